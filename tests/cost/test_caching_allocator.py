"""torch's allocator, simulated: segments and blocks by the rules of c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import itertools
import random

import pytest

import shardc
from shardc.cost.caching_allocator import MIB, CachingAllocator
from shardc.report.cost import table
from tests.gpt3 import GPT3
from tests.gpu.test_memory import built


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        pytest.param([1], 2 * MIB, id="a small one comes from 2 MiB"),
        pytest.param([MIB] * 2, 2 * MIB, id="two of them from the same"),
        pytest.param([MIB - 511] * 3, 4 * MIB, id="rounded up to 512 bytes"),
        pytest.param([MIB + 1], 20 * MIB, id="a middle one from 20 MiB"),
        pytest.param([6 * MIB] * 3, 20 * MIB, id="three of them from the same"),
        pytest.param([7 * MIB] * 3, 40 * MIB, id="what is too large for the rest gets another one"),
        pytest.param([10 * MIB], 10 * MIB, id="a large one gets its own"),
        pytest.param([11 * MIB + 1], 12 * MIB, id="rounded up to 2 MiB"),
        pytest.param([11 * MIB + 1, MIB // 2], 14 * MIB, id="small and large ones share nothing"),
    ],
)
def test_what_is_asked_of_the_device(sizes: list[int], segments: int) -> None:
    a = CachingAllocator()
    for n in sizes:
        a.allocate(n)
    assert a.reserved == segments


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    a = CachingAllocator()
    large, less = a.allocate(40 * MIB), a.allocate(24 * MIB)
    a.free(large)
    a.free(less)
    assert a.allocate(23 * MIB).address == less.address
    assert a.allocate(30 * MIB).address == large.address
    assert a.reserved == 64 * MIB


def test_free_neighbours_become_one() -> None:
    a = CachingAllocator()
    whole = a.allocate(30 * MIB)
    a.free(whole)
    parts = [a.allocate(10 * MIB) for _ in range(3)]
    for i in (0, 2, 1):
        a.free(parts[i])
    assert a.allocate(30 * MIB).address == whole.address
    assert a.reserved == 30 * MIB


def test_gaps_are_not_given_back_but_whole_segments_are() -> None:
    a = CachingAllocator(limit=64 * MIB)
    kept, gone = a.allocate(20 * MIB), a.allocate(20 * MIB)
    a.free(gone)
    a.allocate(40 * MIB)  # 20 + 40 fit once the free one is given back
    assert (a.reserved, a.peak) == (60 * MIB, 60 * MIB)
    a.free(kept)
    a.allocate(12 * MIB)  # from the first: nothing is asked
    a.allocate(24 * MIB)
    assert a.peak == 84 * MIB  # more than there is


def test_blocks_never_overlap() -> None:
    rng, a = random.Random(0), CachingAllocator()
    live, total = [], 0
    for _ in range(3000):
        if live and rng.random() < 0.5:
            block, _n = live.pop(rng.randrange(len(live)))
            a.free(block)
            continue
        n = int(10 ** rng.uniform(0, 8))
        live.append((a.allocate(n), n))
        ranges = sorted((b.address, b.address + b.size) for b, _ in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert all(b.size >= n for b, n in live)
        total = max(total, sum(b.size for b, _ in live))
    assert total <= a.peak


def test_a_device_has_to_hold_what_is_reserved_and_what_lies_outside() -> None:
    model, batch = built("cuda")
    assert isinstance(model, GPT3)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "data": {"axis": "dp", "zero": 3}})
    on = program.cost("h100-80g")
    live, outside = on.memory.peak, on.outside
    assert live < on.reserved < 2 * live
    assert outside == 0.5e9 + 33.6e6 + 0.7e9  # the process, products, one communicator

    def fits(memory: float) -> bool:
        return program.cost(on.device.model_copy(update={"memory": memory})).fits

    assert fits(on.reserved + outside)
    assert not fits(live + outside)
    assert f"reserves, and libraries take beside it, {on.reserved / 2**30:.1f} GiB" in table(on)
