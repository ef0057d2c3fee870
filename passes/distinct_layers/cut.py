"""Which layers repeat in a captured program, and the program without most of them.

A *unit* is what repeats: a layer, or several where every other one attends to a window. Of the units that are equal,
two stay, and what comes before and after all of them. Passes may make something else of the last layer, for what is
behind it; then three stay, and the last one besides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from torch import fx

from shardc.ir.deferred_graph import FewerLayers, fewer_layers
from shardc.ir.graph import placeholders, source_of
from shardc.ir.layers import layer_of
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.passes.distinct_layers.numbering import ORDINAL, Numbering
from shardc.passes.distinct_layers.twins import Names, Twins, UnlikeError, copied, ordinal_at
from shardc.spec import Spec

#: Units that stay, whose results are compared.
UNITS = 2
#: With the last unit besides, so many: two steps from one to the next.
MORE_UNITS = 3
#: So many are to be left out at least: cutting and restoring costs about what a layer does.
LEFT_OUT = 2
#: Layers of a unit, at most.
PERIOD = 8
#: A number in a pattern of the spec: it may name one layer.
_NAMES_A_NUMBER = re.compile(r"(?:^|[.{,])\d+(?:[.},]|$)")


@dataclass(frozen=True)
class Cut:
    """program: without the units. layers: the first one of each unit that stays, and of the first one after all units.

    left_out: how many units. stored: of the parameters and buffers left out: the name of that in the last unit that
    stays, and how many units later they are; before: of those that stay, that of the unit before.
    """

    program: Program
    names: Names
    layers: tuple[int, ...]
    left_out: int
    stored: Mapping[str, tuple[str, int]]
    before: Mapping[str, str]

    @property
    def units(self) -> int:
        """How many stay."""
        return len(self.layers) - 1

    def later(self, units: int) -> dict[str, str]:
        """What is stored of the last unit that stays: names, and those of so many units later."""
        return {kept: name for name, (kept, n) in self.stored.items() if n == units}


@dataclass
class Ops:
    """The ops of a graph, and where the layers of one list begin. starts: index of the first op of each layer; last:
    index of the last op that is in one.
    """

    nodes: list[fx.Node]
    starts: dict[int, int]
    last: int

    def start(self, layer: int, of_last: tuple[int, int]) -> int:
        """Index of the first op of a layer; of one that is not there, behind the last one. of_last: where the last unit
        begins, and how many ops the one before has.

        Raises UnlikeError where it is not.
        """
        end = sum(of_last)
        if layer not in self.starts and not self.last < end <= len(self.nodes):
            raise UnlikeError("the last layer has another number of ops")
        return self.starts.get(layer, end)


def ops_of(graph: fx.Graph, name: str) -> Ops:
    """Raises UnlikeError where layers do not come one after the other."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    starts: dict[int, int] = {}
    now = last = -1
    of_module: dict[str, int | None] = {}
    for i, n in enumerate(nodes):
        module = source_of(n).module
        if module not in of_module:
            layer = layer_of(module)
            of_module[module] = int(layer[1]) if layer is not None and layer[0] == name else None
        number = of_module[module]
        if number is not None:
            last = i
        if number is not None and number != now:
            if number in starts or number < now:
                raise UnlikeError(f"layer {number} of {name} runs twice, or late")
            starts[number] = i
            now = number
    return Ops(nodes, starts, last)


def names_in(nodes: Sequence[fx.Node]) -> Iterator[str]:
    """The names of ops, and of those that draw random numbers their ordinals."""
    for n in nodes:
        yield n.name
        if (at := ordinal_at(n.args)) is not None:
            yield f"{ORDINAL}{n.args[at]}"


def cuts(program: Program, spec: Spec) -> Iterator[Cut]:
    """The program without layers that are equal to others: of the fewest layers, then of more. Nothing where that saves
    nothing, or would not do.
    """
    if spec.adapters or spec.optimizer.matrices is not None or _names_layers(spec):
        return
    if (fewer := fewer_layers(program.graph)) is not None:
        yield _known(program, fewer)
        if fewer.more is not None:
            yield _known(program, fewer.more())
        return
    for name in _lists(program.graph):
        try:
            if (run := _longest(program, name)) is not None:
                yield _cut(program, run)
                if (more := run.with_more()) is not None:
                    yield _cut(program, more)
                return
        except UnlikeError:
            continue


def _known(program: Program, fewer: FewerLayers) -> Cut:
    """As capture has found."""
    stored, names = fewer.stored, Names(fewer.list, fewer.period)
    params = tuple(p for p in program.params if p.name not in stored)
    buffers = tuple(b for b in program.buffers if b.name not in stored)
    short = replace(program, graph=fewer.graph, params=params, buffers=buffers)
    return Cut(short, names, fewer.layers, fewer.left_out, stored, fewer.before)


def _names_layers(spec: Spec) -> bool:
    """Does the spec say something of single layers?"""
    return any(_NAMES_A_NUMBER.search(text) for f in fields(spec) if f.repr for text in _texts(getattr(spec, f.name)))


def _texts(x: Any) -> Iterator[str]:
    if isinstance(x, str):
        yield x
    elif isinstance(x, BaseModel):
        yield from _texts(x.model_dump())
    elif isinstance(x, Mapping):
        for k, v in x.items():
            yield from (*_texts(k), *_texts(v))
    elif isinstance(x, (tuple, list, set, frozenset)):
        for each in x:
            yield from _texts(each)
    elif is_dataclass(x):
        for f in fields(x):
            yield from _texts(getattr(x, f.name))


def _lists(graph: fx.Graph) -> list[str]:
    """The lists of enough layers, that of most ops first."""
    layers: dict[str, set[str]] = {}
    ops: dict[str, int] = {}
    modules = Counter(source_of(n).module for n in graph.nodes if n.op == "call_function")
    for module, count in modules.items():
        if (layer := layer_of(module)) is not None:
            layers.setdefault(layer[0], set()).add(layer[1])
            ops[layer[0]] = ops.get(layer[0], 0) + count
    least = UNITS + LEFT_OUT + 1
    return sorted((name for name, each in layers.items() if len(each) >= least), key=lambda name: -ops[name])


# --- equal layers


@dataclass
class _Run:
    """Units that are equal. first: number of the first layer; twins: parameters, by those a unit later; stay: how many
    units do.
    """

    ops: Ops
    names: Names
    first: int
    units: int
    twins: dict[fx.Node, fx.Node]
    stay: int = UNITS

    @property
    def left_out(self) -> int:
        """Units."""
        return self.units - self.stay

    def with_more(self) -> _Run | None:
        """More units stay, and another one comes last; None where that saves nothing."""
        more = replace(self, units=self.units - 1, stay=MORE_UNITS)
        return more if more.left_out >= LEFT_OUT else None

    def bound(self, unit: int) -> int:
        """Index of its first op."""
        starts, layers = self.ops.starts, [self.first + i * self.names.period for i in range(self.units)]
        of_last = starts[layers[-1]], starts[layers[1]] - starts[layers[0]]
        return self.ops.start(self.first + unit * self.names.period, of_last)


def _longest(program: Program, name: str) -> _Run | None:
    """The units of a list that are equal, if they are enough."""
    ops = ops_of(program.graph, name)
    count = len(ops.starts)
    if list(ops.starts) != list(range(count)):
        return None
    index = {n: i for i, n in enumerate(ops.nodes)}
    best: _Run | None = None
    for period in range(1, min(PERIOD, (count - 1) // (UNITS + LEFT_OUT)) + 1):
        gone = 0 if best is None else best.left_out * best.names.period
        if gone >= count - period * (UNITS + 1):
            break  # with longer units fewer layers would go
        run = _equal_units(program, ops, index, Names(name, period))
        if run.left_out >= LEFT_OUT and run.left_out * period > gone:
            best = run
    return best


def _equal_units(program: Program, ops: Ops, index: Mapping[fx.Node, int], names: Names) -> _Run:
    """The most layers in a row that are equal, each to that a period before it, behind a period of others."""
    stored, period = _stored_a_unit_before(program, names), names.period
    first, last, begin = period, period, period
    starts = ops.starts
    for layer in range(2 * period, len(starts)):
        try:
            length = starts[layer] - starts[layer - period]
            of_twin = starts[layer - period + 1] - starts[layer - period]
            end = ops.start(layer + 1, (starts[layer], of_twin))
            if end - starts[layer] != of_twin:
                raise UnlikeError(f"layers {layer - period} and {layer} have other numbers of ops")
            twins = Twins(names, index, starts[layer - period], length, stored)
            for i in range(starts[layer], end):
                twins.check(ops.nodes[i - length], ops.nodes[i])
        except UnlikeError:
            begin = layer - period + 1
        if layer + 1 - begin > last - first:
            first, last = begin, layer + 1
    return _Run(ops, names, first, (last - first) // period, stored)


def _stored_a_unit_before(program: Program, names: Names) -> dict[fx.Node, fx.Node]:
    """Of parameters and buffers: that of the same name in the layer a unit before."""
    nodes = placeholders(program.graph)
    held: list[Param | Buffer] = [*program.params, *program.buffers]
    by_name = {x.fqn: x for x in held}
    found: dict[fx.Node, fx.Node] = {}
    for x in held:
        before = by_name.get(names.text(x.fqn, -1))
        if before is None or before is x or type(before) is not type(x):
            continue
        aliases = tuple(names.text(a, 1) for a in before.aliases)
        if replace(before, name=x.name, fqn=x.fqn, aliases=aliases) == x:
            found[nodes[x.name]] = nodes[before.name]
    return found


# --- without most of them


def _numbering(program: Program, run: _Run) -> Numbering:
    """How the names of the units' ops go on."""
    ops, bounds = run.ops.nodes, [run.bound(i) for i in range(run.units + 1)]
    units = [list(names_in(ops[a:b])) for a, b in pairwise(bounds)]
    numbering = Numbering({x.name for x in program.stored})
    numbering.learn(units, names_in(ops[: bounds[0]]), names_in(ops[bounds[-1] :]))
    return numbering


def _cut(program: Program, run: _Run) -> Cut:
    """Raises UnlikeError where anything but the next unit uses what a unit makes."""
    numbering = _numbering(program, run)
    ops, names, left_out = run.ops.nodes, run.names, run.left_out
    entry, begin, end = run.bound(0), run.bound(run.stay), run.bound(run.units)
    length = (begin - entry) // run.stay
    index = {n: i for i, n in enumerate(ops)}
    stored = _left_out(program, run, set(ops[begin:end]))
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()

    def after(n: fx.Node) -> fx.Node:
        """Of an operand of what comes after the units."""
        i = index.get(n, -1)
        if entry <= i < end - length:
            raise UnlikeError(f"{n} is used behind the layers that it is in")
        return env[ops[i - (end - begin)] if i in range(end - length, end) else n]

    for n in program.graph.nodes:
        i = index.get(n, -1)
        if begin <= i < end or n.name in stored:
            continue
        if i < end and n.op != "output":
            env[n] = copied(new, n, n.name, env.__getitem__)
        elif n.op == "output":
            new.output(fx.map_arg(n.args[0], after))
        else:
            env[n] = copied(new, n, numbering.after(n.name, -left_out), after, numbering.ordinal(-left_out))
    params = tuple(p for p in program.params if p.name not in stored)
    buffers = tuple(b for b in program.buffers if b.name not in stored)
    short = replace(program, graph=new, params=params, buffers=buffers)
    layers = tuple(run.first + i * names.period for i in (*range(run.stay), run.units))
    before = {x.name: y.name for x, y in run.twins.items() if not {x.name, y.name} & stored.keys()}
    return Cut(short, names, layers, left_out, stored, before)


def _left_out(program: Program, run: _Run, ops: set[fx.Node]) -> dict[str, tuple[str, int]]:
    """The parameters and buffers that only ops use which are left out: the one in the last unit that stays, and how
    many units later they are.
    """
    nodes = placeholders(program.graph)
    gone = {n: None for n in nodes.values() if n.users and all(u in ops for u in n.users)}
    found: dict[fx.Node, tuple[str, int]] = {}
    for n in gone:
        chain = [n]
        while chain[-1] in gone and chain[-1] not in found:
            if chain[-1] not in run.twins:
                raise UnlikeError(f"{chain[-1]} is of one layer alone")
            chain.append(run.twins[chain[-1]])
        kept, units = found.get(chain[-1], (chain[-1].name, 0))
        for x in reversed(chain[:-1]):
            units += 1
            found[x] = kept, units
    return {n.name: found[n] for n in gone}
