"""Find the lines of a program's text that only repeat and can be left out: layers, buckets, stages.

    # h.0.fc (gpt.py:31): ...
    linear = aten.linear.default(x, h_0_fc_weight)
    # 78 more layers like h.0: h.{1-78}

A saved text is always complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from torch import fx

from shardc.ir.program import Program
from shardc.ir.repeats import Repeats, graph_key, in_order, repeats
from shardc.ir.stage import Edge, Region, Stage
from shardc.ir.stored import Bucket, Param
from shardc.ir.units import plural
from shardc.layer_names import blank, enclosing_layers, ranges

T = TypeVar("T")
#: What is shown in place of an item, and what it represents; None for an item that is shown itself.
Like = tuple[str, str] | None


class Fold:
    """A program without what only repeats: each method yields what is shown, and notes (texts) in place of the rest.

    full: all is shown.
    """

    def __init__(self, program: Program, *, full: bool) -> None:
        self._program, self._full = program, full
        self._equal = Repeats() if full else repeats(program)

    def params(self) -> Iterator[Param | str]:
        return self._layers([(p, [p.fqn]) for p in self._program.params])

    def nodes(self, graph: fx.Graph, op: str) -> Iterator[fx.Node | str]:
        """Yield the nodes of a kind, without layers of which an earlier one in this graph computes the same."""
        nodes = [n for n in graph.nodes if n.op == op]
        return iter(nodes) if self._full else self._layers([(n, self._equal.modules(n)) for n in nodes])

    def buckets(self) -> Iterator[tuple[int, Bucket] | str]:
        equal, param = self._equal, self._program.param

        def key(b: Bucket) -> Hashable:
            params = tuple((equal.shown(equal.names[n]), str(param(n).value)) for n in b.params)
            return replace(b, params=(), stages=()), params

        names = [f"bucket {i}" for i in range(len(self._program.buckets))]
        return self._entries("bucket", list(enumerate(self._program.buckets)), names, lambda x: key(x[1]))

    def regions(self) -> Iterator[Region | str]:
        shown, regions = self._equal.shown, self._program.regions

        def key(r: Region) -> Hashable:
            return replace(r, name=shown(r.name), parent=shown(r.parent), cause=blank(r.cause))

        return self._entries("region", regions, [r.name for r in regions], key)

    def edges(self) -> Iterator[Edge | str]:
        names = [f"stage{e.source} -> stage{e.target}" for e in self._program.edges]

        def key(e: Edge) -> Hashable:
            return tuple((str(v), v.requires_grad) for v in e.values)

        return self._entries("edge", self._program.edges, names, key)

    def stages(self) -> Iterator[tuple[int, Stage] | str]:
        """Yield the stages with their numbers, without those that run what the stage before runs."""
        numbered = enumerate(self._program.stages)
        for _, equal in groupby(numbered, lambda x: x[0] if self._full else graph_key(x[1].graph)):
            first, *others = equal
            yield first
            if others:
                their = "its" if len(others) == 1 else "their"
                yield f"{_together([s.name for _, s in others])}: as {first[1].name}, on {their} own layers"

    def _layers(self, items: Sequence[tuple[T, Sequence[str]]]) -> Iterator[T | str]:
        """Yield the items of layers. items: each with the modules that it belongs to."""
        layers = {layer for _, modules in items for m in modules for layer in enclosing_layers(m)}
        first = self._equal.first
        shown: dict[str, str] = {}  # of equal layers, the first that has an item
        for layer in sorted(layers, key=in_order):
            shown.setdefault(first.get(layer, layer), layer)

        def like(module: str) -> Like:
            each = ((shown[first.get(layer, layer)], layer) for layer in enclosing_layers(module))
            return next((pair for pair in each if pair[0] != pair[1]), None)

        pairs = ((item, [like(m) for m in modules]) for item, modules in items)
        return _shown("layer", ((item, each[-1] if each and all(each) else None) for item, each in pairs))

    def _entries(
        self, kind: str, items: Sequence[T], names: Sequence[str], key: Callable[[T], Hashable]
    ) -> Iterator[T | str]:
        """Yield the items of a list, without those that have the key of an earlier one."""
        first: dict[Hashable, int] = {}
        like = [first.setdefault(i if self._full else key(x), i) for i, x in enumerate(items)]
        pairs = (None if one == i else (names[one], names[i]) for i, one in enumerate(like))
        return _shown(kind, zip(items, pairs, strict=True))


def _shown(kind: str, items: Iterable[tuple[T, Like]]) -> Iterator[T | str]:
    """Yield the items that are shown, and notes for stretches of others. A single one is shown: it is as long."""
    for left_out, stretch in groupby(items, lambda x: x[1] is not None):
        gap = list(stretch)
        if not left_out or len(gap) == 1:
            yield from (item for item, _ in gap)
            continue
        like: dict[str, dict[str, None]] = {}
        for one, other in (pair for _, pair in gap if pair is not None):
            like.setdefault(one, {})[other] = None
        for one, others in like.items():
            yield f"{plural(len(others), f'more {kind}')} like {one}: {_together(list(others))}"


def _together(names: Sequence[str]) -> str:
    """Join names that differ in one number.

    >>> _together(["h.1.fc", "h.2.fc", "h.4.fc"]), _together(["0 -> 1", "1 -> 2"])
    ('h.{1-2,4}.fc', '0 -> 1 to 1 -> 2')
    """
    columns = [list(dict.fromkeys(c)) for c in zip(*(re.split(r"(\d+)", n) for n in names), strict=True)]
    if sum(len(c) > 1 for c in columns) > 1:
        return f"{names[0]} to {names[-1]}"
    return "".join(c[0] if len(c) == 1 else f"{{{ranges(c)}}}" for c in columns)
