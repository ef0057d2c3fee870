"""What an optimizer over whole matrices adds to a step: Muon for the matrices and AdamW for the rest, beside AdamW for
all, on two gloo processes, dp=2.

    python tests/bench/matrices.py                     prints the table of docs/measured/features.md
    python tests/bench/matrices.py --rows 16           the same with 16 rows of 256 tokens in a step; --rounds 3
    python tests/bench/matrices.py --least             the least that Muon can add: torch's own steps, no messages
    python tests/bench/matrices.py --predict           what cost.step says of Llama 3 8B on 64 H100s, for that page

Four engines on the same model, in turn, a step each, so that what else the machine does falls on all alike. Ratios are
medians over rounds of a step's wall time to that of AdamW, with the quartiles; and of the CPU time of a rank, which
says nothing of what it waits for, but is the same on a busy machine.

A Newton-Schulz step of a matrix of k rows takes about 30 k flops an element, forward and backward 6 a token: the
optimizer's share is 5 k / tokens whatever the number of ranks. Llama 3 8B (k = 4096) was trained with 4 M tokens in
a step and more, 1024 k (Llama Team 2024); here ROWS rows are 128 k.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import llama
from gloo import on_ranks

import shardc
from shardc.features.matrices.owners import owners
from shardc.features.matrices.owners import work as cost
from tests.bench import shapes

#: Rows of 256 tokens in a step; of each microbatch of two ranks.
ROWS, MICRO = 128, 16
ROUNDS, WARM = 9, 1


def sized(rows: int) -> None:
    """The model and the batch, of this process."""
    llama.SIZE = llama.Size(layers=4, hidden=256, heads=4, inter=704, vocab=4096, batch=rows, seq=256)


def muon(params: Any) -> list[torch.optim.Optimizer]:
    matrices, others = shardc.matrices(params)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


WHOLE = {"optimizer": {"matrices": "whole"}}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, zero: 1": (adamw, {"data": {"zero": 1}}),
    "Muon, zero: 1, whole matrices": (muon, {"data": {"zero": 1}, **WHOLE}),
    "Muon, zero: 0, whole matrices": (muon, WHOLE),
    "Muon, zero: 0, every rank steps all": (muon, {}),
}


def work(rank: int, rows: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each way's steps, on one rank."""
    sized(rows)
    torch.manual_seed(0)
    model, batch = llama.model(), llama.batch()
    engines = {}
    for way, (make, spec) in WAYS.items():
        given = {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": max(rows // MICRO, 1)}, **spec}
        program = shardc.compile(model, batch, given, prove=False)
        engines[way] = program.engine(model, make)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds + WARM):
        for way, engine in engines.items():
            torch.distributed.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            engine.step(batch)
            times[way].append((time.perf_counter() - start, time.process_time() - cpu))
    return {way: each[WARM:] for way, each in times.items()}


def least() -> None:
    """CPU seconds of one rank of two, without shardc and without messages: forward and backward of its rows, AdamW on
    its half of all parameters (zero: 1), and Muon on the matrices that it would own with AdamW on half of the rest.
    """
    sized(MICRO // 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = llama.model(), llama.batch()
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if p.dim() == 2 and "embed" not in n and "lm_head" not in n}
    places = owners([cost(p.shape) for p in matrices.values()], 2)
    mine = [p for p, place in zip(matrices.values(), places, strict=True) if place == 0]
    rest = [p for n, p in named.items() if n not in matrices]

    def forward_backward() -> None:
        model(**batch).loss.backward()

    def stepping(make: Any, params: list[Any], share: int) -> Any:
        made = [
            torch.nn.Parameter(p.detach().flatten()[: p.numel() // share] if share > 1 else p.detach()) for p in params
        ]
        for p in made:
            p.grad = torch.randn_like(p)
        return make(made).step

    parts = {
        "forward and backward": forward_backward,
        "AdamW, half of all": stepping(lambda ps: torch.optim.AdamW(ps, lr=3e-4), list(named.values()), 2),
        "AdamW, half of the rest": stepping(lambda ps: torch.optim.AdamW(ps, lr=3e-4), rest, 2),
        "Muon, its own matrices": stepping(lambda ps: torch.optim.Muon(ps, lr=0.02), mine, 1),
    }
    seconds = {name: min(_cpu_seconds(part) for _ in range(8)) for name, part in parts.items()}
    print(f"one rank of two, {MICRO // 2} rows of {llama.SIZE.seq} tokens; CPU ms, the least of 8")
    for name, x in seconds.items():
        print(f"  {name:<26}{x * 1e3:8.1f}")
    step, plain, other, muon_ = seconds.values()
    for rows in (16, 32, 64, 128, 256):
        compute = step * rows / MICRO
        print(f"  {rows:>4} rows a step: at least {(compute + other + muon_) / (compute + plain):.3f} of AdamW's")


def _cpu_seconds(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


#: Of Llama 3 8B on 64 devices: mesh, and the rest of the spec.
LARGE: dict[str, dict[str, Any]] = {
    "dp=64, zero: 3": {"mesh": {"dp": 64}, "data": {"zero": 3}},
    "dp=8 x tp=8, zero: 1": {"mesh": {"dp": 8, "tp": 8}, "shard": {"use": "model"}, "data": {"zero": 1}},
}


def predict() -> None:
    """Seconds of a step with AdamW for all, and with Muon for matrices; and the bytes that the priced rank sends."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shapes.llama("8B")))
    for rows, share in ((256, 1), (64, 4)):
        ids = torch.empty(rows, 4096, dtype=torch.int64, device="meta")
        for name, spec in LARGE.items():
            micro = (4 if "zero: 3" in name else 8) // share
            words = {
                "batch": {"microbatches": micro},
                "precision": {"compute": "bfloat16"},
                "checkpoint": [{"match": "model.layers.*"}],
                **spec,
            }
            batch = {"input_ids": ids, "labels": ids}
            program = shardc.compile(model, batch, {"shardc": 1, **words, **WHOLE}, prove=False)
            plain, whole = program.cost("h100-80g", optimizer=adamw), program.cost("h100-80g")
            moved = sum(n for (_, kind), n in whole.comm.items() if kind == "all_to_all") / 2**20
            more = whole.step_seconds / plain.step_seconds - 1
            print(
                f"{name}, {rows} rows: {plain.step_seconds:.3f} s, with Muon {more:+.2%}, {moved:.0f} MiB", flush=True
            )


def main() -> None:
    if "--predict" in sys.argv[1:]:
        return predict()
    if "--least" in sys.argv[1:]:
        return least()
    rows, rounds = (
        int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else usual
        for name, usual in (("--rows", ROWS), ("--rounds", ROUNDS))
    )
    times, _ = on_ranks(work, 2, rows, rounds)
    print("| optimizer | ms a step | to AdamW | CPU ms of a rank | to AdamW |\n|---|---:|---:|---:|---:|")
    base = times[next(iter(WAYS))]
    for way, each in times.items():
        cells = []
        for i in range(2):
            low, middle, high = statistics.quantiles([a[i] / b[i] for a, b in zip(each, base, strict=True)], n=4)
            cells.append(f"{statistics.median(x[i] for x in each) * 1e3:.0f} | {middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
