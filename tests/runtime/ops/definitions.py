"""Ops of the runtime against their definitions on the whole value, forward and backward: `CHECKS`.

A check runs its op on the loopback mesh of 2, 3 and 4 ranks, in each dtype that the op is for, on parts that are
empty, padded (a rank may have padding alone), and not contiguous. It raises AssertionError where ranks together have
something else than one device. Where sums are all that is done, numbers are small whole ones, exact in each dtype.

Ops are looked up in `ops` when they run, so that `test_broken_ops.py` can put broken ones there. Here: what checks
share, and those of conversions; definitions_parts.py: ops on a part of a dim; definitions_losses.py: losses, experts.
"""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.ir.conversions import BY_OP, COLLECTIVES, Conversion
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import CommRecord
from shardc.ir.placement import Partial, PartialGrad, Placement, Shard
from shardc.ir.shard_chunks import chunks, widen
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests.differentiable import ops

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
WHOLE = (torch.int64, torch.bool)
RANKS = (2, 3, 4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def of(*names: str) -> Callable[[Check], Check]:
    """Registers a check of some ops."""

    def register(check: Check) -> Check:
        for name in names:
            assert name not in CHECKS
            CHECKS[name] = check
        return check

    return register


# --- values and their parts


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Whole numbers from -4 to 4, complex ones with both parts, truth values."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-4, 5, (2, *shape), generator=generator)
    if dtype == torch.bool:
        return drawn[0] > 0
    return torch.complex(*drawn.double()).to(dtype) if dtype.is_complex else drawn[0].to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same numbers, not contiguous where there is more than one dim."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x.clone()


def summands(x: Tensor, n: int) -> list[Tensor]:
    parts = [numbers(x.shape, x.dtype, seed=i + 1) for i in range(n - 1)]
    return [*parts, x - sum(parts, torch.zeros_like(x))]


def lay(x: Tensor, placement: Placement, n: int, *, gradient: bool) -> list[Tensor]:
    """A global value (or gradient) as ranks hold it."""
    if isinstance(placement, Shard):
        return [strided(p) for p in chunks(widen(x, placement), placement, n)]
    if isinstance(placement, PartialGrad if gradient else Partial):
        return [strided(p) for p in summands(x, n)]
    return [strided(x) for _ in range(n)]


def same(parts: Sequence[Tensor], x: Tensor, placement: Placement, *, gradient: bool) -> None:
    """Asserts that ranks hold this global value, to the bit; padding is zero."""
    assert all(p.dtype == x.dtype for p in parts)
    if isinstance(placement, Shard):
        wanted = chunks(widen(x, placement), placement, len(parts))
        assert all(torch.equal(p, w) for p, w in zip(parts, wanted, strict=True))
    elif isinstance(placement, PartialGrad if gradient else Partial):
        assert torch.equal(torch.stack(list(parts)).sum(0).to(x.dtype), x)
    else:
        assert all(torch.equal(p, x) for p in parts)


def on_ranks(n: int, work: Callable[[LoopbackMesh], Any]) -> tuple[Any, ...]:
    """What ranks return, by place in it."""
    return tuple(zip(*loopback(Mesh((("a", n),)), work), strict=True))


def digit(s: Shard) -> tuple[tuple[str, int], ...]:
    return (("a", s.signed),)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a definition is computed in."""
    return torch.promote_types(dtype, torch.float32)


def close(x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(x.to(torch.float64), y.to(torch.float64), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# --- conversions


def shards(n: int) -> Iterator[tuple[tuple[int, ...], Shard]]:
    """Shapes and how n ranks split them: in each way, padded, with padding alone on some ranks, and empty."""
    yield (2 * n, 6 * n, 3), Shard(0)
    yield (2 * n, 6 * n, 3), Shard(1, 3)
    yield (2 * n, 6 * n, 3), Shard(1, 1, (2 * n, 4 * n))
    yield (2, 4 * n), Shard(1, 2, mirrored=True)
    yield (1, 3, 2), Shard(0, 1, (), n - 1)
    yield (2, 3 * (n + 1)), Shard(1, 3, (), n - 1, 3)
    yield (2 * n, 0, 3), Shard(0)


def in_turn(i: int, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    """The dtypes that a check tries on its i-th shape: all on the first one, the widest and another one on the rest.

    No op has code for a dtype on some of the shapes only.
    """
    return dtypes if i == 0 else (dtypes[0], dtypes[1 + i % (len(dtypes) - 1)])


def placements(row: Conversion, n: int) -> Iterator[tuple[tuple[int, ...], Placement, Placement]]:
    """Every way in which n ranks may have what a row of the table takes and gives."""
    if row.source is row.target is Shard:
        yield (2 * n, 3, 4 * n), Shard(0), Shard(2, 2)
        yield (3 * n, 2, n), Shard(0, 3), Shard(2)
        yield (n + 1, 2, 2 * n - 1), Shard(0, 1, (), n - 1), Shard(2, 1, (), 1)
        yield (n, 0, n), Shard(0), Shard(2)
    elif Shard in (row.source, row.target):
        for shape, s in shards(n):
            yield shape, *((s, row.target()) if row.source is Shard else (row.source(), s))
    else:
        yield from ((shape, row.source(), row.target()) for shape in ((3, 4), (), (2, 0)))


def arguments(row: Conversion, old: Placement, new: Placement) -> tuple[Any, ...]:
    """Of a row's op behind the mesh."""
    if row.merged:
        return (("a",),)
    each = [p for p in (old, new) if isinstance(p, Shard)]
    if len(each) == 2:
        pads = [arg for s in each for arg in (s.padding, s.blocks)] if any(s.padding for s in each) else []
        return ("a", *(arg for s in each for arg in (s.dim, s.signed)), *pads)
    return ("a", *(arg for s in each for arg in (s.dim, s.signed, s.sections, s.padding, s.blocks)))


def messages(row: Conversion, x: Tensor, old: Placement, new: Placement, n: int) -> list[CommRecord]:
    """What the op sends, and its transpose, where they send anything: the value with its padding."""
    for s in (old, new):
        x = widen(x, s) if isinstance(s, Shard) else x
    size = x.nbytes
    ways = zip(row.collectives(gradient=True), ("forward", "backward"), strict=True)
    return [CommRecord(k, ("a",), size // n if k == "all_to_all" else size, way, "node") for k, way in ways]


def conversion(name: str) -> None:
    """A row of the table: values and gradients, at once, begun and waited for, its transpose alone; what each sends."""
    row = BY_OP[name]
    sums = row.source is Partial or row.target is Partial
    for n in RANKS:
        for i, (shape, old, new) in enumerate(placements(row, n)):
            for dtype in in_turn(i, (*FLOATS, *COMPLEX, *(d for d in WHOLE if not (sums and d == torch.bool)))):
                x, g = numbers(shape, dtype), numbers(shape, dtype, seed=9)
                flows = dtype not in WHOLE
                xs, gs = lay(x, old, n, gradient=False), lay(g, new, n, gradient=True) if flows else [g] * n
                args = arguments(row, old, new)
                sent = messages(row, x, old, new, n)

                def work(mesh: LoopbackMesh) -> tuple[Any, ...]:
                    mine, g = xs[mesh.rank].clone(memory_format=torch.preserve_format), gs[mesh.rank]
                    found = [getattr(ops, name)(mine, mesh, *args, tag="node")]
                    assert mesh.records == sent[:1] * (row.forward in COLLECTIVES), "it sends something else"
                    if row.forward in COLLECTIVES:
                        found.append(ops.wait(ops.start(name, mine.detach(), mesh, *args, tag="node")))
                    if flows:
                        mesh.records.clear()
                        found.append(ops.transpose(name, g, mesh, *args, tag="node"))
                        assert mesh.records == sent[1:] * (row.backward in COLLECTIVES), "its transpose does"
                    if flows and row.backward in COLLECTIVES:
                        found.append(ops.wait(ops.transpose_start(name, g, mesh, *args, tag="node")))
                    assert torch.equal(mine, xs[mesh.rank]), "it writes to its operand"
                    return tuple(found)

                values, *rest = on_ranks(n, work)
                same(values, x, new, gradient=False)
                if row.forward in COLLECTIVES:
                    same(rest.pop(0), x, new, gradient=False)
                for grads in rest:
                    same(grads, g, old, gradient=True)


for _name in BY_OP:
    CHECKS[_name] = lambda name=_name: conversion(name)  # type: ignore[misc]


def one_way() -> None:
    """One conversion of each move that communicates, which `conversion` also begins, and transposes by itself."""
    for name in ("all_reduce", "all_gather", "sum_grad", "all_to_all", "reduce_scatter"):
        conversion(name)


for _name in ("start", "wait", "transpose", "transpose_start"):
    CHECKS[_name] = one_way


@of("all_reduce_max")
def maximum() -> None:
    for n in RANKS:
        for dtype in (*FLOATS, torch.int64):
            x = numbers((n, 3, 4), dtype)
            (outs,) = on_ranks(n, lambda mesh, x=x: (ops.all_reduce_max(strided(x[mesh.rank]), mesh, ("a",)),))
            assert all(torch.equal(out, x.amax(0)) for out in outs)
