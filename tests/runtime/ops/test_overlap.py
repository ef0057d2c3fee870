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
from shardc.runtime.ops.overlap import product

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


def run(mesh: LoopbackMesh, convert: Any, overlap: bool) -> tuple[list[Tensor], list[str]]:
    """(the result, all gradients, what happened in backward)."""
    torch.manual_seed(mesh.rank)
    x, w, b = torch.randn(4, 3, 8), torch.randn(5, 8), torch.randn(5)
    v, c, m = torch.randn(8, 5), torch.randn(5), torch.randn(8, 5)
    leaves = [t.requires_grad_() for t in (x, w, b, v, c, m)]
    events: list[str] = []
    for kind in ("start_all_reduce", "start_reduce_scatter"):
        setattr(mesh, kind, told(getattr(mesh, kind), events))
    for name, p in (("w", w), ("v", v), ("m", m)):
        p.register_hook(lambda _, name=name: events.append(name))
    h = x * 1.0
    joined = convert(h, mesh, overlap)
    rows = joined.reshape(-1, 8)

    def multiply(target: Any, *args: Any) -> Tensor:
        result: Tensor = product(target, *args) if overlap else target(*args)
        return result

    y = multiply(aten.linear.default, joined, w, b).sin() + multiply(aten.matmul.default, joined, m)
    z = multiply(aten.addmm.default, c, rows, v)
    (y.square().sum() + z.sum()).backward()  # type: ignore[no-untyped-call]
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)], events


@pytest.mark.parametrize("convert", [each, whole], ids=["all_reduce", "reduce_scatter"])
def test_the_same_bits_and_the_sum_begins_before_the_gradients_of_weights(convert: Any) -> None:
    for rank in loopback(TP, lambda mesh: (run(mesh, convert, False)[0], *run(mesh, convert, True))):
        plain, overlapped, events = rank
        assert len(plain) == len(overlapped) == 7
        assert all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))
        assert events[0] == "begin"
        assert events.index("wait") > max(events.index("w"), events.index("m"))


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
