"""Place the copies of values that wait on the host until backward (`checkpoint: {offload: cpu}`).

    gelu = aten.gelu.default(up)                                    forward
    gelu_leaving = ops.offload_start(gelu, mesh, tag='h.0')         as soon as it is there
    down = aten.linear.default(gelu, w, b)                          its last use
    gelu_host = ops.offload_wait(gelu_leaving)                      the device's memory is free

    gelu_coming = ops.reload_start(gelu_host, tag='h.0')            backward: while something else is computed
    ...
    gelu = ops.reload_wait(gelu_coming)                             its first use

Forward: copies leave in the order of the values' last uses, because that memory is free first. (Other lines may come
between the last use and the wait: shardc.passes.joint.overlap puts them there, where memory allows.)

Backward has a copy back for each op that needs the value, and one tensor more on the device than is used, as autograd
would (shardc.runtime.stage.activation_offload). Its peak of live bytes is the bound for two steps:

    merge     a value that is needed again is held from one use to the next instead
    hoist     a copy begins so early that nothing waits for it: computed from the last copy to the first, with the
              seconds of the assumed machine
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import fx

from shardc.ir.graph import reorder
from shardc.passes.joint.memory import COPIES, Sizes, Uses
from shardc.passes.joint.seconds import Seconds, Work
from shardc.runtime import ops

#: A sort key: (index of the line that follows, order among copies there, 0 for a start and 1 for a wait).
_Place = tuple[int, int, int]


def arrange_copies(graph: fx.Graph, seconds: Seconds, sizes: Sizes) -> None:
    """Move the lines that copy to their final places, and set their bytes (see shardc.passes.joint.write)."""
    begun = [n for n in graph.nodes if n.target in COPIES]
    if not begun:
        return
    copying = {*COPIES, *COPIES.values()}
    work = {n: seconds.of(n) for n in graph.nodes}
    lines = [n for n in graph.nodes if n.op == "call_function" and n.target not in copying]
    for n in begun:
        n.meta["copy"] = replace(n.meta["copy"], bytes=seconds.moved(n))
    if any(n.target is ops.offload_start for n in begun):
        _leave(graph, lines, begun, Uses(graph, sizes, work))
    else:
        _Back(graph, lines, begun, sizes, work).arrange(lambda n: seconds.sent(n)[1])


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return wait


def _put(graph: fx.Graph, lines: Sequence[fx.Node], placed: Mapping[fx.Node, _Place]) -> None:
    """Write lines and placed copies to the graph in one order."""
    at = {n: (i, len(lines), 0) for i, n in enumerate(lines)} | dict(placed)
    reorder(graph, sorted(at, key=at.__getitem__))


def _leave(graph: fx.Graph, lines: Sequence[fx.Node], begun: Sequence[fx.Node], uses: Uses) -> None:
    """Place forward's copies: start when the value exists, wait after its last use."""
    place = {n: i for i, n in enumerate(lines)}
    last: dict[fx.Node, int] = {}  # last use of the memory that holds a value
    for n in (*lines, graph.output_node()):
        for owner in uses.of[n]:
            last[owner] = place.get(n, len(lines) - 1)
    value: dict[fx.Node, Any] = {n: n.args[0] for n in begun}
    made_at = {n: place.get(value[n], -1) for n in begun}
    until = {n: max(last.get(uses.owner[value[n]], -1), made_at[n]) for n in begun}
    placed: dict[fx.Node, _Place] = {}
    earliest = 0
    for i, n in enumerate(sorted(begun, key=lambda n: (until[n], made_at[n]))):
        earliest = max(earliest, made_at[n] + 1)
        placed[n], placed[_wait_of(n)] = (earliest, i, 0), (until[n] + 1, i, 1)
    _put(graph, lines, placed)


@dataclass
class _Reload:
    """A value that comes back from the host. nbytes: its bytes, which are alive from `begin` on.

    begin: the line before which its copy begins. first, last: the lines that use it first and last.
    """

    start: fx.Node
    begin: int
    first: int
    last: int
    nbytes: int


class _Back:
    """A backward graph.

    live: by line, the bytes alive in the first backward of a step and in a later one. most: the bounds of both.
    """

    def __init__(
        self,
        graph: fx.Graph,
        lines: Sequence[fx.Node],
        begun: Sequence[fx.Node],
        sizes: Sizes,
        work: Mapping[fx.Node, Work],
    ) -> None:
        self._graph, self._lines, self._sizes, self._work = graph, lines, sizes, work
        self._place = {n: i for i, n in enumerate(lines)}
        self._reloads = self._one_ahead(begun)
        uses = Uses(graph, sizes, work)
        order = [n for n in graph.nodes if n.op == "call_function"]
        alive = dict(zip(order, uses.alive(order), strict=True))
        self._live = np.array([alive[n] for n in lines], dtype=np.int64).T
        self._most = self._live.max(axis=1, keepdims=True)
        last: dict[fx.Node, int] = {}
        for n in (*lines, graph.output_node()):
            for owner in uses.of[n]:
                last[owner] = self._place.get(n, len(lines) - 1)
        for r in self._reloads:
            r.last, r.nbytes = last[r.start], uses.bytes[r.start]

    def arrange(self, takes: Callable[[fx.Node], float]) -> None:
        """Arrange all copies. takes: seconds of the copy that a line begins."""
        self._merge()
        self._hoist(takes)
        self._arrange()

    def _one_ahead(self, begun: Sequence[fx.Node]) -> list[_Reload]:
        """Return the reloads, each begun one use ahead, as autograd would."""
        reloads = [
            _Reload(n, 0, min(self._place.get(u, len(self._lines) - 1) for u in _wait_of(n).users), 0, 0) for n in begun
        ]
        self._reloads = sorted(reloads, key=lambda r: r.first)
        for i, r in enumerate(self._reloads):
            r.begin = self._reloads[max(i - 1, 0)].first
        self._arrange()
        return self._reloads

    def _arrange(self) -> None:
        placed: dict[fx.Node, _Place] = {}
        for i, r in enumerate(self._reloads):
            placed[r.start], placed[_wait_of(r.start)] = (r.begin, i, 0), (r.first, i, 1)
        _put(self._graph, self._lines, placed)

    def _fits(self, begin: int, end: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return, by line of a stretch, whether so many more bytes may be alive."""
        fits: np.ndarray[Any, np.dtype[np.bool_]] = (self._live[:, begin:end] + nbytes <= self._most).all(axis=0)
        return fits

    def _merge(self) -> None:
        """Hold a value from one use to the next where memory allows."""
        by_handle: defaultdict[Any, list[_Reload]] = defaultdict(list)
        for r in self._reloads:
            by_handle[r.start.args[0]].append(r)
        gone: set[int] = set()
        for several in by_handle.values():
            earlier = several[0]
            for r in several[1:]:
                if not self._fits(earlier.last + 1, r.begin, r.nbytes).all():
                    earlier = r
                    continue
                self._live[:, earlier.last + 1 : r.begin] += r.nbytes
                self._live[:, r.begin : min(earlier.last, r.last) + 1] -= r.nbytes  # two copies of it were alive
                wait = _wait_of(r.start)
                wait.replace_all_uses_with(_wait_of(earlier.start))
                self._graph.erase_node(wait)
                self._graph.erase_node(r.start)
                earlier.last = max(earlier.last, r.last)
                gone.add(id(r))
        self._reloads = [r for r in self._reloads if id(r) not in gone]

    def _hoist(self, takes: Callable[[fx.Node], float]) -> None:
        """Begin each reload early enough that nothing waits for it, where memory allows."""
        done = np.cumsum([0.0, *(self._work[n].seconds for n in self._lines)])  # seconds before a line
        due: list[int] = []
        begin = float("inf")
        for r in reversed(self._reloads):
            begin = min(float(done[r.first]), begin) - takes(r.start)
            due.append(max(int(np.searchsorted(done, begin, "right")) - 1, 0))
        earliest = 0
        for r, due_at in zip(self._reloads, reversed(due), strict=True):
            to = max(due_at, earliest)
            if to < r.begin:
                over = np.flatnonzero(~self._fits(to, r.begin, r.nbytes))
                to += int(over[-1]) + 1 if len(over) else 0
                self._live[:, to : r.begin] += r.nbytes
                r.begin = to
            earliest = r.begin
