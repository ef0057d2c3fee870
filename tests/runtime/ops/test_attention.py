"""Attention with dropout in blocks of queries is attention written out, with the same masks, in less memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.rng import Rng
from shardc.verify.simulate import simulate
from tests import equality, live_bytes
from tests.differentiable import ops
from tests.live_bytes import Live


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    rng: Rng,
    index: int,
) -> Tensor:
    """With all weights at once."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if is_causal else mask
    if seen is not None and seen.dtype == torch.bool:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    elif seen is not None:
        scores = scores + seen
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    if seen is not None and seen.dtype == torch.bool:
        weights = weights.masked_fill(~seen, 0)
    return ops.dropout(weights, p, rng, index) @ v


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 1000 + sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


S, T = 300, 170  # neither divides by a block
SEEN = torch.rand(2, 1, S, T, generator=torch.Generator().manual_seed(0)) > 0.3
SEEN[0, 0, 5] = False  # a row that sees nothing
CASES: dict[str, tuple[Any, ...]] = {
    "plain": (normal(2, 4, S, 8), normal(2, 4, T, 8), normal(2, 4, T, 6), None, False, None, False),
    "causal": (normal(2, 4, S, 8), normal(2, 4, S, 8), normal(2, 4, S, 6), None, True, 0.3, False),
    "causal, more queries": (normal(2, 4, S, 8), normal(2, 4, T, 8), normal(2, 4, T, 6), None, True, None, False),
    "causal, more keys": (normal(2, 4, T, 8), normal(2, 4, S, 8), normal(2, 4, S, 6), None, True, None, False),
    "bools": (normal(2, 4, S, 8), normal(2, 4, T, 8), normal(2, 4, T, 6), SEEN, False, None, False),
    "added": (normal(2, 4, S, 8), normal(2, 4, T, 8), normal(2, 4, T, 6), normal(4, S, T), False, None, False),
    "one row added": (
        normal(2, 4, S, 8),
        normal(2, 4, T, 8),
        normal(2, 4, T, 6),
        normal(2, 1, 1, T),
        False,
        None,
        False,
    ),
    "a vector added": (normal(2, 4, S, 8), normal(2, 4, T, 8), normal(2, 4, T, 6), normal(T), False, None, False),
    "groups": (normal(2, 6, S, 8), normal(2, 3, T, 8), normal(2, 2, T, 6), SEEN, False, None, True),
    "one group": (normal(2, 6, S, 8), normal(2, 1, S, 8), normal(2, 1, S, 6), None, True, None, True),
    "no batch": (normal(S, 8), normal(T, 8), normal(T, 6), None, False, None, False),
    "broadcast": (normal(2, 4, S, 8), normal(1, 4, T, 8), normal(1, 1, T, 6), None, False, None, False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_written_out(name: str) -> None:
    q, k, v, mask, causal, scale, groups = CASES[name]
    inputs = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    results = []
    for function in (ops.attention, written_out):
        y = function(q, k, v, mask, 0.3, causal, scale, groups, Rng(seed=4, step=2), 7)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        results.append([y, *torch.autograd.grad((y * weights).sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes_add_up_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (normal(2, 4, S, 8, dtype=dtype) for _i in range(3))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options = (None, 0.3, True, None, False, Rng(), 0)
    y, z = ops.attention(q, k, v, *options), ops.attention(*wide, *options)
    assert y.dtype == dtype
    grads = torch.autograd.grad(y.sum(), (q, k, v))
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip((y.detach(), *grads), (z.detach(), *torch.autograd.grad(z.sum(), wide)), strict=True):
        assert a.dtype == dtype
        assert float((a - b).norm() / b.norm()) < tolerance


def test_without_training_it_is_torchs() -> None:
    q, k, v, *_ = CASES["causal"]
    y = ops.attention(q, k, v, None, 0.3, True, None, False, Rng(training=False), 0)
    assert torch.equal(y, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_sequence_not_with_its_square(causal: bool) -> None:
    def peak(length: int) -> int:
        q, k, v = (torch.zeros(1, 2, length, 16).requires_grad_() for _i in range(3))
        with Live((q, k, v)) as live:
            y = ops.attention(q, k, v, None, 0.1, causal, None, False, Rng(), 0)
            y.sum().backward()
        return int(live.peak)

    short, long = peak(1024), peak(4096)
    assert long < 4.2 * short
    assert long < 2 * 4096 * 4096 * 4 / 3  # the weights alone, in float32, would be three times as large


# --- values of another size than keys


class Latent(nn.Module):
    """Multi-head latent attention's shapes: heads of queries and keys are larger than those of values, or smaller."""

    def __init__(self, heads: int, keys: int, values: int, dtype: torch.dtype = torch.float64, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.how = heads, how
        self.q, self.k, self.v = (nn.Linear(8, heads * n, dtype=dtype) for n in (keys, keys, values))
        self.o = nn.Linear(heads * values, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, **self.how)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize(("keys", "values"), [(12, 8), (8, 12)])
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_unequal_heads_equal_one_device(keys: int, values: int, how: dict[str, Any], tp: int) -> None:
    model, x = Latent(4, keys, values, **how), torch.randn(2, 16, 8, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"tp": tp}, "shard": {"{q,k,v}": "column", "o": "row"}})
    equality.assert_equal(simulate(program, model, x), loss.detach(), grads, rtol=1e-12)


def test_unequal_heads_keep_no_scores() -> None:
    heads, sequence = 4, 512
    model = Latent(heads, 12, 8, torch.float32, is_causal=True)
    x = torch.randn(1, sequence, 8)
    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    found = program.cost().memory.peak
    assert found == pytest.approx(live_bytes.measured(program, model, x)[0], rel=0.01)
    assert found < 4 * heads * sequence * sequence / 4


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"window": (-255, 0)}], ids=str)
def test_what_a_ring_holds_is_a_rank_s_part_of_the_sequence(how: dict[str, Any]) -> None:
    """Live bytes, in keys and values of a rank, do not grow with the ranks: beside its own, those that it works on,
    those that arrive, and a copy while it is sent; the result, and what is joined to it; in backward gradients too."""
    length = 4096

    def peaks(ranks: int) -> tuple[float, float]:
        def work(mesh: LoopbackMesh) -> tuple[float, float]:
            mesh.__class__ = live_bytes.Measured
            assert isinstance(mesh, live_bytes.Measured)
            q, k, v = (normal(1, 2, length // ranks, 16).float().requires_grad_() for _ in range(3))
            mesh.live = live = Live(foreign=(q, k, v))
            digits = ((2, "cp", 1, ()), (3, "cp", 1, ()))
            causal, window = how.get("is_causal", False), {k: x for k, x in how.items() if k == "window"}
            options = (None, 0.0, causal, None, False, None, 0, mesh, (1, 2, length, length), digits, (), "cp")
            with live:
                y = ops.attention(q, k, v, *options, **window)
                forward = live.peak
                y.sum().backward()
            return forward / (2 * k.nbytes), live.peak / (2 * k.nbytes)

        found = loopback(Mesh((("cp", ranks),)), work)
        return max(f for f, _ in found), max(b for _, b in found)

    for ranks in (4, 8):
        forward, step = peaks(ranks)
        assert forward < 4.6
        assert step < 9.6
