"""Compute attention block by block: rows of queries against stretches of keys (spans.py), then joined.

A block returns (out, lse): the softmax over its own keys, and the log of what it divided by. Two blocks of the same
queries are joined by

    lse = logaddexp(lse_a, lse_b)        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

in float32 at least (the online softmax of Milakov & Gimelshein 2018; Liu et al. 2023, "Ring Attention"). A row that
sees none of a block's keys has lse = -inf there, and contributes nothing.

Backward does not differentiate that sum. With the joined out and lse, the weights of a block are P = exp(scores - lse),
and dV = P^T dO, dS = P (dO V^T - sum(dO out)): each block separately, as in fused kernels (Dao et al. 2022,
"FlashAttention", section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.runtime.ops.attention.spans import ALL, CAUSAL, QUERIES, UPPER, Band, Block, Span, blocks
from shardc.runtime.ops.dropout import dropped
from shardc.runtime.ops.with_backward import with_backward

aten = torch.ops.aten


# --- one block


class Drop(NamedTuple):
    """Dropout of weights [b, h, rows, keys] by global index: arguments of `dropped`, rows i[b, h, rows]."""

    words: Tensor
    rows: Tensor
    columns: Tensor
    stream: int
    p: float

    def of(self, rows: slice, keys: slice) -> Drop:
        return self._replace(rows=self.rows[:, :, rows], columns=self.columns[keys])

    def __call__(self, weights: Tensor) -> Tensor:
        narrow = weights.contiguous()
        return dropped(narrow, self.words, self.rows.reshape(-1), self.columns, self.stream, self.p)


@dataclass(frozen=True)
class Rule:
    """The scores q k^T * scale, of q f[b, h, s, d] and k f[b, g, t, d] (g divides h), and their mask.

    mask: bool (True where a key is seen) or float (added), each dim as long as that of [b, h, s, t], or 1.
    """

    scale: float
    mask: Tensor | None = None
    drop: Drop | None = None

    def of(self, rows: slice, keys: slice) -> Rule:
        """Return the rule of a part of the rows and keys."""
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
            mask = mask if mask.shape[3] == 1 else mask[..., keys]
        return Rule(self.scale, mask, self.drop.of(rows, keys) if self.drop is not None else None)

    @property
    def plain(self) -> bool:
        return self.mask is None and self.drop is None


def forward(rule: Rule, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Compute (out f[b, h, s, e], lse f[b, h, s]) of one block. lse: in float32 at least."""
    if _fused(rule, q, k, v, band):
        if band == UPPER:  # reversed, it is causal
            out, lse = forward(rule, q.flip(2), k.flip(2), v.flip(2), CAUSAL)
            return out.flip(2), lse.flip(2)
        causal = band == CAUSAL
        q, k, v = map(_dense, (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=rule.scale)
        return out, lse
    outs, lses = [], []
    for top in range(0, q.shape[2], QUERIES):
        part = rule.of(slice(top, top + QUERIES), slice(None))
        scores, v_ = _scores(part, q[:, :, top : top + QUERIES], k, band, top), _heads(v, q)
        lse = torch.logsumexp(scores, -1)
        weights = _weights(scores, lse)
        outs.append((part.drop(weights) if part.drop else weights) @ v_.to(scores.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    rule: Rule, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v by one block. g: of the joined result; out, lse: joined."""
    if _fused(rule, q, k, v, band):
        if band == UPPER:
            g, q, k, v, out, lse = (x.flip(2) for x in (g, q, k, v, out, lse))
            dq, dk, dv = backward(rule, g, q, k, v, out, lse, CAUSAL)
            return dq.flip(2), dk.flip(2), dv.flip(2)
        q, k, v = map(_dense, (q, k, v))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, band == CAUSAL, scale=rule.scale
        )
        return dq, dk, dv
    wide = torch.promote_types(q.dtype, torch.float32)
    k_, v_ = _heads(k, q).to(wide), _heads(v, q).to(wide)
    dqs, dk, dv = [], torch.zeros_like(k_), torch.zeros_like(v_)
    for top in range(0, q.shape[2], QUERIES):
        rows = slice(top, top + QUERIES)
        part = rule.of(rows, slice(None))
        weights = _weights(_scores(part, q[:, :, rows], k, band, top), lse[:, :, rows])
        dout = g[:, :, rows].to(wide)
        delta = (dout * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        dweights, kept = dout @ v_.transpose(-2, -1), weights
        if part.drop:
            dweights, kept = part.drop(dweights), part.drop(weights)
        dscores = weights * (dweights - delta) * rule.scale
        dqs.append(dscores @ k_)
        dk += dscores.transpose(-2, -1) @ q[:, :, rows].to(wide)
        dv += kept.transpose(-2, -1) @ dout
    return torch.cat(dqs, 2), _grouped(dk, k), _grouped(dv, v)


def _dense(x: Tensor) -> Tensor:
    """Make a head's elements contiguous: the kernel assumes it without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fused(rule: Rule, q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return whether torch's CPU kernel that returns the log-sum-exp can run this block.

    It needs heads of one size, and rows that see all keys, or up to the diagonal, or from it on.
    """
    square = band in (CAUSAL, UPPER) and q.shape[2] == k.shape[2]
    kernel = q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.dtype in _DTYPES
    return rule.plain and kernel and (band == ALL or square)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _scores(rule: Rule, q: Tensor, k: Tensor, band: Band, top: int) -> Tensor:
    """Compute f[b, h, rows, keys] in float32 at least, -inf for unseen keys. top: the first row's number."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _heads(k, q).to(wide).transpose(-2, -1) * rule.scale
    low, high = band
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device) if band != ALL else None
    if ones is not None and high is not None:
        scores = scores.masked_fill(ones.triu(top + high + 1), -torch.inf)
    if ones is not None and low is not None:
        scores = scores.masked_fill(ones.tril(top + low - 1), -torch.inf)
    if rule.mask is None:
        return scores
    return scores.masked_fill(~rule.mask, -torch.inf) if rule.mask.dtype == torch.bool else scores + rule.mask


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Compute exp(scores - lse), with zeros in rows that see nothing, where lse is -inf."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of x f[b, g, t, d] for all query heads that use it."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _grouped(grad: Tensor, x: Tensor) -> Tensor:
    """Sum the gradients over the query heads that share a head of x."""
    b, g, t, d = x.shape
    return grad if grad.shape[1] == g else grad.view(b, g, grad.shape[1] // g, t, d).sum(2)


class Joined:
    """(out, lse) of some queries, joined over blocks of keys as they come.

    out: f[b, h, s, e], lse: f[b, h, s], both in float32 at least.
    """

    def __init__(self, q: Tensor, features: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], features), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        mine, theirs = self.lse[:, :, rows], lse.to(self.lse.dtype)
        both = torch.logaddexp(mine, theirs)
        least = both.masked_fill(both == -torch.inf, 0.0)  # rows that have seen nothing yet: exp(-inf - 0), not nan
        kept, new = torch.exp(mine - least).unsqueeze(-1), torch.exp(theirs - least).unsqueeze(-1)
        self.out[:, :, rows].mul_(kept).addcmul_(out.to(self.out.dtype), new)
        mine.copy_(both)


def _whole_keys(
    q: Tensor, k: Tensor, v: Tensor, plan: list[Block], rule: Rule
) -> tuple[Tensor, tuple[Tensor | list[Block] | Rule, ...]]:
    """Compute attention of a rank's queries to all keys."""
    joined = Joined(q, v.shape[-1])
    for rows, keys, band in plan:
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        joined.add(rows, *forward(rule.of(rows, keys), *part, band))
    out = joined.out.to(q.dtype)
    return out, (q, k, v, out, joined.lse, plan, rule)


def _whole_keys_backward(
    needs: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: list[Block], rule: Rule
) -> tuple[Tensor, ...]:
    totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]  # sums over blocks
    for r, c, band in plan:
        part = q[:, :, r], k[:, :, c], v[:, :, c], out[:, :, r], lse[:, :, r]
        grads = backward(rule.of(r, c), g[:, :, r], *part, band)
        for total, at, grad in zip(totals, (r, c, c), grads, strict=True):
            total[:, :, at] += grad
    return tuple(t.to(x.dtype) for t, x in zip(totals, (q, k, v), strict=True))


def leading(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> tuple[int, ...]:
    """Return the result's dims before its queries: the batch's, and heads."""
    if not grouped:
        return tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v))))  # type: ignore[no-untyped-call]
    return (*torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), q.shape[-3])  # type: ignore[no-untyped-call]


def as_heads(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Reshape queries, keys and values to [b, heads, ...]: leading dims flattened, broadcasts expanded."""
    last = 3 if grouped else 2  # with groups, keys and values have fewer heads
    lead = torch.broadcast_shapes(*(x.shape[:-last] for x in (q, k, v)))  # type: ignore[no-untyped-call]
    size = math.prod(lead if grouped or not lead else lead[:-1])

    def one(x: Tensor) -> Tensor:
        x = x.expand(*lead, *x.shape[-last:])
        heads = x.shape[-3] if x.dim() > 2 else 1
        return x.reshape(size, heads, *x.shape[-2:])

    q, k, v = one(q), one(k), one(v)
    few, many = sorted((k.shape[1], v.shape[1]))
    k, v = (x if x.shape[1] == many else x.repeat_interleave(many // few, 1) for x in (k, v))
    return q, k, v


def of_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Span], band: Band, scale: float | None, *, grouped: bool
) -> Tensor:
    """Compute attention of a rank's queries to all keys, restricted to a band.

    q: f[.., h, s, d], rows: which queries these are; k: f[.., g, t, d], v: f[.., g, t, e], of the whole sequence.
    Returns f[.., h, s, e].
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    plan = list(blocks(rows, [Span(0, 0, k.shape[-2])], band))
    heads = as_heads(q, k, v, grouped=grouped)
    out: Tensor = with_backward(_whole_keys, _whole_keys_backward, *heads, plan, Rule(scale))
    return out.reshape(*leading(q, k, v, grouped=grouped), q.shape[-2], v.shape[-1])
