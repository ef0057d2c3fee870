"""LossChunks: compute a linear layer and its loss in chunks of rows (`loss: {chunks: 8}`).

    before   logits = linear(h, w)                           bf16[16384, 128256]     (class_rows.py makes such rows)
             logits_f32 = _to_copy(logits, dtype=float32)
             nll = nll(logits_f32, labels)                   f32[16384]
    after    nll, = in_chunks(8, ... linear, _to_copy, nll ..., (h, labels), (w,))

Ops on rows of classes are put into calls of `in_chunks`: one for those that need nothing of others, one for those that
need sums over ranks of these, and so on. Each call computes the product once more. A cross entropy has one call, also
with split classes (vocabulary parallel).

    before   top = all_reduce_max(largest(logits))       after    most, = in_chunks(8, ... largest ..., (h,), (w,))
             sums = sum_exp(logits, top)                          sums, = in_chunks(8, ... sum_exp ..., (h, top), (w,))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import target_text
from shardc.ir.graph import copy_graph, reorder, source_of, value_of
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.passes.class_rows import Heads, heads, where
from shardc.runtime import ops
from shardc.runtime.ops.factors import multiplies

aten = torch.ops.aten
#: For a score without `loss.chunks`: at least so many chunks, and at most so many logits in each.
SCORE_CHUNKS, SCORE_LOGITS = 8, 2**24


@dataclass(frozen=True)
class LossChunks(Pass):
    """Computes the losses after linear layers in `loss.chunks` chunks. ClassRows notes those for which it cannot."""

    def applies(self, program: Program) -> bool:
        return self.spec.loss.chunks > 1 or self.options.forward == "score"

    def run(self, program: Program) -> Program:
        stages, notes, reached = [], program.notes, False
        for stage in program.stages:
            graph = copy_graph(stage.graph)
            logits = heads(graph, moved=False)
            if logits.reducers:
                reached = True
                number = max(self._number(n, program.mesh) for n in logits.wide if n.target is aten.linear.default)
                _in_chunks(graph, logits, number)
            graph.lint()
            stages.append(replace(stage, graph=graph))
        if self.spec.loss.chunks > 1 and not reached and not any(where(self) in note for note in notes):
            none = f"{where(self)} finds no loss of a linear layer's classes: nothing is computed in chunks"
            notes = (*notes, none)
        return replace(program, stages=tuple(stages), notes=notes)

    def _number(self, linear: fx.Node, mesh: Mesh) -> int:
        """Return the number of chunks: the spec's, or for a score such that a rank holds few logits at a time."""
        logits = math.prod(value_of(linear).local_shape(mesh))
        return self.spec.loss.chunks if self.spec.loss.chunks > 1 else max(SCORE_CHUNKS, -(-logits // SCORE_LOGITS))


def _in_chunks(graph: fx.Graph, logits: Heads, chunks: int) -> None:
    """Put the ops on rows of classes into calls of `in_chunks`."""
    mesh = next(n for n in graph.nodes if n.name == "mesh")
    before: dict[fx.Node, int] = {}  # calls that a value needs
    for n in graph.nodes:
        before[n] = max((before[x] + (x in logits.reducers) for x in n.all_input_nodes), default=0)
    until = max(before[n] for n in logits.reducers)
    turn: dict[fx.Node, int] = {}  # as late as possible: products are computed again for each turn
    latest: dict[fx.Node, int] = {}
    for n in reversed(graph.nodes):
        latest[n] = min((turn.get(u, latest[u]) for u in n.users), default=until + 1)
        if n in logits.reducers:
            turn[n] = latest[n] - 1
    groups: dict[tuple[int, bool], list[fx.Node]] = {}
    for n in sorted(logits.reducers, key=turn.__getitem__):
        groups.setdefault((turn[n], value_of(n).requires_grad), []).append(n)
    with graph.inserting_before(graph.output_node()):
        for (_, trains), reducers in groups.items():
            _Body(graph, logits, mesh).write(reducers, chunks, trains=trains)
    for n in reversed(logits.wide):
        if not n.users:
            graph.erase_node(n)
    order: dict[fx.Node, None] = {}
    for n in graph.nodes:
        _after_operands(n, order)
    reorder(graph, [n for n in order if n.op == "call_function"])


def _after_operands(n: fx.Node, order: dict[fx.Node, None]) -> None:
    if n not in order:
        for x in n.all_input_nodes:
            _after_operands(x, order)
        order[n] = None


class _Body:
    """The lines of one call of `in_chunks`. rows, whole: the values that it reads, in chunks or as they are."""

    def __init__(self, graph: fx.Graph, logits: Heads, mesh: fx.Node) -> None:
        self.graph, self.logits, self.mesh = graph, logits, mesh
        self.rows: dict[fx.Node, None] = {}
        self.whole: dict[fx.Node, None] = {}

    def write(self, reducers: Sequence[fx.Node], chunks: int, *, trains: bool) -> None:
        inside: dict[fx.Node, None] = {}
        for n in reducers:
            self._behind(n, inside)
        at = {n: f"%{i}" for i, n in enumerate((*self.rows, *self.whole, *inside))} | {self.mesh: "%mesh"}
        body = tuple(
            (
                target_text(n.target),
                tuple(_named(a, at) for a in n.args),
                tuple((k, _named(v, at)) for k, v in n.kwargs.items()),
            )
            for n in inside
        )
        outputs = tuple((int(at[n][1:]), int(n.target is ops.nll_stats)) for n in reducers)
        args = (chunks, body, outputs, tuple(self.rows), tuple(self.whole), self.mesh)
        kwargs: dict[str, Any] = {} if trains else {"trains": False}
        source = source_of(reducers[-1])
        call = self.graph.create_node("call_function", ops.in_chunks, args, kwargs, name="in_chunks")
        call.meta = {"value": tuple(map(value_of, reducers)), "source": source}
        for i, n in enumerate(reducers):
            part = self.graph.create_node("call_function", operator.getitem, (call, i), name=f"{n.name}_rows")
            part.meta = {"value": value_of(n), "source": source}
            n.replace_all_uses_with(part)
            self.graph.erase_node(n)

    def _behind(self, n: fx.Node, inside: dict[fx.Node, None]) -> None:
        """Add an op with the ops on rows of classes before it."""
        if n in inside:
            return
        keeps = n in self.logits.wide
        for i, x in enumerate(n.all_input_nodes):
            if x in self.logits.wide:
                self._behind(x, inside)
            elif n.target is aten.linear.default:
                (self.whole if i else self.rows)[x] = None
                alone = not any(multiplies(u, x) for u in x.users if u not in self.logits.wide)
                if not i and x.kwargs.get("overlap") and alone:  # the product is not one op any more
                    x.kwargs = {k: v for k, v in x.kwargs.items() if k != "overlap"}
            elif x is not self.mesh:
                sizes = value_of(x).shape
                (self.whole if keeps and (len(sizes) < 2 or sizes[0] == 1) else self.rows)[x] = None
        inside[n] = None


def _named(x: Any, at: dict[fx.Node, str]) -> Any:
    if isinstance(x, fx.Node):
        return at[x]
    return type(x)([_named(y, at) for y in x]) if isinstance(x, (list, tuple)) else x
