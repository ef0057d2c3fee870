"""The main job, start to end (`make train`): train over dp=2 x tp=2, then prove it against the plain model.

1. `shardc run` trains examples/gpt.py on 4 processes of this machine and saves its weights.
2. The same run on one process: its first losses stand beside the 4 processes' losses.
3. The plain model, which knows nothing of shardc, loads the weights and gives the same held-out loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpt  # noqa: E402  (the example, as any user's file)

GOAL = 2.5  # nats per byte on files that training never sees
SHARDC = [sys.executable, "-m", "shardc"]


def shardc(*args: str) -> list[str]:
    return [*SHARDC, "run", str(HERE / "gpt.py"), str(HERE.parent / "specs" / "gpt.yaml"), *args]


def held_out() -> float:
    """The plain model's loss on the held-out batches, with the weights that the run saved."""
    model = gpt.model().eval()
    load_model(model, HERE.parent / "runs" / "gpt" / "model.safetensors")
    with torch.no_grad():
        losses = [float(model(**batch)) for batch in gpt.data("valid")]
    return sum(losses) / len(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--compare", type=int, default=10, help="steps of the run on one process")
    args = parser.parse_args()
    out = HERE.parent / "runs" / "gpt"
    shutil.rmtree(out, ignore_errors=True)

    print(f"training on 4 processes (dp=2 x tp=2), {args.steps} steps", flush=True)
    done = subprocess.run(shardc("--steps", str(args.steps), "--save", str(out), "--log", str(out)), check=False)
    if done.returncode:
        return done.returncode
    four = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())

    print(f"\nthe same on one process, {args.compare} steps", flush=True)
    one = subprocess.run(
        shardc("--mesh", "dp=1,tp=1", "--steps", str(args.compare), "--json"),
        check=True,
        capture_output=True,
        text=True,
    )
    alone = json.loads(one.stdout)["losses"]
    print("step   4 processes   1 process    difference")
    for line, loss in zip(four, alone, strict=False):
        print(f"{line['step']:>4}   {line['loss']:.6f}      {loss:.6f}     {abs(line['loss'] - loss):.1e}")
    equal = all(abs(line["loss"] - loss) < 1e-4 * loss for line, loss in zip(four, alone, strict=False))

    plain = held_out()
    print(
        f"\nheld-out loss: {summary['held_out']:.5f} nats/byte on 4 processes, {plain:.5f} in the plain model with the"
        " saved weights"
    )
    same = abs(plain - summary["held_out"]) < 1e-5 * plain
    low = plain < GOAL
    checks = (
        (equal, "losses of 4 processes and 1 are equal"),
        (same, "held-out losses are equal"),
        (low, f"held-out loss is below {GOAL}"),
    )
    for good, what in checks:
        print(f"{'yes' if good else 'NO '}  {what}")
    return 0 if equal and same and low else 1


if __name__ == "__main__":
    sys.exit(main())
