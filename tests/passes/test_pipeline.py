"""PIPELINE: every stage is a value in, a value out, and one more stage is one file and one line."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

import shardc
from shardc import passes
from shardc.artifact import emit
from shardc.ir.program import Program
from shardc.passes import PIPELINE, Entry, Pass, with_features
from tests import zoo
from tests.zoo import expert_loops

COMPILE = importlib.import_module("shardc.compile")  # `shardc.compile` itself is the function
#: A spec for which nearly every stage has something to do.
FULL = {
    "shardc": 1,
    "mesh": {"dp": 2, "pp": 2, "tp": 2},
    "batch": {"microbatches": 2},
    "shard": {"use": "structure"},
    "activations": {"h.*": {1: "tp"}},
    "pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"},
    "data": {"zero": 3},
    "checkpoint": [{"match": "h.*"}],
    "precision": {"compute": "bfloat16"},
}


def _state(program: Program) -> object:
    """All that a pass could change: the text, the tables, and what the nodes of the graphs carry."""
    graphs = [program.graph, *(stage.graph for stage in program.stages)]
    return (
        emit.text(program, full=True),
        {f.name: getattr(program, f.name) for f in fields(program)},  # not what it has worked out of these
        [(n.name, sorted(n.meta)) for graph in graphs for n in graph.nodes],
    )


def test_no_pass_changes_the_program_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()

    def watched(entry: Entry) -> Entry:
        class Watched(entry.make):  # type: ignore[name-defined, misc]
            def run(self, program: Program) -> Program:
                before = _state(program)
                result: Program = super().run(program)
                assert _state(program) == before, f"{entry.name} changed its input"
                ran.add(entry.name)
                return result

        return entry._replace(make=Watched)

    monkeypatch.setattr(COMPILE, "with_features", lambda entries: map(watched, with_features(entries)))
    model, batch = zoo.gpt()
    program = shardc.compile(model, batch, FULL, prove=False)
    shardc.compile(model, batch, program.spec, compatible_with=program, prove=False)
    experts = expert_loops.Model(expert_loops.Mixtral)
    entry = {"match": "moe", "axis": "ep", "capacity": 1.5}
    tokens = torch.randint(0, expert_loops.VOCAB, (4, 6))
    chosen = {"experts": [entry], "choices": {"*": "replay"}}
    shardc.compile(experts, (tokens,), {"shardc": 1, "mesh": {"ep": 2}, **chosen}, prove=False)
    narrow = {"batch": {"microbatches": 2}, "loss": {"chunks": 2}}
    narrow["precision"] = {"compute": "bfloat16", "products": "fp8-rowwise"}
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, **narrow}, prove=False)
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, forward=True, prove=False)
    tuned = {"adapters": [{"match": "*.fc", "rank": 2}], "optimizer": {"matrices": "whole"}}
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, **tuned}, prove=False)
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"cp": 2}, "sequence": {"axis": "cp"}}, prove=False)
    untried = {entry.name for entry in with_features(PIPELINE)} - ran
    assert untried == {"grouped_mm"}, "it needs a model with grouped products"


def test_a_pass_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is named, timed and dumped like the others."""

    @dataclass(frozen=True)
    class CountOps(Pass):
        def run(self, program: Program) -> Program:
            ops = sum(n.op == "call_function" for n in program.graph.nodes)
            return replace(program, notes=(*program.notes, f"{ops} ops on {self.spec.mesh}"))

    line = Entry("count_ops", CountOps, "of the graph that the rules see")
    monkeypatch.setattr(COMPILE, "PIPELINE", (*PIPELINE[:3], line, *PIPELINE[3:]))
    program = shardc.compile(*zoo.mlp(), {"shardc": 1, "mesh": {"dp": 2}}, dump=tmp_path)
    assert any(note.endswith("ops on dp=2") for note in program.notes)
    assert "count_ops" in program.meta["pass_seconds"]
    assert (tmp_path / "02-count_ops.txt").exists()


def test_every_pass_has_a_name_and_a_reason() -> None:
    entries = list(with_features(PIPELINE))
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    assert passes.CAPTURE not in names
    assert all(entry.why and entry.make.__doc__ for entry in entries)
