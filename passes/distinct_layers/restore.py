"""The whole program again: what the passes made of the program with fewer layers, and copies of its last unit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

from torch import fx

from shardc.ir.deferred_graph import DeferredGraph
from shardc.ir.graph import copy_graph, placeholders
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Input, Param
from shardc.passes.distinct_layers.cut import Cut, names_in, ops_of
from shardc.passes.distinct_layers.numbering import Numbering
from shardc.passes.distinct_layers.twins import Twins, UnlikeError, copied

_Stored = TypeVar("_Stored", Param, Buffer)

#: What holds for the program with fewer layers as for the whole one. All other fields have to be as captured.
_OF_BOTH = {"mesh", "inputs", "outputs", "microbatches", "notes"}
#: In a note on what is in several layers, of which it names the first.
_COUNTS = re.compile(r" more\b|\d×")


def restored(program: Program, cut: Cut, result: Program, run: Callable[[Program], Program]) -> Program:
    """program: as captured; result: what the passes up to partition made of `cut.program`; run: these passes.

    Raises UnlikeError where the result says anything that more layers would change, or where units differ.
    """
    changed = {f.name for f in fields(Program) if _differs(getattr(cut.program, f.name), getattr(result, f.name))}
    if odd := changed - _OF_BOTH - {"graph", "stages", "params", "buffers", "meta"}:
        raise UnlikeError(f"passes made {', '.join(odd)}")
    added = result.notes[len(cut.program.notes) :]
    if cut.names.in_any((*added, result.meta)) or len({*added}) < len(added) or any(map(_COUNTS.search, added)):
        raise UnlikeError("a pass has noted something of single layers, or counted")
    params = _stored(program.params, cut.program.params, result.params, cut)
    buffers = _stored(program.buffers, cut.program.buffers, result.buffers, cut)
    held: list[Param | Buffer | Input] = [*params, *buffers, *result.inputs]
    order = ["mesh", "rng", *(x.name for x in held)]

    def write(whole: fx.Graph) -> None:
        try:
            _graph(result.graph, cut, order, whole)
        except UnlikeError:
            fx.Graph.__init__(whole)
            made = run(program).graph
            copy_graph(made, into=whole)
            whole.output_node().meta = dict(made.output_node().meta)

    return replace(
        program,
        graph=DeferredGraph(write, result.graph),
        stages=tuple(replace(s, graph=_graph(s.graph, cut, order, fx.Graph())) for s in result.stages),
        params=params,
        buffers=buffers,
        meta=result.meta,
        **{name: getattr(result, name) for name in _OF_BOTH},
    )


def _differs(a: object, b: object) -> bool:
    return a is not b and a != b


def _stored(
    captured: Sequence[_Stored], before: Sequence[_Stored], after: Sequence[_Stored], cut: Cut
) -> tuple[_Stored, ...]:
    """Parameters or buffers: what passes changed of one, they changed of those in its place."""
    if [x.name for x in before] != [x.name for x in after]:
        raise UnlikeError("passes made other parameters")
    changes: dict[str, dict[str, Any]] = {}
    for old, new in zip(before, after, strict=True):
        values = ((f.name, getattr(new, f.name)) for f in fields(new))
        changes[old.name] = {k: v for k, v in values if v is not getattr(old, k)}
        if not changes[old.name].keys() <= {"layout", "requires_grad", "frozen", "reduce"}:
            raise UnlikeError(f"passes changed {', '.join(changes[old.name])} of {old.name}")
    for kept, _ in cut.stored.values():
        if kept in changes and changes[kept] != changes[cut.before[kept]]:
            raise UnlikeError(f"{kept} is not stored as {cut.before[kept]} is")
    return tuple(x.changed(changes[cut.stored.get(x.name, (x.name, 0))[0]]) for x in captured)


def _graph(graph: fx.Graph, cut: Cut, order: Sequence[str], into: fx.Graph) -> fx.Graph:
    """A graph of the result with all layers. order: names of the placeholders; into: an empty graph."""
    ops = ops_of(graph, cut.names.list)
    units = cut.units
    if any(layer not in ops.starts for layer in cut.layers[:units]):
        raise UnlikeError("a layer has no ops left")
    bounds = [ops.starts[layer] for layer in cut.layers[:units]]
    bounds.append(ops.start(cut.layers[units], (bounds[-1], bounds[1] - bounds[0])))
    if len({b - a for a, b in pairwise(bounds)}) > 1:
        raise UnlikeError("layers have other numbers of ops")
    nodes = placeholders(graph)
    behind = range(
        cut.layers[units], sys.maxsize
    )  # the last unit may name these, which are others in the whole program
    for n in ops.nodes[bounds[-2] : bounds[-1]]:
        n.meta = {k: cut.names.moved(x, -cut.left_out, behind) for k, x in n.meta.items()}
    moving = _moving(cut, ops.nodes, bounds, nodes)
    numbering = Numbering(nodes)
    captured = {n.name for n in cut.program.graph.nodes}
    names = numbering.replaced([n.name for n in ops.nodes], bounds, cut.left_out, captured)
    for n, name in zip(ops.nodes, names, strict=True):
        n.name = name
    in_units = [list(names_in(ops.nodes[a:b])) for a, b in pairwise(bounds)]
    numbering.learn(in_units, names_in(ops.nodes[: bounds[0]]), names_in(ops.nodes[bounds[-1] :]))
    whole = _Whole(cut, ops.nodes, bounds, nodes, moving, numbering, into)
    whole.store(order)
    whole.copy_units()
    whole.finish(graph.output_node())
    return whole.graph


@dataclass
class _Whole:
    """A graph with all layers. ops: of the graph with fewer; bounds: where their units begin and end, moving: what
    changes from unit to unit of what nodes say. written: all ops up to the last unit's end; env: of nodes outside of
    the units.
    """

    cut: Cut
    ops: list[fx.Node]
    bounds: list[int]
    nodes: dict[str, fx.Node]
    moving: dict[fx.Node, list[str]]
    numbering: Numbering
    graph: fx.Graph
    written: list[fx.Node] = field(default_factory=list)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.index = {n: i for i, n in enumerate(self.ops)}
        self.length = self.bounds[1] - self.bounds[0]
        self.here: dict[str, fx.Node] = {}

    def _said(self, n: fx.Node, unit: int) -> dict[str, Any]:
        return {k: self.cut.names.moved(n.meta[k], unit) for k in self.moving[n]}

    def store(self, order: Sequence[str]) -> None:
        """The placeholders."""
        for name in order:
            kept, unit = self.cut.stored.get(name, (name, 0))
            old = self.nodes[kept]
            said = self._said(old, unit) if unit else {}
            self.here[name] = copied(self.graph, old, name, self.env.__getitem__, **said)
            if not unit:
                self.env[old] = self.here[name]

    def copy_units(self) -> None:
        """What comes before the last unit that stays, that one, and its copies."""
        last, end = self.bounds[-2:]
        for n in self.ops[:end]:
            self.env[n] = copied(self.graph, n, n.name, self.env.__getitem__)
            self.written.append(self.env[n])
        forms = [(n, self.numbering.name(n.name), self._taken(n)) for n in self.ops[last:end]]
        for unit in range(1, self.cut.left_out + 1):
            later = self.cut.later(unit)
            own = self.env | {self.nodes[kept]: self.here[name] for kept, name in later.items()}
            ordinal, shift = self.numbering.ordinal(unit), unit * self.length
            for n, name, taken in forms:
                operands = {x: self.written[i + shift] if i >= 0 else own[x] for x, i in taken}
                self.written.append(
                    copied(self.graph, n, name.at(unit, later), operands.__getitem__, ordinal, **self._said(n, unit))
                )

    def _taken(self, n: fx.Node) -> list[tuple[fx.Node, int]]:
        """The operands of an op of the last unit, with their place among all ops if that goes on from unit to unit."""
        places = ((x, self.index.get(x, -1)) for x in n.all_input_nodes)
        return [(x, i if i >= self.bounds[0] else -1) for x, i in places]

    def finish(self, output: fx.Node) -> None:
        """What comes behind the units."""
        names, layers, more = self.cut.names, self.cut.layers, self.cut.left_out
        last = layers[self.cut.units - 1]
        inner, of_last = range(layers[0], last), range(last, last + names.period)
        for n in self.ops[self.bounds[-1] :]:
            if any(x != names.moved(x, 1, inner) for x in n.meta.values()):
                raise UnlikeError(f"{n} names an inner layer")
            said = {k: names.moved(x, more, of_last) for k, x in n.meta.items()}
            name = self.numbering.after(n.name, more)
            self.env[n] = copied(self.graph, n, name, self._behind, self.numbering.ordinal(more), **said)
        self.graph.output(fx.map_arg(output.args[0], self._behind))
        self.graph.output_node().meta = dict(output.meta)

    def _behind(self, n: fx.Node) -> fx.Node:
        """An operand of what comes behind the units."""
        i = self.index.get(n, -1)
        if self.bounds[0] <= i < self.bounds[-2]:
            raise UnlikeError(f"{n} is used behind the layers that it is in")
        inside = self.bounds[-2] <= i < self.bounds[-1]
        return self.written[i + self.cut.left_out * self.length] if inside else self.env[n]


def _moving(
    cut: Cut, ops: Sequence[fx.Node], bounds: Sequence[int], nodes: Mapping[str, fx.Node]
) -> dict[fx.Node, list[str]]:
    """Of the ops of the last unit that stays, and of its parameters: what they say of themselves that goes on.

    Raises UnlikeError where the units differ in more.
    """
    names, length = cut.names, bounds[1] - bounds[0]
    stored = {nodes[x]: nodes[before] for x, before in cut.before.items()}
    twins = Twins(names, {n: i for i, n in enumerate(ops)}, bounds[0], length, stored)
    for i in range(bounds[1], bounds[-1]):
        twins.check(ops[i - length], ops[i])
    of_last = {nodes[kept] for kept, _ in cut.stored.values()}
    for n in of_last:
        later = n
        for _ in range(cut.units - 1):
            twins.check_meta(stored[later], later)
            later = stored[later]
    pairs = [(ops[i - length], ops[i]) for i in range(bounds[-2], bounds[-1])]
    return {b: twins.moving(a, b) for a, b in (*pairs, *((stored[n], n) for n in of_last))}
