"""What a module of a program holds beside parameters and buffers, and how its backward begins and ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.autograd import Function

from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.mesh import TorchMesh, agreement
from shardc.runtime.reshard.between import End
from shardc.runtime.rng import Rng
from shardc.runtime.step import (
    evaluating,
    parameter_parts,
    state_dict_marks,
    tensor_parts,
    user_changes,
    whole_backward,
)
from shardc.runtime.step.clip_grad_norm import GradNorm, norm_axes
from shardc.runtime.step.communicators import groups_of
from shardc.runtime.step.given_model import GivenModel
from shardc.runtime.step.loop_watch import LoopWatch
from shardc.runtime.step.optimizer_watch import OptimizerWatch
from shardc.runtime.step.parameter_updates import Updates
from shardc.runtime.step.runnable import runnable
from shardc.runtime.zero.bucket_launch import Buckets
from shardc.torch_private import after_backward


class Start(Function):
    """Identity on the loss, whose backward is the first thing that runs: it opens the buckets, and closes them when all
    is done.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        buckets: Buckets,
        finish: Callable[[], None],
        note: Callable[[Tensor], None],
        *beside: nn.Parameter,
    ) -> Tensor:
        ctx.buckets, ctx.finish, ctx.note, ctx.beside = buckets, finish, note, beside
        return loss.clone()  # a view could not be written to: `loss += penalty`

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        whole_backward.check(ctx.beside, ctx.next_functions[0][0])
        buckets: Buckets = ctx.buckets
        if not buckets.active:  # of two losses in one backward, the first one opens
            buckets.start()
            after_backward(ctx.finish)
        ctx.note(g)
        return g, None, None, None, *(None for _ in ctx.beside)


@dataclass
class Running:
    """What a ShardedModule holds beside parameters and buffers; one attribute, so that no name of the model can clash
    with it.
    """

    program: Program
    model: Any
    mesh: Any
    rng: Rng
    run: fx.GraphModule
    buckets: Buckets
    updates: Updates
    norm: GradNorm
    split: tuple[tuple[nn.Parameter, frozenset[int] | None, str], ...]  # the dims that are, and the name
    summed: tuple[str, ...]  # names of those whose gradient is not whole and final when the graph's backward brings it
    watched: user_changes.Watched
    optimizers: OptimizerWatch
    loop: LoopWatch
    same_rows: agreement.SameRows
    check_every: int
    check: bool
    slices: dict[str, str]
    saves: state.Saves
    given: GivenModel
    end: End | None = None  # made when it is asked for
    unmarked: bool = False  # weights were loaded that do not say of which rank they are
    eval: tuple[Program, fx.GraphModule, dict[str, Tensor]] | None = None
    told: set[str] = field(default_factory=set)  # names, of user_changes.check_attributes, and kinds of `given`

    def evaluating(self, batch: Any) -> tuple[Program, fx.GraphModule, dict[str, Tensor]]:
        """What runs a forward in eval mode, and constants of its own: see shardc.runtime.step.evaluating."""
        if self.eval is None:
            program, constants = self.program, dict[str, Tensor]()
            if not evaluating.switched(program, self.tell):
                shapes = tuple(x.shape for x in program.inputs)
                self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
                program = evaluating.compiled(program, batch, shapes, self.mesh, use="evaluate", tell=self.tell)
                self.mesh.barrier()
                if isinstance(self.mesh, TorchMesh):
                    self.mesh.add_groups(groups_of(program))
                constants = state.constants(program, self.mesh)
            same = program is self.program
            self.eval = program, self.run if same else runnable(program.stages[0], self.mesh.device, program), constants
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
        runnable(program.stages[0], mesh.device, program),
        buckets,
        Updates(buckets),
        GradNorm(program, owned, mesh),
        tuple(parameter_parts.split(program, owned, buckets.runs)),
        tuple(sorted(buckets.names | split)),
        user_changes.Watched(program, owned, buckets.runs, buckets.names | split),
        OptimizerWatch(program, owned, buckets.runs, model, mesh),
        LoopWatch(owned.values(), noting=check),
        agreement.SameRows(),
        check_every,
        check,
        state_dict_marks.slices(program, mesh, buckets.runs),
        state.Saves(mesh),
        GivenModel(model, "this module", mesh.rank, copied=copied),
    )
