"""Key-value heads that ranks share: fewer of them than ranks, down to one, without a gather of keys or values."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

import shardc
from shardc.ir.mesh import Mesh
from shardc.passes.annotate import kv_heads
from shardc.passes.annotate.kv_heads import Shared
from tests import equality, zoo
from tests.test_equal import SHARD, assert_equal


def llama(kv: int, attention: str = "sdpa") -> zoo.Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=zoo.VOCAB,
        hidden_size=zoo.HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv,
        attn_implementation=attention,
    )
    return zoo.ready(LlamaForCausalLM(config), torch.float64), {"input_ids": zoo.tokens(), "labels": zoo.labels()}


def equal(built: zoo.Built, spec: dict[str, Any]) -> tuple[shardc.Program, Any]:
    model, batch = built
    with zoo.Wide():
        loss = model(**batch).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        program = shardc.compile(model, batch, spec)
    sim = shardc.verify.simulate(program, model, batch)
    assert_equal(sim, loss.detach(), grads)
    return program, sim


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kv", "tp"), [(2, 4), (2, 8), (4, 8), (1, 2), (1, 4)])
def test_fewer_key_value_heads_than_ranks(kv: int, tp: int, attention: str) -> None:
    program, sim = equal(llama(kv, attention), {"shardc": 1, "mesh": {"tp": tp}, "shard": SHARD["llama"]})
    count = collections.Counter((c.kind, c.axis, c.direction) for c in sim.comms)
    forward = count.pop(("all_reduce", "tp", "forward"))
    assert forward == 4 + 1 + 2  # two a layer, the embedding, the loss
    gradients = ("all_reduce", "tp.1" if kv > 1 else "tp", "backward")
    assert count == collections.Counter({("all_reduce", "tp", "backward"): 5}) + collections.Counter({gradients: 1}), (
        "one bucket for k and v"
    )
    assert not equality.notes(program)
    k = program.param("model.layers.0.self_attn.k_proj.weight")
    assert k.value.local_shape(program.mesh)[0] == 8  # one head of 8


@pytest.mark.parametrize("use", ["model", "structure"])
def test_what_the_models_plan_or_its_structure_splits(use: str) -> None:
    """As by hand: of a mesh whose axis was seen in digits, all was left whole, with a note that it splits nothing."""
    model, batch = llama(2)
    ways = (SHARD["llama"], {"use": use})
    by_hand, used = (shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 4}, "shard": s}) for s in ways)
    assert {p.fqn: str(p.value) for p in used.params} == {p.fqn: str(p.value) for p in by_hand.params}
    assert not equality.notes(used)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shared_heads_between_sequence_parallel_blocks(attention: str) -> None:
    spec = {
        "shardc": 1,
        "mesh": {"dp": 2, "tp": 4},
        "shard": SHARD["llama"],
        "activations": {"model.embed_tokens": {1: "tp"}},
    }
    program, sim = equal(llama(2, attention), spec)
    count = collections.Counter((c.kind, c.axis) for c in sim.comms if c.direction == "forward")
    assert count == {
        ("reduce_scatter", "tp"): 5,
        ("all_gather", "tp"): 5,
        ("all_reduce", "tp"): 2,
        ("all_reduce", "dp"): 2,
    }
    assert not equality.notes(program)


def fused(name: str) -> tuple[Any, dict[str, Any]]:
    """(model, spec) with one weight for queries, keys and values: in thirds by sections, in groups, per head, for one
    key head.
    """
    import transformers

    common = {"vocab_size": zoo.VOCAB, "hidden_size": zoo.HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 8}
    falcon = {"hidden_dropout": 0, "attention_dropout": 0, "bias": False, **common}
    neox = {"*.query_key_value": "column", "*.dense": "row", "*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row"}
    if name.startswith("phi3"):
        kv = int(name[-1])
        config = transformers.Phi3Config(
            intermediate_size=128, num_key_value_heads=kv, pad_token_id=0, eos_token_id=1, **common
        )
        return transformers.Phi3ForCausalLM(config), {
            "*.qkv_proj.weight": {0: {"axis": "tp", "sections": [64, 8 * kv, 8 * kv]}},
            "*.gate_up_proj.weight": {0: {"axis": "tp", "split": 2}},
            "*.{o,down}_proj": "row",
        }
    if name == "neox":
        config = transformers.GPTNeoXConfig(intermediate_size=128, **common)
        return transformers.GPTNeoXForCausalLM(config), neox
    if name == "bigcode":
        config = transformers.GPTBigCodeConfig(
            vocab_size=zoo.VOCAB,
            n_positions=64,
            n_embd=zoo.HIDDEN,
            n_layer=2,
            n_head=8,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=1,
            eos_token_id=1,
        )
        return transformers.GPTBigCodeForCausalLM(config), {"*.c_attn": "column", "*.c_proj": "row", "*.c_fc": "column"}
    options = {
        "grouped 4": (4, True, False, False),
        "grouped 2": (2, True, False, False),
        "one": (1, False, True, False),
        "alibi": (8, False, False, True),
    }
    kv, grouped, one, alibi = options[name]
    config = transformers.FalconConfig(
        num_kv_heads=kv, new_decoder_architecture=grouped, multi_query=one, alibi=alibi, **falcon
    )
    return transformers.FalconForCausalLM(config), neox


@pytest.mark.parametrize("name", ["phi3 4", "phi3 2", "grouped 4", "grouped 2", "one", "alibi", "neox", "bigcode"])
def test_fused_weights_in_every_layout(name: str) -> None:
    model, shard = fused(name)
    batch = {"input_ids": zoo.tokens(), "labels": zoo.labels()}
    program, sim = equal((zoo.ready(model, torch.float64), batch), {"shardc": 1, "mesh": {"tp": 4}, "shard": shard})
    count = collections.Counter((c.kind, c.direction) for c in sim.comms if c.axis == "tp")
    two = name.startswith("phi3") or name == "bigcode"
    assert count["all_reduce", "forward"] == (4 if two else 2), (
        "one of attention and MLP, or one of both where they are parallel"
    )
    assert set(count) == {("all_reduce", "forward"), ("all_reduce", "backward")}
    few = name in ("phi3 2", "grouped 2", "one", "bigcode")
    assert len(equality.notes(program)) == few
    assert all("ranks of tp" in n and "all compute its queries too" in n for n in equality.notes(program))


def test_an_axis_is_seen_in_digits_only_where_heads_need_it() -> None:
    def cuts(*heads: Shared) -> list[int]:
        return list(kv_heads.cuts(8, heads))

    assert cuts(Shared(8, 32)) == []
    assert cuts(Shared(1, 32)) == []
    assert cuts(Shared(3, 24)) == []  # 3 does not divide 8
    assert cuts(Shared(2, 12)) == []  # 12 queries' heads do not either
    assert cuts(Shared(2, 8)) == [2]
    assert cuts(Shared(2, 8), Shared(4, 8)) == [2, 4]


def test_digits_whose_ranks_share_a_head() -> None:
    mesh = Mesh((("tp", 8),)).refine("tp", 2, 2)
    assert kv_heads.shares(mesh, mesh.digits("tp"), Shared(2, 8)) == ["tp.1", "tp.2"]
    assert kv_heads.shares(mesh, mesh.digits("tp"), Shared(4, 8)) == ["tp.2"]
    assert kv_heads.shares(mesh, mesh.digits("tp"), Shared(1, 8)) == ["tp.0", "tp.1", "tp.2"]
    assert kv_heads.shares(mesh, mesh.digits("tp"), Shared(8, 8)) == []


def test_the_name_of_an_axis_stands_for_its_digits() -> None:
    mesh = Mesh((("dp", 2), ("tp", 8))).refine("tp", 2)
    assert mesh.size("tp") == 8
    assert mesh.digits("tp") == ("tp.0", "tp.1")
    assert mesh.merge(["tp.1", "dp", "tp.0"]) == ("dp", "tp")
    assert mesh.merge(["tp.1", "dp"]) == ("dp", "tp.1")
    assert mesh.group(9, ["tp"]) == tuple(range(8, 16))
    with pytest.raises(KeyError):
        mesh.digits("cp")
