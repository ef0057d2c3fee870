"""`torch.ops.shardc.experts`: the op of experts in a captured graph, until the canonical pass makes it
`ops.experts`.
"""

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
    """As shardc.runtime.ops.expert_products.experts."""
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
    """Run again, with autograd: in programs `ops.experts` runs, which keeps what it needs."""
    leaves = [
        None if x is None else x.detach().requires_grad_(n)
        for x, n in zip(ctx.saved_tensors, ctx.needs_input_grad[:7], strict=True)
    ]
    with torch.enable_grad():
        result = run(*leaves, *ctx.options)  # type: ignore[arg-type]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(result, wanted, grad, allow_unused=True))
    return (*(next(grads) if x is not None and x.requires_grad else None for x in leaves), None, None)


experts.register_autograd(_backward, setup_context=_save)
