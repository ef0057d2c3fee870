"""Record a run in MLflow. Its variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) say where."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardc.features.trackers import runtime

#: Characters that a parameter may have.
LONGEST = 6000


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        self._client = import_module("mlflow")
        active = self._client.start_run(run_id=id)
        if id is None:  # parameters of a run cannot change
            self._client.log_params({k: x[:LONGEST] for k, x in runtime.flat_texts(run).items() if k != "spec"})
        self._client.set_tag("shardc.begins_at_step", str(run["begun"]))
        self._client.log_text(run["spec"], "spec.yaml")
        return str(active.info.run_id)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._client.log_metrics(dict(numbers), step=step, synchronous=False)  # no step waits for the network

    def close(self, summary: Mapping[str, Any]) -> None:
        self._client.flush_async_logging()
        self._client.set_tag("shardc.state", summary["state"])
        self._client.log_dict(dict(summary), "summary.json")
        states = {"interrupted": "KILLED", "failed": "FAILED"}
        self._client.end_run(states.get(summary["state"], "FINISHED"))
