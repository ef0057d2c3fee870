"""Send a run to OpenTelemetry: a span of the run, and a gauge for each number.

Through the providers that the model file has set, else those that OTEL_METRICS_EXPORTER and OTEL_TRACES_EXPORTER name
(otlp, console, ...; default: otlp).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from shardc.features.trackers import runtime


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        metrics, trace = import_module("opentelemetry.metrics"), import_module("opentelemetry.trace")
        self._providers, self._codes = [metrics.get_meter_provider(), trace.get_tracer_provider()], trace.StatusCode
        if not hasattr(self._providers[0], "force_flush"):  # the API's own, which does nothing
            sdk, export = import_module("opentelemetry.sdk.metrics"), import_module("opentelemetry.sdk.metrics.export")
            self._providers[0] = sdk.MeterProvider([export.PeriodicExportingMetricReader(_exporter("metrics"))])
        if not hasattr(self._providers[1], "force_flush"):
            sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
            self._providers[1] = sdk.TracerProvider()
            log, errors = logging.getLogger("opentelemetry"), logging.Handler(logging.ERROR)  # one for each failed try
            errors.emit = lambda record: self.warn(record.getMessage())  # type: ignore[method-assign]
            log.propagate, log.handlers = False, [errors]
            self._providers[1].add_span_processor(export.BatchSpanProcessor(_exporter("traces")))
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
        good = summary["state"] in ("finished", "stopped early")
        self._span.set_attributes({f"shardc.summary.{k}": x for k, x in runtime.texts(summary).items()})
        self._span.set_status(self._codes.OK if good else self._codes.ERROR)
        self._span.end()
        for provider in self._providers:
            provider.force_flush()


def _exporter(kind: str) -> Any:
    """Make the exporter of metrics or traces that the environment names."""
    name = os.environ.get(f"OTEL_{kind.upper()}_EXPORTER", "otlp")
    exporters = entry_points(group=f"opentelemetry_{kind}_exporter", name="otlp_proto_http" if name == "otlp" else name)
    return next(iter(exporters)).load()()
