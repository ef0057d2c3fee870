"""What collectives take, against a simulation of the links that their messages use; and published measurements of
collectives and products.

The simulation knows algorithms and links only: in each round of an algorithm every rank sends some bytes to another. A
message takes the sender's and the receiver's link of its kind; a link takes its messages one after the other. A round
lasts as long as its busiest link, and the latency of its longest way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardc.cost.collective_seconds import collective_seconds, reach
from shardc.cost.device import Device, Link, device, names
from shardc.cost.ledger import Op

Round = tuple[NDArray[np.int64], NDArray[np.int64], float]  # senders, receivers, bytes of each message

PODS = device("h100-80g").model_copy(
    update={"name": "pods", "pod": 64, "beyond": Link(bandwidth=12.5e9, latency=12e-6, reaches=0.92)}
)
MACHINES = {x.name: x for x in (*map(device, ("h100-80g", "a100-80g", "gb200-nvl72", "rtx-4090", "h100-pcie")), PODS)}


class Links:
    """Of a machine whose ranks are 0, 1, ..."""

    def __init__(self, machine: Device, n: int) -> None:
        self.machine, self.n = machine, n
        levels = [(1, machine.within), (machine.node, machine.between)]
        levels += [(machine.pod, machine.beyond)] if machine.pod and machine.beyond else []
        self.levels = levels

    def seconds(self, rounds: Iterator[Round]) -> float:
        return sum(self._round(*each) for each in rounds)

    def around(self, node: int, nbytes: float) -> float:
        """Of a ring, whose ranks do not wait for each other's rounds: a part goes from rank to rank."""
        senders, receivers, each = next(ring(self.n, node, nbytes))
        links = self._levels(senders[: self.n - 1], receivers[: self.n - 1])
        latency = sum(self.levels[i][1].latency for i in links)
        return latency + (self.n - 1) * self._busiest(senders, receivers, each)

    def _round(self, senders: NDArray[np.int64], receivers: NDArray[np.int64], nbytes: float) -> float:
        latency = self.levels[int(self._levels(senders, receivers).max())][1].latency
        return latency + self._busiest(senders, receivers, nbytes)

    def _levels(self, senders: NDArray[np.int64], receivers: NDArray[np.int64]) -> NDArray[np.int64]:
        level = np.zeros(len(senders), dtype=np.int64)
        for i, (size, _) in enumerate(self.levels):
            level[senders // size != receivers // size] = i
        return level

    def _busiest(self, senders: NDArray[np.int64], receivers: NDArray[np.int64], nbytes: float) -> float:
        level, busiest = self._levels(senders, receivers), 0.0
        for i, (_, link) in enumerate(self.levels):
            rate = link.bandwidth * (link.reaches or self.machine.reaches.link)
            if (mine := level >= i if i == 1 else level == i).any():  # what leaves a pod leaves a node, too
                for ends in (senders[mine], receivers[mine]):
                    # a pod's ranks have their links to other pods in common
                    many = min(self.machine.pod or 1, self.n) if i == 2 else 1
                    busiest = max(busiest, np.bincount(ends // many).max() * nbytes / (rate * many))
        return busiest


def ring(n: int, node: int, nbytes: float) -> Iterator[Round]:
    """all_gather: as many rings as a node has ranks, each of which leaves the node at another rank. All rounds are
    alike: the first.
    """
    g = min(node, n)
    ranks = np.arange(n)
    orders = [ranks.reshape(-1, g)[:, (np.arange(g) + c) % g].reshape(-1) for c in range(g)]
    yield np.concatenate(orders), np.concatenate([np.roll(order, -1) for order in orders]), nbytes / n / g


def doubling(n: int, nbytes: float) -> Iterator[Round]:
    """all_gather: in round j, what one has goes to the rank whose number differs in bit j."""
    ranks = np.arange(n)
    for j in range(int(math.log2(n))):
        yield ranks, ranks ^ (1 << j), nbytes / n * 2**j


def exchange(n: int, nbytes: float) -> Iterator[Round]:
    """all_to_all: everybody sends to everybody else at once."""
    a, b = np.divmod(np.arange(n * n), n)
    yield a[a != b], b[a != b], nbytes / n


@pytest.mark.parametrize("n", [8, 16, 64, 256, 1024])
@pytest.mark.parametrize("name", list(MACHINES))
def test_collectives_take_what_their_messages_take(name: str, n: int) -> None:
    machine = MACHINES[name]
    n = n // machine.node * machine.node or n  # whole nodes
    ranks, links = tuple(range(n)), Links(machine, n)
    start = (machine.within if n <= machine.node else machine.between).start
    start = machine.beyond.start if machine.beyond and machine.pod and n > machine.pod else start

    def priced(kind: str, nbytes: float) -> float:
        return collective_seconds(machine, kind, nbytes, ranks) - start

    for nbytes in (8, 2e4, 1e6, 3e7, 1e9, 4e10):
        ways = [links.around(machine.node, nbytes)]
        if n & (n - 1) == 0:
            ways.append(links.seconds(doubling(n, nbytes)))
            assert priced("all_gather", nbytes) == pytest.approx(min(ways), rel=0.1)
        elif nbytes > 1e8:
            assert priced("all_gather", nbytes) == pytest.approx(min(ways), rel=0.1)
        if n & (n - 1) == 0 and nbytes < 100:
            assert priced("all_reduce", nbytes) == pytest.approx(2 * ways[1], rel=0.1)
        if nbytes > 1e8 * n and not machine.within.adds:
            assert priced("all_reduce", nbytes) == pytest.approx(2 * ways[0], rel=0.1)
    exchanged = links.seconds(exchange(n, 1e9))
    assert priced("all_to_all", 1e9) == pytest.approx(exchanged, rel=0.1)


def busbw(name: str, n: int, gib: float) -> float:
    """GB/s as nccl-tests and all_reduce_bench count them."""
    nbytes = gib * 2**30
    return 2 * (n - 1) / n * nbytes / collective_seconds(device(name), "all_reduce", nbytes, tuple(range(n))) / 1e9


@pytest.mark.parametrize(
    ("name", "n", "gib", "measured"),
    [
        *(("h200", n, 8, x) for n, x in ((4, 363.3), (5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1))),
        *(("b200", n, 8, x) for n, x in ((4, 673.2), (5, 677.8), (6, 778.2), (7, 811.2), (8, 838.0))),
        *(("b200", 32, gib, x) for gib, x in ((1, 362.0), (4, 377.3), (16, 381.8))),
        *(("a100-80g", 8, 16, 234.9), ("mi300x", 2, 4, 47.7), ("mi300x", 8, 4, 312.9)),
    ],
)
def test_published_all_reduces(name: str, n: int, gib: float, measured: float) -> None:
    """S. Bekman, Machine Learning Engineering, network/README.md at 744d01e (2026-08-22): busbw in GB/s. The shares
    that links reach are from the same measurements; that one of them fits 4 to 8 and 32 ranks is not.
    """
    assert busbw(name, n, gib) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "shape", "measured"),
    [
        ("h100-80g", (2048, 2048, 13312), 794.5),
        ("a100-80g", (1024, 10240, 5120), 271.2),
        ("b200", (1792, 16128, 3072), 1745.0),
        ("gb200-nvl72", (4096, 9728, 2048), 1822.0),
        ("mi300x", (10240, 15360, 8192), 668.4),
        ("mi355x", (12288, 8192, 8192), 1565.0),
    ],
)
def test_published_products(name: str, shape: tuple[int, int, int], measured: float) -> None:
    """The same book, compute/accelerator/README.md: TFLOP/s of bfloat16 at the best shape that a search found."""
    m, n, k = shape
    op = Op(2 * m * n * k, 0, torch.bfloat16, matrices=(1, m, n))
    assert op.flops / device(name).product_seconds(op) / 1e12 == pytest.approx(measured, rel=0.1)


def test_sums_in_switches_are_used_where_they_are_faster() -> None:
    h200 = device("h200")
    ring_only = h200.model_copy(update={"within": h200.within.model_copy(update={"adds": 0.0})})
    for n, less in ((4, False), (8, True)):
        one, other = (collective_seconds(d, "all_reduce", 1e9, tuple(range(n))) for d in (h200, ring_only))
        assert (one < 0.95 * other) == less


def test_kinds_of_links() -> None:
    assert [reach(PODS, (0, x)) for x in (1, 8, 64)] == [0, 1, 2]


@pytest.mark.parametrize("name", names())
def test_devices_are_sound(name: str) -> None:
    """Sources and shares; a wider link is never slower."""
    d = device(name)
    assert "datasheet" in d.source or "whitepaper" in d.source
    assert "not measured here" in d.source
    assert d.products is not None
    assert 0.5 < d.products.share(8192, 8192, 8192) <= 1
    assert d.products.share(64, 64, 64) < 0.1
    assert d.within.bandwidth >= d.between.bandwidth
    assert d.within.latency <= d.between.latency
