"""Rules of elementwise ops: every dim is a factor. Most are found by torch's own tag, not by a list."""

from __future__ import annotations

import torch
from torch import fx

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import all_whole, broadcast, each_operand, names_of, whole_names
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers shardc::with_gradient_of)

aten = torch.ops.aten


def to_float(call: Call) -> str:
    """Return the linear operands of a cast: x, between floating dtypes; others cut off digits of the sum."""
    return "0" if call.results[0].dtype.is_floating_point and call.operands[0].dtype.is_floating_point else ""


def fill_zero(call: Call) -> str:
    """Return the linear operands of a fill: the filled tensor, if the value is zero."""
    return "0" if call.arg("value") == 0 and not isinstance(call.arg("value"), Operand) else ""


rules("add.Tensor sub.Tensor", broadcast, linear="0 1")
rule(aten.mul.Tensor, broadcast, linear=each_operand)
rule(aten.where.self, broadcast, linear="1 2")
rule(aten.masked_fill.Scalar, broadcast, linear=fill_zero)
rules(
    "mul.Scalar div.Tensor div.Scalar neg clone alias contiguous positive resolve_conj lift_fresh_copy detach",
    broadcast,
    linear="0",
)
rules("_to_copy to.dtype to.dtype_layout to.device", broadcast, linear=to_float)
rules("lerp.Scalar lerp.Tensor addcdiv", broadcast, linear="0 1")
rule(aten.addcmul.default, broadcast, linear="0 1 | 0 2")
rule(aten.masked_fill.Tensor, broadcast, linear="0 2")


def first_only(call: Call) -> Signature:
    """Split dims of the first operand elementwise; keep the others whole (type_as, fake_quantize)."""
    names = names_of(len(call.results[0].shape))
    return call.fit([names, *(whole_names(v, f"x{j}_") for j, v in enumerate(call.operands) if j)], [names])


def unreduced(call: Call) -> Signature:
    """Split elementwise losses, as the canonical pass leaves them; keep all whole if the loss reduces."""
    return broadcast(call) if call.arg("reduction") == 0 else all_whole(call)


rules(
    "smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss binary_cross_entropy_with_logits kl_div mse_loss",
    unreduced,
)


def prelu(call: Call) -> Signature:
    """Split x[n, c, ...], with one slope per channel or one for all."""
    x, w = (v.shape for v in call.operands)
    names = names_of(len(x))
    slopes = [names[1] if len(x) > 1 and w[0] == x[1] else ""] if w else []
    return call.fit([names, slopes], [names])


rule(aten.prelu.default, prelu)


def per_channel(call: Call) -> Signature:
    """Split fake_quantize(x, scale[c], zero[c], dim): every channel has its own scale and zero."""
    names = names_of(len(call.operands[0].shape))
    channel = [names[int(call.arg("axis"))]]
    return call.fit([names, channel, channel], [names])


rules("fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine.tensor_qparams", first_only)
rule(aten.fake_quantize_per_channel_affine.default, per_channel)
rule(aten.type_as.default, first_only, linear=to_float)

rule(torch.ops.shardc.with_gradient_of.default, broadcast, linear="0 1")

# pointwise, but torch does not tag them (or composites that canonical graphs keep)
rules(
    "where.ScalarSelf where.ScalarOther where.Scalar silu gelu selu relu6 softplus __and__.Tensor __or__.Tensor "
    "__xor__.Tensor zeros_like ones_like full_like empty_like hardswish leaky_relu log_sigmoid floor_divide clamp "
    "isfinite isinf isposinf isneginf float_power.Tensor_Scalar square",
    broadcast,
)


def local_size(call: LocalCall) -> fx.Node:
    """Replace the size by that of the rank's part."""
    return call.same(size=list(call.out_shape))
