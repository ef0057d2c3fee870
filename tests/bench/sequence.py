"""Long rows on two processes: causal attention of 8192 tokens, its keys travelling (ring) against gathered, by blocks and
under a mask, and heads for tokens (ulysses) against DeepSpeed's DistributedAttention, where that is installed.

    python tests/bench/sequence.py [--tokens 8192] [--quick]

torch's context_parallel is no contender here: what it says on a CPU is printed. Its ring is registered for CUDA's
kernels alone (flash, efficient, cudnn; torch 2.11 to 2.13, torch/distributed/tensor/experimental/_context_parallel).
DeepSpeed: deepspeed.ai/tutorials/ds-sequence; each rank has the tokens of its half, and sums gradients of weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo import on_ranks
from torch import Tensor, nn

import shardc

RANKS, HEADS, SIZE = 2, 4, 64
#: (method, whether the model hides keys by a mask that is known when it runs only)
CONTENDERS = {
    "ring": ("ring", False),
    "gather, by blocks": ("gather", False),
    "gather, under a mask": ("gather", True),
    "ulysses": ("ulysses", False),
}
Step = Callable[[], float]  # one training step; the global loss


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


def ours(tokens: int, method: str, masked: bool) -> Step:
    model, batch = made(tokens, masked)
    spec = {"shardc": 1, "mesh": {"cp": RANKS}, "sequence": {"axis": "cp", "method": method}}
    program = shardc.compile(model, batch, spec, prove=False)
    engine = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, 0.0))
    return lambda: float(engine.step(batch))


def deepspeeds(tokens: int) -> Step:
    """The same layer with DeepSpeed's attention between its two products, [batch, tokens, heads, size]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)

    def attends(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    model, batch = made(tokens, False)
    attention = DistributedAttention(attends, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    x = batch["x"].chunk(RANKS, 1)[dist.get_rank()].contiguous()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.0)

    def step() -> float:
        q, k, v = (y.unflatten(-1, (HEADS, SIZE)) for y in model.qkv(x).chunk(3, -1))
        loss = model.out(attention(q, k, v, 0).flatten(2)).square().mean() / RANKS
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for g, mine in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(mine.view_as(g))
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    return step


def torchs() -> str:
    """What torch's context_parallel says on a CPU: "" if it runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = (torch.randn(1, HEADS, 64, SIZE, requires_grad=True) for _ in range(3))
    whole = [x.detach().clone() for x in (q, k, v)]
    try:
        with context_parallel(init_device_mesh("cpu", (RANKS,)), buffers=whole, buffer_seq_dims=[2, 2, 2]):
            parts = [x.clone().requires_grad_() for x in whole]
            F.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()
    except (NotImplementedError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}".splitlines()[0]
    return ""


def work(rank: int, tokens: int, steps: int) -> None:
    every = {name: ours(tokens, *how) for name, how in CONTENDERS.items()}
    try:
        every["DeepSpeed's ulysses"], missing = deepspeeds(tokens), ""
    except ImportError as e:  # deepspeed, or einops, which its layer wants
        missing = str(e)
    taken: dict[str, list[float]] = {name: [] for name in every}
    losses: dict[str, float] = {}
    for step in range(steps + 1):  # by turns; the first does not count
        for name, one in every.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = one()
            dist.barrier()
            if step:
                taken[name].append(time.perf_counter() - start)
    said = torchs()
    if rank == 0:
        report(taken, losses)
        if missing:
            print(f"DeepSpeed's DistributedAttention: {missing} (make .venv/.peers)")
        print(f"torch's context_parallel: {said or 'runs on this CPU: make it a contender'}")


def report(taken: dict[str, list[float]], losses: dict[str, float]) -> None:
    """A line for each contender. What computes another loss is no contender."""
    wrong = {name: loss for name, loss in losses.items() if abs(loss - losses["ring"]) > 1e-4 * abs(losses["ring"])}
    assert not wrong, f"losses differ: {losses}"
    ring = statistics.median(taken["ring"])
    for name, times in taken.items():
        one = statistics.median(times)
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{name:24} {one:6.2f} s a step ({spread})   {one / ring:5.2f} x ring")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="512 tokens and one step: whether it runs")
    args = parser.parse_args()
    on_ranks(work, RANKS, *((512, 1) if args.quick else (args.tokens, args.steps)))
