"""Split collectives into start and wait, and order lines so that other work runs in between.

    dgrad = mm(dy, w)            the gradient of the input, which tensor-parallel ranks add up
    sum = ops.transpose_start('sum_grad', dgrad, ...)
    wgrad = mm(dyT, x)           nothing but a bucket waits for it: it fills the time
    dx = ops.wait(sum)

A collective begins as soon as its operand exists, and is waited for where its result is needed. This is a list
scheduler: collectives keep their order, which all ranks share. Lines that lead to the next one run first. Instead of
waiting for a collective, the first line of the graph that is ready runs. Gradients of weights may also be
delayed to fill the time of later collectives (`reserve` of them), which takes memory. Several orders are simulated, and
the one that ends first is taken, among those whose peak of live bytes is not above that of the original order. Ranks
compute the same numbers in another order, so only the time changes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.conversions import BY_OP, COLLECTIVES
from shardc.ir.graph import reorder
from shardc.ir.metadata import Collective
from shardc.machine.clock import Clock
from shardc.machine.work import Sent
from shardc.passes.joint.derivatives.transposed import CONVERTED, EXCHANGES
from shardc.passes.joint.memory import GATHERS, STARTS, WAITS, Memory, MemoryStep, Sizes, Uses
from shardc.passes.joint.seconds import Seconds, Work
from shardc.runtime import ops
from shardc.torch_private import OpOverload, add_node

#: Tried numbers of following collectives for which gradients of weights are delayed, to hide them.
RESERVES = (0, 1, 2, 4)
#: How many lines ahead the scheduler looks for work during a collective.
WINDOW = 400
#: How often an order that takes too much memory is computed again.
ROUNDS = 6


def overlap_collectives(graph: fx.Graph, seconds: Seconds, sizes: Sizes, room: int = 0) -> int:
    """Split a graph's collectives in two and move its lines. Return its peak of live bytes.

    The peak is that of a microbatch after the first. room: a higher limit of live bytes; 0: the peak of the graph's own
    order.
    """
    _split(graph, seconds)
    ordered = OrderedGraph(graph, seconds, sizes)
    order = ordered.nodes
    if ordered.targets:
        most = ordered.uses.peak(ordered.nodes)
        order = best_order(ordered, most)
        if room > min(most):
            order = min(order, best_order(ordered, (max(most[0], room), max(most[1], room))), key=ordered.simulate)
        reorder(graph, order)
    return ordered.uses.peak(order)[1] if order else 0


def best_order(ordered: OrderedGraph, most: tuple[int, int]) -> list[fx.Node]:
    """Return the fastest of the tried orders and the graph's own. most: peaks of bytes that may be alive."""
    best = ordered.nodes
    least = ordered.simulate(best)
    for reserve in RESERVES if ordered.may_delay else RESERVES[:1]:
        order, clock = fitting(ordered, reserve, most)
        if clock.end < least:
            best, least = order, clock.end
    return best


def fitting(ordered: OrderedGraph, reserve: int, most: tuple[int, int]) -> tuple[list[fx.Node], LineClock]:
    """Return an order that needs no more memory than `most`, and its clock; else the graph's own order.

    A line with too much alive beside it keeps its place: all lines before it in the graph come before it.
    """
    barriers: set[fx.Node] = set()
    for _ in range(ROUNDS):
        scheduler = Scheduler(ordered, reserve, most, barriers)
        order = [ordered.nodes[at] for at in scheduler.order()]
        over = {n for n, alive in zip(order, scheduler.alive, strict=True) if not within(alive, most)}
        if not over:
            return order, scheduler.clock
        barriers |= over
    return ordered.nodes, ordered.timed(ordered.nodes)


def within(bytes_: tuple[int, int], most: tuple[int, int]) -> bool:
    """Return whether both peaks (shardc.passes.joint.memory) are at most their limits."""
    return bytes_[0] <= most[0] and bytes_[1] <= most[1]


def _split(graph: fx.Graph, seconds: Seconds) -> None:
    """Split each line that communicates into a start and a wait: conversions, and exchanges of experts."""
    for n in list(graph.nodes):
        back = n.target is ops.transpose
        op = n.args[0] if back else (CONVERTED | EXCHANGES).get(n.target)
        c: Collective | None = n.meta.get("collective")
        if op is None or c is None or not seconds.sent(n)[1] or not _communicates(op, back=back):
            continue
        target: Any = ops.transpose_start if back else ops.start
        args = n.args if back else (op, *n.args)
        with graph.inserting_before(n):
            begun = add_node(graph, "call_function", target, args, n.kwargs, name=f"{n.name}_start", meta=n.meta)
        n.target, n.args, n.kwargs = ops.wait, (begun,), {}
        n.meta = {k: v for k, v in n.meta.items() if k != "collective"}


def _communicates(op: str, *, back: bool) -> bool:
    row = BY_OP.get(op)
    return row is None or (row.backward if back else row.forward) in COLLECTIVES


@dataclass(slots=True)
class ScheduledLine:
    """A line of a graph, as the scheduler sees it.

    place: its number in the graph. seconds, sends: of computing and of sending. step: its effect on memory. waits:
    place of the line that it waits for, or -1. begins: others wait for it. stops: the rank is idle while it sends.
    settles: it waits for the sum of the bucket before. leads: a collective or a result depends on it. before, after:
    places of lines that must come earlier or later.
    """

    place: int
    seconds: float
    sends: float
    sent: Sent | None
    step: MemoryStep
    waits: int
    begins: bool
    stops: bool
    settles: bool
    before: list[int]
    after: list[int] = field(default_factory=list)
    leads: bool = False


_PLACE, _SECONDS = attrgetter("place"), attrgetter("seconds")


class OrderedGraph:
    """A graph's lines with dependencies, seconds and memory. targets: places of lines that communicate."""

    def __init__(self, graph: fx.Graph, seconds: Seconds, sizes: Sizes) -> None:
        self.nodes: list[fx.Node] = [n for n in graph.nodes if n.op == "call_function"]
        self.place = {n: i for i, n in enumerate(self.nodes)}
        work, self._priced = {n: seconds.of(n) for n in graph.nodes}, seconds.clock
        self.uses = Uses(graph, sizes, work)
        self.lines = [self._line(n, work[n], seconds) for n in self.nodes]
        for pinned, earlier in self._pinned():
            before = self.lines[self.place[pinned]].before
            if self.place[earlier] not in before:
                before.append(self.place[earlier])
        for line in self.lines:
            for at in line.before:
                self.lines[at].after.append(line.place)
        self.targets = [line.place for line in self.lines if line.begins or line.stops]
        returned = [self.place[x] for x in graph.output_node().all_input_nodes if x in self.place]
        for at in self.ancestors([*self.targets, *returned], bytearray(len(self.lines))):
            self.lines[at].leads = True
        #: Whether some lines can be kept in reserve. A forward has none.
        self.may_delay = any(line.seconds and not line.leads for line in self.lines)

    def _line(self, n: fx.Node, work: Work, seconds: Seconds) -> ScheduledLine:
        at, before = self.place[n], [self.place[x] for x in self.uses.taken[n] if x in self.place]
        if isinstance(n.target, OpOverload):
            return ScheduledLine(at, work.seconds, 0.0, None, self.uses.steps[n], -1, False, False, False, before)
        record, sends = seconds.sent(n)
        waits = self.place.get(n.args[0], -1) if n.target in WAITS else -1  # type: ignore[arg-type]
        begins = n.target in STARTS
        stops = bool(sends) and not begins and n.target not in EFFECTS
        bucket = self.uses.sizes.buckets.get(self.uses.steps[n].sums)
        settles = bucket is not None and bucket.each
        sent = Sent(record, None if stops else at) if record is not None and sends else None
        return ScheduledLine(at, work.seconds, sends, sent, self.uses.steps[n], waits, begins, stops, settles, before)

    def _pinned(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return pairs of (line, one that has to come before it), where memory, effects or tapes need it.

        A gather of a bucket and a reload from the host begin no earlier than their passes decided.
        """
        pairs = [(n, x) for x, n in itertools.pairwise(self.nodes) if n.target is ops.reload_start]
        latest: dict[bool, fx.Node] = {}  # by half of an overlapped pair
        under_way: dict[Any, fx.Node] = {}  # by bucket that forward gathers: the last line that waited for it
        tapes: dict[Any, fx.Node] = {}
        effect: fx.Node | None = None
        for n in self.nodes:
            if isinstance(n.target, OpOverload):
                continue
            half = bool(n.meta.get("back"))
            if n.target is ops.gather_start and n.args[1] in under_way:
                pairs.append((n, under_way[n.args[1]]))  # a bucket's gather of the other half has ended
            if n.target is ops.gather_wait:
                under_way[n.args[0].args[1]] = n  # type: ignore[union-attr]
            if n.target in GATHERS and half in latest:
                pairs.append((n, latest[half]))
            elif n.target in GATHERS.values():
                latest[half] = n
            elif n.target is ops.opaque_backward:
                if (tape := n.args[0]) in tapes:
                    pairs.append((n, tapes[tape]))
                tapes[tape] = n
            elif n.target in EFFECTS:
                if effect is not None:
                    pairs.append((n, effect))
                effect = n
        return pairs

    def ancestors(self, places: Sequence[int], done: bytearray) -> set[int]:
        """Return these lines and all that they take, directly or not, without those that are `done`."""
        reached: set[int] = set()
        todo = list(places)
        while todo:
            at = todo.pop()
            if at not in reached and not done[at]:
                reached.add(at)
                todo += self.lines[at].before
        return reached

    def simulate(self, order: Sequence[fx.Node]) -> float:
        """Return the seconds of the graph on the assumed machine."""
        return self.timed(order).end

    def clock(self) -> LineClock:
        """Return the clock at the beginning of the graph."""
        return LineClock(self._priced.device, self._priced.mesh, self._priced.rank, _known=self._priced._known)

    def timed(self, order: Sequence[fx.Node]) -> LineClock:
        """Return the clock after the last line."""
        clock = self.clock()
        for n in order:
            clock.line(self.lines[self.place[n]])
        return clock


@dataclass
class LineClock(Clock):
    """The streams of one rank. summing: place of the line that started the running bucket sum; -1: none."""

    summing: int = -1

    def line(self, line: ScheduledLine) -> None:
        """Run a line. If it begins a bucket's sum, wait for the sum before (shardc.runtime.zero.buckets)."""
        if line.waits >= 0:
            self.wait(line.waits)
        if line.seconds:
            self.compute(line.seconds)
        if line.sent is not None:
            self.send(line.sent)
        if line.settles:
            self.wait(self.summing)
            self.summing = line.place


class Scheduler:
    """One order of a graph. alive: bytes at each of its lines.

    reserve: for how many of the next collectives lines are delayed. most: the peaks of bytes that may be alive.
    barriers: lines that no other line may be moved across.
    """

    def __init__(
        self, ordered: OrderedGraph, reserve: int, most: tuple[int, int], barriers: Collection[fx.Node] = ()
    ) -> None:
        self._ordered, self._lines, self._reserve, self._most = ordered, ordered.lines, reserve, most
        places = {p for n in barriers for p in (ordered.place[n], ordered.place[n] + 1)}
        self._parts = list(itertools.pairwise(sorted({0, *places, len(ordered.nodes)})))
        self._end = 0  # the end of the part of the graph that is being ordered
        self.clock, self._memory = ordered.clock(), Memory(ordered.uses)
        self._order: list[int] = []
        self.alive: list[tuple[int, int]] = []
        self._done = bytearray(len(ordered.nodes))
        self._missing = [len(line.before) for line in ordered.lines]
        self._ready = [at for at, missing in enumerate(self._missing) if not missing]  # a heap of lines that could run
        self._delayed: list[ScheduledLine] = []  # more lines that could run: in order, and their seconds
        self._delayed_seconds = 0.0
        self._reached = 0  # the greatest place of a line that ran

    def order(self) -> list[int]:
        """Return the places of the lines in order. Call it once."""
        ordered, done = self._ordered, self._done
        targets = deque(enumerate(ordered.targets))
        for begin, end in self._parts:
            self._end = end
            while targets and targets[0][1] < end:
                k, target = targets.popleft()
                ahead = sum(self._lines[t].sends for t in ordered.targets[k + 1 : k + 1 + self._reserve])
                for at in sorted(ordered.ancestors([target], done)):
                    if not done[at]:
                        self._next(self._lines[at], ahead)
            for at in range(begin, end):
                if not done[at]:
                    self._next(self._lines[at], 0.0)
        return self._order

    def _next(self, line: ScheduledLine, ahead: float) -> None:
        if line.waits >= 0:
            self._fill(line)
        if not self._fits(line):
            self._catch_up(0.0)
        if not self._done[line.place]:
            self._emit(line)
            self._catch_up(ahead)

    def _emit(self, line: ScheduledLine) -> None:
        self.clock.line(line)
        self.alive.append(self._memory.run(line.step))
        self._order.append(line.place)
        self._done[line.place] = True
        if line.place > self._reached:
            self._reached = line.place
        missing = self._missing
        for user in line.after:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(self._ready, user)

    def _fill(self, wait: ScheduledLine) -> None:
        """Run other lines while the collective that a line waits for is under way."""
        if not self.clock.left(wait.waits):
            return
        self._take_back()
        limit = min(wait.place + WINDOW, self._end - 1)
        aside: list[int] = []
        while self._ready and self.clock.left(wait.waits):
            at = heapq.heappop(self._ready)
            if self._done[at]:
                continue
            if at > limit:
                aside.append(at)
                break
            line = self._lines[at]
            if line is wait or self._would_wait(line) or not self._fits(line):
                aside.append(at)
            else:
                self._emit(line)
        for at in aside:
            heapq.heappush(self._ready, at)

    def _fits(self, line: ScheduledLine) -> bool:
        return within(self._memory.would_be(line.step), self._most)

    def _would_wait(self, line: ScheduledLine) -> bool:
        """Return whether the rank would be idle for a line. Starts never wait: all ranks run the same graph."""
        return self.clock.left(line.waits) > 0 if line.waits >= 0 else line.stops

    def _catch_up(self, ahead: float) -> None:
        """Run overtaken lines, oldest first, but delay gradients of weights for up to `ahead` seconds."""
        ready, lines, done = self._ready, self._lines, self._done
        if not ahead:
            self._take_back()
        more: list[ScheduledLine] = []
        aside: list[int] = []
        while ready and ready[0] < self._reached:
            at = heapq.heappop(ready)
            if done[at]:
                continue
            line = lines[at]
            if self._would_wait(line):
                aside.append(at)
            elif ahead and line.seconds and not line.leads:
                more.append(line)
            else:
                self._emit(line)
        if more:
            self._delayed = sorted((*self._delayed, *more), key=_PLACE)
            self._delayed_seconds = sum(map(_SECONDS, self._delayed))
        self._run_delayed(ahead)
        for at in aside:
            heapq.heappush(ready, at)

    def _run_delayed(self, ahead: float) -> None:
        """Run the oldest delayed lines, as long as `ahead` seconds of lines stay delayed."""
        while self._delayed and self._delayed_seconds - self._delayed[0].seconds >= ahead:
            self._emit(self._delayed.pop(0))
            self._delayed_seconds = sum(map(_SECONDS, self._delayed))

    def _take_back(self) -> None:
        """Put delayed lines back among the lines that could run."""
        for line in self._delayed:
            heapq.heappush(self._ready, line.place)
        self._delayed, self._delayed_seconds = [], 0.0
