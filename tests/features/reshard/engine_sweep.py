"""Many families on many training meshes into engines of many sizes: every byte against torch's own slices of the whole
state dict, and the bytes sent against what the engine lacks.

    python -m tests.features.reshard.engine_sweep [family ...]       prints the table of docs/measured/layouts.md
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import shardc
from shardc import engines
from shardc.features.reshard.layout import Layout, by_rank
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests.features.reshard import engine_slices
from tests.zoo import hf, hf_more

MESHES: dict[str, dict[str, Any]] = {
    "dp 4, zero 3": {"mesh": {"dp": 4}, "data": {"zero": 3}},
    "dp 2, zero 1": {"mesh": {"dp": 2}, "data": {"zero": 1}},
    "tp 2": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "dp 2 x tp 2, zero 3": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 3}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}},
    "pp 2 x dp 2, zero 1": {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
        "data": {"zero": 1},
    },
}
ENGINES = [
    (kind, tp, ep)
    for kind in ("vllm", "transformers")
    for tp, ep in ((1, False), (2, False), (4, False), (8, False), (8, True))
]


def tried(family: str, counts: Counter[str], reasons: Counter[str]) -> None:
    families = hf.FAMILIES | hf_more.FAMILIES
    model, batch = hf.build(families[family])
    layouts: list[tuple[str, int, bool, Layout]] = []
    for kind, tp, ep in ENGINES:
        try:
            layouts.append((kind, tp, ep, getattr(engines, kind)(model, tp, dtype="float64", ep=ep)))
        except (shardc.ShardcError, AttributeError) as e:
            reasons[f"{kind}: {str(e).splitlines()[0][:90]}"] += 1
    if not layouts:
        counts["families without a layout"] += 1
        return
    counts["families"] += 1
    for mesh, spec in MESHES.items():
        try:
            program = shardc.compile(model, batch, {"shardc": 1, "uneven": "pad", **spec}, prove=False)
        except shardc.ShardcError as e:
            reasons[f"{mesh}: {str(e).splitlines()[0][:90]}"] += 1
            continue
        with tempfile.TemporaryDirectory() as folder:

            def work(ranks: LoopbackMesh, program: Any = program, folder: str = folder) -> None:
                engine = program.engine(model, None, mesh=ranks)
                for i, (*_, layout) in enumerate(layouts):
                    engine.weights_to(engines.files(layout, Path(folder) / str(i)))

            loopback(program.mesh, work)
            for i, (kind, tp, ep, layout) in enumerate(layouts):
                for rank in range(tp):
                    made = load_file(Path(folder) / str(i) / f"rank-{rank:05d}-of-{tp:05d}.safetensors")
                    how: dict[str, Any] = {"ep": ep} if kind == "vllm" else {}
                    if not (kind == "transformers" and ep):
                        engine_slices.equal(made, getattr(engine_slices, kind)(model, tp, rank, **how))
                need = 8 * sum(
                    math.prod(box[1])
                    for x in layout.tensors.values()
                    for p in x.parts
                    for r in range(tp)
                    if p.of and (box := by_rank(p.boxes, r)) is not None
                )
                assert program.reshard(layout).bytes == need
                counts["engines"] += 1
                counts["bytes"] += need
        counts["meshes"] += 1
    print(family, dict(counts), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, reasons = Counter[str](), Counter[str]()
    for family in sys.argv[1:] or [*hf.FAMILIES, *hf_more.FAMILIES]:
        tried(family, counts, reasons)
    print("| " + " | ".join(counts) + " |")
    print("| " + " | ".join(f"{n:,}" for n in counts.values()) + " |")
    for reason, n in reasons.most_common():
        print(n, reason)


if __name__ == "__main__":
    main()
