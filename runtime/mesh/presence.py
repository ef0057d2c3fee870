"""This process as one of a world, from its first moment on: where the ranks meet, who is there, what they are doing.

Processes that start together do not come together: one compiles, one reads its modules from a slow disk, one is stopped
or killed before it has said a word. Those that wait for it would do so until torch.distributed's time limit. So each
says that it is there before anything else, and has a thread that watches (shardc.runtime.mesh.watch) from then on, long
before there is a process group:

    `begin`  the store ── who is there, what they do ── the thread ........ compile, import, build ...
    `join`   of a TorchMesh, which takes over what has begun; or begins then, in programs that have not
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from shardc.ir.mesh import Mesh
from shardc.runtime.launch import LOOPBACK
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.inherited import not_inherited
from shardc.runtime.mesh.processes import Processes
from shardc.runtime.mesh.watch import NAMED, Watch, World, print_line


@dataclass
class Presence:
    """store: torch.distributed's, of the world. processes, watch: None where a thread cannot ask the store beside
    others, and where nobody is to watch.
    """

    store: Any
    rank: int
    world: int
    activity: Activity
    processes: Processes | None
    watch: Watch | None

    @staticmethod
    def of(store: Any, rank: int, world: int, *, named: float, met: bool = False) -> Presence:
        """Say that this rank is there, and watch. named: seconds, of Watch; 0: never. met: all are there already."""
        activity, processes, watch = Activity(), None, None
        if world > 1 and can_watch(store):
            processes = Processes(store.clone(), rank, world)  # the main thread may wait with the store in its hands
            activity.noted.append(processes.note)
            if named:
                watch = Watch(World(world), rank, activity, store, processes, named=named, met=met)
        return Presence(store, rank, world, activity, processes, watch)

    def meet(self, layout: Mesh, named: float) -> None:
        """All ranks are there, and what mesh they are is known. named: see `of`."""
        if self.watch is not None and not named:
            self.watch.stop()
            self.watch = None
        elif self.watch is not None:
            self.watch.meet(layout, named)


_begun: list[Presence] = []


def begin(named: float = NAMED) -> Presence | None:
    """Before anything that takes time, in a process that the environment calls one of a world: be there. Returns what
    the next TorchMesh takes over; None where this process has joined a world already.
    """
    if dist.is_initialized() or _begun or "RANK" not in os.environ:
        return None
    _begun.append(here := _new(default_pg_timeout, named))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, functools.partial(_end, here.processes))  # until the run has a handler of its own
    return here


def _end(processes: Processes | None, number: int, _: object) -> None:
    with contextlib.suppress(Exception):  # the store may be gone
        if processes is not None:
            processes.told_to_end()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def take(timeout: timedelta, named: float) -> Presence:
    """What has begun in this process, or begins now. timeout: of the store."""
    if not _begun:
        return _new(timeout, named)
    _begun[0].store.set_timeout(timeout)
    return _begun.pop()


def _new(timeout: timedelta, named: float) -> Presence:
    with not_inherited():
        store, rank, world = _meeting(timeout)
        return Presence.of(store, rank, world, named=named)


#: By where it is: a process's store, its rank, the world's size, and how often it has joined a world there.
_stores: dict[tuple[str | None, ...], tuple[Any, int, int, Iterator[int]]] = {}


def _meeting(timeout: timedelta) -> tuple[Any, int, int]:
    """(store, rank, world), as torch's env:// has them. What is left in the store of the last time would mislead: a
    process that joins a world once more, after `close`, keeps its store, and torchrun's agent may keep its own when it
    starts all processes again. So they meet under keys of this time.
    """
    place = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")))
    if place not in _stores:
        _stores[place] = (*_new_store(timeout), itertools.count())
    store, rank, world, joined = _stores[place]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"shardc/start{restarts}/join{next(joined)}", store), rank, world  # type: ignore[attr-defined]


def _new_store(timeout: timedelta) -> tuple[Any, int, int]:
    """That of torchrun's agent, or of rank 0, who does not wait here for the others. Where all ranks are on this
    machine, as of `shardc run`, the store, which asks nobody who they are, listens to this machine alone.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        return store, rank, world
    address, port, rank, world = env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"])
    options: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False}
    if rank == 0 and address == LOOPBACK:
        with (
            socket.socket() as here,
            contextlib.suppress(OSError),
        ):  # taken: by a store of this process, which is shared
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            here.bind((LOOPBACK, port))
            here.listen(world)
            options["master_listen_fd"] = here.detach()
    with _say_if_nobody_is_there(rank, f"{address}:{port}"):
        return dist.TCPStore(address, port, world, rank == 0, timeout, **options), rank, world  # type: ignore[attr-defined]


@contextlib.contextmanager
def _say_if_nobody_is_there(rank: int, address: str) -> Iterator[None]:
    """One rank says it for all, as they have no place yet to agree in."""
    where = f"to {address}, where ranks meet, for {NAMED:.0f} s"
    said = f"rank 0 has not come {where}: it is stopped, starts slowly, or its machine is gone"
    late = threading.Timer(NAMED, print_line, [said])
    late.daemon = True
    if rank == 1:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def can_watch(store: Any) -> bool:
    """Whether a thread can ask the store beside others: over a connection of its own."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
