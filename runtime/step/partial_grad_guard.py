"""The gradient of a parameter that a rank has a part of only: a norm over it is not the norm of the whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of what lies in `.grad`. Where that is this
rank's slice, every rank would clip by another number, and replicated weights would drift apart. So the `.grad` of such
parameters is a tensor that does everything a tensor does but add itself up to one number: that is an error with the
method to call instead. It catches clip_grad_norm_, get_total_norm and sums by hand, `p.grad.pow(2).sum()`, alike.
Parameters stay plain, so optimizers choose their fused and foreach forms as always.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError

#: What adds elements up, and which of its positional arguments names dims. (A maximum is this rank's as well, but is
#: seldom taken for the whole: it is left alone.)
_SUMS = {
    **dict.fromkeys(("vector_norm", "matrix_norm", "norm", "_foreach_norm"), 2),
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "var", "std"), 1),
    **dict.fromkeys(("dot", "vdot", "inner", "dist"), 9),  # no dims
}
_PLAIN = {"clone", "as_subclass"}


class GradientPart(Tensor):
    """A part of a gradient. New tensors of as many elements that torch makes from it element by element are parts too,
    but for copies by `clone`; others are ordinary tensors. What changes it in place keeps it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        if name in _SUMS and _is_whole(name, args, kwargs):
            raise ShardcError(
                "this would add up the part of the gradient which this rank has: another number on every rank",
                where=f"{name} of a parameter's .grad",
                fix="clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient,"
                " or by an engine's clip_norm=max_norm, which has it in engine.grad_norm; clip_grad_value_ works as it"
                " is; .grad.as_subclass(torch.Tensor) is this rank's part as a plain tensor",
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name in _PLAIN or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        size = next((x.numel() for x in args if isinstance(x, GradientPart)), -1)
        new = type(result) is Tensor and result.numel() == size and not any(result is x for x in args)
        return result.as_subclass(GradientPart) if new else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo).as_subclass(GradientPart)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # what a file has
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _is_whole(name: str, args: Any, kwargs: Any) -> bool:
    """Does this call add all elements up, and not those along some dims?"""
    dims = kwargs.get("dim", kwargs.get("axis", args[_SUMS[name]] if len(args) > _SUMS[name] else None))
    return dims is None or isinstance(dims, (bool, torch.dtype))  # var's `unbiased`


def mark(params: Iterable[nn.Parameter]) -> None:
    """Let gradients of parameters that are split be known as parts. Their memory stays theirs."""
    for p in params:
        if p.grad is not None and type(p.grad) is Tensor:
            p.grad = p.grad.as_subclass(GradientPart)
