"""Gradient buckets: sums start in one order while backward runs, gradients are views of the buffers, nothing is counted
twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Bucket, Param
from shardc.runtime import ops
from shardc.runtime.mesh import RankMesh, Work
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.clip_grad_norm import GradNorm
from shardc.runtime.zero.buckets import Buckets
from tests import example_program

PAIR = Mesh((("dp", 2),))


class Watched(RankMesh):
    """A rank of two, that only writes down what is started and waited for; the other rank's summand is zero."""

    def __init__(self) -> None:
        super().__init__(PAIR, 0, record=True)
        self.events: list[str] = []

    def _sum_on_host(self, x: Tensor) -> Tensor:
        return x

    def _all_reduce(self, flat: Tensor, axes: tuple[str, ...], op: str, tag: str, background: bool) -> Work:
        self.events.append(f"start {tag}")
        events = self.events

        class Handle:
            def wait(self) -> None:
                events.append(f"wait {tag}")

        return Work(Handle())

    def barrier(self) -> None:
        raise AssertionError

    _all_gather = _reduce_scatter = _all_to_all = _send = _receive = barrier  # type: ignore[assignment]


def program(*buckets: tuple[str, ...], axes: tuple[str, ...] = ("dp",)) -> Program:
    base = example_program.program()
    names = [n for b in buckets for n in b]
    params = tuple(Param(n, n, (2,), torch.float32, reduce=axes) for n in names)
    made = tuple(Bucket(axes, torch.float32, b) for b in buckets)
    return replace(base, mesh=PAIR, params=params, buffers=(), inputs=(), stages=(), buckets=made)


def parameters(program: Program) -> dict[str, nn.Parameter]:
    return {p.name: nn.Parameter(torch.tensor([1.0, 2.0])) for p in program.params}


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def test_buckets_start_in_their_order_while_backward_runs() -> None:
    """c, the last used, is finished first; but bucket 1 waits for bucket 0."""
    p = program(("a", "b"), ("c",), ("d",))
    params, mesh = parameters(p), Watched()
    buckets = Buckets(p, params.items(), mesh)
    buckets.start()
    for n in ("c", "b", "a"):  # as a backward graph puts them
        ops.accumulate(params[n], torch.ones(2))
        buckets.launch()
    mesh.events.append("d is next")
    ops.accumulate(params["d"], torch.ones(2))
    buckets.launch()
    assert mesh.events == ["start bucket0", "start bucket1", "d is next", "start bucket2"]
    mesh.events.clear()
    buckets.finish(lambda names: mesh.events.append(f"ready {' '.join(names)}"))
    assert mesh.events == ["wait bucket0", "ready a b", "wait bucket1", "ready c", "wait bucket2", "ready d"]
    assert [r.bytes for r in mesh.records] == [32, 16, 16]  # each parameter begins at 16 bytes


def test_gradients_are_views_of_one_buffer_that_is_freed_with_them() -> None:
    p = program(("a", "b"))
    params = parameters(p)
    buckets = Buckets(p, params.items(), Watched())
    for step in range(1, 3):
        buckets.start()
        backward((params["a"] * params["b"] * step).sum())
        buckets.finish()
        a, b = params["a"].grad, params["b"].grad
        assert a is not None
        assert b is not None
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        assert a.untyped_storage().nbytes() == 32
        assert a.tolist() == [step, 2 * step]
        memory = StorageWeakRef(a.untyped_storage())
        del a, b
        for q in params.values():
            q.grad = None
        assert memory.expired()  # the next forward has it


def test_a_gradient_that_is_there_is_added_to() -> None:
    """Accumulation over backwards: a gradient that is a sum already is not summed over ranks again."""
    p = program(("a",), ("b",))

    def work(mesh: LoopbackMesh) -> tuple[list[float], list[float]]:
        params = parameters(p)
        params["b"].grad = torch.tensor([100.0, 100.0])
        buckets = Buckets(p, params.items(), mesh)
        for _ in range(3):
            buckets.start()
            backward((params["a"] * (mesh.rank + 1)).sum() + params["b"].sum())
            buckets.finish()
        a, b = params["a"].grad, params["b"].grad
        assert a is not None
        assert b is not None
        return a.tolist(), b.tolist()

    assert loopback(PAIR, work) == [([9.0, 9.0], [106.0, 106.0])] * 2


def test_what_backward_does_not_reach_counts_as_zeros_and_keeps_its_gradient() -> None:
    p = program(("a", "b", "c"))

    def work(mesh: LoopbackMesh) -> list[list[float] | None]:
        params = parameters(p)
        buckets = Buckets(p, params.items(), mesh)
        buckets.start()
        backward((params["a"] + params["b"]).sum())
        buckets.finish()  # leaves something in the buffer
        params["a"].grad = params["c"].grad = None
        buckets.start()
        backward(params["a"].sum())
        buckets.finish()
        return [q.grad.tolist() if q.grad is not None else None for q in params.values()]

    assert loopback(PAIR, work) == [[[2.0, 2.0], [2.0, 2.0], None]] * 2


def test_an_axis_of_one_rank_needs_no_bucket() -> None:
    p = program(("a",))
    params = parameters(p)

    def work(mesh: LoopbackMesh) -> int:
        buckets = Buckets(p, params.items(), mesh)
        buckets.start()
        backward(params["a"].sum())
        buckets.finish()
        return len(mesh.records)

    assert loopback(Mesh((("dp", 1),)), work) == [0]
    assert params["a"].grad is not None
    assert params["a"].grad.untyped_storage().nbytes() == 8


def test_outside_of_start_and_finish_gradients_are_left_alone() -> None:
    p = program(("a",))
    params = parameters(p)
    Buckets(p, params.items(), Watched())
    backward((params["a"] * 3).sum())
    assert params["a"].grad is not None
    assert params["a"].grad.tolist() == [3.0, 3.0]


def test_a_backward_that_failed_halfway_leaves_nothing_behind() -> None:
    p = program(("a",), ("b",))
    params, mesh = parameters(p), Watched()
    buckets = Buckets(p, params.items(), mesh)
    buckets.start()
    backward(params["a"].sum())
    buckets.start()  # the same step again
    params["a"].grad = None
    mesh.events.clear()
    backward((params["a"] + params["b"]).sum())
    buckets.finish()
    assert mesh.events == ["start bucket0", "start bucket1", "wait bucket0", "wait bucket1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_counts_every_parameter_once(dtype: torch.dtype) -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    g = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(6, generator=g, dtype=dtype) for n in ("split", "both", "kept", "frozen")}
    layouts = {
        "split": Layout.of({"tp": Shard(0)}, mesh),
        "both": Layout.of({"dp": Shard(0), "tp": Shard(0, 2)}, mesh),
        "kept": Layout(),
        "frozen": Layout(),
    }
    params = tuple(Param(n, n, (6,), dtype, layout=layouts[n]) for n in whole)
    p = replace(example_program.program(), mesh=mesh, params=params, buffers=(), inputs=(), stages=(), buckets=())

    def work(m: LoopbackMesh) -> Tensor:
        local = {n: nn.Parameter(torch.zeros(layouts[n].local_shape((6,), mesh), dtype=dtype)) for n in whole}
        for n in ("split", "both", "kept"):
            local[n].grad = layouts[n].local(whole[n], mesh, mesh.coords(m.rank)).clone()
        norm = GradNorm(p, local, m)
        norm.start()
        norm.add(["kept"])  # as a bucket does
        return norm.total()

    norms = loopback(mesh, work)
    want = torch.cat([whole[n] for n in ("split", "both", "kept")]).norm()
    for x in norms:
        assert torch.equal(x, norms[0])
        torch.testing.assert_close(x, want)
