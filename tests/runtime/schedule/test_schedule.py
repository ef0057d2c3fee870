"""Schedules of pipelines: complete and legal by construction, proven, read and written; broken ones are refused by
name.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from shardc.errors import ShardcError
from shardc.plan.space import Core, choices
from shardc.runtime import schedule
from shardc.runtime.schedule import SCHEDULES, Action, Costs, Link, Maker, Schedule, make, parse, prove
from shardc.spec import Spec
from tests.passes.pipeline.test_pipeline import check, spec

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (3, 2), (3, 3), (3, 7), (4, 4), (4, 9), (5, 3)]
KINDS = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("1f1b", 3),
    ("interleaved", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb-h1", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


def skips(stages: int) -> list[Link]:
    """A chain, and over it long and short jumps, one of them without gradients."""
    found = {(s, s + 1): True for s in range(stages - 1)}
    found |= {(0, t): True for t in range(2, stages, 2)}
    if stages > 2:
        found[0, stages - 1] = False
    return [Link(*pair, gradient) for pair, gradient in found.items()]


# --- what the generators make


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (2, 9), (3, 6), (4, 11), (5, 10)])
def test_dualpipe_v_is_the_order_of_torchs(ranks: int, microbatches: int) -> None:
    made = SCHEDULES["dualpipe-v"].order(2 * ranks, ranks, microbatches)
    for rank, ours in enumerate(made):
        theirs = object.__new__(ScheduleDualPipeV)
        theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
        order = theirs._calculate_single_rank_operations(rank)
        assert parse("\n".join([f"rank 0: {' '.join(map(str, order))}"])).actions == (tuple(ours),)


def test_a_pair_has_one_place_and_a_name_that_is_read_back() -> None:
    text = "rank 0: 0F0 0F1+0B0 0B1"
    made = parse(text)
    assert str(made).splitlines()[1] == text
    assert made.actions[0][1] == schedule.pair(Action("F", 0, 1), Action("B", 0, 0))
    assert prove(made).live == (2,)
    assert made.pairs() == (("FB", 0, 0),)
    line = schedule.timeline(made, schedule.Costs.even(1))
    assert [s.end - s.start for s in line.slots[0]] == [1, 3, 2]
    cheap = replace(schedule.Costs.even(1), pairs={("FB", 0, 0): 2.5})
    assert schedule.timeline(made, cheap).end == line.end - 0.5
    assert schedule.forward_only(made).actions == ((Action("F", 0, 0), Action("F", 0, 1)),)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0+0B0 0F1 0B1"], "0B0 runs beside 0F0"),
        (["0F0 1F0 0F1+1B0 1F1+0B0 0F1+1B1 0B1"], "0F1 occurs twice"),
        (["0F0 0F1+1B0 0B0 0B1", "1F0 1F1 1B1"], "1F0 is on rank 1, and stage 1 is rank 0's"),
        # 0F1 is held up by its partner 0B0, for which rank 1 wants 0F1
        (["0F0 0F1+0B0 0B1", "1F0 1F1 1B0 1B1"], "a deadlock: rank 0 at 0F1+0B0 waits for 1B0"),
    ],
)
def test_wrong_pairs_are_refused(rows: list[str], said: str) -> None:
    text = "\n".join(f"rank {r}: {row}" for r, row in enumerate(rows))
    with pytest.raises(ShardcError, match=re.escape(said)):
        prove(parse(text))


@pytest.mark.parametrize(
    ("name", "v"), [(name, v) for name, maker in SCHEDULES.items() for v in maker.per_rank], ids=lambda x: str(x)
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_schedule_waits_and_keeps_as_the_planner_says(ranks: int, name: str, v: int) -> None:
    maker, m = SCHEDULES[name], 4 * ranks
    made = make(name, stages=v * ranks, ranks=ranks, microbatches=m)
    kept = [n / v for n in prove(made).live]
    first, last = (maker.kept(ranks, v, m, end) for end in (True, False))
    assert kept == pytest.approx([first + (last - first) * r / (ranks - 1) for r in range(ranks)])
    for weights in (1.0, 0.5):  # of a backward of 2
        line = schedule.timeline(made, Costs.even(v * ranks, 1 / v, (2 - weights) / v, weights / v))
        idle = line.end - 3 * m
        # a pair's halves fill some of what is left where backward's halves differ
        near = 0.3 if maker.pairs and weights < 1.0 else 1e-9
        assert maker.idle(ranks, v, m, 1.0, 2.0, weights) == pytest.approx(idle, rel=near)
    assert maker.pairs == (name == "dualpipe-v")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("name", "v"), KINDS)
def test_every_schedule_is_proven(name: str, v: int, sizes: tuple[int, int]) -> None:
    ranks, m = sizes
    for edges in (None, skips(ranks * v), []):
        made = make(name, stages=ranks * v, ranks=ranks, microbatches=m, edges=edges)
        assert (made.name, made.stages, made.ranks, made.microbatches) == (name, ranks * v, ranks, m)
        assert prove(made, edges).live == tuple(schedule.live(each) for each in made.actions)
        assert parse(str(made)) == made
        for rank, each in enumerate(made.actions):
            assert each[-1] == Action("STEP")
            assert Counter(a.kind for a in each)["REDUCE"] == v
            assert {a.stage for a in each} - {-1} == set(made.stages_of(rank))
        forward = schedule.forward_only(made, edges)
        prove(forward, edges, training=False)
        assert {a.kind for each in forward.actions for a in each} <= {"F", "SEND_F", "RECV_F"}


def test_placement_and_texts() -> None:
    assert make("interleaved", stages=6, ranks=3, microbatches=2).placement == (0, 1, 2, 0, 1, 2)
    assert make("zb-v", stages=6, ranks=3, microbatches=2).placement == (0, 1, 2, 2, 1, 0)
    assert (
        str(make("1f1b", stages=2, ranks=2, microbatches=3))
        == "# 1f1b: 2 stages on 2 ranks, 3 microbatches\nrank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0F2"
        " 0SEND_F2>1 0RECV_B1<1 0B1 0RECV_B2<1 0B2 0REDUCE STEP\nrank 1: 1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0"
        " 1F1 1RECV_F2<0 1B1 1SEND_B1>0 1F2 1B2 1SEND_B2>0 1REDUCE STEP\n"
    )


def test_backward_is_whole_where_nobody_waits_for_half_of_it() -> None:
    kinds = [
        {a.kind for a in each if a.stage == s}
        for s, each in enumerate(make("zb-h1", stages=3, ranks=3, microbatches=4).actions)
    ]
    assert ["I" in k for k in kinds] == [False, True, True]
    assert ["B" in k for k in kinds] == [True, False, False]


def test_a_value_goes_straight_to_where_it_is_used() -> None:
    made = make("1f1b", stages=4, ranks=4, microbatches=1, edges=[(0, 1), (1, 2), (2, 3), Link(0, 3, gradient=False)])
    text = str(made)
    assert "0SEND_F0>3" in text
    assert "3RECV_F0<0" in text
    assert "3SEND_B0>0" not in text
    assert "1SEND_F0>3" not in text


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    made = make("zb-v", stages=2, ranks=1, microbatches=3)
    assert not any(a.peer >= 0 for a in made.actions[0])


def test_receives_are_posted_ahead() -> None:
    """What arrives while a rank computes was posted before that began."""
    last = make("1f1b", stages=2, ranks=2, microbatches=8).actions[1]
    assert last.index(Action("RECV_F", 1, 3, 0)) < last.index(Action("B", 1, 2)) < last.index(Action("F", 1, 3))


def test_large_ones_are_proven_in_seconds() -> None:
    made = make("1f1b", stages=64, ranks=64, microbatches=512)
    assert prove(made).live == tuple(64 - i for i in range(64))


# --- no deadlock, whatever is buffered


def run(s: Schedule, capacity: int, rng: random.Random) -> None:
    """All ranks in a random interleaving. A send ends when there is room: capacity 0 asks for a receive that waits for
    it.

    Messages of an ordered pair of ranks come in the order in which they were sent; a receive blocks until its message
    is there."""
    queues: dict[tuple[int, int], deque[Action]] = {}
    at = [0] * s.ranks
    done: set[Action] = set()
    while any(i < len(each) for i, each in zip(at, s.actions, strict=True)):
        ready = [r for r in range(s.ranks) if at[r] < len(s.actions[r]) and _can(s, r, at, queues, capacity)]
        assert ready, "a deadlock"
        rank = rng.choice(ready)
        a = s.actions[rank][at[rank]]
        at[rank] += 1
        if a.kind in ("SEND_F", "SEND_B"):
            assert (
                a._replace(kind="F" if a.kind == "SEND_F" else "B", peer=-1) in done
                or a._replace(kind="I", peer=-1) in done
            )
            queues.setdefault((rank, s.placement[a.peer]), deque()).append(a)
        elif a.kind in ("RECV_F", "RECV_B"):
            assert queues[s.placement[a.peer], rank].popleft() == a.other_end()
        done.update(a.parts)


def _can(s: Schedule, rank: int, at: list[int], queues: dict[tuple[int, int], deque[Action]], capacity: int) -> bool:
    a = s.actions[rank][at[rank]]
    if a.kind in ("SEND_F", "SEND_B"):
        peer = s.placement[a.peer]
        theirs = s.actions[peer]
        waits = at[peer] < len(theirs) and theirs[at[peer]] == a.other_end()
        return len(queues.get((rank, peer), ())) < capacity or (waits and not queues.get((rank, peer)))
    return a.peer < 0 or bool(queues.get((s.placement[a.peer], rank)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([0, 1, 2, 100]),
    st.integers(0, 999),
    st.booleans(),
)
def test_no_deadlock_under_any_buffering(
    kind: tuple[str, int], ranks: int, m: int, capacity: int, seed: int, skipping: bool
) -> None:
    name, v = kind
    run(
        make(name, stages=ranks * v, ranks=ranks, microbatches=m, edges=skips(ranks * v) if skipping else None),
        capacity,
        random.Random(seed),
    )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 4), st.integers(1, 9))
def test_both_ranks_of_a_pair_see_one_order_in_both_directions(kind: tuple[str, int], ranks: int, m: int) -> None:
    """What NCCL needs, whose sends and receives between two ranks run one after the other."""
    name, v = kind
    made = make(name, stages=ranks * v, ranks=ranks, microbatches=m, edges=skips(ranks * v))
    for a in range(ranks):
        for b in range(a):
            one = [x for x in made.actions[a] if x.peer >= 0 and made.placement[x.peer] == b]
            other = [x.other_end() for x in made.actions[b] if x.peer >= 0 and made.placement[x.peer] == a]
            assert one == other


# --- text

_NONE = st.just(-1)
_ALONE = st.just((-1, -1))
_STAGE, _MICROBATCH = st.integers(0, 11), st.integers(0, 99)
_ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(["F", "B", "I", "W"]), _STAGE, _MICROBATCH, _NONE, _ALONE),
    st.builds(Action, st.sampled_from(["FB", "FF"]), _STAGE, _MICROBATCH, _NONE, st.tuples(_STAGE, _MICROBATCH)),
    st.builds(Action, st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]), _STAGE, _MICROBATCH, _STAGE, _ALONE),
    st.builds(Action, st.just("REDUCE"), _STAGE, _NONE, _NONE, _ALONE),
    st.just(Action("STEP")),
)


@settings(deadline=None)
@given(st.lists(st.lists(_ACTIONS), min_size=1, max_size=5).filter(any))
def test_any_schedule_prints_and_parses_back(actions: list[list[Action]]) -> None:
    made = Schedule.of("mine", actions)
    assert parse(str(made)) == made


def test_a_file_may_wrap_lines_and_have_remarks() -> None:
    made = parse("# mine\nrank 0: 0F0 0F1  # warm up\n   0B0 0B1\n\nrank 1:\n 1F0 1B0 1F1 1B1\n")
    assert [" ".join(map(str, each)) for each in made.actions] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert made.where[1][2] == "schedule:6:10"
    prove(made)


def test_torch_csv_is_read() -> None:
    """What torch.distributed.pipelining's _dump_csv writes: a line a rank, empty cells where it waits."""
    made = parse("0F0,0F1,,,0B0,,0B1\n,1F0,1I0,1W0,1F1,1B1,\n")
    assert made.placement == (0, 1)
    prove(made)


@pytest.mark.parametrize(
    ("text", "where", "what", "fix"),
    [
        ("", "schedule", "has no actions", "rank 0: 0F0 0B0"),
        ("rank 0: 0F0 0X0", "schedule:1:13", "'0X0' is not an action", "2F0, 2B0"),
        ("rank 0: F0", "schedule:1:9", "'F0' is not an action", "stage, kind, microbatch"),
        ("rank 0: 0F", "schedule:1:9", "'0F' is not an action", "stage, kind, microbatch"),
        ("rank 0: 0F0>1", "schedule:1:9", "'0F0>1' is not an action", "write 0F0"),
        ("rank 0:\n  0SEND_F0", "schedule:2:3", "'0SEND_F0' is not an action", "write 0SEND_F0>N"),
        ("rank 0: 0SEND_F0<1", "schedule:1:9", "'0SEND_F0<1' is not an action", "write 0SEND_F0>N"),
        ("rank 0: 1RECV_F0>0", "schedule:1:9", "'1RECV_F0>0' is not an action", "write 1RECV_F0<N"),
        ("rank 1: 0F0", "schedule:1:1", "rank 1 comes after 0 ranks", "`rank 0:`"),
        ("rank 0: 0F0 0B0\nrank 0: 1F0", "schedule:2:1", "rank 0 comes after 1 ranks", "`rank 1:`"),
        ("0F0\nrank 0: 0B0", "schedule:1:1", "0F0 comes before the first rank", "`rank 0:`"),
    ],
)
def test_what_does_not_parse(text: str, where: str, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        parse(text)
    first = e.value.errors[0]
    assert first.where == where
    assert what in first.what
    assert fix in first.fix


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ShardcError) as e:
        parse("rank 0: 0F0 x\nrank 1: y 1F0")
    assert [x.where for x in e.value.errors] == ["schedule:1:13", "schedule:2:9"]


# --- broken schedules

EDGES = [Link(0, 1), Link(1, 2), Link(0, 2, gradient=False)]
BASES = {
    "1f1b": make("1f1b", stages=3, ranks=3, microbatches=4, edges=EDGES),
    "zb-h1": make("zb-h1", stages=3, ranks=3, microbatches=4, edges=EDGES),
    "bare": parse(
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\nrank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\nrank 2: 2F0 2B0 2F1 2B1 2F2"
        " 2B2 2F3 2B3\n",
        "bare",
    ),
    "v": parse("rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n", "v"),
}
Lists = list[list[str]]
Edit = Callable[[Lists], None]


def _find(lists: Lists, a: str) -> tuple[int, int]:
    return next((r, i) for r, each in enumerate(lists) for i, x in enumerate(each) if x == a)


def drop(a: str) -> Edit:
    def edit(lists: Lists) -> None:
        r, i = _find(lists, a)
        del lists[r][i]

    return edit


def add(a: str, behind: str) -> Edit:
    def edit(lists: Lists) -> None:
        r, i = _find(lists, behind)
        lists[r].insert(i + 1, a)

    return edit


def swap(a: str, b: str) -> Edit:
    def edit(lists: Lists) -> None:
        (r, i), (q, j) = _find(lists, a), _find(lists, b)
        lists[r][i], lists[q][j] = b, a

    return edit


def early(a: str, b: str) -> Edit:
    """a right before b."""

    def edit(lists: Lists) -> None:
        r, i = _find(lists, a)
        del lists[r][i]
        r, i = _find(lists, b)
        lists[r].insert(i, a)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(lists: Lists) -> None:
        for e in edits:
            e(lists)

    return edit


BROKEN: list[tuple[str, str, Edit, str]] = [
    # missing
    ("a forward", "1f1b", drop("1F2"), "1F2 is missing"),
    ("a forward of a bare one", "bare", drop("1F2"), "1F2 is missing"),
    ("a backward", "1f1b", drop("2B3"), "2B3 is missing"),
    ("gradients of inputs", "zb-h1", drop("1I2"), "1I2 is missing"),
    ("gradients of weights", "zb-h1", drop("2W3"), "2W3 is missing"),
    ("a send", "1f1b", drop("0SEND_F1>1"), "0SEND_F1>1 is missing"),
    ("a receive", "1f1b", drop("1RECV_F1<0"), "1RECV_F1<0 is missing"),
    ("a send of gradients", "1f1b", drop("2SEND_B0>1"), "2SEND_B0>1 is missing"),
    ("a receive of gradients", "1f1b", drop("0RECV_B3<1"), "0RECV_B3<1 is missing"),
    ("a send over a skip", "1f1b", drop("0SEND_F3>2"), "0SEND_F3>2 is missing"),
    ("both ends over a skip", "1f1b", both(drop("0SEND_F3>2"), drop("2RECV_F3<0")), "2RECV_F3<0 is missing"),
    ("a reduction", "1f1b", drop("1REDUCE"), "1REDUCE is missing"),
    ("a step", "1f1b", drop("STEP"), "rank 0: STEP is missing"),
    # doubled
    ("a forward twice", "1f1b", add("1F2", "1F2"), "1F2 occurs twice"),
    ("a backward twice", "bare", add("0B1", "0B3"), "0B1 occurs twice"),
    ("a send twice", "1f1b", add("0SEND_F1>1", "0SEND_F1>1"), "0SEND_F1>1 occurs twice"),
    ("a receive twice", "1f1b", add("1RECV_F1<0", "1RECV_F1<0"), "1RECV_F1<0 occurs twice"),
    ("a reduction twice", "1f1b", add("1REDUCE", "1REDUCE"), "1REDUCE occurs twice"),
    ("a step twice", "1f1b", add("STEP", "STEP"), "STEP of rank 0 is not its last action"),
    ("a backward whole and in halves", "zb-h1", add("1B2", "1W2"), "1B2 repeats 1I2"),
    ("a backward and half of it", "1f1b", add("1W2", "1B2"), "1W2 repeats 1B2"),
    # swapped
    ("backward and forward", "1f1b", swap("2F1", "2B1"), "2B1 comes before 2F1"),
    ("weights and inputs", "zb-h1", swap("2I1", "2W1"), "2W1 comes before 2I1"),
    (
        "two receives",
        "1f1b",
        swap("2RECV_F0<1", "2RECV_F0<0"),
        "rank 0 sends 0SEND_F0>2 where rank 2 receives 2RECV_F1<0",
    ),
    ("two receives of one pair", "1f1b", swap("1RECV_F0<0", "1RECV_F1<0"), "1RECV_F0<0 comes|receives 1RECV_F1<0"),
    ("two sends of one pair", "bare", swap("2B0", "2B1"), "2B0 comes before|2B1 comes before 2F1"),
    ("two stages of one rank", "v", swap("1F0", "2F0"), "2F0 comes before 1F0"),
    ("backwards of two stages of one rank", "v", swap("2B1", "1B1"), "1B1 comes before 2B1"),
    # crossed
    (
        "an action of another rank",
        "bare",
        both(drop("1F1"), add("1F1", "2B0")),
        "1F1 is on rank 2, and stage 1 is rank 1's",
    ),
    ("a send of another rank", "1f1b", both(drop("0SEND_F1>1"), add("0SEND_F1>1", "2F1")), "0SEND_F1>1 is on rank 2"),
    ("a send to nobody", "1f1b", add("1SEND_F0>0", "1F0"), "1SEND_F0>0: stage 1 sends no values to stage 0"),
    (
        "gradients over a skip that has none",
        "1f1b",
        add("2SEND_B0>0", "2B0"),
        "2SEND_B0>0: stage 2 sends no gradients to stage 0",
    ),
    ("gradients forward", "1f1b", add("0SEND_B0>1", "0B0"), "0SEND_B0>1: stage 0 sends no gradients to stage 1"),
    ("a send to oneself", "1f1b", add("1SEND_F0>1", "1F0"), "1SEND_F0>1: stage 1 sends no values to stage 1"),
    ("two orders of two ranks", "bare", both(swap("0F0", "0F3"), swap("2B0", "2B1")), "comes before"),
    # early
    ("a forward before its values", "1f1b", early("2F0", "2RECV_F0<1"), "2F0 comes before 2RECV_F0<1"),
    ("a backward before its gradients", "1f1b", early("1B1", "1RECV_B1<2"), "1B1 comes before 1RECV_B1<2"),
    ("a send before its forward", "1f1b", early("1SEND_F1>2", "1F1"), "1SEND_F1>2 comes before 1F1"),
    ("a send before its backward", "zb-h1", early("2SEND_B1>1", "2I1"), "2SEND_B1>1 comes before 2I1"),
    ("a backward before its forward", "bare", early("2B2", "2F2"), "2B2 comes before 2F2"),
    ("weights before inputs", "zb-h1", early("1W0", "1I0"), "1W0 comes before 1I0"),
    ("a reduction", "1f1b", early("2REDUCE", "2B3"), "2REDUCE comes before 2B3"),
    ("a reduction before the last weights", "zb-h1", early("2REDUCE", "2W3"), "2REDUCE comes before 2W3"),
    ("a step", "1f1b", early("STEP", "0B3"), "STEP of rank 0 is not its last action"),
    (
        "a backward before what it waits for",
        "bare",
        early("0B0", "0F1"),
        "rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
    ),
    (
        "a backward before the forward that its gradients wait for",
        "bare",
        both(early("0B0", "0F1"), early("2F1", "2B0")),
        "a deadlock: .*0B0",
    ),
    (
        "a receive before the send that it waits for",
        "1f1b",
        early("0RECV_B0<1", "0SEND_F0>1"),
        "a deadlock: .*0RECV_B0<1",
    ),
]


@pytest.mark.parametrize(("base", "edit", "what"), [pytest.param(*row[1:], id=f"{row[1]}: {row[0]}") for row in BROKEN])
def test_broken_schedules_are_refused(base: str, edit: Edit, what: str) -> None:
    edges = None if base in ("bare", "v") else EDGES
    prove(BASES[base], edges)
    lists = [[str(a) for a in each] for each in BASES[base].actions]
    edit(lists)
    broken = parse("\n".join(f"rank {r}: {' '.join(each)}" for r, each in enumerate(lists)), "broken")
    with pytest.raises(ShardcError) as e:
        prove(broken, edges)
    assert re.search(what, str(e.value)), str(e.value)
    assert all(x.where.startswith("broken") and x.fix for x in e.value.errors)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BASES)), st.integers(0, 9999), st.integers(1, 4), st.sampled_from([0, 1, 100]))
def test_what_is_proven_runs(base: str, seed: int, edits: int, capacity: int) -> None:
    """Whatever is moved, dropped, doubled or put on another rank: it is refused, or it runs under any buffering."""
    rng = random.Random(seed)
    lists = [list(each) for each in BASES[base].actions]
    for _ in range(edits):
        rank = rng.randrange(len(lists))
        here = lists[rank]
        i = rng.randrange(len(here) - 1)
        how = rng.randrange(8)
        if how == 0:
            del here[i]
        elif how == 1:
            here.insert(rng.randrange(len(here)), here[i])
        elif how == 2:
            lists[rng.randrange(len(lists))].insert(0, here.pop(i))
        else:  # most of what is legal is near
            here.insert(min(i + rng.randrange(1, 4), len(here) - 1), here.pop(i))
    edges = None if base in ("bare", "v") else EDGES
    broken = Schedule.of("broken", lists)
    try:
        prove(broken, edges)
    except ShardcError:
        return
    run(schedule.fill(broken, edges), capacity, rng)


def test_errors_have_the_place_in_the_file() -> None:
    with pytest.raises(ShardcError) as e:
        prove(parse("rank 0: 0F0 0F1\n  0B0 0B1 0B0", "mine.txt"))
    assert e.value.where == "mine.txt:2:11"
    made = BASES["1f1b"]
    with pytest.raises(ShardcError, match=r"1f1b: rank 2, action 3: .* occurs twice"):
        prove(
            replace(
                made, actions=(*made.actions[:2], (*made.actions[2][:2], made.actions[2][1], *made.actions[2][2:]))
            ),
            EDGES,
        )


def test_actions_that_cannot_be() -> None:
    made = Schedule("mine", 1, (0,), ((Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 3)),))
    with pytest.raises(ShardcError, match="0F3 with 1 stages and 1 microbatches"):
        prove(made)
    with pytest.raises(ShardcError, match="0B0 in a schedule that only runs forward"):
        prove(BASES["bare"], training=False)
    with pytest.raises(ShardcError, match="an edge from stage 2 to stage 1 of 3"):
        prove(BASES["bare"], [(2, 1)])


def test_of_many_mistakes_some_are_shown() -> None:
    with pytest.raises(ShardcError) as e:
        prove(parse("rank 0: 0F99 0B99"))
    assert len(e.value.errors) == 21
    assert "and 178 more" in e.value.errors[-1].what


# --- what a spec asks for


def test_a_schedule_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0\n")
    sizes = {"stages": 2, "ranks": 2, "microbatches": 2, "edges": [(0, 1)]}
    made = schedule.load(str(tmp_path / "mine.txt"), **sizes)  # type: ignore[arg-type]
    assert [str(a) for a in made.actions[1] if a.kind == "B"] == ["1B1", "1B0"]
    assert Action("SEND_B", 1, 1, 0) in made.actions[1]
    assert made.actions[0][-1] == Action("STEP")
    again = schedule.load("mine.txt", **sizes, where=f"{tmp_path}/spec.yaml:4:1")  # type: ignore[arg-type]  # beside the spec
    assert again.actions == made.actions
    monkeypatch.chdir(tmp_path)
    assert schedule.load("mine.txt", **sizes).actions == made.actions  # type: ignore[arg-type]
    (tmp_path / "full.txt").write_text(str(made))
    full = schedule.load("full.txt", **sizes)  # type: ignore[arg-type]
    assert full.actions == made.actions
    assert full.name == "full.txt"


@pytest.mark.parametrize(
    ("asked", "what", "fix"),
    [
        ("two.txt", "two.txt has 2 microbatches, but the spec needs 4", "change the number of microbatches"),
        ("stages.txt", "stages.txt has 3 stages, but the spec needs 2", "stages"),
        ("ranks.txt", "ranks.txt has 1 ranks, but the spec needs 2", "ranks"),
        ("gone.txt", "the schedule gone.txt cannot be read", "gpipe, 1f1b"),
        ("1f1c", "the schedule 1f1c cannot be read", "gpipe, 1f1b"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, what: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.txt").write_text("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n")
    Path("stages.txt").write_text("rank 0: 0F0 0B0 2F0 2B0\nrank 1: 1F0 1B0\n")
    Path("ranks.txt").write_text("rank 0: 0F0 1F0 1B0 0B0\n")
    with pytest.raises(ShardcError) as e:
        schedule.load(asked, stages=2, ranks=2, microbatches=4, edges=[(0, 1)], where="spec.yaml:4:1")
    assert e.value.where == "spec.yaml:4:1"
    assert what in e.value.what
    assert fix in e.value.fix


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "m", "what"),
    [
        ("1f1c", 2, 2, 2, "unknown schedule '1f1c'"),
        ("1f1b", 3, 2, 2, "3 stages on 2 ranks with 2 microbatches"),
        ("gpipe", 2, 2, 0, "2 stages on 2 ranks with 0 microbatches"),
        ("zb-v", 2, 2, 2, "zb-v has 2 stages on each rank, not 1"),
        ("zb-v", 6, 2, 2, "zb-v has 2 stages on each rank, not 3"),
    ],
)
def test_sizes_that_a_schedule_cannot_have(name: str, stages: int, ranks: int, m: int, what: str) -> None:
    with pytest.raises(ShardcError) as e:
        make(name, stages=stages, ranks=ranks, microbatches=m, where="spec.yaml:4:1")
    assert what in e.value.what
    assert e.value.where == "spec.yaml:4:1"
    assert e.value.fix


# --- a new one


def breadth_first(stages: int, ranks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, all gradients of inputs, all gradients of weights."""
    each = range(microbatches)
    return [[Action(kind, rank, m) for kind in ("F", "I", "W") for m in each] for rank in range(ranks)]


def planned(keep: Literal["none", "full"]) -> set[str]:
    """The schedules that a planner tries for two stages."""
    return {c.schedule for c in choices(Core(checkpoint=keep), devices=2, batch=4, layers=2) if c.pp == 2}


def test_a_new_schedule_is_a_file_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in SCHEDULES is all: specs take the name, the planner tries it, a program runs by it."""
    monkeypatch.setitem(SCHEDULES, "breadth-first", Maker(breadth_first))
    with pytest.raises(ShardcError) as caught:
        Spec.load(spec({"pp": 2}, 2, schedule="breadth-frist"))
    assert "did you mean 'breadth-first'" in str(caught.value)
    assert planned("none") == {"gpipe", "1f1b", "zb-h1", "breadth-first"}  # the others have more stages than layers
    assert planned("full") == {"gpipe", "1f1b"}  # a backward in two halves computes nothing again
    program = check("gpt", spec({"pp": 2}, 2, schedule="breadth-first"))  # equal to one device
    assert program.schedule is not None
    assert (program.schedule.name, program.schedule.stages) == ("breadth-first", 2)
