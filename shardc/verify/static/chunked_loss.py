"""Read losses in chunks (`loss: {chunks: 8}`, shardc.passes.loss_chunks) as ops of the model.

In a text a linear layer and its loss are one op. Its line is read as the model's ops:

    stats = linear_nll(rows, w, None, labels, ...)      linear(rows, w)
    loss = nll_alone(stats, labels)                     nll(stats, labels)
    parts = in_chunks(8, body, ...)                     the ops of its body, if each works row by row
    top = parts[0]                                      that result

Both are then proven like any other op.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import value_of
from shardc.runtime import ops
from shardc.runtime.ops.in_chunks import by_rows, lines
from shardc.verify.static.same_values import call_key

if TYPE_CHECKING:
    from shardc.verify.static.text import Text

aten = torch.ops.aten


def as_ops(text: Text, n: fx.Node) -> Any:
    """Return the key of a line of such a loss, as the model's op; None for another line or a wrong one."""
    try:
        return _as_ops(text, n)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError, ShardcError):
        return None  # invalid arguments: the text may come from anywhere


def _as_ops(text: Text, n: fx.Node) -> Any:
    args: Any = n.args
    if n.target is ops.linear_nll:
        return _layer(text, n)
    if n.target is operator.getitem and args[0].target is ops.in_chunks:
        return _of_rows(text, args[0], args[1])
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


def _of_rows(text: Text, call: fx.Node, index: int) -> Any:
    """Return the key of a result of `in_chunks`; None if a line may mix rows, or reads what has none as rows."""
    of_call: Any = call.args
    chunks, body, outputs, rows, whole, mesh, *_ = of_call
    number, dim = outputs[index]
    values, wide = [*rows, *whole], set[fx.Node]()  # wide: [rows, classes]
    given = {x: len(value_of(x).shape) for x in rows}
    if not isinstance(chunks, int) or any(not n for n in given.values()):
        return None
    for target, args, kwargs in lines(body, values, mesh):
        read = [x for x in args if isinstance(x, fx.Node) and x is not mesh]
        ends = target is not aten.linear.default and by_rows(target, args, 2) == "reduces"
        others = read[1:] if ends or target is aten.linear.default else [x for x in read if x not in wide]
        if target is aten.linear.default:
            right = given.get(read[0]) == 2 and not given.keys() & {*others} and not wide & {*others}
        elif ends:
            right = read[0] in wide and all(x in given for x in others)
        else:
            right = all(x in wide or given.get(x, _whole(x)) in (0, 2) for x in read) and any(x in wide for x in read)
        if not right:
            return None
        key = call_key(target, args, kwargs, text.one)
        values.append(text.unwritten(key, target, args, kwargs))
        if not ends:
            wide.add(values[-1])
        elif len(values) - 1 == number:
            return key if dim == int(target is ops.nll_parts) else None
    return None


def _whole(x: fx.Node) -> int:
    """Return 0 for a tensor that is the same beside every row, else -1."""
    sizes = value_of(x).shape if "value" in x.meta else (0, 0)
    return 0 if len(sizes) < 2 or sizes[:-1] == (1,) else -1
