"""Multiply a rounded input with a weight, which is rounded here: a linear layer of 8 bits.

    y = fp8_linear(x_fp8, w, w_amax, 'fp8-rowwise')     x_fp8: a result of `fp8_round`; w_amax: `fp8_amax` of w

Where torch has a kernel (kernel.py), 8 bits are multiplied; else the same numbers in the dtype of x. The function is
the same: a float8 number times a power of two is a bfloat16 number.

    y  = x_8 @ w_8.T            8 bits
    dx = g_8 @ w_8              8 bits. g is rounded already (`fp8_grad`). Row-wise, the scales of the weight's rows are
                                in g's numbers: here they are taken out again
    dw = g_8.T @ x_8            8 bits where a tensor has one scale. Else the sum runs over tokens with different
                                scales, which no kernel supports: in the dtype of x, of the same numbers

Backward needs x as 8 bits at most: `kept`, which is `fp8_pack` of it, once for all products of x. It saves nothing of
the weight: w is a parameter, a copy that other microbatches share, or what ZeRO 3 gathers again. It is rounded a second
time, as backward's kernel needs another memory order anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.features.fp8 import rounding
from shardc.features.fp8.casts import cast
from shardc.features.fp8.kernel import Narrow, has_kernel, multiplied
from shardc.features.fp8.recipe import BLOCK, FORMATS, RECIPES, Recipe, along
from shardc.runtime.ops.with_backward import with_backward


def fp8_linear(
    x: Tensor, weight: Tensor, amax: Tensor, recipe: str, transposed: bool = False, kept: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T of rounded numbers: f[.., out]. x f[.., in] is a result of `fp8_round`.

    weight: f[out, in]; transposed: f[in, out]. amax: its `fp8_amax`. kept: `fp8_pack` of x, whose values replace those
    of x; gradients still flow through x.
    """
    by = Fp8(recipe, transposed, x.shape)

    def forward(x: Tensor, weight: Tensor, amax: Tensor, kept: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return by.product(x, weight, amax, kept), (x if kept is None else kept, weight, amax)

    def backward(
        needs: Sequence[bool], g: Tensor, x: Tensor, weight: Tensor, amax: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return by.of_data(g, weight, amax) if needs[0] else None, by.of_weight(g, x) if needs[1] else None

    result: Tensor = with_backward(forward, backward, x, weight, amax, kept)
    return result


@dataclass(frozen=True)
class Fp8:
    """The products of one layer. shape: of its input."""

    name: str
    transposed: bool
    shape: torch.Size

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    @property
    def _granule(self) -> tuple[int, ...]:
        """The granule of the input."""
        return along(self.recipe.x, len(self.shape))

    def product(self, x: Tensor, weight: Tensor, amax: Tensor, kept: Tensor | None) -> Tensor:
        """Compute the result f[.., out]. kept: x as bytes, if there are any."""
        if not has_kernel(x, self.recipe, *weight.shape):
            w = rounding.fp8_round(weight, amax, "e4m3", self.recipe.of_weight(self.transposed))
            x = x if kept is None else self._wide(kept, x.dtype)
            return x @ (w if self.transposed else w.t())
        bytes_ = rounding.fp8_pack(x, "e4m3", self._granule) if kept is None else kept
        result = multiplied(self._read(bytes_), self._weight(weight, amax, across=False), blocks=self.recipe.blocks)
        return result.view(*self.shape[:-1], result.shape[-1])

    def of_data(self, g: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
        """Return the gradient of x. g: that of the product, rounded."""
        rows = g.reshape(-1, g.shape[-1])
        if has_kernel(g, self.recipe, *weight.shape):
            weights = amax.reshape(-1) if self.recipe.rows else None
            factors = self._gradient(rows, weights), self._weight(weight, amax, across=True)
            grad = multiplied(*factors, blocks=self.recipe.blocks)
        else:
            w = rounding.fp8_round(weight, amax, "e4m3", self.recipe.of_weight(self.transposed))
            grad = rows @ (w.t() if self.transposed else w)
        return grad.view(self.shape)

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight. x: the input, or its bytes."""
        rows, packed = g.reshape(-1, g.shape[-1]), x.dtype is torch.uint8
        one_scale = self.recipe.x == (0, 0)
        if one_scale and has_kernel(g, self.recipe, self.shape[-1], *rows.shape):
            x8 = self._read(x if packed else rounding.fp8_pack(x, "e4m3", self._granule))
            g8 = self._gradient(rows)
            one, other = Narrow(g8.data.t(), g8.exponent), Narrow(x8.data.t(), x8.exponent)
            return multiplied(*((other, one) if self.transposed else (one, other)))
        if packed:
            x = self._wide(x, g.dtype)
        x = x.reshape(-1, self.shape[-1])
        return x.t() @ rows if self.transposed else rows.t() @ x

    # --- factors

    def _read(self, message: Tensor) -> Narrow:
        """Read the input's rows from its bytes."""
        k = self.shape[-1]
        return _of_bytes(message, "e4m3", (self.shape.numel() // k, k), k // BLOCK if self.recipe.blocks else 1)

    def _wide(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Read the input's values from its bytes."""
        return rounding.unpacked(message, message.new_empty((), dtype=dtype).expand(self.shape), "e4m3", self._granule)

    def _weight(self, weight: Tensor, amax: Tensor, *, across: bool) -> Narrow:
        """Pack the weight as [out, in], for products that sum over `in`; across: as [in, out], over `out`.

        Across, the scales of rows are in the gradient.
        """
        granule = self.recipe.of_weight(self.transposed)
        message = cast(weight, amax, "e4m3", granule, "packed")
        data, exponent = _of_bytes(message, "e4m3", weight.shape, amax.shape[-1])
        if across != self.transposed:
            data, exponent = data.t(), exponent.t()
        if self.recipe.blocks:
            exponent = exponent.repeat_interleave(BLOCK, 0)
        elif self.recipe.rows and across:
            exponent = torch.zeros(data.shape[0], 1, dtype=exponent.dtype, device=exponent.device)
        return Narrow(data, exponent)

    def _gradient(self, rows: Tensor, weights: Tensor | None = None) -> Narrow:
        """Pack the gradient of the result, which is rounded, by finding the scales of its local part again.

        weights: largest values of the weight's rows, whose scales `fp8_grad` put into it: they are taken out.
        """
        format, granule = self.recipe.gradient, self.recipe.grad
        amax = rounding.fp8_amax(rows, granule) if weights is None else torch.ops.shardc.fp8_row_amax(rows, weights)
        message = cast(rows, amax, format, granule, "packed", weights)
        return _of_bytes(message, format, rows.shape, amax.shape[-1])


def _of_bytes(message: Tensor, format: str, shape: tuple[int, int] | torch.Size, scales: int) -> Narrow:
    """Read the numbers and scales of a message. scales: of a row, or of all."""
    n = math.prod(shape)
    data = message[:n].view(FORMATS[format].dtype).view(shape)
    return Narrow(data, message[n:].view(torch.int8).to(torch.int32).view(-1, scales))


def fp8_grad_of_data(
    g: Tensor, weight: Tensor, amax: Tensor, recipe: str, transposed: bool, shape: tuple[int, ...]
) -> Tensor:
    """Compute the gradient of `fp8_linear`'s x, of that shape, in a step graph."""
    return Fp8(recipe, transposed, torch.Size(shape)).of_data(g, weight, amax)


def fp8_grad_of_weight(g: Tensor, x: Tensor, recipe: str, transposed: bool, shape: tuple[int, ...]) -> Tensor:
    """Compute the gradient of `fp8_linear`'s weight. x: the input, or its bytes; shape: the input's."""
    return Fp8(recipe, transposed, torch.Size(shape)).of_weight(g, x)
