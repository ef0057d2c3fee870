"""The bytes that a layer keeps from forward until backward, tp=8 with sequence parallelism: a table of docs/measured/features.md.
Nothing is computed: tensors have no data.

    .venv/bin/python tests/bench/kept.py        a minute, 1 GB

In units of s·b·h/t (s sequence, b batch, h hidden, t = tp): what a dry run of two layers keeps of a microbatch more than
one of one layer, with statistics of rows, without the copies of weights in 16 bits that microbatches share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from shardc.cost.dry_run import dry_run
from shardc.cost.kept_activations import storages
from tests.bench import shapes
from tests.gpt3 import gpt3

TP = 8
CHEAP = ["elementwise", "norm", "gather"]
RECOMPUTED: dict[str, list[str]] = {"nothing": [], "cheap": CHEAP, "with matmul": [*CHEAP, "matmul"]}
Case = tuple[Any, dict[str, torch.Tensor], dict[str, Any]]  # model, batch of two microbatches, spec


def gpt(layers: int) -> Case:
    """GPT 22B of Korthikanti et al. 2022, in 16 bits: attention written out, dropout."""
    split = {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row", "wte": "vocab"}
    activations = {"wte": {1: "tp"}, "drop": {1: "tp"}, "h.*": {1: "tp"}}
    return *gpt3(layers, 6144, 64, 2048, 51200, batch=8), {"shard": split, "activations": activations}


def _of_transformers(model: Callable[[Any], Any], config: Callable[..., Any], layers: int, **sizes: Any) -> Case:
    """Of Llama 3 8B's layers."""
    with torch.device("meta"):
        fields = {"vocab_size": 32000, "max_position_embeddings": 4096, "num_hidden_layers": layers}
        made = model(config(**shapes.llama("8B", **fields, **sizes))).train()
        ids = torch.zeros(2, 4096, dtype=torch.int64)
    spec = {
        "shard": {"use": "model"},
        "activations": {"model.embed_tokens": {1: "tp"}},
        "precision": {"compute": "bfloat16"},
    }
    return made, {"input_ids": ids, "labels": ids}, spec


def llama(layers: int) -> Case:
    return _of_transformers(LlamaForCausalLM, LlamaConfig, layers)


def mixtral(layers: int) -> Case:
    """Mixtral 8x7B."""
    return _of_transformers(MixtralForCausalLM, MixtralConfig, layers, sliding_window=None)


def kept(make: Callable[[int], Case], kinds: list[str]) -> float:
    def of(layers: int) -> int:
        model, batch, spec = make(layers)
        regions = [{"match": "{h,model.layers}.*", "recompute": kinds}] if kinds else []
        more = {"mesh": {"tp": TP}, "batch": {"microbatches": 2}, "checkpoint": regions}
        return sum(
            x.nbytes for x in storages(dry_run(shardc.compile(model, batch, {"shardc": 1} | spec | more, prove=False)))
        )

    rows, length = next(iter(make(1)[1].values())).shape
    return (of(2) - of(1)) / (rows // 2 * length * (6144 if make is gpt else 4096) / TP)


if __name__ == "__main__":
    print(f"| | {' | '.join(RECOMPUTED)} |")
    print("|---|" + "---:|" * len(RECOMPUTED))
    for make in (gpt, llama, mixtral):
        cells = (f"{kept(make, kinds):.2f}" for kinds in RECOMPUTED.values())
        print(f"| {make.__name__} | {' | '.join(cells)} |", flush=True)
