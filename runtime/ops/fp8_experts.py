"""Experts whose products are of numbers rounded to float8, row by row (`precision: {products: fp8-rowwise}`).

    y    = fp8_experts(x_fp8, index, weights, up, down, ...)     as `experts`, of rounded rows
    made = fp8_experts_apply(rows, counts, up, down, ...)        as `experts_apply`

Experts have no biases here. Each computes what `fp8_linear` would, twice: a row of the input, of the activation's
result and of either gradient has a scale, and so has each row of a weight. These numbers are multiplied in the dtype of
x: torch has a grouped product of 8 bits for some GPUs, which is not called here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.runtime.ops import expert_activation, fp8
from shardc.runtime.ops.expert_parallel import experts_combine, experts_route, experts_send, rows_by_expert
from shardc.runtime.ops.fp8_cast import exponents, scaled
from shardc.runtime.ops.grouped_mm import Groups, grad_of_rows, grad_of_weight, product


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
    """f[t, h] like x: `experts` of what `fp8_round` gave, x. up_amax, down_amax: the largest of each row of the
    weights. axes: of the mesh, over which the activation's columns are split.
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
    """f[rows, h]: what the experts here make of their rows, which are sorted by expert."""
    groups = Groups(tuple(rows_by_expert(rows, counts)), rows.device)

    def layer(x: Tensor, weight: Tensor, amax: Tensor, over: tuple[str, ...]) -> Tensor:
        granule = (1, 0, 1) if transposed else (1, 1, 0)
        rounded = fp8.fp8_round(weight, amax, "e4m3", granule)
        y: Tensor = _Grouped.apply(x, rounded, groups, transposed)  # type: ignore[no-untyped-call]
        if y.requires_grad:
            scales = groups.rows_of(exponents(amax.reshape(amax.shape[0], -1), "e4m3"))
            y = _RoundGrad.apply(y, scales, mesh, over, tag)  # type: ignore[no-untyped-call]
        return y

    first = layer(rows, up, up_amax, axes)
    between = expert_activation.read(activation)(first)
    amax = fp8.fp8_amax(between, (1, 0))
    if axes:
        amax = mesh.all_reduce(amax, axes, op="max", direction="forward", tag=tag)
    return layer(fp8.fp8_round(between, amax, "e4m3", (1, 0)), down, down_amax, ())


class _Grouped(Function):
    """rows f[n, a] of sorted experts times their weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: Groups, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.how = groups, transposed
        return product(rows, weight, None, groups, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows = grad_of_rows(g, weight, *ctx.how) if ctx.needs_input_grad[0] else None
        of_weight = grad_of_weight(g, rows, weight, *ctx.how) if ctx.needs_input_grad[1] else None
        return of_rows, of_weight, None, None


class _RoundGrad(Function):
    """y itself. Its gradient is rounded by rows, with the scales of its expert's weight in it (see `fp8_grad`)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scales: Tensor, mesh: Any, axes: tuple[str, ...], tag: str) -> Tensor:
        ctx.save_for_backward(scales)
        ctx.how = mesh, axes, tag
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (scales,), (mesh, axes, tag) = ctx.saved_tensors, ctx.how
        g = scaled(g, -scales, (1, 1))
        amax = fp8.fp8_amax(g, (1, 0))
        if axes:
            amax = mesh.all_reduce(amax, axes, op="max", direction="backward", tag=tag)
        return scaled(fp8.fp8_round(g, amax, "e4m3", (1, 0)), scales, (1, 1)), None, None, None, None
