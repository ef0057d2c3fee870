"""Sample calls: reductions, scans and sorts."""

from __future__ import annotations

import math

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(aten.sum.dim_IntList, aten.mean.dim)(
    lambda t: call(t.real(4, 12, 6), [1]),
    lambda t: call(t.real(4, 12, 6), [-1, 0], True),
    lambda t: call(t.real(4, 12), None),
    lambda t: call(t.real(4, 12), []),
    lambda t: call(t.real(4, 12), [-1], dtype=torch.float32),
)
sample(aten.sum.dim_IntList, lambda t: call(t.truth(4, 12), [-1]), lambda t: call(t.index(9, 4, 12), [0], keepdim=True))
samples(aten.sum.default, aten.mean.default)(
    lambda t: call(t.real(4, 12)), lambda t: call(t.real(12), dtype=torch.float32)
)
samples(aten.amax.default, aten.amin.default)(
    lambda t: call(t.real(4, 12, 6), [1]), lambda t: call(t.real(4, 12, 6), [-1, 0], True)
)
samples(aten.amax.default, aten.amin.default)(
    lambda t: call(t.real(4, 12)),
    lambda t: call(t.index(3, 4, 12).double(), [1]),  # several that are the largest
    lambda t: call(t.index(9, 4, 12), [1]),
)
samples(aten.any.dim, aten.all.dim)(
    lambda t: call(t.index(6, 4, 12) > 4, 1),
    lambda t: call(t.index(6, 4, 12) < 5, -2, True),
    lambda t: call(t.truth(4, 12, 6), -1),
)
samples(aten.any.dims, aten.all.dims)(
    lambda t: call(t.index(6, 4, 12, 2) > 4, [1, 2]),
    lambda t: call(t.truth(4, 12), None, True),
    lambda t: call(t.truth(4, 12, 2), [-1]),
)
samples(aten.argmax.default, aten.argmin.default)(
    lambda t: call(t.real(4, 12), 1), lambda t: call(t.real(4, 12), -2, True), lambda t: call(t.real(4, 12))
)
samples(aten.max.dim, aten.min.dim, aten.median.dim)(
    lambda t: call(t.real(4, 12, 6), 1), lambda t: call(t.real(4, 12), -2, True)
)
sample(
    aten.prod.dim_int,
    lambda t: call(t.real(4, 12, 6), 1),
    lambda t: call(t.real(4, 12), -2, True),
    lambda t: call(t.index(9, 4, 12).double(), 1),  # zeros among them
)
sample(
    aten.count_nonzero.dim_IntList,
    lambda t: call(t.index(2, 4, 12, 6), [1]),
    lambda t: call(t.index(2, 4, 12, 6), [-1, 0]),
)
samples(aten.any.default, aten.all.default)(lambda t: call(t.truth(4, 12)))
samples(aten.max.default, aten.min.default, aten.prod.default)(lambda t: call(t.real(4, 12)))
samples(aten.var.correction, aten.std.correction, aten.var_mean.correction)(
    lambda t: call(t.real(4, 12, 6), [1], correction=0),
    lambda t: call(t.real(4, 12, 6), [-1, 0], keepdim=True),
    lambda t: call(t.real(4, 12)),
)
samples(aten.var.dim, aten.std.dim)(
    lambda t: call(t.real(4, 12, 6), [1]), lambda t: call(t.real(4, 12, 6), [-1, 0], False, True)
)
sample(
    aten.linalg_vector_norm.default,
    lambda t: call(t.real(4, 12, 6), 2, [1]),
    lambda t: call(t.real(4, 12, 6), 3, [-1, 0], True),
    lambda t: call(t.real(4, 12)),
    lambda t: call(t.index(2, 4, 12).double(), 2, [1]),  # rows of zeros among them
    lambda t: call(t.index(3, 4, 12).double(), math.inf, [1]),
    lambda t: call(t.real(4, 12), -math.inf, [0, 1], True),
    lambda t: call(t.real(4, 12), -2, [1]),
)
sample(
    aten.norm.ScalarOpt_dim,
    lambda t: call(t.real(4, 12, 6), 2, [1]),
    lambda t: call(t.real(4, 12, 6), 3, [-1, 0], True),
)
samples(
    "cumsum cumprod logcumsumexp cummax sort argsort glu",
)(lambda t: call(t.real(4, 6, 12), -1), lambda t: call(t.real(4, 12), 0))
samples(aten.sort.default, aten.argsort.default)(
    lambda t: call(t.real(4, 6, 12), 1, True), lambda t: call(t.real(4, 12))
)
samples(aten.sort.stable, aten.argsort.stable)(
    lambda t: call(t.real(4, 6, 12), stable=True),
    lambda t: call(t.real(4, 12), stable=True, dim=0),
)
sample(aten.topk.default, lambda t: call(t.real(4, 6, 12), 3), lambda t: call(t.real(12, 4), 2, 0))
sample(
    aten.diff.default,
    lambda t: call(t.real(4, 12)),
    lambda t: call(t.real(4, 12), 2, 0),
    lambda t: call(t.real(4, 12), 1, -1, t.real(4, 1)),
    lambda t: call(t.real(4, 12), 1, -1, t.real(4, 2), t.real(4, 3)),
)
samples(aten.nanmedian.dim, aten.mode.default)(
    lambda t: call(t.real(4, 12, 6), 1), lambda t: call(t.real(4, 12), -2, True)
)
sample(aten.kthvalue.default, lambda t: call(t.real(4, 12, 6), 2, 1), lambda t: call(t.real(4, 12), 2, -2, True))
samples(aten.median.default, aten.nanmedian.default)(lambda t: call(t.real(4, 12)))
sample(aten.cummin.default, lambda t: call(t.real(4, 6, 12), -1))
sample(aten.histogram.bin_ct, lambda t: call(t.constant(t.real(24)), 6))
sample(
    aten.histogram.bins_tensor, lambda t: call(t.constant(t.real(24)), t.constant(torch.linspace(-2, 2, 7).double()))
)
sample(aten.histc.default, lambda t: call(t.real(24), 6, -1, 1), lambda t: call(t.real(24), 6))
