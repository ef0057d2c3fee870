"""Define where an engine keeps weights, as data: which box of which tensor is where on each of its ranks.

    layout = Layout.load("layout.json")      {"shardc_layout": 1, "ranks": 2, "tensors": {
                                                "layers.0.qkv_proj.weight": {"dtype": "bfloat16", "shapes": [[96, 64]],
                                                  "parts": [{"of": "layers.0.q_proj.weight", "at": [[0, 0]],
                                                             "boxes": [[[0, 0], [64, 64]], [[64, 0], [64, 64]]]}, ...

A list by rank may have one entry, which holds for all ranks. `check` proves without running that each element of the
engine's tensors is written once, and each of the model's is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from shardc.errors import Errors, ShardcError
from shardc.features.reshard.routes import divided
from shardc.ir.patterns import match
from shardc.ir.similar_names import did_you_mean
from shardc.runtime.state.boxes import Box, Numbers, disjoint, whole

#: By name, the dtypes of an engine's tensors. Those of 8 bits have scales.
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
EIGHT_BITS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
T = TypeVar("T")
Sizes = Mapping[str, Numbers]


@dataclass(frozen=True)
class Part:
    """A box of one of the model's tensors on each rank, and its place in the engine's tensor.

    of: the tensor's name in the model; "": zeros, such as the padding of a vocabulary. boxes: by rank, (offset, shape)
    in it; None: the rank has none. at: by rank, where it begins in the engine's tensor. dims: the model's dims in the
    engine's order, if it is another one. Dims that only one of the two has are its first ones, and are 1 long.
    """

    of: str
    boxes: tuple[tuple[Numbers, Numbers] | None, ...]
    at: tuple[Numbers, ...]
    dims: Numbers | None = None

    def place(self, rank: int) -> tuple[Numbers, Numbers] | None:
        """Return the box of the engine's tensor that it fills on a rank."""
        box, at = by_rank(self.boxes, rank), by_rank(self.at, rank)
        if box is None:
            return None
        shape = tuple(box[1][d] for d in self.dims) if self.dims is not None else box[1]
        missing = len(at) - len(shape)
        return at, (1,) * missing + shape if missing >= 0 else shape[-missing:]

    def box(self, rank: int) -> Box | None:
        """Return the model's box, with its place in `seen`; None if the rank has none."""
        box = by_rank(self.boxes, rank)
        if box is None or not self.of:
            return None
        at, n = by_rank(self.at, rank), len(box[1])
        start = (0,) * (n - len(at)) + at
        inner = start[len(start) - n :]
        if self.dims is not None:
            inner = tuple(inner[self.dims.index(d)] for d in range(n))
        return Box(*box, (*start[: len(start) - n], *inner))

    def seen(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Return the engine's tensor in the model's order of dims. n: of the model's tensor."""
        x = x[(None,) * max(0, n - x.dim())]
        if self.dims is None:
            return x
        outer = x.dim() - n
        return x.permute(*range(outer), *(outer + self.dims.index(d) for d in range(n)))


@dataclass(frozen=True)
class Scale:
    """The scales of a tensor of 8 bits: one for each block of the model's tensor. name: of the engine's tensor.

    block: by dim of the model's tensor; 0: all of the dim. A stored number times its scale is the value.
    """

    name: str
    block: Numbers

    def sizes(self, shape: Numbers) -> Numbers:
        """Return the sizes of a block in a tensor of this shape."""
        return tuple(b or n for b, n in zip(self.block, shape, strict=True))

    def of(self, shape: Numbers) -> Numbers:
        """Return the number of blocks by dim."""
        return tuple(-(-n // b) for n, b in zip(shape, self.sizes(shape), strict=True))


@dataclass(frozen=True)
class Held:
    """A tensor of the engine. shapes: by rank."""

    dtype: str
    shapes: tuple[Numbers, ...]
    parts: tuple[Part, ...]
    scale: Scale | None = None


def by_rank(entries: Sequence[T], rank: int) -> T:
    return entries[rank] if len(entries) > 1 else entries[0]


@dataclass(frozen=True)
class Layout:
    """The tensors of an engine of so many ranks, by its names.

    unused: patterns of names of the model's tensors that the engine does not keep. origin: the convention behind it and
    its settings (shardc.features.reshard.conventions); `check` compares the layout with it.
    """

    ranks: int
    tensors: dict[str, Held]
    unused: tuple[str, ...] = ()
    origin: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Layout:
        """Read layout.json. Raises ShardcError with the place of each mistake."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            fix = "name a file that layout.save wrote"
            raise ShardcError(f"it cannot be read: {e}", where=str(path), fix=fix) from e
        if not isinstance(read, dict) or read.pop("shardc_layout", None) != 1:
            raise ShardcError("this is no layout of version 1", where=str(path), fix='begin with "shardc_layout": 1')
        try:
            return TypeAdapter(cls).validate_python(read)
        except ValidationError as e:
            errors = Errors()
            for mistake in e.errors():
                where = ".".join(map(str, mistake["loc"]))
                errors.add(mistake["msg"], where=f"{path}: {where}", fix="docs/how-to/engines.md shows the format")
            errors.raise_any()
            raise

    def save(self, path: str | Path) -> None:
        """Write layout.json."""
        Path(path).write_text(json.dumps({"shardc_layout": 1} | asdict(self)) + "\n", encoding="utf-8")

    def every(self, shapes: Sizes) -> dict[str, Held]:
        """Return all tensors, with those of scales. shapes: of the model's tensors."""
        scales: dict[str, Held] = {}
        for x in self.tensors.values():
            if x.scale is not None:
                parts = tuple(_of_scales(p, x.scale, shapes[p.of]) for p in x.parts if p.of)
                filled = tuple(_filled([p.place(r) for p in parts]) for r in range(self.ranks))
                scales[x.scale.name] = Held("float32", filled, parts)
        return self.tensors | scales


def _filled(places: Sequence[tuple[Numbers, Numbers] | None]) -> Numbers:
    """Return the shape that these parts of a tensor fill."""
    ends = [tuple(o + n for o, n in zip(*place, strict=True)) for place in places if place is not None]
    return tuple(map(max, zip(*ends, strict=True))) or (0,)


#: Behind the name of a tensor: its scales, as a tensor that the model seems to have.
SCALES = "::scale"


def scales_of(name: str, scale: Scale) -> str:
    return f"{name}{SCALES}{','.join(map(str, scale.block))}"


def _of_scales(part: Part, scale: Scale, shape: Numbers) -> Part:
    """Return the part of the scales that belongs to a part of the tensor. Raises ShardcError if blocks are cut."""
    sizes = scale.sizes(shape)

    def blocks(offset: Numbers, size: Numbers) -> tuple[Numbers, Numbers]:
        end = [o + n for o, n in zip(offset, size, strict=True)]
        begins = [o % b == 0 for o, b in zip(offset, sizes, strict=True)]
        if not all(begins) or any(e % b and e != n for e, b, n in zip(end, sizes, shape, strict=True)):
            fault = f"a rank's box at {list(offset)} of {list(size)} cuts blocks of {list(sizes)}"
            raise ShardcError(fault, where=part.of, fix="use fewer ranks, or scales of smaller blocks")
        first = tuple(o // b for o, b in zip(offset, sizes, strict=True))
        return first, tuple(-(-e // b) - f for e, b, f in zip(end, sizes, first, strict=True))

    def at(at: Numbers) -> Numbers:
        order = part.dims or tuple(range(len(sizes)))
        inner = [sizes[d] for d in order]
        many = [1] * (len(at) - len(inner)) + inner[max(0, len(inner) - len(at)) :]
        return tuple(-(-a // b) for a, b in zip(at, many, strict=True))

    boxes = tuple(blocks(*box) if box is not None else None for box in part.boxes)
    return replace(part, of=scales_of(part.of, scale), boxes=boxes, at=tuple(map(at, part.at)))


# --- the proof of a layout


def check(layout: Layout, shapes: Sizes, ties: Mapping[str, str] | None = None) -> None:
    """Raise ShardcError unless each element of the engine's tensors is written once, and each of the model's is read.

    shapes: of the model's tensors, by all their names. ties: {other name: first name}. Nothing is run.
    """
    errors = Errors()
    if layout.ranks < 1:
        errors.add(f"an engine of {layout.ranks} ranks", where="ranks", fix="a whole number from 1 on")
        errors.raise_any()
    ties = ties or {}
    read: dict[str, list[tuple[Numbers, Numbers]]] = {n: [] for n in shapes if n not in ties}
    for name, x in layout.tensors.items():
        with errors.collect():
            _check_form(name, x, layout.ranks, shapes)
            for rank in range(layout.ranks):
                _check_written(name, x, rank)
            for p in x.parts:
                if p.of:
                    read[ties.get(p.of, p.of)] += (box for box in p.boxes if box is not None)
    errors.raise_any()
    for pattern in layout.unused:
        if not any(match(pattern, n) for n in shapes):
            fix = did_you_mean(pattern, shapes, "remove it")
            errors.add(f"the model has no tensor {pattern!r}", where="unused", fix=fix)
    for n, boxes in read.items():
        _, rest = divided((whole(shapes[n]),) if math.prod(shapes[n]) else (), dict.fromkeys(boxes))
        if rest and not any(match(pattern, n) for pattern in layout.unused):
            (offset, shape), *_ = rest
            missing = "it" if not boxes else f"its box at {list(offset)} of {list(shape)}"
            fix = "add a part of it to one of the engine's tensors, or list it in `unused`"
            errors.add(f"no rank of the engine keeps {missing}", where=n, fix=fix)
    errors.raise_any()
    layout.every(shapes)  # raises where scales cut blocks


def _check_form(name: str, x: Held, ranks: int, shapes: Sizes) -> None:
    errors = Errors()

    def lists(what_for: str, entries: Sequence[Any]) -> None:
        if len(entries) not in (1, ranks):
            fix = f"give one for each of the {ranks} ranks, or one for all"
            errors.add(f"{what_for} has {len(entries)} entries", where=name, fix=fix)

    if x.dtype not in {*DTYPES, *EIGHT_BITS}:
        errors.add(f"dtype {x.dtype!r}", where=name, fix=f"one of {', '.join([*DTYPES, *EIGHT_BITS])}")
    if (x.dtype in EIGHT_BITS) != (x.scale is not None):
        word = "needs a scale" if x.dtype in EIGHT_BITS else "has no scale"
        errors.add(f"a tensor of {x.dtype} {word}", where=name, fix='"scale": {"name": ..., "block": [128, 128]}')
    lists("shapes", x.shapes)
    for i, p in enumerate(x.parts):
        lists(f"parts[{i}].boxes", p.boxes)
        lists(f"parts[{i}].at", p.at)
        if not p.of:
            continue
        if p.of not in shapes:
            fix = did_you_mean(p.of, shapes, "name a tensor of the model's state dict")
            errors.add(f"the model has no tensor {p.of!r}", where=name, fix=fix)
            continue
        n = len(shapes[p.of])
        if p.dims is not None and sorted(p.dims) != list(range(n)):
            errors.add(f"dims {list(p.dims)} of {p.of}", where=name, fix=f"an order of 0 to {n - 1}")
        if x.scale is not None and len(x.scale.block) != n:
            errors.add(f"blocks of {len(x.scale.block)} dims for {p.of}", where=name, fix=f"give {n} sizes; 0: all")
        for box in filter(None, p.boxes):
            inside = len(box[0]) == len(box[1]) == n and all(
                o >= 0 and s > 0 and o + s <= full for o, s, full in zip(*box, shapes[p.of], strict=False)
            )
            if not inside:
                fault = f"the box at {list(box[0])} of {list(box[1])} is not in {p.of} {list(shapes[p.of])}"
                errors.add(fault, where=name, fix="boxes are [offset, shape] in the model's whole tensor")
    errors.raise_any()


def _check_written(name: str, x: Held, rank: int) -> None:
    """Raise ShardcError unless the parts fill the tensor on a rank, each element once."""
    shape = by_rank(x.shapes, rank)
    boxes = [box for p in x.parts if (box := p.place(rank)) is not None]
    where, fix = f"{name} on rank {rank}", "make the parts fill it, each place once"
    for offset, size in boxes:
        if len(offset) != len(shape) or any(o < 0 or o + s > n for o, s, n in zip(offset, size, shape, strict=True)):
            fault = f"a part at {list(offset)} of {list(size)} is not in its shape {list(shape)}"
            raise ShardcError(fault, where=where, fix=fix)
    if not disjoint(boxes):
        raise ShardcError("two parts overlap", where=where, fix=fix)
    if lacking := math.prod(shape) - sum(math.prod(size) for _, size in boxes):
        fault = f"{lacking:,} of its {math.prod(shape):,} elements are in no part"
        raise ShardcError(fault, where=where, fix=fix)
