"""Round numbers to float8 with one scale for each *granule*, as ops on tensors of any floating dtype.

    x        0.11  3.0  -7.0     a row, which is a granule
    amax     7.0                 the largest of it
    scale    2**6                the largest power of two that float8 e4m3 can take: 7.0 * 64 = 448
    float8   7     192  -448     the factors of a product of 8 bits: 0.11 * 64 = 7.04 is rounded
    result   0.109375  3.0  -7.0

The result of `fp8_round` has the dtype of x. Scales are powers of two, so a number of 4 significant bits is the same in
bfloat16, float32 and float64: a product of such tensors is exactly the product of float8 tensors, and everything that
follows (splits, gradients, proofs) is that of an ordinary product. Where 8 bits matter, `fp8_pack` makes them of the
values again: for messages (half the bytes of bfloat16), and for kernels (products.py). Rounding twice changes neither
numbers nor scales.

A granule is written as a block size for each dim: 0 is the whole dim. [rows, features] in (1, 0) has a scale for each
row; (0, 0) one scale; (1, 32) one for each 32 features of a row.

Scales are those of torchao's float8 (`round_scales_to_power_of_2`) and of the OCP's MX formats, except at the very top:
a scale is the largest with which the largest element still rounds to a number. Then it is also the scale of the rounded
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.features.fp8.casts import blocks, cast, of_columns, scaled, wide
from shardc.runtime.ops.with_backward import with_backward

Granule = Sequence[int]


def fp8_amax(x: Tensor, granule: Granule) -> Tensor:
    """Return the largest absolute value of each granule, in float32 or wider; detached.

    A dim in blocks of 1 keeps its size, a whole one has size 1.
    """
    x = x.detach()
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.dim():
        return x.abs().to(wide)
    inside = list(range(1, 2 * x.dim(), 2))
    largest: Tensor = torch.linalg.vector_norm(blocks(x, granule), math.inf, inside)  # it reads x once
    return largest.to(wide)


def fp8_round(x: Tensor, amax: Tensor, format: str, granule: Granule) -> Tensor:
    """Round x to float8, in the dtype of x; the gradient passes unchanged. amax: of each granule.

    format: "e4m3" or "e5m2". A granule in which something is not finite becomes nan.
    """
    result: Tensor = with_backward(
        lambda x, amax: (cast(x, amax, format, granule, "values"), ()), lambda needs, g: (g,), x, amax
    )
    return result


def fp8_grad(
    y: Tensor,
    weights: Tensor | None,
    format: str,
    granule: Granule,
    mesh: Any = None,
    axes: tuple[str, ...] = (),
    tag: str = "",
) -> Tensor:
    """Return y, but round its gradient to float8 before it goes on to the product that y is the result of.

    weights: of a weight [out, in] with a scale for each of its rows, their largest values [out, 1]. The product of the
    gradient with the weight sums over these rows, so their scales are multiplied into the gradient before it is
    rounded. None: rows that are summed together have one scale. axes: of the mesh, over which granules are split.
    """
    if not (torch.is_grad_enabled() and y.requires_grad):
        return y

    def backward(needs: Any, g: Tensor, weights: Tensor | None) -> tuple[Tensor]:
        return (fp8_round_grad(g, weights, format, granule, mesh, axes, tag),)

    result: Tensor = with_backward(lambda y, weights: (y.view_as(y), (weights,)), backward, y, weights)
    return result


def fp8_round_grad(
    g: Tensor,
    weights: Tensor | None,
    format: str,
    granule: Granule,
    mesh: Any = None,
    axes: tuple[str, ...] = (),
    tag: str = "",
) -> Tensor:
    """Round a gradient as `fp8_grad` does."""
    if weights is None:
        amax = fp8_amax(g, granule)
    elif granule[-1] == 0 and set(granule[:-1]) == {1}:
        amax = torch.ops.shardc.fp8_row_amax(g.reshape(-1, g.shape[-1]), weights).view(*g.shape[:-1], 1)
    else:
        amax = fp8_amax(scaled(g, -of_columns(weights, g.dim()), [*[0] * (g.dim() - 1), 1]), granule)
    if axes:
        amax = mesh.all_reduce(amax, axes, op="max", direction="backward", tag=tag)
    return cast(g, amax, format, granule, "values", weights)


# --- messages


def fp8_pack(x: Tensor, format: str, granule: Granule, amax: Tensor | None = None) -> Tensor:
    """Return values that `fp8_round` returned, or a part of them, as bytes u8[..]; no gradient.

    There is one byte for each element, and one for each granule of the part: its scale's exponent. A part of a granule
    has its own scale, which holds its values as well. amax: x is not rounded yet; round by these largest values.
    """
    return cast(x.detach(), fp8_amax(x, granule) if amax is None else amax, format, granule, "packed")


def unpacked(message: Tensor, like: Tensor, format: str, granule: Granule) -> Tensor:
    """Return the values of `fp8_pack`. like: of their shape and dtype."""
    n = like.numel()
    shape = granules(like.shape, granule)
    exponent = message[n:].view(torch.int8).to(torch.int32).view(shape)
    return wide(message[:n].view(like.shape), exponent, like.dtype, format, granule)


def granules(shape: Sequence[int], granule: Granule) -> tuple[int, ...]:
    """Return the shape of a tensor with one number a granule."""
    return tuple(1 if g == 0 else n // g for n, g in zip(shape, granule, strict=True))


def message_bytes(shape: Sequence[int], granule: Granule) -> int:
    """Return the number of bytes of `fp8_pack`."""
    return math.prod(shape) + math.prod(granules(shape, granule))
