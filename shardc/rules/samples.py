"""Sample calls of every op that has a rule. `check.py` proves the rules on them; a rule without a sample fails the tests.

    sample(aten.linear.default, lambda t: call(t.real(4, 12), t.real(24, 12), t.real(24)))

Tensors are float64 and small; dims that may be split have 12 elements, or another multiple of 2, 3 or 4, so that parts on
two, three and four ranks exist and inner digits too. A sample must not be degenerate (no roll by zero): what splitting does
wrong has to show. Every tensor stands once in a call, because the check lays every operand out on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import ops

aten = torch.ops.aten


class RngMark:
    """Stands in a sample's arguments for the random state that the graph passes."""

    def __repr__(self) -> str:
        return "RNG"


RNG = RngMark()
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    """(args, kwargs) of one call."""
    return args, kwargs


@dataclass
class Tensors:
    """Makes the tensors of samples, reproducibly from a seed."""

    seed: int
    generator: torch.Generator = field(init=False)
    constants: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def real(self, *shape: int) -> Tensor:
        """f64[shape], standard normal."""
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        """f64[shape], in (0.1, 0.9): inside the domain of logarithms, powers and inverse functions."""
        return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def constant(self, x: Tensor) -> Tensor:
        """x as an operand that the op cannot be differentiated by."""
        self.constants.append(x)
        return x

    def definite(self, *shape: int) -> Tensor:
        """f64[.., n, n] for shape (.., n): symmetric, positive definite."""
        x = self.real(*shape, shape[-1])
        return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)

    def index(self, high: int, *shape: int) -> Tensor:
        """i64[shape], in [0, high)."""
        return torch.randint(high, shape, generator=self.generator)

    def truth(self, *shape: int) -> Tensor:
        """bool[shape], fair."""
        return self.index(2, *shape).bool()

    def orders(self, high: int, *shape: int) -> Tensor:
        """i64[shape], along the last dim different numbers in [0, high): writing to them clashes nowhere."""
        scores = torch.rand((*shape[:-1], high), generator=self.generator)
        return scores.argsort(-1)[..., : shape[-1]].contiguous()


Sample = Callable[[Tensors], Arguments]
SAMPLES: dict[Any, list[Sample]] = {}


def sample(op: Any, *makers: Sample) -> None:
    """Add sample calls of an op."""
    SAMPLES.setdefault(op, []).extend(makers)


def samples(*ops_: Any) -> Callable[..., None]:
    """Add the same sample calls to several ops."""

    def add(*makers: Sample) -> None:
        for op in ops_:
            sample(op, *makers)

    return add


# --- matrix products --------------------------------------------------------------------------------------------------

sample(
    aten.linear.default,
    lambda t: call(t.real(4, 12), t.real(24, 12), t.real(24)),
    lambda t: call(t.real(2, 6, 12), t.real(8, 12)),
    lambda t: call(t.real(12), t.real(12, 12), t.real(12)),
    lambda t: call(t.real(3, 12), t.real(4, 12), None),
)
sample(aten.mm.default, lambda t: call(t.real(4, 12), t.real(12, 6)))
sample(aten.bmm.default, lambda t: call(t.real(12, 2, 6), t.real(12, 6, 4)))
sample(aten.mv.default, lambda t: call(t.real(4, 12), t.real(12)))
sample(aten.dot.default, lambda t: call(t.real(12), t.real(12)))
sample(aten.outer.default, lambda t: call(t.real(12), t.real(4)))
sample(
    aten.addmm.default,
    lambda t: call(t.real(8), t.real(4, 12), t.real(12, 8)),
    lambda t: call(t.real(4, 8), t.real(4, 12), t.real(12, 8), beta=0.5, alpha=2.0),
    lambda t: call(t.real(4, 1), t.real(4, 12), t.real(12, 8)),
    lambda t: call(t.real(1), t.real(4, 12), t.real(12, 8)),
)
sample(
    aten.baddbmm.default,
    lambda t: call(t.real(12, 2, 4), t.real(12, 2, 6), t.real(12, 6, 4), beta=0.5, alpha=2.0),
    lambda t: call(t.real(1, 2, 4), t.real(12, 2, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(4), t.real(12, 2, 6), t.real(12, 6, 4)),
)
sample(
    aten.matmul.default,
    lambda t: call(t.real(4, 12), t.real(12, 6)),
    lambda t: call(t.real(12, 3, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(2, 12, 3, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(2, 1, 3, 6), t.real(1, 12, 6, 4)),
    lambda t: call(t.real(12, 3, 6), t.real(6, 4)),
    lambda t: call(t.real(6), t.real(12, 6, 4)),
    lambda t: call(t.real(12, 3, 6), t.real(6)),
    lambda t: call(t.real(12), t.real(12)),
    lambda t: call(t.real(4, 12), t.real(12)),
)
sample(
    aten.einsum.default,
    lambda t: call("bqhd,bkhd->bhqk", [t.real(2, 3, 12, 4), t.real(2, 6, 12, 4)]),
    lambda t: call("tk,tkd,d->td", [t.real(12, 4), t.real(12, 4, 6), t.real(6)]),
    lambda t: call("ij,jk", [t.real(4, 12), t.real(12, 6)]),
    lambda t: call("ij->", [t.real(4, 12)]),
    lambda t: call("ij,k->k", [t.real(4, 12), t.real(6)]),
    lambda t: call("ii->i", [t.real(12, 12)]),
    lambda t: call("ii,j->j", [t.real(12, 12), t.real(4)]),
    lambda t: call("...i,ij->...j", [t.real(2, 4, 12), t.real(12, 6)]),
    lambda t: call("...ij,...jk->...ik", [t.real(12, 2, 4), t.real(12, 4, 6)]),
    lambda t: call("...ij,...jk->...ik", [t.real(4, 12, 2, 4), t.real(12, 4, 6)]),
    lambda t: call("...i,...i->...", [t.real(1, 12, 4), t.real(12, 1, 4)]),
    lambda t: call("b i, b i -> b", [t.real(12, 1), t.real(12, 4)]),
)

# --- attention --------------------------------------------------------------------------------------------------------

sample(
    aten.scaled_dot_product_attention.default,
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4)),
    lambda t: call(t.real(2, 12, 12, 3), t.real(2, 12, 12, 3), t.real(2, 12, 12, 4), None, 0.0, True),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.truth(2, 1, 4, 6) | torch.eye(4, 6).bool()),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.real(12, 4, 6), scale=0.3),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), t.real(1, 6)),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 2, 6, 3), t.real(2, 2, 6, 4), t.real(2, 24, 4, 6), enable_gqa=True),
    lambda t: call(t.real(2, 24, 4, 3), t.real(2, 1, 6, 3), t.real(2, 1, 6, 4), enable_gqa=True),
    lambda t: call(t.real(2, 12, 4, 3), t.real(2, 12, 6, 3), t.real(2, 12, 6, 4), enable_gqa=True),
    lambda t: call(t.real(12, 4, 3), t.real(12, 6, 3), t.real(12, 6, 4), is_causal=True),
    lambda t: call(t.real(2, 12, 4, 3), t.real(1, 12, 6, 3), t.real(1, 12, 6, 4)),
)

# --- convolutions and pools -------------------------------------------------------------------------------------------

samples(aten.conv1d.default)(
    lambda t: call(t.real(12, 4, 6), t.real(8, 4, 3), t.real(8), [2], [1]),
    lambda t: call(t.real(4, 12, 6), t.real(12, 12, 3)),
    lambda t: call(t.real(12, 6), t.real(8, 12, 3), t.real(8)),
    lambda t: call(t.real(2, 12, 6), t.real(12, 1, 3), t.real(12), [1], [0], [1], 12),
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
sample(aten.conv3d.padding, lambda t: call(t.real(2, 12, 3, 2, 4), t.real(4, 12, 2, 2, 2), t.real(4), [1, 1, 1], "valid"))
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
sample(aten.adaptive_avg_pool1d.default, lambda t: call(t.real(4, 12, 6), [4]))
samples(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)(
    lambda t: call(t.real(4, 12, 6, 6), [1, 1]), lambda t: call(t.real(12, 6, 6), [3, 4])
)
sample(aten.upsample_nearest1d.vec, lambda t: call(t.real(4, 12, 6), None, [2.0]), lambda t: call(t.real(4, 12, 6), [8], None))
sample(aten.upsample_nearest2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, [2.0, 2.0]))
sample(aten.upsample_bilinear2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, False, [2.0, 2.0]))

# --- normalisations ---------------------------------------------------------------------------------------------------

sample(
    aten.layer_norm.default,
    lambda t: call(t.real(4, 6, 12), [12], t.real(12), t.real(12)),
    lambda t: call(t.real(4, 6, 12), [6, 12], t.real(6, 12)),
    lambda t: call(t.real(4, 12), [12], None, t.real(12)),
)
sample(
    aten.native_layer_norm.default,
    lambda t: call(t.real(4, 6, 12), [12], t.real(12), t.real(12), 1e-5),
    lambda t: call(t.real(4, 6, 12), [6, 12], None, None, 1e-5),
)
sample(aten.rms_norm.default, lambda t: call(t.real(4, 6, 12), [12], t.real(12), 1e-6), lambda t: call(t.real(4, 6, 12), [6, 12]))
if hasattr(aten, "_fused_rms_norm"):
    sample(aten._fused_rms_norm.default, lambda t: call(t.real(4, 6, 12), [12], t.real(12), 1e-6))
sample(
    aten.group_norm.default,
    lambda t: call(t.real(4, 24, 6), 12, t.real(24), t.real(24)),
    lambda t: call(t.real(12, 12, 2, 3), 4),
    lambda t: call(t.real(4, 12), 1, t.real(12)),
)

# --- reductions -------------------------------------------------------------------------------------------------------

samples(aten.sum.dim_IntList, aten.mean.dim)(
    lambda t: call(t.real(4, 12, 6), [1]),
    lambda t: call(t.real(4, 12, 6), [-1, 0], True),
    lambda t: call(t.real(4, 12), None),
    lambda t: call(t.real(4, 12), []),
    lambda t: call(t.real(4, 12), [-1], dtype=torch.float32),
)
sample(aten.sum.dim_IntList, lambda t: call(t.truth(4, 12), [-1]), lambda t: call(t.index(9, 4, 12), [0], keepdim=True))
samples(aten.sum.default, aten.mean.default)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(12), dtype=torch.float32))
samples(aten.amax.default, aten.amin.default, aten.logsumexp.default)(
    lambda t: call(t.real(4, 12, 6), [1]), lambda t: call(t.real(4, 12, 6), [-1, 0], True)
)
samples(aten.amax.default, aten.amin.default)(lambda t: call(t.real(4, 12)))
samples(aten.any.dim, aten.all.dim)(
    lambda t: call(t.index(6, 4, 12) > 4, 1), lambda t: call(t.index(6, 4, 12) < 5, -2, True), lambda t: call(t.truth(4, 12, 6), -1)
)
samples(aten.any.dims, aten.all.dims)(
    lambda t: call(t.index(6, 4, 12, 2) > 4, [1, 2]),
    lambda t: call(t.truth(4, 12), None, True),
    lambda t: call(t.truth(4, 12, 2), [-1]),
)
samples(aten.argmax.default, aten.argmin.default)(
    lambda t: call(t.real(4, 12), 1), lambda t: call(t.real(4, 12), -2, True), lambda t: call(t.real(4, 12))
)
samples(aten.max.dim, aten.min.dim, aten.median.dim)(lambda t: call(t.real(4, 12, 6), 1), lambda t: call(t.real(4, 12), -2, True))
sample(aten.prod.dim_int, lambda t: call(t.real(4, 12, 6), 1), lambda t: call(t.real(4, 12), -2, True))
sample(aten.count_nonzero.dim_IntList, lambda t: call(t.index(2, 4, 12, 6), [1]), lambda t: call(t.index(2, 4, 12, 6), [-1, 0]))
samples(aten.any.default, aten.all.default)(lambda t: call(t.truth(4, 12)))
samples(aten.max.default, aten.min.default, aten.prod.default)(lambda t: call(t.real(4, 12)))
samples(aten.var.correction, aten.std.correction, aten.var_mean.correction)(
    lambda t: call(t.real(4, 12, 6), [1], correction=0),
    lambda t: call(t.real(4, 12, 6), [-1, 0], keepdim=True),
    lambda t: call(t.real(4, 12)),
)
samples(aten.var.dim, aten.std.dim)(lambda t: call(t.real(4, 12, 6), [1]), lambda t: call(t.real(4, 12, 6), [-1, 0], False, True))
sample(
    aten.linalg_vector_norm.default,
    lambda t: call(t.real(4, 12, 6), 2, [1]),
    lambda t: call(t.real(4, 12, 6), 3, [-1, 0], True),
    lambda t: call(t.real(4, 12)),
)
sample(aten.norm.ScalarOpt_dim, lambda t: call(t.real(4, 12, 6), 2, [1]), lambda t: call(t.real(4, 12, 6), 3, [-1, 0], True))
samples(aten.softmax.int, aten.log_softmax.int)(
    lambda t: call(t.real(4, 6, 12), -1), lambda t: call(t.real(4, 6, 12), 1), lambda t: call(t.real(4, 12), -1, torch.float32)
)
samples(aten._softmax.default, aten._log_softmax.default)(
    lambda t: call(t.real(4, 6, 12), -1, False),
    lambda t: call(t.real(4, 12), 0, False),
)
samples(
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.sort.default,
    aten.argsort.default,
    aten.glu.default,
)(lambda t: call(t.real(4, 6, 12), -1), lambda t: call(t.real(4, 12), 0))  # fmt: skip
samples(aten.sort.default, aten.argsort.default)(lambda t: call(t.real(4, 6, 12), 1, True), lambda t: call(t.real(4, 12)))
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

# --- elementwise ------------------------------------------------------------------------------------------------------

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
    aten.neg.default, aten.clone.default, aten.alias.default, aten.contiguous.default, aten.positive.default,
    aten.detach.default,
)(
    lambda t: call(t.real(4, 12)), lambda t: call(t.real(12, 4).t())
)
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
samples(
    aten.silu.default, aten.selu.default, aten.relu6.default, aten.square.default, aten.isfinite.default, aten.isinf.default,
    aten.isposinf.default, aten.isneginf.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.exp.default, aten.expm1.default,
    aten.sin.default, aten.cos.default, aten.abs.default, aten.sign.default, aten.floor.default, aten.erf.default,
    aten.logical_not.default,
    aten.hardtanh.default, aten.leaky_relu.default, aten.elu.default, aten.mish.default, aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.isnan.default,
)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(2, 3, 4)))  # fmt: skip
samples(aten.rsqrt.default, aten.sqrt.default, aten.log.default, aten.log1p.default, aten.reciprocal.default, aten.acos.default)(
    lambda t: call(t.positive(4, 12))
)
sample(aten.nan_to_num.default, lambda t: call(t.real(4, 12) / t.index(2, 4, 12)))
sample(aten.gelu.default, lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12), approximate="tanh"))
sample(aten.softplus.default, lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12), 2.0, 1.0))
samples(
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.logical_and.default, aten.logical_or.default,
    aten.bitwise_and.Tensor,
)(
    lambda t: call(t.truth(4, 12), t.truth(12)), lambda t: call(t.truth(4, 1, 6), t.truth(12, 1))
)
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
    aten.maximum.default, aten.minimum.default, aten.atan2.default, aten.pow.Tensor_Tensor, aten.eq.Tensor, aten.gt.Tensor,
    aten.le.Tensor,
    aten.ne.Tensor, aten.fmod.Tensor, aten.remainder.Tensor, aten.hypot.default, aten.clamp_min.Tensor,
)(
    lambda t: call(t.positive(4, 12), t.positive(4, 12)),
    lambda t: call(t.positive(4, 1, 12), t.positive(6, 1)),
    lambda t: call(t.positive(12), t.positive()),
)  # fmt: skip
samples(
    aten.pow.Tensor_Scalar, aten.eq.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar,
    aten.clamp_min.default, aten.clamp_max.default, aten.remainder.Scalar,
)(lambda t: call(t.positive(4, 12), 2.0))  # fmt: skip
sample(aten.pow.Scalar, lambda t: call(2.0, t.real(4, 12)))
sample(aten.bitwise_not.default, lambda t: call(t.truth(4, 12)))
sample(aten.bitwise_or.Tensor, lambda t: call(t.index(99, 4, 12), t.index(99, 12)))
sample(aten.div.Tensor_mode, lambda t: call(t.real(4, 12), t.real(12), rounding_mode="floor"))
sample(aten.floor_divide.default, lambda t: call(t.index(99, 4, 12), 7))
sample(aten.addcmul.default, lambda t: call(t.real(4, 12), t.real(12), t.real(4, 1), value=2.0))
sample(aten.addcdiv.default, lambda t: call(t.real(4, 12), t.real(12), t.positive(4, 1)))
sample(aten.lerp.Tensor, lambda t: call(t.real(4, 12), t.real(12), t.real(4, 1)))

# --- moving elements --------------------------------------------------------------------------------------------------

samples(aten.view.default, aten.reshape.default, aten._unsafe_view.default)(
    lambda t: call(t.real(4, 12, 6), [48, 6]),
    lambda t: call(t.real(4, 72), [4, 12, -1]),
    lambda t: call(t.real(12, 8), [8, 12]),
    lambda t: call(t.real(6, 4, 3), [4, 18]),
    lambda t: call(t.real(2, 1, 36), [12, 1, 6, 1]),
    lambda t: call(t.real(1), []),
)
sample(aten.reshape.default, lambda t: call(t.real(12, 4).t(), [48]), lambda t: call(t.real(4, 6, 12).transpose(1, 2), [12, 24]))
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
    lambda t: call(t.real(4, 1, 12), [-1, 6, -1]), lambda t: call(t.real(1, 12), [4, 6, 12]), lambda t: call(t.real(), [4, 12])
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
)
sample(
    aten.slice.Tensor,
    lambda t: call(t.real(4, 12), 1, 0, 6),
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
sample(aten.constant_pad_nd.default, lambda t: call(t.real(4, 12), [1, 2]), lambda t: call(t.real(4, 6, 12), [0, 0, 1, -1], 2.0))
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

# --- look-ups ---------------------------------------------------------------------------------------------------------

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

# --- making tensors ---------------------------------------------------------------------------------------------------

sample(aten.full.default, lambda t: call([4, 12], 3.0, dtype=torch.float64), lambda t: call([], 3.0))
samples(aten.zeros.default, aten.ones.default, aten.empty.memory_format)(lambda t: call([4, 12], dtype=torch.float64))
sample(aten.new_full.default, lambda t: call(t.real(6), [4, 12], 3.0))
samples(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)(lambda t: call(t.real(6), [4, 12]))
sample(aten.arange.default, lambda t: call(12))
sample(aten.arange.start, lambda t: call(3, 15))
sample(aten.arange.start_step, lambda t: call(0, 24, 2))
sample(aten.linspace.default, lambda t: call(0.0, 1.0, 12, dtype=torch.float64))
sample(aten.scalar_tensor.default, lambda t: call(3.0))
sample(aten.eye.default, lambda t: call(12))
sample(aten.eye.m, lambda t: call(4, 12))
sample(aten.lift_fresh_copy.default, lambda t: call(t.real(4, 12)))
samples(aten.tril_indices.default, aten.triu_indices.default)(lambda t: call(4, 6))

# --- linear algebra ---------------------------------------------------------------------------------------------------

samples(
    aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.linalg_det.default, aten.linalg_slogdet.default,
    aten.linalg_svdvals.default, aten.linalg_qr.default, aten.linalg_pinv.atol_rtol_float, aten.pinverse.default,
    aten.matrix_exp.default, aten.linalg_cond.default, aten.linalg_lu_factor.default,
)(lambda t: call(t.real(4, 6, 6)), lambda t: call(t.real(2, 6, 3, 3)), lambda t: call(t.real(6, 6)))  # fmt: skip
samples(
    aten.linalg_cholesky.default, aten.linalg_cholesky_ex.default, aten.cholesky.default, aten.cholesky_inverse.default,
    aten.logdet.default, aten.linalg_eigvalsh.default,
)(lambda t: call(t.definite(12, 3)), lambda t: call(t.definite(2, 6, 2)))  # fmt: skip
sample(aten.linalg_matrix_power.default, lambda t: call(t.real(12, 3, 3), 3))
sample(aten.linalg_eigh.default, lambda t: call(t.definite(12, 3)))
sample(aten.linalg_svd.default, lambda t: call(t.index(9, 12, 4, 3).double(), False))
sample(
    aten.linalg_solve.default,
    lambda t: call(t.real(12, 3, 3), t.real(12, 3, 4)),
    lambda t: call(t.real(12, 3, 3), t.real(12, 3)),
    lambda t: call(t.real(4, 1, 3, 3), t.real(6, 3, 2)),
    lambda t: call(t.real(3, 3), t.real(3)),
)
sample(aten.linalg_solve_triangular.default, lambda t: call(t.definite(12, 3), t.real(12, 3, 4), upper=False))
sample(aten.cholesky_solve.default, lambda t: call(t.real(12, 3, 4), t.definite(12, 3)))
sample(aten.linalg_matrix_norm.default, lambda t: call(t.real(12, 3, 4), 2), lambda t: call(t.real(3, 12, 4), 1, [0, -1], True))
sample(aten.linalg_matrix_norm.str_ord, lambda t: call(t.real(12, 3, 4)), lambda t: call(t.real(3, 12, 4), "nuc", [0, -1], True))
sample(
    aten.cdist.default,
    lambda t: call(t.real(12, 3), t.real(6, 3)),
    lambda t: call(t.real(2, 6, 3), t.real(2, 4, 3), 1.0),
    lambda t: call(t.real(4, 1, 6, 3), t.real(12, 4, 3)),
)
sample(aten.pdist.default, lambda t: call(t.real(12, 3)))
sample(aten.trace.default, lambda t: call(t.real(6, 6)))

# --- Fourier transforms and complex numbers ---------------------------------------------------------------------------

samples(
    aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default, aten.fft_hfft.default,
    aten.fft_ihfft.default,
)(lambda t: call(t.real(4, 12)), lambda t: call(t.real(4, 12, 6), 8, 1, "ortho"))  # fmt: skip
samples(
    aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_irfft2.default, aten.fft_hfft2.default,
    aten.fft_ihfft2.default, aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default,
    aten.fft_hfftn.default, aten.fft_ihfftn.default,
)(lambda t: call(t.real(12, 4, 6), None, [-2, -1]), lambda t: call(t.real(4, 12, 6), [8, 4], [0, -1], "ortho"))  # fmt: skip
sample(aten.fft_fft2.default, lambda t: call(t.real(12, 4, 6)))
samples(aten.fft_fftn.default, aten.fft_rfftn.default)(lambda t: call(t.real(12, 4, 6), [4, 4]), lambda t: call(t.real(4, 6)))
sample(
    aten.stft.center,
    lambda t: call(t.real(12, 16), 4, 2, 4, t.positive(4), return_complex=True),
    lambda t: call(t.real(16), 4, 2, 4, t.positive(4), False, return_complex=True),
)
sample(aten.istft.default, lambda t: call(torch.view_as_complex(t.real(12, 3, 9, 2)), 4, 2, 4, torch.ones(4).double()))
sample(aten.view_as_real.default, lambda t: call(torch.view_as_complex(t.real(4, 12, 2))))
sample(aten.view_as_complex.default, lambda t: call(t.real(4, 12, 2)))
samples(aten.real.default, aten.imag.default)(lambda t: call(torch.view_as_complex(t.real(4, 12, 2))))
sample(aten.complex.default, lambda t: call(t.real(4, 12), t.real(12)))
sample(aten.polar.default, lambda t: call(t.positive(4, 12), t.real(12)))

# --- images, sequences, norms -----------------------------------------------------------------------------------------

sample(aten.conv_transpose2d.input, lambda t: call(t.real(2, 24, 3, 2), t.real(24, 4, 2, 2), t.real(48), [2, 2], [0, 0], [0, 0], 12))
samples(aten.max_pool1d_with_indices.default)(lambda t: call(t.real(4, 12, 12), [2], [2]))
samples(aten.max_pool3d_with_indices.default)(lambda t: call(t.real(2, 12, 4, 4, 6), [2, 2, 2], [2, 2, 2]))
samples(aten.adaptive_max_pool1d.default)(lambda t: call(t.real(4, 12, 6), [4]))
samples(aten.adaptive_max_pool2d.default)(lambda t: call(t.real(4, 12, 6, 6), [2, 3]), lambda t: call(t.real(12, 6, 6), [3, 4]))
samples(aten.adaptive_max_pool3d.default, aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)(
    lambda t: call(t.real(2, 12, 4, 4, 6), [2, 2, 2])
)
sample(aten._upsample_nearest_exact1d.vec, lambda t: call(t.real(4, 12, 6), None, [2.0]))
sample(aten._upsample_nearest_exact2d.vec, lambda t: call(t.real(4, 12, 6, 4), None, [2.0, 2.0]))
samples(aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec)(lambda t: call(t.real(2, 12, 2, 3, 2), None, [2.0, 2.0, 2.0]))
sample(aten.upsample_linear1d.vec, lambda t: call(t.real(4, 12, 6), None, False, [2.0]))
samples(aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)(
    lambda t: call(t.real(4, 12, 6, 4), None, False, [2.0, 2.0]), lambda t: call(t.real(4, 12, 6, 4), [3, 8], True, None)
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
sample(
    aten.instance_norm.default,
    lambda t: call(t.real(4, 12, 6), t.real(12), t.real(12), None, None, True, 0.1, 1e-5, False),
    lambda t: call(t.real(12, 4, 3, 2), None, None, None, None, True, 0.1, 1e-5, False),
)
samples(aten._weight_norm.default, aten._weight_norm_interface.default)(
    lambda t: call(t.real(12, 4, 3), t.positive(12, 1, 1)), lambda t: call(t.real(4, 3, 12), t.positive(1, 1, 12), 2)
)
sample(aten._weight_norm.default, lambda t: call(t.real(4, 12), t.positive(), -1))
sample(
    aten.prelu.default,
    lambda t: call(t.real(4, 12, 6), t.real(12)),
    lambda t: call(t.real(4, 12), t.real(1)),
    lambda t: call(t.real(12), t.real(1)),
)
samples(
    aten.smooth_l1_loss.default, aten.huber_loss.default, aten.binary_cross_entropy_with_logits.default, aten.mse_loss.default,
)(lambda t: call(t.real(4, 12), t.positive(4, 12), reduction=0), lambda t: call(t.real(4, 12), t.positive(4, 12)))  # fmt: skip
sample(
    aten.binary_cross_entropy_with_logits.default, lambda t: call(t.real(4, 12), t.positive(4, 12), None, t.constant(t.positive(12)), 0)
)
sample(
    aten.binary_cross_entropy.default,
    lambda t: call(t.positive(4, 12), t.positive(4, 12), None, 0),
    lambda t: call(t.positive(4, 12), t.positive(4, 12)),
)
sample(aten.soft_margin_loss.default, lambda t: call(t.real(4, 12), 2 * t.index(2, 4, 12) - 1, 0))
sample(aten.kl_div.default, lambda t: call(t.real(4, 12), t.positive(4, 12), 0), lambda t: call(t.real(4, 12), t.positive(4, 12)))
sample(
    aten.lstm.input,
    lambda t: call(
        t.real(2, 12, 3), [t.real(1, 12, 2), t.real(1, 12, 2)], [t.real(8, 3), t.real(8, 2), t.real(8), t.real(8)],
        True, 1, 0.0, True, False, False,
    ),
    lambda t: call(
        t.real(12, 2, 3), [t.real(2, 12, 2), t.real(2, 12, 2)], [t.real(8, 3), t.real(8, 2), t.real(8, 3), t.real(8, 2)],
        False, 1, 0.0, True, True, True,
    ),
)  # fmt: skip
sample(
    aten.gru.input,
    lambda t: call(t.real(2, 12, 3), t.real(1, 12, 2), [t.real(6, 3), t.real(6, 2), t.real(6), t.real(6)], True, 1, 0.0, True, False, False),
)
samples(aten.rnn_tanh.input, aten.rnn_relu.input)(
    lambda t: call(t.real(12, 2, 3), t.real(1, 12, 2), [t.real(2, 3), t.real(2, 2)], False, 1, 0.0, True, False, True),
)

# --- more look-ups, reductions and views ------------------------------------------------------------------------------

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
samples(aten.nanmedian.dim, aten.mode.default)(lambda t: call(t.real(4, 12, 6), 1), lambda t: call(t.real(4, 12), -2, True))
sample(aten.kthvalue.default, lambda t: call(t.real(4, 12, 6), 2, 1), lambda t: call(t.real(4, 12), 2, -2, True))
samples(aten.median.default, aten.nanmedian.default)(lambda t: call(t.real(4, 12)))
sample(aten.cummin.default, lambda t: call(t.real(4, 6, 12), -1))
sample(aten.histc.default, lambda t: call(t.real(24), 6, -1, 1), lambda t: call(t.real(24), 6))
sample(aten.as_strided.default, lambda t: call(t.real(4, 12), [4, 6], [12, 2]))
sample(aten.masked_scatter.default, lambda t: call(t.real(4, 12), t.truth(4, 12), t.real(4, 12)))
sample(aten.put.default, lambda t: call(t.real(4, 12), t.orders(48, 6), t.real(6)))
sample(aten.diagonal.default, lambda t: call(t.real(12, 4, 4), 0, 1, 2), lambda t: call(t.real(4, 12, 6), 1, -1, 0))
sample(aten.diag_embed.default, lambda t: call(t.real(12, 4)), lambda t: call(t.real(4, 12, 3), 1, 0, 2))
sample(aten.unfold.default, lambda t: call(t.real(4, 12), 1, 4, 2), lambda t: call(t.real(12, 4, 6), 0, 2, 2))

# --- shardc's own -----------------------------------------------------------------------------------------------------

sample(
    ops.dropout,
    lambda t: call(t.real(4, 12), 0.5, RNG, 0),
    lambda t: call(t.real(2, 6, 12), 0.3, RNG, 3),
)
sample(ops.batch_stat, lambda t: call(t.real(12), t.real(12), RNG))
sample(
    ops.nll,
    lambda t: call(t.real(12, 24), t.index(24, 12), -100),
    lambda t: call(t.real(4, 12, 6), t.index(12, 4, 6), 3),
    lambda t: call(t.real(12, 12), torch.where(t.truth(12), -100, t.index(12, 12)), -100),
    lambda t: call(t.real(12), t.index(12), -100),
)
