"""A pipeline's time from the longest paths through its schedule: as its timeline says, whatever actions take."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shardc.plan.longest_paths import walked
from shardc.runtime.schedule import SCHEDULES, Costs, make, timeline

SIZES = [
    (name, ranks, per_rank, microbatches)
    for name, maker in SCHEDULES.items()
    for ranks, per_rank, microbatches in itertools.product((2, 3, 4, 8), maker.per_rank, (1, 2, 5, 8, 17, 64))
]


@pytest.mark.parametrize("number", range(30))
def test_the_longest_path_ends_with_the_timeline(number: int) -> None:
    """Paths are those of a few proportions: with others, the longest of them is at most a little shorter. With many
    microbatches, rounds are alike.
    """
    r = random.Random(number)
    name, ranks, per_rank, microbatches = r.choice(SIZES)
    found = walked(name, ranks, per_rank, microbatches)
    if found is None:
        assert microbatches * ranks * per_rank > 128
        return
    forward, inputs, weights, send = 1.0, r.uniform(0.5, 2.5), r.uniform(0.5, 1.5), r.choice([0.0, 0.02, 0.3, 3.0])
    seconds = found.seconds(np.array([[forward], [inputs + weights], [inputs], [weights], [send]]))[0]
    stages = ranks * per_rank
    transfer = {(s, s + 1): send for s in range(stages - 1)}
    costs = Costs((forward,) * stages, (inputs,) * stages, (weights,) * stages, transfer)
    end = timeline(make(name, stages=stages, ranks=ranks, microbatches=microbatches), costs).end
    assert 0.97 * end < seconds <= end * (1 + 1e-9)


def test_one_microbatch_on_two_ranks() -> None:
    """The gradients of the last stage's weights are worked out while the first stage runs its backward."""
    each = np.array([[1.0], [2.0], [1.0], [1.5], [0.25]])
    plain, split = (walked(name, 2, 1, 1) for name in ("1f1b", "zb-h1"))
    assert plain is not None
    assert split is not None
    assert plain.seconds(each) == 2 * 1.0 + 2 * 2.0 + 2 * 0.25
    assert split.seconds(each) == 2 * 1.0 + 1.0 + 2.0 + 2 * 0.25
