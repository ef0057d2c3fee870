"""Collectives begin as soon as what they send is there, are waited for where somebody wants the result, and something
else runs in between.

    dgrad = mm(dy, w)            the gradient of the input, which tensor-parallel ranks add up
    sum = ops.transpose_start('sum_grad', dgrad, ...)
    wgrad = mm(dyT, x)           nothing but a bucket waits for it: it fills the time
    dx = ops.wait(sum)

It is a list scheduler: collectives are taken in their order, which all ranks share; what leads to the next one runs
first; while a collective would be waited for, the first line of the text that is ready runs instead. Gradients of
weights may also be put off to fill the time of the next collectives (`reserve` of them), which takes memory. Several
orders are simulated, and that which ends first is taken, among those whose peak of live bytes is not above the text's
as it was. Ranks compute the same numbers in another order, so nothing changes but the time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.conversions import BY_OP, SENT
from shardc.ir.metadata import Collective
from shardc.ir.offload import HOST_LINK
from shardc.passes.lower.memory import GATHERS, STARTS, WAITS, Memory, Sizes, Uses
from shardc.passes.lower.rule_transposed import CONVERSIONS, EXCHANGES
from shardc.passes.lower.seconds import Seconds
from shardc.runtime import ops

#: How many collectives' time may be kept in reserve.
RESERVES = (0, 1, 2, 4)
#: How many lines further down may come first.
WINDOW = 400
#: How often an order that takes too much memory is made again.
ROUNDS = 6


def overlap_collectives(graph: fx.Graph, seconds: Seconds, sizes: Sizes, room: int = 0) -> int:
    """Split the collectives of a text in two, and move its lines. room: bytes that may be alive in any case. Returns
    the peak of those that are, in a microbatch that is not the first.
    """
    _split(graph, seconds)
    text = Text(graph, seconds, sizes)
    order = text.nodes
    if text.targets:
        most = text.uses.peak(text.nodes)
        order = best_order(text, most)
        if room > min(most):
            order = min(order, best_order(text, (max(most[0], room), max(most[1], room))), key=text.simulate)
        output = graph.output_node()
        for n in order:
            output.prepend(n)
    return text.uses.peak(order)[1] if order else 0


def best_order(text: Text, most: tuple[int, int]) -> list[fx.Node]:
    """The order that ends first. most: peaks of bytes that may be alive."""
    best = text.nodes
    least = text.simulate(best)
    for reserve in RESERVES if text.may_put_off else RESERVES[:1]:
        order, took = fitting(text, reserve, most)
        if took < least:
            best, least = order, took
    return best


def fitting(text: Text, reserve: int, most: tuple[int, int]) -> tuple[list[fx.Node], float]:
    """(an order that takes no more memory, its seconds). Where one does, it meets the text's own order: at a line that
    has too much beside it, all lines before it in the text come before it.
    """
    meets: set[fx.Node] = set()
    for _ in range(ROUNDS):
        made = Scheduler(text, reserve, most, meets)
        order = made.order()
        over = {n for n, alive in zip(order, made.alive, strict=True) if not within(alive, most)}
        if not over:
            return order, made.seconds
        meets |= over
    return text.nodes, text.simulate(text.nodes)


def within(bytes_: tuple[int, int], most: tuple[int, int]) -> bool:
    """Are both peaks (shardc.passes.lower.memory) at most those?"""
    return bytes_[0] <= most[0] and bytes_[1] <= most[1]


def _split(graph: fx.Graph, seconds: Seconds) -> None:
    """A line that communicates becomes a start and a wait: of conversions, and of exchanges of experts."""
    for n in list(graph.nodes):
        back = n.target is ops.transpose
        op = n.args[0] if back else (CONVERSIONS | EXCHANGES).get(n.target)
        c: Collective | None = n.meta.get("collective")
        if op is None or c is None or not seconds.sent(c) or not _communicates(op, back=back):
            continue
        target: Any = ops.transpose_start if back else ops.start
        args = n.args if back else (op, *n.args)
        with graph.inserting_before(n):
            begun = graph.create_node("call_function", target, args, dict(n.kwargs), name=f"{n.name}_start")
        begun.meta = dict(n.meta)
        n.target, n.args, n.kwargs = ops.wait, (begun,), {}
        n.meta = {k: v for k, v in n.meta.items() if k != "collective"}


def _communicates(op: str, *, back: bool) -> bool:
    row = BY_OP.get(op)
    return row is None or (row.backward if back else row.forward) in SENT


class Text:
    """What the order of a graph's lines has to keep, and what it costs.

    targets: lines that communicate, in order; leads: lines that lead to one of them, or to what the text returns.
    """

    def __init__(self, graph: fx.Graph, seconds: Seconds, sizes: Sizes) -> None:
        self.nodes: list[fx.Node] = [n for n in graph.nodes if n.op == "call_function"]
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.work = {n: seconds.of(n) for n in graph.nodes}
        self.sends = {n: self._sent(n, seconds) for n in self.nodes}
        self._started = {n: n.args[0] for n in self.nodes if n.target in WAITS}
        self.starts = {n for n in self.nodes if n.target in STARTS}
        #: Lines during whose sending the rank stands still.
        self.stops = {n for n in self.nodes if self.sends[n] and n not in self.starts and n.target not in EFFECTS}
        self.targets = [n for n in self.nodes if n in self.starts or n in self.stops]
        self.before = {n: dict.fromkeys(x for x in n.all_input_nodes if x in self.place) for n in self.nodes}
        for pinned, earlier in self._pinned():
            self.before[pinned][earlier] = None
        self.after: dict[fx.Node, list[fx.Node]] = {n: [] for n in self.nodes}
        for n, those in self.before.items():
            for x in those:
                self.after[x].append(n)
        returned = [x for x in graph.output_node().all_input_nodes if x in self.place]
        self.leads = self.ancestors([*self.targets, *returned])
        #: Are there lines that a reserve is made of? A forward has none.
        self.may_put_off = any(self.work[n].seconds and n not in self.leads for n in self.nodes)
        self.uses = Uses(graph, sizes, self.work)

    @staticmethod
    def _sent(n: fx.Node, seconds: Seconds) -> float:
        if "copy" in n.meta:
            return seconds.copied(n.meta["copy"])
        c: Collective | None = n.meta.get("collective")
        return seconds.sent(c) if c is not None else 0.0

    def _pinned(self) -> list[tuple[fx.Node, fx.Node]]:
        """(line, one that has to come before it): a bucket is gathered, and a value comes back from the host, no
        earlier than the pass has decided, as it takes memory, and what has effects keeps its order."""
        pairs = [(n, x) for x, n in itertools.pairwise(self.nodes) if n.target is ops.reload_start]
        there: dict[bool, fx.Node] = {}  # by half of an overlapped pair
        under_way: dict[Any, fx.Node] = {}  # by bucket that forward gathers: the last line that waited for it
        effect: fx.Node | None = None
        for n in self.nodes:
            half = bool(n.meta.get("back"))
            if n.target is ops.gather_start and n.args[1] in under_way:
                pairs.append((n, under_way[n.args[1]]))  # a bucket's gather of the other half has ended
            if n.target is ops.gather_wait:
                under_way[n.args[0].args[1]] = n  # type: ignore[union-attr]
            if n.target in GATHERS and half in there:
                pairs.append((n, there[half]))
            elif n.target in GATHERS.values():
                there[half] = n
            elif n.target in EFFECTS:
                if effect is not None:
                    pairs.append((n, effect))
                effect = n
        return pairs

    def ancestors(self, nodes: Sequence[fx.Node], done: set[fx.Node] | None = None) -> set[fx.Node]:
        """These lines and all that they take, directly or not; but for those that are `done`."""
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            n = todo.pop()
            if n not in found and (done is None or n not in done):
                found.add(n)
                todo += self.before[n]
        return found

    def started(self, n: fx.Node) -> fx.Node | None:
        """What a line waits for."""
        start: Any = self._started.get(n)
        return start if start in self.place else None

    def simulate(self, order: Sequence[fx.Node]) -> float:
        """Seconds of the text on the assumed machine: computing, one stream for each group of axes, and one for copies
        to the host and back.
        """
        clock = Clock(self)
        for n in order:
            clock.run(n)
        return clock.end()


class Clock:
    """now: seconds of computing and waiting so far."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self.now = 0.0
        self.ends: dict[fx.Node, float] = {}  # of collectives
        self._streams: dict[tuple[str, ...], float] = {}

    def run(self, n: fx.Node) -> None:
        start = self._text.started(n)
        if start is not None:
            self.now = max(self.now, self.ends[start])
        self.now += self._text.work[n].seconds
        if self._text.sends[n]:
            stream = HOST_LINK if "copy" in n.meta else n.meta["collective"].axes
            self._streams[stream] = self.ends[n] = max(self._streams.get(stream, 0.0), self.now) + self._text.sends[n]
            if n in self._text.stops:
                self.now = self.ends[n]
        elif n in self._text.starts:
            self.ends[n] = self.now

    def end(self) -> float:
        """When all is done, sums of buckets too."""
        return max(self.now, *self._streams.values(), 0.0)


class Scheduler:
    """One order of a text. reserve: how many of the next collectives lines are put off for; most: the peaks of bytes
    that may be alive; meets: lines that nothing passes, in either direction. alive: bytes at each line of the order.
    """

    def __init__(self, text: Text, reserve: int, most: tuple[int, int], meets: Collection[fx.Node] = ()) -> None:
        self._text, self._reserve, self._most = text, reserve, most
        places = {p for n in meets for p in (text.place[n], text.place[n] + 1)}
        self._parts = list(itertools.pairwise(sorted({0, *places, len(text.nodes)})))
        self._end = 0  # of the part of the text that is being ordered
        self._clock, self._memory = Clock(text), Memory(text.uses)
        self._order: list[fx.Node] = []
        self.alive: list[tuple[int, int]] = []
        self._done: set[fx.Node] = set()
        self._missing = {n: len(those) for n, those in text.before.items()}
        self._ready: list[int] = []  # places of lines that could run
        self._reached = 0  # the greatest place of a line that ran
        for n in text.nodes:
            if not self._missing[n]:
                heapq.heappush(self._ready, text.place[n])

    @property
    def seconds(self) -> float:
        """Of the order so far."""
        return self._clock.end()

    def order(self) -> list[fx.Node]:
        """Once."""
        text = self._text
        targets = deque(enumerate(text.targets))
        for begin, end in self._parts:
            self._end = end
            while targets and text.place[targets[0][1]] < end:
                k, target = targets.popleft()
                ahead = sum(text.sends[t] for t in text.targets[k + 1 : k + 1 + self._reserve])
                for n in sorted(text.ancestors([target], self._done), key=text.place.__getitem__):
                    self._next(n, ahead)
            for n in text.nodes[begin:end]:
                self._next(n, 0.0)
        return self._order

    def _next(self, n: fx.Node, ahead: float) -> None:
        if n not in self._done:
            self._fill(n)
        if n not in self._done:
            if not self._fits(n):
                self._catch_up(0.0)
            self._emit(n)
            self._catch_up(ahead)

    def _emit(self, n: fx.Node) -> None:
        self._clock.run(n)
        self.alive.append(self._memory.run(n))
        self._order.append(n)
        self._done.add(n)
        self._reached = max(self._reached, self._text.place[n])
        for user in self._text.after[n]:
            self._missing[user] -= 1
            if not self._missing[user]:
                heapq.heappush(self._ready, self._text.place[user])

    def _fill(self, wait: fx.Node) -> None:
        """While the collective that a line waits for is under way, others run."""
        start = self._text.started(wait)
        if start is None:
            return
        limit = min(self._text.place[wait] + WINDOW, self._end - 1)
        aside: list[int] = []
        while self._ready and self._clock.now < self._clock.ends[start]:
            place = heapq.heappop(self._ready)
            n = self._text.nodes[place]
            if n in self._done:
                continue
            if place > limit:
                aside.append(place)
                break
            if n is wait or self._would_wait(n) or not self._fits(n):
                aside.append(place)
            else:
                self._emit(n)
        for place in aside:
            heapq.heappush(self._ready, place)

    def _fits(self, n: fx.Node) -> bool:
        return within(self._memory.would_be(n), self._most)

    def _would_wait(self, n: fx.Node) -> bool:
        """Does the rank stand still for it? It may begin any collective: all ranks run the same text."""
        start = self._text.started(n)
        if start is not None:
            return self._clock.ends[start] > self._clock.now
        return n in self._text.stops

    def _catch_up(self, ahead: float) -> None:
        """Run lines that others have overtaken, oldest first; of gradients of weights `ahead` seconds are put off."""
        text, put_off, aside = self._text, [], []
        while self._ready and self._ready[0] < self._reached:
            n = text.nodes[place := heapq.heappop(self._ready)]
            if n in self._done:
                continue
            if self._would_wait(n):
                aside.append(place)
            elif text.work[n].seconds and ahead and n not in text.leads:
                put_off.append(place)
            else:
                self._emit(n)
        left = sum(text.work[text.nodes[place]].seconds for place in put_off)
        for place in put_off:
            if left > ahead:
                left -= text.work[text.nodes[place]].seconds
                self._emit(text.nodes[place])
            else:
                aside.append(place)
        for place in aside:
            heapq.heappush(self._ready, place)
