"""Compute experts of numbers rounded to float8, row by row (`precision: {products: fp8-rowwise}`).

    y    = fp8_experts(x_fp8, index, weights, up, down, ...)     as `experts`, of rounded rows
    made = fp8_experts_apply(rows, counts, up, down, ...)        as `experts_apply`

Experts have no biases here. Each computes what `fp8_linear` would, twice: a row of the input, of the activation's
result and of either gradient has a scale, and so has each row of a weight. These numbers are multiplied in the dtype of
x: torch has a grouped product of 8 bits for some GPUs, which is not used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardc.features.fp8 import rounding
from shardc.features.fp8.casts import exponents, scaled
from shardc.runtime.ops.experts import activation as expert_activation
from shardc.runtime.ops.experts.grouped_mm import Groups, grad_of_rows, grad_of_weight, product
from shardc.runtime.ops.experts.parallel import experts_combine, experts_route, experts_send, rows_by_expert
from shardc.runtime.ops.with_backward import with_backward


def fp8_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: None,
    down_bias: None,
    activation: str,
    transposed: bool,
    up_amax: Tensor,
    down_amax: Tensor,
    mesh: Any = None,
    axes: tuple[str, ...] = (),
    tag: str = "",
) -> Tensor:
    """Compute `experts` of x, a result of `fp8_round`: f[t, h] like x.

    up_amax, down_amax: the largest of each row of the weights. axes: over which the activation's columns are split.
    """
    order, counts = experts_route(index, None, (), up.shape[0], ())
    rows = experts_send(x, order, counts, None, (), index.shape[1])
    how = (activation, transposed, up_amax, down_amax, mesh, axes, tag)
    return experts_combine(fp8_experts_apply(rows, counts, up, down, up_bias, down_bias, *how), order, weights)


def fp8_experts_apply(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: None,
    down_bias: None,
    activation: str,
    transposed: bool,
    up_amax: Tensor,
    down_amax: Tensor,
    mesh: Any = None,
    axes: tuple[str, ...] = (),
    tag: str = "",
) -> Tensor:
    """Apply the experts here to their rows, which are sorted by expert: f[rows, h]."""
    groups = Groups(tuple(rows_by_expert(rows, counts)), rows.device)

    def layer(x: Tensor, weight: Tensor, amax: Tensor, over: tuple[str, ...]) -> Tensor:
        granule = (1, 0, 1) if transposed else (1, 1, 0)
        rounded = rounding.fp8_round(weight, amax, "e4m3", granule)
        y: Tensor = with_backward(_grouped, _grouped_backward, x, rounded, groups, transposed)
        if y.requires_grad:
            scales = groups.rows_of(exponents(amax.reshape(amax.shape[0], -1), "e4m3"))
            y = with_backward(lambda y, scales: (y.view_as(y), (scales, mesh, over, tag)), _round_grad, y, scales)
        return y

    first = layer(rows, up, up_amax, axes)
    between = expert_activation.read(activation)(first)
    amax = rounding.fp8_amax(between, (1, 0))
    if axes:
        amax = mesh.all_reduce(amax, axes, op="max", direction="forward", tag=tag)
    return layer(rounding.fp8_round(between, amax, "e4m3", (1, 0)), down, down_amax, ())


def _grouped(rows: Tensor, weight: Tensor, groups: Groups, transposed: bool) -> tuple[Tensor, tuple[Any, ...]]:
    """Multiply rows f[n, a], sorted by expert, by their weights."""
    return product(rows, weight, None, groups, transposed), (rows, weight, groups, transposed)


def _grouped_backward(
    needs: Sequence[bool], g: Tensor, rows: Tensor, weight: Tensor, groups: Groups, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    of_rows = grad_of_rows(g, weight, groups, transposed) if needs[0] else None
    return of_rows, grad_of_weight(g, rows, weight, groups, transposed) if needs[1] else None


def _round_grad(needs: Any, g: Tensor, scales: Tensor, mesh: Any, axes: tuple[str, ...], tag: str) -> tuple[Tensor]:
    """Round a gradient by rows, with the scales of its expert's weight in it (see `fp8_grad`)."""
    g = scaled(g, -scales, (1, 1))
    amax = rounding.fp8_amax(g, (1, 0))
    if axes:
        amax = mesh.all_reduce(amax, axes, op="max", direction="backward", tag=tag)
    return (scaled(rounding.fp8_round(g, amax, "e4m3", (1, 0)), scales, (1, 1)),)
