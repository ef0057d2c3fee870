"""Trace the rule of a torch op: record the ops that autograd runs for it on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Line, Recorder, Ref, Type, is_view, map_refs
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Template

aten = torch.ops.aten


def traced(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the traced rule. Raises any error that the op or its autograd raises without data."""
    recorder = Recorder()
    with rank.mode:
        leaves = [replace(t, grad=t.grad and w) for t, w in zip(request.operands, request.wanted, strict=True)]
        xs = [t.empty() for t in leaves]
        gs = [None if t is None else replace(t, grad=False).empty() for t in request.tangents]
        ps = [None if t is None else replace(t, grad=False).empty() for t in request.before]
        for kind, tensors in (("x", xs), ("g", gs), ("p", ps)):
            for i, x in enumerate(tensors):
                if x is not None:
                    recorder.name(x, Ref(kind, i))  # type: ignore[arg-type]
        with recorder, torch.enable_grad():
            outputs = rank.run(call, xs)
            split = len(recorder.lines)
            results = tuple(recorder.ref(y) if isinstance(y, Tensor) else Ref("none") for y in outputs)
            grads = _grad(xs, outputs, gs, ps)
        lines = recorder.lines
        grad_refs = tuple(None if x is None else recorder.ref(x) for x in grads)
        types = tuple(None if x is None else Type.of(x) for x in grads)
    forward = lines[:split]
    ours = {r: Ref("y", i) for i, r in reversed(list(enumerate(results))) if r.kind == "t"}
    backward = [_renamed(line, ours) for line in lines[split:]]
    grad_refs = tuple(None if r is None else ours.get(r, r) for r in grad_refs)
    moved, own = _moved(forward, backward, grad_refs, ours)
    backward, grad_refs = _tidied([*moved, *backward], grad_refs, request)
    backward = _used(backward, grad_refs)
    if not own and (len(forward) == 1 or _same_without_autograd(rank, call, request, forward)):
        return Rule(None, (), tuple(backward), grad_refs, types, "traced")
    return Rule(tuple(forward), results, tuple(backward), grad_refs, types, "traced")


def _grad(xs: list[Tensor], made: list[Any], gs: Sequence[Any], ps: Sequence[Any]) -> list[Tensor | None]:
    begin = [(x, p) for x, p in zip(xs, ps, strict=True) if p is not None and x.requires_grad]
    begin += [(y, g) for y, g in zip(made, gs, strict=True) if g is not None and y.requires_grad]
    inputs = [x for x in xs if x.requires_grad]
    starts, values = [b for b, _ in begin], [g for _, g in begin]
    grads = iter(torch.autograd.grad(starts, inputs, values, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in xs]


def _same_without_autograd(rank: Rank, call: Template, request: Request, lines: list[Line]) -> bool:
    """Return whether the call runs the same ops if no gradient is needed; some torch ops check that."""
    recorder = Recorder()
    with rank.mode:
        xs = [replace(t, grad=False).empty() for t in request.operands]
        for i, x in enumerate(xs):
            recorder.name(x, Ref("x", i))
        with recorder, torch.no_grad():
            rank.run(call, xs)
    alone = [(x.target, x.args, x.kwargs) for x in recorder.lines]
    return alone == [(x.target, x.args, x.kwargs) for x in lines]


def _renamed(line: Line, names: dict[Ref, Ref]) -> Line:
    def put(a: Any) -> Any:
        return map_refs(a, lambda r: names.get(r, r))

    return replace(line, args=put(line.args), kwargs=tuple((k, put(v)) for k, v in line.kwargs))


def _moved(
    forward: list[Line], backward: list[Line], grads: Sequence[Ref | None], ours: dict[Ref, Ref]
) -> tuple[list[Line], set[int]]:
    """Return (the views of operands and results that backward makes again, what forward must keep)."""
    moved: dict[int, Line] = {}
    own: set[int] = set()

    def visit(r: Ref) -> bool:
        """Return whether backward can have it without keeping a result of forward's lines."""
        if r.kind != "t" or r.index >= len(forward):
            return True
        if r.index in moved:
            return True
        if r.index in own:
            return False
        line = _renamed(forward[r.index], ours)
        if is_view(line.target) and all(visit(x) for x in line.refs):
            moved[r.index] = line
            return True
        return False

    for line in backward:
        for r in line.refs:
            if not visit(r):
                own.add(r.index)
    for g in grads:
        if g is not None and not visit(g):
            own.add(g.index)
    return [moved[i] for i in sorted(moved)], own


def _tidied(
    lines: list[Line], grads: tuple[Ref | None, ...], request: Request
) -> tuple[list[Line], tuple[Ref | None, ...]]:
    """Let users skip double transposes and reshapes to the same shape; `_used` then drops these lines."""
    by_number: dict[int, Line] = {line.number: line for line in lines}
    same: dict[Ref, Ref] = {}
    kept: list[Line] = []
    for old in lines:
        line = _renamed(old, same)
        by_number[line.number] = line
        kept.append(line)
        if line.target not in (aten.t.default, aten.reshape.default):
            continue
        x: Ref = line.args[0]
        maker = by_number.get(x.index) if x.kind == "t" else None
        known = request.types(x.kind)
        type_: Any = maker.types if maker is not None else known[x.index] if known else None
        if line.target is aten.t.default and maker is not None and maker.target is aten.t.default:
            same[Ref("t", line.number)] = maker.args[0]
        elif line.target is aten.reshape.default and type_ is not None and type_.shape == tuple(line.args[1]):
            same[Ref("t", line.number)] = x
    return kept, tuple(None if g is None else same.get(g, g) for g in grads)


def _used(lines: list[Line], grads: Sequence[Ref | None]) -> list[Line]:
    """Return the lines on which the gradients depend."""
    needed = {g for g in grads if g is not None}
    kept: list[Line] = []
    for line in reversed(lines):
        if Ref("t", line.number) in needed:
            kept.append(line)
            needed.update(line.refs)
    return kept[::-1]
