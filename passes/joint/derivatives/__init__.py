"""Find the derivative of each call, once for every distinct call of a program.

    traced       an op of torch, or one of shardc that consists of such ops: the ops that autograd runs for it,
                 recorded on tensors without data
    transposed   a linear op of shardc (conversions, exchanges of experts, dropout, casts of weights, zeros in padding):
                 its backward is an op of the gradient
    product      a product beside a collective: its gradients are products
    opaque       all others, as one op, with its backward as one op (shardc.runtime.ops.opaque): ops of shardc in no
                 set below; ops with a torch kernel for each kind of device; ops that cannot be traced

rule: what a derivative is; rank: the rank on which calls run; template: a call without its graph, equal for calls of
equal layers; record: runs one call under autograd on tensors without data, and records what torch runs. Optional
features bring the derivatives of their ops.

Autograd adds the gradients of a value one after the other, in the order in which it reaches the ops that use it. A sum
of three depends on that order. So a rule adds to the gradient that an operand already has (p), as autograd does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import values_of
from shardc.ir.program import Program
from shardc.optional import table
from shardc.passes.joint.derivatives.opaque import opaque
from shardc.passes.joint.derivatives.rank import Rank
from shardc.passes.joint.derivatives.record import Type, memory_of
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Template, template
from shardc.passes.joint.derivatives.traced import traced
from shardc.passes.joint.derivatives.transposed import (
    CONVERTED,
    EXCHANGES,
    LINEAR,
    begun,
    of_data,
    of_weights,
    transposed,
    waited,
)
from shardc.runtime import ops
from shardc.torch_private import OpOverload

aten = torch.ops.aten

#: Torch ops whose derivative depends on the device.
BY_DEVICE = {
    *(aten.scaled_dot_product_attention.default, aten.rms_norm.default),
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
}
#: Torch ops whose derivative depends on the data: products with and without zeros.
_BY_DATA = {aten.prod.default, aten.prod.dim_int, aten.cumprod.default}
#: Torch ops whose derivative depends on the device if they have a dtype argument.
_BY_DEVICE_AND_DTYPE = {aten.softmax.int, aten.log_softmax.int}
#: Ops of shardc that consist of torch ops.
_OF_TORCH = {ops.log_sum, ops.nll, ops.nll_join, ops.nll_parts, ops.partial_mean}
#: Ops whose results are known by type only: they read buckets, step totals or random numbers.
_BY_TYPE = {ops.gather_start, ops.gather_wait, ops.updated, ops.total, ops.summed, ops.random}
#: Ops whose results have as many rows as the router decides; so have results of ops on these.
_RAGGED = {ops.experts_route, ops.experts_send}

_PARTS = {"whole": None, "data": of_data, "weights": of_weights, "begin": begun, "wait": waited}


#: Facts and rules of torch ops, shared by all programs of this process: they depend on no mesh.
_FACTS: dict[Hashable, Facts] = {}
_RULES: dict[Hashable, Rule] = {}


@dataclass(frozen=True)
class Facts:
    """The types of a call's results; views: for each the operand in whose memory it is on a rank, or -1."""

    types: tuple[Type | None, ...]
    views: tuple[int, ...]


class Rules:
    """The rules of one program's calls. rank: the rank on which they were found."""

    def __init__(self, program: Program) -> None:
        self._program, self.rank = program, Rank(program)
        self._templates: dict[fx.Node, Template] = {}
        self._facts: dict[Hashable, Facts] = {}
        self._rules: dict[Hashable, Rule] = {}

    def template(self, node: fx.Node) -> Template:
        """Return the call without its graph."""
        if node not in self._templates:
            self._templates[node] = template(node)
        return self._templates[node]

    # --- forward

    def facts(self, node: fx.Node, operands: Sequence[Type]) -> Facts:
        """Return the facts of a call for operands of these types."""
        if node.target in _BY_TYPE:
            return self._by_value(node, operands)
        call = self.template(node)
        key = (call.key, tuple(operands))
        cache = _FACTS if isinstance(call.target, OpOverload) else self._facts
        if (facts := cache.get(key) or self._facts.get(key)) is None:
            try:
                facts = cache[key] = self._run(call, operands)
            except Exception:  # code that was not written for tensors without data: use the known types of its results
                facts = self._facts[key] = self._by_value(node, operands)
        return facts

    def _by_value(self, node: fx.Node, operands: Sequence[Type]) -> Facts:
        grad = any(t.grad for t in operands) or node.target in (ops.gather_wait, ops.updated)
        shapes = [(v.local_shape(self._program.mesh), v.dtype, grad and v.requires_grad) for v in values_of(node)]
        return Facts(tuple(Type.contiguous(*pair) for pair in shapes), (-1,) * len(shapes))

    def _run(self, call: Template, operands: Sequence[Type]) -> Facts:
        with self.rank.mode, torch.enable_grad():
            xs = [t.empty() for t in operands]
            result = self.rank.run(call, xs)
        ragged = call.target in _RAGGED or (call.target is not ops.experts_combine and any(t.ragged for t in operands))
        passed_on = call.target in CONVERTED and operands[0].grad  # they are functions without autograd
        types = tuple(
            replace(t, grad=t.grad or passed_on, ragged=ragged) if (t := _type(y)) is not None else None for y in result
        )
        memory = {memory_of(x): i for i, x in reversed(list(enumerate(xs)))}
        return Facts(types, tuple(memory.get(memory_of(y), -1) if isinstance(y, Tensor) else -1 for y in result))

    # --- backward

    def rule(self, node: fx.Node, request: Request, part: str = "whole") -> Rule:
        """Return the derivative of a call, or a part of it (shardc.passes.joint.autograd_order)."""
        call = self.template(node)
        key = (part, call.key, request)
        cache = _RULES if isinstance(call.target, OpOverload) else self._rules
        if key not in cache:
            by_hand = transposed if call.target in CONVERTED or call.target in LINEAR | EXCHANGES.keys() else None
            by_hand = table("passes", "DERIVATIVES").get(call.target) or _PARTS[part] or by_hand
            cache[key] = by_hand(self.rank, call, request) if by_hand else self._derive(node, call, request)
        return cache[key]

    def _derive(self, node: fx.Node, call: Template, request: Request) -> Rule:
        if self._traceable(call) and not any(t.ragged for t in request.operands):
            try:
                return traced(self.rank, call, request)
            except Exception:  # anything that torch's Python, or a user's op, raises on tensors without data
                pass
        return opaque(self.rank, call, request, self.facts(node, request.operands).types)

    def _traceable(self, call: Template) -> bool:
        if not isinstance(call.target, OpOverload):
            return call.target in _OF_TORCH
        with_dtype = call.target in _BY_DEVICE_AND_DTYPE and len(call.args) + len(call.kwargs) > 2
        return not (call.target in BY_DEVICE or call.target in _BY_DATA or with_dtype)


def _type(x: Any) -> Type | None:
    return Type.of(x) if isinstance(x, Tensor) else None
