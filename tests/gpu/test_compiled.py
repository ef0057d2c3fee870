"""Fused regions of a step, compiled by Triton, against the same step line by line: numbers, masks, memory."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.fused_regions import without_fused_regions
from shardc.runtime.compiled import masks
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.rng import Rng, row_and_column_offsets
from shardc.torch_private import inductor_compiled

compiler: Any = importlib.import_module("shardc.runtime.compiled.compiler")

#: Inductor adds up rows (a norm's gradients) in two stages: what the first one gives was 6 MiB here on an H200.
PARTIAL_SUMS = 8 * 2**20


class Layers(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.fcs = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, fc in zip(self.norms, self.fcs, strict=True):
            x = x + nn.functional.dropout(nn.functional.gelu(fc(norm(x))), 0.1, self.training)
        return x.square().mean()


def test_compiled_masks_are_the_kernels(gpu: str) -> None:
    device = torch.device(gpu)
    where = row_and_column_offsets([64, 4096], (), None, device)
    x, rng = torch.ones(64, 4096, device=device), Rng(seed=7, step=2)
    inputs = [x, rng.key_words(3, device), *where]
    run = inductor_compiled(lambda x, *given: [masks.masked(x, given, 0.1)], inputs)
    assert torch.equal(run(list(inputs))[0], torch.ops.shardc.dropout(x, rng.words(device), *where, 3, 0.1))


@pytest.mark.parametrize(("precision", "bound"), [({}, 1e-5), ({"compute": "bfloat16"}, 5e-2)], ids=["f32", "bf16"])
def test_a_compiled_step(gpu: str, precision: dict[str, str], bound: float) -> None:
    torch.manual_seed(0)
    model, batch = Layers(), {"x": torch.randn(16, 256, 512)}
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": precision, "execution": {"compile": "layers"}}
    program = shardc.compile(model, batch, spec, prove=False)
    assert "| fused 0" in program.joint()
    mesh = TorchMesh(program.mesh, device=torch.device(gpu))
    found, peaks = [], []
    for p in (without_fused_regions(program), program):
        engine = p.engine(model, None, mesh=mesh)
        engine.backward(batch)  # this compiles
        engine.update()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(batch)
        peaks.append(torch.cuda.max_memory_allocated())
        found.append({n: x.grad.double() for n, x in engine.params.items() if x.grad is not None})
        engine.close()
    assert not [run for run in compiler._DONE.values() if isinstance(run, str)]
    want, have = found
    assert want.keys() == have.keys() != set()
    assert [n for n, g in want.items() if float((have[n] - g).norm()) > bound * float(g.norm())] == []
    assert peaks[1] <= peaks[0] * 1.01 + PARTIAL_SUMS
