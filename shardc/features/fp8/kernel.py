"""Multiply float8 matrices by torch's kernels (torch.nn.functional.scaled_mm).

    a    float8[m, k], scales        one for all of it, one a row, or one for each 32 of a row
    b    float8[n, k], scales        the same
    a @ b.T                          bf16[m, n]: sums of products, times the scales

Scales are powers of two, so this is the product of the numbers that the 8 bits represent, as a 16-bit kernel computes
it: neither rounds the terms, and at most the order of sums differs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from shardc.features.fp8.casts import powers
from shardc.features.fp8.recipe import Recipe
from shardc.torch_private import FakeTensor, multiplies_float8_on_cpu


class Narrow(NamedTuple):
    """A matrix float8[rows, k], whose last dim a product sums. exponent: i32, log2 of its scales.

    The shape of exponent is [1, 1], [rows, 1], or [rows, k / 32].
    """

    data: Tensor
    exponent: Tensor


def has_kernel(x: Tensor, recipe: Recipe, *sizes: int) -> bool:
    """Return whether torch multiplies such numbers in 8 bits where x is, with a result of its dtype.

    sizes: of the product, without its rows. A tensor without data represents one on a GPU that supports it.
    """
    if x.dtype is not torch.bfloat16 or any(n % recipe.multiple for n in sizes):
        return False
    return isinstance(x, FakeTensor) or _on(x.device, recipe.blocks)


@cache
def _on(device: torch.device, blocks: bool) -> bool:
    if device.type == "cpu":
        return multiplies_float8_on_cpu() and not blocks  # torch has no kernel for blocks there
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:  # an MI300 has another float8 format; an MI355X has the OCP's
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx95") and not blocks
    capability = torch.cuda.get_device_capability(device)
    return capability[0] == 10 if blocks else capability >= (8, 9)  # B200; L40S, H100 and later


def multiplied(a: Narrow, b: Narrow, *, blocks: bool = False) -> Tensor:
    """Multiply: bf16[m, n]. Sums are in float32. blocks: scales are those of blocks."""
    how, swizzle = ScalingType.BlockWise1x32, None
    if blocks:
        one, other, swizzle = _in_tiles(a.exponent), _in_tiles(b.exponent), SwizzleType.SWIZZLE_32_4_4
    else:
        how = ScalingType.TensorWise if b.exponent.numel() == 1 else ScalingType.RowWise
        one, other = powers(-a.exponent, torch.float32), powers(-b.exponent, torch.float32).t().contiguous()
    return F.scaled_mm(
        *(a.data.contiguous(), b.data.contiguous().t(), one, how, other, how, swizzle, swizzle),
        output_dtype=torch.bfloat16,
    )


def _in_tiles(exponent: Tensor) -> Tensor:
    """Return the scales of blocks as e8m0 in the order of cuBLAS: tiles of 128 rows by 4 blocks.

    In a tile, the scale of row r and block c is at (r % 32) * 16 + r // 32 * 4 + c. ("1D block scaling factors layout",
    docs.nvidia.com/cuda/cublas)
    """
    rows, blocks = exponent.shape
    scales = (127 - exponent).to(torch.uint8)
    scales = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = scales.view(-1, 4, 32, scales.shape[1] // 4, 4)  # tile, r // 32, r % 32, tile, c
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
