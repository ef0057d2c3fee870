"""Check a module in a custom loop: its forward checks what was done since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc import torch_modes
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks import shared_facts, state_dict_marks, tensor_parts, user_changes
from shardc.runtime.checks.checks import Checks
from shardc.runtime.checks.loop_watch import LoopWatch
from shardc.runtime.checks.optimizer_watch import OptimizerWatch
from shardc.runtime.checks.stepped_once import ValueBeside
from shardc.runtime.data import inputs
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import SAME_CALLS, SAME_OPTIMIZER, Fact, hashed, stated
from shardc.runtime.stage.clip_grad_norm import norm_axes
from shardc.runtime.zero.optimizer_list import learning_rates, rates_text
from shardc.torch_private import current_backward

_FIX_EVALUATE = (
    "all ranks must run a forward under torch.no_grad(), like every forward: call it outside of `if rank == 0:`; one "
    "rank may print the result"
)


_FIX_ZERO_GRAD = "call optimizer.zero_grad(), or set p.grad to None, on all ranks"


class Updates(Protocol):
    """Whether parameters may have changed since they were last gathered."""

    @property
    def due(self) -> bool: ...

    @property
    def written(self) -> bool: ...


class ModuleChecks(Checks):
    """The checks of a module: see CheckHooks. A module's forward is a step of its loop."""

    def __init__(self, program: Program, mesh: Any, *, copied: bool = False) -> None:
        super().__init__(program, mesh, "a module", copied=copied)
        self._unmarked = False

    def watch_module(self, model: Any, parts: Any, held: Sequence[user_changes.ModuleParam], updates: Updates) -> None:
        """Start watching registered parameters and buffers. model: source of weights; parts: submodules."""
        self._parts, self._held, self._updates = parts, held, updates
        owned, shards = self._model.owned, self._model.buckets.shards
        self._optimizers = OptimizerWatch(self._program, owned, shards, model, self._mesh)
        self._loop = LoopWatch(owned.values(), noting=self.compares)
        self._watch_parts()

    def mode(self, *, training: bool) -> None:
        if training and self._program.eval_mode:
            self._note({"module.train()": user_changes.EVAL_MODE})

    def forward(self, call: str, *, training: bool) -> None:
        tensor_parts.end_plain()  # begun by an optimizer's step that failed
        torch_modes.check(call, self._mesh.device.type, training=False)
        if current_backward() is not None:
            raise ShardcError(
                "forward is run inside of backward, as torch.utils.checkpoint does: its gradients would be lost",
                where=call,
                fix="call the module directly; the spec's `checkpoint:` says what is recomputed",
            )
        self._watched.check()
        if training and torch.is_grad_enabled():
            self._optimizers.check_model(changed=self._updates.written)
        self._parts.check()
        user_changes.check_not_replaced(self._held)
        user_changes.check_submodules(self._parts, self._program.still)
        self._look_at_model(self._parts if training else ())  # the user's own train() sets attributes by the mode

    def batch(self, batch: Any, *, local: bool) -> None:
        if torch.is_grad_enabled():
            inputs.check_no_gradient(batch)
        if not self.compares:
            return
        training = self._model.rng.training
        facts = shared_facts.batch_facts(self._program, batch, local=local)
        calls = [
            stated("the number of steps done", self._model.rng.step, fix=SAME_CALLS),
            stated("whether the module trains", training, fix="call train() or eval() on all ranks"),
            stated("whether parameters changed", self._updates.due, fix="update parameters equally on all ranks"),
            stated("whether weights were loaded", self._unmarked, fix="load the same weights on all ranks"),
            stated("which parameters have a gradient", self._with_gradients(), fix=_FIX_ZERO_GRAD),
            stated("which parameters are frozen", self._watched.frozen(), fix=user_changes.FIX_FREEZE),
            stated("whether gradients are on", torch.is_grad_enabled(), fix=_FIX_EVALUATE),
        ]
        equal_facts = self._compare("forward", [*facts, *calls, *self._loop.facts()])
        if self._unmarked:
            self._check_loaded()
        self._same_rows.look(self._program, batch, facts, equal_facts, self._mesh.note)
        step = self._model.rng.step
        if training and self._check_every and step and step % self._check_every == 0:
            self._compare_copies("a step", None)

    def _with_gradients(self) -> str:
        owned = self._model.owned
        return f"{sum(p.grad is not None for p in owned.values())} of {len(owned)}"

    def returned(self, result: Any) -> Any:
        if not (isinstance(result, tuple) and torch.is_grad_enabled()):
            return result
        loss, named = result
        return loss, {n: x.as_subclass(ValueBeside) if type(x) is Tensor else x for n, x in named.items()}

    def _compare(self, call: str, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Compare facts, and parameters of no module after a step, over ranks; return the equal facts."""
        after_step = self._loop.others
        equal_facts = agreement.check(self._mesh, facts, call)
        if after_step:
            self._loop.check_others(self._mesh)
        return equal_facts

    def _check_loaded(self) -> None:
        """Check loaded weights whose slices are not marked. Collective."""
        axes = {p.name: norm_axes(self._program, p.name) for p in self._program.params}
        params = [(axes[n], p.detach()) for n, p in self._model.owned.items() if axes[n]]
        facts = state_dict_marks.loaded_facts(params, self._mesh.rank)
        state_dict_marks.check_loaded(facts, agreement.check(self._mesh, facts, "forward"))
        self._unmarked = False

    def loss_gradient(self, gradient: Tensor) -> None:
        self._loop.note_gradient(gradient)

    def gradients(self, *, user_reads: bool = False) -> None:
        self._mark_gradients()

    def owners_step(self, optimizer: Optimizer, *, written: bool) -> None:
        if self.compares:
            rates = learning_rates(optimizer)
            facts = [
                Fact("the learning rate", hashed(rates), fix=SAME_OPTIMIZER, shown=rates_text(rates)),
                stated("whether parameters were written to", written, fix="write to parameters equally on all ranks"),
            ]
            agreement.check(self._mesh, facts, "the optimizer's step")

    def call(self, name: str, *facts: Fact, steps: bool = False) -> None:
        if steps and self.compares:  # no forward may follow that compares the loop's last step
            self._compare(name, [*facts, *self._loop.facts(last=True)])
        else:
            super().call(name, *facts)

    def saving(self, optimizer: Optimizer | None) -> None:
        self.call("saving", stated("the number of steps done", self._model.rng.step, fix=SAME_CALLS), steps=True)
        if self._check_every:
            self._compare_copies("saving", optimizer)

    def loaded_unmarked(self) -> None:
        self._unmarked = True

    def copy(self, model: Any) -> ModuleChecks:
        copied = ModuleChecks(self._program, self._mesh, copied=True)
        copied._check_every = self._check_every
        copied.follow_model(model)
        return copied
