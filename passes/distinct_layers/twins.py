"""Is one op another one, some layers later? It has the same target and constants, takes what stands as far before it,
and says the same of the layer that it is in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import fx

from shardc.ir.source import Source
from shardc.torch_private import add_node


class UnlikeError(Exception):
    """Layers that were taken for equal are not: the passes run on all."""


@dataclass
class Names:
    """Names of modules in one list of layers. list: its name; period: layers of a unit, which is what repeats."""

    list: str
    period: int
    _known: dict[tuple[str, int, range | None], str] = field(default_factory=dict)
    _known_calls: dict[tuple[tuple[str, ...], int, range | None], tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = re.escape(f"{self.list}.") if self.list else ""
        self._layer = re.compile(rf"(?<![\w.]){head}(\d+)(?![\w])")

    def text(self, text: str, units: int, of: range | None = None) -> str:
        """A text, perhaps with names of modules, so many units later. of: the layers that go on; None: all."""
        key = text, units, of
        if key not in self._known:

            def later(m: re.Match[str]) -> str:
                number = int(m[1])
                on = units * self.period if of is None or number in of else 0
                return f"{m[0][: m.start(1) - m.start()]}{number + on}"

            self._known[key] = self._layer.sub(later, text)
        return self._known[key]

    def in_any(self, x: Any) -> bool:
        """Does a text in it name a layer?"""
        if isinstance(x, dict):
            return any(map(self.in_any, (*x, *x.values())))
        if isinstance(x, (tuple, list)):
            return any(map(self.in_any, x))
        if is_dataclass(x) and not isinstance(x, type):
            return any(map(self.in_any, _texts(x).values()))
        return isinstance(x, str) and self._layer.search(x) is not None

    def moved(self, x: Any, units: int, of: range | None = None) -> Any:
        """What a node says of itself, so many units later. of: as in `text`."""
        if isinstance(x, str):
            return self.text(x, units, of)
        if isinstance(x, Source):
            return Source(self.text(x.module, units, of), x.line, x.code, self._calls(x.calls, units, of))
        if isinstance(x, tuple):
            return tuple(self.moved(each, units, of) for each in x)
        if isinstance(x, dict):
            return {self.moved(k, units, of): self.moved(v, units, of) for k, v in x.items()}
        if is_dataclass(x) and not isinstance(x, type) and (texts := _texts(x)):
            return replace(x, **{k: self.text(v, units, of) for k, v in texts.items()})
        return x

    def _calls(self, calls: tuple[str, ...], units: int, of: range | None) -> tuple[str, ...]:
        """Those of a layer's ops are few."""
        key = calls, units, of
        if key not in self._known_calls:
            self._known_calls[key] = tuple(self.text(c, units, of) for c in calls)
        return self._known_calls[key]

    def alike(self, a: Any, b: Any) -> bool:
        """Is what an op says of itself what the one a unit before says, or that with the names of its own layer?"""
        if isinstance(a, Source):
            return isinstance(b, Source) and a.line == b.line and a.code == b.code and self._sources(a, b)
        return bool(a == b) or bool(self.moved(a, 1) == b)

    def _sources(self, a: Source, b: Source) -> bool:
        if a.module == b.module:
            return a.calls == b.calls
        return self.text(a.module, 1) == b.module and self._calls(a.calls, 1, None) == b.calls


def _texts(x: Any) -> dict[str, str]:
    return {f.name: v for f in fields(x) if f.init and isinstance(v := getattr(x, f.name), str) and v}


@dataclass
class Twins:
    """Compares an op with the one that stands a unit before it. index: of every op. entry: index of the first op of the
    first unit; length: ops of a unit. stored: of a parameter, that of the unit before.
    """

    names: Names
    index: Mapping[fx.Node, int]
    entry: int
    length: int
    stored: Mapping[fx.Node, fx.Node]

    def check(self, a: fx.Node, b: fx.Node) -> None:
        """Raises UnlikeError."""
        if a.target is not b.target or not self._args(a.args, b.args) or not self._kwargs(a, b):
            raise UnlikeError(f"{a} and {b} do different things")
        self.check_meta(a, b)

    def check_meta(self, a: fx.Node, b: fx.Node) -> None:
        """Raises UnlikeError where two say other things of themselves than their layers' names."""
        if a.meta.keys() != b.meta.keys():
            raise UnlikeError(f"{a} and {b} are of different kinds")
        for key, mine in a.meta.items():
            other = b.meta[key]
            if mine is not other and not self.names.alike(mine, other):
                raise UnlikeError(f"{a} and {b} differ in {key}")

    def moving(self, a: fx.Node, b: fx.Node) -> list[str]:
        """The metadata in which two twins differ.

        Raises UnlikeError where both name one layer: what that one is to them may depend on how many there are.
        """
        found = [
            k for k, mine in a.meta.items() if mine != b.meta[k] or (k == "source" and mine.calls != b.meta[k].calls)
        ]
        if self.names.in_any({k: v for k, v in a.meta.items() if k not in found}):
            raise UnlikeError(f"{a} and {b} name one layer")
        return found

    def _kwargs(self, a: fx.Node, b: fx.Node) -> bool:
        mine, other = a.kwargs, b.kwargs
        if not mine or not other:
            return bool(mine) == bool(other)
        return mine.keys() == other.keys() and all(
            mine[k] == a.name and other[k] == b.name if k == "tag" else self._same(mine[k], other[k]) for k in mine
        )

    def _args(self, a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
        if len(a) != len(b):
            return False
        unlike = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not self._same(x, y)]
        return not unlike or (unlike == [ordinal_at(a)] and type(b[unlike[0]]) is int)

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return isinstance(b, fx.Node) and self._operand(a, b)
        if isinstance(a, (tuple, list)):
            return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(self._same, a, b))
        if isinstance(a, slice):
            return isinstance(b, slice) and (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
        return type(a) is type(b) and bool(a == b)

    def _operand(self, a: fx.Node, b: fx.Node) -> bool:
        if b.op == "placeholder":
            return a is b or self.stored.get(b) is a
        if a.op != "call_function":
            return False
        i, j = self.index[a], self.index[b]
        return i == j < self.entry or (j - i == self.length and j >= self.entry)


def ordinal_at(args: tuple[Any, ...]) -> int | None:
    """Where the ordinal of an op that draws random numbers stands among its arguments."""
    for i, x in enumerate(args[:-1]):
        if isinstance(x, fx.Node) and x.name == "rng" and type(args[i + 1]) is int:
            return i + 1
    return None


def copied(
    graph: fx.Graph, node: fx.Node, name: str, operand: Callable[[fx.Node], fx.Node], later: int = 0, **meta: Any
) -> fx.Node:
    """A copy at the end of a graph, under a name of its own. operand: of every node that it takes; later: how much more
    the ordinal of an op that draws random numbers is; meta: what is not as the node says.

    Raises UnlikeError where another node has the name.
    """
    args: tuple[Any, ...] = fx.map_arg(node.args, operand)
    if later and (at := ordinal_at(node.args)) is not None:
        args = (*args[:at], args[at] + later, *args[at + 1 :])
    kwargs = node.kwargs and {k: name if k == "tag" else fx.map_arg(v, operand) for k, v in node.kwargs.items()}
    target = node.target if node.op == "call_function" else name
    new = add_node(graph, node.op, target, args, kwargs, name=name, meta=node.meta | meta)
    if new.name != name:
        raise UnlikeError(f"two nodes would be called {name}")
    return new
