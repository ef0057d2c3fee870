"""Round to float8 (`cast`), and find rows' largest scaled numbers (`largest`), by Triton kernels.

They have the arithmetic of torch's casts in casts, on the bits of float32, so that the results
are equal bit for bit, and a GPU needs no float8 type. A granule's scale is computed from its largest number in
registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardc.features.fp8.recipe import EXPONENTS, FORMATS, NAN

#: Elements that one program computes; at most this many in a row.
TILE = 2048
ACROSS = 512


@triton.jit  # type: ignore[untyped-decorator]
def _exponent(amax, TOP: tl.constexpr, STEP: tl.constexpr, MOST: tl.constexpr, NOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute fp8.exponents of float32."""
    biased = (amax.to(tl.int32, bitcast=True) + (8388608 - STEP)) >> 23
    exponent = tl.minimum(tl.maximum(TOP - biased, -MOST), MOST)
    exponent = tl.where(amax == 0, 0, exponent)
    return tl.where(amax < float("inf"), exponent, NOT)


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    """Compute 2 ** exponent, for finite ones."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    x_at,
    amax_at,
    weights_at,
    out_at,
    scales_at,
    height,
    width,
    down,
    across,
    scales,
    TOP: tl.constexpr,
    STEP: tl.constexpr,
    ROW_TOP: tl.constexpr,
    ROW_STEP: tl.constexpr,
    MOST: tl.constexpr,
    NOT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PACK: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Round HEIGHT rows by WIDTH columns of height x width numbers.

    down, across: numbers of a granule; scales: granules side by side.
    """
    many = (width + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    row = (program // many) * HEIGHT + tl.arange(0, HEIGHT)
    column = (program % many) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < height)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    granule = (row // down).to(tl.int64)[:, None] * scales + (column // across)[None, :]
    exponent = _exponent(tl.load(amax_at + granule, mask=inside, other=0.0), TOP, STEP, MOST, NOT)
    broken = exponent == NOT
    up = tl.where(broken, 0, exponent)

    x = tl.load(x_at + place, mask=inside, other=0.0)
    v = x.to(tl.float32)
    if WEIGHTS:
        of_rows = tl.load(weights_at + column, mask=column < width, other=0.0)
        row_exponent = _exponent(of_rows, ROW_TOP, ROW_STEP, MOST, NOT)[None, :]
        v = v * _power(-row_exponent)
    v = v * _power(up)
    bits = v.to(tl.int32, bitcast=True)
    sign = bits & -2147483648
    size = bits & 2147483647
    drop: tl.constexpr = 23 - MANTISSA
    magic: tl.constexpr = (127 - BIAS + drop + 1) << 23
    round_up = size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)
    low = size.to(tl.float32, bitcast=True) + tl.full((1, 1), magic, tl.int32).to(tl.float32, bitcast=True)
    normal = size >= ((128 - BIAS) << 23)
    if PACK:
        byte = tl.where(normal, (round_up >> drop) - ((127 - BIAS) << MANTISSA), low.to(tl.int32, bitcast=True) - magic)
        byte = tl.where(broken, 127, byte | ((sign >> 24) & 128))
        tl.store(out_at + place, byte.to(tl.uint8), mask=inside)
        first = inside & (row % down == 0)[:, None] & (column % across == 0)[None, :]
        tl.store(scales_at + granule, exponent.to(tl.uint8), mask=first)
    else:
        small = low - tl.full((1, 1), magic, tl.int32).to(tl.float32, bitcast=True)
        bits = tl.where(normal, (round_up >> drop) << drop, small.to(tl.int32, bitcast=True)) | sign
        r = bits.to(tl.float32, bitcast=True) * _power(-up)
        if WEIGHTS:
            r = r * _power(row_exponent)
        r = tl.where(broken, float("nan"), r)
        tl.store(out_at + place, r.to(x.dtype), mask=inside)


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.where(a > b, a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    x_at,
    weights_at,
    out_at,
    width,
    TOP: tl.constexpr,
    STEP: tl.constexpr,
    MOST: tl.constexpr,
    NOT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find the largest number of one row."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.full((WIDTH,), 0.0, tl.float32)
    for begin in range(0, width, WIDTH):
        column = begin + tl.arange(0, WIDTH)
        v = tl.load(x_at + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        exponent = _exponent(tl.load(weights_at + column, mask=column < width, other=0.0), TOP, STEP, MOST, NOT)
        v = tl.abs(v * _power(-exponent))
        most = _larger(most, tl.where(v == v, v, float("inf")))
    tl.store(out_at + row, tl.reduce(most, 0, _larger))


def _top(format: str) -> tuple[int, int]:
    """Return TOP and STEP, as in fp8.exponents."""
    _, top, even = FORMATS[format]
    most, power = math.frexp(top)
    return power - 1 + 127, int((2 * most - 1) * (1 << 23)) + int(even)


def cast(
    x: Tensor, amax: Tensor, weights: Tensor | None, format: str, granule: Sequence[int], out: Tensor, kind: str
) -> None:
    """Write x [height, width] into `out`: "packed" (bytes, with the scales' exponents after), or "values"."""
    x = x.contiguous()
    height, width = x.shape
    down, across = granule[0] or max(height, 1), granule[1] or max(width, 1)
    if not x.numel():
        return
    top, row_top = _top(format), _top("e4m3")
    side = min(triton.next_power_of_2(width), ACROSS)
    rows = min(triton.next_power_of_2(height), TILE // side)
    programs = triton.cdiv(height, rows) * triton.cdiv(width, side)
    mantissa, bias = (3, 7) if format == "e4m3" else (2, 15)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _cast[(programs,)](
            *(x, amax.contiguous(), amax if weights is None else weights.contiguous(), out, out[x.numel() :]),
            *(height, width, down, across, width // across),
            TOP=top[0],
            STEP=top[1],
            ROW_TOP=row_top[0],
            ROW_STEP=row_top[1],
            MOST=EXPONENTS,
            NOT=NAN,
            MANTISSA=mantissa,
            BIAS=bias,
            WEIGHTS=weights is not None,
            PACK=kind == "packed",
            HEIGHT=rows,
            WIDTH=side,
            enable_fp_fusion=False,  # round like torch
        )


def largest(x: Tensor, weights: Tensor) -> Tensor:
    """Return f32[height, 1]: for each row of x the largest absolute number over its column's e4m3 scale.

    It is infinity where something is not finite. weights: largest values of the columns.
    """
    x = x.contiguous()
    height, width = x.shape
    out = torch.zeros(height, 1, device=x.device)
    top, step = _top("e4m3")
    if x.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            side = min(triton.next_power_of_2(width), TILE)
            _largest[(height,)](
                *(x, weights.contiguous(), out, width),
                **{"TOP": top, "STEP": step, "MOST": EXPONENTS, "NOT": NAN, "WIDTH": side},
                enable_fp_fusion=False,
            )
    return out
