"""What a plan recommends: nothing in its own space that fits is faster; more memory and more devices, of which some may
be idle, make it no slower. What it rests on: longer rows take no less memory, a higher ZeRO no more. Models and devices
are drawn at random, by the numbers from 0 on: everybody tries the same ones. `--fuzz N` tries N of them,
`--fuzz-from M` begins with the number M.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardc.cost import Device
from shardc.cost.caching_allocator import MIB
from shardc.errors import ShardcError
from shardc.plan.planner import Planner
from shardc.plan.price import Priced, price
from shardc.plan.space import CHECKPOINTS, Choice, Core, budget, choices, spec, splits
from shardc.spec import Spec
from tests.plan.test_monotone import MODELS, machine, numbers, planner

KEEPS = [keep for keep in CHECKPOINTS if keep != "host"]


def drawn(number: int) -> tuple[random.Random, int, Device, int, int]:
    """(the rest of what is drawn, model, device, how many of these, batch)"""
    r = random.Random(number)
    model, on = r.randrange(len(MODELS)), machine(r)
    memory = r.choice([2e7, 1e8, on.memory])
    return r, model, on.model_copy(update={"memory": memory}), r.choice([1, 2, 4, 8]), r.choice([8, 32])


def some(plans: Planner, r: random.Random, devices: int, batch: int) -> Iterator[Choice]:
    """Choices of a plan's space."""
    cores = splits(plans.facts, devices, plans.device.node)
    while True:
        core: Core = r.choice(cores)._replace(checkpoint=r.choice(KEEPS))
        if found := list(choices(core, devices, batch, plans.facts.cuts, node=plans.device.node)):
            yield r.choice(found)


def exact(plans: Planner, c: Choice, sequence: int | None = None, counts: tuple[int, ...] = ()) -> Priced | None:
    """None: compile refuses it. counts: of layers on each stage, where they are given."""
    try:
        library = plans.library if sequence is None else replace(plans.library, sequence=sequence)
        return price(library, Spec.load(spec(c, plans.facts, counts)), c.batch, whole_layers=True)
    except ShardcError:
        return None


def fastest(plans: Planner, devices: int, batch: int) -> float:
    """Seconds of what is recommended; inf where nothing fits."""
    fits = (c.step_seconds for c in plans.search(devices, batch).candidates if c.fits)
    return next(fits, float("inf"))


def test_nothing_given_that_fits_is_faster(pytestconfig: pytest.Config) -> None:
    for number in numbers(pytestconfig, 1):
        r, model, on, devices, batch = drawn(number)
        plans = planner(model, on)
        best = fastest(plans, devices, batch)
        for _, c in zip(range(8), some(plans, r, devices, batch), strict=False):
            given = exact(plans, c)
            if given is not None and given.fits:
                assert best <= given.step_seconds * (1 + 1e-9), (number, str(c), given.step_seconds / best)


def test_more_devices_and_more_memory_are_no_slower(pytestconfig: pytest.Config) -> None:
    for number in numbers(pytestconfig, 1):
        _, model, on, devices, batch = drawn(number)
        more = on.model_copy(update={"memory": 2 * on.memory})
        cases = (on, devices), (on, 2 * devices), (more, devices)
        less, *found = (fastest(planner(model, x), n, batch) for x, n in cases)
        assert max(found) <= less * (1 + 1e-9), (number, less, found)


def test_longer_rows_take_no_less_memory(pytestconfig: pytest.Config) -> None:
    for number in numbers(pytestconfig, 2):
        r, model, on, devices, batch = drawn(number)
        plans = planner(model, on)
        c = next(some(plans, r, devices, batch))
        short = exact(plans, c, 64)
        counts = short.counts if short is not None and c.pp > 1 else ()  # longer rows may move layers to other stages
        long = exact(plans, c, 128, counts)
        if short is None or long is None:
            continue
        if budget(c.checkpoint) is None:  # which ops a budget keeps is chosen anew for each length
            assert short.peak <= long.peak, (number, str(c))
            # torch's allocator takes 20 MiB where 1 to 10 are wanted: more may fit into a segment of its own size
            assert short.needs <= long.needs + 20 * MIB, (number, str(c))


def test_a_higher_zero_takes_no_more_memory(pytestconfig: pytest.Config) -> None:
    for number in numbers(pytestconfig, 2):
        r, model, on, devices, batch = drawn(number)
        plans = planner(model, on)
        c = next(c for c in some(plans, r, max(devices, 2), batch) if not c.kept and not c.over_experts)
        if c.dp == 1:
            continue
        plain = exact(plans, replace(c, zero=0, outer=1))  # whose layers on each stage all have: others wait elsewhere
        counts = plain.counts if plain is not None and c.pp > 1 else ()
        higher_ones = (exact(plans, replace(c, zero=zero, outer=1), counts=counts) for zero in (1, 2, 3))
        prices = [p for p in (plain, *higher_ones) if p is not None]
        # each of these models is one bucket, which a rank has whole for a moment beside its shares
        bucket = sum(prices[0].memory.get(kind, 0.0) for kind in ("gradients", "parameters")) if prices else 0.0
        for lower, higher in itertools.pairwise(prices):
            assert higher.peak <= lower.peak + bucket, (number, str(c), higher.memory, lower.memory)


def test_layers_of_stages_that_wait_for_gathers() -> None:
    """Two layers wait less than one for a bucket, which has nothing to hide behind: a layer takes what it computes all
    the same, and none of the stages gets nearly all of them.
    """
    r, model, on, devices, batch = drawn(72)
    plans = planner(model, on)
    c = next(c for c in some(plans, r, devices, batch) if c.pp == 2 and c.dp == 2 and c.per_rank == 1)
    c = replace(c, zero=3, kept=False, outer=1, over_experts=False)
    own, even = exact(plans, c), exact(plans, c, counts=(4, 4))
    assert own is not None
    assert even is not None
    assert own.step_seconds <= even.step_seconds
