"""Write the samples of rules, `sample(op, lambda t: call(t.real(4, 12)))`, and prove a rule on one.

Tensors are float64 and small; dims that may be split have 12 elements, or another multiple of 2, 3 or 4, so that parts
on two, three and four ranks exist and inner digits too. A sample must not be degenerate (no roll by zero): errors of
splitting must show. Every tensor occurs once in a call, because the check places each operand separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.rules.core.registry import Rule, overloads
from shardc.rules.core.user_ops import SAMPLES, Arguments, Sample
from shardc.runtime.rng import Rng
from shardc.verify.rules.case import Case, Finding
from shardc.verify.rules.prove import prove_case

#: In a sample's arguments: the random state that the graph passes.
RNG = Rng(0)


class Tensors(list[Tensor]):
    """Makes the tensors of samples, reproducibly from a seed. It holds those that have no gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def real(self, *shape: int) -> Tensor:
        """Return f64[shape], standard normal."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        """Return f64[shape] in (0.1, 0.9), the domain of logarithms, powers and inverse functions."""
        return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def constant(self, x: Tensor) -> Tensor:
        """Mark x as an operand that the op cannot be differentiated by, and return it."""
        self.append(x)
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


Maker = Callable[[Tensors], Arguments]


def made(maker: Maker) -> Sample:
    """The sample that a function of `Tensors` makes."""

    def make(constants: list[Tensor]) -> Arguments:
        tensors = constants if isinstance(constants, Tensors) else Tensors()
        arguments = maker(tensors)
        if tensors is not constants:
            constants += tensors
        return arguments

    return make


def call(*args: Any, **kwargs: Any) -> Arguments:
    """Return (args, kwargs) of one call."""
    return args, kwargs


def sample(op: Any, *makers: Maker) -> None:
    """Add sample calls of an op."""
    SAMPLES.setdefault(op, []).extend(map(made, makers))


def samples(*ops_: Any) -> Callable[..., None]:
    """Add the same sample calls to several ops, or to torch's ops of some names: see `overloads`."""

    def add(*makers: Maker) -> None:
        for op in (x for named in ops_ for x in (overloads(named) if isinstance(named, str) else [named])):
            sample(op, *makers)

    return add


def prove(op: Any, maker: Maker, *parts: int, rule: Rule | None = None) -> list[Finding]:
    """Every strategy of one call that is wrong on so many ranks. rule: in place of the registered one."""
    return prove_case(Case.of(op, made(maker), rule), *parts)
