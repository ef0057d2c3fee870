"""Compute attention over a split sequence: keys and values travel between ranks, queries stay.

    step 0      every rank: its queries against its own keys
    step i      what rank r - i has arrives at rank r, while step i - 1 is computed

A rank holds at most three parts of keys and values: its own, those in use, and those that arrive. Each part comes from
the rank that owns it, in one exchange of all ranks a step, with only the keys that the queries there see: under a
causal mask none from ranks whose keys all come later, of a window only the keys near the border. With grouped queries
the key-value heads travel (ring attention; Liu et al. 2023).

Results are joined by their log-sum-exps (shardc.runtime.ops.attention.blocks). Backward sends keys and values again,
uses the joined out and log-sum-exp for every part, and sends each part's gradients to the rank that owns it, which adds
them up in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.mesh.base import Work
from shardc.runtime.ops.attention import blocks as attention_blocks
from shardc.runtime.ops.attention.blocks import Drop, Joined, Rule
from shardc.runtime.ops.attention.spans import Band, Block, Reach, Span, between, blocks, seen
from shardc.runtime.ops.with_backward import with_backward

Mesh = Any


@dataclass(frozen=True)
class Ring:
    """The distribution over the axis: by rank, `rows` of queries and `keys`.

    reach: by rank, of each of its rows, where it is known (held.py): the same on all ranks.
    """

    mesh: Mesh
    axis: str
    rows: tuple[tuple[Span, ...], ...]
    keys: tuple[tuple[Span, ...], ...]
    band: Band
    tag: str
    reach: tuple[tuple[Reach, ...], ...] | None = None

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def here(self) -> int:
        return int(self.mesh.coordinate(self.axis))

    def sees(self, rank: int, owner: int) -> list[Span]:
        """Return the owner's keys that some query of another rank sees."""
        return seen(self.rows[rank], self.keys[owner], self.band, self.reach[rank] if self.reach else None)

    def blocks(self, keys: Sequence[Span]) -> Iterator[Block]:
        """Yield the blocks in which this rank's rows see keys."""
        rows = self.rows[self.here]
        if self.reach is None:
            yield from blocks(rows, keys, self.band)
            return
        for row, (first, end) in zip(rows, self.reach[self.here], strict=False):
            yield from blocks([row], between(keys, first, end), self.band)

    def steps(self) -> list[int]:
        """Return the steps after the first in which any two ranks send: the same on all ranks."""
        ranks = range(self.ranks)
        return [i for i in ranks if i and any(self.sees(r, (r - i) % self.ranks) for r in ranks)]


@dataclass
class _Part:
    """Keys and values [b, g, n, ...] of an owner, or their gradients. spans: the keys in these tensors."""

    k: Tensor
    v: Tensor
    spans: list[Span]


def _in_a_row(spans: Sequence[Span]) -> list[Span]:
    """Return the same keys with consecutive local places."""
    out, at = [], 0
    for s in spans:
        out.append(s._replace(local=at))
        at += s.length
    return out


@dataclass
class _Arriving:
    """The result of an exchange; `wait` returns it."""

    flat: Tensor
    work: Work
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    spans: list[Span]

    def wait(self) -> _Part:
        self.work.wait()
        n = sum(s.length for s in self.spans)
        (b, g, _, d), (_, h, _, e) = self.shapes
        k, v = self.flat.split_with_sizes([b * g * n * d, b * h * n * e])
        return _Part(k.view(b, g, n, d), v.view(b, h, n, e), _in_a_row(self.spans))


def _exchange(ring: Ring, part: _Part, send: list[Span], to: int, take: list[Span], source: int, way: str) -> _Arriving:
    """Send a part to one rank, and start to receive one from another. send, take: as the sender has them."""
    flat = torch.cat([_joined(x, send).reshape(-1) for x in (part.k, part.v)])
    (b, g, _, d), (_, h, _, e) = part.k.shape, part.v.shape
    n = sum(s.length for s in take) * b * (g * d + h * e)
    into = flat.new_empty(n)
    sent, received = [0] * ring.ranks, [0] * ring.ranks
    sent[to], received[source] = flat.numel(), n
    work = ring.mesh.start_all_to_all_rows(flat, into, (sent, received), (ring.axis,), direction=way, tag=ring.tag)
    return _Arriving(into, work, (tuple(part.k.shape), tuple(part.v.shape)), take)


def _joined(x: Tensor, spans: list[Span]) -> Tensor:
    """Return these keys of x f[b, g, n, d], one stretch after the other."""
    return torch.cat([x[:, :, s.local : s.local + s.length] for s in spans] or [x[:, :, :0]], 2)


def _travel(ring: Ring, own: _Part, i: int, way: str) -> _Arriving:
    """Start to send and receive the keys and values of step i."""
    r, n = ring.here, ring.ranks
    to, source = (r + i) % n, (r - i) % n
    return _exchange(ring, own, ring.sees(to, r), to, ring.sees(r, source), source, way)


def _send_back(ring: Ring, grads: _Part, i: int, dtype: torch.dtype) -> _Arriving:
    """Start to send the gradients of step i's keys and values to the ranks that own these."""
    r, n = ring.here, ring.ranks
    to, source = (r - i) % n, (r + i) % n
    grads = _Part(grads.k.to(dtype), grads.v.to(dtype), grads.spans)
    return _exchange(ring, grads, grads.spans, to, ring.sees(source, r), source, "backward")


def _ring(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, ring: Ring
) -> tuple[Tensor, tuple[Any, ...]]:
    joined, own_part = Joined(q, v.shape[-1]), _Part(k, v, list(ring.keys[ring.here]))
    steps = ring.steps()
    part = own_part
    for at in range(len(steps) + 1):
        arriving = _travel(ring, own_part, steps[at], "forward") if at < len(steps) else None
        of = _of_keys(rule, part.spans)
        for rows, keys, band in ring.blocks(part.spans):
            block = q[:, :, rows], part.k[:, :, keys], part.v[:, :, keys]
            joined.add(rows, *attention_blocks.forward(of.of(rows, keys), *block, band))
        if arriving is not None:
            part = arriving.wait()
    out = joined.out.to(q.dtype)
    return out, (q, k, v, mask, out, joined.lse, Rule(rule.scale, None, rule.drop), ring)


def _ring_backward(
    needs: Any,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rule: Rule,
    ring: Ring,
) -> tuple[Tensor, ...]:
    rule = Rule(rule.scale, mask, rule.drop)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of rows that see nothing: their weights are exp(-inf) = 0
    own_part = _Part(k, v, list(ring.keys[ring.here]))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    steps = ring.steps()
    part, step, home = own_part, 0, None
    for at in range(len(steps) + 1):
        arriving = _travel(ring, own_part, steps[at], "backward") if at < len(steps) else None
        of = _of_keys(rule, part.spans)
        zeros = [torch.zeros_like(x, dtype=lse.dtype) for x in (part.k, part.v)]
        grads = _Part(zeros[0], zeros[1], part.spans)
        into = (dk, dv) if step == 0 else (grads.k, grads.v)
        for r, c, band in ring.blocks(part.spans):
            block = q[:, :, r], part.k[:, :, c], part.v[:, :, c], out[:, :, r], lse[:, :, r]
            one = attention_blocks.backward(of.of(r, c), g[:, :, r], *block, band)
            for total, where, grad in zip((dq, *into), (r, c, c), one, strict=True):
                total[:, :, where] += grad
        if home is not None:
            _add(dk, dv, home)
        home = _send_back(ring, grads, step, k.dtype) if step else None
        if arriving is not None:
            part, step = arriving.wait(), steps[at]
    if home is not None:
        _add(dk, dv, home)
    return tuple(t.to(x.dtype) for t, x in zip((dq, dk, dv), (q, k, v), strict=True))


def _add(dk: Tensor, dv: Tensor, home: _Arriving) -> None:
    """Add another rank's gradients of this rank's keys and values."""
    part = home.wait()
    for mine, theirs in zip(home.spans, part.spans, strict=True):
        for total, grad in ((dk, part.k), (dv, part.v)):
            where = slice(mine.local, mine.local + mine.length)
            total[:, :, where] += grad[:, :, theirs.local : theirs.local + theirs.length]


def _of_keys(rule: Rule, spans: list[Span]) -> Rule:
    """Restrict the rule of all keys to those of one part."""
    mask, drop = rule.mask, rule.drop
    if mask is not None and mask.shape[3] > 1:
        mask = torch.cat([mask[..., s.start : s.end] for s in spans], -1) if spans else mask[..., :0]
    if drop is not None:
        columns = torch.cat([drop.columns[s.start : s.end] for s in spans]) if spans else drop.columns[:0]
        drop = drop._replace(columns=columns)
    return Rule(rule.scale, mask, drop)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring, scale: float, drop: Drop | None
) -> Tensor:
    """Compute attention of q f[b, h, s, d] to the keys and values of all ranks.

    k f[b, g, t, d], v f[b, g, t, e]: this rank's. mask: as in `Rule`, of this rank's rows and all keys; it gets no
    gradient. Returns f[b, h, s, e].
    """
    out: Tensor = with_backward(_ring, _ring_backward, q, k, v, mask, Rule(scale, mask, drop), ring)
    return out
