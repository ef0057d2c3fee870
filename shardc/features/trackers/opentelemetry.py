"""Send a run to OpenTelemetry: a span of the run, and a gauge for each number.

Through the providers that the model file has set, else over OTLP (OTEL_EXPORTER_OTLP_ENDPOINT).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardc.features.trackers import runtime


class Tracker(runtime.Tracker):
    def open(self, run: Mapping[str, Any], id: str | None) -> str:
        self._id, self._gauges, meters, tracers = id or uuid.uuid4().hex, dict[str, Any](), _meters(), _tracers()
        self._meter, self._flush = meters.get_meter("shardc"), (meters.force_flush, tracers.force_flush)
        facts = {f"shardc.{name}": text for name, text in runtime.flat_texts({"run_id": self._id, **run}).items()}
        self._span = tracers.get_tracer("shardc").start_span("shardc run", attributes=facts)
        return self._id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in {"step": step, **numbers}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"shardc.{runtime.plain_name(name)}")
            self._gauges[name].set(value, {"shardc.run_id": self._id})

    def close(self, summary: Mapping[str, Any]) -> None:
        codes = import_module("opentelemetry.trace").StatusCode
        self._span.set_attributes({f"shardc.summary.{k}": x for k, x in runtime.flat_texts(summary).items()})
        self._span.set_status(codes.OK if summary["state"] in ("finished", "stopped early") else codes.ERROR)
        self._span.end()
        for flush in self._flush:
            flush()


def _meters() -> Any:
    """Return the process's provider of meters, or one that sends over OTLP."""
    current = import_module("opentelemetry.metrics").get_meter_provider()
    if hasattr(current, "force_flush"):  # not the API's own, which does nothing
        return current
    export, otlp = import_module("opentelemetry.sdk.metrics.export"), "opentelemetry.exporter.otlp.proto.http"
    exporter = import_module(f"{otlp}.metric_exporter").OTLPMetricExporter()
    return import_module("opentelemetry.sdk.metrics").MeterProvider([export.PeriodicExportingMetricReader(exporter)])


def _tracers() -> Any:
    """Return the process's provider of spans, or one that sends over OTLP."""
    current = import_module("opentelemetry.trace").get_tracer_provider()
    if hasattr(current, "force_flush"):
        return current
    export, otlp = import_module("opentelemetry.sdk.trace.export"), "opentelemetry.exporter.otlp.proto.http"
    provider = import_module("opentelemetry.sdk.trace").TracerProvider()
    exporter = import_module(f"{otlp}.trace_exporter").OTLPSpanExporter()
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return provider
