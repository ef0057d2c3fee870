"""Run one op under autograd as a whole, for step graphs (shardc.passes.joint) without its derivative.

    y, tape = ops.opaque('ops.experts_apply', (0, 2, 3), (0, 2, 3), rows, counts, up, down, ...)
    ...
    rows_grad, up_grad, down_grad = ops.opaque_backward(tape, (y_grad,), (None, None, None), (rows, up, down))

Tensors among the arguments are counted from 0, in order. `opaque_backward` gets those that autograd needs again: so a
program itself defines which values it keeps, recomputes, or gathers again. The tape holds the rest, which only the op's
backward uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from shardc.errors import ShardcError
from shardc.optional import table
from shardc.runtime.ops.with_backward import with_backward
from shardc.torch_private import OpOverload

#: The ops of shardc.runtime.ops, by name, without those of backward graphs; that module fills it.
OPS: dict[str, Callable[..., Any]] = {}


@cache
def op_of(name: str) -> Callable[..., Any]:
    """Return the op of a name: `ops.experts_apply`, `aten.silu.default`, `torch.ops.lib.op.default`.

    Raises ShardcError for any other text: programs may come from untrusted sources.
    """
    kind, _, rest = name.partition(".")
    if kind == "ops" and (op := OPS.get(rest) or table("ops", "OPS").get(rest)) is not None:
        return op
    path = name.removeprefix("torch.ops.").split(".")
    if kind != "ops" and len(path) == 3 and all(part.isidentifier() for part in path):
        op = getattr(getattr(getattr(torch.ops, path[0]), path[1], None), path[2], None)
        if isinstance(op, OpOverload):
            return op
    raise ShardcError(f"{name!r} is not an op that programs call", where="ops.opaque", fix="compile again")


def tensors_in(a: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, in order."""
    if isinstance(a, Tensor):
        yield a
    elif isinstance(a, (tuple, list)):
        for x in a:
            yield from tensors_in(x)
    elif isinstance(a, dict):
        for name in sorted(a):
            yield from tensors_in(a[name])


def _replaced(a: Any, those: Iterator[Tensor]) -> Any:
    if isinstance(a, Tensor):
        return next(those)
    if isinstance(a, (tuple, list)):
        return type(a)([_replaced(x, those) for x in a])
    if isinstance(a, dict):
        return {name: _replaced(a[name], those) for name in sorted(a)}
    return a


def _opened(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return operands' places in autograd's graph, where backward ends. A leaf would hold the operand."""
    anchor = torch.empty(0, device=xs[0].device, requires_grad=True)
    places: tuple[Tensor, ...] = with_backward(_views, _ends_here, anchor, *xs)
    return places


def _views(anchor: Tensor, *xs: Tensor) -> tuple[tuple[Tensor, ...], tuple[()]]:
    return tuple(x.view_as(x) for x in xs), ()


def _ends_here(needs: Any, *gs: Tensor) -> tuple[()]:
    return ()


class Own:
    """The place of a saved tensor: the op's own, or an operand that is lent to it.

    None: it is elsewhere (shardc.runtime.ops.host_handle). Autograd holds the place as long as it may need the tensor.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor


@dataclass
class Tape:
    """The backward of one op, as places in autograd's graph.

    begins: by result; ends: by operand that gets a gradient; zeros: functions that make zeros like these operands;
    again: the operands that backward receives, to be put into `operands`. saved: what it holds, which autograd frees op
    by op; lent: those of `saved` that are copies from the host.
    """

    begins: list[Any]
    ends: list[Any]
    zeros: list[Callable[[], Tensor]]
    again: tuple[int, ...]
    operands: weakref.WeakValueDictionary[int, Own]
    saved: list[weakref.ref[Own]]
    lent: Sequence[weakref.ref[Own]] = ()

    def own(self) -> list[Own]:
        """Return the places of the op's saved tensors that are still alive."""
        return [place for ref in self.saved if (place := ref()) is not None]


_Seen = tuple[Own, tuple[int, ...], torch.Size, tuple[int, ...], int]


def opaque(op: str, needs: Sequence[int], again: Sequence[int], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Run an op; return its result or results, and a tape. needs: numbers of tensors that get gradients.

    again: numbers of the tensors that `opaque_backward` receives again.
    """
    tensors = list(tensors_in((args, kwargs)))
    with torch.enable_grad():
        of_needs = dict(zip(needs, _opened([tensors[i] for i in needs]), strict=True))
        # an operand that has two places is one: autograd adds up the gradients of both
        same = {id(tensors[i]): x for i, x in reversed(of_needs.items())}
        opened = [of_needs[i] if i in of_needs else same.get(id(x), x) for i, x in enumerate(tensors)]
    places: dict[object, list[int]] = {}  # of memory that `tensors` holds as long as the op runs
    for i in again:
        if tensors[i].layout is torch.strided:
            places.setdefault(_memory(tensors[i]), []).append(i)
    operands: weakref.WeakValueDictionary[int, Own] = weakref.WeakValueDictionary()
    saved: list[weakref.ref[Own]] = []

    def pack(x: Tensor) -> Own | _Seen:
        at = _within(x, places.get(_memory(x), ()), tensors) if x.layout is torch.strided and x.numel() else None
        if at is not None:
            place = operands.get(at)
            if place is None:
                place = operands[at] = Own(None)
            of = tensors[at]
            offset = int(x.storage_offset()) - int(of.storage_offset())
            return place, of.stride(), x.size(), x.stride(), offset
        kept = Own(x.detach() if x.grad_fn is not None else x)
        saved.append(weakref.ref(kept))
        return kept

    def unpack(kept: Own | _Seen) -> Tensor:
        if isinstance(kept, Own):
            assert kept.tensor is not None, "what the tape holds is not on the device"
            return kept.tensor
        place, strides, size, stride, offset = kept
        assert place.tensor is not None, "backward was not given this operand"
        return _same_view(place.tensor, strides, size, stride, offset)

    replacements = iter(opened)
    args, kwargs = _replaced(args, replacements), _replaced(kwargs, replacements)
    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        result = op_of(op)(*args, **kwargs)
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    begins = [_edge(y) if isinstance(y, Tensor) and y.requires_grad else None for y in results]
    like: list[Callable[[], Tensor]] = [
        partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in (tensors[i] for i in needs)
    ]
    ends = [_edge(opened[i]) for i in needs]
    tape = Tape(begins, ends, like, tuple(again), operands, saved)
    tensors.clear()  # autograd holds `pack`, which would hold these tensors
    places.clear()
    return (*(y.detach() if isinstance(y, Tensor) else y for y in results), tape)


def _edge(y: Tensor) -> GradientEdge:
    """Return the edge of an op's result in autograd's graph, without the checks of torch's function."""
    assert y.grad_fn is not None
    return GradientEdge(y.grad_fn, y.output_nr)


def _memory(x: Tensor) -> object:
    """Return the key that the views of one tensor share, as long as its memory is in use."""
    return x.untyped_storage()._cdata, x.dtype, x.is_conj(), x.is_neg()


def _within(x: Tensor, places: Sequence[int], given: Sequence[Tensor]) -> int | None:
    """Return the operand that x is a view of, among operands of its dtype and memory.

    They may be parts of one tensor that come back separately: then only one that begins where x does is certain.
    """
    same = places
    if len(same) > 1:
        same = [i for i in same if given[i].storage_offset() == x.storage_offset()]
    return max(same, key=lambda i: given[i].numel(), default=None)


def _same_view(x: Tensor, strides: tuple[int, ...], size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Return the view of an operand that has this size, stride and offset under the operand's old strides.

    It may come back with other strides: from the host without gaps.
    """
    if x.stride() == strides or all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        if not offset and x.stride() == stride and x.size() == size:
            return x
        return x.as_strided(size, stride, int(x.storage_offset()) + offset)
    dims = [d for d, n in enumerate(x.shape) if n > 1]
    left, order = list(dims), []
    for n, a in zip(size, stride, strict=True):
        if n > 1:
            same = [d for d in left if (x.shape[d], strides[d]) == (n, a)]
            order += same[:1]
            left = [d for d in left if d not in same[:1]]
    if not offset and not left and len(order) == sum(n > 1 for n in size):  # dims in another order
        return x.squeeze().permute([dims.index(d) for d in order]).reshape(size)
    whole = x.shape
    for d, a in enumerate(strides):
        x = x if a else x.narrow(d, 0, min(1, whole[d]))
    copied = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return copied.as_strided(size, stride, offset)


def opaque_backward(
    tape: Tape,
    grads: Sequence[Tensor | None],
    before: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    *,
    zeros: bool = False,
    only: Sequence[int] = (),
    keep: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands that `opaque` has in `needs`; the tape is empty then.

    grads: of the results. before: what each of the operands has from other ops, to which the new gradients are added,
    or None. operands: those of `again`. zeros: return zeros instead of missing gradients. only: of these alone, counted
    among those that need one; the others get None. keep: the tape stays, for the others.
    """
    chosen = only or range(len(tape.ends))
    for at, x in zip(tape.again, operands, strict=True):
        if (place := tape.operands.get(at)) is not None:
            place.tensor = x
    begin = [(tape.ends[k], p) for k in chosen if (p := before[k]) is not None]
    begin += [(y, g) for y, g in zip(tape.begins, grads, strict=True) if y is not None and g is not None]
    results: list[Tensor | None] = [None] * len(tape.ends)
    if begin:
        starts, values = zip(*begin, strict=True)
        ends = [tape.ends[k] for k in chosen]
        gradients = torch.autograd.grad(starts, ends, values, retain_graph=keep, allow_unused=True)
        for k, g in zip(chosen, gradients, strict=True):
            results[k] = g
    for k in chosen if zeros else ():
        results[k] = tape.zeros[k]() if results[k] is None else results[k]
    for place in tape.operands.values():
        place.tensor = None
    if not keep:
        tape.begins, tape.ends, tape.zeros = [], [], []
    for ref in tape.lent:
        if (kept := ref()) is not None:
            kept.tensor = None
    tape.lent = ()
    return tuple(results)
