"""Of a step, as of one under autograd, it is known which ops of backward compute something again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.api import Program
from shardc.cost import waterfall
from shardc.cost.measured.op_times import OpTimes
from shardc.machine.work import Op
from shardc.runtime.mesh.loopback import loopback

PIPE: dict[str, Any] = {"mesh": {"pp": 2}, "batch": {"microbatches": 4}}
SPECS: dict[str, dict[str, Any]] = {
    "one device": {"mesh": {"dp": 1}},
    "ZeRO 3": {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.001}},
    "backward in two halves": PIPE | {"pipeline": {"axis": "pp", "stages": 2, "schedule": "zb-h1"}},
    "pairs": PIPE | {"pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"}},
}


def compiled(spec: dict[str, Any]) -> tuple[Program, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)))
    batch = {"input": torch.randn(8, 16)}
    spec = {"shardc": 1, "checkpoint": [{"match": "{0,1,2,3}"}], **spec}
    return shardc.compile(model, batch, spec, loss=lambda y, batch: y.sum(), prove=False), model, batch


def again(ops: list[Op]) -> Counter[tuple[str, int]]:
    """How often the ops of forward's layers are computed again."""
    return Counter((op.name, op.flops) for op in ops if op.again and op.name in ("addmm", "gelu"))


@pytest.mark.parametrize("name", SPECS)
def test_predicted(name: str) -> None:
    program, _, _ = compiled(SPECS[name])
    cost = program.cost("h100-80g")
    repeated = [again([w for _, p in r.actions for w in p.work if isinstance(w, Op)]) for r in cost.dry_runs]
    assert waterfall.predicted(cost)["recomputed"] > 0
    assert all(sum(each.values()) >= 4 for each in repeated)


def test_measured() -> None:
    def measured(program: Program, model: nn.Module, batch: Any) -> list[Counter[tuple[str, int]]]:
        def step(mesh: Any) -> Counter[tuple[str, int]]:
            engine = program.engine(model, mesh=mesh)
            with OpTimes(torch.device("cpu"), mesh) as times:
                engine.step(batch)
            ops = [x.op for x in times.measured(1).ops for _ in range(x.count)]
            return again(ops)

        return loopback(program.mesh, step)

    assert sum(measured(*compiled(SPECS["one device"]))[0].values()) == 8


def test_an_error_in_between() -> None:
    """The next step's ops are not taken for repeated ones."""
    program, model, batch = compiled(SPECS["one device"])

    def step(mesh: Any) -> bool:
        engine = program.engine(model, mesh=mesh)
        with mesh.step.training():
            mesh.step.repeats = True
        with mesh.step.training():
            assert not mesh.step.repeats
        engine.step(batch)
        return bool(mesh.step.repeats)

    assert loopback(program.mesh, step) == [False]
