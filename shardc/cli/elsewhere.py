"""Options and commands of other trainers: an error that names one says where shardc has it."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperGroup

_OPTIMIZER = "learning rates and the like are the optimizer's: `def optimizer(params)` in the model file"
_STEPS = "--steps counts steps; data that ends begins anew"
_BATCH = "rows are those of batch() or data() in the model file; --batch for an hf: model"
_MESH = "devices are the mesh's: --mesh dp=2,tp=4"
#: What is written elsewhere, by the name that others give it.
PLACES = {
    **dict.fromkeys(
        ("lr", "learning-rate", "weight-decay", "warmup", "warmup-steps", "optimizer", "betas"), _OPTIMIZER
    ),
    **dict.fromkeys(("scheduler", "lr-scheduler"), "`def scheduler(optimizer)` in the model file"),
    **dict.fromkeys(("epochs", "num-epochs", "max-steps", "iterations"), _STEPS),
    **dict.fromkeys(("batch-size", "micro-batch-size", "per-device-train-batch-size"), _BATCH),
    **dict.fromkeys(
        ("accumulate", "gradient-accumulation-steps", "grad-accum"), "microbatches: --set batch.microbatches=4"
    ),
    **dict.fromkeys(("tp", "dp", "pp", "cp", "ep", "tensor-parallel-size", "devices", "gpus", "num-gpus"), _MESH),
    **dict.fromkeys(("nproc-per-node", "nproc_per_node", "world-size"), "--nproc, or what the mesh needs"),
    "device": "`run` takes the GPUs that are there, else the CPU; CUDA_VISIBLE_DEVICES= hides them. plan and inspect"
    " price for --device",
    **dict.fromkeys(("dtype", "bf16", "fp16", "precision", "amp"), "--set precision.compute=bfloat16"),
    **dict.fromkeys(("zero", "zero-stage", "fsdp"), "--set data.zero=3"),
    **dict.fromkeys(("output", "output-dir", "checkpoint-dir", "save-dir"), "--save DIR; of compile: -o DIR"),
    **dict.fromkeys(("config", "spec", "model"), "model and spec have no option: shardc run model.py spec.yaml"),
    **dict.fromkeys(("data", "dataset", "train-data"), "`def data()` in the model file returns a Dataset"),
    **dict.fromkeys(("gradient-clipping", "max-grad-norm", "clip-grad-norm"), "--clip 1.0"),
    **dict.fromkeys(("train", "fit", "launch", "torchrun"), "`shardc run model.py spec.yaml` trains"),
    **dict.fromkeys(("eval", "evaluate", "test"), "`shardc run ... --eval-every N`, and engine.evaluate in Python"),
    **dict.fromkeys(("perplexity", "logprobs"), "`shardc score model.py spec.yaml --weights DIR`"),
    **dict.fromkeys(("shard", "parallelize"), "`shardc compile model.py spec.yaml` splits a model"),
    **dict.fromkeys(
        ("estimate", "memory", "cost"),
        "`shardc inspect model.py spec.yaml --memory` (or --html), and program.cost() in Python",
    ),
    **dict.fromkeys(("view", "show", "print", "graph"), "`shardc inspect model.py spec.yaml`"),
    **dict.fromkeys(("check", "prove", "test-equal"), "`shardc verify model.py spec.yaml`"),
}
_NAMED = re.compile(r"No such (?:option|command):? '?-{0,2}([\w-]+)'?")


class Commands(TyperGroup):
    """The commands, whose errors say where else a thing is written."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as e:  # the parser's own, whose module has changed its name between versions of typer
            message = getattr(e, "message", None)
            found = _NAMED.match(message) if isinstance(message, str) else None
            if found is not None and (place := PLACES.get(found[1])) is not None:
                e.message = f"{message.rstrip('.')}: {place}"  # type: ignore[attr-defined, union-attr]
                e.possibilities = None  # type: ignore[attr-defined]
            raise
