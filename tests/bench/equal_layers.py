"""CPU seconds to compile a model of many equal layers: Llama-70B's shape on the meta device, dp=4 x tp=8.

    python tests/bench/equal_layers.py [--layers 2,8,32,80] [--reps 3]
    python tests/bench/equal_layers.py --compiled [--layers 2,32]

One process, one thread, nothing computed; of the repetitions the least. "and a rank's code": with
what the first engine and its first step make of the program on one rank, weights aside: a stage's graphs are written
then.

--compiled: with `execution: {compile: layers}`, of a GPT of 256 that fits here, from the model to the end of its first step,
with nothing on disk; each in a process of its own, with the C++ compiler's seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.capture import capture  # noqa: E402
from shardc.runtime.mesh.loopback import loopback  # noqa: E402
from shardc.runtime.stage.interpreter import Interpreter  # noqa: E402
from tests.bench import shapes  # noqa: E402
from tests.gpt3 import GPT3  # noqa: E402

SPEC: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 4, "tp": 8}, "shard": {"use": "model"}}


def model(layers: int) -> tuple[torch.nn.Module, Any]:
    config = LlamaConfig(**shapes.llama("70B", num_hidden_layers=layers))
    with torch.device("meta"):
        ids = torch.zeros(4, 4096, dtype=torch.int64)
        return LlamaForCausalLM(config).bfloat16(), {"input_ids": ids, "labels": ids}


def measured(layers: int, reps: int) -> tuple[float, ...]:
    """Capture, the passes, and these with a rank's code."""
    subject, batch = model(layers)
    best = [float("inf")] * 3

    def least(i: int, began: float) -> None:
        best[i] = min(best[i], time.process_time() - began)

    for _ in range(reps):
        began = time.process_time()
        captured = capture(subject, batch, prove=False)
        least(0, began)
        began = time.process_time()
        program = shardc.compile(subject, batch, SPEC, captured=captured, prove=False)
        least(1, began)
        loopback(program.mesh, lambda mesh, program=program: mesh.rank or written(Interpreter(program, mesh)))
        least(2, began)
    return tuple(best)


def written(interpreter: Interpreter) -> None:
    """The graphs of a rank's stages, which its first step would make."""
    for stage in interpreter.stages.values():
        stage.joint  # noqa: B018 (it is made now)


def first_step(layers: int) -> float:
    """CPU seconds, of this process and of the compilers that it runs, until a first step has ended."""

    def used() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(x.ru_utime + x.ru_stime for x in both)

    began = used()
    ids = torch.randint(1024, (4, 128))
    batch = {"ids": ids, "targets": ids.roll(1)}
    subject = GPT3(layers, 256, 4, 128, 1024)
    program = shardc.compile(subject, batch, {"shardc": 1, "mesh": {"dp": 1}, "execution": {"compile": "layers"}})
    program.engine(subject).step(batch)
    return used() - began


def first_step_apart(layers: int) -> str:
    """The same in a process of its own, with nothing on disk."""
    with TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--first-step", str(layers)]
        return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="2,8,32,80")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--first-step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if options.first_step:
        print(f"{first_step(options.first_step):.1f}")
        return
    if options.compiled:
        print("| equal layers | to the end of the first step |\n|---:|---:|")
        for layers in map(int, options.layers.split(",")):
            print(f"| {layers} | {first_step_apart(layers)} |", flush=True)
        return
    measured(2, 1)
    print("| equal layers | capture | passes | capture and passes | and a rank's code |")
    print("|---:|---:|---:|---:|---:|", flush=True)
    for layers in map(int, options.layers.split(",")):
        captured, passes, ran = measured(layers, options.reps)
        cells = captured, passes, captured + passes, captured + ran
        print(f"| {layers} | {' | '.join(f'{x:.2f}' for x in cells)} |", flush=True)


if __name__ == "__main__":
    main()
