"""What offload frees, and what it costs: peak memory and time of steps on one device, each way in a process of its own.

    python tests/bench/offload.py [--width 1024] [--layers 32] [--rows 64] [--steps 5] [--bucket_mb 8] [--dir
    /scratch/offload]

Peak memory is the system's (VmHWM): everything that the process has in memory, pages of files that it maps included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc

MIB = 2**20


class Deep(nn.Module):
    """Much weight, little activation. width * width * layers numbers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def ways(folder: str) -> dict[str, dict[str, str]]:
    """What of `data.offload` is compared, by name."""
    return {
        "nothing": {},
        "optimizer on the cpu": {"optimizer": "cpu"},
        "optimizer in files": {"optimizer": folder},
        "optimizer and parameters in files": {"optimizer": folder, "parameters": folder},
    }


def status(key: str) -> int:
    """Bytes, of /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def one(width: int, layers: int, rows: int, steps: int, bucket_mb: float, offload: dict[str, str]) -> dict[str, Any]:
    """Train in this process: {"loss", "peak": bytes above what was there before the engine was made, "ms" of the
    fastest step, "params": bytes}.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = (torch.randn(rows, width),)
    with torch.device("meta"):
        shape = Deep(width, layers)
    spec = {"shardc": 1, "mesh": {"dp": 1}, "data": {"zero": 3, "bucket_mb": bucket_mb, "offload": offload}}
    program = shardc.compile(shape, batch, spec, prove=False)
    before = status("VmRSS")
    engine = program.engine(lambda: Deep(width, layers), lambda ps: torch.optim.AdamW(ps, lr=1e-3))
    engine.step(batch)  # makes the state
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = engine.step(batch)
        times.append(time.perf_counter() - start)
    peak = status("VmHWM") - before
    engine.close()
    return {
        "loss": float(loss),
        "peak": peak,
        "ms": min(times) * 1000,
        "params": sum(p.numel() * p.element_size() for p in shape.parameters()),
    }


def measure(**args: Any) -> dict[str, Any]:
    """Run `one` in its own process.

    A fixed threshold makes each tensor a mapping that goes back to the system when it is freed: by default glibc
    raises it, keeps freed blocks, and the peak moves by 20 % from run to run.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(args)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1024), ("layers", 32), ("rows", 64), ("steps", 5), ("bucket_mb", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", default="")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(**json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory(dir=options.dir or None) as folder:
        sizes = {key: getattr(options, key) for key in ("width", "layers", "rows", "steps", "bucket_mb")}
        results = {name: measure(**sizes, offload=offload) for name, offload in ways(folder).items()}
    first = results["nothing"]
    size = f"{first['params'] / MIB:.0f} MiB of float32 parameters, {options.rows} rows"
    print(f"{size}, AdamW, one process x 1 thread, fastest of {options.steps} steps\n")
    print("| offloaded | peak memory, MiB | step, ms |\n|---|---:|---:|")
    for name, x in results.items():
        assert x["loss"] == first["loss"], f"{name}: {x['loss']} is not {first['loss']}"
        print(f"| {name} | {x['peak'] / MIB:.0f} | {x['ms']:.0f} |")


if __name__ == "__main__":
    main()
