"""The joint graph of a stage (shardc.passes.joint) as two functions, and an overlapped pair as one.

forward(*what the stage takes)   -> loss, news, what other stages take; and what backward wants, kept by name
backward({name: value})          -> gradients of what was received; it takes each value out of the dict, so that
                                    what forward kept is freed at its last use
    weights({name: value})           -> of a backward in two halves, the second one: gradients go into buckets
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.ir.graph import copy_graph
from shardc.ir.pairs import prefix_of
from shardc.ir.stage import Stage
from shardc.runtime.compiled import Compiler, with_compiled_regions
from shardc.runtime.mesh.step_context import MicrobatchContext, StepContext
from shardc.runtime.stage import op_errors
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.bindings import bind
from shardc.runtime.stage.profiler_ranges import with_ranges
from shardc.runtime.stage.repeated_lines import tell_repeated


class JointStage:
    """stage: with `joint`; graphs: its graphs, for the device; compiler: of their fused regions, if they are compiled;
    copies: to the host and back. weights: the second half of backward, if it has one.
    """

    def __init__(
        self,
        stage: Stage,
        graphs: Mapping[str, fx.Graph],
        copies: OffloadedTensors,
        *,
        ranges: bool,
        compiler: Compiler | None = None,
    ) -> None:
        self._copies = copies
        forward, backward = graphs["forward"], graphs["backward"]
        returned: Any = stage.graph.output_node().args[0]
        self._loss = f"{returned[0].name}_grad" if returned[0] is not None else ""
        self.received = [n for n, v in stage.receives.items() if v.requires_grad]
        self._forward_graph = forward
        kept: Any = forward.output_node().args[0]
        self._kept = [n.name for n in kept[3]]
        self._forward = fx.GraphModule(nn.Module(), bind(copy_graph(with_compiled_regions(forward, compiler))))
        if ranges:
            self._forward = with_ranges(self._forward, forward)
        self._backward = _Half(backward, compiler, ranges=ranges)
        self.weights = _Half(graphs["weights"], compiler, ranges=ranges) if "weights" in graphs else None
        given: Any = backward.output_node().args[0]
        self._handed_on = [n.name for n in given[1]] if self.weights is not None else []

    @torch.no_grad()
    def forward(self, mesh: Any, *values: Any) -> tuple[Any, dict[str, Any]]:
        """((loss, news, sent), what backward wants). values: what the stage takes."""
        with mesh.step.training(host_copies=self._copies), op_errors.named(self._forward_graph):
            *returned, kept = self._forward(*values)
        return tuple(returned), dict(zip(self._kept, kept, strict=True))

    def begin(self, grads: Mapping[str, Tensor], loss: Tensor | None) -> dict[str, Tensor]:
        """What backward begins with, by the names of its graph: see `backward`."""
        return {f"{n}_grad": g for n, g in grads.items()} | ({} if loss is None else {self._loss: loss})

    @torch.no_grad()
    def backward(
        self,
        kept: dict[str, Any],
        values: Mapping[str, Any],
        grads: Mapping[str, Tensor],
        loss: Tensor | None,
        launch: Callable[[], None],
    ) -> dict[str, Tensor | None]:
        """{received value: its gradient}. kept: of forward, which is used up, but for what the second half wants;
        values: what the stage takes; grads: of what it made for others; loss: the gradient of the loss, if that is made
        here; launch: begins the sums of buckets that are complete.
        """
        kept |= self.begin(grads, loss)
        if self.weights is None:
            return dict(zip(self.received, self._backward(kept, values, launch), strict=True))
        later = {name: kept[name] for name in self.weights.takes & kept.keys()}
        returned, handed_on = self._backward(kept, values, launch)
        kept.clear()
        kept |= later | dict(zip(self._handed_on, handed_on, strict=True))
        return dict(zip(self.received, returned, strict=True))


class JointPair:
    """The forward of one microbatch and the backward or the forward of another as one graph (shardc.passes.joint.pair).
    graph: for the device; forward, then: the stages of its halves; compiler: of its fused regions, if they are
    compiled; copies: to the host and back.
    """

    def __init__(
        self,
        kind: str,
        graph: fx.Graph,
        forward: Stage,
        then: JointStage,
        copies: OffloadedTensors,
        *,
        ranges: bool,
        compiler: Compiler | None = None,
    ) -> None:
        self._copies = copies
        assert forward.joint is not None
        self._prefix = prefix_of(kind, forward.joint.forward)
        self._then = then
        returned: Any = graph.output_node().args[0]
        halves = returned[:1] if kind == "FB" else returned
        #: Of each forward, the names of what it keeps.
        self._kept = [[n.name.removeprefix(self._prefix) for n in half[3]] for half in halves]
        self._graph, self._half = graph, _Half(graph, compiler, ranges=ranges)

    @torch.no_grad()
    def run(
        self,
        mesh: Any,
        microbatch: MicrobatchContext,
        given: Mapping[str, Any],
        kept: dict[str, Any],
        values: Mapping[str, Any],
        begin: Mapping[str, Tensor],
        launch: Callable[[], None],
    ) -> tuple[tuple[Any, dict[str, Any]], dict[str, Tensor | None]]:
        """(what forward returns, as of JointStage.forward; the gradients of what backward's stage received).

        given: what forward's stage takes. microbatch, kept, values: backward's, what its forward kept for it, which is
        used up, and what its stage takes; begin: gradients of what it made for others, and of the loss, by the names of
        its graph; launch: begins the sums of buckets that are complete.
        """
        view = mesh.beside()
        view.step.in_backward, view.step.microbatch = True, microbatch
        kept |= begin
        here = self._taken(given, view, values, kept)
        kept.clear()
        with mesh.step.training(launch, self._copies), view.step.training(launch):
            returned, grads = self._half.call(here, mesh.step)
        return self._forward(0, returned), dict(zip(self._then.received, grads, strict=True))

    @torch.no_grad()
    def run_forwards(
        self,
        mesh: Any,
        microbatch: MicrobatchContext,
        given: Mapping[str, Any],
        values: Mapping[str, Any],
        weight_copies: dict[str, Tensor],
    ) -> tuple[tuple[Any, dict[str, Any]], ...]:
        """What each forward returns, as of JointStage.forward. given: what the first one's stage takes. microbatch,
        values: the second's, and what its stage takes; weight_copies: those that microbatches share, of its stage.
        """
        view = mesh.beside()
        view.step.microbatch, view.step.routings = microbatch, mesh.step.routings
        view.step.weight_copies = weight_copies
        here = self._taken(given, view, values, {})
        with mesh.step.training(host_copies=self._copies), view.step.training(host_copies=self._copies):
            returned = self._half.call(here, mesh.step)
        return tuple(self._forward(i, half) for i, half in enumerate(returned))

    def _taken(
        self, given: Mapping[str, Any], view: Any, values: Mapping[str, Any], kept: dict[str, Any]
    ) -> dict[str, Any]:
        """All that the graph takes, by name. view: the mesh as the second half sees it."""
        here: dict[str, Any] = {}
        for name in self._half.takes:
            own = name.removeprefix(self._prefix)
            if own == name:
                here[name] = given[name] if name in given else values[name]
            elif own == "mesh":
                here[name] = view
            else:
                here[name] = kept.pop(own) if own in kept else values[own]
        return here

    def _forward(self, half: int, returned: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        *results, saved = returned
        return tuple(results), dict(zip(self._kept[half], saved, strict=True))


class _Half:
    """A graph of backward, as a function of a dict from which it takes what it needs. takes: names."""

    def __init__(self, graph: fx.Graph, compiler: Compiler | None, *, ranges: bool) -> None:
        self._graph, self.takes = graph, {n.name for n in graph.find_nodes(op="placeholder")}
        module = _taking(with_compiled_regions(graph, compiler))
        self._run = with_ranges(module, graph) if ranges else module

    @torch.no_grad()
    def __call__(self, kept: dict[str, Any], values: Mapping[str, Any], launch: Callable[[], None]) -> Any:
        """kept: of what came before; values: what the stage takes; launch: begins sums of buckets."""
        step = values["mesh"].step
        for name in self.takes - kept.keys():
            kept[name] = values[name]
        with step.training(launch), step.backward():
            return self.call(kept, step)

    def call(self, values: dict[str, Any], step: StepContext) -> Any:
        """values: all that it takes, by name; it takes each out of the dict."""
        values[_STEP] = step
        with op_errors.named(self._graph):
            return self._run(values)


#: Where a graph's dict has the context of the step, beside its values: no name of a node.
_STEP = "the step"


def _taking(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a function of one dict, which takes values out of it."""
    copy = fx.Graph()
    values = copy.placeholder("values")
    step = copy.create_node("call_method", "pop", (values, _STEP), name="step_context")
    env = {
        n: copy.create_node("call_method", "pop", (values, n.name), name=n.name)
        for n in graph.find_nodes(op="placeholder")
    }
    copy_graph(graph, env, into=copy)
    tell_repeated(copy, step)
    return fx.GraphModule(nn.Module(), bind(copy))
