"""Sample calls: recurrent layers."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

sample(
    aten.lstm.input,
    lambda t: call(
        t.real(2, 12, 3),
        [t.real(1, 12, 2), t.real(1, 12, 2)],
        [t.real(8, 3), t.real(8, 2), t.real(8), t.real(8)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    lambda t: call(
        t.real(12, 2, 3),
        [t.real(2, 12, 2), t.real(2, 12, 2)],
        [t.real(8, 3), t.real(8, 2), t.real(8, 3), t.real(8, 2)],
        False,
        1,
        0.0,
        True,
        True,
        True,
    ),
)
sample(
    aten.gru.input,
    lambda t: call(
        t.real(2, 12, 3),
        t.real(1, 12, 2),
        [t.real(6, 3), t.real(6, 2), t.real(6), t.real(6)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
)
samples(aten.rnn_tanh.input, aten.rnn_relu.input)(
    lambda t: call(t.real(12, 2, 3), t.real(1, 12, 2), [t.real(2, 3), t.real(2, 2)], False, 1, 0.0, True, False, True),
)
