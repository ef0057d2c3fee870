"""Blocks of attention against all pairs of a row and a key, one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shardc.runtime.ops.attention import blocks as attention_blocks
from shardc.runtime.ops.attention import spans as attention_spans
from shardc.runtime.ops.attention.blocks import Rule, of_rows
from shardc.runtime.ops.attention.spans import ALL, CAUSAL, UPPER, Band, Span, blocks, seen

BANDS = (ALL, CAUSAL, UPPER, Band(-5, 0), Band(-13, 0), Band(-3, 3), Band(2, 9), Band(None, -4), Band(-20, None))


def stretches(draw: random.Random, size: int) -> list[Span]:
    """Some stretches of a dim, in any order, one behind the other in memory."""
    cuts = sorted(draw.sample(range(size + 1), 4))
    every = [(cuts[0], cuts[1]), (cuts[2], cuts[3])]
    draw.shuffle(every)
    spans, at = [], 0
    for start, end in every:
        spans.append(Span(start, at, end - start))
        at += end - start
    return spans


def places(spans: list[Span]) -> list[int]:
    return [s.start + i for s in spans for i in range(s.length)]


@pytest.mark.parametrize("step", [4, 128])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_pair_is_in_one_block(band: Band, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_spans, "QUERIES", step)
    draw = random.Random(step)
    for _ in range(60):
        rows, keys = stretches(draw, 40), stretches(draw, 40)
        rows_at, keys_at = places(rows), places(keys)
        want = torch.tensor(
            [[(band.low is None or j - i >= band.low) and (band.high is None or j - i <= band.high) for j in keys_at]
             for i in rows_at]
        ).reshape(len(rows_at), len(keys_at))  # fmt: skip
        found = torch.zeros_like(want, dtype=torch.int64)
        for b in blocks(rows, keys, band):
            n, m = b.rows.stop - b.rows.start, b.keys.stop - b.keys.start
            part = torch.ones(n, m, dtype=torch.int64)
            part = part if b.band.high is None else part.tril(b.band.high)
            part = part if b.band.low is None else part.triu(b.band.low)
            assert b.pairs == part.sum()
            found[b.rows, b.keys] += part
        assert torch.equal(found, want.long())
        needed = {j for j, column in zip(keys_at, want.T, strict=True) if column.any()}
        sent = seen(rows, keys, band)
        assert needed <= set(places(sent))
        assert len(places(sent)) == len(set(places(sent)))
        assert all(keys_at[s.local + i] == s.start + i for s in sent for i in range(s.length))


def test_most_of_a_window_is_what_kernels_do() -> None:
    """Blocks that are whole, or square with an end at the diagonal."""
    every = list(blocks([Span(512, 0, 512)], [Span(0, 0, 1024)], Band(-299, 0)))
    assert {b.band for b in every} == {ALL, CAUSAL, UPPER}
    assert sum(b.pairs for b in every) == 512 * 300


@pytest.mark.parametrize("band", [Band(-9, 0), Band(-2, 3), UPPER, CAUSAL], ids=str)
def test_attention_of_a_band(band: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to a mask, with its gradients, also by kernels that see the block from behind."""
    for module in (attention_spans, attention_blocks):
        monkeypatch.setattr(module, "QUERIES", 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 24, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    d = torch.arange(24)[None] - torch.arange(24)[:, None]
    low, high = band
    mask = (d >= (-99 if low is None else low)) & (d <= (99 if high is None else high))

    def grads(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]

    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    mine = of_rows(q, k, v, [Span(0, 0, 24)], band, None, grouped=True)
    for a, b in zip(grads(mine), grads(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_block_whose_rows_see_nothing_gives_nothing() -> None:
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 2, 4)
    out, lse = attention_blocks.forward(Rule(1.0), q, k, k, Band(None, -2))
    assert torch.equal(out[:, :, :2], torch.zeros(1, 1, 2, 4))
    assert bool((lse[:, :, :2] == -torch.inf).all())


@pytest.mark.parametrize("band", [ALL, CAUSAL, UPPER])
@pytest.mark.parametrize("which", ["q", "k", "v", "g"])
def test_heads_whose_elements_are_not_side_by_side(which: str, band: Band) -> None:
    """torch's kernel reads them as if they were: transposed and expanded tensors gave garbage."""
    given = {n: torch.randn(2, 3, 8, 4, dtype=torch.float64) for n in "qkvg"}

    def run(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        out, lse = attention_blocks.forward(Rule(0.5), x["q"], x["k"], x["v"], band)
        return [out, *attention_blocks.backward(Rule(0.5), x["g"], x["q"], x["k"], x["v"], out, lse, band)]

    turned = given[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    for found, want in zip(run({**given, which: turned}), run(given), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
