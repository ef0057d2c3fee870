"""Register `torch.ops.shardc.fp8_cast` and `fp8_row_amax`: rounding to float8 as one op each.

On GPUs each is one Triton kernel (cast_kernel.py) in place of a dozen torch kernels, which would take longer than
products of 8 bits save. Elsewhere they are the forms below, to which the kernels are equal bit for bit. x is of
bfloat16, float32 or float64; for float64 the form below runs on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.features.fp8.recipe import EXPONENTS, FORMATS, NAN

torch.library.define(
    "shardc::fp8_cast",
    "(Tensor x, Tensor amax, Tensor? weights, str format, int[] granule, str kind) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define("shardc::fp8_row_amax", "(Tensor x, Tensor weights) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def blocks(x: Tensor, granule: Sequence[int]) -> Tensor:
    """View x with each dim as [granules, size of one]."""
    sizes = [(1, n) if g == 0 else (n // g, g) for n, g in zip(x.shape, granule, strict=True)]
    return x.reshape([n for pair in sizes for n in pair])


def exponents(amax: Tensor, format: str) -> Tensor:
    """Return log2 of each granule's scale, int32: 0 for zeros, `NAN` if a number is not finite."""
    _, top, even = FORMATS[format]
    whole, bits = (torch.int64, 52) if amax.dtype == torch.float64 else (torch.int32, 23)
    most, power = math.frexp(top)
    # above this, the largest number would overflow, and its scale is one power of two less: as for twice the number
    step = int((2 * most - 1) * (1 << bits)) + int(even)
    biased = (amax.view(whole) + ((1 << bits) - step)) >> bits  # the float's exponent, with the bias
    result = (power - 1 + (127 if bits == 23 else 1023)) - biased.to(torch.int32)
    result = result.clamp(-EXPONENTS, EXPONENTS).masked_fill(amax == 0, 0)
    return result.masked_fill(~(amax < math.inf), NAN)


def powers(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2 ** exponent exactly, through e8m0, which stores only an exponent. nan for `NAN`."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).to(dtype)


def scaled(x: Tensor, exponent: Tensor, granule: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Multiply each granule by a power of two. dtype: of the result, which has all numbers of x."""
    dtype = x.dtype if dtype is None else dtype
    factors = blocks(powers(exponent, dtype), [1] * exponent.dim())
    return (blocks(x.to(dtype), granule) * factors).view(x.shape)


def narrow(x: Tensor, exponent: Tensor, format: str, granule: Sequence[int]) -> Tensor:
    """Multiply x by its scales, round, and return bytes."""
    return scaled(x, exponent, granule).to(FORMATS[format].dtype).view(torch.uint8)


def wide(message: Tensor, exponent: Tensor, dtype: torch.dtype, format: str, granule: Sequence[int]) -> Tensor:
    """Invert `narrow`: return the values of its bytes."""
    return scaled(message.view(FORMATS[format].dtype), -exponent, granule, dtype)


def of_columns(weights: Tensor, dims: int = 2) -> Tensor:
    """Return the exponents of a weight's rows, along the last of so many dims."""
    return exponents(weights.reshape(-1), "e4m3").view(*[1] * (dims - 1), -1)


def by_torch(x: Tensor, amax: Tensor, weights: Tensor | None, format: str, granule: Sequence[int], kind: str) -> Tensor:
    """Round x [height, width] to float8. amax: of its granules.

    kind: "packed": u8[..], a byte for each number and the exponents of scales after them; "values": like x, as numbers.
    weights: largest values of a weight's rows, one for each column, by whose scales columns are divided before and
    multiplied after.
    """
    exponent = exponents(amax, format)
    columns = None if weights is None else of_columns(weights)
    v = x if columns is None else scaled(x, -columns, (0, 1))
    rounded = narrow(v, exponent, format, granule)
    if kind == "packed":
        return torch.cat((rounded.reshape(-1), exponent.to(torch.int8).view(torch.uint8).reshape(-1)))
    v = wide(rounded, exponent, x.dtype, format, granule)
    return v if columns is None else scaled(v, columns, (0, 1))


def row_amax_by_torch(x: Tensor, weights: Tensor) -> Tensor:
    """Return the largest of each row over column scales, f32 or wider [height, 1]; infinity if not finite."""
    v = scaled(x, -of_columns(weights), (0, 1))
    largest: Tensor = torch.linalg.vector_norm(v, math.inf, [1], True)
    largest = largest.to(torch.promote_types(x.dtype, torch.float32))
    return largest.masked_fill_(largest.isnan(), math.inf)


def _empty(x: Tensor, amax: Tensor, kind: str) -> Tensor:
    if kind == "packed":
        return x.new_empty(x.numel() + amax.numel(), dtype=torch.uint8)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _kernels() -> Any:
    """Import the Triton kernels; return None without Triton (it comes with torch for CUDA on Linux)."""
    try:
        from shardc.features.fp8 import cast_kernel
    except ModuleNotFoundError:
        return None
    return cast_kernel


def by_kernel(
    x: Tensor, amax: Tensor, weights: Tensor | None, format: str, granule: Sequence[int], kind: str
) -> Tensor:
    """Run `by_torch` as a kernel."""
    kernels = _kernels() if amax.dtype is torch.float32 else None
    if kernels is None:
        return by_torch(x, amax, weights, format, granule, kind)
    out = _empty(x, amax, kind)
    kernels.cast(x, amax, weights, format, granule, out, kind)
    return out


def row_amax_by_kernel(x: Tensor, weights: Tensor) -> Tensor:
    """Run `row_amax_by_torch` as a kernel."""
    kernels = _kernels() if x.dtype is not torch.float64 else None
    largest: Tensor = row_amax_by_torch(x, weights) if kernels is None else kernels.largest(x, weights)
    return largest


torch.library.impl("shardc::fp8_cast", "CompositeExplicitAutograd", by_torch)
torch.library.impl("shardc::fp8_cast", "CUDA", by_kernel)
torch.library.impl("shardc::fp8_row_amax", "CompositeExplicitAutograd", row_amax_by_torch)
torch.library.impl("shardc::fp8_row_amax", "CUDA", row_amax_by_kernel)


@torch.library.register_fake("shardc::fp8_cast")  # type: ignore[untyped-decorator]
def _(x: Tensor, amax: Tensor, weights: Tensor | None, format: str, granule: Sequence[int], kind: str) -> Tensor:
    return _empty(x, amax, kind)


@torch.library.register_fake("shardc::fp8_row_amax")  # type: ignore[untyped-decorator]
def _(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def cast(
    x: Tensor, amax: Tensor, format: str, granule: Sequence[int], kind: str, weights: Tensor | None = None
) -> Tensor:
    """Run `by_torch` for x [.., width] with a granule for each dim, and amax of its dims."""
    down, across = granule[0], granule[-1]
    if x.dim() == 2 or (x.dim() > 2 and set(granule[:-1]) in ({0}, {1})):
        tops = amax.reshape(-1, amax.shape[-1])
        rounded: Tensor = torch.ops.shardc.fp8_cast(
            x.reshape(-1, x.shape[-1]), tops, weights, format, [down, across], kind
        )
        return rounded if kind == "packed" else rounded.view(x.shape)
    assert weights is None
    return by_torch(x, amax, weights, format, granule, kind)
