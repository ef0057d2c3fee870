"""Print types of values as programs show them, and parse them: `f32[8, 512@tp] +dp`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, Layout, Partial, PartialGrad, Placement, Shard

#: The most elements of a tensor: more than any machine holds.
ELEMENTS = 1 << 56
#: Follows the axis of a mirrored shard.
MIRRORED = "↔"
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
    """Format a value's type for a program: `f32[8, 512@tp]`, `f32[8, 3·512@tp]` (split=3).

    Also `f32[8, 510+2@tp]` (padded), `f32[8, 512] +tp ~dp`, `i64[8, 2·512@cp↔]` (mirrored).
    """
    dims = []
    for d, size in enumerate(shape):
        # axes with sections come first, then outer ones: the printed sizes already show the first axis's split
        axes = sorted(layout.shards(d), key=lambda item: (not item[1].sections, item[1].split))
        text = str(size)
        for i, (name, s) in enumerate(axes):
            axis = name + MIRRORED if s.mirrored else name
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


_TYPE = re.compile(r"(\w+)\[(.*)\]((?: [+~]\S+)*)$", re.ASCII)
#: Sizes have at most 18 digits: longer numbers take time and memory, and no tensor is so large.
_N, _N1 = r"\d{1,18}", r"[1-9]\d{0,17}"
_DIM = re.compile(rf"(?:({_N})|({_N1})·({_N})|({_N}(?:\|{_N})+))(?:\+({_N1}))?((?:@[^@/\s]+(?:/{_N1})?)*)$", re.ASCII)


def parse(text: str) -> tuple[tuple[int, ...], torch.dtype, dict[str, Placement]]:
    """Parse the text of `show`: return (global shape, dtype, placements by axis). Raises ValueError."""
    match = _TYPE.match(text) if len(text) < 10_000 else None
    names = {v: k for k, v in DTYPES.items()}
    if not match or match[1] not in names:
        raise ValueError(f"not a type: {text[:80]!r}")
    shape: list[int] = []
    placements: list[tuple[str, Placement]] = []
    for d, part in enumerate(match[2].split(", ") if match[2] else ()):
        dim = _DIM.match(part)
        if not dim:
            raise ValueError(f"not a type: {text[:80]!r} (its dim {d})")
        sections = tuple(int(x) for x in dim[4].split("|")) if dim[4] else ()
        split = int(dim[2]) if dim[2] else 1
        shape.append(sum(sections) if sections else split * int(dim[3]) if dim[3] else int(dim[1]))
        pad = (int(dim[5]), split) if dim[5] else ()
        for i, axis in enumerate(dim[6].split("@")[1:]):
            name, _, written = axis.partition("/")
            parts = split if i == 0 and not written else int(written or 1)
            mirrored, name = name.endswith(MIRRORED), name.removesuffix(MIRRORED)
            shard = Shard(d, parts, sections if i == 0 else (), *pad)
            placements.append((name, replace(shard, mirrored=True) if mirrored else shard))
    for mark in match[3].split():
        op, _, axis = mark[1:].rpartition(":")
        placements.append((axis, PARTIAL_GRAD if mark[0] == "~" else Partial(op or "sum")))
    if math.prod(s for s in shape if s) > ELEMENTS:
        raise ValueError(f"not a type: {text[:80]!r} (larger than any machine)")
    if len({axis for axis, _ in placements}) < len(placements):
        raise ValueError(f"not a type: {text[:80]!r} (an axis appears twice)")
    return tuple(shape), names[match[1]], dict(placements)
