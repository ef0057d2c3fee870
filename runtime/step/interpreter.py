"""Runs the actions of one rank: a loop over a list (shardc.runtime.schedule), and what each kind of action does.

A stage is a function of its rank's parameters, buffers and inputs and of values of other stages; autograd is cut at
those. For a stage s and a microbatch m, forward keeps what the stage received (leaves) and what it made for others
(outputs); backward starts from the gradients of the outputs, and leaves those of the leaves, to be sent back:

    0F0          stage 0 runs; its output h is kept, and a detached copy waits in the outbox
    0SEND_F0>1   h leaves                             1RECV_F0<0    a receive is posted on the other rank
                                                      1F0           waits for it: h is a leaf of stage 1
                                                      1B0           from the loss; h.grad waits in the outbox
    0RECV_B0<1   its receive                          1SEND_B0>0    h.grad leaves
    0B0          backward of stage 0 from (h, its gradient)

A program of one stage is the same loop over `F0 B0 F1 B1 ...`. A receive is posted at its place in the list and waited
for by the action that uses it; a send is waited for, and what it sent freed, when IN_FLIGHT others have begun after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph
from shardc.ir.outputs import loss_axes, loss_value
from shardc.ir.pairs import Pair
from shardc.ir.program import Edge, Program, Stage, Value
from shardc.runtime import ops, schedule
from shardc.runtime.compiled import Compiler
from shardc.runtime.mesh import Work
from shardc.runtime.ops.local_math import summed, total
from shardc.runtime.ops.overlap import beside, multiplies
from shardc.runtime.schedule import Action, computed
from shardc.runtime.step import op_errors, outputs
from shardc.runtime.step.activation_offload import OffloadedTensors
from shardc.runtime.step.lowered import LoweredPair, LoweredStage
from shardc.runtime.step.profiler_ranges import with_ranges
from shardc.runtime.step.recompute import with_regions
from shardc.runtime.step.split_backward import SplitBackward, split_stage

#: Sends that a rank has under way, each of all values of one edge. More would keep more activations alive.
IN_FLIGHT = 2
# fx writes a graph's code with notes on its nodes, and a node that gets one is not found for a moment
# (fx.Node.__setattr__): ranks that are threads of one process, and share a program, must not look at its graphs
# meanwhile
_WRITING = threading.RLock()


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
    with _WRITING:
        return with_regions(graph, program, offloaded)


@dataclass
class _Kept:
    """Of one run of a stage, until its backward: what it received, and where backward begins. lowered: what its
    backward wants, where that is a text of its own.
    """

    leaves: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)  # name -> where its gradient goes in
    loss: Tensor | None = None
    split: SplitBackward | None = None
    lowered: dict[str, Any] | None = None


@dataclass(frozen=True)
class StepHooks:
    """What the engine does around forward and backward: see `shardc.runtime.zero.bucket_launch.Buckets`. launch: in a
    lowered backward, whose text asks for it; scaled: the loss that backward begins with.
    """

    saving: Callable[..., Any]
    start: Callable[..., None]
    start_inputs: Callable[..., None]
    pause: Callable[[], None]
    launch: Callable[[], None]
    reduce: Callable[[], None]
    scaled: Callable[[Tensor], Tensor]


Way = Literal["forward", "backward"]
Values = Sequence[Mapping[str, Any]]  # by microbatch: {placeholder: value}, but for what comes from other stages


class Interpreter:
    """The stages that this rank runs. mesh: a runtime mesh. offloaded: where regions with `offload: cpu` keep tensors
    until backward. ranges: every node is a range of torch.profiler's (shardc.runtime.step.profiler_ranges)."""

    #: Pieces of lowered texts run as compiled code.
    compiles = True

    def __init__(
        self,
        program: Program,
        mesh: Any,
        *,
        offloaded: type[OffloadedTensors] = OffloadedTensors,
        ranges: bool = False,
    ) -> None:
        self.program, self.mesh, self.axis = program, mesh, program.axis
        self.schedule = schedule.of(program)
        self.at = mesh.coordinate(self.axis) if self.axis else 0
        self.actions = self.schedule.actions[self.at]
        mine = [s for s, coordinate in enumerate(self.schedule.placement) if coordinate == self.at]
        divided = any(a.kind == "I" for a in self.actions)
        compiler = Compiler(strict=program.spec is not None and program.spec.strict) if self.compiles else None
        copies = offloaded(mesh.device, {})
        with _WRITING:
            self.stages = {
                s: _Runnable(program, s, mesh.device, offloaded, copies, compiler, divided=divided, ranges=ranges)
                for s in mine
            }
            self.pairs = {
                (p.forward, p.backward): _pair(program, p, self.stages, mesh.device, copies, compiler, ranges=ranges)
                for p in program.pairs
                if p.forward in mine and p.backward in mine
            }
            self.edges = {(e.source, e.target): e for e in program.edges}
            self._count = runnable(program.prologue, mesh.device, program) if program.prologue is not None else None
            self._counted = (
                [n.name for n in program.prologue.graph.find_nodes(op="placeholder")]
                if program.prologue is not None
                else []
            )
            summing = [n for s in program.stages for n in s.graph.find_nodes(op="call_function", target=summed)]
            summed_over = [
                n for s in mine for n in program.stages[s].graph.find_nodes(op="call_function", target=total)
            ]
            #: Of totals over ranks too: (axes, tag), by number.
            self._over = {int(n.args[1]): (n.args[2], n.name) for n in summed_over if len(n.args) > 2}
            self._sums = max((int(str(n.args[2])) + 1 for n in summing), default=0)
        self.adding = {b.name for b in program.buffers if b.adds}

    def count(self, values: Values) -> None:
        """Before the step: what all microbatches add up to. First of the batch alone; then of what forward makes, which
        takes a forward of all of them."""
        totals: list[Tensor] = []
        if self._count is not None:
            for i, microbatch in enumerate(values):
                self.mesh.step.set_microbatch(i, len(values))
                sums, _ = self._count(*(microbatch.get(n) for n in self._counted))  # of parameters it looks at none
                totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else list(sums)
        for i in self._over:
            totals[i] = totals[i].contiguous()  # summed in place
        over_ranks = {
            i: self.mesh.start_all_reduce(totals[i], axes, direction="forward", tag=tag)
            for i, (axes, tag) in sorted(self._over.items())
        }
        self.mesh.step.set_microbatch(0, len(values), totals, over_ranks)
        if self._sums:
            sums = self._summed(values)
            none = torch.zeros((), device=self.mesh.device)  # of stages elsewhere
            later = (sums.get(i, none) for i in range(len(totals), self._sums))
            self.mesh.step.set_microbatch(0, len(values), (*totals, *later), over_ranks)

    @torch.no_grad()
    def _summed(self, values: Values) -> dict[int, Tensor]:
        """By number, what `ops.summed` of the stages here takes, added up over microbatches."""
        sums: dict[int, Tensor] = {}
        self.mesh.step.sums = sums
        try:
            self._forward(values, keep_outputs=False)
        finally:
            self.mesh.step.sums = None
        return sums

    def step(self, values: Values, hooks: StepHooks) -> tuple[Tensor, dict[str, Tensor], outputs.Values]:
        """Forward and backward of all microbatches.

        Returns (the global loss, 0-dim, on every rank; {buffer: its new value} of the stages here; {output: value}).
        """
        run = Run(self, values, self.actions, hooks)
        run.go()
        return self._total(run.losses), self._spread(run.news), self._outputs(run.outputs)

    def _outputs(self, parts: outputs.Parts) -> outputs.Values:
        return outputs.combined(self.program, self.mesh, parts)

    def _spread(self, news: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The new values of the buffers that are here, from the ranks whose stages computed them."""
        received, works = {}, []
        for b in self.program.buffers if self.axis else ():
            home, others = self.program.broadcast_of(b)
            if self.at in others:
                received[b.name] = self.empty(b.value)
                works.append(self.mesh.start_receive(received[b.name], self.axis, home, tag=b.name))
            elif b.name in news:
                works += [
                    self.mesh.start_send(news[b.name], self.axis, c, direction="update", tag=b.name) for c in others
                ]
        for work in works:
            work.wait()
        return {**news, **received}

    def empty(self, value: Value) -> Tensor:
        """Room for this rank's part of a value."""
        return torch.empty(value.local_shape(self.program.mesh), dtype=value.dtype, device=self.mesh.device)

    @torch.no_grad()
    def evaluate(self, values: Values) -> tuple[Tensor | None, outputs.Values]:
        """The global loss (None of a forward-only program), and what stands beside it."""
        run = self._forward(values)
        loss = None if self.program.forward_only else self._total(run.losses)
        return loss, self._outputs(run.outputs)

    @torch.no_grad()
    def forward(self, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One microbatch of a forward-only program: the new values of buffers, and outputs, of the stages here."""
        self.count([values])
        run = self._forward([values])
        return run.news, {name: parts[0] for name, parts in run.outputs.items()}

    @contextmanager
    def replaced(self, runs: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
        """Let other functions stand in for the stages here, by number."""
        before = {s: stage.run for s, stage in self.stages.items()}
        try:
            for s, run in runs.items():
                self.stages[s].run = run
            yield
        finally:
            for s, run in before.items():
                self.stages[s].run = run

    def _forward(self, values: Values, *, keep_outputs: bool = True) -> Run:
        """keep_outputs: keep what stands beside the loss."""
        run = Run(self, values, self._forward_actions, None, keep_outputs=keep_outputs)
        run.go()
        return run

    @cached_property
    def _forward_actions(self) -> Sequence[Action]:
        return schedule.forward_only(self.schedule, tuple(self.edges.values())).actions[self.at]

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """The step's loss, of the summands that this rank has."""
        total = sum(losses[1:], losses[0]) if losses else self.zero()
        axes = loss_axes(self.program)
        return self.mesh.all_reduce(total, axes, direction="forward", tag="loss") if axes else total

    def zero(self) -> Tensor:
        """The loss of a rank that does not compute it."""
        value = loss_value(self.program)
        assert value is not None, "a forward-only program has no loss"
        return torch.zeros((), dtype=value.dtype, device=self.mesh.device)


class _Runnable:
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


def _pair(
    program: Program,
    pair: Pair,
    stages: Mapping[int, _Runnable],
    device: torch.device,
    copies: OffloadedTensors,
    compiler: Compiler | None,
    *,
    ranges: bool,
) -> LoweredPair:
    graph = on_device(pair.graph, device) if device.type != "cpu" else pair.graph
    backward = stages[pair.backward].lowered
    assert backward is not None
    return LoweredPair(graph, program.stages[pair.forward], backward, copies, ranges=ranges, compiler=compiler)


#: Kind of action -> the method that does it. (A table in the run itself would tie it into a knot, which is freed much
#: later.)
_DOES = {
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
    "SEND_F": "send",
    "SEND_B": "send",
    "RECV_F": "post",
    "RECV_B": "post",
    "REDUCE": "reduce",
}
_SAYS = {"B": "backward", "I": "backward", "W": "backward", "F": "forward"}


class Run:
    """One step under way."""

    def __init__(
        self,
        interpreter: Interpreter,
        values: Values,
        actions: Sequence[Action],
        hooks: StepHooks | None,
        *,
        keep_outputs: bool = True,
    ) -> None:
        self.on, self.values, self.actions, self.hooks = interpreter, values, actions, hooks
        self.losses: list[Tensor] = []
        self.news: dict[str, Tensor] = {}
        self.outputs: dict[str, dict[int, Tensor]] = {}  # by microbatch
        self._keep_outputs = keep_outputs
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.inbox: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, microbatch) -> values of other stages
        self.grads: dict[tuple[int, int], dict[str, Tensor]] = {}  # (stage, microbatch) -> gradients of what it made
        self.posted: dict[
            tuple[int, int, Way], list[tuple[Edge, dict[str, Tensor], list[Work]]]
        ] = {}  # (stage, microbatch, way)
        self.outbox: dict[tuple[int, int, int, Way], list[Tensor]] = {}
        self.sending: deque[list[Work]] = deque()
        wanted = [a for a in computed(actions) if a.kind in ("B", "W")]
        self.first = wanted[0] if wanted else None
        self.last = {a.stage: a for a in wanted}
        self.last_forward = {a.stage: a for a in computed(actions) if a.kind == "F"}
        self.weight_copies: dict[int, dict[str, Tensor]] = {}  # by stage

    def go(self) -> None:
        for action in self.actions:
            self.do(action)
        for works in self.sending:
            for work in works:
                work.wait()
        self._act("")

    def do(self, action: Action) -> None:
        """One action. STEP is the engine's."""
        doing = f"at {action} of the schedule" + (
            f": stage {action.stage}, microbatch {action.microbatch}" if action.microbatch >= 0 else ""
        )
        self._act(doing)
        try:
            if action.kind == "FB" and self.hooks is not None and (action.stage, action.back[0]) in self.on.pairs:
                self._pair(*action.parts)
            else:
                for part in action.parts:
                    self._do(part)
        except ShardcError:
            raise
        except Exception as e:
            if op_errors.no_memory(e):
                raise op_errors.out_of_memory(e, _SAYS.get(action.kind, "a step")) from e
            if self.on.axis and hasattr(e, "add_note"):  # Python 3.11
                e.add_note(doing)
            raise

    def _set_microbatch(self, action: Action) -> None:
        step = self.on.mesh.step
        step.set_microbatch(action.microbatch, len(self.values), step.running.totals, step.running.sums)

    def _do(self, action: Action) -> None:
        if action.kind in ("F", "B", "I", "W"):
            self._set_microbatch(action)
        if action.kind != "STEP":
            getattr(self, _DOES[action.kind])(action)

    def _act(self, doing: str) -> None:
        if self.on.axis:
            self.on.mesh.activity.act(doing)

    # --- computing

    def forward(self, action: Action) -> None:
        stage = self.on.stages[action.stage]
        lowered = stage.lowered if self.hooks is not None else None
        leaves, given = self._given(action)
        args = [given[n] for n in stage.takes]
        wanted: dict[str, Any] | None = None
        with self._around_forward(action):
            if lowered is not None:
                returned, wanted = lowered.forward(self.on.mesh, *args)
            else:
                with op_errors.named(stage.graph):
                    returned = stage.run(*args)
        self._forwarded(action, leaves, returned, wanted)

    def _given(self, action: Action) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """({what a stage received for a forward}, {all that it takes})."""
        stage, key = self.on.stages[action.stage], (action.stage, action.microbatch)
        self._received(*key, "forward")
        under_autograd = self.hooks is not None and stage.lowered is None
        leaves = {}
        for name, x in self.inbox.pop(key, {}).items():
            leaves[name] = x.detach().requires_grad_(under_autograd and stage.receives[name].requires_grad)
        values = self.values[action.microbatch]
        return leaves, {n: leaves[n] if n in leaves else values[n] for n in stage.takes}

    @contextmanager
    def _around_forward(self, action: Action) -> Iterator[None]:
        saving = self.hooks.saving((action.stage, action.microbatch)) if self.hooks is not None else nullcontext()
        with saving, self._weight_copies(action):
            yield

    def _forwarded(
        self, action: Action, leaves: dict[str, Tensor], returned: Any, wanted: dict[str, Any] | None
    ) -> None:
        """A forward has run. wanted: by its backward, of a lowered stage."""
        s, m = action.stage, action.microbatch
        stage, key = self.on.stages[s], (s, m)
        training = self.hooks is not None
        lowered = stage.lowered if training else None
        loss, news, sent, *rest = returned if stage.piped or lowered else (*returned[:2], (), *returned[2:])
        if self._keep_outputs:
            for name, x in zip(stage.outputs, news[len(stage.updates) :], strict=True):
                self.outputs.setdefault(name, {})[m] = x.detach().clone() if name in stage.copied else x.detach()
        for name, new in zip(stage.updates, news, strict=False):
            self.news[name] = (
                self.news[name] + new.detach() if name in self.news and name in self.on.adding else new.detach()
            )
        if loss is not None:
            self.losses.append(loss.detach())
        out = dict(zip(stage.sends, sent, strict=True))
        if training:
            edges = {n: torch.autograd.graph.get_gradient_edge(x) for n, x in out.items() if x.requires_grad}
            begin = loss if loss is not None and loss.requires_grad else None
            split = SplitBackward(*rest) if rest and lowered is None else None
            if lowered is not None:  # what it wants of what it received is in `wanted`
                begin, leaves = loss, {}
            self.kept[key] = _Kept(leaves, edges, begin, split, wanted)
        for edge in self.on.edges.values():
            if edge.source == s:
                self._deliver(edge, m, {n: out[n].detach() for n in edge.names}, "forward")

    @contextmanager
    def _weight_copies(self, action: Action) -> Iterator[None]:
        """Around a forward in training: one copy of the stage's cast weights for all microbatches
        (shardc.runtime.ops.cast_once). After the stage's last forward, only those that backward needs are alive.
        """
        if self.hooks is None or len(self.values) == 1:
            yield
            return
        step = self.on.mesh.step
        step.weight_copies = self.weight_copies.setdefault(action.stage, {})
        try:
            yield
        finally:
            step.weight_copies = None
            if action == self.last_forward[action.stage]:
                del self.weight_copies[action.stage]

    def _begin(self, kept: _Kept, key: tuple[int, int]) -> tuple[list[Any], list[Tensor | None]]:
        """Where backward begins, and with which gradients."""
        assert self.hooks is not None
        self._received(*key, "backward")
        grads = self.grads.pop(key, {})
        tensors: list[Any] = [kept.made[n] for n in kept.made if n in grads]
        begin: list[Tensor | None] = [grads[n] for n in kept.made if n in grads]
        if kept.loss is not None:
            tensors.append(self.hooks.scaled(kept.loss))
            begin.append(None)
        return tensors, begin

    def backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        kept = self.kept.pop(key)
        if kept.lowered is not None:
            self._received(*key, "backward")
            self._start(action)
            grads = self._lowered_backward(kept.lowered, kept.loss, key)
            self._lowered_weights(kept.lowered, key)
            self._pause()
            self._give_back(action, grads)
            return
        tensors, begin = self._begin(kept, key)
        self._start(action)
        if tensors:
            torch.autograd.backward(tensors, begin)
        self._pause()
        self._give_back(action, {n: x.grad for n, x in kept.leaves.items()})

    def _lowered_backward(
        self, kept: dict[str, Any], loss: Tensor | None, key: tuple[int, int]
    ) -> dict[str, Tensor | None]:
        """Of a lowered stage: the gradients of what it received. kept: what forward kept for it."""
        lowered = self.on.stages[key[0]].lowered
        assert lowered is not None
        assert self.hooks is not None
        begin, of_loss = self._begin_lowered(loss, key)
        grads = lowered.backward(kept, self.values[key[1]], begin, of_loss, self.hooks.launch)
        return {n: g if g is None else g.contiguous() for n, g in grads.items()}

    def _begin_lowered(self, loss: Tensor | None, key: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients that a lowered backward begins with: of what the stage made for others, and of the loss."""
        assert self.hooks is not None
        one = torch.ones_like(loss) if loss is not None else self.on.zero()
        return self.grads.pop(key, {}), self.hooks.scaled(one)

    def _pair(self, forward: Action, backward: Action) -> None:
        """Both as one text."""
        assert self.hooks is not None
        self._set_microbatch(backward)
        theirs = self.on.mesh.step.running
        self._set_microbatch(forward)
        leaves, given = self._given(forward)
        key = (backward.stage, backward.microbatch)
        kept = self.kept.pop(key)
        lowered = self.on.stages[backward.stage].lowered
        assert kept.lowered is not None
        assert lowered is not None
        self._received(*key, "backward")
        self._start(backward)
        begin = lowered.begin(*self._begin_lowered(kept.loss, key))
        pair = self.on.pairs[forward.stage, backward.stage]
        with self._around_forward(forward):
            (returned, wanted), grads = pair.run(
                self.on.mesh, theirs, given, kept.lowered, self.values[key[1]], begin, self.hooks.launch
            )
        self._forwarded(forward, leaves, returned, wanted)
        self._pause()
        self._give_back(backward, {n: g if g is None else g.contiguous() for n, g in grads.items()})

    def _lowered_weights(self, kept: dict[str, Any], key: tuple[int, int]) -> None:
        """The second half of a backward that has two."""
        lowered = self.on.stages[key[0]].lowered
        if lowered is not None and lowered.weights is not None:
            assert self.hooks is not None
            lowered.weights(kept, self.values[key[1]], self.hooks.launch)

    def inputs(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        kept = self.kept[key]
        assert self.hooks is not None
        if kept.lowered is not None:
            self._received(*key, "backward")
            self.hooks.start_inputs(key, action.stage)
            self._give_back(action, self._lowered_backward(kept.lowered, kept.loss, key))
            return
        tensors, begin = self._begin(kept, key)
        assert kept.split is not None
        leaves = {n: x for n, x in kept.leaves.items() if x.requires_grad}
        self.hooks.start_inputs(key, action.stage)
        grads = kept.split.inputs(tensors, begin, list(leaves.values()))
        self._give_back(action, dict(zip(leaves, grads, strict=True)))
        kept.leaves, kept.made, kept.loss = {}, {}, None

    def weights(self, action: Action) -> None:
        kept = self.kept.pop((action.stage, action.microbatch))
        self._start(action)
        if kept.lowered is not None:
            self._lowered_weights(kept.lowered, (action.stage, action.microbatch))
        else:
            assert kept.split is not None
            kept.split.weights()
        self._pause()

    def _start(self, action: Action) -> None:
        assert self.hooks is not None
        key = (action.stage, action.microbatch)
        self.hooks.start(key, stage=action.stage, first=action == self.first, last=action == self.last[action.stage])

    def _pause(self) -> None:
        assert self.hooks is not None
        self.hooks.pause()

    def _give_back(self, action: Action, grads: Mapping[str, Tensor | None]) -> None:
        """Gradients of what a stage received: to the stages of this rank at once; the rest waits to be sent."""
        s, m = action.stage, action.microbatch
        for edge in self.on.edges.values():
            if edge.target == s:
                theirs = {}
                for name, value in edge.differentiable():
                    grad = grads.get(name)
                    theirs[name] = grad if grad is not None else self.on.empty(value).zero_()
                self._deliver(edge, m, theirs, "backward")

    def reduce(self, action: Action) -> None:
        if self.hooks is not None:
            self.hooks.reduce()

    # --- between stages

    def _deliver(self, edge: Edge, microbatch: int, values: dict[str, Tensor], way: Way) -> None:
        """To a stage of this rank at once; for another one, when its turn to be sent comes."""
        if (edge.target if way == "forward" else edge.source) in self.on.stages:
            self._arrived(edge, microbatch, values, way)
        else:
            self.outbox[edge.source, edge.target, microbatch, way] = list(values.values())

    def _arrived(self, edge: Edge, microbatch: int, values: dict[str, Tensor], way: Way) -> None:
        if way == "forward":
            self.inbox.setdefault((edge.target, microbatch), {}).update(values)
        else:
            mine = self.grads.setdefault((edge.source, microbatch), {})
            for name, g in values.items():
                mine[name] = mine[name] + g if name in mine else g

    def _way(self, action: Action) -> tuple[Edge, Way]:
        """The edge over which an action sends or receives, and in which direction."""
        here, there = action.stage, action.peer
        source, target = (here, there) if action.kind in ("SEND_F", "RECV_B") else (there, here)
        return self.on.edges[source, target], "forward" if action.kind in ("SEND_F", "RECV_F") else "backward"

    def post(self, action: Action) -> None:
        """Begin to receive."""
        edge, way = self._way(action)
        into = {
            n: self.on.empty(v)
            for n, v in (zip(edge.names, edge.values, strict=True) if way == "forward" else edge.differentiable())
        }
        peer = self.on.schedule.placement[action.peer]
        works = [self.on.mesh.start_receive(x, self.on.axis, peer, tag=n) for n, x in into.items()]
        self.posted.setdefault((action.stage, action.microbatch, way), []).append((edge, into, works))

    def _received(self, stage: int, microbatch: int, way: Way) -> None:
        """Wait for what is on its way to an action."""
        for edge, into, works in self.posted.pop((stage, microbatch, way), ()):
            for work in works:
                work.wait()
            self._arrived(edge, microbatch, into, way)

    def send(self, action: Action) -> None:
        edge, way = self._way(action)
        names = edge.names if way == "forward" else tuple(n for n, _ in edge.differentiable())
        to = self.on.schedule.placement[action.peer]
        values = self.outbox.pop((edge.source, edge.target, action.microbatch, way))
        works = [
            self.on.mesh.start_send(x, self.on.axis, to, direction=way, tag=n)
            for n, x in zip(names, values, strict=True)
        ]
        self.sending.append(works)
        if (
            len(self.sending) > IN_FLIGHT
        ):  # schedules are proven to end even if every send waited for its receive at once
            for work in self.sending.popleft():
                work.wait()
