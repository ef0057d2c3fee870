"""Forward and backward of two microbatches as one text: the same numbers to the bit, less waiting, no more memory."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.cost.dry_run import dry_run
from shardc.cost.peak_memory import memory
from shardc.ir.graph import copy_graph
from shardc.ir.stage import second_prefix
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.memory import Sizes
from shardc.passes.joint.seconds import Seconds
from shardc.report.comm import comm_rows
from shardc.runtime import ops
from shardc.runtime.schedule import of as schedule_of
from shardc.verify.static.joint_graphs import halves
from tests import zoo
from tests.passes.test_joint import SP, TP, built, compiled, momentum, same
from tests.passes.test_overlap import Block, Routed
from tests.zoo import hf, hf_more

overlap: Any = importlib.import_module("shardc.passes.joint.overlap")
pair: Any = importlib.import_module("shardc.passes.joint.pair")

SIDE = {"overlap": "microbatches"}
FORWARDS = {"overlap": "forwards"}
DUAL = {
    "mesh": {"pp": 2},
    "pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"},
    "batch": {"microbatches": 4},
}
MICRO = {"batch": {"microbatches": 4}}
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "tp": ("gpt", {**TP, **MICRO}, SIDE),
    "sp, recomputed": ("gpt", {**SP, **MICRO, "checkpoint": [{"match": "h.*", "save": ["linear"]}]}, SIDE),
    "two microbatches, zero 2": (
        "gpt",
        {**TP, "batch": {"microbatches": 2}, "data": {"zero": 2, "bucket_mb": 0.01}},
        SIDE,
    ),
    "zero 3, cheap": (
        "gpt",
        {**TP, **MICRO, "data": {"zero": 3, "bucket_mb": 0.01}, "checkpoint": [{"match": "h.*", "recompute": "cheap"}]},
        SIDE,
    ),
    "zero 3 kept": ("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3, "keep": True}, **MICRO}, SIDE),
    "precision": ("gpt", {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}, **MICRO}, SIDE),
    "forwards, sp, recomputed": (
        "gpt",
        {**SP, **MICRO, "checkpoint": [{"match": "h.*", "save": ["linear"]}]},
        FORWARDS,
    ),
    "forwards, three, zero 2": (
        "gpt",
        {**TP, "batch": {"microbatches": 3}, "uneven": "pad", "data": {"zero": 2, "bucket_mb": 0.01}},
        FORWARDS,
    ),
    "forwards, zero 3": ("gpt", {**TP, **MICRO, "data": {"zero": 3, "bucket_mb": 0.01}}, FORWARDS),
    "forwards, precision": ("gpt", {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}, **MICRO}, FORWARDS),
    "forwards, to the host": (
        "gpt",
        {**TP, **MICRO, "checkpoint": [{"match": "h.*", "save": ["linear"], "offload": "cpu"}]},
        FORWARDS,
    ),
    "dualpipe-v": ("gpt", DUAL, {}),
    "dualpipe-v, zero 3": ("gpt", {**DUAL, "mesh": {"pp": 2, "dp": 2}, "data": {"zero": 3, "bucket_mb": 0.01}}, {}),
    "dualpipe-v, tied, sp": ("llama", {**DUAL, "mesh": {"pp": 2, "tp": 2}, "shard": {"use": "structure"}}, {}),
    "dualpipe-v, passed on": ("linear_attention", DUAL, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_side_by_side_is_one_after_the_other_to_the_bit(case: str) -> None:
    name, spec, how = CASES[case]
    model, batch, _ = built(name)
    program = compiled(name, spec, execution=how)
    one_by_one = replace(program, pairs=())
    assert program.pairs, program.notes
    assert {p.key for p in program.pairs} == set(schedule_of(program).pairs())
    want, have = (shardc.verify.simulate(p, model, batch, steps=2, optimizer=momentum) for p in (one_by_one, program))
    assert torch.equal(have.loss, want.loss)
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []
    assert [n for n, x in want.state.items() if not same(have.state[n], x)] == []
    sent = [Counter((c.kind, c.axis, c.bytes, c.direction) for c in sim.comms) for sim in (want, have)]
    assert not sent[1] - sent[0]


@pytest.mark.parametrize("how", [SIDE, FORWARDS])
def test_experts_side_by_side(how: Any) -> None:
    with zoo.Wide():
        model, batch = hf.build(hf_more.FAMILIES["mixtral"])
        spec = {
            "shardc": 1,
            "mesh": {"ep": 2},
            "shard": {"use": "model"},
            "experts": [{"match": "*.mlp.experts", "axis": "ep"}],
            "batch": {"microbatches": 2},
        }
        program = shardc.compile(model, batch, {**spec, "execution": how})
        plain = shardc.compile(model, batch, spec)
    want, have = (shardc.verify.simulate(p, model, batch) for p in (plain, program))
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []


@pytest.mark.parametrize("case", ["zero 3, cheap", "forwards, zero 3", "dualpipe-v"])
def test_a_pair_has_the_lines_of_both_texts_and_takes_no_more_memory(case: str) -> None:
    name, spec, how = CASES[case]
    program = compiled(name, spec, execution=how)
    seconds, sizes = Seconds(program, Rank(program)), Sizes(program)
    for p in program.pairs:
        forward, other = program.stages[p.first].joint, program.stages[p.then].joint
        assert forward is not None
        assert other is not None
        prefix = second_prefix(p.kind, forward.forward)
        first, then = halves(program, p)
        second = [g for w, g in other.graphs.items() if (w == "forward") == (p.kind == "FF")]
        for half, texts in ((first, [forward.forward]), (then, second)):
            lines = sorted(n.name for text in texts for n in text.nodes if n.op == "call_function")
            assert sorted(n.name.removeprefix(half.prefix) for n in half.nodes if n.op == "call_function") == lines
        for text in forward.graphs.values():  # what its tapes take is known from forward's lines
            overlap.OrderedGraph(text, seconds, sizes)
        for text in other.graphs.values():
            overlap.OrderedGraph(text, seconds, sizes)
        whole = pair._whole(other, seconds, sizes) if p.kind == "FB" else other.forward
        one_by_one = overlap.OrderedGraph(pair._joined(program, forward.forward, whole, prefix), seconds, sizes)
        both = overlap.OrderedGraph(p.graph, seconds, sizes)
        assert overlap.within(both.uses.peak(both.nodes), one_by_one.uses.peak(one_by_one.nodes))
        assert both.simulate(both.nodes) <= one_by_one.simulate(one_by_one.nodes)


def test_a_backward_in_two_halves_is_whole_in_a_pair() -> None:
    """The gradient of a linear layer's result is held until the second half, for that of the weight, where that takes
    no more memory than not to hold it.
    """
    program = compiled("gpt", DUAL)
    joint = program.stages[1].joint
    assert joint is not None
    assert joint.weights is not None
    first, second = ([n.name for n in g.nodes if n.op == "call_function"] for g in (joint.backward, joint.weights))
    seconds, sizes = Seconds(program, Rank(program)), Sizes(program)
    for n in joint.forward.nodes:  # what its tapes take is known from forward's lines
        seconds.of(n)
    peaks = []
    for early in (True, False):
        text = overlap.OrderedGraph(pair._of_halves(joint, joint.weights, early=early), seconds, sizes)
        names = [n.name for n in text.nodes]
        assert [n for n in names if n in first] == first
        assert [n for n in names if n in second] == second
        assert (names == [*first, *second]) != early
        peaks.append(text.uses.peak(text.nodes))
    text = overlap.OrderedGraph(pair._whole(joint, seconds, sizes), seconds, sizes)
    assert text.uses.peak(text.nodes) == peaks[1 if overlap.within(peaks[1], peaks[0]) else 0]


def test_names_of_the_two_halves_do_not_meet() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.back_, self.back_mesh = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.back_mesh(self.back_(x).relu()).square().mean()

    with zoo.Wide():
        model, batch = Model().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
        spec = {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 2}}
        want, have = (
            shardc.simulate(shardc.compile(model, batch, spec | more), model, batch)
            for more in ({}, {"execution": SIDE})
        )
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []


def test_pairs_come_back_from_disk_and_are_proven(tmp_path: Path) -> None:
    program = compiled(*CASES["dualpipe-v"][:2])
    program.save(tmp_path / "out")
    there = shardc.load(tmp_path / "out")
    assert there.joint() == program.joint()
    assert {f.name for f in (tmp_path / "out").glob("pair_*")} == {
        f"pair_{f}_{b}.py" for f, b in ((0, 3), (1, 2), (2, 1), (3, 0))
    }
    assert there.prove().ok
    assert there.verify().ok
    file = tmp_path / "out" / "pair_1_2.py"
    file.write_text(re.sub(r"    return .*\n", "    return (None, ())\n", file.read_text()))
    with pytest.raises(shardc.ShardcError, match="does not return the loss, and what the tables list"):
        shardc.load(tmp_path / "out", trust=True)


def test_two_forwards_come_back_from_disk_and_are_proven(tmp_path: Path) -> None:
    program = compiled(*CASES["forwards, zero 3"][:2], execution=FORWARDS)
    assert [str(a) for a in schedule_of(program).actions[0]][:6] == ["0F0+0F1", "0B0", "0B1", "0F2+0F3", "0B2", "0B3"]
    program.save(tmp_path / "out")
    there = shardc.load(tmp_path / "out")
    assert there.joint() == program.joint()
    assert there.prove().ok

    def other_mesh(graph: Any) -> None:
        mesh = {n.name: n for n in graph.nodes}["mesh"]
        line = next(n for n in graph.nodes if n.target is ops.start and n.name.startswith("next_"))
        line.args = tuple(mesh if getattr(a, "name", "") == "next_mesh" else a for a in line.args)

    def another_op(graph: Any) -> None:
        line = next(n for n in graph.nodes if n.name == "next_gelu")
        line.target, line.kwargs = torch.ops.aten.silu.default, {}

    assert "takes a value of the other microbatch" in _broken(there, other_mesh)[0]
    assert any("forwards_0_0, pair, second forward" in gap for gap in _broken(there, another_op))
    file = tmp_path / "out" / "forwards_0_0.py"
    file.write_text(re.sub(r"    return .*\n", "    return ((), ())\n", file.read_text()))
    with pytest.raises(shardc.ShardcError, match="does not return the loss, and what the tables list"):
        shardc.load(tmp_path / "out", trust=True)


def _broken(program: Any, change: Any) -> list[str]:
    """What the proof says of a program whose first pair has one line changed."""
    p = program.pairs[0]
    graph = copy_graph(p.graph)
    change(graph)
    return [str(g) for g in replace(program, pairs=(replace(p, graph=graph), *program.pairs[1:])).prove().gaps]


def test_a_pair_that_mixes_its_microbatches_is_not_proven() -> None:
    program = compiled(*CASES["tp"][:2], execution=SIDE)

    def other_mesh(graph: Any) -> None:
        mesh = {n.name: n for n in graph.nodes}["mesh"]
        line = next(n for n in graph.nodes if n.target is ops.transpose_start)
        line.args = tuple(mesh if getattr(a, "name", "") == "back_mesh" else a for a in line.args)

    def twice(graph: Any) -> None:
        line = next(n for n in graph.nodes if n.target is torch.ops.aten.gelu.default)
        line.args = (line.args[0],)
        line.target = torch.ops.aten.silu.default
        line.kwargs = {}

    assert "takes a value of the other microbatch" in _broken(program, other_mesh)[0]
    assert any("pair_0_0, pair, forward" in gap for gap in _broken(program, twice))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"mesh": {"dp": 2}}, "needs at least two microbatches"),
        ({"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, **MICRO}, "does not work with a pipeline"),
    ],
)
@pytest.mark.parametrize("how", [SIDE, FORWARDS])
def test_overlap_is_refused_where_nothing_runs_beside(spec: dict[str, Any], said: str, how: dict[str, str]) -> None:
    with pytest.raises(shardc.ShardcError, match=f"overlap: {how['overlap']}.*{said}"):
        compiled("gpt", spec, execution=how)


class _Mean(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def _waited(model: nn.Module, width: int, spec: dict[str, Any], how: Any) -> tuple[float, float]:
    """(seconds of waiting for collectives, peak bytes) of a step."""
    full = {"shardc": 1, **spec, "batch": {"microbatches": 4}, "execution": how}
    program = shardc.compile(model, {"x": torch.empty(4 * 8192, width, device="meta")}, full, prove=False)
    cost = program.cost("h100-80g")
    return sum(r.exposed or 0.0 for r in comm_rows(cost)), cost.memory.peak


def test_forward_waits_for_less_than_half_beside_a_backward() -> None:
    with torch.device("meta"):
        model = _Mean(nn.Sequential(*(Block(8192) for _ in range(4))))
    spec = {
        "mesh": {"tp": 8},
        "shard": {"*.up": "column", "*.down": "row"},
        "activations": {"blocks.*.norm": {0: "tp"}},
    }
    alone, _ = _waited(model, 8192, spec, {})
    beside, _ = _waited(model, 8192, spec, SIDE)
    assert beside < alone / 2


def test_a_forward_waits_for_less_beside_another_and_takes_no_more_memory_than_both() -> None:
    with torch.device("meta"):
        model = _Mean(nn.Sequential(*(Block(8192) for _ in range(3))))
    spec = {
        "mesh": {"tp": 8},
        "shard": {"*.up": "column", "*.down": "row"},
        "activations": {"blocks.*.norm": {0: "tp"}},
    }

    def waited(how: Any) -> tuple[float, int]:
        full = {"shardc": 1, **spec, "batch": {"microbatches": 2}, "execution": how}
        batch = {"x": torch.empty(2 * 8192, 8192, device="meta")}
        cost = shardc.compile(model, batch, full, prove=False).cost("h100-80g")
        forward = sum(r.exposed or 0.0 for r in comm_rows(cost) if r.direction == "forward")
        return forward, cost.memory.peak

    (alone, one), (beside, both) = waited({}), waited(FORWARDS)
    assert beside < alone / 3
    assert one < both < 2 * one


def test_new_values_of_buffers_do_not_add_to_a_pairs_peak() -> None:
    """A forward by itself hands them over before the backward behind it begins; a pair has them to its end."""
    with torch.device("meta"):
        model, x = _Mean(nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(4)))), torch.empty(32, 64)
    spec: dict[str, Any] = {"shardc": 1, **DUAL, "batch": {"microbatches": 8}, "batch_norm": "local"}

    paired = shardc.compile(model, {"x": x}, spec, prove=False)
    assert paired.pairs

    def peak(pairs: bool) -> int:
        program = paired if pairs else replace(paired, pairs=())
        return memory(dry_run(program, 0), schedule_of(program).actions[0]).peak

    assert peak(True) <= peak(False)


def test_exchanges_of_experts_run_beside_the_other_microbatch() -> None:
    with torch.device("meta"):
        model = Routed()
    spec = {"mesh": {"ep": 8}, "experts": [{"match": "blocks.*", "axis": "ep"}], "precision": {"compute": "bfloat16"}}
    alone, _ = _waited(model, 4096, spec, {})
    beside, _ = _waited(model, 4096, spec, SIDE)
    assert beside < 0.8 * alone  # there is little else to compute: gradients of router weights take their bytes
