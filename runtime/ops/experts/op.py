"""Define `torch.ops.shardc.experts`, for captured graphs until the canonical pass (`ops.experts`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.runtime.ops.experts.products import experts as run


@torch.library.custom_op("shardc::experts", mutates_args=())
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
) -> Tensor:
    """Compute experts as shardc.runtime.ops.experts.products.experts does."""
    return run(x, index, weights, up, down, up_bias, down_bias, activation, transposed)


@experts.register_fake
def _(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Recompute forward with autograd. Programs run `ops.experts`, which saves what it needs."""
    leaves = [
        None if x is None else x.detach().requires_grad_(n)
        for x, n in zip(ctx.saved_tensors, ctx.needs_input_grad[:7], strict=True)
    ]
    with torch.enable_grad():
        result = run(*leaves, *ctx.options)  # type: ignore[arg-type]
    inputs = [x for x in leaves if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(result, inputs, grad, allow_unused=True))
    return (*(next(grads) if x is not None and x.requires_grad else None for x in leaves), None, None)


experts.register_autograd(_backward, setup_context=_save)
