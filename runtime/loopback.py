"""All ranks of a mesh in one process, in lockstep: a thread a rank, sums in the order of ranks, so that a run repeats bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardc.mesh import Mesh
from shardc.runtime.comm import RankMesh, Work

T = TypeVar("T")


class Aborted(RuntimeError):
    """Another rank failed; this one stops where it would wait for it."""


class _Meeting:
    """The place where one group's ranks meet: everyone puts something in and gets everyone's, in the order of ranks."""

    def __init__(self, ranks: tuple[int, ...], world: _World) -> None:
        self.ranks, self.world = ranks, world
        self.barrier = threading.Barrier(len(ranks))
        self.here: dict[int, tuple[str, Any]] = {}

    def exchange(self, rank: int, what: str, item: Any, combine: Callable[[list[Any]], T]) -> T:
        """combine(items) is done by every rank before any goes on: nobody changes a tensor that another still reads."""
        self.here[rank] = (what, item)
        self._wait()
        seen = {w for w, _ in self.here.values()}
        if len(seen) > 1:
            each = "; ".join(f"rank {r}: {self.here[r][0]}" for r in self.ranks)
            raise RuntimeError(f"ranks meet in different collectives: {each}")
        made = combine([self.here[r][1] for r in self.ranks])
        self._wait()
        return made

    def _wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None


class _World:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self.failed = False

    def meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        with self.lock:
            if ranks not in self.meetings:
                self.meetings[ranks] = _Meeting(ranks, self)
                if self.failed:
                    self.meetings[ranks].barrier.abort()
            return self.meetings[ranks]

    def abort(self) -> None:
        with self.lock:
            self.failed = True
            for m in self.meetings.values():
                m.barrier.abort()


class LoopbackMesh(RankMesh):
    """One rank of a mesh whose ranks are threads. Made by `loopback`."""

    def __init__(self, layout: Mesh, rank: int, world: _World) -> None:
        super().__init__(layout, rank, "cpu", record=True)
        self._world = world
        self._rooms: dict[tuple[str, ...], _Meeting] = {}

    def _exchange(self, axes: tuple[str, ...], what: str, item: Any, combine: Callable[[list[Any]], T]) -> T:
        if axes not in self._rooms:
            self._rooms[axes] = self._world.meeting(self.layout.group(self.rank, axes))
        return self._rooms[axes].exchange(self.rank, what, item, combine)

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        def combine(items: list[Tensor]) -> Tensor:
            total = items[0].clone(memory_format=torch.contiguous_format)
            for other in items[1:]:
                total = torch.maximum(total, other) if op == "max" else total.add_(other)
            return total

        return self._exchange(axes, f"all_reduce {op} {tag} {tuple(x.shape)} over {axes}", x.detach(), combine)

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        flat.copy_(self._all_reduce(flat, axes, "sum", tag))
        return Work()

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> list[Tensor]:
        return self._exchange((axis,), f"all_gather {tag} {tuple(x.shape)} over {axis}", x.detach(), _copies)

    def _reduce_scatter(self, parts: Sequence[Tensor], axis: str, tag: str) -> Tensor:
        mine = self.coordinate(axis)

        def combine(items: list[list[Tensor]]) -> Tensor:
            total = items[0][mine].clone(memory_format=torch.contiguous_format)
            for other in items[1:]:
                total += other[mine]
            return total

        what = f"reduce_scatter {tag} {tuple(parts[0].shape)} over {axis}"
        return self._exchange((axis,), what, [p.detach() for p in parts], combine)

    def _all_to_all(self, parts: Sequence[Tensor], axis: str, tag: str) -> list[Tensor]:
        mine = self.coordinate(axis)
        what = f"all_to_all {tag} {tuple(parts[0].shape)} over {axis}"
        return self._exchange((axis,), what, [p.detach() for p in parts], lambda items: _copies([sent[mine] for sent in items]))

    def barrier(self) -> None:
        if self.layout.world > 1:
            self._exchange(self.layout.names, "barrier", None, lambda _: None)


def _copies(items: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in items]


def loopback(layout: Mesh, work: Callable[[LoopbackMesh], T]) -> list[T]:
    """Run `work(mesh)` as every rank of a mesh, each in a thread; results by rank.

    If a rank raises, all others stop at their next collective, and the first failing rank's own error is raised, with a note
    that names the rank and its coordinates.
    """
    world = _World()
    results: list[Any] = [None] * layout.world
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(LoopbackMesh(layout, rank, world))
        except Aborted:
            pass
        except BaseException as e:
            errors.append((rank, e))
            world.abort()

    if layout.world == 1:
        return [work(LoopbackMesh(layout, 0, world))]
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(layout.world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        rank, error = errors[0]
        if hasattr(error, "add_note"):
            error.add_note(f"on rank {rank} of {layout.world} ({', '.join(f'{a}={c}' for a, c in layout.coords(rank).items())})")
        raise error
    return results
