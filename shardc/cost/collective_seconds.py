"""How long one collective takes on a device: by its kind, its bytes, and by who of its ranks share a node.

    all_gather, reduce_scatter    bytes as in a ring: each rank sends (n - 1) / n of the tensor; latency as in a tree:
                                  that of ceil(log2 n) messages
    all_reduce                    both, one after the other
    all_to_all                    each rank sends a part of its own to every other: inside its node over the inner link,
                                  to other nodes over its own link to them, both at once
    send_recv                     from one rank to another

Libraries choose by size: a tree (or halving and doubling) for small tensors, where latency counts, and a ring for large
ones, where its n - 1 messages one after the other are little beside the bytes. So each is priced by what counts there.
In a ring every byte enters a node once, over whichever link: the links that a node's ranks have to other nodes add up.
The bytes of an exchange are all different, and each rank's go over its own link. (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH".) Placement weighs the same bytes without a device:
shardc.passes.place.transfer_cost.
"""

from __future__ import annotations

import math
from collections import Counter

from shardc.cost.device import Device


def collective_seconds(device: Device, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
    """Of one collective among ranks (numbers in the world; neighbours share a node).

    nbytes: of the whole tensor that is gathered or reduced, or of what a rank exchanges, its own part included, as in
    shardc.runtime.mesh.CommRecord.
    """
    n = len(ranks)
    if n <= 1:
        return 0.0
    reaches = device.reaches.link
    inner, outer = device.within.bandwidth * reaches, device.between.bandwidth * reaches
    together = max(Counter(r // device.node for r in ranks).values())  # in one node; each has its own link to others
    latency = (device.within if together == n else device.between).latency
    ring = inner if together == n else min(inner, outer * together)
    if kind == "send_recv":
        return latency + nbytes / ring
    start = latency * math.ceil(math.log2(n))
    if kind == "all_to_all":
        return start + max(nbytes * (together - 1) / n / inner, nbytes * (n - together) / n / outer)
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (start + nbytes * (n - 1) / n / ring)
