"""What a checkpoint replaces of an engine's settings is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback

Schedule = Callable[[Any], Any] | None


def warmed_up(length: int) -> Schedule:
    def make(optimizer: Any) -> SequentialLR:
        parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, T_max=length)]
        return SequentialLR(optimizer, parts, milestones=[2])

    return make


@pytest.mark.parametrize(
    ("then", "now", "seeds", "told"),
    [
        ((1e-2, None), (1e-4, None), (0, 0), ["lr: the checkpoint's 0.01 is used, not 0.0001"]),
        ((1e-2, None), (1e-2, None), (0, 3), ["seed: the checkpoint's 0 is used, not 3"]),
        (
            (1e-2, lambda o: CosineAnnealingLR(o, T_max=10)),
            (1e-3, lambda o: CosineAnnealingLR(o, T_max=100)),
            (0, 0),
            [
                "initial_lr: the checkpoint's 0.01 is used, not 0.001",
                "T_max of CosineAnnealingLR: the checkpoint's 10 is used, not 100",
            ],
        ),
        (
            (1e-2, warmed_up(10)),
            (1e-2, warmed_up(20)),
            (0, 0),
            ["T_max of CosineAnnealingLR, number 1 of SequentialLR: the checkpoint's 10 is used, not 20"],
        ),
        # a run that goes on with what it had
        ((1e-2, lambda o: StepLR(o, 1)), (1e-2, lambda o: StepLR(o, 1)), (0, 0), []),
        ((1e-2, warmed_up(10)), (1e-2, warmed_up(10)), (4, 4), []),
    ],
)
def test_what_a_checkpoint_replaces_is_told(
    then: tuple[float, Schedule],
    now: tuple[float, Schedule],
    seeds: tuple[int, int],
    told: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    program = shardc.compile(
        model, batch, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda output, _: output.square().mean()
    )

    def engine(mesh: Any, lr: float, scheduler: Schedule, seed: int) -> Any:
        return program.engine(
            model, optimizer=lambda ps: torch.optim.SGD(ps, lr=lr), scheduler=scheduler, seed=seed, mesh=mesh
        )

    def save(mesh: Any) -> None:
        first = engine(mesh, *then, seeds[0])
        for _ in range(3):
            first.step(batch)
        first.save(tmp_path / "checkpoint")

    loopback(program.mesh, save)
    capfd.readouterr()
    loopback(program.mesh, lambda mesh: engine(mesh, *now, seeds[1]).load(tmp_path / "checkpoint"))
    assert capfd.readouterr().err.splitlines() == [f"note: {line}" for line in told]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("chained", [False, True])
def test_a_schedule_that_ends_before_the_run(chained: bool) -> None:
    """It is an error before the step that it has no rate for; a run asks before its first step."""

    def schedule(optimizer: Any) -> Any:
        one = OneCycleLR(optimizer, 1e-2, total_steps=3)
        return ChainedScheduler([one], optimizer) if chained else one

    batch = {"x": torch.ones(2, 4)}
    program = shardc.compile(Line(), batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)

    def train(mesh: Any) -> None:
        engine = program.engine(Line(), optimizer=torch.optim.AdamW, scheduler=schedule, mesh=mesh)
        engine.check_schedule(3)
        with pytest.raises(ShardcError, match="is made for 3 steps, 0 of which are done, and 4 more are to come"):
            engine.check_schedule(4)
        for _ in range(3):
            engine.step(batch)
        before = engine.full_state_dict()
        with pytest.raises(
            ShardcError, match=r"3 of which are done, and another one is to come\n  fix: .*total_steps=4"
        ):
            engine.step(batch)
        assert engine.step_count == 3
        assert all(torch.equal(x, before[n]) for n, x in engine.full_state_dict().items())

    loopback(program.mesh, train)
