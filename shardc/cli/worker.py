"""One process of `shardc run`: load the program, make its part of the weights, train, save, evaluate.

Started by shardc.runtime.launch, torchrun or Slurm as `python -m shardc.cli.worker JOB.json`.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import Dataset, IterableDataset

from shardc.errors import ShardcError


@dataclasses.dataclass(frozen=True)
class Job:
    """One run. program: artifact folder. model: model reference. save, resume, log: folders, or "". quiet: no lines
    (--json).

    progress: folder in which rank r keeps `rank<r>` (shardc.runtime.launch.Progress). result: file into which rank 0
    writes the summary. trust: run an edited artifact. routing: say how tokens are spread over experts. joined: the
    processes were started by torchrun or Slurm.
    """

    program: str
    model: str
    batch: int | None = None
    seq: int | None = None
    steps: int = 100
    seed: int = 0
    save: str = ""
    resume: str = ""
    log: str = ""
    quiet: bool = False
    result: str = ""
    progress: str = ""
    trust: bool = False
    routing: bool = False
    joined: bool = False


def run(job: Job) -> dict[str, Any]:
    """Train. Returns the summary: steps, losses, held-out loss, seconds. Collective over the world."""
    from shardc.artifact import load
    from shardc.cli import model_file
    from shardc.compile import compile
    from shardc.resize import Resizer
    from shardc.runtime import state
    from shardc.runtime.launch import Progress
    from shardc.runtime.step.engine import adamw
    from shardc.runtime.step.interpreter import Interpreter

    file = model_file.load(job.model, batch=job.batch, seq=job.seq)
    program = load(job.program, trust=job.trust)
    program.resize = Resizer(file.on_meta, file.loss, {}, compile)
    note = Progress(Path(job.progress) / f"rank{os.environ.get('RANK', '0')}").note if job.progress else None
    engine = program.engine(
        file.build,
        optimizer=file.optimizer or adamw,
        scheduler=file.scheduler,
        seed=job.seed,
        norm=True,
        routing=job.routing,
        interpreter=functools.partial(Interpreter, note=note),
    )
    if job.resume:
        engine.load(Path(job.resume) / "checkpoint")
    rank = engine.mesh.rank
    train = _Data.of(engine, file, "train", job.seed) if file.data else _Data(itertools.repeat(file.batch))
    valid = _Data.of(engine, file, "valid", job.seed) if file.data else None
    if train is None:
        raise ShardcError(
            "data('train') returns None",
            where=job.model,
            fix="return an iterable of global batches, or a torch Dataset of samples",
        )
    tokens = next(
        (x.shape[0] * x.shape[1] for x in program.inputs if len(x.shape) > 1 and not x.dtype.is_floating_point), 0
    )
    tokens = tokens or (program.inputs[0].shape[0] if program.inputs and program.inputs[0].shape else 1)

    lines, begin = [], time.perf_counter()
    for line in _shown(_logged(_steps(engine, train, job.steps, tokens), job, rank), job, rank):
        lines.append(line)
    seconds = time.perf_counter() - begin
    if len(lines) < job.steps and rank == 0:
        what = f"data('train') ended after {engine.step_count} batches: {len(lines)} of {job.steps} steps were done"
        print(f"note: {what}; let it begin anew there, or return a torch Dataset", file=sys.stderr)
    if job.save:
        engine.save(Path(job.save) / "checkpoint")
        state.export_safetensors(
            Path(job.save) / "model.safetensors", program, engine.mesh, engine.wholes(), engine.buffers
        )
    held_out = _held_out(engine, valid)
    summary = {
        "model": program.meta.get("model"),
        "mesh": dict(program.mesh.axes),
        "steps": len(lines),
        "seconds": round(seconds, 3),
        "losses": [line["loss"] for line in lines],
        "held_out": held_out,
        "tokens_per_second": round(tokens * len(lines) / seconds, 1),
        "peak_memory_mb": lines[-1]["memory_mb"] if lines else 0,
        "saved": job.save or None,
    }
    if job.log and rank == 0:
        (Path(job.log) / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


@dataclasses.dataclass(frozen=True)
class _Data:
    """Batches of a split: global ones, or local parts where they come from a loader, which keeps its own position."""

    batches: Iterable[Any]
    local: bool = False

    @classmethod
    def of(cls, engine: Any, file: Any, split: str, seed: int) -> _Data | None:
        """From the model file's data(split), which may return None. A map-style dataset is read by a loader."""
        data = file.data(split)
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            train = split == "train"
            options = {"shuffle": train, "seed": seed, "collate_fn": file.collate, "name": split if train else None}
            return cls(engine.loader(data, **options), local=True)
        return cls(data) if data is not None else None

    def rest(self, done: int, steps: int) -> Iterator[Any]:
        """The batches of the next `steps` steps: of one epoch after the other, or those behind what `done` steps have
        seen.
        """
        if self.local:
            return itertools.islice(itertools.chain.from_iterable(itertools.repeat(self.batches)), steps)
        return itertools.islice(iter(self.batches), done, done + steps)


def _steps(engine: Any, data: _Data, steps: int, tokens: int) -> Iterator[dict[str, Any]]:
    for batch in data.rest(engine.step_count, steps):
        start, lr = time.perf_counter(), engine.lr
        loss = engine.step(batch, local=data.local)
        value, norm = float(loss), float(engine.grad_norm) if engine.grad_norm is not None else 0.0
        line = {
            "step": engine.step_count,
            "loss": value,
            "grad_norm": norm,
            "lr": lr,
            "tokens_per_second": round(tokens / (time.perf_counter() - start), 1),
            "memory_mb": round(_memory(engine.mesh.device) / 2**20, 1),
        }
        if engine.loads:
            line["experts"] = [dataclasses.asdict(x) for x in engine.loads]
        if engine.scaler is not None:
            line |= {"loss_scale": engine.scaler.factor, "skipped": engine.scaler.skipped}
        yield line


def _logged(lines: Iterable[dict[str, Any]], job: Job, rank: int) -> Iterator[dict[str, Any]]:
    """Rank 0 appends each step to LOG/steps.jsonl at once: a run that is stopped keeps its log."""
    if rank != 0 or not job.log:
        yield from lines
        return
    Path(job.log).mkdir(parents=True, exist_ok=True)
    with (Path(job.log) / "steps.jsonl").open("a", buffering=1) as f:
        for line in lines:
            f.write(json.dumps(line) + "\n")
            yield line


def _memory(device: torch.device) -> float:
    """Peak bytes: of the device's allocator, or of the process on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)


def _text(line: dict[str, Any]) -> str:
    lr = f"lr {line['lr']:.2e}  " if line["lr"] is not None else ""
    return (
        f"step {line['step']:>5}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3f}  {lr}"
        f"{line['tokens_per_second']:>9,.0f} tokens/s  {line['memory_mb']:,.0f} MiB"
        + (f"  loss scale {line['loss_scale']:g}, {line['skipped']} skipped" if "loss_scale" in line else "")
        + _spread(line.get("experts", ()))
    )


def _spread(layers: Sequence[dict[str, Any]]) -> str:
    """The experts' part of a step line: the least and the most tokens of an expert, the busiest rank, and drops, over
    all layers.
    """
    if not layers:
        return ""
    tokens = [n for x in layers for n in x["tokens"]]
    dropped = sum(x["dropped"] for x in layers) / len(layers)
    text = f"  experts {min(tokens)}-{max(tokens)} tokens, busiest rank x{max(x['imbalance'] for x in layers):.2f}"
    return text + (f", {dropped:.1%} dropped" if dropped else "")


def _shown(lines: Iterable[dict[str, Any]], job: Job, rank: int) -> Iterator[dict[str, Any]]:
    """Rank 0 shows a bar with the step line on a terminal, and about 20 lines elsewhere."""
    if rank != 0 or job.quiet:
        yield from lines
    elif sys.stdout.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        ) as bar:
            task = bar.add_task("", total=job.steps)
            for line in lines:
                bar.update(task, advance=1, description=_text(line))
                yield line
    else:
        every = max(1, job.steps // 20)
        for i, line in enumerate(lines):
            if i % every == 0 or i + 1 == job.steps:
                print(_text(line), flush=True)
            yield line


def _held_out(engine: Any, data: _Data | None) -> float | None:
    """Mean loss over the held-out batches, each with the same weight; None without any."""
    losses = [float(engine.evaluate(b, local=data.local)) for b in data.batches] if data is not None else []
    return sum(losses) / len(losses) if losses else None


def main(file: str) -> None:
    """Run a job, and leave at once if it fails: a rank that waits in a destructor for its
    peers would hide the cause.
    """
    job = Job(**json.loads(Path(file).read_text()))
    try:
        summary = run(job)
    except ShardcError as e:
        print(e, file=sys.stderr, flush=True)
        _report_errors(job, e.to_json())
        os._exit(2)
    except BaseException as e:
        traceback.print_exc()
        sys.stderr.flush()
        _report_errors(
            job, [{"where": f"rank {os.environ.get('RANK', '0')}", "what": f"{type(e).__name__}: {e}", "fix": ""}]
        )
        os._exit(1)
    if job.result and int(os.environ.get("RANK", "0")) == 0:
        Path(job.result).write_text(json.dumps(summary))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _report_errors(job: Job, errors: list[dict[str, str]]) -> None:
    """For --json: to the launcher, which prints those of the rank that failed first; under torchrun or Slurm, the first
    rank prints its own.
    """
    rank = os.environ.get("RANK", "0")
    if job.progress:
        (Path(job.progress) / f"errors{rank}.json").write_text(json.dumps(errors))
    if job.joined and job.quiet and rank == "0" and sys.__stdout__ is not None:
        print(json.dumps({"errors": errors}), file=sys.__stdout__, flush=True)


def leave(status: int = 0) -> NoReturn:
    """End a process of a world that has done its work, without taking the interpreter down first.

    gloo's threads may still hold a tensor then, and letting go of it without an interpreter aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). What was registered with atexit runs.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
