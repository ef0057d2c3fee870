"""What a loop of one's own makes of parameters of which a rank has a part: what it is on one device, or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from shardc.errors import ShardcError
from shardc.runtime.checks.tensor_parts import ParameterPart, TensorPart
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, SPECS, backward, compiled, on_modules

Make = Callable[[nn.Parameter], Any]

REFUSED: dict[str, Make] = {
    "function": torch.norm,
    "linalg": torch.linalg.vector_norm,
    "mean of what was made": lambda p: p.square().mean(),
    "of what was made of what was made": lambda p: (p.abs() + 1).log().max(),
    "product": lambda p: (p.view(8, -1) @ p.view(8, -1).T).sum(),
    "a penalty": lambda p: p.square().sum(),
    "norm by hand": lambda p: p.square().sum().sqrt(),
    "norm by hand, of all": lambda p: sum(x.square().sum() for x in [p, p]) ** 0.5,
    "one sum times another": lambda p: p.sum() * p.sum(),
    "a sum times what is trained": lambda p: torch.ones((), requires_grad=True).mul(p.sum()),
    "one over a sum": lambda p: 1 / p.abs().sum(),
    "a ratio of sums": lambda p: torch.ones(()) / p.abs().sum(),
    "a threshold of a sum": lambda p: bool(p.abs().sum() > 3),
    "data": lambda p: p.data.norm(),
    "detached": lambda p: p.detach().abs().sum(),
    "without gradients": torch.no_grad()(lambda p: p.square().sum()),
    "foreach": lambda p: torch._foreach_norm([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(p.shape[-1]), p),
    "numbers": lambda p: p.detach().numpy(),
    "a number": lambda p: p.flatten().tolist(),
    "concatenated": lambda p: torch.cat([p.flatten(), p.flatten()]),
    "norm": lambda p: p.norm(),
    "norm along a split dim": lambda p: p.norm(dim=0),
    "mean": lambda p: 0.01 * p.mean(),
    "maximum": lambda p: p.max(),
    "quantile": lambda p: p.quantile(0.9),
}
#: Each rank would draw the numbers of its part, the same ones for every part.
DRAWN: dict[str, Make] = {
    "dropout": lambda p: F.dropout(p, 0.5),
    "empty_like": lambda p: torch.empty_like(p).normal_(),
    "data": lambda p: p.data.normal_(),
    "like it": lambda p: p.add_(torch.randn_like(p)),
    "of its gradient": lambda p: [p.add_(torch.randn_like(x)) for x in (p.grad, p) if x is not None],
    "orthogonal": nn.init.orthogonal_,
    "xavier": lambda p: nn.init.xavier_uniform_(p.data),
    "dirac": nn.init.eye_,
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "kaiming": lambda p: nn.init.kaiming_uniform_(p) if p.ndim > 1 else p.uniform_(),
    "truncated": nn.init.trunc_normal_,
    "method": lambda p: p.bernoulli_(0.5),
}


def both(program: Any, mesh: LoopbackMesh) -> list[Any]:
    module, engine = ShardedModule(program, NORMED, mesh=mesh), Engine(program, NORMED, mesh=mesh)
    backward(module)
    engine.backward(BATCH)
    return [module.get_parameter("up.weight"), engine.params["up.weight"]]


@pytest.mark.parametrize("spec", SPECS)
def test_what_mixes_elements_of_a_parameter_is_refused(spec: str) -> None:
    program = compiled(spec)

    def work(mesh: LoopbackMesh) -> None:
        for p in both(program, mesh):
            for name, make in REFUSED.items():
                with pytest.raises(ShardcError, match=r"^up.weight: p.*would be that of the part which this rank has"):
                    pytest.fail(f"{name}: {make(p)}")
            for name, make in DRAWN.items():
                with torch.no_grad(), pytest.raises(ShardcError, match=r"up.weight.*: .* would draw only for this"):
                    pytest.fail(f"{name}: {make(p)}")

    loopback(program.mesh, work)


#: Entries by their numbers: each rank would take others.
SELECTED: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda p: p[0],
    "last row": lambda p: p[-1],
    "some rows": lambda p: p[:4],
    "every second": lambda p: p[::2],
    "by a list": lambda p: p[[0]],
    "narrow": lambda p: p.narrow(0, 0, 1),
    "split": lambda p: p.split(2),
    "chunk": lambda p: p.chunk(2)[0].mul_(0.5),
    "tensor_split": lambda p: torch.tensor_split(p, 2),
    "unbind": lambda p: p.unbind(),
    "loop": list,
    "index_select": lambda p: p.index_select(0, torch.tensor([0])),
    "index_fill": lambda p: p.index_fill_(0, torch.tensor([0]), 0.0),
    "write": lambda p: p.__setitem__(0, 0.0),
    "write of data": lambda p: p.data.__setitem__(slice(0, 2), 0.0),
    "write after a view": lambda p: p.view(2, -1).__setitem__(0, 0.0),
    "numbers": lambda p: torch.where(p > 0),
    "pad": lambda p: F.pad(p, (0, 0, 1, 0)) if p.ndim > 1 else F.pad(p, (1, 0)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_entries_by_their_numbers_are_refused(spec: str) -> None:
    program = compiled(spec)

    def work(mesh: LoopbackMesh) -> None:
        for p in both(program, mesh):
            for name, make in SELECTED.items():
                for x in (p, p.grad) if p.grad is not None else (p,):  # a rank may have nothing of it
                    with torch.no_grad(), pytest.raises(ShardcError, match=r"^up.weight.*selects entries by index"):
                        pytest.fail(f"{name}: {make(x)}")

    loopback(program.mesh, work)


def test_entries_of_a_dim_that_is_whole_are_parts() -> None:
    """Also those of a mask that goes element by element."""
    program = compiled("tp")

    def work(mesh: LoopbackMesh) -> None:
        for p in both(program, mesh):
            with torch.no_grad():
                whole = p.as_subclass(Tensor).clone()
                p[:, 0] = 0.0
                p.data[..., 1].mul_(2.0)
                p[p > 0.1] = 0.1
                whole[:, 0] = 0.0
                whole[:, 1] *= 2.0
                whole.clamp_(max=0.1)
                assert torch.equal(p.as_subclass(Tensor), whole)
                for x in (p[:, 0], p.split(4, 1)[0], p[p > 0], p.narrow(1, 0, 2)):
                    with pytest.raises(ShardcError, match="would be that of the part"):
                        x.sum()

    loopback(program.mesh, work)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_the_same_for_a_part_works(spec: str) -> None:
    """An average of weights, clamping, decay by hand, noise that is cut from the whole one."""
    reference = copy.deepcopy(NORMED)

    def train(model: Any, loss: Callable[[], Tensor]) -> list[Tensor]:
        average = [p.data.clone() for p in model.parameters()]
        for _ in range(3):
            loss().backward()
            with torch.no_grad():
                for p, q in zip(model.parameters(), average, strict=True):
                    p.grad.clamp_(-0.1, 0.1)
                    p.mul_(0.99).sub_(p.grad, alpha=0.05)
                    p.copy_(torch.where(p.abs() > 1e-3, p, torch.zeros_like(p)))
                    q.lerp_(p.detach(), 0.5)
                    p.grad = None
        return average

    averages = train(reference, lambda: reference(**BATCH))
    with torch.no_grad():
        for p, q in zip(reference.parameters(), averages, strict=True):
            p.copy_(q)

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        averages = train(module, lambda: module(**module.local(BATCH)))
        with torch.no_grad():
            for p, q in zip(module.parameters(), averages, strict=True):
                p.copy_(q)
        torch.testing.assert_close(module.full_state_dict(), dict(reference.state_dict()))


def test_an_engines_parameters_know_it_when_they_are_asked_for() -> None:
    program = compiled("tp")

    def work(mesh: LoopbackMesh) -> tuple[list[float], list[float]]:
        asked, other = (Engine(program, NORMED, torch.optim.AdamW, mesh=mesh) for _ in range(2))
        assert {type(p) for p in other.owned.values()} == {nn.Parameter}
        assert isinstance(asked.params["up.weight"], ParameterPart)
        assert asked.params["up.weight"] is asked.owned["up_weight"]
        losses = [[float(e.step(BATCH)) for _ in range(3)] for e in (asked, other)]
        assert torch.equal(asked.full_state_dict()["up.weight"], other.full_state_dict()["up.weight"])
        return losses[0], losses[1]

    for a, b in loopback(program.mesh, work):
        assert a == b


def test_a_parts_state_is_not_loaded_into_the_whole_model() -> None:
    @on_modules(compiled("tp"))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        held = module.state_dict()
        assert isinstance(held["up.weight"], TensorPart)
        with pytest.raises(ShardcError, match=r"up.weight: this is a rank's part of the weight(.|\n)*full_state_dict"):
            copy.deepcopy(NORMED).load_state_dict(held)
        module.load_state_dict(held)


def test_copies_of_a_state_are_parts_for_a_checkpoint() -> None:
    """torch.distributed.checkpoint would take them for the whole; a file by torch.save has plain tensors."""
    program = compiled("tp")

    def work(mesh: LoopbackMesh) -> None:
        held = {n: x.clone() for n, x in ShardedModule(program, NORMED, mesh=mesh).state_dict().items()}
        with pytest.raises(ShardcError, match="this rank has a part of it, which torch"):
            create_default_local_save_plan(held, is_coordinator=False)
        file = io.BytesIO()
        torch.save(held, file)
        file.seek(0)
        assert {type(x) for x in torch.load(file).values()} == {Tensor}

    loopback(program.mesh, work)


@pytest.mark.parametrize("spec", ["tp", "zero 3"])
def test_an_average_of_a_plain_copy_by_zip_is_refused(spec: str) -> None:
    """torch says that sizes do not match, or, of a stretch of one row's length, nothing at all."""
    said = r"up.weight: this is a rank's part .* of \[16, 8\], with a tensor of the whole's shape\n  fix: an average"

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        whole, held = copy.deepcopy(NORMED).state_dict()["up.weight"], module.state_dict()["up.weight"]
        with torch.no_grad():
            with pytest.raises(ShardcError, match=said):
                whole.mul_(0.9).add_(held, alpha=0.1)
            with pytest.raises(ShardcError, match=said):
                torch._foreach_lerp_([whole], [held], 0.1)
            for a, b in zip(copy.deepcopy(module).parameters(), module.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)


def test_a_part_is_not_written_by_safetensors(tmp_path: Path) -> None:
    @on_modules(compiled("tp"))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"save_file: up.weight: this rank has only a part(.|\n)*engine.export"):
            save_file(module.state_dict(), tmp_path / f"{mesh.rank}.safetensors")
        save_file(module.full_state_dict(), tmp_path / f"whole{mesh.rank}.safetensors")
