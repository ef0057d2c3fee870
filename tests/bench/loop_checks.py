"""What a loop of one's own around `program.module` pays for being compared over ranks: two gloo processes, dp=2.

    python tests/bench/loop_checks.py                  prints the figures of docs/measured/faults.md

Three ways of the same loop on the same module, in turn, a few steps each, so that what else the machine does falls on
all alike: everything compared; without what the loop did between two forwards (shardc/runtime/checks/loop_watch.py);
nothing compared. Ratios are medians over rounds of the steps' wall time, with the quartiles; beside them the CPU
seconds of the first rank, of which nobody else can take any.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import llama
from gloo import on_ranks

import shardc

WAYS = ("all compared", "not the loop", "nothing compared")


llama.SIZE = llama.Size(layers=4, hidden=256, heads=4, inter=704, vocab=4096, batch=4, seq=128)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


MODELS: dict[str, tuple[Any, Any, int, int]] = {  # name: (model, batch, steps in a turn, rounds)
    "8 linear layers, 0.13 M parameters, 64 rows": (Small, lambda: {"x": torch.ones(64, 128)}, 10, 60),
    "Llama, 4 layers, 5 M parameters, 4 x 128 tokens": (llama.model, llama.batch, 1, 12),
}


class _Off:
    """In place of the watch of a loop."""

    others = False

    def check_model(self, plain_optimizer: str, *, changed: bool) -> None: ...

    def note_gradient(self, g: Tensor) -> None: ...

    def facts(self, *, last: bool = False) -> list[Any]:
        return []


def work(rank: int, name: str) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each way's steps, on one rank."""
    made, batch, steps, rounds = MODELS[name]
    torch.manual_seed(0)
    model = made()
    program = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    module = program.module(model, check_every=0)
    optimizer = llama.optimizer(module.parameters())
    part, running = module.local(batch()), module._running
    checks = running.checks
    watch = checks._loop
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for i in range(rounds + 2):
        for k in range(3):
            way = WAYS[(i + k) % 3]
            checks.compares = way != "nothing compared"
            checks._loop = watch if way == "all compared" else _Off()  # type: ignore[assignment]
            watch._compares = way == "all compared"
            torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                module(**part).backward()
                optimizer.step()
                optimizer.zero_grad()
            times[way].append(((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps))
    return {way: each[2:] for way, each in times.items()}


def main() -> None:
    print("| model | ms a step | without the loop's | without any | CPU ms a step | without the loop's | without any |")
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        times, _ = on_ranks(work, 2, name)
        cells = []
        for kind in (0, 1):
            each = {way: [x[kind] for x in given] for way, given in times.items()}
            cells.append(f"{statistics.median(each[WAYS[0]]) * 1e3:.2f}")
            for way in WAYS[1:]:
                ratios = [a / b for a, b in zip(each[WAYS[0]], each[way], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
