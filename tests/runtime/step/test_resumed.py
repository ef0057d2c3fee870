"""What a checkpoint replaces of an engine's settings is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step import resumed
from shardc.runtime.step.schedulers import Schedulers

TODAY = "learning rates of today: load(folder, new_schedule=True), run: --new-schedule"
Schedule = Callable[[Any], Any] | None


def warmed_up(length: int) -> Schedule:
    def make(optimizer: Any) -> SequentialLR:
        parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, T_max=length)]
        return SequentialLR(optimizer, parts, milestones=[2])

    return make


@pytest.mark.parametrize(
    ("then", "now", "seeds", "told"),
    [
        ((1e-2, None), (1e-4, None), (0, 0), ["lr: the checkpoint's 0.01 is used, not 0.0001", TODAY]),
        ((1e-2, None), (1e-2, None), (0, 3), ["seed: the checkpoint's 0 is used, not 3"]),
        (
            (1e-2, lambda o: CosineAnnealingLR(o, T_max=10)),
            (1e-3, lambda o: CosineAnnealingLR(o, T_max=100)),
            (0, 0),
            [
                "initial_lr: the checkpoint's 0.01 is used, not 0.001",
                "T_max of CosineAnnealingLR: the checkpoint's 10 is used, not 100",
                TODAY,
            ],
        ),
        (
            (1e-2, warmed_up(10)),
            (1e-2, warmed_up(20)),
            (0, 0),
            ["T_max of CosineAnnealingLR, number 1 of SequentialLR: the checkpoint's 10 is used, not 20", TODAY],
        ),
        (
            (1e-2, None),
            (1e-2, lambda o: StepLR(o, 1)),
            (0, 0),
            [
                "scheduler: the checkpoint has none, so this one begins at step 0; to begin at the checkpoint's:"
                " load(folder, new_schedule=True), run: --new-schedule"
            ],
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


def test_another_clip_norm_than_the_checkpoints_is_a_note(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, loss=lambda o, _: o.square().mean())
    loopback(program.mesh, lambda mesh: program.engine(model, clip_norm=1.0, mesh=mesh).save(tmp_path))
    for now, note in ((1.0, ""), (0.5, "note: clip_norm: today's 0.5 is used; the checkpoint was trained with 1.0\n")):
        capfd.readouterr()
        loopback(program.mesh, lambda mesh, now=now: program.engine(model, clip_norm=now, mesh=mesh).load(tmp_path))
        assert capfd.readouterr().err == note


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w(x).square().mean()  # type: ignore[no-any-return]


class Noisy(Line):
    """Another forward with the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.w(x), 0.5).square().mean()


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize(
    ("now", "rows", "mesh", "told"),
    [
        (Line, 8, {"dp": 2}, []),
        (Line, 8, {"tp": 2}, []),
        (Line, 4, {"dp": 2}, ["batch: the checkpoint was trained with x f32[8, 4], and this run has x f32[4, 4]"]),
        (Noisy, 8, {"dp": 2}, ["forward or loss differ from those that wrote the checkpoint: 1 more dropout(p=0.5"]),
    ],
)
def test_what_a_checkpoint_cannot_replace_is_told(
    now: type[nn.Module],
    rows: int,
    mesh: dict[str, int],
    told: list[str],
    module: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def saved(kind: type[nn.Module], rows: int, mesh: dict[str, int], call: str) -> None:
        model, batch = kind(), {"x": torch.ones(rows, 4)}
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": mesh}, prove=False)

        def rank(on: Any) -> None:
            made = (program.module if module else program.engine)(model, mesh=on)
            getattr(made, call)(tmp_path / "checkpoint")

        loopback(program.mesh, rank)

    saved(Line, 8, {"dp": 2}, "save")
    capfd.readouterr()
    saved(now, rows, mesh, "load")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(told), lines
    assert all(line.startswith(f"note: {start}") for line, start in zip(lines, told, strict=True)), lines


def one_cycle(optimizer: Any, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, 1e-2, total_steps=steps)


def chained(optimizer: Any, steps: int) -> ChainedScheduler:
    return ChainedScheduler([one_cycle(optimizer, steps)], optimizer)


def in_sequence(optimizer: Any, steps: int) -> SequentialLR:
    """One step of warming up, then the cycle."""
    parts = [LinearLR(optimizer, total_iters=1), one_cycle(optimizer, steps - 1)]
    return SequentialLR(optimizer, parts, milestones=[1])


def first_in_sequence(optimizer: Any, steps: int) -> SequentialLR:
    """It would have to go on until the next begins."""
    parts = [one_cycle(optimizer, steps), LinearLR(optimizer, total_iters=1)]
    return SequentialLR(optimizer, parts, milestones=[9])


@pytest.mark.parametrize("schedule", [one_cycle, chained, in_sequence, first_in_sequence])
def test_a_schedule_that_ends_before_the_run(schedule: Callable[[Any, int], Any]) -> None:
    """It is an error before the step that it has no rate for; a run asks before its first step."""
    batch = {"x": torch.ones(2, 4)}
    program = shardc.compile(Line(), batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)

    def train(mesh: Any) -> None:
        engine = program.engine(Line(), optimizer=torch.optim.AdamW, scheduler=lambda o: schedule(o, 3), mesh=mesh)
        engine.check_schedule(3)
        with pytest.raises(ShardcError, match=r"is made for \d steps, 0 of which are done, and 4 more are to come"):
            engine.check_schedule(4)
        for _ in range(3):
            engine.step(batch)
        before = engine.full_state_dict()
        with pytest.raises(ShardcError, match=r"and another one is to come\n  fix: .*total_steps=\d"):
            engine.step(batch)
        assert engine.step_count == 3
        assert all(torch.equal(x, before[n]) for n, x in engine.full_state_dict().items())

    loopback(program.mesh, train)


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        one_cycle,
        chained,
        in_sequence,
        lambda o, n: CosineAnnealingLR(o, n),
        lambda o, n: LambdaLR(o, lambda step: 1 - step / (2 * n)),
    ],
)
def test_a_new_schedule_stands_where_training_does(
    schedule: Callable[[Any, int], Any] | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rates are those of a run that had it from the first step; the optimizer's state is the checkpoint's."""
    batch = {"x": torch.ones(2, 4)}
    program = shardc.compile(Line(), batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)

    def train(mesh: Any) -> None:
        def made(lr: float, length: int) -> Any:
            of = (lambda o: schedule(o, length)) if schedule is not None else None
            return program.engine(Line(), optimizer=lambda ps: torch.optim.AdamW(ps, lr=lr), scheduler=of, mesh=mesh)

        def setting(engine: Any) -> Any:
            return [{k: group[k] for k in ("lr", "betas")} for group in engine.optimizer.param_groups]

        old, longer, resumed = made(1e-2, 4), made(3e-3, 9), made(3e-3, 9)
        for _ in range(3):
            old.step(batch)
            longer.step(batch)
        old.save(tmp_path / "checkpoint")
        with torch.no_grad():  # what it replaces of its own is not the checkpoint's
            resumed.optimizer.param_groups[0]["lr"] = 0.5
        state = {k: x.clone() for k, x in next(iter(old.optimizer.state.values())).items()}
        resumed.step(batch)  # also where the engine has trained already
        resumed.load(tmp_path / "checkpoint", new_schedule=True)
        torch.testing.assert_close(next(iter(resumed.optimizer.state.values())), state)
        for _ in range(4):
            assert setting(resumed) == setting(longer)
            assert setting(resumed) != setting(old)
            resumed.step(batch)
            longer.step(batch)
        resumed.save(tmp_path / "again")
        again = made(3e-3, 9)
        again.load(tmp_path / "again")
        assert setting(again) == setting(longer)
        if schedule in (one_cycle, chained, in_sequence):
            short = made(1e-2, 2)
            with pytest.raises(ShardcError, match=r"is made for \d steps, and 7 are done"):
                short.load(tmp_path / "again", new_schedule=True)
            short.step(batch)  # nothing has changed
            assert short.step_count == 1

    loopback(program.mesh, train)
    assert capfd.readouterr().err == ""


def test_settings_that_are_numbers_of_numpy(tmp_path: Path) -> None:
    """They train, so they have to be saved, too."""
    batch = {"x": torch.ones(2, 4)}
    program = shardc.compile(Line(), batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)

    def train(mesh: Any) -> None:
        rate, decay = np.float32(0.5), np.float64(0.25)
        engine = program.engine(Line(), lambda ps: torch.optim.AdamW(ps, lr=rate, weight_decay=decay), mesh=mesh)
        engine.step(batch)
        engine.save(tmp_path)
        other = program.engine(Line(), mesh=mesh)
        other.load(tmp_path)
        assert [other.optimizer.param_groups[0][k] for k in ("lr", "weight_decay")] == [0.5, 0.25]

    loopback(program.mesh, train)


@pytest.mark.parametrize(("cycles", "told"), [(False, ["betas", "learning rates of today"]), (True, [])])
def test_betas_are_the_optimizers_unless_a_schedule_moves_them(cycles: bool, told: list[str]) -> None:
    def of(beta: float) -> resumed.Settings:
        optimizer = torch.optim.AdamW([torch.zeros(1)], betas=(beta, 0.9))
        made: Any = OneCycleLR(optimizer, 0.1, total_steps=9) if cycles else CosineAnnealingLR(optimizer, T_max=9)
        return resumed.settings(optimizer, Schedulers((SequentialLR(optimizer, [made], []),), None))

    assert [line.partition(":")[0] for line in resumed.replaced(of(0.5), of(0.9))] == told
