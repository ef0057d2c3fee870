"""Record a run in Weights & Biases. Its variables (WANDB_PROJECT, WANDB_MODE=offline, ...) say where."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardc.features.trackers import runtime


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        client = import_module("wandb")
        self._run = client.init(id=id, resume="allow" if id else None, config=dict(run))
        # the client drops numbers of steps below the last one, which a run that went back takes again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary["state"] in ("finished", "stopped early") else 1)
