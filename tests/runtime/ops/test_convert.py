"""Conversions and look-ups beside their definitions (definitions.py): how parts are cut, what is kept, bad indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, unchunk
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.ops import shard_parts
from tests.differentiable import ops


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DIGITS = [Shard(0), Shard(1), Shard(2), Shard(1, 3), Shard(2, 2), Shard(1, 1, (24, 12))]


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


# --- local math


def test_the_loss_on_split_classes_saves_one_buffer_of_the_logits_size() -> None:
    logits, target = noise(64, 32).requires_grad_(), torch.zeros(64, dtype=torch.int64)
    saved: list[Tensor] = []

    def work(mesh: LoopbackMesh) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            ops.nll_stats(logits, target, mesh, (), logits.shape[1])
        total = ops.nll_stats(logits, target, mesh, (), logits.shape[1]).sum()
        total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation"
        ):  # the buffer has become the gradient
            total.backward()  # type: ignore[no-untyped-call]

    loopback(Mesh((("a", 1),)), work)
    assert sum(x.nbytes for x in saved) <= logits.nbytes + 64 * (8 + 1)


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_index_that_no_rank_has_is_told(bad: int) -> None:
    table, ids = noise(8, 5), torch.tensor([3, bad])

    def look_up(mesh: LoopbackMesh) -> None:
        ops.embedding_partial(table.chunk(2)[mesh.rank], ids, mesh, (("a", 1),), 8)

    def lose(mesh: LoopbackMesh) -> None:
        logits = noise(2, 8).chunk(2, 1)[mesh.rank]
        ops.nll_stats(logits, ids, mesh, (("a", 1),), 8)

    for work, what in ((look_up, "index"), (lose, "target")):
        with pytest.raises(IndexError, match=f"{what} {bad} is out of range: it must be at least 0 and less than 8"):
            loopback(Mesh((("a", 2),)), work)
