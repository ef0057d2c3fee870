"""Documents over two ranks, start to end (`make documents`): train, then compare with the plain model.

1. `shardc run` trains examples/documents.py on 2 processes, each with half of every row, and saves its weights.
2. The same run on one process: its first losses stand beside the others.
3. 2 processes load the weights and give the loss of every held-out document; so does the plain model.
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

import documents  # noqa: E402  (the example, as any user's file)

import shardc  # noqa: E402

OUT = HERE.parent / "runs" / "documents"
RUN = [sys.executable, "-m", "shardc", "run", str(HERE / "documents.py"), str(HERE / "documents.yaml")]


def compare() -> int:
    """On each of two ranks: the loss of every held-out document by both, and by the plain model, which rank 0 runs."""
    torch.manual_seed(0)
    model = documents.model()
    load_model(model, OUT / "model.safetensors")
    program = shardc.compile(model, documents.batch(), str(HERE / "documents.yaml"), loss=documents.loss)
    engine, worst, number = program.engine(model), 0.0, 0
    for batch in documents.data("valid"):
        _, values = engine.evaluate(batch, gather=True)
        if engine.mesh.rank:
            continue
        with torch.no_grad():
            output = model(batch["input_ids"], batch["document"], batch["position"])
            _, alone = documents.loss(output, batch)
        of = batch["document"][0]
        for i in range(int(of.max()) + 1):
            both, one, size = values["per_document"][0, i], alone["per_document"][0, i], int((of == i).sum())
            ranks = "both ranks" if (of[: len(of) // 2] == i).any() and (of[len(of) // 2 :] == i).any() else "one rank"
            number, worst = number + 1, max(worst, float((both - one).abs() / one))
            print(f"{number:>4}  {size:>5} bytes on {ranks:<10}  {both:.6f}  {one:.6f}", flush=True)
    if engine.mesh.rank == 0:
        print(f"worst relative difference of {number} documents: {worst:.1e}", flush=True)
    return int(worst > 1e-4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--alone", type=int, default=3, help="steps of the run on one process")
    parser.add_argument("--compare", action="store_true", help="what each rank runs in step 3")
    args = parser.parse_args()
    if args.compare:
        return compare()
    shutil.rmtree(OUT, ignore_errors=True)
    print(f"training on 2 processes (cp=2), {args.steps} steps of {documents.SEQ} tokens", flush=True)
    steps = ["--steps", str(args.steps)]
    done = subprocess.run([*RUN, *steps, "--save", str(OUT), "--log", str(OUT)], check=False)
    if done.returncode:
        return done.returncode
    two = [json.loads(line) for line in (OUT / "steps.jsonl").read_text().splitlines()]

    print(f"\nthe same on one process, {args.alone} steps", flush=True)
    one = subprocess.run(
        [*RUN, "--mesh", "cp=1", "--steps", str(args.alone), "--json"], check=True, capture_output=True, text=True
    )
    alone = json.loads(one.stdout)["losses"]
    print("step   2 processes   1 process    difference")
    for line, loss in zip(two, alone, strict=False):
        print(f"{line['step']:>4}   {line['loss']:.6f}      {loss:.6f}     {abs(line['loss'] - loss):.1e}")
    equal = all(abs(line["loss"] - loss) < 1e-4 * loss for line, loss in zip(two, alone, strict=False))

    print("\nheld-out documents: nats a byte on 2 processes, in the plain model", flush=True)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(Path(__file__)), "--compare"]
    same = subprocess.run(ranks, check=False).returncode == 0
    for good, what in ((equal, "losses of 2 processes and 1 are equal"), (same, "so is that of every document")):
        print(f"{'yes' if good else 'NO '}  {what}")
    return 0 if equal and same else 1


if __name__ == "__main__":
    sys.exit(main())
