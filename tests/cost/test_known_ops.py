"""What a dry run knows of ops already is what torch says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardc
from shardc.cost.dry_run import dry_run
from shardc.cost.known_ops import KnownOps
from shardc.cost.recorded import DryRun
from shardc.ir.program import Program
from shardc.machine.work import Op
from shardc.runtime.step.engine_optimizer import adamw
from tests import zoo
from tests.plan.test_plan import Sparse


def compiled(name: str, **spec: Any) -> Program:
    model, batch = zoo.ALL[name]()
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)


SPECS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3}, "checkpoint": [{"match": "h.*", "save": []}]}),
    ("llama", {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 1}}),
    ("moe", {"mesh": {"dp": 2}, "precision": {"params": "float32", "compute": "bfloat16"}}),
    ("resnet_bn", {"mesh": {"dp": 2}}),
]


def told(r: DryRun) -> Any:
    """A dry run as plain values, with the names of what made something. Keys of collectives are addresses."""
    keys: dict[Any, int] = {}

    def part(p: Any) -> Any:
        def plain(w: Any) -> Any:
            if isinstance(w, Op):
                return w
            return tuple(keys.setdefault(x, len(keys)) if isinstance(x, int) else x for x in w)

        work = [plain(w) for w in p.work]
        return [(sign, s.nbytes, s.kind, s.op, s.shape) for sign, s in p.changes], work, p.sent

    every = [("before", r.before), *((str(a), p) for a, p in r.actions), ("after", r.after), ("update", r.update)]
    return sorted((s.nbytes, s.kind, s.op) for s in r.resident), [(name, part(p)) for name, p in every]


class Forgets(KnownOps):
    """Asks torch for every op anew."""

    def key(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize(("name", "spec"), SPECS, ids=[n for n, _ in SPECS])
def test_ops_that_are_known_give_what_torch_says(name: str, spec: dict[str, Any]) -> None:
    """Known from the same dry run, and from another one before."""
    program, known = compiled(name, **spec), KnownOps()
    asked = told(dry_run(program, 0, adamw, known=Forgets()))
    for _ in range(2):
        assert told(dry_run(program, 0, adamw, known=known)) == asked


def test_experts_on_a_gpu_are_one_product() -> None:
    """As the engine runs them there (runtime/ops/experts/grouped_mm.py): as many flops, fewer calls."""
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"params": "bfloat16"}}
    program = shardc.compile(Sparse(), {"x": torch.zeros(8, 4, 16)}, spec, prove=False)

    def products(cpu: bool) -> tuple[int, int]:
        ops = [w for _, p in dry_run(program, 0, adamw, cpu=cpu).actions for w in p.work if isinstance(w, Op)]
        return sum(w.flops for w in ops), sum(w.name == "_grouped_mm" for w in ops)

    (flops, calls), (flops_of_loops, none) = products(cpu=False), products(cpu=True)
    assert calls == 5  # two, and their gradients but for the input's
    assert not none
    assert flops == flops_of_loops
    assert told(dry_run(program, 0, adamw, cpu=True, known=Forgets())) == told(dry_run(program, 0, adamw, cpu=True))
