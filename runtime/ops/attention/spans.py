"""Compute which keys the rows of attention see, as stretches and blocks, before any tensor work.

A band covers all rows at once: row i sees key j only if low <= j - i <= high. Causal attention is the band (None, 0), a
sliding window of W keys (1 - W, 0).

    causal, zigzag: queries 2..5 of 8                 a window of 4, queries 4..7 of 8
    keys 0..1   all, for all four                     keys 1..3   of which query n sees the last 3 - n
    keys 2..5   the diagonal                          keys 4..7   the diagonal
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: Rows of queries for which scores exist at a time, where no kernel runs.
QUERIES = 128


class Band(NamedTuple):
    """The keys that rows see: row i sees key j only if low <= j - i <= high; None: no bound."""

    low: int | None = None
    high: int | None = None

    def keys(self, first: int, end: int, k: Span) -> tuple[int, int]:
        """Return (first, end) of the keys of k that any row first ... end - 1 sees; first >= end if none."""
        low = k.start if self.low is None else max(k.start, first + self.low)
        return low, k.end if self.high is None else min(k.end, end + self.high)


#: (first, end) of the keys that some rows see at most, besides the band: depends on the batch (held.py).
Reach = tuple[int, int]

ALL, CAUSAL, UPPER = Band(), Band(None, 0), Band(0, None)


class Span(NamedTuple):
    """A stretch of a dim: its start in the whole dim, its start on this rank, its length."""

    start: int
    local: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Block(NamedTuple):
    """A block of attention. rows, keys: local slices. band: which keys rows see, counted from both starts."""

    rows: slice
    keys: slice
    band: Band

    @property
    def pairs(self) -> int:
        """The number of pairs of a row and a key that it sees."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

        def below(high: int) -> int:
            """Count pairs with key - row <= high: over rows i the sum of i + high + 1, clipped to 0 ... keys."""
            return _clipped(rows + high, keys) - _clipped(high, keys)

        low, high = self.band
        return below(keys if high is None else high) - below(-rows - 1 if low is None else low - 1)


def _clipped(n: int, most: int) -> int:
    """Compute 1 + 2 + ... + n, where each term is at most `most`."""
    some = max(0, min(n, most))
    return some * (some + 1) // 2 + max(0, n - most) * most


def blocks(rows: Sequence[Span], keys: Sequence[Span], band: Band) -> Iterator[Block]:
    """Yield the blocks in which rows see keys; where the band excludes all keys there is none.

    A kernel can compute most of them: rows see all keys, or block and band are square, with the diagonal as a border.
    """
    for r in rows:
        for top, bottom in _stretches(r, band):
            for k in keys:
                for first, end, left, right, block_band in _parts(top, bottom, k, band):
                    if first < end and left < right:
                        at = slice(first - r.start + r.local, end - r.start + r.local)
                        yield Block(at, slice(left - k.start + k.local, right - k.start + k.local), block_band)


def _stretches(r: Span, band: Band) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of rows, few enough that some keys are seen by all of them."""
    low, high = band
    step = r.length if low is None or high is None else max(QUERIES, (high - low) // 2)
    for top in range(r.start, r.end, step or 1):
        yield top, min(top + step, r.end)


def _parts(a: int, b: int, k: Span, band: Band) -> Iterator[tuple[int, int, int, int, Band]]:
    """Yield (first row, end, first key, end, band) of blocks of rows a ... b - 1 and keys; some are empty."""
    low, high = band
    first, last = band.keys(a, b, k)
    if first >= last:
        return
    if low is not None and high is not None and high - low < b - a:  # no key is seen by all
        top, bottom = max(a, first - high), min(b, last - low)
        yield top, bottom, first, last, Band(top + low - first, top + high - first)
        return
    left, right = first, last  # keys between them are seen by all rows
    if low is not None:
        left = min(max(first, b + low), last)
        yield a, first - low, first, left, ALL
        yield max(a, first - low), min(b, left - low), first, left, UPPER
    if high is not None:
        right = min(max(left, a + high), last)
        yield max(a, right - high), last - high, right, last, CAUSAL
        yield max(a, last - high), b, right, last, ALL
    yield a, b, left, right, ALL


def stretches(rows: Iterable[Span]) -> Iterator[Span]:
    """Yield the same rows, QUERIES at a time."""
    for r in rows:
        for top in range(0, r.length, QUERIES):
            yield Span(r.start + top, r.local + top, min(QUERIES, r.length - top))


def between(keys: Iterable[Span], first: int, end: int) -> list[Span]:
    """Return the parts of `keys` at places first ... end - 1."""
    cut = ((k, max(k.start, first), min(k.end, end)) for k in keys)
    return [Span(a, k.local + a - k.start, b - a) for k, a, b in cut if a < b]


def seen(rows: Sequence[Span], keys: Sequence[Span], band: Band, reach: Sequence[Reach] | None = None) -> list[Span]:
    """Return the keys that any row sees, in order. reach: of each row."""
    spans: list[Span] = []
    for k in keys:
        ranges = [band.keys(r.start, r.end, k) for r in rows if r.length]
        if reach is not None:
            ranges = [(max(a, x), min(b, y)) for (a, b), (x, y) in zip(ranges, reach, strict=False)]
        ranges = sorted(x for x in ranges if x[0] < x[1])
        at = k.start
        for first, end in ranges:
            first = max(first, at)
            if first >= end:
                continue
            if spans and spans[-1].end == first and spans[-1].local + spans[-1].length == first - k.start + k.local:
                spans[-1] = spans[-1]._replace(length=end - spans[-1].start)
            else:
                spans.append(Span(first, first - k.start + k.local, end - first))
            at = end
    return spans
