"""Run one step of one rank: a loop over a list of actions (shardc.runtime.schedule).

A stage has two graphs, forward and backward. Both take its rank's parameters, buffers and inputs, and values of other
stages. For a stage s and a microbatch m, forward keeps what backward needs. Backward starts from the gradients of the
values that the stage sent, and returns those of the values that it received. `0SEND_F3>1`: stage 0, microbatch 3, to 1.

    0F3          stage 0 runs; its output h waits in the outbox
    0SEND_F3>1   h is sent                            1RECV_F3<0    a receive is posted on the other rank
                                                      1F3           waits for it
                                                      1B3           from the loss; the gradient of h waits in the outbox
    0RECV_B3<1   a receive is posted                  1SEND_B3>0    that gradient is sent
    0B3          backward of stage 0 from that gradient

A program of one stage is the same loop over `F0 B0 F1 B1 ...`. A receive is posted at its place in the list; the action
that uses it waits for it. A send is waited for, and its values freed, when IN_FLIGHT other sends have begun after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.stage import Edge
from shardc.runtime.mesh import Work
from shardc.runtime.mesh.step_context import MicrobatchContext
from shardc.runtime.schedule import Action, computed
from shardc.runtime.schedule.actions import PAIRS
from shardc.runtime.schedule.sends import IN_FLIGHT
from shardc.runtime.stage import op_errors
from shardc.runtime.zero.buckets import Buckets

if TYPE_CHECKING:
    from shardc.runtime.stage.interpreter import Interpreter
    from shardc.runtime.stage.runnable import RunnableStage


Way = Literal["forward", "backward"]
Values = Sequence[Mapping[str, Any]]  # by microbatch: {placeholder: value}, without values of other stages


@dataclass
class _Kept:
    """What one forward keeps: the loss, if made here, and the values that its backward reads, by name."""

    loss: Tensor | None
    values: dict[str, Any]


@dataclass(frozen=True)
class Training:
    """What the backwards of a step need: buckets for gradients, and `scale`, which applies the loss scale.

    `Run` calls `Buckets.start` before each backward, and `pause` after it. The backward graph calls `launch`.
    """

    buckets: Buckets
    scale: Callable[[Tensor], Tensor]


#: Kind of action -> the method that runs it (names: a table of bound methods in Run would be a reference cycle).
_METHODS = {
    "F": "forward",
    "B": "backward",
    "I": "backward_inputs",
    "W": "backward_weights",
    "SEND_F": "send",
    "SEND_B": "send",
    "RECV_F": "post",
    "RECV_B": "post",
    "REDUCE": "reduce",
}
_PHASES = {"B": "backward", "I": "backward", "W": "backward", "F": "forward"}


class Run:
    """One pass over a list of actions: a step, or forward alone (training=None)."""

    def __init__(
        self,
        interpreter: Interpreter,
        values: Values,
        actions: Sequence[Action],
        training: Training | None,
        *,
        keep_outputs: bool = True,
    ) -> None:
        self.interpreter, self.mesh = interpreter, interpreter.mesh
        self.values, self.actions, self.training = values, actions, training
        self.losses: list[Tensor] = []
        self.new_values: dict[str, Tensor] = {}
        self.outputs: dict[str, dict[int, Tensor]] = {}  # by microbatch
        self._keep_outputs = keep_outputs
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.inbox: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, microbatch) -> values of other stages
        self.grads: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, microbatch) -> gradients of what it sent
        # (stage, microbatch, way) -> receives in progress: the tensors that they fill
        self.posted: dict[tuple[int, int, Way], list[tuple[Edge, dict[str, Tensor], list[Work]]]] = {}
        # (source stage, target stage, microbatch, way) -> values that wait for their SEND action
        self.outbox: dict[tuple[int, int, int, Way], list[Tensor]] = {}
        self.sending: deque[list[Work]] = deque()  # sends in progress, the oldest first
        backwards = [a for a in computed(actions) if a.kind in ("B", "W")]
        self.first_backward = backwards[0] if backwards else None
        self.last_backward = {a.stage: a for a in backwards}
        self.last_forward = {a.stage: a for a in computed(actions) if a.kind == "F"}
        self.weight_copies: dict[int, dict[str, Tensor]] = {}  # by stage

    def run_all(self) -> None:
        for action in self.actions:
            self.run_action(action)
        for works in self.sending:
            for work in works:
                work.wait()
        self._note_activity("")

    def run_action(self, action: Action) -> None:
        """Run one action. STEP does nothing here: the engine updates."""
        doing = f"at {action} of the schedule" + (
            f": stage {action.stage}, microbatch {action.microbatch}" if action.microbatch >= 0 else ""
        )
        self._note_activity(doing)
        try:
            if action.kind in PAIRS and self.training is not None and action.of_pair in self.interpreter.pairs:
                (self._pair if action.kind == "FB" else self._forwards)(*action.parts)
            else:
                for part in action.parts:
                    self._run_part(part)
        except ShardcError:
            raise
        except Exception as e:
            if op_errors.no_memory(e):
                raise op_errors.out_of_memory(e, _PHASES.get(action.kind, "a step")) from e
            if self.interpreter.pipeline_axis and hasattr(e, "add_note"):  # Python 3.11
                e.add_note(doing)
            raise

    def _set_microbatch(self, action: Action) -> MicrobatchContext:
        """Make an action's microbatch the current one, with the totals of this step; return its context."""
        step, given = self.mesh.step, self.interpreter.totals_of
        totals = given[action.microbatch] if given else step.running.totals
        step.set_microbatch(action.microbatch, len(self.values), totals, step.running.works)
        context: MicrobatchContext = step.running
        return context

    def _run_part(self, action: Action) -> None:
        if action.kind in ("F", "B", "I", "W"):
            self._set_microbatch(action)
        if action.kind != "STEP":
            getattr(self, _METHODS[action.kind])(action)

    def _stage(self, stage: int, microbatch: int) -> RunnableStage:
        return self.interpreter.of(microbatch).stages[stage]

    def _note_activity(self, doing: str) -> None:
        if self.interpreter.pipeline_axis:
            self.mesh.activity.act(doing)

    # --- computing

    def forward(self, action: Action) -> None:
        """Run a stage's forward (F): in training its forward graph, else the stage's own graph."""
        stage = self._stage(action.stage, action.microbatch)
        inputs = self._forward_inputs(action)
        if self.training is None:
            with op_errors.named(stage.graph):
                loss, new_values, *rest = stage.run(*inputs.values())
            self._store_results(action, (loss, new_values, rest[0] if stage.piped else ()), None)
            return
        with self._weight_copies(action):
            returned, kept = stage.joint.forward(self.mesh, *inputs.values())
        self._store_results(action, returned, kept)

    def _forward_inputs(self, action: Action) -> dict[str, Any]:
        """Return all inputs of a stage's forward, by name."""
        key = (action.stage, action.microbatch)
        stage = self._stage(*key)
        self._wait_for_receives(*key, "forward")
        received, values = self.inbox.pop(key, {}), self.values[action.microbatch]
        return {n: received[n] if n in received else values[n] for n in stage.takes}

    def _store_results(self, action: Action, returned: Any, kept: dict[str, Any] | None) -> None:
        """Store the results of a forward. kept: for its backward, in training."""
        s, m = action.stage, action.microbatch
        stage = self._stage(s, m)
        loss, new_values, sent = returned
        if self._keep_outputs:
            for name, x in zip(stage.outputs, new_values[len(stage.updates) :], strict=True):
                self.outputs.setdefault(name, {})[m] = x.detach().clone() if name in stage.copied else x.detach()
        for name, new in zip(stage.updates, new_values, strict=False):
            adds = name in self.new_values and name in self.interpreter.added_buffers
            self.new_values[name] = self.new_values[name] + new.detach() if adds else new.detach()
        if loss is not None:
            self.losses.append(self.interpreter.loss_summand(m, loss.detach()))
        if kept is not None:
            self.kept[s, m] = _Kept(loss, kept)
        out = dict(zip(stage.sends, sent, strict=True))
        for edge in self.interpreter.of(m).edges.values():
            if edge.source == s:
                self._deliver(edge, m, {n: out[n].detach() for n in edge.names}, "forward")

    @contextmanager
    def _weight_copies(self, action: Action) -> Iterator[None]:
        """Share a stage's cast weights between the forwards of all microbatches (ops.cast_once).

        After the stage's last forward, only copies that backward needs are alive.
        """
        if len(self.values) == 1:
            yield
            return
        step = self.mesh.step
        step.weight_copies = self.weight_copies.setdefault(action.stage, {})
        try:
            yield
        finally:
            step.weight_copies = None
            self._end_weight_copies(action)

    def _end_weight_copies(self, action: Action) -> None:
        if action == self.last_forward[action.stage]:
            self.weight_copies.pop(action.stage, None)

    def backward(self, action: Action) -> None:
        """Run a whole backward (B). Some schedules run its halves: `backward_inputs`, then `backward_weights`."""
        key = (action.stage, action.microbatch)
        kept = self.kept.pop(key)
        self._start_buckets(action)
        grads = self._run_backward_graph(kept, key)
        self._run_weights_graph(kept, key)
        self._buckets.pause()
        self._deliver_grads(action, grads)

    def backward_inputs(self, action: Action) -> None:
        """Run the half of a backward that computes gradients of received values (I)."""
        key = (action.stage, action.microbatch)
        self._deliver_grads(action, self._run_backward_graph(self.kept[key], key))

    def backward_weights(self, action: Action) -> None:
        """Run the half of a backward that computes gradients of parameters (W)."""
        key = (action.stage, action.microbatch)
        self._start_buckets(action)
        self._run_weights_graph(self.kept.pop(key), key)
        self._buckets.pause()

    @property
    def _buckets(self) -> Buckets:
        assert self.training is not None, "forward alone has no backward"
        return self.training.buckets

    def _start_buckets(self, action: Action) -> None:
        first, last = action == self.first_backward, action == self.last_backward[action.stage]
        self._buckets.start(stage=action.stage, first=first, last=last)

    def _run_backward_graph(self, kept: _Kept, key: tuple[int, int]) -> dict[str, Tensor | None]:
        """Run a backward graph. Returns the gradients of values that the stage received."""
        self._add_first_grads(kept, key)
        return self._stage(*key).joint.backward(kept.values, self.values[key[1]], self._buckets.launch)

    def _run_weights_graph(self, kept: _Kept, key: tuple[int, int]) -> None:
        """Run the second half of a backward graph that has two."""
        if (weights := self._stage(*key).joint.weights) is not None:
            weights(kept.values, self.values[key[1]], self._buckets.launch)

    def _add_first_grads(self, kept: _Kept, key: tuple[int, int]) -> None:
        """Add the gradients that a backward begins with: of values that the stage sent, and of the loss."""
        assert self.training is not None
        self._wait_for_receives(*key, "backward")
        loss_grad = None if kept.loss is None else self.training.scale(torch.ones_like(kept.loss))
        kept.values |= self._stage(*key).joint.named_grads(self.grads.pop(key, {}), loss_grad)

    def _pair(self, forward: Action, backward: Action) -> None:
        """Run a forward and a backward as one graph. The backward's half sees its own microbatch as the current one."""
        context = self._set_microbatch(backward)
        self._set_microbatch(forward)
        inputs = self._forward_inputs(forward)
        key = (backward.stage, backward.microbatch)
        kept = self.kept.pop(key)
        self._add_first_grads(kept, key)
        self._start_buckets(backward)
        pair = self.interpreter.pairs["FB", forward.stage, backward.stage]
        with self._weight_copies(forward):
            (returned, forward_kept), grads = pair.run(
                self.mesh, context, inputs, kept.values, self.values[key[1]], self._buckets.launch
            )
        self._store_results(forward, returned, forward_kept)
        self._buckets.pause()
        self._deliver_grads(backward, grads)

    def _forwards(self, first: Action, then: Action) -> None:
        """Run two forwards as one graph. The second half sees its own microbatch as the current one."""
        context = self._set_microbatch(then)
        self._set_microbatch(first)
        inputs, values = self._forward_inputs(first), self._forward_inputs(then)
        pair = self.interpreter.pairs["FF", first.stage, then.stage]
        copies = self.weight_copies.setdefault(then.stage, {})
        with self._weight_copies(first):
            (one, kept), (other, other_kept) = pair.run_forwards(self.mesh, context, inputs, values, copies)
        self._end_weight_copies(then)
        self._store_results(first, one, kept)
        self._store_results(then, other, other_kept)

    def _deliver_grads(self, action: Action, grads: Mapping[str, Tensor | None]) -> None:
        """Deliver gradients of received values: at once to stages of this rank; the rest waits to be sent."""
        s, m = action.stage, action.microbatch
        for edge in self.interpreter.of(m).edges.values():
            if edge.target == s:
                edge_grads = {}
                for name, value in edge.differentiable():
                    grad = grads.get(name)
                    edge_grads[name] = grad if grad is not None else self.interpreter.of(m).empty(value).zero_()
                self._deliver(edge, m, edge_grads, "backward")

    def reduce(self, action: Action) -> None:
        """Start the sums that wait for gradients which will not come, after a stage's last backward (REDUCE)."""
        if self.training is not None:
            self.training.buckets.start_incomplete()

    # --- between stages

    def _deliver(self, edge: Edge, microbatch: int, values: dict[str, Tensor], way: Way) -> None:
        """Pass values to a stage of this rank at once, or put them into the outbox until they are sent.

        They are contiguous in both cases, so that results do not depend on where stages are.
        """
        values = {n: x.contiguous() for n, x in values.items()}
        if (edge.target if way == "forward" else edge.source) in self.interpreter.stages:
            self._store(edge, microbatch, values, way)
        else:
            self.outbox[edge.source, edge.target, microbatch, way] = list(values.values())

    def _store(self, edge: Edge, microbatch: int, values: dict[str, Tensor], way: Way) -> None:
        """Store values that arrived at a stage here; gradients of a value that several stages use add up."""
        if way == "forward":
            self.inbox.setdefault((edge.target, microbatch), {}).update(values)
        else:
            grads = self.grads.setdefault((edge.source, microbatch), {})
            for name, g in values.items():
                grads[name] = grads[name] + g if name in grads else g

    def _edge_of(self, action: Action) -> tuple[Edge, Way]:
        """Return the edge over which an action sends or receives, and the direction."""
        stage, peer = action.stage, action.peer
        source, target = (stage, peer) if action.kind in ("SEND_F", "RECV_B") else (peer, stage)
        edges = self.interpreter.of(action.microbatch).edges
        return edges[source, target], "forward" if action.kind in ("SEND_F", "RECV_F") else "backward"

    def post(self, action: Action) -> None:
        """Begin to receive (RECV_F, RECV_B)."""
        edge, way = self._edge_of(action)
        received = zip(edge.names, edge.values, strict=True) if way == "forward" else edge.differentiable()
        into = {n: self.interpreter.of(action.microbatch).empty(v) for n, v in received}
        peer = self.interpreter.schedule.placement[action.peer]
        works = [self.mesh.start_receive(x, self.interpreter.pipeline_axis, peer, tag=n) for n, x in into.items()]
        self.posted.setdefault((action.stage, action.microbatch, way), []).append((edge, into, works))

    def _wait_for_receives(self, stage: int, microbatch: int, way: Way) -> None:
        """Wait for the values that an action receives."""
        for edge, into, works in self.posted.pop((stage, microbatch, way), ()):
            for work in works:
                work.wait()
            self._store(edge, microbatch, into, way)

    def send(self, action: Action) -> None:
        """Begin to send, and wait for an older send if IN_FLIGHT others run (SEND_F, SEND_B)."""
        edge, way = self._edge_of(action)
        names = edge.names if way == "forward" else tuple(n for n, _ in edge.differentiable())
        to = self.interpreter.schedule.placement[action.peer]
        values = self.outbox.pop((edge.source, edge.target, action.microbatch, way))
        works = [
            self.mesh.start_send(x, self.interpreter.pipeline_axis, to, direction=way, tag=n)
            for n, x in zip(names, values, strict=True)
        ]
        self.sending.append(works)
        # no deadlock: schedules are proven to end even if every send blocks until its receive
        if len(self.sending) > IN_FLIGHT:
            for work in self.sending.popleft():
                work.wait()
