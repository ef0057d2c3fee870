"""What a user writes to `engine.params` by hand, between two steps, counts on every rank and at every stage of ZeRO."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NET, TP, of, on_engines, on_modules


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("spec", [{"mesh": {"dp": 2}}, {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}])
def test_a_write_by_hand_is_that_of_one_device(zero: int, spec: dict[str, Any]) -> None:
    program = of({**spec, "data": {"axis": "dp", "zero": zero}})
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
    @on_engines(of({"mesh": {"dp": 2}, "data": {"zero": 2}}), NET, sgd)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        if mesh.rank:
            with torch.no_grad():
                next(iter(engine.params.values())).mul_(2.0)
        with pytest.raises(
            ShardcError,
            match=r"whether parameters were written to differs(.|\n)*(in the same way|equally) on all ranks",
        ):
            engine.step(BATCH)


def test_what_a_part_knows_of_itself() -> None:
    """What is along whole dims, and parameters that every rank has whole."""

    @on_modules(of(TP), NET)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        up, bias = module.get_parameter("up.weight"), module.get_parameter("down.bias")
        plain = up.as_subclass(torch.Tensor)
        assert torch.equal(up.norm(dim=1), plain.norm(dim=1))
        assert torch.equal(up.max(dim=-1).values, plain.max(dim=-1).values)
        assert up.norm(dim=1).requires_grad
        assert torch.equal(bias.norm(), bias.detach().norm())
        assert "Parameter" in repr(up)


def test_an_engine_has_parameters_by_the_models_names() -> None:
    program = of(TP)

    @on_engines(program, NET)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        assert list(engine.params) == [p.fqn for p in program.params]
        assert engine.params["up.weight"] is engine.params["up_weight"]
        assert "up_weight" in engine.params
        assert engine.params.get("up_weight") is engine.params.get("up.weight")
        assert engine.params.get("nothing") is None
        with pytest.raises(KeyError):
            engine.params["nothing"]
        with pytest.raises(ShardcError, match="an engine's parameters cannot be replaced"):
            engine.params["up.bias"] = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("guarded", [False, True], ids=["torch's", "transformers'"])
def test_what_is_no_draw_and_what_is_whole_is_written_as_ever(guarded: bool, request: pytest.FixtureRequest) -> None:
    """Also where transformers has put its own functions in the place of torch.nn.init's."""
    if guarded:
        guard = pytest.importorskip("transformers.initialization").guard_torch_init_functions()
        guard.__enter__()
        request.addfinalizer(lambda: guard.__exit__(None, None, None))

    @on_modules(of(TP), NET)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
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
