"""Define how a value is placed on a mesh: its placement on each axis, and the part that each rank has.

On every mesh axis a value is `Replicate`, `Shard`, `Partial` or `PartialGrad`; a `Layout` has one for each axis.
A shard takes one *digit* of a dim: the global dim is viewed as [split, axis size, rest], and the middle index is spread
over the axis. Axes that share a dim take different digits, and can cut and gather it in any order.

    dim of 12, tp=2, split=3    viewed as [3, 2, 2]: rank 0 has 0 1, 4 5, 8 9; rank 1 has 2 3, 6 7, 10 11
    dim of 12, dp=2, split=1    viewed as [1, 2, 6]: rank 0 of dp has 0 .. 5
      and also tp=2, split=2    viewed as [2, 2, 3], the first 2 is dp: of 0 .. 5, rank 0 of tp has 0 1 2, rank 1 3 4 5

Related files: shard_chunks.py cuts tensors by a shard and joins them; type_text.py prints layouts for programs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from shardc.ir.mesh import Mesh
from shardc.ir.shard_chunks import chunks, trim, unchunk, widen


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value and its whole gradient."""


@dataclass(frozen=True)
class Shard:
    """A dim is viewed as [split, axis size, rest], and the middle index is spread over the axis.

    dim: dimension of the global tensor, >= 0.
    split: number of equal parts of the dim, each of which is split over the ranks: 1 is the plain case, 3 a fused
    q|k|v weight. A rank has a piece of every part.
    sections: sizes of concatenated parts of the dim, each of which is split separately (then split is 1).
    padding, blocks: for sizes that are not divisible. The dim is viewed as [blocks, size/blocks], and each block gets
    `padding` more elements at its end; `split` divides the padded size. Parameters are padded with zeros, inputs with
    copies of their first entries. The gradient of padding is zero. Elsewhere padding may hold any finite number: ops
    that sum over it set it to zero first, and ops that are not finite there fill it (shardc.rules.core.finite_padding).
    mirrored: of the `split` parts (an even number), every second one is dealt out backwards. With split=2 rank r of n
    has parts r and 2 n - 1 - r of 2 n: a zigzag, which balances causal work. Padding comes after all 2 n parts, so it
    is at the end of a rank's part, as elsewhere. Sequence dims of inputs (`balance: zigzag`) and of values computed
    from them are mirrored; parameters never are.
    """

    dim: int
    split: Annotated[int, Field(ge=1, lt=1 << 62)] = 1
    sections: tuple[int, ...] = ()
    padding: int = 0
    blocks: Annotated[int, Field(ge=1, lt=1 << 62)] = 1
    mirrored: bool = False

    @property
    def signed(self) -> int:
        """`split`, negative if the shard is mirrored: the form in which programs write digits."""
        return -self.split if self.mirrored else self.split

    @classmethod
    def of_signed(cls, dim: int, split: int, sections: Sequence[int] = (), padding: int = 0, blocks: int = 1) -> Shard:
        """Return the shard with a signed `split`, as programs write it."""
        return cls(dim, abs(split), tuple(sections), padding, blocks, split < 0)

    @property
    def by_digits_alone(self) -> bool:
        """Whether `signed` and the dim's size define which rank has an index: no sections, no padding inside."""
        return not self.sections and (self.blocks == 1 or not self.padding)

    def padded(self, size: int) -> int:
        """Return the dim's size with its padding."""
        return size + self.blocks * self.padding


@dataclass(frozen=True)
class Partial:
    """The ranks' values still have to be combined by `op` ("sum" or "max"). Its gradient is replicated."""

    op: str = "sum"


@dataclass(frozen=True)
class PartialGrad:
    """Replicated with a partial gradient: every rank has the whole value, and one summand of its gradient.

    The mirror image of `Partial`, whose value is a summand and whose gradient is whole. `sum_grad` makes it from a
    replicated value: identity in forward and all_reduce in backward, the *f* of Megatron-LM (Shoeybi et al. 2019). The
    opposite, Megatron's *g*, is `all_reduce` from `Partial`. JAX's shard_map calls the two `pvary` and `psum`, each the
    other's transpose. Printed as `~axis`.
    """


Placement = Replicate | Shard | Partial | PartialGrad
REPLICATE, PARTIAL_GRAD, PARTIAL = Replicate(), PartialGrad(), Partial()


@dataclass(frozen=True)
class Layout:
    """A placement for each axis, in the mesh's order of axes. On an axis that is missing, the value is replicated."""

    items: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def of(cls, placements: Mapping[str, Placement], mesh: Mesh) -> Layout:
        """Return the layout with these placements. An axis of several digits (Mesh.refine) gets one for each."""
        by_digit = {digit: p for a, placed in placements.items() for digit, p in _by_digit(a, placed, mesh)}
        return cls(tuple((a, by_digit[a]) for a in mesh.names if a in by_digit and by_digit[a] != REPLICATE))

    def __getitem__(self, axis: str) -> Placement:
        return dict(self.items).get(axis, REPLICATE)

    def replace(self, axis: str, placement: Placement, mesh: Mesh) -> Layout:
        return Layout.of({**dict(self.items), axis: placement}, mesh)

    def shards(self, dim: int | None = None) -> list[tuple[str, Shard]]:
        """Return the (axis, shard) pairs, of one dim or of all."""
        return [(a, p) for a, p in self.items if isinstance(p, Shard) and dim in (None, p.dim)]

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        local = list(shape)
        for s in self.paddings():
            local[s.dim] = s.padded(local[s.dim])
        for axis, s in self.shards():
            local[s.dim] //= mesh.size(axis)
        return tuple(local)

    def paddings(self) -> list[Shard]:
        """Return one shard for every padded dim: all shards of a dim have the same padding."""
        return list({s.dim: s for _, s in self.shards() if s.padding}.values())

    def local_split(self, axis: str, mesh: Mesh) -> int:
        """Return `signed` of this axis's shard as seen in a tensor that the axes of outer digits have cut already."""
        shard = self[axis]
        assert isinstance(shard, Shard)
        outer = [mesh.size(a) for a, s in self.shards(shard.dim) if a != axis and s.split < shard.split]
        parts = shard.split // math.prod(outer)
        return -parts if shard.mirrored else parts

    def problem(self, shape: Sequence[int], mesh: Mesh) -> str:
        """Return why a tensor cannot have the layout; "" if shards divide their dims, and digits are disjoint."""
        for axis, s in self.shards():
            n = mesh.size(axis)
            if s.dim >= len(shape):
                return f"dim {s.dim} does not exist in a tensor of {len(shape)} dims"
            if s.mirrored and (
                s.sections or self.local_split(axis, mesh) % 2 or (s.padding and s.split % (2 * s.blocks))
            ):
                return f"{axis} deals dim {s.dim} out in a zigzag, which no other axis may cut through"
            if s.padding and (s.sections or s.split % s.blocks or shape[s.dim] % s.blocks):
                return f"dim {s.dim} of {shape[s.dim]}, split over {axis}, cannot be padded in {s.blocks} blocks"
            for part in s.sections or (s.padded(shape[s.dim]),):
                if part % (s.split * n):
                    return f"{part} is not divisible by {axis}={n}" + (f" in {s.split} parts" if s.split > 1 else "")
            if s.sections and (sum(s.sections) != shape[s.dim] or s.split != 1):
                return f"sections {list(s.sections)} do not sum to the dim's size {shape[s.dim]}"
            for other, o in self.shards(s.dim):
                if other == axis or n == 1 or mesh.size(other) == 1:  # an axis of one rank cuts nothing
                    continue
                if (s.padding, s.blocks) != (o.padding, o.blocks):
                    return f"{axis} and {other} pad dim {s.dim} differently"
                if s.sections or o.sections:
                    return f"{axis} and {other} both split dim {s.dim}, and one of them by sections"
                if o.split <= s.split and s.split % (o.split * mesh.size(other)):
                    return f"{axis} and {other} take the same part of dim {s.dim}"
        return ""

    def local(
        self, tensor: torch.Tensor, mesh: Mesh, coords: Mapping[str, int], *, copies: bool = False
    ) -> torch.Tensor:
        """Return this rank's part of a global tensor (a view where possible). Ignores Partial and PartialGrad.

        copies: pad with copies of the first entries of the dim, not with zeros.
        """
        for s in self.paddings():
            tensor = widen(tensor, s, copies=copies)
        # inner digits first: cutting an inner digit keeps the outer ones' absolute position
        for axis, s in sorted(self.shards(), key=lambda item: -item[1].split):
            tensor = chunks(tensor, s, mesh.size(axis))[coords[axis]]
        return tensor

    def join(self, parts: Callable[[Mapping[str, int]], torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """Join the global tensor from its parts, `parts(coords)`. Replicas are read at coordinate 0."""

        def build(todo: list[tuple[str, Shard]], coords: dict[str, int]) -> torch.Tensor:
            if not todo:
                return parts(coords)
            axis, s = todo[0]
            done = [build(todo[1:], {**coords, axis: i}) for i in range(mesh.size(axis))]
            return unchunk(done, s)

        # as in `local`, inner digits first; the recursion joins the outermost digit first, and these last
        order = sorted(self.shards(), key=lambda item: -item[1].split)
        whole = build(order, dict.fromkeys(mesh.names, 0))
        for s in self.paddings():
            whole = trim(whole, s)
        return whole

    def boxes(
        self, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]
    ) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Yield this rank's part as boxes: a (local start, global start, length) per dim. Padding is in none."""
        per_dim: list[list[tuple[int, int, int]]] = []
        for dim, size in enumerate(shape):
            digits = [(s, mesh.size(axis), coords[axis]) for axis, s in self.shards(dim) if mesh.size(axis) > 1]
            per_dim.append(runs(size, digits))
        yield from itertools.product(*per_dim)

    def __str__(self) -> str:
        return " ".join(f"{a}:{p}" for a, p in self.items)


def _by_digit(axis: str, placement: Placement, mesh: Mesh) -> Iterator[tuple[str, Placement]]:
    """Yield the digits of an axis, outermost first, each with the placement on it."""
    outer = 1
    for digit in mesh.digits(axis):
        if isinstance(placement, Shard) and outer > 1:
            yield digit, replace(placement, split=placement.split * outer)
        else:
            yield digit, placement
        outer *= mesh.size(digit)


def runs(size: int, digits: list[tuple[Shard, int, int]]) -> list[tuple[int, int, int]]:
    """Return (local start, global start, length) of each run of indices of a dim that one rank holds.

    digits: (shard, number of ranks, this rank's coordinate) of each axis that splits the dim. First come the runs of
    the padded dim; then padding is cut off, and neighbours are merged.
    """
    if size == 0:
        return []
    padded = digits[0][0] if digits else Shard(0)  # all shards of a dim have the same padding
    block = size // padded.blocks + padded.padding
    stretches = [(0, padded.padded(size))]  # (start, length) of runs in the padded dim
    cut = 1  # into how many pieces the digits so far cut the padded dim
    for s, n, i in sorted(digits, key=lambda d: d[0].split):
        if s.sections:
            starts = [sum(s.sections[:k]) for k in range(len(s.sections))]
            stretches = [(start + i * (part // n), part // n) for start, part in zip(starts, s.sections, strict=True)]
        else:
            parts = s.split // cut  # each run has so many parts, and of each part this rank has the i-th of n pieces
            stretches = [
                (
                    start + k * (length // parts) + (n - 1 - i if s.mirrored and k % 2 else i) * (length // parts // n),
                    length // parts // n,
                )
                for start, length in stretches
                for k in range(parts)
            ]
            cut = s.split * n
    merged: list[tuple[int, int, int]] = []
    local = 0
    for padded_start, padded_length in stretches:
        inside = padded_start % block  # its place in its block; a run is within one block
        start = padded_start - padded_start // block * padded.padding
        length = max(0, min(padded_length, block - padded.padding - inside))
        if merged and merged[-1][1] + merged[-1][2] == start and merged[-1][0] + merged[-1][2] == local:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + length)
        elif length:
            merged.append((local, start, length))
        local += padded_length
    return merged
