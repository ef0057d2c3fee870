"""What a local program calls: conversions between placements, each with its transpose (DESIGN 2.3), and the loss on split classes.

x is this rank's tensor, mesh the runtime mesh (shardc.runtime.comm), axis / axes name mesh axes. `dim`, `split`, `sections` say which
digit of the *local* dim is cut or gathered (shardc.placement.Shard). tag: the graph node's name, for the record of what ran.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.placement import Shard, chunks, unchunk
from shardc.runtime.math_ops import batch_stat, embedding_partial, nll, nll_join, nll_max, nll_parts, partial_mean
from shardc.runtime.rng import dropout

__all__ = [
    "all_gather", "all_gather_varying", "all_reduce", "all_reduce_max", "all_to_all", "batch_stat", "dropout", "embedding_partial", "nll",
    "nll_join", "nll_max", "nll_parts", "partial_mean", "reduce_scatter", "shard", "shard_varying", "to_partial", "unshard_partial",
    "unvary", "vary", "varying_to_partial",
]  # fmt: skip

Mesh = Any  # shardc.runtime.comm's meshes; a protocol would only repeat their docstrings


# --- the raw moves, without gradients ---------------------------------------------------------------------------------


def _sum(x: Tensor, mesh: Mesh, axes: tuple[str, ...], direction: str, tag: str) -> Tensor:
    return mesh.all_reduce(x, axes, direction=direction, tag=tag)  # type: ignore[no-any-return]


def _gather(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return unchunk(mesh.all_gather(x.contiguous(), axis, direction=direction, tag=tag), s)


def _scatter(x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    return mesh.reduce_scatter(chunks(x, s, mesh.size(axis)), axis, direction=direction, tag=tag)  # type: ignore[no-any-return]


def _cut(x: Tensor, mesh: Mesh, axis: str, s: Shard) -> Tensor:
    return chunks(x, s, mesh.size(axis))[mesh.coordinate(axis)].contiguous()


def _pad(x: Tensor, mesh: Mesh, axis: str, s: Shard) -> Tensor:
    zero = torch.zeros_like(x)
    return unchunk([x if i == mesh.coordinate(axis) else zero for i in range(mesh.size(axis))], s)


def _first(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    return x if mesh.coordinate(axis) == 0 else torch.zeros_like(x)


# --- conversions ------------------------------------------------------------------------------------------------------


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str) -> Tensor:
        return _sum(x, mesh, axes, "forward", tag)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None, None, None


class _Vary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str) -> Tensor:
        ctx.how = mesh, axes, tag
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        mesh, axes, tag = ctx.how
        return _sum(g, mesh, axes, "backward", tag), None, None, None


class _Digit(Function):
    """Conversions of one digit: `kind` names the move forward, `_BACK` its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, mesh: Mesh, axis: str, s: Shard, tag: str) -> Tensor:
        ctx.how = kind, mesh, axis, s, tag
        return _move(_FORTH[kind], x, mesh, axis, s, "forward", tag)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        kind, mesh, axis, s, tag = ctx.how
        return _move(_BACK[kind], g, mesh, axis, s, "backward", tag), None, None, None, None, None


def _move(how: str, x: Tensor, mesh: Mesh, axis: str, s: Shard, direction: str, tag: str) -> Tensor:
    if how == "gather":
        return _gather(x, mesh, axis, s, direction, tag)
    if how == "scatter":
        return _scatter(x, mesh, axis, s, direction, tag)
    return {"cut": _cut, "pad": _pad}[how](x, mesh, axis, s)


_FORTH = {
    "all_gather": "gather", "all_gather_varying": "gather", "reduce_scatter": "scatter", "shard": "cut", "shard_varying": "cut",
    "unshard_partial": "pad",
}  # fmt: skip
_BACK = {
    "all_gather": "cut", "all_gather_varying": "scatter", "reduce_scatter": "gather", "shard": "gather", "shard_varying": "pad",
    "unshard_partial": "cut",
}  # fmt: skip


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, old: Shard, new: Shard, tag: str) -> Tensor:
        ctx.how = mesh, axis, old, new, tag
        return unchunk(mesh.all_to_all(chunks(x, new, mesh.size(axis)), axis, direction="forward", tag=tag), old)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        mesh, axis, old, new, tag = ctx.how
        return unchunk(mesh.all_to_all(chunks(g, old, mesh.size(axis)), axis, direction="backward", tag=tag), new), *[None] * 5


class _First(Function):
    """First rank keeps, others zero: forward or backward or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, forth: bool, back: bool) -> Tensor:
        ctx.how = mesh, axis, back
        return _first(x, mesh, axis).view_as(x) if forth else x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        mesh, axis, back = ctx.how
        return (_first(g, mesh, axis) if back else g), None, None, None, None


def all_reduce(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """partial -> replicated. Backward: identity."""
    return _AllReduce.apply(x, mesh, axes, tag)  # type: ignore[no-any-return]


def all_reduce_max(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """partial(max) -> replicated. No gradient: the result is detached."""
    return mesh.all_reduce(x.detach(), axes, op="max", direction="forward", tag=tag)  # type: ignore[no-any-return]


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """shard -> replicated. Backward: local slice."""
    return _Digit.apply(x, "all_gather", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def all_gather_varying(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """shard -> varying. Backward: reduce_scatter."""
    return _Digit.apply(x, "all_gather_varying", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """partial -> shard. Backward: all_gather."""
    return _Digit.apply(x, "reduce_scatter", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def shard(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """replicated -> shard: local slice. Backward: all_gather."""
    return _Digit.apply(x, "shard", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def shard_varying(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """varying -> shard: local slice. Backward: placed among zeros."""
    return _Digit.apply(x, "shard_varying", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def unshard_partial(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, sections: tuple[int, ...] = (), tag: str = "") -> Tensor:
    """shard -> partial: placed among zeros. Backward: local slice."""
    return _Digit.apply(x, "unshard_partial", mesh, axis, Shard(dim, split, tuple(sections)), tag)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, mesh: Mesh, axis: str, dim: int, split: int, to_dim: int, to_split: int, tag: str = "") -> Tensor:
    """shard(dim) -> shard(to_dim). Backward: the reverse."""
    return _AllToAll.apply(x, mesh, axis, Shard(dim, split), Shard(to_dim, to_split), tag)  # type: ignore[no-any-return]


def vary(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """replicated -> varying: identity. Backward: all_reduce."""
    return _Vary.apply(x, mesh, axes, tag)  # type: ignore[no-any-return]


def unvary(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """varying -> replicated: identity. Backward: the first rank keeps, others zero."""
    return _First.apply(x, mesh, axis, False, True)  # type: ignore[no-any-return]


def to_partial(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """replicated -> partial: the first rank keeps, others zero. Backward: identity."""
    return _First.apply(x, mesh, axis, True, False)  # type: ignore[no-any-return]


def varying_to_partial(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
    """varying -> partial: the first rank keeps, others zero, in both directions."""
    return _First.apply(x, mesh, axis, True, True)  # type: ignore[no-any-return]
