"""Where rows go, by predicted seconds: pure functions."""

from __future__ import annotations

import itertools
import random

import pytest

from shardc.features.rows.arrangement import Priced, Row, Step, arranged, dealt, priced, row
from shardc.features.rows.seconds import Seconds, fitted, spread
from shardc.features.text.packing import best_fit

#: A layer's linear part grows with tokens, attention with pairs: as much at 6 times the model's width.
SECONDS = Seconds(1e-3, 1e-5, 1e-5 / 24576)
LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def talks(count: int, seed: int, longest: int = 4096) -> list[int]:
    """Lengths as those of public sets for fine-tuning: log-normal, half below 300 tokens, and a heavy tail."""
    draw = random.Random(seed)
    return [min(longest, max(8, int(draw.lognormvariate(5.7, 1.0)))) for _ in range(count)]


def compared(step: Step, rows: list[Row]) -> tuple[Priced, Priced]:
    """As they come, and balanced: the same rows."""
    come, balanced = priced(step, rows, range(step.size)), arranged(step, rows)
    assert sorted(balanced.order) == list(range(step.size))
    assert balanced.seconds <= come.seconds
    assert balanced == priced(step, rows, balanced.order)
    return come, balanced


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_rows_of_a_heavy_tail(ranks: int) -> None:
    """First come, first served: the slowest rank takes much longer than the mean. Balanced: at most 1.05 of it."""
    step = Step(ranks, 32, 1, SECONDS, lengths=LENGTHS)
    pairs = [compared(step, [row(n) for n in talks(step.size, seed)]) for seed in range(4)]
    assert max(balanced.slowest for _, balanced in pairs) <= 1.05
    assert max(come.slowest for come, _ in pairs) > 1.2


def test_packed_rows() -> None:
    """Best fit leaves at most 2 % of a row empty; a ring's seconds are even over ranks within 1.05."""
    lengths = talks(4096, 0)
    rows = best_fit(lengths, 4096)
    documents = [[lengths[i] for i in some] for some in rows]
    full = [row([*d, 4096 - sum(d)] if sum(d) < 4096 else d) for d in documents]
    assert 1 - sum(lengths) / (4096 * len(rows)) <= 0.02
    random.Random(0).shuffle(full)
    for left_out in (True, False):
        step = Step(8, 8, 1, SECONDS, length=4096, left_out=left_out)
        for at in range(0, len(full) - step.size, step.size):
            come, balanced = compared(step, full[at : at + step.size])
            assert balanced.slowest <= (1.05 if left_out else 1 + 1e-9)
            assert come.padding == balanced.padding


def test_microbatches_of_like_rows_have_less_padding() -> None:
    step = Step(4, 4, 4, SECONDS, lengths=LENGTHS)
    for seed in range(4):
        come, balanced = compared(step, [row(n) for n in talks(step.size, seed)])
        assert balanced.padding < come.padding / 1.5


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_meet_in_each_microbatch(seed: int) -> None:
    """Seconds are those of the slowest rank in each microbatch: like microbatches are at the same time."""
    step = Step(8, 8, 1, SECONDS, meet=True, lengths=LENGTHS)
    come, balanced = compared(step, [row(n) for n in talks(step.size, seed)])
    assert balanced.seconds < come.seconds / 1.5
    assert balanced.seconds == pytest.approx(
        sum(max(step.seconds(n, n * n) for n in balanced.lengths[m::8]) for m in range(8))
    )


def test_dealing_is_near_the_best() -> None:
    """Against all ways to deal 8 things to 2 ranks."""
    for seed in range(20):
        draw = random.Random(seed)
        costs = [draw.lognormvariate(0, 1) for _ in range(8)]
        halves = (sum(costs[i] for i in some) for some in itertools.combinations(range(8), 4))
        best = min(max(x, sum(costs) - x) for x in halves)
        ranks = dealt(costs, 2, 4)
        assert sorted(map(len, ranks)) == [4, 4]
        assert sorted(itertools.chain(*ranks)) == list(range(8))
        assert max(sum(costs[i] for i in some) for some in ranks) <= 1.05 * best


def test_seconds_of_a_length() -> None:
    true = Seconds(2e-3, 3e-6, 4e-10)
    assert spread([64, 128, 512, 1024, 2048]) == [64, 1024, 2048]
    found = fitted({n: true(n, n * n) for n in (64, 1024, 2048)})
    assert found(700, 700**2) == pytest.approx(true(700, 700**2), rel=1e-9)
    two = fitted({n: 1e-3 + 2e-6 * n for n in (64, 128)})
    assert (two.by_pair, two(256, 256**2)) == (0.0, pytest.approx(1e-3 + 2e-6 * 256))
    assert fitted({64: 1e-3})(128, 0) == pytest.approx(2e-3)
    flat = fitted({64: 2e-3, 128: 1e-3, 256: 1.5e-3})  # of a step that the host bounds
    assert min(flat.fixed, flat.by_token, flat.by_pair) >= 0
