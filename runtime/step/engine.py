"""Train, evaluate, generate and save on one rank. A step is here; its parts are in other files.

local_model   the rank's part of the model, and the interpreter that runs a batch on it
update        the optimizer's half of a step
evaluation    forward without training
saver         saves the state, and moves it to other programs
checks        checks of user code, and whether ranks agree (shardc.runtime.checks.hooks)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.optional import needed
from shardc.runtime.checks import engine_options
from shardc.runtime.checks.callbacks import Callbacks
from shardc.runtime.checks.engine_checks import EngineChecks
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.data import inputs
from shardc.runtime.data.loader import Loader, Loaders
from shardc.runtime.mesh import TorchMesh, replicas
from shardc.runtime.mesh.agreement import SAME_CALLS, stated
from shardc.runtime.offload import Offload
from shardc.runtime.rng import Rng
from shardc.runtime.stage import not_finite, outputs
from shardc.runtime.stage.clip_grad_norm import parameter_norms
from shardc.runtime.stage.communicators import runtime_mesh, seen_as
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import Training, Values
from shardc.runtime.state import KEEP
from shardc.runtime.state.export import MAX_FILE_BYTES, skeleton
from shardc.runtime.state.parts import blank, local_parts
from shardc.runtime.state.quantized import plain
from shardc.runtime.state.sources import weights_of
from shardc.runtime.step import engine_optimizer, step_graph
from shardc.runtime.step.engine_optimizer import OptimizerOf, adamw
from shardc.runtime.step.engine_state import Saver
from shardc.runtime.step.evaluation import Evaluation
from shardc.runtime.step.expert_load import Load, Loads
from shardc.runtime.step.local_model import LocalModel
from shardc.runtime.step.loss_scale import LossScaler
from shardc.runtime.step.schedulers import SchedulerOf
from shardc.runtime.step.update import Update
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.named_parameters import ByName
from shardc.runtime.zero.several_optimizers import class_of, learning_rates


class Engine:
    """Trains one rank's part of a model.

    Made by `program.engine(...)`, in each process of torchrun or each thread of loopback.

    model: source of the weights: an nn.Module (not changed), a function that builds it, a state_dict or files; see
        shardc.runtime.state.sources. Each rank makes only its own part; nothing is broadcast.
    weights: files (or a state_dict) whose weights replace the model's; each rank reads its part. A weight that they do
        not have stays the model's. `.weight_notes` says where the weights came from, `.weight_folder` which folder.
    optimizer: params -> torch optimizer, or a list of them; None: no update, for evaluation and gradients only. params:
        (name, parameter) pairs, which torch's optimizers accept; shardc.groups(params, ...) groups them by pattern. In
        a list of optimizers, each parameter belongs to one.
    scheduler: what `optimizer` returned -> learning-rate scheduler, or a list of them; stepped after every step that
        updates.
    seed: of dropout, and of weights that a function builds. clip_norm: gradients are scaled down to this global 2-norm.
    routing: record in every step how tokens are spread over experts, in `.loads`, one
        shardc.runtime.step.expert_load.Load per layer.
    check: compare what all ranks share: weights, program and seed here; batch, step and learning rate in each step
        (shardc.runtime.mesh.agreement). A difference is an error on all ranks. False: the user's model, optimizer and
        scheduler are not checked either (docs/reference/not-checked.md).
    check_every: steps between two comparisons of all replicas of weights, buffers and optimizer states, which find a
        bit flip in one of them (shardc.runtime.mesh.replicas); `save` compares them too. 0: never.
    broadcast: send rank 0's weights to all ranks, for models that are not seeded.
    nonfinite: what to do if a loss or a gradient is nan or inf: "ignore", "stop" (raise NotFiniteError before anything
        is updated, naming the op or the parameters) or "skip" (leave out the update). The host then reads loss and norm
        in every step. Loss scaling skips such steps in any case.
    norm: compute the gradient norm in every step, also without clipping (reads all gradients once more).
    callbacks: functions, called after every `step` with the engine and the step's result, or objects with methods for
        moments of a run (docs/how-to/trackers.md). They may log, and may save or evaluate if all ranks do. On every
        rank, or on the first one alone where `rank0 = True`. `.callbacks` is the list.
    mesh: a runtime mesh; default: torch.distributed's world (NCCL on CUDA, gloo on the CPU), joined if necessary.
    interpreter: makes the interpreter of the program's stages; rng: makes the random state from the seed; offload:
        makes the places that `data.offload` names. shardc.cost runs an engine on tensors without data with its own
        three.

    .params: this rank's shards of parameters, by the model's names. At ZeRO >= 1 a shard is a flat range of the
    parameter, perhaps empty. Gradients are in `.grad`; after the update they have the dtype of their sum. .owned and
    .buffers: by the program's placeholder names. .interpreter: runs the program's stages.
    .extra: a dict of your own values of JSON that checkpoints keep, those of the first rank.
    .buckets: holds parameters and sums gradients (shardc.runtime.zero.buckets).
    .clip_norm: the norm that gradients are clipped to; `set` changes it.
    .grad_norm: 2-norm of the whole gradient of the last step, before clipping; 0-dim, on every rank; None before the
    first step, and if nothing needs it (`norm`, `clip_norm`, `nonfinite`).
    .scaler: the loss scaling of `precision.loss_scale` (shardc.runtime.step.loss_scale), or None. If gradients are not
    finite on some rank, the step leaves parameters and optimizer unchanged on every rank.

    Without clip_norm, nonfinite, loss scaling, offload and CUDA graphs, some updates begin early. With
    `optimizer: {matrices: ...}` owners of matrices get gradients in backward. Else, at ZeRO 0 on a CPU, parameters are
    updated while later buckets are still summed (shardc.runtime.zero.optimizer_check), if the optimizer treats each
    separately.

    An error in forward or backward (a wrong batch, a failing op, Ctrl-C) on all ranks leaves the engine unchanged,
    except perhaps buffers: the next step starts fresh. After one in the update (a custom optimizer) load a checkpoint.
    """

    #: Whether to try on small copies if the optimizer can step shards. On tensors without data (shardc.cost) it cannot.
    _tries_optimizer = True

    def __init__(
        self,
        program: Program,
        model: Any,
        optimizer: OptimizerOf | None = adamw,
        seed: int = 0,
        *,
        weights: Any = None,
        scheduler: SchedulerOf | None = None,
        clip_norm: float | None = None,
        norm: bool = False,
        routing: bool = False,
        check: bool = True,
        check_every: int = replicas.CHECK_EVERY,
        broadcast: bool = False,
        nonfinite: not_finite.Action = "ignore",
        callbacks: Iterable[Any] = (),
        mesh: Any = None,
        interpreter: Callable[[Program, Any], Interpreter] = Interpreter,
        rng: Callable[[int], Rng] = Rng,
        offload: Callable[[Any, Any], Offload] = Offload,
    ) -> None:
        #: Options that `set` can change.
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
        self.program, self.callbacks = program, Callbacks(callbacks)
        self.mesh = mesh if mesh is not None else runtime_mesh(program)
        self.rng, self.loaders = rng(seed), Loaders()
        self._checks = EngineChecks(program, self.mesh) if check else CheckHooks()
        self._checks.making(seed, broadcast=broadcast, routing=routing, **settable)
        model = plain(model)
        loaded = weights_of(program, model, weights, seed)
        self.weight_notes, self.weight_folder = loaded.notes, loaded.folder
        self._checks.weights(model, loaded)
        on_whole = self._checks.whole_weight
        parts, buffers = local_parts(program, loaded, self.mesh, broadcast=broadcast, on_whole=on_whole)
        local = LocalModel(
            program,
            self.mesh,
            self.rng,
            self._checks.parts(parts),
            buffers,
            offload(program.spec.data, self.mesh),
            forward_arguments=inputs.arguments(loaded.model),
            make_interpreter=interpreter,
        )
        self._model = local
        self._checks.new_model(local)
        trains = optimizer is not None and not program.forward_only
        local_optimizer = None
        if trains and optimizer is not None:
            local_optimizer, local.owners = engine_optimizer.create_optimizer(
                optimizer, program, local.buckets, self.mesh, local.offload, try_it=self._tries_optimizer
            )
        schedules = scheduler if trains else None
        self._optimizer_half = Update(local, local_optimizer, schedules, self._checks, settable, trains=trains)
        self._evaluation = Evaluation(local, self._checks, self._optimizer_half.check_consistent)
        like = skeleton(loaded.model)
        self._saver = Saver(local, self._optimizer_half, self.loaders, self._checks, like, loaded.folder)
        self.loads: tuple[Load, ...] = ()
        self._loads = Loads(program, self.mesh) if routing else None
        self._step_graphs = step_graph.step_graphs(program, self.mesh, self.rng, local.buckets)
        self._waiting = False  # whether gradients of `backward` wait for `update`
        self._noted_replaced = False  # whether a note said that a second `backward` replaces them
        self._made = True

    # --- a step

    def step(
        self, batch: Any, *, choices: Mapping[str, Any] | None = None, local: bool = False, gather: bool = False
    ) -> Any:
        """Run one optimizer step on a global batch and return the global loss, 0-dim, detached.

        If the loss function names values beside the loss, return (loss, {name: value}), detached. Single numbers and
        values without rows are those of the whole batch, on every rank: sums and means over all rows. Others, such as
        logits, have this rank's rows; gather=True: all rows, on every rank. local=True: `batch` is this rank's part.
        choices: {name: tensor} that the spec's `choices` replays; or under the batch's key "choices".
        A batch may have fewer rows than the compiled one, such as the last of an epoch, or another length. The first
        time that such sizes come, every rank compiles for them (shardc.recompile).
        Raises ShardcError for names, dtypes or shapes that it cannot take.
        """
        with self.mesh.together(f"step {self.rng.step + 1}"):  # an error on one rank ends the others
            early = self._step_graphs is None
            result = self._backward(batch, choices, local=local, gather=gather, early=early)
            self._update()
            self.callbacks.call("step_done", self, result)
        return result

    def backward(
        self, batch: Any, *, choices: Mapping[str, Any] | None = None, local: bool = False, gather: bool = False
    ) -> Any:
        """Run the first half of `step`: put reduced gradients into `.params[...].grad`, and return its result.

        They replace the last ones; to sum batches: `batch: {microbatches: n}`. Taking a norm of a gradient raises if
        this rank holds only a part of it (shardc.runtime.checks.tensor_parts).
        """
        if self._waiting and not self._noted_replaced:
            self._noted_replaced = True
            twice = "engine.backward was called twice without engine.update between: gradients are replaced, not added"
            self.mesh.note(f"{twice} up; to accumulate, write batch: {{microbatches: n}}")
        result = self._backward(batch, choices, local=local, gather=gather, early=False)
        self._waiting = True
        self._checks.gradients(user_reads=True)
        return result

    def update(self) -> None:
        """Clip and step the optimizer: the second half of `step`.

        Raises ShardcError without a `backward` before it, and, on all ranks, if some ranks call something else.
        """
        self._optimizer_half.check_consistent()
        if not self._waiting:
            fault = "no backward was called since the last update: the current gradients are used already"
            fix = "engine.backward(batch) and then engine.update(), or engine.step(batch), which does both"
            raise ShardcError(fault, where="engine.update", fix=fix)
        self._checks.call("an update")
        self._update()

    @torch.enable_grad()  # even if the caller disabled it: nobody would notice a step that trains nothing
    def _backward(self, batch: Any, choices: Any, *, local: bool, gather: bool, early: bool) -> Any:
        """Run the batch forward and backward, replace buffers, wait for gradients. early: see Update.begin."""
        model, update, checks = self._model, self._optimizer_half, self._checks
        update.check_consistent()
        self._saver.saves.poll()
        checks.forward("engine.step", training=True)
        model.buckets.reset(forward=True)
        self.rng.training = True
        interpreter, values = model.take(batch, checks, local=local, choices=choices)
        update.begin(early=early)
        loss, buffers, beside = self._run(interpreter, values)
        update.check_loss(loss, interpreter, values)
        update.replace_buffers(buffers)
        if self._step_graphs is None:
            model.buckets.finish(update.reduced)
        else:  # the CUDA graph of the step has already run `buckets.finish`
            for names in model.buckets.names_by_bucket:
                update.reduced(names)
        update.finish_gradients()
        checks.gradients()
        return outputs.result(interpreter.program, self.mesh, checks.loss(loss), beside, gather=gather)

    def _run(self, interpreter: Interpreter, values: Values) -> step_graph.Result:
        """Run all microbatches, forward and backward; return (loss, new buffers, values beside the loss)."""
        buckets, update = self.buckets, self._optimizer_half
        # gradients come to buckets by `ops.accumulate`; `ops.launch` in the backward graph calls `Buckets.launch`
        training = Training(buckets, update.scale)
        self.mesh.step.routings = [] if self._loads is not None else None

        def forward_backward(values: Values) -> step_graph.Result:
            interpreter.compute_totals(values)
            return interpreter.step(values, training)

        def with_sums(values: Values) -> step_graph.Result:  # what a CUDA graph records
            result = forward_backward(values)
            buckets.finish()
            return result

        if self._step_graphs is None:
            result = forward_backward(values)
        else:
            scale = update.scaler.factor if update.scaler is not None else None
            result = self._step_graphs.step((id(interpreter), scale), values, with_sums)
        if self._loads is not None:
            self.loads, self.mesh.step.routings = self._loads(self.mesh.step.routings or ()), None
        return result

    def _update(self) -> None:
        """Clip, step the optimizer and the schedules."""
        self._waiting = False
        self._optimizer_half.apply()
        self.rng.step += 1  # counts steps; random numbers depend on it
        self.loaders.note_step()
        self._optimizer_half.consistent = True
        self._optimizer_half.step_schedule()
        self._checks.updated()

    # --- forward alone

    def evaluate(
        self, batch: Any, *, choices: Mapping[str, Any] | None = None, local: bool = False, gather: bool = False
    ) -> Any:
        """Return what `step` returns, without dropout and with BatchNorm's running statistics; change nothing.

        If forward branches on `self.training`, the model is compiled once more, in eval mode.
        """
        return self._evaluation.loss(batch, choices, local=local, gather=gather)

    def evaluate_all(self, batches: Iterable[Any], *, local: bool = False) -> dict[str, float]:
        """Return {"loss": ..., name: ...} over all batches. Raises NoBatchesError without any batch.

        (sum, count) pairs: sum of sums / sum of counts; integers: sums. Loss and other means: weighted by their
        divisors, such as each batch's number of tokens (shardc.runtime.step.means); other single numbers: by rows (a
        note if the loss is one).
        """
        return self._evaluation.losses(batches, local=local)

    def score(
        self, batch: Any, *, choices: Mapping[str, Any] | None = None, local: bool = False, gather: bool = False
    ) -> Tensor:
        """Return the log-probability of each target of the cross entropy in the loss.

        Has the shape of the targets in the batch (`labels`, [batch, sequence]), in float32 at least; 0 where the loss
        ignores a target. No dropout; nothing changes. This rank's rows; gather=True: all rows, on every rank.

        The first call compiles a forward-only program on the same parameters: logits stay split by classes, and are
        computed a few rows at a time. Raises ShardcError if the loss has no cross entropy of class indices, or several.
        """
        return self._evaluation.score(batch, choices, local=local, gather=gather)

    def score_all(
        self, batches: Iterable[Any], *, local: bool = False, each: Callable[[Tensor], None] | None = None
    ) -> dict[str, float]:
        """Return {"tokens": count, "logprob": mean, "perplexity": exp(-mean)} of the `score`s of all batches.

        Only targets that the loss counts. Exact on any mesh. each: called on every rank with the scores of all rows of
        each batch. Raises NoBatchesError without any batch.
        """
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
        """Return the new tokens of each prompt, with the current weights, on every rank; change nothing.

        Tokens end with the first of `stop` (None: the end tokens of the model's configuration). All ranks pass the same
        prompts: lists of token ids, of any lengths; i64[rows, length]; a tokenizer's dict; for a model with an encoder,
        the encoder's input (shardc.features.generation.prompts). temperature 0: the most likely token each time; else
        tokens are drawn by counters of `seed`, the same on every mesh (shardc.features.generation). The first call of a
        length compiles for it. Raises ShardcError for a model that is not causal.
        """
        ends = tuple(stop) if stop is not None else None
        options = needed("generation", "runtime", "Options")(
            tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=ends, seed=seed
        )
        return self._evaluation.generate(prompts, options)

    # --- the state

    def save(self, folder: str | Path, *, wait: bool = True, keep: int | None = KEEP, overwrite: bool = False) -> None:
        """Write a checkpoint that any mesh can load, to `folder/step-N`. Collective.

        Has parameters, buffers, optimizer, scheduler, loaders, step, seed.
        wait: False copies the state and returns; it is written in the background, at most one at a time. The next
            `step` or `save` raises its errors, on all ranks. `finish_save` and `close` wait for it.
        keep: how many of the folder's checkpoints stay, the last ones; None: all.
        overwrite: also replace checkpoints of another run, which this engine has neither saved nor loaded.
        Raises shardc.runtime.state.checkpoint_folder.SavingError, on all ranks; earlier checkpoints are then unchanged.
        """
        self._saver.save(folder, wait=wait, keep=keep, overwrite=overwrite)

    def finish_save(self) -> None:
        """Wait until a save in the background is on the disk, and raise its error. Collective."""
        self._saver.finish()

    @property
    def saving(self) -> tuple[int, int] | None:
        """(bytes written, bytes to write) by this rank of the save in the background; None without one."""
        return self._saver.saves.progress

    def load(
        self, folder: str | Path, *, last_good: bool = False, new_schedule: bool = False, new_data: bool = False
    ) -> None:
        """Read a checkpoint that any mesh wrote. Collective.

        folder: where checkpoints were saved (the last one is read), or one checkpoint. last_good: if that one is
            damaged, read the last one that is not.
        new_schedule: do not take learning rates (momenta, betas) from the checkpoint. The schedulers are made again
            from what `optimizer` made, and advanced to the checkpoint's step, as if they had been there from the first.
        new_data: the engine's loaders begin with their first epoch, not at the checkpoint's place: for a dataset that
            has grown, or another one.
        Seed and settings of optimizer and schedulers are then the checkpoint's; a note names those that it replaced.
        """
        self._saver.load(folder, last_good=last_good, new_schedule=new_schedule, new_data=new_data)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Return {fqn: whole tensor on the CPU}, as the unsharded model's state_dict. Collective.

        On every rank; rank0_only: on the first rank; the others return {} and keep nothing.
        """
        return self._saver.full_state_dict(rank0_only=rank0_only)

    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        overwrite: bool = False,
        merge: bool = False,
    ) -> list[Path]:
        """Write the weights for other programs. All ranks write, and see one file system. Collective.

        Writes a folder that transformers (or peft, for adapters) loads, with config and tokenizer; for other models
        safetensors files; to a `.safetensors` path one file. merge: the whole model, with adapters added to their
        weights.
        dtype: of floating-point tensors; None: unchanged. max_file_bytes: above it, numbered files with an index.
        overwrite: also replace weights that shardc did not write, such as those of a pretrained model.
        Returns the folders written. Raises ShardcError, on all ranks, if it cannot write them.
        """
        options = {"dtype": dtype, "max_file_bytes": max_file_bytes, "overwrite": overwrite, "merge": merge}
        return self._saver.export(folder, **options)

    @property
    def weights_holder(self) -> Saver:
        """The object that holds the weights, for `weights_to`."""
        return self._saver

    def weights_to(self, other: Any) -> Any:
        """Copy this engine's weights to another engine, a module, a forward-only program's, or an engine of others.

        Collective. The last are of shardc.engines.

        Both are of the same model on the same ranks. Copies parameters, and buffers that both programs have. Each
        element is sent once to each rank that needs it and does not have it; the first call plans who sends what to
        whom. Returns the plan (shardc.features.reshard): `.sent` and `.received`, bytes by rank. The other's optimizer
        and step are unchanged. Raises ShardcError for a program of another model, or of other ranks.
        """
        return needed("reshard", "runtime", "move_weights")(self._saver, other)

    def wholes(self) -> Mapping[str, Tensor]:
        """Return {name: local part uncut by ZeRO, detached}; reading gathers, so all ranks read in one order."""
        return self._model.wholes()

    def norms(self, *, grad: bool = False) -> dict[str, float]:
        """Return {parameter name: 2-norm of the whole parameter}, on every rank, for a log. Collective.

        grad: norms of the last gradients instead (clipped after a `step`), 0 without a gradient.
        """
        with self.mesh.together("norms"):
            self._checks.call("norms", stated("grad", grad, where="engine.norms", fix=SAME_CALLS))
            return parameter_norms(self.program, self.owned, self.mesh, grad=grad)

    def close(self) -> None:
        """Wait for a background save, remove files of `data.offload`, and leave the world that it joined."""
        self._saver.close()

    # --- options, and another plan

    def set(self, **options: Any) -> None:
        """Change `clip_norm`, `norm`, `nonfinite` or `check_every` for the next steps. Collective.

        Between `step`s, or before `backward`. All ranks set the same values.
        Raises ShardcError, on all ranks, for values that differ between ranks, other options, invalid values, and
        gradients that wait for an update.
        """
        with self.mesh.together("setting options"):
            engine_options.check_settable(Engine, options)
            changed = {**self._options, **options}
            checked = (*engine_options.SETTABLE, "optimizer", "scheduler")
            engine_options.check(seed=0, **{n: changed[n] for n in checked})
            self._check_nothing_waits("engine.set")
            same, settable = "set the same value on all ranks", {n: changed[n] for n in engine_options.SETTABLE}
            facts = (stated(n, x, where="engine.set", fix=same) for n, x in settable.items())
            self._checks.call("setting options", *facts)
            self._options = changed
            self._optimizer_half.set_options(**settable)

    def _check_nothing_waits(self, call: str) -> None:
        if self._waiting:
            fault, fix = "gradients of engine.backward need an update", "call engine.update() first"
            raise ShardcError(fault, where=call, fix=fix)

    def to(self, program: Program | str | Path | Mapping[str, Any], **options: Any) -> Engine:
        """Return an engine of another program of this model that continues from this state. Collective.

        It has the weights, buffers, optimizer state, schedules, step, seed and data places of this one, on the same
        ranks, as if loaded from a checkpoint, but from memory to memory (shardc.features.reshard).
        program: or a spec (path, dict), for which the model is compiled: see Program.to.
        options: of the new engine: `optimizer`, `clip_norm`, ...; default: this engine's. The optimizer must be of the
        same kind. Make loaders again by `loader`: each continues where the one of its name stopped. This engine keeps
        its memory while it is referenced: `engine = engine.to(program)`.
        Raises ShardcError for a program of another model, of other ranks, or a forward-only one (`weights_to`).
        """
        engine_options.check_program(program, "engine.to")
        if not isinstance(program, Program):
            program = self._compiled_for(program)
        if program.forward_only:
            fault, fix = "the program is forward-only: it does not train", "engine.weights_to(program.forward(model))"
            raise ShardcError(fault, where="engine.to", fix=fix)
        self._check_nothing_waits("engine.to")
        engine_options.check_options("engine", Engine, options)
        move = needed("reshard", "runtime", "TrainingMove")(self.program, program)
        options = {**self._options, "callbacks": self.callbacks, **options}
        other = Engine(program, blank(program), seed=self.rng.seed, mesh=seen_as(self.mesh, program), **options)
        move(self._saver, other._saver)
        if isinstance(self.mesh, TorchMesh):
            self.mesh.transfer_to(other.mesh)
        return other

    def _compiled_for(self, spec: Any) -> Program:
        """Compile the model for another spec. Collective. Raises ShardcError, on all ranks, if one cannot."""
        self.mesh.barrier()  # if ranks are threads of one process, none may run during compilation
        program, error = self.program, None
        try:
            program = self.program.for_spec(spec, self.mesh.layout.world)
        except ShardcError as e:
            error = e
        if self.mesh.sum_on_host([error is not None])[0]:
            raise error or ShardcError("another rank could not compile the program for it", where="engine.to")
        return program

    # --- data

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """Return a loader: each `for` over it is an epoch of this rank's parts, for `step(part, local=True)`.

        Make it once. `save` and `load` keep its place.
        dataset: map-style (__getitem__, __len__), or iterable: then every rank and every worker reads the whole stream
            and keeps its own samples. torch's, `datasets`', Grain's, or anything of that shape.
        batch_size: samples in a global batch; default, and only valid value: the compiled one.
        shuffle: an order fixed by (seed, epoch), the same on every mesh; default for map-style datasets. seed: 0.
        drop_last: True: samples that fill no batch are left out of that epoch. False: they are the epoch's last,
            smaller batch, whole on every rank (shardc.recompile); refused for a program read from an artifact.
        collate_fn: samples -> batch as compiled, but of this rank's samples only; default: torch's, after lists of
            numbers became tensors.
        name: "train"; key in checkpoints; None: not saved. num_workers, pin_memory, ...: as of torch's
        DataLoader. What dataset and collate_fn draw from `random`, numpy and torch is the same on ranks that read the
        same samples. Raises ShardcError for another batch size than the compiled one, and for datasets shorter than a
        batch.
        """
        loader = self.loaders.add(Loader(self.program, self.mesh, dataset, batch_size=batch_size, **options))
        self._checks.loader(loader)
        return loader

    def local(self, batch: Any) -> Any:
        """Return this rank's part of a global batch, for `step(part, local=True)`. See Program.local."""
        return inputs.local(self.program, batch, self.mesh.rank)

    @property
    def part(self) -> tuple[int, int]:
        """(number of this rank's part of a global batch, number of parts), for custom data.

        Read only this rank's rows for `step(rows, local=True)`. Ranks with the same number need the same rows.
        """
        return inputs.part_of(self.program, self.mesh.rank)

    # --- what it has

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """This rank's shards, by the model's names. Reading it starts the checks of partial parameters."""
        self._checks.read_params()
        return ByName(self.program, self.owned)

    @property
    def buckets(self) -> Buckets:
        """Holds parameters and sums gradients (shardc.runtime.zero.buckets)."""
        return self._model.buckets

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """This rank's shards of parameters: {placeholder name: shard}."""
        return self._model.owned

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers: {placeholder name: buffer}."""
        return self._model.buffers

    @property
    def interpreter(self) -> Interpreter:
        """Runs the program's stages."""
        return self._model.interpreter

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the user's function made; None if this rank has nothing to train."""
        return self._optimizer_half.optimizer

    @property
    def scheduler(self) -> Any:
        """What the user's function returned: a scheduler or a list of them; None without one."""
        schedulers = self._optimizer_half.schedulers
        return schedulers.returned if schedulers is not None else None

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaling of `precision.loss_scale`, or None."""
        return self._optimizer_half.scaler

    @property
    def clip_norm(self) -> float | None:
        """The norm that gradients are clipped to; `set` changes it."""
        return self._optimizer_half.clip_norm

    @property
    def grad_norm(self) -> Tensor | None:
        """2-norm of the last step's whole gradient, before clipping; None if nothing needs it."""
        return self._optimizer_half.norm

    @property
    def updated(self) -> bool:
        """Whether the last step updated anything: not if its loss or gradient was nan or inf, and it was left out."""
        return self._optimizer_half.updated

    @property
    def consistent(self) -> bool:
        """Whether all of the state belongs to the same step. False after an error in an update or a load."""
        return self._optimizer_half.consistent

    @property
    def lr(self) -> float | None:
        """The first group's learning rate in the next step; None without an optimizer, or if it sets its own."""
        return next(iter(learning_rates(self.optimizer)), None)

    @property
    def step_count(self) -> int:
        """Steps done."""
        return self.rng.step

    def check_schedule(self, steps: int, *, evaluates: bool = True) -> None:
        """Raise ShardcError if the learning-rate schedule ends before so many more steps, or waits for held-out losses.

        evaluates: these come. A schedule of the spec whose number of steps became known sets the next step's rate.
        """
        if self._optimizer_half.schedulers is not None:
            self._optimizer_half.schedulers.check_room(steps, evaluates=evaluates)
            self._optimizer_half.schedulers.refresh()

    def evaluated(self, loss: float) -> None:
        """Step each ReduceLROnPlateau with a held-out loss, the same on all ranks. `shardc run` calls it."""
        if self._optimizer_half.schedulers is not None:
            self._optimizer_half.schedulers.evaluated(loss)

    @property
    def extra(self) -> dict[str, Any]:
        """Values of your own that checkpoints keep, of JSON: numbers, texts, lists, dicts."""
        return self._saver.extra

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_made" in self.__dict__:
            engine_options.check_set(Engine, name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in engine_options.INSTEAD:
            raise AttributeError(f"an engine has no {name!r}: {engine_options.INSTEAD[name]}", name=name, obj=self)
        return object.__getattribute__(self, name)  # raises: where a property failed, that property's own error

    def __repr__(self) -> str:
        kind = class_of(self.optimizer) if self.optimizer is not None else "no optimizer"
        name, mesh = self.program.meta.get("model", ""), self.mesh
        return f"<Engine of {name}: rank {mesh.rank} of {mesh.layout}, {kind}, {self.step_count} steps done>"

    def __call__(self, *_: Any, **__: Any) -> Any:
        fix = "engine.step(batch) trains, engine.evaluate(batch) evaluates; program.module(model) can be called "
        fix += "like a model"
        raise ShardcError("an engine cannot be called", where="engine(...)", fix=fix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fix = "engine.save(folder), or engine.full_state_dict(), the whole model's weights; for an average of weights:"
        fix += " your own tensors beside engine.params, or copy.deepcopy(program.module(model))"
        fault = "an engine of one rank of a running world can be neither pickled nor copied"
        raise ShardcError(fault, where="copy or pickle of an engine", fix=fix)
