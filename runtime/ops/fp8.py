"""Numbers of 8 bits: rounding to float8 with one scale for each *granule*, as ops on tensors of any floating dtype.

    x        0.11  3.0  -7.0     a row, which is a granule
    amax     7.0                 the largest of it
    scale    2**6                the largest power of two that float8 e4m3 can take: 7.0 * 64 = 448
    float8   7     192  -448     what a product of 8 bits multiplies: 0.11 * 64 = 7.04 is rounded
    result   0.109375  3.0  -7.0

The result of `fp8_round` has the dtype of x. Scales are powers of two, so a number of 4 significant bits is the same in
bfloat16, float32 and float64: a product of such tensors is the product of float8 tensors, exactly, and everything that
follows (splits, gradients, proofs) is that of an ordinary product. Where it counts, the 8 bits are made of the values
again, by `packed`: for messages (half the bytes of bfloat16), and for kernels (fp8_products.py). Rounding twice changes
nothing, and no scale.

A granule is written as a block size for each dim: 0 is the whole dim. [rows, features] in (1, 0) has a scale for each
row; (0, 0) one scale; (1, 32) one for each 32 features of a row.

Scales as in torchao's float8 (`round_scales_to_power_of_2`) and in the OCP's MX formats, but for the very top: a scale
is the largest with which the largest element still rounds to a number. Then it is the scale of the rounded values,
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Granule = Sequence[int]


class Format(NamedTuple):
    """top: what is this large, or larger, does not round to a number (`even`: larger alone)."""

    dtype: torch.dtype
    top: float
    even: bool


#: e4m3 has numbers to 448, the next would be 480: what is above 464 is none, and the tie goes to the even one. e5m2 has
#: numbers to 57344, the next would be 65536, which is the even one.
FORMATS = {"e4m3": Format(torch.float8_e4m3fn, 464.0, True), "e5m2": Format(torch.float8_e5m2, 61440.0, False)}
#: Of scales: with these, the least number of float8 times its scale is one of bfloat16 and float32.
_EXPONENTS = 110
#: What e8m0 holds as nan; its negative too.
_NAN = 128


def blocks(x: Tensor, granule: Granule) -> Tensor:
    """x with each dim as [granules, size of one]."""
    sizes = [(1, n) if g == 0 else (n // g, g) for n, g in zip(x.shape, granule, strict=True)]
    return x.reshape([n for pair in sizes for n in pair])


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


def exponents(amax: Tensor, format: str) -> Tensor:
    """int32: the binary logarithm of each granule's scale. 0 for a granule of zeros, `_NAN` for one in which something
    is not finite: all of it becomes nan.
    """
    _, top, even = FORMATS[format]
    whole, bits = (torch.int64, 52) if amax.dtype == torch.float64 else (torch.int32, 23)
    most, power = math.frexp(top)
    # above that, the largest would round to no number, and its scale is one power of two less: as if it were twice it
    step = int((2 * most - 1) * (1 << bits)) + int(even)
    own = (amax.view(whole) + ((1 << bits) - step)) >> bits  # of float: its exponent, with the bias
    found = (power - 1 + (127 if bits == 23 else 1023)) - own.to(torch.int32)
    found = found.clamp(-_EXPONENTS, _EXPONENTS).masked_fill(amax == 0, 0)
    return found.masked_fill(~(amax < math.inf), _NAN)


def powers(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2 ** exponent, exactly: as e8m0 holds it, which is an exponent and nothing else. nan for `_NAN`."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).to(dtype)


def scaled(x: Tensor, exponent: Tensor, granule: Granule, dtype: torch.dtype | None = None) -> Tensor:
    """Each granule times a power of two. dtype: of the result, which has all numbers of x; x's own."""
    dtype = x.dtype if dtype is None else dtype
    each = blocks(powers(exponent, dtype), [1] * exponent.dim())
    return (blocks(x.to(dtype), granule) * each).view(x.shape)


def _rounded(x: Tensor, exponent: Tensor, format: str, granule: Granule) -> Tensor:
    return wide(narrow(x, exponent, format, granule), exponent, x.dtype, format, granule)


class _Round(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, format: str, granule: Granule) -> Tensor:
        return _rounded(x, exponents(amax, format), format, granule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None, None, None


def fp8_round(x: Tensor, amax: Tensor, format: str, granule: Granule) -> Tensor:
    """x as float8 holds it, in the dtype of x. amax: of each granule; its gradient is that of x.

    format: "e4m3" or "e5m2". A granule in which something is not finite becomes nan.
    """
    result: Tensor = _Round.apply(x, amax, format, granule)  # type: ignore[no-untyped-call]
    return result


#: How a gradient is rounded: format, granule, mesh, axes over which granules are split, tag.
_How = tuple[str, Granule, Any, tuple[str, ...], str]


class _RoundGrad(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, how: _How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(weights)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return fp8_round_grad(g, weights, *ctx.how), None, None


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
    result: Tensor = _RoundGrad.apply(y, weights, (format, granule, mesh, axes, tag))  # type: ignore[no-untyped-call]
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
    rows, columns = None, [*[0] * (g.dim() - 1), 1]
    if weights is not None:
        rows = exponents(weights.reshape(-1), "e4m3").view(*[1] * (g.dim() - 1), -1)
        g = scaled(g, -rows, columns)
    amax = fp8_amax(g, granule)
    if axes:
        amax = mesh.all_reduce(amax, axes, op="max", direction="backward", tag=tag)
    g = _rounded(g, exponents(amax, format), format, granule)
    return g if rows is None else scaled(g, rows, columns)


# --- messages


def packed(x: Tensor, format: str, granule: Granule, amax: Tensor | None = None) -> Tensor:
    """Values that `fp8_round` gave, or a part of them, as bytes: one for each element, and one for each granule of the
    part, which is its scale's exponent. A part of a granule has a scale of its own, which holds its values as well.
    amax: x is not rounded yet, and is by these largest values.
    """
    exponent = exponents(fp8_amax(x, granule) if amax is None else amax, format)
    scales = exponent.to(torch.int8).view(torch.uint8)
    return torch.cat((narrow(x, exponent, format, granule).reshape(-1), scales.reshape(-1)))


def unpacked(message: Tensor, like: Tensor, format: str, granule: Granule) -> Tensor:
    """The values of `packed`. like: of their shape and dtype."""
    n = like.numel()
    shape = granules(like.shape, granule)
    exponent = message[n:].view(torch.int8).to(torch.int32).view(shape)
    return wide(message[:n].view(like.shape), exponent, like.dtype, format, granule)


def narrow(x: Tensor, exponent: Tensor, format: str, granule: Granule) -> Tensor:
    """x times its scales, rounded, as bytes."""
    return scaled(x, exponent, granule).to(FORMATS[format].dtype).view(torch.uint8)


def wide(message: Tensor, exponent: Tensor, dtype: torch.dtype, format: str, granule: Granule) -> Tensor:
    """What `narrow` made bytes of."""
    return scaled(message.view(FORMATS[format].dtype), -exponent, granule, dtype)


def granules(shape: Sequence[int], granule: Granule) -> tuple[int, ...]:
    """The shape of one number a granule."""
    return tuple(1 if g == 0 else n // g for n, g in zip(shape, granule, strict=True))


def message_bytes(shape: Sequence[int], granule: Granule) -> int:
    """Of `packed`."""
    return math.prod(shape) + math.prod(granules(shape, granule))
