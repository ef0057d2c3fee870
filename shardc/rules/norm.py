"""Rules of normalisations: the normalised dims stay whole, every other dim may be split."""

from __future__ import annotations

import torch
from torch import fx

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import names_of, whole_names

aten = torch.ops.aten


def layer_norm(call: Call) -> Signature:
    """Keep the dims of normalized_shape whole in layer_norm and rms_norm; weight and bias have just those."""
    n, last = len(call.operands[0].shape), len(call.arg("normalized_shape"))
    names = names_of(n, range(n - last, n))
    inner, stats = names[n - last :], [*names[: n - last], *[""] * last]
    return call.fit([names, *[inner] * (len(call.operands) - 1)], [names, *[stats] * (len(call.results) - 1)])


rules("layer_norm native_layer_norm rms_norm", layer_norm)
if hasattr(aten, "_fused_rms_norm"):
    rule(aten._fused_rms_norm.default, layer_norm)


def group_norm(call: Call) -> Signature:
    """Split batch and groups of x[n, (g c), ...]: channels are normalised in groups, which stay whole."""
    full = ["n", "g c!", *whole_names(call.operands[0], "s")[2:]]
    return call.fit([full, *[["g c"]] * (len(call.operands) - 1)], [full], g=call.arg("num_groups"))


def local_group_norm(call: LocalCall) -> fx.Node:
    channels_of_a_group = call.call.operands[0].shape[1] // call.call.arg("num_groups")
    return call.same(num_groups=call.local(0)[1] // channels_of_a_group)


rule(aten.group_norm.default, group_norm, local=local_group_norm)


def instance_norm(call: Call) -> Signature:
    """Split images and channels of x[n, c, ...]; running statistics are means over images: n stays whole."""
    over_images = isinstance(call.arg("running_mean"), Operand)
    full = ["n!" if over_images else "n", "c", *whole_names(call.operands[0], "s")[2:]]
    return call.fit([full, *[["c"]] * (len(call.operands) - 1)], [full])


rule(aten.instance_norm.default, instance_norm, linear=lambda c: "1 2" if len(c.operands) == 3 else "")


def weight_norm(call: Call) -> Signature:
    """Split the one dim without a norm in v, g -> g * v / |v|; dim=-1: the norm is over all dims."""
    v, g = (len(x.shape) for x in call.operands)
    d = call.arg("dim")
    names = names_of(v, set(range(v)) - {d})
    gains = [n if i == d else "" for i, n in enumerate(names)][:g]
    return call.fit([names, gains], [names, *[gains] * (len(call.results) - 1)])


rule(aten._weight_norm.default, weight_norm, linear="1")
rule(aten._weight_norm_interface.default, weight_norm)
