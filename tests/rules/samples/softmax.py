"""Sample calls: softmax and its normaliser."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

sample(
    aten.logsumexp.default,
    lambda t: call(t.real(4, 12, 6), [1]),
    lambda t: call(t.real(4, 12, 6), [-1, 0], True),
)
samples(aten.softmax.int, aten.log_softmax.int)(
    lambda t: call(t.real(4, 6, 12), -1),
    lambda t: call(t.real(4, 6, 12), 1),
    lambda t: call(t.real(4, 12), -1, torch.float32),
)
samples(aten._softmax.default, aten._log_softmax.default)(
    lambda t: call(t.real(4, 6, 12), -1, False),
    lambda t: call(t.real(4, 12), 0, False),
)
