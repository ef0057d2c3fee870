"""Compute attention with dropout of its weights, or of the part of the queries that a rank has.

Dropout works in blocks of queries, so memory grows with the sequence, not with its square:

    for each block of QUERIES rows:
        weights = softmax(q_block @ k^T)  [.., heads, QUERIES, keys]      all keys of a row: no sums to correct later
        out_block = dropout(weights) @ v

Backward recomputes each block with autograd, so that only the operands are saved. The masks are those of `ops.dropout`
on the whole weights [.., heads, queries, keys]: functions of the global element's index, so that batch, heads and
queries may be split over ranks. torch's fused kernels draw other masks. They run without dropout; where a causal mask
meets a part of the queries, shardc.runtime.ops.attention.blocks runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.runtime.ops.attention import blocks as attention_blocks
from shardc.runtime.ops.attention.blocks import Drop
from shardc.runtime.ops.attention.held import Held, reach_of
from shardc.runtime.ops.attention.ring import Ring, ring_attention
from shardc.runtime.ops.attention.spans import ALL, CAUSAL, QUERIES, Band, Span, stretches
from shardc.runtime.ops.dropout import dropped
from shardc.runtime.ops.with_backward import with_backward
from shardc.runtime.rng import Digits, Paddings, Rng


@dataclass(frozen=True)
class _Options:
    """Options of attention with dropout. rows: i[.., heads, queries], columns: i[keys], words: of rng.

    spans: which queries these are, where a causal mask counts them.
    """

    p: float
    causal: bool
    scale: float
    words: Tensor
    rows: Tensor
    columns: Tensor
    stream: int
    spans: Sequence[Span]


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply f[.., h, n, m] @ f[.., g, m, e]; each of y's heads serves h / g consecutive heads of x."""
    heads, groups = x.shape[-3] if x.dim() > 2 else 1, y.shape[-3] if y.dim() > 2 else 1
    if groups in (1, heads):
        return x @ y
    *lead, n, m = x.shape
    return (x.reshape(*lead[:-1], groups, heads // groups * n, m) @ y).reshape(*lead, n, y.shape[-1])


def _block(o: _Options, place: _Place, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the result's rows of these queries."""
    scores = _product(q * o.scale, k.transpose(-2, -1))
    hidden: Tensor | None = None
    if o.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(place.start + 1)
    elif mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    elif mask is not None:
        scores = scores + mask
    if hidden is not None:  # the least number, not -inf: a row that sees nothing must become zeros (below), not NaN
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    narrow = scores.dtype  # exponentials add up in float32, as in the fused op
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(narrow, torch.float32)).to(narrow)
    if hidden is not None and not o.causal:
        weights = weights.masked_fill(hidden, 0.0)
    rows = o.rows[..., place.rows].reshape(-1)
    return _product(dropped(weights, o.words, rows, o.columns[: k.shape[-2]], o.stream, o.p), v)


class _Place(NamedTuple):
    """The place of a block: its local queries, the first one's global number, their keys, its mask rows."""

    rows: slice
    start: int
    keys: slice
    seen: slice


def _blocks(o: _Options, q: Tensor, k: Tensor, mask: Tensor | None) -> list[_Place]:
    keys = k.shape[-2]
    same = mask is None or mask.dim() < 2 or mask.shape[-2] == 1
    blocks = []
    for span in o.spans:
        for top in range(span.local, span.local + span.length, QUERIES):
            rows = slice(top, min(top + QUERIES, span.local + span.length))
            start = span.start + top - span.local
            sees = min(start + rows.stop - rows.start, keys) if o.causal else keys
            blocks.append(_Place(rows, start, slice(0, sees), slice(None) if same else rows))
    return blocks


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or rows == slice(None) else mask[..., rows, :]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: _Options
) -> tuple[Tensor, tuple[Tensor | _Options | None, ...]]:
    out = q.new_zeros((*o.rows.shape, v.shape[-1]))  # rows of padding are in no span
    for place in _blocks(o, q, k, mask):
        rows, keys = place.rows, place.keys
        block = q[..., rows, :], k[..., keys, :], v[..., keys, :], _rows(mask, place.seen)
        out[..., rows, :] = _block(o, place, *block)
    return out, (q, k, v, mask, o)


def _attention_backward(
    needs: Sequence[bool], g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: _Options
) -> tuple[Tensor | None, ...]:
    operands = q, k, v, mask
    # sums over blocks, in float32 at least
    totals = [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if x is not None and needed else None
        for x, needed in zip(operands, needs, strict=False)
    ]
    for place in _blocks(o, q, k, mask):
        rows, _, keys, seen = place
        columns = slice(None)
        of_mask = (...,) if seen == columns else (..., seen, columns)
        parts = (..., rows, columns), (..., keys, columns), (..., keys, columns), of_mask
        leaves = [
            None if x is None else x[part].detach().requires_grad_(total is not None)
            for x, part, total in zip(operands, parts, totals, strict=True)
        ]
        with torch.enable_grad():
            out = _block(o, place, *leaves)  # type: ignore[arg-type]
        inputs = [x for x in leaves if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(out, inputs, g[..., rows, :]))
        for total, part in zip(totals, parts, strict=True):
            if total is not None:
                total[part] += next(grads)
    return tuple(None if t is None or x is None else t.to(x.dtype) for t, x in zip(totals, operands, strict=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    rng: Rng | None = None,
    index: int = 0,
    mesh: Any = None,
    shape: Sequence[int] | None = None,
    digits: Digits = (),
    paddings: Paddings = (),
    ring: str = "",
    tag: str = "",
    window: tuple[int | None, int | None] | None = None,
    reach: Tensor | None = None,
) -> Tensor:
    """Compute softmax(q @ k^T * scale + mask) @ v, with dropout p < 1 of the weights.

    Runs torch's fused op without dropout, when rng is not training; blocks where this rank has a part of the queries
    and a causal mask counts them.

    q: f[.., h, s, d], k: f[.., g, t, d], v: f[.., g, t, e]; mask: bool (True where a key is seen) or float (added), of
    a shape that broadcasts to [.., h, s, t]; scale: 1 / sqrt(d) if None. enable_gqa: each of g heads serves h / g.
    index: ordinal of this op in the graph. shape: of the *global* weights [.., h, s, t] (default: this rank's); digits,
    paddings: which part of them this rank holds, as of `ops.dropout`. ring: an axis over which keys are split too: k
    and v are a rank's part, which travels (shardc.runtime.ops.attention.ring); digits then also describe the keys.
    window: (low, high) of a band (shardc.runtime.ops.attention.spans): row i sees key j only if low <= j - i <= high.
    If a mask is given too, it covers each pair, and only a ring reads the window, to send less. reach: i64[ranks,
    stretches, 2] of `attention_reach`: the only keys that a ring's mask shows. Returns f[.., h, s, e].
    """
    if ring:
        assert shape is not None
        drop = p if rng is not None and rng.training else 0.0
        held_by = Held(tuple(shape), digits, paddings, mesh)
        band = CAUSAL if is_causal else Band(*window) if window else ALL
        return _ring(q, k, v, mask, drop, band, scale, enable_gqa, rng, index, held_by, ring, tag, reach)
    windowed = window is not None and mask is None
    rows_held = _spans(shape, digits, paddings, mesh) if is_causal or windowed else None
    if rng is None or not rng.training or p == 0:
        if rows_held is not None or windowed:
            rows_ = [Span(0, 0, q.shape[-2])] if rows_held is None else rows_held
            band = CAUSAL if is_causal or window is None else Band(*window)
            return attention_blocks.of_rows(q, k, v, rows_, band, scale, grouped=enable_gqa)
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    last = 3 if enable_gqa else 2  # with groups, keys and values have fewer heads
    others = [(*x.shape[:-last], *[1] * (last - 2)) for x in (k, v)]
    others += [] if mask is None else [mask.shape[:-2]]
    lead = torch.broadcast_shapes(q.shape[:-2], *others)  # type: ignore[no-untyped-call]
    sizes = (*lead, q.shape[-2], k.shape[-2])
    rows, columns = rng.row_and_column_offsets(
        sizes if shape is None else shape, digits, mesh, q.device, paddings, last=True
    )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    every = [Span(0, 0, q.shape[-2])] if rows_held is None else rows_held
    options = _Options(p, is_causal, scale, rng.words(q.device), rows.view(sizes[:-1]), columns, index, every)
    result: Tensor = with_backward(_attention, _attention_backward, q, k, v, mask, options)
    return result


def _spans(shape: Sequence[int] | None, digits: Digits, paddings: Paddings, mesh: Any) -> list[Span] | None:
    """Return the queries that a rank has; None: all. shape, digits, paddings: of the weights."""
    return None if shape is None else Held(tuple(shape), digits, paddings, mesh).spans(len(shape) - 2)


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    band: Band,
    scale: float | None,
    enable_gqa: bool,
    rng: Rng | None,
    index: int,
    held: Held,
    axis: str,
    tag: str,
    found: Tensor | None,
) -> Tensor:
    mesh, last, reach = held.mesh, len(held.shape) - 1, reach_of(found)
    rows = held.every(last - 1, axis)
    if reach is not None:
        rows = tuple(tuple(stretches(r)) for r in rows)
    ring = Ring(mesh, axis, rows, held.every(last, axis), band, tag, reach)
    q_, k_, v_ = attention_blocks.as_heads(q, k, v, grouped=enable_gqa)
    drop = None
    if p and rng is not None:
        queries = tuple(d for d in held.digits if d[0] != last)
        padded = tuple(d for d in held.paddings if d[0] != last)
        row_offsets, columns = rng.row_and_column_offsets(held.shape, queries, mesh, q.device, padded, last=True)
        drop = Drop(rng.words(q.device), row_offsets.view(q_.shape[:-1]), columns, index, p)
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
    out = ring_attention(q_, k_, v_, mask, ring, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, drop)
    return out.reshape(*attention_blocks.leading(q, k, v, grouped=enable_gqa), q.shape[-2], v.shape[-1])
