"""A stage as a function of its placeholders, on one rank's device: as its graph says, or as its lowered texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import copy_graph
from shardc.ir.pairs import Pair
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.runtime import ops
from shardc.runtime.compiled import Compiler
from shardc.runtime.ops.overlap import beside, multiplies
from shardc.runtime.step import outputs
from shardc.runtime.step.activation_offload import OffloadedTensors
from shardc.runtime.step.lowered import LoweredPair, LoweredStage
from shardc.runtime.step.profiler_ranges import with_ranges
from shardc.runtime.step.recompute import with_regions
from shardc.runtime.step.split_backward import split_stage

# fx writes a graph's code with notes on its nodes, and a node that gets one is not found for a moment
# (fx.Node.__setattr__): ranks that are threads of one process, and share a program, must not look at its graphs
# meanwhile
WRITING = threading.RLock()


def on_device(graph: fx.Graph, device: torch.device | str) -> fx.Graph:
    """A copy of a canonical graph, which names no device, whose ops make their tensors on `device`: all that could make
    them elsewhere, that is, take a device.
    """
    copy = copy_graph(graph)
    for node in copy.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target is ops.random or (schema and any(a.name == "device" for a in schema.arguments)):
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
    return copy


def _overlapped(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph whose products compute the gradients of their weights while that of their input is summed,
    where the program says so (`overlap=True`).
    """
    copy = copy_graph(graph)
    for node in copy.nodes:
        for user in list(node.users) if node.kwargs.get("overlap") else ():
            if multiplies(user, node):
                user.target, user.args = beside(user.target, user.args)
    return copy


def _in_place(graph: fx.Graph, program: Program) -> fx.Graph:
    """A copy of a graph that writes to a cache where it stands, as nothing else looks at what was there."""
    copy, caches = copy_graph(graph), {b.name for b in program.buffers if b.cache}
    for node in copy.find_nodes(op="call_function", target=torch.ops.aten.index_copy.default):
        written = node.args[0]
        if written.name in caches and len(written.users) == 1:
            node.target = torch.ops.aten.index_copy_.default
    return copy


def runnable(
    stage: Stage,
    device: torch.device,
    program: Program,
    offloaded: type[OffloadedTensors] = OffloadedTensors,
    *,
    divided: bool = False,
) -> fx.GraphModule:
    """A stage as a function of its placeholders; frees each value after its last use.

    offloaded: where regions with `offload: cpu` keep tensors until backward. divided: backward comes in two
    (shardc.runtime.step.split_backward), and that of weights is late anyway."""
    graph = stage.graph if divided else _overlapped(stage.graph)
    if any(b.cache for b in program.buffers):
        graph = _in_place(graph, program)
    if device.type != "cpu":
        graph = on_device(graph, device)
    with WRITING:
        return with_regions(graph, program, offloaded)


class RunnableStage:
    """One stage, compiled. divided: its backward comes in two, for inputs and for weights."""

    def __init__(
        self,
        program: Program,
        index: int,
        device: torch.device,
        offloaded: type[OffloadedTensors],
        copies: OffloadedTensors,
        compiler: Compiler | None,
        *,
        divided: bool,
        ranges: bool,
    ) -> None:
        stage = program.stages[index]
        self.takes = [n.name for n in stage.graph.find_nodes(op="placeholder")]
        self.receives, self.sends, self.updates = stage.receives, stage.sends, stage.updates
        self.outputs, self.copied = stage.outputs, outputs.views(stage)
        self.piped = bool(program.axis)
        whole = (
            split_stage(stage, {p.name for p in program.params}, {x.name for x in program.inputs}) if divided else stage
        )
        self.graph = whole.graph
        module = runnable(whole, device, program, offloaded, divided=divided)
        self.run: Callable[..., Any] = with_ranges(module, whole.graph) if ranges else module
        self.lowered: LoweredStage | None = None
        if stage.lowered is not None:
            texts = stage.lowered.texts
            if device.type != "cpu":
                texts = {way: on_device(graph, device) for way, graph in texts.items()}
            self.lowered = LoweredStage(stage, texts, copies, ranges=ranges, compiler=compiler)
        if not self.piped:
            self.updates = tuple(b.name for b in program.buffers if b.updated)


def runnable_pair(
    program: Program,
    pair: Pair,
    stages: Mapping[int, RunnableStage],
    device: torch.device,
    copies: OffloadedTensors,
    compiler: Compiler | None,
    *,
    ranges: bool,
) -> LoweredPair:
    graph = on_device(pair.graph, device) if device.type != "cpu" else pair.graph
    then = stages[pair.then].lowered
    assert then is not None
    one = program.stages[pair.first]
    return LoweredPair(pair.kind, graph, one, then, copies, ranges=ranges, compiler=compiler)
