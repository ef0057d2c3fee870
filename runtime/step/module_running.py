"""What a module of a program holds beside parameters and buffers, and how its backward begins and ends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks import parameter_parts, shared_facts, state_dict_marks, tensor_parts, user_changes
from shardc.runtime.checks.given_model import GivenModel
from shardc.runtime.checks.loop_watch import LoopWatch
from shardc.runtime.checks.optimizer_watch import OptimizerWatch
from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.mesh import TorchMesh, agreement
from shardc.runtime.reshard.between import End
from shardc.runtime.rng import Rng
from shardc.runtime.stage.clip_grad_norm import GradNorm, norm_axes
from shardc.runtime.stage.communicators import groups_of
from shardc.runtime.stage.joint_function import JointCall, differentiable
from shardc.runtime.stage.runnable import RunnableStage, only_stage
from shardc.runtime.step import batch_sizes
from shardc.runtime.zero.buckets import Buckets


@dataclass
class Running:
    """What a ShardedModule holds beside parameters and buffers; one attribute, so that no name of the model can clash
    with it.
    """

    program: Program
    model: Any
    mesh: Any
    rng: Rng
    stage: RunnableStage
    buckets: Buckets
    updates: Updates
    norm: GradNorm
    split: tuple[tuple[nn.Parameter, frozenset[int] | None, str], ...]  # the dims that are, and the name
    summed: tuple[str, ...]  # names of those whose gradient is not whole and final when the graph's backward brings it
    watched: user_changes.Watched
    optimizers: OptimizerWatch
    loop: LoopWatch
    same_rows: shared_facts.SameRows
    check_every: int
    check: bool
    slices: dict[str, str]
    saves: state.Saves
    given: GivenModel
    end: End | None = None  # made when it is asked for
    unmarked: bool = False  # weights were loaded that do not say of which rank they are
    eval: tuple[Program, RunnableStage, dict[str, Tensor]] | None = None
    waiting: weakref.WeakSet[JointCall] = field(default_factory=weakref.WeakSet)  # for their backward
    told: set[str] = field(default_factory=set)  # names, of user_changes.check_attributes, and kinds of `given`

    def evaluating(self, batch: Any) -> tuple[Program, RunnableStage, dict[str, Tensor]]:
        """What runs a forward in eval mode, and constants of its own: see shardc.runtime.step.batch_sizes."""
        if self.eval is None:
            program, constants = self.program, dict[str, Tensor]()
            if not batch_sizes.switched(program, self.tell):
                shapes = tuple(x.shape for x in program.inputs)
                self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
                program = batch_sizes.compiled(program, batch, shapes, self.mesh, use="evaluate", tell=self.tell)
                self.mesh.barrier()
                if isinstance(self.mesh, TorchMesh):
                    self.mesh.add_groups(groups_of(program))
                constants = state.constants(program, self.mesh)
            same = program is self.program
            self.eval = program, self.stage if same else only_stage(program, self.mesh), constants
        return self.eval

    def check_loaded(self) -> None:
        """Collective, where ranks have loaded weights of which nothing says whose slices they are."""
        axes = {p.name: norm_axes(self.program, p.name) for p in self.program.params}
        held = [(axes[n], p.detach()) for n, p in self.buckets.owned.items() if axes[n]]
        facts = state_dict_marks.loaded_facts(held, self.mesh.rank)
        state_dict_marks.check_loaded(facts, agreement.check(self.mesh, facts, "forward"))
        self.unmarked = False

    def tell(self, note: str) -> None:
        """A line on the first rank's stderr."""
        if self.mesh.rank == 0:
            print(f"note: {note}", file=sys.stderr, flush=True)

    def differentiable(self, stage: RunnableStage, values: Mapping[str, Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Run a forward whose loss has a backward: (loss, news). values: what the stage takes, by name."""
        buckets = self.buckets
        call = JointCall(stage.joint, values, self)
        loss, news = call.forward()
        unsummed = [buckets.owned[name] for name in buckets.unsummed]
        summed = [p for name in self.summed if (p := buckets.owned[name]).requires_grad]
        result = differentiable(loss, call, *unsummed, *summed)
        if result.requires_grad:
            self.waiting.add(call)
            result.register_hook(self.updates.note)  # type: ignore[no-untyped-call]
        return result, news

    def finish_backward(self) -> None:
        with tensor_parts.plain():
            self.buckets.finish()
            parameter_parts.mark(self.split)


def running_of(
    program: Program,
    model: Any,
    mesh: Any,
    rng: Rng,
    buckets: Buckets,
    check_every: int,
    check: bool,
    *,
    copied: bool = False,
) -> Running:
    """copied: of a copy of another module."""
    owned = buckets.owned
    split = {p.name for p in program.params if norm_axes(program, p.name)}
    return Running(
        program,
        model,
        mesh,
        rng,
        only_stage(program, mesh),
        buckets,
        Updates(buckets),
        GradNorm(program, owned, mesh),
        tuple(parameter_parts.split(program, owned, buckets.runs)),
        tuple(sorted(buckets.names | split)),
        user_changes.Watched(program, owned, buckets.runs, buckets.names | split),
        OptimizerWatch(program, owned, buckets.runs, model, mesh),
        LoopWatch(owned.values(), noting=check),
        shared_facts.SameRows(),
        check_every,
        check,
        state_dict_marks.slices(program, mesh, buckets.runs),
        state.Saves(mesh),
        GivenModel(model, "this module", mesh.rank, copied=copied),
    )


class Updates:
    """Whether parameters may have changed since they were last gathered: by a backward and what follows it, by weights
    that were loaded, or by anybody who writes to them, as what keeps an average of them does.

    Use: `carry_out()` begins to gather, and `settle()` ends it, before anybody else may write: a gather in the
    background writes to the memory of parameters too (ZeRO 1 and 2), whenever its bytes come.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets, self._noted, self._settled = buckets, False, True
        self._versions = self._now()
        #: What owners keep of these parameters: a gather writes them, too, and changes nothing for them.
        self.owners: weakref.WeakSet[WholeMatrices] = weakref.WeakSet()
        self._same: list[WholeMatrices] = []

    @property
    def due(self) -> bool:
        return self._noted or self.written

    @property
    def written(self) -> bool:
        """Has somebody written to parameters? Waits for a gather that is under way, which writes to them too."""
        self.settle()
        return self._versions != self._now()

    def note(self, *_: Any) -> None:
        self._noted = True

    def carry_out(self) -> None:
        if self.due:
            self._same = [m for m in self.owners if not m.written]
            self.buckets.publish()
            self._noted = self._settled = False

    def settle(self) -> None:
        if not self._settled:
            self.buckets.wait_for_gathers()
            self._settled, self._versions = True, self._now()
            for m in self._same:
                m.note()
            self._same = []

    def _now(self) -> int:
        return sum(p._version for p in self.buckets.owned.values())
