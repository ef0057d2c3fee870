"""LossChunks: compute a linear layer and its cross entropy in chunks of rows (`loss: {chunks: 8}`).

    before   logits = linear(h, w)                           bf16[8, 2048, 128256]
             logits_f32 = _to_copy(logits, dtype=float32)
             rows = reshape(logits_f32, [16384, 128256])
             nll = nll(rows, labels)                         f32[16384]
    after    h_rows = reshape(h, [16384, 4096])
             nll_stats = linear_nll(h_rows, w, None, labels, ..., 8, float32)      f32[2, 16384]
             nll = nll_alone(nll_stats, labels)

Ops between the two that only move rows (views, slices, casts) are applied to the layer's input instead. With split
classes (vocabulary parallel), `linear_nll` returns each rank's own normaliser, and the sums over ranks stay:

    before   top = all_reduce_max(nll_max(rows))             after    top = all_reduce_max(nll_top(nll_stats))
             parts = all_reduce(nll_parts(rows, ..., top))            parts = all_reduce(nll_exp(nll_stats, top))
             nll = nll_join(parts, labels)                            nll = nll_join(parts, labels, -100, top)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import calls, copy_graph, source_of, value_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.runtime import ops
from shardc.runtime.ops.factors import multiplies

aten = torch.ops.aten
#: For a score without `loss.chunks`: at least so many chunks, and at most so many logits in each.
SCORE_CHUNKS, SCORE_LOGITS = 8, 2**24
_VIEWS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
_SAME = {aten.clone.default, aten.contiguous.default, aten.alias.default}


@dataclass(frozen=True)
class LossChunks(Pass):
    """Computes the losses after linear layers in `loss.chunks` chunks. Notes those for which it cannot."""

    def applies(self, program: Program) -> bool:
        return self.spec.loss.chunks > 1 or self.options.forward == "score"

    def run(self, program: Program) -> Program:
        stages, notes, reached = [], [], False
        asked = self.spec.loss.chunks > 1
        where = f"{self.spec.where(('loss', 'chunks'))}: loss: {{chunks: {self.spec.loss.chunks}}}"
        where = where if asked else "score: the computation of a few rows of logits at a time"
        for stage in program.stages:
            graph = copy_graph(stage.graph)
            for node in [n for n in calls(graph) if n.target in (ops.nll, ops.nll_parts)]:
                chain = _Chain(node)
                if chain.why:
                    notes.append(f"{where} does not reach {source_of(node)}: {chain.why}")
                else:
                    reached = True
                    chunks = self.spec.loss.chunks if asked else _chunks(value_of(chain.linear), program.mesh)
                    _Writer(graph, chain, program.mesh, chunks).run()
            graph.lint()
            stages.append(replace(stage, graph=graph))
        if asked and not reached and not notes:
            notes.append(f"{where} finds no cross entropy of class indices: nothing is computed in chunks")
        return replace(program, stages=tuple(stages), notes=(*program.notes, *notes))


def _chunks(logits: Value, mesh: Mesh) -> int:
    """Return the number of chunks of a score, so that a rank holds few logits at a time."""
    return max(SCORE_CHUNKS, -(-math.prod(logits.local_shape(mesh)) // SCORE_LOGITS))


class _Chain:
    """The ops between a linear layer and a loss.

    linear: the layer. moves: the ops after it. padding: the op that fills padded classes, if any; it comes last.
    dtype: of the logits in the loss. why: the reason why there is no such chain, or "".
    """

    def __init__(self, loss: fx.Node) -> None:
        self.loss, self.moves, self.why = loss, list[fx.Node](), ""
        self.padding: fx.Node | None = None
        at = loss.args[0]
        assert isinstance(at, fx.Node)
        self.dtype = value_of(at).dtype
        readers = {loss}
        if loss.target is ops.nll_parts:
            readers |= {u for u in at.users if u.target is ops.nll_max}
        if len(value_of(at).shape) != 2:
            self.why = "its logits do not have the shape [rows, classes]"
            return
        while True:
            others = [u for u in at.users if u not in readers]
            if others:
                self.why = f"{others[0].name} reads its logits too"
                return
            if at.target is aten.linear.default:
                self.linear = at
                return
            if not self._moves(at):
                maker = "an input" if at.op == "placeholder" else getattr(at.target, "__name__", str(at.target))
                self.why = f"its input is the result of {maker}, not of a linear layer"
                return
            if at.target is ops.fill_padding:
                self.padding = at
            else:
                self.moves.insert(0, at)
            before = at.args[0]
            assert isinstance(before, fx.Node)
            readers, at = {at}, before

    def _moves(self, n: fx.Node) -> bool:
        """Return whether an op keeps rows as they are, or only moves or casts whole rows."""
        if n.op != "call_function" or not isinstance(n.args[0], fx.Node):
            return False
        before = n.args[0].meta.get("value")
        if not isinstance(before, Value) or not isinstance(n.meta.get("value"), Value):
            return False
        last = len(before.shape) - 1
        if n.target is ops.fill_padding:
            return not self.moves and self.padding is None and bool(n.args[2] == 1)
        if n.target is aten._to_copy.default:
            return set(n.kwargs) == {"dtype"}
        if n.target is aten.slice.Tensor:
            dim: Any = n.args[1] if len(n.args) > 1 else 0
            return bool(dim % (last + 1) != last)
        return n.target in _SAME or (n.target in _VIEWS and value_of(n).shape[-1:] == before.shape[-1:])


@dataclass
class _Writer:
    graph: fx.Graph
    chain: _Chain
    mesh: Mesh
    chunks: int

    def run(self) -> None:
        loss, linear = self.chain.loss, self.chain.linear
        x, weight, *rest = linear.args
        assert isinstance(x, fx.Node)
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n in self._first())):
            stats = self._stats(self._rows(x), weight, rest[0] if rest else None)
        if x.kwargs.get("overlap") and not any(multiplies(u, x) for u in x.users if u is not linear):
            x.kwargs = {k: v for k, v in x.kwargs.items() if k != "overlap"}  # the product is not one op any more
        if loss.target is ops.nll:
            _, target, *ignore = loss.args
            loss.target, loss.args = ops.nll_alone, (stats, target, *ignore)
        else:
            self._split(stats)
        for n in (*([self.chain.padding] if self.chain.padding else []), *reversed(self.chain.moves), linear):
            self.graph.erase_node(n)

    def _first(self) -> set[fx.Node]:
        """Return the ops that read the logits."""
        return set((self.chain.padding or (self.chain.moves or [self.chain.linear])[-1]).users)

    def _rows(self, x: fx.Node) -> fx.Node:
        """Apply the moves of the layer's result to its input: [rows, features]."""
        features = value_of(x).local_shape(self.mesh)[-1]
        for n in self.chain.moves:
            if n.target is aten._to_copy.default:
                continue
            value = _with_features(value_of(n), value_of(x))
            args: tuple[Any, ...] = (x, *n.args[1:])
            if n.target in _VIEWS:
                shape: Any = n.args[1]
                args = (x, [*shape[:-1], features])
            x = self._call(n.target, args, f"{x.name}_rows", value, n, **n.kwargs)
        return x

    def _stats(self, rows: fx.Node, weight: Any, bias: Any) -> fx.Node:
        loss, padding = self.chain.loss, self.chain.padding
        mesh = next(n for n in self.graph.nodes if n.name == "mesh")
        value = value_of(self.chain.loss)
        if loss.target is ops.nll:
            _, target, *rest = loss.args
            classes = value_of(self.chain.linear).shape[-1]
            digits, ignore = (), rest[0] if rest else -100
            value = _stacked_type(value)
        else:
            _, target, _, _, digits, classes, *rest = loss.args  # type: ignore[assignment]
            ignore = rest[0] if rest else -100
        args: tuple[Any, ...] = (
            rows,
            weight,
            bias,
            target,
            mesh,
            digits,
            classes,
            ignore,
            self.chunks,
            self.chain.dtype,
        )
        if padding is not None:
            args = (*args, tuple(padding.args[2:]))
        return self._call(ops.linear_nll, args, f"{loss.name}_stats", value, loss)

    def _split(self, stats: fx.Node) -> None:
        """Rewrite the sums over ranks, so that they read each rank's own statistics."""
        parts = self.chain.loss
        _, target, top, _mesh, _digits, _classes, *_ = parts.args
        assert isinstance(top, fx.Node)
        largest = top.args[0]
        assert isinstance(largest, fx.Node)
        assert largest.target is ops.nll_max
        largest.target, largest.args = ops.nll_top, (stats,)
        parts.target, parts.args = ops.nll_exp, (stats, top)
        (total,) = parts.users
        (join,) = total.users
        assert join.target is ops.nll_join
        join.args = (total, target, join.args[2] if len(join.args) > 2 else -100, top)

    def _call(
        self, target: Any, args: tuple[Any, ...], name: str, value: Value, like: fx.Node, **kwargs: Any
    ) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        new.meta = {"value": value, "source": source_of(like)}
        return new


def _with_features(moved: Value, x: Value) -> Value:
    """Return the type of the layer's input x after the moves that gave its result the type `moved`."""
    last = len(moved.shape) - 1
    rows = [(a, p) for a, p in moved.layout.items if isinstance(p, Shard) and p.dim != last]
    others = [(a, p) for a, p in x.layout.items if not isinstance(p, Shard)]
    return Value((*moved.shape[:-1], x.shape[-1]), x.dtype, x.requires_grad, Layout((*rows, *others)))


def _stacked_type(v: Value) -> Value:
    """Return the type of two such values, stacked along a new first dim."""
    items = ((a, replace(p, dim=p.dim + 1) if isinstance(p, Shard) else p) for a, p in v.layout.items)
    return Value((2, *v.shape), v.dtype, v.requires_grad, Layout(tuple(items)))
