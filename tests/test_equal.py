"""The promise: loss and every gradient equal those of one device (DESIGN section 6), and just the collectives of
    Megatron's papers.

The reference is the user's own model in eager mode (dropout off), or the same program on a mesh of one rank (dropout
on: eager's masks are not counter-based). `zoo.Wide` keeps transformers' float32 casts in float64 on both sides.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from tests import equality, zoo
from tests.equality import assert_equal, collectives

MESHES: dict[str, dict[str, int]] = {
    "tp=2": {"dp": 1, "tp": 2},
    "tp=4": {"dp": 1, "tp": 4},
    "dp=2": {"dp": 2, "tp": 1},
    "dp=4": {"dp": 4, "tp": 1},
    "dp=2 tp=2": {"dp": 2, "tp": 2},
}
MODELS = ("gpt", "llama", "gpt2", "bert", "t5")

THIRDS = {"axis": "tp", "split": 3}
SHARD: dict[str, dict[str, Any]] = {
    "gpt": {"wte": "vocab", "*.qkv.{weight,bias}": {0: THIRDS}, "*.proj": "row", "*.fc": "column", "*.out": "row"},
    "llama": {
        "model.embed_tokens": "vocab",
        "*.{q,k,v}_proj": "column",
        "*.o_proj": "row",
        "*.{gate,up}_proj": "column",
        "*.down_proj": "row",
        "lm_head": "column",
    },
    "gpt2": {
        "*.wte": "vocab",
        "*.c_attn.weight": {1: THIRDS},
        "*.c_attn.bias": {0: THIRDS},
        "*.c_fc": "column",
        "*.c_proj": "row",
    },
    "bert": {
        "*.word_embeddings": "vocab",
        "*.{query,key,value}": "column",
        "*.attention.output.dense": "row",
        "*.intermediate.dense": "column",
        "*.output.dense": "row",
    },
    "t5": {
        "shared": "vocab",
        "*.{q,k,v}": "column",
        "*.o": "row",
        "*.wi": "column",
        "*.wo": "row",
        "*.relative_attention_bias": "column",
    },
}
FIRST = {  # the module whose output is annotated for sequence parallelism; the rest follows
    "gpt": "wte",
    "llama": "model.embed_tokens",
    "gpt2": "transformer.wte",
    "bert": "bert.embeddings",
    "t5": "{encoder,decoder}.embed_tokens",
}
HALVES = {
    "gpt": 4,
    "llama": 4,
    "gpt2": 4,
    "bert": 4,
    "t5": 10,
}  # attention and MLP parts: each is one Megatron f/g pair


def spec_of(name: str, mesh: dict[str, int], *, sequence: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh, "shard": SHARD[name]}
    if sequence:
        spec["activations"] = {FIRST[name]: {1: "tp"}}
    return spec


@functools.cache
def one_device(name: str) -> equality.Reference:
    return equality.reference(zoo.ALL[name])


def reference(name: str) -> tuple[Any, Any, Tensor, dict[str, Tensor]]:
    """(model, batch, loss, gradients by FQN) of one device in float64."""
    one = one_device(name)
    return one.model, one.batch, one.loss, one.grads


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_one_device(name: str, mesh: str, record_property: equality.Property) -> None:
    check(name, mesh, spec_of(name, MESHES[mesh]), record_property)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dp", [1, 2])
def test_sequence_parallel_equals_one_device(name: str, dp: int, record_property: equality.Property) -> None:
    check(
        name, f"{'dp=2 ' if dp == 2 else ''}tp=2 sp", spec_of(name, {"dp": dp, "tp": 2}, sequence=True), record_property
    )


def check(name: str, mesh: str, spec: dict[str, Any], record_property: equality.Property) -> None:
    one = one_device(name)
    program = one.compile(spec)
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.record(record_property, name, mesh, one, program, sim)
    assert_equal(sim, one.loss, one.grads)


@pytest.mark.parametrize("name", ["resnet_bn", "mlp", "moe"])
def test_data_parallel_of_other_models(name: str) -> None:
    """BatchNorm's statistics are the whole batch's: running statistics come out equal too."""
    model, batch = zoo.ALL[name]()
    one = shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {}}), model, batch)
    many = shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 4}}), model, batch)
    assert_equal(many, one.loss, one.grads)
    for fqn, value in one.state.items():
        torch.testing.assert_close(many.state[fqn], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "t5"])
def test_dropout_does_not_know_the_mesh(name: str, mesh: str) -> None:
    model, batch, one, other = dropping_out(name)
    with zoo.Wide():
        program = shardc.compile(model, batch, spec_of(name, MESHES[mesh], sequence="tp" in mesh and mesh != "tp=4"))
    assert_equal(shardc.verify.simulate(program, model, batch, seed=7), one.loss, one.grads)
    assert float((other.loss - one.loss).abs()) > 1e-6  # another seed, other masks


@functools.cache
def dropping_out(name: str) -> tuple[Any, Any, Any, Any]:
    """A model, its batch, and a step on one device with each of two seeds."""
    with zoo.Wide():
        model, batch = zoo.ALL[name](dropout=0.2)
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": {}})
    return model, batch, *(shardc.verify.simulate(program, model, batch, seed=seed) for seed in (7, 8))


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_has_megatrons_collectives(name: str) -> None:
    """Forward one all_reduce for each attention and each MLP, backward likewise; the rest: embedding, head and loss."""
    model, batch, _, _ = reference(name)
    sim = shardc.verify.simulate(shardc.compile(model, batch, spec_of(name, MESHES["tp=2"])), model, batch)
    embeddings = 2 if name == "t5" else 1
    assert collectives(sim, "forward") == {
        "all_reduce": HALVES[name] + embeddings + 2
    }  # + 2: the loss over split classes
    # T5's decoder layers read the encoder's output: one sum for all of them, and one for the head, as many as
    # cross-attentions
    assert collectives(sim, "backward") == {"all_reduce": HALVES[name] + (2 if name == "t5" else 1)}


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "bert"])
def test_sequence_parallel_has_megatrons_collectives(name: str) -> None:
    """Korthikanti et al. 2022: all_gather and reduce_scatter instead of every all_reduce;
    only the loss still has two.
    """
    model, batch, _, _ = reference(name)
    sim = shardc.verify.simulate(
        shardc.compile(model, batch, spec_of(name, MESHES["tp=2"], sequence=True)), model, batch
    )
    pairs = HALVES[name] + 1  # + 1: the embedding is scattered, the head's input gathered
    assert collectives(sim, "forward") == {"all_gather": pairs, "reduce_scatter": pairs, "all_reduce": 2}
    assert collectives(sim, "backward") == {"all_gather": pairs, "reduce_scatter": pairs}


def test_a_spec_from_a_file_and_from_a_dict_give_the_same_program(tmp_path: Path) -> None:
    model, batch, loss, grads = reference("llama")
    spec = spec_of("llama", {"dp": 1, "tp": 1})
    (tmp_path / "spec.yaml").write_text(str(shardc.Spec.load(spec)))
    with zoo.Wide():
        from_path = shardc.compile(model, batch, tmp_path / "spec.yaml", mesh={"dp": 2, "tp": 2})
        from_dict = shardc.compile(model, batch, spec, mesh={"dp": 2, "tp": 2})
    assert [str(n.meta["value"]) for n in from_path.stages[0].graph.nodes if n.op != "output"] == [
        str(n.meta["value"]) for n in from_dict.stages[0].graph.nodes if n.op != "output"
    ]
    assert_equal(shardc.verify.simulate(from_path, model, batch), loss, grads)


def test_integer_weights_are_bit_equal_in_float32() -> None:
    """No rounding happens on small integers, so every order of sums gives the same bits (DESIGN section 6)."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-3, 4, p.shape))
    batch = (torch.randint(-3, 4, (8, 8)).float(),)

    def loss(out: Tensor, _: Any) -> Tensor:
        return out.sum()

    one = shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {}}, loss=loss), model, batch)
    for mesh in ({"dp": 2, "tp": 2}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 8}):
        spec = {"shardc": 1, "mesh": mesh, "shard": {"0": "column", "2": "row"}}
        sim = shardc.verify.simulate(shardc.compile(model, batch, spec, loss=loss), model, batch)
        assert torch.equal(sim.loss, one.loss)
        assert all(torch.equal(sim.grads[n], g) for n, g in one.grads.items())


def test_sixty_four_ranks() -> None:
    model, batch, loss, grads = reference("gpt")
    with zoo.Wide():
        program = shardc.compile(model, batch, spec_of("gpt", {"dp": 8, "tp": 8}))
    assert_equal(shardc.verify.simulate(program, model, batch), loss, grads)
