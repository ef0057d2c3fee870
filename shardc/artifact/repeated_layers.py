"""Find the lines of a program's text that only repeat and can be left out: layers, buckets, stages.

    # h.0.fc (gpt.py:31): ...
    linear = aten.linear.default(x, h_0_fc_weight)
    # 78 more layers like h.0: h.{1-78}

A saved text is always complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from torch import fx

from shardc.ir.program import Program
from shardc.ir.repeats import Repeats, graph_key, in_order, repeats
from shardc.ir.stage import Stage
from shardc.ir.units import plural
from shardc.layer_names import blank, enclosing_layers, ranges

Notes = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Folded:
    """What a text leaves out: by kind, {name of a node or parameter, or index: the line in its place}.

    The line is "" for all but the first of a stretch.
    """

    params: Mapping[str, str]
    nodes: Mapping[str, Mapping[str, str]]  # by name of the stage; placeholders and ops
    buckets: Mapping[int, str]
    regions: Mapping[int, str]
    edges: Mapping[int, str]
    stages: Mapping[int, str]


NOTHING = Folded({}, {}, {}, {}, {}, {})


def fold(program: Program) -> Folded:
    """Find the lines that only repeat."""
    equal, stages = repeats(program), program.stages or (Stage(program.graph, "single"),)

    def bucket(i: int) -> Hashable:
        b = program.buckets[i]
        params = tuple((equal.shown(equal.names[n]), str(program.param(n).value)) for n in b.params)
        return replace(b, params=(), stages=()), params

    def region(i: int) -> Hashable:
        r = program.regions[i]
        return replace(r, name=equal.shown(r.name), parent=equal.shown(r.parent), cause=blank(r.cause))

    def edge(i: int) -> Hashable:
        return tuple((str(v), v.requires_grad) for v in program.edges[i].values)

    return Folded(
        _layers([(p.name, [p.fqn]) for p in program.params], equal),
        {s.name: _graph(s.graph, equal) for s in stages},
        _entries("bucket", [f"bucket {i}" for i in range(len(program.buckets))], bucket),
        _entries("region", [r.name for r in program.regions], region),
        _entries("edge", [f"stage{e.source} -> stage{e.target}" for e in program.edges], edge),
        _stages(program.stages),
    )


# --- layers


def _graph(graph: fx.Graph, equal: Repeats) -> Notes:
    """Return the placeholders and ops to leave out: an earlier layer of this graph computes the same."""
    nodes: dict[str, list[fx.Node]] = {"placeholder": [], "call_function": []}
    for n in graph.nodes:
        nodes.get(n.op, []).append(n)
    both = ([(n.name, equal.modules(n)) for n in of_kind] for of_kind in nodes.values())
    return {name: note for items in both for name, note in _layers(items, equal).items()}


def _layers(items: Sequence[tuple[str, Sequence[str]]], equal: Repeats) -> Notes:
    """Return the items to leave out, with notes. items: (name, the modules that it belongs to)."""
    layers = {layer for _, modules in items for m in modules for layer in enclosing_layers(m)}
    shown: dict[str, str] = {}  # of equal layers, the first that has an item
    for layer in sorted(layers, key=in_order):
        shown.setdefault(equal.first.get(layer, layer), layer)

    def like(module: str) -> tuple[str, str] | None:
        each = ((shown[equal.first.get(layer, layer)], layer) for layer in enclosing_layers(module))
        return next((pair for pair in each if pair[0] != pair[1]), None)

    pairs = ((name, [like(m) for m in modules]) for name, modules in items)
    return _notes("layer", ((name, each[-1] if each and all(each) else None) for name, each in pairs))


def _notes(kind: str, items: Iterable[tuple[T, tuple[str, str] | None]]) -> dict[T, str]:
    """Return what is left out, with the lines in its place. A single item is shown: its line is as long.

    items: each with (what is shown, what it represents), or None.
    """
    gaps: list[list[tuple[T, tuple[str, str]]]] = [[]]
    for item, pair in items:
        if pair is not None:
            gaps[-1].append((item, pair))
        elif gaps[-1]:
            gaps.append([])
    notes: dict[T, str] = {}
    for gap in gaps:
        like: dict[str, dict[str, None]] = {}
        for _, (one, other) in gap:
            like.setdefault(one, {})[other] = None
        if len(gap) > 1:
            lines = (f"{plural(len(x), f'more {kind}')} like {one}: {_together(list(x))}" for one, x in like.items())
            notes |= dict.fromkeys((item for item, _ in gap), "") | {gap[0][0]: "\n".join(lines)}
    return notes


def _together(names: Sequence[str]) -> str:
    """Join names that differ in one number.

    >>> _together(["h.1.fc", "h.2.fc", "h.4.fc"]), _together(["0 -> 1", "1 -> 2"])
    ('h.{1-2,4}.fc', '0 -> 1 to 1 -> 2')
    """
    columns = [list(dict.fromkeys(c)) for c in zip(*(re.split(r"(\d+)", n) for n in names), strict=True)]
    if sum(len(c) > 1 for c in columns) > 1:
        return f"{names[0]} to {names[-1]}"
    return "".join(c[0] if len(c) == 1 else f"{{{ranges(c)}}}" for c in columns)


# --- lists: buckets, regions, edges, stages


def _entries(kind: str, names: Sequence[str], key: Callable[[int], Hashable]) -> dict[int, str]:
    """Return the indices to leave out of a list, with notes: earlier entries have the same key."""
    first: dict[Hashable, int] = {}
    like = ((i, first.setdefault(key(i), i)) for i in range(len(names)))
    return _notes(kind, ((i, None if one == i else (names[one], names[i])) for i, one in like))


def _stages(stages: Sequence[Stage]) -> dict[int, str]:
    """Return the pipeline stages to leave out, with notes: they run what the stage before runs."""
    left_out: dict[int, str] = {}
    for _, run in groupby(range(len(stages)), key=lambda i: graph_key(stages[i].graph)):
        first, *others = run
        if others:
            names, their = _together([stages[i].name for i in others]), "its" if len(others) == 1 else "their"
            left_out |= dict.fromkeys(others, "")
            left_out[others[0]] = f"{names}: as {stages[first].name}, on {their} own layers"
    return left_out
