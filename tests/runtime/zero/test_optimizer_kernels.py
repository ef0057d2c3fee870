"""Which of torch's implementations of an optimizer steps, where its user did not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.zero.several_optimizers import as_one, prefer_fused


class Own(torch.optim.AdamW):
    """A step of one's own, which may not know of `fused`."""


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adam(p, amsgrad=True), True),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True),
        (lambda p: torch.optim.AdamW(p, foreach=True), None),
        (lambda p: torch.optim.AdamW(p, foreach=False), None),
        (lambda p: torch.optim.AdamW(p, fused=False), False),
        (lambda p: torch.optim.AdamW(p, differentiable=True), None),
        (lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=None, capturable=True), None),
        (lambda p: Own(p), None),
        (lambda p: torch.optim.RMSprop(p), None),
    ],
)
def test_what_the_user_says_stays(make: Any, fused: bool | None) -> None:
    optimizer = make(params())
    prefer_fused(optimizer)
    assert optimizer.param_groups[0].get("fused") is fused


def test_of_several_optimizers_each() -> None:
    a, b = params()
    both = as_one([torch.optim.AdamW([a]), torch.optim.RMSprop([b])])
    prefer_fused(both)
    assert [g.get("fused") for g in both.param_groups] == [True, None]
    for p in (a, b):
        p.grad = torch.ones_like(p)
    both.step()
    assert not torch.equal(a, torch.ones(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


@pytest.mark.parametrize("zero", [0, 2])
def test_a_checkpoint_does_not_say_which_ran(tmp_path: Path, zero: int) -> None:
    """Saved after steps of one implementation, it goes on with the other one."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    net = Net()
    program = shardc.compile(net, x, {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": zero}})

    def run(mesh: LoopbackMesh, first: dict[str, bool], then: dict[str, bool], name: str) -> dict[str, Tensor]:
        def engine(how: dict[str, bool]) -> Any:
            return program.engine(net, lambda ps: torch.optim.AdamW(ps, 1e-2, **how), mesh=mesh)

        one = engine(first)
        one.step(x)
        one.save(tmp_path / name)
        other = engine(then)
        other.load(tmp_path / name)
        assert {k: other.optimizer.param_groups[0][k] for k in then} == then
        other.step(x)
        state: dict[str, Tensor] = other.full_state_dict()
        return state

    fused, foreach = {"fused": True, "foreach": False}, {"fused": False, "foreach": True}
    want = loopback(program.mesh, lambda mesh: run(mesh, foreach, foreach, "same"))[0]
    for first, then in ((fused, foreach), (foreach, fused)):
        name = f"{first['fused']}"
        for found in loopback(program.mesh, lambda mesh, a=first, b=then, n=name: run(mesh, a, b, n)):
            assert all(torch.allclose(found[n], x, rtol=1e-5, atol=1e-7) for n, x in want.items())
