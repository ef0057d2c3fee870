"""Sample calls: ops that move elements."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(aten.view.default, aten.reshape.default, aten._unsafe_view.default)(
    lambda t: call(t.real(4, 12, 6), [48, 6]),
    lambda t: call(t.real(4, 72), [4, 12, -1]),
    lambda t: call(t.real(12, 8), [8, 12]),
    lambda t: call(t.real(6, 4, 3), [4, 18]),
    lambda t: call(t.real(2, 1, 36), [12, 1, 6, 1]),
    lambda t: call(t.real(1), []),
)
sample(
    aten.reshape.default,
    lambda t: call(t.real(12, 4).t(), [48]),
    lambda t: call(t.real(4, 6, 12).transpose(1, 2), [12, 24]),
)
sample(
    aten.flatten.using_ints,
    lambda t: call(t.real(4, 12, 6)),
    lambda t: call(t.real(4, 12, 6), 1, -1),
    lambda t: call(t.real(2, 3, 4, 2), -3, -2),
)
sample(aten.unflatten.int, lambda t: call(t.real(4, 24), -1, [2, 12]), lambda t: call(t.real(24, 4), 0, [12, -1]))
sample(aten.squeeze.default, lambda t: call(t.real(1, 4, 1, 12)))
sample(aten.squeeze.dim, lambda t: call(t.real(4, 1, 12), 1), lambda t: call(t.real(4, 12), -1))
sample(aten.squeeze.dims, lambda t: call(t.real(4, 1, 12, 1), [-1, 1]))
sample(aten.unsqueeze.default, lambda t: call(t.real(4, 12), 1), lambda t: call(t.real(4, 12), -1))
sample(aten.permute.default, lambda t: call(t.real(4, 6, 12), [2, 0, 1]), lambda t: call(t.real(4, 6, 12), [0, -1, -2]))
sample(aten.transpose.int, lambda t: call(t.real(4, 6, 12), -2, -1), lambda t: call(t.real(4, 6, 12), 0, 2))
sample(aten.t.default, lambda t: call(t.real(4, 12)), lambda t: call(t.real(12)))
sample(aten.numpy_T.default, lambda t: call(t.real(4, 12)))
samples(aten.expand.default, aten.broadcast_to.default)(
    lambda t: call(t.real(4, 1, 12), [-1, 6, -1]),
    lambda t: call(t.real(1, 12), [4, 6, 12]),
    lambda t: call(t.real(), [4, 12]),
)
sample(
    aten.repeat.default,
    lambda t: call(t.real(4, 12), [2, 3]),
    lambda t: call(t.real(4, 12), [6, 1, 2]),
    lambda t: call(t.real(12), [4, 1, 1]),
)
sample(
    aten.repeat_interleave.self_int,
    lambda t: call(t.real(4, 12), 3, 1),
    lambda t: call(t.real(12, 4), 2, -2),
    lambda t: call(t.real(4, 12), 3),
    lambda t: call(t.real(4, 12), 3, 1, output_size=36),
)
sample(
    aten.slice.Tensor,
    lambda t: call(t.real(4, 12), 1, 0, 6),
    lambda t: call(t.real(4, 24), 1, 12, 24),
    lambda t: call(t.real(4, 36), -1, 12, 24),
    lambda t: call(t.real(36, 2), 0, 1, None, 3),
    lambda t: call(t.real(4, 12), -1, 3, 9223372036854775807),
    lambda t: call(t.real(4, 12), 1, 0, 12),
    lambda t: call(t.real(4, 12), 0, 0, 9223372036854775807),
    lambda t: call(t.real(24, 4), 0, 0, 24, 2),
    lambda t: call(t.real(4, 12), 1, -3),
    lambda t: call(t.real(4, 12), 1, 5, 5),
)
sample(aten.narrow.default, lambda t: call(t.real(4, 12), 1, 3, 6), lambda t: call(t.real(12, 4), -2, 0, 4))
sample(aten.flip.default, lambda t: call(t.real(4, 12), [1]), lambda t: call(t.real(4, 12, 6), [0, -1]))
sample(
    aten.roll.default,
    lambda t: call(t.real(4, 12), [1], [1]),
    lambda t: call(t.real(4, 12, 6), [1, -2], [0, -1]),
    lambda t: call(t.real(4, 12), [5]),
    lambda t: call(t.real(4, 12), [5], []),
)
sample(aten.select.int, lambda t: call(t.real(4, 12), 1, 3), lambda t: call(t.real(4, 6, 12), -2, -1))
sample(aten.unbind.int, lambda t: call(t.real(3, 12)), lambda t: call(t.real(4, 12, 2), -1))
sample(
    aten.constant_pad_nd.default,
    lambda t: call(t.real(4, 12), [1, 2]),
    lambda t: call(t.real(4, 6, 12), [0, 0, 1, -1], 2.0),
)
sample(
    aten.pad.default,
    lambda t: call(t.real(4, 12), [1, 2]),
    lambda t: call(t.real(4, 12), [0, 0, 1, 0], "constant", 2.0),
    lambda t: call(t.real(2, 4, 12), [1, 1], "reflect"),
)
sample(
    aten.split.Tensor,
    lambda t: call(t.real(4, 24), 12, -1),
    lambda t: call(t.real(36, 4), 12),
    lambda t: call(t.real(4, 20), 12, 1),
)
samples(aten.split_with_sizes.default, aten.split.sizes)(
    lambda t: call(t.real(4, 36), [12, 12, 12], -1),
    lambda t: call(t.real(48, 4), [12, 12, 24]),
    lambda t: call(t.real(4, 12), [5, 7], 1),
    lambda t: call(t.real(4, 12), [12], 1),
)
sample(
    aten.chunk.default,
    lambda t: call(t.real(4, 36), 3, -1),
    lambda t: call(t.real(20, 4), 3),
    lambda t: call(t.real(4, 24), 2, 1),
)
sample(
    aten.cat.default,
    lambda t: call([t.real(4, 12), t.real(4, 12)], -1),
    lambda t: call([t.real(12, 4), t.real(24, 4), t.real(12, 4)]),
    lambda t: call([t.real(4, 12), t.real(0)], 1),
    lambda t: call([t.real(4, 12), t.real(4, 0), t.real(4, 12)], 1),
    lambda t: call([t.real(4, 12)], 0),
)
sample(
    aten.stack.default,
    lambda t: call([t.real(4, 12), t.real(4, 12)]),
    lambda t: call([t.real(4, 12), t.real(4, 12), t.real(4, 12)], -1),
)
samples(aten.tril.default, aten.triu.default)(lambda t: call(t.real(6, 12, 12)), lambda t: call(t.real(4, 12), 1))
sample(aten.diagonal.default, lambda t: call(t.real(12, 4, 4), 0, 1, 2), lambda t: call(t.real(4, 12, 6), 1, -1, 0))
sample(aten.diag_embed.default, lambda t: call(t.real(12, 4)), lambda t: call(t.real(4, 12, 3), 1, 0, 2))
sample(aten.unfold.default, lambda t: call(t.real(4, 12), 1, 4, 2), lambda t: call(t.real(12, 4, 6), 0, 2, 2))
