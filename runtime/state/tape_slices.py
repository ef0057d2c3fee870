"""A slice of a tensor on a tape, without the rest of it: traced back to the tensors of files that it is made of, or
computed from the counters of the random op that filled it.

    files          experts.0.w1 [4, 8], experts.1.w1 [4, 8]   experts.0.w3, experts.1.w3
    on the tape    cat(stack(w1), stack(w3)) -> experts.gate_up_proj [2, 8, 8]
    pieces of [1:2, 2:6, :]                                   experts.1.w1 [2:4, :], experts.1.w3 [0:2, :]

Followed are ops that move numbers and do not change them: stack, cat, copies, and views whose dims are dims of what
they view, or parts of them. What else a tensor depends on (a reshape across dims, a sum) is computed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import random_draws, rng
from shardc.runtime.state.init_tape import STREAM, Entry, Ref, Tape
from shardc.runtime.state.sliced_tensors import Ranges, Sliced, index, whole

aten = torch.ops.aten
_COPIES = {aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.detach_copy.default}


@dataclass(frozen=True)
class Piece:
    """A slice of a stored tensor, and its place in a result.

    source: what is stored; ranges: of it; place: the ranges of the result. dims: for each dim of the result the
    source's dim that lies along it, -1 where there is none (the place is 1 long there). dtypes: which the numbers pass
    through.
    """

    source: Sliced
    ranges: tuple[tuple[int, int], ...]
    place: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = ()

    def turned(self, x: Tensor) -> Tensor:
        """What was read of the source, with the result's dims and dtype."""
        kept = [d for d in self.dims if d >= 0]
        x = x.permute([*kept, *(d for d in range(x.dim()) if d not in kept)])
        for dtype in self.dtypes:
            x = x.to(dtype)
        return x.reshape([n for _, n in self.place])

    def within(self, ranges: Ranges) -> Piece | None:
        """The part of it that lies in these ranges of the source."""
        common = [_common(mine, other) for mine, other in zip(self.ranges, ranges, strict=True)]
        if any(n <= 0 for _, n in common):
            return None
        place = list(self.place)
        for d, along in enumerate(self.dims):
            if along >= 0:
                start = self.place[d][0] + common[along][0] - self.ranges[along][0]
                place[d] = start, common[along][1]
        return replace(self, ranges=tuple(common), place=tuple(place))


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    start = max(a[0], b[0])
    return start, min(a[0] + a[1], b[0] + b[1]) - start


@dataclass(frozen=True)
class OnTape:
    """A tensor of a tape, read by slice. seed: of what on the tape is random; device: where that is computed."""

    tape: Tape
    ref: Ref
    seed: int | None = None
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype

    def pieces(self, ranges: Ranges) -> list[Piece] | None:
        """What a slice of it consists of; None where it is computed."""
        return pieces(self.tape, self.ref, ranges)

    def read(self, ranges: Ranges) -> Tensor:
        found = self.pieces(ranges)
        if found is None:
            return self.tape.replay([self.ref], self.seed, self.device)[0][index(ranges)]
        out = torch.empty([n for _, n in ranges], dtype=self.dtype)
        for piece in found:
            place = [(start - first, n) for (start, n), (first, _) in zip(piece.place, ranges, strict=True)]
            out[index(place)] = piece.turned(piece.source.read(piece.ranges))
        return out

    @property
    def stored(self) -> bool:
        """Does it come from files alone, piece by piece?"""
        return self.pieces(whole(self.shape)) is not None


@dataclass(frozen=True)
class Drawn:
    """A tensor that one random op filled: any slice of it is computed by itself, the same numbers as in the whole."""

    entry: Entry
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    device: torch.device | str = "cpu"

    def read(self, ranges: Ranges) -> Tensor:
        key = rng.key(self.seed, STREAM, self.entry.random)
        args = {k: x for k, x in self.entry.kwargs.items() if not isinstance(x, Ref)}
        return random_draws.draw_box(
            self.entry.name, torch.Size(self.shape), self.dtype, key, args, ranges, self.device
        )


def drawn(tape: Tape, ref: Ref, seed: int) -> Drawn | None:
    """None where anything but a random op, whose arguments are numbers, had a part in the tensor's last values."""
    at = tape.last_writer(ref.storage, len(tape.entries))
    entry = tape.entries[at] if at is not None else None
    if entry is None or entry.random < 0 or entry.name not in random_draws.SAMPLERS:
        return None
    target = entry.created[0] or entry.kwargs.get("self")
    given = [x for k, x in entry.kwargs.items() if isinstance(x, Ref) and (k != "self" or entry.created[0])]
    same = isinstance(target, Ref) and target.whole and target == ref
    return Drawn(entry, ref.shape, ref.dtype, seed) if same and not given else None


def pieces(tape: Tape, ref: Ref, ranges: Ranges, before: int | None = None) -> list[Piece] | None:
    """What a slice of a tensor consists of, at the end of the tape (or before one of its entries); None where it is not
    made of parts of stored tensors."""
    if any(n <= 0 for _, n in ranges):
        return []
    at = tape.last_writer(ref.storage, len(tape.entries) if before is None else before)
    if at is None:
        return None
    entry = tape.entries[at]
    made = entry.args[0] if entry.overwrites is not None else next((m for m in entry.created if m is not None), None)
    if made is None or made.storage != ref.storage or len(entry.created) > 1:
        return None
    view = _view(ref, made)
    if view is None:
        return None
    dims, starts = view
    inner = [(start, 1) for start in starts]
    for d, along in enumerate(dims):
        if along >= 0:
            inner[along] = starts[along] + ranges[d][0], ranges[d][1]
    found = _made_of(tape, at, inner)
    if found is None:
        return None
    return [_seen(piece, dims, starts, ranges, ref.dtype) for piece in found]


def _seen(piece: Piece, dims: Sequence[int], starts: Sequence[int], ranges: Ranges, dtype: torch.dtype) -> Piece:
    """A piece of what was made, as a piece of a view of it."""
    place = [
        (piece.place[along][0] - starts[along], piece.place[along][1]) if along >= 0 else (ranges[d][0], 1)
        for d, along in enumerate(dims)
    ]
    last = piece.dtypes[-1] if piece.dtypes else piece.source.dtype
    return replace(
        piece,
        place=tuple(place),
        dims=tuple(piece.dims[along] if along >= 0 else -1 for along in dims),
        dtypes=piece.dtypes if last == dtype else (*piece.dtypes, dtype),
    )


def _made_of(tape: Tape, at: int, ranges: Ranges) -> list[Piece] | None:
    """The pieces of a slice of what an entry makes."""
    entry = tape.entries[at]
    if entry.name == "stored":
        (stored,) = entry.args
        return [Piece(stored, tuple(ranges), tuple(ranges), tuple(range(len(ranges))))]
    if entry.func in _COPIES:
        source: Any = entry.args[1] if entry.func is aten.copy_.default else entry.args[0]
        made: Any = entry.args[0] if entry.func is aten.copy_.default else entry.created[0]
        return pieces(tape, source, ranges, at) if source.shape == made.shape else None
    if entry.func is aten.cat.default or entry.func is aten.stack.default:
        parts, dim = entry.args[0], entry.args[1] if len(entry.args) > 1 else entry.kwargs.get("dim", 0)
        stacked = entry.func is aten.stack.default
        return _joined(tape, at, parts, dim % len(ranges), ranges, stacked=stacked)
    return None


def _joined(
    tape: Tape, at: int, parts: Sequence[Ref], dim: int, ranges: Ranges, *, stacked: bool
) -> list[Piece] | None:
    """The pieces of a slice of tensors that are joined along a dim: an own one (stack), or one that they have (cat)."""
    found: list[Piece] = []
    first, count = ranges[dim]
    begin = 0
    for part in parts:
        if not stacked and part.shape == (0,) and len(ranges) > 1:
            continue  # cat leaves such out
        size = 1 if stacked else part.shape[dim]
        start, n = _common((first, count), (begin, size))
        if n > 0:
            own = [] if stacked else [(start - begin, n)]
            rest = [*ranges[:dim], *own, *ranges[dim + 1 :]]
            inner = pieces(tape, part, rest, at)
            if inner is None:
                return None
            for p in inner:
                place, dims = list(p.place), list(p.dims)
                if stacked:
                    place.insert(dim, (begin, 1))
                    dims.insert(dim, -1)
                else:
                    place[dim] = place[dim][0] + begin, place[dim][1]
                found.append(replace(p, place=tuple(place), dims=tuple(dims)))
        begin += size
    return found


def _view(ref: Ref, made: Ref) -> tuple[list[int], list[int]] | None:
    """A window on what was made, in its dims: (for each dim of the window the dim along it, -1 for none; where the
    window begins in each). None if the window's dims are no dims of it."""
    if ref.dtype != made.dtype or made.offset or not _dense(made):
        return None
    starts = [ref.offset // s % n if n > 1 else 0 for s, n in zip(made.stride, made.shape, strict=True)]
    dims, free = [], [d for d, n in enumerate(made.shape) if n > 1]
    for n, stride in zip(ref.shape, ref.stride, strict=True):
        fits = (d for d in free if made.stride[d] == stride and starts[d] + n <= made.shape[d])
        along = next(fits, -1) if n > 1 else -1
        if n > 1 and along < 0:
            return None
        if along >= 0:
            free.remove(along)
        dims.append(along)
    return dims, starts


def _dense(ref: Ref) -> bool:
    """Does every element of its storage belong to one place in it?"""
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(ref.stride, ref.shape, strict=True) if n != 1):
        if stride != size:
            return False
        size *= n
    return ref.nbytes == size * ref.dtype.itemsize
