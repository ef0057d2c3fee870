"""Adapters, start to end (`make adapters`): adapt a trained model on two ranks, and load the result with peft.

1. The base: examples/llama.py, as `make generate` trains it (which this does if it is not there).
2. `shardc run` trains adapters of examples/adapters.py on 2 processes, and saves them alone.
3. peft, which knows nothing of shardc, loads them beside the plain model: the same held-out loss, below that before.
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
from peft import PeftModel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import adapters  # noqa: E402  (the examples, as any user's files)
import check_generate as base  # noqa: E402

OUT = HERE.parent / "runs" / "adapters"
RUN = [*base.SHARDC, "run", str(HERE / "adapters.py"), str(HERE / "adapters.yaml")]


def held_out(model: Any) -> float:
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in adapters.data("valid")]
    return sum(losses) / len(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--base", type=int, default=300, help="steps of the base's training, if it is not there")
    args = parser.parse_args()
    if not (base.OUT / "model.safetensors").exists() and (status := base.trained(args.base)):
        return status

    shutil.rmtree(OUT, ignore_errors=True)
    print(f"\nadapting on 2 processes (tp=2), {args.steps} steps", flush=True)
    where = ["--weights", str(base.OUT), "--save", str(OUT), "--log", str(OUT)]
    done = subprocess.run([*RUN, "--steps", str(args.steps), *where], check=False)
    if done.returncode:
        return done.returncode
    ours = json.loads((OUT / "summary.json").read_text())["held_out"]

    before = held_out(base.plain())
    tuned = PeftModel.from_pretrained(base.plain(), str(OUT)).eval()
    theirs = held_out(tuned)
    trained = sum(p.numel() for n, p in tuned.named_parameters() if "lora" in n)
    print(f"\nheld-out loss: {before:.5f} nats/byte before, {ours:.5f} on 2 processes, {theirs:.5f} with peft")
    print(f"{trained:,} numbers were trained of {sum(p.numel() for p in tuned.parameters()):,}")
    checks = ((abs(ours - theirs) < 1e-5 * theirs, "peft's loss is that of the run"), (theirs < before, "it is lower"))
    for good, what in checks:
        print(f"{'yes' if good else 'NO '}  {what}")
    return 0 if all(good for good, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
