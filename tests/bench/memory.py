"""Write docs/memory.md: predicted and measured peaks of live tensor bytes, of every model and setting. `make table` runs it.

Exit status 1 if a prediction is off by more than 5 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.capture import capture  # noqa: E402
from tests import live, zoo  # noqa: E402

OUT = ROOT / "docs" / "memory.md"
LIMIT = 0.05
HEAD = """\
# Memory: predicted and measured

`shardc inspect --memory`, `program.cost().memory`: the peak of live tensor bytes of one training step. Made by `make table`
(tests/bench/memory.py): tiny models (two layers, 8 × 16 tokens), float32, dropout 0.1 where the model has it, AdamW. *Measured*: every storage
that a tensor of a real step lies in, from the op that makes it until it is freed (tests/live.py), in the second step of a run on
the loopback mesh; of ranks that do the same, the one that has most. The worst of {count} predictions is off by {worst:.2f} %.

The prediction is made without weights or processes: the engine runs one rank's step on tensors without data (shardc/cost/rehearse.py),
so what autograd keeps, what a checkpoint computes again, how buckets fill and what a schedule keeps alive are not modelled, but what they are.
On a GPU add what the allocator keeps for itself, and the workspaces of kernels (cuBLAS, NCCL): neither is a tensor.

| model | setting | rank | predicted, bytes | measured, bytes | difference | at the peak | where |
|---|---|---|---:|---:|---:|---|---|
"""
LAYERS = {"gpt": "h.*", "llama": "model.layers.*", "bert": "*.encoder.layer.*", "t5": "{encoder,decoder}.block.*", "resnet": "blocks.*"}


def models() -> Iterator[tuple[str, Any, Any]]:
    yield "gpt", *zoo.gpt(torch.float32, dropout=0.1)
    yield "llama", *zoo.llama(torch.float32)
    yield "bert", *zoo.bert(torch.float32, dropout=0.1)
    yield "t5", *zoo.t5(torch.float32, dropout=0.1)
    yield "resnet", *zoo.resnet_bn(torch.float32)


def settings(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "one device", {"mesh": {"dp": 1}}
    yield "tp=2", {"mesh": {"tp": 2}, "shard": {"use": "structure"}}
    for zero in range(4):
        yield f"dp=2, zero {zero}", {"mesh": {"dp": 2}, "data": {"zero": zero, "bucket_mb": 0.1}}
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
        microbatches = 8 if model != "resnet" else 1  # a batch norm's statistics are those of the whole batch
        yield f"pp=2, {schedule}", {"mesh": {"pp": 2}, "batch": {"microbatches": microbatches}, "pipeline": {"axis": "pp", "schedule": schedule}}
    for what, words in (("", {}), (", save linear", {"save": ["linear"]}), (", budget 0.5", {"budget": 0.5}), (", every 2", {"every": 2})):
        yield f"checkpoint{what}", {"mesh": {"dp": 1}, "checkpoint": [{"match": LAYERS[model], **words}]}


def main() -> int:
    torch.set_num_threads(1)
    lines, worst = [], 0.0
    for name, model, batch in models():
        captured = capture(model, batch, prove=False)
        for setting, spec in settings(name):
            program = shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured)
            found, real = program.cost("h100-80g"), live.measured(program, model, batch)
            for r in found.ranks:
                here = max(n for i, n in enumerate(real) if not program.axis or program.mesh.coords(i)[program.axis] == r.at)
                off = r.memory.peak / here - 1
                worst = max(worst, abs(off))
                kinds = ", ".join(f"{k} {100 * n / r.memory.peak:.0f} %" for k, n in r.memory.kinds.items() if n > 0.005 * r.memory.peak)
                rank = f"pp={r.at}" if program.axis else "each"
                at = f"{r.memory.part} {r.memory.op}"
                lines.append(f"| {name} | {setting} | {rank} | {r.memory.peak} | {here} | {100 * off:+.2f} % | {kinds} | {at} |\n")
                print(lines[-1], end="", flush=True)
    OUT.write_text(HEAD.format(count=len(lines), worst=100 * worst) + "".join(lines))
    print(f"{OUT.relative_to(ROOT)}: {len(lines)} rows, the worst off by {100 * worst:.2f} %")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
