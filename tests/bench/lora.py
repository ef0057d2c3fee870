"""LoRA of a Llama of 8 billion parameters on one GPU, 2 x 4096 tokens: tokens per second, for docs/measured/gpu.md."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardc
from shardc.runtime.mesh import TorchMesh

WARM = 3
HEAD = """
LoRA (rank 8, beside `{q,v,o,gate,up,down}_proj`) of a Llama of 8 billion parameters (32 layers, hidden 4096) in bfloat16, 2 x 4096 tokens, nothing recomputed, AdamW; medians of {rounds} steps. A published figure, on one H100, is 12,473 tokens a second.

| contender | step, ms | tokens/s | predicted, ms | peak, GiB | predicted | loss |
|---|---:|---:|---:|---:|---:|---:|
"""
#: of Llama 3 8B; on a CPU, a model whose figures say nothing
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
ADAPTERS = [{"match": "*.{q,v,o,gate,up,down}_proj", "rank": 8, "alpha": 16}]


def lines(device: torch.device, machine: Any, rounds: int, compiles: bool) -> Iterator[str]:
    """The table's, as they are found."""
    tiny = device.type == "cpu"
    heads = {"num_attention_heads": 4 if tiny else 32, "num_key_value_heads": 1 if tiny else 8}
    config = LlamaConfig(**(TINY if tiny else LARGE), **heads, tie_word_embeddings=False, use_cache=False)
    ids = torch.randint(config.vocab_size, (2, 32 if tiny else 4096), device=device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    for name in ("shardc", "shardc, compiled") if compiles else ("shardc",):
        spec = {"shardc": 1, "mesh": {"dp": 1}, "adapters": ADAPTERS}
        if "compiled" in name:
            spec["execution"] = {"compile": "layers"}
        try:
            yield f"| {name} | {_measured(config, batch, spec, device, machine, rounds)} |"
        except torch.OutOfMemoryError as e:
            yield f"| {name} | {str(e).splitlines()[0][:80]} | | | | | |"


def _measured(config: Any, batch: Any, spec: Any, device: torch.device, machine: Any, rounds: int) -> str:
    gpu = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    program = shardc.compile(model, batch, spec, prove=False)
    mesh = TorchMesh(program.mesh, device=device)
    engine = program.engine(model, lambda ps: torch.optim.AdamW(ps, lr=3e-4), mesh=mesh, check=False)
    del model  # the engine has a copy
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loss = float(engine.step(batch))
    took = []
    for i in range(WARM + rounds):
        began = time.perf_counter()
        engine.step(batch)
        if gpu:
            torch.cuda.synchronize()
        if i >= WARM:
            took.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else float("nan")
    engine.close()
    seconds, cost = statistics.median(took), program.cost(machine)
    speed = f"{1e3 * seconds:.0f} | {batch['input_ids'].numel() / seconds:,.0f} | {1e3 * cost.step_seconds:.0f}"
    return f"{speed} | {peak:.1f} | {cost.memory.peak / 2**30:.1f} | {loss:.4f}"
