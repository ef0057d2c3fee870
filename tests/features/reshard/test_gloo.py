"""Real processes: another plan in the middle of training, and weights for a program that scores, over gloo."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

import shardc
from shardc.runtime import launch
from tests import warm
from tests.features.reshard.test_pairs import adamw, batch, model

SPECS = {
    "zero": {"mesh": {"dp": 2}, "data": {"zero": 3}},
    "tp": {"mesh": {"tp": 2}, "shard": {"*.gate_up": "column", "*.down": "row"}},
}


def work(rank: int, port: int, folder: str) -> None:
    """One rank of two: a step under each plan, and back; then scores."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    programs = {name: shardc.load(Path(folder) / name) for name in ("zero", "tp", "score")}
    engine = programs["zero"].engine(model(), adamw)
    for name in ("zero", "tp", "zero"):
        engine = engine.to(programs[name]) if engine.step_count else engine
        engine.step(batch(engine.step_count))
    run = programs["score"].forward(model())
    engine.weights_to(run)
    found = {"scores": run.score(batch(), gather=True), **engine.full_state_dict()}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    engine.close()


def _positional(rank: int, run: functools.partial[None]) -> None:
    run(rank)


def test_real_processes(tmp_path: Path) -> None:
    for name, spec in SPECS.items():
        shardc.compile(model(), batch(), {"shardc": 1, **spec}).save(tmp_path / name)
    shardc.compile(model(), batch(), {"shardc": 1, **SPECS["tp"]}, forward="score").save(tmp_path / "score")
    warm.ranks(_positional, functools.partial(work, port=launch.free_port(), folder=str(tmp_path)), world=2)
    found, plain = torch.load(tmp_path / "found.pt"), model()
    optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    for step in range(3):
        optimizer.zero_grad()
        plain(**batch(step)).backward()
        optimizer.step()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(found[name], x)
    expected = float(plain(**batch()).detach())
    assert abs(float(-found["scores"].mean()) - expected) < 1e-5
