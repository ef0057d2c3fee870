"""An op with its backward as one op, and values that wait on the host, against autograd of the op."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.activation_offload import OffloadedTensors
from tests.differentiable import ops
from tests.runtime.ops.definitions import COMPLEX, FLOATS, WHOLE, numbers, of, strided

ALONE = Mesh((("a", 1),))
#: (op, tensors of these shapes, what else it takes, those that get gradients, those that backward is given again).
Taped = tuple[str, tuple[tuple[int, ...], ...], tuple[Any, ...], tuple[int, ...], tuple[int, ...]]
TAPED: tuple[Taped, ...] = (
    ("aten.mul.Tensor", ((3, 4), (3, 4)), (), (0, 1), (0, 1)),
    ("aten.mul.Tensor", ((3, 4), (4,)), (), (1,), (0,)),
    ("aten.addmm.default", ((5,), (3, 4), (4, 5)), (), (0, 1, 2), (1, 2)),
    ("aten.tanh.default", ((3, 4),), (), (0,), ()),  # its tape holds the result
    ("aten.split.Tensor", ((4, 3),), (2,), (0,), ()),
    ("ops.partial_mean", ((4, 3),), ([0], False, 4), (0,), ()),
)


def operands(case: Taped, dtype: torch.dtype) -> list[Tensor]:
    return [strided(numbers(shape, dtype, seed=i)) for i, shape in enumerate(case[1])]


def by_autograd(case: Taped, tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """(results, their gradients, the gradients of the operands that get one)."""
    name, _, rest, needs, _ = case
    op: Any = ops if name.startswith("ops.") else torch.ops
    for part in name.removeprefix("ops.").split("."):
        op = getattr(op, part)
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_(i in needs) for i, x in enumerate(tensors)]
    made = op(*leaves, *rest)
    results = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    grads = [numbers(tuple(y.shape), y.dtype, seed=7 + i) for i, y in enumerate(results)]
    found = torch.autograd.grad(results, [leaves[i] for i in needs], grads)
    return tuple(y.detach() for y in results), grads, list(found)


def same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


Through = Callable[[Any], Any]


def recorded(through: Through = lambda tape: tape) -> None:
    """Results and gradients are autograd's, to the bit. through: what a tape goes through before backward."""
    for case in TAPED:
        name, _, rest, needs, again = case
        for dtype in (*FLOATS, *COMPLEX):
            tensors = operands(case, dtype)
            wanted, grads, of_operands = by_autograd(case, tensors)

            def tape() -> Any:
                *results, made = ops.opaque(name, needs, again, *tensors, *rest)
                same(results, wanted)
                assert not any(y.requires_grad for y in results)
                return through(made)

            nothing, given = (None,) * len(needs), [tensors[i] for i in again]
            same(ops.opaque_backward(tape(), grads, nothing, given), of_operands)
            before = [numbers(tuple(g.shape), dtype, seed=20) for g in of_operands]
            added = ops.opaque_backward(tape(), grads, before, given)
            same(added, [torch.add(x, g) for x, g in zip(before, of_operands, strict=True)])
            made = tape()
            for k, want in enumerate(of_operands):  # one after the other
                each = ops.opaque_backward(made, grads, nothing, given, only=(k,), keep=k + 1 < len(needs))
                assert [i for i, g in enumerate(each) if g is not None] == [k]
                same([each[k]], [want])
            none = [None] * len(grads)
            assert ops.opaque_backward(tape(), none, nothing, given) == nothing
            same(
                ops.opaque_backward(tape(), none, nothing, given, zeros=True),
                [torch.zeros_like(g) for g in of_operands],
            )


@of("opaque", "opaque_backward")
def opaque() -> None:
    recorded()


class Moving(OffloadedTensors):
    """Copies of a CPU, which is its own host: here it plays the device."""

    useful = staticmethod(lambda x: True)


def moving(mesh: LoopbackMesh) -> None:
    mesh.step.host_copies = Moving(torch.device("cpu"))


@of("offload_start", "offload_wait", "reload_start", "reload_wait")
def on_the_host() -> None:
    """What comes back is what left, in other memory; while it is away, its memory on the device is free."""

    def work(mesh: LoopbackMesh) -> None:
        moving(mesh)
        for dtype in (*FLOATS, *COMPLEX, *WHOLE):
            for shape in ((3, 4), (), (2, 0)):
                x = strided(numbers(shape, dtype))
                want, on_device = x.clone(), weakref.ref(x)
                leaving = ops.offload_start(x, mesh, tag="h.0")
                del x
                assert on_device() is not None, "the copy is not done"
                away = ops.offload_wait(leaving)
                assert on_device() is None, "its memory is free"
                twice = [ops.reload_wait(ops.reload_start(away, tag="h.0")) for _ in range(2)]
                for back in twice:
                    assert back.dtype == dtype
                    assert torch.equal(back, want)
                assert not want.numel() or twice[0].data_ptr() != twice[1].data_ptr(), "each is a copy of its own"

        def away_and_back(tape: Any) -> Any:
            away = ops.offload_wait(ops.offload_start(tape, mesh, tag="h.0"))
            assert all(own.tensor is None for own in tape.own()), "what the tape holds is free"
            back = ops.reload_wait(ops.reload_start(away, tag="h.0"))
            assert back is tape
            return back

        recorded(away_and_back)

    loopback(ALONE, work)
