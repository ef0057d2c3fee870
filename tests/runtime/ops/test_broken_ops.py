"""Ops of the runtime and conversions, broken on purpose: the checks of `definitions` notice every one.

Each op is broken in every way of `ways`, and each row of the table of conversions by every other move, forward and
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.ir import conversions, shard_chunks
from shardc.ir.conversions import BY_OP, Move
from shardc.runtime import ops
from shardc.runtime.ops import convert, local_math, one_way, shard_parts
from tests.runtime.ops import broken_steps
from tests.runtime.ops.checks import CHECKS

Op = Callable[..., Any]
#: What an op raises where it meets what no op like it should.
NOTICED = (AssertionError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)


class _Backward(torch.autograd.Function):
    """x itself, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.change(g), None


def first_tensor(op: Op, change: Callable[[Tensor, Any], Tensor]) -> Op:
    """The op, the gradient of whose first tensor is changed; change(gradient, the mesh)."""

    def broken(*args: Any, **named: Any) -> Any:
        mesh = next((a for a in args if hasattr(a, "coordinate")), None)
        x, *rest = args
        return op(_Backward.apply(x, lambda g: change(g, mesh)) if isinstance(x, Tensor) else x, *rest, **named)

    return broken


def result(op: Op, change: Callable[[Tensor], Tensor]) -> Op:
    """The op, whose results are changed."""

    def broken(*args: Any, **named: Any) -> Any:
        made = op(*args, **named)
        return tuple(change(y) for y in made) if isinstance(made, tuple) else change(made)

    return broken


def twice(x: Any) -> Any:
    return x + x if isinstance(x, Tensor) and x.dtype != torch.bool else ~x if isinstance(x, Tensor) else x


class _Turned:
    """A mesh whose ranks are counted from the end."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    @property
    def rank(self) -> int:
        return int(self._mesh.layout.world - 1 - self._mesh.rank)

    def coordinate(self, axis: str) -> int:
        return int(self._mesh.size(axis) - 1 - self._mesh.coordinate(axis))

    def all_gather(self, *args: Any, **named: Any) -> Tensor:
        return self._mesh.all_gather(*args, **named).flip(0)  # type: ignore[no-any-return]

    def reduce_scatter(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return self._mesh.reduce_scatter(x.flip(0).contiguous(), *args, **named)  # type: ignore[no-any-return]

    def all_to_all(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        return self._mesh.all_to_all(x.flip(0).contiguous(), *args, **named)  # type: ignore[no-any-return]


class _Mean:
    """A mesh that takes means where sums are to be taken."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def all_reduce(self, x: Tensor, axes: Any, **named: Any) -> Tensor:
        return _less(self._mesh.all_reduce(x, axes, **named), self._mesh.members(tuple(axes)))

    def reduce_scatter(self, x: Tensor, axis: str, **named: Any) -> Tensor:
        return _less(self._mesh.reduce_scatter(x, axis, **named), self._mesh.size(axis))


def _less(total: Tensor, n: int) -> Tensor:
    return total / n if total.is_floating_point() or total.is_complex() else total // n


def on_mesh(op: Op, other: Callable[[Any], Any]) -> Op:
    def broken(*args: Any, **named: Any) -> Any:
        return op(*(other(a) if hasattr(a, "coordinate") else a for a in args), **named)

    return broken


def with_argument(op: Op, position: int, value: Any) -> Op:
    def broken(*args: Any, **named: Any) -> Any:
        return op(*(value if i == position else a for i, a in enumerate(args)), **named)

    return broken


CONVERSIONS = set(BY_OP)
SUMS = {"all_reduce", "reduce_scatter"}
#: Ops whose result has no gradient, or that have none of their first tensor.
DETACHED = {
    "top",
    "ties",
    "all_reduce_max",
    "nll_top",
    "largest",
    "random",
    "experts_keep",
    "experts_route",
    "total",
}
DETACHED |= {"gather_start", "gather_wait", "fp8_amax", "fp8_round_grad", "attention_reach"}
DETACHED |= {"in_chunks"}  # its tensors are in tuples: see `ways`
DETACHED |= {"start", "wait", "transpose", "transpose_start", "add_into", "batch_stat"}
DETACHED |= {"fp8_pack", "fp8_grad_of_data", "fp8_grad_of_weight", *broken_steps.OPS}
#: Ops that look at this rank's place, or put ranks' parts in order.
PLACED = {
    "fill_padding",
    "embedding_partial",
    "select_partial",
    "gather_partial",
    "cumsum",
    "conv1d",
    "dropout",
    "random",
}
PLACED |= {"nll_stats", "attention"}
# where one rank brings a value, or counts, it may be any of them
PLACED |= {n for n in CONVERSIONS if not {BY_OP[n].forward, BY_OP[n].backward} <= {"all_reduce", "identity", "first"}}
#: Ops of numbers of 8 bits, and which argument is the axes over which they find scales together.
AXES = {"fp8_grad": 5, "fp8_round_grad": 5, "fp8_experts": 12, "fp8_experts_apply": 11}
#: Ops of complex numbers with a gradient.
COMPLEX = {"fill_padding", "select_partial", "gather_partial", "cumsum", "partial_mean"}


def ways(name: str) -> Iterator[tuple[str, Op]]:
    """(how, the broken op) for an op."""
    op = getattr(ops, name, None) or ops.named(name, joint=True)
    if name == "nll_top":  # any number that exponentials do not overflow beside
        yield "a number that is far off", result(op, lambda x: x - 1000)
    elif name not in {"start", "transpose_start", "wait", "batch_stat", *broken_steps.WITHOUT_TENSORS}:
        yield "twice the result", result(op, twice)
    if name not in DETACHED | CONVERSIONS:  # whose transposes are ops: TRANSPOSES
        yield "twice the gradient", first_tensor(op, lambda g, _: g + g)
        yield "no gradient", first_tensor(op, lambda g, _: torch.zeros_like(g))
    if name in COMPLEX:
        yield "a conjugate too many", first_tensor(op, lambda g, _: g.conj().resolve_conj())
    if name in PLACED:
        yield "ranks in another order", on_mesh(op, _Turned)
    if name in CONVERSIONS and BY_OP[name].forward in SUMS:
        yield "means for sums", on_mesh(op, _Mean)
    if name in AXES:
        yield "a scale of each rank", with_argument(op, AXES[name], ())
    if name in {"fp8_linear", "fp8_grad_of_data", "fp8_grad_of_weight"}:
        at = {"fp8_linear": 4, "fp8_grad_of_data": 4, "fp8_grad_of_weight": 3}[name]
        yield "the weight the other way round", lambda *a: op(*a[:at], not a[at], *a[at + 1 :])
    if name == "fp8_linear":
        yield "a weight that is not rounded", lambda x, w, _, __, turned, *___: x @ (w if turned else w.T)
        yield "bytes that are not read", with_argument(op, 5, None)
    if name == "fp8_pack":
        yield "no scales", lambda x, *a: torch.cat([(made := op(x, *a))[: x.numel()], 0 * made[x.numel() :]])
    if name == "in_chunks":
        for how, at in (("rows", 3), ("whole tensors", 4)):

            def doubled(*a: Any, at: int = at, **k: Any) -> Any:
                changed = [_Backward.apply(x, lambda g: g + g) for x in a[at]]
                return op(*a[:at], changed, *a[at + 1 :], **k)

            yield f"twice the gradient of {how}", doubled
        yield "no gradient", lambda *a, **k: op(*a, **{**k, "trains": False})
    yield from broken_steps.ways(name, op)
    if name == "attention":
        yield "not causal", with_argument(op, 5, False)
    if name == "fill_padding":
        yield "no fill", lambda x, *_: x.contiguous()
        yield "another fill", with_argument(op, 7, 0.5)
        yield "a fill with its gradient", lambda x, *a: x + (op(x, *a) - x).detach()
    if name == "partial_mean":
        yield "a mean of what is here", lambda x, dims, keep, _: x.mean(dims, keep)
    if name == "cast_once":
        yield "a gradient that stays in the copy's dtype", result(op, lambda x: x.bfloat16().to(x.dtype))
        yield "no cast", lambda x, *_, **__: x
    if name == "summed":
        yield "this microbatch alone", lambda x, *_: x.clone()
    if name == "batch_stat":
        yield "always the batch's", lambda batch, *_: batch
        yield "always the running one", with_argument(op, 2, type("R", (), {"training": False})())
    if name in {"start", "transpose_start"}:
        yield "begun with twice the value", lambda o, x, *a, **k: op(o, x + x if x.dtype != torch.bool else ~x, *a, **k)
    if name == "wait":
        yield "twice what comes", result(op, twice)


BROKEN = [(name, how, broken) for name in CHECKS for how, broken in ways(name)]


def noticed(name: str) -> bool:
    try:
        CHECKS[name]()
    except NOTICED:
        return True
    return False


def test_every_op_is_broken_somehow() -> None:
    assert {name for name, _, _ in BROKEN} == set(CHECKS)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "how", "broken"), BROKEN, ids=[f"{name}, {how}" for name, how, _ in BROKEN])
def test_a_broken_op_is_noticed(name: str, how: str, broken: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, name, broken, raising=False)  # optional features' ops are not there
    assert noticed(name)


#: What is done to the gradient that a conversion's transpose gives; change(gradient, the mesh).
TRANSPOSES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "twice the gradient": lambda g, _: g + g,
    "no gradient": lambda g, _: torch.zeros_like(g),
    "the first rank's gradient alone": lambda g, mesh: g if mesh.coordinate("a") == 0 else torch.zeros_like(g),
    "a conjugate too many": lambda g, _: g.conj().resolve_conj(),
}


@pytest.mark.every_case
@pytest.mark.parametrize("how", [*TRANSPOSES, "means for sums"])
@pytest.mark.parametrize("name", BY_OP)
def test_a_broken_transpose_is_noticed(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "the first rank's gradient alone" and BY_OP[name].backward == "first":
        return  # it is what the transpose does
    if how == "means for sums" and BY_OP[name].backward not in SUMS:
        return
    transpose = one_way._TRANSPOSED[name]

    def broken(g: Tensor, mesh: Any, *args: Any, **named: Any) -> Tensor:
        if how == "means for sums":
            return transpose(g, _Mean(mesh), *args, **named)
        return TRANSPOSES[how](transpose(g, mesh, *args, **named), mesh)

    monkeypatch.setitem(one_way._TRANSPOSED, name, broken)
    assert noticed(name)


#: Moves that take the same arguments: a digit that is joined, one that is cut, or none.
ALIKE: tuple[set[Move], ...] = ({"all_gather", "pad"}, {"reduce_scatter", "slice"}, {"all_reduce", "first", "identity"})
OTHER_MOVES = [
    (name, direction, move)
    for name, row in BY_OP.items()
    for direction in ("forward", "backward")
    for moves in ALIKE
    if getattr(row, direction) in moves
    for move in sorted(moves - {getattr(row, direction)})
]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "direction", "move"), OTHER_MOVES, ids=str)
def test_a_conversion_with_another_move_is_noticed(
    name: str, direction: str, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong transpose, and a wrong value: each other move in the place of the right one."""
    rows = {**BY_OP, name: replace(BY_OP[name], **{direction: move})}  # type: ignore[arg-type]
    monkeypatch.setattr(convert, "BY_OP", rows)
    assert noticed(name)


#: Pieces that several ops share: (where, name, what stands for it, an op whose check notices).
PIECES: dict[str, tuple[Any, str, Any, str]] = {
    "padding that is not put on": (convert, "widen", lambda x, _: x, "shard"),
    "padding of copies": (convert, "widen", lambda x, s: shard_chunks.widen(x, s, copies=True), "shard"),
    "padding that is not taken off": (convert, "trim", lambda x, _: x, "all_gather"),
    "parts in the memory's order": (shard_parts, "stack", lambda x, s, n: x.reshape(n, -1), "reduce_scatter"),
    "a mask of padding that is turned": (local_math, "_real", lambda *a: None, "fill_padding"),
    "entries of all ranks": (
        local_math,
        "locate",
        lambda index, size, digits, mesh: (index % (size // mesh.size("a")), index == index),
        "gather_partial",
    ),
}


@pytest.mark.parametrize("piece", PIECES)
def test_a_broken_piece_is_noticed(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, other, op = PIECES[piece]
    assert hasattr(module, name)
    monkeypatch.setattr(module, name, other)
    assert noticed(op)


def test_what_is_whole_is_not_noticed() -> None:
    """The checks pass with the ops as they are, also wrapped in what breaks nothing."""
    assert conversions.BY_OP is convert.BY_OP
    assert not noticed("shard")
    assert not noticed("fill_padding")
