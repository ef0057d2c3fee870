"""Seconds a token of Llamas that generate on two processes over gloo: with a cache; without one; as a loop over
forwards of all 256 positions, with the logits of each; and with transformers' own tensor parallelism (`tp_plan`). All
are greedy, of one prompt and of four, and of a very small model and one of 143 million parameters.

    .venv/bin/python tests/bench/generate.py

Contenders take turns in the same two processes, of one thread each; the medians of a few rounds. Without a cache, a
token takes a forward of all that are there by then: timed are the last ones. Prints a table for docs/measured/features.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402

VOCAB, PROMPT, TOKENS = 8192, 128, 128


class Sizes(NamedTuple):
    hidden: int
    layers: int
    rounds: int


MODELS = (Sizes(384, 6, 5), Sizes(1024, 8, 3))
#: Without a cache: so many of the last tokens.
LAST = 8


def config(model: Sizes) -> Any:
    from transformers import LlamaConfig

    hidden = {"hidden_size": model.hidden, "intermediate_size": 4 * model.hidden}
    sizes = {**hidden, "num_hidden_layers": model.layers, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    return LlamaConfig(**sizes, **heads, eos_token_id=None)


def contenders(folder: Path) -> dict[str, Callable[[list[list[int]]], tuple[Any, int]]]:
    """{name: what generates after each prompt, and says how many tokens}."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.zeros(4, 32, dtype=torch.int64)
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}}
    program = shardc.compile(model, {"input_ids": ids, "labels": ids}, spec, prove=False)
    engine, without = (program.engine(model, None) for _ in range(2))
    vars(without._generator)["_compiled"] = lambda call: None  # knows of no cache
    theirs: Any = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")

    def transformers(prompts: list[list[int]]) -> Any:
        ids = torch.tensor(prompts)
        made = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        return made[:, PROMPT:].tolist(), TOKENS

    def whole(prompts: list[list[int]]) -> Any:
        longer = [(p * (TOKENS // len(p) + 1))[: PROMPT + TOKENS - LAST] for p in prompts]
        return without.generate(longer, LAST, stop=()), LAST

    positions = torch.zeros(4, PROMPT + TOKENS, dtype=torch.int64)
    logits = {"outputs": {"logits": "whole"}}
    forward = shardc.compile(model, {"input_ids": positions}, {**spec, **logits}, forward=True, prove=False)
    run = forward.forward(model)

    def loop(prompts: list[list[int]]) -> Any:
        ids = torch.zeros(len(prompts), PROMPT + TOKENS, dtype=torch.int64)
        ids[:, :PROMPT] = torch.tensor(prompts)
        for at in range(PROMPT, PROMPT + LAST):
            ids[:, at] = run({"input_ids": ids}, gather=True)["logits"][:, at - 1].argmax(-1)
        return ids[:, PROMPT : PROMPT + LAST].tolist(), LAST

    return {
        "shardc": lambda prompts, _alive=model: (engine.generate(prompts, TOKENS, stop=()), TOKENS),  # type: ignore[misc]
        "shardc, without a cache": whole,
        "a loop of forwards": loop,
        "transformers, tp_plan": transformers,
    }


def work(rank: int, folder: str, rounds: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    those = contenders(Path(folder))
    for rows in (1, 4):
        prompts = [[(7 * i + 13 * j) % VOCAB for j in range(PROMPT)] for i in range(rows)]
        seconds: dict[str, list[float]] = {name: [] for name in those}
        made = {name: run(prompts) for name, run in those.items()}  # compiled and warm
        for _ in range(rounds):
            for name, run in those.items():
                dist.barrier()
                start = time.perf_counter()
                _, tokens = run(prompts)
                seconds[name].append((time.perf_counter() - start) / tokens)
        if rank == 0:
            same = "yes" if made["shardc"] == made["transformers, tp_plan"] else "no"
            alike = dict.fromkeys(made, "") | {"transformers, tp_plan": same}
            results.put((rows, {name: statistics.median(s) for name, s in seconds.items()}, alike))
    dist.barrier()
    os._exit(0)


def main() -> None:
    for model in MODELS:
        measure(model)


def measure(model: Sizes) -> None:
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config(model)).save_pretrained(folder)
        context = multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        processes = [context.Process(target=work, args=(r, folder, model.rounds, results)) for r in range(2)]
        for p in processes:
            p.start()
        print(
            f"{date.today()}: {model.layers} layers, hidden {model.hidden}, vocabulary {VOCAB}, float32; {TOKENS} tokens"
            f" after {PROMPT}\n"
        )
        print("| prompts | | ms a token | beside shardc | the same tokens |\n|---|---|---|---|---|")
        for _ in range(2):
            rows, medians, alike = results.get(timeout=400)
            for name, s in medians.items():
                print(f"| {rows} | {name} | {1000 * s:.2f} | {s / medians['shardc']:.1f} | {alike[name]} |", flush=True)
        for p in processes:
            p.join()


if __name__ == "__main__":
    main()
