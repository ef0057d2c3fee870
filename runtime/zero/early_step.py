"""Step the optimizer bucket by bucket, overlapped with gradient all-reduces still in flight.

That this gives the same as one step of all parameters is proven for the optimizer at hand, not assumed
(shardc.runtime.zero.optimizer_check): one that, say, scales every update by the norm of all of them steps once.
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
    """Steps a bucket's parameters when their gradients are there. Use, in every step: `possible()`, and if it is,
    `step` with each parameter's name once.

    params: what the optimizer works on, by name."""

    def __init__(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._params = optimizer, params
        self._separable = why_all_at_once(optimizer) is None
        self._settings: list[dict[str, Any]] = []

    def possible(self) -> bool:
        """May this step be done in parts? Not where the optimizer has hooks: they run once a step, with all parameters.
        If so, the step begins here."""
        self._settings = group_settings(self.optimizer)
        return self._separable and not any(map(step_hooks, members_of(self.optimizer)))

    def step(self, names: Sequence[str]) -> None:
        """Those of them that have gradients, by the optimizer's own step."""
        with only_params(self.optimizer, [self._params[n] for n in names], self._settings):
            self.optimizer.step()
