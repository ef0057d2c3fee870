"""Recurrent layers: dropout between the layers becomes an op of its own, so that its masks do not know the mesh.

    lstm(x, [h, c], weights, .., 2 layers, dropout=0.1)    ->    y = lstm(x, [h[:1], c[:1]], weights[:4], .., 1 layer, dropout=0)
                                                                 lstm(dropout(y, 0.1), [h[1:], c[1:]], weights[4:], ..)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from shardc.passes.canonical_emit import Args, Emit, Result, rewrite, value
from shardc.program import Value

aten = torch.ops.aten


@rewrite("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(emit: Emit, a: Args, out: tuple[Value, ...]) -> Result:
    """Without dropout it stays one op. Packed sequences (whose lengths are data) are refused."""
    if a.op._overloadname != "input":
        raise emit.refuse(
            f"{a.op_name} on a packed sequence: its shapes depend on the sequences' lengths",
            "give the padded batch to the layer; the loss may ignore what is padding",
        )
    states = list(a.hx) if isinstance(a.hx, (list, tuple)) else [a.hx]
    single = not isinstance(a.hx, (list, tuple))
    directions, layers = 2 if a.bidirectional else 1, a.num_layers

    def run(x: fx.Node, states: Sequence[fx.Node], params: Sequence[fx.Node], layers: int) -> tuple[fx.Node, ...]:
        hx = states[0] if single else list(states)
        node = emit(a.op, x, hx, list(params), a.has_biases, layers, 0.0, a.train, a.bidirectional, a.batch_first)
        types: tuple[Value, ...] = node.meta["value"]
        return tuple(emit.typed(v, operator.getitem, node, i) for i, v in enumerate(types))

    if layers == 1 or a.dropout <= 0 or not a.train:
        return run(a.input, states, a.params, layers)
    per, x, last = len(a.params) // layers, a.input, []
    for layer in range(layers):
        own = [emit(aten.slice.Tensor, s, 0, directions * layer, directions * (layer + 1)) for s in states]
        x, *ends = run(x, own, a.params[per * layer : per * (layer + 1)], 1)
        last.append(ends)
        if layer < layers - 1:
            x = emit.dropout(x, float(a.dropout))
    return (x, *(emit(aten.cat.default, list(many), 0) for many in zip(*last, strict=True)))


@rewrite("bilinear")
def bilinear(emit: Emit, a: Args, out: Value) -> Result:
    """`bilinear(x, y, w, b)` -> `einsum("...i,oij,...j->...o", x, w, y) + b`."""
    y = emit(aten.einsum.default, "...i,oij,...j->...o", [a.input1, a.weight, a.input2])
    return y if a.bias is None else emit(aten.add.Tensor, y, a.bias)


@rewrite("embedding_bag")
def embedding_bag(emit: Emit, a: Args, out: tuple[Value | None, ...]) -> Result:
    """Bags of one size (the usual 2-d ids): look-up, then sum, mean or max over the bag. Other bags depend on data."""
    offsets = emit.constant(a.offsets)
    n = value(a.indices).shape[0]
    bags = out[0].shape[0] if out[0] is not None else 0
    size = n // max(bags, 1)
    even = offsets is not None and n == bags * size and torch.equal(offsets[:bags], torch.arange(0, n, max(size, 1)))
    if not even or a.include_last_offset:
        raise emit.refuse("embedding_bag with bags of different sizes: where they lie depends on data", "give 2-d ids, padded with padding_idx")
    ids = emit.reshape(a.indices, (bags, size))
    padding = -1 if a.get("padding_idx") is None else a.padding_idx % value(a.weight).shape[0]
    found = emit(aten.embedding.default, a.weight, ids, padding, a.scale_grad_by_freq, a.sparse)
    kept: fx.Node | None = None
    if padding >= 0:
        kept = emit(aten.unsqueeze.default, emit(aten.ne.Scalar, ids, padding), 2)
    if a.mode == 2:
        if kept is not None:
            found = emit(aten.masked_fill.Scalar, found, emit(aten.logical_not.default, kept), -torch.inf)
            some = emit(aten.any.dim, kept, 1)
            most = emit(aten.amax.default, found, [1])
            return (emit(aten.masked_fill.Scalar, most, emit(aten.logical_not.default, some), 0.0), None, None, None)
        # max.dim, as embedding_bag does: one of several equal elements gets the gradient
        node = emit(aten.max.dim, found, 1)
        return (emit.typed(node.meta["value"][0], operator.getitem, node, 0), None, None, None)
    if a.per_sample_weights is not None:
        found = emit(aten.mul.Tensor, found, emit.reshape(a.per_sample_weights, (bags, size, 1)))
    if kept is not None:
        found = emit(aten.mul.Tensor, found, emit.cast(kept, value(found).dtype))
    total = emit(aten.sum.dim_IntList, found, [1])
    if a.mode == 1:
        count: fx.Node | float = float(size)
        if kept is not None:
            count = emit(aten.clamp_min.default, emit.cast(emit(aten.sum.dim_IntList, kept, [1]), value(found).dtype), 1)
        total = emit(aten.div.Tensor, total, count)
    return (total, None, None, None)
