"""Send tokens to the experts that a router chose (expert parallelism), and sum their weighted results.

    order, counts = experts_route(index, ...)       which (token, choice) pairs go where, sorted by rank and expert;
                                                    counts are exchanged
    rows = experts_send(x, order, counts, ...)      all_to_all of just these rows; they come sorted by expert
    made = experts_apply(rows, counts, up, ...)     products of the experts that are here: products.py
    back = experts_return(made, counts, ...)        all_to_all back
    y    = experts_combine(back, order, weights)    weighted sum of the choices of each token

Each is differentiable, and its backward is the transposed exchange. Where nothing is sent, `experts` of products.py
does all of it. How many rows a rank gets depends on the router; nothing is padded or dropped, so the result is exact
for any routing.

    x        f[t, h]            tokens
    index    i64[t, k]          experts of each token, 0 .. e-1; a choice outside of that adds nothing (a dropped
                                token)
    weights  f[t, k]            of the choices
    up       f[e, m, h]         first product of each expert; transposed: f[e, h, m]. m: what the activation takes apart
    down     f[e, h, i]         second one; transposed: f[e, i, h]
    order    i64[n]             the pairs t * k + choice that go anywhere, sorted by where they go
    counts   i64[2, ranks, e']  rows that are sent to, and received from, every rank, by the experts there / here; on
                                the CPU, which has to know how much is sent: the one wait for the device in a layer

After Lepikhin et al. 2020, "GShard"; dropless as in Gale et al. 2022, "MegaBlocks".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardc.ir.mesh import Mesh as RankLayout
from shardc.ir.placement import Layout, Shard
from shardc.runtime.mesh.base import Work
from shardc.runtime.ops.convert import Started
from shardc.runtime.ops.host_copy import to_device, to_host
from shardc.runtime.ops.with_backward import with_backward
from shardc.torch_private import FakeTensor

Mesh = Any
Digits = Sequence[tuple[Any, ...]]


def experts_keep(index: Tensor, experts: int, limit: int) -> Tensor:
    """Replace choices beyond the first `limit` of an expert by -1: i64[t, k].

    They are counted by position: token by token, and in each choice by choice. index: i64[t, k], or i64[chunks, t, k]:
    each chunk separately.
    """
    flat = index.reshape(-1)
    chunks = index.shape[0] if index.dim() == 3 else 1
    inside = (flat >= 0) & (flat < experts)
    slot = torch.where(inside, flat, experts)
    if chunks > 1:
        slot = (slot.view(chunks, -1) + torch.arange(chunks, device=flat.device).unsqueeze(1) * (experts + 1)).view(-1)
    order = slot.argsort(stable=True)
    sizes = _count(slot, chunks * (experts + 1))
    first = sizes.cumsum(0) - sizes  # where each expert's choices begin, sorted
    before = torch.arange(flat.numel(), device=flat.device) - first[slot[order]]
    return torch.where(inside & (torch.empty_like(flat).index_copy_(0, order, before) < limit), flat, -1).view_as(index)


def _count(slot: Tensor, slots: int) -> Tensor:
    """Count each slot in i64[n]: i64[slots]. (`bincount` would wait for a GPU, to know its result's size.)"""
    return torch.zeros(slots, dtype=torch.int64, device=slot.device).scatter_add_(0, slot, torch.ones_like(slot))


# --- routing ----------------------------------------------------------------------------------------------------------


def experts_route(
    index: Tensor,
    mesh: Mesh,
    axes: Sequence[str],
    experts: int,
    digits: Digits,
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> tuple[Tensor, Tensor]:
    """Return (order, counts). The ranks of `axes` exchange rows; each gets only those of its experts.

    experts: the number of all. digits: (axis, split, *sections) of each shard of the experts' dim, padding, blocks: its
    own (shardc.ir.placement.Shard). Choices of experts that no rank of `axes` has (those of another tensor-parallel
    rank) go nowhere.
    """
    flat = index.reshape(-1)
    if isinstance(index, FakeTensor):
        ranks, local = _sizes(mesh, tuple(axes), experts, digits, padding, blocks)
        if ranks > 1:
            mesh.all_to_all_rows(flat.new_empty(ranks, local), ([], []), tuple(axes), tag=tag)
        return torch.empty_like(flat), torch.empty(2, ranks, local, dtype=torch.int64)
    place, ranks, local = _places(mesh, tuple(axes), experts, tuple(map(tuple, digits)), padding, blocks, flat.device)
    inside = (flat >= 0) & (flat < experts)
    slot = place[torch.where(inside, flat, experts)]
    order = slot.argsort(stable=True)
    sent = _count(slot, ranks * local + 1)[: ranks * local].view(ranks, local)
    received = sent if ranks == 1 else mesh.all_to_all_rows(sent, ([], []), tuple(axes), tag=tag)
    counts = to_host(torch.stack([sent, received]))
    if mesh is not None and mesh.step.routings is not None:
        chosen = _count(torch.where(inside, flat, experts), experts + 1)
        mesh.step.routings.append((tag, chosen, int(counts[1].sum())))
    return order[: int(counts[0].sum())], counts


def _places(
    mesh: Mesh,
    axes: tuple[str, ...],
    experts: int,
    digits: tuple[tuple[Any, ...], ...],
    padding: int,
    blocks: int,
    device: torch.device,
) -> tuple[Tensor, int, int]:
    """Return (place, ranks, experts of each).

    place[e] = rank in the group of `axes` * experts of each + its number there; for experts that no rank of the group
    has, and as entry `experts`, the number after all places.
    """
    if not digits:
        return torch.arange(experts + 1, device=device), 1, experts
    return _places_on(mesh.layout, mesh.rank, axes, experts, digits, padding, blocks, device)


@lru_cache(maxsize=1024)
def _places_on(
    layout: RankLayout,
    rank: int,
    axes: tuple[str, ...],
    experts: int,
    digits: tuple[tuple[Any, ...], ...],
    padding: int,
    blocks: int,
    device: torch.device,
) -> tuple[Tensor, int, int]:
    """Compute `_places` once: it is the same for every layer and every step."""
    split = _layout(digits, padding, blocks)
    numbers = torch.arange(1, experts + 1)  # padding is zero
    group = layout.group(rank, axes) if axes else (rank,)
    table = torch.stack([split.local(numbers, layout, layout.coords(r)) for r in group])
    place = torch.full((experts + 1,), table.numel())
    real = table > 0
    place[table[real] - 1] = torch.arange(table.numel()).view_as(table)[real]
    return to_device(place, device), len(group), table.shape[1]


def _layout(digits: Digits, padding: int, blocks: int) -> Layout:
    return Layout(tuple((a, Shard.of_signed(0, split, sections, padding, blocks)) for a, split, *sections in digits))


# --- tensors without data (a dry run): every expert gets as much as any other ---------------------------------------


def _sizes(
    mesh: Mesh, axes: tuple[str, ...], experts: int, digits: Digits, padding: int, blocks: int
) -> tuple[int, int]:
    """Return (ranks, experts of each), as `_places`."""
    if not digits:
        return 1, experts
    return mesh.members(axes), _layout(digits, padding, blocks).local_shape((experts,), mesh.layout)[0]


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (i < rows % parts) for i in range(parts)]


def _by_rank(rows: Tensor, counts: Tensor) -> tuple[list[int], list[int]]:
    """Return the numbers of rows sent to and received from every rank; `rows` are those of this one."""
    if isinstance(counts, FakeTensor):
        sizes = _even(rows.shape[0], counts.shape[1])
        return sizes, sizes
    sent, received = counts.sum(-1).tolist()
    return sent, received


def rows_by_expert(rows: Tensor, counts: Tensor) -> list[int]:
    """Return the number of rows of each expert here."""
    if isinstance(counts, FakeTensor):
        return _even(rows.shape[0], counts.shape[2])
    by_expert: list[int] = counts[1].sum(0).tolist()
    return by_expert


# --- exchange ---------------------------------------------------------------------------------------------------------


def _sorted(rows: Tensor, received: Tensor, *, back: bool) -> Tensor:
    """Reorder rows by rank, then expert -> by expert, then rank; back: the reverse.

    received: i64[ranks, e'], on the CPU. Blocks of rows change places, and keep their order inside: each row moves as
    far as its block does.
    """
    ranks, experts = received.shape
    if ranks == 1 or experts == 1:
        return rows
    if isinstance(received, FakeTensor):
        return torch.empty_like(rows)
    by_rank = received.flatten()
    start_by_rank = by_rank.cumsum(0) - by_rank
    by_expert = received.t().flatten()
    start_by_expert = (by_expert.cumsum(0) - by_expert).view(experts, ranks).t().flatten()
    distance, sizes = to_device(torch.stack([start_by_expert - start_by_rank, by_rank]), rows.device)
    n = rows.shape[0]
    place = torch.arange(n, device=rows.device) + distance.repeat_interleave(sizes, output_size=n)
    return rows.index_select(0, place) if back else torch.empty_like(rows).index_copy_(0, place, rows)


def _route(rows: Tensor, counts: Tensor, mesh: Mesh, axes: tuple[str, ...], direction: str, tag: str) -> Tensor:
    """Send rows to the ranks that have the experts; return the received ones sorted by expert."""
    if not axes:
        return rows
    came = mesh.all_to_all_rows(rows, _by_rank(rows, counts), axes, direction=direction, tag=tag)
    return _sorted(came, counts[1], back=False)


def _back(rows: Tensor, counts: Tensor, mesh: Mesh, axes: tuple[str, ...], direction: str, tag: str) -> Tensor:
    """Send rows to the ranks that have the tokens; return the received ones in their `order`."""
    if not axes:
        return rows
    sent, received = _by_rank(rows, counts)
    rows = _sorted(rows, counts[1], back=True)
    result: Tensor = mesh.all_to_all_rows(rows, (received, sent), axes, direction=direction, tag=tag)
    return result


def _start_route(rows: Tensor, counts: Tensor, mesh: Mesh, axes: tuple[str, ...], direction: str, tag: str) -> Started:
    if not axes:
        return Started(Work(), lambda: rows)
    sent, received = _by_rank(rows, counts)
    into = rows.new_empty(sum(received), *rows.shape[1:])
    work = mesh.start_all_to_all_rows(rows.contiguous(), into, (sent, received), axes, direction=direction, tag=tag)
    return Started(work, lambda: _sorted(into, counts[1], back=False))


def _start_back(rows: Tensor, counts: Tensor, mesh: Mesh, axes: tuple[str, ...], direction: str, tag: str) -> Started:
    if not axes:
        return Started(Work(), lambda: rows)
    sent, received = _by_rank(rows, counts)
    rows = _sorted(rows, counts[1], back=True).contiguous()
    into = rows.new_empty(sum(sent), *rows.shape[1:])
    work = mesh.start_all_to_all_rows(rows, into, (received, sent), axes, direction=direction, tag=tag)
    return Started(work, lambda: into)


def _chosen(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Return the token of each pair: f[pairs, h]."""
    return x.index_select(0, order // k if k > 1 else order)


def _by_token(rows: Tensor, order: Tensor, tokens: int, k: int) -> Tensor:
    """Sum the pairs of each token, from rows in their `order`: f[tokens, h]."""
    pairs = by_pair(rows, order, tokens * k)
    return pairs.view(tokens, k, rows.shape[1]).sum(1) if k > 1 else pairs


def by_pair(rows: Tensor, order: Tensor, n: int) -> Tensor:
    """Return the rows in the order of pairs [n, h], with zeros for those that went nowhere."""
    whole = rows.new_empty if order.numel() == n else rows.new_zeros
    return whole(n, rows.shape[1]).index_copy_(0, order, rows)


def experts_send(
    x: Tensor, order: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], k: int, *, tag: str = ""
) -> Tensor:
    """Return all ranks' tokens for the experts here, sorted by expert: f[rows, h]. k: choices a token."""
    axes, tokens = tuple(axes), x.shape[0]

    def forward(x: Tensor, order: Tensor, counts: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return _route(_chosen(x, order, k), counts, mesh, axes, "forward", tag), (order, counts)

    def backward(needs: Any, g: Tensor, order: Tensor, counts: Tensor) -> tuple[Tensor]:
        return (experts_send_transposed(g, order, counts, mesh, axes, k, tokens=tokens, tag=tag),)

    result: Tensor = with_backward(forward, backward, x, order, counts)
    return result


def experts_return(rows: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], *, tag: str = "") -> Tensor:
    """Return the experts' results for this rank's pairs, in their `order`: f[pairs, h]."""
    axes = tuple(axes)

    def backward(needs: Any, g: Tensor, counts: Tensor) -> tuple[Tensor]:
        return (experts_return_transposed(g, counts, mesh, axes, tag=tag),)

    result: Tensor = with_backward(
        lambda rows, counts: (_back(rows, counts, mesh, axes, "forward", tag), (counts,)), backward, rows, counts
    )
    return result


# --- single directions, at once or started, for backward graphs (shardc.runtime.ops.one_way)


def experts_send_start(
    x: Tensor, order: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], k: int, *, tag: str = ""
) -> Started:
    """Start `experts_send`."""
    return _start_route(_chosen(x, order, k), counts, mesh, tuple(axes), "forward", tag)


def experts_send_transposed(
    g: Tensor, order: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], k: int, *, tokens: int, tag: str = ""
) -> Tensor:
    """Compute the backward of `experts_send`. tokens: their number."""
    return _by_token(_back(g, counts, mesh, tuple(axes), "backward", tag), order, tokens, k)


def experts_send_transposed_start(
    g: Tensor, order: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], k: int, *, tokens: int, tag: str = ""
) -> Started:
    """Start the backward of `experts_send`."""
    begun = _start_back(g, counts, mesh, tuple(axes), "backward", tag)
    return Started(begun.work, lambda: _by_token(begun.result(), order, tokens, k))


def experts_return_start(rows: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], *, tag: str = "") -> Started:
    """Start `experts_return`."""
    return _start_back(rows, counts, mesh, tuple(axes), "forward", tag)


def experts_return_transposed(g: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], *, tag: str = "") -> Tensor:
    """Compute the backward of `experts_return`."""
    return _route(g, counts, mesh, tuple(axes), "backward", tag)


def experts_return_transposed_start(
    g: Tensor, counts: Tensor, mesh: Mesh, axes: Sequence[str], *, tag: str = ""
) -> Started:
    """Start the backward of `experts_return`."""
    return _start_route(g, counts, mesh, tuple(axes), "backward", tag)


def weighted_sum(each: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of f[t, k, h] over k, weighted by f[t, k]: f[t, h]."""
    if weights.dtype == each.dtype:
        return torch.bmm(weights.unsqueeze(1), each).squeeze(1)
    return (each * weights.unsqueeze(-1)).sum(1).to(each.dtype)


def _combine(rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    t, k = weights.shape
    pairs = by_pair(rows, order, t * k).view(t, k, -1)
    return weighted_sum(pairs, weights), (pairs, order, weights)


def _combine_backward(
    needs: Sequence[bool], g: Tensor, each: Tensor, order: Tensor, weights: Tensor
) -> tuple[Tensor | None, ...]:
    k = weights.shape[1]
    rows = of_weights = None
    if needs[0]:
        chosen = weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        rows = (g.index_select(0, order // k) * chosen).to(each.dtype)
    if needs[2]:
        wide = torch.promote_types(g.dtype, weights.dtype)
        of_weights = torch.bmm(each.to(wide), g.to(wide).unsqueeze(-1)).squeeze(-1).to(weights.dtype)
    return rows, None, of_weights


def experts_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum weight * row over each token's choices: f[t, h]. Choices that went nowhere add nothing."""
    result: Tensor = with_backward(_combine, _combine_backward, rows, order, weights)
    return result
