"""What trains, evaluates, generates and saves on one rank. A step is here; its parts are

local_model   the rank's part of the model, and what runs a batch on it
update        the optimizer's half of a step
evaluation    forward without training
saver         the state, into files and to other plans
checks        what user code did, and whether ranks agree (shardc.runtime.checks.moments)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.offload import OffloadPlaces
from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks import engine_options, parameter_parts
from shardc.runtime.checks.engine_checks import EngineChecks
from shardc.runtime.checks.moments import Moments
from shardc.runtime.data import inputs
from shardc.runtime.data.loader import Loader, Loaders
from shardc.runtime.generate import Options
from shardc.runtime.mesh import TorchMesh, replicas
from shardc.runtime.mesh.agreement import SAME_CALLS, stated
from shardc.runtime.offload import Offload
from shardc.runtime.reshard import wanted
from shardc.runtime.reshard.between import End, Reshard, move_weights
from shardc.runtime.reshard.places import Plan
from shardc.runtime.rng import Rng
from shardc.runtime.stage import not_finite, outputs
from shardc.runtime.stage.clip_grad_norm import parameter_norms
from shardc.runtime.stage.communicators import runtime_mesh, seen_as
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import StepHooks, Values
from shardc.runtime.state.checkpoint_folder import KEEP
from shardc.runtime.step import engine_optimizer, lr, step_graph
from shardc.runtime.step.engine_optimizer import OptimizerOf, adamw
from shardc.runtime.step.evaluation import Evaluation
from shardc.runtime.step.expert_load import Load, Loads
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.loss_scale import LossScaler
from shardc.runtime.step.saver import Saver
from shardc.runtime.step.update import Update
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.optimizer_list import class_of, lr_rates


class Engine:
    """Trains one rank's part of a model. Made by `program.engine(...)`, in each process of torchrun or thread of
    loopback.

    model: where the weights come from: an nn.Module (not changed), a function that builds it, a state_dict or files;
           see shardc.runtime.state.local_parameters. Each rank makes only its own part; nothing is broadcast.
    weights: files (or a state_dict) whose weights are put into the model, each rank reading its part; what they do not
        have is as the model has it. `.weight_notes` says what came from where.
    optimizer: params -> torch optimizer, or a list of them; None: no update, for evaluation and gradients only. params:
        (name, parameter) pairs, which torch's optimizers take as they are; shardc.groups(params, ...) makes groups of
        them by pattern. Of a list, each parameter is in one.
    scheduler: what `optimizer` returned -> learning-rate scheduler, or a list of them, stepped after every step that
        updates.
    seed: of dropout and of weights that are computed. clip_norm: gradients are scaled down to this global 2-norm.
    routing: note in every step how tokens are spread over experts, in `.loads`: one
    shardc.runtime.step.expert_load.Load a layer.
    check: compare what all ranks share: weights, program and seed here, batch, step and learning rate in each step
        (shardc.runtime.mesh.agreement); a difference is an error on all ranks. False: the user's model,
        optimizer and scheduler are not checked either (docs/reference/not-checked.md).
    check_every: steps between two comparisons of all copies of weights, buffers and optimizer states, which find a bit
        that flipped in one of them (shardc.runtime.mesh.replicas); `save` compares them too. 0: never.
    broadcast: rank 0's weights for all ranks, for models that are not seeded.
    nonfinite: where a loss or a gradient is nan or inf: "ignore", "stop" (raise NotFiniteError before anything is
        updated, naming the op or the parameters) or "skip" (leave out the update). Loss and norm are read on the host
        for it. Loss scaling skips by itself.
    norm: compute the gradient's norm in every step, also where nothing is clipped (it reads all gradients once more).
    callbacks: called after every `step`, with the engine and what the step returns, on every rank: they may log, save
        or evaluate, which all ranks do together. `.callbacks` is the list.
    mesh: a runtime mesh; default: torch.distributed's world (NCCL on CUDA, gloo on the CPU), joined if it is not yet.
    interpreter: makes what runs the program's stages; rng: makes the random state from the seed; offload: makes the
        places that `data.offload` names. shardc.cost, which runs an engine on tensors without data, has others of all
        three.

    .params: this rank's parts by the model's names: of parameters what it updates, that is, at ZeRO >= 1 a flat stretch
    of each, perhaps empty; gradients stand there, after the update in the dtype in which they were summed. .owned, and
    .buffers: by the program's placeholder names.
    .interpreter: what runs the program's stages; .buckets: what holds parameters and sums gradients
    (shardc.runtime.zero.buckets).
    .clip_norm: what gradients are clipped to; `set` changes it.
    .grad_norm: 2-norm of the whole gradient in the last step, before clipping; 0-dim, on every rank; None before the
    first step, and where nothing asks for it (`norm`, `clip_norm`, `nonfinite`).
    .scaler: the loss scaling of `precision.loss_scale`
    (shardc.runtime.step.loss_scale), or None. A step whose gradients are not finite on some rank leaves parameters and
    optimizer as they are, on every rank.

    `step` updates a bucket's parameters as soon as their gradients are summed, while later buckets still are
    (shardc.runtime.zero.early_step), at ZeRO 0 on a CPU, if the optimizer steps each parameter by itself and nothing
    has to be known of all gradients first (clip_norm, nonfinite, loss scaling, offload). Gradients of matrices go to
    their owners while backward runs, if nothing has to be known of all first.

    An error in a step before its update (a wrong batch, a failing op, Ctrl-C) leaves the engine as it was, if all ranks
    meet it: the next step starts afresh. One in the update itself, as in an optimizer of one's own, does not: the
    engine then asks for a checkpoint."""

    def __init__(
        self,
        program: Program,
        model: Any,
        optimizer: OptimizerOf | None = adamw,
        seed: int = 0,
        *,
        weights: Any = None,
        scheduler: lr.SchedulerOf | None = None,
        clip_norm: float | None = None,
        norm: bool = False,
        routing: bool = False,
        check: bool = True,
        check_every: int = replicas.CHECK_EVERY,
        broadcast: bool = False,
        nonfinite: not_finite.Action = "ignore",
        callbacks: Iterable[Callable[[Engine, Any], None]] = (),
        mesh: Any = None,
        interpreter: Callable[[Program, Any], Interpreter] = Interpreter,
        rng: Callable[[int], Rng] = Rng,
        offload: Callable[[OffloadPlaces, Any], Offload] = Offload,
    ) -> None:
        #: What `set` changes.
        settable = {"clip_norm": clip_norm, "norm": norm, "nonfinite": nonfinite, "check_every": check_every}
        engine_options.check(seed=seed, optimizer=optimizer, scheduler=scheduler, **settable)
        self._options: dict[str, Any] = {
            **settable,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "routing": routing,
            "check": check,
            "interpreter": interpreter,
            "rng": rng,
            "offload": offload,
        }
        self.program, self.callbacks = program, list(callbacks)
        self.mesh = mesh if mesh is not None else runtime_mesh(program)
        self.rng, self.loaders = rng(seed), Loaders()
        self._checks = EngineChecks(program, self.mesh) if check else Moments()
        self._checks.making(seed, broadcast=broadcast, routing=routing, **settable)
        model = state.plain(model)
        given = state.weights_of(program, model, weights, seed)
        self.weight_notes = given.notes
        self._checks.weights(model, given)
        parts, buffers = state.local_parts(program, given, self.mesh, broadcast=broadcast, whole_of=self._checks.whole)
        local = LocalModel(
            program,
            self.mesh,
            self.rng,
            self._checks.parts(parts),
            buffers,
            offload(program.offload, self.mesh),
            inputs.arguments(given.model),
            interpreter,
        )
        self._model = local
        self._checks.made(local)
        trains = optimizer is not None and not program.forward_only
        made = self._make_optimizer(local, optimizer) if trains and optimizer is not None else None
        schedules = scheduler if trains else None
        self._updating = Update(local, made, schedules, self._checks, settable, trains=trains)
        self._evaluation = Evaluation(local, self._checks)
        skeleton = state.skeleton(given.model)
        self._saver = Saver(local, self._updating, self.loaders, self._checks, skeleton, given.folder)
        self.loads: tuple[Load, ...] = ()
        self._loads = Loads(program, self.mesh) if routing else None
        self._graphs = step_graph.of(program, self.mesh, self.rng, local.buckets, self.mesh.note)
        self._waiting = self._noted_replaced = False  # gradients of `backward` for `update`
        self._made = True

    def _make_optimizer(self, model: LocalModel, make: OptimizerOf) -> torch.optim.Optimizer | None:
        optimizer, model.matrices = engine_optimizer.made(
            make, self.program, model.buckets, self.mesh, self._check_optimizer, self.mesh.note, model.offload
        )
        return optimizer

    def _check_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, nn.Parameter],
        whole: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raises ShardcError for an optimizer that needs more than what this rank has of the parameters. whole: those
        that get whole matrices.
        """
        engine_optimizer.check_parts(self.program, self.buckets)(optimizer, params, whole)

    # --- a step

    def step(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """One optimizer step on a global batch (local=True: this rank's own part of one). Returns the global loss,
        0-dim, detached; if the loss function names values beside it, (loss, {name: value}), detached.

        Of these, single numbers and what else has no rows are the whole batch's, on every rank: sums and means over all
        of its rows. What has rows, such as logits, is of this rank's rows; gather=True: of all rows, on every rank.
        A batch may have fewer rows than the program was compiled for, such as the last one of an epoch, or another
        length: the first time that such sizes come, every rank compiles for them (shardc.recompile).
        Raises ShardcError for a batch that is not of the compiled names, shapes and dtypes.
        """
        with self.mesh.together(f"step {self.rng.step + 1}"):
            result = self._backward(batch, local=local, gather=gather, early=self._graphs is None)
            self._update()
            for callback in self.callbacks:
                callback(self, result)
        return result

    def backward(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """The first half of `step`: gradients stand, reduced, in `.params[...].grad`, in place of those of the last
        one: a sum over batches is `batch: {microbatches: n}`. Returns what `step` does. A norm of a gradient of which
        this rank has a part is refused (shardc.runtime.checks.tensor_parts).
        """
        if self._waiting and not self._noted_replaced:
            self._noted_replaced = True
            self.mesh.note(
                "engine.backward came twice without engine.update between: gradients are replaced, not added up; to"
                " accumulate, write batch: {microbatches: n}"
            )
        result = self._backward(batch, local=local, gather=gather, early=False)
        self._waiting = True
        self._checks.gradients(handed_out=True)
        return result

    def update(self) -> None:
        """The second half of `step`: clip, and step the optimizer. Raises ShardcError without a `backward` before it,
        and on all ranks where some do something else.
        """
        self._updating.check_whole()
        if not self._waiting:
            raise ShardcError(
                "no backward came since the last update: the gradients that stand there are used up",
                where="engine.update",
                fix="engine.backward(batch) and then engine.update(), or engine.step(batch), which does both",
            )
        self._checks.call("an update")
        self._update()

    @torch.enable_grad()  # also where the caller has switched it off: a step that trains nothing would not be noticed
    def _backward(self, batch: Any, *, local: bool, gather: bool, early: bool) -> Any:
        """Cut the batch, run the graphs, finish the sums of gradients. early: see Update.begin."""
        model, update, checks = self._model, self._updating, self._checks
        update.check_whole()
        self._saver.saves.poll()
        checks.forward("engine.step", training=True)
        model.buckets.reset(forward=True)
        self.rng.training = True
        interpreter, values = model.take(batch, checks, local=local)
        update.begin(early=early)
        loss, buffers, beside = self._run(interpreter, values)
        update.look_at_loss(loss, interpreter, values)
        update.replace_buffers(buffers)
        if self._graphs is None:
            model.buckets.finish(update.reduced)
        else:  # the recorded step has finished them
            for names in model.buckets.of_each:
                update.reduced(names)
        update.all_reduced()
        checks.gradients()
        return outputs.result(interpreter.program, self.mesh, checks.loss(loss), beside, gather=gather)

    def _run(self, interpreter: Interpreter, values: Values) -> step_graph.Result:
        """Forward and backward of all microbatches, by the schedule; with `execution: {graphs: true}` a recorded one.
        Returns (the loss, buffers' new values, what the loss function names beside the loss).
        """
        buckets, scaler = self.buckets, self._updating.scaler
        # gradients come to buckets by `ops.accumulate`; `ops.launch` in the backward graph calls `launch`
        hooks = StepHooks(buckets.start, buckets.pause, buckets.launch, buckets.reduce, self._updating.scale)
        self.mesh.step.routings = [] if self._loads is not None else None

        def work(values: Values) -> step_graph.Result:
            interpreter.count(values)
            return interpreter.step(values, hooks)

        def recorded(values: Values) -> step_graph.Result:
            result = work(values)
            buckets.finish()
            return result

        if self._graphs is None:
            result = work(values)
        else:
            scale = scaler.factor if scaler is not None else None
            result = self._graphs.step((id(interpreter), scale), values, recorded)
        if self._loads is not None:
            self.loads, self.mesh.step.routings = self._loads(self.mesh.step.routings or ()), None
        return result

    def _update(self) -> None:
        """Clip, step the optimizer and the schedules."""
        self._waiting = False
        self._updating.apply()
        self.rng.step += 1  # the count of steps: random numbers are drawn by it
        self.loaders.note_step()
        self._updating.whole = True
        self._updating.step_schedule()
        self._checks.updated()

    # --- forward alone

    def evaluate(self, batch: Any, *, local: bool = False, gather: bool = False) -> Any:
        """What `step` returns, without dropout and with BatchNorm's running statistics; nothing changes.

        Where forward has branches of its own on `self.training`, the model is compiled in eval mode for it, once.
        """
        self._updating.check_whole()
        return self._evaluation.loss(batch, local=local, gather=gather)

    def evaluate_all(self, batches: Iterable[Any], *, local: bool = False) -> dict[str, float]:
        """{"loss": ..., name: ...} over all batches, of what `evaluate` gives: (sum, count) pairs by their sums, whole
        numbers added up; the loss and other means weighed by what they are the mean of, as many tokens as each batch
        counts (shardc.runtime.step.means); other single numbers by the batches' rows, with a note where that
        is the loss. Raises NoBatchesError without any batch.
        """
        self._updating.check_whole()
        return self._evaluation.losses(batches, local=local)

    def score(self, batch: Any, *, local: bool = False, gather: bool = False) -> Tensor:
        """The log-probability that the model gives to each target of its loss's cross entropy, in the form that the
        targets have in the batch (`labels`, [batch, sequence]), in float32 at least; 0 where the loss ignores one.
        Without dropout; nothing changes. This rank's rows; gather=True: all rows, on every rank.

        The first call compiles a forward-only program for it, on the same parameters: logits stay split by their
        classes, and are computed a few rows at a time. Raises ShardcError where the loss has no cross entropy of class
        indices, or several.
        """
        self._updating.check_whole()
        return self._evaluation.score(batch, local=local, gather=gather)

    def score_all(
        self, batches: Iterable[Any], *, local: bool = False, each: Callable[[Tensor], None] | None = None
    ) -> dict[str, float]:
        """Of what `score` gives for all batches: {"tokens": how many targets count, "logprob": their mean
        log-probability, "perplexity": exp(-logprob)}; exact on any mesh. Raises NoBatchesError without any batch.

        each: called on every rank with the scores of all rows of each batch.
        """
        self._updating.check_whole()
        return self._evaluation.scores(batches, local=local, each=each)

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 20,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Iterable[int] | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """The new tokens of each prompt, with the weights as they stand: on every rank, up to and with the first of
        `stop` (None: the end tokens of the model's configuration). Nothing changes. All ranks give the same prompts.

        prompts: lists of token ids, of any lengths; i64[rows, length]; or a tokenizer's dict; of a model with an
        encoder, what that is given (shardc.runtime.generate.prompts). temperature 0: the most likely token each time;
        else drawn, by counters of `seed`, so that every mesh draws the same (shardc.runtime.generate). The first call
        of a length compiles for it. Raises ShardcError for a model that is not causal.
        """
        ends = tuple(stop) if stop is not None else None
        options = Options(max_new_tokens, temperature, top_k, top_p, ends, seed)
        self._updating.check_whole()
        return self._evaluation.generate(prompts, options)

    # --- the state

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = KEEP, overwrite: bool = False) -> None:
        """Write a checkpoint that any mesh can load, `folder/step-N`: parameters, buffers, optimizer, scheduler,
        loaders, step, seed. Collective.

        wait: False copies the state and returns; it is written in the background, at most one at a time, and what goes
            wrong is raised by the next `step` or `save`, on all ranks. `finish_save` waits for it, as `close` does.
        keep: how many checkpoints of the folder stay, the last ones; None: all.
        overwrite: replace those of another run, too: that this engine has neither saved nor loaded.
        Raises shardc.runtime.state.SavingError, on all ranks; what was saved before is then as it was.
        """
        self._saver.save(folder, wait=wait, keep=keep, overwrite=overwrite)

    def finish_save(self) -> None:
        """Wait until a save in the background is on the disk. Collective. Raises what went wrong."""
        self._saver.finish()

    @property
    def saving(self) -> tuple[int, int] | None:
        """(bytes written, bytes to write) by this rank of the save in the background; None without one."""
        return self._saver.saves.progress

    def load(
        self, folder: str | Path, *, last_good: bool = False, new_schedule: bool = False, new_data: bool = False
    ) -> None:
        """Read a checkpoint that any mesh wrote. Collective.

        folder: where checkpoints were saved to: the last one is read; or one of them. last_good: if that one is
            damaged, read the last one that is not.
        new_schedule: learning rates (momenta, betas) are not the checkpoint's: the schedulers are made anew, from what
            `optimizer` made, and stand at the checkpoint's step, as if they had been there from the first.
        new_data: the engine's loaders begin with their first epoch, wherever the checkpoint's stood: for a dataset that
            has grown, or another one.
        The seed and the settings of optimizer and schedulers are then the checkpoint's; what they replace is told.
        """
        self._saver.load(folder, last_good=last_good, new_schedule=new_schedule, new_data=new_data)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """{fqn: whole tensor on the CPU}, as the unsharded model's state_dict gives it, on every rank; rank0_only: on
        the first, and {} on the others, which then keep nothing. Collective.
        """
        return self._saver.full_state_dict(rank0_only=rank0_only)

    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = 5_000_000_000,
        overwrite: bool = False,
        merge: bool = False,
    ) -> list[Path]:
        """Write the weights for others: a folder that transformers (or peft, of a model with adapters) loads, with
        config and tokenizer; of other models safetensors files; of a `.safetensors` path one file. All ranks write, and
        see one file system. Collective.

        merge: the whole model, with the adapters of the spec added to the weights that they are beside.

        dtype: of floating-point tensors; None: as they are held. max_file_bytes: what is more goes into numbered files
        with an index. overwrite: replace weights, too, that shardc did not write, such as those of a pretrained model.
        Returns the folders written. Raises ShardcError, on all ranks, where it cannot be written.
        """
        options = {"dtype": dtype, "max_file_bytes": max_file_bytes, "overwrite": overwrite, "merge": merge}
        return self._saver.export(folder, **options)

    @property
    def weights_end(self) -> End:
        """What has the weights, for `weights_to`."""
        return self._saver

    def weights_to(self, other: Any) -> Reshard:
        """Copy this engine's weights into those of another engine, of a module, or of what runs a forward-only program,
        of the same model on the same ranks: parameters, and buffers that both programs have. Collective.

        Each element goes once to each rank that needs it and does not have it (shardc.runtime.reshard); who sends what
        to whom is found out the first time. Returns that: `.sent` and `.received`, bytes by rank. The other's optimizer
        and step stay as they are. Raises ShardcError for a program of another model, or of other ranks.
        """
        return move_weights(self._saver, other)

    def wholes(self) -> Mapping[str, Tensor]:
        """{placeholder name: this rank's whole local part, detached}. What ZeRO shards is gathered, a bucket at a time,
        when it is read: all ranks read in one order.
        """
        return self._model.wholes()

    def norms(self, *, grad: bool = False) -> dict[str, float]:
        """{name of a parameter: 2-norm of all of it}, on every rank, for a log. Collective. grad: of the gradients of
        the last step or `backward` instead, 0 where none came; after a step they are clipped.
        """
        with self.mesh.together("norms"):
            self._checks.call("norms", stated("grad", grad, where="engine.norms", fix=SAME_CALLS))
            return parameter_norms(self.program, self.owned, self.mesh, grad=grad)

    def close(self) -> None:
        """Wait for a save in the background; remove the files of `data.offload`; leave torch.distributed's world, if
        this engine joined it.
        """
        self._saver.close()

    # --- options, and another plan

    def set(self, **options: Any) -> None:
        """Change options in the middle of a training: `clip_norm`, `norm`, `nonfinite`, `check_every`; the next step
        has them. Between `step`s, or before `backward`. Collective: all ranks set them alike.

        Raises ShardcError, on all ranks, for options that differ; and for others than these, values that mean nothing,
        and gradients that wait for an update.
        """
        with self.mesh.together("setting options"):  # what is refused on one rank ends the others
            engine_options.check_settable(Engine, options)
            changed = {**self._options, **options}
            engine_options.check(
                seed=0, **{n: changed[n] for n in (*engine_options.SETTABLE, "optimizer", "scheduler")}
            )
            self._check_nothing_waits("engine.set")
            same, settable = "set it on all ranks alike", {n: changed[n] for n in engine_options.SETTABLE}
            facts = (stated(n, x, where="engine.set", fix=same) for n, x in settable.items())
            self._checks.call("setting options", *facts)
            self._options = changed
            self._updating.settle(**settable)

    def _check_nothing_waits(self, call: str) -> None:
        if self._waiting:
            fault, fix = "gradients of engine.backward wait for an update", "call engine.update() first"
            raise ShardcError(fault, where=call, fix=fix)

    def to(self, program: Program | str | Path | Mapping[str, Any], **options: Any) -> Engine:
        """An engine of another program of the same model, over the same ranks, that goes on where this one stands: with
        its weights, buffers, optimizer's state, schedules, step, seed and places in the data, as if it had loaded this
        one's checkpoint, but from memory to memory (shardc.runtime.reshard). Collective.

        program: or a spec (path, dict), for which the model is compiled: see Program.to.
        options: of the engine, in the place of this one's: `optimizer`, `clip_norm`, ...; an optimizer of another kind
        is refused. Loaders are made anew, by `loader`, and go on where those of the same name stood. This engine keeps
        its memory as long as somebody holds it: `engine = engine.to(program)`.
        Raises ShardcError for a program of another model, of other ranks, or that runs forward alone (`weights_to`).
        """
        engine_options.check_program(program, "engine.to")
        if not isinstance(program, Program):
            program = self._compiled_for(program)
        if program.forward_only:
            fault, fix = "the program is forward-only: it does not train", "engine.weights_to(program.forward(model))"
            raise ShardcError(fault, where="engine.to", fix=fix)
        self._check_nothing_waits("engine.to")
        engine_options.check_names("engine", Engine, options)
        wanted.check(Plan(self.program), Plan(program), all_buffers=True)
        options = {**self._options, "callbacks": self.callbacks, **options}
        other = Engine(program, state.blank(program), seed=self.rng.seed, mesh=seen_as(self.mesh, program), **options)
        self._saver.move_to(other._saver)
        if isinstance(self.mesh, TorchMesh):
            self.mesh.hand_over(other.mesh)
        return other

    def _compiled_for(self, spec: Any) -> Program:
        """The program for another spec. Collective. Raises ShardcError, on all ranks, where one cannot compile it."""
        self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
        made, error = self.program, None
        try:
            made = self.program.for_spec(spec, self.mesh.layout.world)
        except ShardcError as e:
            error = e
        if self.mesh.sum_on_host([error is not None])[0]:
            raise error or ShardcError("another rank could not compile the program for it", where="engine.to")
        return made

    # --- data

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """An iterable of epochs of this rank's parts of global batches, for `step(part, local=True)`; `save` and `load`
        know where it stands.

        dataset: map-style (__getitem__, __len__), or iterable: then every rank reads the whole stream and keeps its own
            samples, and
                 num_workers is at most 1.
        batch_size: samples in a global batch; what the program was compiled for, and need not be given.
        shuffle: an order fixed by (seed, epoch), the same on every mesh; default for map-style datasets. seed: 0.
        drop_last: True: samples that fill no batch are left out of that epoch's order. False: they come as the epoch's
            last batch, smaller,
                 to every rank whole (shardc.recompile); refused for streams, and for a program read from an artifact.
        collate_fn: samples -> batch as the program was compiled for, but of this rank's samples only; default: torch's.
        name: "train"; under which checkpoints keep it; None: they do not. num_workers, pin_memory, ...: as of torch's
        DataLoader. What dataset and collate_fn draw from `random`, numpy and torch is the same on ranks that read the
        same samples. Raises ShardcError for a batch size that was not compiled, and for datasets shorter than a batch.
        """
        loader = self.loaders.add(Loader(self.program, self.mesh, dataset, batch_size=batch_size, **options))
        self._checks.loader(loader)
        return loader

    def local(self, batch: Any) -> Any:
        """This rank's part of a global batch, for `step(part, local=True)`. See shardc.ir.program.Program.local."""
        return inputs.local(self.program, batch, self.mesh.rank)

    @property
    def part(self) -> tuple[int, int]:
        """(the number of this rank's part of a global batch, how many there are): for data of one's own that reads only
        this rank's rows, and gives them to `step(rows, local=True)`. Ranks of one number need the same rows."""
        return inputs.part_of(self.program, self.mesh.rank)

    # --- what it has

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """See above. Checks of parameters that are parts begin when somebody reads them."""
        self._checks.read_params()
        return parameter_parts.ByName(self.program, self.owned)

    @property
    def buckets(self) -> Buckets:
        """See above."""
        return self._model.buckets

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """See above."""
        return self._model.owned

    @property
    def buffers(self) -> dict[str, Tensor]:
        """{placeholder name: buffer}"""
        return self._model.buffers

    @property
    def interpreter(self) -> Interpreter:
        """See above."""
        return self._model.interpreter

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What the user's function made; None where this rank has nothing to train."""
        return self._updating.optimizer

    @property
    def scheduler(self) -> Any:
        """What the user's function made: a scheduler or a list of them; None without one."""
        schedulers = self._updating.schedulers
        return schedulers.returned if schedulers is not None else None

    @property
    def scaler(self) -> LossScaler | None:
        """See above."""
        return self._updating.scaler

    @property
    def clip_norm(self) -> float | None:
        """See above."""
        return self._updating.clip_norm

    @property
    def grad_norm(self) -> Tensor | None:
        """See above."""
        return self._updating.norm

    @property
    def whole(self) -> bool:
        """Whether all of the state is that of one step: not after an error in an update."""
        return self._updating.whole

    @property
    def lr(self) -> float | None:
        """The learning rate that the next step uses, of the first parameter group; None without an optimizer, and where
        the optimizer has its own.
        """
        return next(iter(lr_rates(self.optimizer)), None)

    @property
    def step_count(self) -> int:
        """Steps done."""
        return self.rng.step

    @property
    def matrix_bytes(self) -> list[int]:
        """Bytes that this rank sends in each message of a step that takes matrices to their owners, or back."""
        return self._model.matrices.exchange.nbytes if self._model.matrices is not None else []

    def check_schedule(self, steps: int) -> None:
        """Raises ShardcError where the learning-rate schedule ends before so many more steps."""
        if self._updating.schedulers is not None:
            self._updating.schedulers.check_room(steps)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_made" in self.__dict__:
            engine_options.check_set(Engine, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in engine_options.INSTEAD:
            raise AttributeError(f"an engine has no {name!r}: {engine_options.INSTEAD[name]}", name=name, obj=self)
        return object.__getattribute__(self, name)  # raises: where a property failed, that property's own error

    def __repr__(self) -> str:
        made = class_of(self.optimizer) if self.optimizer is not None else "no optimizer"
        name, mesh = self.program.meta.get("model", ""), self.mesh
        return f"<Engine of {name}: rank {mesh.rank} of {mesh.layout}, {made}, {self.step_count} steps done>"

    def __call__(self, *_: Any, **__: Any) -> Any:
        fix = (
            "engine.step(batch) trains, engine.evaluate(batch) evaluates; program.module(model) is called as a model is"
        )
        raise ShardcError("an engine is not called", where="engine(...)", fix=fix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardcError(
            "an engine of one rank of a running world can be neither pickled nor copied",
            where="copy or pickle of an engine",
            fix="engine.save(folder), or engine.full_state_dict(), the whole model's weights; an average of weights:"
            " tensors of your own beside engine.params, or copy.deepcopy(program.module(model))",
        )
