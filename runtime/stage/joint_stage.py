"""Run a stage's forward and backward graphs (passes/joint) as functions; a merged pair as one.

forward     from inputs of the stage to the loss, new values, values for other stages; and what backward needs, by name
backward    from that and first gradients, in one dict, to gradients of received values. Each value is popped from the
            dict, so that it is freed at its last use
weights     the second half of a backward in two halves, in the same way: gradients go into buckets
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import copy_graph
from shardc.ir.stage import Stage, second_prefix
from shardc.runtime.compiled import Compiler, with_compiled_regions
from shardc.runtime.mesh.step_context import MicrobatchContext, StepContext
from shardc.runtime.stage import op_errors
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.bindings import bound
from shardc.runtime.stage.profiler_ranges import MakeFunction
from shardc.runtime.stage.repeated_lines import insert_repeat_marks

#: Values by name, such as a stage's inputs.
Inputs = Mapping[str, Any]
#: Those that a backward reads, by name; it pops each, so that it is freed at its last use.
Kept = dict[str, Any]
#: Begins the sums of complete buckets.
Launch = Callable[[], None]


@dataclass(frozen=True)
class Tools:
    """How graphs become functions on a device.

    on_host: keeps activations on the host. compiler: compiles fused regions; make: see Interpreter.
    """

    device: torch.device
    on_host: OffloadedTensors
    compiler: Compiler | None = None
    make: MakeFunction = bound


class JointStage:
    """The forward and backward graphs of a stage with `joint`.

    graphs: forward, backward, perhaps weights, as prepared for this device. .weights: the second half, if any.
    """

    def __init__(self, stage: Stage, graphs: Mapping[str, fx.Graph], tools: Tools) -> None:
        self._on_host = tools.on_host
        forward, backward = graphs["forward"], graphs["backward"]
        returned: Any = stage.graph.output_node().args[0]
        self._loss_grad_name = f"{returned[0].name}_grad" if returned[0] is not None else ""
        self.received = [n for n, v in stage.receives.items() if v.requires_grad]
        self._forward_graph = forward
        outputs: Any = forward.output_node().args[0]
        self._kept = [n.name for n in outputs[3]]
        self._forward = tools.make(copy_graph(with_compiled_regions(forward, tools.compiler)), forward)
        self._backward = _ConsumingGraph(backward, tools)
        self.weights = _ConsumingGraph(graphs["weights"], tools) if "weights" in graphs else None
        results: Any = backward.output_node().args[0]
        self._passed_to_weights = [n.name for n in results[1]] if self.weights is not None else []

    @torch.no_grad()
    def forward(self, mesh: Any, *values: Any) -> tuple[Any, dict[str, Any]]:
        """Run forward: ((loss, new values, sent values), what backward needs). values: the stage's inputs."""
        with mesh.step.training(host_copies=self._on_host), op_errors.named(self._forward_graph):
            *returned, kept = self._forward(*values)
        return tuple(returned), dict(zip(self._kept, kept, strict=True))

    def named_grads(self, grads: Mapping[str, Tensor], loss_grad: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients that backward begins with, by the names of its graph.

        grads: of values for other stages. loss_grad: of the loss, if computed here.
        """
        of_loss = {} if loss_grad is None else {self._loss_grad_name: loss_grad}
        return {f"{n}_grad": g for n, g in grads.items()} | of_loss

    @torch.no_grad()
    def backward(self, kept: Kept, values: Inputs, launch: Launch) -> dict[str, Tensor | None]:
        """Run backward and return {received value: its gradient}.

        kept: of forward, with `named_grads`; what the second half needs stays. values: the stage's inputs.
        """
        if self.weights is None:
            return dict(zip(self.received, self._backward(kept, values, launch), strict=True))
        needed_later = {name: kept[name] for name in self.weights.takes & kept.keys()}
        returned, passed_on = self._backward(kept, values, launch)
        kept.clear()
        kept |= needed_later | dict(zip(self._passed_to_weights, passed_on, strict=True))
        return dict(zip(self.received, returned, strict=True))


class JointPair:
    """One microbatch's forward and another's backward or forward as one graph (shardc.passes.joint.pair).

    graph: as prepared for this device. forward, then: the stages of its halves.
    """

    def __init__(self, kind: str, graph: fx.Graph, forward: Stage, then: JointStage, tools: Tools) -> None:
        self._on_host = tools.on_host
        assert forward.joint is not None
        self._second_prefix = second_prefix(kind, forward.joint.forward)
        self._then = then
        returned: Any = graph.output_node().args[0]
        halves = returned[:1] if kind == "FB" else returned
        #: For each forward, the names of the values that it keeps.
        self._kept = [[n.name.removeprefix(self._second_prefix) for n in half[3]] for half in halves]
        self._pair = _ConsumingGraph(graph, tools)

    @torch.no_grad()
    def run(
        self, mesh: Any, microbatch: MicrobatchContext, first: Inputs, kept: Kept, second: Inputs, launch: Launch
    ) -> tuple[tuple[Any, dict[str, Any]], dict[str, Tensor | None]]:
        """Run both: (result as of JointStage.forward; gradients of values that backward's stage received).

        first, second: inputs of the forward's and the backward's stages. microbatch, kept: of the backward, as in
        JointStage.backward.
        """
        view = mesh.new_view()
        view.step.in_backward, view.step.microbatch = True, microbatch
        inputs = self._graph_inputs(first, view, second, kept)
        kept.clear()
        with mesh.step.training(launch, self._on_host), view.step.training(launch):
            returned, grads = self._pair.call(inputs, mesh.step)
        return self._forward(0, returned), dict(zip(self._then.received, grads, strict=True))

    @torch.no_grad()
    def run_forwards(
        self, mesh: Any, microbatch: MicrobatchContext, first: Inputs, second: Inputs, weight_copies: dict[str, Tensor]
    ) -> tuple[tuple[Any, dict[str, Any]], ...]:
        """Run both forwards; return a result as of JointStage.forward for each.

        first, second: inputs of their stages. microbatch: of the second. weight_copies: copies of weights that the
        microbatches of the second's stage share.
        """
        view = mesh.new_view()
        view.step.microbatch, view.step.routings = microbatch, mesh.step.routings
        view.step.weight_copies = weight_copies
        inputs = self._graph_inputs(first, view, second, {})
        with mesh.step.training(host_copies=self._on_host), view.step.training(host_copies=self._on_host):
            returned = self._pair.call(inputs, mesh.step)
        return tuple(self._forward(i, half) for i, half in enumerate(returned))

    def _graph_inputs(self, first: Inputs, view: Any, second: Inputs, kept: Kept) -> dict[str, Any]:
        """Return all inputs of the graph by name. view: the mesh as the second half sees it."""
        inputs: dict[str, Any] = {}
        for name in self._pair.takes:
            plain = name.removeprefix(self._second_prefix)
            if plain == name:
                inputs[name] = first[name] if name in first else second[name]
            elif plain == "mesh":
                inputs[name] = view
            else:
                inputs[name] = kept.pop(plain) if plain in kept else second[plain]
        return inputs

    def _forward(self, half: int, returned: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        *results, saved = returned
        return tuple(results), dict(zip(self._kept[half], saved, strict=True))


class _ConsumingGraph:
    """A graph as a function that pops its inputs from a dict: each is freed at its last use."""

    def __init__(self, graph: fx.Graph, tools: Tools) -> None:
        self._graph, self.takes = graph, {n.name for n in graph.find_nodes(op="placeholder")}
        self._run = tools.make(_popping(with_compiled_regions(graph, tools.compiler)), graph)

    @torch.no_grad()
    def __call__(self, kept: Kept, values: Inputs, launch: Launch) -> Any:
        """Run the graph. kept: of earlier graphs; values: the stage's inputs."""
        step = values["mesh"].step
        for name in self.takes - kept.keys():
            kept[name] = values[name]
        with step.training(launch), step.backward():
            return self.call(kept, step)

    def call(self, values: dict[str, Any], step: StepContext) -> Any:
        """Run the graph on a dict of all its inputs; it pops each from the dict."""
        values[_STEP] = step
        with op_errors.named(self._graph):
            return self._run(values)


#: Key of the step's context in a graph's dict of values; no node can have this name.
_STEP = "the step"


def _popping(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, to take one dict, from which it pops its inputs."""
    copy = fx.Graph()
    values = copy.placeholder("values")
    step = copy.create_node("call_method", "pop", (values, _STEP), name="step_context")
    env = {
        n: copy.create_node("call_method", "pop", (values, n.name), name=n.name)
        for n in graph.find_nodes(op="placeholder")
    }
    copy_graph(graph, env, into=copy)
    insert_repeat_marks(copy, step)
    return copy
