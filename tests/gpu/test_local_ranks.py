"""Ranks of larger meshes, each alone on its device: a step's results are those of the CPU, all state is on the device,
and the host waits for nothing but what experts send, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc.api import Program
from tests import zoo
from tests.gpu.devices import needs_gpu
from tests.gpu.twin_mesh import TwinMesh, twin
from tests.gpu.watched import watched_device, watching
from tests.second_device import OnSecond
from tests.zoo import hf, hf_more

STRUCTURE = {"shard": {"use": "structure"}}
LAYERS = "model.layers.*"


@dataclass(frozen=True)
class Case:
    """waits: of the host in a step; None: not asked, as the thread that moves tensors waits for its copies.
    second: also on the made-up device.
    """

    build: Callable[[], Any]
    spec: dict[str, Any]
    waits: int | None = 0
    second: bool = False


def llama() -> Any:
    return zoo.llama()


def mixtral() -> Any:
    return hf.build(hf_more.FAMILIES["mixtral"])


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"mesh": {"dp": 2}, "data": {"axis": "dp", "zero": stage, **more}}


def offload(**places: str) -> dict[str, Any]:
    return {"offload": places}


CASES = {
    "dp tp": Case(llama, {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE}, second=True),
    "tp, padded": Case(llama, {"mesh": {"tp": 3}, "uneven": "pad", **STRUCTURE}),
    "dropout": Case(lambda: zoo.gpt(dropout=0.1), {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE}, second=True),
    "experts": Case(
        mixtral, {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.experts", "axis": "ep"}]}, waits=2, second=True
    ),
    "pipeline": Case(
        llama, {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}, second=True
    ),
    "zero 1": Case(llama, zero(1) | {"batch": {"microbatches": 2}}),
    "zero 2, tp": Case(llama, zero(2) | {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE}),
    "hybrid": Case(llama, {"mesh": {"dp_outer": 2, "dp": 2}, "data": {"axis": ["dp_outer", "dp"], "zero": 2}}),
    "zero 3, recompute": Case(llama, zero(3, bucket_mb=0.1) | {"checkpoint": [{"match": LAYERS}]}, second=True),
    "optimizer on the host": Case(llama, zero(2, **offload(optimizer="cpu")), waits=None),
    "parameters on the host": Case(llama, zero(3, **offload(optimizer="cpu", parameters="cpu")), waits=None),
    "activations on the host": Case(llama, {"mesh": {"dp": 2}, "checkpoint": [{"match": LAYERS, "offload": "cpu"}]}),
    "activations on the host, products kept": Case(
        llama,
        {
            "mesh": {"dp": 2},
            "checkpoint": [{"match": LAYERS, "save": ["linear", "attention"], "offload": "cpu"}],
        },
    ),
}
#: On the made-up device tests/runtime/step/test_second_device.py has these, and other features, on a loopback mesh.
CASES |= {f"{name}, dp tp": Case(build, CASES["dp tp"].spec) for name, build in zoo.ALL.items() if name != "llama"}


@lru_cache(maxsize=1)
def compiled(name: str) -> tuple[Any, Any, Program]:
    with zoo.Wide():
        model, batch = CASES[name].build()
        return model, batch, shardc.compile(model, batch, {"shardc": 1, **CASES[name].spec}, prove=False)


def plain(x: Tensor) -> Tensor:
    x = x.detach()
    return x.numbers if isinstance(x, OnSecond) else x.cpu()


def trained(name: str, mesh: TwinMesh, watched: Any = None) -> dict[str, Tensor]:
    """{"loss": ..., parameter: ...} after two steps, of which the second is watched."""
    model, batch, program = compiled(name)
    engine = program.engine(model, lambda ps: torch.optim.AdamW(ps, lr=1e-3, eps=1e-2), mesh=mesh, check=False)
    engine.step(batch)
    if watched is None or CASES[name].waits is None:
        loss = engine.step(batch)
    else:
        with watching(watched):
            loss = engine.step(batch)
    assert loss.device.type == mesh.device.type
    if not program.spec.data.offload.used:
        state = engine.optimizer.state.values() if engine.optimizer is not None else ()
        tensors = [*engine.params.values(), *(p.grad for p in engine.params.values()), *engine.buffers.values()]
        tensors += [x for s in state for x in s.values() if isinstance(x, Tensor) and x.dim()]
        assert {x.device.type for x in tensors if x is not None} == {mesh.device.type}
    with engine._model.offload.params_on_host():
        found = {"loss": plain(loss)} | {n: plain(p).clone() for n, p in engine.params.items()}
    engine.close()
    return found


def ranks(name: str, on: str) -> list[int]:
    """One of them on the made-up device; on a GPU all."""
    world = compiled(name)[2].mesh.world
    return list(range(world)) if on == "cuda" else [world - 1]


@pytest.mark.parametrize(
    ("name", "on"),
    [
        *((name, "second") for name, case in CASES.items() if case.second),
        *(pytest.param(name, "cuda", marks=needs_gpu) for name in CASES),
    ],
)
def test_a_rank_alone(name: str, on: str) -> None:
    _, _, program = compiled(name)
    for rank in ranks(name, on):
        with twin(program, rank, "cpu") as mesh:
            expected = trained(name, mesh)
        with twin(program, rank, "cpu" if on == "second" else "cuda") as mesh, watched_device(on) as device:
            mesh.device = torch.device(device.name) if on == "second" else mesh.device
            found = trained(name, mesh, device)
        assert [w.rpartition(" ")[2] for w in device.syncs] == ["to_host"] * (CASES[name].waits or 0)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")
