"""Adapters and frozen weights on meshes: gradients and steps are one device's, and what is frozen costs nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.features.adapters.program import adapters
from shardc.verify.equality import difference
from shardc.verify.simulate import Simulation
from tests import zoo
from tests.live_bytes import watched
from tests.once import once_each
from tests.zoo import expert_loops, hf, hf_more

TP: dict[str, Any] = {"shard": {"use": "structure"}}
PP: dict[str, Any] = {"pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}
MIXTRAL = hf.row("MixtralForCausalLM", **hf.GQA, **hf.EXPERTS, num_local_experts=4, num_experts_per_tok=2)
EP: dict[str, Any] = {"experts": [{"match": "*.mlp.experts", "axis": "ep"}]}
ALL_LINEAR = "*.{q,k,v,o,gate,up,down}_proj"
FAMILY = hf.FAMILIES | hf_more.FAMILIES
#: family -> (the rest of a spec, what gets adapters, their kind, dropout)
FAMILIES: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "llama": ({"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 3}}, ALL_LINEAR, "lora", 0.1),
    "gpt2": ({"mesh": {"pp": 2, "tp": 2}, **TP, **PP}, "*.{c_attn,c_proj,c_fc}", "rslora", 0.1),
    "gpt": ({"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 2}}, "h.*.{qkv,proj,fc}", "dora", 0.1),
    "qwen3": ({"mesh": {"pp": 2, "dp": 2}, **PP, "data": {"zero": 1}}, ALL_LINEAR, "dora", 0.0),
    "phi3": ({"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 1}}, "*.{qkv_proj,o_proj}", "lora", 0.0),
    "gpt_neox": ({"mesh": {"tp": 4}, **TP, "checkpoint": [{"match": "gpt_neox.layers.*"}]}, "*.dense*", "dora", 0.0),
    "opt": ({"mesh": {"pp": 2, "tp": 2}, **TP, **PP, "data": {"zero": 0}}, "*.{q_proj,v_proj,fc1}", "lora", 0.0),
    "bart": ({"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 3}}, "*.{q_proj,out_proj}", "rslora", 0.0),
    "roberta": ({"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 2}}, "*.{query,value}", "lora", 0.0),
    "mixtral": ({"mesh": {"dp": 2, "ep": 2}, **EP, "data": {"zero": 1}}, "*.{q_proj,experts.*}", "lora", 0.0),
    "list of experts": (
        {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "moe", "axis": "ep"}]},
        "*.w{1,2,3}",
        "lora",
        0.0,
    ),
    "biogpt": ({"mesh": {"cp": 2, "tp": 2}, **TP, "sequence": {"axis": "cp"}}, "*.fc1", "lora", 0.1),
    "vit": ({"mesh": {"dp": 2, "tp": 2}, **TP}, "*.{q_proj,v_proj,query,value}", "lora", 0.0),
}


@lru_cache(maxsize=1)
def built(name: str) -> tuple[nn.Module, Any, Program]:
    with zoo.Wide():
        if name in zoo.ALL:
            model, batch = zoo.ALL[name]()
        elif name == "list of experts":
            model, batch = expert_loops.Model(expert_loops.Mixtral).double(), {"ids": zoo.tokens(expert_loops.VOCAB)}
        else:
            model, batch = hf.build(MIXTRAL if name == "mixtral" else FAMILY[name])  # type: ignore[misc]
        return model, batch, capture(model, batch)


@once_each
def compiled(name: str, **spec: Any) -> Program:
    model, batch, captured = built(name)
    with zoo.Wide():
        return shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured)


def steps(program: Program, name: str, n: int) -> Simulation:
    model, batch, _ = built(name)
    return shardc.verify.simulate(
        program, model, batch, steps=n, optimizer=lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)
    )


#: Each family with its kind, and with LoRA or DoRA, whichever that is not; experts' adapters have no DoRA.
KINDS = [
    (name, kind)
    for name, (rest, _, own, _) in FAMILIES.items()
    for kind in (own, "lora" if own == "dora" else "dora")
    if kind == own or "experts" not in rest
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_equals_one_device(name: str, kind: str) -> None:
    """LoRA and DoRA on ten families; A has a gradient from the second step on, and momentum from the third."""
    rest, match, _, dropout = FAMILIES[name]
    adapters = [{"match": match, "kind": kind, "rank": 4, "alpha": 6, "dropout": dropout}]
    program = compiled(name, **rest, adapters=adapters)
    one = steps(compiled(name, mesh={"dp": 1}, adapters=adapters), name, 3)
    report = program.verify()  # random weights: at the first step B is zero, and so is the gradient of A
    assert report.ok, str(report)
    proof = program.prove()
    assert proof.ok, str(proof)
    many = steps(program, name, 3)
    floor = 1e-3 * max(float(x.norm()) for n, x in one.grads.items())
    assert all(n.rpartition("lora_")[1] for n in one.grads)
    assert one.grads.keys() == many.grads.keys()
    off = {n: difference(g, many.grads[n], floor) for n, g in one.grads.items()}
    off |= {f"new {n}": difference(x.double(), many.state[n].double()) for n, x in one.state.items()}
    assert not {n: e for n, e in off.items() if not e <= 1e-12}
    model, *_ = built(name)
    weights = dict(model.named_parameters())
    assert all(torch.equal(many.state[n], p) for n, p in weights.items() if n in many.state)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(params), lr=0.1)


@pytest.mark.parametrize(("name", "match"), [("llama", "*.{q,o}_proj"), ("mixtral", "*.experts.*")])
def test_an_optimizer_over_whole_matrices_steps_them(name: str, match: str) -> None:
    """Of experts in one tensor each expert's A and B."""
    own = {"adapters": [{"match": match, "rank": 4}], "optimizer": {"matrices": {"*": "experts"}}}
    rest = {"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 1}} if name == "llama" else {"mesh": {"ep": 2}, **EP}
    model, batch, _ = built(name)
    one, many = (
        shardc.verify.simulate(compiled(name, **spec, **own), model, batch, steps=2, optimizer=muon)
        for spec in ({"mesh": {"dp": 1}}, rest)
    )
    adapters = {n for n in one.state if "lora" in n}
    assert all(one.state[n].any() for n in adapters)
    assert all(difference(one.state[n], many.state[n]) <= 1e-12 for n in adapters)


# --- what is frozen ---------------------------------------------------------------------------------------------------

LORA = [{"match": "h.*.{qkv,fc}", "rank": 2}]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [{}, {"params": "float32", "compute": "bfloat16"}], ids=["wide", "mixed"])
def test_what_is_frozen_has_no_gradient_and_no_state(zero: int, precision: dict[str, str]) -> None:
    """Live bytes between two steps: the model's own weights once, in 16 bits where nothing else reads them; of trained
    ones a value, a gradient and two moments.
    """
    rest: dict[str, Any] = {"mesh": {"dp": 2}, "data": {"zero": zero}, "precision": precision}
    program = compiled("gpt", **rest, adapters=LORA)
    own = {n for a in adapters(program) for n in a.names}
    trained = [p for p in program.params if p.name in own]
    assert [p for p in program.params if p.requires_grad] == trained
    frozen = [p for p in program.params if p.name not in own]
    assert all(p.name not in b.params for b in program.buckets if b.axes for p in frozen)
    if precision:  # norms are computed in float32, and the embedding is added in it
        assert {p.dtype for p in frozen if p.fqn.endswith(("fc.weight", "proj.weight"))} == {torch.bfloat16}
    model, batch, _ = built("gpt")
    one = watched(program, model, batch)[0]
    cut = 2 if zero == 3 else 1
    held = sum(p.value.nbytes() for p in program.params) / cut + sum(b.value.nbytes() for b in program.buffers)
    held += sum(p.value.nbytes() for p in trained) * (2 / (2 if zero else 1) + 1 / (2 if zero >= 2 else 1))
    slack = 256 * (len(program.params) + len(program.buckets))
    assert abs(one.now - held) <= slack < sum(p.value.nbytes() for p in frozen) / 4
    assert program.cost().memory.peak == pytest.approx(one.peak, rel=0.01)


def test_backward_computes_no_gradient_of_what_is_frozen() -> None:
    """Where the last norm alone is trained, backward has one product: its gradient through the head."""
    model, batch, _ = built("gpt")

    def flops(program: Program) -> tuple[int, int]:
        """Measured, and by calculation, which counts attention on the CPU too."""
        with FlopCounterMode(display=False) as counter:
            shardc.verify.simulate(program, model, batch)
        return counter.get_total_flops(), program.cost().flops

    one: dict[str, Any] = {"mesh": {"dp": 1}}
    forward = flops(shardc.compile(model, batch, {"shardc": 1, **one}, forward=True))
    vocab, hidden = model.head.weight.shape  # type: ignore[union-attr, misc]
    product = 2 * batch["ids"].numel() * vocab * hidden
    assert flops(compiled("gpt", **one, freeze=["*", "!ln_f"])) == tuple(n + product for n in forward)
    assert all(n > 2.9 * f for n, f in zip(flops(compiled("gpt", **one)), forward, strict=True))


def test_frozen_in_part(tmp_path: Any) -> None:
    """The last pattern that matches counts; what stays trained is trained as without the others."""
    program = compiled("gpt", mesh={"dp": 2}, freeze=["*", "!h.1", "h.1.*.bias"])
    trained = {p.fqn for p in program.params if p.requires_grad}
    model, *_ = built("gpt")
    assert trained == {n for n, _ in model.named_parameters() if n.startswith("h.1.") and not n.endswith("bias")}
    one = steps(compiled("gpt", mesh={"dp": 1}), "gpt", 1)
    many = steps(program, "gpt", 1)
    assert many.grads.keys() == trained
    assert all(difference(one.grads[n], g) <= 1e-12 for n, g in many.grads.items())
    program.save(tmp_path / "p")
    again = shardc.load(tmp_path / "p")
    assert again.text(full=True) == program.text(full=True)
    assert [p.frozen for p in again.params] == [p.frozen for p in program.params]


def test_adapters_come_back_from_a_folder(tmp_path: Any) -> None:
    program = compiled("gpt", mesh={"dp": 2}, adapters=LORA)
    program.save(tmp_path / "p")
    again = shardc.load(tmp_path / "p")
    assert adapters(again) == adapters(program)
    assert torch.equal(steps(again, "gpt", 2).loss, steps(program, "gpt", 2).loss)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"adapters": [{"match": "*.qvk", "rank": 2}]}, "did you mean"),
        ({"adapters": [{"match": "wpe", "rank": 2}]}, "names no weight of a product that supports an adapter"),
        ({"adapters": [*LORA, {"match": "h.0.fc", "rank": 4}]}, "never wins"),
        ({"adapters": [{"match": "*.fc", "rank": 0}]}, "rank"),
        ({"adapters": [{"match": "*.fc", "kind": "lorax", "rank": 1}]}, "lora, rslora"),
        ({"freeze": ["h.7"]}, "matches no parameter"),
        ({"freeze": ["*"]}, "depends on no|is trained"),
    ],
)
def test_what_is_refused(spec: dict[str, Any], message: str) -> None:
    model, batch, _ = built("gpt")
    with pytest.raises(ShardcError, match=message):
        shardc.verify.simulate(compiled("gpt", mesh={"dp": 2}, **spec), model, batch)


def test_freezing_everything_is_told_with_its_line() -> None:
    (note,) = compiled("gpt", mesh={"dp": 2}, freeze=["*"]).notes
    assert note == "spec: freeze: no trainable parameter remains, so steps will be refused"


def test_experts_take_no_dropout() -> None:
    adapters = [{"match": "*.experts.*", "rank": 2, "dropout": 0.1}]
    with pytest.raises(ShardcError, match="a separate entry for experts, without dropout"):
        compiled("mixtral", mesh={"dp": 2}, adapters=adapters)
