"""Steps that were recorded as a CUDA graph, against the same steps op by op: of one device, and of ranks of larger
meshes, each alone on its device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc.api import Program
from shardc.runtime.step import step_graph
from tests import zoo
from tests.gpu.test_local_ranks import CASES, zero
from tests.gpu.twin_mesh import twin

STEPS = 6
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, CASES[name].spec)
    for name in ("dp tp", "tp, padded", "dropout", "pipeline", "zero 1", "zero 2, tp", "hybrid", "zero 3, recompute")
}
SPECS |= {
    "one device": ("dropout", {"mesh": {"dp": 1}}),
    "bfloat16, compiled": ("dropout", {"mesh": {"dp": 1}, "precision": {"compute": "bfloat16"}}),
    "float16": ("dropout", zero(1) | {"precision": {"compute": "float16", "loss_scale": "dynamic"}}),
    "batch norm": ("resnet_bn, dp tp", {"mesh": {"dp": 2}}),
}


def compiled(name: str, graphs: bool) -> tuple[Any, Any, Program]:
    case, spec = SPECS[name]
    execution = {"graphs": graphs, "compile": "layers" if "compiled" in name else "none"}
    with zoo.Wide():
        model, batch = CASES[case].build()
        return model, batch, shardc.compile(model, batch, {"shardc": 1, **spec, "execution": execution}, prove=False)


def trained(name: str, rank: int, gpu: str, graphs: bool) -> dict[str, Tensor]:
    """{"loss 0": ..., parameter: ...}"""
    model, batch, program = compiled(name, graphs)
    with twin(program, rank, gpu) as mesh:
        engine = program.engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-2), mesh=mesh, check=False)
        found = {}
        for step in range(STEPS):
            rolled = {k: v.roll(step, 0) if isinstance(v, Tensor) else v for k, v in batch.items()}
            found[f"loss {step}"] = engine.step(rolled)
        if graphs:
            assert engine._step_graphs is not None
            assert len(engine._step_graphs._recorded) == 1
        found |= {n: p.detach().clone() for n, p in engine.params.items()}
        found |= {n: b.clone() for n, b in engine.buffers.items()}
        engine.close()
    return found


@pytest.mark.parametrize("name", SPECS)
def test_recorded_steps(gpu: str, name: str) -> None:
    rank = compiled(name, graphs=False)[2].mesh.world - 1
    expected, found = (trained(name, rank, gpu, graphs) for graphs in (False, True))
    assert found.keys() == expected.keys()
    narrow = "precision" in SPECS[name][1]  # sums whose order a GPU does not fix, in 16 bits
    bound = 2e-2 if narrow else 1e-9
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=bound, atol=bound, msg=lambda m, key=key: f"{key}: {m}")


def test_what_cannot_be_recorded_runs_op_by_op(gpu: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A host that waits in the middle of a step; the next step is as any other."""
    graph = step_graph.CudaGraph(torch.cuda.graph_pool_handle())
    x = torch.ones(4, device=gpu)
    with pytest.raises(RuntimeError), graph.recording():
        float(x.sum())
    assert float(x.sum()) == 4
