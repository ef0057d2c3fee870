"""Floats made of integers have the dtype of the capture, whatever the default dtype of the process that runs the
program.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.capture import capture
from shardc.ir.mesh import Mesh
from shardc.passes.canonical import Canonical
from shardc.spec import Spec
from tests import equality


class Integers(nn.Module):
    """Positions divided, buckets scaled, choices between numbers, a tensor made empty and then written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        made = torch.empty(4)
        made.copy_(self.steps / 3)
        rows = (
            i / 3
            + 0.5
            + torch.where(i > 1, 0.1, 0.2)
            + torch.where(i > 1, i, 0.3)
            + torch.where(i > 1, 0.7, i)
            + (i > 1) * 0.3
        )
        rows = rows + (i * 0.1).sqrt() + i.sigmoid() + torch.true_divide(i, self.steps.sum()) + 1 / (i + 1) + i.pow(0.5)
        return F.mse_loss(self.linear(x), rows[:, None] * made)


def test_floats_of_integers_do_not_know_the_default_dtype() -> None:
    torch.manual_seed(0)
    one = equality.reference(
        lambda: (Integers().double(), (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4))
    )  # default: float64
    assert torch.get_default_dtype() == torch.float32
    sim = one.on({"shardc": 1, "mesh": {"dp": 2}})  # runs in the default of this process
    equality.assert_equal(sim, one.loss, one.grads)


def test_an_integer_is_cast_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, i: Tensor) -> Tensor:
            return (self.w * (i * 0.5 + i * 0.25)).sum()

    graph = Canonical(Spec(Mesh(()))).run(capture(Twice(), (torch.arange(3),))).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)) == 1
