"""Step the optimizer bucket by bucket, overlapped with gradient all-reduces still in flight.

The optimizer is tested for whether this equals one step of all parameters (shardc.runtime.zero.optimizer_check). One
that, say, scales every update by the norm of all of them steps once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardc.runtime.zero.optimizer_check import group_settings, only_params, why_all_at_once
from shardc.runtime.zero.optimizer_list import members_of
from shardc.torch_private import step_hooks


class OverlappedStep:
    """Steps the parameters of one bucket after the other, when their sums are ready. params: by name.

    In every step: call `begin_if_possible()`; if it is, call `step` with each parameter's name once.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._params = optimizer, params
        self._separable = why_all_at_once(optimizer) is None
        self._settings: list[dict[str, Any]] = []

    def begin_if_possible(self) -> bool:
        """Return whether this step may run in parts; if so, begin it.

        Not where the optimizer has hooks: they run once a step, with all parameters.
        """
        self._settings = group_settings(self.optimizer)
        return self._separable and not any(map(step_hooks, members_of(self.optimizer)))

    def step(self, names: Sequence[str]) -> None:
        """Step those of the named parameters that have gradients."""
        with only_params(self.optimizer, [self._params[n] for n in names], self._settings):
            self.optimizer.step()
