"""Long rows on two processes: causal attention of 8192 tokens, its keys travelling (ring) against gathered, by blocks and
under a mask.

    python tests/bench/sequence.py [tokens]

torch's context_parallel is no contender here: its ring is registered for CUDA's kernels alone (flash, efficient, cudnn;
torch 2.11 to 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

RANKS, STEPS, HEADS, SIZE = 2, 3, 4, 64
#: (method, whether the model hides keys by a mask that is known when it runs only)
CONTENDERS = {"ring": ("ring", False), "gather, by blocks": ("gather", False), "gather, under a mask": ("gather", True)}


class Attends(nn.Module):
    """One layer of causal attention. A mask that hangs on the batch is what a padded batch brings."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.masked = masked

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.masked:
            i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None, :]
            y = F.scaled_dot_product_attention(q, k, v, (j <= i) & kept[:, None, None, :])
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()  # type: ignore[no-any-return]


def made(tokens: int, masked: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(1, tokens, HEADS * SIZE), "kept": torch.ones(1, tokens, dtype=torch.bool)}
    return Attends(masked), batch


def work(rank: int, tokens: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    engines: dict[str, Any] = {}
    for name, (method, masked) in CONTENDERS.items():
        model, batch = made(tokens, masked)
        spec = {"shardc": 1, "mesh": {"cp": RANKS}, "sequence": {"axis": "cp", "method": method}}
        program = shardc.compile(model, batch, spec, prove=False)
        engines[name] = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, 0.0)), batch
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(STEPS + 1):  # by turns; the first does not count
        for name, (engine, batch) in engines.items():
            dist.barrier()
            start = time.perf_counter()
            engine.step(batch)
            dist.barrier()
            if step:
                taken[name].append(time.perf_counter() - start)
    if rank == 0:
        ring = statistics.median(taken["ring"])
        for name, times in taken.items():
            one = statistics.median(times)
            spread = f"{min(times):.2f} to {max(times):.2f}"
            print(f"{name:24} {one:6.2f} s a step ({spread})   {one / ring:5.2f} x ring")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
        mp.spawn(work, (tokens, str(Path(folder) / "meeting")), RANKS)
