"""The proof without running: what is right is proven, what is broken is not, and the gap says where."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardc
from shardc.api import Program
from shardc.ir.graph import copy_graph
from shardc.ir.stage import DeferredJoint
from shardc.runtime import ops
from shardc.verify.static import chain_rule, prove, prove_within
from tests import zoo
from tests.verify import mutants
from tests.verify.settings import builders, settings
from tests.zoo import plain

TP, MICRO, ZERO3 = "dp=2, tp=2", "dp=2, tp=2, zero 1, 2 microbatches", "dp=2, tp=2, zero 3, recompute cheap"
PADDED, ZB_V = "dp=3, padded", "pp=2, dp=2, zb-v, zero 3"


@lru_cache
def model(name: str) -> tuple[Any, Any]:
    return builders()[name]()


def program(name: str, setting: str, **more: Any) -> Program:
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built, batch = model(name)
        return shardc.compile(built, batch, {"shardc": 1, **settings(built)[setting], **more}, prove=False)


@pytest.mark.parametrize("setting", [TP, MICRO, ZERO3, PADDED, ZB_V])
@pytest.mark.parametrize("name", ["t5", "mixtral", "resnet", "attention_weights"])
def test_right_programs_are_proven(name: str, setting: str) -> None:
    try:
        compiled = program(name, setting)
    except shardc.ShardcError:
        return  # batch statistics over microbatches
    assert prove(compiled).ok, str(prove(compiled))


@pytest.mark.parametrize("setting", [TP, MICRO])
def test_gradients_of_an_op_that_stays_whole_are_taken_over(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = program("mixtral", setting)
    assert prove(compiled).ok, str(prove(compiled))
    puts = [n for n in compiled.stages[0].joint.backward.nodes if n.kwargs.get("own")]
    assert [n for n in puts if n.args[1].args[0].target is ops.opaque_backward]
    monkeypatch.setattr(chain_rule.ChainRule, "fresh", property(lambda _: set(), lambda *_: None), raising=False)
    assert any("which is not this text's own" in gap.what for gap in prove(compiled).gaps)


@pytest.mark.parametrize("setting", [TP, MICRO, PADDED, ZB_V])
def test_losses_in_chunks_are_proven(setting: str) -> None:
    compiled = program("llama", setting, loss={"chunks": 3})
    assert "in_chunks" in compiled.text()
    assert prove(compiled).ok, str(prove(compiled))


class Classes(torch.nn.Module):
    """A soft cap, probabilities as targets, and a mask of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 12)

    def forward(self, x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
        z = 9 * torch.tanh(self.head(x) / 9) + mask
        return torch.nn.functional.cross_entropy(z, p)


def _edited(program: Program, change: Callable[[list[Any]], None]) -> Program:
    """The program, the arguments of whose last `in_chunks` are changed."""
    graph = copy_graph(program.stages[0].graph)
    *_, call = (n for n in graph.nodes if n.target is ops.in_chunks)
    chunks, body, outputs, *rest = call.args
    args: list[Any] = [chunks, [list(line) for line in body], [list(o) for o in outputs], *map(list, rest[:2]), rest[2]]
    change(args)
    call.args = (args[0], tuple(map(tuple, args[1])), tuple(map(tuple, args[2])), *map(tuple, args[3:5]), args[5])
    return replace(program, stages=(replace(program.stages[0], graph=graph),))


#: What is done to the last call: its arguments are (chunks, body, outputs, rows, whole, mesh).
CHUNK_FAULTS: dict[str, Callable[[list[Any]], None]] = {
    "another constant": lambda a: a[1].__setitem__(1, ["aten.div.Tensor", (a[1][1][1][0], 8), ()]),
    "an op that mixes rows": lambda a: a[1].__setitem__(1, ["aten.cumsum.default", (a[1][1][1][0], 0), ()]),
    "a sum over rows": lambda a: a[1].__setitem__(-1, [a[1][-1][0], (a[1][-1][1][0], [0]), ()]),
    "no tanh": lambda a: a[1].__setitem__(2, ["aten.clone.default", a[1][2][1], ()]),
    "another result": lambda a: a[2].__setitem__(0, [a[2][0][0] - 1, 0]),
    "rows along classes": lambda a: a[2].__setitem__(0, [a[2][0][0], 1]),
    "an op that is none": lambda a: a[1].__setitem__(1, ["os.system", ("%0",), ()]),
    "no chunks": lambda a: a.__setitem__(0, "8"),
    "rows that are read whole": lambda a: a[4].insert(0, a[3].pop()),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fault", CHUNK_FAULTS)
def test_wrong_chunks_are_noticed(fault: str, tp: int) -> None:
    rows = torch.randn(6, 8), torch.rand(6, 12), torch.zeros(12)
    spec = {"shardc": 1, "mesh": {"tp": tp}, "shard": {"head": "column"}, "loss": {"chunks": 2}}
    compiled = shardc.compile(Classes(), rows, spec, prove=False)
    assert prove(compiled).ok, str(prove(compiled))
    assert prove(_edited(compiled, lambda _: None)).ok
    assert not prove(_edited(compiled, CHUNK_FAULTS[fault])).ok


def test_a_loss_in_chunks_of_a_pinned_layer_is_proven() -> None:
    spec = {"shardc": 1, "mesh": {"tp": 2}, "activations": {"head": {1: "tp"}}, "loss": {"chunks": 2}}
    with zoo.Wide():
        compiled = shardc.compile(*zoo.gpt(), spec, prove=False)
    assert "in_chunks" in compiled.text()
    assert prove(compiled).ok, str(prove(compiled))


def test_a_constant_in_two_layouts_is_proven_where_microbatches_pad_one() -> None:
    """The cells' first states are equal zeros, of which one is split over tp."""
    spec = {
        "shardc": 1,
        "mesh": {"tp": 3},
        "batch": {"microbatches": 3},
        "uneven": "pad",
        "shard": {"head": "column"},
        "activations": {"one": {0: "tp"}},
    }
    with zoo.Wide():
        compiled = shardc.compile(*plain.ALL["cells"](), spec, prove=False)
    assert prove(compiled).ok, str(prove(compiled))


def test_a_value_of_another_stage_that_waits_on_the_host_is_proven() -> None:
    """Its type is that of all ranks, unlike that of a rank's own values."""
    spec = {
        "shardc": 1,
        "mesh": {"pp": 2, "cp": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "sequence": {"axis": "cp"},
        "checkpoint": [{"match": "bert.encoder.layer.*.attention.self", "save": [], "offload": "cpu"}],
    }
    with zoo.Wide():
        compiled = shardc.compile(*builders()["bert"](), spec, prove=False)
    assert "reload_wait" in compiled.joint()
    assert prove(compiled).ok, str(prove(compiled))


@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("balance", ["none", "zigzag"])
def test_split_sequences_are_proven(method: str, balance: str) -> None:
    section = {"axis": "cp", "method": method, "balance": balance}
    with zoo.Wide():
        built, batch = model("llama")
        spec = {"shardc": 1, "mesh": {"dp": 2, "cp": 2}, "sequence": section, "batch": {"microbatches": 2}}
        proof = prove(shardc.compile(built, batch, spec, prove=False))
    assert proof.ok, str(proof)


def test_what_stages_send_may_be_split_in_several_ways_at_once() -> None:
    """Learned queries, repeated for each row, are alike in all: a part of them is that of any digit."""
    model, batch = plain.ALL["detector"]()
    more = {"pipeline": {"axis": "pp", "stages": 3, "schedule": "gpipe"}, "freeze": ["*", "!box"]}
    spec = {"shardc": 1, "mesh": {"pp": 3, "tp": 2}, "batch": {"microbatches": 2}, "shard": {"use": "structure"}}
    program = shardc.compile(model, batch, {**spec, "activations": {"decoder:in": {1: "tp"}}, **more}, prove=False)
    assert program.prove().ok


def test_a_loaded_program_is_proven(tmp_path: Path) -> None:
    program("gpt", MICRO, activations={"h.*": {1: "tp"}}).save(tmp_path / "a")
    assert prove(shardc.load(tmp_path / "a")).ok


@pytest.mark.parametrize("setting", [TP, MICRO, ZERO3, PADDED, ZB_V])
def test_mutants_are_noticed(setting: str) -> None:
    """Of each kind one: a mutant that is not noticed has to be none, its step that of one device."""
    counts, missed, alarms = mutants.tried(iter([("gpt", program("gpt", setting))]), 1, run=False)
    assert not missed
    assert not alarms
    assert sum(c.made for c in counts.values()) > 10


def test_a_gap_names_line_module_and_what_would_be_right() -> None:
    compiled = program("gpt", TP)
    (stage,) = compiled.stages
    graph = copy_graph(stage.graph)
    total = next(n for n in graph.nodes if n.name == "linear_1_sum")
    total.replace_all_uses_with(total.args[0])  # type: ignore[arg-type]
    graph.erase_node(total)
    unwritten = DeferredJoint(lambda: pytest.fail("no backward can be written of a wrong stage"), RLock())
    proof = prove(replace(compiled, stages=(replace(stage, graph=graph, joint=unwritten),)))
    first = proof.gaps[0]
    assert not proof.ok
    assert first.where == "stage0: add_tensor_1"
    assert first.what == "on tp its operands are (whole, a sum still to be done), and no way to run it takes them so"
    assert first.line.startswith("add_tensor_1 = aten.add.Tensor(add_tensor, linear_1)")
    assert first.source.startswith("h.0 ")
    assert len(proof.gaps) == 1, "what follows of a gap is not told again"


def test_many_ranks_cost_no_more() -> None:
    """The texts are those of any number of ranks."""
    with zoo.Wide():
        built, batch = model("gpt")
        big = {k: x.repeat(512, 1) for k, x in batch.items()}
        spec = {"shardc": 1, "mesh": {"dp": 2048, "tp": 4}, "shard": {"use": "structure"}}
        proof = prove(shardc.compile(built, big, spec, prove=False))
    assert proof.ok
    assert proof.ranks == 8192
    assert proof.lines == prove(program("gpt", TP)).lines


def test_it_gives_up_in_time() -> None:
    assert prove_within(program("gpt", TP), 0.0) is None


def test_a_gradient_that_stops_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs and what they are compared with ask the same rules, which would be wrong in both."""
    monkeypatch.setattr("shardc.passes.joint.derivatives.CONVERTED", {})
    split = {"shard": {"*.fc": "column", "*.out": "row"}, "activations": {"drop": {1: "tp"}, "h.*": {1: "tp"}}}
    assert "the chain rule stops here" in str(program("gpt", TP, **split).prove())


@pytest.mark.parametrize("spec", [TP, ZB_V], ids=["tp", "zb-v"])
def test_graphs_of_a_step_are_proven(spec: dict[str, Any]) -> None:
    proven = program("gpt", spec)
    proof, forward = proven.prove(), replace(proven, stages=tuple(replace(s, joint=None) for s in proven.stages))
    assert proof.ok, proof
    assert proof.texts > forward.prove().texts
    assert proof.lines > 3 * forward.prove().lines


def test_cli(tmp_path: Path) -> None:
    from shardc.cli import app

    program("gpt", ZB_V).save(tmp_path / "a")
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "a"), "--static"])
    assert said.exit_code == 0, said.output
    assert said.output.startswith("proven equal to one device: ")
    document = json.loads(CliRunner().invoke(app, ["verify", str(tmp_path / "a"), "--static", "--json"]).output)
    assert document["ok"]
    assert document["gaps"] == []
    assert "conversions and their transposes" in document["assumed"]
    assert "conversions and their transposes" in said.output.splitlines()[1]


class _UnusedBranch(nn.Module):
    """Its blocks only feed a norm's statistics: the loss does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = y = self.stem(x)
        for block in self.blocks:
            y = y + block(y)
        self.norm(y)
        return h.sigmoid().square().mean()


def test_what_only_buffers_are_computed_from_needs_no_gradient() -> None:
    """The second stage receives a value only for them. Gradients of the blocks' weights are None, as on one device."""
    pipeline = {"axis": "pp", "cut": ["blocks.2"]}
    spec = {"shardc": 1, "mesh": {"pp": 2, "tp": 2}, "shard": {"use": "structure"}, "pipeline": pipeline}
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    program = shardc.compile(_UnusedBranch().double(), batch, spec, prove=False)
    assert program.prove().ok
