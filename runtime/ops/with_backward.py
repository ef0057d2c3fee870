"""Define ops with a custom backward: a pair of functions, run by one autograd.Function.

    forward(*args)             (the result or results, what backward takes: tensors and others)
    backward(needs, g, *kept)  gradients of the first arguments, in order; needs: by argument, whether one is needed

Step graphs run such an op as a whole (shardc.runtime.ops.opaque), or call the parts of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Backward = Callable[..., Sequence[Tensor | None]]


class WithBackward(Function):
    """Run a pair under autograd. others: backward's inputs that are no tensors, by place."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Backward, once: bool, *args: Any) -> Any:
        result, kept = forward(*args)
        ctx.saves = any(isinstance(x, Tensor) for x in kept)  # else torch would not run backward twice
        if ctx.saves:
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in kept))
        ctx.others = tuple(None if isinstance(x, Tensor) else x for x in kept)
        ctx.run, ctx.once = backward, once
        return result

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return _once(ctx, *gs) if ctx.once else _gradients(ctx, *gs)


def _gradients(ctx: Any, *gs: Tensor) -> Any:
    kept = ctx.others
    if ctx.saves:
        kept = (other if x is None else x for x, other in zip(ctx.saved_tensors, kept, strict=True))
    _, _, _, *needs = ctx.needs_input_grad
    grads = ctx.run(needs, *gs, *kept)
    return None, None, None, *grads, *[None] * (len(needs) - len(grads))


_once: Any = once_differentiable(_gradients)


def with_backward(forward: Callable[..., Any], backward: Backward, *args: Any, once: bool = True) -> Any:
    """Return `forward`'s result, with `backward` as its gradient.

    once: backward cannot be differentiated, and torch raises an error for it; else it runs unguarded.
    """
    return WithBackward.apply(forward, backward, once, *args)  # type: ignore[no-untyped-call]
