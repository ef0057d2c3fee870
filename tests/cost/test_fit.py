"""A device's numbers from measured ops: logs of runs on devices whose numbers are known; and real runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardc
from shardc.cli import app
from shardc.cost import device, run_log, waterfall, whole_steps
from shardc.cost.fit import LinkSample, OpSample, fit
from shardc.cost.op_times import MeasuredStep, OpTime, OpTimes, file_of
from shardc.cost.tour import _host, _in_one_dtype, _pieces
from shardc.cost.whole_steps import _softened
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device, Link, OpRates, Products, Reaches, Reference
from shardc.machine.work import Op
from shardc.runtime.mesh.waits import Wait

F32, F64, BF16 = "float32", "float64", "bfloat16"
CPU = Device(
    name="cpu",
    kind="cpu",
    memory=8e9,
    flops={"float32": 9e10, "float64": 4e10},
    bandwidth=8e9,
    launch=5e-6,
    reaches={"attention": 0.3},
    products=Products(tiles=((32, 64, 1.0),), ramp=64.0),
    ops={"gelu": OpRates(launch=2e-5, bandwidth=3e9)},
    node=4,
    within=Link(bandwidth=2e9, latency=4e-5),
    between=Link(bandwidth=2e9, latency=4e-5),
)
#: As a new installation of torch knows it.
UNKNOWN = Device(
    name="cpu",
    kind="cpu",
    memory=8e9,
    flops={"float32": 2e11},
    bandwidth=2e10,
    launch=2e-6,
    node=4,
    within=Link(bandwidth=1e10, latency=1e-5),
    between=Link(bandwidth=1e10, latency=1e-5),
)
GPU = device("h100-80g").model_copy(
    update={
        "reaches": device("h100-80g").reaches.model_copy(update={"flops": 0.6, "bandwidth": 0.7, "attention": 0.25}),
        "launch": 2.5e-6,
        "within": device("h100-80g").within.model_copy(update={"reaches": 0.5, "latency": 9e-6, "start": 9e-5}),
    }
)


def ops(scale: int, *dtypes: str) -> Iterator[Op]:
    """Of a model of so many hidden features, and others."""
    for dtype in dtypes:
        size = getattr(torch, dtype).itemsize
        for m, n, k in ((1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 4), (3, 5, 2), (7, 1, 3), (8, 2, 2), (0.3, 1, 2)):
            m, n, k = (round(x * scale) for x in (m, n, k))
            moved = size * (m * k + k * n + m * n)
            yield Op(2 * m * n * k, moved, dtype, matrices=(1, m, n), name="mm")
            yield Op(2 * 8 * m * n * k, 8 * moved, dtype, matrices=(8, m, n), name="bmm")
            yield Op(4 * m * n * k, moved, dtype, attention=True, masked=2 * m * n * k, name="_scaled_dot_product")
        for many in (1e-4, 1e-3, 0.01, 0.1, 0.5, 1, 4, 10, 30):
            for name, times in (("add", 3), ("mul", 3), ("copy_", 2), ("gelu", 2)):
                yield Op(0, max(int(many * times * size * scale**2), 4), dtype, name=name)


def links(d: Device, groups: tuple[tuple[int, ...], ...]) -> list[LinkSample]:
    return [
        LinkSample(kind, n, ranks, collective_seconds(d, kind, n, ranks))
        for kind in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")
        for n in (1e3, 1e5, 1e6, 1e7, 3e8)
        for ranks in groups
    ]


@pytest.mark.parametrize(
    ("true", "base", "some"),
    [
        (CPU, UNKNOWN, (256, F32, F64)),
        (GPU, device("h100-80g"), (1536, F32, BF16)),
    ],
    ids=["cpu", "gpu"],
)
def test_a_known_device_is_found(true: Device, base: Device, some: tuple[int, str]) -> None:
    samples = [OpSample(op, true.op_seconds(op)) for op in ops(*some)]
    found = fit(base, samples, links(true, ((0, 1), (0, 1, 2, 3))))
    for x in samples:
        assert found.device.op_seconds(x.op) == pytest.approx(x.seconds, rel=0.05), x
    for link in links(true, ((0, 1, 2), (0, 3))):
        assert collective_seconds(found.device, link.kind, link.bytes, link.ranks) == pytest.approx(
            link.seconds, rel=0.03
        )
    assert found.ops is not None
    assert found.ops.half < 0.01
    assert found.ops.most < 0.03
    assert abs(found.ops.sum) < 0.03
    assert found.links is not None
    assert found.links.most < 0.03
    assert found.device.products is not None
    if true is CPU:
        assert found.device.products == true.products
        assert found.device.bandwidth == pytest.approx(true.bandwidth, rel=0.02)
        assert found.device.ops["gelu"].bandwidth == pytest.approx(3e9, rel=0.03)
        assert set(found.device.ops) == {"gelu"}
    else:  # the datasheet's peaks stay
        assert (found.device.flops, found.device.bandwidth) == (base.flops, base.bandwidth)
        assert found.device.reaches.flops == pytest.approx(0.6, rel=0.02)
        assert found.device.ops == base.ops  # none more


def test_an_op_has_other_numbers_in_another_dtype() -> None:
    """As on a CPU, which computes in float32 what has 16 bits. A run in one of the two says nothing of the other."""
    own = {"mul bfloat16": OpRates(launch=9e-6, bandwidth=2.5e9), "mm bfloat16": OpRates(launch=8e-5, flops=0.8)}
    true = CPU.model_copy(update={"ops": {**CPU.ops, **own}, "flops": {**CPU.flops, BF16: 2e11}})
    samples = [OpSample(op, true.op_seconds(op)) for op in ops(256, F32, BF16)]
    found = fit(UNKNOWN, samples).device
    assert set(found.ops) == {"gelu", *own}
    for x in samples:
        assert found.op_seconds(x.op) == pytest.approx(x.seconds, rel=0.05), x
    low, double = Op(0, 10**7, BF16, name="mul"), Op(0, 10**7, F64, name="mul")
    assert found.op_seconds(double) < 0.5 * found.op_seconds(low)
    slower = [OpSample(x.op, 2 * x.seconds) for x in samples if x.op.dtype == BF16 and x.op.name == "mul"]
    learned = fit(found, slower).device
    assert learned.op_seconds(low) == pytest.approx(2 * found.op_seconds(low), rel=0.05)
    assert learned.ops["gelu"] == found.ops["gelu"]


def test_each_of_many_small_products_takes_a_time_of_its_own() -> None:
    """On a CPU, beside their flops and bytes: as its kernels of attention do for each head of each row."""
    true = CPU.model_copy(update={"ops": {**CPU.ops, "bmm": OpRates(each=2e-5)}})
    sizes = [(many, m, k) for many in (8, 64, 512) for m in (16, 32, 64, 128) for k in (32, 128)]
    small = [
        Op(2 * many * m * m * k, 4 * many * m * (2 * k + m), F32, matrices=(many, m, m), name="bmm")
        for many, m, k in sizes
    ]
    samples = [OpSample(op, true.op_seconds(op)) for op in (*ops(256, F32), *small)]
    found = fit(UNKNOWN, samples).device
    for x in samples:
        assert found.op_seconds(x.op) == pytest.approx(x.seconds, rel=0.1), x
    assert found.ops["bmm"].each == pytest.approx(2e-5, rel=0.1)
    none = found.model_copy(update={"ops": {}})
    few, many = small[0], small[16]
    assert found.op_seconds(many) - none.op_seconds(many) > 50 * (found.op_seconds(few) - none.op_seconds(few))


def test_it_says_how_far_off_it_is() -> None:
    """Times that nothing explains: by a factor of up to 2, at random."""
    noise = torch.rand(2000, generator=torch.Generator().manual_seed(0)).tolist()
    samples = [OpSample(op, CPU.op_seconds(op) * 2**r) for op, r in zip(ops(256, F32), noise, strict=False)]
    error = fit(UNKNOWN, samples).ops
    assert error is not None
    assert 0.1 < error.half < 0.4
    assert error.half < error.most
    assert str(error).startswith(f"{error.held} of {len(samples)} held back: half within ")


def test_what_was_not_measured_stays() -> None:
    only = fit(CPU, [OpSample(Op(0, 10**8, F32, name="add"), 0.05)])
    assert (only.device.flops, only.device.within, only.device.ops["gelu"]) == (CPU.flops, CPU.within, CPU.ops["gelu"])
    assert only.device.bandwidth == pytest.approx(10**8 / (0.05 - CPU.launch), rel=0.1)
    assert only.ops is None
    assert str(only) == "too few shapes to hold any back"


def test_small_work_says_nothing_of_rates() -> None:
    """However noisy: what takes long among small messages and small ops has waited, and moved next to nothing."""
    noise = torch.rand(400, generator=torch.Generator().manual_seed(0)).tolist()
    known = {"gelu": OpRates(launch=2e-5, bandwidth=3e9), "mm": OpRates(launch=5e-6, flops=0.5)}
    link = CPU.within.model_copy(update={"kinds": {"all_gather": 0.5, "all_reduce": 0.8}})
    base = CPU.model_copy(update={"ops": known, "within": link, "between": link})
    small = [Op(0, 4 << (i % 14), F32, name=("gelu", "add")[i % 2]) for i in range(200)]
    small += [Op(2**14, 2**10, F32, matrices=(1, 16, 16), name="mm")] * 100
    samples = [OpSample(op, 1e-5 * 1000**r) for op, r in zip(small, noise, strict=False)]
    waits = [LinkSample("all_reduce", 4 << (i % 8), (0, 1), 2e-4 * 50**r) for i, r in enumerate(noise[:30])]
    found = fit(base, samples, waits).device
    assert (found.flops, found.bandwidth, found.reaches, found.products) == (
        base.flops,
        base.bandwidth,
        base.reaches,
        base.products,
    )
    assert {(name, x.bandwidth, x.flops) for name, x in found.ops.items()} == {
        ("gelu", 3e9, None),
        ("mm", None, 0.5),
        ("add", None, None),
    }
    assert found.within == link.model_copy(update={"latency": found.within.latency})
    assert found.within.latency > 5 * link.latency
    assert found.launch > CPU.launch


def test_kinds_that_were_not_measured_keep_their_share() -> None:
    link = CPU.within.model_copy(update={"kinds": {"all_gather": 0.5}})
    base = CPU.model_copy(update={"within": link, "between": link})
    faster = base.model_copy(update={"within": link.model_copy(update={"bandwidth": 3 * link.bandwidth})})
    found = fit(base, [], [x for x in links(faster, ((0, 1),)) if x.kind != "all_gather"]).device
    assert found.within.kinds == {"all_gather": 0.5}
    assert found.within.bandwidth == pytest.approx(faster.within.bandwidth, rel=0.03)


# --- logs


def write_log(folder: Path, program: shardc.Program, true: Device, *, host: float = 3e-5) -> Path:
    """As a run on such a device leaves it: its steps are what the device takes."""
    folder.mkdir()
    cost = program.cost(true.model_copy(update={"host": host}))
    lines = waterfall.predicted(cost)
    line = {
        "seconds": cost.step_seconds,
        "data_wait": 0.002,
        "waited": {name.removeprefix("waiting for "): s for name, s in lines.items() if name.startswith("waiting")},
    }
    (folder / "steps.jsonl").write_text("".join(json.dumps({"step": i, **line}) + "\n" for i in range(1, 7)))
    dry = cost.dry_runs[0]
    times: dict[tuple[str, Op], OpTime] = {}
    waits = []
    for part in (dry.before, *(p for _, p in dry.actions), dry.after, dry.update):
        for w in part.work:
            if isinstance(w, Op):
                key = ("update" if part is dry.update else "forward", w._replace(of=""))
                x = times.setdefault(key, OpTime(key[0], key[1], 0, 0.0, math.inf))
                took = true.op_seconds(w)
                x.count, x.seconds, x.least = x.count + 1, x.seconds + took, min(x.least, took)
        for r in part.sent:
            took = collective_seconds(true, r.kind, r.bytes, program.mesh.group(0, r.axes))
            waits.append(Wait(r.kind, r.axes, r.bytes, took, whole=True))
    made = cost.memory.peak - sum(cost.memory.resident.values())
    mesh = dict(program.mesh.axes)
    step = MeasuredStep(3, 0, mesh, "cpu", "cpu, 1 threads", made, 1.0, list(times.values()), waits)
    file_of(folder, 3, step.rank).write_text(json.dumps(step.to_json()))
    return folder


@pytest.fixture(scope="module")
def program() -> shardc.Program:
    from tests import zoo

    model, batch = zoo.gpt(torch.float32)
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 1}, "checkpoint": [{"match": "h.0"}]}
    return shardc.compile(model, batch, spec)


def test_a_step_reads_back(program: shardc.Program, tmp_path: Path) -> None:
    log = run_log.read(write_log(tmp_path / "log", program, CPU))
    (step,) = log.timed
    assert MeasuredStep.of_json(json.loads(json.dumps(step.to_json()))) == step
    assert any(x.op.again for x in step.ops)
    assert any(x.op.matrices for x in step.ops)


def test_a_run_of_the_device_that_is_priced_differs_in_nothing(program: shardc.Program, tmp_path: Path) -> None:
    log = run_log.read(write_log(tmp_path / "log", program, CPU, host=3e-5))
    (found,) = waterfall.compare(program.cost(CPU.model_copy(update={"host": 3e-5})), log)
    for name, (ours, theirs) in found.lines.items():
        if name != "data":
            assert ours == pytest.approx(theirs, rel=1e-6), name
    assert found.lines["data"] == (0.0, 0.002)
    assert {"recomputed", "update", "waiting for dp", "host", "small ops", "products at the peak"} <= found.lines.keys()
    assert found.made[0] == found.made[1]
    assert found.seconds[1] == pytest.approx(log.seconds + 0.002)


def test_lines_say_where_a_run_differs(program: shardc.Program, tmp_path: Path) -> None:
    """A slower link makes waiting longer, and nothing else; a slow op its line, which is that of its price."""
    slow_link = CPU.model_copy(update={"within": Link(bandwidth=4e7, latency=4e-5)})
    slow_gelu = CPU.model_copy(update={"ops": {"gelu": OpRates(launch=2e-3)}})
    for name, true, shares in (
        ("link", slow_link, {"waiting for dp": 1.0}),
        ("gelu", slow_gelu, {"memory-bound ops": 2 / 3, "recomputed": 1 / 3}),
    ):
        log = run_log.read(write_log(tmp_path / name, program, true))
        (found,) = waterfall.compare(program.cost(CPU.model_copy(update={"host": 3e-5})), log)
        off = {n: theirs - ours for n, (ours, theirs) in found.lines.items() if n != "data"}
        whole = sum(abs(x) for x in off.values())
        for line, share in shares.items():
            assert off[line] / whole == pytest.approx(share, rel=0.05)
    assert {x.op.name for x in found.ops[:2]} == {"gelu"}


def test_the_command_learns(program: shardc.Program, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", program, CPU, host=3e-5)
    (tmp_path / "unknown.yaml").write_text(UNKNOWN.to_yaml())
    out = tmp_path / "learned.yaml"
    done = CliRunner().invoke(app, ["device", str(tmp_path / "unknown.yaml"), "--fit", str(log), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "held back: half within" in done.stderr
    learned = device(out)
    assert f"fitted to {log}" in learned.source
    before, after = (abs(program.cost(d).step_seconds / run_log.read(log).seconds - 1) for d in (UNKNOWN, learned))
    assert after < 0.03 < 0.2 < before
    assert learned.host == pytest.approx(3e-5, rel=0.01)


def test_waits_say_how_late_ranks_come(program: shardc.Program, tmp_path: Path) -> None:
    """Half of the waits for one collective were a millisecond longer than the quickest; of a few, nothing is known."""
    log = run_log.read(write_log(tmp_path / "log", program, CPU))
    (step,) = log.timed
    assert run_log.fitted_to(CPU, [log]).device.skew == CPU.skew
    longer = (0.0, 1e-3, 1e-3, 5e-3)
    waits = [replace(x, seconds=x.seconds + late) for x in step.waits for late in longer]
    more = replace(log, timed=[replace(step, waits=waits)])
    assert len(waits) >= run_log.WAITS
    learned = run_log.fitted_to(CPU, [more]).device
    assert learned.skew == pytest.approx(1e-3)
    assert learned.within.latency == pytest.approx(CPU.within.latency, rel=0.05)


def test_a_few_short_waits_are_not_the_links(program: shardc.Program, tmp_path: Path) -> None:
    """Where ranks are known to be late by a millisecond, one wait of two says so again; a long one is the link's."""
    base = CPU.model_copy(update={"skew": 1e-3})
    log = run_log.read(write_log(tmp_path / "log", program, CPU))
    (step,) = log.timed
    late = replace(log, timed=[replace(step, waits=[replace(x, seconds=x.seconds + 2e-3) for x in step.waits])])
    assert run_log.fitted_to(base, [late]).device.within == CPU.within
    long = replace(log, timed=[replace(step, waits=[replace(x, seconds=x.seconds + 0.1) for x in step.waits])])
    assert run_log.fitted_to(base, [long]).device.within != CPU.within


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["cpu", "--fit", "nothing"], "there is no steps.jsonl in nothing", "shardc run ... --log DIR"),
        (["h200", "--fit", "log"], "nothing says where h200's new numbers go", "-o FILE"),
        (["h200", "--fit", "log", "-o", "x.yaml"], "h200 is no cpu device", "name the device that it was on"),
        (["--fit", "plain"], "no step of this run has times of ops", "--breakdown 5"),
        (["--fit", "other"], "this is no log of `shardc run`", "name another folder"),
    ],
)
def test_runs_that_teach_nothing(
    words: list[str], what: str, fix: str, program: shardc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "log", program, CPU)
    for name, text in (("plain", '{"step": 1, "seconds": 1}\n'), ("other", "what a day\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["device", *words])
    assert done.exit_code == 2
    assert what in done.stderr
    assert fix in done.stderr


def test_a_run_on_another_mesh_or_device_is_refused(program: shardc.Program, tmp_path: Path) -> None:
    log = run_log.read(write_log(tmp_path / "log", program, CPU))
    with pytest.raises(ShardcError, match=r"the run was on cpu, 1 threads, and h100-80g is no cpu device"):
        waterfall.compare(program.cost("h100-80g"), log)
    from tests import zoo

    other = shardc.compile(*zoo.gpt(torch.float32), {"shardc": 1, "mesh": {"dp": 4}})
    with pytest.raises(ShardcError, match=r"the run's mesh was \{'dp': 2\}, this is \{'dp': 4\}"):
        waterfall.compare(other.cost(CPU), log)


# --- what is measured


def test_ops_of_a_step_are_timed_as_the_ledger_counts_them() -> None:
    x, w = torch.randn(64, 32), torch.randn(16, 32, requires_grad=True)
    kept = torch.zeros(1000)
    optimizer = torch.optim.AdamW([w], foreach=False)
    with OpTimes(torch.device("cpu")) as times:
        loss = torch.nn.functional.linear(x, w).sum()
        times.in_backward = lambda: True  # as a step says it
        loss.backward()
        times.in_backward = lambda: False
        kept.view(10, 100).add_(1)
        optimizer.step()
    step = times.measured(4)
    named = {(x.part, x.op.name): x for x in step.ops}
    forward, backward = named["forward", "mm"], named["backward", "mm"]
    assert (forward.op.flops, forward.op.matrices) == (2 * 64 * 32 * 16, (1, 64, 16))
    assert backward.op.flops == forward.op.flops
    assert 0 < forward.least <= forward.seconds < step.seconds
    assert ("update", "addcdiv_") in named
    assert not any(x.op.name in ("t", "view") for x in step.ops)
    assert step.made < 3 * 4 * (64 * 16 + 16 * 32) + 4096  # neither x nor kept, which were there before
    assert step.made >= 4 * (64 * 16 + 16 * 32)


def test_a_machine_is_measured_by_pieces_that_run() -> None:
    cpu = torch.device("cpu")
    for piece in (
        *_pieces(16, 32, cpu, torch.float32),
        *_pieces(16, 32, cpu, torch.bfloat16),
        *_in_one_dtype(16, 32, cpu),
    ):
        piece()
    assert 0 <= _host(torch.device("cpu")) < 0.1


def test_whole_steps_say_what_is_lost_between_ops() -> None:
    """Steps as they would take on a machine whose ops are 1.3 times as long, with 40 us beside each and 150 us beside
    each collective, whose ranks come 0.4 ms late, compute at half the rate beside collectives, and send at half of what
    was measured: its numbers are found again, whatever made some turns quick or slow.
    """
    none = Reference(product=1e-4, memory=1e-4, small=1e-6)
    update = {"host": 4e-5, "host_collective": 1.5e-4}
    beside = Reaches(attention=0.3, computing=0.5)
    true = CPU.slower(1.3, 1.3, 1.3, 2.0).model_copy(update=update | {"skew": 4e-4, "reaches": beside})
    prices = [
        whole_steps.price(program, CPU) for program, _, _ in whole_steps.cases(shardc.compile, 2, ((128, 1), (256, 1)))
    ]
    seconds = [price(true) for price in prices]
    turns = [[whole_steps.Turn(share * x, none) for share in (0.6, 1, 1.5)] for x in seconds]
    quicker = [[whole_steps.Turn(0.9 * turn.seconds, none) for turn in each] for each in turns]
    found = whole_steps.fitted(CPU, [turns, quicker], prices)
    assert found.flops["float32"] == pytest.approx(CPU.flops["float32"] / 1.3, rel=0.05)
    assert found.host == pytest.approx(4e-5, rel=0.1)
    assert found.host_collective == pytest.approx(1.5e-4, rel=0.1)
    assert found.skew == pytest.approx(4e-4, rel=0.1)
    assert found.reaches.computing == pytest.approx(0.5, rel=0.1)
    assert found.within.bandwidth == pytest.approx(CPU.within.bandwidth / 2, rel=0.1)
    assert found.reference == none


def test_the_usual_turn() -> None:
    """A turn is compared with what a step takes at the machine's speed then: the slowest one may be the usual one."""
    then = Reference(product=1e-4, memory=1e-4, small=1e-6)
    slow = Reference(product=2e-4, memory=2e-4, small=2e-6)
    on = CPU.model_copy(update={"reference": then})

    def price(device: Device) -> float:
        return 1e10 / device.flops["float32"]

    quick, usual, late = (whole_steps.Turn(x * price(on), at) for x, at in ((0.9, then), (2.0, slow), (1.5, then)))
    assert whole_steps.usual_turn([quick, late, usual], price, on) is usual
    ranks = [whole_steps.Turn(1.0, then), whole_steps.Turn(2.0, slow)]
    assert whole_steps.Turn.together(ranks).seconds == 2.0


def test_a_step_that_something_slowed_down_decides_little() -> None:
    """Numbers are found by least squares: of what is far off, the square goes on growing, but slowly."""
    small, large, larger = (_softened(x) ** 2 for x in (0.01, 0.5, 1.0))
    assert small == pytest.approx(0.01**2, rel=0.01)
    assert large < larger < 1.5 * large
    assert _softened(-0.5) == -_softened(0.5)


def test_a_slower_moment() -> None:
    """All of a device's numbers change with the machine's: what computes, what moves bytes, what is small, messages."""
    then, now = (Reference(product=1e-4, memory=2e-4, small=1e-6), Reference(product=2e-4, memory=6e-4, small=4e-6))
    measured = CPU.model_copy(update={"reference": then, "host": 1e-5, "host_collective": 2e-5, "skew": 1e-3})
    slow = measured.as_fast(now)
    product = Op(2 * 512**3, 0, F32, shape=(512, 512), matrices=(1, 512, 512), name="mm")
    moved, gelu = Op(0, 10**7, F32, name="mul"), Op(0, 10**7, F32, name="gelu")
    assert slow.product_seconds(product) == pytest.approx(2 * measured.product_seconds(product))
    for op in (moved, gelu):
        assert slow.traffic_seconds(op) == pytest.approx(3 * measured.traffic_seconds(op))
        assert slow.launch_seconds(op) == pytest.approx(4 * measured.launch_seconds(op))
    assert (slow.host, slow.host_collective, slow.skew) == pytest.approx((4e-5, 8e-5, 4e-3))
    for kind in ("all_reduce", "all_to_all"):
        for nbytes in (8, 10**8):
            alone = [collective_seconds(d, kind, nbytes, (0, 1, 2)) for d in (measured, slow)]
            assert alone[1] == pytest.approx(4 * alone[0])
    assert CPU.as_fast(now) == CPU  # nobody knows how fast it was
    assert slow.as_fast(then).op_seconds(gelu) == pytest.approx(measured.op_seconds(gelu))


def test_waits_are_measured_where_somebody_asks() -> None:
    from shardc.runtime.mesh.loopback import loopback

    def work(mesh: shardc.runtime.mesh.RankMesh) -> tuple[dict[str, float], dict[str, float], list[Wait]]:
        mesh.all_reduce(torch.ones(4), ("dp",))
        before = mesh.waits.take()
        mesh.waits.on, mesh.waits.kept = True, []
        mesh.all_reduce(torch.ones(4), ("dp",))
        flat = torch.ones(8)
        mesh.start_all_reduce(flat, ("dp", "tp")).wait()
        mesh.all_gather(flat, "tp")
        return before, mesh.waits.take(), mesh.waits.kept

    for before, seconds, kept in loopback(Mesh((("dp", 2), ("tp", 2))), work):
        assert before == {}
        assert set(seconds) >= {"dp", "tp"}
        assert [(x.kind, x.bytes) for x in kept if x.whole] == [("all_reduce", 16), ("all_gather", 64)]
