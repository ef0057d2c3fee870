"""What collectives take, against a simulation of the links that their messages use (tests/cost/link_simulator.py);
and published measurements of collectives and products.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardc.cost.measured.device_file import device, names
from shardc.ir.metadata import CommRecord
from shardc.machine.clock import Flight, Flights
from shardc.machine.collectives import collective_seconds, reach
from shardc.machine.device import Device, Link
from shardc.machine.work import Op
from tests.cost.link_simulator import Links, Machine, padded

PODS = device("h100-80g").model_copy(
    update={"name": "pods", "pod": 64, "beyond": Link(bandwidth=12.5e9, latency=12e-6, reaches=0.92)}
)
MACHINES = {x.name: x for x in (*map(device, ("h100-80g", "a100-80g", "gb200-nvl72", "rtx-4090", "h100-pcie")), PODS)}


# --- the simulator, where the answer is known


def test_messages_share_what_they_have_in_common() -> None:
    links = Links()
    a, b = links.add(10.0), links.add(4.0)
    assert links.seconds([(a,)], [5.0]) == pytest.approx(0.5)
    assert links.seconds([(a,)] * 5, [2.0] * 5) == pytest.approx(1.0)
    # of a's 10, two that also take b get 2 each, and the third the rest
    assert links.fair(padded([(a, b), (a, b), (a,)])).tolist() == pytest.approx([2.0, 2.0, 6.0])
    # when one has ended the others are faster: 2 bytes each at 5, then 8 at 10
    assert links.ends([(a,), (a,)], [2.0, 10.0]).tolist() == pytest.approx([0.4, 1.2])


def test_a_parking_lot() -> None:
    """One message over three links, and one more on each: all have half, as max-min fairness wants it."""
    links = Links()
    ways = [links.add(1.0) for _ in range(3)]
    assert links.fair(padded([tuple(ways), *((x,) for x in ways)])).tolist() == pytest.approx([0.5] * 4)


def test_closed_forms() -> None:
    """An exchange in a node sends (n - 1) / n of the tensor over each link; a ring likewise; two exchanges side by side
    take no longer, as each rank has links of its own.
    """
    d = device("h100-80g")
    m, rate, card = Machine(d, 32), d.within.bandwidth * 0.8, d.between.bandwidth * 0.92
    assert m.all_to_all([range(8)], 1e9) == pytest.approx(d.within.latency + 7 / 8 * 1e9 / rate)
    assert m.ring([range(8)], 1e9) == pytest.approx(7 * d.within.latency + 7 / 8 * 1e9 / rate)
    assert m.all_to_all([(0, 8)], 1e9) == pytest.approx(d.between.latency + 1e9 / 2 / card)
    assert m.all_to_all([(i, i + 8) for i in range(8)], 1e9) == pytest.approx(m.all_to_all([(0, 8)], 1e9))
    assert m.doubling([(0, 8, 16, 24)], 4e9) == pytest.approx(2 * d.between.latency + 3e9 / card)
    assert PODS.beyond is not None
    far = Machine(PODS, 128)  # what leads out of a pod is its ranks' in common: one alone is held up by its own card
    alone, all_of_them = (far.all_to_all(g, 1e9) for g in ([(0, 64)], [(i, i + 64) for i in range(64)]))
    assert alone == pytest.approx(PODS.beyond.latency + 0.5e9 / card)
    assert all_of_them == pytest.approx(PODS.beyond.latency + 0.5e9 / (12.5e9 * 0.92))


def test_on_rails_the_way_to_another_rail_is_through_the_node() -> None:
    d = device("h100-80g").model_copy(update={"within": Link(bandwidth=50e9, latency=3e-6)})
    crossed = [(i, 8 + (i + 1) % 8) for i in range(8)]
    plain, rails = (Machine(d, 16, rails=r).all_to_all(crossed, 1e9) for r in (False, True))
    card, inside = d.between.bandwidth * 0.92, d.within.bandwidth * 0.8
    assert plain == pytest.approx(d.between.latency + 0.5e9 / card)
    assert rails == pytest.approx(d.between.latency + 0.5e9 / inside)  # slower than the card, here


# --- prices


def groups_of(n: int, size: int, step: int) -> list[list[int]]:
    """All groups of an axis of so many ranks, of a mesh of n: `step` others lie between two neighbours."""
    return [
        [first + i * step for i in range(size)] for at in range(0, n, size * step) for first in range(at, at + step)
    ]


def rounded(machine: Device, n: int) -> int:
    """Whole nodes."""
    return n // machine.node * machine.node or n


@pytest.mark.parametrize("n", [8, 64, 256, 1024])
@pytest.mark.parametrize("name", list(MACHINES))
def test_collectives_of_all_ranks(name: str, n: int) -> None:
    check(MACHINES[name], rounded(MACHINES[name], n), 1)


@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize("name", ["h100-80g", "rtx-4090", "pods"])
def test_collectives_of_all_groups_of_an_axis_at_once(name: str, step: int, rails: bool) -> None:
    """Between neighbours lie the ranks of inner axes: then fewer of a group share a node, and cards are its own."""
    check(MACHINES[name], 128, step, rails=rails)


def check(machine: Device, n: int, step: int, *, rails: bool = False) -> None:
    groups = groups_of(n, n // step, step)
    m, ranks = Machine(machine, n, rails=rails), tuple(groups[0])
    level, power = reach(machine, ranks), len(ranks) & (len(ranks) - 1) == 0
    link = (machine.within, machine.between, machine.beyond)[level]
    assert link is not None

    def priced(kind: str, nbytes: float) -> float:
        return collective_seconds(machine, kind, nbytes, ranks) - link.start

    for nbytes in (8, 2e4, 1e6, 3e7, 1e9, 4e10) if n < 1000 else (8, 1e6, 4e10):
        around = m.ring(groups, nbytes)
        ways = [around, *([m.doubling(groups, nbytes)] if power else [])]
        if power or nbytes > 1e8:
            for kind in ("all_gather", "reduce_scatter"):
                assert priced(kind, nbytes) == pytest.approx(min(ways), rel=0.1), (kind, nbytes)
        if power and nbytes < 100:
            assert priced("all_reduce", nbytes) == pytest.approx(2 * ways[1], rel=0.1)
        if nbytes > 3e7 * n and not link.adds:
            assert priced("all_reduce", nbytes) == pytest.approx(2 * around, rel=0.1)
    assert priced("all_to_all", 1e9) == pytest.approx(m.all_to_all(groups, 1e9), rel=0.1)
    if power:  # of small messages: those for many are sent together (Bruck et al. 1997), in as many rounds as doubling
        assert priced("all_to_all", 8) == pytest.approx(m.doubling(groups, 8), rel=0.1)


@pytest.mark.parametrize("n", [4, 8])
def test_a_node_whose_devices_have_links_to_each_other(n: int) -> None:
    """Each sends its own part to every other at once. (Its rings would have to take all of these links in turn, which
    the simulation's do not.)
    """
    machine = device("mi300x")
    m, ranks = Machine(machine, 8), list(range(n))
    exchanged = m.all_to_all([ranks], 1e9)
    for kind in ("all_to_all", "all_gather", "reduce_scatter"):
        priced = collective_seconds(machine, kind, 1e9, tuple(ranks)) - machine.within.start
        assert priced == pytest.approx(exchanged, rel=0.1)


@pytest.mark.parametrize(("stages", "level"), [(8, 0), (2, 1)])
def test_stages_send_side_by_side(stages: int, level: int) -> None:
    """Every rank to the same one of the next stage: over its own link, so as if it were alone."""
    machine, n = device("h100-80g"), 8 if level == 0 else 64
    m, step = Machine(machine, n), n // stages
    senders, receivers = np.arange(n - step), np.arange(step, n)
    took = m.links.seconds(m.paths(senders, receivers), np.full(n - step, 1e9)) + m.latency(senders, receivers)
    assert collective_seconds(machine, "send_recv", 1e9, (0, step)) == pytest.approx(took, rel=0.1)


def test_two_collectives_at_once_share_their_links() -> None:
    """As the clock of a step has it (shardc.machine.clock): equal parts, until the shorter one ends."""
    machine = device("h100-80g")
    m = Machine(machine, 64)
    ranks = np.arange(64)
    across = m.paths(ranks, (ranks + 8) % 64)
    alone = [m.links.seconds(across, np.full(64, nbytes)) for nbytes in (1e9, 3e9)]
    both = m.links.ends(np.concatenate([across, across]), np.repeat([1e9, 3e9], 64))
    flights = Flights()
    each = [Flight(CommRecord("send_recv", (axis,), 1, "", ""), 1, s, 0.0) for axis, s in zip("ab", alone, strict=True)]
    for flight in each:
        flights.start(flight, 0.0)
    assert [flight.end for flight in each] == pytest.approx([both[0], both[64]])


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
    op = Op(2 * m * n * k, 0, "bfloat16", matrices=(1, m, n))
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
