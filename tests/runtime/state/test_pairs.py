"""Saved on one mesh and setting, loaded on another: 72 ordered pairs. The state is the same bit for bit, told by saving
it again; and the next losses are those of the run that never stopped, on the same samples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import shardc
from shardc.api import Program
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state.checkpoint_folder import checkpoints_in, diff

torch.set_num_threads(1)
STEPS, MORE, WIDTH, ROWS = 3, 5, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = Experts()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, index, weights)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 12, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 6) / 3)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return shardc.nn.experts(x, index, weights, self.up, self.down, activation="silu")


class Model(nn.Module):
    """Tied embeddings, experts, dropout, and a buffer that every step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.seen.add_(1.0)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


TP = {"*.up": "column", "*.down": "row"}
EP = [{"match": "*.experts", "axis": "ep"}]
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "dp=4 zero 1": {"mesh": {"dp": 4}, "data": {"zero": 1}},
    "dp=2 zero 2 offload": {"mesh": {"dp": 2}, "data": {"zero": 2, "offload": {"optimizer": "cpu"}}},
    "tp=2": {"mesh": {"tp": 2}, "shard": TP},
    "dp=2 tp=2 zero 3, 2 microbatches": {
        "mesh": {"dp": 2, "tp": 2},
        "shard": TP,
        "data": {"zero": 3},
        "batch": {"microbatches": 2},
    },
    "dp=2 pp=2": {
        "mesh": {"dp": 2, "pp": 2},
        "pipeline": {"axis": "pp", "cut": ["layers.1"]},
        "batch": {"microbatches": 2},
    },
    "ep=2": {"mesh": {"ep": 2}, "experts": EP},
    "dp=2 ep=2 tp=2": {"mesh": {"dp": 2, "ep": 2, "tp": 2}, "shard": TP, "experts": EP, "data": {"zero": 1}},
    "bf16": {"mesh": {"dp": 2}, "data": {"zero": 1}, "precision": {"compute": "bfloat16"}},
}
PAIRS = [(a, b) for a in SETTINGS for b in SETTINGS if a != b]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3 * ROWS + 3

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(5) * (i + 1) + i) % 12
        return {"ids": ids[:4], "labels": ids[1:]}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


@functools.cache
def program(name: str) -> Program:
    ids = torch.zeros(ROWS, 4, dtype=torch.long)
    return shardc.compile(model(), {"ids": ids, "labels": ids}, {"shardc": 1, **SETTINGS[name]})


def run(name: str, load: Path | None, again: Path | None, steps: int, save: Path | None) -> list[float]:
    """The losses of so many steps, after what is loaded, and saved again at once; saved at the end."""
    p, source = program(name), model()

    def work(mesh: Any) -> list[float]:
        engine = p.engine(
            source,
            optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01),
            scheduler=lambda o: LambdaLR(o, lambda step: 0.9**step),
            mesh=mesh,
            seed=3,
        )
        loader = engine.loader(Rows(), seed=5)
        if load is not None:
            engine.load(load)
        if again is not None:
            engine.save(again)
        losses: list[float] = []
        while len(losses) < steps:
            for part in loader:
                losses.append(float(engine.step(part, local=True)))
                if len(losses) == steps:
                    break
        if save is not None:
            engine.save(save, wait=False)
            engine.close()
        return losses

    return loopback(p.mesh, work)[0]


@functools.cache
def saved(name: str, root: Path) -> tuple[Path, list[float]]:
    """A checkpoint after some steps, and the losses of the steps after it."""
    folder = root / name.replace(" ", "_")
    run(name, None, None, STEPS, folder)
    return folder, run(name, folder, None, MORE, None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_stopped_is_one_that_did_not(name: str, root: Path) -> None:
    assert run(name, None, None, STEPS + MORE, None)[STEPS:] == saved(name, root)[1]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_state_is_the_same_and_training_goes_on(a: str, b: str, root: Path, tmp_path: Path) -> None:
    folder, losses = saved(a, root)
    resumed = run(b, folder, tmp_path / "again", MORE, None)
    differences = {d.what for d in diff(*(checkpoints_in(at)[0].path for at in (folder, tmp_path / "again")))}
    assert differences <= {"mesh", "program"}
    assert resumed == pytest.approx(losses, rel=0.05 if "bf16" in (a, b) else 1e-9)
