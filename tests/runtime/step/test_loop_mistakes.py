"""Mistakes in a loop around a module that a plain model forgives, or that only one rank makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.agreement import DisagreementError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, SPECS, compiled


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


def loss_of(y: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return y.square().mean(), {"size": y.abs().mean(), "logits": y}


ROWS = {"x": torch.randn(4, 8, dtype=torch.float64)}
PENALTIES: dict[str, Callable[[Any, Any], Any]] = {
    "a term": lambda loss, beside: loss + beside["size"],
    "a factor of it": lambda loss, beside: loss + 0.1 * beside["size"],
    "of logits": lambda loss, beside: loss + beside["logits"].exp().mean(),
    "a head beside": lambda loss, beside: nn.functional.linear(
        beside["logits"], torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    ),
}


def beside(work: Callable[[Any, dict[str, Tensor]], Any]) -> list[Any]:
    program = shardc.compile(Two(), ROWS, {"shardc": 1, "mesh": {"dp": 2}}, loss=loss_of)

    def rank(mesh: LoopbackMesh) -> Any:
        module = ShardedModule(program, Two(), seed=3, mesh=mesh, broadcast=True)
        return work(*module(**module.local(ROWS)))

    return loopback(program.mesh, rank)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_value_beside_the_loss_is_no_term_of_it(name: str) -> None:
    with pytest.raises(ShardcError, match=r"a value beside the loss is detached: (.|\n)*add the term in the loss"):
        beside(PENALTIES[name])


def test_a_value_beside_the_loss_is_a_number_otherwise() -> None:
    def work(loss: Tensor, named: dict[str, Tensor]) -> Any:
        size = named["size"]
        (loss + size.detach()).backward()
        assert f"{size:.3f}" == f"{float(size):.3f}"
        assert repr(size) == repr(torch.tensor(float(size), dtype=torch.float64))
        assert copy.deepcopy(size).item() == (size * 2 / 2).item() == max(size, torch.zeros(())).item()
        return type(named["logits"].argmax(-1))

    assert beside(work) == [Tensor, Tensor]


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_that_one_rank_alone_clears(spec: str) -> None:
    program = compiled(spec)

    def rank(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, NORMED, mesh=mesh)
        for _ in range(3):
            if mesh.rank == 0:
                module.zero_grad()
            module(**module.local(BATCH)).backward()

    with pytest.raises(DisagreementError, match=r"which parameters have a gradient differ(.|\n)*zero_grad"):
        loopback(program.mesh, rank)


def test_a_hook_on_the_module_itself_runs(capfd: pytest.CaptureFixture[str]) -> None:
    program = compiled("tp")

    def rank(mesh: LoopbackMesh) -> list[float]:
        module = ShardedModule(program, NORMED, mesh=mesh)
        plain = module(**module.local(BATCH))
        module.register_forward_hook(lambda module, given, loss: 2 * loss)
        return [plain.item(), module(**module.local(BATCH)).item()]

    for plain, hooked in loopback(program.mesh, rank):
        assert hooked == 2 * plain
    assert "hook" not in capfd.readouterr().err


def test_a_simulation_sees_what_an_engine_would() -> None:
    """Though its engines check nothing: modes of torch, and a layer that was frozen after compiling."""
    model = Two()
    program = shardc.compile(model, ROWS, {"shardc": 1, "mesh": {"dp": 2}}, loss=loss_of)
    with torch.autocast("cpu"), pytest.raises(ShardcError, match=r"shardc.simulate: torch.autocast is on"):
        shardc.simulate(program, model, ROWS)
    model.up.bias.requires_grad_(False)
    with pytest.raises(ShardcError, match=r"up.bias.requires_grad: was trained when the model was compiled"):
        shardc.simulate(program, model, ROWS)
