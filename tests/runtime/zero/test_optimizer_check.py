"""Optimizers that need more than a rank has are refused wherever ranks have parts, or other parameters; and nowhere
else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.zero.optimizer_check import ParamSharding, multiplies, needs_whole
from tests.runtime.offload.test_offload import Normalised
from tests.runtime.zero import test_edges
from tests.runtime.zero.test_edges import WHOLE, Two, X, alone

torch.set_num_threads(1)


class Decayed(torch.optim.SGD):
    """Decays matrices only: it knows a parameter's dims, and is elementwise all the same."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() > 1:
                p.mul_(0.9)
        super().step()


class Unused(Two):
    """One parameter that no bucket has at ZeRO 1, and one that one has."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def trained(model: nn.Module, spec: dict[str, Any], make: Any) -> list[dict[str, Tensor]]:
    return test_edges.trained(shardc.compile(model, X, {"shardc": 1, **spec}), model, make)


class Lookahead(torch.optim.Optimizer):
    """Every second step goes back half the way. It counts steps, and shares another optimizer's groups."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.steps % 2 == 0:
                p.copy_(slow.add_(p - slow, alpha=0.5))


class Wrapped(torch.optim.Optimizer):
    """Steps an optimizer that has its own lists of parameters: nobody can give it others."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = torch.optim.AdamW(params, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


TP = {"mesh": {"tp": 2}, "shard": {"b": "column"}}
PP = {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["b"]}}


@pytest.mark.parametrize("name", WHOLE)
def test_split_parameters_are_refused_to_what_needs_whole_ones(name: str) -> None:
    with pytest.raises(
        ShardcError,
        match=r"b\.weight: the optimizer .* needs whole parameters.* split over tp\n.*or leave b\.weight whole",
    ):
        trained(Two(), TP, WHOLE[name])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (TP, "b.weight is split over tp"),
        (PP, "each rank along pp has only those of its stages"),
        ({"mesh": {"dp": 2}, "data": {"zero": 1}}, "data.zero: 1 gives each rank a part of them"),
    ],
    ids=["tp", "pp", "zero"],
)
def test_an_optimizer_that_looks_at_all_parameters_is_refused_where_no_rank_has_all(
    spec: dict[str, Any], why: str
) -> None:
    """Its ranks would each scale by a norm of their own, and drift apart."""
    with pytest.raises(
        ShardcError, match=f"Normalised updates a parameter depending on others, and no rank has all of them: {why}"
    ):
        trained(Two(), spec, Normalised)
    for state in trained(Two(), {"mesh": {"dp": 2}}, Normalised):
        for n, x in alone(Two(), Normalised).items():
            torch.testing.assert_close(state[n], x, rtol=1e-4, atol=1e-6)


def test_what_is_whole_may_be_looked_at_as_a_whole() -> None:
    """Muon gets the matrix that is not split, and nothing trains the other one."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([(n, p) for n, p in params if n == "a.weight"], lr=0.1)

    (one, *_), other = trained(Two(), TP, make), trained(Two(), {"mesh": {"dp": 1}}, make)[0]
    for n, x in other.items():
        torch.testing.assert_close(one[n], x, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "spec"),
    [(Decayed, TP), (Decayed, PP), (torch.optim.Adagrad, {"mesh": {"dp": 2}, "data": {"zero": 1}}), (Lookahead, TP)],
    ids=["tp", "pp", "state from the constructor", "counts steps"],
)
def test_elementwise_optimizers_train_as_on_one_device(make: Any, spec: dict[str, Any]) -> None:
    for state in trained(Unused(), spec, make):
        for n, x in alone(Unused(), make).items():
            torch.testing.assert_close(state[n], x, rtol=2e-5, atol=1e-6)


def test_an_optimizer_that_moves_nothing_of_what_it_is_given_shows_nothing() -> None:
    with pytest.raises(
        ShardcError, match=r"Wrapped cannot be tried on a small sample \(ValueError: it moves none of the parameters"
    ):
        trained(Two(), {"mesh": {"dp": 2}, "data": {"zero": 1}}, Wrapped)


def test_a_rate_that_16_bits_do_not_show_is_no_reason() -> None:
    model = Two().bfloat16()
    for make in (lambda ps: torch.optim.SGD(ps, lr=1e-9), lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.0))):
        p = shardc.compile(model, X.bfloat16(), {"shardc": 1, **TP})
        loopback(p.mesh, lambda mesh, p=p, make=make: p.engine(model, make, mesh=mesh).step(X.bfloat16()))  # type: ignore[misc]


def test_cuts() -> None:
    x = torch.arange(20).view(4, 5)
    assert [list(p.shape) for p in ParamSharding((0, 1), "", "", "").parts(x)] == [[2, 2], [2, 3], [2, 2], [2, 3]]
    assert [p.tolist() for p in ParamSharding((), "", "", "").parts(torch.arange(4).view(2, 2))] == [[0, 1], [2, 3]]
    assert [p.numel() for p in ParamSharding((), "", "", "").parts(torch.ones(()))] == [1, 0]


def test_an_optimizer_that_needs_a_closure_is_refused_as_what_it_is() -> None:
    program = shardc.compile(Two(), X, {"shardc": 1, **TP})

    def work(mesh: Any) -> None:
        module = program.module(Two(), mesh=mesh, broadcast=True)
        optimizer = torch.optim.LBFGS(module.parameters())
        with pytest.raises(ShardcError, match=r"LBFGS cannot be tried on a small sample \(TypeError: .*closure"):
            optimizer.step(lambda: module(module.local(X)))

    loopback(program.mesh, work)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (lambda ps: Decayed(ps, lr=0.1), False),
        (lambda ps: torch.optim.Adagrad(ps, initial_accumulator_value=0.1), True),
        (lambda ps: torch.optim.AdamW(ps), True),
    ],
)
def test_stretches_of_a_module_are_tried_as_the_parameters_that_they_are_of(make: Any, fits: bool, zero: int) -> None:
    program = shardc.compile(Two(), X, {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": zero}})

    def work(mesh: Any) -> None:
        module = program.module(Two(), mesh=mesh, broadcast=True)
        optimizer = make(list(module.parameters()))
        module(module.local(X)).backward()
        if fits:
            optimizer.step()
        else:
            with pytest.raises(ShardcError, match=r"the optimizer Decayed needs whole parameters: .*data.zero"):
                optimizer.step()

    loopback(program.mesh, work)


@pytest.mark.parametrize(
    ("make", "whole", "products"),
    [
        (lambda ps: torch.optim.AdamW(ps), False, False),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), False, False),
        (lambda ps: torch.optim.Muon(ps), True, True),
        (lambda ps: torch.optim.Adafactor(ps), True, False),
        (lambda ps: shardc.whole(torch.optim.SGD(ps, lr=0.1)), True, False),
    ],
)
def test_which_need_whole_matrices_and_multiply_them(make: Any, whole: bool, products: bool) -> None:
    optimizer = make([nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 9))])
    assert needs_whole(optimizer) == whole
    assert multiplies(optimizer) == products


class Careless(torch.optim.Optimizer):
    """Reads the gradient of every parameter, also of one that has none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.1 * p.grad.sign()


def test_an_optimizer_that_wants_every_gradient_is_told_before_the_first_step() -> None:
    """At ZeRO 3 a rank may have none of a small parameter: its step would fail on that rank alone."""
    model = torch.nn.Linear(8, 1)
    batch = {"input": torch.randn(8, 8)}
    program = shardc.compile(
        model, batch, {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}}, loss=lambda y, _: y.mean()
    )

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"Careless fails where a parameter has no gradient .*NoneType") as caught:
            Engine(program, model, Careless, mesh=mesh)
        assert "skip a parameter whose .grad is None" in str(caught.value.fix)

    loopback(program.mesh, work)
