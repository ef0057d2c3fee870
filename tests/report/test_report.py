"""The views of `shardc inspect`: they count what runs, and nothing else."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import shardc
from shardc.passes.dump import diff
from shardc.report import comm, text
from tests import example_text, zoo
from tests.artifact.test_emit import program
from tests.test_equal import spec_of


def test_the_table_counts_what_a_step_runs() -> None:
    """The count of the dry run equals the record of the simulated step, kind by kind and byte by byte."""
    p = program("llama")
    model, batch = zoo.llama()
    sim = shardc.verify.simulate(p, model, batch)
    ran: collections.Counter[tuple[str, str, str]] = collections.Counter()
    size: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for c in sim.comms:
        ran[c.axis, c.kind, c.direction] += 1
        size[c.axis, c.kind, c.direction] += c.bytes
    counted: collections.Counter[tuple[str, str, str]] = collections.Counter()
    bytes_: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for r in comm.comm_rows(p.cost()):
        counted[r.axes, r.kind, r.direction] += r.count
        bytes_[r.axes, r.kind, r.direction] += r.bytes
    assert counted == ran
    assert bytes_ == size


def test_the_table_reads_well() -> None:
    table = comm.comm_table(program("llama").cost())
    assert "axis" in table.splitlines()[0]
    assert "gradients, in buckets" in table
    assert "*.o_proj" in table
    alone = shardc.compile(*zoo.mlp(), {"shardc": 1, "mesh": {}}, prove=False)
    assert comm.comm_table(alone.cost()) == "no collectives: one rank"


def test_before_shows_the_model_of_one_device() -> None:
    shown = text.before(program("gpt"))
    assert "all_reduce" not in shown
    assert "def single(" in shown
    assert "f64[8, 16, 64]" in shown


def test_json_is_json() -> None:
    found = json.loads(json.dumps(text.to_json(program("gpt"))))
    assert found["mesh"] == {"dp": 2, "tp": 2}
    assert {"name", "type", "kind", "backward", "axes", "bytes", "cause", "module", "line"} <= found["collectives"][
        0
    ].keys()


def test_a_difference_shows_what_a_pass_did() -> None:
    p = example_text.program()
    old = text.before(p)
    assert diff(old, old) == ""
    found = diff(old, p.text(full=True)).splitlines()
    assert "-    pre = aten.mul.Tensor(x, scale)  # f64[8, 6] grad" in found
    assert "+    pre = aten.mul.Tensor(x, scale)  # f64[8@dp, 6] grad" in found


def test_dump_writes_a_text_for_every_pass_and_the_differences(tmp_path: Path) -> None:
    model, batch = zoo.gpt()
    shardc.compile(model, batch, spec_of("gpt", {"dp": 2, "tp": 2}), prove=False, dump=tmp_path)
    names = sorted(x.name for x in tmp_path.iterdir())
    texts = [n for n in names if n.endswith(".txt")]
    assert texts == [
        "00-capture.txt",
        "01-canonical.txt",
        "02-unknown_ops.txt",
        "03-annotate.txt",
        "04-place.txt",
        "05-partition.txt",
        "06-gradient_buckets.txt",
        "07-joint.txt",
        "08-unused_axes.txt",
    ]
    assert [n for n in names if n.endswith(".diff")] == [n.replace("txt", "diff") for n in texts[1:]]
    assert "+    x" not in (tmp_path / "04-place.diff").read_text()
    assert "ops.all_reduce" in (tmp_path / "05-partition.txt").read_text()


def test_bytes_of_a_rank() -> None:
    """Of a pipeline: those of the rank that has most."""
    spec = {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}
    program = shardc.compile(*zoo.gpt(layers=3), {"shardc": 1, "data": {"zero": 1}, **spec}, prove=False)
    held = [sum(p.value.nbytes() for p in program.params if at in program.holders(p)) for at in (0, 1)]
    assert program.parameter_bytes() == max(held) < sum(p.value.nbytes() for p in program.params)


def test_bytes_of_a_rank_at_zero_3() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 4}, "data": {"zero": 3}}
    program = shardc.compile(*zoo.gpt(), spec, prove=False)
    assert program.parameter_bytes() == sum(p.value.nbytes() for p in program.params) // 4
