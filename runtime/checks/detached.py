"""Values that a step or a module returns beside their gradients: a backward of them would train nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.checks.tensor_parts import plain, tensors_in


class _Detached(Tensor):
    """A tensor that becomes plain in a file and in a copy."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class SteppedLoss(_Detached):
    """The loss of a step: its backward has run."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        fix = "remove .backward(); or write the loop around program.module(model), whose loss has backward()"
        fault = "the engine has already run backward: this number is detached"
        raise ShardcError(fault, where="loss.backward()", fix=fix)


class ValueBeside(_Detached):
    """A value beside a module's loss, or derived from it. It has no gradient.

    So a term of the loss with it would change nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with plain():
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((args, kwargs))):
                fault = "a value beside the loss is detached: a term computed from it has no gradient and would train"
                fault += " nothing"
                fix = "add the term in the loss function, which may name its value beside the loss, too; value.detach()"
                fix += " where no gradient is meant"
                raise ShardcError(fault, where=f"{name} of a value beside the loss", fix=fix)
            result = func(*args, **kwargs)
        if name in ("detach", "as_subclass") or not (type(result) is Tensor and result.is_floating_point()):
            return result
        return result.as_subclass(cls)
