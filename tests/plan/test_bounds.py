"""What plan does not run is bounded: no bound is above what a run says, but for as much as estimates are off by. Devices
are drawn at random; `--fuzz N` tries N of them.
"""

from __future__ import annotations

import functools
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.plan.bounds import optimistic, relatives
from shardc.plan.few_layers import Subject
from shardc.plan.frontier import NEAR
from shardc.plan.planner import Planner
from shardc.plan.records import Records
from shardc.plan.space import Choice, Core, Keep
from tests.plan.test_monotone import MODELS, Stack, machines
from tests.plan.test_plan import SparseStack

KEEPS: tuple[Keep, ...] = ("none", "cheap", "full")


@functools.cache
def records(experts: bool) -> Records:
    """Of one model: its dry runs serve all devices."""
    with torch.device("meta"):
        made = SparseStack(6) if experts else Stack(*MODELS[1])
    return Records(Subject.of(made, {"ids": torch.empty(16, 32 if experts else 64, dtype=torch.long)}))


@pytest.mark.parametrize("experts", [False, True])
def test_no_bound_is_above_its_price(experts: bool, pytestconfig: pytest.Config) -> None:
    sizes = product((1, 2) if experts else (1, 2, 4), (1, 2, 4) if experts else (1,), KEEPS)

    @settings(max_examples=pytestconfig.getoption("--fuzz") or 2, derandomize=True, database=None)
    @given(machines())
    def check(on: object) -> None:
        plans = Planner(records(experts).subject, on, "bfloat16", 0.05, "it", lambda *_: None)  # type: ignore[arg-type]
        plans.__dict__["records"] = records(experts)
        finder, library = plans.finder, plans.library
        some = [Core(tp, ep, sequence_parallel=tp > 1, checkpoint=keep) for tp, ep, keep in cores]
        known = {core: library.core(Choice(**core._asdict())) for core in some}
        for core in some:
            columns = finder.estimates.columns(list(finder.choices([core], 16, 32)))
            prices = finder.estimates.at_once(columns, known[core], core.checkpoint)
            others = {k: v for k, v in known.items() if k != core}
            for near in {*relatives(core, others), relatives(core, {k: v for k, v in known.items() if k[:3] != core[:3]})[0]}:
                bound = optimistic(core, {near: library.elsewhere(near, core)}, library.device)
                for low, price in zip(
                    finder.estimates.at_once(columns, bound, core.checkpoint), prices, strict=True
                ):
                    assert np.all(low <= NEAR * price), (core, near, float(np.max(low / price)))

    cores = list(sizes)
    check()
