"""Of many copies of a layer in a row, those that need not be written where a few are enough: what passes run on
(shardc.passes.distinct_layers).

    h.0  h.1  h.2  h.3  h.4 ... h.30  h.31     h.1 to h.31 are copies of h.0, each of what the one before gives
    h.0  h.1  h.2                              what h.31 gives is what h.2 gives
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from shardc.capture.layer_copies import Copies, Copy
from shardc.ir.deferred_graph import FewerLayers
from shardc.ir.layers import layer_of
from shardc.ir.stored import Buffer, Param
from shardc.passes.distinct_layers.cut import LEFT_OUT, MORE_UNITS, PERIOD, UNITS


@dataclass(frozen=True)
class Run:
    """Copies that follow each other. list: the name of the list that they are in; first: number of the first layer;
    calls: one of each layer, of whole units; period: layers of a unit, which is what repeats; stay: how many units are
    written.
    """

    list: str
    first: int
    calls: Sequence[fx.Node]
    period: int
    stay: int = UNITS

    @property
    def units(self) -> int:
        return len(self.calls) // self.period

    @property
    def gone(self) -> Sequence[fx.Node]:
        """The calls of layers that are left out."""
        return self.calls[self.stay * self.period :]

    @property
    def stand_for(self) -> Mapping[fx.Node, fx.Node]:
        """The calls of the last unit that stays: those whose results theirs are."""
        kept, period = self.stay * self.period, self.period
        return dict(zip(self.calls[kept - period : kept], self.gone[-period:], strict=True))

    def with_more(self) -> Run | None:
        """More units stay, and another one comes last; None where that saves nothing."""
        more = replace(self, calls=self.calls[: -self.period], stay=MORE_UNITS)
        return more if more.units >= MORE_UNITS + LEFT_OUT else None

    def fewer(self, graph: fx.Graph, stored: Mapping[str, Param | Buffer], copies: Copies) -> FewerLayers | None:
        """The graph without them. stored: by the model's names. None where what they store is used by others too."""
        within: dict[str, list[str]] = {}  # names in a layer, by that which was traced
        for call in self.calls[: self.period]:
            first = copies.found[call].first
            within[first] = [name.removeprefix(first) for name in stored if name.startswith(f"{first}.")]
        gone: dict[str, tuple[str, int]] = {}
        before: dict[str, str] = {}
        for i, call in enumerate(self.calls):
            copy, at = copies.found[call], i // self.period
            for name in within[copy.first]:
                x = stored[copy.layer + name]
                if any(not n.startswith(f"{copy.layer}.") for n in x.names) or (isinstance(x, Buffer) and x.updated):
                    return None
                if 0 < at < self.stay:
                    before[x.name] = stored[self._layer(i - self.period) + name].name
                elif at >= self.stay:
                    kept = self._layer((self.stay - 1) * self.period + i % self.period)
                    gone[x.name] = stored[kept + name].name, at - self.stay + 1
        layers = tuple(self.first + at * self.period for at in (*range(self.stay), self.units))
        return FewerLayers(graph, self.list, self.period, layers, self.units - self.stay, gone, before)

    def _layer(self, i: int) -> str:
        return _named(self.list, self.first + i)


def longest_run(graph: fx.Graph, copies: Copies, kept: Collection[fx.Node]) -> Run | None:
    """The run of which most ops would be left out; None where that saves nothing. kept: nodes that are looked at
    besides the graph's output.
    """
    inner = {n for nodes in copies.segments.values() for n in nodes}
    lists: dict[str, dict[int, fx.Node]] = {}
    for call, copy in copies.found.items():
        layer = layer_of(copy.layer)
        if call not in inner and layer is not None and copy.layer == _named(*layer):
            lists.setdefault(layer[0], {})[int(layer[1])] = call
    finds = [_Find(graph, name, calls, copies.found, kept) for name, calls in lists.items()]
    periods = range(1, PERIOD + 1)
    runs = [run for find in finds for period in periods if (run := find.longest(period)) is not None]
    return max(runs, key=lambda run: sum(len(copies.segments[copies.found[c].first]) for c in run.gone), default=None)


def _named(of: str, number: object) -> str:
    """The name of a layer."""
    return f"{of}.{number}" if of else str(number)


class _Find:
    """Runs in one list of layers. calls: by the layers' numbers."""

    def __init__(
        self,
        graph: fx.Graph,
        name: str,
        calls: Mapping[int, fx.Node],
        found: Mapping[fx.Node, Copy],
        kept: Collection[fx.Node],
    ) -> None:
        self._list, self._calls, self._found, self._kept = name, calls, found, kept
        self._place = {n: i for i, n in enumerate(graph.nodes)}
        #: What a layer gives: its number, and which of its results.
        self._made: dict[fx.Node, tuple[int, int]] = {}
        for number, call in calls.items():
            copy = found[call]
            first = layer_of(copy.first)
            if first is not None and first[0] == name:
                self._made |= {x: (int(first[1]), k) for k, x in enumerate(copy.results)}
            self._made |= {u: (number, int(u.args[1])) for u in call.users}  # type: ignore[arg-type]

    def longest(self, period: int) -> Run | None:
        """A unit stays before it."""
        begin, best = 0, range(0)
        for number in sorted(self._calls):
            if number < 2 * period or not self._alike(number, period):
                begin = max(number - period + 1, period)
            elif number + 1 - begin > len(best):
                best = range(begin, number + 1)
        calls = [self._calls[i] for i in best[: len(best) // period * period]]
        run = Run(self._list, best.start, calls, period)
        return run if run.units >= UNITS + LEFT_OUT and self._closed(run) else None

    def _alike(self, number: int, period: int) -> bool:
        """Does a layer take what the one a unit before takes: what is outside of both, or what layers as far before
        each give?
        """
        twin = self._calls.get(number - period)
        if twin is None or number - 1 not in self._calls:
            return False
        one, other = self._found[twin], self._found[self._calls[number]]
        return one.first == other.first and all(
            y is x or self._moves(x, y, number, period)
            for x, y in zip(one.operands.values(), other.operands.values(), strict=True)
        )

    def _moves(self, x: fx.Node, y: fx.Node, number: int, period: int) -> bool:
        if x not in self._made or y not in self._made:
            return False
        (before, j), (now, k) = self._made[x], self._made[y]
        return j == k and now - before == period and now >= number - period

    def _closed(self, run: Run) -> bool:
        """Is nothing between its layers, and does nothing but the next layers look at what they give? What they all
        take stands before them.
        """
        calls, place = set(run.calls), self._place
        for before, call in pairwise(run.calls):
            if place[call] - place[before] != 1 + len(before.users):
                return False
        for call in run.calls[: -run.period]:
            for given in call.users:
                if given in self._kept or any(u not in calls for u in given.users):
                    return False
        for one, other in zip(run.calls, run.calls[run.period :], strict=False):
            pairs = zip(self._found[one].operands.values(), self._found[other].operands.values(), strict=True)
            if any(x is y and place[x] > place[run.calls[0]] for x, y in pairs):
                return False
        return True
