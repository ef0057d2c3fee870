"""Sample calls: elementwise ops and losses without weights."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)(
    lambda t: call(t.real(4, 12), t.real(4, 12)),
    lambda t: call(t.real(4, 1, 12), t.real(6, 1)),
    lambda t: call(t.real(12), t.real(4, 12)),
    lambda t: call(t.real(4, 12), t.real()),
    lambda t: call(t.real(4, 12), 3.0),
    lambda t: call(t.index(9, 4, 12), t.real(12)),
)
samples(aten.add.Tensor, aten.sub.Tensor)(lambda t: call(t.real(4, 12), t.real(12), alpha=2.0))
samples(aten.mul.Scalar, aten.div.Scalar)(lambda t: call(t.real(4, 12), 3.0))
sample(
    aten.where.self,
    lambda t: call(t.truth(4, 12), t.real(4, 12), t.real(4, 12)),
    lambda t: call(t.truth(6, 1, 1), t.real(4, 1), t.real(12)),
    lambda t: call(t.truth(4, 12), t.real(4, 12), t.real()),
)
sample(
    aten.masked_fill.Scalar,
    lambda t: call(t.real(4, 12), t.truth(4, 12), 0),
    lambda t: call(t.real(4, 6, 12), t.truth(6, 1), -3.0),
    lambda t: call(t.real(12), t.truth(4, 12), 2.0),
)
sample(aten.masked_fill.Tensor, lambda t: call(t.real(4, 12), t.truth(12), t.real()))
sample(aten.where.ScalarSelf, lambda t: call(t.truth(4, 12), 2.0, t.real(12)))
sample(aten.where.ScalarOther, lambda t: call(t.truth(12), t.real(4, 12), 2.0))
sample(aten.where.Scalar, lambda t: call(t.truth(4, 12), 1.0, 2.0))
samples(
    "neg clone alias contiguous positive detach",
)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(12, 4).t()))
samples(aten._to_copy.default, aten.to.dtype_layout)(
    lambda t: call(t.real(4, 12), dtype=torch.float32),
    lambda t: call(t.index(9, 4, 12), dtype=torch.float64),
    lambda t: call(t.real(4, 12), dtype=torch.int64),
)
sample(
    aten.to.dtype,
    lambda t: call(t.real(4, 12), torch.float32),
    lambda t: call(3 * t.real(4, 12), torch.int64),
    lambda t: call(t.truth(4, 12), torch.float64),
)
sample(aten.to.device, lambda t: call(t.real(4, 12), torch.device("cpu"), torch.float32))
sample(
    aten.type_as.default,
    lambda t: call(t.real(4, 12), t.real(4, 12).float()),
    lambda t: call(t.index(9, 4, 12), t.real(2, 3, 5)),
    lambda t: call(t.real(4, 12), t.real(12)),
    lambda t: call(t.real(4, 12), t.index(9, 4, 3, 12)),
)
sample(torch.ops.shardc.with_gradient_of.default, lambda t: call(t.real(4, 12), t.real(4, 12)))
samples(
    "silu selu relu6 square isfinite isinf isposinf isneginf relu sigmoid tanh exp expm1 sin cos abs sign floor erf "
    "logical_not hardtanh leaky_relu elu mish hardswish log_sigmoid isnan",
)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(2, 3, 4)))
samples(
    "rsqrt sqrt log log1p reciprocal acos",
)(lambda t: call(t.positive(4, 12)))
sample(aten.nan_to_num.default, lambda t: call(t.real(4, 12) / t.index(2, 4, 12)))
sample(aten.gelu.default, lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12), approximate="tanh"))
sample(aten.softplus.default, lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12), 2.0, 1.0))
samples(
    "__and__.Tensor __or__.Tensor __xor__.Tensor logical_and logical_or bitwise_and.Tensor",
)(lambda t: call(t.truth(4, 12), t.truth(12)), lambda t: call(t.truth(4, 1, 6), t.truth(12, 1)))
samples(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)(
    lambda t: call(t.real(4, 12)), lambda t: call(t.index(9, 4, 12), dtype=torch.float64)
)
sample(aten.full_like.default, lambda t: call(t.real(4, 12), 3.0))
sample(aten.lerp.Scalar, lambda t: call(t.real(4, 12), t.real(12), 0.3))
sample(aten.clamp.default, lambda t: call(t.real(4, 12), -0.5, 0.5), lambda t: call(t.real(4, 12), min=0.0))
sample(
    aten.bucketize.Tensor,
    lambda t: call(t.real(4, 12), t.real(12).sort().values),
    lambda t: call(t.real(4, 12), t.real(5).sort().values, right=True),
)
sample(aten.float_power.Tensor_Scalar, lambda t: call(t.positive(4, 12), 1.5))
# elementwise by torch's own tag: a spread of them
samples(
    "maximum minimum atan2 pow.Tensor_Tensor eq.Tensor gt.Tensor le.Tensor ne.Tensor fmod.Tensor remainder.Tensor "
    "hypot clamp_min.Tensor",
)(
    lambda t: call(t.positive(4, 12), t.positive(4, 12)),
    lambda t: call(t.positive(4, 1, 12), t.positive(6, 1)),
    lambda t: call(t.positive(12), t.positive()),
)
samples(
    "pow.Tensor_Scalar eq.Scalar gt.Scalar lt.Scalar add.Scalar sub.Scalar rsub.Scalar clamp_min clamp_max "
    "remainder.Scalar",
)(lambda t: call(t.positive(4, 12), 2.0))
sample(aten.pow.Scalar, lambda t: call(2.0, t.real(4, 12)))
sample(aten.bitwise_not.default, lambda t: call(t.truth(4, 12)))
sample(aten.bitwise_or.Tensor, lambda t: call(t.index(99, 4, 12), t.index(99, 12)))
sample(aten.div.Tensor_mode, lambda t: call(t.real(4, 12), t.real(12), rounding_mode="floor"))
sample(aten.floor_divide.default, lambda t: call(t.index(99, 4, 12), 7))
sample(aten.addcmul.default, lambda t: call(t.real(4, 12), t.real(12), t.real(4, 1), value=2.0))
sample(aten.addcdiv.default, lambda t: call(t.real(4, 12), t.real(12), t.positive(4, 1)))
sample(aten.lerp.Tensor, lambda t: call(t.real(4, 12), t.real(12), t.real(4, 1)))
sample(aten.lift_fresh_copy.default, lambda t: call(t.real(4, 12)))
sample(
    aten.prelu.default,
    lambda t: call(t.real(4, 12, 6), t.real(12)),
    lambda t: call(t.real(4, 12), t.real(1)),
    lambda t: call(t.real(12), t.real(1)),
)
samples(
    "smooth_l1_loss huber_loss binary_cross_entropy_with_logits mse_loss",
)(lambda t: call(t.real(4, 12), t.positive(4, 12), reduction=0), lambda t: call(t.real(4, 12), t.positive(4, 12)))
sample(
    aten.binary_cross_entropy_with_logits.default,
    lambda t: call(t.real(4, 12), t.positive(4, 12), None, t.constant(t.positive(12)), 0),
)
sample(
    aten.binary_cross_entropy.default,
    lambda t: call(t.positive(4, 12), t.positive(4, 12), None, 0),
    lambda t: call(t.positive(4, 12), t.positive(4, 12)),
)
sample(aten.soft_margin_loss.default, lambda t: call(t.real(4, 12), 2 * t.index(2, 4, 12) - 1, 0))
sample(
    aten.kl_div.default,
    lambda t: call(t.real(4, 12), t.positive(4, 12), 0),
    lambda t: call(t.real(4, 12), t.positive(4, 12)),
)
sample(aten.fake_quantize_per_tensor_affine.default, lambda t: call(t.real(4, 12), 0.1, 0, -8, 7))
sample(
    aten.fake_quantize_per_tensor_affine.tensor_qparams,
    lambda t: call(
        t.real(4, 12), t.constant(torch.tensor([0.1])), t.constant(torch.zeros(1, dtype=torch.int32)), -8, 7
    ),
)
sample(
    aten.fake_quantize_per_channel_affine.default,
    lambda t: call(
        t.real(4, 12),
        t.constant(torch.linspace(0.1, 0.5, 12)),
        t.constant(torch.zeros(12, dtype=torch.int32)),
        1,
        -8,
        7,
    ),
)
