"""Decide which step of a run is the best, by a held-out value, and whether the run has stopped getting better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.similar_names import did_you_mean
from shardc.runtime.state.checkpoint_folder import generations
from shardc.spec import Run


class Best:
    """The best held-out value so far, and how often it was missed since: a part of each checkpoint.

    .state: metric, value, step (with `keep: best`: of the checkpoint that stays), stale: evaluations in a row without a
    better value. .on: whether the run asks which step is best.
    """

    def __init__(self, settings: Run, engine: Any) -> None:
        self._settings, self._engine = settings, engine
        self._metric, self.on = (
            f"{settings.metric_mode} {settings.metric}",
            settings.keeps_best or settings.patience > 0,
        )

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._engine.extra.get("best", {})
        return state if state.get("metric") == self._metric else {}

    @property
    def stopped(self) -> bool:
        """Whether as many evaluations in a row as `patience` says brought nothing better."""
        return 0 < self._settings.patience <= int(self.state.get("stale", 0))

    def check(self, *, held_out: bool) -> None:
        """Raise ShardcError if the run cannot have this value. held_out: there is held-out data."""
        if self.on and not held_out:
            fault, fix = "there is no held-out data to choose the best step by", "return it from data('valid')"
            raise ShardcError(fault, where="--keep best" if self._settings.keeps_best else "--patience", fix=fix)
        if self.on and "/" not in self._settings.metric:
            self._check_name(["loss", *(o.name for o in self._engine.program.outputs)])

    def _check_name(self, names: list[str]) -> None:
        if (metric := self._settings.metric) not in names:
            fix = did_you_mean(metric, names, f"one of {', '.join(names)}")
            raise ShardcError(f"there is no held-out value {metric!r}", where="--metric", fix=fix)

    def evaluated(self, values: Mapping[str, float]) -> bool:
        """Compare the held-out values of this step with the best; return whether they are better. Collective."""
        if not self.on:
            return False
        self._check_name(list(values))
        now, before, mesh = float(values[self._settings.metric]), self.state, self._engine.mesh
        sign, first = (1.0 if self._settings.metric_mode == "max" else -1.0), before.get("value") is None
        better = not math.isnan(now) and (first or sign * (now - before["value"]) > self._settings.min_delta)
        better = bool(mesh.sum_on_host([int(better and mesh.rank == 0)])[0])  # ranks may differ in a last bit
        kept = {"step": self._engine.step_count} if self._settings.keeps_best else {}
        new = {"value": now, "stale": 0, **kept} if better else {**before, "stale": before.get("stale", 0) + 1}
        self._engine.extra["best"] = {**new, "metric": self._metric}
        return better

    def summary(self, folder: Path) -> dict[str, Any]:
        """Return the best step for the summary, with its checkpoint if the folder has it."""
        state = self.state
        if not self.on or state.get("value") is None:
            return {}
        path = next((g.path for g in generations(folder) if g.step == state.get("step") and not g.replaced), None)
        return {**state, "metric": self._settings.metric, "checkpoint": str(path) if path is not None else None}
