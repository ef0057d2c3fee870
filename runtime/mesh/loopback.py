"""Run all ranks of a mesh as threads of one process, in lockstep, so that a run repeats exactly."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.base import Axes, RankMesh, Rows, Work

T = TypeVar("T")


class Aborted(RuntimeError):
    """Another rank failed; this one stops where it waits for it."""


class _World:
    """What the ranks of a mesh exchange. One lock guards all fields; tensor work runs outside of it."""

    def __init__(self, layout: Mesh) -> None:
        self.layout, self.lock = layout, threading.Lock()
        self.arrived = [threading.Condition(self.lock) for _ in range(layout.world)]  # by rank: it has mail
        #: By group: what the ranks that came to a collective have brought, {rank: (call, item)}.
        self.meetings: defaultdict[tuple[int, ...], dict[int, tuple[str, Any]]] = defaultdict(dict)
        #: What was not taken yet: {(rank,): result of a collective}, {(from, to, how many before it): what was sent}.
        self.mail: dict[tuple[int, ...], Any] = {}
        self.sent: Counter[tuple[int, int]] = Counter()
        self.posted: Counter[tuple[int, int]] = Counter()
        #: Sleeping rank -> its call, and the mail that it waits for.
        self.waiting: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.running = set(range(layout.world))
        self.failed = False

    def exchange(
        self, ranks: tuple[int, ...], rank: int, name: str, item: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Bring `item`; get this rank's entry of combine(items of all ranks in order).

        The last rank to come computes all entries while the others sleep, so that no rank changes a tensor that is
        still read.
        """
        with self.lock:
            meeting = self.meetings[ranks]
            meeting[rank] = (name, item)
            if len(meeting) < len(ranks):
                return self._take(rank, (rank,), name)
            del self.meetings[ranks]
        if len({call for call, _ in meeting.values()}) > 1:
            calls = "; ".join(f"rank {r}: {meeting[r][0]}" for r in ranks)
            raise RuntimeError(f"ranks meet in different collectives: {calls}")
        results = dict(zip(ranks, combine([meeting[r][1] for r in ranks]), strict=True))
        meeting.clear()  # else the sleepers would hold what was brought until they wake
        result = results.pop(rank)
        with self.lock:
            for r, x in results.items():
                self._put(r, (r,), x)
        return result

    def send(self, rank: int, to: int, name: str, item: Tensor) -> None:
        with self.lock:
            self._put(to, (rank, to, self.sent[rank, to]), (name, item))
            self.sent[rank, to] += 1

    def post(self, rank: int, source: int) -> int:
        """Register a receive of the next item from another rank, and return the item's number."""
        with self.lock:
            self.posted[source, rank] += 1
            return self.posted[source, rank] - 1

    def receive(self, rank: int, source: int, number: int, name: str) -> Tensor:
        """Wait for an item from another rank. Raises RuntimeError if it does not have the expected name."""
        item: Tensor
        with self.lock:
            sent, item = self._take(rank, (source, rank, number), f"receive {name} from rank {source}")
        if sent != name:
            raise RuntimeError(f"rank {rank} waits for {name}, and rank {source} sent {sent}")
        return item

    def _put(self, to: int, key: tuple[int, ...], item: Any) -> None:
        self.mail[key] = item
        self.arrived[to].notify()

    def _take(self, rank: int, key: tuple[int, ...], call: str) -> Any:
        """Sleep until the mail is there, and return it."""
        self.waiting[rank] = call, key
        self._check()
        self.arrived[rank].wait_for(lambda: self.failed or key in self.mail)
        if self.failed:
            raise Aborted
        del self.waiting[rank]
        return self.mail.pop(key)

    def _check(self) -> None:
        """Raise if no rank is left that could wake the sleepers."""
        asleep = [r for r, (_, key) in self.waiting.items() if key not in self.mail]
        if asleep and len(asleep) == len(self.running) and not self.failed:
            calls = {r: call for r, (call, _) in self.waiting.items()}
            every = (f"rank {r}: {calls.get(r, 'has ended')}" for r in range(self.layout.world))
            raise RuntimeError(f"ranks wait for each other: {'; '.join(every)}")

    def end(self, rank: int) -> None:
        """Mark a rank's work as done. Raises if others wait for it."""
        with self.lock:
            self.running.discard(rank)
            self._check()

    def abort(self) -> None:
        with self.lock:
            self.failed = True
            for rank in self.arrived:
                rank.notify()


class LoopbackMesh(RankMesh):
    """One rank of a mesh whose ranks are threads. Made by `loopback`."""

    def __init__(self, layout: Mesh, rank: int, world: _World) -> None:
        super().__init__(layout, rank, "cpu", record=True)
        self._world = world
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}

    def seen_as(self, layout: Mesh, axes: Iterable[tuple[str, ...]] = (), lines: Iterable[str] = ()) -> LoopbackMesh:
        mesh = LoopbackMesh(layout, self.rank, self._world)
        mesh.device = self.device
        return mesh

    def in_digits(self, layout: Mesh, axes: Iterable[tuple[str, ...]]) -> RankMesh:
        view: Any = super().in_digits(layout, axes)
        view._ranks = {}
        return view  # type: ignore[no-any-return]

    def _exchange(self, axes: Axes, name: str, item: Any, combine: Callable[[list[Any]], Sequence[T]]) -> T:
        if axes not in self._ranks:
            self._ranks[axes] = self.layout.group(self.rank, axes)
        result: T = self._world.exchange(self._ranks[axes], self.rank, f"{name} over {', '.join(axes)}", item, combine)
        return result

    def _sum_on_host(self, x: Tensor) -> Tensor:
        self._all_reduce(x, self.layout.names, "sum", "agreement", False)
        return x

    def _all_reduce(self, flat: Tensor, axes: Axes, op: str, tag: str, background: bool) -> Work:
        def combine(items: list[Tensor]) -> list[Tensor]:
            return [_total(items, op)] * len(items)

        flat.copy_(self._exchange(axes, f"all_reduce {op} {_named(tag, flat)}", flat.detach(), combine))
        return Work()

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        def combine(items: list[Tensor]) -> list[Tensor]:
            return [torch.cat(items)] * len(items)

        whole.copy_(self._exchange((axis,), f"all_gather {_named(tag, part)}", part.detach(), combine))
        return Work(kept=part)  # as with NCCL

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        def combine(items: list[Tensor]) -> Sequence[Tensor]:
            return _total(items, "sum").chunk(len(items))

        part.copy_(self._exchange((axis,), f"reduce_scatter {_named(tag, flat)}", flat.detach(), combine))
        return Work()

    def _all_to_all(self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, tag: str, background: bool) -> Work:
        def combine(items: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [torch.cat([parts[i] for parts in items]) for i in range(len(items))]

        name = f"all_to_all {tag} {x.dtype} rows of {list(x.shape[1:])}"  # row counts differ between ranks
        parts = x.detach().split_with_sizes(rows[0]) if rows[0] else x.detach().chunk(self.members(axes))
        into.copy_(self._exchange(axes, name, parts, combine))
        return Work()

    def _peer(self, axis: str, coordinate: int) -> int:
        return self.layout.group(self.rank, (axis,))[coordinate]

    def _send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        self._world.send(self.rank, self._peer(axis, to), _named(tag, x), x.clone())
        return Work()

    def _receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        sender = self._peer(axis, source)
        number = self._world.post(self.rank, sender)

        def arrive() -> None:
            into.copy_(self._world.receive(self.rank, sender, number, _named(tag, into)))

        return Work(then=arrive)

    def barrier(self) -> None:
        if self.layout.world > 1:
            self._exchange(self.layout.names, "barrier", None, lambda items: items)


def _total(items: list[Tensor], op: str) -> Tensor:
    total = items[0].clone()
    for other in items[1:]:
        total = torch.maximum(total, other) if op == "max" else total.add_(other)
    return total


def _named(tag: str, x: Tensor) -> str:
    return f"{tag} {x.dtype} {list(x.shape)}".strip()


def loopback(layout: Mesh, work: Callable[[LoopbackMesh], T]) -> list[T]:
    """Run `work(mesh)` as every rank of a mesh, each in a thread; return the results by rank.

    If a rank raises, all others stop where they wait, and the error of the rank that failed first is raised, with a
    note that names the rank and its coordinates. Ranks that meet in different collectives, or wait for each other
    without end, are errors.
    """
    world = _World(layout)
    if layout.world == 1:
        return [work(LoopbackMesh(layout, 0, world))]
    results: list[Any] = [None] * layout.world
    errors: list[tuple[int, BaseException]] = []
    intra = torch.get_num_threads()

    def run(rank: int) -> None:
        torch.set_num_threads(intra)  # new threads inherit it late, and convolutions never: they would use all cores
        try:
            results[rank] = work(LoopbackMesh(layout, rank, world))
            world.end(rank)
        except Aborted:
            pass
        except BaseException as e:  # is raised again in loopback's caller
            errors.append((rank, e))
            world.abort()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(layout.world)
    ]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    finally:
        world.abort()  # on Ctrl-C: wake all sleepers
    if errors:
        rank, error = errors[0]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"on rank {rank} of {layout.world} ({', '.join(f'{a}={c}' for a, c in layout.coords(rank).items())})"
            )
        raise error
    return results
