"""Compute a stage's gradients as terms, from the stage's text and the derivative of each call.

    y = linear(x, w)    w's gradient is mm(t(y's gradient), x)

Goes through the calls from the last to the first and adds up each value's gradients. The derivative of a single call
is what autograd runs for it (shardc.passes.joint.derivatives); it is trusted, as rules of ops are. Nothing is planned
here: the joint graphs decide what is kept or recomputed, in which order, and in whose memory.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from typing import Any

from torch import fx

from shardc.ir.graph import is_call, producer_of, values_of
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.types import continuous, nodes_in
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.derivatives.record import Line, Ref, Type, map_refs
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Made, item_name
from shardc.passes.joint.derivatives.transposed import CONVERTED
from shardc.passes.joint.saved import types_of
from shardc.runtime import ops
from shardc.verify.static.terms import Term, Terms
from shardc.verify.static.text import TooLongError


class ChainRule:
    """The terms of everything that a stage returns, and of all its gradients.

    returned: what it returns, as its text does; puts: by the term of a parameter, its name and its gradient; scatters:
    by gathered bucket, the gradients of its parameters; received: by received value, its gradient. fresh: results of
    ops that stay whole, in memory that nothing else has. stops: conversions whose result needs a gradient, but has none
    when the graph is differentiated (for torch's ops autograd says which have one); values that are used only for new
    values of buffers need none.
    """

    def __init__(self, program: Program, stage: Stage, rules: Rules, terms: Terms, until: float) -> None:
        """rules: shared by stages; equal calls have one derivative."""
        self._program, self._graph, self._rules, self._terms, self._until = program, stage.graph, rules, terms, until
        self._types, _ = types_of(program, stage.graph, rules)
        self._returned: Any = stage.graph.output_node().args[0]
        self._values: dict[Made, Term] = {}
        self._lines: dict[fx.Node, dict[int, Term]] = {}
        self.puts: dict[Term, tuple[str, Term]] = {}
        self.scatters: dict[str, tuple[Term | None, ...]] = {}
        self.received: dict[str, Term] = {}
        self.fresh: set[Term] = set()
        self.stops: list[fx.Node] = []
        derivatives = self._derivatives()
        self._forward(derivatives)
        self.returned: Any = fx.map_arg(self._returned, self._value)
        self._backward(derivatives)

    def _derivatives(self) -> dict[fx.Node, Rule]:
        """Return the derivative of each call through which a gradient flows, from types of gradients."""
        rules: dict[fx.Node, Rule] = {}
        grads = {root: self._type(root) for root in self._roots()}  # the sum of a value's gradients so far
        loss, _, *sent = self._returned
        needed = set(nodes_in((loss, sent)))
        for n in reversed(self._graph.nodes):
            if time.perf_counter() > self._until:
                raise TooLongError
            if n in needed and any(v is None or continuous(v) for v in values_of(n)):  # else no gradient flows
                needed.update(n.all_input_nodes)
                t = self._types.get((n, 0)) if n.target in CONVERTED else None
                self.stops += [n] if t is not None and n.meta["value"].requires_grad and not t.grad else []
            tangents = tuple(map(grads.get, _results(n)))
            if all(t is None for t in tangents) or not is_call(n) or n.target in (ops.gather_wait, ops.updated):
                continue
            operands, wanted = self._operands(n)
            known = tuple(map(self._type, operands))
            before = tuple(grads.get(m) if w else None for m, w in zip(operands, wanted, strict=True))
            rules[n] = rule = self._rules.rule(n, Request(known, tangents, before, wanted))
            grads |= {m: t for m, w, t in zip(operands, wanted, rule.types, strict=True) if w and t is not None}
        return rules

    def _operands(self, n: fx.Node) -> tuple[tuple[Made, ...], tuple[bool, ...]]:
        """Return the operands of a call, and whether each needs a gradient."""
        operands = self._rules.template(n).operands
        return operands, tuple(self._type(m).grad for m in operands)

    def _roots(self) -> list[Made]:
        """Return the values whose gradients are inputs: the loss, and values that are sent to other stages."""
        loss, _, *sent = self._returned
        crossing = {name for e in self._program.edges for name, _ in e.differentiable()}
        nodes = [n for n in (sent[0] if sent else ()) if n.name in crossing]
        nodes += [loss] if loss is not None else []
        roots = dict.fromkeys(map(producer_of, nodes))
        return [root for root in roots if (t := self._types[root]) is not None and t.grad]

    def _type(self, made: Made) -> Type:
        t = self._types[made]
        assert t is not None
        return t

    # --- terms

    def _forward(self, derivatives: Mapping[fx.Node, Rule]) -> None:
        for n in self._graph.nodes:
            if n.op == "placeholder":
                self._values[n, 0] = self._terms.given(n.name, self._shape(n, 0))
            elif is_call(n):
                rule = derivatives.get(n)
                if rule is not None and rule.forward is not None:
                    self._decomposed(n, rule)
                else:
                    self._called(n)

    def _value(self, x: fx.Node) -> Any:
        return self._values[producer_of(x)]

    def _called(self, n: fx.Node) -> None:
        single = not _several(n) or n.target is ops.gather_start  # its result is a handle
        args, kwargs = fx.map_arg(n.args, self._value), fx.map_arg(dict(n.kwargs), self._value)
        term = self._terms.call(n.target, args, kwargs, self._shape(n, 0) if single else None)
        if single:
            self._values[n, 0] = term
        else:
            for _, i in _results(n):
                self._values[n, i] = self._terms.call(operator.getitem, (term, i), {}, self._shape(n, i))

    def _shape(self, n: fx.Node, i: int) -> tuple[int, ...] | None:
        t = self._types.get((n, i))
        return None if t is None or t.ragged else t.shape

    def _decomposed(self, n: fx.Node, rule: Rule) -> None:
        """Compute a call as the ops that it consists of, because its backward needs more than its results."""
        terms = self._lines[n] = {}
        assert rule.forward is not None
        for line in rule.forward:
            terms[line.number] = self._line(n, line, terms, ())
        for i, r in enumerate(rule.results):
            if r.kind != "none":
                self._values[n, i] = self._at(n, r, terms, ())

    def _backward(self, derivatives: Mapping[fx.Node, Rule]) -> None:
        """Compute the terms of gradients, from the last call to the first."""
        grads = {root: self._terms.given(f"{item_name(*root)}_grad", self._type(root).shape) for root in self._roots()}
        for n in reversed(self._graph.nodes):
            tangents = tuple(map(grads.get, _results(n)))
            if n in derivatives:
                self._back(n, derivatives[n], tangents, grads)
            elif all(g is None for g in tangents):
                continue
            elif n.target is ops.gather_wait:
                self.scatters[n.args[0].args[1]] = tangents
            elif n.op == "placeholder" and "collective" in n.meta:
                self.received[n.name] = grads[n, 0]
            elif n.op == "placeholder" or n.target is ops.updated:
                params: Any = [n] if n.op == "placeholder" else n.args[0]
                for i, (p, g) in enumerate(zip(params, tangents, strict=True)):
                    if g is not None:
                        self.puts[self._values[n, i]] = (p.name, g)

    def _back(self, n: fx.Node, rule: Rule, tangents: tuple[Term | None, ...], grads: dict[Made, Term]) -> None:
        operands, wanted = self._operands(n)
        before = tuple(grads.get(m) if w else None for m, w in zip(operands, wanted, strict=True))
        terms, inputs = dict(self._lines.get(n, {})), {"g": tangents, "p": before}
        for line in rule.backward:
            terms[line.number] = self._line(n, line, terms, inputs)
            self.fresh |= {terms[line.number]} if line.fresh else set()
        for m, w, r in zip(operands, wanted, rule.grads, strict=True):
            if w and r is not None:
                grads[m] = self._at(n, r, terms, inputs)

    def _line(self, n: fx.Node, line: Line, made: Mapping[int, Term], given: Any) -> Term:
        def put(r: Ref) -> Any:
            if r.kind == "n":
                return self._rules.template(n).names[r.index]
            return self._at(n, r, made, given)

        args, kwargs = map_refs(line.args, put), {k: map_refs(v, put) for k, v in line.kwargs}
        shape = line.types.shape if isinstance(line.types, Type) and not line.types.ragged else None
        return self._terms.call(line.target, args, kwargs, shape)

    def _at(self, n: fx.Node, r: Ref, made: Mapping[int, Term], given: Any) -> Term:
        if r.kind == "x":
            return self._values[self._rules.template(n).operands[r.index]]
        if r.kind == "y":
            return self._values[n, r.index]
        if r.kind == "t":
            return made[r.index]
        if r.kind in ("g", "p"):
            return given[r.kind][r.index]  # type: ignore[no-any-return]
        return self._terms.given(r.kind)  # "mesh", "rng"


def _results(n: fx.Node) -> list[Made]:
    return [(n, i) for i in range(len(n.meta["value"]))] if _several(n) else [(n, 0)]


def _several(n: fx.Node) -> bool:
    return isinstance(n.meta.get("value"), tuple)
