"""Run the stages of one rank: a step, a forward, an evaluation (shardc.runtime.stage.run)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.collector import uncollected
from shardc.ir.metadata import Value
from shardc.ir.outputs import loss_axes, loss_value
from shardc.ir.program import Program
from shardc.runtime import schedule
from shardc.runtime.compiled import Compiler
from shardc.runtime.mesh.step_context import changed
from shardc.runtime.ops.local_math import summed, total
from shardc.runtime.schedule import Action
from shardc.runtime.stage import outputs
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.bindings import bound
from shardc.runtime.stage.joint_stage import Tools
from shardc.runtime.stage.mixed_sizes import MixedSum
from shardc.runtime.stage.profiler_ranges import MakeFunction
from shardc.runtime.stage.run import Run, Training, Values
from shardc.runtime.stage.runnable import WRITING, RunnableStage, runnable, runnable_pair


class Interpreter:
    """Runs the stages of this rank. mesh: a runtime mesh.

    offloaded: class that keeps activations on the host for `offload: cpu`. make: makes functions of its graphs.
    """

    #: Whether fused regions of a step's graphs run as compiled code.
    compiles = True

    def __init__(
        self,
        program: Program,
        mesh: Any,
        *,
        offloaded: type[OffloadedTensors] = OffloadedTensors,
        make: MakeFunction = bound,
    ) -> None:
        self.program, self.mesh, self.pipeline_axis = program, mesh, program.axis
        self.schedule = schedule.of(program)
        self.at = mesh.coordinate(self.pipeline_axis) if self.pipeline_axis else 0
        self.actions = self.schedule.actions[self.at]
        stages = [s for s, coordinate in enumerate(self.schedule.placement) if coordinate == self.at]
        compiler = Compiler(strict=program.spec.strict) if self.compiles else None
        tools = Tools(mesh.device, offloaded(mesh.device), compiler, make)
        with WRITING, uncollected():
            self.stages = {s: RunnableStage(program, s, tools) for s in stages}
            self.pairs = {
                p.key: runnable_pair(program, p, self.stages, tools)
                for p in program.pairs
                if p.first in stages and p.then in stages
            }
            self.edges = {(e.source, e.target): e for e in program.edges}
            prologue = program.prologue
            self._prologue = runnable(prologue, mesh.device, program) if prologue is not None else None
            takes = prologue.graph.find_nodes(op="placeholder") if prologue is not None else []
            self._prologue_inputs = [n.name for n in takes]
            returned: Any = prologue.graph.output_node().args[0] if prologue is not None else ((),)
            self._prologue_layouts = [n.meta["value"].layout for n in returned[0]]
            graphs = [program.stages[s].graph for s in stages]
            calls_here: list[Any] = [n for g in graphs for n in g.find_nodes(op="call_function", target=total)]
            #: Totals of the prologue that are read here: {number: (axes over which they are summed too, tag)}.
            self._read_totals = {int(n.args[1]): (n.args[2] if len(n.args) > 2 else (), n.name) for n in calls_here}
            calls = [n for s in program.stages for n in s.graph.find_nodes(op="call_function", target=summed)]
            #: How many totals there are, if forward computes some of them (`ops.summed`); else 0.
            self._total_count = max((int(str(n.args[2])) + 1 for n in calls), default=0)
        self.added_buffers = {b.name for b in program.buffers if b.adds}  # new values add up over microbatches
        self._each: tuple[Interpreter, ...] = ()
        #: With sizes of their own: what each takes of the totals, and the sums of the prologue's values and of losses.
        self.totals_of: list[tuple[Tensor, ...]] = []
        self._sums: list[MixedSum] = []
        self._loss_sum: MixedSum | None = None

    def of(self, microbatch: int) -> Interpreter:
        """Return the interpreter that runs a microbatch: itself, unless microbatches have lengths of their own."""
        return self._each[microbatch] if self._each else self

    def with_each(self, each: Sequence[Interpreter], every: Sequence[Interpreter]) -> Interpreter:
        """Return this interpreter with one for each microbatch, of the same model for other sizes.

        There may be fewer microbatches than compiled: the schedule leaves out the others. every: those of all ranks.
        """
        other, among = copy.copy(self), dict.fromkeys((self, *every))
        other._each = tuple(each)
        other._sums = [
            MixedSum({one: one._prologue_layouts[k] for one in among}) for k in range(len(self._prologue_layouts))
        ]
        if (loss := loss_value(self.program)) is not None:
            other._loss_sum = MixedSum({one: (loss_value(one.program) or loss).layout for one in among})
            self.mesh.add_groups([s.axes for s in (*other._sums, other._loss_sum)])
        if len(each) < self.program.microbatches:
            other.__dict__.pop("_forward_actions", None)
            other.schedule = schedule.shortened(self.schedule, len(each))
            other.actions = other.schedule.actions[self.at]
        return other

    def loss_summand(self, microbatch: int, loss: Tensor) -> Tensor:
        """Return what this rank adds of a microbatch's loss."""
        return loss if self._loss_sum is None else self._loss_sum.summand(loss, self.of(microbatch))

    def compute_totals(self, values: Values) -> None:
        """Compute the sums over all microbatches that each microbatch needs, before a step (shardc.passes.accumulate).

        The prologue sums values of the batch. Where forward needs sums of its own values, all forwards run once more.
        """
        totals, over_ranks = self._prologue_totals(values), dict[int, Any]()
        for i, (axes, tag) in sorted(self._read_totals.items()):
            if self._each:
                totals[i] = self.mesh.all_reduce(totals[i], self._sums[i].axes, direction="forward", tag=tag)
            elif axes:
                totals[i] = totals[i].contiguous()  # summed in place
                over_ranks[i] = self.mesh.start_all_reduce(totals[i], axes, direction="forward", tag=tag)
        self.totals_of = [
            tuple(
                s.taken(x, one, one._read_totals.get(i, ((),))[0])
                for i, (s, x) in enumerate(zip(self._sums, totals, strict=True))
            )
            for one in self._each
        ]
        self.mesh.step.set_microbatch(0, len(values), totals, over_ranks)
        if self._total_count:
            sums = self._forward_totals(values)
            none = torch.zeros((), device=self.mesh.device)  # for stages of other ranks
            later = tuple(sums.get(i, none) for i in range(len(totals), self._total_count))
            self.mesh.step.set_microbatch(0, len(values), (*totals, *later), over_ranks)
            self.totals_of = [(*given, *later) for given in self.totals_of]

    def _prologue_totals(self, values: Values) -> list[Tensor]:
        """Run the prologue, which uses no parameters, on each microbatch, and add up its results."""
        totals: list[Tensor] = []
        for i, microbatch in enumerate(values if self._prologue is not None else ()):
            one = self.of(i)
            assert one._prologue is not None
            self.mesh.step.set_microbatch(i, len(values))
            sums, _ = one._prologue(*(microbatch.get(n) for n in one._prologue_inputs))
            if self._each:
                sums = [s.summand(x, one) for s, x in zip(self._sums, sums, strict=True)]
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else list(sums)
        return totals

    @torch.no_grad()
    def _forward_totals(self, values: Values) -> dict[int, Tensor]:
        """Return {number: operand of `ops.summed` in the stages here, added up over microbatches}."""
        sums: dict[int, Tensor] = {}
        with changed(self.mesh.step, sums=sums):
            self._forward(values, keep_outputs=False)
        return sums

    def step(self, values: Values, training: Training) -> tuple[Tensor, dict[str, Tensor], outputs.Values]:
        """Run forward and backward of all microbatches.

        Returns (the global loss, 0-dim, on every rank; {buffer: its new value} of the stages here; {output: value}).
        """
        run = Run(self, values, self.actions, training)
        run.run_all()
        return self._total(run.losses), self._share_buffers(run.new_values), self._outputs(run.outputs)

    def _outputs(self, parts: outputs.Parts) -> outputs.Values:
        return outputs.combined(self.program, self.mesh, parts)

    def _share_buffers(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the new values of the buffers here; receive them from the ranks that computed them."""
        received, works, axis = {}, [], self.pipeline_axis
        for b in self.program.buffers if axis else ():
            home, others = self.program.broadcast_of(b)
            if self.at in others:
                received[b.name] = self.empty(b.value)
                works.append(self.mesh.start_receive(received[b.name], axis, home, tag=b.name))
            elif b.name in new:
                works += [self.mesh.start_send(new[b.name], axis, c, direction="update", tag=b.name) for c in others]
        for work in works:
            work.wait()
        return {**new, **received}

    def empty(self, value: Value) -> Tensor:
        """Allocate this rank's part of a value."""
        return torch.empty(value.local_shape(self.program.mesh), dtype=value.dtype, device=self.mesh.device)

    @torch.no_grad()
    def evaluate(self, values: Values) -> tuple[Tensor | None, outputs.Values]:
        """Return the global loss (None for a forward-only program), and the values beside it."""
        run = self._forward(values)
        loss = None if self.program.forward_only else self._total(run.losses)
        return loss, self._outputs(run.outputs)

    @torch.no_grad()
    def forward(self, values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run one microbatch of a forward-only program: (new values of buffers, outputs) of the stages here."""
        self.compute_totals([values])
        run = self._forward([values])
        return run.new_values, {name: parts[0] for name, parts in run.outputs.items()}

    def _forward(self, values: Values, *, keep_outputs: bool = True) -> Run:
        """Run forward of all microbatches. keep_outputs: keep the values beside the loss."""
        run = Run(self, values, self._forward_actions, None, keep_outputs=keep_outputs)
        run.run_all()
        return run

    @cached_property
    def _forward_actions(self) -> Sequence[Action]:
        return schedule.forward_only(self.schedule, tuple(self.edges.values())).actions[self.at]

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the step's loss from this rank's summands."""
        total = sum(losses[1:], losses[0]) if losses else self.zero()
        axes = loss_axes(self.program)
        if self._loss_sum is not None:
            axes = (*self._loss_sum.axes, *([self.pipeline_axis] if self.pipeline_axis else []))
        return self.mesh.all_reduce(total, axes, direction="forward", tag="loss") if axes else total

    def zero(self) -> Tensor:
        """Return the loss of a rank that does not compute it: 0."""
        value = loss_value(self.program)
        assert value is not None, "a forward-only program has no loss"
        return torch.zeros((), dtype=value.dtype, device=self.mesh.device)
