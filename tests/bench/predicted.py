"""Write docs/measured/predicted.md: of models that no test has, what was predicted, and what a real step took.

Memory: the peak of live bytes on the loopback mesh (tests/live_bytes.py), which no other load changes. Time, with
`--time`: of each model this machine is measured, then a step on 1, 2 and 4 processes over gloo with one thread and one
core each; it says something on a quiet machine only. `--quick`: few settings and few steps. `--only gMLP`: that model,
printed and not written. Exit status 1 where memory is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.cost import Device  # noqa: E402
from shardc.cost.measure import measure  # noqa: E402
from shardc.errors import ShardcError  # noqa: E402
from tests import live_bytes  # noqa: E402
from tests.bench.new_models import MODELS, New  # noqa: E402

OUT = ROOT / "docs" / "measured" / "predicted.md"
LIMIT = 0.02
WIDE = {"gMLP": 6, "parallel decoder": 6, "character CNN": 8, "DenseNet": 3, "cross network": 6, "Conformer": 8}
STEPS, QUICK = 15, 9
#: Settings whose steps are timed.
TIMED = {
    1: ("one device", "checkpoint", "bfloat16", "lower"),
    2: ("zero 0", "zero 2", "zero 3", "tp", "ep", "cp", "pp", "checkpoint", "bfloat16", "lower"),
}


def settings(model: New, world: int = 2) -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs on so many ranks."""
    dp: dict[str, Any] = {"mesh": {"dp": world}}
    yield "one device", {"mesh": {"dp": 1}}
    for zero in range(4):
        yield f"zero {zero}", dp | {"data": {"zero": zero, "bucket_mb": 0.05}}
    yield "zero 2, 2 microbatches", dp | {"data": {"zero": 2, "bucket_mb": 0.05}, "batch": {"microbatches": 2}}
    yield "tp", {"mesh": {"tp": world}, "shard": {"use": "structure"}}
    yield "dp × tp", {"mesh": {"dp": world, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 1}}
    if model.cut:
        yield "pp", {"mesh": {"pp": 2}, "batch": {"microbatches": 4}, "pipeline": {"axis": "pp", "schedule": "1f1b"}}
    if model.experts:
        yield "ep", {"mesh": {"ep": world}, "experts": [{"match": model.experts, "axis": "ep"}]}
    if model.sequence:
        yield "cp", {"mesh": {"cp": world}, "sequence": {"axis": "cp"}}
    yield "checkpoint", dp | {"checkpoint": [{"match": model.layers}]}
    yield "checkpoint, cheap", dp | {"checkpoint": [{"match": model.layers, "recompute": "cheap"}], "data": {"zero": 3}}
    yield "bfloat16", dp | {"precision": {"compute": "bfloat16"}, "data": {"zero": 1}}
    yield "lower", dp | {"lower": True, "data": {"zero": 2}}
    yield "lower, checkpoint", dp | {"lower": True, "checkpoint": [{"match": model.layers}]}


def memory(name: str, quick: bool) -> Iterator[tuple[float, list[str]]]:
    """(how far off, the cells) of each setting; of a pipeline its worst rank."""
    model, batch = MODELS[name].make(1)
    for label, spec in settings(MODELS[name]):
        if quick and label not in ("one device", "zero 3", "tp", "ep", "checkpoint", "lower"):
            continue
        try:
            program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
        except ShardcError as e:
            yield 0.0, [name, label, "", "", f"refused: {e.errors[0].what.splitlines()[0]}"]
            continue
        cost, real = program.cost("h100-80g"), live_bytes.watched(program, model, batch)
        found = []
        for r in cost.ranks:
            here = [x for i, x in enumerate(real) if not program.axis or program.mesh.coords(i)[program.axis] == r.at]
            found.append((r.memory.peak, max(x.peak for x in here)))
        ours, theirs = max(found, key=lambda x: abs(x[0] / x[1] - 1))
        yield abs(ours / theirs - 1), [name, label, f"{ours:,}", f"{theirs:,}", f"{100 * (ours / theirs - 1):+.2f} %"]


def _steps(rank: int, name: str, spec: dict[str, Any], world: int, folder: str, steps: int) -> list[float]:
    """Seconds of each step, on one rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model, batch = MODELS[name].make(WIDE.get(name, 4))
    engine = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False).engine(model)
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step(batch)
        found.append(time.perf_counter() - begin)
    engine.close()
    return found[2:]


def times(name: str, cpu: Device, quick: bool) -> Iterator[list[str]]:
    steps = QUICK if quick else STEPS
    for world in (1, 2, 4):
        if world > len(os.sched_getaffinity(0)):  # a device is a core here
            continue
        for label, spec in settings(MODELS[name], world):
            size = 1
            for n in spec["mesh"].values():
                size *= n
            if size != world or label not in TIMED[min(world, 2)]:
                continue
            torch.manual_seed(0)
            model, batch = MODELS[name].make(WIDE.get(name, 4))
            try:
                predicted = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False).cost(cpu).step_seconds
            except ShardcError:
                continue
            with (
                tempfile.TemporaryDirectory() as folder,
                ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool,
            ):
                work = partial(_steps, name=name, spec=spec, world=world, folder=folder, steps=steps)
                took = max(median(x) for x in pool.map(work, range(world)))
            off = f"{100 * (predicted / took - 1):+.0f} %"
            yield [name, label, str(world), f"{1e3 * predicted:.1f}", f"{1e3 * took:.1f}", off]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one of the models")
    parser.add_argument("--quick", action="store_true", help="few settings, few steps; nothing is written")
    parser.add_argument("--time", action="store_true", help="step times too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.only] if options.only else list(MODELS)
    rows, timed, worst = [], [], 0.0
    for name in names:
        for off, row in memory(name, options.quick):
            worst = max(worst, off)
            rows.append(row)
            print(" | ".join(row), flush=True)
    if options.time:
        for name in names:  # measured again for each: the speed of a virtual machine changes within minutes
            cpu = measure("cpu", lambda what: print(f"measuring {what}", file=sys.stderr))
            print(cpu.source)
            for row in times(name, cpu, options.quick):
                timed.append(row)
                print(" | ".join(row), flush=True)
    refused = sum(not row[2] for row in rows)
    print(f"{len(rows) - refused} peaks, {refused} refused: the worst is off by {100 * worst:.2f} %")
    if options.only is None and not options.quick:
        write(rows, timed, worst, refused, cpu.source if options.time else "")
    return int(worst > LIMIT)


def write(rows: list[list[str]], timed: list[list[str]], worst: float, refused: int, machine: str) -> None:
    text = f"""# Predicted and measured

{len(MODELS)} models that no test of this repository has (tests/bench/new_models.py), {date.today()}, torch {torch.__version__}. Made by
`.venv/bin/python tests/bench/predicted.py`, with `--time` for times.

## Memory

The peak of live tensor bytes of a step, as in [memory.md](memory.md): of {len(rows) - refused} predictions the worst is off by {100 * worst:.2f} %. {refused} specs
are refused by compile. Of a pipeline: the rank whose prediction is worst.

"""
    text += table(["model", "spec", "predicted, bytes", "measured, bytes", "difference"], rows)
    if timed:
        text += f"\n## Time\n\nProcesses over gloo, one thread each; of {STEPS} steps the median. {machine}.\n\n"
        text += table(["model", "spec", "processes", "predicted, ms", "measured, ms", "difference"], timed)
    OUT.write_text(text)
    print(f"{OUT.relative_to(ROOT)}: {len(rows)} rows of memory, {len(timed)} of time")


if __name__ == "__main__":
    sys.exit(main())
