"""Lines of a plain loop that were left in beside `engine.step`, and those that belong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from tests.runtime.step.small import BATCH, NET, of, on_engines

PROGRAM = of({"mesh": {"dp": 2}})


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def two(params: Any) -> list[torch.optim.Optimizer]:
    first, *others = list(params)
    return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others, lr=0.1)]


def scheduled(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


def scheduled_each(optimizers: list[Any]) -> Any:
    return [StepLR(o, 1, 0.5) for o in optimizers]


MISTAKES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "the optimizer": ({"optimizer": adam}, lambda e: e.optimizer.step(), r"AdamW.step\(\): the engine steps its"),
    "with a schedule": (
        {"optimizer": adam, "scheduler": scheduled},
        lambda e: e.optimizer.step(),
        r"AdamW.step\(\): the engine steps its",
    ),
    "one of a list": ({"optimizer": two}, lambda e: e.optimizer.members[0].step(), r"SGD.step\(\): the engine steps"),
    "the scheduler": (
        {"optimizer": adam, "scheduler": scheduled},
        lambda e: (e.scheduler.step(), e.step(BATCH)),
        r"StepLR.step\(\): the loop steps it, and the engine also steps it(.|\n)*make it from engine.optimizer",
    ),
    "one of several schedulers": (
        {"optimizer": two, "scheduler": scheduled_each},
        lambda e: (e.scheduler[1].step(), e.step(BATCH)),
        r"StepLR.step\(\): the loop steps it, and the engine also steps it",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_second_update_is_an_error(name: str) -> None:
    options, mistake, said = MISTAKES[name]

    @on_engines(PROGRAM, NET, **options)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        engine.step(BATCH)
        with pytest.raises(ShardcError, match=said):
            mistake(engine)


OWN: dict[str, Callable[[Any], Any]] = {
    "a schedule by epoch": lambda o: LambdaLR(o, lambda epoch: 0.5**epoch),
    "a measure": lambda o: ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("own", OWN)
def test_a_scheduler_of_the_users_own_is_stepped_by_him(own: str) -> None:
    def work(mesh: LoopbackMesh) -> float:
        engine = Engine(PROGRAM, NET, adam, mesh=mesh)
        scheduler = OWN[own](engine.optimizer)
        for epoch in range(3):
            engine.step(BATCH)
            scheduler.step(*([float(epoch)] if own == "a measure" else []))
        engine.step(BATCH)
        assert engine.lr is not None
        return engine.lr

    assert set(loopback(PROGRAM.mesh, work)) == {0.1 * 0.5**3 if own == "a schedule by epoch" else 0.1 * 0.1**2}


def test_a_schedule_that_got_another_state_goes_on_from_it() -> None:
    def work(mesh: LoopbackMesh) -> list[float]:
        engine = Engine(PROGRAM, NET, adam, mesh=mesh, scheduler=scheduled)
        engine.step(BATCH)
        state = engine.scheduler.state_dict()
        rates = []
        for _ in range(3):
            engine.step(BATCH)
            assert engine.lr is not None
            rates.append(engine.lr)
        engine.scheduler.load_state_dict(state)
        engine.backward(BATCH)
        engine.update()
        return rates

    assert loopback(PROGRAM.mesh, work)[0] == [0.025, 0.0125, 0.00625]
