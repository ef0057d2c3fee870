"""Read losses in chunks (`loss: {chunks: 8}`, shardc.passes.loss_chunks) as ops of the model.

In a text a linear layer and its loss are one op. Its line is read as the model's ops:

    parts = in_chunks(8, body, ...)                     the ops of its body, if each works row by row
    top = parts[0]                                      that result

They are then proven like any other op.
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
    args: Any = n.args
    try:
        if n.target is operator.getitem and args[0].target is ops.in_chunks:
            return _of_rows(text, args[0], args[1])
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError, ShardcError):
        pass  # invalid arguments: the text may come from anywhere
    return None


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
            return key if dim == int(target is ops.nll_stats) else None
    return None


def _whole(x: fx.Node) -> int:
    """Return 0 for a tensor that is the same beside every row, else -1."""
    sizes = value_of(x).shape if "value" in x.meta else (0, 0)
    return 0 if len(sizes) < 2 or sizes[:-1] == (1,) else -1
