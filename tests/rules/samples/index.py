"""Sample calls: look-ups, scatters and histograms."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample

aten = torch.ops.aten

sample(
    aten.embedding.default,
    lambda t: call(t.real(24, 12), t.index(24, 4, 6)),
    lambda t: call(t.real(24, 12), t.index(24, 12), 3),
    lambda t: call(t.real(12, 4), t.index(12, 24), 11),
    lambda t: call(t.real(12, 4), t.index(6, 24), -1, True),
)
sample(
    aten.gather.default,
    lambda t: call(t.real(4, 12), 1, t.index(12, 4, 6)),
    lambda t: call(t.real(12, 4, 6), -1, t.index(6, 12, 2, 6)),
    lambda t: call(t.real(12, 4), 0, t.index(12, 12, 4)),
)
sample(
    aten.index_select.default,
    lambda t: call(t.real(4, 12), 1, t.index(12, 6)),
    lambda t: call(t.real(12, 4), -2, t.index(12, 12)),
)
sample(
    aten.index.Tensor,
    lambda t: call(t.real(12, 4), [t.index(12, 6)]),
    lambda t: call(t.real(4, 12, 6), [None, t.index(12, 4, 3)]),
    lambda t: call(t.real(4, 12, 6), [t.index(4, 6), t.index(12, 6)]),
    lambda t: call(t.real(4, 12, 6), [t.index(4, 12, 1), t.index(12, 4)]),
    lambda t: call(t.real(4, 12, 6), [t.index(4, 6), None, t.index(6, 6)]),
    lambda t: call(t.real(12, 4), [t.index(12)]),
    lambda t: call(t.real(4, 12), [t.truth(4, 12)]),
    lambda t: call(t.real(4, 12), [None, t.truth(12)]),
)
sample(
    aten.index_put.default,
    lambda t: call(t.real(4, 12), [t.index(4, 6)], t.real(6, 12), True),
    lambda t: call(t.real(4, 12), [None, t.orders(12, 6)], t.real(4, 6)),
)
sample(aten.nonzero.default, lambda t: call(t.truth(4, 12)))
sample(aten.repeat_interleave.Tensor, lambda t: call(t.index(4, 12)))
sample(aten.nonzero_static.default, lambda t: call(t.truth(4, 12), size=12))
sample(aten.unique_consecutive.default, lambda t: call(t.index(3, 12), True, True))
sample(aten.unique_dim.default, lambda t: call(t.index(3, 12), 0, True, True, True))
sample(
    aten.bincount.default,
    lambda t: call(t.index(6, 24).sort().values),
    lambda t: call(t.index(6, 12).sort().values, t.index(9, 12)),
)
sample(
    aten.scatter.src,
    lambda t: call(t.real(4, 12), 1, t.orders(12, 4, 6), t.real(4, 6)),
    lambda t: call(t.real(4, 12), -1, t.orders(12, 2, 6), t.real(2, 6)),
    lambda t: call(t.index(9, 4, 12), 1, t.orders(12, 4, 6), t.index(9, 8, 12)),
)
sample(
    aten.scatter.value,
    lambda t: call(t.real(4, 12), 1, t.orders(12, 4, 6), 2.0),
    lambda t: call(t.real(6, 12), -1, t.orders(12, 3, 12), 0.0),
)
sample(
    aten.scatter_add.default,
    lambda t: call(t.real(4, 12), 1, t.index(12, 4, 6), t.real(4, 6)),
    lambda t: call(t.real(12, 4), 0, t.index(12, 12, 4), t.real(12, 4)),
    lambda t: call(t.index(9, 4, 12), 1, t.index(12, 4, 6), t.index(9, 8, 12)),
)
sample(aten.one_hot.default, lambda t: call(t.index(12, 4, 6), 12), lambda t: call(t.index(12, 12)))
sample(
    aten.index_put.default,
    lambda t: call(t.real(4, 12, 6), [None, t.index(12, 8), t.index(6, 8)], t.real(4, 8), True),
    lambda t: call(t.real(12, 4), [t.index(12, 6)], t.real(4), True),
    lambda t: call(t.real(4, 12), [t.truth(4, 12)], t.real()),
)
sample(
    aten.index_add.default,
    lambda t: call(t.real(4, 12), 1, t.index(12, 8), t.real(4, 8)),
    lambda t: call(t.real(6, 12), 0, t.index(6, 12), t.real(12, 12), alpha=2.0),
)
sample(aten.index_copy.default, lambda t: call(t.real(12, 6), 1, t.orders(6, 4), t.real(12, 4)))
sample(aten.index_reduce.default, lambda t: call(t.real(12, 6), 1, t.index(6, 4), t.real(12, 4), "mean"))
sample(
    aten.scatter_reduce.two,
    lambda t: call(t.real(4, 12), 1, t.index(12, 4, 6), t.real(4, 6), "mean"),
    lambda t: call(t.real(12, 4), 0, t.index(12, 24, 4), t.real(24, 4), "amax", include_self=False),
)
sample(aten.put.default, lambda t: call(t.real(4, 12), t.orders(48, 6), t.real(6)))
sample(
    aten.searchsorted.Tensor,
    lambda t: call(t.real(6).sort().values, t.real(4, 12)),
    lambda t: call(t.real(12, 6).sort().values, t.real(12, 4), right=True),
)
