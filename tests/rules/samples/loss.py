"""Sample calls: losses."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.runtime import ops
from tests.rules.making import Tensors, call, sample


def _labels(t: Tensors, n: int) -> Tensor:
    """i64[n, 6]: two of six classes each; -1 ends a row."""
    return torch.cat([t.orders(6, n, 2), torch.full((n, 4), -1)], 1)


sample(
    ops.nll,
    lambda t: call(t.real(12, 24), t.index(24, 12), -100),
    lambda t: call(t.real(4, 12, 6), t.index(12, 4, 6), 3),
    lambda t: call(t.real(12, 12), torch.where(t.truth(12), -100, t.index(12, 12)), -100),
    lambda t: call(t.real(12), t.index(12), -100),
)
sample(
    torch.ops.aten.multilabel_margin_loss.default,
    lambda t: call(t.real(12, 6), _labels(t, 12), 0),
    lambda t: call(t.real(6), _labels(t, 1)[0], 0),
    lambda t: call(t.real(12, 6), _labels(t, 12)),
)
sample(
    torch.ops.shardc.ctc_loss.default,
    lambda t: call(
        t.real(6, 12, 5).log_softmax(-1), t.index(4, 12, 2) + 1, torch.full((12,), 6), t.index(2, 12) + 1, 0, False
    ),
    lambda t: call(
        t.real(6, 4, 5).log_softmax(-1), t.index(4, 8) + 1, torch.full((4,), 6), torch.full((4,), 2), 0, True
    ),
)
