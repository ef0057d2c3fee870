"""Rules of normalisations: the normalised dims stay whole, every other dim may be split."""

from __future__ import annotations

import torch
from torch import fx

from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule

aten = torch.ops.aten


def layer_norm(call: Call) -> Signature:
    """Keep the dims of normalized_shape whole in layer_norm and rms_norm; weight and bias have just those."""
    x = call.operands[0].shape
    last = len(call.arg(1, "normalized_shape"))
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(x)))
    inner = names[len(x) - last :]
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    stats = (*names[: len(x) - last], *[()] * last)
    ins = (names, *[inner for _ in call.operands[1:]])
    outs = tuple(names if r.shape == x else stats for r in call.results)
    return Signature(ins, outs, sizes, frozenset(), frozenset(n for (n,) in inner if n))


rule(aten.layer_norm.default, layer_norm)
rule(aten.native_layer_norm.default, layer_norm)
rule(aten.rms_norm.default, layer_norm)
if hasattr(aten, "_fused_rms_norm"):
    rule(aten._fused_rms_norm.default, layer_norm)


def group_norm(call: Call) -> Signature:
    """Split batch and groups of x[n, (g c), ...]: channels are normalised in groups, which stay whole."""
    x = call.operands[0].shape
    groups = call.arg(1, "num_groups")
    sizes = {"n": x[0], "g": groups, "c": x[1] // groups} | {f"s{i}": s for i, s in enumerate(x[2:])}
    space: tuple[Dim, ...] = tuple((f"s{i}",) for i in range(len(x) - 2))
    full: tuple[Dim, ...] = (("n",), ("g", "c"), *space)
    ins = (full, *[(("g", "c"),) for _ in call.operands[1:]])
    return Signature(ins, (full,), sizes, frozenset(), frozenset({"c", *(f"s{i}" for i in range(len(space)))}))


def local_group_norm(call: LocalCall) -> fx.Node:
    whole, groups = call.call.operands[0].shape, call.call.arg(1, "num_groups")
    groups = call.inputs[0].local_shape(whole, call.mesh)[1] // (whole[1] // groups)
    return call.same(_1=groups)


rule(aten.group_norm.default, group_norm, local=local_group_norm)


def instance_norm(call: Call) -> Signature:
    """Split images and channels of x[n, c, ...]; running statistics are means over images: n stays whole."""
    x = call.operands[0].shape
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(x)))
    ins = (names, *[(names[1],) for _ in call.operands[1:]])
    whole = {f"d{i}" for i in range(2, len(x))} | (
        {"d0"} if isinstance(call.arg(3, "running_mean"), Operand) else set()
    )
    return Signature(ins, (names,), {f"d{i}": s for i, s in enumerate(x)}, frozenset(), frozenset(whole))


rule(aten.instance_norm.default, instance_norm, linear=lambda c: "1 2" if len(c.operands) == 3 else "")


def weight_norm(call: Call) -> Signature:
    """Split the one dim without a norm in v, g -> g * v / |v|; dim=-1: the norm is over all dims."""
    v, g, d = call.operands[0].shape, call.operands[1].shape, call.arg(2, "dim", 0)
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(v)))
    gains: tuple[Dim, ...] = tuple(n if i == d else () for i, n in enumerate(names))[: len(g)]
    whole = frozenset(f"d{i}" for i in range(len(v)) if i != d)
    outs = (names, *(gains for _ in call.results[1:]))
    return Signature((names, gains), outs, {f"d{i}": s for i, s in enumerate(v)}, frozenset(), whole)


rule(aten._weight_norm.default, weight_norm, linear="1")
rule(aten._weight_norm_interface.default, weight_norm)
