"""Where rows go, by predicted seconds: pure functions."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from shardc.features.rows.arrangement import Priced, Row, Step, arranged, as_they_come, dealt, priced, row
from shardc.features.rows.seconds import OfSizes, Seconds, fitted, of_sizes, priced_sizes, spread
from shardc.features.text.packing import best_fit
from shardc.runtime.data.ragged import Size

#: A layer's linear part grows with tokens, attention with pairs: as much at 6 times the model's width.
SECONDS = Seconds(1e-3, 1e-5, 1e-5 / 24576)
OF_SIZES = OfSizes({1: SECONDS})
SIZES = tuple(Size(n) for n in (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096))


def talks(count: int, seed: int, longest: int = 4096) -> list[int]:
    """Lengths as those of public sets for fine-tuning: log-normal, half below 300 tokens, and a heavy tail."""
    draw = random.Random(seed)
    return [min(longest, max(8, int(draw.lognormvariate(5.7, 1.0)))) for _ in range(count)]


def compared(step: Step, rows: list[Row]) -> tuple[Priced, Priced]:
    """As they come, and balanced: the same rows."""
    come, balanced = as_they_come(step, rows), arranged(step, rows)
    assert sorted(balanced.order) == list(range(step.size))
    assert balanced.seconds <= come.seconds
    assert balanced == priced(step, rows, balanced.groups)
    assert all(
        max(rows[i].length for i in cell.rows) <= cell.size.length for cells in balanced.groups for cell in cells
    )
    return come, balanced


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_rows_of_a_heavy_tail(ranks: int) -> None:
    """First come, first served: the slowest rank takes much longer than the mean. Balanced: at most 1.05 of it."""
    step = Step(ranks, 32, 1, OF_SIZES, sizes=SIZES)
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
        step = Step(8, 8, 1, OF_SIZES, length=4096, left_out=left_out)
        for at in range(0, len(full) - step.size, step.size):
            come, balanced = compared(step, full[at : at + step.size])
            assert balanced.slowest <= (1.05 if left_out else 1 + 1e-9)
            assert come.padding == balanced.padding


def test_microbatches_of_like_rows_have_less_padding() -> None:
    step = Step(4, 4, 4, OF_SIZES, sizes=SIZES)
    for seed in range(4):
        come, balanced = compared(step, [row(n) for n in talks(step.size, seed)])
        assert balanced.padding < come.padding / 1.5


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_meet_in_each_microbatch(seed: int) -> None:
    """Seconds are those of the slowest rank in each microbatch: like microbatches are at the same time."""
    step = Step(8, 8, 1, OF_SIZES, meet=True, sizes=SIZES)
    come, balanced = compared(step, [row(n) for n in talks(step.size, seed)])
    assert balanced.seconds < come.seconds / 1.5
    assert balanced.seconds == pytest.approx(sum(max(cells[m].seconds for cells in balanced.groups) for m in range(8)))


@pytest.mark.parametrize("meet", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_short_rows_are_on_fewer_ranks(ranks: int, meet: bool) -> None:
    """Four ranks share a row of 4,096 tokens; of up to 1,024 tokens each takes one, in a quarter of the seconds.

    The sum of seconds is the least of all ways to cut the sorted rows, which a search in another form finds.
    """
    alone = Seconds(1e-3, 1e-5 / 4, 1e-5 / 24576 / 4)  # of a row on four ranks, that send nothing to each other
    several = Seconds(1e-3, 1e-5, 1e-5 / 24576)
    seconds = OfSizes({1: Seconds(2e-3, alone.by_token, alone.by_pair), 4: several})
    sizes = (*SIZES, *(s._replace(times=4) for s in SIZES if s.length * 4 <= 4096))
    step, plain = Step(ranks, 8, 1, seconds, meet, sizes), Step(ranks, 8, 1, seconds, meet, SIZES)
    for seed in range(4):
        rows = [row(n) for n in talks(step.size, seed)]
        _, balanced = compared(step, rows)
        assert balanced.seconds < arranged(plain, rows).seconds
        assert len({len(cells) for cells in balanced.groups}) == 1
        cells = step.cells(rows, sorted(range(len(rows)), key=lambda i: -rows[i].length))
        lengths = sorted((r.length for r in rows), reverse=True)
        assert sum(cell.seconds for cell in cells) == pytest.approx(least(step, lengths, 0))


def least(step: Step, lengths: list[int], number: int, known: dict[tuple[int, int], float] | None = None) -> float:
    """The least seconds of rows in this order, after `number` microbatches, if groups get equally many."""
    known = {} if known is None else known
    key = len(lengths), number % step.ranks
    if not lengths:
        return 0.0 if number % step.ranks == 0 else math.inf
    if key not in known:
        known[key] = min(
            step.seconds(size, size.length**2) + least(step, lengths[size.times :], number + 1, known)
            for size in step.sizes
            if size.length >= lengths[0] and size.times <= len(lengths)
        )
    return known[key]


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


def test_seconds_of_sizes() -> None:
    """Fitted for each number of rows alone."""
    sizes = [*map(Size, (64, 128, 512, 1024, 2048)), Size(64, 4), Size(512, 4)]
    at = priced_sizes(sizes)
    assert at == [Size(64), Size(1024), Size(2048), Size(64, 4), Size(512, 4)]
    found = of_sizes({s: s.times * 1e-3 + s.times * 2e-6 * s.length for s in at})
    assert [found(s, s.length**2) for s in sizes] == pytest.approx([s.times * (1e-3 + 2e-6 * s.length) for s in sizes])


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
