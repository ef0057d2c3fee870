"""What trains, evaluates, generates and saves on one rank: how it is made, and what it was made with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.offload import OffloadPlaces
from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks import parameter_parts, shared_facts, user_changes
from shardc.runtime.checks.every_optimizer import observe
from shardc.runtime.checks.given_model import GivenModel
from shardc.runtime.checks.optimizer_marks import OptimizerMarks
from shardc.runtime.checks.stepped_once import SteppedOnce
from shardc.runtime.data import inputs, same_samples
from shardc.runtime.data.loader import Loader, Loaders
from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.mesh import TorchMesh, agreement, replicas
from shardc.runtime.mesh.agreement import stated
from shardc.runtime.offload import Offload
from shardc.runtime.reshard import wanted
from shardc.runtime.reshard.places import Plan
from shardc.runtime.rng import Rng
from shardc.runtime.stage import not_finite
from shardc.runtime.stage.clip_grad_norm import GradNorm, norm_axes
from shardc.runtime.stage.communicators import runtime_mesh, seen_as
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.step import batch_sizes, engine_optimizer, engine_options, lr, param_groups, step_graph
from shardc.runtime.step.engine_optimizer import OptimizerOf, adamw
from shardc.runtime.step.engine_step import EngineStep
from shardc.runtime.step.expert_load import Load, Loads
from shardc.runtime.step.loss_scale import LossScaler
from shardc.runtime.step.lr import NewSchedule
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.early_step import OverlappedStep
from shardc.runtime.zero.offloaded_optimizer import Paged
from shardc.runtime.zero.optimizer_kernels import choose_as_on_gpu
from shardc.runtime.zero.optimizer_list import class_of, lr_rates


class Engine(EngineStep):
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
        (shardc.runtime.mesh.agreement); a difference is an error on all ranks.
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
    has to be known of all gradients first (clip_norm, loss scaling). Under the same condition gradients of matrices go
    to their owners while backward runs.

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
        engine_options.check(
            clip_norm=clip_norm,
            nonfinite=nonfinite,
            seed=seed,
            check_every=check_every,
            optimizer=optimizer,
            scheduler=scheduler,
        )
        model = state.plain(model)
        self.program, self.callbacks = program, list(callbacks)
        self._options: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": scheduler,
            "clip_norm": clip_norm,
            "norm": norm,
            "routing": routing,
            "check": check,
            "check_every": check_every,
            "nonfinite": nonfinite,
            "interpreter": interpreter,
            "rng": rng,
            "offload": offload,
        }
        if program.forward_only:
            optimizer = scheduler = None
        self.mesh = mesh if mesh is not None else runtime_mesh(program)
        self.rng = rng(seed)
        check = check and self.mesh.layout.world > 1  # one rank agrees with itself: nothing is hashed
        self._checks, self._skipping = check, False
        if check:
            options = {"clip_norm": clip_norm, "nonfinite": nonfinite, "broadcast": broadcast, "norm": norm}
            options |= {"check_every": check_every, "routing": routing}
            facts = shared_facts.program_facts(program, seed=seed, **options)
            agreement.check(self.mesh, facts, "making an engine")
            agreement.check(self.mesh, shared_facts.joint_facts(program, self.mesh), "making an engine")
        given = state.weights_of(program, model, weights, seed)
        self.weight_notes = given.notes
        self._told: set[str] = set()
        changed = user_changes.check_as_compiled(program, given.model, built=given.model is not model)
        user_changes.tell_once(changed, self._told, self._tell)
        user_changes.tell_eval_mode(program, self._tell)
        self._given = GivenModel(model, "this engine", self.mesh.rank)
        observe(self._given)
        self._takes = inputs.arguments(given.model)
        self._skeleton, self._folder = state.skeleton(given.model), given.folder
        prints = replicas.Given(program)
        if not check:
            parts, self.buffers = state.local_parts(program, given, self.mesh, broadcast=broadcast)
        else:
            whole_of = prints.whole
            parts, self.buffers = state.local_parts(program, given, self.mesh, broadcast=broadcast, whole_of=whole_of)
            parts = prints.passing(parts)
        self._buffers_before = self.buffers  # the last step
        self._offload = offload(program.offload, self.mesh)
        self.buckets = Buckets(program, parts, self.mesh, self._offload)
        if check:
            prints.check(self.mesh, self.buffers)
        self.owned = self.buckets.owned
        self._updates, self._whole = optimizer is not None, True
        self._matrices: WholeMatrices | None = None
        split = {n for n in self.owned if norm_axes(program, n)}
        partial = self.buckets.names | split
        self._watched = user_changes.Watched(program, self.owned, self.buckets.runs, partial)
        self.optimizer = None
        if optimizer is not None:
            self.optimizer, self._matrices = engine_optimizer.made(
                optimizer, program, self.buckets, self.mesh, self._check_optimizer, self._tell, self._offload
            )
        if self.optimizer is not None and self.mesh.device.type == "cuda" and not self._offload.places:
            choose_as_on_gpu(self.optimizer)  # not where a page's state comes and goes
        self._new_schedule = NewSchedule(self.optimizer, scheduler) if self.optimizer is not None else None
        if self.optimizer is not None and self.mesh.layout.world > 1:
            fix = "save by engine.save(folder) on all ranks, and load by engine.load(folder)"
            OptimizerMarks(program, self.mesh, self.owned, self.buckets.runs, fix).guard(self.optimizer)
        if self.optimizer is not None:
            engine_optimizer.keep_groups(self.optimizer)
        self._once = SteppedOnce(self.optimizer)  # before schedulers are made, which look at its method `step`
        if check:
            agreement.check(self.mesh, shared_facts.optimizer_facts(program, self.optimizer), "making an engine")
        self._settle_options()
        self._stepping = self._sending = False
        self._paged = (
            Paged(self.optimizer, self._offload) if self.optimizer is not None and self._offload.places else None
        )
        self._schedulers = (
            lr.Schedulers.make(scheduler, self.optimizer)
            if scheduler is not None and self.optimizer is not None
            else None
        )
        self._note_schedulers()
        self.loaders = Loaders()
        self._same_rows = shared_facts.SameRows()
        self._waiting = self._told_replaced = False  # gradients of `backward` for `update`
        self._saves = state.Saves(self.mesh)
        self.reshards = WeakKeyDictionary()
        self.loads: tuple[Load, ...] = ()
        self._loads = Loads(program, self.mesh) if routing else None
        self.grad_norm: Tensor | None = None
        self._norm = GradNorm(program, self.owned, self.mesh)
        self._runs = interpreter
        self.interpreter = interpreter(program, self.mesh)
        #: For batches of other sizes, for evaluating and scoring: by sizes and use.
        self._others: dict[tuple[batch_sizes.Shapes, batch_sizes.Use], tuple[Interpreter, dict[str, Tensor]]] = {}
        self.scaler = LossScaler(program.loss_scale, self.mesh) if program.loss_scale is not None else None
        self._graphs: step_graph.StepGraphs | None = None
        if step_graph.asked(program):
            graphs = step_graph.StepGraphs(program, self.mesh, self.rng, self.buckets, self.owned, self._tell)
            self._graphs = graphs if graphs.records else None
        self._unbucketed = [n for n in self.owned if n not in self.buckets.names]
        self._made = True

    def _settle_options(self) -> None:
        """What follows from the options that `set` may change."""
        o = self._options
        self._nonfinite: not_finite.Action = o["nonfinite"]
        object.__setattr__(self, "clip_norm", o["clip_norm"])  # which nobody else may
        self._wants_norm = o["norm"] or o["clip_norm"] is not None or o["nonfinite"] != "ignore"
        self._check_every = o["check_every"] if self._checks else 0
        whole = (
            o["clip_norm"] is not None
            or o["nonfinite"] != "ignore"
            or self.program.loss_scale is not None
            or bool(self._offload.places)
        )  # nothing may be updated before all is there
        self._overlapped = (
            OverlappedStep(self.optimizer, self.owned)
            if self.optimizer is not None and not whole and self._matrices is None and self.buckets.arrive_apart
            else None
        )
        self._sends_early = not whole  # gradients of matrices to their owners, while backward runs

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

    def _check_trains(self) -> None:
        """Raises ShardcError where no parameter is trained."""
        param_groups.check_trains(self.program)

    def _tell_changes(self) -> None:
        """Raises ShardcError for what changed in the model that was compiled; tells what does not reach the copy."""
        user_changes.check_attributes(self.program, self._told, self._tell)
        for note in self._given.tell(self._told):
            self._tell(note)

    def _tell(self, note: str) -> None:
        """A line on the first rank's stderr."""
        if self.mesh.rank == 0:
            print(f"note: {note}", file=sys.stderr, flush=True)

    def check_schedule(self, steps: int) -> None:
        """Raises ShardcError where the learning-rate schedule ends before so many more steps."""
        if self._schedulers is not None:
            self._schedulers.check_room(steps)

    def _note_schedulers(self) -> None:
        self._once.note(self._schedulers.members if self._schedulers is not None else ())

    @property
    def step_count(self) -> int:
        """Steps done."""
        return self.rng.step

    @property
    def matrix_bytes(self) -> list[int]:
        """Bytes that this rank sends in each message of a step that takes matrices to their owners, or back."""
        return self._matrices.exchange.nbytes if self._matrices is not None else []

    @property
    def scheduler(self) -> Any:
        """What the user's function made: a scheduler or a list of them; None without one."""
        return self._schedulers.returned if self._schedulers is not None else None

    @property
    def whole(self) -> bool:
        """Whether all of the state is that of one step: not after an error in an update."""
        return self._whole

    @property
    def lr(self) -> float | None:
        """The learning rate that the next step uses, of the first parameter group; None without an optimizer, and where
        the optimizer has its own.
        """
        return next(iter(lr_rates(self.optimizer)), None)

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
            if self._waiting:
                what, fix = "gradients of engine.backward wait for an update", "call engine.update() first"
                raise ShardcError(what, where="engine.set", fix=fix)
            if self._checks:
                same = "set it on all ranks alike"
                facts = [stated(n, changed[n], where="engine.set", fix=same) for n in engine_options.SETTABLE]
                agreement.check(self.mesh, facts, "setting options")
            self._options = changed
            self._settle_options()

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
            what, fix = "the program is forward-only: it does not train", "engine.weights_to(program.forward(model))"
            raise ShardcError(what, where="engine.to", fix=fix)
        if self._waiting:
            what, fix = "gradients of engine.backward wait for an update", "call engine.update() first"
            raise ShardcError(what, where="engine.to", fix=fix)
        engine_options.check_names("engine", Engine, options)
        wanted.check(Plan(self.program), Plan(program), all_buffers=True)
        options = {**self._options, "callbacks": self.callbacks, **options}
        other = Engine(program, state.blank(program), seed=self.rng.seed, mesh=seen_as(self.mesh, program), **options)
        other._takes, other._skeleton, other._folder = self._takes, self._skeleton, self._folder
        other._given = self._given
        self._move_to(other)
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

    @cached_property
    def params(self) -> dict[str, nn.Parameter]:
        """See above. From now on they know that they are parts: an engine whose parameters nobody asks for has nothing
        to look at.
        """
        parameter_parts.watch(self.program, self.owned, self.buckets.runs)
        self._mark_gradients()
        return parameter_parts.ByName(self.program, self.owned)

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
        if self._checks:
            agreement.check(self.mesh, shared_facts.loader_facts(loader.order), "making a loader")
            same_samples.check(self.mesh, loader)
        return loader

    def local(self, batch: Any) -> Any:
        """This rank's part of a global batch, for `step(part, local=True)`. See shardc.ir.program.Program.local."""
        return inputs.local(self.program, batch, self.mesh.rank)

    @property
    def part(self) -> tuple[int, int]:
        """(the number of this rank's part of a global batch, how many there are): for data of one's own that reads only
        this rank's rows, and gives them to `step(rows, local=True)`. Ranks of one number need the same rows."""
        return inputs.part_of(self.program, self.mesh.rank)
