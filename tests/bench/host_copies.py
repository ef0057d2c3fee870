"""Copies of `checkpoint: {offload: cpu}` on `h100-80g`: a table of docs/measured/joint.md. Nothing is computed.

python tests/bench/host_copies.py
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.ir.metadata import HOST_LINK  # noqa: E402

REGION = {"match": "h.*", "save": ["linear"]}
HOST = REGION | {"offload": "cpu"}
ROWS: dict[str, dict[str, Any]] = {
    "all on the device": {"checkpoint": [REGION]},
    "`offload: cpu`": {"checkpoint": [HOST]},
}


class Blocks(nn.Module):
    """LayerNorm, Linear, GELU, Linear, several times."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.h = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(layers)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.h(x).square().mean()


def main() -> None:
    logging.disable(logging.CRITICAL)
    with torch.device("meta"):
        model, batch = Blocks(4, 8192), {"x": torch.empty(32768, 8192)}
    print("| | step | copies | waited for | peak memory | on the host |\n|---|---:|---:|---:|---:|---:|")
    for name, row in ROWS.items():
        spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "bfloat16"}, **row}
        cost = shardc.compile(model, batch, spec, prove=False).cost("h100-80g")
        copies = sum(s.seconds for s in cost.streams[0].spans if s.record.axes == HOST_LINK)
        waited = cost.exposed.get(HOST_LINK[0], 0.0)
        cells = (f"{1e3 * x:.1f} ms" for x in (cost.step_seconds, copies, waited))
        sizes = (f"{x / 1e9:.2f} GB" for x in (cost.memory.peak, cost.memory.host))
        print(f"| {' | '.join((name, *cells, *sizes))} |")


if __name__ == "__main__":
    main()
