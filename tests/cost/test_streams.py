"""Which collectives a step hides, behind what, and for how long it waits: small steps whose answers are known."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.streams import Streams
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import CommRecord
from shardc.machine.clock import Clock, Flight, Flights
from shardc.machine.device import Device, Reaches
from shardc.machine.work import Op, Part, Sent, Waited
from shardc.report.comm import comm_table
from tests.cost.link_simulator import Links, padded

MESH = Mesh((("dp", 2), ("tp", 2)))
#: A flop takes a second; so does a byte that two ranks gather, as each sends half of it.
UNIT = Device.model_validate(
    {
        "name": "unit",
        "memory": 1e9,
        "flops": {"float32": 1.0},
        "bandwidth": 1e30,
        "node": 8,
        "within": {"bandwidth": 0.5, "latency": 0.0},
        "between": {"bandwidth": 0.5, "latency": 0.0},
    }
)


def product(seconds: int, of: str = "linear") -> Op:
    return Op(seconds, 0, "float32", of)


def gather(seconds: int, axis: str = "dp", key: int | None = None, after: int | None = None) -> Sent:
    return Sent(CommRecord("all_gather", (axis,), seconds, "backward", "bucket0"), key, after)


def streams(*work: Op | Sent | Waited, device: Device = UNIT) -> Streams:
    clock = Streams(device, MESH, 0)
    clock.run(Part("0B0", work=list(work)))
    return clock


def test_what_the_computation_does_not_cover_is_exposed() -> None:
    clock = streams(gather(5, key=1), product(3), Waited(1))
    (span,) = clock.spans
    assert (span.seconds, span.exposed, span.behind) == (5, 2, {("backward", "linear"): 3})
    assert (clock.now, dict(clock.exposed)) == (5, {"dp": 2})


def test_one_that_the_next_op_needs_is_exposed_whole() -> None:
    clock = streams(product(3), gather(5), product(3))
    (span,) = clock.spans
    assert (span.exposed, span.behind, clock.now) == (5, {}, 11)


def test_a_communicator_takes_one_at_a_time_and_two_run_side_by_side() -> None:
    same = streams(gather(4, key=1), gather(4, key=2), product(5), Waited(1), Waited(2))
    assert [(s.begin, s.end, s.exposed) for s in same.spans] == [(0, 4, 0), (4, 8, 3)]
    nodes = UNIT.model_copy(update={"node": 2})  # tp inside a node, dp between two
    apart = streams(gather(4, key=1), gather(4, "tp", key=2), product(5), Waited(1), Waited(2), device=nodes)
    assert [(s.begin, s.end, s.exposed) for s in apart.spans] == [(0, 4, 0), (0, 4, 0)]


def test_a_cpus_messages_are_on_their_way_while_the_one_before_is_sent() -> None:
    """gloo's threads wait for several at once; NCCL's stream for one after the other."""
    late = UNIT.model_copy(update={"within": UNIT.within.model_copy(update={"latency": 1.0})})
    work = [gather(4, key=1), gather(4, key=2), product(9), gather(4, key=3), Waited(1), Waited(2), Waited(3)]
    times = [(s.begin, s.end) for s in streams(*work, device=late).spans]
    assert times == [(0, 5), (5, 10), (10, 15)]
    own = streams(*work, device=late.model_copy(update={"kind": "cpu"}))
    assert [(s.begin, s.end) for s in own.spans] == [(0, 5), (5, 9), (9, 14)]  # behind the third one nothing is sent


def test_two_communicators_share_the_links_that_both_use() -> None:
    """Each has half of them while both run; the one that is left has all of them again."""
    alike = streams(gather(4, key=1), gather(4, "tp", key=2), product(9), Waited(1), Waited(2))
    assert [(s.begin, s.end, s.exposed) for s in alike.spans] == [(0, 8, 0), (0, 8, 0)]
    later = streams(gather(4, key=1), product(2), gather(6, "tp", key=2), product(1), Waited(1), Waited(2))
    assert [(s.begin, s.end, s.exposed) for s in later.spans] == [(0, 6, 3), (2, 10, 4)]
    assert later.now == 10


def test_those_that_are_queued_share_links_from_when_they_begin() -> None:
    """Of one group that has two in its queue, and another group's that starts later."""
    work = [gather(4, key=1), gather(4, key=2), gather(6, "tp", key=3), product(20), Waited(1), Waited(2), Waited(3)]
    assert [(s.begin, s.end) for s in streams(*work).spans] == [(0, 8), (8, 14), (0, 12)]
    apart = [gather(4, key=1), gather(9, "tp", key=2, after=1), gather(2, key=3), product(20), Waited(2), Waited(3)]
    assert [(s.begin, s.end) for s in streams(*apart).spans] == [(0, 4), (4, 15), (4, 8)]


@pytest.mark.parametrize("seed", range(5))
def test_queues_take_as_long_as_in_the_simulator_of_links(seed: int) -> None:
    """Three groups over one link, each with a queue, at random times."""
    r, axes = random.Random(seed), ("a", "b", "c")
    work: list[tuple[float, str, float]] = sorted(
        (r.uniform(0, 30), r.choice(axes), r.uniform(0.5, 9)) for _ in range(25)
    )
    flights, mine = Flights(), []
    for at, axis, seconds in work:
        mine.append(Flight(CommRecord("all_gather", (axis,), 1, "", ""), 0, seconds, at))
        flights.start(mine[-1], at)

    links, now, left = Links(), 0.0, {i: seconds for i, (_, _, seconds) in enumerate(work)}
    link, ends = links.add(1.0), [0.0] * len(work)
    while left:
        heads = {work[i][1]: i for i in sorted(left, reverse=True)}  # the first that is left of each group
        sent = [i for i in heads.values() if work[i][0] <= now]
        rates = links.fair(padded([(link,)] * len(sent))) if sent else []
        steps = [left[i] / rate for i, rate in zip(sent, rates, strict=True)]
        then = min([*(now + s for s in steps), *(work[i][0] for i in heads.values() if work[i][0] > now)])
        for i, rate in zip(sent, rates, strict=True):
            left[i] -= rate * (then - now)
            if left[i] < 1e-9:
                ends[i] = then
                del left[i]
        now = then
    assert [f.end for f in mine] == pytest.approx(ends)


def test_what_computes_while_a_collective_runs_is_slower() -> None:
    slower = UNIT.model_copy(update={"reaches": Reaches(computing=0.5)})
    clock = streams(gather(4, key=1), product(1), product(3), Waited(1), product(1), device=slower)
    assert clock.now == 2 + (2 + 2) + 1  # of the second product, one second's work takes two


def test_an_op_runs_when_the_host_has_started_it() -> None:
    slow = UNIT.model_copy(update={"host": 2.0})
    clock = streams(product(1), product(1), product(9), product(1), product(1), device=slow)
    assert clock.now == 6 + 9 + 1 + 1  # during the long one the host gets ahead


def test_one_that_follows_another_begins_when_that_ends() -> None:
    clock = streams(gather(4, key=1), gather(3, "tp", key=2, after=1), product(6), Waited(1), Waited(2))
    assert [(s.begin, s.end, s.exposed) for s in clock.spans] == [(0, 4, 0), (4, 7, 1)]


def test_streams_take_as_long_as_the_clock() -> None:
    work = [gather(4, key=1), product(1), gather(2), product(1), Waited(1)]
    clock = Clock(UNIT, MESH, 0)
    clock.run(Part("0B0", work=list(work)))
    assert (clock.now, clock.exposed) == (streams(*work).now, streams(*work).exposed)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x)).relu()).square().mean()


def test_a_column_parallel_products_sum_hides_behind_the_gradient_of_its_weight() -> None:
    """On a rank the gradient of its weight is 2 * 4 * 8 * 16 flops: 1024 s. The sum of 4 x 8 float32 takes 256 s."""
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}
    program = shardc.compile(Pair(), torch.randn(4, 8), spec)
    each = next(n for n in program.stages[0].graph.nodes if n.kwargs.get("overlap"))
    (span,) = [s for s in program.cost(UNIT).streams[0].spans if s.record.tag == each.name]
    assert span.seconds == 2 * 4 * 8 * 4
    assert span.exposed == 0
    assert set(span.behind) == {("backward", "linear_1")}


@pytest.mark.parametrize(
    ("zero", "device", "waits"),
    [(1, UNIT, False), (1, UNIT.model_copy(update={"kind": "cpu"}), True), (2, UNIT, True)],
    ids=["zero 1", "zero 1 on a CPU", "zero 2"],
)
def test_no_backward_waits_for_sums_that_free_nothing(zero: int, device: Device, waits: bool) -> None:
    """At ZeRO 2 a bucket's whole gradients are freed once its part is there; gloo's sums take memory on their way."""
    data = {"zero": zero, "bucket_mb": 0.0005}
    program = shardc.compile(Pair(), torch.randn(4, 8), {"shardc": 1, "mesh": {"dp": 2}, "data": data})
    (run,) = program.cost(device).dry_runs
    (backward,) = [part for a, part in run.actions if a.kind == "B"]
    sums = [w for w in backward.work if isinstance(w, Sent) and w.record.kind == "reduce_scatter"]
    assert len(sums) > 2
    assert any(isinstance(w, Waited) for w in backward.work) == waits


def test_what_stages_send_is_there_before_they_sum() -> None:
    """A rank's clock does not wait for other stages: what it sent them is there once they sum the loss."""
    sum_of_loss = Sent(CommRecord("all_reduce", ("dp",), 4, "forward", "loss"))
    sent = Sent(CommRecord("send_recv", ("dp",), 50, "forward", "h"), 1)
    alone = streams(product(1), sum_of_loss)
    assert streams(sent, product(1), sum_of_loss).now == alone.now
    gathered = gather(50, key=1)
    assert streams(gathered, product(1), sum_of_loss).now == alone.now + 50 - 1


def test_the_table_says_what_hides_a_collective() -> None:
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}
    program = shardc.compile(Pair(), torch.randn(4, 8), spec)
    cost = program.cost(UNIT)
    lines = comm_table(cost).splitlines()
    assert lines[0].split()[-4:] == ["takes", "exposed", "behind", "cause"]
    (backward,) = [line for line in lines if "backward  " in line]
    assert "256.00 s" in backward
    assert "backward of up" in backward
    assert set(cost.exposed) == {"tp"}
    assert cost.exposed["tp"] == cost.ranks[0].waited
