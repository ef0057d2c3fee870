"""Compute dropout in one Triton kernel: read x, hash each element's global index in registers, write.

It has the arithmetic of `dropout.by_blocks`, on unsigned 32-bit numbers, so that the results are equal bit for bit. The
kernel computes the key from words on the device: a captured CUDA graph draws new numbers in every replay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardc.runtime.rng import threshold

#: Elements that one program of the kernel computes; at most this many in a row.
TILE = 2048
ACROSS = 256
#: The dtype in which numbers are multiplied, as torch does: half precision in float32.
_COMPUTED = {torch.float64: tl.float64}


@triton.jit
def _splitmix(state, word):  # type: ignore[no-untyped-def]
    """Mix one word into the state, as rng.key does."""
    state = (state ^ word) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _avalanche(x):  # type: ignore[no-untyped-def]
    """Hash x by lowbias32, as rng._avalanche does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hash(x, low, high):  # type: ignore[no-untyped-def]
    return _avalanche(_avalanche(x ^ low) + high)


@triton.jit(do_not_specialize=["stream", "size", "height"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x_at,
    out_at,
    words_at,
    rows_at,
    columns_at,
    size,
    height,
    width,
    stream,
    limit,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTED: tl.constexpr,
):
    """Compute HEIGHT rows by WIDTH columns of height x width elements, of which the first `size` exist."""
    state = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    state = _splitmix(state, tl.load(words_at).to(tl.uint64))
    state = _splitmix(state, tl.full((1,), 0, tl.uint64) + stream.to(tl.uint64))
    state = _splitmix(state, tl.load(words_at + 1).to(tl.uint64))
    state = _splitmix(state, tl.load(words_at + 2).to(tl.uint64))
    low, high = state.to(tl.uint32)[:, None], (state >> 32).to(tl.uint32)[:, None]

    across = (width + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    row = (program // across) * HEIGHT + tl.arange(0, HEIGHT)
    column = (program % across) * WIDTH + tl.arange(0, WIDTH)
    index = (
        tl.load(rows_at + row, mask=row < height, other=0)[:, None]
        + tl.load(columns_at + column, mask=column < width, other=0)[None, :]
    )
    number = index.to(tl.uint32)
    if index.dtype == tl.int64:
        above = (index >> 32).to(tl.uint32)
        number = number ^ tl.where(above == 0, 0, _hash(above, high, low))
    number = _hash(number, low, high)
    keep = number.to(tl.int32, bitcast=True) < limit

    place = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (column < width)[None, :] & (place < size)
    x = tl.load(x_at + place, mask=inside, other=0)
    # torch's rounding: first times 0 or 1, which makes infinities NaN and keeps zeros' signs, then times the scale
    y = x.to(COMPUTED) * keep.to(COMPUTED)
    y = y * tl.full((1, 1), SCALE, COMPUTED)
    tl.store(out_at + place, y.to(x.dtype), mask=inside)


def launch(x: Tensor, words: Tensor, rows: Tensor, columns: Tensor, stream: int, p: float) -> Tensor:
    """Run the kernel. See `dropout.by_blocks`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    width = min(triton.next_power_of_2(len(columns)), ACROSS)
    height = min(triton.next_power_of_2(len(rows)), TILE // width)
    programs = triton.cdiv(len(rows), height) * triton.cdiv(len(columns), width)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _kernel[(programs,)](
            x,
            out,
            words,
            rows,
            columns,
            x.numel(),
            len(rows),
            len(columns),
            stream,
            threshold(p),
            SCALE=1 / (1 - p),
            HEIGHT=height,
            WIDTH=width,
            COMPUTED=_COMPUTED.get(x.dtype, tl.float32),
            enable_fp_fusion=False,  # round like torch
        )
    return out
