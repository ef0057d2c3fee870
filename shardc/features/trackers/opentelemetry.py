"""Send a run to OpenTelemetry: a span of the run, and a gauge for each number.

Through the providers that the model file has set, else those that OTEL_METRICS_EXPORTER and OTEL_TRACES_EXPORTER name
(otlp, console, ...; default: otlp).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from shardc.features.trackers import runtime


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        metrics, self._trace = import_module("opentelemetry.metrics"), import_module("opentelemetry.trace")
        if not hasattr(metrics.get_meter_provider(), "force_flush"):  # the API's own, which does nothing
            for kind in ("METRICS", "TRACES"):
                os.environ.setdefault(f"OTEL_{kind}_EXPORTER", "otlp")
            for entry in entry_points(group="opentelemetry_configurator"):
                entry.load()().configure()
        self._providers = metrics.get_meter_provider(), self._trace.get_tracer_provider()
        self._id, self._gauges = id or uuid.uuid4().hex, dict[str, Any]()
        facts = {f"shardc.{n}": x for n, x in {**runtime.texts(run), "run_id": self._id, "spec": run["spec"]}.items()}
        self._span = self._providers[1].get_tracer("shardc").start_span("shardc run", attributes=facts)
        return self._id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in {"step": step, **numbers}.items():
            if name not in self._gauges:
                meter = self._providers[0].get_meter("shardc")
                self._gauges[name] = meter.create_gauge(f"shardc.{runtime.plain_name(name)}")
            self._gauges[name].set(value, {"shardc.run_id": self._id})

    def close(self, summary: Mapping[str, Any]) -> None:
        good, codes = summary["state"] in ("finished", "stopped early"), self._trace.StatusCode
        self._span.set_attributes({f"shardc.summary.{k}": x for k, x in runtime.texts(summary).items()})
        self._span.set_status(codes.OK if good else codes.ERROR)
        self._span.end()
        for provider in self._providers:
            provider.force_flush()
