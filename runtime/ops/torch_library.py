"""Register ops that replace torch ops that a captured graph cannot hold: `torch.ops.shardc.*`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("shardc::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Compute the CTC loss of every sequence, f[n].

    log_probs f[t, n, c], targets i64[n, s] or all in one row, lengths i64[n]. torch's `_ctc_loss` also returns what its
    backward needs, in a shape that depends on the lengths' values. This op computes that again in backward.
    zero_infinity: sequences that cannot be aligned have no gradient.
    """
    return torch._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, *rest = ctx.saved_tensors
    with torch.enable_grad():
        x = log_probs.detach().requires_grad_()
        loss = torch._ctc_loss(x, *rest, *ctx.options)[0]
    (dx,) = torch.autograd.grad(loss, x, grad)
    return (dx, None, None, None, None, None)


ctc_loss.register_autograd(_backward, setup_context=_save)


torch.library.define("shardc::with_gradient_of", "(Tensor value, Tensor path) -> Tensor")
torch.library.impl("shardc::with_gradient_of", "CompositeExplicitAutograd", lambda value, path: value.view_as(value))
torch.library.register_autograd("shardc::with_gradient_of", lambda ctx, grad: (None, grad))


def with_gradient_of(value: Tensor, path: Tensor) -> Tensor:
    """Return `value` with the gradient of `path`, of the same shape and dtype.

    A custom backward becomes this (shardc/capture/rewrite/autograd_function.py). The value gets no gradient; nothing is
    copied or computed.
    """
    result: Tensor = torch.ops.shardc.with_gradient_of.default(value, path)
    return result
