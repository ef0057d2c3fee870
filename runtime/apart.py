"""Stepping an optimizer on some of its parameters at a time: while gradients of others are still being summed, or state of others is away.

That it comes to the same as stepping all together is proven for the very optimizer, not assumed: one that, say, scales every update by
the norm of all of them steps once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardc.runtime.zero_optimizer import SmallCopy
from shardc.torch_private import step_hooks


class ByBucket:
    """Steps a bucket's parameters when their gradients are there. Use: in every step `begin()`, then `step` with each parameter's name once.

    params: what the optimizer works on, by name. Raises nothing for an optimizer that cannot be stepped so: `begin` says False.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._params = optimizer, params
        self._apart = why_together(optimizer) is None
        self._before: list[dict[str, Any]] = []

    def begin(self) -> bool:
        """Whether this step may be done in parts: hooks are to run once a step, and with all parameters."""
        self._before = settings(self.optimizer)
        return self._apart and not step_hooks(self.optimizer)

    def step(self, names: Sequence[str]) -> None:
        """Those of them that have gradients, as the optimizer's own step."""
        with only(self.optimizer, [self._params[n] for n in names], self._before):
            self.optimizer.step()


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What stands in every parameter group beside its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@contextmanager
def only(optimizer: Optimizer, some: Sequence[nn.Parameter], before: Sequence[dict[str, Any]]) -> Iterator[None]:
    """In here the optimizer's groups hold `some` parameters only. before: its settings as the whole step begins with them.

    What a step changes in a group, such as a count of steps, is thus what one step changes.
    """
    here = {id(p) for p in some}
    every = [list(group["params"]) for group in optimizer.param_groups]
    for group, given in zip(optimizer.param_groups, before, strict=True):
        for new in group.keys() - given.keys() - {"params"}:
            del group[new]
        group.update(given)
        group["params"][:] = [p for p in group["params"] if id(p) in here]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, every, strict=True):
            group["params"][:] = params


class _Apart(SmallCopy):
    """A small copy of an optimizer that steps every parameter by itself."""

    def step(self) -> None:
        before = settings(self.optimizer)
        for p in [p for group in self.optimizer.param_groups for p in group["params"]]:
            with only(self.optimizer, [p], before):
                super().step()


def why_together(optimizer: Optimizer) -> str | None:
    """Why an optimizer has to step all parameters at once; None if it updates each by itself.

    Copies of it step small random parameters, together and apart: it must come to the same, bit by bit.
    """
    kind = type(optimizer).__name__
    found = []
    for made in (SmallCopy(optimizer), _Apart(optimizer)):
        try:
            found.append(made.run(*made.data(copies=2), cut=False))
        except Exception as e:  # the user's own optimizer: whatever it raises is the reason
            what = f"the optimizer {kind} cannot be tried on a small sample ({type(e).__name__}: {e})"
            return f"{what}, so nothing shows that it may step some parameters"
    if all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in zip(*found, strict=True)):
        return None
    return f"the optimizer {kind} updates parameters together, not each by itself"
