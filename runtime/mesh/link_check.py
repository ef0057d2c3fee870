"""Check the links between ranks before a run: name those that are slow, or that carry nothing.

    distance 1    0 -> 1, 1 -> 2, 2 -> 3, 3 -> 0      all at the same time
    distance 2    0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1

Up to `ALL` ranks every distance, else 1, 2, 4, ...: a large world then takes seconds too. Results go through the store
where ranks meet, and not over the links.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from itertools import count
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


def check_links(mesh: TorchMesh) -> list[str]:
    """Send `NBYTES` over the links; return lines about their speed. Raises ShardcError for broken ones. Collective."""
    world, number = mesh.layout.world, next(_checks)
    if world == 1:
        return ["links: one rank has none"]
    hosts = _from_all(mesh, f"links/{number}/host", socket.gethostname())
    sent, got = (torch.ones(NBYTES, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    seconds: dict[tuple[int, int], float | None] = {}
    for distance in distances(world):
        for i in range(
            ROUNDS
        ):  # the first one connects; all ranks begin each together, so that a late one is late once
            nbytes = NBYTES if i else 1024
            took = _from_all(
                mesh, f"links/{number}/{distance}/{i}", _transfer(mesh, sent[:nbytes], got[:nbytes], distance)
            )
            links = [((rank - distance) % world, rank) for rank in range(world)]
            if None in took:
                return verdict(dict(zip(links, took, strict=True)), hosts)
            for link, now in zip(links, took, strict=True):
                seconds[link] = min(now, seconds[link] or now) if i > 1 else now
    return verdict(seconds, hosts)


def distances(world: int) -> list[int]:
    """Return how far ranks send in each round."""
    return [*range(1, world)] if world <= ALL else [1 << i for i in range((world - 1).bit_length())]


def _transfer(mesh: TorchMesh, sent: Tensor, got: Tensor, distance: int) -> float | None:
    """Send to the rank at this distance, and receive; return the seconds, None if nothing came in time."""
    world, start = mesh.layout.world, time.perf_counter()
    to, source = (mesh.rank + distance) % world, (mesh.rank - distance) % world
    try:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, source), dist.P2POp(dist.isend, sent, to)])
        if mesh.device.type == "cpu":
            works[0].wait(limit := timedelta(seconds=LINK))
            took = time.perf_counter() - start
            with suppress(RuntimeError):  # what was sent is the receiver's to report
                works[1].wait(limit)
            return took
        for work in works:
            work.wait()
    except RuntimeError:
        return None
    # on a GPU, waiting does not block the host
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    while not done.query():
        if time.perf_counter() - start > LINK:
            return None
        time.sleep(1e-4)
    return time.perf_counter() - start


def _from_all(mesh: TorchMesh, key: str, value: Any) -> list[Any]:
    """Return each rank's value, on all ranks, when all have come here."""
    store, keys = mesh.watch.store, [f"{key}/{rank}" for rank in range(mesh.layout.world)]
    store.set(keys[mesh.rank], json.dumps(value))
    limit = timedelta(seconds=(ROUNDS + 3) * LINK)
    try:
        if mesh.rank == 0:
            store.wait(keys, limit)
            store.set(key, json.dumps([json.loads(store.get(k)) for k in keys]))
        store.wait([key], 2 * limit)
    except RuntimeError:
        absent = [r for r, k in enumerate(keys) if not store.check([k])]
        fault = f"{mesh.layout.named(*absent or [0])} did not answer in the check of links"
        raise ShardcError(fault, where="--check-links", fix="see what stops it, or leave its host out") from None
    values: list[Any] = json.loads(store.get(key))
    return values


def verdict(seconds: dict[tuple[int, int], float | None], hosts: list[str]) -> list[str]:
    """Return lines about these links: a summary, and one for the slow ones. Raises ShardcError for broken ones."""

    def named(links: list[tuple[int, int]]) -> str:
        """Name ranks that half of their links are of, then the other links."""
        shares = {r: n / sum(r in link for link in seconds) for r, n in Counter(r for x in links for r in x).items()}
        ranks = [r for r in shares if shares[r] > 0.5 and shares[r] == max(shares.values()) and len(hosts) > 2]
        rest = [x for x in links if not {*x} & {*ranks}]
        texts = [f"all or most links of rank {r} on {hosts[r]}" for r in ranks]
        texts += [f"rank {a} on {hosts[a]} -> rank {b} on {hosts[b]}" for a, b in rest]
        return ", ".join(texts[:SHOWN]) + (f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else "")

    if broken := [link for link, x in seconds.items() if x is None]:
        fault = f"nothing came within {LINK:.0f} s over {named(broken)}"
        fix = "check the network between these hosts and its settings (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, FI_*)"
        raise ShardcError(fault, where="--check-links", fix=f"{fix}, or leave a host out")
    whole = {link: x for link, x in seconds.items() if x is not None}
    slow: list[tuple[int, int]] = []
    for within in (True, False):
        kind = {link: x for link, x in whole.items() if (hosts[link[0]] == hosts[link[1]]) == within}
        usual = statistics.median(kind.values()) if kind else 0.0
        slow += [link for link, x in kind.items() if x > SLOW * usual]
    worst, middle = max(whole, key=whole.__getitem__), statistics.median(whole.values())
    lines = [f"links: {len(whole)} between {len(hosts)} ranks, hosts: {len({*hosts})}, {size(NBYTES / middle)}/s"]
    lines[0] += f" at the median, {size(NBYTES / whole[worst])}/s over the slowest, {named([worst])}"
    return lines + ([f"links: more than {SLOW:.0f} times as slow as the median: {named(slow)}"] if slow else [])
