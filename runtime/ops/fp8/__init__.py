"""Numbers of 8 bits: rounding to float8 with one scale for each *granule*, as ops on tensors of any floating dtype.

    x        0.11  3.0  -7.0     a row, which is a granule
    amax     7.0                 the largest of it
    scale    2**6                the largest power of two that float8 e4m3 can take: 7.0 * 64 = 448
    float8   7     192  -448     what a product of 8 bits multiplies: 0.11 * 64 = 7.04 is rounded
    result   0.109375  3.0  -7.0

The result of `fp8_round` has the dtype of x. Scales are powers of two, so a number of 4 significant bits is the same in
bfloat16, float32 and float64: a product of such tensors is the product of float8 tensors, exactly, and everything that
follows (splits, gradients, proofs) is that of an ordinary product. Where it counts, the 8 bits are made of the values
again, by `packed`: for messages (half the bytes of bfloat16), and for kernels (products.py). Rounding twice changes
nothing, and no scale.

A granule is written as a block size for each dim: 0 is the whole dim. [rows, features] in (1, 0) has a scale for each
row; (0, 0) one scale; (1, 32) one for each 32 features of a row.

Scales as in torchao's float8 (`round_scales_to_power_of_2`) and in the OCP's MX formats, but for the very top: a scale
is the largest with which the largest element still rounds to a number. Then it is the scale of the rounded values,
too.

format, recipe      the two formats, and how products take them
casts, cast_kernel  rounding, on the CPU and as a Triton kernel
products, kernel    products of rounded factors, and torch's kernels for them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.ops.fp8.casts import blocks, cast, of_columns, scaled, wide
from shardc.runtime.ops.with_backward import with_backward

Granule = Sequence[int]


def fp8_amax(x: Tensor, granule: Granule) -> Tensor:
    """The largest absolute value of each granule, in float32 or wider; detached. One number a granule: a dim in blocks
    of 1 keeps its size, a whole one has size 1.
    """
    x = x.detach()
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.dim():
        return x.abs().to(wide)
    inside = list(range(1, 2 * x.dim(), 2))
    largest: Tensor = torch.linalg.vector_norm(blocks(x, granule), math.inf, inside)  # it reads x once
    return largest.to(wide)


def fp8_round(x: Tensor, amax: Tensor, format: str, granule: Granule) -> Tensor:
    """x as float8 holds it, in the dtype of x. amax: of each granule; its gradient is that of x.

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
    """y itself, whose gradient is rounded to float8 before it goes on to the product that y is the result of.

    weights: of a weight [out, in] with a scale for each of its rows, their largest values [out, 1]. The product of the
    gradient with the weight sums over these rows, so their scales are multiplied into the gradient before it is
    rounded. None: one scale does for all rows that are summed together. axes: of the mesh, over which granules are
    split.
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
    """What `fp8_grad` does with a gradient."""
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


def packed(x: Tensor, format: str, granule: Granule, amax: Tensor | None = None) -> Tensor:
    """Values that `fp8_round` gave, or a part of them, as bytes: one for each element, and one for each granule of the
    part, which is its scale's exponent. A part of a granule has a scale of its own, which holds its values as well.
    amax: x is not rounded yet, and is by these largest values.
    """
    return cast(x, fp8_amax(x, granule) if amax is None else amax, format, granule, "packed")


def unpacked(message: Tensor, like: Tensor, format: str, granule: Granule) -> Tensor:
    """The values of `packed`. like: of their shape and dtype."""
    n = like.numel()
    shape = granules(like.shape, granule)
    exponent = message[n:].view(torch.int8).to(torch.int32).view(shape)
    return wide(message[:n].view(like.shape), exponent, like.dtype, format, granule)


def granules(shape: Sequence[int], granule: Granule) -> tuple[int, ...]:
    """The shape of one number a granule."""
    return tuple(1 if g == 0 else n // g for n, g in zip(shape, granule, strict=True))


def message_bytes(shape: Sequence[int], granule: Granule) -> int:
    """Of `packed`."""
    return math.prod(shape) + math.prod(granules(shape, granule))
