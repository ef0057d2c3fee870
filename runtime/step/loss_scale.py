"""Loss scaling for float16: gradients too small for it are computed as multiples of the scale, and divided again before
they are used.

The algorithm of torch.amp.GradScaler (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), for all ranks
of a mesh at once: a number that is not finite in any rank's gradients skips the step on every rank, and the scale
changes on all of them alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's own defaults


class LossScaler:
    """scale: "dynamic", or a number that stays. mesh: the runtime mesh.

    Use, in every step: `scale` the loss, `unscale` each gradient once when it is summed, `sync_overflow`, then step the
    optimizer unless `overflow`, and `update`.

    .factor: a float, the same on all ranks. .overflow: the last step found a number that was not finite. .skipped: how
    many did."""

    def __init__(self, scale: float | str, mesh: Any) -> None:
        self.dynamic = scale == "dynamic"
        self.factor = INITIAL if self.dynamic else float(scale)
        self.mesh = mesh
        self.overflow, self.skipped = False, 0
        self._good = 0  # steps since the factor last changed
        self._norms: list[Tensor] = []

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward on."""
        return loss * self.factor

    def unscale(self, grads: Iterable[Tensor | None]) -> None:
        """Divide gradients by the factor, in place, and note whether all are finite."""
        some = [g for g in grads if g is not None and g.numel()]
        for g in some:
            g.mul_(1 / self.factor)
        # a sum of squares would do in one pass, but overflows by itself; the largest absolute value does not
        self._norms += [torch.linalg.vector_norm(g, math.inf).float() for g in some]

    def sync_overflow(self) -> bool:
        """Whether any rank of the whole mesh found a number that is not finite. Collective: one number, the largest of
        all.
        """
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
        """After the step: the factor of the next one."""
        if not self.dynamic:
            return
        self._good = 0 if self.overflow else self._good + 1
        if self.overflow:
            self.factor *= BACKOFF
        elif self._good == INTERVAL:
            self.factor, self._good = self.factor * GROWTH, 0

    def state_dict(self) -> dict[str, float]:
        """JSON-able, for checkpoints."""
        return {"factor": self.factor, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed factor stays what the spec says."""
        if self.dynamic:
            self.factor, self._good = float(state["factor"]), int(state["good"])
        self.skipped = int(state["skipped"])
