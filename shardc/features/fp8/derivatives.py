"""Write the rules of float8 rounding and of 8-bit products by hand (products)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardc.features.fp8.products import fp8_grad_of_data, fp8_grad_of_weight
from shardc.features.fp8.rounding import fp8_grad, fp8_round_grad
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Ref, Type
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Template
from shardc.passes.joint.derivatives.transposed import Lines


def rounded(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of `fp8_round`, which passes the gradient on, or of `fp8_grad`, which rounds it."""
    w, g = Lines(rank, call, request), Ref("g")
    if call.target is fp8_grad:
        g = w.call(fp8_round_grad, g, *call.args[1:], type_=request.tangents[0], **call.kwargs)
    grads: list[Ref | None] = [None] * len(request.operands)
    grads[call.args[0].index] = g
    return w.rule(grads, "transposed")


def product(rank: Rank, call: Template, request: Request) -> Rule:
    """Return the rule of `fp8_linear`: the wanted gradients of its input and of its weight."""
    x, weight, amax, recipe, *rest = call.args
    transposed = bool(rest and rest[0])
    kept = rest[1] if len(rest) > 1 and rest[1] is not None else x
    w, how = Lines(rank, call, request), (recipe, transposed, request.operands[x.index].shape)
    grads: list[Ref | None] = [None] * len(request.operands)

    def made(at: Ref, target: Any, *args: Any) -> None:
        if request.wanted[at.index]:
            like = request.operands[at.index]
            grads[at.index] = w.call(target, Ref("g"), *args, *how, type_=_contiguous(like))

    made(x, fp8_grad_of_data, weight, amax)
    made(weight, fp8_grad_of_weight, kept)
    return w.rule(grads, "product")


def _contiguous(like: Type) -> Type:
    return replace(Type.contiguous(like.shape, like.dtype), ragged=like.ragged)
