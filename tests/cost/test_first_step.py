"""A first step that leaves out forward and backward leaves the same to the second one: every byte that it holds and
changes, in order, and all that it computes and sends.
"""

from __future__ import annotations

from typing import Any

import pytest

import shardc
from shardc.cost import first_step
from shardc.cost.dry_run import dry_run
from shardc.cost.recorded import DryRun
from shardc.ir.program import Program
from shardc.machine.work import Op
from shardc.runtime.step.engine_optimizer import adamw
from tests import zoo

CAST = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
SPECS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 1}, "precision": CAST}),
    ("llama", {"mesh": {"dp": 2}, "data": {"zero": 2}, "batch": {"microbatches": 4}, "precision": CAST}),
    (
        "llama",
        {
            "mesh": {"pp": 2, "dp": 2},
            "pipeline": {"axis": "pp", "schedule": "1f1b"},
            "batch": {"microbatches": 2},
            "checkpoint": [{"match": "*", "save": []}],
        },
    ),
    ("moe", {"mesh": {"dp": 2}, "freeze": ["*", "!embed"]}),
]


def compiled(name: str, spec: dict[str, Any]) -> Program:
    model, batch = zoo.gpt(dropout=0.1) if name == "dropout" else zoo.ALL[name]()
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)


def told(r: DryRun) -> Any:
    """As plain values. Keys of collectives are numbered in their order."""
    keys: dict[Any, int] = {}

    def plain(w: Any) -> Any:
        return w if isinstance(w, Op) else tuple(keys.setdefault(x, len(keys)) if isinstance(x, int) else x for x in w)

    every = [r.before, *(p for _, p in r.actions), r.after, r.update]
    parts = [([(sign, s.nbytes, s.kind) for sign, s in p.changes], [plain(w) for w in p.work], p.sent) for p in every]
    return sorted((s.nbytes, s.kind) for s in r.resident), parts


@pytest.mark.parametrize(("name", "spec"), SPECS, ids=["zero-1", "zero-2", "pipeline", "frozen"])
def test_a_first_step_of_gradients_alone_leaves_what_a_whole_one_does(
    name: str, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(name, spec)
    assert not first_step.leaves_more(program, list(program.stages))
    last = program.schedule.ranks - 1 if program.schedule is not None else 0
    for at, cpu in ((0, False), (last, True)):
        less = told(dry_run(program, at, adamw, cpu=cpu))
        with monkeypatch.context() as m:
            m.setattr(first_step, "leaves_more", lambda *_: True)
            assert told(dry_run(program, at, adamw, cpu=cpu)) == less


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", {"mesh": {"dp": 2}, "data": {"zero": 3}}),
        ("resnet_bn", {"mesh": {"dp": 2}}),
        ("dropout", {"mesh": {"dp": 2}}),
        ("llama", {"mesh": {"dp": 2}, "checkpoint": [{"match": "*", "save": [], "offload": "cpu"}]}),
    ],
    ids=["gathers", "buffers", "dropout", "on the host"],
)
def test_what_leaves_more_runs_its_first_step_whole(name: str, spec: dict[str, Any]) -> None:
    program = compiled(name, spec)
    assert first_step.leaves_more(program, list(program.stages))
