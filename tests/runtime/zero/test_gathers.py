"""ZeRO 3's gathers in backward begin ahead of use, in the order in which backward asks: with recomputation too, and in
the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost import dry_run
from shardc.cost.ledger import FakeLedger
from shardc.ir.program import Program
from shardc.machine.work import Op, Part, Sent, Waited


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Blocks of which each is several buckets of 8 KiB."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def compiled(**more: Any) -> Program:
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 8 / 1024}, **more}
    return shardc.compile(Net(), torch.randn(8, 16), spec)


def steps(program: Program, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> list[list[Part]]:
    """What a rank does in two steps."""
    made: list[FakeLedger] = []

    def ledger(*options: Any) -> FakeLedger:
        made.append(FakeLedger(*options))
        return made[-1]

    monkeypatch.setattr(dry_run, "FakeLedger", ledger)
    dry_run.dry_run(program, at)
    parts: list[list[Part]] = []
    for part in made[0].parts:
        if part.name == "the batch":
            parts.append([])
        if parts:
            parts[-1].append(part)
    return parts


def exposed(parts: list[Part]) -> tuple[int, int]:
    """(gathers in backward that are waited for as soon as they begin, all gathers in backward)."""
    work = [w for p in parts for w in p.work]
    gathers = [
        i
        for i, w in enumerate(work)
        if isinstance(w, Sent) and w.record.kind == "all_gather" and w.record.direction == "backward"
    ]

    def hidden(i: int) -> bool:
        sent = work[i]
        assert isinstance(sent, Sent)
        between = work[i : work.index(Waited(sent.key), i)] if sent.key is not None else []
        return any(isinstance(w, Op) for w in between)

    return sum(not hidden(i) for i in gathers), len(gathers)


REGIONS = [{"match": "blocks.*"}]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"checkpoint": REGIONS},
        {"checkpoint": [{"match": "blocks.*"}, {"match": "blocks.*.up"}]},
        {"checkpoint": REGIONS, "batch": {"microbatches": 4}},
        {"checkpoint": REGIONS, "precision": {"compute": "bfloat16"}},
    ],
    ids=["plain", "regions", "nested", "microbatches", "precision"],
)
def test_gathers_begin_ahead(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = map(exposed, steps(compiled(**more), monkeypatch))
    backwards = more.get("batch", {}).get("microbatches", 1)
    assert second[1] >= backwards * 10
    assert second[0] <= backwards  # the first of a backward has nothing to hide behind
    assert first[0] <= 2


def test_the_second_sum_of_hybrid_sharding_follows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for zero, microbatches in ((2, 1), (3, 1), (3, 2)):
        spec = {"mesh": {"dp_outer": 2, "dp": 2}, "data": {"zero": zero, "bucket_mb": 8 / 1024}}
        program = compiled(**spec, batch={"microbatches": microbatches})
        work = [w for p in steps(program, monkeypatch)[1] for w in p.work]
        second = [w for w in work if isinstance(w, Sent) and w.record.tag and w.record.axes == ("dp_outer",)]
        assert len(second) == len(program.buckets)
        computed = [i for i, w in enumerate(work) if isinstance(w, Op) and w.flops]
        first = {w.key: w for w in work if isinstance(w, Sent) and w.record.kind == "reduce_scatter"}
        if microbatches == 1:  # else sums of microbatches are added before
            assert [first[w.after].record.tag for w in second] == [w.record.tag for w in second]
        assert sum(work.index(w) < computed[-1] for w in second) >= len(second) - 3
