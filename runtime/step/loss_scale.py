"""Scale the loss for float16, so that small gradients do not become zero, and unscale gradients.

The algorithm of torch.amp.GradScaler (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), for all ranks
of a mesh at once: a gradient that is not finite on any rank skips the step and changes the scale on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's own defaults


class LossScaler:
    """The loss scale of all ranks. scale: "dynamic", or a fixed number. mesh: the runtime mesh.

    In every step: `scale` the loss, `unscale` each gradient once when it is summed, `sync_overflow`, then step the
    optimizer unless `overflow`, and `update`. .factor: a float, the same on all ranks. .overflow: the last step found a
    number that is not finite. .skipped: how many steps did.
    """

    def __init__(self, scale: float | str, mesh: Any) -> None:
        self.dynamic = scale == "dynamic"
        self.factor = INITIAL if self.dynamic else float(scale)
        self.mesh = mesh
        self.overflow, self.skipped = False, 0
        self._good = 0  # steps since the factor last changed
        self._norms: list[Tensor] = []

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, which backward begins with."""
        return loss * self.factor

    def unscale(self, grads: Iterable[Tensor | None]) -> None:
        """Divide gradients by the factor, in place, and record whether all are finite."""
        some = [g for g in grads if g is not None and g.numel()]
        for g in some:
            g.mul_(1 / self.factor)
        # a sum of squares would need one pass, but can overflow; the largest absolute value cannot
        self._norms += [torch.linalg.vector_norm(g, math.inf).float() for g in some]

    def sync_overflow(self) -> bool:
        """Return whether any rank found a number that is not finite. Collective: one maximum."""
        bad = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        if self._norms:
            bad = (~torch.stack(self._norms).isfinite()).any().float()
        self._norms = []
        axes = self.mesh.layout.merge(self.mesh.layout.names)
        overflow = self.mesh.all_reduce(bad, axes, op="max", direction="update", tag="overflow") if axes else bad
        self.overflow = bool(overflow > 0)
        self.skipped += self.overflow
        return self.overflow

    def update(self) -> None:
        """Compute the factor of the next step, after a step."""
        if not self.dynamic:
            return
        self._good = 0 if self.overflow else self._good + 1
        if self.overflow:
            self.factor *= BACKOFF
        elif self._good == INTERVAL:
            self.factor, self._good = self.factor * GROWTH, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for checkpoints, JSON-able."""
        return {"factor": self.factor, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the state. A fixed factor stays the spec's."""
        if self.dynamic:
            self.factor, self._good = float(state["factor"]), int(state["good"])
        self.skipped = int(state["skipped"])
