"""Trackers record configuration, spec, numbers, summary and state; go on with a run; and never end one."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardc.cli.run import _settings
from shardc.errors import ShardcError
from shardc.features.trackers import runtime
from shardc.ir.mesh import Mesh
from shardc.runtime.checks.callbacks import Callbacks
from shardc.runtime.mesh.activity import Activity
from shardc.spec import Run

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 1.0, "lr": None, "bytes": {"dp+tp": 256}, "experts": [{"op": "experts"}]},
    {"step": 2, "loss": 0.5, "lr": 0.1, "held_out": 0.75},
]
SPEC = "shardc: 1\nmesh: {dp: 2}\n"


def tracked(
    name: str, extra: dict[str, Any], log: Path, *, begun: int = 0, goes_on: bool = False, state: str = "finished"
) -> list[runtime.Tracker]:
    """Run all moments of a run in a tracker."""
    mesh = SimpleNamespace(rank=0, activity=Activity(), layout=Mesh.of({"dp": 2}))
    engine = SimpleNamespace(extra=extra, mesh=mesh, step_count=2)
    trackers = runtime.make([name])
    callbacks = Callbacks(trackers)
    facts = {
        "model": "Net",
        "begun": begun,
        "goes_on": goes_on,
        "log": str(log),
        "spec": SPEC,
        "settings": {"clip": 1.0},
    }
    callbacks.call("run_begins", engine, facts)
    for line in LINES[begun:]:
        callbacks.call("logged", engine, line)
    callbacks.call("evaluated", engine, {"loss": 0.75, "accuracy": 0.25})
    callbacks.call("run_ends", engine, {"state": state, "step": 2, "losses": [1.0, 0.5]})
    engine.mesh.rank = 1
    callbacks.call("run_begins", engine, {})  # nothing: the first rank alone
    return trackers


def test_the_spec_names_them_all() -> None:
    (names, _) = get_args(Run.model_fields["track"].annotation)
    assert set(get_args(names)) == set(runtime.CLIENTS)
    folder = Path(runtime.__file__).parent
    for name in runtime.CLIENTS:
        code = (folder / f"{name}.py").read_text().rpartition("import runtime\n")[2]
        assert sum(bool(line.strip()) for line in code.splitlines()) <= 45


def board(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard(tmp_path: Path) -> None:
    extra: dict[str, Any] = {}
    tracked("tensorboard", extra, tmp_path)
    events = board(tmp_path)
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["loss"] == [(1, 1.0), (2, 0.5)]
    assert found["bytes/dp+tp"] == [(1, 256.0)]
    assert found["held_out"] == [(2, 0.75)]
    assert found["held_out_outputs/accuracy"] == [(2, 0.25)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "mesh: {dp: 2}" in texts["spec/text_summary"]
    assert "settings.clip: 1.0" in texts["config/text_summary"]
    assert '"state": "finished"' in texts["summary/text_summary"]
    time.sleep(1.1)  # it reads files in the order of their names, which have seconds
    tracked("tensorboard", extra, tmp_path, begun=1, goes_on=True)
    assert [e.step for e in board(tmp_path).Scalars("loss")] == [1, 2], "steps after the checkpoint are taken again"


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    extra: dict[str, Any] = {}
    tracked("mlflow", extra, tmp_path, state="interrupted")
    client, id = mlflow.MlflowClient(), extra["trackers"]["mlflow"]
    run = client.get_run(id)
    assert run.info.status == "KILLED"
    assert run.data.params == {
        "model": "Net",
        "begun": "0",
        "goes_on": "False",
        "log": str(tmp_path),
        "settings.clip": "1.0",
    }
    assert [(m.step, m.value) for m in client.get_metric_history(id, "loss")] == [(1, 1.0), (2, 0.5)]
    assert [m.value for m in client.get_metric_history(id, "bytes/dp.tp")] == [256]
    tracked("mlflow", extra, tmp_path, begun=1, goes_on=True)
    assert extra["trackers"]["mlflow"] == id
    run = client.get_run(id)
    assert (run.info.status, run.data.tags["shardc.state"], run.data.tags["shardc.begins_at_step"]) == (
        "FINISHED",
        "finished",
        "1",
    )
    artifacts = Path(run.info.artifact_uri.removeprefix("file:"))
    assert json.loads((artifacts / "summary.json").read_text())["state"] == "finished"
    assert (artifacts / "spec.yaml").read_text() == SPEC
    tracked("mlflow", extra, tmp_path, begun=1)
    assert extra["trackers"]["mlflow"] != id, "a run that saves elsewhere is another one"


def test_long_values_do_not_stop_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#9210: a value that is too long for a parameter ended the run."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    extra: dict[str, Any] = {}
    tracked("mlflow", extra, tmp_path / ("long" * 4000))
    found = mlflow.MlflowClient().get_run(extra["trackers"]["mlflow"])
    assert found.info.status == "FINISHED"
    assert found.data.params["log"].startswith(str(tmp_path))
    assert found.data.metrics["loss"] == 0.5


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: meters)
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: tracers)
    yield reader, spans
    meters.shutdown()
    tracers.shutdown()


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_opentelemetry(tmp_path: Path, telemetry: tuple[Any, Any], state: str) -> None:
    reader, spans = telemetry
    extra: dict[str, Any] = {}
    tracked("opentelemetry", extra, tmp_path, state=state)
    metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    found = {m.name: m.data.data_points[0] for m in metrics}
    assert {n: found[n].value for n in ("shardc.step", "shardc.loss", "shardc.held_out", "shardc.bytes/dp.tp")} == {
        "shardc.step": 2,
        "shardc.loss": 0.5,
        "shardc.held_out": 0.75,
        "shardc.bytes/dp.tp": 256,
    }
    (span,) = spans.get_finished_spans()
    assert span.attributes["shardc.spec"] == SPEC
    assert span.attributes["shardc.settings.clip"] == "1.0"
    assert span.attributes["shardc.summary.state"] == state
    assert span.status.status_code.name == ("OK" if state == "finished" else "ERROR")
    id = extra["trackers"]["opentelemetry"]
    assert (
        found["shardc.loss"].attributes == {"shardc.run_id": id} == {"shardc.run_id": span.attributes["shardc.run_id"]}
    )
    tracked("opentelemetry", extra, tmp_path, begun=1, goes_on=True)
    assert spans.get_finished_spans()[1].attributes["shardc.run_id"] == id


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that `wandb sync` sends has the numbers; a run that goes on has the same id."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    extra: dict[str, Any] = {}
    tracked("wandb", extra, tmp_path)
    id = extra["trackers"]["wandb"]
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + 20  # a process of the client's writes it
    while b"finished" not in (data := file.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    for text in (b"mesh: {dp: 2}", b"held_out", b"0.75", b"bytes/dp+tp", b"finished"):
        assert text in data, text
    time.sleep(1.1)  # folders have seconds in their names
    tracked("wandb", extra, tmp_path, begun=1, goes_on=True)
    assert extra["trackers"]["wandb"] == id
    assert len([*tmp_path.glob(f"wandb/offline-run-*/run-{id}.wandb")]) == 2


class Failing(runtime.Tracker):
    fails: str

    def open(self, run: Any, id: str | None) -> str:
        return self._do("open")

    def log(self, numbers: Any, step: int) -> None:
        self._do("log")

    def close(self, summary: Any) -> None:
        self._do("close")

    def _do(self, work: str) -> str:
        self.done = [*getattr(self, "done", []), work]
        if work == self.fails:
            raise ConnectionError("no route to the host\nand more")
        return work


@pytest.mark.parametrize(
    ("fails", "done"),
    [
        ("open", ["open"]),
        ("log", ["open", "log", "log", "log", "close"]),
        ("close", ["open", "log", "log", "log", "close"]),
    ],
)
def test_a_tracker_that_fails_warns_once(
    fails: str, done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Failing.fails = fails
    monkeypatch.setattr(runtime, "make", lambda names: [Failing(name) for name in names])
    (tracker,) = tracked("wandb", {}, tmp_path)
    assert tracker.done == done  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "note: wandb fails, and the run goes on: ConnectionError: no route to the host\n"


def test_a_client_that_is_missing_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    of = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        # without the package, the folder that it wrote beside a script looks like one
        return SimpleNamespace(origin=None) if name == "wandb" else None if name == "mlflow" else of(name)

    monkeypatch.setattr(runtime, "find_spec", find_spec)
    with pytest.raises(ShardcError) as e:
        _settings(Run(), track=("wandb", "mlflow", "opentelemetry"))
    assert len(e.value.errors) == 3
    assert re.search(r"--track wandb: wandb is not installed\n  fix: pip install 'shardc\[track\]'", str(e.value))
    assert _settings(Run(), tensorboard=True, log="x").trackers == ("tensorboard",)
