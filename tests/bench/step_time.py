"""Predicted and measured step times of a GPT on this machine's CPU: measures the machine, then a step on one and on two
processes.

Prints a table: the best of some steps, of processes with one thread each; nothing else should run
meanwhile. CPU seconds, of which nobody else can take any, show whether something did.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.cost.measured.measure import measure  # noqa: E402
from tests.gpt3 import GPT3  # noqa: E402

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB, BATCH, STEPS = 4, 384, 6, 128, 4096, 8, 12
TP = {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row"}
SETTINGS: dict[str, dict[str, Any]] = {
    "one process": {"mesh": {"dp": 1}},
    "dp=2": {"mesh": {"dp": 2}},
    "dp=2, zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
    "tp=2": {"mesh": {"tp": 2}, "shard": TP},
    "one process, checkpoint": {"mesh": {"dp": 1}, "checkpoint": [{"match": "h.*"}]},
}


def built() -> tuple[Any, Any]:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (BATCH, SEQUENCE))
    return GPT3(LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB).train(), {"ids": ids, "targets": ids.roll(1)}


def steps(rank: int, folder: str, spec: dict[str, Any], world: int) -> tuple[float, float]:
    """Of the best step, seconds and CPU seconds."""
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model, batch = built()
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
    engine = program.engine(model)
    best = busy = float("inf")
    for _ in range(STEPS):
        begin, used = time.perf_counter(), time.process_time()
        engine.step(batch)
        best, busy = min(best, time.perf_counter() - begin), min(busy, time.process_time() - used)
    engine.close()
    return best, busy


def measured(spec: dict[str, Any]) -> tuple[float, float]:
    world = max(spec["mesh"].values())
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        return max(pool.map(partial(steps, folder=folder, spec=spec, world=world), range(world)))


def main() -> None:
    torch.set_num_threads(1)
    cpu = measure("cpu", lambda what: print(f"measuring {what}", file=sys.stderr))
    print(cpu.to_yaml())
    model, batch = built()
    elements = sum(p.numel() for p in model.parameters())
    print(
        f"GPT, {LAYERS} layers, hidden {HIDDEN}, {elements / 1e6:.1f} M parameters, batch {BATCH} x {SEQUENCE} tokens,"
        " float32, AdamW\n"
    )
    print("| | predicted, ms | measured, ms | predicted / measured | CPU, ms |\n|---|---:|---:|---:|---:|")
    for name, spec in SETTINGS.items():
        program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
        predicted, (took, busy) = program.cost(cpu).step_seconds, measured(spec)
        print(
            f"| {name} | {1e3 * predicted:.0f} | {1e3 * took:.0f} | {predicted / took:.2f} | {1e3 * busy:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
