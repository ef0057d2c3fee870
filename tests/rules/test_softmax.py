"""Losses on logits that are split by their classes: nothing as large as the logits travels, whatever the loss is made
of, with the sequence split beside it and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests import equality
from tests.equality import assert_equal
from tests.zoo import ready

ROWS, SEQ, HIDDEN = 4, 8, 8


class Head(nn.Module):
    def __init__(self, loss: Callable[..., Tensor], classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, classes)
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.body(x))), targets, weights)


def rows(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return z.flatten(0, 1), targets.flatten()


def by_class(z: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, z.shape[-1], dtype=z.dtype)


def policy(z: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Log-probabilities of what was taken, weighted by token, and an entropy."""
    logp = z.log_softmax(-1)
    taken = logp.gather(-1, targets.clamp(0).unsqueeze(-1)).squeeze(-1)
    return -(taken * weights).mean() - 0.1 * -(logp.exp() * logp).sum(-1).mean()


def by_hand(z: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The same log-probabilities, without the logarithm of every class."""
    taken = z.gather(-1, targets.clamp(0).unsqueeze(-1)).squeeze(-1)
    return ((z.logsumexp(-1) - taken) * weights).sum() / weights.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda z, y, w: F.cross_entropy(*rows(z, y), label_smoothing=0.1),
    "label smoothing, classes weighted": lambda z, y, w: F.cross_entropy(*rows(z, y), by_class(z), label_smoothing=0.1),
    "z-loss": lambda z, y, w: F.cross_entropy(*rows(z, y)) + 1e-2 * z.logsumexp(-1).square().mean(),
    "tokens weighted": lambda z, y, w: (F.cross_entropy(*rows(z, y), reduction="none") * w.flatten()).sum() / w.sum(),
    "all of them": lambda z, y, w: (
        (F.cross_entropy(*rows(z, y), label_smoothing=0.1, reduction="none") * w.flatten()).sum() / w.sum()
        + 1e-2 * (z.logsumexp(-1).square() * w).sum()
    ),
    "probabilities as targets": lambda z, y, w: F.cross_entropy(
        z.flatten(0, 1), z.detach().roll(1, 0).softmax(-1).flatten(0, 1)
    ),
    "distillation": lambda z, y, w: (
        F.kl_div(z.log_softmax(-1), (2 * z.detach()).softmax(-1), reduction="none").sum(-1).mean()
    ),
    "policy": policy,
    "log-probabilities by hand": by_hand,
}


def reference(loss: Callable[..., Tensor], classes: int = 32) -> equality.Reference:
    torch.manual_seed(3)
    targets = torch.randint(0, classes, (ROWS, SEQ))
    targets[1, :3] = -100
    batch = {
        "x": torch.randn(ROWS, SEQ, HIDDEN).double(),
        "targets": targets,
        "weights": torch.rand(ROWS, SEQ).double(),
    }
    return equality.reference(lambda: (ready(Head(loss, classes), torch.float64), batch))


SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 4}},
    "cp and tp": {"mesh": {"cp": 2, "tp": 4}, "sequence": {"axis": "cp"}},
}


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize("spec", SPECS)
def test_logits_stay_split(what: str, spec: str) -> None:
    one = reference(LOSSES[what])
    program = one.compile({"shardc": 1, **SPECS[spec], "shard": {"head": "column"}})
    assert equality.gathered(program) == []
    assert program.prove().ok
    sim = shardc.verify.simulate(program, one.model, one.batch)
    assert_equal(sim, one.loss, one.grads)
    tokens = ROWS * SEQ // (2 if "cp" in program.mesh.names else 1)
    sent = [c for c in sim.comms if c.axis == "tp" and ("loss" in c.cause or "softmax" in c.cause)]
    assert sent
    assert all(c.bytes <= 2 * tokens * 8 for c in sent)


@pytest.mark.parametrize("what", ["all of them", "policy", "distillation"])
def test_lowered(what: str) -> None:
    one = reference(LOSSES[what])
    program = one.compile({"shardc": 1, "mesh": {"tp": 4}, "shard": {"head": "column"}})
    assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)


@pytest.mark.parametrize("what", ["all of them", "policy"])
def test_classes_that_do_not_divide(what: str) -> None:
    one = reference(LOSSES[what], classes=30)
    program = one.compile({"shardc": 1, "mesh": {"tp": 4}, "shard": {"head": "column"}, "uneven": "pad"})
    assert equality.gathered(program) == []
    assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)


def test_logits_without_a_largest_and_with_an_infinite_one() -> None:
    """All -inf has the normaliser -inf, as torch has it; one inf has inf."""

    def masked(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
        hidden = z.masked_fill(y.unsqueeze(-1) < 0, -math.inf).logsumexp(-1)
        return hidden.masked_fill(y < 0, 0.0).mean()

    one = reference(masked)
    program = one.compile({"shardc": 1, "mesh": {"tp": 4}, "shard": {"head": "column"}})
    assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)
