"""Every row of the table of conversions: what its op makes of a value, and of a gradient, and what it sends.

A value's placement fixes its gradient's: a shard's is cut alike; a replicated value's is whole on every rank, and a
partial's too; the gradients of a partial-grad value sum to it. So `lay` and `join` serve both directions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.ir.conversions import CONVERSIONS, Conversion
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import CommRecord
from shardc.ir.placement import Partial, PartialGrad, Placement, Shard
from shardc.ir.shard_chunks import chunks, trim, unchunk, widen
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.ops import shard_parts
from shardc.runtime.rng import Rng
from tests.differentiable import ops


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summands(x: Tensor, n: int) -> list[Tensor]:
    parts = [noise(*x.shape, seed=i + 1) for i in range(n - 1)]
    return [*parts, x - sum(parts, torch.zeros_like(x))]


def lay(x: Tensor, placement: Placement, n: int, *, gradient: bool) -> list[Tensor]:
    """A global value (or gradient) as the ranks hold it."""
    if isinstance(placement, Shard):
        return [p.contiguous() for p in chunks(widen(x, placement), placement, n)]
    if isinstance(placement, PartialGrad if gradient else Partial):
        return summands(x, n)
    return [x.clone() for _ in range(n)]


def join(parts: list[Tensor], placement: Placement, *, gradient: bool) -> Tensor:
    if isinstance(placement, Shard):
        return trim(unchunk(parts, placement), placement)
    if isinstance(placement, PartialGrad if gradient else Partial):
        return torch.stack(parts).sum(0)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


DIGITS = [Shard(0), Shard(1), Shard(2), Shard(1, 3), Shard(2, 2), Shard(1, 1, (24, 12))]
PADDED = [
    Shard(0, 1, (), 12),
    Shard(1, 3, (), 12, 3),
    Shard(2, 2, (), 12, 2),
]  # to sizes that 1, 2, 3 and 4 ranks divide


def cases() -> Iterator[tuple[Conversion, Placement, Placement]]:
    """Every row of the table, from every placement of its kind to every other that the op converts it to."""
    for row in CONVERSIONS:
        if row.source is row.target is Shard:
            yield from ((row, Shard(0), Shard(2, 2)), (row, Shard(1, 3), Shard(0)))
        elif row.source is Shard:
            yield from ((row, s, row.target()) for s in (*DIGITS, *PADDED))
        elif row.target is Shard:
            yield from ((row, row.source(), s) for s in (*DIGITS, *PADDED))
        else:
            yield row, row.source(), row.target()


def run(row: Conversion, x: Tensor, mesh: LoopbackMesh, old: Placement, new: Placement) -> Tensor:
    """The row's op, called as programs call it."""
    op = getattr(ops, row.op)
    shards = [p for p in (old, new) if isinstance(p, Shard)]
    if row.merged:
        return op(x, mesh, ("a",), tag="node")
    if not shards:
        return op(x, mesh, "a", tag="node")
    if len(shards) == 2:
        return op(x, mesh, "a", *(arg for s in shards for arg in (s.dim, s.split)), tag="node")
    (s,) = shards
    return op(x, mesh, "a", s.dim, s.split, s.sections, s.padding, s.blocks, tag="node")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("row", "old", "new"), [*cases()], ids=lambda x: x.op if isinstance(x, Conversion) else str(x))
def test_a_conversion_and_its_transpose(row: Conversion, old: Placement, new: Placement, n: int) -> None:
    x, g = noise(12, 36, 24), noise(12, 36, 24, seed=9)
    xs, gs = lay(x, old, n, gradient=False), lay(g, new, n, gradient=True)

    def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor, list[CommRecord]]:
        mine = xs[mesh.rank].clone().requires_grad_()
        out = run(row, mine, mesh, old, new)
        (grad,) = torch.autograd.grad(out, mine, gs[mesh.rank])
        assert torch.equal(mine, xs[mesh.rank])
        return out.detach(), grad, mesh.records

    outs, grads, records = zip(*loopback(Mesh((("a", n),)), work), strict=True)
    torch.testing.assert_close(join(list(outs), new, gradient=False), x)
    torch.testing.assert_close(join(list(grads), old, gradient=True), g)
    pads = [p for p in (old, new) if isinstance(p, Shard) and p.padding]
    size = x.nbytes // x.shape[pads[0].dim] * pads[0].padded(x.shape[pads[0].dim]) if pads else x.nbytes
    ran = zip(row.collectives(gradient=True), ("forward", "backward"), strict=True)
    want = [
        CommRecord(kind, ("a",), size // n if kind == "all_to_all" else size, direction, "node")
        for kind, direction in ran
        if kind != "none" and n > 1
    ]
    assert all(r == want for r in records)


@pytest.mark.parametrize("s", DIGITS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_digits_agree_with_chunks(s: Shard, n: int) -> None:
    x = noise(12, 36, 24).transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
    parts = chunks(x, s, n)
    stacked = shard_parts.stack(x, s, n)
    assert torch.equal(stacked, torch.stack(parts))
    assert stacked.is_contiguous()
    assert torch.equal(shard_parts.unstack(stacked, s), x)
    for i, part in enumerate(parts):
        assert torch.equal(shard_parts.cut(x, s, n, i), part)
        padded = shard_parts.pad(part.contiguous(), s, n, i)
        assert torch.equal(padded, unchunk([p if j == i else torch.zeros_like(p) for j, p in enumerate(parts)], s))


def test_reduction_over_two_axes_is_one() -> None:
    def work(mesh: LoopbackMesh) -> tuple[float, int]:
        return float(ops.all_reduce(torch.ones(()), mesh, ("a", "c"))), len(mesh.records)

    assert loopback(Mesh((("a", 2), ("b", 2), ("c", 3))), work) == [(6.0, 1)] * 12


def test_all_reduce_max_has_no_gradient() -> None:
    def work(mesh: LoopbackMesh) -> tuple[float, bool]:
        out = ops.all_reduce_max(torch.tensor(float(-mesh.rank), requires_grad=True), mesh, ("a",))
        return float(out), out.requires_grad

    assert loopback(Mesh((("a", 3),)), work) == [(0.0, False)] * 3


# --- local math


@pytest.mark.parametrize("shape", [(5, 12), (2, 12, 3), (12,)])
def test_nll_is_cross_entropy(shape: tuple[int, ...]) -> None:
    logits = noise(*shape)
    target = torch.randint(
        0, 12, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=torch.Generator().manual_seed(1)
    )
    target.view(-1)[:1] = -7
    want = F.cross_entropy(logits, target, ignore_index=-7, reduction="none")
    torch.testing.assert_close(ops.nll(logits, target, -7), want)
    assert float(want.reshape(-1)[0]) == 0


@pytest.mark.parametrize("shape", [(5, 12), (2, 12, 3), (12,)])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_loss_on_split_classes(shape: tuple[int, ...], n: int) -> None:
    c = 1 if len(shape) > 1 else 0
    logits = noise(*shape).mul_(30).requires_grad_()  # large: exponentials would overflow without the maximum
    target = torch.randint(0, 12, shape[:1] + shape[2:] if c else (), generator=torch.Generator().manual_seed(1))
    if c:
        target.view(-1)[1] = -7
    weight = noise(*target.shape, seed=3)
    want = F.cross_entropy(logits, target, ignore_index=-7, reduction="none")
    (grad,) = torch.autograd.grad(want, logits, weight)

    def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
        mine = logits.detach().chunk(n, c)[mesh.rank].clone().requires_grad_()
        top = ops.all_reduce_max(ops.nll_max(mine), mesh, ("a",))
        parts = ops.nll_parts(mine, target, top, mesh, (("a", 1),), logits.shape[c], -7)
        out = ops.nll_join(ops.all_reduce(parts, mesh, ("a",)), target, -7)
        return out.detach(), torch.autograd.grad(out, mine, weight)[0]

    outs, grads = zip(*loopback(Mesh((("a", n),)), work), strict=True)
    for out in outs:
        torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(torch.cat(grads, c), grad)


def test_the_loss_on_split_classes_saves_one_buffer_of_the_logits_size() -> None:
    logits, target = noise(64, 32).requires_grad_(), torch.zeros(64, dtype=torch.int64)
    saved: list[Tensor] = []

    def work(mesh: LoopbackMesh) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            ops.nll_parts(logits, target, ops.nll_max(logits), mesh, (), logits.shape[1])
        total = ops.nll_parts(logits, target, ops.nll_max(logits), mesh, (), logits.shape[1]).sum()
        total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation"
        ):  # the buffer has become the gradient
            total.backward()  # type: ignore[no-untyped-call]

    loopback(Mesh((("a", 1),)), work)
    assert sum(x.nbytes for x in saved) <= logits.nbytes + 64 * (8 + 1)


@pytest.mark.parametrize("padding", [-1, 1, 7])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_look_ups_in_a_part_of_a_table(padding: int, n: int) -> None:
    table, ids = noise(8, 5).requires_grad_(), torch.tensor([[0, 7, 3], [7, 1, 1]])
    want = torch.ops.aten.embedding.default(table, ids, padding)
    weight = noise(2, 3, 5, seed=2)
    (grad,) = torch.autograd.grad(want, table, weight)

    def work(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
        mine = table.detach().chunk(n)[mesh.rank].clone().requires_grad_()
        out = ops.embedding_partial(mine, ids, mesh, (("a", 1),), table.shape[0], padding)
        return out.detach(), torch.autograd.grad(out, mine, weight)[0]

    outs, grads = zip(*loopback(Mesh((("a", n),)), work), strict=True)
    torch.testing.assert_close(torch.stack(outs).sum(0), want.detach(), rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(grads), grad, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_index_that_no_rank_has_is_told(bad: int) -> None:
    table, ids = noise(8, 5), torch.tensor([3, bad])

    def look_up(mesh: LoopbackMesh) -> None:
        ops.embedding_partial(table.chunk(2)[mesh.rank], ids, mesh, (("a", 1),), 8)

    def lose(mesh: LoopbackMesh) -> None:
        logits = noise(2, 8).chunk(2, 1)[mesh.rank]
        ops.nll_parts(logits, ids, ops.nll_max(logits), mesh, (("a", 1),), 8)

    for work, what in ((look_up, "index"), (lose, "target")):
        with pytest.raises(IndexError, match=f"{what} {bad} is out of range: it must be at least 0 and less than 8"):
            loopback(Mesh((("a", 2),)), work)


def test_partial_means_sum_to_the_mean() -> None:
    x = noise(6, 4, 5)
    parts = [ops.partial_mean(p, [0, 2], True, 30) for p in x.chunk(3)]
    torch.testing.assert_close(torch.stack(parts).sum(0), x.mean((0, 2), keepdim=True))


def test_batch_statistics_follow_the_mode() -> None:
    batch, running = noise(1, 4, 1), noise(4, seed=1).float()
    assert ops.batch_stat(batch, running, Rng()) is batch
    assert ops.batch_stat(batch, running, None) is batch
    torch.testing.assert_close(ops.batch_stat(batch, running, Rng(training=False)), running.double().reshape(1, 4, 1))
