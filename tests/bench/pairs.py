"""What is hidden of communication, by the simulation of streams on h100-80g: tables of
docs/measured/joint.md. `alone`: within a
microbatch; else beside a backward, or a forward, of another one. Nothing is computed: tensors have no data.

    .venv/bin/python tests/bench/pairs.py [alone] [llama] [mixtral] [dualpipe-v]        some minutes, 3 GB
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from shardc.cost.step import Cost
from shardc.report.comm import comm_rows
from tests.bench import shapes

Seconds = defaultdict[str, float]

MICROBATCHES, TOKENS, LAYERS = 4, 4096, 4
SIZES: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": TOKENS}
SP = {
    "shard": {
        "model.embed_tokens": "vocab",
        "*.{q,k,v}_proj": "column",
        "*.o_proj": "row",
        "*.{gate,up}_proj": "column",
        "*.down_proj": "row",
        "lm_head": "column",
    },
    "activations": {"model.embed_tokens": {1: "tp"}},
}
LLAMA = {"mesh": {"tp": 8}, **SP}
MIXTRAL = {"mesh": {"ep": 8}, "experts": [{"match": "*.mlp.experts", "axis": "ep"}]}
DUAL = {"mesh": {"pp": 2, "tp": 8}, **SP, "pipeline": {"axis": "pp", "stages": 4}}


def llama(layers: int = LAYERS) -> Any:
    return LlamaForCausalLM(LlamaConfig(**shapes.llama("70B", num_hidden_layers=layers, **SIZES)))


def mixtral() -> Any:
    """Mixtral 8x7B's shape: layers as those of Llama 3 8B, with 8 experts."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**shapes.llama("8B", num_hidden_layers=LAYERS, **SIZES, **experts)))


def simulated(make: Any, rows: int, microbatches: int, spec: dict[str, Any]) -> tuple[Cost, Seconds, Seconds]:
    """(the whole, what collectives take, what of it is waited for): by way, by kind, and of all."""
    with torch.device("meta"):
        model = make().train()
        ids = torch.zeros(rows * microbatches, TOKENS, dtype=torch.int64)
    full = {"shardc": 1, "batch": {"microbatches": microbatches}, "precision": {"compute": "bfloat16"}, **spec}
    cost = shardc.compile(model, {"input_ids": ids, "labels": ids}, full, prove=False).cost("h100-80g")
    takes: Seconds = defaultdict(float)
    waits: Seconds = defaultdict(float)
    for r in comm_rows(cost):
        for key in (r.direction, r.kind, "all"):
            takes[key] += r.seconds or 0.0
            waits[key] += r.exposed or 0.0
    return cost, takes, waits


def row(name: str, make: Any, rows: int, spec: dict[str, Any]) -> None:
    cost, takes, waits = simulated(make, rows, MICROBATCHES, spec)
    cells = [f"{1e3 * waits[k]:.2f} of {1e3 * takes[k]:.2f}" for k in ("forward", "backward", "all_to_all", "all")]
    step = f"{1e3 * cost.step_seconds:.1f}"
    print(f"| {name} | {step} | {' | '.join(cells)} | {cost.memory.peak / 1e9:.2f} |", flush=True)


def alone() -> None:
    """One microbatch, and what each of its layers adds."""
    figures = []
    for layers in (LAYERS // 2, LAYERS):
        cost, takes, waits = simulated(lambda layers=layers: llama(layers), 1, 1, LLAMA)
        of = (cost.step_seconds, takes["all"], waits["forward"], waits["backward"], waits["all"])
        figures.append(([1e3 * x for x in of], cost.memory.peak))
    (few, _), (many, peak) = figures
    cells = [f"{b:.2f} ({(b - a) / (LAYERS - LAYERS // 2):.2f})" for a, b in zip(few, many, strict=True)]
    print(f"| {' | '.join(cells)} | {peak / 1e9:.3f} |", flush=True)


def main(wanted: list[str]) -> None:
    if not wanted or "alone" in wanted:
        print("| step, ms (a layer) | collectives | waited for, forward | backward | all | peak, GB |")
        print("|---:|---:|---:|---:|---:|---:|")
        alone()
        if wanted == ["alone"]:
            return
    print("| | step, ms | waited for, forward, ms | backward | all_to_all | all | peak, GB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    ways = {"alone": "none", "side by side": "microbatches", "two forwards": "forwards"}
    for name, make, rows, spec in (("llama", llama, 1, LLAMA), ("mixtral", mixtral, 8, MIXTRAL)):
        for way, overlap in ways.items() if not wanted or name in wanted else ():
            row(f"{name}, {way}", make, rows, {**spec, "execution": {"overlap": overlap}})
    if not wanted or "dualpipe-v" in wanted:
        for schedule in ("zb-v", "dualpipe-v"):
            row(f"llama, {schedule}", llama, 1, {**DUAL, "pipeline": {**DUAL["pipeline"], "schedule": schedule}})


if __name__ == "__main__":
    main(sys.argv[1:])
