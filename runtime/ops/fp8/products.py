"""A linear layer of 8 bits: the product of an input that is rounded with a weight, which is rounded here.

    y = fp8_linear(x_fp8, w, w_amax, 'fp8-rowwise')     x_fp8: what `fp8_round` gave; w_amax: `fp8_amax` of w

Where torch has a kernel for it (fp8_kernel.py), the numbers are multiplied as 8 bits; else as what they are, in the
dtype of x. It is one function: a number of float8 times a power of two is one of bfloat16.

    y  = x_8 @ w_8.T            8 bits
    dx = g_8 @ w_8              8 bits. g is rounded already (`fp8_grad`). Row-wise, the scales of the weight's rows are
                                in g's numbers: here they are taken out again
    dw = g_8.T @ x_8            8 bits where a tensor has one scale. Else the sum runs over tokens, each with scales of
                                its own, which no kernel takes: in the dtype of x, of the same numbers

Backward needs x as 8 bits at most: `kept`, which is `fp8_pack` of it, once for all products that take x. Of the weight
it keeps nothing: w is a parameter, a copy that other microbatches share, or what ZeRO 3 gathers again, and is rounded a
second time, as backward's kernel wants the other order of its memory anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.runtime.ops import fp8
from shardc.runtime.ops.fp8.casts import cast
from shardc.runtime.ops.fp8.format import FORMATS
from shardc.runtime.ops.fp8.kernel import Narrow, has_kernel, multiplied
from shardc.runtime.ops.fp8.recipe import BLOCK, RECIPES, Recipe, along
from shardc.runtime.ops.with_backward import with_backward


def fp8_pack(x: Tensor, format: str, granule: fp8.Granule, amax: Tensor | None = None) -> Tensor:
    """u8[..]: x, which `fp8_round` gave, as bytes: one for each number and one for each granule. It has no gradient.
    amax: those of what `fp8_round` makes of x by these largest values.
    """
    return fp8.packed(x.detach(), format, granule, amax)


def fp8_linear(
    x: Tensor, weight: Tensor, amax: Tensor, recipe: str, transposed: bool = False, kept: Tensor | None = None
) -> Tensor:
    """f[.., out]: x @ weight.T of rounded numbers; x f[.., in] is what `fp8_round` gave.

    weight: f[out, in]; transposed: f[in, out]. amax: its `fp8_amax`. kept: what `fp8_pack` made of x, which counts in
    the place of x: x itself is then what gradients flow through.
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
    """One layer's products. shape: of its input."""

    name: str
    transposed: bool
    shape: torch.Size

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.name]

    @property
    def _granule(self) -> tuple[int, ...]:
        """Of the input."""
        return along(self.recipe.x, len(self.shape))

    def product(self, x: Tensor, weight: Tensor, amax: Tensor, kept: Tensor | None) -> Tensor:
        """f[.., out]. kept: x as bytes, if there are any."""
        if not has_kernel(x, self.recipe, *weight.shape):
            w = fp8.fp8_round(weight, amax, "e4m3", self.recipe.of_weight(self.transposed))
            x = x if kept is None else self._wide(kept, x.dtype)
            return x @ (w if self.transposed else w.t())
        bytes_ = fp8_pack(x, "e4m3", self._granule) if kept is None else kept
        made = multiplied(self._read(bytes_), self._weight(weight, amax, across=False), blocks=self.recipe.blocks)
        return made.view(*self.shape[:-1], made.shape[-1])

    def of_data(self, g: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
        """The gradient of x. g: that of the product, rounded."""
        rows = g.reshape(-1, g.shape[-1])
        if has_kernel(g, self.recipe, *weight.shape):
            weights = amax.reshape(-1) if self.recipe.rows else None
            factors = self._gradient(rows, weights), self._weight(weight, amax, across=True)
            made = multiplied(*factors, blocks=self.recipe.blocks)
        else:
            w = fp8.fp8_round(weight, amax, "e4m3", self.recipe.of_weight(self.transposed))
            made = rows @ (w.t() if self.transposed else w)
        return made.view(self.shape)

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight. x: the input, or its bytes."""
        rows, packed = g.reshape(-1, g.shape[-1]), x.dtype is torch.uint8
        one_scale = self.recipe.x == (0, 0)
        if one_scale and has_kernel(g, self.recipe, self.shape[-1], *rows.shape):
            x8 = self._read(x if packed else fp8_pack(x, "e4m3", self._granule))
            g8 = self._gradient(rows)
            one, other = Narrow(g8.data.t(), g8.exponent), Narrow(x8.data.t(), x8.exponent)
            return multiplied(*((other, one) if self.transposed else (one, other)))
        if packed:
            x = self._wide(x, g.dtype)
        x = x.reshape(-1, self.shape[-1])
        return x.t() @ rows if self.transposed else rows.t() @ x

    # --- factors

    def _read(self, message: Tensor) -> Narrow:
        """The input's rows."""
        k = self.shape[-1]
        return _of_bytes(message, "e4m3", (self.shape.numel() // k, k), k // BLOCK if self.recipe.blocks else 1)

    def _wide(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The input's values."""
        return fp8.unpacked(message, message.new_empty((), dtype=dtype).expand(self.shape), "e4m3", self._granule)

    def _weight(self, weight: Tensor, amax: Tensor, *, across: bool) -> Narrow:
        """As [out, in], for products that sum over `in`; across: as [in, out], over `out`, where the scales of rows are
        the gradient's.
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
        """Of the result, which is rounded: the scales of what is here are found again. weights: largest values of the
        weight's rows, whose scales `fp8_grad` put into it: they are taken out.
        """
        format, granule = self.recipe.gradient, self.recipe.grad
        amax = fp8.fp8_amax(rows, granule) if weights is None else torch.ops.shardc.fp8_row_amax(rows, weights)
        message = cast(rows, amax, format, granule, "packed", weights)
        return _of_bytes(message, format, rows.shape, amax.shape[-1])


def _of_bytes(message: Tensor, format: str, shape: tuple[int, int] | torch.Size, scales: int) -> Narrow:
    """What a message holds. scales: of a row, or of all."""
    n = math.prod(shape)
    data = message[:n].view(FORMATS[format].dtype).view(shape)
    return Narrow(data, message[n:].view(torch.int8).to(torch.int32).view(-1, scales))


def fp8_grad_of_data(
    g: Tensor, weight: Tensor, amax: Tensor, recipe: str, transposed: bool, shape: tuple[int, ...]
) -> Tensor:
    """The gradient of `fp8_linear`'s x, of that shape, in a graph of a step."""
    return Fp8(recipe, transposed, torch.Size(shape)).of_data(g, weight, amax)


def fp8_grad_of_weight(g: Tensor, x: Tensor, recipe: str, transposed: bool, shape: tuple[int, ...]) -> Tensor:
    """The gradient of `fp8_linear`'s weight. x: the input, or its bytes; shape: the input's."""
    return Fp8(recipe, transposed, torch.Size(shape)).of_weight(g, x)
