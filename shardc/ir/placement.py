"""How one value lies on a mesh: the placements on each mesh axis, and the arithmetic of cutting and joining tensors.

On every mesh axis a value is `Replicate`, `Shard`, `Partial` or `PartialGrad`; a `Layout` gives one for each axis.
A shard is an *absolute digit*: the global dim is seen as [split, axis size, rest] and the middle digit is spread over
the axis. Axes that share a dim must hold disjoint digits; then they can be cut and gathered in any order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardc.ir.mesh import Mesh


@dataclass(frozen=True)
class Replicate:
    """Every rank holds all of the value, and all of its gradient."""


@dataclass(frozen=True)
class Shard:
    """The dim is seen as [split, axis, rest]; the middle digit is spread over the axis.

    dim: dimension of the global tensor, >= 0.
    split: product of the major digits; 1 is the plain case, 3 a fused q|k|v weight.
    sections: sizes of concatenated parts of the dim, each of which is split on its own (then split is 1).
    padding, blocks: for sizes that do not divide. The dim is seen as [blocks, size/blocks], and so many elements are
    put behind each block; split counts in the padded dim. Parameters are padded by zeros, inputs by copies of their
    first entries, and the gradient of padding is zero; elsewhere padding may hold any finite number: what sums it away
    sets it to zero first."""

    dim: int
    split: int = 1
    sections: tuple[int, ...] = ()
    padding: int = 0
    blocks: int = 1

    def padded(self, size: int) -> int:
        """The dim's size with its padding."""
        return size + self.blocks * self.padding


@dataclass(frozen=True)
class Partial:
    """The ranks' values still have to be combined by `op` ("sum" or "max"). Its gradient is replicated."""

    op: str = "sum"


@dataclass(frozen=True)
class PartialGrad:
    """Replicated with a partial gradient: every rank holds all of the value, and its gradient is only a summand.

    The mirror image of `Partial`, whose value is a summand and whose gradient is whole. What makes it of a replicated
    value is `sum_grad`, identity in forward and all_reduce in backward: *f* of Megatron-LM (Shoeybi et al. 2019), whose
    *g*, the opposite, is `all_reduce` from `Partial`; JAX's shard_map calls the two `pvary` and `psum`, each the
    other's transpose. Printed as `~axis`."""


Placement = Replicate | Shard | Partial | PartialGrad
REPLICATE, PARTIAL_GRAD, PARTIAL = Replicate(), PartialGrad(), Partial()


@dataclass(frozen=True)
class Layout:
    """Placement per axis; axes that are not named replicate. Pairs are kept in the mesh's order of axes."""

    items: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def of(cls, placements: Mapping[str, Placement], mesh: Mesh) -> Layout:
        """The layout with these placements. On an axis that is seen as several digits each of them gets its own."""
        every = {part: p for a, placed in placements.items() for part, p in _digits(a, placed, mesh)}
        return cls(tuple((a, every[a]) for a in mesh.names if a in every and every[a] != REPLICATE))

    def __getitem__(self, axis: str) -> Placement:
        return dict(self.items).get(axis, REPLICATE)

    def replace(self, axis: str, placement: Placement, mesh: Mesh) -> Layout:
        return Layout.of({**dict(self.items), axis: placement}, mesh)

    def shards(self, dim: int | None = None) -> list[tuple[str, Shard]]:
        """The (axis, shard) pairs, of one dim or of all."""
        return [(a, p) for a, p in self.items if isinstance(p, Shard) and dim in (None, p.dim)]

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        local = list(shape)
        for s in self.paddings():
            local[s.dim] = s.padded(local[s.dim])
        for axis, s in self.shards():
            local[s.dim] //= mesh.size(axis)
        return tuple(local)

    def paddings(self) -> list[Shard]:
        """One shard of every dim that is padded: all shards of a dim have the same padding."""
        return list({s.dim: s for _, s in self.shards() if s.padding}.values())

    def local_split(self, axis: str, mesh: Mesh) -> int:
        """`split` of this axis' shard as seen by a tensor that all *other* axes have already cut."""
        shard = self[axis]
        assert isinstance(shard, Shard)
        outer = [mesh.size(a) for a, s in self.shards(shard.dim) if a != axis and s.split < shard.split]
        return shard.split // math.prod(outer)

    def fits(self, shape: Sequence[int], mesh: Mesh) -> str:
        """ "" if every shard divides its dim and digits are disjoint; else what is wrong."""
        for axis, s in self.shards():
            n = mesh.size(axis)
            if s.dim >= len(shape):
                return f"dim {s.dim} does not exist in a tensor of {len(shape)} dims"
            if s.padding and (s.sections or s.split % s.blocks or shape[s.dim] % s.blocks):
                return f"padding of {s.blocks} blocks does not fit {s}"
            for part in s.sections or (s.padded(shape[s.dim]),):
                if part % (s.split * n):
                    return f"{part} does not divide by {axis}={n}" + (f" in {s.split} parts" if s.split > 1 else "")
            if s.sections and (sum(s.sections) != shape[s.dim] or s.split != 1):
                return f"sections {list(s.sections)} do not sum to the dim's size {shape[s.dim]}"
            for other, o in self.shards(s.dim):
                if other == axis or n == 1 or mesh.size(other) == 1:  # an axis of one rank takes nothing away
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
        """This rank's part of a global tensor (a view where possible). Ignores Partial and PartialGrad.

        Padding is zeros, or copies of what the dim begins with.
        """
        for s in self.paddings():
            tensor = widen(tensor, s, copies=copies)
        # inner digits first: cutting an inner digit leaves the outer ones' absolute position alone
        for axis, s in sorted(self.shards(), key=lambda item: -item[1].split):
            tensor = chunks(tensor, s, mesh.size(axis))[coords[axis]]
        return tensor

    def join(self, parts: Callable[[Mapping[str, int]], torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """The global tensor from its parts; `parts(coords)` gives one rank's. Replicas are read at coordinate 0."""

        def build(todo: list[tuple[str, Shard]], coords: dict[str, int]) -> torch.Tensor:
            if not todo:
                return parts(coords)
            axis, s = todo[0]
            done = [build(todo[1:], {**coords, axis: i}) for i in range(mesh.size(axis))]
            return unchunk(done, s)

        # outermost level of the recursion joins last: inner digits are joined last, mirror image of `local`
        order = sorted(self.shards(), key=lambda item: -item[1].split)
        whole = build(order, dict.fromkeys(mesh.names, 0))
        for s in self.paddings():
            whole = trim(whole, s)
        return whole

    def boxes(
        self, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]
    ) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """This rank's part as boxes, each a tuple per dim of (local start, global start,
        length). Padding is in none.
        """
        runs: list[list[tuple[int, int, int]]] = []
        for dim, size in enumerate(shape):
            digits = [(s, mesh.size(axis), coords[axis]) for axis, s in self.shards(dim) if mesh.size(axis) > 1]
            runs.append(_runs(size, digits))
        yield from _product(runs)

    def __str__(self) -> str:
        return " ".join(f"{a}:{p}" for a, p in self.items)


def _digits(axis: str, placement: Placement, mesh: Mesh) -> Iterator[tuple[str, Placement]]:
    """What a placement on an axis means for each of the digits that it consists of."""
    outer = 1
    for part in mesh.parts(axis):
        yield (
            part,
            (
                replace(placement, split=placement.split * outer)
                if isinstance(placement, Shard) and outer > 1
                else placement
            ),
        )
        outer *= mesh.size(part)


def _runs(size: int, digits: list[tuple[Shard, int, int]]) -> list[tuple[int, int, int]]:
    """(local start, global start, length) of the stretches of a dim that one rank holds. digits: (shard, ranks, this
    rank's).
    """
    pad = digits[0][0] if digits else Shard(0)
    block = size // pad.blocks + pad.padding
    stretches = [(0, pad.padded(size))]
    before = 1  # product of the digits above the current one
    for s, n, i in sorted(digits, key=lambda d: d[0].split):
        if s.sections:
            starts = [sum(s.sections[:k]) for k in range(len(s.sections))]
            stretches = [(start + i * (part // n), part // n) for start, part in zip(starts, s.sections, strict=True)]
        else:
            free = s.split // before  # digits between that axis and this one: every value of them is held
            stretches = [
                (start + f * (length // free) + i * (length // free // n), length // free // n)
                for start, length in stretches
                for f in range(free)
            ]
            before = s.split * n
    merged: list[tuple[int, int, int]] = []
    local = 0
    for padded_start, held in stretches:
        inside = padded_start % block  # a stretch lies within one block
        start, length = (
            padded_start - padded_start // block * pad.padding,
            max(0, min(held, block - pad.padding - inside)),
        )
        if merged and merged[-1][1] + merged[-1][2] == start and merged[-1][0] + merged[-1][2] == local:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + length)
        elif length:
            merged.append((local, start, length))
        local += held
    return merged


def _product(runs: list[list[tuple[int, int, int]]]) -> Iterator[tuple[tuple[int, int, int], ...]]:
    if not runs:
        yield ()
        return
    for head in runs[0]:
        for tail in _product(runs[1:]):
            yield (head, *tail)


def widen(x: torch.Tensor, s: Shard, *, copies: bool = False) -> torch.Tensor:
    """x with the padding of a shard: zeros, or copies of what each block begins with. x itself where there is none."""
    if not s.padding:
        return x
    d, size = s.dim, x.shape[s.dim]
    block = size // s.blocks
    seen = x.reshape(*x.shape[:d], s.blocks, block, *x.shape[d + 1 :])
    if copies:
        wide = seen.index_select(d + 1, torch.arange(block + s.padding, device=x.device) % block)
    else:
        wide = torch.nn.functional.pad(seen, (*[0, 0] * (x.dim() - 1 - d), 0, s.padding))
    return wide.reshape(*x.shape[:d], s.padded(size), *x.shape[d + 1 :])


def trim(x: torch.Tensor, s: Shard) -> torch.Tensor:
    """The inverse of `widen`."""
    if not s.padding:
        return x
    d, block = s.dim, x.shape[s.dim] // s.blocks
    seen = x.reshape(*x.shape[:d], s.blocks, block, *x.shape[d + 1 :]).narrow(d + 1, 0, block - s.padding)
    return seen.reshape(*x.shape[:d], s.blocks * (block - s.padding), *x.shape[d + 1 :])


def chunks(x: torch.Tensor, shard: Shard, n: int) -> list[torch.Tensor]:
    """Cut x, padded already, into the n parts of a shard: dim = [split, n, rest], part i keeps digit i. Views where
    possible.
    """
    d = shard.dim
    if n == 1:
        return [x]
    if shard.sections:
        pieces = [p.chunk(n, d) for p in x.split_with_sizes(list(shard.sections), d)]
        return [torch.cat([p[i] for p in pieces], d) for i in range(n)]
    if shard.split == 1:
        return list(x.chunk(n, d))
    shape, size = x.shape, x.shape[d]
    seen = x.reshape(*shape[:d], shard.split, n, size // (shard.split * n), *shape[d + 1 :])
    return [seen.select(d + 1, i).reshape(*shape[:d], size // n, *shape[d + 1 :]) for i in range(n)]


def unchunk(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The inverse of `chunks`: padding stays."""
    d, n = shard.dim, len(parts)
    if n == 1:
        return parts[0]
    if shard.sections:
        cut = [p.split_with_sizes([s // n for s in shard.sections], d) for p in parts]
        return torch.cat([c[i] for i in range(len(shard.sections)) for c in cut], d)
    if shard.split == 1:
        return torch.cat(list(parts), d)
    shape = parts[0].shape
    seen = [p.reshape(*shape[:d], shard.split, shape[d] // shard.split, *shape[d + 1 :]) for p in parts]
    return torch.cat(seen, d + 1).reshape(*shape[:d], shape[d] * n, *shape[d + 1 :])


DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}


def show(shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> str:
    """A value's type as programs print it: `f32[8, 512@tp]`, `f32[8, 3·512@tp]` (split=3), `f32[8, 510+2@tp]`, `f32[8,
    512] +tp ~dp`.
    """
    dims = []
    for d, size in enumerate(shape):
        # an axis with sections first: the sizes say what it splits; then by digit, and the first digit is said by the
        # sizes too
        axes = sorted(layout.shards(d), key=lambda item: (not item[1].sections, item[1].split))
        text = str(size)
        for i, (axis, s) in enumerate(axes):
            if i == 0 and s.sections:
                text = "|".join(map(str, s.sections))
            elif i == 0 and s.padding:
                text = (f"{s.blocks}·{size // s.blocks}" if s.blocks > 1 else str(size)) + f"+{s.padding}"
                text += f"@{axis}/{s.split}" if s.split != s.blocks else f"@{axis}"
                continue
            elif i == 0 and s.split > 1:
                text = f"{s.split}·{size // s.split}"
            text += f"@{axis}" if i == 0 or s.split == 1 else f"@{axis}/{s.split}"
        dims.append(text)
    marks = [f"+{a}" if p == PARTIAL else f"+{p.op}:{a}" for a, p in layout.items if isinstance(p, Partial)]
    marks += [f"~{a}" for a, p in layout.items if isinstance(p, PartialGrad)]
    return " ".join([f"{DTYPES.get(dtype, str(dtype))}[{', '.join(dims)}]", *marks])


_TYPE = re.compile(r"(\w+)\[(.*)\]((?: [+~]\S+)*)$")
_DIM = re.compile(r"(?:(\d+)|([1-9]\d*)·(\d+)|(\d+(?:\|\d+)+))(?:\+([1-9]\d*))?((?:@[^@/\s]+(?:/[1-9]\d*)?)*)$")


def parse(text: str) -> tuple[tuple[int, ...], torch.dtype, dict[str, Placement]]:
    """The inverse of `show`: (global shape, dtype, placements by axis). Raises ValueError on anything else."""
    match = _TYPE.match(text)
    names = {v: k for k, v in DTYPES.items()}
    if not match or match[1] not in names:
        raise ValueError(f"not a type: {text!r}")
    shape: list[int] = []
    placements: list[tuple[str, Placement]] = []
    for d, part in enumerate(match[2].split(", ") if match[2] else ()):
        dim = _DIM.match(part)
        if not dim:
            raise ValueError(f"not a type: {text!r} (its dim {d})")
        sections = tuple(int(x) for x in dim[4].split("|")) if dim[4] else ()
        split = int(dim[2]) if dim[2] else 1
        shape.append(sum(sections) if sections else split * int(dim[3]) if dim[3] else int(dim[1]))
        pad = (int(dim[5]), split) if dim[5] else ()
        for i, axis in enumerate(dim[6].split("@")[1:]):
            name, _, at = axis.partition("/")
            own = split if i == 0 and not at else int(at or 1)
            placements.append((name, Shard(d, own, sections if i == 0 else (), *pad)))
    for mark in match[3].split():
        op, _, axis = mark[1:].rpartition(":")
        placements.append((axis, PARTIAL_GRAD if mark[0] == "~" else Partial(op or "sum")))
    if len({axis for axis, _ in placements}) < len(placements):
        raise ValueError(f"not a type: {text!r} (an axis appears twice)")
    return tuple(shape), names[match[1]], dict(placements)
