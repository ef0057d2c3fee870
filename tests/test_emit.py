"""A program's text prints, parses back to the same program, and runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shardc
from shardc import emit, report
from tests import zoo
from tests.test_equal import spec_of

MODELS = ("gpt", "llama", "gpt2", "bert", "t5", "resnet_bn", "moe")


def program(name: str = "gpt", *, sequence: bool = True) -> shardc.Program:
    model, batch = zoo.ALL[name](dropout=0.1) if name == "gpt" else zoo.ALL[name]()
    if name in ("resnet_bn", "moe"):
        return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 4}}, prove=False)
    return shardc.compile(model, batch, spec_of(name, {"dp": 2, "tp": 2}, sequence=sequence), prove=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_artifact_comes_back_the_same(name: str, tmp_path: Path) -> None:
    first = program(name)
    first.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert str(again) == str(first)
    assert report.before(again) == report.before(first)
    assert (again.params, again.buffers, again.inputs, again.buckets) == (first.params, first.buffers, first.inputs, first.buckets)
    assert again.spec == first.spec


@pytest.mark.parametrize("name", ["gpt", "resnet_bn"])
def test_a_loaded_program_computes_the_same(name: str, tmp_path: Path) -> None:
    first = program(name)
    first.save(tmp_path / "out")
    model, batch = zoo.ALL[name]()
    one, two = (shardc.simulate(p, model, batch, seed=3) for p in (first, shardc.load(tmp_path / "out")))
    assert torch.equal(one.loss, two.loss)
    assert one.grads.keys() == two.grads.keys()
    assert all(torch.equal(one.grads[n], two.grads[n]) for n in one.grads)
    assert one.comms == two.comms


def test_the_written_python_runs_as_it_stands(tmp_path: Path) -> None:
    model, batch = zoo.mlp()
    p = shardc.compile(model, batch, {"shardc": 1, "mesh": {}}, prove=False)
    p.save(tmp_path / "out")
    forward = runpy.run_path(str(tmp_path / "out" / "stage0.py"))["forward"]
    params = dict(model.named_parameters())
    leaves = batch if isinstance(batch, tuple) else tuple(batch.values()) if isinstance(batch, dict) else (batch,)
    loss, news = forward(None, None, *(params[x.fqn] for x in p.params), *leaves)
    torch.testing.assert_close(loss, shardc.simulate(p, model, batch).loss)
    assert news == ()


def test_every_collective_stands_in_the_text_with_its_cause() -> None:
    p = program("llama")
    text = str(p)
    found = [n for n in p.stages[0].graph.nodes if "collective" in n.meta]
    assert found
    for n in found:
        line = next(line for line in text.splitlines() if line.lstrip().startswith(f"{n.name} = "))
        assert f"{n.meta['collective'].kind}/{n.meta['collective'].backward} " in line
        assert n.meta["collective"].cause
        assert n.meta["collective"].cause.replace('"', '\\"') in line
    assert re.search(r"# model\.layers\.0\.self_attn\.q_proj \(modeling_llama\.py:\d+\): ", text)


def test_dead_values_are_deleted_where_they_die() -> None:
    lines = str(program("gpt")).splitlines()
    deleted = {n for line in lines if line.startswith("    del ") for n in line.removeprefix("    del ").split(", ")}
    assert "wte_weight" not in deleted  # parameters belong to the caller
    made = {line.split(" = ")[0].strip() for line in lines if " = " in line and not line.lstrip().startswith("#")}
    assert made - deleted == {n.name for n in _results(program("gpt"))}


def _results(p: shardc.Program) -> set[torch.fx.Node]:
    return set(next(n for n in p.stages[0].graph.nodes if n.op == "output").all_input_nodes)


def damaged(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("manifest.json", '"format": 1', '"format": 99', "artifact of format 99"),
        ("manifest.json", "{", "", "is no JSON"),
        ("stage0.py", "aten.linear", "aten.linnear", "stage0.py was edited"),
        ("layouts.json", "wte", "wtf", "layouts.json was edited"),
    ],
)
def test_damaged_artifacts(tmp_path: Path, file: str, old: str, new: str, what: str) -> None:
    program().save(tmp_path / "out")
    damaged(tmp_path / "out", file, old, new)
    with pytest.raises(shardc.ShardcError, match=re.escape(what)) as caught:
        shardc.load(tmp_path / "out")
    assert str(tmp_path) in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("aten.linear.default(", "aten.linnear.default(", "there is no op aten.linnear.default"),
        ("aten.linear.default(", "print(", "is no op that programs call"),
        ("aten.linear.default(", "ops.torch(", "is no op that programs call"),
        ("    return (", "    import os; return (", "cannot read 'import os'"),
        ("f64[", "f99[", "not a type"),
        (" = aten", " == aten", "cannot read"),
        ("def forward(", "def forward)", "not Python"),
    ],
)
def test_edited_programs_are_read_with_care(tmp_path: Path, old: str, new: str, what: str) -> None:
    """Reading executes nothing: whatever shardc would not write is an error with file and line."""
    program().save(tmp_path / "out")
    file = tmp_path / "out" / "stage0.py"
    head, body = file.read_text().split("):\n", 1)
    text = f"{head.replace(old, new, 1)}):\n{body.replace(old, new, 1)}" if old.startswith("def") else f"{head}):\n{body.replace(old, new, 1)}"
    file.write_text(text)
    with pytest.raises(shardc.ShardcError, match=re.escape(what)) as caught:
        shardc.load(tmp_path / "out", trust=True)
    assert re.search(r"stage0\.py:\d+", caught.value.where)


def test_a_trusted_edit_is_what_runs(tmp_path: Path) -> None:
    model, batch = zoo.mlp()
    p = shardc.compile(model, batch, {"shardc": 1, "mesh": {}}, prove=False)
    p.save(tmp_path / "out")
    file = tmp_path / "out" / "stage0.py"
    text = file.read_text()
    name = re.search(r"return \((\w+), ", text)
    assert name
    last = next(n for n in p.stages[0].graph.nodes if n.name == name[1])
    extra = f"    twice = aten.mul.Tensor({name[1]}, 2)  # {emit.value_text(last.meta['value'])}\n    return (twice, "
    file.write_text(text.replace(f"    return ({name[1]}, ", extra))
    one, two = (shardc.simulate(x, model, batch).loss for x in (p, shardc.load(tmp_path / "out", trust=True)))
    torch.testing.assert_close(two, 2 * one)


def test_saving_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    p = program()
    with pytest.raises(shardc.ShardcError, match="is no shardc artifact"):
        p.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    p.save(tmp_path / "out")
    p.save(tmp_path / "out")  # an artifact may be replaced
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine", "out"]


def test_loading_what_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(shardc.ShardcError, match="is no shardc artifact") as caught:
        shardc.load(tmp_path)
    assert "shardc compile -o" in caught.value.fix


def test_special_arguments_print_and_parse() -> None:
    def loss(out: Tensor, _: object) -> Tensor:
        return out.masked_fill(out > 1, float("-inf")).softmax(-1).to(torch.float64).sum()

    model = torch.nn.Linear(4, 4)
    p = shardc.compile(model, (torch.ones(4, 4),), {"shardc": 1, "mesh": {"dp": 2}}, loss=loss, prove=False)
    assert "float('-inf')" in str(p)
    assert "torch.float64" in str(p)
