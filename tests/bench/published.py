"""Steps that others published, against what `shardc plan --given` says of the same split on the same devices. Nothing is
tuned to match.

    .venv/bin/python tests/bench/published.py                  all of them; writes docs/measured/published.md
    .venv/bin/python tests/bench/published.py --only 175B      prints those whose name has it; --parts: of what they consist

The GPTs are those of `tests/gpt3.py`: attention is written out, as it was in those papers. Llamas are transformers'. Each
is priced op by op and with its element-wise work compiled, which is nearer to what those programs are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import shardc
from shardc.cost import Device, device
from shardc.plan import Candidate
from tests.bench import shapes
from tests.bench.plan_large import DEEPSEEK, MODELS
from tests.gpt3 import gpt3

OUT = Path(__file__).resolve().parents[2] / "docs" / "measured" / "published.md"
SEQUENCE, VOCAB = 2048, 51200  # of the GPTs
GIB = 2**30

#: What a reader has to know of the rows.
NOTES = """\
- GPTs are written out as in their papers (`tests/gpt3.py`: attention with its scores, dropout), in float16, all layers computed again but where the row says otherwise. Narayanan et al. do not say how many stages a rank has, nor the microbatch: one sequence, and as many stages as divide the layers, were assumed.
- Their rows of ZeRO 3 are DeepSpeed's of 2021, in their own code; why it took so long is not said, and what is predicted here is another program's.
- Llama 3 405B: the paper computes nothing again; here that does not fit, so what is cheap is computed again. The paper's ranks have a part of the gradients each; ours at ZeRO 2 send those of every microbatch, which takes 1.31 of the published step on 16,384 GPUs, so the rows are of ZeRO 1. Its TFLOP/s are read as 6 N + 12 L h s a token, and stages on a rank are assumed.
- torchtitan's H100s are slower ones: 2.4 TB/s, as here, and 500 W, "between SXM and NVL, and we don't know its exact value" (same page); its prediction has an SXM's products. It keeps every second product of a layer where our spec keeps all.
- Models with experts: steps of NeMo AutoModel have balanced routing and no clipping, as here, and DeepEP, which sends a token once to each machine that has several of its experts; ours are sent once for each expert, which shows where experts are on several machines (GPT-OSS 120B, DeepSeek-V3, Kimi K2). Its Mamba layers are fused kernels; ours are transformers' ops. Megatron's TFLOP/s are read as 6 N + 12 L h s a token, N of the experts that a token takes.
"""

NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473)"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), table 5"
LLAMA = "Llama Team 2024 (arXiv 2407.21783v3), table 4, p. 10"
AUTOMODEL = "NeMo AutoModel, performance-summary.md at 01926a5c"
MCORE = "Megatron Core, megatron/core/transformer/moe/README.md at 022bcb5a, 468 TFLOP/s"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bfd"


@dataclass(frozen=True)
class Published:
    """A step. seconds: what it took; bytes: what the allocator had reserved, where that was said. model: arguments of
    the GPT, or a config of transformers. batch: sequences of a step. compiled: the published program was.
    """

    name: str
    source: str
    seconds: float
    devices: int
    device: Device
    model: dict[str, Any]
    batch: int
    spec: dict[str, Any]
    sequence: int = SEQUENCE
    bytes: float | None = None
    compiled: bool | None = None

    def made(self, folder: Path) -> tuple[nn.Module, Any]:
        """(the model on the meta device, one row)"""
        if "model_type" not in self.model:
            return gpt3(**self.model, sequence=self.sequence, vocab=VOCAB, batch=1, dtype=torch.float32)
        from shardc.cli.model_file import load

        path = folder / "config.json"
        path.write_text(json.dumps(self.model))
        file = load(f"hf:{path}", batch=1, seq=self.sequence)
        return file.on_meta(), file.batch


# --- GPTs


def gpt_spec(
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    *,
    each: int = 1,
    microbatches: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    checkpoint: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """each: stages on a rank. checkpoint: of a layer."""
    found: dict[str, Any] = {
        "shardc": 1,
        "mesh": {"pp": pp, "dp": dp, "tp": tp},
        "precision": {"compute": "float16"},
        "batch": {"microbatches": microbatches},
        "data": {"axis": "dp", "zero": zero},
    }
    if tp > 1:
        found["shard"] = {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row", "wte": "vocab"}
    if sequence_parallel:
        found["activations"] = {"wte": {1: "tp"}, "drop": {1: "tp"}, "h.*": {1: "tp"}}
    if pp > 1:
        schedule = "interleaved" if each > 1 else "1f1b"
        found["pipeline"] = {"axis": "pp", "stages": pp * each, "schedule": schedule}
    if checkpoint is not None:
        found["checkpoint"] = [{"match": "h.*", **checkpoint}]
    return found


FULL: dict[str, Any] = {}
SELECTIVE: dict[str, Any] = {"recompute": ["elementwise", "norm", "gather", "matmul"]}


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads}


def flops(layers: int, hidden: int, batch: int) -> float:
    """Of a step whose layers are all computed again: Narayanan et al. 2021, equation 3 (p. 8)."""
    once = 1 + SEQUENCE / (6 * hidden) + VOCAB / (16 * layers * hidden)
    return 96 * batch * SEQUENCE * layers * hidden**2 * once


def narayanan() -> Iterator[Published]:
    a100 = device("a100-80g")
    weak = (  # layers, hidden, heads, pp, GPUs, batch, TFLOP/s of one, stages on a rank: an assumption
        ("39.1B", 48, 8192, 64, 2, 512, 1536, 138, 2),
        ("76.1B", 60, 10240, 80, 4, 1024, 1792, 140, 3),
        ("145.6B", 80, 12288, 96, 8, 1536, 2304, 148, 2),
        ("310.1B", 96, 16384, 128, 16, 1920, 2160, 155, 2),
        ("529.6B", 105, 20480, 128, 35, 2520, 2520, 163, 3),
        ("1008B", 128, 25600, 160, 64, 3072, 3072, 163, 2),
    )
    for name, layers, hidden, heads, pp, gpus, batch, rate, each in weak:
        dp = gpus // (8 * pp)
        yield Published(
            f"GPT {name}, tp 8, pp {pp} x {each}, dp {dp}",
            f"{NARAYANAN}, table 1, p. 8",
            flops(layers, hidden, batch) / (rate * 1e12 * gpus),
            gpus,
            a100,
            gpt(layers, hidden, heads),
            batch,
            gpt_spec(dp, pp, 8, each=each, microbatches=batch // dp, checkpoint=FULL),
        )
    for gpus, rate in ((384, 153), (768, 149), (1536, 141)):
        dp = gpus // 96
        yield Published(
            f"GPT-3 175B, tp 8, pp 12 x 2, dp {dp}",
            f"{NARAYANAN}, table 2, p. 9",
            flops(96, 12288, 1536) / (rate * 1e12 * gpus),
            gpus,
            a100,
            gpt(96, 12288, 96),
            1536,
            gpt_spec(dp, 12, 8, each=2, microbatches=1536 // dp, checkpoint=FULL),
        )
    sizes = (("GPT-3 175B", 96, 12288, 96), ("GPT 529.6B", 105, 20480, 128))
    alone = (
        (0, 384, 1536, 144),
        (0, 768, 1536, 88),
        (0, 1536, 1536, 44),
        (1, 640, 2560, 138),
        (1, 1120, 2240, 98),
        (1, 2240, 2240, 48),
    )
    for which, gpus, batch, rate in alone:
        name, layers, hidden, heads = sizes[which]
        yield Published(
            f"{name}, ZeRO 3, dp {gpus}",
            f"{NARAYANAN}, table 2, p. 9",
            flops(layers, hidden, batch) / (rate * 1e12 * gpus),
            gpus,
            a100,
            gpt(layers, hidden, heads),
            batch,
            gpt_spec(gpus, zero=3, checkpoint=FULL),
        )


def korthikanti() -> Iterator[Published]:
    a100 = device("a100-80g")
    sizes = (  # layers, hidden, heads, pp, stages on a rank, batch, rows of a microbatch, seconds: all, some again
        ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
    )
    for name, layers, hidden, heads, pp, each, batch, rows, full, selective in sizes:
        for what, seconds, own in (
            ("all again", full, {"checkpoint": FULL}),
            ("attention again, sequence parallel", selective, {"checkpoint": SELECTIVE, "sequence_parallel": True}),
        ):
            yield Published(
                f"GPT {name}, tp 8, pp {pp} x {each}, {what}",
                KORTHIKANTI,
                seconds,
                8 * pp,
                a100,
                gpt(layers, hidden, heads),
                batch,
                gpt_spec(1, pp, 8, each=each, microbatches=batch // rows, **own),
            )


# --- Llamas

FLOAT8: dict[str, Any] = {
    "compute": "bfloat16",
    "products": {"recipe": "fp8-tensorwise", "match": ["*", "!lm_head"]},
}


def llama(size: str) -> dict[str, Any]:
    return shapes.llama(size, model_type="llama", rope_theta=500000.0, max_position_embeddings=131072)


def model_flops(size: str, sequence: int) -> float:
    """Of a token, forward and backward: 6 N + 12 L h s (Chowdhery et al. 2022, appendix B), attention's whole square."""
    layers, hidden, heads, wide = shapes.SIZES[size]
    weights = layers * (2 * hidden**2 * (1 + 8 / heads) + 3 * hidden * wide) + hidden * shapes.VOCAB
    return 6 * weights + 12 * layers * hidden * sequence


def llama_team() -> Iterator[Published]:
    for gpus, cp, sequence, rate in ((8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380)):
        dp = gpus // (8 * cp * 16)
        batch = 2**24 // sequence
        spec: dict[str, Any] = {
            "shardc": 1,
            "mesh": {"pp": 16, "dp": dp, "cp": cp, "tp": 8},
            "shard": {"use": "model"},
            "activations": {"model.embed_tokens": {1: "tp"}, "model.layers.*": {1: "tp"}},
            "pipeline": {"axis": "pp", "stages": 64, "schedule": "interleaved"},
            "data": {"axis": "dp", "zero": 1},
            "precision": {"compute": "bfloat16"},
            "batch": {"microbatches": batch // dp},
            "checkpoint": [{"match": "model.layers.*", "recompute": "cheap"}],
        }
        if cp > 1:
            spec["sequence"] = {"axis": "cp", "method": "gather"}
        yield Published(
            f"Llama 3 405B, tp 8, cp {cp}, pp 16 x 4, dp {dp}, {sequence} tokens",
            LLAMA,
            2**24 * model_flops("405B", sequence) / (gpus * rate * 1e12),
            gpus,
            device("h100-80g"),
            llama("405B"),
            batch,
            spec,
            sequence=sequence,
        )


def torchtitan() -> Iterator[Published]:
    #: of these measurements: HBM2e, 500 W
    h100 = device("h100-80g").model_copy(update={"name": "h100-96g", "memory": 96 * GIB, "bandwidth": 2.4e12})

    def spec(dp: int, **more: Any) -> dict[str, Any]:
        return {
            "shardc": 1,
            "mesh": {"dp": dp},
            "data": {"axis": "dp", "zero": 3},
            "precision": {"compute": "bfloat16"},
        } | more

    def one(
        name: str, table: int, size: str, rate: float, gib: float, batch: int, own: dict[str, Any], **more: Any
    ) -> Published:
        gpus = 1
        for n in own["mesh"].values():
            gpus *= n
        sequence = more.get("sequence", 8192)
        seconds = batch * sequence / gpus / rate
        full = f"Llama 3.1 {size}, {name}"
        return Published(
            full,
            f"{TITAN}, table {table}",
            seconds,
            gpus,
            h100,
            llama(size),
            batch,
            own,
            **{"sequence": 8192, "bytes": gib * GIB} | more,
        )

    some = {"checkpoint": [{"match": "model.layers.*", "save": ["linear", "attention"]}]}
    full = {"checkpoint": [{"match": "model.layers.*"}]}
    for gpus, table, rows in (
        (8, 1, ((5762, 82.4), (6667, 77.0), (8532, 76.8))),
        (128, 3, ((5605, 67.0), (6514, 62.0), (8380, 61.8))),
    ):
        for (rate, gib), what, own in zip(
            rows, ("FSDP", "FSDP, compiled", "FSDP, compiled, float8"), ({}, {}, {"precision": FLOAT8}), strict=True
        ):
            yield one(
                f"{what}, {gpus} GPUs",
                table,
                "8B",
                rate,
                gib,
                2 * gpus,
                spec(gpus, **some, **own),
                compiled="compiled" in what,
            )
    for cp, sequence, rate, gib in ((1, 32768, 3890, 83.9), (8, 262144, 548, 84.5)):  # between: over dp x cp, not here
        own = spec(8, **full, **{"precision": FLOAT8})
        if cp > 1:
            own |= {"mesh": {"cp": 8}, "data": {"zero": 3}, "sequence": {"axis": "cp", "method": "ring"}}
        what = f"FSDP {8 // cp}, CP {cp}, {sequence} tokens, compiled, float8"
        yield one(what, 2, "8B", rate, gib, 8 // cp, own, sequence=sequence, compiled=True)
    two = spec(32, **full, **{"precision": FLOAT8}, mesh={"dp": 32, "tp": 8}, shard={"use": "model"})
    two["activations"] = {"model.embed_tokens": {1: "tp"}, "model.layers.*": {1: "tp"}}
    yield one("FSDP 32, TP 8, compiled, float8", 4, "70B", 829, 71.9, 512, two, compiled=True)


# --- models with experts

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
}
GPT_OSS_120B = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}
#: https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
NEMOTRON_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "vocab_size": 131072,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}


def automodel() -> Iterator[Published]:
    """Step times of the table; mapping, recompute and dtypes of its recipes (examples/benchmark/configs)."""
    rows = (  # model, GPUs, batch, pp, ep, stages on a rank, microbatches, all recomputed, seconds
        ("Qwen3 30B-A3B", QWEN3_30B, 8, 512, 1, 8, 1, 16, True, 21.773),
        ("GPT-OSS 20B", GPT_OSS_20B, 8, 256, 1, 8, 1, 16, False, 10.04),
        ("GPT-OSS 120B", GPT_OSS_120B, 64, 512, 1, 64, 1, 4, False, 4.30),
        ("DeepSeek-V3", DEEPSEEK, 256, 512, 4, 64, 8, 8, True, 8.18),
        ("Kimi K2", MODELS["kimi-k2"][0], 256, 512, 8, 32, 4, 16, True, 8.86),
        ("Nemotron 3 Nano 30B", NEMOTRON_NANO, 8, 512, 1, 8, 1, 16, True, 15.614),
    )
    for name, config, gpus, batch, pp, ep, each, microbatches, recomputed, taken in rows:
        spec: dict[str, Any] = {
            "shardc": 1,
            "mesh": {"pp": pp, "dp": gpus // (pp * ep), "ep": ep},
            "shard": {"use": "model"},
            "data": {"axis": ["dp", "ep"], "zero": 3, "keep": True},
            "precision": {"compute": "bfloat16"},
            "batch": {"microbatches": microbatches},
        }
        if pp > 1:
            spec["pipeline"] = {"axis": "pp", "stages": pp * each, "schedule": "interleaved"}
        if recomputed:
            spec["checkpoint"] = [{"match": "model.layers.*"}]
        yield Published(
            f"{name}, FSDP, EP {ep}, PP {pp} x {each}, {gpus} GPUs",
            AUTOMODEL,
            taken,
            gpus,
            device("h100-80g"),
            config | {"dtype": "bfloat16"},
            batch,
            spec,
            sequence=4096,
        )


def megatron_experts() -> Iterator[Published]:
    c = MIXTRAL_8X7B
    hidden, layers, wide, heads = (
        c[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    )
    weights = layers * (2 * hidden**2 * (1 + 8 / heads) + 2 * 3 * hidden * wide) + hidden * c["vocab_size"]
    token = 6 * weights + 12 * layers * hidden * 4096  # with attention's whole square, as in Megatron-LM's formula
    yield Published(
        "Mixtral 8x7B, EP 8, PP 4 x 8, DP 2, 64 GPUs",
        MCORE,
        256 * 4096 * token / (64 * 468e12),
        64,
        device("h100-80g"),
        c,
        256,
        {
            "shardc": 1,
            "mesh": {"pp": 4, "dp": 2, "ep": 8},
            "shard": {"use": "model"},
            "data": {"axis": ["dp", "ep"], "zero": 1},
            "precision": {"compute": "bfloat16"},
            "batch": {"microbatches": 16},
            "pipeline": {"axis": "pp", "stages": 32, "schedule": "interleaved"},
        },
        sequence=4096,
    )


def all_of_them() -> Iterator[Published]:
    yield from torchtitan()
    yield from automodel()
    yield from megatron_experts()
    yield from llama_team()
    yield from korthikanti()
    yield from narayanan()


def predicted(run: Published, folder: Path, compiled: bool) -> Candidate:
    model, batch = run.made(folder)
    spec = run.spec | ({"execution": {"compile": "layers"}} if compiled else {})
    return shardc.plan(model, batch, device=run.device, global_batch=run.batch, given=spec).candidates[0]


HEAD = """\
# Published steps, and what is predicted for them

Made by `python tests/bench/published.py` on {date}. Each row is a step that others measured on their machines, and what `shardc plan --given` says of the same model, split in the same way, on the same devices. Nothing was tuned to match; device files have their numbers from datasheets
and from measurements of single products and collectives (`shardc device NAME`).

- **published**: seconds of a step, from the source's own figures: TFLOP/s by its formula, or tokens a second.
- **op by op**: as torch runs the model. **compiled**: with `execution: {{compile: layers}}`, which fuses the ops between products, as the published programs do with kernels of their own. Seconds, and how many times the published ones.
- **reserved**: by torch's allocator, published and predicted (of the program that the source has, compiled or not).
{notes}
| source | run | published | op by op | | compiled | | reserved | |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""


def seconds(found: Candidate | None, run: Published) -> str:
    return " | " if found is None else f"{found.step_seconds:.2f} s | {found.step_seconds / run.seconds:.2f}"


def row(run: Published, op_by_op: Candidate | None, compiled: Candidate | None) -> str:
    found = compiled if run.compiled else op_by_op
    reserved = " | "
    if run.bytes is not None and found is not None:
        theirs, ours = run.bytes / GIB, found.reserved / GIB
        reserved = f"{theirs:.1f} | {ours:.1f} GiB"
    cells = run.source, run.name, f"{run.seconds:.2f} s", seconds(op_by_op, run), seconds(compiled, run), reserved
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="")
    options.add_argument("--parts", action="store_true")
    asked = options.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for run in (x for x in all_of_them() if asked.only in x.name):
            found: list[Candidate | None] = []
            for compiled in (False, True):
                try:
                    found.append(predicted(run, Path(folder), compiled))
                except shardc.ShardcError as e:
                    print(f"{run.name}: refused: {e}", file=sys.stderr)
                    found.append(None)
            rows.append(row(run, *found))
            print(rows[-1], flush=True)
            if asked.parts:
                print(*(parts(x) for x in found if x is not None), sep="\n", flush=True)
    if not asked.only:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        OUT.write_text(HEAD.format(date=date, notes=NOTES) + "\n".join(rows) + "\n")


def parts(p: Candidate) -> str:
    spent = {k: round(v, 3) for k, v in p.spent.items() if v}
    held = {k: round(v / GIB, 1) for k, v in p.memory.items() if v}
    return f"    {spent}\n    needs {p.needs / GIB:.1f}, live {p.peak / GIB:.1f} GiB: {held}"


if __name__ == "__main__":
    main()
