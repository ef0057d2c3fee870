"""Run the loop of `shardc run` in one process: batches, steps, lines, saves, evaluation, failures."""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.cli.ranks.best import Best
from shardc.cli.ranks.step_lines import StepLines
from shardc.cli.ranks.step_metrics import Meter, timed_ops
from shardc.cli.ranks.training_data import Batches, HeldOut
from shardc.errors import ShardcError
from shardc.optional import needed
from shardc.runtime.data.inputs import rows
from shardc.runtime.launch import ignored_hangup
from shardc.runtime.mesh.agreement import SAME_BATCH, DisagreementError, differ
from shardc.runtime.mesh.replicas import ReplicasDifferError
from shardc.runtime.mesh.watch import RankFailedError, print_line
from shardc.runtime.stage.not_finite import NotFiniteError
from shardc.runtime.state.checkpoint_folder import SavingError, generations
from shardc.runtime.step.evaluation import NoBatchesError
from shardc.runtime.storage import disk_calls
from shardc.spec import Run
from shardc.torch_private import let_workers_end, memory_recorded

SAY_AFTER = 10.0  # seconds between two reports on an evaluation
NONE, FAILED = 0, 2  # what a rank has instead of a batch
AT_ONCE = 0.5  # seconds in which signals are one: a service manager sends it to all processes, `launch` passes it on


class Interrupted(Exception):
    """A signal stopped the run, after its state was saved."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


class _Stopped(Exception):
    """A signal ended an evaluation before its last batch, on all ranks."""


@dataclasses.dataclass(frozen=True)
class Unread:
    """A step whose numbers may still be on the device. seconds: time that the host spent in the step."""

    step: int
    loss: Tensor
    beside: dict[str, Tensor]
    grad_norm: Tensor | None
    lr: float | None
    seconds: float
    waited: float
    updated: bool
    epoch: float | None


@dataclasses.dataclass
class Training:
    """The steps of a run, and the work between them."""

    settings: Run
    engine: Any
    train: Batches
    valid: HeldOut
    lines: StepLines
    signals: Signals
    saved: int | None = None  # the last step that was saved, or is being saved
    writing: int | None = None  # the step that is being saved in the background
    waited: float = 0.0  # seconds for the batch of this step
    wrote: bool = False  # whether a checkpoint was written into --save
    empty: bool = False  # there was no held-out batch, and that was reported
    stopped: bool = False  # a signal stops all ranks
    save_requested: bool = False  # SIGUSR1 requested a checkpoint of this step
    heeded: int = 0  # requests for a checkpoint that came to this rank, as far as all ranks know of them
    skipped: int = 0  # updates that were left out, of the steps whose numbers were read
    evaluated: tuple[int, dict[str, float]] = (-1, {})  # the last step with held-out values, and these
    failing: bool = False  # an error ends the run
    choices: Any = None  # files of recorded or given choices
    losses: list[float] = dataclasses.field(default_factory=list)  # of the steps whose numbers were read
    unread: list[Unread] = dataclasses.field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return disk_calls.expanded(self.settings.save) / "checkpoint"

    @functools.cached_property
    def meter(self) -> Meter:
        return Meter(self.engine.program, self.engine.mesh)

    @functools.cached_property
    def best(self) -> Best:
        return Best(self.settings, self.engine)

    def open_choices(self) -> None:
        """Open the files of recorded or given choices. Raises ShardcError for a spec or files that do not fit."""
        if self.settings.choices:
            path, held_out = disk_calls.expanded(self.settings.choices), self.valid is not None
            self.choices = needed("choices", "files", "open_files")(path, self.engine, held_out=held_out)

    @functools.cached_property
    def steps(self) -> int:
        """The last step of the run."""
        if self.settings.epochs is None:
            return 100 if self.settings.steps is None else self.settings.steps
        of_epochs = self.train.steps(self.settings.epochs, self.engine.step_count)
        return of_epochs if self.settings.steps is None else min(of_epochs, self.settings.steps)

    def run(self) -> list[float]:
        """Train up to the last step; return the losses. Raises Interrupted, or an error of the user's code."""
        try:
            self._steps()
        except BaseException:
            self.failing = True
            with suppress(Exception):  # the device may have failed
                self._read()
            raise
        return self.losses

    def call(self, moment: str, facts: Any) -> None:
        """Call the callbacks of all ranks. The first error ends the run after a save, unless one ends it already."""
        if not self.engine.callbacks:
            return
        if self.failing:
            with suppress(Exception):
                self.engine.callbacks.call(moment, self.engine, facts)
            return
        with self._save_on_failure(f"step {self.engine.step_count} and its callbacks ({moment})"):
            self.engine.callbacks.call(moment, self.engine, facts)

    def _steps(self) -> None:
        stream = iter(self.train)
        self.engine.mesh.waits.on = bool(self.settings.log)
        for _ in range(0 if self.train.resumes else self.engine.step_count):
            if not self.signals.seen:
                next(stream)  # skip batches from before the checkpoint; a loader restores its position
        while self.engine.step_count < self.steps and not self.best.stopped:
            batch = self._next(stream)
            samples = self.train.samples(rows(self.engine.program)) if self.choices is not None else None
            start, lr = time.perf_counter(), self.engine.lr
            with self._measured():
                result = self._step(batch, samples)
            loss, beside = result if self.engine.program.outputs else (result, {})
            if samples is not None:
                self.choices.take(samples, beside)
            seconds, norm = time.perf_counter() - start, self.engine.grad_norm
            step, updated, epoch = self.engine.step_count, self.engine.updated, self.train.position
            self.unread.append(Unread(step, loss, beside, norm, lr, seconds, self.waited, updated, epoch))
            evaluated = self._due(self.settings.eval_every)
            if evaluated or self._due(self.settings.log_every) or self.engine.step_count == self.steps:
                self._read(evaluated=evaluated)
            if self.settings.save and (self._due(self.settings.save_every) or self.save_requested):
                self._save_in_background()

    def _due(self, every: int) -> bool:
        return bool(every) and self.engine.step_count % every == 0

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Count the first step; record traces, snapshots and op times of the chosen steps."""
        step, mesh = self.engine.step_count + 1, self.engine.mesh
        with ExitStack() as stack:
            if not self.meter.flops:
                stack.enter_context(self.meter.counting())
            # only on one rank of each stage: the others do the same
            others = (c for axis, c in mesh.layout.coords(mesh.rank).items() if axis != self.engine.program.axis)
            first, name = not any(others), f"step{step}-rank{mesh.rank}"
            if first and step in self.settings.trace:
                stack.enter_context(traced(Path(self.settings.log) / f"trace-{name}.json", mesh.device))
            if first and step in self.settings.memory_snapshot:
                stack.enter_context(memory_recorded(Path(self.settings.log) / f"memory-{name}.pickle"))
            if first and step in self.settings.breakdown:
                stack.enter_context(timed_ops(Path(self.settings.log), step, mesh))
            yield

    def _step(self, batch: Any, samples: Tensor | None) -> Any:
        """Run one step. If a save in the background failed, report it and go on: the next may succeed."""
        number, local = self.engine.step_count + 1, self.train.local
        try:
            with self._save_on_failure(f"step {number}"):
                more = self.choices.options(samples, local=local) if samples is not None else {}
                try:
                    result = self.engine.step(batch, local=local, **more)
                except SavingError as e:  # raised before the step began
                    self._not_saved(e)
                    result = self.engine.step(batch, local=local, **more)
        except NotFiniteError as e:
            saved = self._save_and_describe(separately=f"step-{number}-not-finite")
            raise ShardcError(e.what, where=e.where, fix=f"{e.fix}; {saved}") from e
        self._report_saved()
        return result

    @contextmanager
    def _save_on_failure(self, doing: str) -> Iterator[None]:
        """Run work of all ranks together; if it fails, save the state and raise the first failure.

        The state is saved only if all ranks still have the state of the same step.
        """
        try:
            with self.engine.mesh.together(doing):
                yield
        except (NotFiniteError, ReplicasDifferError, SavingError):
            raise  # same error on all ranks; if replicas differ, the last checkpoint is better than the state
        except Exception as e:
            self.failing = True
            failed = e.what if isinstance(e, RankFailedError) else f"{doing} failed"
            print(f"{failed}: {self._save_after_failure()}", file=sys.stderr, flush=True)
            raise

    def _save_after_failure(self) -> str:
        """Save after an error in a step, if no rank has updated anything in it; return what was done."""
        engine = self.engine
        if not self.settings.save:
            return self._save_and_describe()
        try:
            engine.mesh.reconnect()
            n, world = engine.step_count, engine.mesh.layout.world
            consistent, *steps = engine.mesh.sum_on_host([int(engine.consistent), n, n * n])
            if consistent < world or differ(steps, world):
                self._finish_save()  # the save of an earlier step
                return f"some ranks had already updated, so nothing was saved; {self._last_checkpoint()}"
            return f"after step {n}: {self._save_and_describe()}"
        except Exception as e:  # a process is gone, or the disk failed: the first failure matters more
            why = e.what if isinstance(e, ShardcError) else f"{type(e).__name__}: {e}"
            return f"the current state could not be saved ({why}); {self._last_checkpoint()}"

    def _last_checkpoint(self) -> str:
        """Return a phrase that says where the last checkpoint is."""
        if generations(self.folder):
            return f"the last checkpoint is in {self.settings.save}"
        return "there is no checkpoint (see --save-every)"

    def _report_saved(self) -> None:
        if self.writing is not None and self.engine.saving is None:
            self.lines.say(f"saved step {self.writing}")
            step, self.writing = self.writing, None
            self.call("saved", {"step": step, "folder": str(self.folder)})

    def _save_in_background(self) -> None:
        self.save_requested = False
        if self.saved == self.engine.step_count:
            return
        try:
            with self._save_on_failure(f"saving step {self.engine.step_count}"):
                self.engine.finish_save()  # the previous one
                self._report_saved()
                self._write(wait=False)
            self.saved = self.writing = self.engine.step_count
        except SavingError as e:
            self._not_saved(e)

    def _not_saved(self, error: ShardcError) -> None:
        self.saved = self.writing = None
        if self.engine.mesh.rank == 0:
            print_line(f"{error.what}; training goes on")

    def _next(self, stream: Iterator[Any]) -> Any:
        """Return the next batch. All ranks decide together to go on: the others would wait for one that stops."""
        if self.stopped:
            self._interrupt()
        with self._save_on_failure(f"synchronizing before step {self.engine.step_count + 1}"):
            batch, problem, having = self._read_batch(stream)
        if self.stopped:
            self._interrupt()
        if FAILED in having:
            self._read()  # before a rank ends, and the launcher ends all others
            saved = self._save_and_describe()
            if problem is not None:
                place = self.engine.mesh.layout.named(self.engine.mesh.rank)
                message = f"{place} failed in data(), after step {self.engine.step_count}: {saved}"
                print(message, file=sys.stderr, flush=True)
                raise problem
            ranks = self.engine.mesh.layout.named(*(r for r, has in enumerate(having) if has == FAILED))
            fault = f"{ranks} failed in data(), after step {self.engine.step_count}; {saved}"
            raise RankFailedError(fault, where="data", fix="see the error of that rank")
        return batch

    def _read_batch(self, batches: Iterator[Any]) -> tuple[Any, BaseException | None, list[int]]:
        """Return a batch, the error of data() if one came instead, and what each rank has: NONE, 1, FAILED. Collective.

        NONE: the batches have ended.
        """
        batch, problem, has, began = None, None, 1, time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            has = NONE
        except (Exception, SystemExit) as e:  # raised again after a save; or a signal has ended the workers that read
            problem, has = e, FAILED
        let_workers_end()
        self.waited = time.perf_counter() - began
        return batch, problem, self._agree(has)

    def _agree(self, state: int) -> list[int]:
        """Return the states of all ranks, and note the signals that came to any of them. Collective."""
        states = [0] * self.engine.mesh.layout.world
        states[self.engine.mesh.rank], asked = state, self.signals.saves if self.settings.save else 0
        sums: list[int] = self.engine.mesh.sum_on_host([self.signals.seen, asked - self.heeded, *states])
        stop, saves, *states = sums
        self.heeded, self.stopped, self.save_requested = asked, bool(stop), self.save_requested or saves > 0
        return states

    def _interrupt(self) -> NoReturn:
        """End the run, after a save, because a signal came to some rank."""
        self._read()
        number = self.signals.seen or signal.SIGTERM
        after = f"stopped by {signal.Signals(number).name} after step {self.engine.step_count}"
        raise Interrupted(number, f"{after}: {self._save_and_describe()}")

    def _read(self, *, evaluated: bool = False) -> None:
        """Read the numbers of the steps since the last time, and write their lines.

        The last line has the current numbers. With `evaluated` it also has the held-out loss: a collective.
        """
        steps, self.unread = self.unread, []
        if not steps:
            return
        begin = time.perf_counter()
        numbers = [float(x.loss) for x in steps]
        mean = (sum(x.seconds for x in steps) + time.perf_counter() - begin) / len(steps)
        self.losses += numbers
        waited = {axes: round(s / len(steps), 6) for axes, s in self.engine.mesh.waits.take().items()}
        *earlier, last = (self._line(x, loss, mean, waited) for x, loss in zip(steps, numbers, strict=True))
        if any(x.step in self.settings.breakdown for x in steps):  # op times slow the step down
            for line in (*earlier, last):
                line["breakdown"] = True
        for line in earlier:
            self.lines.add(line)
            self.call("logged", line)
        if self.engine.loads:
            last["experts"] = [dataclasses.asdict(x) for x in self.engine.loads]
        if self.engine.scaler is not None:
            last |= {"loss_scale": self.engine.scaler.factor, "skipped": self.engine.scaler.skipped}
        if evaluated and (held_out := self.held_out()):
            last |= in_log(held_out)
        self.lines.add(last, always="held_out" in last)
        self.call("logged", last)

    def _line(self, step: Unread, loss: float, seconds: float, waited: dict[str, float]) -> dict[str, Any]:
        line: dict[str, Any] = {
            "step": step.step,
            "loss": loss,
            "grad_norm": float(step.grad_norm) if step.grad_norm is not None else 0.0,
            "lr": step.lr,
            **({"epoch": round(step.epoch, 6)} if step.epoch is not None else {}),
            **self.meter.speed(1 / seconds),
            "seconds": round(seconds, 6),
            "data_wait": round(step.waited, 6),
            "waited": waited,
            **self.meter.work(1 / seconds),
            "bytes": self.meter.bytes,
            "memory_mb": round(peak_memory(self.engine.mesh.device) / 2**20, 1),
        }
        if self.engine.mesh.device.type == "cuda":
            line["reserved_mb"] = round(torch.cuda.max_memory_reserved(self.engine.mesh.device) / 2**20, 1)
        if not step.updated:
            self.skipped += 1
            line |= {"updated": False, "skipped": self.skipped}
        # the scalars that the loss function returns beside the loss
        if beside := {name: x.item() for name, x in step.beside.items() if x.numel() == 1}:
            line["outputs"] = beside
        return line

    def held_out(self) -> dict[str, float]:
        """Return {"loss": ..., name: ...} over all held-out batches (Engine.evaluate_all); {} without any.

        Of several sets, each one's values are at NAME/loss, ..., and `loss` is the mean of the sets' losses.
        Also {} if a signal stops it: the mean of some of the batches is not that of all.
        """
        if self.valid is None:
            if self.settings.eval_every and not self.empty and self.engine.mesh.rank == 0:
                print_line("note: there is no data('valid') in the model file: no held-out loss (--eval-every)")
            self.empty = True
            return {}
        step, values = self.engine.step_count, dict[str, float]()
        if self.evaluated[0] == step:
            return dict(self.evaluated[1])
        sets, of_sets = self.valid if isinstance(self.valid, dict) else {"": self.valid}, dict[str, dict[str, float]]()
        with self._save_on_failure(f"the evaluation after step {step}"), suppress(_Stopped):
            for name, valid in sets.items():
                with suppress(NoBatchesError):
                    of_sets[name] = self.engine.evaluate_all(self._held_out_batches(valid), local=valid.local)
            values = of_sets.get("") or {f"{name}/{n}": x for name, of in of_sets.items() for n, x in of.items()}
            if "" not in of_sets and of_sets:
                values["loss"] = sum(of["loss"] for of in of_sets.values()) / len(of_sets)
            self.evaluated = step, dict(values)
        if not values and not self.stopped and self.engine.mesh.rank == 0 and not self.empty:
            self.empty = True
            print_line("note: data('valid') has no batch: there is no held-out loss (return None if none is intended)")
        if values and self.engine.extra.get("evaluated") != step:  # a resumed run evaluates its first step again
            self.engine.extra["evaluated"] = step
            self.engine.evaluated(values["loss"])
            self.save_requested |= self.best.evaluated(values) and self.settings.keeps_best
        if values:
            self.call("evaluated", values)
        return dict(values)

    def _held_out_batches(self, valid: Batches) -> Iterator[Any]:
        """Yield held-out batches until they end. Heed signals between two batches: raise _Stopped, or save.

        A long evaluation reports its progress: data without end would be read forever. All ranks check first that all
        have a batch: one that ends alone would leave the others in the collectives of a batch that it does not have.
        """
        mesh, batches = self.engine.mesh, islice(valid.one_epoch(), self.settings.eval_batches or None)
        began = last_report = time.perf_counter()
        for number in count():
            batch, problem, having = self._read_batch(batches)
            if self.stopped and any(having):
                raise _Stopped
            if problem is not None:
                raise problem
            if any(having) and not all(having):
                ended = mesh.layout.named(*(rank for rank, has in enumerate(having) if not has))
                fault = f"the held-out data of {ended} ended after {number} batches, but others have more"
                fix = "make data(split, part, parts) return the same number of batches for every part"
                raise DisagreementError(fault, where="data", fix=fix if valid.local else SAME_BATCH)
            if not any(having):
                return
            if self.save_requested:
                self._save_in_background()
            if (now := time.perf_counter()) - last_report > SAY_AFTER:
                last_report = now
                read = f"held-out data: {number} batches in {now - began:.0f} s"
                self.lines.say(f"{read}, and it has not ended (--eval-batches N reads the first N)")
            yield batch

    def last_held_out(self) -> dict[str, float]:
        """Return the held-out values after the last step, and log them with it. Raises Interrupted after a signal."""
        values = self.held_out()
        if self.stopped and not values:
            self._interrupt()
        self.lines.add_held_out(self.engine.step_count, in_log(values))
        return values

    def save(self) -> None:
        """Save now, unless this step is saved already, and wait until all data is on disk."""
        self._finish_save()
        if self.saved != self.engine.step_count or self.save_requested:  # the last evaluation was the best
            self._write(wait=True)
            self.saved, self.save_requested = self.engine.step_count, False
            self.call("saved", {"step": self.saved, "folder": str(self.folder)})

    def _write(self, *, wait: bool) -> None:
        """Write a checkpoint. The first one may replace an earlier run's: `shardc run` has checked that."""
        self.engine.save(self.folder, wait=wait, keep=self.settings.last, overwrite=not self.wrote)
        self.wrote = True

    def _finish_save(self) -> None:
        """Wait until the save in the background is on disk, and report it, or why it failed."""
        try:
            self.engine.finish_save()
        except SavingError as e:
            self._not_saved(e)
        self._report_saved()

    def _save_and_describe(self, *, separately: str = "") -> str:
        """Save if the user named a folder; return a phrase that says so.

        separately: in a folder of this name, so that no good checkpoint is replaced.
        """
        if not self.settings.save:
            return "nothing was saved (no --save)"
        if separately:
            self.engine.save(self.folder.parent / separately / "checkpoint", overwrite=True)
            return f"the state before that step is in {self.folder.parent / separately}"
        self.save()
        return f"saved to {self.settings.save}; continue with --resume {self.settings.save}"


def in_log(held_out: dict[str, float]) -> dict[str, Any]:
    """Return held-out values as a line of the log has them."""
    loss, others = {"held_out": held_out.get("loss")}, {n: x for n, x in held_out.items() if n != "loss"}
    return (loss | ({"held_out_outputs": others} if others else {})) if held_out else {}


@contextmanager
def traced(file: Path, device: torch.device) -> Iterator[None]:
    """Record a trace for chrome://tracing and Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        yield
    file.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(file))


class Signals:
    """Records signals, which the ranks handle together between two steps.

    SIGINT, SIGTERM and SIGHUP (closed terminal) stop the run after a save. seen: the number. SIGUSR1 requests a
    checkpoint without a stop (Slurm sends it before it ends a job). saves: how often it came.
    """

    def __init__(self) -> None:
        self.seen, self.saves, self._since = 0, 0, 0.0
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if not ignored_hangup(number):
                    signal.signal(number, self._note)
            signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "saves", self.saves + 1))

    def _note(self, number: int, _: object) -> None:
        if self.seen and time.monotonic() - self._since > AT_ONCE:  # the second signal does not wait for a save
            os._exit(128 + number)
        if not self.seen:
            self.seen, self._since = number, time.monotonic()


def peak_memory(device: torch.device) -> float:
    """Return peak bytes: of the device's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)
