"""Peak memory of a step against `program.cost`: on a GPU by its allocator, on the CPU by tests/live_bytes.py."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import shardc
from shardc.runtime.mesh import TorchMesh
from tests import live_bytes
from tests.gpt3 import GPT3
from tests.gpu.devices import needs_gpu

#: What is no tensor of the program: cuBLAS's workspaces, which torch's allocator gives.
WORKSPACE = 96 * 2**20
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"checkpoint": [{"match": "h.*"}]},
    "bfloat16": {"precision": {"compute": "bfloat16"}},
}


def built(device: str) -> tuple[Any, Any]:
    """Of a GPU, a peak of some GiB."""
    layers, hidden, heads, sequence, vocab, batch = (
        (8, 1024, 16, 512, 8192, 8) if device == "cuda" else (2, 32, 2, 16, 64, 4)
    )
    torch.manual_seed(0)
    ids = torch.randint(vocab, (batch, sequence))
    return GPT3(layers, hidden, heads, sequence, vocab).train(), {"ids": ids, "targets": ids.roll(1)}


def measured(program: Any, model: Any, batch: Any, device: str) -> int:
    """Bytes, in the second of two steps."""
    if device == "cpu":
        return int(max(x.peak for x in live_bytes.watched(program, model, batch)))
    engine = program.engine(model, mesh=TorchMesh(program.mesh, device=device))
    engine.step(batch)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() - sum(x.nbytes for x in held(engine))
    torch.cuda.reset_peak_memory_stats()
    engine.step(batch)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - max(before, 0))


def held(engine: Any) -> list[torch.Tensor]:
    """What a step begins with."""
    state = [x for s in engine.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    tensors = [*engine.params.values(), *engine.buffers.values(), *state]
    tensors += [p.grad for p in engine.params.values() if p.grad is not None]
    return [x for x in tensors if x.device.type == "cuda"]


@pytest.mark.parametrize(
    ("name", "on"),
    [("recompute", "cpu"), *(pytest.param(name, "cuda", marks=needs_gpu) for name in SPECS)],
)
def test_the_peak_is_what_was_told(name: str, on: str) -> None:
    model, batch = built(on)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, **SPECS[name]}, prove=False)
    cost = program.cost("h200")
    predicted = cost.memory.peak
    found = measured(program, model, batch, on)
    if on == "cuda":  # what its allocator has, in segments
        assert torch.cuda.max_memory_reserved() <= 1.1 * cost.reserved + WORKSPACE
        assert cost.reserved <= 1.1 * torch.cuda.max_memory_reserved()
    assert found <= 1.1 * predicted + (WORKSPACE if on == "cuda" else 0)
    assert predicted <= 1.1 * found
