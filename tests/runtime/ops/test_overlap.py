"""A column-parallel product's backward begins the sum of its input's gradient, computes the weight's, then waits: the
same numbers, in that order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.runtime import ops
from shardc.runtime.mesh import Work
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.ops.factors import multiplies, product

aten = torch.ops.aten
TP = Mesh((("tp", 2),))


def each(x: Tensor, mesh: LoopbackMesh, overlap: bool) -> Tensor:
    return ops.sum_grad(x, mesh, ("tp",), tag="x_each", overlap=overlap)


def whole(x: Tensor, mesh: LoopbackMesh, overlap: bool) -> Tensor:
    return ops.all_gather_partial_grad(x, mesh, "tp", 0, 1, tag="x_whole", overlap=overlap)


def told(start: Any, events: list[str]) -> Any:
    """A collective that notes when it begins and when it is waited for."""

    def started(*args: Any, **kwargs: Any) -> Work:
        events.append("begin")
        work: Work = start(*args, **kwargs)

        def waited() -> None:
            work.wait()
            events.append("wait")

        return Work(then=waited)

    return started


def run(mesh: LoopbackMesh, convert: Any, rows: tuple[int, ...], overlap: bool) -> tuple[list[Tensor], list[str]]:
    """(the result, all gradients, what happened in backward) of three products of one input [*rows, 8]."""
    drawn = torch.Generator().manual_seed(mesh.rank)
    shapes = {"x": (*rows, 8), "w": (5, 8), "b": (5,), "m": (8, 5), "v": (8, 5), "c": (5,)}
    leaves = {
        n: torch.randn(shape, generator=drawn, dtype=torch.float64).requires_grad_() for n, shape in shapes.items()
    }
    events: list[str] = []
    for kind in ("start_all_reduce", "start_reduce_scatter"):
        setattr(mesh, kind, told(getattr(mesh, kind), events))
    for name in ("w", "m", "v"):
        leaves[name].register_hook(lambda _, name=name: events.append(name))
    x, w, b, m, v, c = leaves.values()
    joined = convert(x * 1.0, mesh, overlap)

    def multiply(target: Any, *args: Any) -> Tensor:
        result: Tensor = product(target, *args) if overlap else target(*args)
        return result

    y = multiply(aten.linear.default, joined, w, b).sin() + multiply(aten.matmul.default, joined, m)
    y = y + (
        multiply(aten.addmm.default, c, joined, v)
        if len(rows) == 1
        else multiply(aten.linear.default, joined, v.t(), c)
    )
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(t.grad for t in leaves.values() if t.grad is not None)], events


@pytest.mark.parametrize("rows", [(4, 3), (12,)], ids=str)
@pytest.mark.parametrize("convert", [each, whole], ids=["all_reduce", "reduce_scatter"])
def test_the_same_numbers_and_the_sum_begins_before_those_of_weights(convert: Any, rows: tuple[int, ...]) -> None:
    """To the bit on most processors; some multiply matrices of other strides, as autograd has them, in other order."""

    def both(mesh: LoopbackMesh) -> tuple[list[Tensor], list[Tensor], list[str]]:
        return run(mesh, convert, rows, False)[0], *run(mesh, convert, rows, True)

    for plain, overlapped, events in loopback(TP, both):
        assert len(plain) == len(overlapped) == 7
        for a, b in zip(plain, overlapped, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
        assert events[0] == "begin"
        assert events[-1] == "wait"
        assert sorted(events[1:-1]) == ["m", "v", "w"]


def test_a_product_with_options_is_left_alone() -> None:
    """Such as addmm's beta: its backward is another."""
    graph = torch.fx.Graph()
    x, w, b = map(graph.placeholder, "xwb")
    plain = graph.call_function(aten.addmm.default, (b, x, w))
    scaled = graph.call_function(aten.addmm.default, (b, x, w), {"beta": 2})
    assert multiplies(plain, x)
    assert not multiplies(plain, w)
    assert not multiplies(scaled, x)


def test_without_gradients_it_is_the_op_itself() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(product(aten.linear.default, x, w), torch.nn.functional.linear(x, w))


def test_a_frozen_weight_needs_no_way_of_its_own() -> None:
    def work(mesh: LoopbackMesh) -> Tensor:
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
        y = product(aten.linear.default, each(x * 1.0, mesh, True), w)
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    assert all(torch.isfinite(g).all() for g in loopback(TP, work))
