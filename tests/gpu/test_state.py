"""Weights and checkpoints of a device are those of the CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.step.engine import Engine


class Net(nn.Module):
    """Weights of every common kind of initialisation, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(96, 32), nn.Linear(32, 2048), nn.BatchNorm1d(2048)
        self.down = nn.Linear(2048, 8)
        nn.init.trunc_normal_(self.table.weight, std=0.02)
        nn.init.xavier_normal_(self.up.weight)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.norm(self.up(self.table(ids)).relu())), y)


BATCH = {"ids": torch.arange(16) * 5, "y": torch.linspace(-1, 1, 128).view(16, 8)}


@pytest.fixture(scope="module")
def program() -> Program:
    return shardc.compile(Net(), BATCH, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def tensors(engine: Engine) -> dict[str, Tensor]:
    found = {**engine.params, **engine.buffers}
    for name, p in engine.params.items():
        state = engine.optimizer.state.get(p, {}) if engine.optimizer is not None else {}
        found |= {f"{name}.{key}": x for key, x in state.items() if isinstance(x, Tensor)}
    return {n: x.detach().cpu().clone() for n, x in found.items()}


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def test_initial_weights(program: Program, device: str) -> None:
    """Computed on the device, for a function that builds the model."""
    expected = tensors(program.engine(Net, adamw, mesh=TorchMesh(program.mesh, device="cpu")))
    engine = program.engine(Net, adamw, mesh=TorchMesh(program.mesh, device=device))
    assert {p.device.type for p in engine.params.values()} == {device}
    found = tensors(engine)
    torch.testing.assert_close(found.pop("down.weight"), expected.pop("down.weight"))  # of a library's QR
    alike(found, expected)


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
def test_checkpoints(program: Program, device: str, wait: bool, tmp_path: Path) -> None:
    def engine(where: str) -> Engine:
        return program.engine(Net(), adamw, mesh=TorchMesh(program.mesh, device=where))

    first = engine(device)
    first.step(BATCH)
    first.save(tmp_path, wait=wait)
    saved = tensors(first)
    after = first.step(BATCH)  # beside what is being written
    first.finish_save()
    for where in {device, "cpu"}:
        other = engine(where)
        other.load(tmp_path)
        alike(tensors(other), saved)
        torch.testing.assert_close(other.step(BATCH).cpu(), after.cpu(), rtol=1e-4, atol=1e-5)
    whole = first.full_state_dict()
    assert {x.device.type for x in whole.values()} == {"cpu"}
