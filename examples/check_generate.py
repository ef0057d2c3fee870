"""Generation, start to end (`make generate`): train, write texts on two ranks, and compare with transformers.

1. `shardc run` trains examples/llama.py on 2 processes, and saves its weights.
2. `shardc generate` continues prompts of different lengths on 2 processes, each with half of every layer's cache.
3. transformers' own `generate` on one process, which knows nothing of shardc, gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import llama  # noqa: E402  (the example, as any user's file)

OUT = HERE.parent / "runs" / "llama"
SHARDC, FILES = [sys.executable, "-m", "shardc"], [str(HERE / "llama.py"), str(HERE / "llama.yaml")]
PROMPTS = ("def main(", "import ", "class Error(Exception):\n    ", '    """Return')


def trained(steps: int) -> int:
    """Train the model, and save it in runs/llama. Returns the exit status."""
    shutil.rmtree(OUT, ignore_errors=True)
    print(f"training on 2 processes (tp=2), {steps} steps", flush=True)
    command = [*SHARDC, "run", *FILES, "--steps", str(steps), "--save", str(OUT), "--log", str(OUT)]
    return subprocess.run(command, check=False).returncode


def plain() -> Any:
    """The model on one device, with the weights that the run saved."""
    model = llama.model().eval()
    load_model(model, OUT / "model.safetensors")
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if status := trained(args.steps):
        return status

    print(f"\n{args.tokens} bytes after each of {len(PROMPTS)} prompts, on 2 processes", flush=True)
    prompts = [list(p.encode()) for p in PROMPTS]
    given = [part for ids in prompts for part in ("--ids", ",".join(map(str, ids)))]
    options = ["--weights", str(OUT), "--max-new-tokens", str(args.tokens), "--json"]
    done = subprocess.run(
        [*SHARDC, "generate", *FILES, *given, *options], check=True, stdout=subprocess.PIPE, text=True
    )
    ours = json.loads(done.stdout)["tokens"]

    model = plain()
    same = []
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.tokens, do_sample=False)
        same.append(theirs[0, len(prompt) :].tolist() == tokens)
        print(f"--- {'the same in transformers' if same[-1] else 'OTHERWISE in transformers'}")
        print(bytes(prompt + tokens).decode(errors="replace"))
    print(f"\n{'yes' if all(same) else 'NO '}  {sum(same)} of {len(same)} texts are those of transformers' generate")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
