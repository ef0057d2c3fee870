"""How long `shardc.compile` takes beside `torch.export` alone, of every listed model: issue 3 wants below 2×.

    python tests/bench/compile_time.py [--reps 3] [--over 1.5] [names...]

One process, one thread, float32; CPU seconds, so that other processes count little; the better of the repetitions,
after a first model that warms imports and caches up. Compiling is all of
it: export, the proof against eager (forward and backward on real numbers), and every pass, on dp=2 × tp=2.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from shardc.capture import default_loss
from shardc.ir.program import Program
from shardc.passes.annotate import model_plan
from tests import zoo
from tests.test_models_hf import LISTED
from tests.test_models_plain import STYLES
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

#: Models in whose graph `use: structure` finds no pair of weights to split.
WHOLE = {
    "cells",
    "audio",
    "classification",
    "embedding_losses",
    "contrastive",
    "ordering",
    "indexing",
    "activations",
    "messages",
    "nerf",
    "mixture",
    "convnext",
}


def builders() -> dict[str, Callable[[], zoo.Built]]:
    """Every model of docs/measured/models.md that is tried on several meshes, and the ordinary ones."""
    families = {name: (hf.FAMILIES | hf_more.FAMILIES)[name] for name in LISTED}
    models: dict[str, Callable[[], zoo.Built]] = {
        n: lambda build=build: build(dtype=torch.float32) for n, build in zoo.ALL.items()
    }
    models |= {n: lambda family=family: hf.build(family, torch.float32) for n, family in families.items()}
    return models | {n: lambda build=build: build(dtype=torch.float32) for n, build in plain.ALL.items()}


class Loss(nn.Module):
    """What torch.export can take of a model: caches and output classes left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return default_loss(self.model(*args, **kwargs))


def compiled(name: str, model: nn.Module, batch: Any) -> Program:
    """On dp=2 × tp=2, split as the tests split it, or on dp=2 where nothing can be split."""
    shard: Any = STYLES.get(name) or {"use": "model" if model_plan.read(model) else "structure"}
    if name in WHOLE:
        return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": shard})


def measure(name: str, build: Callable[[], zoo.Built], reps: int) -> tuple[float, float, dict[str, float]]:
    """Seconds of torch.export alone, of shardc.compile, and of its stages."""
    exports, compiles, stages = [], [], {}
    for _ in range(reps):
        model, batch = build()
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        start = time.process_time()
        torch.export.export(Loss(model), args, kwargs, strict=False)
        exports.append(time.process_time() - start)
        model, batch = build()
        start = time.process_time()
        program = compiled(name, model, batch)
        compiles.append(time.process_time() - start)
        if compiles[-1] == min(compiles):
            stages = program.meta["pass_seconds"] | {"export": program.meta["capture_seconds"]}
    return min(exports), min(compiles), stages


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="*")
    options.add_argument("--reps", type=int, default=2)
    options.add_argument("--over", type=float, default=0.0, help="print only models above this ratio")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    measure("mlp", zoo.mlp, 1)
    every = builders()
    ratios = []
    for name in arguments.names or every:
        try:
            export, compile_, stages = measure(name, every[name], arguments.reps)
        except (
            Exception
        ) as e:  # torch.export alone takes fewer models than shardc; the tests show what shardc does not take
            print(f"{name:24} {type(e).__name__}: {str(e).splitlines()[0][:100] if str(e) else ''}")
            continue
        ratios.append(compile_ / export)
        if ratios[-1] >= arguments.over:
            largest = sorted(stages.items(), key=lambda s: -s[1])[:5]
            print(
                f"{name:24} {export:6.2f} {compile_:6.2f}  {ratios[-1]:4.2f}x "
                f" {', '.join(f'{n} {s:.2f}' for n, s in largest)}",
                flush=True,
            )
    print(
        f"{len(ratios)} models, {sum(r < 2 for r in ratios)} below 2x, worst {max(ratios):.2f}x, mean"
        f" {sum(ratios) / len(ratios):.2f}x"
    )


if __name__ == "__main__":
    main()
