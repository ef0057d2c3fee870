"""Parameters in buckets: what ZeRO gathers, and what becomes of their gradients, against whole parameters and sums."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.ir.stored import Bucket, Param, Rounded
from shardc.runtime.mesh.loopback import LoopbackMesh
from shardc.runtime.zero.buckets import Buckets
from shardc.spec import Spec
from tests import example_program
from tests.differentiable import ops
from tests.runtime.ops.definitions import COMPLEX, FLOATS, RANKS, numbers, of, on_ranks, strided

#: By bucket, parameters of sizes that no number of ranks divides, one without elements for most ranks.
SHAPES = {"a": (5, 3), "b": (), "c": (7,), "d": (2, 1, 3)}
BUCKETS = (("a", "b"), ("c", "d"))
Work = Callable[[LoopbackMesh, Buckets, list[list[Any]], dict[str, Tensor]], list[Tensor]]


def whole(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: numbers(shape, dtype, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


def gradient(name: str, rank: int, dtype: torch.dtype) -> Tensor:
    return strided(numbers(SHAPES[name], dtype, seed=10 + 4 * rank + ord(name) - ord("a")))


#: (of parameters as they are stored, in which ops have them)
DTYPES = (*((dtype, None) for dtype in (*FLOATS, *COMPLEX)), (torch.float32, torch.bfloat16))


def program(n: int, zero: int, dtype: torch.dtype, compute: torch.dtype | None) -> Program:
    """Parameters in two buckets, that ZeRO of this level has over an axis of n ranks."""
    params = tuple(Param(name, name, shape, dtype, reduce=("a",)) for name, shape in SHAPES.items())
    buckets = tuple(Bucket(("a",), dtype, names, "a" if zero else "", zero, compute) for names in BUCKETS)
    mesh, spec = Mesh((("a", n),)), Spec.load({"shardc": 1, "mesh": {"a": n}})
    return Program(mesh, example_program.program().graph, params, (), (), buckets=buckets, spec=spec)


def begun(mesh: LoopbackMesh, direction: str) -> list[str]:
    """The buckets that a rank has sent anything of, in order."""
    return [r.tag for r in mesh.records if r.direction == direction]


def check(levels: tuple[int, ...], work: Work) -> None:
    """Runs the work on ranks that have begun a backward. It gives whole parameters, by name, and brings `gradient`s:
    then each rank has its stretch of their sum.
    """
    for n in RANKS:
        for dtype, compute in DTYPES:
            for zero in levels:
                narrow = compute if zero and compute is not None else dtype
                made, values = program(n, zero, dtype, compute), whole(dtype)

                def on_rank(mesh: LoopbackMesh) -> tuple[Any, ...]:
                    buckets = Buckets(made, ((k, nn.Parameter(x.clone())) for k, x in values.items()), mesh)
                    grads = {name: gradient(name, mesh.rank, narrow) for name in SHAPES}
                    given = [[buckets.given[name] for name in names] for names in BUCKETS]
                    params = work(mesh, buckets, given, grads)
                    for found, name in zip(params, SHAPES, strict=True):
                        assert found.dtype == narrow
                        assert torch.equal(found.detach().to(dtype), values[name])
                    shards = {k: buckets.shards[k] if zero else None for k in SHAPES}
                    return tuple((shards[name], buckets.owned[name].grad) for name in SHAPES)

                for name, parts in zip(SHAPES, on_ranks(n, on_rank), strict=True):
                    total = torch.stack([gradient(name, rank, dtype) for rank in range(n)]).sum(0)
                    for run, grad in parts:
                        want = total if run is None else total.flatten()[run.start : run.stop]
                        assert (grad is None) if not want.numel() else torch.equal(grad, want)


@of("gather_start", "gather_wait")
def gathered() -> None:
    """Whole parameters, for forward; backward scatters their gradients."""

    def work(mesh: LoopbackMesh, buckets: Buckets, given: list[list[Any]], grads: dict[str, Tensor]) -> list[Tensor]:
        first = ops.gather_start(given[0], tag="first")
        assert begun(mesh, "forward") == ["bucket0"], "it begins before it is waited for"
        second = ops.gather_start(given[1], tag="second")
        params = [*ops.gather_wait(first), *ops.gather_wait(second)]
        assert begun(mesh, "forward") == ["bucket0", "bucket1"]
        buckets.start()
        for names, bucket in zip(BUCKETS, given, strict=True):
            ops.scatter(bucket, [grads[name] for name in names])
        assert sorted(begun(mesh, "backward")) == ["bucket0", "bucket1"]
        buckets.finish()
        return params

    check((3,), work)
    gathered_in_8_bits()


def gathered_in_8_bits() -> None:
    """Of parameters that ops want rounded alone, whole, with a scale for each row or for all of it."""
    granules = {"a": (1, 0), "b": (0, 0)}
    for n in RANKS:
        for dtype, compute in ((torch.float32, None), (torch.float32, torch.bfloat16)):
            values = {k: numbers((5, 4), dtype, seed=i) / 3 for i, k in enumerate(granules)}
            values["a"][0] *= 2.0**-20  # a row that is nothing beside the others
            params = tuple(Param(name, name, (5, 4), dtype, reduce=("a",)) for name in granules)
            how = tuple(Rounded("e4m3", granule) for granule in granules.values())
            bucket = Bucket(("a",), dtype, tuple(granules), "a", 3, compute, rounded=how)
            made = replace(program(n, 3, dtype, None), params=params, buckets=(bucket,))

            def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                buckets = Buckets(made, ((k, nn.Parameter(x.clone())) for k, x in values.items()), mesh)
                given = [buckets.given[name] for name in granules]
                with torch.no_grad():
                    forward = ops.gather_wait(ops.gather_start(given))
                return *forward, *ops.regather_wait(ops.regather_start(given))

            stored = [x.to(compute or dtype) for x in values.values()]
            wanted = [
                ops.fp8_round(x, ops.fp8_amax(x, granule), "e4m3", granule)
                for x, granule in zip(stored, granules.values(), strict=True)
            ]
            for parts, want in zip(on_ranks(n, work), wanted * 2, strict=True):
                assert all(p.dtype == want.dtype and torch.equal(p, want) for p in parts)


@of("regather_start", "regather_wait", "scatter")
def gathered_again() -> None:
    """Whole parameters, for a backward graph, which brings their gradients itself."""

    def work(mesh: LoopbackMesh, buckets: Buckets, given: list[list[Any]], grads: dict[str, Tensor]) -> list[Tensor]:
        params: list[Tensor] = []
        buckets.start()
        with mesh.step.training(buckets.launch):
            for i, (names, refs) in enumerate(zip(BUCKETS, given, strict=True)):
                gathering = ops.regather_start(refs, tag="again")
                assert begun(mesh, "backward")[2 * i :] == [f"bucket{i}"], "it begins before it is waited for"
                params += [p.clone() for p in ops.regather_wait(gathering)]
                ops.scatter(refs, [grads[name] for name in names], tag="sum")
                assert begun(mesh, "backward")[2 * i :] == [f"bucket{i}"] * 2, "its sum begins"
        buckets.finish()
        return params

    check((3,), work)


@of("accumulate", "launch")
def handed_over() -> None:
    """Gradients of whole parameters, of which each bucket's sum begins when all of it is there."""

    def work(mesh: LoopbackMesh, buckets: Buckets, given: list[list[Any]], grads: dict[str, Tensor]) -> list[Tensor]:
        params = [p for refs in given for p in refs]
        if zero_refs := [i for i, p in enumerate(params) if not isinstance(p, nn.Parameter)]:
            by_bucket = [ops.updated(refs) for refs in given]
            assert len(zero_refs) == len(params)
            params = [p for each in by_bucket for p in each]
        buckets.start()
        with mesh.step.training(buckets.launch):
            for own, (name, p) in zip((False, True, True, False), zip(SHAPES, params, strict=True), strict=True):
                ops.accumulate(p, grads[name].clone(), own=own)
                assert p.grad is None, "it is in the bucket"
                before = begun(mesh, "backward")
                ops.launch(mesh, tag="launch")
                assert len(begun(mesh, "backward")) - len(before) == (name in {b[-1] for b in BUCKETS})
        buckets.finish()
        return params

    check((0, 1, 2), work)
    for own in (False, True):  # where no bucket waits for it
        for dtype in FLOATS:
            p, g = nn.Parameter(numbers((2, 3), dtype)), numbers((2, 3), dtype, seed=1)
            want = g.clone()
            ops.accumulate(p, g, own=own)
            assert p.grad is not None
            assert (p.grad.data_ptr() == g.data_ptr()) == own, "it is copied where somebody else may look at it"
            assert torch.equal(p.grad, want)
            ops.accumulate(p, want.clone(), own=own)
            assert torch.equal(p.grad, 2 * want)


@of("updated")
def after_updates() -> None:
    """Each rank updates its stretch: then all have all of it."""
    for n in RANKS:
        for dtype, compute in DTYPES:
            for zero in (1, 2):
                made, values = program(n, zero, dtype, compute), whole(dtype)

                def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                    buckets = Buckets(made, ((k, nn.Parameter(x.clone())) for k, x in values.items()), mesh)
                    found = [
                        p.detach().clone() for names in BUCKETS for p in ops.updated([buckets.given[k] for k in names])
                    ]
                    assert all(torch.equal(p, x) for p, x in zip(found, values.values(), strict=True))
                    with torch.no_grad():
                        for p in buckets.owned.values():
                            p.mul_(-1).add_(1)
                    buckets.publish()
                    return tuple(p for names in BUCKETS for p in ops.updated([buckets.given[k] for k in names]))

                for parts, x in zip(on_ranks(n, work), values.values(), strict=True):
                    assert all(p.dtype == (compute or dtype) and torch.equal(p.to(dtype), 1 - x) for p in parts)
