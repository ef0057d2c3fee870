"""Stepping in blocks is stepping, for every optimizer of torch that updates elements by themselves; others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardc.runtime.blockwise import Blockwise

ELEMENTWISE = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "plain SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
}


def trained(make, blocks: bool):  # type: ignore[no-untyped-def]
    """Parameters and optimizer after steps, one of them without one of the gradients. Sizes: no multiple of a block, less than one, empty."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((7, 9), (3,), (0, 4), ())]
    optimizer = make(params)
    way = Blockwise(optimizer, nbytes=10 * 8) if blocks else optimizer
    for step in range(4):
        for p in params:
            p.grad = torch.randn_like(p) if step != 2 or p.dim() < 2 else None
        way.step()
    return params, optimizer


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_blocks_are_the_whole(name: str) -> None:
    assert Blockwise.of(ELEMENTWISE[name]([nn.Parameter(torch.randn(3, 5))])) is not None
    ours, mine = trained(ELEMENTWISE[name], True)
    theirs, other = trained(ELEMENTWISE[name], False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    a, b = mine.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=1e-14, atol=1e-14)
    assert set(mine.state) <= set(ours)


class Replaces(torch.optim.Optimizer):
    """Momentum that is a new tensor in each step, as in code that writes `state["m"] = 0.9 * state["m"] + grad`."""

    def __init__(self, params, lr: float = 0.1) -> None:  # type: ignore[no-untyped-def]
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(group["lr"] * state["m"])


def test_state_may_be_replaced() -> None:
    (ours, mine), (theirs, other) = trained(Replaces, True), trained(Replaces, False)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(mine.state_dict()["state"], other.state_dict()["state"], rtol=1e-14, atol=1e-14)


def test_an_error_leaves_the_optimizer_whole() -> None:
    params, optimizer = trained(Replaces, True)
    before = list(optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        Blockwise(optimizer, nbytes=10 * 8).step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert set(optimizer.state) <= set(params)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS, lambda ps: torch.optim.AdamW(ps, foreach=True)])
def test_others_step_as_ever(make) -> None:  # type: ignore[no-untyped-def]
    assert Blockwise.of(make([nn.Parameter(torch.randn(3, 5))])) is None
