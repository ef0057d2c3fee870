"""Read losses in chunks (`loss: {chunks: 8}`, shardc.passes.loss_chunks) as ops of the model.

In a text a linear layer and its loss are one op, and the layer's input is moved as the model moves its result.

    model    logits = linear(h, w)              text    rows  = reshape(h, [16384, 4096])
             rows = reshape(logits, [16384, V])         stats = linear_nll(rows, w, None, labels, ...)
             loss = nll(rows, labels)                   loss  = nll_alone(stats, labels)

The model's ops are put into the text's order, and the text's lines are read as the model's ops: `stats` as
`linear(rows, w)`, `loss` as `nll(stats, labels)`. Both are then proven like any other op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, value_of
from shardc.ir.metadata import Value
from shardc.runtime import ops
from shardc.verify.static.same_values import call_key

if TYPE_CHECKING:
    from shardc.verify.static.same_values import Model
    from shardc.verify.static.text import Text

aten = torch.ops.aten
_VIEWS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


def reordered(model: Model) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each loss behind a linear layer, with equal calls in the text's order: moving rows commutes."""
    for loss in [c for c in model.calls if c.target is ops.nll]:
        moves: list[fx.Node] = []
        at = operands_of(loss)[0]
        while at.op == "call_function" and at.target is not aten.linear.default and len(operands_of(at)) == 1:
            moves.insert(0, at)
            (at,) = operands_of(at)
        if at.target is aten.linear.default:
            yield loss, _reordered(model, loss, moves, at)


def _reordered(model: Model, loss: fx.Node, moves: list[fx.Node], linear: fx.Node) -> list[fx.Node]:
    x, *weights = operands_of(linear)
    calls: list[fx.Node] = []
    rows, features = x, value_of(x).shape[-1]
    for n in moves:
        if n.target in (aten._to_copy.default, aten.alias.default):  # an alias is a pin of `activations:`
            continue
        args: tuple[Any, ...] = (rows, *n.args[1:])
        if n.target in _VIEWS:
            sizes: Any = n.args[1]
            args = (rows, [*sizes[:-1], features])
        value = replace(value_of(x), shape=(*value_of(n).shape[:-1], features))
        rows = model.added(n.target, args, dict(n.kwargs), value)
        calls.append(rows)
    value = Value((*value_of(rows).shape[:-1], value_of(linear).shape[-1]), value_of(linear).dtype, True)
    calls.append(model.added(linear.target, (rows, *weights), {}, value))
    if (dtype := value_of(operands_of(loss)[0]).dtype) != value.dtype:
        cast = replace(value, dtype=dtype)
        calls.append(model.added(aten._to_copy.default, (calls[-1],), {"dtype": dtype}, cast))
    calls.append(model.added(loss.target, (calls[-1], *loss.args[1:]), dict(loss.kwargs), value_of(loss), of=loss))
    return calls


def as_ops(text: Text, n: fx.Node) -> Any:
    """Return the key of a line of such a loss, as the model's op; None for another line or a wrong one."""
    try:
        return _as_ops(text, n)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError):
        return None  # invalid arguments: the text may come from anywhere


def _as_ops(text: Text, n: fx.Node) -> Any:
    args: Any = n.args
    if n.target is ops.linear_nll:
        return _layer(text, n)
    if n.target is ops.nll_join and len(args) > 3:
        parts = args[0]
        while parts.target is not ops.nll_exp and parts.args and isinstance(parts.args[0], fx.Node):
            parts = parts.args[0]
        same = parts.target is ops.nll_exp and text.one[parts.args[1]] is text.one[args[3]]
        return call_key(ops.nll_join, args[:3], n.kwargs, text.one) if same else None
    stats = args[0] if args else None
    if not isinstance(stats, fx.Node) or stats.target is not ops.linear_nll:
        return None
    of_stats: Any = stats.args
    weight, labels, mesh, digits, classes, ignore = (of_stats[i] for i in (1, 3, 4, 5, 6, 7))
    if n.target is ops.nll_top:
        return call_key(ops.nll_max, (stats,), n.kwargs, text.one)
    if n.target is ops.nll_exp:
        return call_key(ops.nll_parts, (stats, labels, args[1], mesh, digits, classes, ignore), n.kwargs, text.one)
    if n.target is ops.nll_alone:
        of_line = (text.one[labels], digits, classes, ignore)
        of_all = (text.one[args[1]], (), value_of(weight).shape[0], args[2] if len(args) > 2 else -100)
        return call_key(ops.nll, (stats, *args[1:]), n.kwargs, text.one) if of_line == of_all else None
    return None


def _layer(text: Text, n: fx.Node) -> Any:
    """Return the key of a line's last op: of a linear layer, a cast if any, and a fill of padding if any."""
    args: Any = n.args
    rows, weight, bias, _, mesh, _, _, _, chunks, dtype, *padding = args
    if not isinstance(chunks, int):
        return None
    key = call_key(aten.linear.default, (rows, weight) if bias is None else (rows, weight, bias), {}, text.one)
    if value_of(rows).dtype != dtype:
        key = call_key(aten._to_copy.default, (text.unwritten(key),), {"dtype": dtype}, text.one)
    if padding and padding[0]:
        key = call_key(ops.fill_padding, (text.unwritten(key), mesh, *padding[0]), {}, text.one)
    return key
