"""Checkpoints of another run stay: a new engine or module neither joins nor replaces what it has not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state.checkpoint_folder import SavingError

torch.manual_seed(0)
MODEL, BATCH = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
PROGRAM = shardc.compile(MODEL, BATCH, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda output, _: output.square().mean())


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*"))


@pytest.mark.parametrize("kind", ["engine", "module"])
def test_what_another_run_saved_is_replaced_only_when_asked(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def made(mesh: LoopbackMesh) -> tuple[Any, Any]:
        if kind == "engine":
            engine = PROGRAM.engine(MODEL, mesh=mesh)
            return engine, lambda: engine.step(BATCH)
        module = PROGRAM.module(MODEL, mesh=mesh)
        return module, lambda: module(module.local(BATCH)).backward()

    def earlier(mesh: LoopbackMesh) -> None:
        run, step = made(mesh)
        for _ in range(3):
            step()
            run.save(folder, keep=2)  # of its own: as often as it likes

    loopback(PROGRAM.mesh, earlier)
    assert names(folder) == ["step-000002", "step-000003"]

    def forgets(mesh: LoopbackMesh) -> None:
        run, step = made(mesh)
        step()
        with pytest.raises(SavingError, match=r"neither saved nor loaded \(step-000003, step-000002\)(.|\n)*overwrite"):
            run.save(folder)

    loopback(PROGRAM.mesh, forgets)
    assert names(folder) == ["step-000002", "step-000003"]

    def goes_on(mesh: LoopbackMesh) -> None:
        first, one = made(mesh)
        first.load(folder)
        second, other = made(mesh)
        second.load(folder / "step-000003")  # the same run, started twice
        one()
        first.save(folder)
        other()
        with pytest.raises(SavingError, match=r"neither saved nor loaded \(step-000004\)"):
            second.save(folder)
        second.save(folder, overwrite=True)
        other()
        second.save(folder)

    loopback(PROGRAM.mesh, goes_on)
    assert names(folder) == ["step-000004.2", "step-000005"]
