"""Products of numbers that are rounded to 8 bits, of layers and of experts, against those of the rounded numbers."""

# ruff: noqa: B023 (functions of loop variables run at once)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.features.fp8.recipe import RECIPES, along
from shardc.ir.placement import Partial, PartialGrad, Placement, Replicate, Shard
from shardc.ir.shard_chunks import chunks
from shardc.runtime.mesh.loopback import LoopbackMesh
from tests.differentiable import ops
from tests.runtime.ops.definitions import RANKS, close, numbers, of, on_ranks, strided

NARROW = (torch.float64, torch.float32, torch.bfloat16)
WHOLE = Replicate()


def part(x: Tensor, placement: Placement, n: int, rank: int) -> Tensor:
    return strided(chunks(x, placement, n)[rank] if isinstance(placement, Shard) else x)


def scales(amax: Tensor, placement: Placement, n: int, rank: int) -> Tensor:
    """Of a part of a tensor; a dim with one scale for all of it keeps that."""
    split = isinstance(placement, Shard) and amax.shape[placement.dim] > 1
    return part(amax, placement if split else WHOLE, n, rank)


def joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    return torch.stack(list(parts)).double().sum(0) if isinstance(placement, Partial | PartialGrad) else parts[0]


#: How ranks split a layer: of x [rows, in], the weight [out, in], and the result [rows, out] the placements, and of the
#: gradients of x and the weight.
LAYERS: tuple[tuple[Placement, ...], ...] = (
    (Shard(0), WHOLE, Shard(0), Shard(0), PartialGrad()),
    (WHOLE, Shard(0), Shard(1), PartialGrad(), Shard(0)),
    (Shard(1), Shard(1), Partial(), Shard(1), Shard(1)),
)


def other_way(placement: Placement) -> Placement:
    """Of a weight [in, out]."""
    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def of_bytes(message: Tensor, x: Tensor, granule: Sequence[int]) -> Tensor:
    """The numbers that a message says: a byte for each in float8, and behind them one for each granule: the binary
    logarithm of what they were multiplied by.
    """
    data, powers = message[: x.numel()].view(torch.float8_e4m3fn), message[x.numel() :].view(torch.int8)
    sizes = [size // (g or size) for size, g in zip(x.shape, granule, strict=True)]
    factors = torch.pow(2.0, -powers.double()).view(sizes)
    for d, (size, of_granule) in enumerate(zip(x.shape, granule, strict=True)):
        factors = factors.repeat_interleave(of_granule or size, d)
    return (data.double().view(x.shape) * factors).to(x.dtype)


@of("fp8_linear", "fp8_pack", "fp8_grad_of_data", "fp8_grad_of_weight")
def products() -> None:
    """Each recipe, each way to split a layer; the weight is rounded by the op, x and the gradient are before it."""
    for n in RANKS:
        for name, recipe in RECIPES.items():
            for transposed in (False, True):
                for dtype in NARROW if n == 2 else NARROW[:1]:
                    size = 32 * n  # a block of mxfp8 a rank
                    x, w, g = (
                        numbers(s, dtype, seed=i) / 3 for i, s in enumerate(((4 * n, size), (size,) * 2, (4 * n, size)))
                    )
                    stored = w.T if transposed else w
                    w_granule, x_granule = recipe.of_weight(transposed), along(recipe.x, 2)
                    amax = ops.fp8_amax(stored, w_granule)
                    x8 = ops.fp8_round(x, ops.fp8_amax(x, x_granule), "e4m3", x_granule)
                    w8 = ops.fp8_round(stored, amax, "e4m3", w_granule)
                    g8 = ops.fp8_round_grad(g, amax if recipe.rows else None, recipe.gradient, along(recipe.grad, 2))
                    message = ops.fp8_pack(x8, "e4m3", x_granule)
                    assert message.dtype is torch.uint8
                    assert torch.equal(of_bytes(message, x8, x_granule), x8)
                    assert torch.equal(ops.fp8_pack(x, "e4m3", x_granule, ops.fp8_amax(x, x_granule)), message)
                    leaves = [t.double().requires_grad_() for t in (x8, w8.T if transposed else w8)]
                    want = leaves[0] @ leaves[1].T
                    of_x, of_w = torch.autograd.grad(want, leaves, g8.double())

                    for in_x, in_w, out, back_x, back_w in LAYERS:
                        in_stored = other_way(in_w) if transposed else in_w

                        def work(mesh: LoopbackMesh) -> tuple[Tensor, ...]:
                            rank = mesh.rank
                            mine, weight, grad = (
                                part(x8, in_x, n, rank),
                                part(stored, in_stored, n, rank),
                                part(g8, out, n, rank),
                            )
                            largest = scales(amax, in_stored, n, rank)
                            kept = ops.fp8_pack(mine, "e4m3", x_granule)
                            assert torch.equal(of_bytes(kept, mine, x_granule), mine)
                            shape = (largest, name, transposed)
                            found = []
                            for bytes_ in (None, kept):  # with bytes, x is what gradients flow through
                                leaf = (mine.clone() if bytes_ is None else torch.zeros_like(mine)).requires_grad_()
                                of_weight = weight.clone().requires_grad_()
                                y = ops.fp8_linear(leaf, of_weight, *shape, bytes_)
                                found += [y.detach(), *torch.autograd.grad(y, (leaf, of_weight), grad)]
                                data = mine if bytes_ is None else bytes_
                                found.append(ops.fp8_grad_of_data(grad, weight, *shape, tuple(mine.shape)))
                                found.append(ops.fp8_grad_of_weight(grad, data, *shape[1:], tuple(mine.shape)))
                            return tuple(found)

                        wanted = [
                            (want.detach(), out),
                            *[
                                (of_x, back_x),
                                (of_w.T if transposed else of_w, other_way(back_w) if transposed else back_w),
                            ]
                            * 2,
                        ]
                        for parts, (whole, placement) in zip(on_ranks(n, work), wanted * 2, strict=True):
                            assert all(p.dtype == dtype for p in parts)
                            largest = float(whole.abs().max())
                            close(joined(parts, placement) / largest, whole / largest, dtype)


@of("fp8_experts", "fp8_experts_apply")
def experts() -> None:
    """Two layers of rounded numbers for each expert, in a loop; ranks split tokens, or the columns between."""
    for n in RANKS:
        for transposed in (False, True):
            for dtype in NARROW[:2]:
                count, k, h, inner, tokens = 3, 2, 5, 4 * n, 2 * n
                granule = (1, 0, 1) if transposed else (1, 1, 0)
                x, weights = numbers((tokens, h), dtype) / 3, numbers((tokens, k), dtype, seed=1) / 4
                index = torch.stack([torch.arange(tokens) % count, (torch.arange(tokens) + 1) % count], 1)
                up, down = numbers((count, inner, h), dtype, seed=2) / 3, numbers((count, h, inner), dtype, seed=3) / 3
                up[:, :4] *= 2.0**-20  # the first rank's are nothing beside the others'
                down[:, :, :4] *= 2.0**8
                if transposed:
                    up, down = up.mT.contiguous(), down.mT.contiguous()
                g = numbers((tokens, h), dtype, seed=4)
                amaxes = [ops.fp8_amax(w, granule) for w in (up, down)]
                x8 = ops.fp8_round(x, ops.fp8_amax(x, (1, 0)), "e4m3", (1, 0))
                leaves = [t.clone().requires_grad_() for t in (x8, weights, up, down)]

                def layer(rows: Tensor, weight: Tensor, amax: Tensor) -> Tensor:
                    y = ops.fp8_linear(rows, weight, amax, "fp8-rowwise", transposed)
                    return ops.fp8_grad(y, amax.reshape(-1, 1), "e4m3", (1, 0))

                want = torch.zeros(tokens, h, dtype=dtype)
                for e in range(count):
                    token, choice = (index == e).nonzero(as_tuple=True)
                    between = torch.relu(layer(leaves[0][token], leaves[2][e], amaxes[0][e]))
                    between = ops.fp8_round(between, ops.fp8_amax(between, (1, 0)), "e4m3", (1, 0))
                    made = layer(between, leaves[3][e], amaxes[1][e])
                    want = want.index_add(0, token, made * leaves[1][token, choice][:, None])
                wanted = torch.autograd.grad(want, leaves, g)
                columns = (Shard(2), Shard(1)) if transposed else (Shard(1), Shard(2))
                splits: tuple[tuple[Placement, ...], ...] = (
                    (Shard(0), WHOLE, WHOLE, Shard(0), Shard(0), Shard(0), PartialGrad(), PartialGrad()),
                    (WHOLE, *columns, Partial(), PartialGrad(), PartialGrad(), *columns),
                )
                for rows, in_up, in_down, out, *back in splits:
                    axes = ("a",) if rows is WHOLE else ()

                    def work(mesh: LoopbackMesh) -> Any:
                        r = mesh.rank
                        mine = [
                            part(t, p, n, r).requires_grad_()
                            for t, p in zip((x8, weights, up, down), (rows, rows, in_up, in_down), strict=True)
                        ]
                        to = part(index, rows, n, r)
                        largest = [scales(a, p, n, r) for a, p in zip(amaxes, (in_up, in_down), strict=True)]
                        how = (None, None, "relu(x)", transposed, *largest, mesh, axes)
                        grad = part(g, rows, n, r)
                        whole = ops.fp8_experts(mine[0], to, *mine[1:], *how)
                        order, counts = ops.experts_route(to, None, (), count, ())
                        sent = ops.experts_send(mine[0], order, counts, None, (), k)
                        apart = ops.experts_combine(
                            ops.fp8_experts_apply(sent, counts, *mine[2:], *how), order, mine[1]
                        )
                        return tuple(
                            t for y in (whole, apart) for t in (y.detach(), *torch.autograd.grad(y, mine, grad))
                        )

                    for parts, whole, placement in zip(
                        on_ranks(n, work), (want.detach(), *wanted) * 2, (out, *back) * 2, strict=True
                    ):
                        close(joined(parts, placement), whole, dtype)
