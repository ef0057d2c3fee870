"""What tests of `sequence:` have in common: sections of specs, and a program of a split sequence against one device."""

from __future__ import annotations

from typing import Any

import shardc
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step.engine import Engine
from tests import equality
from tests.equality import assert_equal

CP: dict[str, Any] = {"axis": "cp"}
TP = {"shard": {"use": "structure"}}
PP = {"pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}


def check(
    one: equality.Reference,
    mesh: dict[str, int],
    method: Any = "gather",
    balance: str = "auto",
    axis: Any = "cp",
    **more: Any,
) -> shardc.Program:
    section = {"axis": axis, "method": method, "balance": balance}
    program = one.compile({"shardc": 1, "mesh": mesh, "sequence": section, **more})
    assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)
    assert equality.unnoticed(program) == []
    return program


def exchanged(program: Any, one: equality.Reference, direction: str) -> int:
    """Bytes of the exchanges that all ranks make in one direction of a step."""
    found: list[int] = []

    def work(mesh: Any) -> None:
        Engine(program, one.model, None, 0, mesh=mesh, check=False).backward(one.batch)
        found.extend(r.bytes for r in mesh.records if r.kind == "all_to_all" and r.direction == direction)

    loopback(program.mesh, work)
    return sum(found)
