"""Sample calls: attention."""

from __future__ import annotations

import torch

from shardc.runtime import ops
from tests.rules.making import RNG, call, sample

aten = torch.ops.aten

sample(
    aten.scaled_dot_product_attention.default,
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4)),
    lambda t: call(t.real(2, 2, 6, 3), t.real(2, 2, 6, 3), t.real(2, 2, 6, 4), None, 0.0, True),
    lambda t: call(
        t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.truth(2, 1, 4, 6) | torch.eye(4, 6).bool()
    ),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.real(12, 4, 6), scale=0.3),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.real(1, 6)),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 2, 6, 3), t.real(2, 2, 6, 4), t.real(2, 24, 4, 6), enable_gqa=True),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 12, 6, 3), t.real(2, 4, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 6, 4, 3), t.real(2, 2, 6, 3), t.real(2, 3, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 1, 6, 3), t.real(2, 1, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), enable_gqa=True),
    lambda t: call(t.real(12, 4, 3), t.real(12, 6, 3), t.real(12, 6, 4), is_causal=True),
    lambda t: call(t.real(2, 12, 4, 3), t.real(1, 12, 6, 3), t.real(1, 12, 6, 4)),
)
sample(
    ops.attention,
    lambda t: call(
        t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), None, 0.3, False, None, False, RNG, 1
    ),
    lambda t: call(t.real(2, 2, 6, 3), t.real(2, 2, 6, 3), t.real(2, 2, 6, 4), None, 0.3, True, 0.4, False, RNG, 2),
    lambda t: call(
        t.real(2, 12, 4, 3),
        t.real(2, 12, 6, 3),
        t.real(2, 12, 6, 4),
        t.truth(2, 1, 4, 6) | torch.eye(4, 6).bool(),
        0.3,
        False,
        None,
        False,
        RNG,
        3,
    ),
    lambda t: call(
        t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.real(12, 4, 6), 0.3, False, None, False, RNG, 4
    ),
    lambda t: call(
        t.real(2, 24, 4, 3), t.real(2, 12, 6, 3), t.real(2, 4, 6, 4), t.real(1, 6), 0.3, False, None, True, RNG, 5
    ),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 1, 6, 3), t.real(2, 1, 6, 4), None, 0.3, False, None, True, RNG, 6),
    lambda t: call(t.real(12, 4, 3), t.real(12, 6, 3), t.real(12, 6, 4), None, 0.3, True, None, False, RNG, 7),
    lambda t: call(
        t.real(2, 2, 12, 3),
        t.real(2, 2, 12, 3),
        t.real(2, 2, 12, 3),
        None,
        0.0,
        False,
        None,
        False,
        None,
        0,
        window=(-3, 1),
    ),
    lambda t: call(
        t.real(2, 12, 4, 3), t.real(1, 12, 6, 3), t.real(1, 12, 6, 4), None, 0.3, False, None, False, RNG, 8
    ),
)
