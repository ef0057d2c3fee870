"""Attention of a part of the queries or heads, and rounding to 8 bits of a part, against the whole."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks
from shardc.runtime.mesh.loopback import LoopbackMesh
from shardc.runtime.rng import Rng
from tests.differentiable import ops
from tests.runtime.ops.definitions import RANKS, close, numbers, of, on_ranks, same, strided, wide

NARROW = (torch.float64, torch.float32, torch.bfloat16)


@of("attention")
def attended() -> None:
    """Rows of queries, or heads, that ranks split; without dropout the formula written out, with it the whole op's."""
    for n in RANKS:
        for dtype in NARROW:
            b, h, s, t, d = 2, n, 3 * n, 5, 4
            q, k, v = (numbers((b, h, x, d), dtype, seed=i) / 4 for i, x in enumerate((s, t, t)))
            g = numbers((b, h, s, d), dtype, seed=4)
            seen = torch.arange(t) <= torch.arange(s)[:, None]
            leaves = [x.to(wide(dtype)).requires_grad_() for x in (q, k, v)]
            scores = leaves[0] @ leaves[1].mT / math.sqrt(d)
            written = scores.masked_fill(~seen, -math.inf).softmax(-1) @ leaves[2]
            of_written = torch.autograd.grad(written, leaves, g.to(written.dtype))
            for p, split in ((0.0, Shard(2)), (0.0, Shard(1)), (0.5, Shard(2)), (0.5, Shard(1))):
                one = [x.clone().requires_grad_() for x in (q, k, v)]
                want = ops.attention(*one, None, p, True, None, False, Rng(3), 1)
                wanted = torch.autograd.grad(want, one, g)
                if not p:
                    for a, c in zip((want.detach(), *wanted), (written.detach(), *of_written), strict=True):
                        close(a, c, dtype)

                def work(mesh: LoopbackMesh) -> Any:
                    parts = [
                        x if split.dim == 2 and i else chunks(x, split, n)[mesh.rank] for i, x in enumerate((q, k, v))
                    ]
                    mine = [strided(x).requires_grad_() for x in parts]
                    where = (mesh, (b, h, s, t), ((split.dim, "a", 1, ()),))
                    out = ops.attention(*mine, None, p, True, None, False, Rng(3), 1, *where)
                    return out.detach(), *torch.autograd.grad(out, mine, strided(chunks(g, split, n)[mesh.rank]))

                outs, of_q, of_k, of_v = on_ranks(n, work)
                for found, whole in ((outs, want.detach()), (of_q, wanted[0])):
                    close(torch.cat(found, split.dim), whole, dtype)
                for found, whole in ((of_k, wanted[1]), (of_v, wanted[2])):
                    total = torch.cat(found, 1) if split.dim == 1 else torch.stack(found).to(wide(dtype)).sum(0)
                    close(total, whole, dtype)


@of("attention_reach")
def reached() -> None:
    """The first key that any row of a rank sees, and the one behind the last."""
    for n in RANKS:
        s, t = 4 * n, 7
        mask = numbers((s, t), torch.bool) & (torch.arange(t) > 1) & (torch.arange(t) < 6)
        mask[:4] = False  # of the first rank, nothing
        mask[-1, 6] = True
        for given in (mask, torch.zeros(s, t).masked_fill(~mask, -math.inf)):

            def work(mesh: LoopbackMesh) -> tuple[Tensor]:
                part = strided(given.chunk(n)[mesh.rank])
                return (ops.attention_reach(part, mesh, "a", (1, 1, s, t), ((2, "a", 1, ()),)),)

            (found,) = on_ranks(n, work)
            want = []
            for rows in mask.chunk(n):
                places = rows.any(0).nonzero().flatten().tolist()
                want.append([[places[0], places[-1] + 1] if places else [0, 0]])
            assert all(each.tolist() == want for each in found)


@of("fp8_amax", "fp8_round", "fp8_grad", "fp8_round_grad")
def rounded() -> None:
    """Rows with a scale each, that ranks split; and one scale for all of them, which ranks find together."""
    for n in RANKS:
        for dtype in NARROW:
            x, g = (numbers((2 * n, 8), dtype, seed=i) / 3 for i in range(2))
            x[:2], g[:2] = x[:2] * 2.0**-30, g[:2] * 2.0**-40  # the first rank's are nothing beside the others'
            for granule, axes, digits in (((1, 0), (), 4), ((1, 4), (), 4), ((0, 0), ("a",), 4)):
                blocks = x.view(2 * n, -1, granule[1] or 8).abs().amax(-1)
                amax = blocks.amax().view(1, 1) if granule[0] == 0 else blocks
                assert torch.equal(ops.fp8_amax(x, granule), amax.to(wide(dtype)))
                whole = ops.fp8_round(x, ops.fp8_amax(x, granule), "e4m3", granule)
                of_g = ops.fp8_round_grad(g, None, "e5m2", granule)
                assert bool(((whole - x).abs() <= x.abs() / 2**digits + amax.max() / 2**15).all()), (
                    "3 bits behind the first"
                )
                assert bool(((of_g - g).abs() <= g.abs() / 2 ** (digits - 1) + g.abs().max() / 2**20).all())
                assert torch.equal(ops.fp8_round(whole, ops.fp8_amax(whole, granule), "e4m3", granule), whole)

                def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                    mine, grad = (strided(y.chunk(n)[mesh.rank]) for y in (x, g))
                    largest = ops.fp8_amax(mine.requires_grad_(), granule)
                    assert not largest.requires_grad
                    if axes:
                        largest = ops.all_reduce_max(largest, mesh, axes)
                    out = ops.fp8_round(mine, largest, "e4m3", granule)
                    passed = ops.fp8_grad(mine * 1, None, "e5m2", granule, mesh, axes)
                    assert torch.equal(passed, mine)
                    grads = (torch.autograd.grad(y, mine, grad)[0] for y in (out, passed))
                    return out.detach(), *grads, ops.fp8_round_grad(grad, None, "e5m2", granule, mesh, axes)

                outs, straight, *ways = on_ranks(n, work)
                same(outs, whole, Shard(0), gradient=False)
                same(straight, g, Shard(0), gradient=True)
                for each in ways:
                    same(each, of_g, Shard(0), gradient=True)
