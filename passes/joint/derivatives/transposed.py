"""Write by hand the rules of linear ops of shardc, and of products beside a collective.

See shardc.runtime.ops.factors and shardc.passes.joint.autograd_order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardc.ir.conversions import BY_OP
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Line, Ref, Type, map_refs
from shardc.passes.joint.derivatives.rule import Kind, Request, Rule
from shardc.passes.joint.derivatives.template import Template
from shardc.runtime import ops
from shardc.runtime.ops.factors import factors

aten = torch.ops.aten

#: Conversions between placements, with their names in the table.
CONVERTED = {getattr(ops, op): op for op in BY_OP}
#: Exchanges of experts' rows, with their names: linear in the first operand.
EXCHANGES = {ops.experts_send: "experts_send", ops.experts_return: "experts_return"}
#: Other ops of shardc whose backward is an op of the gradient alone.
LINEAR = {ops.dropout, ops.cast_once, ops.summed, ops.fill_padding}


def transposed(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of a linear op."""
    w = Lines(rank, call, request)
    g: Ref = Ref("g")
    behind, kwargs = call.args[1:], dict(call.kwargs)
    if call.target is ops.cast_once:
        g = w.call(aten._to_copy.default, g, dtype=request.operands[0].dtype)
    elif call.target is ops.fill_padding:  # (mesh, dim, digits, size, padding, blocks, fill): zeros there
        blocks = behind[5] if len(behind) > 5 else 1
        x = request.operands[0]
        g = w.call(ops.fill_padding, g, *behind[:5], blocks, 0.0, type_=Type.contiguous(x.shape, x.dtype))
    elif call.target is ops.dropout:
        g = w.call(ops.dropout, g, *behind, **kwargs)
    elif call.target in EXCHANGES:
        x = request.operands[0]
        tokens = {"tokens": x.shape[0]} if call.target is ops.experts_send else {}
        out_type = replace(Type.contiguous(x.shape, x.dtype), ragged=x.ragged)
        g = w.call(ops.transpose, EXCHANGES[call.target], g, *behind, type_=out_type, **tokens, **kwargs)
    elif call.target in CONVERTED and BY_OP[op := CONVERTED[call.target]].backward != "identity":
        g = w.call(ops.transpose, op, g, *behind, **_options(call))
    return w.rule([g, *[None] * (len(request.operands) - 1)], "transposed")


def begun(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule that begins the backward of a conversion, a sum over ranks."""
    w, op = Lines(rank, call, request), CONVERTED[call.target]
    started = w.call(ops.transpose_start, op, Ref("g"), *call.args[1:], type_=request.operands[0], **_options(call))
    return w.rule([started], "begun")


def _options(call: Template) -> dict[str, Any]:
    """Return a conversion's options without those of its forward."""
    return {k: v for k, v in call.kwargs.items() if k not in ("overlap", "fp8")}


def waited(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule that waits for the sum that `begun` begins."""
    w = Lines(rank, call, request)
    return w.rule([w.call(ops.wait, Ref("g"), type_=request.operands[0])], "waited")


def of_data(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of a product for the gradient of its input."""
    x, weight, _ = factors(call.target, call.args)
    g = request.tangents[0]
    assert g is not None
    w = Lines(rank, call, request)
    rows = w.call(aten.reshape.default, Ref("g"), [-1, g.shape[-1]])
    matrix = w.conj(weight if call.target is aten.linear.default else w.call(aten.t.default, weight))
    product = w.call(aten.mm.default, rows, matrix)
    grads: list[Ref | None] = [None] * len(request.operands)
    grads[x.index] = w.call(aten.reshape.default, product, list(request.operands[x.index].shape))
    return w.rule(grads, "product")


def of_weights(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of a product for the gradients of its weight and bias."""
    x, weight, bias = factors(call.target, call.args)
    g = request.tangents[0]
    assert g is not None
    w = Lines(rank, call, request)
    rows = w.conj(w.call(aten.reshape.default, x, [-1, request.operands[x.index].shape[-1]]))
    back = w.call(aten.reshape.default, Ref("g"), [-1, g.shape[-1]])
    grads: list[Ref | None] = [None] * len(request.operands)
    if request.wanted[weight.index]:
        one, other = (back, rows) if call.target is aten.linear.default else (rows, back)
        grads[weight.index] = w.call(aten.mm.default, w.call(aten.t.default, one), other)
    if bias is not None and request.wanted[bias.index]:
        shape = list(request.operands[bias.index].shape)
        dims = [0] if shape == [g.shape[-1]] else [0, 1]  # one number is added to all columns
        grads[bias.index] = w.call(aten.reshape.default, w.call(aten.sum.dim_IntList, back, dims), shape)
    return w.rule(grads, "product")


class Lines:
    """Lines of one call written by hand, with the types that they have on tensors without data."""

    def __init__(self, rank: Rank, call: Template, request: Request) -> None:
        self._rank, self._names, self._request = rank, call.names, request
        self.lines: list[Line] = []

    def put(self, line: Line) -> Ref:
        """Add a line and return its result."""
        self.lines.append(replace(line, number=len(self.lines)))
        return Ref("t", len(self.lines) - 1)

    def type(self, r: Ref) -> Type | None:
        """Return the type of a tensor."""
        result = self.lines[r.index].types if r.kind == "t" else self._request.types(r.kind)[r.index]
        assert not isinstance(result, tuple)
        return result

    def call(self, target: Any, *args: Any, type_: Type | None = None, **kwargs: Any) -> Ref:
        """Add a call, except a reshape to the same shape. type_: of its result, if known; else the call runs."""
        if target is aten.reshape.default and (t := self.type(args[0])) is not None:
            known_size = math.prod(t.shape) // max(-math.prod(args[1]), 1)
            if [known_size if n == -1 else n for n in args[1]] == list(t.shape):
                return args[0]  # type: ignore[no-any-return]
        if type_ is None:
            with self._rank.mode, torch.no_grad():
                out = target(*map_refs(args, self._empty), **{k: map_refs(v, self._empty) for k, v in kwargs.items()})
                type_ = Type.of(out) if isinstance(out, Tensor) else None
        return self.put(Line(0, target, args, tuple(kwargs.items()), type_))

    def conj(self, r: Ref) -> Ref:
        """Add the conjugate of a complex tensor; return a real tensor unchanged."""
        t = self.type(r)
        return self.call(aten._conj.default, r) if t is not None and t.dtype.is_complex else r

    def _empty(self, r: Ref) -> Any:
        if r.kind == "n":
            return self._names[r.index]
        if r.kind in ("mesh", "rng"):
            return self._rank.named(r.kind)
        t = self.type(r)
        assert t is not None
        return replace(t, grad=False).empty()

    def rule(self, grads: Sequence[Ref | None], kind: Kind) -> Rule:
        """Return the rule; gradients are added to those that the operands already have."""
        totals: list[Ref | None] = []
        for i, g in enumerate(grads):
            before = self._request.before[i]
            totals.append(g if g is None or before is None else self.call(aten.add.Tensor, Ref("p", i), g))
        types = tuple(None if g is None else self.type(g) for g in totals)
        return Rule(None, (), tuple(self.lines), tuple(totals), types, kind)
