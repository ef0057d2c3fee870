"""Run a stage as a function of its placeholders, on one rank's device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shardc.collector import uncollected
from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph
from shardc.ir.program import Program
from shardc.ir.stage import Pair, Stage
from shardc.runtime import ops
from shardc.runtime.compiled import Compiler
from shardc.runtime.stage import outputs
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.bindings import bound
from shardc.runtime.stage.joint_stage import JointPair, JointStage
from shardc.runtime.stage.profiler_ranges import MakeFunction

# fx sets attributes of nodes while it writes a graph's code, and such a node is not found for a moment
# (fx.Node.__setattr__): other ranks that are threads of this process, and share the program, must not read its graphs
# meanwhile
WRITING = threading.RLock()


def on_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Copy a graph, which names no device, and pass `device` to all ops that accept one; on a CPU: the graph itself."""
    if device.type == "cpu":
        return graph
    copy = copy_graph(graph)
    for node in copy.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.target is ops.random or (schema and any(a.name == "device" for a in schema.arguments)):
            node.kwargs = {**node.kwargs, "device": device}
    return copy


def _overwrite_caches(graph: fx.Graph, program: Program) -> None:
    """Let a graph overwrite caches in place, as nothing else reads the old values."""
    caches = {b.name for b in program.buffers if b.cache}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy.default) if caches else ():
        written = node.args[0]
        if written.name in caches and len(written.users) == 1:
            node.target = torch.ops.aten.index_copy_.default


def runnable(stage: Stage, device: torch.device, program: Program, make: MakeFunction = bound) -> Callable[..., Any]:
    """Make a function without backward of a stage's placeholders; it frees each value after its last use."""
    graph = copy_graph(on_device(stage.graph, device))
    _overwrite_caches(graph, program)
    with WRITING:
        return make(graph, stage.graph)


class RunnableStage:
    """One stage: its graph, and its forward and backward graphs."""

    # no cached_property: before Python 3.12 it locks, and WRITING is taken inside

    def __init__(
        self,
        program: Program,
        index: int,
        device: torch.device,
        copies: OffloadedTensors,
        compiler: Compiler | None,
        make: MakeFunction = bound,
    ) -> None:
        stage = program.stages[index]
        self.takes = [n.name for n in stage.graph.find_nodes(op="placeholder")]
        self.graph, self.receives, self.sends = stage.graph, stage.receives, stage.sends
        self.outputs, self.copied = stage.outputs, outputs.views(stage)
        self.piped = bool(program.axis)
        self.updates = stage.updates if self.piped else tuple(b.name for b in program.buffers if b.updated)
        self._stage, self._device, self._program, self._copies = stage, device, program, copies
        self._compiler, self._make = compiler, make
        self._run: Callable[..., Any] | None = None
        self._joint: JointStage | None = None

    @property
    def run(self) -> Callable[..., Any]:
        """Its graph without backward, made when a forward or an evaluation first runs it."""
        if self._run is None:
            with uncollected():
                self._run = runnable(self._stage, self._device, self._program, self._make)
        return self._run

    @run.setter
    def run(self, function: Callable[..., Any]) -> None:
        self._run = function

    @property
    def joint(self) -> JointStage:
        """Its forward and backward graphs, made when a step first runs them."""
        if self._joint is not None:
            return self._joint
        if self._stage.joint is None:
            fault, fix = "the program has no backward graph: an earlier version of shardc wrote it", "compile again"
            raise ShardcError(fault, where=self._stage.name, fix=fix)
        with WRITING, uncollected():
            graphs = {way: on_device(graph, self._device) for way, graph in self._stage.joint.graphs.items()}
            self._joint = JointStage(self._stage, graphs, self._copies, self._compiler, self._make)
        return self._joint


def only_stage(program: Program, mesh: Any) -> RunnableStage:
    """Return the stage of a program that has one, for a mesh's device."""
    compiler = Compiler(strict=program.spec.strict)
    with WRITING:
        return RunnableStage(program, 0, mesh.device, OffloadedTensors(mesh.device), compiler)


def runnable_pair(
    program: Program,
    pair: Pair,
    stages: Mapping[int, RunnableStage],
    device: torch.device,
    copies: OffloadedTensors,
    compiler: Compiler | None,
    make: MakeFunction,
) -> JointPair:
    """Make a merged pair runnable on a device. stages: those of this rank."""
    graph = on_device(pair.graph, device)
    first, then = program.stages[pair.first], stages[pair.then].joint
    return JointPair(pair.kind, graph, first, then, copies, compiler, make)
