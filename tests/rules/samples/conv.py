"""Sample calls: convolutions, pools and images."""

from __future__ import annotations

import torch

from shardc.runtime import ops
from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(aten.conv1d.default)(
    lambda t: call(t.real(12, 4, 6), t.real(8, 4, 3), t.real(8), [2], [1]),
    lambda t: call(t.real(4, 12, 6), t.real(12, 12, 3)),
    lambda t: call(t.real(12, 6), t.real(8, 12, 3), t.real(8)),
    lambda t: call(t.real(2, 12, 6), t.real(12, 1, 3), t.real(12), [1], [0], [1], 12),
)
sample(
    ops.conv1d,
    lambda t: call(t.real(2, 12, 12), t.real(8, 12, 3), t.real(8), 2),
    lambda t: call(t.real(2, 12, 12), t.real(12, 1, 3), None, 1, 1, 12),
    lambda t: call(t.real(2, 12, 12), t.real(12, 4, 2), t.real(12), 0, 2, 3),
)
sample(
    aten.conv2d.default,
    lambda t: call(t.real(4, 12, 4, 6), t.real(6, 12, 3, 3), t.real(6), [1, 1], [1, 1]),
    lambda t: call(t.real(2, 12, 4, 4), t.real(24, 4, 3, 3), t.real(24), [1, 1], [0, 0], [1, 1], 3),
)
sample(aten.conv3d.default, lambda t: call(t.real(2, 12, 3, 2, 4), t.real(4, 12, 2, 2, 2), t.real(4)))
sample(
    aten.conv1d.padding,
    lambda t: call(t.real(4, 12, 6), t.real(8, 12, 3), t.real(8), [1], "same"),
    lambda t: call(t.real(4, 12, 6), t.real(8, 12, 3), None, [1], "valid"),
)
sample(aten.conv2d.padding, lambda t: call(t.real(4, 12, 4, 4), t.real(6, 12, 3, 3), t.real(6), [1, 1], "same"))
sample(
    aten.conv3d.padding, lambda t: call(t.real(2, 12, 3, 2, 4), t.real(4, 12, 2, 2, 2), t.real(4), [1, 1, 1], "valid")
)
sample(
    aten.convolution.default,
    lambda t: call(t.real(4, 12, 6), t.real(8, 12, 3), t.real(8), [1], [1], [1], False, [0], 1),
    lambda t: call(t.real(4, 12, 6), t.real(12, 8, 3), None, [2], [1], [1], True, [1], 1),
    lambda t: call(t.real(2, 12, 4, 4), t.real(24, 4, 3, 3), t.real(24), [1, 1], [0, 0], [1, 1], False, [0, 0], 3),
)
sample(
    aten.conv_transpose1d.default,
    lambda t: call(t.real(4, 12, 6), t.real(12, 8, 3), t.real(8), [2], [1], [1]),
    lambda t: call(t.real(2, 12, 6), t.real(12, 2, 3), t.real(6), [1], [0], [0], 3),
)
sample(aten.conv_transpose2d.input, lambda t: call(t.real(4, 12, 3, 4), t.real(12, 6, 3, 3), t.real(6)))
sample(aten.conv_transpose3d.input, lambda t: call(t.real(2, 12, 3, 2, 4), t.real(12, 4, 2, 2, 2), t.real(4)))
samples(aten.max_pool1d.default, aten.avg_pool1d.default)(
    lambda t: call(t.real(4, 12, 12), [2], [2]), lambda t: call(t.real(12, 12), [3], [1], [1])
)
samples(aten.max_pool2d.default, aten.avg_pool2d.default, aten.max_pool2d_with_indices.default)(
    lambda t: call(t.real(4, 12, 6, 6), [2, 2], [2, 2]), lambda t: call(t.real(12, 6, 6), [3, 3], [1, 1], [1, 1])
)
samples(aten.max_pool3d.default, aten.avg_pool3d.default)(lambda t: call(t.real(2, 12, 4, 4, 6), [2, 2, 2], [2, 2, 2]))
sample(
    aten.avg_pool2d_backward.default,
    lambda t: call(t.real(4, 12, 3, 3), t.real(4, 12, 6, 6), [2, 2], [2, 2], [0, 0], False, True, None),
    lambda t: call(t.real(12, 3, 3), t.real(12, 6, 6), [3, 3], [2, 2], [1, 1], False, False, None),
)
sample(
    aten.avg_pool3d_backward.default,
    lambda t: call(t.real(2, 12, 2, 2, 3), t.real(2, 12, 4, 4, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
)
sample(aten._adaptive_avg_pool2d_backward.default, lambda t: call(t.real(4, 12, 3, 2), t.real(4, 12, 6, 6)))
sample(aten._adaptive_avg_pool3d_backward.default, lambda t: call(t.real(2, 12, 2, 1, 3), t.real(2, 12, 4, 4, 6)))
sample(aten.adaptive_avg_pool1d.default, lambda t: call(t.real(4, 12, 6), [4]))
samples(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)(
    lambda t: call(t.real(4, 12, 6, 6), [1, 1]), lambda t: call(t.real(12, 6, 6), [3, 4])
)
sample(
    aten.upsample_nearest1d.vec,
    lambda t: call(t.real(4, 12, 6), None, [2.0]),
    lambda t: call(t.real(4, 12, 6), [8], None),
)
sample(aten.upsample_nearest2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, [2.0, 2.0]))
sample(aten.upsample_bilinear2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, False, [2.0, 2.0]))
sample(
    aten.conv_transpose2d.input,
    lambda t: call(t.real(2, 24, 3, 2), t.real(24, 4, 2, 2), t.real(48), [2, 2], [0, 0], [0, 0], 12),
)
sample(
    aten.fractional_max_pool2d.default,
    lambda t: call(t.real(4, 12, 6, 6), [2, 2], [3, 2], t.constant(t.positive(4, 12, 2))),
    lambda t: call(t.real(12, 6, 6), [2, 2], [3, 2], t.constant(t.positive(1, 12, 2))),
)
sample(
    aten.fractional_max_pool3d.default,
    lambda t: call(t.real(2, 12, 4, 4, 4), [2, 2, 2], [2, 2, 2], t.constant(t.positive(2, 12, 3))),
)
samples(aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default)(
    lambda t: call(t.real(4, 12, 6, 4), [3, 8], True)
)
samples(aten.max_pool1d_with_indices.default)(lambda t: call(t.real(4, 12, 12), [2], [2]))
samples(aten.max_pool3d_with_indices.default)(lambda t: call(t.real(2, 12, 4, 4, 6), [2, 2, 2], [2, 2, 2]))
samples(aten.adaptive_max_pool1d.default)(lambda t: call(t.real(4, 12, 6), [4]))
samples(aten.adaptive_max_pool2d.default)(
    lambda t: call(t.real(4, 12, 6, 6), [2, 3]), lambda t: call(t.real(12, 6, 6), [3, 4])
)
samples(aten.adaptive_max_pool3d.default, aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)(
    lambda t: call(t.real(2, 12, 4, 4, 6), [2, 2, 2])
)
sample(aten._upsample_nearest_exact1d.vec, lambda t: call(t.real(4, 12, 6), None, [2.0]))
sample(aten._upsample_nearest_exact2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, [2.0, 2.0]))
samples(aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec)(
    lambda t: call(t.real(2, 12, 2, 3, 2), None, [2.0, 2.0, 2.0])
)
sample(aten.upsample_linear1d.vec, lambda t: call(t.real(4, 12, 6), None, False, [2.0]))
samples(aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)(
    lambda t: call(t.real(4, 12, 6, 4), None, False, [2.0, 2.0]),
    lambda t: call(t.real(4, 12, 6, 4), [3, 8], True, None),
)
sample(aten.upsample_trilinear3d.vec, lambda t: call(t.real(2, 12, 2, 3, 2), None, False, [2.0, 2.0, 2.0]))
samples(aten.grid_sampler.default, aten.grid_sampler_2d.default)(
    lambda t: call(t.real(4, 12, 5, 6), t.real(4, 6, 12, 2).tanh(), 0, 0, False),
    lambda t: call(t.real(12, 2, 5, 6), t.real(12, 3, 2, 2).tanh(), 1, 1, True),
)
samples(aten.grid_sampler.default, aten.grid_sampler_3d.default)(
    lambda t: call(t.real(2, 12, 2, 3, 4), t.real(2, 2, 4, 6, 3).tanh(), 0, 0, False)
)
sample(
    aten.im2col.default,
    lambda t: call(t.real(4, 12, 4, 6), [2, 2], [1, 1], [1, 1], [1, 2]),
    lambda t: call(t.real(12, 4, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
)
sample(
    aten.col2im.default,
    lambda t: call(t.real(4, 48, 6), [4, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    lambda t: call(t.real(48, 6), [4, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
)
