"""Values of `checkpoint: {offload: cpu}` as lines of the graphs: the step without offload to the bit, no more memory,
copies that nothing waits for where there is something to compute. The CPU plays the device: copies are real.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.api import Program
from shardc.cost.measured.device_file import device
from shardc.ir.graph import copy_graph
from shardc.ir.metadata import HOST_LINK
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.memory import Sizes
from shardc.passes.joint.seconds import Seconds
from shardc.report.comm import comm_table
from shardc.runtime import ops
from shardc.runtime.stage.activation_offload import OffloadedTensors
from tests import stand_in_compiler
from tests.bench.host_copies import Blocks
from tests.passes.test_joint import PP, SP, TP, built, compiled, momentum, same
from tests.verify.mutants_joint import OF_GRAPHS

overlap: Any = importlib.import_module("shardc.passes.joint.overlap")


def region(**how: Any) -> dict[str, Any]:
    return {"checkpoint": [{"match": "h.*", "offload": "cpu", **how}]}


MICRO = {"batch": {"microbatches": 4}}
#: (model, spec, execution)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "tp, linear": ("gpt", {**TP, **region(save=["linear"])}, {}),
    "sp, cheap": ("gpt", {**SP, **region(recompute="cheap")}, {}),
    "everything kept": ("gpt", {**TP, **region(save=["linear", "attention", "matmul", "norm", "collective"])}, {}),
    "nothing kept, zero 3": ("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.01}, **region(save=[])}, {}),
    "one layer of two": ("gpt", {**TP, "checkpoint": [{"match": "h.0", "save": ["linear"], "offload": "cpu"}]}, {}),
    "nested": (
        "gpt",
        {**TP, "checkpoint": [{"match": "h.*", "save": ["linear"], "offload": "cpu"}, {"match": "h.*.fc", "save": []}]},
        {},
    ),
    "precision": (
        "gpt",
        {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}, **MICRO, **region(recompute="cheap")},
        {},
    ),
    "side by side": ("gpt", {**TP, **MICRO, **region(save=["linear"])}, {"overlap": "microbatches"}),
    "compiled": ("gpt", {**TP, **region(save=["linear", "norm"])}, {"compile": "layers"}),
    "1f1b": ("gpt", {**PP, **region(save=["linear"])}, {}),
    "zero bubbles, v": (
        "gpt",
        {**PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}, **region(recompute="cheap")},
        {},
    ),
    "dualpipe-v": (
        "gpt",
        {
            "mesh": {"pp": 2},
            "pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"},
            **MICRO,
            **region(save=["linear", "attention"]),
        },
        {},
    ),
    "experts": ("moe", {**TP, "checkpoint": [{"match": "*", "save": ["linear", "matmul"], "offload": "cpu"}]}, {}),
    "recurrent": ("lstm", {"mesh": {"dp": 2}, "checkpoint": [{"match": "*", "save": [], "offload": "cpu"}]}, {}),
}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Every copy is made. The sizes of what leaves."""
    sizes: list[torch.Size] = []
    begin = OffloadedTensors.to_host

    def noted(self: OffloadedTensors, x: Tensor, tag: str = "") -> Any:
        sizes.append(x.size())
        return begin(self, x, tag)

    monkeypatch.setattr(OffloadedTensors, "useful", staticmethod(lambda x: True))
    monkeypatch.setattr(OffloadedTensors, "to_host", noted)
    return sizes


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_step_without_offload_in_no_more_memory(
    case: str, moved: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_compiler.put_in(monkeypatch)
    name, spec, execution = CASES[case]
    model, batch, _ = built(name)
    here = {**spec, "checkpoint": [{k: v for k, v in r.items() if k != "offload"} for r in spec["checkpoint"]]}
    plain, program = (compiled(name, each, execution=execution) for each in (here, spec))
    proof = program.prove()
    assert proof.ok, str(proof)
    want = shardc.verify.simulate(plain, model, batch, steps=2, optimizer=momentum)
    assert not moved
    have = shardc.verify.simulate(program, model, batch, steps=2, optimizer=momentum)
    assert moved
    assert torch.equal(have.loss, want.loss)
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []
    assert [n for n, x in want.state.items() if not same(have.state[n], x)] == []
    theirs, ours = plain.cost().memory, program.cost().memory
    assert ours.peak <= theirs.peak
    assert ours.host > theirs.host


def lines(program: Program, text: str, target: Any) -> list[fx.Node]:
    joint = program.stages[0].joint
    assert joint is not None
    return [n for n in joint.graphs[text].nodes if n.target is target]


def test_what_the_text_says() -> None:
    program = compiled("gpt", {**TP, **region(save=["linear"])})
    forward, _, backward = program.joint().partition("_backward(")
    assert re.search(
        r"linear_2_leaving = ops.offload_start\(linear_2, mesh, tag='h.0'\)  # \? \| copy 65536 \"spec: checkpoint",
        forward,
    )
    assert "linear_2_host = ops.offload_wait(linear_2_leaving)" in forward
    assert re.search(r"    linear_2_host,  # \?\n", backward)
    assert re.search(
        r"linear_2_coming = ops.reload_start\(linear_2_host, tag='h.0'\)  # f64\[4, 16, 128\] \| copy 65536 ", backward
    )
    assert "linear_2 = ops.reload_wait(linear_2_coming)" in backward
    assert not [n for n in program.notes if "autograd" in n]


def test_it_comes_back_from_disk(tmp_path: Path, moved: list[torch.Size]) -> None:
    model, batch, _ = built("gpt")
    program = compiled("gpt", {**TP, **region(save=["linear"])})
    program.save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    assert loaded.joint() == program.joint()
    assert loaded.prove().ok
    want, have = (shardc.verify.simulate(p, model, batch) for p in (program, loaded))
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []


class Shared(nn.Module):
    """Of the two products of `a`, the first one's result is wanted outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Region()
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.a(x)
        return (self.b(one) * two).square().mean()


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(x)
        return one, nn.functional.gelu(self.two(nn.functional.gelu(one)))


def test_what_is_wanted_elsewhere_too_stays(moved: list[torch.Size]) -> None:
    torch.manual_seed(0)
    model, batch = Shared().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    checkpoint = [{"match": "a", "save": ["linear"], "offload": "cpu"}]
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, "checkpoint": checkpoint})
    assert [str(n.args[0]) for n in lines(program, "forward", ops.offload_start)] == ["linear_1"]
    assert shardc.verify.simulate(program, model, batch).loss.isfinite()


def test_copies_run_beside_computing() -> None:
    """What is computed takes longer than the copies, and no order takes more memory than one copy ahead."""
    with torch.device("meta"):
        model = Blocks(4, 8192)
    batch = {"x": torch.empty(8192, 8192, device="meta")}
    checkpoint = [{"match": "h.*", "save": ["linear"], "offload": "cpu"}]
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "bfloat16"}, "checkpoint": checkpoint}
    program = shardc.compile(model, batch, {**spec}, prove=False)
    ours = program.cost("h100-80g")
    copied = sum(s.seconds for s in ours.streams[0].spans if s.record.axes == HOST_LINK)
    assert 0 < ours.exposed["host link"] < 0.25 * copied
    # of a text by itself: each copy back begins before something that is computed, but for the first
    seconds, sizes = Seconds(program, Rank(program)), Sizes(program)
    joint = program.stages[0].joint
    assert joint is not None
    overlap.OrderedGraph(joint.forward, seconds, sizes)
    text = overlap.OrderedGraph(joint.backward, seconds, sizes)
    adjacent = [n for n in text.nodes if n.target is not ops.reload_start]
    for n in [n for n in text.nodes if n.target is ops.reload_start]:
        (wait,) = n.users
        adjacent.insert(adjacent.index(wait), n)
    assert text.simulate(text.nodes) < text.simulate(adjacent)


def test_copies_have_a_price() -> None:
    program = compiled("gpt", {**TP, **region(save=["linear"])})
    cost = program.cost("h100-80g")
    spans = [s for s in cost.streams[0].spans if s.record.axes == HOST_LINK]
    assert {s.record.kind for s in spans} == {"offload", "reload"}
    for s in spans:
        assert s.seconds == pytest.approx(device("h100-80g").copy_seconds(s.record.bytes))
    assert "host link  forward    offload" in comm_table(cost)
    free = device("h100-80g").model_copy(update={"host_link": None})
    assert program.cost(free).exposed.get("host link", 0) == 0


# --- the proof


KINDS = [k for k in OF_GRAPHS if "host" in k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["tp, linear", "zero bubbles, v", "experts"])
def test_the_proof_notices(kind: str, case: str) -> None:
    name, spec, execution = CASES[case]
    program = compiled(name, spec, execution=execution)
    mutants = [m for m in (thunk() for thunk in OF_GRAPHS[kind](program)) if m is not None]
    assert mutants or case != "tp, linear"
    for mutant in mutants[:3]:
        assert not mutant.prove().ok


def test_the_proof_says_what_is_missing() -> None:
    program = compiled("gpt", {**TP, **region(save=["linear"])})
    stage = program.stages[0]
    assert stage.joint is not None
    graph = copy_graph(stage.joint.backward)
    wait = next(n for n in graph.nodes if n.target is ops.reload_wait)
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    broken = replace(program, stages=(replace(stage, joint=replace(stage.joint, backward=graph)),))
    said = str(broken.prove())
    assert "what it begins is waited for 0 times" in said
    assert "reads what is still on its way" in said
