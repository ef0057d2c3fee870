"""Losses, normalisers and experts in parts, against the whole."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardc.errors import ShardcError
from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, trim, unchunk, widen
from shardc.runtime.mesh.loopback import LoopbackMesh
from tests.differentiable import ops
from tests.runtime.ops.definitions import FLOATS, RANKS, close, numbers, of, on_ranks, strided, wide


@of("nll", "nll_stats", "nll_top", "nll_parts", "nll_join")
def loss() -> None:
    for n in RANKS:
        for dtype in FLOATS:
            for shape, ignored in (((5, 4 * n), -100), ((2, 4 * n, 3), -7), ((4 * n,), -100)):
                c = min(len(shape) - 1, 1)
                # as large as in float32 exponentials would overflow without the maximum
                logits = (numbers(shape, dtype) * (30 if dtype in FLOATS[:2] else 1)).requires_grad_()
                target = numbers(shape[:c] + shape[c + 1 :], torch.int64).abs()
                if c:
                    target.view(-1)[1] = ignored
                want = F.cross_entropy(logits.to(wide(dtype)), target, ignore_index=ignored, reduction="none")
                g = numbers(want.shape, dtype, seed=2)
                (of_logits,) = torch.autograd.grad(want, logits, g.to(want.dtype))
                close(ops.nll(logits, target, ignored).detach(), want.detach(), dtype)
                close(torch.autograd.grad(ops.nll(logits, target, ignored), logits, g)[0], of_logits, dtype)

                def work(mesh: LoopbackMesh) -> Any:
                    mine = strided(logits.detach().chunk(n, c)[mesh.rank]).requires_grad_()
                    stats = ops.nll_stats(mine, target, mesh, (("a", 1),), shape[c], ignored)
                    assert torch.equal(ops.nll_top(stats), mine.detach().amax(c))
                    top = ops.all_reduce_max(ops.nll_top(stats), mesh, ("a",))
                    parts = ops.nll_parts(stats, top)
                    out = ops.nll_join(ops.all_reduce(parts, mesh, ("a",)), target, ignored)
                    assert not top.requires_grad
                    return out.detach(), *torch.autograd.grad(out, mine, g)

                outs, grads = on_ranks(n, work)
                for out in outs:
                    close(out, want.detach(), dtype)
                close(torch.cat(grads, c), of_logits, dtype)


def chunked_loss() -> None:
    for n in (1, *RANKS):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            rows, width, classes = 6, 3, 4 * n - 1  # with one of padding
            x, w, b = (
                numbers(shape, dtype, seed=i) / 2
                for i, shape in enumerate(((rows, width), (classes, width), (classes,)))
            )
            target = numbers((rows,), torch.int64).abs().clamp_(max=classes - 1)
            target[1] = -100
            leaves = [t.clone().requires_grad_() for t in (x, w, b)]
            logits = F.linear(*leaves)
            want = F.cross_entropy(logits.to(wide(dtype)), target, reduction="none")
            g = numbers(want.shape, want.dtype, seed=3)
            wanted = torch.autograd.grad(want, leaves, g)
            s = Shard(0, 1, (), 1)

            def work(mesh: LoopbackMesh) -> Any:
                held = [strided(chunks(widen(p, s), s, n)[mesh.rank]) for p in (w, b)]
                mine = [p.clone().requires_grad_() for p in (x, *held)]
                padding = (1, (("a", 1),), classes, 1, 1, -math.inf)
                loss: Any = ("ops.nll_stats", ("%5", "%1", "%mesh", (("a", 1),), classes + 1), ())
                if n == 1:
                    loss = ("ops.nll", ("%5", "%1"), ())
                body = (
                    ("aten.linear.default", ("%0", "%2", "%3"), ()),
                    ("ops.fill_padding", ("%4", "%mesh", *padding), ()),
                    loss,
                )
                (out,) = ops.in_chunks(2, body, ((6, int(n > 1)),), (mine[0], target), mine[1:], mesh)
                if n > 1:
                    top = ops.all_reduce_max(ops.nll_top(out), mesh, ("a",))
                    out = ops.nll_join(ops.all_reduce(ops.nll_parts(out, top), mesh, ("a",)), target)
                return out.detach(), *torch.autograd.grad(out, mine, g.to(out.dtype))

            outs, of_x, of_w, of_b = on_ranks(n, work)
            for out in outs:
                close(out, want.detach(), dtype)
            close(torch.stack(of_x).double().sum(0), wanted[0], dtype)
            for found, whole in ((of_w, wanted[1]), (of_b, wanted[2])):
                close(trim(unchunk(list(found), s), s), whole, dtype)


@of("in_chunks")
def rows_in_chunks() -> None:
    """A product, and what reduces its classes; a last chunk of another size, and a row value that has a gradient."""
    chunked_loss()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w, top = (numbers(s, dtype, seed=i) / 2 for i, s in enumerate(((7, 3), (5, 3), (7, 1))))
        body = (
            ("aten.linear.default", ("%0", "%2"), ()),
            ("aten.mul.Tensor", ("%3", "%1"), ()),
            ("aten.logsumexp.default", ("%4", [1]), ()),
            ("aten.sum.dim_IntList", ("%3", [1], True), (("dtype", torch.float64),)),
        )
        leaves = [t.clone().requires_grad_() for t in (x, top, w)]
        z = F.linear(leaves[0], leaves[2])
        want = torch.logsumexp(z * leaves[1], 1), z.sum(1, keepdim=True, dtype=torch.float64)
        gs = [numbers(y.shape, y.dtype, seed=5 + i) for i, y in enumerate(want)]
        wanted = torch.autograd.grad(want, leaves, gs)
        for number in (1, 3, 7, 100):
            mine = [t.clone().requires_grad_() for t in (x, top, w)]
            out = ops.in_chunks(number, body, ((5, 0), (6, 0)), mine[:2], mine[2:], None)
            for y, right in zip(out, want, strict=True):
                close(y.detach(), right.detach(), dtype)
            for g, right in zip(torch.autograd.grad(out, mine, gs), wanted, strict=True):
                close(g, right, dtype)
        assert not ops.in_chunks(2, body, ((5, 0),), mine[:2], mine[2:], None, trains=False)[0].requires_grad
    with pytest.raises(ShardcError, match=r"aten.cumsum.default is not an op on rows"):
        ops.in_chunks(2, (("aten.cumsum.default", ("%0", 0), ()),), ((1, 0),), [x], [], None)


@of("largest", "sum_exp", "log_sum")
def normaliser() -> None:
    for n in RANKS:
        for dtype in FLOATS:
            x = numbers((3, 4 * n), dtype)
            x[0, 4:] = -math.inf  # ranks with nothing but -inf
            leaf = x.clone().requires_grad_()
            assert torch.equal(ops.largest(x, [1]), x.amax(1, keepdim=True).to(wide(dtype)))
            want = torch.logsumexp(leaf.to(wide(dtype)), 1, keepdim=True)
            g = numbers((3, 1), want.dtype, seed=3)
            (of_x,) = torch.autograd.grad(want, leaf, g)

            def work(mesh: LoopbackMesh) -> Any:
                mine = strided(x.chunk(n, 1)[mesh.rank]).requires_grad_()
                top = ops.all_reduce_max(ops.largest(mine, [1]), mesh, ("a",))
                assert not top.requires_grad
                out = ops.log_sum(ops.all_reduce(ops.sum_exp(mine, top, [1]), mesh, ("a",)), top)
                return out.detach(), *torch.autograd.grad(out, mine, g)

            outs, grads = on_ranks(n, work)
            for out in outs:
                close(out, want.detach(), dtype)
            close(torch.cat(grads, 1), of_x, dtype)


# --- experts


@of("experts", "experts_route", "experts_send", "experts_apply", "experts_return", "experts_combine")
def exchanged_experts() -> None:
    """A loop over all experts on all tokens, against experts that ranks split, padded, and tokens that come to them."""
    for n in RANKS:
        for dtype in (torch.float64, torch.float32):
            count, k, h, inner = 2 * n - 1, 2, 3, 4  # one of padding
            x, weights = numbers((3 * n, h), dtype), numbers((3 * n, k), dtype, seed=1) / 4
            index = torch.stack([torch.arange(3 * n) % count, (torch.arange(3 * n) + 1) % count], 1)
            index[2, 1] = -1  # goes nowhere
            up, down = numbers((count, inner, h), dtype, seed=2) / 4, numbers((count, h, inner), dtype, seed=3) / 4
            leaves = [t.clone().requires_grad_() for t in (x, weights, up, down)]
            kept = (index >= 0).to(dtype) * leaves[1]
            each = torch.stack([torch.relu(leaves[0] @ leaves[2][e].T) @ leaves[3][e].T for e in range(count)], 1)
            want = (each.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, h)) * kept[..., None]).sum(1)
            g = numbers(want.shape, dtype, seed=4)
            wanted = torch.autograd.grad(want, leaves, g)
            one = [t.clone().requires_grad_() for t in (x, weights, up, down)]
            alone = ops.experts(one[0], index, *one[1:], None, None, "relu(x)")
            close(alone.detach(), want.detach(), dtype)
            for a, b in zip(torch.autograd.grad(alone, one, g), wanted, strict=True):
                close(a, b, dtype)
            s = Shard(0, 1, (), 1)

            def work(mesh: LoopbackMesh) -> Any:
                tokens = [t.chunk(n)[mesh.rank] for t in (x, weights)]
                held = [chunks(widen(t, s), s, n)[mesh.rank] for t in (up, down)]
                mine = [strided(t).requires_grad_() for t in (*tokens, *held)]
                order, counts = ops.experts_route(
                    index.chunk(n)[mesh.rank], mesh, ("a",), count, (("a", 1),), 1, 1, tag="route"
                )
                sent = ops.experts_send(mine[0], order, counts, mesh, ("a",), 2, tag="send")
                made = ops.experts_apply(sent, counts, mine[2], mine[3], None, None, "relu(x)")
                back = ops.experts_return(made, counts, mesh, ("a",), tag="return")
                out = ops.experts_combine(back, order, mine[1])
                return out.detach(), *torch.autograd.grad(out, mine, g.chunk(n)[mesh.rank])

            outs, of_x, of_weights, of_up, of_down = on_ranks(n, work)
            for found, whole in ((outs, want.detach()), (of_x, wanted[0]), (of_weights, wanted[1])):
                close(torch.cat(found), whole, dtype)
            for found, whole in ((of_up, wanted[2]), (of_down, wanted[3])):
                close(trim(unchunk(list(found), s), s), whole, dtype)
