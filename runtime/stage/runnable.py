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
from shardc.runtime.stage.joint_stage import JointPair, JointStage, Tools
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

    def __init__(self, program: Program, index: int, tools: Tools) -> None:
        stage = program.stages[index]
        self.takes = [n.name for n in stage.graph.find_nodes(op="placeholder")]
        self.graph, self.receives, self.sends = stage.graph, stage.receives, stage.sends
        self.outputs, self.copied = stage.outputs, outputs.views(stage)
        self.piped = bool(program.axis)
        self.updates = stage.updates if self.piped else tuple(b.name for b in program.buffers if b.updated)
        self._stage, self._program, self._tools = stage, program, tools
        self._run: Callable[..., Any] | None = None
        self._joint: JointStage | None = None

    @property
    def run(self) -> Callable[..., Any]:
        """Its graph without backward, made when a forward or an evaluation first runs it."""
        if self._run is None:
            with uncollected():
                self._run = runnable(self._stage, self._tools.device, self._program, self._tools.make)
        return self._run

    @property
    def joint(self) -> JointStage:
        """Its forward and backward graphs, made when a step first runs them."""
        if self._joint is not None:
            return self._joint
        if self._stage.joint is None:
            raise ShardcError("the program has no backward graph", where=self._stage.name, fix="compile again")
        with WRITING, uncollected():
            graphs = {way: on_device(graph, self._tools.device) for way, graph in self._stage.joint.graphs.items()}
            self._joint = JointStage(self._stage, graphs, self._tools)
        return self._joint


def only_stage(program: Program, mesh: Any) -> RunnableStage:
    """Return the stage of a program that has one, for a mesh's device."""
    tools = Tools(mesh.device, OffloadedTensors(mesh.device), Compiler(strict=program.spec.strict))
    with WRITING:
        return RunnableStage(program, 0, tools)


def runnable_pair(program: Program, pair: Pair, stages: Mapping[int, RunnableStage], tools: Tools) -> JointPair:
    """Make a merged pair runnable on a device. stages: those of this rank."""
    first, then = program.stages[pair.first], stages[pair.then].joint
    return JointPair(pair.kind, on_device(pair.graph, tools.device), first, then, tools)
