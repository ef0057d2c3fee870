"""Compute the seconds of one collective from its kind, its bytes, and which ranks share a node or pod.

    all_gather, reduce_scatter    whichever is faster. A ring: each rank sends (n - 1) / n of the tensor, in n - 1
                                  messages one after the other; every byte enters a node once, over any link, so
                                  the links of a node's ranks to other nodes add up. Or doubling (halving):
                                  log2 n messages, each twice as large; bytes from other nodes come over a
                                  rank's own link
    all_reduce                    a tree, up and down: log2 n messages each way, at the rate of rings; or, where a
                                  node's switches add (`Link.adds`), one pass over them: a rank sends and receives
                                  (n + 1) / n of the tensor
    all_to_all                    each rank sends a part of its tensor to every other: inside its node over the inner
                                  link, to other nodes over its own link to them, both at once, in log2 n messages
    send_recv                     from one rank to another

(Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Sanders, Speck and
Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", which NCCL's trees follow.) All
groups of a mesh do the same at the same time, so each uses only its own ranks' links. tests/cost/test_links.py compares
this with a simulation of links and with published measurements.
"""

from __future__ import annotations

import math
from collections import Counter

from shardc.machine.device import Device, Link


def collective_seconds(device: Device, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Return the seconds of one collective among ranks (numbers in the world; neighbours share a node).

    nbytes: of the whole tensor that is gathered or reduced, or that a rank exchanges (with its own part), as in
    shardc.ir.metadata.CommRecord.
    """
    n = len(ranks)
    if n <= 1:
        return 0.0
    hops = _hops(device, ranks)
    last = hops[-1][0]
    if kind == "send_recv":
        return last.latency + nbytes / _rate(device, last, 1, kind)
    if kind == "all_to_all":
        sent = max(nbytes * peers / n / _rate(device, link, peers, kind) for link, peers, _ in hops)
        return last.start + _rounds(hops) + sent
    per_byte = 0.0  # seconds per byte of a ring
    for link, peers, near in hops:
        # messages between nodes, also between pods, take the links between nodes; only the rest stays inside
        stays = peers / (near + peers) if link is device.within and link is not last else 1.0
        per_byte = max(per_byte, stays / (_rate(device, link, peers, kind) * near))
    around = nbytes * (n - 1) / n * per_byte
    if kind == "all_reduce":
        there_and_back = 2 * around
        if len(hops) == 1 and last.adds:
            there_and_back = min(there_and_back, nbytes * (n + 1) / n / (last.bandwidth * last.adds))
        return last.start + 2 * _rounds(hops) + there_and_back
    ring = sum(
        link.latency * (n / near - (n / (near + peers) if link is not last else 1)) for link, peers, near in hops
    )
    doubled = sum(nbytes * peers / n / _rate(device, link, peers, kind) for link, peers, _ in hops)
    return last.start + min(ring + around, _rounds(hops) + doubled)


def _rounds(hops: list[tuple[Link, int, int]]) -> float:
    """Return the latency of rounds that each double the number of reached ranks, near ones first."""
    return sum(link.latency * math.ceil(math.log2((near + peers) / near)) for link, peers, near in hops)


def reach(device: Device, ranks: tuple[int, ...]) -> int:
    """Return the widest kind of link of these ranks: 0 inside a node, 1 between nodes, 2 between pods.

    Simultaneous collectives over the same kind share it.
    """
    return max(i for i, size in enumerate([1, *_domains(device)]) if len({r // size for r in ranks}) > 1)


def _hops(device: Device, ranks: tuple[int, ...]) -> list[tuple[Link, int, int]]:
    """Return (link, peers, near) for each kind of link that the ranks use, inner ones first.

    peers: other ranks that one rank reaches over it. near: ranks of the next smaller domain: a ring's byte may leave
    it over the link of any of them.
    """
    hops = []
    near = 1  # ranks that share all smaller domains with a rank, itself included
    for link, size in zip(_links(device), [*_domains(device), math.inf], strict=True):
        shared = max(Counter(r // size for r in ranks).values())
        if shared > near:
            hops.append((link, shared - near, near))
            near = shared
    return hops


def _links(device: Device) -> list[Link]:
    return [device.within, device.between, *([device.beyond] if device.beyond is not None else [])]


def _domains(device: Device) -> list[int]:
    """Return the number of devices in a node, and in a pod."""
    return [device.node, *([device.pod] if device.pod is not None and device.beyond is not None else [])]


def _rate(device: Device, link: Link, peers: int, kind: str) -> float:
    """Return the bytes per second of large messages to this many peers."""
    share = (link.reaches or device.reaches.link) * link.kinds.get(kind, 1.0)
    return min(link.bandwidth, (link.peer or math.inf) * peers) * share
