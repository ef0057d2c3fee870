"""How long the proof of a program for thousands of ranks takes (`program.prove()`, `shardc verify --static`), and how much
memory. Nothing is asserted; docs/measured/proof.md has the figures.

    python tests/bench/prove_large.py llama-405b [--layers 126]      8,192 ranks: tp 8, sp, pp 16, dp 64
    python tests/bench/prove_large.py deepseek-v3 [--layers 61]      2,048 ranks: ep 64, pp 16, dp 2
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from tests.bench import shapes

WEIGHTS = {"model.embed_tokens": "vocab", "*.{q,k,v}_proj": "column", "*.o_proj": "row", "lm_head": "column"}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-405b": (
        lambda layers: transformers.LlamaConfig(**shapes.llama("405B", num_hidden_layers=layers)),
        {
            "mesh": {"pp": 16, "dp": 64, "tp": 8},
            "shard": {**WEIGHTS, "*.{gate,up}_proj": "column", "*.down_proj": "row"},
            "activations": {"model.embed_tokens": {1: "tp"}},
            "data": {"zero": 1},
            "batch": {"microbatches": 32},
            "pipeline": {"axis": "pp", "stages": 32, "schedule": "interleaved"},
        },
    ),
    "deepseek-v3": (
        lambda layers: transformers.DeepseekV3Config(num_hidden_layers=layers),  # its defaults are those of V3
        {
            "mesh": {"pp": 16, "dp": 2, "ep": 64},
            "experts": [{"match": "*.mlp.experts", "axis": "ep"}],
            "data": {"axis": ["dp", "ep"], "zero": 1},
            "batch": {"microbatches": 16},
            "pipeline": {"axis": "pp", "stages": 16, "schedule": "1f1b"},
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    configure, spec = MODELS[options.model]
    config = configure(options.layers or {"llama-405b": 126, "deepseek-v3": 61}[options.model])
    started = time.process_time()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(options.rows, 4096, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
    compiled = time.process_time()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"compiled in {compiled - started:.0f} s of CPU, {memory / 2**20:.2f} GiB", flush=True)
    proof = program.prove()
    took = time.process_time() - compiled
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(str(proof)[:2000])
    print(f"proof: {took:.1f} s of CPU; with compile {memory / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
