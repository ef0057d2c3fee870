"""Types of results: found without computing anything, whatever the size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir import types
from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from tests import zoo

aten = torch.ops.aten
HUGE = 1 << 44  # 64 TiB of float32: nothing of that size can be made


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.full.default, ([HUGE], 0.0)),
        (aten.zeros.default, ([HUGE],)),
        (aten.arange.default, (float(HUGE),)),
        (aten.eye.default, (1 << 22,)),
    ],
    ids=str,
)
def test_factories_are_not_run(op: object, args: tuple[object, ...]) -> None:
    value = types.infer(op, args, {"dtype": torch.float32})
    assert isinstance(value, Value)
    assert value.nbytes() == 4 * HUGE


class Masked(nn.Module):
    """Makes a mask of the size of all its scores."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_full((HUGE // 4, x.shape[1]), 2.0)
        return (x.mean(0) * mask).sum()


def test_a_program_may_make_what_this_machine_cannot_hold() -> None:
    program = shardc.compile(Masked(), torch.randn(4, 4), {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    full = next(n for n in program.stages[0].graph.nodes if n.target is aten.full.default)
    assert value_of(full).nbytes() == 4 * HUGE


def test_memory_that_is_not_enough_to_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> fx.Graph:
        torch.empty(HUGE)
        raise AssertionError

    monkeypatch.setattr("shardc.passes.canonical.rewritten", fails)
    with pytest.raises(shardc.ShardcError, match="out of memory") as e:
        shardc.compile(Masked(), torch.randn(4, 4), {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    assert e.value.where == "compile, canonical"
    assert "meta" in e.value.fix


def test_types_are_inferred_past_what_intercepts_calls() -> None:
    """A mode of the user's that widens casts is not asked: the graph says which cast it is."""
    with zoo.Wide():
        model, batch = zoo.gpt(layers=1)
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "precision": {"compute": "float32"}})
    casts = [n for n in program.graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert casts
    assert {(n.kwargs["dtype"], value_of(n).dtype) for n in casts} <= {(d, d) for d in (torch.float32, torch.float64)}
