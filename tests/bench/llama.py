"""Write docs/models.md: every model of the test zoo on every mesh, compared with one device. Run by `make table`."""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardc
from tests import zoo
from tests.test_equal import MESHES, MODELS, reference, spec_of

OUT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"}


def row(name: str, label: str, mesh: dict[str, int], *, sequence: bool) -> str:
    model, batch, loss, grads = reference(name)
    with zoo.Wide():
        start = time.perf_counter()
        program = shardc.compile(model, batch, spec_of(name, mesh, sequence=sequence), prove=False)
        seconds = time.perf_counter() - start
    sim = shardc.simulate(program, model, batch)
    floor = 1e-3 * float(torch.stack([g.norm() for g in grads.values()]).norm())
    worst = max(float((sim.grads[n] - g).norm()) / max(float(g.norm()), floor) for n, g in grads.items())
    off = abs(float((sim.loss - loss) / loss))
    counts = collections.Counter((c.axis, c.direction, SHORT[c.kind]) for c in sim.comms if not c.cause.startswith("gradients of"))
    shown = [
        f"{axis} {way}: " + ", ".join(f"{n} {kind}" for (a, d, kind), n in sorted(counts.items()) if (a, d) == (axis, way))
        for axis, way in sorted({(a, d) for a, d, _ in counts}, key=lambda x: (x[0], x[1] != "forward"))
    ]
    return f"| {name} | {label} | {off:.0e} | {worst:.0e} | {'; '.join(shown)} | {seconds:.2f} |"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# Models, meshes and what is sent",
        "",
        "Made by `make table` from the models of tests/zoo (two layers each, float64, 8 × 16 tokens, labels of -100 unevenly on the rows).",
        "Loss and the worst gradient as relative difference from the eager model; collectives of one step without the bucketed gradient",
        "sums (AR all_reduce, AG all_gather, RS reduce_scatter); seconds to compile. `sp`: one annotation on the embedding's output.",
        "",
        "| model | mesh | loss | gradients | collectives | compile (s) |",
        "|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for label, mesh in MESHES.items():
            lines.append(row(name, label, mesh, sequence=False))
        for dp in (1, 2):
            lines.append(row(name, f"{'dp=2 ' if dp == 2 else ''}tp=2 sp", {"dp": dp, "tp": 2}, sequence=True))
        print(lines[-1], flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
