"""What a user writes to `engine.params` by hand, between two steps, counts on every rank and at every stage of ZeRO."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - x).square().mean()


torch.manual_seed(0)
NET = Net()
BATCH = {"x": torch.randn(8, 8)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("spec", [{"mesh": {"dp": 2}}, {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}])
def test_a_write_by_hand_is_that_of_one_device(zero: int, spec: dict[str, Any]) -> None:
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **spec, "data": {"axis": "dp", "zero": zero}})
    plain = copy.deepcopy(NET)
    optimizer = sgd(plain.parameters())
    losses = []
    for _ in range(2):
        plain.zero_grad()
        loss = plain(**BATCH)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for x in plain.parameters():
                x.mul_(0.5).clamp_(-0.05, 0.05)
        losses += [loss.item(), plain(**BATCH).item()]

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = Engine(program, NET, sgd, mesh=mesh)
        found = []
        for _ in range(2):
            found.append(float(engine.step(BATCH)))
            with torch.no_grad():
                for x in engine.params.values():
                    x.mul_(0.5).clamp_(-0.05, 0.05)
            found.append(float(engine.evaluate(BATCH)))
        with torch.no_grad():
            for x in engine.params.values():
                x.zero_()
        assert not any(x.any() for x in engine.full_state_dict().values())
        return found

    for found in loopback(program.mesh, work):
        assert found == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("precision", [{}, {"compute": "bfloat16"}])
def test_only_a_write_is_gathered_once_more(precision: dict[str, Any]) -> None:
    """Reading them, as for an average of weights, costs nothing; and nor do updates, whose gather is there anyway."""
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 1}, "precision": precision}
    program = shardc.compile(copy.deepcopy(NET), BATCH, spec)

    def work(mesh: LoopbackMesh) -> tuple[int, int, int]:
        engine = Engine(program, NET, sgd, mesh=mesh)
        begun, publish = [], engine.buckets.publish
        engine.buckets.publish = lambda: (begun.append(0), publish())[1]  # type: ignore[method-assign,func-returns-value]
        counts = []
        for write in (False, False, True):
            engine.step(BATCH)
            average = {n: p.detach().clone() for n, p in engine.params.items()}
            if write:
                with torch.no_grad():
                    for n, p in engine.params.items():
                        p.copy_(average[n])
            engine.evaluate(BATCH)
            counts.append(len(begun))
        return counts[0], counts[1], counts[2]

    assert set(loopback(program.mesh, work)) == {(1, 2, 4)}


def test_a_write_on_one_rank_only_is_an_error_on_all() -> None:
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 2}})

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(program, NET, sgd, mesh=mesh)
        if mesh.rank:
            with torch.no_grad():
                next(iter(engine.params.values())).mul_(2.0)
        with pytest.raises(
            ShardcError,
            match=r"whether parameters were written to differs(.|\n)*(in the same way|equally) on all ranks",
        ):
            engine.step(BATCH)

    loopback(program.mesh, work)


TP = {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}
DRAWN: dict[str, Callable[[nn.Parameter], Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "kaiming": lambda p: nn.init.kaiming_uniform_(p) if p.ndim > 1 else p.uniform_(),
    "truncated": nn.init.trunc_normal_,
    "method": lambda p: p.bernoulli_(0.5),
}


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize("spec", [TP, {"mesh": {"dp": 2}, "data": {"zero": 2}}])
def test_random_numbers_for_a_part_are_refused(spec: dict[str, Any], draw: str) -> None:
    """Each rank would draw the numbers of its part, the same ones for every part."""
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **spec})

    def work(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, NET, mesh=mesh)
        engine = Engine(program, NET, mesh=mesh)
        for p in (module.get_parameter("up.weight"), engine.params["up.weight"]):
            with (
                torch.no_grad(),
                pytest.raises(ShardcError, match=r"up.weight: .* would draw only for this rank's part"),
            ):
                DRAWN[draw](p)

    loopback(program.mesh, work)


REDUCED: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "norm along a split dim": lambda p: p.norm(dim=0),
    "mean": lambda p: 0.01 * p.mean(),
    "maximum": lambda p: p.max(),
    "quantile": lambda p: p.quantile(0.9),
}


@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.parametrize("spec", [TP, {"mesh": {"dp": 2}, "data": {"zero": 1}}])
def test_a_norm_of_a_part_is_refused(spec: dict[str, Any], reduce: str) -> None:
    """A penalty of it would have the gradient of this rank's part."""
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **spec})

    def work(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, NET, mesh=mesh)
        engine = Engine(program, NET, mesh=mesh)
        for p in (module.get_parameter("up.weight"), engine.params["up.weight"]):
            with pytest.raises(ShardcError, match=r"up.weight: p\.\w+\(\) would be that of the part"):
                REDUCED[reduce](p)

    loopback(program.mesh, work)


def test_what_a_part_knows_of_itself() -> None:
    """What is along whole dims, and parameters that every rank has whole."""
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **TP})

    def work(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, NET, mesh=mesh)
        up, bias = module.get_parameter("up.weight"), module.get_parameter("down.bias")
        plain = up.as_subclass(torch.Tensor)
        assert torch.equal(up.norm(dim=1), plain.norm(dim=1))
        assert torch.equal(up.max(dim=-1).values, plain.max(dim=-1).values)
        assert up.norm(dim=1).requires_grad
        assert torch.equal(bias.norm(), bias.detach().norm())
        assert "Parameter" in repr(up)

    loopback(program.mesh, work)


def test_an_engine_has_parameters_by_the_models_names() -> None:
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **TP})

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(program, NET, mesh=mesh)
        assert list(engine.params) == [p.fqn for p in program.params]
        assert engine.params["up.weight"] is engine.params["up_weight"]
        assert "up_weight" in engine.params
        assert engine.params.get("up_weight") is engine.params.get("up.weight")
        assert engine.params.get("nothing") is None
        with pytest.raises(KeyError):
            engine.params["nothing"]

    loopback(program.mesh, work)


@pytest.mark.parametrize("guarded", [False, True], ids=["torch's", "transformers'"])
def test_what_is_no_draw_and_what_is_whole_is_written_as_ever(guarded: bool, request: pytest.FixtureRequest) -> None:
    """Also where transformers has put its own functions in the place of torch.nn.init's."""
    if guarded:
        guard = pytest.importorskip("transformers.initialization").guard_torch_init_functions()
        guard.__enter__()
        request.addfinalizer(lambda: guard.__exit__(None, None, None))
    program = shardc.compile(copy.deepcopy(NET), BATCH, {"shardc": 1, **TP})

    def work(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, NET, mesh=mesh)
        up, bias = module.get_parameter("up.weight"), module.get_parameter("down.bias")
        nn.init.zeros_(up)
        nn.init.constant_(up, 2.0)
        noise = torch.linspace(0, 1, 64).view(8, 8)
        with torch.no_grad():
            up.add_(noise)
        assert torch.equal(up, 2.0 + noise)
        torch.manual_seed(0)
        nn.init.normal_(bias)  # every rank has all of it
        file = io.BytesIO()
        torch.save({"up": up, "bias": bias}, file)
        file.seek(0)
        assert torch.equal(torch.load(file)["up"], up)
        average = copy.deepcopy(module)
        with pytest.raises(ShardcError, match="would draw"):
            nn.init.normal_(average.get_parameter("up.weight"))

    loopback(program.mesh, work)
