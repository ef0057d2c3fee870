"""Record a run in MLflow. Its variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) say where."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import Any

from shardc.features.trackers import runtime

LONGEST = 6000  # characters that a parameter may have
PATIENCE = 60.0  # seconds to wait for numbers on their way at the end


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        self._client, self._sending = import_module("mlflow"), list[Future[None]]()
        self._sender = ThreadPoolExecutor(1)  # no step waits for the network
        self._id = str(self._client.start_run(run_id=id).info.run_id)
        if id is None:  # parameters of a run cannot change
            self._client.log_params({k: x[:LONGEST] for k, x in runtime.texts(run).items()})
        self._client.set_tag("shardc.begins_at_step", str(run["begun"]))
        self._client.log_text(run["spec"], "spec.yaml")
        return self._id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        named = {runtime.plain_name(name): value for name, value in numbers.items()}
        self._sending.append(self._sender.submit(self._client.log_metrics, named, step=step, run_id=self._id))
        while self._sending and self._sending[0].done():
            self._sending.pop(0).result()  # raises its error

    def close(self, summary: Mapping[str, Any]) -> None:
        wait(self._sending, PATIENCE)
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._client.set_tag("shardc.state", summary["state"])
        self._client.log_dict(dict(summary), "summary.json")
        states = {"interrupted": "KILLED", "failed": "FAILED"}
        self._client.end_run(states.get(summary["state"], "FINISHED"))
