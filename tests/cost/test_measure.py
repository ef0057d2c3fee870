"""A device's numbers by least squares, from ops and collectives of devices whose numbers are known; logs of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardc
from shardc.cost import waterfall
from shardc.cost.measured import measure, run_log
from shardc.cost.measured.measure import fit, fit_link
from shardc.cost.measured.op_times import MeasuredStep, OpTime, OpTimes, file_of
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device, Link, OpRates, Reaches
from shardc.machine.work import Op
from shardc.runtime.mesh.wait_times import Wait

F32, F64, BF16 = "float32", "float64", "bfloat16"
KERNEL = "_scaled_dot_product"
CPU = Device(
    name="cpu",
    kind="cpu",
    memory=8e9,
    flops={"float32": 9e10, "float64": 4e10},
    bandwidth=8e9,
    launch=5e-6,
    reaches={"attention": 0.3},
    ops={"gelu": OpRates(launch=2e-5, bandwidth=3e9)},
    node=4,
    within=Link(bandwidth=2e9, latency=4e-5),
    between=Link(bandwidth=2e9, latency=4e-5),
)
#: Of no use before it is measured.
UNKNOWN = Device(
    name="cpu", kind="cpu", memory=8e9, flops={F32: 1.0}, bandwidth=1.0, within=CPU.within, between=CPU.between
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
            yield Op(4 * m * n * k, moved, dtype, attention=True, masked=2 * m * n * k, name=KERNEL)
        for many in (1e-4, 1e-3, 0.01, 0.1, 0.5, 1, 4, 10, 30):
            for name, times in (("add", 3), ("mul", 3), ("copy_", 2), ("gelu", 2)):
                yield Op(0, max(int(many * times * size * scale**2), 4), dtype, name=name)


@pytest.mark.parametrize("true", [CPU, CPU.model_copy(update={"launch": 2e-6, "bandwidth": 3e10})])
def test_a_known_device_is_found(true: Device) -> None:
    """Its rates by least squares; a gelu, which is slower, has its own."""
    seconds = {op: true.op_seconds(op) for op in ops(256, F32, F64)}
    found = fit(seconds)
    assert found["launch"] == pytest.approx(true.launch, rel=0.2)
    assert found["bandwidth"] == pytest.approx(true.bandwidth, rel=0.1)
    assert found["flops"] == pytest.approx(dict(true.flops), rel=0.15)
    assert found["attention"] == pytest.approx(0.3, rel=0.15)
    assert found["ops"].keys() == {"gelu", KERNEL, f"{KERNEL} float64"}
    again = UNKNOWN.model_copy(update={k: x for k, x in found.items() if k != "attention"})
    again = again.model_copy(update={"reaches": Reaches(attention=found["attention"])})
    off = [abs(again.op_seconds(op) / took - 1) for op, took in seconds.items()]
    assert sorted(off)[len(off) // 2] < 0.1


def test_an_attention_kernel_is_priced_by_its_large_calls_in_each_dtype() -> None:
    """Small calls take the time of their start, and a CPU's backward in 16 bits is many times slower."""
    shares = {F32: 0.5, BF16: 0.02}
    true = {
        t: CPU.model_copy(update={"flops": {F32: 9e10, BF16: 9e10}, "reaches": Reaches(attention=s)})
        for t, s in shares.items()
    }
    calls = [
        Op(4 * n * n * 64, 8 * n * 64, dtype, attention=True, name=KERNEL, matrices=(1, n, n))
        for dtype in shares
        for n in (4, 8, 16, 32, 64, 128, 256, 512)
    ]
    plain = {op: true[F32].op_seconds(op) for op in ops(256, F32, BF16) if not op.attention}
    found = fit(plain | {op: max(5e-5, true[op.dtype].op_seconds(op)) for op in calls})
    again = UNKNOWN.model_copy(update={k: x for k, x in found.items() if k != "attention"})
    again = again.model_copy(update={"reaches": Reaches(attention=found["attention"])})
    for op in calls:
        expected = max(5e-5, true[op.dtype].op_seconds(op))
        rel = 0.2 if op.flops >= 4 * 256 * 256 * 64 else 1.0
        assert again.op_seconds(op) == pytest.approx(expected, rel=rel), op


def test_of_two_ops_that_are_both_small_no_rate_is_below_zero() -> None:
    """What is subtracted in the least sum of squares gets next to nothing."""
    small = {Op(0, n, F32, name="add"): s for n, s in ((100, 5e-6), (200, 4e-6), (300, 3e-6))}
    found = fit(small | {Op(2 * n**3, 12 * n * n, F32, matrices=(1, n, n), name="mm"): 1e-5 for n in (2, 8)})
    assert found["bandwidth"] > 0
    assert found["launch"] > 0
    assert all(x > 0 for x in found["flops"].values())


@pytest.mark.parametrize("count", [2, 4])
def test_a_known_link_is_found(count: int) -> None:
    link = Link(bandwidth=2e9, latency=4e-5, kinds={"all_to_all": 0.5})
    true = CPU.model_copy(update={"within": link, "between": link})
    ranks = tuple(range(count))
    each = [(kind, n) for kind in measure.KINDS for n in measure.MESSAGES]
    found = fit_link({(*x, count): collective_seconds(true, *x, ranks) for x in each})
    for kind, n in each:
        near = CPU.model_copy(update={"within": found, "between": found})
        assert collective_seconds(near, kind, n, ranks) == pytest.approx(
            collective_seconds(true, kind, n, ranks), rel=0.25
        )
    assert found.kinds.keys() == {"all_to_all"}


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
    assert found.bytes["made"][0] == found.bytes["made"][1]
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


def test_a_run_on_another_mesh_or_device_is_refused(program: shardc.Program, tmp_path: Path) -> None:
    log = run_log.read(write_log(tmp_path / "log", program, CPU))
    with pytest.raises(ShardcError, match=r"the run was on cpu, 1 threads, and h100-80g is not a cpu device"):
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
