"""Check the links between ranks before a run: name those that are slow, or that carry nothing.

    distance 1    0 -> 1, 1 -> 2, 2 -> 3, 3 -> 0      all at the same time
    distance 2    0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1

Up to `ALL` ranks every distance, else 1, 2, 4, ...: a large world then takes seconds too. Results go through the store
where ranks meet, and not over the links; so all begin each round together, and a late rank is late once.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from itertools import count, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.units import size
from shardc.runtime.mesh.torch_mesh import TorchMesh
from shardc.runtime.time_limits import LINK

NBYTES, ROUNDS, ALL, SHOWN = 8 << 20, 4, 16, 6
#: A link is slow if it takes this many times the median of its kind, within a host or between two.
SLOW = 4.0
_checks = count()  # of this process: stores keep the keys of earlier ones
Links = dict[tuple[int, int], float]


def check_links(mesh: TorchMesh) -> list[str]:
    """Send `NBYTES` over the links; return lines about their speed. Raises ShardcError for broken ones. Collective."""
    world, key, seconds = mesh.layout.world, f"links/{next(_checks)}", Links()
    if world == 1:
        return ["links: one rank has none"]
    hosts = _from_all(mesh, key, socket.gethostname())
    sent, got = (torch.ones(NBYTES, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    for distance, i in product(distances(world), range(ROUNDS)):
        nbytes = NBYTES if i else 1024  # the first one connects
        took = _from_all(mesh, f"{key}/{distance}/{i}", _transfer(mesh, sent[:nbytes], got[:nbytes], distance))
        now = {((rank - distance) % world, rank): x for rank, x in enumerate(took)}
        if broken := [link for link, x in now.items() if x is None]:
            fault = f"nothing came within {LINK:.0f} s over {named(broken, now, hosts)}"
            fix = (
                "check the network between these hosts (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, FI_*), or leave one out"
            )
            raise ShardcError(fault, where="--check-links", fix=fix)
        seconds |= now if i < 2 else {link: min(x, seconds[link]) for link, x in now.items()}
    return report(seconds, hosts)


def distances(world: int) -> list[int]:
    """Return how far ranks send in each round."""
    return [*range(1, world)] if world <= ALL else [1 << i for i in range((world - 1).bit_length())]


def _transfer(mesh: TorchMesh, sent: Tensor, got: Tensor, distance: int) -> float | None:
    """Send to the rank at this distance, and receive; return the seconds, None if nothing came in time."""
    world, start, limit = mesh.layout.world, time.perf_counter(), timedelta(seconds=LINK)
    to, source = (mesh.rank + distance) % world, (mesh.rank - distance) % world
    try:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, source), dist.P2POp(dist.isend, sent, to)])
        if mesh.device.type == "cpu":
            works[0].wait(limit)
            took = time.perf_counter() - start
            with suppress(RuntimeError):  # what was sent is the receiver's to report
                works[1].wait(limit)
            return took
        for work in works:
            work.wait()  # does not block the host
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        while not done.query() and time.perf_counter() - start < LINK:
            time.sleep(1e-4)
        return time.perf_counter() - start if done.query() else None
    except RuntimeError:
        return None


def _from_all(mesh: TorchMesh, key: str, value: Any) -> list[Any]:
    """Return each rank's value, on all ranks, when all have come here."""
    store, keys = mesh.watch.store, [f"{key}/{rank}" for rank in range(mesh.layout.world)]
    store.set(keys[mesh.rank], json.dumps(value))
    limit = timedelta(seconds=3 * LINK)
    try:
        if mesh.rank == 0:  # so that a large world does not ask for each value of each rank
            store.wait(keys, limit)
            store.set(key, json.dumps([json.loads(x) for x in store.multi_get(keys)]))
        store.wait([key], 2 * limit)
    except RuntimeError:
        absent = mesh.layout.named(*([r for r, k in enumerate(keys) if not store.check([k])] or [0]))
        fix = "see what stops it, or leave its host out"
        raise ShardcError(f"{absent} did not answer", where="--check-links", fix=fix) from None
    values: list[Any] = json.loads(store.get(key))
    return values


def report(seconds: Links, hosts: list[str]) -> list[str]:
    """Return lines about links: a summary, and one that names slow ones."""
    slow: list[tuple[int, int]] = []
    for within in (True, False):
        kind = {link: x for link, x in seconds.items() if (hosts[link[0]] == hosts[link[1]]) == within}
        slow += [link for link, x in kind.items() if x > SLOW * statistics.median(kind.values())]
    worst, middle = max(seconds, key=seconds.__getitem__), statistics.median(seconds.values())
    lines = [f"links: {len(seconds)} between {len(hosts)} ranks, hosts: {len({*hosts})}, {size(NBYTES / middle)}/s"]
    lines[0] += f" at the median, {size(NBYTES / seconds[worst])}/s over the slowest, {named([worst], seconds, hosts)}"
    text = f"links: more than {SLOW:.0f} times as slow as the median: {named(slow, seconds, hosts)}"
    return lines + [text] * bool(slow)


def named(links: list[tuple[int, int]], of: dict[tuple[int, int], Any], hosts: list[str]) -> str:
    """Name links by rank and host; a rank of whose links most are among them, once."""
    tried, counts = (Counter(rank for link in some for rank in link) for some in (of, links))
    ranks = [r for r, n in counts.items() if n > 2 and n == max(counts.values()) and 2 * n > tried[r]]
    texts = [f"all or most links of rank {r} on {hosts[r]}" for r in ranks]
    texts += [f"rank {a} on {hosts[a]} -> rank {b} on {hosts[b]}" for a, b in links if not {a, b} & {*ranks}]
    return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")
