"""Recurrent layers: dropout between the layers becomes an op of its own, so that its masks do not know the mesh.

    lstm(x, [h, c], weights, .., 2 layers, dropout=0.1)    ->    y = lstm(x, [h[:1], c[:1]], weights[:4], .., 1 layer, dropout=0)
                                                                 lstm(dropout(y, 0.1), [h[1:], c[1:]], weights[4:], ..)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.passes.canonical_emit import Args, Emit, Result, rewrite
from shardc.program import Value

aten = torch.ops.aten


@rewrite("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(emit: Emit, a: Args, out: Any) -> Result:
    """Without dropout it stays one op. (Packed sequences do not come here: capture refuses what reads lengths.)"""
    assert a.op._overloadname == "input"
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
