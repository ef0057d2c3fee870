"""A program's text prints, parses back to the same program, and runs as it is."""

from __future__ import annotations

import functools
import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.artifact import emit, parser
from shardc.ir.source import Source
from shardc.ir.stage import Stage
from shardc.report.text import before
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.spec import Spec
from tests import example_text, zoo
from tests.test_equal import spec_of

MODELS = ("gpt", "llama", "gpt2", "bert", "t5", "resnet_bn", "moe")


@functools.cache
def made(name: str) -> tuple[Any, Any]:
    """A model of the zoo, and its batch."""
    return zoo.ALL[name](dropout=0.1) if name == "gpt" else zoo.ALL[name]()


def program(name: str = "gpt", *, sequence: bool = True) -> shardc.Program:
    model, batch = made(name)
    if name in ("resnet_bn", "moe"):
        return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 4}}, prove=False)
    return shardc.compile(model, batch, spec_of(name, {"dp": 2, "tp": 2}, sequence=sequence), prove=False)


def types(p: Program) -> dict[str, Any]:
    return {x.name: x.value for x in p.stored}


# --- the text


def test_golden_program(golden: Callable[[str, str], None]) -> None:
    golden("written.txt", str(example_text.program()))


def test_golden_files(golden: Callable[[str, str], None]) -> None:
    p = example_text.program()
    golden("written_stage0.py.txt", emit.module(p.stages[0].graph, p, "stage0: what every rank runs."))
    golden("written_before.txt", before(p))


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_fixed_points(name: str) -> None:
    p = program(name)
    for graph in (p.graph, *(s.graph for s in p.stages)):
        given = {n.name: n.meta["value"] for n in graph.nodes if n.op == "placeholder"}
        del given["mesh"], given["rng"]
        text = emit.module(graph, p, "again")
        back = parser.Reader(text, p.mesh, given).run()
        assert emit.module(back, p, "again") == text
        for old, new in zip(graph.nodes, back.nodes, strict=True):
            assert (old.op, old.name, old.target) == (new.op, new.name, new.target)
            assert old.op == "placeholder" or str((old.args, old.kwargs)) == str((new.args, new.kwargs))
            assert old.meta.get("collective") == new.meta.get("collective")
            if old.op == "call_function":
                assert old.meta["value"] == new.meta["value"]
                assert old.meta["source"] == new.meta["source"]


def test_the_text_of_a_rank_runs_on_a_mesh_as_it_stands(tmp_path: Path) -> None:
    """The files alone, without the compiler: what all ranks compute is what the file of one device computes."""
    p = example_text.program()
    p.save(tmp_path / "out")
    forward, single = (runpy.run_path(str(tmp_path / "out" / f))["forward"] for f in ("stage0.py", "single.py"))
    g = torch.Generator().manual_seed(0)
    whole = {x.name: torch.randn(x.shape, generator=g, dtype=x.dtype) for x in p.stored} | {
        "count": torch.tensor(32.0, dtype=torch.float64)
    }

    def work(mesh: LoopbackMesh) -> tuple[Tensor, tuple[Tensor]]:
        parts = [x.layout.local(whole[x.name], p.mesh, p.mesh.coords(mesh.rank)) for x in p.stored]
        found: tuple[Tensor, tuple[Tensor]] = forward(mesh, None, *parts)
        return found

    want, (mean,) = single(None, None, *whole.values())
    for loss, (new,) in loopback(p.mesh, work):
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(new, mean, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "source",
    [
        Source("experts.a b", "my model (1).py:3", "x = f(y): z  # (what): is"),
        Source("", "", ""),
        Source("h.0", "", ""),
        Source("h.0", "a.py:1", "s = '·'"),
    ],
)
def test_odd_sources_come_back(source: Source) -> None:
    assert _through(source) == source


def test_control_characters_stay_on_their_line() -> None:
    assert _through(Source("h", "a.py:1", "x = '\x0c\u2028\r\n'")) == Source("h", "a.py:1", "x = '    '")


def _through(source: Source) -> Source:
    p = example_text.program()
    graph = p.stages[0].graph
    node = next(n for n in graph.nodes if n.name == "square")
    node.meta["source"] = source
    text = emit.module(graph, p, "odd")
    back = parser.Reader(text, p.mesh, types(p)).run()
    assert emit.module(back, p, "odd") == text
    found: Source = next(n for n in back.nodes if n.name == "square").meta["source"]
    return found


@pytest.mark.parametrize(
    "argument",
    [
        None,
        True,
        -3,
        2.5,
        -1e-30,
        float("inf"),
        float("-inf"),
        "a # 'b\n'",
        1 - 2j,
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        torch.device("cuda", 1),
        [1, [2, -1]],
        (),
        (1,),
        (0, "tp", 1, (3, 4)),
    ],
)
def test_arguments_print_and_parse(argument: Any) -> None:
    p = example_text.program()
    graph = p.stages[0].graph
    node = next(n for n in graph.nodes if n.name == "square")
    node.args = (node.args[0], argument)
    text = emit.module(graph, p, "arguments")
    compile(text, "text", "exec")
    back = next(n for n in parser.Reader(text, p.mesh, types(p)).run().nodes if n.name == "square").args[1]
    assert back == argument
    assert type(back) is type(argument) or isinstance(argument, list)


def test_what_has_no_written_form_is_refused() -> None:
    p = example_text.program()
    node = next(n for n in p.stages[0].graph.nodes if n.name == "square")
    node.args = (node.args[0], slice(1, 2))
    with pytest.raises(TypeError, match="cannot stand in a program"):
        str(p)


def test_names_that_the_text_needs_are_refused() -> None:
    p = example_text.program()
    graph = torch.fx.Graph()
    for n in ("mesh", "rng", "aten"):
        graph.placeholder(n).meta["value"] = None
    graph.output((None, ()))
    x = replace(p.params[0], name="aten", fqn="aten")
    with pytest.raises(shardc.ShardcError, match="'aten' cannot be the name of a parameter") as caught:
        str(replace(p, params=(x,), buckets=(), stages=(Stage(graph),)))
    assert caught.value.where == "aten"
    assert "rename it" in caught.value.fix


# --- the artifact


@pytest.mark.parametrize("name", MODELS)
def test_the_artifact_comes_back_the_same(name: str, tmp_path: Path) -> None:
    first = program(name)
    first.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert str(again) == str(first)
    assert before(again) == before(first)
    assert (again.params, again.buffers, again.inputs, again.buckets) == (
        first.params,
        first.buffers,
        first.inputs,
        first.buckets,
    )
    assert again.spec == first.spec


def test_what_the_engine_acts_on_comes_back(tmp_path: Path) -> None:
    sections = {"precision": {"loss_scale": "dynamic"}, "data": {"offload": {"optimizer": "cpu"}, "bucket_mb": 2}}
    fields = {
        "shared_modules": (("a", "b"),),
        "spec": Spec.load({"shardc": 1, "mesh": {"dp": 2, "tp": 2}, **sections}),
    }
    first = replace(example_text.program(), **fields)
    first.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert {key: getattr(again, key) for key in fields} == fields
    assert again.meta == first.meta


@pytest.mark.parametrize("name", ["gpt", "resnet_bn"])
def test_a_loaded_program_computes_the_same(name: str, tmp_path: Path) -> None:
    first = program(name)
    first.save(tmp_path / "out")
    model, batch = made(name)
    one, two = (shardc.verify.simulate(p, model, batch, seed=3) for p in (first, shardc.load(tmp_path / "out")))
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
    torch.testing.assert_close(loss, shardc.verify.simulate(p, model, batch).loss)
    assert news == ()


def test_every_collective_stands_in_the_text_with_its_cause() -> None:
    p = program("llama")
    text = p.text(full=True)
    found = [n for n in p.stages[0].graph.nodes if "collective" in n.meta]
    assert found
    for n in found:
        line = next(line for line in text.splitlines() if line.lstrip().startswith(f"{n.name} = "))
        assert f"{n.meta['collective'].kind}/{n.meta['collective'].backward} " in line
        assert n.meta["collective"].cause
        assert n.meta["collective"].cause.replace('"', '\\"') in line
    assert re.search(r"# model\.layers\.0\.self_attn\.q_proj \(modeling_llama\.py:\d+\): ", text)


def test_dead_values_are_deleted_where_they_die() -> None:
    lines = program("gpt").text(full=True).splitlines()
    deleted = {n for line in lines if line.startswith("    del ") for n in line.removeprefix("    del ").split(", ")}
    assert "wte_weight" not in deleted  # parameters belong to the caller
    made = {line.split(" = ")[0].strip() for line in lines if " = " in line and not line.lstrip().startswith("#")}
    assert made - deleted == {n.name for n in _results(program("gpt"))}


def test_what_nothing_reads_is_deleted_at_once() -> None:
    p = example_text.program()
    graph = p.stages[0].graph
    square = next(n for n in graph.nodes if n.name == "square")
    with graph.inserting_after(square):
        node = graph.create_node("call_function", torch.ops.aten.relu.default, (square,), {}, name="unread")
    node.meta = dict(square.meta)
    assert "    unread = aten.relu.default(square)  # f64[8@dp, 4] grad\n    del unread\n" in str(p)


def _results(p: shardc.Program) -> set[torch.fx.Node]:
    return set(p.stages[0].graph.output_node().all_input_nodes)


def damaged(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("manifest.json", '"format": 5', '"format": 99', "artifact of format 99"),
        ("manifest.json", "{", "", "is not JSON"),
        ("manifest.json", '"sha256"', '"md5"', "is not the manifest of a shardc artifact"),
        ("manifest.json", '"mesh"', '"mush"', "mesh: Field required"),
        ("manifest.json", '"torch": "2.', '"torch": "1.', "compiled with torch 1."),
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
        ("aten.linear.default(", "print(", "is not an op that programs call"),
        ("aten.linear.default(", "ops.torch(", "is not an op that programs call"),
        ("aten.linear.default(", "aten.linear(", "name an op with its overload"),
        ("aten.linear.default(", "aten.linear.default(*", "cannot read the argument"),
        (", tag=", ", **rng, tag=", 'cannot read "ops.'),
        ("aten.linear.default(", "torch.ops.load_library(", "is not an op that programs call"),
        ("aten.linear.default(", "aten.from_file.default(", "opens a file: programs call ops that only compute"),
        ("aten.linear.default(", "aten.zero_.default(", "changes its arguments: programs call ops that only compute"),
        ("aten.linear.default(", "aten._assert_async.msg(", "returns nothing: programs call ops that only compute"),
        ("    return (", "    del nothing\n    return (", "cannot read the deletion of 'nothing'"),
        ("    return (", "    pass; return (", "cannot read 'pass'"),
        ("    return (", "    loss = (", "cannot read"),
        ("    return (", "    return (mesh, ())\n    return (", "nothing can follow the return"),
        ("    mesh,", "    mesh, /,", "another order or form"),
        ("def forward(", "def backward(): ...\ndef forward(", "2 functions, not one"),
        ("def forward(", "print('hello')\ndef forward(", "cannot read \"print('hello')\""),
        ("    wte_weight,", "    wtf_weight,", "'wte_weight' is missing, 'wtf_weight' is not listed"),
        (" ~dp grad\n", " ~qp grad\n", "the mesh has no axis qp"),
        ("  # f64[", "  # f32[", "in the layouts"),
        ("all_gather/", "all_gather\\", "cannot read 'all_gather"),
        ("    return (", "    import os; return (", "cannot read 'import os'"),
        (")  # f64[", ")  # f99[", "not a type"),
        (" = aten", " == aten", "cannot read"),
        ("def forward(", "def forward)", "not Python"),
    ],
)
def test_edited_programs_are_read_with_care(tmp_path: Path, old: str, new: str, what: str) -> None:
    """Reading executes nothing: whatever shardc would not write is an error with file and line."""
    program().save(tmp_path / "out")
    file = tmp_path / "out" / "stage0.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(shardc.ShardcError, match=re.escape(what)) as caught:
        shardc.load(tmp_path / "out", trust=True)
    assert re.search(r"stage0\.py:\d+", caught.value.where)


def test_a_trusted_edit_is_what_runs(tmp_path: Path) -> None:
    model, batch = zoo.mlp()
    p = shardc.compile(model, batch, {"shardc": 1, "mesh": {}}, prove=False)
    p.save(tmp_path / "out")
    for graph in ("stage0.py", "stage0_forward.py"):
        file = tmp_path / "out" / graph
        assert file.read_text().count("aten.mean.default(") == 1
        file.write_text(file.read_text().replace("aten.mean.default(", "aten.sum.default("))
        if graph == "stage0.py":
            with pytest.raises(shardc.ShardcError, match=r"stage0.py was edited, and stage0_forward.py and"):
                shardc.load(tmp_path / "out", trust=True)
    edited = shardc.load(tmp_path / "out", trust=True)
    one, two = (shardc.verify.simulate(x, model, batch).loss for x in (p, edited))
    assert two > 2 * one
    assert not edited.prove().ok


def test_every_damaged_file_is_named_at_once(tmp_path: Path) -> None:
    program().save(tmp_path / "out")
    damaged(tmp_path / "out", "stage0.py", "aten", "atem")
    (tmp_path / "out" / "single.py").unlink()
    with pytest.raises(shardc.ShardcError) as caught:
        shardc.load(tmp_path / "out")
    assert {e.what for e in caught.value.errors} == {
        "single.py is missing",
        "stage0.py was edited after it was written",
    }


def test_edited_tables(tmp_path: Path) -> None:
    program().save(tmp_path / "out")
    damaged(tmp_path / "out", "layouts.json", '"fqn"', '"fqm"')
    with pytest.raises(shardc.ShardcError, match=re.escape("params[0].fqn: Field required")) as caught:
        shardc.load(tmp_path / "out", trust=True)
    assert caught.value.where.endswith("layouts.json")


def test_another_torch_is_accepted_on_trust(tmp_path: Path) -> None:
    p = example_text.program()
    p.save(tmp_path / "out")
    damaged(tmp_path / "out", "manifest.json", '"torch": "2.', '"torch": "1.')
    assert shardc.load(tmp_path / "out", trust=True).text(full=True) == p.text(full=True)


def test_constants_come_back(tmp_path: Path) -> None:
    p = example_text.program()
    shared = torch.arange(6.0, dtype=torch.float64)
    more = [replace(p.buffers[1], name=n, shape=(3,), constant=shared[i : i + 3]) for i, n in enumerate("ab")]
    graphs = []
    for graph in (p.graph, p.stages[0].graph):
        with graph.inserting_before(next(n for n in graph.nodes if n.name == "x")):
            for b in more:
                graph.placeholder(b.name).meta["value"] = b.value
        graphs.append(graph)
    replace(p, buffers=(*p.buffers, *more)).save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert [b.constant.tolist() for b in again.buffers if b.constant is not None] == [
        32.0,
        [0.0, 1.0, 2.0],
        [1.0, 2.0, 3.0],
    ]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_constants_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    turns = torch.polar(torch.ones(4), torch.arange(4.0)).to(dtype)
    model = Turned(turns).to(turns.real.dtype)
    batch = torch.randn(4, 4, dtype=turns.real.dtype)
    p = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    p.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert [b.constant.dtype for b in again.buffers if b.constant is not None] == [dtype]
    assert torch.equal(shardc.verify.simulate(again, model, batch).loss, shardc.verify.simulate(p, model, batch).loss)


class Turned(nn.Module):
    """Multiplied by complex numbers that the code holds."""

    def __init__(self, turns: Tensor) -> None:
        super().__init__()
        self.linear, self.turns = nn.Linear(4, 4), turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.linear(x) * self.turns).square().mean()


def test_saving_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    p = program()
    with pytest.raises(shardc.ShardcError, match="is not a shardc artifact"):
        p.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    p.save(tmp_path / "out")
    p.save(tmp_path / "out")  # an artifact may be replaced
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine", "out"]
    (tmp_path / "mine" / "manifest.json").write_text(json.dumps({"name": "a web page"}))
    with pytest.raises(shardc.ShardcError, match="is not a shardc artifact"):
        p.save(tmp_path / "mine")
    (tmp_path / "out" / "weights.bin").write_text("days of training")
    with pytest.raises(shardc.ShardcError, match=re.escape("contains files that are not the artifact's: weights.bin")):
        p.save(tmp_path / "out")
    with pytest.raises(shardc.ShardcError, match="is not a shardc artifact"):
        p.save(tmp_path / "mine" / "thesis.txt")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    p = example_text.program()
    p.save(tmp_path / "out")
    with pytest.raises(TypeError, match="JSON"):
        replace(p, meta={"model": "new", "when": object()}).save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").text(full=True) == p.text(full=True)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


def test_loading_what_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(shardc.ShardcError, match="is not a shardc artifact") as caught:
        shardc.load(tmp_path)
    assert "shardc compile -o" in caught.value.fix


def test_special_arguments_print_and_parse() -> None:
    def loss(out: Tensor, _: object) -> Tensor:
        return out.masked_fill(out > 1, float("-inf")).softmax(-1).to(torch.float64).sum()

    model = torch.nn.Linear(4, 4)
    p = shardc.compile(model, (torch.ones(4, 4),), {"shardc": 1, "mesh": {"dp": 2}}, loss=loss, prove=False)
    assert "float('-inf')" in str(p)
    assert "torch.float64" in str(p)
