"""Convert between placements by the ops of shardc.ir.conversions, with their transposes as backward.

That table defines which *move* an op makes with a value, and which with its gradient. This file defines each move, and
the three forms in which programs call the ops:

    ops.all_reduce(x, mesh, ("dp", "tp"))        several axes at once
    ops.to_partial(x, mesh, "tp")                one axis
    ops.all_gather(x, mesh, "tp", 0, 3, ())      one axis, and the digit of a dim that is cut or joined

overlap=True: the backward graph starts its sum, and waits for it when the gradients of weights are ready
(shardc.passes.joint.autograd_order). fp8=(format, granule), of a gather: x is a result of `fp8_round`, of which 8 bits
of each number are sent. That loses nothing (shardc.features.fp8); its gradient is not rounded.

`dim`, `split` (negative: mirrored), `sections` name a digit of the *local* dim (shardc.ir.placement.Shard); padding,
blocks: what the whole dim lacks of its padded size (0 where another axis still splits it). Uneven parts are padded, so
that collectives see equal ones: `widen` before a dim is cut, `trim` after it is joined. Padding is decided at compile
time (shardc.passes.annotate.padding); where padding would be counted, the program calls `ops.fill_padding` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardc.ir.conversions import BY_OP, Move
from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import trim, widen
from shardc.optional import needed
from shardc.runtime.mesh.base import Work
from shardc.runtime.ops import shard_parts

Mesh = Any  # shardc.runtime.mesh's meshes; a protocol would only repeat their docstrings
Record = dict[str, str]  # for the mesh's records: "direction", "tag"


# --- moves: over an axis, or axes; old, new: the shards of which x and the result are a part


def _all_gather(x: Tensor, mesh: Mesh, axis: str, old: Shard, new: None, record: Record) -> Tensor:
    return trim(shard_parts.unstack(mesh.all_gather(x, axis, **record), old), old)


#: How 8 bits are sent: the format, and the granule.
Packed = tuple[str, tuple[int, ...]]


def _all_reduce(x: Tensor, mesh: Mesh, axes: tuple[str, ...], old: None, new: None, record: Record) -> Tensor:
    return mesh.all_reduce(x, axes, **record)  # type: ignore[no-any-return]


def _all_to_all(x: Tensor, mesh: Mesh, axis: str, old: Shard, new: Shard, record: Record) -> Tensor:
    sent = shard_parts.stack(widen(x, new), new, mesh.size(axis))
    return trim(shard_parts.unstack(mesh.all_to_all(sent, axis, **record), old), old)


def _reduce_scatter(x: Tensor, mesh: Mesh, axis: str, old: None, new: Shard, record: Record) -> Tensor:
    return mesh.reduce_scatter(shard_parts.stack(widen(x, new), new, mesh.size(axis)), axis, **record)  # type: ignore[no-any-return]


def _slice(x: Tensor, mesh: Mesh, axis: str, old: None, new: Shard, record: Record) -> Tensor:
    return shard_parts.cut(widen(x, new), new, mesh.size(axis), mesh.coordinate(axis))


def _pad(x: Tensor, mesh: Mesh, axis: str, old: Shard, new: None, record: Record) -> Tensor:
    return trim(shard_parts.pad(x, old, mesh.size(axis), mesh.coordinate(axis)), old)


def _first(x: Tensor, mesh: Mesh, axis: str, *_: Any) -> Tensor:
    return x if mesh.coordinate(axis) == 0 else torch.zeros_like(x)


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x


_MOVES: dict[Move, Callable[..., Tensor]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "pad": _pad,
    "first": _first,
    "identity": _identity,
}


@dataclass(frozen=True)
class Started:
    """A tensor that is on its way: after `work` has ended, `result` returns it."""

    work: Work
    result: Callable[[], Tensor]


def _start_all_gather(x: Tensor, mesh: Mesh, axis: str, old: Shard, new: None, record: Record) -> Started:
    stack = x.new_empty(mesh.size(axis), *x.shape)
    work = mesh.start_all_gather(x.contiguous().view(-1), stack.view(-1), axis, **record)
    return Started(work, lambda: trim(shard_parts.unstack(stack, old), old))


def _start_all_reduce(x: Tensor, mesh: Mesh, axes: tuple[str, ...], old: None, new: None, record: Record) -> Started:
    total = x.clone(memory_format=torch.contiguous_format)
    return Started(mesh.start_all_reduce(total, axes, **record), lambda: total)


def _start_all_to_all(x: Tensor, mesh: Mesh, axis: str, old: Shard, new: Shard, record: Record) -> Started:
    sent = shard_parts.stack(widen(x, new), new, mesh.size(axis))
    parts = torch.empty_like(sent)
    work = mesh.start_all_to_all_rows(sent.view(-1), parts.view(-1), ([], []), (axis,), **record)
    return Started(work, lambda: trim(shard_parts.unstack(parts, old), old))


def _start_reduce_scatter(x: Tensor, mesh: Mesh, axis: str, old: None, new: Shard, record: Record) -> Started:
    parts = shard_parts.stack(widen(x, new), new, mesh.size(axis))
    part = torch.empty_like(parts[0])
    return Started(mesh.start_reduce_scatter(parts.view(-1), part.view(-1), axis, **record), lambda: part)


#: The moves that communicate: each may be started, and waited for later.
_STARTS: dict[Move, Callable[..., Started]] = {
    "all_gather": _start_all_gather,
    "all_reduce": _start_all_reduce,
    "all_to_all": _start_all_to_all,
    "reduce_scatter": _start_reduce_scatter,
}


def _convert(
    x: Tensor,
    op: str,
    mesh: Mesh,
    over: str | tuple[str, ...],
    old: Shard | None,
    new: Shard | None,
    tag: str,
    overlap: bool = False,
    fp8: Packed | None = None,
    *,
    start: bool = False,
) -> Any:
    """Make the move that forward makes with a value, at once or started."""
    record = {"direction": "forward", "tag": tag}
    result = _move(x, BY_OP[op].forward, mesh, over, old, new, record, start=start, fp8=fp8)
    return x.view_as(x) if result is x else result


# --- ops: three forms of a call


class OverAxes(Protocol):
    """Converts several axes at once, in one collective."""

    def __call__(
        self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "", *, overlap: bool = False
    ) -> Tensor: ...


class OverAxis(Protocol):
    """Converts one axis, without cutting a dim."""

    def __call__(self, x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor: ...


class OfDigit(Protocol):
    """Cuts or joins one digit of a dim over an axis."""

    def __call__(
        self,
        x: Tensor,
        mesh: Mesh,
        axis: str,
        dim: int,
        split: int,
        sections: tuple[int, ...] = (),
        padding: int = 0,
        blocks: int = 1,
        *,
        tag: str = "",
        overlap: bool = False,
        fp8: Packed | None = None,
    ) -> Tensor: ...


_Op = TypeVar("_Op", bound=Callable[..., Tensor])


def _named(op: str, function: _Op) -> _Op:
    """Set the function's name to the op's, and its docstring to the op's row in the table."""
    row = BY_OP[op]
    function.__name__ = function.__qualname__ = op
    placements = f"{row.source.__name__} -> {row.target.__name__}"
    function.__doc__ = f"{placements}: {row.reason}. Forward: {row.forward}; backward: {row.backward}."
    return function


def _over_axes(op: str, convert_by: Callable[..., Any] = _convert) -> OverAxes:
    def convert(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "", *, overlap: bool = False) -> Tensor:
        return convert_by(x, op, mesh, axes, None, None, tag, overlap)  # type: ignore[no-any-return]

    return _named(op, convert)


def _over_axis(op: str, convert_by: Callable[..., Any] = _convert) -> OverAxis:
    def convert(x: Tensor, mesh: Mesh, axis: str, tag: str = "") -> Tensor:
        return convert_by(x, op, mesh, axis, None, None, tag)  # type: ignore[no-any-return]

    return _named(op, convert)


def _of_digit(op: str, convert_by: Callable[..., Any] = _convert) -> OfDigit:
    joins = BY_OP[op].source is Shard

    def convert(
        x: Tensor,
        mesh: Mesh,
        axis: str,
        dim: int,
        split: int,
        sections: tuple[int, ...] = (),
        padding: int = 0,
        blocks: int = 1,
        *,
        tag: str = "",
        overlap: bool = False,
        fp8: Packed | None = None,
    ) -> Tensor:
        digit = Shard.of_signed(dim, split, sections, padding, blocks)
        old, new = (digit, None) if joins else (None, digit)
        return convert_by(x, op, mesh, axis, old, new, tag, overlap, fp8)  # type: ignore[no-any-return]

    return _named(op, convert)


def _between_digits(op: str, convert_by: Callable[..., Any] = _convert) -> Callable[..., Tensor]:
    def convert(
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
        old = Shard.of_signed(dim, split, (), padding, blocks)
        new = Shard.of_signed(to_dim, to_split, (), to_padding, to_blocks)
        return convert_by(x, op, mesh, axis, old, new, tag)  # type: ignore[no-any-return]

    return _named(op, convert)


all_gather = _of_digit("all_gather")
all_gather_partial_grad = _of_digit("all_gather_partial_grad")
all_reduce = _over_axes("all_reduce")
all_to_all = _between_digits("all_to_all")
first_grad = _over_axis("first_grad")
partial_grad_to_partial = _over_axis("partial_grad_to_partial")
reduce_scatter = _of_digit("reduce_scatter")
shard = _of_digit("shard")
shard_partial_grad = _of_digit("shard_partial_grad")
sum_grad = _over_axes("sum_grad")
to_partial = _over_axis("to_partial")
unshard_partial = _of_digit("unshard_partial")

_Form = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_FORMS: dict[str, _Form] = {
    "all_to_all": _between_digits,
    **dict.fromkeys(("all_reduce", "sum_grad"), _over_axes),
    **dict.fromkeys(("first_grad", "partial_grad_to_partial", "to_partial"), _over_axis),
}


def all_reduce_max(x: Tensor, mesh: Mesh, axes: tuple[str, ...], tag: str = "") -> Tensor:
    """Return the maximum over ranks: Partial("max") -> Replicate. Detached, so not in the table."""
    return mesh.all_reduce(x.detach(), axes, op="max", direction="forward", tag=tag)  # type: ignore[no-any-return]


# --- single directions, at once or started, for backward graphs (shardc.passes.joint)


def _way_back(
    g: Tensor, op: str, mesh: Mesh, over: Any, old: Shard | None, new: Shard | None, tag: str, *_: Any, start: bool
) -> Any:
    """Make the move that backward makes with a gradient, at once or started."""
    return _move(g, BY_OP[op].backward, mesh, over, new, old, {"direction": "backward", "tag": tag}, start=start)


def _move(
    x: Tensor,
    move: Move,
    mesh: Mesh,
    over: Any,
    old: Shard | None,
    new: Shard | None,
    record: Record,
    *,
    start: bool,
    fp8: Packed | None = None,
) -> Any:
    """Make a move. fp8: it gathers in 8 bits."""
    starts = start and mesh.members((over,) if isinstance(over, str) else over) > 1
    if fp8 is None:
        result: Any = (_STARTS if starts else _MOVES)[move](x, mesh, over, old, new, record)
    else:
        result = needed("fp8", "runtime", "all_gather")(x, mesh, over, old, record, fp8, start=starts)
    return result if starts or not start else Started(Work(), lambda: result)


def _forms(way: Callable[..., Any], *, start: bool) -> dict[str, Callable[..., Any]]:
    """Return {op: function with the op's own arguments}."""
    forms = {op: _FORMS.get(op, _of_digit) for op in BY_OP}
    return {op: form(op, partial(way, start=start)) for op, form in forms.items()}  # type: ignore[no-untyped-call]


#: {conversion: function with its arguments}: its transpose, the transpose started, the conversion started.
TRANSPOSED, TRANSPOSE_STARTED = _forms(_way_back, start=False), _forms(_way_back, start=True)
FORWARD_STARTED = _forms(_convert, start=True)
