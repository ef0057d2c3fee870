"""What a machine is measured by: pieces of models, forward and backward, in several sizes, and updates of weights.

Each op of them is timed (shardc.cost.op_times). All pieces run in turn, again and again, so that an op finds its
operands where it finds them in a step: seldom in the nearest cache. Of each op the median of its rounds counts: a step
meets what makes some of them slower, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardc.cost.fit import OpSample, merged
from shardc.cost.machine_speed import timer, usual
from shardc.cost.op_times import OpTimes
from shardc.machine.device import Reference
from shardc.runtime import ops
from shardc.runtime.mesh.allocator import keep_freed
from shardc.runtime.rng import Rng

#: (tokens, hidden) of the pieces.
SIZES = {
    "cpu": ((16, 32), (64, 64), (128, 96), (256, 128), (256, 384), (512, 256), (1024, 512), (2048, 192)),
    "cuda": ((256, 256), (1024, 1024), (2048, 2048), (4096, 1536), (4096, 4096), (8192, 3072), (16384, 2048)),
}
VOCABULARY, HEAD = 1000, 32
#: Products of fewer rows: tokens divided by these. Tokens of the rows of attention, at most.
FEW, LENGTHS = (8, 32), (16, 256)
#: So many pieces run between two looks at how fast the machine is.
TOGETHER = 20
#: Of the small model by which the host's time is found; and how often it runs.
LAYERS, ROUNDS = 8, 5


@dataclass(frozen=True)
class Tour:
    """What was measured. host: seconds that a small op takes beside its own, in autograd and Python; reference: how
    fast the machine was meanwhile.
    """

    samples: list[OpSample]
    host: float
    reference: Reference


def tour(
    device: torch.device,
    seconds: float,
    on: Callable[[str], None] = lambda what: None,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> Tour:
    """Rounds for about so many seconds, and no less than one. sizes: default: SIZES."""
    if device.type == "cpu":
        keep_freed()  # as in a run
    each = sizes or SIZES[device.type]
    pieces = [piece for tokens, hidden in each for piece in _pieces(tokens, hidden, device, torch.float32)]
    pieces += [piece for tokens, hidden in each[::2] for piece in _pieces(tokens, hidden, device, torch.bfloat16)]
    pieces += [piece for tokens, hidden in each for piece in _in_one_dtype(tokens, hidden, device)]
    found: list[OpSample] = []
    once, beside = timer(), []
    begin, rounds = time.perf_counter(), 0
    while not rounds or time.perf_counter() - begin < seconds:
        on(f"ops, round {rounds + 1}")
        if rounds == 1:  # the first one allocates: it counts where there is no other
            found.clear()
        for at in range(0, len(pieces), TOGETHER):
            beside.append(once())
            times = OpTimes(device)
            with times:
                for piece in pieces[at : at + TOGETHER]:
                    piece()
            found += [OpSample(x.op, x.seconds / x.count, x.count) for x in times.measured(0).ops]
        rounds += 1
    return Tour(merged(found, statistics.median), _host(device), usual(beside))


def _host(device: torch.device) -> float:
    """Of a small model of several layers: what its step takes beside its ops, for each op. One backward for many ops,
    as in a step: to begin one takes as long as several ops.
    """
    tokens, hidden = SIZES[device.type][0]
    x = torch.randn(tokens, hidden, device=device)
    layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        for _ in range(LAYERS)
    ).to(device)

    def step() -> None:
        y = x
        for layer in layers:
            y = y + layer(y)
        _backward(y)

    least, spent, count = float("inf"), 0.0, 1
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - begin)
        with OpTimes(device) as times:
            step()
        ops = times.measured(0).ops
        count, spent = sum(x.count for x in ops), sum(x.count * x.least for x in ops)
    return max(least - spent, 0.0) / count if device.type == "cpu" else least / count


def _pieces(tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Functions that each run one piece, forward and backward. dtype: of all numbers in it."""
    random = partial(torch.randn, dtype=dtype, device=device)
    x = random(tokens, hidden).requires_grad_()
    wide = random(tokens, 4 * hidden).requires_grad_()
    yield from _products(x, wide, hidden, device, dtype)
    yield from _attention(tokens, hidden, device, dtype)
    norm, scale = nn.LayerNorm(hidden, device=device, dtype=dtype), random(hidden).requires_grad_()

    def root_mean_square() -> None:
        _backward(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale)

    yield lambda: _backward(norm(x))
    yield root_mean_square
    for function in (functional.gelu, functional.silu, functional.relu, torch.tanh, torch.sigmoid, torch.exp):
        yield lambda function=function: _backward(function(wide))  # type: ignore[misc]
    yield lambda: _backward(functional.gelu(wide, approximate="tanh"))
    yield lambda: _backward(wide.softmax(-1))
    yield lambda: _backward((x + x * 0.5) * x / 3 - x)
    yield lambda: _backward(torch.cat([x, x], -1).chunk(2, -1)[0].contiguous())
    yield lambda: _backward(x.view(tokens, -1, 8).transpose(0, 1).contiguous())
    yield lambda: _backward(torch.where(x > 0, x, -x) + x.clone())
    if device.type == "cuda":  # of a CPU the arithmetic of its masks: `_in_one_dtype`
        rng = Rng()
        yield lambda: _backward(ops.dropout(wide, 0.1, rng, 0))
        yield lambda: _backward(x.masked_fill(x > 0, 0.0))
    ids = torch.arange(tokens, device=device) % VOCABULARY
    table, logits = random(VOCABULARY, hidden).requires_grad_(), random(tokens, VOCABULARY).requires_grad_()
    yield lambda: _backward(functional.embedding(ids, table))
    yield lambda: _backward(functional.cross_entropy(logits, ids))


def _in_one_dtype(tokens: int, hidden: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Pieces that a step has in one dtype, whatever it computes in."""
    x = torch.randn(tokens, hidden, device=device).requires_grad_()
    numbers = torch.arange(tokens * hidden, dtype=torch.int32, device=device)

    def hashed() -> None:  # as a mask of dropout is made
        keys = (numbers ^ (numbers >> 16)) * 0x45D9F3B
        (keys ^ (keys >> 7)).lt(1 << 20)

    yield hashed
    double, weight = (torch.randn(n, hidden, dtype=torch.float64, device=device) for n in (tokens, 4 * hidden))
    yield lambda: _backward(functional.linear(double.requires_grad_(), weight.requires_grad_()))
    yield lambda: _backward(x.to(torch.bfloat16).to(torch.float32))
    for fused in (False, True):
        weights = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((hidden, hidden), (hidden,))]
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=fused, foreach=None if fused else False)

        def update(optimizer: torch.optim.Optimizer = optimizer, weights: list[nn.Parameter] = weights) -> None:
            for w in weights:
                w.grad = w.detach().clone()
            optimizer.step()

        yield update


def _products(
    x: Tensor, wide: Tensor, hidden: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Callable[[], None]]:
    linear = partial(nn.Linear, device=device, dtype=dtype)
    up, down, head = (
        linear(hidden, 4 * hidden),
        linear(4 * hidden, hidden, bias=False),
        linear(hidden, VOCABULARY, bias=False),
    )
    yield lambda: _backward(head(x))
    for rows in dict.fromkeys((len(x), *(max(len(x) // n, 1) for n in FEW))):
        some, those = (t.detach()[:rows].requires_grad_() for t in (x, wide))
        yield lambda some=some: _backward(up(some))  # type: ignore[misc]
        yield lambda those=those: _backward(down(those))  # type: ignore[misc]
    channels = max(hidden // 16, 4)
    image = torch.randn(4, channels, 16, 16, device=device, dtype=dtype)
    convolution = nn.Conv2d(channels, 2 * channels, 3, padding=1, device=device, dtype=dtype)
    yield lambda: _backward(convolution(image))


def _attention(tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    heads = max(hidden // HEAD, 1)
    for length in dict.fromkeys(min(tokens, n) for n in LENGTHS):
        q = torch.randn(tokens // length, heads, length, HEAD, device=device, dtype=dtype).requires_grad_()
        for causal in (False, True):
            yield lambda q=q, causal=causal: _backward(  # type: ignore[misc]
                functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
            )
        yield lambda q=q: _backward((q @ q.transpose(-1, -2)).softmax(-1) @ q)  # type: ignore[misc]


def _backward(result: Tensor) -> None:
    """With a gradient that lies in memory as others do."""
    torch.autograd.backward([result], [result.detach()])
