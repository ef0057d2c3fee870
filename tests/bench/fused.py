"""A step line by line, and with fused regions: seconds, kernels, bytes that all but products move.

    python tests/bench/fused.py [--only 'gpt*'] [--rounds 15] [--processes 6]

One thread, float32. The two take turns, one step each, round after round, in an order that changes: what the machine
does meanwhile falls on both alike. The ratio is the median over rounds of (compiled / line by line), in seconds of the
CPU. Which of the engines was made first makes up to 2 % of a step, as it lies elsewhere in memory: so processes, in
which another one is made first, give the median, and the lowest and the highest. Prints a table for
docs/measured/joint.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import llama as of_bench
import mixtral as of_experts
import torch
from compiled_models import ElementWise
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.capture import capture  # noqa: E402
from shardc.ir.fused_regions import fused_regions, moved  # noqa: E402
from shardc.ir.graph import values_of  # noqa: E402
from shardc.ir.units import size  # noqa: E402
from shardc.passes.joint.derivatives.record import is_view  # noqa: E402
from shardc.passes.joint.fused_regions import fuses, shares_memory  # noqa: E402
from shardc.runtime.compiled import compiler  # noqa: E402
from shardc.runtime.compiled.region_calls import code_of  # noqa: E402
from shardc.torch_private import kernels_of  # noqa: E402
from tests.gpt3 import GPT3  # noqa: E402

WAYS: dict[str, Any] = {"line by line": {}, "compiled": {"compile": "layers"}}
HEAD = """\
| model | compiled / line by line | line by line, CPU ms | regions | distinct | lines of these | kernels | bytes one by one | bytes fused |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
Built = tuple[nn.Module, Any]


def element_wise() -> Built:
    return ElementWise(), {"x": torch.randn(8, 256, 256)}


def gpt() -> Built:
    ids = torch.randint(4096, (4, 128))
    return GPT3(4, 384, 6, 128, 4096), {"ids": ids, "targets": ids.roll(1)}


def llama() -> Built:
    return of_bench.model(), of_bench.batch()


def mixtral() -> Built:
    return of_experts.model(), of_bench.batch()


MODELS: dict[str, Callable[[], Built]] = {"gpt": gpt, "llama": llama, "mixtral": mixtral, "element_wise": element_wise}


class Compared(NamedTuple):
    """ratio: of the compiled step to the step line by line; milliseconds: of that; cells: of the fused regions."""

    ratio: float
    milliseconds: float
    cells: tuple[str, ...]


def compared(name: str, rounds: int, number: int) -> Compared:
    """In this process, which is one of several: its number says which engine is made first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    captured = capture(model, batch, prove=False)
    spec = {"shardc": 1, "mesh": {"dp": 1}}
    order = list(WAYS)
    order = order[number % 2 :] + order[: number % 2]
    programs = {
        way: shardc.compile(model, batch, {**spec, "execution": WAYS[way]}, captured=captured, prove=False)
        for way in order
    }
    compiler._DONE.clear()
    compiler._EXPECTED.clear()
    engines = {way: p.engine(model) for way, p in programs.items()}
    for engine in engines.values():  # this compiles
        engine.step(batch)
        engine.step(batch)
    distinct = [run for run in compiler._DONE.values() if not isinstance(run, str)]
    kernels = sum(map(kernels_of, distinct))
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for r in range(rounds):
        for way in order[r % 2 :] + order[: r % 2]:
            begin = time.process_time()
            engines[way].step(batch)
            took[way].append(time.process_time() - begin)
    for engine in engines.values():
        engine.close()
    ratio = statistics.median(a / b for a, b in zip(took["compiled"], took["line by line"], strict=True))
    regions = [r for s in programs["compiled"].stages for g in s.joint.graphs.values() for r in fused_regions(g)]  # type: ignore[union-attr]
    lines = {code_of(r).key: sum(not is_view(n.target) for n in r.lines) for r in regions}
    traffic = [
        moved(r, fuses, lambda n: sum(v.nbytes() for v in values_of(n) if v is not None), shares_memory)
        for r in regions
    ]
    one_by_one, fused = (sum(x) for x in zip(*traffic, strict=True))
    cells = len(regions), len(distinct), sum(lines.values()), kernels, size(one_by_one), size(fused)
    return Compared(ratio, 1000 * statistics.median(took["line by line"]), tuple(map(str, cells)))


def row(name: str, rounds: int, processes: int) -> str:
    """Of the table."""
    found = []
    for number in range(processes):  # one after the other: each has a core of its own
        with ProcessPoolExecutor(1, get_context("spawn")) as one:
            found.append(one.submit(compared, name, rounds, number).result())
    some = sorted(x.ratio for x in found)
    ratio = f"{statistics.median(some):.3f} ({some[0]:.2f}-{some[-1]:.2f})"
    milliseconds = statistics.median(x.milliseconds for x in found)
    cells = (name, ratio, f"{milliseconds:.0f}", *found[-1].cells)
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="models whose names match")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=6)
    options = parser.parse_args()
    print(HEAD, end="", flush=True)
    for name in MODELS:
        if fnmatch(name, options.only):
            print(row(name, options.rounds, options.processes), end="", flush=True)


if __name__ == "__main__":
    main()
