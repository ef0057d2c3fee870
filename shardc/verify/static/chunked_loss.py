"""Losses in chunks (`loss: {chunks: 8}`, shardc.passes.loss_chunks): a linear layer and the cross entropy of its result
are one op of the text, which takes the layer's input moved as the result was.

    model    logits = linear(h, w)              text    rows  = reshape(h, [16384, 4096])
             rows = reshape(logits, [16384, V])         stats = linear_nll(rows, w, None, labels, ...)
             loss = nll(rows, labels)                   loss  = nll_alone(stats, labels)

The model's ops are first put into the text's order, in which each is proven as any other; what the rule of the loss
then makes of a rank's part is looked for in the words of the op that does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, value_of
from shardc.ir.metadata import Value
from shardc.runtime import ops
from shardc.verify.static import op_types
from shardc.verify.static.statement import Claim

if TYPE_CHECKING:
    from shardc.verify.static.same_values import Model
    from shardc.verify.static.text import Text

aten = torch.ops.aten
_VIEWS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


class Reordered:
    """A loss of the model, and the layer behind it, moves first. moves: on the layer's input, in order; linear: the
    layer on what they give. These are calls of the model as good as its own: moving rows and multiplying each commute.
    """

    def __init__(self, model: Model, loss: fx.Node, moves: list[fx.Node], linear: fx.Node) -> None:
        self.loss = loss
        x, weight, *bias = operands_of(linear)
        self.moves: list[fx.Node] = []
        rows, features = x, value_of(x).shape[-1]
        for n in moves:
            if n.target is aten._to_copy.default:
                continue
            args: tuple[Any, ...] = (rows, *n.args[1:])
            if n.target in _VIEWS:
                sizes: Any = n.args[1]
                args = (rows, [*sizes[:-1], features])
            value = replace(value_of(x), shape=(*value_of(n).shape[:-1], features))
            rows = model.added(n.target, args, dict(n.kwargs), value)
            self.moves.append(rows)
        out = Value((*value_of(rows).shape[:-1], value_of(linear).shape[-1]), value_of(linear).dtype, True)
        self.linear = model.added(linear.target, (rows, weight, *bias), {}, out)
        self.dtype = value_of(operands_of(loss)[0]).dtype


def reordered(model: Model) -> Iterator[Reordered]:
    """The losses behind linear layers."""
    for loss in [c for c in model.calls if c.target is ops.nll]:
        moves: list[fx.Node] = []
        at = operands_of(loss)[0]
        while at.op == "call_function" and at.target is not aten.linear.default and len(operands_of(at)) == 1:
            moves.insert(0, at)
            (at,) = operands_of(at)
        if at.target is aten.linear.default:
            yield Reordered(model, loss, moves, at)


def find(text: Text, way: Reordered) -> None:
    """Find the lines that are this loss, and give them their claim."""
    for move in way.moves:
        text.find(move)
    model, mesh = text.model, text.mesh
    choices, of_loss = model.choices_of(way.linear), model.choices_of(way.loss)
    x, weight, *bias = (text.forms.get(model.one[n], []) for n in operands_of(way.linear))
    targets = text.forms.get(model.one[operands_of(way.loss)[1]], [])
    for forms in product(x, weight, *bias):
        claims = [claim for _, claim in forms]
        for strategies in op_types.fitting(choices, claims, {}, mesh):
            layouts = op_types.results(choices, strategies, mesh)
            if layouts is None or op_types.harm_of_padding(model, way.linear, strategies, claims):
                continue
            for target, targets_claim in targets:
                both = [Claim(way.linear, layouts[0]), targets_claim]
                words = _Words(text, way, [line for line, _ in forms], target)
                for each in op_types.fitting(of_loss, both, {}, mesh):
                    results = op_types.results(of_loss, each, mesh)
                    if results is None:
                        continue
                    args = (way.linear, target, *way.loss.args[2:])
                    need = (layouts[0], targets_claim.layout)
                    try:
                        line = op_types.written(
                            of_loss, each, (need, results), args, {}, mesh, text.mesh_node, words.find
                        )
                    except LookupError:
                        continue
                    for one in words.touched:
                        text.explained.update(text.twins[text.one[one]])
                    text.claim(line, Claim(way.loss, results[0]))


class _Words:
    """What the loss's rule writes for a rank, looked for as ops of a loss in chunks. `way.linear` are the logits."""

    def __init__(self, text: Text, way: Reordered, operands: list[fx.Node], target: fx.Node) -> None:
        self.text, self.way = text, way
        rows, weight, *bias = operands
        #: What the op multiplies, and its labels, as they stand in its line.
        self.operands = (rows, weight, bias[0] if bias else None, target)
        self.touched: list[fx.Node] = []
        self.padding: tuple[Any, ...] = ()
        self.top: fx.Node | None = None

    def find(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        logits = self.way.linear
        classes = value_of(logits).shape[-1]
        if target is ops.fill_padding and logits in args:
            self.padding = args[2:]
            return logits
        if target is ops.nll:
            _, labels, *rest = args
            return self._line(ops.nll_alone, (self._stats((), classes, *rest), labels, *rest), kwargs)
        if target is ops.nll_max:
            return self._line(ops.nll_top, (self._any_stats(),), kwargs)
        if target is ops.nll_parts:
            _, _, top, _, digits, size, *rest = args
            self.top = top
            return self._line(ops.nll_exp, (self._stats(digits, size, *rest), top), kwargs)
        if target is ops.nll_join:
            parts, labels, *rest = args
            return self._line(target, (parts, labels, *(rest or [-100]), self.top), kwargs)
        return self._line(target, args, kwargs)

    def _line(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        line = self.text.line(target, args, kwargs)
        self.touched.append(line)
        return line

    def _any_stats(self) -> fx.Node:
        return next(self._all_stats(), self.way.linear)  # which no line takes

    def _all_stats(self) -> Iterator[fx.Node]:
        """The lines that multiply these, whatever the number of chunks."""
        for n in self.text.graph.nodes:
            if n.target is ops.linear_nll:
                mine: tuple[Any, ...] = n.args[:4]
                if tuple(self.text.one.get(x, x) for x in mine) == self.operands:
                    yield n

    def _stats(self, digits: Any, classes: int, ignore: int = -100) -> fx.Node:
        padded = (self.padding,) if self.padding else ()
        right = (tuple(digits), classes, ignore, self.way.dtype, padded)
        for n in self._all_stats():
            said: Any = n.args[5:]
            own, size, ignored, chunks, dtype, *padding = said
            if isinstance(chunks, int) and right == (tuple(map(tuple, own)), size, ignored, dtype, tuple(padding)):
                self.touched.append(n)
                return n
        raise LookupError
