"""Ops on a rank's part of a dim, against the whole: padding, look-ups, sums along it, random numbers of it."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, widen
from shardc.runtime.mesh.loopback import LoopbackMesh
from shardc.runtime.rng import Rng
from tests.differentiable import ops
from tests.runtime.ops.definitions import (
    COMPLEX,
    FLOATS,
    RANKS,
    WHOLE,
    close,
    digit,
    in_turn,
    lay,
    numbers,
    of,
    on_ranks,
    same,
    shards,
    strided,
)


def padded_values(n: int, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Tensor, Shard]]:
    """Values of which the dim that ranks split is padded in each way."""
    for i, (shape, s) in enumerate((shape, s) for shape, s in shards(n) if not s.sections):
        yield from ((numbers(shape, dtype), s) for dtype in in_turn(i, dtypes))


@of("fill_padding")
def filled() -> None:
    for n in RANKS:
        for x, s in padded_values(n, (*FLOATS, *COMPLEX, *WHOLE)):
            gap = ~widen(torch.ones(x.shape, dtype=torch.bool), s)
            held = [strided(p) for p in chunks(widen(x, s).masked_fill(gap, 1), s, n)]
            g = numbers(gap.shape, x.dtype, seed=3)
            for fill in (0.0, 1.0):

                def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
                    mine = held[mesh.rank].clone().requires_grad_(held[0].dtype not in WHOLE)
                    out = ops.fill_padding(mine, mesh, s.dim, digit(s), x.shape[s.dim], s.padding, s.blocks, fill)
                    assert out.is_contiguous()
                    grad = chunks(g, s, n)[mesh.rank]
                    if mine.requires_grad:
                        (grad,) = torch.autograd.grad(out, mine, strided(grad))
                    return out.detach(), grad

                outs, grads = on_ranks(n, work)
                wanted = chunks(widen(x, s).masked_fill(gap, fill), s, n)
                assert all(torch.equal(o, w) for o, w in zip(outs, wanted, strict=True))
                if x.dtype not in WHOLE:
                    wanted = chunks(g.masked_fill(gap, 0), s, n)
                    assert all(torch.equal(o, w) for o, w in zip(grads, wanted, strict=True))


def looked_up(
    dtype: torch.dtype, whole: Callable[[Tensor], Tensor], part: Callable[[Tensor, LoopbackMesh, Shard, int], Tensor]
) -> None:
    """A look-up along dim 0 of 6 entries, which ranks split: results add up, and each has its entries' gradient."""
    for n in RANKS:
        for s in (Shard(0, 1, (), -6 % n), Shard(0, 2) if 6 % (2 * n) == 0 else Shard(0, 1, (), 2 * n - 6 % n)):
            x = numbers((6, 3), dtype)
            leaf = x.clone().requires_grad_(dtype not in WHOLE)
            want = whole(leaf)
            g = numbers(want.shape, dtype, seed=5)
            held = lay(x, s, n, gradient=False)

            def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                mine = held[mesh.rank].clone().requires_grad_(dtype not in WHOLE)
                out = part(mine, mesh, s, s.padded(6))
                return (out.detach(), *(torch.autograd.grad(out, mine, g) if mine.requires_grad else ()))

            outs, *grads = on_ranks(n, work)
            assert torch.equal(torch.stack(outs).sum(0).to(dtype), want.detach())
            if grads:
                same(grads[0], torch.autograd.grad(want, leaf, g)[0], s, gradient=True)


@of("embedding_partial")
def embedding() -> None:
    ids = torch.tensor([[0, 5, 3], [5, 1, 1]])
    for dtype in FLOATS:
        for skipped in (-1, 1, 5):
            looked_up(
                dtype,
                lambda x, skipped=skipped: torch.ops.aten.embedding.default(x, ids, skipped),
                lambda x, mesh, s, size, skipped=skipped: ops.embedding_partial(x, ids, mesh, digit(s), size, skipped),
            )


@of("select_partial")
def select() -> None:
    for dtype in (*FLOATS, *COMPLEX, *WHOLE):
        for i in (0, 3, 5):
            looked_up(
                dtype,
                lambda x, i=i: x.select(0, i),
                lambda x, mesh, s, size, i=i: ops.select_partial(x, mesh, 0, digit(s), size, i),
            )


@of("gather_partial")
def gather() -> None:
    index = torch.tensor([[0, 5, 2], [3, 3, 1]])
    for dtype in (*FLOATS, *COMPLEX, *WHOLE):
        looked_up(
            dtype,
            lambda x: x.gather(0, index),
            lambda x, mesh, s, size: ops.gather_partial(x, index, mesh, 0, digit(s), size),
        )


@of("cumsum")
def cumulative() -> None:
    for n in RANKS:
        for dtype in (*FLOATS, *COMPLEX, torch.int64):
            for s in (Shard(1), Shard(1, 2, mirrored=True)):
                x, g = numbers((2, 4 * n), dtype), numbers((2, 4 * n), dtype, seed=4)
                leaf = x.clone().requires_grad_(dtype not in WHOLE)
                want = leaf.cumsum(1)

                def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                    mine = strided(chunks(x, s, n)[mesh.rank]).requires_grad_(x.dtype not in WHOLE)
                    out = ops.cumsum(mine, 1, mesh, digit(s))
                    grad = strided(chunks(g, s, n)[mesh.rank])
                    return (out.detach(), *(torch.autograd.grad(out, mine, grad) if mine.requires_grad else ()))

                outs, *grads = on_ranks(n, work)
                same(outs, want.detach(), s, gradient=False)
                if grads:
                    same(grads[0], torch.autograd.grad(want, leaf, g)[0], s, gradient=True)


@of("conv1d")
def convolution() -> None:
    for n in RANKS:
        for dtype in FLOATS:
            for left, dilation, s in (
                (2, 1, Shard(2)),
                (1, 1, Shard(2)),
                (2, 2, Shard(2)),
                (2, 1, Shard(2, 2, mirrored=True)),
            ):
                x, w, b = numbers((2, 4, 8 * n), dtype), numbers((2, 2, 3), dtype, seed=1), numbers((2,), dtype, seed=2)
                g = numbers((2, 2, 8 * n), dtype, seed=3)
                leaves = [t.clone().requires_grad_() for t in (x, w, b)]
                wide = F.pad(leaves[0], (left, 2 * dilation - left))
                want = F.conv1d(wide, leaves[1], leaves[2], dilation=dilation, groups=2)
                wanted = torch.autograd.grad(want, leaves, g)

                def work(mesh: LoopbackMesh) -> Any:
                    each = [strided(chunks(t, s, n)[mesh.rank]) for t in (x, g)]
                    mine = [t.clone().requires_grad_() for t in (each[0], w, b)]
                    out = ops.conv1d(*mine, left, dilation, 2, mesh, digit(s))
                    return (out.detach(), *torch.autograd.grad(out, mine, each[1]))

                outs, of_x, of_w, of_b = on_ranks(n, work)
                same(outs, want.detach(), s, gradient=False)
                same(of_x, wanted[0], s, gradient=True)
                for found, whole in ((of_w, wanted[1]), (of_b, wanted[2])):
                    close(torch.stack(found).sum(0), whole, dtype)


@of("partial_mean")
def mean() -> None:
    for n in RANKS:
        for dtype in (*FLOATS, *COMPLEX):
            for dims, keep in (([0], False), ([0, 2], True)):
                x = numbers((2 * n, 3, 4), dtype)
                leaf = x.clone().requires_grad_()
                count = math.prod(x.shape[d] for d in dims)
                want = leaf.sum(dims, keep) / count
                g = numbers(want.shape, dtype, seed=3) * count  # so that gradients are whole numbers

                def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
                    mine = strided(x.chunk(n)[mesh.rank]).requires_grad_()
                    out = ops.partial_mean(mine, dims, keep, count)
                    return out.detach(), *torch.autograd.grad(out, mine, g)

                outs, grads = on_ranks(n, work)
                real = dtype.to_real()
                total = torch.stack(outs).sum(0)
                for a, b in ((total, want.detach()), (torch.cat(grads), torch.autograd.grad(want, leaf, g)[0])):
                    close(*((torch.view_as_real(t.resolve_conj()) if t.is_complex() else t) for t in (a, b)), real)


def of_a_part(whole: Callable[[Any], Any], part: Callable[[Any, LoopbackMesh, Shard, tuple[int, ...]], Any]) -> None:
    """What ranks draw, or mask, by place: each has its part of what one device has. Padding has any place's."""
    for n in RANKS:
        for values, s in padded_values(n, FLOATS):
            x, shape = values.add(0.5).requires_grad_(), tuple(values.shape)
            want = whole(x)
            g = numbers(shape, x.dtype, seed=2)
            of_x = torch.autograd.grad(want, x, g)[0] if want.requires_grad else None

            def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
                mine, grad = (strided(chunks(widen(t.detach(), s), s, n)[mesh.rank]) for t in (x, g))
                out = part(mine.requires_grad_(), mesh, s, shape)
                return out.detach(), torch.autograd.grad(out, mine, grad)[0] if out.requires_grad else out

            outs, grads = on_ranks(n, work)
            gap = chunks(~widen(torch.ones(shape, dtype=torch.bool), s), s, n)
            outs = tuple(out.masked_fill(hole, 0) for out, hole in zip(outs, gap, strict=True))
            same(outs, want.detach(), s, gradient=False)
            if of_x is not None:
                same(grads, of_x, s, gradient=True)


@of("dropout")
def dropped() -> None:
    def part(x: Tensor, mesh: LoopbackMesh, s: Shard, shape: tuple[int, ...]) -> Tensor:
        pads = ((s.dim, s.padding, s.blocks),) if s.padding else ()
        return ops.dropout(x, 0.5, Rng(3), 1, mesh, shape, ((s.dim, "a", s.signed, ()),), pads)

    of_a_part(lambda x: ops.dropout(x, 0.5, Rng(3), 1), part)
    for dtype in FLOATS:
        x, g = numbers((20, 30), dtype).add(0.5).requires_grad_(), numbers((20, 30), dtype, seed=1)
        y = ops.dropout(x, 0.5, Rng(3), 1)
        kept = y.detach() != 0
        assert 0.4 < float(kept.double().mean()) < 0.6
        assert torch.equal(y.detach(), torch.where(kept, 2 * x.detach(), 0))
        assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.where(kept, 2 * g, 0))


@of("random")
def drawn() -> None:
    def part(x: Tensor, mesh: LoopbackMesh, s: Shard, shape: tuple[int, ...]) -> Tensor:
        pads = ((s.dim, s.padding, s.blocks),) if s.padding else ()
        digits = ((s.dim, "a", s.signed, ()),)
        return ops.random("uniform", (0.0, 1.0), shape, x.dtype, Rng(3), 1, mesh, digits, pads)

    of_a_part(lambda x: ops.random("uniform", (0.0, 1.0), x.shape, x.dtype, Rng(3), 1), part)
    for dtype in FLOATS:
        y = ops.random("uniform", (0.0, 1.0), (20, 30), dtype, Rng(3), 1)
        assert 0 <= float(y.min()) < 0.1
        assert 0.9 < float(y.max()) < 1


@of("batch_stat")
def statistic() -> None:
    for dtype in FLOATS:
        batch, running = numbers((1, 4, 1), dtype), numbers((4,), torch.float32, seed=1)
        assert torch.equal(ops.batch_stat(batch, running, Rng()), batch)
        assert torch.equal(ops.batch_stat(batch, running, None), batch)
        assert torch.equal(ops.batch_stat(batch, running, Rng(training=False)), running.to(dtype).view(1, 4, 1))


@of("cast_once")
def cast() -> None:
    for n in RANKS:
        for old in FLOATS[:2]:
            for new in FLOATS:
                x, g = numbers((3, 4), old) / 3, numbers((3, 4), new, seed=1)

                def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                    found = []
                    for copies in (None, {}):
                        mesh.step.weight_copies = copies
                        for _ in range(2):  # of two microbatches the second takes the first's copy
                            mine = strided(x).requires_grad_()
                            out = ops.cast_once(mine, mesh, new, tag="w")
                            found += [out.detach(), *torch.autograd.grad(out, mine, g)]
                    return tuple(found)

                for i, each in enumerate(on_ranks(n, work)):
                    want = g.to(old) if i % 2 else x.to(new)
                    assert all(torch.equal(y, want) and y.dtype == want.dtype for y in each)


@of("total", "summed")
def over_microbatches() -> None:
    """A sum over microbatches that was taken before: each has all of it, and the gradient of its summand."""
    for n in RANKS:
        for dtype in FLOATS:
            x, g = numbers((4, n, 3), dtype), numbers((3,), dtype, seed=1)

            def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                mesh.step.set_microbatch(0, 4, [x[:, mesh.rank].sum(0)])
                mine = x[0, mesh.rank].clone().requires_grad_()
                out = ops.summed(mine, mesh, 0)
                return ops.total(mesh, 0), out.detach(), *torch.autograd.grad(out, mine, g)

            totals, outs, grads = on_ranks(n, work)
            for rank in range(n):
                assert torch.equal(totals[rank], x[:, rank].sum(0))
                assert torch.equal(outs[rank], x[:, rank].sum(0))
                assert torch.equal(grads[rank], g)


@of("add_into")
def added() -> None:
    for dtype in (*FLOATS, *COMPLEX, torch.int64):
        x, y = strided(numbers((3, 4), dtype)), numbers((3, 4), dtype, seed=1)
        want, out = x + y, ops.add_into(x, y)
        assert torch.equal(out, want)
        assert out.data_ptr() == x.data_ptr()


@of("experts_keep")
def kept_choices() -> None:
    index = numbers((3, 4, 2), torch.int64).abs()
    for experts, limit in ((4, 2), (5, 1), (3, 9)):
        seen: dict[tuple[int, int], int] = {}
        want = []
        for row, choices in enumerate(index):
            for e in choices.flatten().tolist():
                seen[row, e] = seen.get((row, e), 0) + 1
                want.append(e if e < experts and seen[row, e] <= limit else -1)
        assert ops.experts_keep(index, experts, limit).flatten().tolist() == want


@of("top", "ties", "extremum")
def extrema() -> None:
    """The largest along a split dim, with ties between ranks and on one: torch.amax, and its gradient."""
    for n in RANKS:
        for dtype in FLOATS:
            for dims in ([1], [0, 1]):
                x, s = numbers((3, 2 * n), dtype), Shard(1)
                leaf = x.clone().requires_grad_()
                want = leaf.amax(dims, keepdim=True)
                g = numbers(want.shape, dtype, seed=3)
                (of_x,) = torch.autograd.grad(want, leaf, g)
                held = lay(x, s, n, gradient=False)

                def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
                    mine = held[mesh.rank].clone().requires_grad_()
                    largest = ops.all_reduce_max(ops.top(mine, dims), mesh, ("a",))
                    many = mesh.all_reduce(ops.ties(mine, largest, dims), ("a",))
                    out = ops.extremum(mine, largest, many)
                    (grad,) = torch.autograd.grad(out, mine, strided(g))
                    return out.detach(), grad

                outs, grads = on_ranks(n, work)
                assert all(torch.equal(o, want) for o in outs)
                close(torch.cat(grads, 1), of_x, dtype)
