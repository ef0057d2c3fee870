"""Stepping an optimizer on some of its parameters while gradients of others are still being summed.

That it comes to the same as stepping all together is proven for the very optimizer, not assumed
(shardc.runtime.zero.optimizer_check): one that, say, scales every update by the norm of all of them steps once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardc.runtime.zero.optimizer_check import only, settings, why_together
from shardc.torch_private import step_hooks


class ByBucket:
    """Steps a bucket's parameters when their gradients are there. Use: in every step `begin()`, then `step` with each
    parameter's name once.

    params: what the optimizer works on, by name. Raises nothing for an optimizer that cannot be stepped so: `begin`
    says False."""

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
