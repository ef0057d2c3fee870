"""How sample calls of ops are made. `check.py` proves the rules on them; an op with a rule but without a sample fails
the tests.

    sample(aten.linear.default, lambda t: call(t.real(4, 12), t.real(24, 12), t.real(24)))

Tensors are float64 and small; dims that may be split have 12 elements, or another multiple of 2, 3 or 4, so that parts
on two, three and four ranks exist and inner digits too. A sample must not be degenerate (no roll by zero): what
splitting does wrong has to show. Every tensor occurs once in a call, because the check lays every operand out on its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class RngMark:
    """Stands in a sample's arguments for the random state that the graph passes."""

    def __repr__(self) -> str:
        return "RNG"


RNG = RngMark()
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    """(args, kwargs) of one call."""
    return args, kwargs


@dataclass
class Tensors:
    """Makes the tensors of samples, reproducibly from a seed."""

    seed: int
    generator: torch.Generator = field(init=False)
    constants: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def real(self, *shape: int) -> Tensor:
        """f64[shape], standard normal."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        """f64[shape], in (0.1, 0.9): inside the domain of logarithms, powers and inverse functions."""
        return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def constant(self, x: Tensor) -> Tensor:
        """x as an operand that the op cannot be differentiated by."""
        self.constants.append(x)
        return x

    def definite(self, *shape: int) -> Tensor:
        """f64[.., n, n] for shape (.., n): symmetric, positive definite."""
        x = self.real(*shape, shape[-1])
        return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """i64[shape], in [0, high)."""
        return torch.randint(high, shape, generator=self.generator)

    def truth(self, *shape: int) -> Tensor:
        """bool[shape], fair."""
        return self.index(2, *shape).bool()

    def orders(self, high: int, *shape: int) -> Tensor:
        """i64[shape], along the last dim different numbers in [0, high): writing to them clashes nowhere."""
        scores = torch.rand((*shape[:-1], high), generator=self.generator)
        return scores.argsort(-1)[..., : shape[-1]].contiguous()


Sample = Callable[[Tensors], Arguments]
SAMPLES: dict[Any, list[Sample]] = {}


def sample(op: Any, *makers: Sample) -> None:
    """Add sample calls of an op."""
    SAMPLES.setdefault(op, []).extend(makers)


def samples(*ops_: Any) -> Callable[..., None]:
    """Add the same sample calls to several ops."""

    def add(*makers: Sample) -> None:
        for op in ops_:
            sample(op, *makers)

    return add
