"""Parameters that forward or the loss uses and that are not the model's: those of a loss with a temperature of its own.
A program has them as constants, and nothing trains them: that is told. The model's own, held by something else than
their module (a function's closure), are refused: they would come out untrained, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.errors import ShardcError
from shardc.ir import source


class ForeignParameters(TorchFunctionMode):
    """While the model is traced, whose own parameters are fake tensors: real ones are no part of it.

    own: the names of the model's real parameters, by id.
    found: by id, the tensor, so that no other one gets its id, and the first line that uses it where gradients count.
    """

    def __init__(self, own: Mapping[int, str]) -> None:
        super().__init__()
        self.own = own
        self.found: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in ("__get__", "__set__", "detach"):
            for x in (*args, *kwargs.values()):
                if type(x) in (nn.Parameter, Tensor) and x.requires_grad and x.is_leaf:
                    if (name := self.own.get(id(x))) is not None:
                        raise _held_elsewhere(name)
                    self.found.setdefault(id(x), (x, source.of_call().line))
        return func(*args, **kwargs)

    def notes(self) -> tuple[str, ...]:
        """One for each line, that says how many."""
        lines: dict[str, list[Tensor]] = {}
        for x, line in self.found.values():
            lines.setdefault(line, []).append(x)
        return tuple(
            f"{line}: {_said(every)} no parameter of the model that is compiled: a constant of the program, which"
            " nothing trains. If it is to be trained make it a part of the model, else requires_grad_(False)"
            for line, every in lines.items()
        )


def _held_elsewhere(name: str) -> ShardcError:
    place = source.of_call()
    return ShardcError(
        f"forward reads the parameter {name!r} from something that holds it beside its module, such as a closure"
        f" ({place.shown}): a program would have its first value, and not train it",
        where=place.line,
        fix="read it of the module when it is used: self.weight in the function, not weight = self.weight before it",
    )


def _said(every: list[Tensor]) -> str:
    shapes = ", ".join(str(list(x.shape)) for x in every[:3]) + (", ..." if len(every) > 3 else "")
    if len(every) == 1:
        return f"a tensor of shape {shapes} wants a gradient and is"
    return f"{len(every)} tensors of shapes {shapes} want gradients and each is"
