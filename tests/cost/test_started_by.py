"""What the host takes to start ops: nothing of a recorded step, more of what is computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardc
from shardc.api import Program
from shardc.cost import device


def compiled(graphs: bool, **sections: Any) -> Program:
    layers = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4))
    model = nn.Sequential(*layers)
    spec = {"shardc": 1, "mesh": {"dp": 1}, "execution": {"graphs": graphs}} | sections
    return shardc.compile(model, {"input": torch.zeros(4, 16)}, spec, loss=lambda y, batch: y.sum(), prove=False)


def test_the_host_starts_nothing() -> None:
    slow = device("h100-80g").model_copy(update={"host": 1e-3})
    op_by_op, recorded = (compiled(graphs).cost(slow) for graphs in (False, True))
    assert recorded.step_seconds < 1e-3 < 10e-3 < op_by_op.step_seconds
    assert recorded.device == slow
    assert recorded.memory.peak == op_by_op.memory.peak
    assert recorded.streams[0].now == recorded.ranks[0].seconds


def test_a_cpu_has_none() -> None:
    cpu = device("h100-80g").model_copy(update={"kind": "cpu"})
    op_by_op, recorded = (compiled(graphs).cost(cpu) for graphs in (False, True))
    assert recorded.step_seconds == op_by_op.step_seconds


def test_a_product_whose_rows_begin_anywhere() -> None:
    gpu = device("h100-80g")
    op = compiled(False).cost(gpu).dry_runs[0].actions[0][1].work[0]._replace(dtype="bfloat16", flops=10**12)
    seconds = {n: gpu.product_seconds(op._replace(aligned=n)) for n in (16, 8, 4, 2)}
    assert seconds[16] == seconds[8] < seconds[4] < seconds[2]
    assert gpu.product_seconds(op._replace(aligned=2, dtype="float32")) == gpu.product_seconds(
        op._replace(dtype="float32")
    )
