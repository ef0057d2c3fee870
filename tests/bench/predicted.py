"""Write docs/measured/predicted.md: of models that no test has, what was predicted, and what a real step took.

    predicted.py                           memory of every model: the peak of live bytes on the loopback mesh
                                           (tests/live_bytes.py), which no other load changes
    predicted.py --processes 4             the same, of so many processes over gloo
    predicted.py --time 2 --device cpu     times: steps on 2 processes over gloo with one thread each, against the file
                                           of `shardc device cpu --measure --processes 2` (--device names another one)

Both add to the results that are kept in --kept FILE, and write the tables of all that are kept there; a model and a
setting that is kept already is not run again. --only, --setting: patterns of models and settings; --quick: few of them.
Times want all other work stopped, which may be for a part of them: --seconds 50 ends after the case that is under way
then. Exit status 1 where memory is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.api import Program  # noqa: E402
from shardc.cost import Device, device  # noqa: E402
from shardc.errors import ShardcError  # noqa: E402
from shardc.runtime.mesh import own_cores  # noqa: E402
from tests import live_bytes  # noqa: E402
from tests.bench.new_models import MODELS, New  # noqa: E402

OUT = ROOT / "docs" / "measured" / "predicted.md"
LIMIT = 0.02
WIDE = {"gMLP": 6, "parallel decoder": 6, "character CNN": 8, "DenseNet": 3, "cross network": 6, "Conformer": 8}
#: So many cases take so many turns, of so many steps; and steps before the first one.
TOGETHER, TURNS, STEPS, WARM = 12, 9, 3, 2
#: Steps do not count while other work takes more of the machine's cores. (What it takes while ranks wait for each other
#: is in it.)
QUIET = 0.3
LARGE = "zero 2, large buckets"
#: Settings whose steps are timed.
TIMED = {
    1: ("one device", "checkpoint", "bfloat16"),
    2: ("zero 0", "zero 2", "zero 3", "tp", "ep", "cp", "pp", "checkpoint", "bfloat16", LARGE),
}
#: Models that were looked at while shardc.cost was written; all others were not.
SEEN = tuple(MODELS)[:13]
QUICK = ("one device", "zero 3", "tp", "ep", "checkpoint", LARGE)


@dataclass(frozen=True)
class Peak:
    """Bytes, of the rank whose prediction is worst. refused: why there are none."""

    model: str
    setting: str
    predicted: int = 0
    measured: int = 0
    refused: str = ""
    processes: int = 0  # 0: threads
    day: str = field(default_factory=lambda: str(date.today()))

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, as predicted and as they were. others: the share of the cores that other work took; spread: by
    how much the medians of its turns differ, as a share of their median.
    """

    model: str
    setting: str
    processes: int
    predicted: float
    measured: float
    others: float
    machine: str
    day: str
    spread: float = 0.0

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


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
    yield LARGE, dp | {"data": {"zero": 2}}


def memory(name: str, label: str) -> Peak:
    try:
        program, model, batch = small(name, label, 2)
    except ShardcError as e:
        return Peak(name, label, refused=e.errors[0].what.splitlines()[0])
    return worst(name, label, program, live_bytes.measured(program, model, batch))


def small(name: str, label: str, world: int) -> tuple[Program, Any, Any]:
    """(a program, its model, a batch), for memory."""
    torch.manual_seed(0)
    model, batch = MODELS[name].make(1)
    spec = dict(settings(MODELS[name], world))[label]
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False), model, batch


def worst(name: str, label: str, program: Program, peaks: Sequence[int], processes: int = 0) -> Peak:
    """Of what every rank held, against its stage's prediction."""
    found = []
    for r in program.cost("h100-80g").ranks:
        here = [x for i, x in enumerate(peaks) if not program.axis or program.mesh.coords(i)[program.axis] == r.at]
        found.append(Peak(name, label, r.memory.peak, max(here), processes=processes))
    return max(found, key=lambda x: abs(x.off))


def memory_of_processes(cases: Sequence[tuple[str, str]], world: int) -> Iterator[Peak]:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        ranks = list(pool.map(partial(_peaks, cases=cases, world=world, folder=folder), range(world)))
    for (name, label), peaks in zip(cases, zip(*ranks, strict=True), strict=True):
        if None not in peaks:
            program, _, _ = small(name, label, world)
            yield worst(name, label, program, peaks, world)


def _peaks(rank: int, cases: Sequence[tuple[str, str]], world: int, folder: str) -> list[int | None]:
    """Of each (model, setting), what one rank holds at most; None of what is refused."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found: list[int | None] = []
    for name, label in cases:
        try:
            program, model, batch = small(name, label, world)
        except ShardcError:
            found.append(None)
            continue
        found.append(live_bytes.watched_here(program, model, batch).peak)
    torch.distributed.barrier()
    return found


@dataclass(frozen=True)
class Took:
    """Steps in turns. others: the share of the machine's cores that other work took meanwhile."""

    turns: list[float]
    others: float


def _steps(rank: int, cases: Sequence[tuple[str, str]], world: int, folder: str, until: float) -> list[Took | None]:
    """Of each (model, setting) that is begun before this second, on one rank; None of what is refused. Some at a time
    take turns.
    """
    torch.set_num_threads(1)
    own_cores.use(rank, world)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found: list[Took | None] = []
    for begin in range(0, len(cases), TOGETHER):
        late = torch.tensor(float(time.perf_counter() > until))
        torch.distributed.all_reduce(late)
        if late:
            break
        programs = [compiled(name, label, world) for name, label in cases[begin : begin + TOGETHER]]
        engines = [(p.engine(model), batch) for p, model, batch in programs if p is not None]
        torch.distributed.barrier()
        began, cores, own = time.perf_counter(), busy(), time.process_time()
        turns = in_turns([partial(engine.step, batch) for engine, batch in engines])
        ours = torch.tensor(time.process_time() - own, dtype=torch.float64)
        torch.distributed.all_reduce(ours)
        whole = (time.perf_counter() - began) * len(os.sched_getaffinity(0))
        others = max(busy() - cores - float(ours), 0.0) / whole
        for engine, _ in engines:
            engine.close()
        each = iter([Took(x, others) for x in turns])
        found += [None if p is None else next(each) for p, _, _ in programs]
    torch.distributed.barrier()
    return found


def in_turns(each: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Medians of a few steps of each of several programs, which ranks begin together. They take turns: what slows the
    machine down for a few seconds meets a turn of each, not all of one.
    """
    medians: list[list[float]] = [[] for _ in each]
    for turn in range(TURNS):
        for step, mine in zip(each, medians, strict=True):
            took = []
            for _ in range(WARM * (turn == 0) + STEPS):
                torch.distributed.barrier()
                begin = time.perf_counter()
                step()
                took.append(time.perf_counter() - begin)
            mine.append(median(took[-STEPS:]))
    return medians


def busy() -> float:
    """Seconds that all cores of this machine have computed, for anybody; on Linux, elsewhere 0."""
    file = Path("/proc/stat")
    if not file.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, file.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def compiled(name: str, label: str, world: int) -> tuple[Program | None, Any, Any]:
    """(a program, its model, a batch); no program of what is refused."""
    torch.manual_seed(0)
    model, batch = MODELS[name].make(WIDE.get(name, 4))
    spec = dict(settings(MODELS[name], world))[label]
    try:
        return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False), model, batch
    except ShardcError:
        return None, model, batch


def cases_of(world: int) -> list[tuple[str, str]]:
    """(model, setting) of what so many processes run."""
    return [
        (name, label)
        for name in MODELS
        for label, spec in settings(MODELS[name], world)
        if math.prod(spec["mesh"].values()) == world and label in TIMED[min(world, 2)]
    ]


def times(cases: Sequence[tuple[str, str]], cpu: Device, world: int, until: float) -> Iterator[Timed]:
    """Real steps, and what was predicted of them on the machine as it was then."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        work = partial(_steps, cases=cases, world=world, folder=folder, until=until)
        ranks = list(pool.map(work, range(world)))
    for (name, label), each in zip(cases, zip(*ranks, strict=True), strict=False):
        program, _, _ = compiled(name, label, world)
        if program is None or None in each:
            continue
        if (others := max(x.others for x in each)) > QUIET:
            print(f"{name}, {label}: other work took {others:.0%} of the machine; not kept")
            continue
        took = [max(turn) for turn in zip(*(x.turns for x in each if x is not None), strict=True)]
        spread, day = (max(took) - min(took)) / median(took), str(date.today())
        yield Timed(name, label, world, program.cost(cpu).step_seconds, median(took), others, cpu.source, day, spread)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a pattern of models")
    parser.add_argument("--setting", action="append", help="a pattern of settings")
    parser.add_argument("--quick", action="store_true", help="few settings")
    parser.add_argument("--processes", type=int, metavar="N", help="memory of so many processes")
    parser.add_argument("--time", type=int, metavar="N", help="step times on so many processes, not memory")
    parser.add_argument("--device", default="cpu", help="a file of `shardc device cpu --measure -o FILE`")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--kept", type=Path, default=Path("predicted.jsonl"), help="where results are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = [json.loads(x) for x in options.kept.read_text().splitlines()] if options.kept.is_file() else []
    peaks = [Peak(**x) for x in kept if "refused" in x]
    timed = [Timed(**x) for x in kept if "others" in x]

    def wanted(name: str, label: str) -> bool:
        asked = all(
            not patterns or any(fnmatch(x, p) for p in patterns)
            for x, patterns in ((name, options.only), (label, options.setting))
        )
        return asked and not (options.quick and label not in QUICK)

    def keep(found: Peak | Timed) -> None:
        with options.kept.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        print(" | ".join(map(str, asdict(found).values())), f"| {100 * found.off:+.2f} %", flush=True)

    begin = time.perf_counter()
    if options.time:
        there = {(x.model, x.setting) for x in timed if x.processes == options.time}
        cases = [x for x in cases_of(options.time) if wanted(*x) and x not in there]
        for found in times(cases, device(options.device), options.time, begin + options.seconds):
            timed.append(found)
            keep(found)
    elif options.processes:
        there = {(x.model, x.setting) for x in peaks if x.processes == options.processes}
        for found in memory_of_processes(
            [x for x in cases_of(options.processes) if wanted(*x) and x not in there], options.processes
        ):
            peaks.append(found)
            keep(found)
    else:
        there = {(x.model, x.setting) for x in peaks if not x.processes}
        for name, model in MODELS.items():
            for label, _ in settings(model):
                if wanted(name, label) and (name, label) not in there and time.perf_counter() - begin < options.seconds:
                    peaks.append(memory(name, label))
                    keep(peaks[-1])
    write(peaks, timed)
    return int(any(abs(x.off) > LIMIT for x in peaks))


def write(every: list[Peak], timed: list[Timed]) -> None:
    peaks = [x for x in every if not x.processes]
    if not peaks:
        return
    off = sorted(abs(x.off) for x in peaks if not x.refused)
    days = sorted({x.day for x in (*every, *timed)})
    text = f"""# Predicted and measured

{len({x.model for x in peaks})} models that no test of this repository has (tests/bench/new_models.py), {", ".join(days)}, torch {torch.__version__}. Made by
`.venv/bin/python tests/bench/predicted.py`, with `--time` for times.

## Memory

The peak of live tensor bytes of a step, as in [memory.md](memory.md), as it was measured on two ranks (four with dp × tp), and how far the
prediction is off: of {len(off)} the worst by {100 * off[-1]:.2f} %, nine in ten by at most {100 * off[int(0.9 * (len(off) - 1))]:.2f} %. Of a pipeline: the rank whose prediction is worst; "-": the model has no such
setting, it was not run, or compile refuses it (then it is listed below). With `ep` a rank holds the more the more its router sends it, and is
predicted as if all got the same.

"""
    text += _memory(peaks)
    for count in sorted({x.processes for x in every} - {0}):
        some = [x for x in every if x.processes == count]
        off = max((x.off for x in some), key=abs)
        text += f"""
The same of {count} processes over gloo, without what gloo itself takes for messages; the worst {100 * off:+.2f} %:

{_memory(some)}"""
    refused = "".join(f"- {x.model}, {x.setting}: {x.refused}\n" for x in peaks if x.refused)
    text += f"\nRefused:\n\n{refused}" if refused else ""
    if timed:
        text += _times(timed)
    OUT.write_text(text)
    print(f"{OUT.relative_to(ROOT)}: {len(peaks)} peaks, {len(timed)} times")


def _memory(peaks: list[Peak]) -> str:
    labels = list(dict.fromkeys(x.setting for x in peaks))
    by = {(x.model, x.setting): x for x in peaks}
    rows = []
    for name in dict.fromkeys(x.model for x in peaks):
        cells = [by.get((name, label)) for label in labels]
        rows.append(
            [name, *("-" if x is None or x.refused else f"{x.measured / 1e6:.2f} {100 * x.off:+.2f} %" for x in cells)]
        )
    return table(["MB, and % off", *labels], rows)


def _times(timed: list[Timed]) -> str:
    counts, repeated = sorted({x.processes for x in timed}), [x.spread for x in timed if x.spread] or [0.0]
    text = f"""
## Time

Steps of processes over gloo, one thread each, on their own cores where there are enough: the median of {TURNS} turns of {STEPS} steps, of the rank that took longest.
No model had a part in measuring the machine; the
first {len(SEEN)} of `new_models.py` were looked at while `shardc.cost` was written, the others were not. Other work was
stopped, but for {100 * median(x.others for x in timed):.0f} % of the cores' time as a median (which is also what it takes while ranks wait), and {100 * max(x.others for x in timed):.0f} % at most.
The turns of a case, a few seconds apart, differ by {100 * median(repeated):.0f} % as a median, by up to {100 * sorted(repeated)[int(0.9 * (len(repeated) - 1))]:.0f} % in nine of ten cases: so
much is the machine's own. Each cell: ms as predicted / measured, and how far that is off.

"""
    rows = []
    for n in counts:
        for what, some in (
            ("looked at", [x for x in timed if x.processes == n and x.model in SEEN]),
            ("not looked at", [x for x in timed if x.processes == n and x.model not in SEEN]),
        ):
            if some:
                rows.append([f"{n}, {what}", *_summary(some)])
    text += table(["processes, models", "steps", "median", "half within", "within 10 %", "worst"], rows)
    for n in counts:
        some = [x for x in timed if x.processes == n]
        labels = list(dict.fromkeys(x.setting for x in some))
        by = {(x.model, x.setting): x for x in some}
        machines = ", ".join(dict.fromkeys(f"{x.machine.split(';')[0]}" for x in some))
        text += f"\n{n} {'processes' if n > 1 else 'process'} ({machines}):\n\n"
        rows = []
        for name in dict.fromkeys(x.model for x in some):
            cells = [by.get((name, label)) for label in labels]
            rows.append([name, *("-" if x is None else _cell(x) for x in cells)])
        text += table(["model", *labels], rows)
    return text


def _cell(x: Timed) -> str:
    return f"{1e3 * x.predicted:.0f} / {1e3 * x.measured:.0f}, {100 * x.off:+.0f} %"


def _summary(some: list[Timed]) -> list[str]:
    """Median error, half within, share within 10 %, and the worst."""
    off = [x.off for x in some]
    away = sorted(map(abs, off))
    within = sum(x <= 0.1 for x in away)
    worst = max(off, key=abs)
    return [
        str(len(some)),
        f"{100 * median(off):+.0f} %",
        f"{100 * median(away):.0f} %",
        f"{within} of {len(some)}",
        f"{100 * worst:+.0f} %",
    ]


if __name__ == "__main__":
    sys.exit(main())
