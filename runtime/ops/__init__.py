"""What a local program calls: conversions between placements, each with its transpose (DESIGN 2.3), and the loss on
split
classes.

x is this rank's tensor, mesh the runtime mesh (shardc.runtime.mesh), axis / axes name mesh axes. `dim`, `split`,
`sections` say which digit of the *local* dim is cut or gathered (shardc.ir.placement.Shard); padding, blocks: what the
whole dim lacks of its padded size (0 where another axis still splits it). tag: the graph node's name, for the record of
what ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.ir.placement import Shard, trim, widen
from shardc.runtime.ops import digits
from shardc.runtime.ops.expert_parallel import (
    experts,
    experts_apply,
    experts_combine,
    experts_keep,
    experts_return,
    experts_route,
    experts_send,
)
from shardc.runtime.ops.local_math import (
    batch_stat,
    embedding_partial,
    fill_padding,
    nll,
    nll_join,
    nll_max,
    nll_parts,
    partial_mean,
    select_partial,
    summed,
    total,
)
from shardc.runtime.ops.random_ops import random
from shardc.runtime.ops.zero import gather_start, gather_wait, updated
from shardc.runtime.rng import dropout, dropout_mask, masked

__all__ = [
    "all_gather",
    "all_gather_partial_grad",
    "all_reduce",
    "all_reduce_max",
    "all_to_all",
    "batch_stat",
    "dropout",
    "dropout_mask",
    "embedding_partial",
    "experts",
    "experts_apply",
    "experts_combine",
    "experts_keep",
    "experts_return",
    "experts_route",
    "experts_send",
    "fill_padding",
    "first_grad",
    "gather_start",
    "gather_wait",
    "masked",
    "nll",
    "nll_join",
    "nll_max",
    "nll_parts",
    "partial_grad_to_partial",
    "partial_mean",
    "random",
    "reduce_scatter",
    "select_partial",
    "shard",
    "shard_partial_grad",
    "sum_grad",
    "summed",
    "to_partial",
    "total",
    "unshard_partial",
    "updated",
]

Mesh = Any  # shardc.runtime.mesh's meshes; a protocol would only repeat their docstrings
Sections = tuple[int, ...]


# --- conversions ------------------------------------------------------------------------------------------------------


def _gather(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return trim(digits.unstack(mesh.all_gather(x, axis, direction=direction, tag=tag), s), s)


def _scatter(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return mesh.reduce_scatter(digits.stack(widen(x, s), s, mesh.size(axis)), axis, direction=direction, tag=tag)  # type: ignore[no-any-return]


def _cut(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return digits.cut(widen(x, s), s, mesh.size(axis), mesh.coordinate(axis))


def _pad(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return trim(digits.pad(x, s, mesh.size(axis), mesh.coordinate(axis)), s)


#: conversion of one digit -> (what forward does, its transpose)
_MOVES = {
    "all_gather": (_gather, _cut),
    "all_gather_partial_grad": (_gather, _scatter),
    "reduce_scatter": (_scatter, _gather),
    "shard": (_cut, _gather),
    "shard_partial_grad": (_cut, _pad),
    "unshard_partial": (_pad, _cut),
}


class _Digit(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, mesh: Mesh, axis: str, s: Shard, tag: str) -> Tensor:
        ctx.how = kind, mesh, axis, s, tag
        return _MOVES[kind][0](x, mesh, axis, s, "forward", tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        kind, mesh, axis, s, tag = ctx.how
        return _MOVES[kind][1](g, mesh, axis, s, "backward", tag), *[None] * 5


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, old: Shard, new: Shard, tag: str) -> Tensor:
        ctx.how = mesh, axis, old, new, tag
        return _exchange(x, mesh, axis, new, old, "forward", tag)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        mesh, axis, old, new, tag = ctx.how
        return _exchange(g, mesh, axis, old, new, "backward", tag), *[None] * 5


def _exchange(x: Tensor, mesh: Mesh, axis: str, cut: Shard, join: Shard, direction: str, tag: str) -> Tensor:
    got = mesh.all_to_all(digits.stack(widen(x, cut), cut, mesh.size(axis)), axis, direction=direction, tag=tag)
    return trim(digits.unstack(got, join), join)


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str) -> Tensor:
        return mesh.all_reduce(x, axes, direction="forward", tag=tag)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None, None, None


class _SumGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str) -> Tensor:
        ctx.how = mesh, axes, tag
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        mesh, axes, tag = ctx.how
        return mesh.all_reduce(g, axes, direction="backward", tag=tag), None, None, None


class _First(Function):
    """The first rank of the axis keeps, others zero: forward or backward or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool, forth: bool, back: bool) -> Tensor:
        ctx.keep = first or not back
        return x.view_as(x) if first or not forth else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g if ctx.keep else torch.zeros_like(g), None, None, None


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def all_reduce(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """partial -> replicated. Backward: identity."""
    return _apply(_AllReduce, x, mesh, axes, tag)


def all_reduce_max(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """partial(max) -> replicated. No gradient: the result is detached."""
    return mesh.all_reduce(x.detach(), axes, op="max", direction="forward", tag=tag)  # type: ignore[no-any-return]


def all_gather(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """shard -> replicated. Backward: local slice."""
    return _apply(_Digit, x, "all_gather", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag)


def all_gather_partial_grad(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """shard -> partial_grad. Backward: reduce_scatter."""
    return _apply(
        _Digit, x, "all_gather_partial_grad", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag
    )


def reduce_scatter(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """partial -> shard. Backward: all_gather."""
    return _apply(_Digit, x, "reduce_scatter", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag)


def shard(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """replicated -> shard: local slice. Backward: all_gather."""
    return _apply(_Digit, x, "shard", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag)


def shard_partial_grad(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """partial_grad -> shard: local slice. Backward: placed among zeros."""
    return _apply(_Digit, x, "shard_partial_grad", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag)


def unshard_partial(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    sections: Sections = (),
    padding: int = 0,
    blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """shard -> partial: placed among zeros. Backward: local slice."""
    return _apply(_Digit, x, "unshard_partial", mesh, axis, Shard(dim, split, tuple(sections), padding, blocks), tag)


def all_to_all(
    x: Tensor,
    mesh: Mesh,
    axis: str,
    dim: int,
    split: int,
    to_dim: int,
    to_split: int,
    padding: int = 0,
    blocks: int = 1,
    to_padding: int = 0,
    to_blocks: int = 1,
    *,
    tag: str = "",
) -> Tensor:
    """shard(dim) -> shard(to_dim). Backward: the reverse."""
    return _apply(
        _AllToAll,
        x,
        mesh,
        axis,
        Shard(dim, split, (), padding, blocks),
        Shard(to_dim, to_split, (), to_padding, to_blocks),
        tag,
    )


def sum_grad(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """replicated -> partial_grad: identity. Backward: all_reduce."""
    return _apply(_SumGrad, x, mesh, axes, tag)


def first_grad(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """partial_grad -> replicated: identity. Backward: the first rank keeps, others zero."""
    return _apply(_First, x, mesh.coordinate(axis) == 0, False, True)


def to_partial(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """replicated -> partial: the first rank keeps, others zero. Backward: identity."""
    return _apply(_First, x, mesh.coordinate(axis) == 0, True, False)


def partial_grad_to_partial(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """partial_grad -> partial: the first rank keeps, others zero, in both directions."""
    return _apply(_First, x, mesh.coordinate(axis) == 0, True, True)
