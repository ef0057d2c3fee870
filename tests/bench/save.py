"""Saving and loading, ours and torch.distributed.checkpoint's, on the same state: 2 processes of 1 thread, gloo.

    python tests/bench/save.py --mb 1024 --rounds 5

Both take turns, round after round, and each save is on the disk when it ends (fsync). The state is that of an MLP under
AdamW with ZeRO 3: for torch's the same tensors of each rank, under names of their own. Files are read back from the
system's cache, where they are put first: ours were written past it. Then ours is written in the background, and the steps beside it are compared with steps that have none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gloo import on_ranks

RANKS, WIDTH, ROWS = 2, 1024, 256


def work(rank: int, folder: Path, mb: int, rounds: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn

    import shardc

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    torch.manual_seed(0)
    layers = max(1, mb * 2**20 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    batch = {"input": torch.randn(ROWS, WIDTH)}
    spec = {"shardc": 1, "mesh": {"dp": RANKS}, "data": {"zero": 3}}
    program = shardc.compile(model, batch, spec, loss=lambda y, _: y.square().mean())
    engine = program.engine(model, check=False)
    del model
    engine.step(batch)
    tensors = {f"rank{rank}.{n}": p.detach() for n, p in engine.params.items()}
    for n, p in engine.params.items():
        state = engine.optimizer.state[p]
        tensors |= {f"rank{rank}.{n}.{k}": x for k, x in state.items() if x.dim()}
    nbytes = sum(x.nbytes for x in tensors.values())

    def timed(do: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        do()
        dist.barrier()
        return time.perf_counter() - start

    def fresh(name: str) -> Path:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()
        return folder / name

    times: dict[str, list[float]] = {k: [] for k in ("save", "load", "torch save", "torch load")}
    peaks: dict[str, list[float]] = {k: [] for k in times}
    works = {
        "save": lambda: engine.save(fresh("ours")),
        "torch save": lambda: dcp.save(tensors, checkpoint_id=fresh("torch")),
        "load": lambda: engine.load(folder / "ours"),
        "torch load": lambda: dcp.load(tensors, checkpoint_id=folder / "torch"),
    }
    for r in range(rounds):
        for name in list(works) if r % 2 else [list(works)[i] for i in (1, 0, 3, 2)]:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
            if name.endswith("load"):
                for file in (folder / ("ours" if name == "load" else "torch")).rglob("*.*"):
                    with open(file, "rb", buffering=0) as f:
                        while f.read(1 << 20):
                            pass
            before = _memory("VmRSS")
            times[name].append(timed(works[name]))
            peaks[name].append((_memory("VmHWM") - before) / 2**20)

    def step() -> float:
        return timed(lambda: engine.step(batch))

    alone, beside, calls = [], [], []
    for _ in range(rounds):
        alone += [step() for _ in range(4)]
        path = fresh("background")
        calls.append(timed(lambda path=path: engine.save(path, wait=False)))  # type: ignore[misc]
        while engine.saving is not None:
            beside.append(step())
    engine.finish_save()
    engine.close()
    return {
        "mib": RANKS * nbytes / 2**20,
        **{k: RANKS * nbytes / 1e9 / median(v) for k, v in times.items()},
        "save ratio": median(a / b for a, b in zip(times["torch save"], times["save"], strict=True)),
        "load ratio": median(a / b for a, b in zip(times["torch load"], times["load"], strict=True)),
        "peak MiB of a rank": {k: max(v) for k, v in peaks.items()},
        "step alone ms": 1000 * median(alone),
        "step beside a save ms": 1000 * median(beside),
        "steps beside": len(beside),
        "the call of save(wait=False) ms": 1000 * median(calls),
    }


def _memory(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        first, _ = on_ranks(work, RANKS, Path(temporary), args.mb, args.rounds)
    print(json.dumps(first, indent=1))


if __name__ == "__main__":
    main()
