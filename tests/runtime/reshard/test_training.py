"""Training that goes on under another plan, weights for other programs, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardc
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.reshard.between import Reshard
from tests.runtime.matrices.optimizers import SOAP
from tests.runtime.reshard.test_pairs import ROWS, adamw, batch, model, program

torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(5) * (i + 1) + i) % 11
        return {"ids": ids[:4], "labels": ids[1:]}


def scheduled(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def steps(engine: Any, number: int) -> list[float]:
    loader, losses = engine.loader(Rows(), seed=5), list[float]()
    while len(losses) < number:
        for part in loader:
            losses.append(float(engine.step(part, local=True)))
            if len(losses) == number:
                break
    return losses


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("dp=8 zero 3", "tp=2 dp=4 zero 1"),
        ("tp=2 dp=4 zero 1", "pp=2 dp=2 tp=2"),
        ("pp=2 dp=2 tp=2", "dp=4 tp=2 zero 1 bf16"),
        ("dp=4 tp=2 zero 1 bf16", "dp=2 ep=4 zero 2"),
    ],
)
def test_training_goes_on_as_from_a_checkpoint(a: str, b: str, tmp_path: Path) -> None:
    """To the bit: losses, weights, learning rates, the order of the data."""
    old, new, source = program(a), program(b), model()
    options: dict[str, Any] = {"optimizer": adamw, "scheduler": scheduled, "seed": 3, "clip_norm": 1.0}

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, mesh=mesh, **options)
        steps(engine, 4)
        engine.save(tmp_path)
        loaded = new.engine(source, mesh=mesh.seen_as(new.mesh), **options)
        loaded.load(tmp_path)
        moved = engine.to(new)
        assert (moved.step_count, moved.lr, moved.rng.seed) == (loaded.step_count, loaded.lr, 3) == (4, engine.lr, 3)
        assert steps(moved, 4) == steps(loaded, 4)
        one, other = moved.full_state_dict(), loaded.full_state_dict()
        assert all(torch.equal(x, other[n]) for n, x in one.items())

    loopback(old.mesh, work)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


PAIR = {"x": torch.linspace(-1, 1, 64).view(8, 8), "y": torch.linspace(1, -1, 64).view(8, 8).sin()}


@functools.cache
def small(zero: int = 0, matrices: str = "", **mesh: int) -> Program:
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh, "data": {"zero": zero}}
    spec |= {"shard": {"up": "column", "down": "row"}} if "tp" in mesh else {}
    spec |= {"optimizer": {"matrices": matrices}} if matrices else {}
    return shardc.compile(two(), PAIR, spec)


def two() -> nn.Module:
    torch.manual_seed(0)
    return Two()


def test_matrices_with_owners(tmp_path: Path) -> None:
    """Their state is whole, nested, and on other ranks under the other plan."""
    old, new, source = small(zero=1, matrices="whole", dp=4), small(matrices="whole", dp=2, tp=2), two()

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, SOAP, mesh=mesh)
        for _ in range(3):
            engine.step(PAIR)
        moved = engine.to(new)
        back = moved.to(old)
        losses = [[float(e.step(PAIR)) for _ in range(2)] for e in (engine, moved, back)]
        assert losses[0] == losses[2]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        one, other = engine.full_state_dict(), back.full_state_dict()
        assert all(torch.equal(x, other[n]) for n, x in one.items())

    loopback(old.mesh, work)


def test_weights_for_a_forward_only_program_and_back() -> None:
    """Again and again, with one plan of messages; what the optimizer has stays."""
    old = program("dp=8 zero 3")
    spec = {"shardc": 1, "mesh": {"dp": 4, "tp": 2}, "shard": {"*.gate_up": "column", "*.down": "row"}}
    scoring, source = shardc.compile(model(), batch(), spec, forward="score"), model()
    scores: list[float] = []
    alone = shardc.compile(model(), batch(), {"shardc": 1, "mesh": {"dp": 1}})
    for number in (1, 2):
        trained = shardc.simulate(alone, source, batch(), steps=number, optimizer=adamw).state
        one = shardc.compile(model(), batch(), {"shardc": 1, "mesh": {"dp": 1}}, forward="score")
        scores.append(float(one.forward(source, weights=trained).score(batch(1)).sum()))

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, adamw, mesh=mesh)
        run = scoring.forward(source, mesh=mesh.seen_as(scoring.mesh))
        made = []
        for _ in range(2):
            engine.step(batch())
            made.append(engine.weights_to(run))
            weights = engine.full_state_dict()
            assert all(torch.equal(x, weights[n]) for n, x in run.engine.full_state_dict().items() if n != "seen")
            assert float(run.score(batch(1), gather=True).sum()) == pytest.approx(scores[len(made) - 1], rel=1e-5)
        assert made[0] is made[1]
        other = old.engine(source, adamw, mesh=mesh, seed=1)
        run.weights_to(other)
        one, copy = engine.full_state_dict(), other.full_state_dict()
        assert all(torch.equal(x, copy[n]) for n, x in one.items() if n != "seen")
        assert other.step_count == 0

    loopback(old.mesh, work)


@pytest.mark.parametrize("bucket", [64, 1000, 1 << 20])
def test_rounds_are_bounded(bucket: int) -> None:
    """No rank sends more than two buckets at once, and each element still arrives."""
    old, new, source = small(zero=3, dp=4), small(tp=4), two()

    def work(mesh: LoopbackMesh) -> tuple[list[int], int]:
        engine = old.engine(source, None, mesh=mesh)
        other = new.engine(lambda: Two(), None, mesh=mesh.seen_as(new.mesh), seed=7)
        first = len(mesh.records)
        move = Reshard(engine, other, bucket=bucket)
        move(engine, other, {})
        one, copy = engine.full_state_dict(), other.full_state_dict()
        assert all(torch.equal(x, copy[n]) for n, x in one.items())
        sent = [r.bytes for r in mesh.records[first:] if r.tag == "reshard"]
        assert (sum(sent), len(sent)) == (sum(move.sent), move.rounds)
        return sent, sum(move.sent)

    results = loopback(old.mesh, work)
    assert max(n for sent, _ in results for n in sent) <= 2 * bucket
    assert len(results[0][0]) == -(-max(total for _, total in results) // bucket)


def test_what_cannot_go_is_refused() -> None:
    old, forward = small(dp=2), shardc.compile(two(), PAIR, {"shardc": 1, "mesh": {"dp": 2}}, forward=True)
    source, wide, tp = two(), small(dp=4), small(tp=2)
    another = shardc.compile(nn.Sequential(nn.Linear(8, 4)), PAIR["x"], {"shardc": 1, "mesh": {"dp": 2}}, loss=_mean)

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, mesh=mesh)
        engine.step(PAIR)
        with pytest.raises(ShardcError, match="dp=2 has 2 ranks, and dp=4 has 4"):
            engine.to(wide)
        with pytest.raises(ShardcError, match=r"(?s)forward-only.*weights_to"):
            engine.to(forward)
        with pytest.raises(ShardcError, match="no such option"):
            engine.to(tp, optimiser=None)
        with pytest.raises(ShardcError, match="is of another model"):
            engine.to(another)
        with pytest.raises(ShardcError, match="optimizer AdamW, not SGD"):
            engine.to(tp, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
        assert engine.to(tp).step_count == 1  # and the engine is as it was

    loopback(old.mesh, work)


def _mean(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()
