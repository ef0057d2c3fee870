"""A step of an engine: cut the batch, forward, backward, reduce, update. Every rank gets the global loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc import torch_modes
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks import parameter_parts, shared_facts, user_changes
from shardc.runtime.checks.stepped_once import SteppedLoss, SteppedOnce
from shardc.runtime.data import inputs
from shardc.runtime.data.loader import Rest
from shardc.runtime.mesh import TorchMesh, agreement, replicas
from shardc.runtime.mesh.agreement import Fact, hashed, stated
from shardc.runtime.stage import not_finite, outputs
from shardc.runtime.stage.clip_grad_norm import GradNorm
from shardc.runtime.stage.communicators import groups_of
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import StepHooks, Values
from shardc.runtime.step import batch_sizes
from shardc.runtime.step.engine_forward import EngineForward
from shardc.runtime.step.engine_state import WRITE_ALIKE
from shardc.runtime.step.expert_load import Load, Loads
from shardc.runtime.step.step_graph import Result, StepGraphs
from shardc.runtime.zero.early_step import OverlappedStep
from shardc.runtime.zero.optimizer_list import lr_rates, rates_text


class EngineStep(EngineForward):
    """The part of `shardc.runtime.step.engine.Engine` that trains: forward and backward, sums, the update."""

    callbacks: list[Callable[[Any, Any], None]]
    clip_norm: float | None
    grad_norm: Tensor | None
    interpreter: Interpreter
    loads: tuple[Load, ...]
    _buffers_before: dict[str, Tensor]
    _graphs: StepGraphs | None
    _loads: Loads | None
    _nonfinite: not_finite.Action
    _norm: GradNorm
    _once: SteppedOnce
    _others: dict[tuple[batch_sizes.Shapes, batch_sizes.Use], tuple[Interpreter, dict[str, Tensor]]]
    _overlapped: OverlappedStep | None
    _runs: Callable[[Program, Any], Interpreter]
    _same_rows: shared_facts.SameRows
    _sends_early: bool
    _skipping: bool
    _sending: bool
    _stepping: bool
    _takes: Any
    _told_replaced: bool
    _unbucketed: list[str]
    _updates: bool
    _waiting: bool
    _wants_norm: bool
    _watched: user_changes.Watched

    def _check_trains(self) -> None:
        raise NotImplementedError

    def _note_schedulers(self) -> None:
        raise NotImplementedError

    def check_schedule(self, steps: int) -> None:
        raise NotImplementedError

    def step(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """One optimizer step on a global batch (local=True: this rank's own part of one). Returns the global loss,
        0-dim, detached; if the loss function names values beside it, (loss, {name: value}), detached.

        Of these, single numbers and what else has no rows are the whole batch's, on every rank: sums and means over all
        of its rows. What has rows, such as logits, is of this rank's rows; gather=True: of all rows, on every rank.
        A batch may have fewer rows than the program was compiled for, such as the last one of an epoch, or another
        length: the first time that such sizes come, every rank compiles for them (shardc.recompile).
        Raises ShardcError for a batch that is not of the compiled names, shapes and dtypes.
        """
        recorded = self._graphs is not None
        self._stepping = not recorded and self._overlapped is not None and self._overlapped.possible()
        self._sending = not recorded and self._sends_early and self._matrices is not None
        try:
            with self.mesh.together(f"step {self.rng.step + 1}"):
                result = self._backward(batch, local=local, gather=gather)
                self._update()
                for callback in self.callbacks:
                    callback(self, result)
        finally:
            self._stepping = self._sending = False
        return result

    def backward(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """The first half of `step`: gradients stand, reduced, in `.params[...].grad`, in place of those of the last
        one: a sum over batches is `batch: {microbatches: n}`. Returns what `step` does. A norm of a gradient of which
        this rank has a part is refused (shardc.runtime.checks.tensor_parts).
        """
        if self._waiting and not self._told_replaced:
            self._told_replaced = True
            self._tell(
                "engine.backward came twice without engine.update between: gradients are replaced, not added up; to"
                " accumulate, write batch: {microbatches: n}"
            )
        result = self._backward(batch, local=local, gather=gather)
        self._waiting = True
        self._mark_gradients()
        return result

    def _mark_gradients(self) -> None:
        """Let gradients that are parts know it."""
        parameter_parts.mark(parameter_parts.split(self.program, self.owned, self.buckets.runs))

    @torch.enable_grad()  # also where the caller has switched it off: a step that trains nothing would not be noticed
    def _backward(self, batch: Any, *, local: bool, gather: bool) -> Any:
        self._check()
        self._once.check()
        self._check_trains()
        self.check_schedule(1)
        self._saves.poll()
        torch_modes.check("engine.step", self.mesh.device.type)
        self._watched.check()
        self._tell_changes()
        inputs.check_no_gradient(batch)
        self.buckets.reset(forward=True)
        self.rng.training = True
        interpreter, values = self._take(batch, local=local, use="as compiled")
        for p in self.owned.values():
            p.grad = None
        if self._matrices is not None:
            self._matrices.forget()
        self.buckets.early = self._reduced if self._sending else None
        self._norm.start()
        scaled = self.scaler.scale if self.scaler is not None else lambda loss: loss
        b = self.buckets
        hooks = StepHooks(b.start, b.pause, b.launch, b.reduce, scaled)
        self.mesh.step.routings = [] if self._loads is not None else None

        def work(values: Values) -> Result:
            interpreter.count(values)
            result = interpreter.step(values, hooks)
            if self._graphs is not None:
                self.buckets.finish()
            return result

        if self._graphs is not None:
            of_the_host = id(interpreter), self.scaler.factor if self.scaler is not None else None
            total, news, beside = self._graphs.step(of_the_host, values, work)
        else:
            total, news, beside = work(values)
        # loss scaling skips by itself, and wants the gradients
        self._skipping = self.scaler is None and not_finite.skips(
            self._nonfinite, total, interpreter, values, step=self.rng.step + 1
        )
        if self._loads is not None:
            self.loads, self.mesh.step.routings = self._loads(self.mesh.step.routings or ()), None
        # copies, before anything is updated: what a buffer gets may be a parameter, or the batch
        news = {
            name: new.clone(memory_format=torch.contiguous_format) for name, new in news.items() if name in self.buffers
        }
        if self._graphs is None:
            self.buckets.finish(self._reduced)
        else:
            for names in self.buckets.of_each:
                self._reduced(names)
        self._reduced(self._unbucketed)
        if self.scaler is not None:
            self.scaler.sync_overflow()
        self._buffers_before = self.buffers
        if not self._skipping:
            self.buffers = {**self.buffers, **news}
        if "params" in self.__dict__:  # somebody looks at them
            self._mark_gradients()
        if type(total) is Tensor:  # what shardc.cost runs is none
            total = total.as_subclass(SteppedLoss)
        return outputs.result(interpreter.program, self.mesh, total, beside, gather=gather)

    def _facts(self) -> list[Fact]:
        """What all ranks share between steps. Stages of a pipeline may have other parameter groups."""
        rates = lr_rates(self.optimizer)
        same, stage = agreement.SAME_OPTIMIZER, (self.program.axis,) if self.program.axis else ()
        return [
            stated("the number of steps done", self.rng.step, fix="load one checkpoint into all ranks"),
            stated("the seed", self.rng.seed, fix="give all ranks one seed"),
            Fact("the learning rate", hashed(rates), stage, fix=same, shown=rates_text(rates)),
            stated("whether parameters were written to", self._written, stage, fix=WRITE_ALIKE),
            stated("which parameters are frozen", self._watched.frozen(), stage, fix=user_changes.FREEZE_ALIKE),
        ]

    def _take(self, batch: Any, *, local: bool, use: batch_sizes.Use) -> tuple[Interpreter, list[dict[str, Any]]]:
        """What runs a batch of this size, and what its stages here take, by microbatch: {placeholder: value}."""
        if isinstance(batch, Rest):
            batch, local = batch.batch, False
        inputs.check_plain(batch)
        inputs.check_keywords(self.program, batch, self._takes)
        batch = batch_sizes.prepared(self.program, self.mesh, batch, local=local)
        if self._checks:
            facts = shared_facts.batch_facts(self.program, batch, local=local)
            call = "a step" if self.rng.training else "evaluating"
            alike = agreement.check(self.mesh, [*facts, *self._facts()], call)
            self._same_rows.look(self.program, batch, facts, alike, self._tell)
        self._gather_written()
        interpreter, constants = self._sized(batch, local=local, use=use)
        program = interpreter.program
        parts = inputs.microbatches(program, inputs.take(program, batch, self.mesh, local=local))
        stored = {"mesh": self.mesh, "rng": self.rng, **self.buckets.given, **self.buffers, **constants}
        return interpreter, [
            {**stored, **dict(zip((x.name for x in program.inputs), given, strict=True))} for given in parts
        ]

    def _gather_written(self) -> None:
        """What somebody wrote to `.params` goes to who keeps a copy: all ranks at ZeRO 1 and 2, owners of matrices."""
        if self.buckets.written:
            self.buckets.publish()
        if self._matrices is not None and self._matrices.written:
            self._matrices.gather()

    @property
    def _written(self) -> bool:
        return self.buckets.written or (self._matrices is not None and self._matrices.written)

    def _sized(self, batch: Any, *, local: bool, use: batch_sizes.Use) -> tuple[Interpreter, dict[str, Tensor]]:
        """What runs a batch, and constants of its own: the engine's program, or one for its sizes or for evaluating,
        made when such a batch comes.
        """
        shapes = batch_sizes.other_shapes(self.program, batch, local=local)
        if (use == "evaluate" and self._evaluates_alike) or (use == "score" and self.program.scores):
            use = "as compiled"
        if use != "score" and (self.program.resize is None or (shapes is None and use == "as compiled")):
            return self.interpreter, {}
        key = shapes or tuple(x.shape for x in self.program.inputs), use
        if key not in self._others:
            self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
            start = time.perf_counter()
            program = batch_sizes.compiled(self.program, batch, key[0], self.mesh, use=use, tell=self._tell)
            self.mesh.barrier()
            if isinstance(self.mesh, TorchMesh):
                self.mesh.add_groups(groups_of(program))
            self._others[key] = self._runs(program, self.mesh), state.constants(program, self.mesh)
            seconds = time.perf_counter() - start
            sizes = batch_sizes.described(self.program, key[0])
            what = "scoring" if use == "score" else sizes or "evaluating"
            self._tell(f"compiled for {what} in {seconds:.1f} s")
        return self._others[key]

    @cached_property
    def _evaluates_alike(self) -> bool:
        """Does the program of a step evaluate as well? What nobody knows is told once."""
        return batch_sizes.switched(self.program, self._tell)

    def _reduced(self, names: Sequence[str]) -> None:
        """Gradients that are summed over ranks, while others still are on their way."""
        if self.scaler is not None:
            self.scaler.unscale(self.owned[n].grad for n in names)
        if self._wants_norm:
            self._norm.add(names)
        if self._sending and self._matrices is not None:
            self._matrices.begin(names)
        if self._stepping and self._overlapped is not None and names and not self._skipping:
            self._whole = False
            with self._once.by_the_engine():
                self._overlapped.step(names)

    def update(self) -> None:
        """The second half of `step`: clip, and step the optimizer. Raises ShardcError without a `backward` before it,
        and on all ranks where some do something else.
        """
        self._check()
        if not self._waiting:
            raise ShardcError(
                "no backward came since the last update: the gradients that stand there are used up",
                where="engine.update",
                fix="engine.backward(batch) and then engine.update(), or engine.step(batch), which does both",
            )
        if self._checks:
            agreement.check(self.mesh, [], "an update")
        self._update()

    def _update(self) -> None:
        self._waiting = False
        if not self._stepping:
            self._check()
        if self._updates:
            if self._wants_norm:
                self.grad_norm = self._norm.total()
                if self.scaler is None and not self._skipping:
                    self._look_at_gradients(self.grad_norm)
            if not self._skipping and (self.scaler is None or not self.scaler.overflow):
                self._whole = False
                if self.clip_norm is not None and self.grad_norm is not None:
                    self._norm.clip(self.clip_norm, self.grad_norm)
                if self.optimizer is not None and not self._stepping:
                    self._step_optimizer(self.optimizer)
                self.buckets.publish()
        updated = not self._whole
        self.buckets.narrow()
        if self.scaler is not None:
            self.scaler.update()
        self.rng.step += 1
        self.loaders.note_step()
        self._whole = True
        if self._schedulers is not None and updated:  # a step that is skipped is none for the schedule either
            try:
                self._schedulers.step()  # the user's, which may fail: the state is that of a step by now
            finally:
                self._note_schedulers()
        if self._check_every and self.rng.step % self._check_every == 0 and not self.program.offload.used:
            self._compare_replicas("a step")

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._matrices is not None:
            self._matrices.take_gradients()
        with self._once.by_the_engine():
            (self._paged or optimizer).step()
        if self._matrices is not None:
            self._matrices.publish()

    def _look_at_gradients(self, norm: Tensor) -> None:
        """Skip or stop where they are not finite; buffers are then as they were before the step, too."""
        new, self.buffers = self.buffers, self._buffers_before
        self._skipping = not_finite.skips_gradient(
            self._nonfinite, norm, self.program, self.owned, self.mesh, step=self.rng.step + 1
        )
        if not self._skipping:
            self.buffers = new

    def _compare_replicas(self, call: str) -> None:
        replicas.check_replicas(
            self.program, self.mesh, self.owned, self.buffers, self.optimizer, step=self.rng.step, call=call
        )

    def _check(self) -> None:
        """After an error in backward the next step is as any other; after one in an update, nobody knows what was
        updated.
        """
        if not self._whole:
            raise ShardcError(
                "an update or a load failed halfway: some parameters may be new, others not, and ranks may differ",
                where="Engine.update",
                fix="load a checkpoint into this engine, or make a new one",
            )
