"""Rules of scaled dot product attention, kept as one op.

It is torch's op, so that fused kernels run, or shardc's where attention weights are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import REPLICATE, Layout, Placement, Shard, runs
from shardc.machine.flops import attention_flops
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, NoSuchCallError, rule
from shardc.rules.core.strategy import Strategy, needs_sum_grad, splits_of
from shardc.rules.random import local_part
from shardc.runtime import ops
from shardc.runtime.ops.attention.held import Held
from shardc.runtime.ops.attention.spans import ALL, CAUSAL, Band, Span, seen

aten = torch.ops.aten
#: Both take queries, keys and values first, then the other arguments in the same order.
OPS = (aten.scaled_dot_product_attention.default, ops.attention)
#: The kind of the strategy by which keys travel.
RING = "ring"


def attention(call: Call) -> Signature:
    """Split batch, heads (grouped queries: kv heads) and the queries' sequence; keys stay whole.

    q[..., h, s, d], k[..., g, t, d], v[..., g, t, e]. With grouped queries h = (g, r). If keys and values have
    different groups, h = (g, m, r): one of them has g heads, the other (g, m). A rank knows which query rows it has,
    for a causal mask (`local_attention`).
    """
    q, k, v = (o.shape for o in call.operands[:3])
    out = call.results[0].shape
    batch = [f"b{i}" for i in range(len(out) - 2)]
    full, query, key, value = ([*batch[len(batch) + 2 - len(x) :]] for x in (out, q, k, v))  # they broadcast
    sizes: dict[str, int] = {}
    if batch and len(k) > 2 and len(q) > 2 and call.arg("enable_gqa"):  # without enable_gqa heads broadcast
        few, many = sorted((k[-3], v[-3]))
        if many % few:  # groups that overlap
            full[-1], query[-1], key[-1], value[-1] = "h!", "h!", "gk!", "gv!"
        else:
            sizes = {"g": few, "m": many // few, "r": q[-3] // many}
            full[-1] = query[-1] = "g m r"
            key[-1], value[-1] = ("g m" if x[-3] == many else "g" for x in (k, v))
    ins = [[*query, "s", "d!"], [*key, "t!", "d!"], [*value, "t!", "e!"]]
    if len(call.operands) > 3:
        mask, dims = call.operands[3].shape, [*full, "s", "t!"]
        ins.append(["" if n == 1 else d for d, n in zip(dims[len(dims) - len(mask) :], mask, strict=True)])
    return call.fit(ins, [[*full, "s", "e!"]], **sizes)


def _flops(call: Call) -> int:
    q, k, v = (o.shape for o in call.operands[:3])
    return attention_flops(q, k, v)


def by_ring(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split queries and keys by their sequences; keys and values travel in a ring.

    Placement uses them only for `sequence: {method: ring}`. There are none if the mask needs a gradient.
    """
    q, k, v, *masks = call.operands
    out, mask = call.results[0], masks[0] if masks else None
    if len(out.shape) > 4 or (mask is not None and needs_sum_grad(mask)):
        return

    def at(x: Value, p: Shard) -> Shard:
        return replace(p, dim=len(x.shape) - 2)

    for rows in splits_of(q, {len(q.shape) - 2}, n, available[0]):
        for keys in splits_of(k, {len(k.shape) - 2}, n, available[1]):
            ins: list[Placement] = [rows, keys, at(v, keys)]
            if mask is not None:
                split = len(mask.shape) > 1 and mask.shape[-2] == q.shape[-2] and mask.shape[-2] > 1
                ins.append(at(mask, rows) if split else REPLICATE)
            yield Strategy(RING, tuple(ins), (at(out, rows),))


def sent_by_ring(call: Call, rows: Shard, keys: Shard, n: int) -> float:
    """Return the keys that a rank sends in a ring of n ranks, in units of one rank's share, mean of ranks.

    It is n - 1 where every row sees every key.
    """
    q, k = call.operands[:2]

    def spans(p: Shard, size: int, rank: int) -> list[Span]:
        return [Span(start, local, length) for local, start, length in runs(size, [(p, n, rank)])]

    band = CAUSAL if call.arg("is_causal") else Band(*(dict(call.kwargs).get("window") or ALL))
    owned = [spans(keys, k.shape[-2], r) for r in range(n)]
    asked = [spans(rows, q.shape[-2], r) for r in range(n)]
    sent = sum(s.length for r in range(n) for o in range(n) if o != r for s in seen(asked[r], owned[o], band))
    return sent / (keys.padded(k.shape[-2]) or 1)


def local_attention(call: LocalCall) -> fx.Node:
    """Rewrite the call for a rank: its share of the dropped weights, and in a ring the exchange of keys.

    Attention weights are split as the result is, except for the last dim: every rank has, or receives, all keys.
    """
    digits, paddings = local_part(call)
    weights = (*call.call.results[0].shape[:-1], call.call.operands[1].shape[-2])
    last, t = len(weights) - 1, len(call.call.operands[1].shape) - 2
    digits = tuple(d for d in digits if d[0] != last)
    ring = call.axes(RING)
    window = {k: v for k, v in call.kwargs.items() if k == "window"}
    if not ring:
        args = (*call.args[:10], call.mesh_node, weights, digits, *((paddings,) if paddings else ()))
        return call.emit(call.call.target, args, window) if digits else call.same()
    keys = call.inputs[1]
    digits = (*digits, *((last, axis, s.signed, s.sections) for axis, s in keys.shards(t)))
    paddings = (*paddings, *((last, s.padding, s.blocks) for s in keys.paddings() if s.dim == t))
    axis, *others = call.mesh.merge(ring)
    if others:
        raise NoSuchCallError("keys travel over one axis")
    args = (*call.args[:10], call.mesh_node, weights, digits, paddings, axis)
    size = sum(
        replace(v, layout=p).nbytes(call.mesh) for v, p in zip(call.call.operands[1:3], call.inputs[1:], strict=False)
    )
    rows, key_rows = call.inputs[0][axis], keys[axis]
    assert isinstance(rows, Shard)
    assert isinstance(key_rows, Shard)
    size = round(size * sent_by_ring(call.call, rows, key_rows, call.mesh.size(axis)))
    collective = Collective("all_to_all", "all_to_all", (axis,), size)
    return call.emit(call.call.target, args, window | _reach(call, axis, args), collective=collective)


def _reach(call: LocalCall, axis: str, args: tuple[Any, ...]) -> dict[str, fx.Node]:
    """Emit a small message that shares what a mask allows, once for all attention under this mask."""
    mask, (mesh, weights, *of_weights, _) = args[3], args[10:]
    if mask is None or call.call.operands[3].shape[-1:] != weights[-1:]:
        return {}
    digits, paddings = (tuple(d for d in each if d[0] == len(weights) - 2) for each in of_weights)
    value = Value(
        (call.mesh.size(axis), Held(weights, digits, paddings, call.mesh).stretches(), 2), torch.int64, False, Layout()
    )
    gather = Collective("all_gather", "none", (axis,), value.nbytes(call.mesh))
    where = (mask, mesh, axis, weights, digits, *((paddings,) if paddings else ()))
    return {"reach": call.emit(ops.attention_reach, where, {"tag": ""}, value=value, collective=gather, once="reach")}


def local_torch(call: LocalCall) -> fx.Node:
    """Use shardc's op where rows are split under a causal mask, or in a ring: torch's counts rows from 0."""
    causal = call.call.arg("is_causal")
    if not (call.axes(RING) or (causal and call.split("s"))):
        return call.same()
    mask = next(iter(call.args[3:4]), call.kwargs.get("attn_mask"))
    options = (call.call.arg("scale"), call.call.arg("enable_gqa"))
    converted = replace(call, args=(*call.args[:3], mask, 0.0, causal, *options, None, 0))
    converted.call = replace(call.call, target=OPS[1])
    return local_attention(converted)


rule(OPS[0], attention, linear="2", flops=_flops, local=local_torch, extra=by_ring)
rule(OPS[1], attention, linear="2", flops=_flops, local=local_attention, extra=by_ring)
