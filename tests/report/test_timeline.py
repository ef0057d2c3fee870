"""Timelines of schedules: bubbles and live activations are those of theory; texts show what the timeline says."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from shardc.report import timeline as drawn
from shardc.runtime.schedule import Action, Costs, Link, Timeline, make, parse, timeline
from tests.cli.test_cli import call, files, flat

__all__ = ["files"]


def clock(name: str, ranks: int, m: int, v: int = 1, costs: Costs | None = None) -> Timeline:
    return timeline(make(name, stages=ranks * v, ranks=ranks, microbatches=m), costs)


# --- theory


@pytest.mark.parametrize("m", [1, 3, 4, 9])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_gpipe_and_1f1b(p: int, m: int) -> None:
    """Activations of m microbatches, and of min(m, p - i) on rank i; (p-1)/(m+p-1) of the time is bubble, on every
    rank.
    """
    gpipe, one = clock("gpipe", p, m), clock("1f1b", p, m)
    assert gpipe.live == (m,) * p
    assert one.live == tuple(min(m, p - i) for i in range(p))
    for t in (gpipe, one):
        assert t.end == 3 * (m + p - 1)
        assert [t.bubble(r) for r in range(p)] == pytest.approx([(p - 1) / (m + p - 1)] * p)
        assert t.bubble() == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 8, 3), (3, 9, 4)])
def test_interleaved_divides_the_time_of_the_bubble_by_v(p: int, m: int, v: int) -> None:
    """Stages are a v-th of those of 1f1b. (p-1)/v of (m + (p-1)/v); live: Megatron-LM's warm-up and one more."""
    t = clock("interleaved", p, m, v, Costs.even(p * v, 1 / v, 1 / v, 1 / v))
    one = clock("1f1b", p, m)
    assert t.end - 3 * m == pytest.approx((one.end - 3 * m) / v)
    assert t.bubble() == pytest.approx((p - 1) / v / (m + (p - 1) / v))
    assert t.live == tuple(min((v - 1) * p + 2 * (p - 1 - i) + 1, m * v) for i in range(p))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 3, 2), (4, 9, 2), (4, 5, 3), (3, 7, 2)])
def test_interleaved_in_rounds_that_are_not_whole(p: int, m: int, v: int) -> None:
    """No worse than with the microbatches that would fill the last round; better than 1f1b where there are several
    rounds.
    """
    t = clock("interleaved", p, m, v, Costs.even(p * v, 1 / v, 1 / v, 1 / v))
    assert t.end <= 3 * (-(-m // p) * p) + 3 * (p - 1) / v
    assert max(t.live) <= (v - 1) * p + 2 * (p - 1) + 1


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 9), (4, 4), (4, 8), (8, 9)])
def test_zb_h1_has_a_third_of_the_bubble_and_the_memory_of_1f1b(p: int, m: int) -> None:
    t, one = clock("zb-h1", p, m), clock("1f1b", p, m)
    assert t.end - 3 * m == p - 1 == (one.end - 3 * m) / 3
    assert t.bubble() < one.bubble()
    assert t.live == (p,) * p
    assert max(t.live) == max(one.live)
    two = clock("zb-h1", p, 2 * p, 2)
    assert two.bubble() < clock("interleaved", p, 2 * p, 2).bubble()


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (2, 8), (4, 7), (4, 12), (8, 32)])
def test_zb_v_never_waits_between_first_and_last(p: int, m: int) -> None:
    """With m >= 2p-1 and F, I, W alike. No more activations than 1f1b's first rank, counted in half stages."""
    t = clock("zb-v", p, m, 2)
    for rank, slots in enumerate(t.slots):
        assert slots[0].start == rank
        assert all(a.end == b.start for a, b in pairwise(slots))
    assert t.end == 6 * m + p - 1
    assert max(t.live) <= 2 * p
    assert t.bubble() < clock("zb-h1", p, m).bubble() or p == 1


@pytest.mark.parametrize(("p", "m"), [(3, 2), (4, 3), (8, 1)])
def test_zero_bubble_with_few_microbatches_is_no_slower_than_1f1b(p: int, m: int) -> None:
    one = clock("1f1b", p, m).end
    assert clock("zb-h1", p, m).end <= one
    assert clock("zb-v", p, m, 2, Costs.even(2 * p, 0.5, 0.5, 0.5)).end <= one


# --- costs


def test_a_slow_stage_and_slow_links_are_waited_for() -> None:
    made = make("1f1b", stages=2, ranks=2, microbatches=2)
    t = timeline(made, Costs((1, 3), (1, 3), (1, 3), {(0, 1): 0.5}))
    assert [(str(s.action), s.start, s.end) for s in t.slots[1]] == [
        ("1F0", 1.5, 4.5),
        ("1B0", 4.5, 10.5),
        ("1F1", 10.5, 13.5),
        ("1B1", 13.5, 19.5),
    ]
    assert [(str(s.action), s.start, s.end) for s in t.slots[0]][-2:] == [("0B0", 11.0, 13.0), ("0B1", 20.0, 22.0)]
    assert t.busy(0) == 6
    assert t.bubble(0) == pytest.approx(16 / 22)
    assert t.bubble() == pytest.approx(1 - (6 + 18) / 44)


def test_single_actions_take_longer_and_ranks_begin_late() -> None:
    """The last backward sums gradients; the first forwards wait for gathers, which are under way on both ranks."""
    made = make("1f1b", stages=2, ranks=2, microbatches=3)
    plain = timeline(made, Costs.even(2))
    longer = Costs((1, 1), (1, 1), (1, 1), single={("B", 0, 2): 5.0}, begin=(0.25, 1.0))
    t = timeline(made, longer)
    assert [s.start for s in t.slots[0]][:2] == [0.25, 1.25]
    assert t.slots[1][0].start == 1.25
    assert t.end == plain.end + 0.25 + 3.0
    assert timeline(made, Costs((1, 1), (1, 1), (1, 1), begin=(0.25, 2.0))).slots[1][0].start == 2.0


def test_skips_and_links_without_gradients() -> None:
    edges = [Link(0, 2, gradient=False), Link(1, 2)]
    made = make("gpipe", stages=3, ranks=3, microbatches=1, edges=edges)
    t = timeline(made, Costs((1, 2, 1), (1, 1, 1), (0, 0, 0), {(0, 2): 5}), edges)
    found = [(str(s.action), s.start) for each in t.slots for s in each]
    assert found == [("0F0", 0), ("0B0", 1), ("1F0", 0), ("1B0", 8), ("2F0", 6), ("2B0", 7)]


# --- drawings


def test_the_text_of_a_timeline() -> None:
    text = drawn.text(timeline(make("1f1b", stages=3, ranks=3, microbatches=4))).plain
    assert (
        text == "1f1b: 3 stages on 3 ranks, 4 microbatches; bubble 33.3 %\n"
        "\n"
        "                 time                                                     bubble   live\n"
        "rank 0  stage 0  F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3---    33.3 %      3\n"
        "rank 1  stage 1  ...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- ......   33.3 %      2\n"
        "rank 2  stage 2  ......F0 B0--- F1 B1--- F2 B2--- F3 B3--- ............   33.3 %      1\n"
        "\n"
        "kind, microbatch: F forward, B backward\n"
    )


def test_several_stages_a_rank_are_named() -> None:
    text = drawn.text(timeline(make("zb-v", stages=4, ranks=2, microbatches=3))).plain
    assert "rank 0  stages 0, 3  0F0 0F1 0F2 3F0 3I0 3W0" in text
    assert "stage, kind, microbatch: F forward, B backward, I gradients of inputs, W gradients of weights" in text


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_long_timeline_fits_a_terminal(name: str) -> None:
    made = make(name, stages=8, ranks=4, microbatches=100)
    lines = drawn.text(timeline(made), width=100).plain.splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == 4
    assert len({len(r) for r in rows}) == 1
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "some take less than a column: --html FILE draws them all"


def test_kinds_have_colours_of_their_own() -> None:
    text = drawn.text(timeline(make("zb-h1", stages=2, ranks=2, microbatches=2)))
    styles = {text.plain[s.start : s.start + 1]: s.style for s in text.spans if text.plain[s.start] in "FBIW"}
    assert set(styles) == set("FBIW")
    assert len(set(styles.values())) == 4


def test_json() -> None:
    t = timeline(parse("rank 0: 0F0 0B0", "mine"))
    assert json.loads(json.dumps(drawn.to_json(t))) == {
        "name": "mine",
        "stages": 1,
        "ranks": 1,
        "microbatches": 1,
        "placement": [0],
        "actions": [["0F0", "0B0"]],
        "live": [1],
        "bubble": 0.0,
        "bubbles": [0.0],
        "end": 3.0,
        "slots": [[["0F0", 0.0, 1.0], ["0B0", 1.0, 3.0]]],
    }


def test_sends_are_no_part_of_the_timeline() -> None:
    t = clock("1f1b", 2, 2)
    assert Action("SEND_F", 0, 0, 1) in t.schedule.actions[0]
    assert {s.action.kind for each in t.slots for s in each} == {"F", "B"}


# --- the command line


def test_inspect_schedule(files: Path) -> None:
    (files / "pipe.yaml").write_text("shardc: 1\nmesh: {pp: 2}\npipeline: {axis: pp, schedule: zb-h1}\n")
    done = call("inspect", "model.py", "pipe.yaml", "--schedule")
    assert done.exit_code == 0, done.output
    assert "zb-h1: 2 stages on 2 ranks, 1 microbatch; bubble" in done.stdout
    assert "rank 1  stage 1  ." in done.stdout
    assert "on h100-80g: a step of " in flat(done.stdout)
    found = json.loads(call("inspect", "model.py", "pipe.yaml", "--schedule", "--json").stdout)
    assert found["placement"] == [0, 1]
    done = call("inspect", "model.py", "spec.yaml", "--schedule")  # without a pipeline: one stage
    assert re.search(r"rank 0  stage 0  \.?F0", done.stdout)
    assert "bubble 0.0 %" in done.stdout


def test_all_views_of_a_step_have_one_clock(files: Path) -> None:
    """The schedule, the page and the trace say the same times, those of the cost."""
    (files / "pipe.yaml").write_text("shardc: 1\nmesh: {dp: 2, pp: 2}\npipeline: {axis: pp, schedule: zb-h1}\n")
    command = (
        "inspect",
        "model.py",
        "pipe.yaml",
        "--schedule",
        "--json",
        "--html",
        "page.html",
        "--trace",
        "trace.json",
    )
    schedule = json.loads(call(*command).stdout)
    page = re.search(r'id="data">(.*?)</script>', (files / "page.html").read_text())
    assert page is not None
    shown = json.loads(page[1])
    trace = json.loads((files / "trace.json").read_text())
    assert schedule["step_seconds"] == shown["facts"]["seconds"] == trace["otherData"]["step_seconds"]
    assert schedule["device"] == shown["facts"]["device"] == trace["otherData"]["device"] == "h100-80g"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for slots, row in zip(schedule["slots"], shown["timeline"]["rows"], strict=True):
        begins = [round(begin * 1e9) for _, begin, _ in slots]
        assert [s[2] for s in row["slots"]] == pytest.approx(begins, abs=1)
        mine = [e for e in trace["traceEvents"] if e["pid"] == row["rank"] and e["ph"] == "X"]
        actions = [e for e in mine if names[e["pid"], e["tid"]] == "actions" and "microbatch" in e["args"]]
        assert [round(e["ts"] * 1e3) for e in actions] == [s[2] for s in row["slots"]]
        for axes, spans in row["streams"].items():
            sent = [e for e in mine if names[e["pid"], e["tid"]] == axes]
            assert [(e["name"], round(e["ts"] * 1e3), e["args"]["direction"]) for e in sent] == [
                (kind, begin, direction) for begin, _, _, _, direction, kind in spans
            ]
            assert all(0 <= e["args"]["exposed_us"] <= e["dur"] + 1e-3 and e["args"]["of"] for e in sent)
