"""Random numbers that a user fills a parameter with of which this rank has a part: `nn.init.normal_(p)`.

Every rank would draw the first numbers of its own generator for its own part: where all are seeded alike, each slice of
the weight gets the same numbers, and a fan is that of a slice. Nothing of that can be seen later; so it is refused
where it happens. Torch has no hook there that leaves parameters plain (a subclass would cost optimizers their fused
forms), but finds its methods by name: the parameter object answers to those that draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardc.errors import ShardcError

DRAWS = tuple(
    f"{name}_"
    for name in ["bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"]
)


class _Refused:
    """One of these methods, of one parameter."""

    def __init__(self, fqn: str, method: str) -> None:
        self.fqn, self.method = fqn, method

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ShardcError(
            f"{self.method} would draw for this rank's part alone: other ranks draw the same numbers for theirs, or"
            " others than one device",
            where=self.fqn,
            fix="fill it where the model is built (given the function that builds it, each rank computes its part);"
            " or p.copy_() this rank's part of what you draw, under torch.no_grad()",
        )


def refuse(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Let each of these (name, parameter) pairs, of which ranks have parts, refuse to be filled in place by chance."""
    for fqn, p in params:
        for method in DRAWS:
            setattr(p, method, _Refused(fqn, method))
        p.__getstate__ = _no_state  # type: ignore[method-assign]  # what torch.save writes is plain


def _no_state() -> None:
    """Nothing beside the tensor."""
