"""ClassRows: bring what follows a linear layer into rows of classes, [rows, classes], for `loss: {chunks: 8}`.

    before   logits = linear(h, w)                   [8, 2048, V]      after   rows = reshape(h, [16384, 4096])
             capped = tanh(logits)                   [8, 2048, V]              logits = linear(rows, w)
             rows = reshape(capped, [16384, V])      [16384, V]                capped = tanh(logits)
             loss = nll(rows, labels)                [16384]                   loss = nll(capped, labels)

A *head* is a linear layer whose result is read by ops on rows of classes alone (shardc.runtime.ops.in_chunks), up to
ops that reduce them: losses, sums over classes, a gather of targets. Views and slices of rows go to its input. A sum
over all elements becomes one over classes, then one over rows. LossChunks finds the heads of each rank again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from shardc.ir.graph import calls, copy_graph, source_of, value_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.layer_names import fold
from shardc.passes.base import Pass
from shardc.passes.canonical.rewrite import Emit, shape
from shardc.runtime import ops
from shardc.runtime.ops.in_chunks import by_rows

aten = torch.ops.aten
_VIEWS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
#: Reductions of all elements, and the same along dims.
_OF_ALL = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}


@dataclass(frozen=True)
class Heads:
    """wide: the values with rows of classes, heads included. reducers: the ops that end them, in order.

    refused: {head: the first op that reads it otherwise}, for heads before such an end.
    """

    wide: dict[fx.Node, set[fx.Node]]
    reducers: list[fx.Node]
    refused: dict[fx.Node, fx.Node]


def heads(graph: fx.Graph, *, moved: bool) -> Heads:
    """Find the heads of a graph. moved: rows may be moved on the way, and all elements reduced."""
    left = [n for n in calls(graph) if n.target is aten.linear.default and len(shape(n)) >= 2]
    refused: dict[fx.Node, fx.Node] = {}
    while True:
        wide, reducers, ends = {n: {n} for n in left}, list[fx.Node](), dict[fx.Node, fx.Node]()
        reached = set[fx.Node]()
        for n in graph.nodes:
            of = set[fx.Node]().union(*(wide[x] for x in n.all_input_nodes if x in wide))
            if not of:
                continue
            kind = "" if n in wide else _kind(n, wide, moved=moved)
            if kind == "keeps":
                wide[n] = of
            elif kind == "reduces":
                reducers.append(n)
                reached |= of
            else:
                ends |= dict.fromkeys(of - ends.keys(), n)
        if not ends:
            return Heads({n: of for n, of in wide.items() if of & reached}, reducers, refused)
        refused |= {n: end for n, end in ends.items() if n in reached}
        left = [n for n in left if n not in ends]


def _kind(n: fx.Node, wide: Collection[fx.Node], *, moved: bool) -> str:
    """Return what an op makes of rows of classes: it "keeps" them, or "reduces" them; "" for neither."""
    first = n.args[0] if n.args else None
    if n.op != "call_function" or len(values_of(n)) != 1:
        return ""
    if moved and n.target in _OF_ALL and first in wide and len(n.args) == 1 and not n.kwargs:
        return "reduces"
    if moves(n):
        return "keeps" if moved else ""
    if "pin" in n.meta:
        return ""
    read = [x for x in n.all_input_nodes if x in wide]
    kind = by_rows(n.target, n.args, len(shape(read[0])))
    if kind == "keeps":
        return kind if all(shape(x) == shape(n) for x in read) else ""
    return kind if read == [first] else ""


def moves(n: fx.Node) -> bool:
    """Return whether an op moves, selects or pins whole rows: a view or a slice of the other dims, a layout of them."""
    x = n.args[0] if n.args else None
    if n.target is aten.alias.default and "pin" in n.meta:
        return all(p.dim != len(shape(n)) - 1 for _, p in n.meta["pin"].shards())
    if n.target in _VIEWS:
        return isinstance(x, fx.Node) and shape(n)[-1:] == shape(x)[-1:] and len(shape(n)) > 1
    if n.target not in (aten.slice.Tensor, aten.select.int) or not isinstance(x, fx.Node):
        return False
    dim: Any = n.args[1] if len(n.args) > 1 else 0
    return len(shape(n)) > 1 and dim % len(shape(x)) != len(shape(x)) - 1


@dataclass(frozen=True)
class ClassRows(Pass):
    """Rewrites the global graph so that heads have rows of classes."""

    def applies(self, program: Program) -> bool:
        return self.spec.loss.chunks > 1 or self.options.forward == "score"

    def run(self, program: Program) -> Program:
        graph = copy_graph(program.graph)
        logits = heads(graph, moved=True)
        rng = next(n for n in graph.nodes if n.name == "rng")
        writer = _Writer(Emit(graph, rng), logits.wide)
        for n in logits.reducers:
            with graph.inserting_before(n):
                n.replace_all_uses_with(writer.reduced(n))
            graph.erase_node(n)
        for n in reversed(logits.wide):
            if not n.users:
                graph.erase_node(n)
        graph.lint()
        most = max((shape(n)[-1] for n in logits.wide), default=0)
        notes = (
            f"{where(self)} does not reach {source_of(n)}: {end.name} reads its logits too"
            for n, end in logits.refused.items()
            if shape(n)[-1] >= most
        )
        return replace(program, graph=graph, notes=(*program.notes, *fold(notes)))


def where(of: Pass) -> str:
    """Return what computes losses in chunks, for notes."""
    if of.spec.loss.chunks > 1:
        return f"{of.spec.where(('loss', 'chunks'))}: loss: {{chunks: {of.spec.loss.chunks}}}"
    return "score: the computation of a few rows of logits at a time"


@dataclass
class _Writer:
    emit: Emit
    wide: Collection[fx.Node]

    def __post_init__(self) -> None:
        self.made: dict[Any, fx.Node] = {}

    def reduced(self, n: fx.Node) -> fx.Node:
        """Return the result of a reducer, computed of rows of classes."""
        x, *rest = cast("tuple[Any, ...]", n.args)
        rows = self.rows(x, ())
        self.emit.source = source_of(n)
        if n.target in _OF_ALL:
            return self.emit(n.target, self.emit(_OF_ALL[n.target], rows, [1]))
        if n.target is ops.nll:
            return self._typed(n, (rows, *rest), value_of(n))
        if n.target is aten.gather.default:
            rest = [1, self.emit.reshape(rest[1], [shape(rows)[0], shape(rest[1])[-1]])]
        else:
            rest[0] = [1] if isinstance(rest[0], (list, tuple)) else 1
        return self.emit.reshape(self.emit(n.target, rows, *rest, **n.kwargs), shape(n))

    def rows(self, n: fx.Node, after: tuple[fx.Node, ...]) -> fx.Node:
        """Return a value with rows of classes as [rows, classes], of those rows that the moves `after` it leave."""
        if moves(n):
            assert isinstance(n.args[0], fx.Node)
            return self.rows(n.args[0], (n, *after))
        while after and after[-1].target in _VIEWS:
            after = after[:-1]
        if (made := self.made.get((n, after))) is not None:
            return made
        if n.target is aten.linear.default:
            x, *weights = n.args
            args: tuple[Any, ...] = (self.moved(x, after), *weights)
        else:
            args = tuple(self._operand(a, n, after) if isinstance(a, fx.Node) else a for a in n.args)
            if n.target in (aten.softmax.int, aten.log_softmax.int):
                args = (args[0], 1, *args[2:])
        number = shape(next(a for a in args if isinstance(a, fx.Node) and len(shape(a)) == 2))[0]
        self.emit.source = source_of(n)
        new = self._typed(n, args, replace(value_of(n), shape=(number, shape(n)[-1])))
        self.made[n, after] = new
        return new

    def _typed(self, n: fx.Node, args: tuple[Any, ...], value: Value) -> fx.Node:
        new = self.emit.typed(value, n.target, *args, **n.kwargs)
        new.meta = {**n.meta, "value": value}
        return new

    def _operand(self, x: fx.Node, of: fx.Node, after: tuple[fx.Node, ...]) -> fx.Node:
        """Return an operand of an op that keeps rows."""
        if x in self.wide:
            return self.rows(x, after)
        sizes = (1,) * (len(shape(of)) - len(shape(x))) + shape(x)
        if all(s == 1 for s in sizes[:-1]):
            return self.emit.reshape(x, sizes[-1:]) if len(shape(x)) > 1 else x
        x = self.emit.reshape(x, sizes)
        return self.moved(self.emit.expand(x, (*shape(of)[:-1], sizes[-1])), after)

    def moved(self, x: Any, after: Sequence[fx.Node]) -> fx.Node:
        """Return [rows, features] of a tensor with other features than classes, moved in the same way."""
        for m in after:
            if m.target is aten.alias.default:
                pinned = self.emit.typed(value_of(x), m.target, x)
                x, pinned.meta = pinned, {**m.meta, "value": value_of(x)}
                continue
            args: Any = ([*shape(m)[:-1], shape(x)[-1]],) if m.target in _VIEWS else m.args[1:]
            if args and m.target not in _VIEWS:
                args = (args[0] % len(shape(x)), *args[1:])
            x = self.emit(m.target, x, *args, **m.kwargs)
        return self.emit.reshape(x, [math.prod(shape(x)[:-1]), shape(x)[-1]])
