"""What a loop of one's own does alike on all ranks, and where it does not: as wrong as it would be, it is an error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.runtime.mesh.agreement import DisagreementError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NET, of

SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}
PROGRAMS = {name: of(s) for name, s in SPECS.items()}


def trained(spec: str, work: Callable[[ShardedModule, int], Any], **options: Any) -> list[Any]:
    program = PROGRAMS[spec]

    def rank(mesh: Any) -> Any:
        return work(program.module(copy.deepcopy(NET), mesh=mesh, **options), mesh.rank)

    return loopback(program.mesh, rank)


def test_a_rate_of_its_own() -> None:
    """An optimizer's groups may have lr=None, as those of transformers' Adafactor, on all ranks or on none."""

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            torch._foreach_sub_([p for g in self.param_groups for p in g["params"]], 0.01)

    def work(module: ShardedModule, rank: int, *, lr: list[Any]) -> None:
        optimizer = Own(module.parameters(), {"lr": lr[rank]})
        for _ in range(2):
            module(**module.local(BATCH)).backward()
            with torch.no_grad():
                optimizer.step()

    trained("dp", functools.partial(work, lr=[None, None]))
    with pytest.raises(DisagreementError, match=r"rate differs.*: computed by the optimizer on rank 0, 0.1 on rank 1"):
        trained("dp", functools.partial(work, lr=[None, 0.1]))


def test_a_schedule_that_one_rank_steps() -> None:
    def work(module: ShardedModule, rank: int) -> int:
        optimizer = torch.optim.AdamW(module.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        done = 0
        try:
            for _ in range(4):
                module(**module.local(BATCH)).backward()
                optimizer.step()
                done += 1
                if rank == 0:
                    schedule.step()
        except DisagreementError as e:
            assert "the learning rate differs" in str(e)  # noqa: PT017
        return done

    assert trained("dp", work) == [2, 2]  # the second step is the first that differs


def test_a_factor_of_ones_own_rows() -> None:
    def work(module: ShardedModule, rank: int) -> None:
        for _ in range(2):
            part = module.local(BATCH)
            (module(**part) * (1 + part["x"].mean())).backward()

    with pytest.raises(DisagreementError, match="the gradient of the loss in backward differs") as found:
        trained("dp", work)
    assert "loss=lambda output, batch" in str(found.value)
    trained("dp", work, check=False)  # compares nothing, and keeps nothing


@pytest.mark.parametrize("spec", list(SPECS))
def test_what_all_ranks_do_alike_is_right(spec: str) -> None:
    """Accumulation, a scaled loss, a factor of the loss itself, two optimizers, a schedule, a closure."""

    def work(module: ShardedModule, rank: int) -> None:
        some, *others = module.parameters()
        optimizers = [torch.optim.SGD([some], lr=0.1), torch.optim.AdamW(others, lr=torch.tensor(0.01))]
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10)
        for _ in range(3):
            for k in range(2):
                loss = module(**module.local(BATCH))
                (loss * 128 / (1 + loss.detach()) / (k + 1)).backward()
            for x in optimizers:
                x.step()
                x.zero_grad()
            schedule.step()
        module.eval()(**module.local(BATCH))

    trained(spec, work)


@pytest.mark.parametrize("spec", ["dp", "tp"])
@pytest.mark.parametrize("kind", ["alone", "summed", "another on each rank", "another module's"])
def test_parameters_beside_the_module(spec: str, kind: str) -> None:
    """Refused where they drift: not where somebody sums them, where all ranks have the same rows, where each rank has
    its own from the start, or where they are another module's."""

    def work(module: ShardedModule, rank: int) -> None:
        mesh = module._running.mesh
        other = PROGRAMS[spec].module(copy.deepcopy(NET), mesh=mesh)
        own = nn.Parameter(torch.full((8,), 1.0 + rank * (kind == "another on each rank")))
        beside = [*other.parameters()] if kind == "another module's" else [own]
        optimizer = torch.optim.SGD([*module.parameters(), *beside], lr=0.1)
        for _ in range(3):
            part = module.local(BATCH)
            loss = module(**part)
            (loss + other(**part) if kind == "another module's" else loss + (part["x"] * own).square().sum()).backward()
            if kind == "summed" and spec == "dp":
                assert own.grad is not None
                own.grad = mesh.all_reduce(own.grad, ("dp",))
            optimizer.step()
            optimizer.zero_grad()

    if spec == "dp" and kind == "alone":
        with pytest.raises(DisagreementError, match="SGD: it also steps parameters that are not the module's") as found:
            trained(spec, work)
        assert isinstance(found.value, ShardcError)
        assert "all_reduce" in found.value.fix
    else:
        trained(spec, work)


@pytest.mark.parametrize("end", ["save", "full_state_dict"])
@pytest.mark.parametrize("odd", ["factor", "rate", "momentum", "beside", "parameter", ""])
def test_the_last_step_of_a_loop(odd: str, end: str, tmp_path: Path) -> None:
    """It is compared where the loop ends: nothing is written of ranks that went apart in it."""

    def work(module: ShardedModule, rank: int) -> None:
        own = nn.Parameter(torch.ones(8))
        params = [*module.parameters(), *([own] if odd == "beside" else [])]
        settings = {"lr": 0.1 * (1 + rank * (odd == "rate")), "momentum": 0.5 * rank * (odd == "momentum")}
        optimizer = torch.optim.SGD(params, **settings)
        part = module.local(BATCH)
        loss = module(**part) * (1 + part["x"].mean() * (odd == "factor"))
        (loss + (part["x"] * own).square().sum() * (odd == "beside")).backward()
        optimizer.step()
        if odd == "parameter" and rank:
            with torch.no_grad():
                module.get_parameter("up.bias").add_(1)
        module.save(tmp_path, optimizer) if end == "save" else module.full_state_dict()

    apart = {
        "factor": "the gradient of the loss in backward differs",
        "rate": "the learning rate differs between ranks 0.*0.1 on rank 0, 0.2 on rank 1",
        "momentum": "the setting of the optimizer differs between ranks 0",
        "beside": "parameters that are not the module's",
        "parameter": "the weight up.bias differs" if end == "save" else "",  # a copy of weights costs no comparison
    }
    if apart.get(odd):
        with pytest.raises(ShardcError, match=apart[odd]):
            trained("dp", work)
        assert not list(tmp_path.iterdir())
    else:
        trained("dp", work)


@pytest.mark.parametrize("spec", list(SPECS))
@pytest.mark.parametrize("how", ["grad", "grad of one, beside a penalty", "inputs", "create_graph"])
def test_a_backward_around_the_sums(spec: str, how: str) -> None:
    """It would give no gradients, or those of the penalty alone: an error, after which the loop may go on."""

    def work(module: ShardedModule, rank: int) -> None:
        params = list(module.parameters())
        # a penalty of what every rank has whole
        loss = module(**module.local(BATCH)) + sum(p.square().sum() for p in params if type(p) is nn.Parameter)
        if how == "inputs" and spec == "tp":  # nothing there is summed in buckets
            loss.backward(inputs=params)
            return
        asked = params if how == "grad" else params[:1]
        if how == "inputs":
            module(**module.local(BATCH)).backward(inputs=params)  # nothing is left out
            assert all(p.grad is not None for p in params)
        backward = (
            functools.partial(loss.backward, inputs=asked)
            if how == "inputs"
            else functools.partial(loss.backward, create_graph=True)
            if how == "create_graph"
            else functools.partial(torch.autograd.grad, loss, asked, allow_unused=True)
        )
        with pytest.raises(ShardcError, match=r"call loss.backward\(\)"):
            backward()
        module(**module.local(BATCH)).backward()
        assert all(p.grad is not None for p in params)

    trained(spec, work)
