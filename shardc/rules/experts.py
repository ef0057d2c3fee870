"""Rules of experts, `t h, t k, t k, e (2 i) h, e h i -> t h`.

Tokens split is data parallel, i tensor parallel, e expert parallel. There are two ways to spread experts over an axis.
With tokens whole there, each rank computes what its experts make of all tokens: partial sums. With tokens split there
too, tokens go to the experts' ranks and back ("exchange"): every expert sees all its tokens, so its weights' gradients
are whole, and only chosen tokens are sent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, Layout, Partial, Placement, Shard
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.strategy import Strategy, needs_sum_grad, splits_of
from shardc.runtime import ops
from shardc.runtime.ops.experts.activation import read

#: Positions of the arguments of `ops.experts`.
X, INDEX, WEIGHTS, UP, DOWN, UP_BIAS, DOWN_BIAS, ACTIVATION, TRANSPOSED = range(9)


def dims_of(call: Call) -> list[list[str]]:
    """Return the dims of all operands. The activation decides where i is in the first product's columns."""
    columns = {"": "i+", "halves": "p! i+", "stripes": "i+ p!"}[read(call.arg("activation")).word]
    transposed = bool(call.arg("transposed"))
    up, down = ["e+", columns, "h!"], ["e+", "o", "i+"]
    weights = [[e, b, a] if transposed else [e, a, b] for e, a, b in (up, down)]
    biases = [dims[:2] for dims, name in ((up, "up_bias"), (down, "down_bias")) if call.arg(name) is not None]
    return [["t", "h!"], ["t", "k!"], ["t", "k!"], *weights, *biases]


def experts(call: Call) -> Signature:
    """Split tokens, experts and i."""
    return call.fit(dims_of(call), [["t", "o"]], p=read(call.arg("activation")).parts)


def linear(call: Call) -> str:
    """Return the linear operands: the weights of the choices, or the second product with its bias."""
    bias = call.arg("down_bias")
    return f"{WEIGHTS} | {DOWN}" + (f" {bias.index}" if isinstance(bias, Operand) else "")


def exchange(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split tokens and experts over the same ranks."""
    x, up = call.operands[X], call.operands[UP]
    for rows in splits_of(x, {0}, n, available[X] | {Shard(0)}):
        for e in splits_of(up, {0}, n, available[UP]):
            yield Strategy("exchange", (rows, rows, rows, *[e] * (len(call.operands) - 3)), (rows,))


def flops(call: Call) -> int:
    t, k = call.operands[INDEX].shape
    return 2 * t * k * sum(math.prod(call.operands[i].shape[1:]) for i in (UP, DOWN))


def local(
    call: LocalCall, apply: Callable[..., Any] = ops.experts_apply, more: tuple[Any, ...] = (), **options: Any
) -> fx.Node:
    """Rewrite split experts as routing, exchange, products, exchange and weighted sum, one op each.

    apply: the op of the products; more: its last arguments, as of the whole op; options: of their `LocalCall.emit`.
    """
    shards, tag = call.inputs[UP].shards(0), {"tag": ""} if more else {}
    if not shards:
        return call.emit(call.call.target, (*call.args, *more), {**call.kwargs, **tag}, **options)
    axes = call.mesh.merge(call.axes("exchange"))
    x, index, weights, up, down, up_bias, down_bias, activation, *rest = call.args
    types = call.call.operands
    experts, (t, k), h = types[UP].shape[0], types[INDEX].shape, types[X].shape[1]
    digits, first = tuple((a, s.signed, *s.sections) for a, s in shards), shards[0][1]
    local_count = call.local(UP)[0]
    ranks = math.prod(call.mesh.size(a) for a in axes)

    tokens = {a: replace(s, padding=s.padding * k) for a, s in call.inputs[X].shards(0)}

    def typed(*shape: int, dtype: torch.dtype, layout: dict[str, Placement], grad: bool = False) -> Value:
        return Value(shape, dtype, grad, Layout.of(layout, call.mesh))

    summed: dict[str, Placement] = {a: PARTIAL for a, p in call.outputs[0].items if isinstance(p, Partial)}
    every: dict[str, Placement] = {a: PARTIAL_GRAD for a in summed if needs_sum_grad(types[X])}
    rows = typed(t * k, h, dtype=types[X].dtype, layout=tokens | every, grad=types[X].requires_grad)
    results = typed(t * k, h, dtype=types[X].dtype, layout=tokens | summed, grad=call.call.results[0].requires_grad)
    pairs = typed(t * k, dtype=torch.int64, layout=dict(tokens))
    counts = typed(2, ranks, local_count, dtype=torch.int64, layout={})

    def sends(value: Value, kind: str = "all_to_all") -> Collective | None:
        nbytes = ranks * local_count * 8 if value is counts else value.nbytes(call.mesh)
        return Collective("all_to_all", kind if value.requires_grad else "none", axes, nbytes) if axes else None

    def part(node: fx.Node, i: int, value: Value) -> fx.Node:
        return call.emit(operator.getitem, (node, i), {}, value=value)

    mesh: Any = call.mesh_node
    where = (index, mesh, axes, experts, digits, *((first.padding, first.blocks) if first.padding else ()))
    route = call.emit(ops.experts_route, where, {"tag": ""}, value=(pairs, counts), collective=sends(counts))
    order, numbers = part(route, 0, pairs), part(route, 1, counts)
    sent = call.emit(ops.experts_send, (x, order, numbers, mesh, axes, k), {}, value=rows, collective=sends(rows))
    apply_to = (sent, numbers, up, down, up_bias, down_bias, activation, *rest, *more)
    result = call.emit(apply, apply_to, tag, value=results, **options)
    back = (
        call.emit(ops.experts_return, (result, numbers, mesh, axes), {}, value=results, collective=sends(results))
        if axes
        else result
    )
    return call.emit(ops.experts_combine, (back, order, weights), {})


rule(
    ops.experts_keep, "... t! k! -> ... t! k!"
)  # it selects the first of all tokens: their indices are gathered, not the tokens
rule(ops.experts, experts, linear=linear, added=(DOWN_BIAS, UP_BIAS), local=local, extra=exchange, flops=flops)
