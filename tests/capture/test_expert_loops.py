"""Loops over experts, as people write them, are the experts op: captured, proven, equal on meshes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.runtime import ops
from tests import equality
from tests.zoo import expert_loops, hf, hf_more

MESHES: dict[str, dict[str, Any]] = {
    "dp=2": {"mesh": {"dp": 2}, "data": {"axis": "dp"}},
    "tp=2": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
}


def build(style: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    model = expert_loops.Model(expert_loops.STYLES[style])
    return model, (torch.randint(0, expert_loops.VOCAB, (4, 6)),)


@cache
def one(style: str) -> equality.Reference:
    return equality.reference(lambda: build(style))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("style", expert_loops.STYLES)
def test_equal_to_one_device(style: str, mesh: str) -> None:
    reference = one(style)
    program = reference.compile({"shardc": 1, **MESHES[mesh]})
    assert len(program.graph.find_nodes(op="call_function", target=ops.experts)) == 1
    sim = reference.on({"shardc": 1, **MESHES[mesh]})
    equality.assert_equal(sim, reference.loss, reference.grads)


def test_eager_experts_of_transformers() -> None:
    model, batch = hf.build(hf_more.FAMILIES["mixtral"], torch.float32, experts_implementation="eager")
    program = capture(model, batch)
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.shardc.experts.default)) == 2
    assert not any("run on all rows" in n for n in program.notes)


# --- what stays a loop, and what is refused ---------------------------------------------------------------------------


class Rows(nn.Module):
    """function(rows of a mask) for two masks, put back."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.second = forward, nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.function(self, x, x.argmax(-1) % 2).square().sum()


def capture_rows(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> shardc.ir.program.Program:
    torch.manual_seed(0)
    return capture(Rows(forward).double(), (torch.randn(10, 8, dtype=torch.float64),))


def norms(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    """Not two products with elementwise ops in between: right, and not one op."""
    out = torch.zeros_like(x)
    for e, linear in enumerate((s.first, s.second)):
        rows = torch.where(chosen == e)[0]
        out[rows] = F.layer_norm(linear(x[rows]).relu(), (8,)).softmax(-1)
    return out


def lists(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    rows = [(chosen == e).nonzero().view(-1) for e in range(2)]
    found = torch.cat([linear(x[r]) for linear, r in zip((s.first, s.second), rows, strict=True)])
    return torch.zeros_like(x).index_add(0, torch.cat(rows), found)


def rebinds(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    for e, linear in enumerate((s.first, s.second)):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            x = x.index_add(0, rows, linear(x[rows]))
    return x


@pytest.mark.parametrize("forward", [norms, lists, rebinds])
def test_any_rows_that_are_chosen(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Captured, and proven by the capture."""
    program = capture_rows(forward)
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.shardc.experts.default)


def test_a_loop_that_stays_one_is_noted() -> None:
    (note,) = [n for n in capture_rows(norms).notes if "experts" in n]
    assert "all 2 experts run on all rows" in note
    assert "test_expert_loops.py:" in note


def mixes_rows(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        out[rows] = x[rows] - x[rows].mean(0)
    return out


def uses_their_number(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        out[rows] = x[rows] * rows.numel()
    return out


def more_than_rows(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    for e in range(2):
        mask = chosen == e
        if mask.any():
            x = x * 2
    return x


def another_mask(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        if (chosen == e).any():
            out[chosen != e] += x[chosen != e]
    return out


def changes_all(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() == 0:
            continue
        out[rows] += x[rows]
        out.mul_(2)
    return out


def counts(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), 0
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() == 0:
            continue
        out[rows] += x[rows]
        busy += 1
    return out * busy


def has_else(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += x[rows]
        else:
            out += 1
    return out


@pytest.mark.parametrize(
    "forward", [mixes_rows, uses_their_number, more_than_rows, another_mask, changes_all, counts, has_else]
)
def test_what_is_more_than_rows_is_refused(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(shardc.ShardcError, match="depends on a tensor's value"):
        capture_rows(forward)
