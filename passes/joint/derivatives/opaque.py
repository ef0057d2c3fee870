"""Write the rule of an op that stays whole: its backward is one op too (shardc.runtime.ops.opaque)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.artifact.emit import target_text
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Line, Ref, Type, memory_of
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Template
from shardc.passes.joint.derivatives.transposed import Lines
from shardc.runtime import ops


@dataclass(frozen=True)
class _OpaqueSaves:
    """What autograd saves for an op. measured: from a run; else a guess. own: other bytes that it saves.

    operands: the places of those that it saves. grads: types of the gradients of operands that need one. fresh: by
    gradient, whether its memory is new.
    """

    operands: tuple[int, ...]
    grads: tuple[Type | None, ...]
    measured: bool
    own: int = 0
    fresh: tuple[bool, ...] = ()


def opaque(rank: Rank, call: Template, request: Request, types: Sequence[Type | None]) -> Rule:
    """Return the rule of an op that stays whole. types: of the results.

    An operand is counted once for each place in the arguments. If it is in two, its first place gets the sum of both
    gradients, in autograd's order.
    """
    template, places = call.split_operands()
    needs = tuple(k for k, i in enumerate(places) if request.wanted[i] and i not in places[:k])
    saved = _saved(rank, template, places, needs, request)
    w = Lines(rank, call, request)
    args = (target_text(call.target), needs, saved.operands, *call.args)
    first = w.put(Line(0, ops.opaque, args, tuple(call.kwargs.items())))
    outputs = [w.put(Line(0, operator.getitem, (first, k), (), t)) for k, t in enumerate(types)]
    tape = w.put(Line(0, operator.getitem, (first, len(types))))
    split = len(w.lines)
    grads = tuple(Ref("g", i) if t is not None else None for i, t in enumerate(request.tangents))
    before = [Ref("p", places[k]) if request.before[places[k]] is not None else None for k in needs]
    operands = tuple(Ref("x", places[k]) for k in saved.operands)
    zeros = () if saved.measured else (("zeros", True),)  # else the graph would use None as a gradient
    back = w.put(Line(0, ops.opaque_backward, (tape, grads, tuple(before), operands), zeros, saved.grads))
    of_operands: list[Ref | None] = [None] * len(request.operands)
    kinds: list[Type | None] = [None] * len(request.operands)
    for n, k in enumerate(needs):
        i, t = places[k], saved.grads[n]
        # (a user's autograd function may return the same buffer in each step)
        fresh = bool(saved.fresh) and saved.fresh[n] and ops.named(call.target.__name__, joint=False) is call.target
        of_operands[i], kinds[i] = w.put(Line(0, operator.getitem, (back, n), (), t, fresh)), t
    return Rule(
        tuple(w.lines[:split]),
        tuple(outputs),
        tuple(w.lines[split:]),
        tuple(of_operands),
        tuple(kinds),
        "opaque",
        saved.own,
    )


def _saved(rank: Rank, call: Template, places: Sequence[int], needs: tuple[int, ...], request: Request) -> _OpaqueSaves:
    """Return what autograd saves, from a run without data; if it fails, all operands, and equal gradients."""
    packed: dict[StorageWeakRef, int] = {}

    def pack(x: Tensor) -> Tensor:
        packed[memory_of(x)] = x.untyped_storage().nbytes()
        return x.detach() if x.grad_fn is not None else x

    try:
        with rank.mode:
            last_first = reversed(list(enumerate(places)))
            first = {i: replace(request.operands[i], grad=k in needs).empty() for k, i in last_first}
            xs = [first[i] for i in places]
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
                outputs = rank.run(call, xs)
            gs = [None if t is None else replace(t, grad=False).empty() for t in request.tangents]
            pairs = [(y, g) for y, g in zip(outputs, gs, strict=True) if g is not None]
            gradients = torch.autograd.grad(
                [y for y, _ in pairs], [xs[k] for k in needs], [g for _, g in pairs], allow_unused=True
            )
        again = tuple(k for k, x in enumerate(xs) if memory_of(x) in packed and places[k] not in places[:k])
        elsewhere = {memory_of(x) for x in (*xs, *outputs) if isinstance(x, Tensor)}
        own_bytes = sum(nbytes for memory, nbytes in packed.items() if memory not in elsewhere)
        made = [None if x is None else memory_of(x) for x in gradients]
        taken = elsewhere | set(packed) | {memory_of(g) for _, g in pairs}
        fresh = tuple(memory not in taken and made.count(memory) == 1 for memory in made)
        return _OpaqueSaves(again, tuple(None if x is None else Type.of(x) for x in gradients), True, own_bytes, fresh)
    except Exception:  # anything that torch's Python, or a user's op, raises on tensors without data
        like = (request.operands[places[k]] for k in needs)
        return _OpaqueSaves(tuple(range(len(places))), tuple(Type.contiguous(t.shape, t.dtype) for t in like), False)
