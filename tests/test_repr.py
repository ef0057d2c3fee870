"""What public values show of themselves in a prompt, a debugger, a log: a line, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import shardc
from tests import zoo

SPEC = {"shardc": 1, "mesh": {"pp": 2, "dp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}


def values() -> Iterator[Any]:
    model, batch = zoo.gpt()
    program = shardc.compile(model, batch, SPEC, prove=False)
    cost = program.cost("h100-80g")
    planned = shardc.plan(*zoo.mlp(), devices=2)
    yield from (program, *program.stages, program.schedule, program.spec)
    yield from (*program.params, *program.inputs)
    yield from (cost, *cost.ranks, cost.memory, *cost.dry_runs)
    yield from (planned, planned.best, planned.target)
    yield from (shardc.simulate(program, model, batch), program.verify(), shardc.coverage(model, batch))


def test_reprs_are_a_line() -> None:
    for value in values():
        text = repr(value)
        assert len(text) < 300, text
        assert "\n" not in text, text
        assert type(value).__name__ in text


def test_they_say_what_it_is() -> None:
    model, batch = zoo.mlp()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    assert "on dp=2: 1 stage, " in repr(program)
    assert "of 79.1 GiB; step" in repr(program.cost("h100-80g"))
    planned = shardc.plan(model, batch, devices=2)
    assert "best: <Candidate" in repr(planned)
    assert str(planned).splitlines()[0].startswith(f"{planned.target.model} on 2 × h100-80g")
