"""The gradient of a parameter that a rank has a part of only: a norm over it is not the norm of the whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of what lies in `.grad`. Where that is this
rank's slice, every rank would clip by another number, and replicated weights would drift apart. So the `.grad` of such
parameters is a tensor that does everything a tensor does but take its norm: that is an error with the method to call
instead. It catches clip_grad_norm_, get_total_norm and norms by hand alike. Parameters stay plain, so optimizers choose
their fused and foreach forms as always.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError

_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.linalg.matrix_norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,  # what torch.nn.utils calls
}


class GradientPart(Tensor):
    """A part of a gradient. What torch makes from it is an ordinary tensor; what changes it in place keeps it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and kwargs.get("dim") is None and len(args) < 3:
            raise ShardcError(
                "the norm of this gradient would be that of the part which this rank has, another number on every rank",
                where=f"{getattr(func, '__name__', func)} of a parameter's .grad",
                fix="clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient,"
                " or by an engine's clip_norm=max_norm, which has it in engine.grad_norm;"
                " clip_grad_value_ works as it is; .grad.detach() is this rank's part as a plain tensor",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo).as_subclass(GradientPart)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # a file has the plain tensor


def mark(params: Iterable[nn.Parameter]) -> None:
    """Let gradients of parameters that are split be known as parts. Their memory stays theirs."""
    for p in params:
        if p.grad is not None and type(p.grad) is Tensor:
            p.grad = p.grad.as_subclass(GradientPart)
