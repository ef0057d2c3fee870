"""Compute the two products of each expert on its rows, with the activation between them.

    made = experts_apply(rows, counts, up, ...)     of the experts that are here, whoever has sent the rows
    y    = experts(x, index, weights, up, ...)      routing, products and the weighted sum, where nothing is sent

Arguments are those of parallel.py, which sends the rows. Both save the first product's result for backward, and compute
the activation again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.ops.experts import activation as expert_activation
from shardc.runtime.ops.experts.grouped_mm import Groups, grad_of_bias, grad_of_rows, grad_of_weight, product
from shardc.runtime.ops.experts.parallel import by_pair, experts_route, rows_by_expert, weighted_sum
from shardc.runtime.ops.with_backward import with_backward

Between = Callable[[Tensor], Tensor]


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str | Between,
    transposed: bool = False,
) -> Tensor:
    """Return f[t, h]: sum over k of weights[t, k] * expert e = index[t, k] of x[t].

    Expert e is down[e] @ activation(up[e] @ x + up_bias[e]) + down_bias[e]. activation: text
    (shardc.runtime.ops.experts.activation), or a function.
    """
    order, counts = experts_route(index, None, (), up.shape[0], ())
    groups = Groups(tuple(rows_by_expert(order, counts)), x.device)
    between = expert_activation.read(activation) if isinstance(activation, str) else activation
    tensors, how = (x, order, weights, up, down, up_bias, down_bias), (groups, between, transposed)
    result: Tensor = with_backward(_local, _local_backward, *tensors, *how)
    return result


def experts_apply(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str | Between,
    transposed: bool = False,
) -> Tensor:
    """Apply the experts here to their rows, which are sorted by expert: f[rows, h]."""
    groups = Groups(tuple(rows_by_expert(rows, counts)), rows.device)
    between = expert_activation.read(activation) if isinstance(activation, str) else activation
    how = (groups, between, transposed)
    result: Tensor = with_backward(_apply, _apply_backward, rows, up, down, up_bias, down_bias, *how)
    return result


@dataclass(frozen=True)
class _Layer:
    """The two products of the experts here, on rows sorted by expert. Backward recomputes the activation."""

    up: Tensor
    down: Tensor
    groups: Groups
    between: Between
    transposed: bool

    def first(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return product(rows.to(self.up.dtype), self.up, bias, self.groups, self.transposed)

    def second(self, first: Tensor, bias: Tensor | None) -> Tensor:
        return product(self.between(first).to(self.down.dtype), self.down, bias, self.groups, self.transposed)

    def backward(self, first: Tensor, back: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
        """Run `backward_of`, or what a compiled activation has instead of it."""
        compiled = getattr(self.between, "backward", None)
        return compiled(first, back, *chosen) if compiled else backward_of(self.between, first, back, *chosen)

    def grads(
        self, rows: Tensor, of_first: Tensor, activated: Tensor, g: Tensor, needs: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, up, down and the up bias, where `needs` requires it.

        of_first: that of the first product's result. activated, g: the second product's input and its result's
        gradient, for the gradient of `down`.
        """
        groups, transposed = self.groups, self.transposed
        of_up = grad_of_weight(of_first, rows.to(self.up.dtype), self.up, groups, transposed) if needs[1] else None
        of_up_bias = grad_of_bias(of_first, groups) if needs[3] else None
        of_rows = grad_of_rows(of_first, self.up, groups, transposed).to(rows.dtype) if needs[0] else None
        of_down = grad_of_weight(g, activated, self.down, groups, transposed) if needs[2] else None
        return of_rows, of_up, of_down, of_up_bias


def backward_of(between: Between, first: Tensor, back: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the gradient of the first product's result, and the activation's result a.

    back: the gradient of a. chosen: f[rows, 1], weights of the rows: back comes without them, a is returned with them,
    and third comes <a, back> of each row, which is a weight's gradient.
    """
    leaf = first.detach().requires_grad_()
    with torch.enable_grad():
        made = between(leaf)
    a = made.detach()
    of_made = back if chosen is None else back * chosen
    (of_first,) = torch.autograd.grad(made, leaf, of_made.to(made.dtype))
    if chosen is None:
        return of_first, a
    wide = torch.promote_types(back.dtype, chosen.dtype)
    return of_first, a * chosen, (a.to(wide) * back.to(wide)).sum(-1)


def _apply(
    rows: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, *how: Any
) -> tuple[Tensor, tuple[Any, ...]]:
    layer = _Layer(up, down, *how)
    first = layer.first(rows, up_bias)
    return layer.second(first, down_bias).to(rows.dtype), (rows, up, down, first, *how)


def _apply_backward(
    needs: Sequence[bool], g: Tensor, rows: Tensor, up: Tensor, down: Tensor, first: Tensor, *how: Any
) -> tuple[Tensor | None, ...]:
    layer, g = _Layer(up, down, *how), g.to(down.dtype)
    of_first, activated = layer.backward(first, grad_of_rows(g, down, layer.groups, layer.transposed))
    grads = layer.grads(rows, of_first, activated.to(down.dtype), g, needs)
    return *grads, grad_of_bias(g, layer.groups) if needs[4] else None


def _local(
    x: Tensor,
    order: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *how: Any,
) -> tuple[Tensor, tuple[Any, ...]]:
    """Compute experts that are all here: nothing is sent, and only tokens and the first product are saved."""
    layer, (t, k) = _Layer(up, down, *how), weights.shape
    first = layer.first(x.index_select(0, order // k), up_bias)
    results = layer.second(first, down_bias).to(x.dtype)
    y = weighted_sum(by_pair(results, order, t * k).view(t, k, -1), weights)
    return y, (x, order, weights, up, down, down_bias, first, *how)


def _local_backward(
    needs: Sequence[bool],
    g: Tensor,
    x: Tensor,
    order: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    first: Tensor,
    *how: Any,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of `_local`, without the experts' results, which are not saved.

    The gradient of a choice's weight is <g, down @ a> with the activation's result a, which is <down.T @ g, a>, and the
    gradient of a needs down.T @ g anyway.
    """
    layer, (t, k) = _Layer(up, down, *how), weights.shape
    token = order // k
    g = g.index_select(0, token).to(down.dtype)  # of the results of a token's experts, without the weight
    chosen = weights.reshape(-1).index_select(0, order).unsqueeze(-1)
    back = grad_of_rows(g, down, layer.groups, layer.transposed)
    of_first, activated, dots = layer.backward(first, back, chosen)
    of_weights = None
    if needs[2]:
        if down_bias is not None:
            dots = dots + (g.to(dots.dtype) * layer.groups.rows_of(down_bias).to(dots.dtype)).sum(-1)
        of_weights = dots.new_zeros(t * k).index_copy_(0, order, dots).view(t, k).to(weights.dtype)
    needed = needs[0], needs[3], needs[4], needs[5]
    of_rows, of_up, of_down, of_up_bias = layer.grads(
        x.index_select(0, token), of_first, activated.to(down.dtype), g, needed
    )
    of_bias = grad_of_bias((g * chosen).to(down.dtype), layer.groups) if needs[6] else None
    of_x = by_pair(of_rows, order, t * k).view(t, k, -1).sum(1) if of_rows is not None else None
    return of_x, None, of_weights, of_up, of_down, of_up_bias, of_bias
