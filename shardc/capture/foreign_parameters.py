"""Find parameters that forward or the loss uses and that are not the model's, such as a temperature.

A program has them as constants, and nothing trains them: a note says so. The model's own parameters, if they are held
outside of their module (a function's closure), are refused: they would stay untrained, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardc.ir import source


class ForeignParameters(TorchFunctionMode):
    """A mode for tracing, in which real parameters are foreign: the model's own are fake tensors.

    own: the names of the model's real parameters, by id. found: id -> the tensor, so that no other one gets its id, and
    the first line that uses it where gradients count.
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
                        raise source.of_call().error(
                            f"forward reads the parameter {name!r} from an object other than its module, such as a"
                            " closure: a program would use its first value and not train it",
                            "read it from the module at each use: self.weight in the function, not weight ="
                            " self.weight before it",
                        )
                    self.found.setdefault(id(x), (x, source.of_call().line))
        return func(*args, **kwargs)

    def notes(self) -> tuple[str, ...]:
        """Return one note for each line, with the number of parameters."""
        lines: dict[str, list[Tensor]] = {}
        for x, line in self.found.values():
            lines.setdefault(line, []).append(x)
        return tuple(
            f"{line}: {_describe(every)} not a parameter of the compiled model: the program keeps it as a constant and "
            "does not train it. To train it, make it a part of the model; else call requires_grad_(False)"
            for line, every in lines.items()
        )


def _describe(every: list[Tensor]) -> str:
    shapes = ", ".join(str(list(x.shape)) for x in every[:3]) + (", ..." if len(every) > 3 else "")
    if len(every) == 1:
        return f"a tensor of shape {shapes} requires a gradient and is"
    return f"{len(every)} tensors of shapes {shapes} require gradients, and each is"
