"""Rewrite recurrent layers: dropout between layers becomes a separate op, and cells are written out.

So dropout's masks do not depend on the mesh.

    before   lstm(x, [h, c], weights, .., 2 layers, dropout=0.1)
    after    y = lstm(x, [h[:1], c[:1]], weights[:4], .., 1 layer, dropout=0)
             lstm(dropout(y, 0.1), [h[1:], c[1:]], weights[4:], ..)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten


@rewrite("lstm gru rnn_tanh rnn_relu")
def recurrent(emit: Emit, a: Args, out: Any) -> Result:
    """Split layers with dropout; others stay one op.

    Packed sequences do not come here: capture refuses ops that read lengths.
    """
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
        initial = [emit(aten.slice.Tensor, s, 0, directions * layer, directions * (layer + 1)) for s in states]
        x, *ends = run(x, initial, a.params[per * layer : per * (layer + 1)], 1)
        last.append(ends)
        if layer < layers - 1:
            x = emit.dropout(x, float(a.dropout))
    return (x, *(emit(aten.cat.default, list(many), 0) for many in zip(*last, strict=True)))


@rewrite("lstm_cell")
def lstm_cell(emit: Emit, a: Args, out: Any) -> Result:
    """Write out one step: gates from both products; c' = f c + i g, h' = o tanh(c')."""
    h, c = a.hx
    i, f, g, o = _gates(emit, _add(emit, _linear(emit, a.input, a.w_ih, a.b_ih), _linear(emit, h, a.w_hh, a.b_hh)), 4)
    kept = emit(aten.mul.Tensor, emit(aten.sigmoid.default, f), c)
    cell = _add(emit, kept, emit(aten.mul.Tensor, emit(aten.sigmoid.default, i), emit(aten.tanh.default, g)))
    return emit(aten.mul.Tensor, emit(aten.sigmoid.default, o), emit(aten.tanh.default, cell)), cell


@rewrite("gru_cell")
def gru_cell(emit: Emit, a: Args, out: Value) -> Result:
    """Write out one step: n = tanh(x_n + r h_n), h' = n + z (h - n)."""
    h = a.hx
    of_input = _gates(emit, _linear(emit, a.input, a.w_ih, a.b_ih), 3)
    of_state = _gates(emit, _linear(emit, h, a.w_hh, a.b_hh), 3)
    r, z = (emit(aten.sigmoid.default, _add(emit, x, y)) for x, y in zip(of_input[:2], of_state[:2], strict=True))
    n = emit(aten.tanh.default, _add(emit, of_input[2], emit(aten.mul.Tensor, r, of_state[2])))
    return _add(emit, n, emit(aten.mul.Tensor, z, emit(aten.sub.Tensor, h, n)))


@rewrite("rnn_tanh_cell rnn_relu_cell")
def rnn_cell(emit: Emit, a: Args, out: Value) -> Result:
    act = aten.tanh.default if "tanh" in a.op_name else aten.relu.default
    return emit(act, _add(emit, _linear(emit, a.input, a.w_ih, a.b_ih), _linear(emit, a.hx, a.w_hh, a.b_hh)))


def _linear(emit: Emit, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    return emit(aten.linear.default, x, weight, *([] if bias is None else [bias]))


def _add(emit: Emit, x: fx.Node, y: fx.Node) -> fx.Node:
    return emit(aten.add.Tensor, x, y)


def _gates(emit: Emit, x: fx.Node, count: int) -> list[fx.Node]:
    """Split the last dim into this many parts."""
    size = shape(x)[-1] // count
    parts = emit(aten.split_with_sizes.default, x, [size] * count, len(shape(x)) - 1)
    return [emit.typed(parts.meta["value"][i], operator.getitem, parts, i) for i in range(count)]
