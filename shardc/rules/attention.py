"""Scaled dot product attention, kept as one op: torch's, so that the fused kernels run, and ours where weights are
dropped."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from shardc.rules.notation import Dim, Signature
from shardc.rules.op_call import Call
from shardc.rules.random import part_held
from shardc.rules.registry import LocalCall, rule
from shardc.runtime import ops

aten = torch.ops.aten
#: Both have queries, keys and values first, and their other arguments in one order.
OPS = (aten.scaled_dot_product_attention.default, ops.attention)


def attention(call: Call) -> Signature:
    """q[..., h, s, d], k[..., g, t, d], v[..., g, t, e]: heads and batch split. With grouped queries h = (g, r): kv
    heads g split.

    If keys and values come in different groups, h = (g, m, r), where one has g heads and the other (g, m).
    Queries split over their sequence too: where a causal mask counts rows, a rank knows which are its own
    (`local_attention`). Keys are reduced over: they stay whole.
    """
    q, k, v = (o.shape for o in call.operands[:3])
    out = call.results[0].shape
    lead = len(out) - 2
    sizes = {"s": q[-2], "t": k[-2], "d": q[-1], "e": v[-1]} | {f"b{i}": s for i, s in enumerate(out[:-2])}

    def leading(shape: tuple[int, ...]) -> list[Dim]:
        """Batch and heads, counted from the right: they may be missing or have size one, and broadcast then."""
        own = shape[:-2]
        return [
            (f"b{lead - len(own) + i}",) if s == out[lead - len(own) + i] and s != 1 else () for i, s in enumerate(own)
        ]

    full_query: list[Dim] = leading(out)
    query, key, value = leading(q), leading(k), leading(v)
    whole = {"t", "d", "e"}
    if lead and len(k) > 2 and len(q) > 2 and call.arg(7, "enable_gqa"):  # without the word heads broadcast
        few, many = sorted((k[-3], v[-3]))
        sizes |= {"g": few, "m": many // few, "r": q[-3] // many}
        full_query[-1] = query[-1] = ("g", "m", "r")
        key[-1], value[-1] = (("g", "m") if x[-3] == many else ("g",) for x in (k, v))
        if many % few:  # groups that cut through each other
            sizes |= {"gk": k[-3], "gv": v[-3], "h": q[-3]}
            whole |= {"gk", "gv", "h"}
            full_query[-1], query[-1], key[-1], value[-1] = ("h",), ("h",), ("gk",), ("gv",)
    ins: list[tuple[Dim, ...]] = [(*query, ("s",), ("d",)), (*key, ("t",), ("d",)), (*value, ("t",), ("e",))]
    if len(call.operands) > 3:
        mask = call.operands[3].shape
        full = [*full_query, ("s",), ("t",)]
        skip = len(full) - len(mask)
        shape = (*out[:-2], q[-2], k[-2])
        ins.append(
            tuple(n if s == f and s != 1 else () for n, s, f in zip(full[skip:], mask, shape[skip:], strict=True))
        )
    return Signature(tuple(ins), ((*full_query, ("s",), ("e",)),), sizes, frozenset(), frozenset(whole))


def attention_flops(call: Call) -> int:
    q, k, v = (o.shape for o in call.operands[:3])
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def local_attention(call: LocalCall) -> fx.Node:
    """The weights that a rank drops are split as its result is, but for the last dim: every rank has all keys."""
    digits, paddings = part_held(call)
    weights = (*call.call.results[0].shape[:-1], call.call.operands[1].shape[-2])
    args = (*call.args[:10], call.mesh_node, weights, digits, *((paddings,) if paddings else ()))
    return call.emit(call.call.target, args, {}) if digits else call.same()


def local_causal(call: LocalCall) -> fx.Node:
    """torch's op counts rows from zero: with a part of the queries it is ours, which knows which they are."""
    if not (call.call.arg(5, "is_causal", False) and call.split("s")):
        return call.same()
    own = (call.call.arg(6, "scale"), call.call.arg(7, "enable_gqa", False))
    ours = replace(call, args=(*call.args[:3], None, 0.0, True, *own, None, 0))
    ours.call = replace(call.call, target=OPS[1])
    return local_attention(ours)


rule(OPS[0], attention, linear="2", flops=attention_flops, local=local_causal)
rule(OPS[1], attention, linear="2", flops=attention_flops, local=local_attention)
