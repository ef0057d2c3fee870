"""Of an op whose backward is one line of a text, gradients go to their parameters one by one, as under autograd."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.ir.program import Program
from shardc.runtime.step.early_puts import tape_of, untape


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers: Any = kind(32, 32, 2, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(self.layers(x)[0])
        return h.square().mean()


BATCH = {"x": torch.linspace(-1, 1, 4 * 3 * 32).view(4, 3, 32).sin()}


@functools.cache
def captured(kind: type[nn.RNNBase]) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Recurrent(kind)
    return model, capture(model, BATCH, prove=False)


SPECS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {"dp": 1}},
    "buckets, two microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
    "zero 2": {"mesh": {"dp": 2}, "data": {"zero": 2}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}


@pytest.mark.parametrize(("kind", "spec"), [*((nn.LSTM, s) for s in SPECS), (nn.GRU, "buckets, two microbatches")])
def test_a_recurrent_layer_takes_about_autograds_memory(kind: Any, spec: str) -> None:
    """With all gradients of its weights at once it would be up to 13 % more."""
    model, program = captured(kind)
    eager, lowered = (
        shardc.compile(model, BATCH, {"shardc": 1, **SPECS[spec], **more}, captured=program, prove=False)
        for more in ({}, {})
    )
    peaks = [p.cost("h100-80g").ranks[0].memory.peak for p in (eager, lowered)]
    assert peaks[1] <= peaks[0] + model.layers.bias_ih_l0.nbytes  # type: ignore[operator, union-attr]
    want, have = (shardc.simulate(p, model, BATCH, steps=2) for p in (eager, lowered))
    assert torch.equal(want.loss, have.loss)
    assert [n for n in want.grads if not torch.equal(want.grads[n], have.grads[n])] == []


def test_the_last_layer_has_its_gradients_before_the_first_one_and_what_backward_began_with_is_gone() -> None:
    torch.manual_seed(0)
    layers = nn.LSTM(4, 4, 2, batch_first=True)
    params, x, state = list(layers.parameters()), torch.randn(2, 3, 4), [torch.zeros(2, 2, 4) for _ in range(2)]
    y, *_, tape = tape_of(
        *("aten.lstm.input", (0, *range(3, 11)), range(11)),
        *(x, state, params, True, 2, 0.0, True, False, True),
    )
    g = torch.randn_like(y)
    layers(x)[0].backward(g)
    want = [p.grad for p in params]
    layers.zero_grad()
    seen: list[tuple[bool, bool]] = []
    begun = weakref.ref(g)
    params[4].register_post_accumulate_grad_hook(lambda _: seen.append((params[0].grad is None, begun() is None)))
    box: Any = [[g, None, None], [x, *state, *params]]
    del g
    x_grad, *rest = untape(tape, box, [None] * 9, tuple((k + 1, p) for k, p in enumerate(params)), ())
    assert seen == [(True, True)]
    assert x_grad is not None
    assert rest == [None] * 8
    assert [i for i, p in enumerate(params) if not torch.equal(p.grad, want[i])] == []  # type: ignore[arg-type]


def test_a_parameter_that_stands_in_two_places_gets_each_places_gradient() -> None:
    w = nn.Parameter(torch.tensor([2.0, 3.0]))
    _, tape = tape_of("aten.mul.Tensor", (0, 1), (0, 1), w, w)
    found = untape(tape, [[torch.ones(2)], [w, w]], (None, None), (), ())
    assert [g.tolist() for g in found if g is not None] == [[2.0, 3.0], [2.0, 3.0]]
