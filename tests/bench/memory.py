"""Write docs/measured/memory.md: predicted and measured peaks of live tensor bytes, of every model and setting. `make
table` runs it.

`--only gpt --setting 'checkpoint*'`: these alone, printed and not written. Exit status 1 if a prediction is off by more
than 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
import shardc.nn  # noqa: E402
from shardc.capture import capture  # noqa: E402
from shardc.runtime.schedule import SCHEDULES  # noqa: E402
from tests import live_bytes, zoo  # noqa: E402
from tests.zoo import hf, hf_more  # noqa: E402

OUT = ROOT / "docs" / "measured" / "memory.md"
LIMIT = 0.05
HEAD = """\
# Memory: predicted and measured

`shardc inspect --memory`, `program.cost().memory`: the peak of live tensor bytes of one training step. Made by `make table`
(tests/bench/memory.py): tiny models (two layers, 8 × 16 tokens), float32, dropout 0.1 where the model has it, AdamW. *Measured*: every storage
that holds a tensor of a real step, from the op that makes it until it is freed (tests/live_bytes.py), in the second step of a run on
the loopback mesh; of ranks that do the same, the one that needs most. The worst of {count} predictions is off by {worst:.2f} %.

The prediction is made without weights or processes: the engine runs one rank's step on tensors without data (shardc/cost/dry_run.py),
so what is kept for backward, what a checkpoint computes again, how buckets fill and what a schedule keeps alive are not modelled, they happen.
What can differ is what such a dry run cannot see:

- *The device.* Both columns are a GPU's step as a CPU can play it: AdamW updates all parameters at once (`fused`), offloaded tensors are in
  memory that is counted separately ("host"), collectives make no buffers of their own. Kernels are the CPU's: a GPU's attention may keep other statistics.
- *Values.* Experts are taken to be chosen evenly. "moe" has a router that does so; "mixtral" one with random weights, and so few tokens that some
  ranks get many more than others: its rows do not count for the worst.
- *Other shards*: an optimizer on the host is updated page by page, and its pages differ between ranks, as their shards do. The last rank is predicted.
- *What is no tensor*: on a GPU add what the allocator keeps for itself, and the workspaces of kernels (cuBLAS, NCCL).

| model | setting | rank | predicted, bytes | measured, bytes | difference | host, predicted | measured | at the peak | where |
|---|---|---|---:|---:|---:|---:|---:|---|---|
"""
LAYERS = {
    "gpt": "h.*",
    "llama": "model.layers.*",
    "bert": "*.encoder.layer.*",
    "t5": "{encoder,decoder}.block.*",
    "resnet": "blocks.*",
}
EXPERTS = {"moe": "moe", "mixtral": "*.mlp.experts"}
Setting = tuple[str, dict[str, Any], dict[str, Any]]  # its name, the spec, options of Engine


class Even(nn.Module):
    """Experts, each of which gets as many tokens as any other."""

    def __init__(self, hidden: int = 64, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, count)
        self.up, self.down = (
            nn.Parameter(torch.randn(count, 4 * hidden, hidden) * 0.1),
            nn.Parameter(torch.randn(count, hidden, 2 * hidden) * 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        count = p.shape[-1]
        first = torch.arange(x.shape[1]).expand(x.shape[:2])
        index = torch.stack([first % count, (first + 1) % count], -1)
        return x + shardc.nn.experts(x, index, p.gather(-1, index), self.up, self.down)


class MoE(nn.Module):
    def __init__(self, hidden: int = 64, vocab: int = 128) -> None:
        super().__init__()
        self.emb, self.moe, self.head = nn.Embedding(vocab, hidden), Even(hidden), nn.Linear(hidden, vocab)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.moe(self.emb(ids))).flatten(0, 1), targets.flatten())


def models() -> Iterator[tuple[str, Any]]:
    yield "gpt", lambda: zoo.gpt(torch.float32, dropout=0.1)
    yield "llama", lambda: zoo.llama(torch.float32)
    yield "bert", lambda: zoo.bert(torch.float32, dropout=0.1)
    yield "t5", lambda: zoo.t5(torch.float32, dropout=0.1)
    yield "resnet", lambda: zoo.resnet_bn(torch.float32)
    yield "moe", lambda: (MoE(), {"ids": zoo.tokens(), "targets": zoo.tokens(seed=2)})
    yield "mixtral", lambda: hf.build(hf_more.FAMILIES["mixtral"], torch.float32, experts_implementation="grouped_mm")


def settings(model: str) -> Iterator[Setting]:
    yield from ((name, spec, {}) for name, spec in (_of_experts(model) if model in EXPERTS else _of_layers(model)))
    yield "one device, clip_norm", {"mesh": {"dp": 1}}, {"clip_norm": 1.0}
    yield "dp=2, zero 2, clip_norm", {"mesh": {"dp": 2}, "data": {"zero": 2, "bucket_mb": 0.1}}, {"clip_norm": 1.0}


def _of_experts(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    ep: dict[str, Any] = {"mesh": {"ep": 2}, "experts": [{"match": EXPERTS[model], "axis": "ep"}]}
    yield "one device", {"mesh": {"dp": 1}}
    yield "ep=2", ep
    yield "dp=2, ep=2, zero 1", ep | {"mesh": {"dp": 2, "ep": 2}, "data": {"zero": 1}}
    yield "dp=2, ep=2, zero 3", ep | {"mesh": {"dp": 2, "ep": 2}, "data": {"zero": 3}}
    if model == "mixtral":
        yield "ep=2, checkpoint", ep | {"checkpoint": [{"match": "model.layers.*"}]}


def _of_layers(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    layers, local = LAYERS[model], {"batch_norm": "local"} if model == "resnet" else {}
    one: dict[str, Any] = {"mesh": {"dp": 1}}
    tp = {"mesh": {"tp": 2}, "shard": {"use": "structure"}}
    zero = [{"mesh": {"dp": 2}, "data": {"zero": z, "bucket_mb": 0.1}} for z in range(4)]
    pp = {
        s: {"mesh": {"pp": 2}, "batch": {"microbatches": 8}, "pipeline": {"axis": "pp", "schedule": s}} | local
        for s in SCHEDULES
    }
    micro = {"batch": {"microbatches": 4}} | local
    yield "one device", one
    yield "tp=2", tp
    for z, spec in enumerate(zero):
        yield f"dp=2, zero {z}", spec
    for s, spec in pp.items():
        yield f"pp=2, {s}", spec
    for z, spec in enumerate(zero):
        yield f"dp=2, zero {z}, 4 microbatches", spec | micro
    yield (
        "dp=2, zero 3, keep, 4 microbatches",
        {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.1, "keep": True}} | micro,
    )
    for label, entries in _checkpoints(model, layers):
        yield label, one | {"checkpoint": entries}
    for name, spec in (("tp=2", tp), ("dp=2, zero 3", zero[3]), ("pp=2, 1f1b", pp["1f1b"]), ("pp=2, zb-v", pp["zb-v"])):
        yield f"{name}, checkpoint", spec | {"checkpoint": [{"match": layers}]}
        yield f"{name}, checkpoint, budget 0.5", spec | {"checkpoint": [{"match": layers, "budget": 0.5}]}
        yield f"{name}, checkpoint, recompute cheap", spec | {"checkpoint": [{"match": layers, "recompute": "cheap"}]}
    narrow = {"precision": {"compute": "bfloat16"}}
    yield "one device, bf16", one | narrow
    for z, spec in enumerate(zero):
        yield f"dp=2, zero {z}, bf16", spec | narrow
    yield "dp=2, zero 2, bf16, reduce bf16", zero[2] | {"precision": {"compute": "bfloat16", "reduce": "bfloat16"}}
    yield "dp=2, zero 3, bf16, checkpoint", zero[3] | narrow | {"checkpoint": [{"match": layers}]}
    yield "one device, fp16, loss scale", one | {"precision": {"compute": "float16", "loss_scale": 16.0}}
    for z in range(4):
        yield f"dp=2, zero {z}, optimizer on the host", _away(zero[z], {"optimizer": "cpu"})
    yield (
        "dp=2, zero 3, optimizer and parameters on the host",
        _away(zero[3], {"optimizer": "cpu", "parameters": "cpu"}),
    )
    yield "dp=2, zero 1, bf16, optimizer on the host", _away(zero[1], {"optimizer": "cpu"}) | narrow


def _away(spec: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    return spec | {"data": spec["data"] | {"offload": places}}


def _checkpoints(model: str, layers: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "checkpoint", [{"match": layers}]
    for kind in ("linear", "attention", "matmul", "norm") if model != "resnet" else ("conv", "norm"):
        yield f"checkpoint, save {kind}", [{"match": layers, "save": [kind]}]
    yield "checkpoint, budget 0.5", [{"match": layers, "budget": 0.5}]
    yield "checkpoint, recompute cheap", [{"match": layers, "recompute": "cheap"}]
    yield "checkpoint, every 2", [{"match": layers, "every": 2}]
    yield "checkpoint, nested", [{"match": layers.removesuffix(".*")}, {"match": layers}]
    yield "checkpoint, offload", [{"match": layers, "offload": "cpu"}]
    yield (
        "checkpoint, save everything, offload",
        [{"match": layers, "save": ["linear", "attention", "matmul", "conv", "norm"], "offload": "cpu"}],
    )


def rows(name: str, model: Any, batch: Any, captured: Any, setting: Setting) -> Iterator[tuple[float, str]]:
    """(difference, line) of each rank that differs."""
    label, spec, options = setting
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured)
    cost, real = program.cost("h100-80g", **options), live_bytes.watched(program, model, batch, **options)
    for r in cost.ranks:
        here = [x for i, x in enumerate(real) if not program.axis or program.mesh.coords(i)[program.axis] == r.at]
        measured, outside = max(x.peak for x in here), max(x.outside_peak for x in here)
        off = r.memory.peak / measured - 1
        kinds = ", ".join(
            f"{k} {100 * n / r.memory.peak:.0f} %" for k, n in r.memory.kinds.items() if n > 0.005 * r.memory.peak
        )
        rank, host = f"pp={r.at}" if program.axis else "each", (f"{n or ''}" for n in (r.memory.host, outside))
        peak = f"{r.memory.part} {r.memory.op}"
        cells = name, label, rank, str(r.memory.peak), str(measured), f"{100 * off:+.2f} %", *host, kinds, peak
        yield (
            max(abs(off), abs(r.memory.host / outside - 1) if outside else float(r.memory.host > 0)),
            f"| {' | '.join(cells)} |\n",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one of the models")
    parser.add_argument("--setting", default="*", help="settings whose names match")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines, worst = [], 0.0
    for name, make in models():
        if options.only not in (None, name):
            continue
        model, batch = make()
        captured = capture(model, batch, prove=False)
        for setting in settings(name):
            if not fnmatch(setting[0], options.setting):
                continue
            for off, line in rows(name, model, batch, captured, setting):
                worst = max(worst, off) if name != "mixtral" else worst
                lines.append(line)
                print(line, end="", flush=True)
    if options.only is None and options.setting == "*":
        OUT.write_text(HEAD.format(count=len(lines), worst=100 * worst) + "".join(lines))
        print(f"{OUT.relative_to(ROOT)}: {len(lines)} rows")
    print(f"the worst is off by {100 * worst:.2f} %")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
