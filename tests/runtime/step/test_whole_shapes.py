"""Optimizers whose function looks at the shapes of parameters: those of the whole ones count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests import equality


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net().double(), {"x": torch.randn(8, 16).double(), "y": torch.randn(8, 8).double()}


def by_fan_in(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 1 / p.shape[-1]} for _, p in params], lr=1.0, momentum=0.9)


def by_size(params: Any) -> torch.optim.Optimizer:
    """The number of groups depends on it."""
    large = [p for _, p in params if p.numel() >= 256]
    small = [p for _, p in params if p.numel() < 256]
    groups = [{"params": ps, "lr": lr} for ps, lr in ((large, 0.1), (small, 0.02)) if ps]
    return torch.optim.Adagrad(groups, initial_accumulator_value=0.1)


def two(params: Any) -> list[torch.optim.Optimizer]:
    weights = [{"params": [(n, p)], "lr": 1 / p.shape[0]} for n, p in params if n.endswith("weight")]
    rest = [(n, p) for n, p in params if n.endswith("bias")]
    return [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]


TP = {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}


@pytest.mark.parametrize("make", [by_fan_in, by_size, two])
@pytest.mark.parametrize(
    "spec",
    [TP, {**TP, "mesh": {"dp": 2, "tp": 2}, "data": {"zero": 3}}, {**TP, "mesh": {"tp": 3}, "uneven": "pad"}],
    ids=["tp", "zero 3", "padded"],
)
def test_groups_are_those_of_one_device(make: Callable[[Any], Any], spec: dict[str, Any]) -> None:
    one = equality.reference(net)
    alone, program = (one.compile({"shardc": 1, **s}) for s in ({"mesh": {"dp": 1}}, spec))
    want, found = (shardc.simulate(p, one.model, one.batch, steps=3, optimizer=make) for p in (alone, program))
    torch.testing.assert_close(found.state, want.state, rtol=1e-12, atol=1e-14)


def test_a_function_that_wants_numbers_gets_a_ranks_own() -> None:
    """It is not asked of parameters without data; what it does is its own."""

    def by_norm(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [p], "lr": 0.01 / (1 + float(p.detach().norm()))} for _, p in params], lr=1.0
        )

    one = equality.reference(net)
    program = one.compile({"shardc": 1, **TP})
    assert shardc.simulate(program, one.model, one.batch, steps=1, optimizer=by_norm).loss.isfinite()
