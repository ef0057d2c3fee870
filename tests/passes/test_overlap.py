"""Collectives of a graph of a step begin early and end late: less time in the open, no more memory, the same lines."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardc
from shardc.machine.assumed import ASSUMED
from shardc.machine.clock import Clock
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.memory import Sizes
from shardc.passes.joint.seconds import Seconds
from shardc.report.comm import comm_rows
from tests import zoo

seconds_module: Any = importlib.import_module("shardc.passes.joint.seconds")
joint: Any = importlib.import_module("shardc.passes.joint")
overlap: Any = importlib.import_module("shardc.passes.joint.overlap")

WIDTH = 8192


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = 6) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def compiled(**more: Any) -> Any:
    """Sequence-parallel: all_gather and reduce_scatter around every pair of products."""
    with torch.device("meta"):
        model = Model()
    spec = {
        "shardc": 1,
        "mesh": {"tp": 8},
        "shard": {"*.up": "column", "*.down": "row"},
        "activations": {"blocks.*.norm": {0: "tp"}},
        **more,
    }
    return shardc.compile(model, {"x": torch.empty(8192, WIDTH, device="meta")}, spec, prove=False)


@pytest.fixture(scope="module")
def program() -> Any:
    return compiled()


def without_overlap(program: Any) -> Any:
    """The same program, each of whose collectives is waited for where it is begun."""

    def as_written(graph: Any, seconds: Seconds, sizes: Sizes, room: int = 0) -> int:
        text = overlap.OrderedGraph(graph, seconds, sizes)
        return text.uses.peak(text.nodes)[1]  # type: ignore[no-any-return]

    with mock.patch.object(joint, "overlap_collectives", as_written):
        plain = joint.with_joint_graphs(replace(program, pairs=()), program.spec.execution)
        assert all(s.joint.graphs for s in plain.stages)
    return plain


def test_backward_waits_for_less_than_half_of_what_it_waits_for_without_overlap(program: Any) -> None:
    def exposed(p: Any) -> float:
        return sum(r.exposed or 0.0 for r in comm_rows(p.cost("h100-80g")) if r.direction == "backward")

    plain = exposed(without_overlap(program))
    assert 0 < exposed(program) < plain / 2


def test_an_order_keeps_the_lines_and_takes_no_more_memory(program: Any) -> None:
    seconds, sizes = Seconds(program, Rank(program)), Sizes(program)
    for graph in program.stages[0].joint.graphs.values():
        text = overlap.OrderedGraph(graph, seconds, sizes)
        most = text.uses.peak(text.nodes)
        for reserve in overlap.RESERVES:
            order, clock = overlap.fitting(text, reserve, most)
            assert clock.end == text.simulate(order)
            assert all(overlap.within(alive, most) for alive in text.uses.alive(order))
            assert sorted(order, key=text.place.__getitem__) == text.nodes
            seen: set[Any] = set()
            for n in order:
                assert seen >= {text.nodes[at] for at in text.lines[text.place[n]].before}
                seen.add(n)
            assert text.simulate(order) <= 1.03 * text.simulate(text.nodes)


@pytest.mark.parametrize(
    ("spec", "rest"),
    [
        # a few small ops of a step are no lines of a graph; nor is what buckets copy
        ({}, 3e-4),
        ({"precision": {"compute": "bfloat16"}}, 3e-3),
        ({"checkpoint": [{"match": "blocks.*"}]}, 3e-4),
        ({"mesh": {"dp": 8}, "shard": {}, "activations": {}, "data": {"zero": 3}}, 0.03),
    ],
    ids=str,
)
def test_a_graph_takes_what_the_cost_model_says_of_its_action(spec: dict[str, Any], rest: float) -> None:
    """Lines and dry runs are priced by one formula, and run on one clock."""
    program = compiled(**spec)
    (run,) = program.cost(ASSUMED).dry_runs
    clock = Clock(ASSUMED, program.mesh, run.rank)
    clock.run(run.before)
    forward, backward = (clock.run(part) for action, part in run.actions if action.kind in "FB")
    seconds, sizes, joint_graphs = Seconds(program, Rank(program)), Sizes(program), program.stages[0].joint
    texts = [overlap.OrderedGraph(graph, seconds, sizes) for graph in (joint_graphs.forward, joint_graphs.backward)]
    took = [text.timed(text.nodes).now for text in texts]
    assert took == pytest.approx([forward, backward], rel=rest)


def test_the_sum_of_a_bucket_waits_for_the_one_before() -> None:
    """At ZeRO 3 its buffer is free then. Without ZeRO no sum waits for another."""
    for zero, settles in ((3, True), (0, False)):
        program = compiled(mesh={"dp": 8}, shard={}, activations={}, data={"zero": zero})
        text = overlap.OrderedGraph(program.stages[0].joint.backward, Seconds(program, Rank(program)), Sizes(program))
        sums = [line for line in text.lines if line.step.sums]
        assert len(sums) > 2
        assert all(line.settles == settles for line in sums)
        first, second = (replace(line, seconds=0.0, waits=-1) for line in sums[:2])
        clock = text.clock()
        clock.line(first)
        clock.line(second)
        assert clock.now == (pytest.approx(first.sends) if settles else 0)


def test_a_product_of_the_input_takes_what_one_of_its_microbatch_does() -> None:
    """The type of an input is that of the whole step's."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), torch.empty(64 * WIDTH, WIDTH)
    spec = {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 8}}
    program = shardc.compile(model, x, spec, loss=lambda y, _: y.square().mean(), prove=False)
    seconds = Seconds(program, Rank(program))
    first, second = (n for n in program.stages[0].joint.forward.nodes if n.target is torch.ops.aten.linear.default)
    assert first.args[0].op == "placeholder"
    assert seconds.of(first) == seconds.of(second)


def test_every_start_has_its_wait(program: Any) -> None:
    for graph in program.stages[0].joint.graphs.values():
        starts = [n for n in graph.nodes if n.target in overlap.STARTS]
        assert starts
        assert all(len(n.users) == 1 and next(iter(n.users)).target in overlap.WAITS for n in starts)
        assert all("collective" not in next(iter(n.users)).meta for n in starts)


def test_what_lines_take_is_found_once_for_all_equal_layers() -> None:
    """Also of dropout, whose streams of random numbers have a number each."""

    def runs(layers: int) -> int:
        model, batch = zoo.gpt(layers=layers, dropout=0.1)
        seconds_module._OF_TORCH.clear()
        with mock.patch.object(Seconds, "_run", autospec=True, side_effect=Seconds._run) as found:
            shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
        return found.call_count

    assert runs(2) == runs(5)


class SharedAndRouted(nn.Module):
    """A layer of experts with a shared expert beside them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * width, width))
        self.down = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.shared_up, self.shared_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        routed = shardc.nn.experts(x, index, weights, self.up, self.down)
        return x + routed + self.shared_down(nn.functional.relu(self.shared_up(x)))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SharedAndRouted(4096, 16) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def test_exchanges_of_experts_run_beside_a_shared_expert() -> None:
    with torch.device("meta"):
        model = Routed()
    spec = {
        "shardc": 1,
        "mesh": {"ep": 8},
        "experts": [{"match": "blocks.*", "axis": "ep"}],
        "precision": {"compute": "bfloat16"},
    }
    program = shardc.compile(model, {"x": torch.empty(8 * 4096, 4096, device="meta")}, spec, prove=False)

    def exposed(program: Any) -> float:
        rows = comm_rows(program.cost("h100-80g"))
        return sum(r.exposed or 0.0 for r in rows if (r.axes, r.kind) == ("ep", "all_to_all"))

    assert 0 < exposed(program) < exposed(without_overlap(program)) / 2
