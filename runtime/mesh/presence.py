"""Join this process to its world from its start: where ranks meet, which are there, what they do.

Processes that start together do not arrive together: one compiles, one reads its modules from a slow disk, one is
stopped or killed before it has reported. The others would wait for it until torch.distributed's time limit. So each
reports that it is there before anything else, and starts a thread that watches (shardc.runtime.mesh.watch), long before
there is a process group:

    `begin`  the store ── who is there, what they do ── the thread ........ compile, import, build ...
    `take`   by a TorchMesh takes over what `begin` made; in programs that have not called it, makes it then
    `world_store`   the store before there is a mesh: for the program that one process compiles, and for equal errors

A connection ends with the last process that has it open. If a process that a rank forks, such as a worker of a
DataLoader, kept its connections, ranks that wait for one that left, or was killed, would not be woken. So a forked
process closes them (`not_inherited`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from shardc.errors import ShardcError
from shardc.runtime.launch import LEFT_OVER, LOOPBACK
from shardc.runtime.mesh.watch import Watch, print_line
from shardc.runtime.time_limits import LATE_RANK_0, NAMED, UNKNOWN_HOST

#: What `begin` has made, and its activity, which ends when a TorchMesh takes it over.
_begun: list[tuple[Watch, contextlib.ExitStack]] = []


def begin(named: float = NAMED) -> Watch | None:
    """Announce this process to the world that its environment describes. Call it before slow work: compiling.

    Returns what the next TorchMesh takes over; None where this process has joined a world already, or RANK is not set.
    """
    if dist.is_initialized() or _begun or "RANK" not in os.environ:
        return None
    watch, compiling = _new(default_pg_timeout, named), contextlib.ExitStack()
    compiling.enter_context(watch.activity.during("compiling"))
    _begun.append((watch, compiling))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: None)  # until the run sets its own handler
        received, sent = os.pipe()
        os.set_blocking(sent, False)
        signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
        threading.Thread(target=_heed, args=(watch, received), daemon=True).start()
    return watch


def _heed(watch: Watch, received: int) -> None:
    """End at SIGTERM or Ctrl-C until all have met: the main thread may wait in native code, where it heeds none."""
    while signals := os.read(received, 1):
        if signals[0] in (signal.SIGINT, signal.SIGTERM) and not watch.met:
            with contextlib.suppress(Exception):  # the store may be gone, or there is none to use
                watch.processes.note_ending()
            os._exit(128 + signals[0])


def take(timeout: timedelta, named: float) -> Watch:
    """Take over what `begin` has started, or start it now. timeout: of the store."""
    if not _begun:
        return _new(timeout, named)
    watch, compiling = _begun.pop()
    compiling.close()
    watch.store.set_timeout(timeout)
    return watch


def failed(text: str) -> None:
    """End the ranks that wait to meet this one, with its error. Nothing is done once all have met."""
    for watch, _ in _begun:
        watch.fail(text)


def _new(timeout: timedelta, named: float) -> Watch:
    with not_inherited():
        store, rank, world = world_store(timeout, named)
        times = store.add(f"joined{rank}", 1)  # a process that joins again after `close` keeps its store: new keys
        store = dist.PrefixStore(f"join{times}", store)  # type: ignore[attr-defined]
        return Watch(store, rank, world, named)


#: What `world_store` returns, by the place where ranks meet.
_stores: dict[tuple[str | None, ...], tuple[Any, int, int]] = {}


def _place() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")))


def joined() -> tuple[Any, int, int]:
    """Return what `world_store` does if this process is connected; else (None, 0, 1)."""
    return _stores.get(_place(), (None, 0, 1))


def world_store(timeout: timedelta = default_pg_timeout, named: float = NAMED) -> tuple[Any, int, int]:
    """Return (store, rank, world), as torch's env:// has them. The process connects once.

    timeout: of the store. named: seconds until a line says that rank 0 has not arrived; 0: never.

    Old keys would mislead: torchrun's agent may keep its store when it restarts all processes.
    """
    place = _place()
    if place not in _stores:
        store, rank, world = _new_store(timeout, named)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _stores[place] = dist.PrefixStore(f"shardc/start{restarts}", store), rank, world  # type: ignore[attr-defined]
    _stores[place][0].set_timeout(timeout)
    return _stores[place]


def _new_store(timeout: timedelta, named: float) -> tuple[Any, int, int]:
    """Connect to the store of torchrun's agent, or of rank 0, which does not wait here for the others.

    The store has no authentication. So it listens to this machine alone where all ranks are on it, as with `shardc
    run`. If rank 0 is late, rank 1 prints a line, as ranks cannot agree before they meet; much later, the others do.
    """
    env = os.environ
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    who = "torchrun's agent" if agent else "rank 0"
    address, port, rank, world = env["MASTER_ADDR"], int(env["MASTER_PORT"]), int(env["RANK"]), int(env["WORLD_SIZE"])
    options: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False}
    if rank == 0 and address == LOOPBACK and not agent:
        # in use: by a store of this process, which is shared
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((LOOPBACK, port))
            listener.listen(world)
            options["master_listen_fd"] = listener.detach()
    seconds = named if rank == 1 else LATE_RANK_0 * named
    where = f"to {address}:{port}, where ranks meet, for {seconds:.0f} s"
    message = f"{who} has not arrived {where}: it is stopped, starts slowly, or its machine is gone"
    message += f"; if no launcher started this process, {LEFT_OVER}"
    late = threading.Timer(seconds, print_line, [message])
    late.daemon = True
    if (rank or agent) and named:
        late.start()
    try:
        if agent:
            store, rank, world = next(rendezvous("env://", timeout=timeout))
            return store, rank, world
        _resolve(address)
        return dist.TCPStore(address, port, world, rank == 0, timeout, **options), rank, world  # type: ignore[attr-defined]
    except dist.DistNetworkError as e:
        if rank or agent or "failed to listen" not in str(e):
            raise
        fault = f"rank 0 cannot listen at port {port}: {str(e).rpartition('message: ')[2]}"
        raise ShardcError(fault, where="MASTER_PORT", fix="set it to a free port, the same on all ranks") from e
    finally:
        late.cancel()


def _resolve(address: str) -> object:
    """Wait until a host has this name, as in a cluster that is still starting: torch would wait for its whole limit."""
    deadline = time.monotonic() + UNKNOWN_HOST
    while True:
        try:
            return socket.getaddrinfo(address, None)
        except OSError as e:
            if time.monotonic() > deadline:
                fix = "set MASTER_ADDR to the name or address by which all machines reach the one of rank 0"
                raise ShardcError(f"no host {address}: {e.strerror}", where="MASTER_ADDR", fix=fix) from e
        time.sleep(1)


# --- connections in forked processes

_OPEN = "/proc/self/fd"  # Linux only; elsewhere nothing is closed
_ours: dict[int, str] = {}  # {descriptor: socket}, as descriptors are reused


@contextlib.contextmanager
def not_inherited() -> Iterator[None]:
    """Keep the connections that are made in this context out of forked processes."""
    before = _sockets()
    try:
        yield
    finally:
        _ours.update(_sockets().items() - before.items())


def _sockets() -> dict[int, str]:
    """Return {descriptor: "socket:[NUMBER]"} of this process."""
    with contextlib.suppress(OSError):
        return {fd: name for fd in map(int, os.listdir(_OPEN)) if (name := _name(fd)).startswith("socket:")}
    return {}


def _name(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"{_OPEN}/{descriptor}")
    return ""


def _close() -> None:
    """Close the registered sockets, in a forked process."""
    for fd, name in _ours.items():
        if _name(fd) == name:
            os.close(fd)
    _ours.clear()


os.register_at_fork(after_in_child=_close)
