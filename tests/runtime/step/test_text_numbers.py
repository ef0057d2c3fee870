"""Text where an optimizer or a schedule wants a number is named, with the user's line, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, StepLR

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x).square().mean()  # type: ignore[no-any-return]


BATCH = {"x": torch.ones(2, 4)}
PROGRAM = shardc.compile(Line(), BATCH, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
Make = Callable[[Any], Any]
TEXT: Any = "1e-3"


def step(optimizer: Make, scheduler: Make | None = None) -> None:
    def rank(mesh: Any) -> None:
        PROGRAM.engine(Line(), optimizer=optimizer, scheduler=scheduler, mesh=mesh).step(BATCH)

    loopback(PROGRAM.mesh, rank)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda ps: AdamW(ps, lr=TEXT), "AdamW is given lr='1e-3'"),
        (lambda ps: SGD(ps, TEXT), "SGD is given lr='1e-3'"),
        (lambda ps: Muon(ps, lr=TEXT), "Muon is given lr='1e-3'"),
        (lambda ps: AdamW(ps, betas=(TEXT, 0.9)), r"AdamW is given betas=\('1e-3', 0.9\)"),
        (lambda ps: SGD([{"params": [p for _, p in ps], "lr": TEXT}]), "parameter group 0: SGD is given lr='1e-3'"),
    ],
)
def test_of_an_optimizer(make: Make, said: str) -> None:
    with pytest.raises(ShardcError, match=said) as error:
        step(make)
    assert "float('1e-3')" in error.value.fix
    assert "group 0" in said or "test_text_numbers.py:" in error.value.where


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: LinearLR(o, TEXT), "LinearLR is given start_factor='1e-3'"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=TEXT), "OneCycleLR is given total_steps='1e-3'"),
        (lambda o: ExponentialLR(o, TEXT), "ExponentialLR is given gamma='1e-3'"),  # torch: in the first step
        (lambda o: StepLR(o, TEXT), "StepLR is given step_size='1e-3'"),
    ],
)
def test_of_a_schedule(make: Make, said: str) -> None:
    with pytest.raises(ShardcError, match=said):
        step(SGD, make)


def test_other_mistakes_and_words_stay_what_they_are() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        step(lambda ps: SGD(ps, rate=0.1))  # type: ignore[call-arg]
    step(SGD, lambda o: OneCycleLR(o, 0.1, total_steps=3, anneal_strategy="linear"))
