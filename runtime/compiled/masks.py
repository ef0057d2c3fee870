"""Compute dropout by elementwise arithmetic, which compilers can fuse; the same bits as `ops.dropout`.

The mask of an element is a hash of its global index and of two key words (shardc.runtime.rng). The words are an input:
one compiled region serves all layers, steps and microbatches, and no mask is ever stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.rng import Digits, Paddings, Rng, threshold

_M1, _M2 = 0x7FEB352D, 0x846CA68B - 2**32  # of lowbias32, as signed 32-bit numbers; see shardc.runtime.rng


def inputs(
    rng: Rng, stream: int, shape: Sequence[int], digits: Digits, paddings: Paddings, mesh: Any, device: torch.device
) -> list[Tensor]:
    """Return the inputs of `masked`: (key words i32[2], rows, columns), without waiting for the device.

    rows, columns: of rng.row_and_column_offsets. shape: global; digits, paddings: of it.
    """
    return [rng.key_words(stream, device), *rng.row_and_column_offsets(shape, digits, mesh, device, paddings)]


def masked(x: Tensor, where: Sequence[Tensor], p: float) -> Tensor:
    """Scale kept elements of x by 1 / (1 - p), zero the others; contiguous. where: of `inputs`."""
    words, rows, columns = where
    indices = (rows[:, None] + columns).reshape(-1)[: x.numel()].reshape(x.shape)
    low, high = words[0], words[1]
    if indices.dtype == torch.int64:
        above = (indices >> 32).to(torch.int32)
        below = indices & 0xFFFFFFFF
        number = (below - ((below >> 31) << 32)).to(torch.int32)
        number = number ^ torch.where(above == 0, 0, _hash(above, high, low))
    else:
        number = indices
    keep = _hash(number, low, high) < threshold(p)
    return (x * keep).contiguous() * (1 / (1 - p))


def _hash(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _avalanche(_avalanche(x ^ low) + high)


def _avalanche(x: Tensor) -> Tensor:
    """Hash as rng._avalanche does: the shifts are arithmetic, so the copied sign bits are masked off."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _M1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _M2
    return x ^ ((x >> 16) & 0xFFFF)
