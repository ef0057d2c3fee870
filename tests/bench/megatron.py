"""Memory of the GPTs of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022, table
3 and figure 1), with sequence parallelism and selective recomputation: the predicted peak of the first stage against
the paper's formulas.

    .venv/bin/python tests/bench/megatron.py            prints the table of docs/measured/features.md; a minute, 5 GB

The paper: 16 bytes a parameter (AdamW, 16-bit products), and 34·s·b·h·L/t bytes of activations (its table 2), times
1 + (p - 1) / (p·m) with p stages, m of them on each rank, interleaved (its section 4.2.3). Outputs of stages, loss and
embeddings are left out there, not here.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from shardc.cost.dry_run import dry_run
from shardc.cost.peak_memory import memory
from shardc.runtime import schedule
from tests.gpt3 import gpt3

TP, SEQUENCE, VOCAB = 8, 2048, 51200


@dataclass(frozen=True)
class Size:
    """stages: of the pipeline; each: on a rank; batch: sequences of a step, rows: of a microbatch."""

    layers: int
    hidden: int
    heads: int
    stages: int = 1
    each: int = 1
    batch: int = 4
    rows: int = 4

    @property
    def activations(self) -> float:
        """Bytes, as the paper counts them."""
        layers = 34 * SEQUENCE * self.rows * self.hidden * self.layers / TP
        return layers * (1 + (self.stages - 1) / (self.stages * self.each)) if self.stages > 1 else layers


SIZES = {
    "22B": Size(48, 6144, 64),
    "175B": Size(96, 12288, 96, stages=8, each=3, batch=64, rows=1),
    "530B": Size(105, 20480, 128, stages=35, each=3, batch=280, rows=1),
}


def spec(size: Size) -> dict[str, Any]:
    return {
        "shardc": 1,
        "mesh": {"pp": size.stages, "tp": TP},
        "shard": {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row", "wte": "vocab"},
        "activations": {"wte": {1: "tp"}, "drop": {1: "tp"}, "h.*": {1: "tp"}},
        "precision": {"compute": "bfloat16"},
        "checkpoint": [{"match": "h.*", "recompute": ["elementwise", "norm", "gather", "matmul"]}],
        "batch": {"microbatches": size.batch // size.rows},
    } | (
        {"pipeline": {"axis": "pp", "stages": size.stages * size.each, "schedule": "interleaved"}}
        if size.stages > 1
        else {}
    )


def peak(size: Size) -> tuple[int, float]:
    """(bytes that the dry run of the first rank has at its peak, what the paper says)."""
    model, batch = gpt3(size.layers, size.hidden, size.heads, SEQUENCE, VOCAB, batch=size.batch, dtype=torch.float32)
    program = shardc.compile(model, batch, spec(size), prove=False)
    actions = (program.schedule or schedule.alone(program.microbatches)).actions[0]
    found = memory(dry_run(program, 0, lambda ps: torch.optim.AdamW(ps, foreach=False)), actions)
    parameters = sum(math.prod(p.shape) for p in program.params)
    return found.peak, 16 * parameters / (TP * size.stages) + size.activations


if __name__ == "__main__":
    print("| GPT | tp, pp | predicted peak of the first rank | the paper's formulas | |\n|---|---|---:|---:|---:|")
    for name, size in SIZES.items():
        ours, theirs = peak(size)
        gib = 2**30
        print(
            f"| {name} | {TP}, {size.stages} | {ours / gib:.1f} GiB | {theirs / gib:.1f} GiB | {ours / theirs:.2f}x |"
        )
