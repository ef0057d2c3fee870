"""A step that was recorded once and is started again, against the same step op by op: bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardc
from shardc.errors import ShardcError
from shardc.runtime.step import step_graph
from tests import zoo
from tests.runtime.step.recorded_ops import RecordedOps

STEPS = 5


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedOps]:
    made: list[RecordedOps] = []

    def make() -> RecordedOps:
        made.append(RecordedOps())
        return made[-1]

    monkeypatch.setattr(step_graph, "graphs_of", lambda device: make)
    return made


class Normed(nn.Module):
    """Buffers that each step changes, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.up(x)).relu(), 0.25, self.training)
        return nn.functional.cross_entropy(self.down(hidden), y, ignore_index=-100)


def normed(step: int, rows: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    y = torch.randint(0, 4, (rows,), generator=draw)
    y[: step % 3] = -100  # a mean over another number of rows
    return {"x": torch.randn(rows, 8, generator=draw), "y": y}


SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"batch": {"microbatches": 2}, "batch_norm": "local"},
    "zero 1": {"data": {"zero": 1}},
    "zero 2, bfloat16": {"data": {"zero": 2}, "precision": {"compute": "bfloat16"}},
    "zero 3, recompute": {"data": {"zero": 3, "bucket_mb": 0.001}, "checkpoint": [{"match": "up"}]},
    "float16": {"precision": {"compute": "float16", "loss_scale": "dynamic"}},
}
Look = Callable[[Any, int], None]


def trained(spec: dict[str, Any], graphs: bool, look: Look = lambda engine, step: None, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Normed()
    program = shardc.compile(
        model, normed(0), {"shardc": 1, "mesh": {"dp": 1}, "execution": {"graphs": graphs}, **spec}, prove=False
    )
    torch.manual_seed(1)
    engine = program.engine(Normed(), lambda ps: torch.optim.AdamW(ps, lr=1e-2), **options)
    found: list[Any] = []
    for step in range(STEPS):
        look(engine, step)
        loss = engine.step(normed(step))
        found += [loss, engine.grad_norm, *(p.grad.clone() for p in engine.params.values() if p.grad is not None)]
    found += [p.detach().clone() for p in engine.params.values()]
    return found + [b.clone() for b in engine.buffers.values()]


def alike(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is y is None) or torch.equal(x, y)


@pytest.mark.parametrize("name", SPECS)
def test_equal_to_op_by_op(name: str, graphs: list[RecordedOps]) -> None:
    options = {"clip_norm": 0.1} if name == "plain" else {}
    expected = trained(SPECS[name], False, **options)
    assert not graphs
    alike(trained(SPECS[name], True, **options), expected)
    assert [g.replays for g in graphs] == [STEPS - step_graph.WARM]


def test_what_a_user_does_between_steps(graphs: list[RecordedOps]) -> None:
    """Another batch size, an evaluation, weights that are written to."""

    def look(engine: Any, step: int) -> None:
        if step == 3:
            engine.evaluate(normed(7))
            engine.step(normed(9, rows=6))
            engine.buffers["norm_running_mean"].add_(0.5)
            with torch.no_grad():
                next(iter(engine.params.values())).mul_(0.5)

    expected = trained({}, False, look)
    alike(trained({}, True, look), expected)
    assert [g.replays for g in graphs] == [STEPS - step_graph.WARM]


def test_sizes_that_come_in_turns(graphs: list[RecordedOps], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are recorded, the third runs op by op, until one of the two is not used any more."""
    monkeypatch.setattr(step_graph, "KEPT", 2)
    monkeypatch.setattr(step_graph, "UNUSED", 7)

    def look(engine: Any, step: int) -> None:
        for rows in (6, 7) if step < STEPS - 1 else (7,) * 7:
            engine.step(normed(step + 10, rows))

    alike(trained({}, True, look), trained({}, False, look))
    assert len(graphs) == 3
    assert [g.replays > 0 for g in graphs] == [True] * 3


def test_what_looks_at_ops_sees_them(graphs: list[RecordedOps]) -> None:
    seen = []

    def look(engine: Any, step: int) -> None:
        if step == STEPS - 1:
            with torch.profiler.profile() as profile:
                engine.step(normed(step))
            seen.extend(e.key for e in profile.key_averages())

    alike(trained({}, True, look), trained({}, False, look))
    assert "aten::linear" in seen
    assert [g.replays for g in graphs] == [STEPS - step_graph.WARM]


def test_who_looks_in_another_thread_is_not_asked(graphs: list[RecordedOps]) -> None:
    """torch's own flag of modes is one for all threads, and stays on where they end in another order."""
    mode = TorchDispatchMode()
    begun, done = threading.Event(), threading.Event()

    def looks() -> None:
        with mode:
            begun.set()
            done.wait()

    thread = threading.Thread(target=looks)
    thread.start()
    begun.wait()
    try:
        trained({}, True)
    finally:
        done.set()
        thread.join()
    assert [g.replays for g in graphs] == [STEPS - step_graph.WARM]


def test_of_a_language_model(graphs: list[RecordedOps]) -> None:
    found = []
    for recorded in (False, True):
        model, batch = zoo.gpt(dropout=0.1)
        program = shardc.compile(
            model, batch, {"shardc": 1, "mesh": {"dp": 1}, "execution": {"graphs": recorded}}, prove=False
        )
        engine = program.engine(model, lambda ps: torch.optim.SGD(ps, lr=0.1))
        found.append([engine.step(batch) for _ in range(STEPS)])
    alike(*found)
    assert len(graphs) == 1


def test_there_are_none_on_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    alike(trained({}, True), trained({}, False))
    assert (
        "execution: {graphs: true}: a device of kind cpu has no CUDA graphs; steps run op by op"
        in capfd.readouterr().err
    )
    with pytest.raises(ShardcError, match="a device of kind cpu has no CUDA graphs"):
        trained({"strict": True}, True)


def test_what_cannot_be_recorded_runs_op_by_op(
    graphs: list[RecordedOps], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(self: RecordedOps) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(RecordedOps, "recording", fails)
    alike(trained({}, True), trained({}, False))
    assert "CUDA cannot record this step (operation not permitted when stream is capturing)" in capfd.readouterr().err
