"""Sample calls of ops, on which rules are proven (shardc.verify.rules).

Samples of shardc's rules are in tests/rules/samples, one file per family; a user's rule comes with its samples.

    sample(aten.linear.default, lambda t: call(t.real(4, 12), t.real(24, 12), t.real(24)))

Tensors are float64 and small; dims that may be split have 12 elements, or another multiple of 2, 3 or 4, so that parts
on two, three and four ranks exist and inner digits too. A sample must not be degenerate (no roll by zero): errors of
splitting must show. Every tensor occurs once in a call, because the check places each operand separately.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError


class RngMark:
    """Represents, in a sample's arguments, the random state that the graph passes."""

    def __repr__(self) -> str:
        return "RNG"


RNG = RngMark()
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Tensors:
    """Makes the tensors of samples, reproducibly from a seed."""

    seed: int
    generator: torch.Generator = field(init=False)
    constants: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def real(self, *shape: int) -> Tensor:
        """Return f64[shape], standard normal."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        """Return f64[shape] in (0.1, 0.9), the domain of logarithms, powers and inverse functions."""
        return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def constant(self, x: Tensor) -> Tensor:
        """Mark x as an operand that the op cannot be differentiated by, and return it."""
        self.constants.append(x)
        return x

    def definite(self, *shape: int) -> Tensor:
        """Return f64[.., n, n] for shape (.., n): symmetric, positive definite."""
        x = self.real(*shape, shape[-1])
        return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """Return i64[shape] in [0, high)."""
        return torch.randint(high, shape, generator=self.generator)

    def truth(self, *shape: int) -> Tensor:
        """Return bool[shape], fair."""
        return self.index(2, *shape).bool()

    def orders(self, high: int, *shape: int) -> Tensor:
        """Return i64[shape], distinct in [0, high) along the last dim: writes to them never collide."""
        scores = torch.rand((*shape[:-1], high), generator=self.generator)
        return scores.argsort(-1)[..., : shape[-1]].contiguous()


Sample = Callable[[Tensors], Arguments]
SAMPLES: dict[Any, list[Sample]] = {}


#: `(x, w)`, `((x, w), {"eps": 1e-6})`, a function of nothing that returns either, or a function of `Tensors` as rules'
#: own samples.
Given = tuple[Any, ...] | Tensor | Callable[..., Any]


def as_sample(given: Given, where: str = "") -> Sample:
    """Make a sample from a user's value; functions run with a fixed seed, and torch's state is restored."""
    if callable(given) and not isinstance(given, Tensor):
        takes = bool(inspect.signature(given).parameters)

        def made(t: Tensors) -> Arguments:
            if takes:
                return arguments(given(t), where)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(t.seed)
                return arguments(given(), where)

        return made
    fixed = arguments(given, where)
    return lambda _: fixed


def arguments(given: Any, where: str = "") -> Arguments:
    """Return (args, kwargs) of a call. Raises ShardcError for a value that is neither."""
    if isinstance(given, Tensor):
        return (given,), {}
    if not isinstance(given, tuple):
        fault = f"a sample is a {type(given).__name__}, not a tuple of arguments"
        raise ShardcError(fault, where=where, fix="samples=[lambda: (torch.randn(4, 12), torch.randn(12))]")
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given[0], given[1]
    return given, {}
