"""The small model, batch and specs of this folder's tests, and what runs a test on each rank of a program's mesh."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - x).square().mean()


class NormedNet(Net):
    """With a batch norm, whose buffers change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.norm(self.up(x)).relu()) - x).square().mean()


torch.manual_seed(0)
NET, NORMED = Net(), NormedNet()
BATCH = {"x": torch.linspace(-1, 1, 64).view(8, 8).sin()}
STRUCTURE = {"shard": {"use": "structure"}}
TP: dict[str, Any] = {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}
SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE},
    "zero 1": {"mesh": {"dp": 4}, "data": {"axis": "dp", "zero": 1}},
    "zero 3": {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE, "data": {"axis": "dp", "zero": 3}},
}


@functools.cache
def compiled(name: str) -> shardc.Program:
    """The program of NORMED for one of SPECS."""
    return shardc.compile(copy.deepcopy(NORMED), BATCH, {"shardc": 1, **SPECS[name]})


def of(spec: dict[str, Any], model: nn.Module = NET) -> shardc.Program:
    return shardc.compile(copy.deepcopy(model), BATCH, {"shardc": 1, **spec}, prove=False)


def backward(module: ShardedModule) -> None:
    module(**module.local(BATCH)).backward()


def on_modules(program: shardc.Program, model: nn.Module = NORMED) -> Callable[[Callable[..., Any]], list[Any]]:
    """Run the decorated function at once on each rank, with its module and mesh; its name is what ranks returned."""
    return lambda work: loopback(program.mesh, lambda mesh: work(ShardedModule(program, model, mesh=mesh), mesh))


def on_engines(
    program: shardc.Program, model: nn.Module = NORMED, *args: Any, **options: Any
) -> Callable[[Callable[..., Any]], list[Any]]:
    """The same with its engine."""

    def rank(mesh: LoopbackMesh, work: Callable[..., Any]) -> Any:
        return work(Engine(program, model, *args, mesh=mesh, **options), mesh)

    return lambda work: loopback(program.mesh, functools.partial(rank, work=work))
