"""Ops without a rule are taken apart by torch's decompositions, and only by those that are right."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc.capture import capture
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.passes.canonical import Canonical
from shardc.rules.core import registry
from shardc.spec import Spec
from shardc.torch_private import traced_functional
from shardc.verify.reference import interpret

#: The module; its package has a function of the same name.
DECOMPOSE = importlib.import_module("shardc.passes.canonical.decompose")
aten = torch.ops.aten


class Model(nn.Module):
    """A weight, and a function of its product with the input whose result's squares are the loss."""

    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(shape, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight).double().square().sum()


def captured(function: Callable[[Tensor], Tensor], *shape: int) -> tuple[Model, Tensor, Program]:
    torch.manual_seed(0)
    model = Model(function, *shape[1:])
    x = torch.randn(shape, dtype=torch.float64)
    return model, x, capture(model, (x,))


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], Any]] = {
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (4, 8, 3, 3), aten.pixel_shuffle.default),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (4, 8, 3, 3), aten.channel_shuffle.default),
    "triplet": (lambda x: F.triplet_margin_loss(x, x.flip(1), x.roll(1, 1)), (4, 6), aten.triplet_margin_loss.default),
    "cosine": (lambda x: F.cosine_similarity(x, x.flip(1), dim=1), (4, 6), aten.cosine_similarity.default),
    "addbmm in parts": (lambda x: torch.addmv(x[0], x, x[0]), (4, 4), aten.addmv.default),
    "cell": (
        lambda x: torch.gru_cell(x, x, x.detach().repeat(3, 1)[:12], x.repeat(3, 1)),
        (4, 4),
        aten.gru_cell.default,
    ),
    "trapezoid": (lambda x: torch.trapezoid(x, dim=1), (4, 6), aten.trapezoid.dx),
    "cross": (lambda x: torch.linalg.cross(x, x.flip(1)), (4, 3), aten.linalg_cross.default),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (4, 6), aten.renorm.default),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([0, 2]), 1.5), (4, 6), aten.index_fill.int_Scalar),
    "nansum": (lambda x: x.nansum(1), (4, 6), aten.nansum.default),
}


@pytest.mark.parametrize("name", CASES)
def test_is_equal_on_ranks_and_needs_no_rule(name: str) -> None:
    function, shape, op = CASES[name]
    model, x, program = captured(function, *shape)
    assert op in targets(program)
    assert registry.find(op) is None, "it has a rule now: choose another op"
    canonical = Canonical(Spec(Mesh(()))).run(program)
    assert op not in targets(canonical)
    assert not [t for t in targets(canonical) if registry.find(t) is None]
    loss = model(x)
    loss.backward()
    sim = shardc.verify.simulate(shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 2}}), model, (x,))
    torch.testing.assert_close(sim.loss, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sim.grads["weight"], model.weight.grad, rtol=1e-11, atol=1e-12)


def test_equal_calls_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = traced_functional

    def counted(*args: Any) -> fx.GraphModule | None:
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(DECOMPOSE, "traced_functional", counted)
    program = captured(lambda x: F.cosine_similarity(x, x.flip(1), dim=1) + F.cosine_similarity(x, x + 1, dim=1), 4, 6)[
        2
    ]
    Canonical(Spec(Mesh(()))).run(program)
    assert count == 1


def without_gradient(x: Tensor, r: int) -> Tensor:
    b, c, h, w = x.shape
    return (
        x.detach().reshape(b, c // r // r, r, r, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // r // r, h * r, w * r)
    )


def without_rule(x: Tensor, r: int) -> Tensor:
    return without_gradient(x, r) + torch.geqrf(x.flatten(2)[:, 0, :].reshape(-1, 1))[0].sum() * 0


@pytest.mark.parametrize("way", [without_gradient, without_rule])
def test_what_is_wrong_is_not_taken(way: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A decomposition that cuts the gradient, or that needs an op without a rule: the op
    stays, and compile names it.
    """
    monkeypatch.setattr(DECOMPOSE, "decompositions", lambda op: [way] if op is aten.pixel_shuffle.default else [])
    model, x, program = captured(lambda x: F.pixel_shuffle(x, 2), 4, 8, 3, 3)
    canonical = Canonical(Spec(Mesh(()))).run(program)
    assert aten.pixel_shuffle.default in targets(canonical)
    assert aten.permute.default not in targets(canonical), "what was written of it is taken back"
    with pytest.raises(shardc.ShardcError, match=r"op aten\.pixel_shuffle\.default \(1×\) has no rule"):
        shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 2}})


@torch.library.custom_op("shardc_decompose::added_in_order", mutates_args=())
def added_in_order(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """As torchtitan's experts put rows back: a function of torch's ops that is an op for what it sets."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return out.scatter_add(0, index, src)
    finally:
        torch.use_deterministic_algorithms(before)


@torch.library.custom_op("shardc_decompose::straight_through", mutates_args=())
def straight_through(x: Tensor) -> Tensor:
    """Rounds; its gradient is not that of its function, which is 0."""
    return x.round()


added_in_order.register_fake(lambda out, index, src: torch.empty_like(out))
added_in_order.register_autograd(
    lambda ctx, g: (g, None, g.gather(0, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
straight_through.register_fake(torch.empty_like)
straight_through.register_autograd(lambda ctx, g: g)


@pytest.mark.parametrize("limit", [DECOMPOSE.PROOF_LIMIT, 0])
def test_a_custom_op_is_its_function(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is proven on smaller operands."""
    monkeypatch.setattr(DECOMPOSE, "PROOF_LIMIT", limit)

    def reversed_rows(x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1]).flip(0)[:, None].expand(x.shape[1], x.shape[0])
        return added_in_order(torch.zeros(x.shape[1], x.shape[0], dtype=x.dtype), index, x.T)

    model, x, program = captured(reversed_rows, 4, 12)
    assert "scatter_add" in str(targets(Canonical(Spec(Mesh(()))).run(program)))
    compiled = shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 2}})
    torch.testing.assert_close(shardc.simulate(compiled, model, (x,)).loss, model(x).detach())


@pytest.mark.parametrize("limit", [DECOMPOSE.PROOF_LIMIT, 0])
def test_a_custom_op_with_a_gradient_of_its_own_is_not_its_function(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DECOMPOSE, "PROOF_LIMIT", limit)
    model, x, _ = captured(lambda x: straight_through(3 * x), 4, 12)
    with pytest.raises(shardc.ShardcError, match=r"op shardc_decompose\.straight_through\.default \(1×\) has no rule"):
        shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 2}})


def test_the_same_step_without_a_mesh() -> None:
    model, x, program = captured(lambda x: F.pixel_shuffle(x, 2), 4, 8, 3, 3)
    canonical = Canonical(Spec(Mesh(()))).run(program)
    name = canonical.inputs[0].name
    loss, *_ = interpret(canonical, {"weight": model.weight}, {}, {name: x})
    torch.testing.assert_close(loss, model(x))
