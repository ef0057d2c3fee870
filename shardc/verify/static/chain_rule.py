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
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardc.ir.graph import is_call, producer_of
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.derivatives.record import Line, Ref, Type, map_refs
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Made, item_name
from shardc.passes.joint.saved import types_of
from shardc.runtime import ops
from shardc.verify.static.terms import Term, Terms
from shardc.verify.static.text import TooLongError


@dataclass
class Results:
    """The terms of one stage.

    returned: what it returns, as its text does; puts: by the term of a parameter, its name and its gradient; scatters:
    by gathered bucket, the gradients of its parameters; received: by received value, its gradient. fresh: results of
    ops that stay whole, in memory that nothing else has.
    """

    returned: tuple[Any, ...]
    puts: dict[int, tuple[str, int]] = field(default_factory=dict)
    scatters: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)


@dataclass
class _Step:
    """The derivative of one call: gradients of its results (tangents), of operands before and after it."""

    node: fx.Node
    rule: Rule
    tangents: tuple[int | None, ...]
    before: tuple[int | None, ...]
    after: tuple[int | None, ...]


class ChainRule:
    """The chain rule of one stage. rules: shared by stages; equal calls have one derivative."""

    def __init__(self, program: Program, stage: Stage, rules: Rules, terms: Terms, until: float) -> None:
        self._program, self._stage, self._rules, self._terms, self._until = program, stage, rules, terms, until
        self._types, _ = types_of(program, stage.graph, rules)
        self._steps: list[_Step] = []
        self._grads: list[Type] = []  # types of gradients, by number; each is a sum so far
        self._of: dict[Made, int] = {}  # a value's gradient so far
        self._begin: dict[int, Made] = {}
        self._leaves: list[tuple[Made, int]] = []
        self._gathered: list[tuple[fx.Node, tuple[int | None, ...]]] = []
        self._values: dict[Made, int] = {}
        self._lines: dict[fx.Node, dict[int, int]] = {}
        self._fresh: set[int] = set()

    def results(self) -> Results:
        """Compute the terms of everything that the stage returns, and of all its gradients."""
        self._derive()
        self._forward()
        grads: dict[int, int] = {
            g: self._terms.given(f"{item_name(*root)}_grad", self._type(root).shape) for g, root in self._begin.items()
        }
        for step in self._steps:
            self._back(step, grads)
        returned: Any = self._stage.graph.output_node().args[0]

        def value(n: fx.Node) -> Any:
            return Term(self._values[producer_of(n)])

        result = Results(fx.map_arg(returned, value), fresh=self._fresh)
        for (n, i), g in self._leaves:
            if "collective" in n.meta and n.op == "placeholder":
                result.received[n.name] = grads[g]
            else:
                of: Any = n if n.op == "placeholder" else n.args[0][i]  # type: ignore[index]
                result.puts[self._values[n, i]] = (of.name, grads[g])
        for start, numbers in self._gathered:
            result.scatters[start.args[1]] = tuple(None if g is None else grads[g] for g in numbers)  # type: ignore[index]
        return result

    # --- the derivatives, and the gradients that they add to

    def _derive(self) -> None:
        for root in self._roots():
            self._begin[self._new(self._type(root))] = root
            self._of[root] = len(self._grads) - 1
        for n in reversed(list(self._stage.graph.nodes)):
            if time.perf_counter() > self._until:
                raise TooLongError
            results = [(n, i) for i in range(len(n.meta["value"]))] if _several(n) else [(n, 0)]
            tangents = tuple(self._of.get(m) for m in results)
            if all(g is None for g in tangents):
                continue
            if n.target is ops.gather_wait:
                self._gathered.append((n.args[0], tangents))
            elif n.op == "placeholder" or n.target is ops.updated:
                self._leaves += [(m, g) for m, g in zip(results, tangents, strict=True) if g is not None]
            elif is_call(n):
                self._step(n, tangents)

    def _step(self, n: fx.Node, tangents: tuple[int | None, ...]) -> None:
        operands = self._rules.template(n).operands
        needed = tuple(self._type(m).grad for m in operands)
        before = tuple(self._of.get(m) if w else None for m, w in zip(operands, needed, strict=True))
        known = tuple(map(self._type, operands))
        rule = self._rules.rule(n, Request(known, self._type_of(tangents), self._type_of(before), needed))
        after: list[int | None] = []
        for operand, w, t in zip(operands, needed, rule.types, strict=True):
            after.append(None if t is None or not w else self._new(t))
            if after[-1] is not None:
                self._of[operand] = after[-1]
        self._steps.append(_Step(n, rule, tangents, before, tuple(after)))

    def _roots(self) -> list[Made]:
        """Return the values whose gradients are inputs: the loss, and values that are sent to other stages."""
        returned: Any = self._stage.graph.output_node().args[0]
        loss, _, *sent = returned
        crossing = {name for e in self._program.edges for name, _ in e.differentiable()}
        nodes = [n for n in (sent[0] if sent else ()) if n.name in crossing]
        nodes += [loss] if loss is not None else []
        roots = dict.fromkeys(map(producer_of, nodes))
        return [root for root in roots if (t := self._types[root]) is not None and t.grad]

    def _new(self, t: Type) -> int:
        self._grads.append(t)
        return len(self._grads) - 1

    def _type(self, made: Made) -> Type:
        t = self._types[made]
        assert t is not None
        return t

    def _type_of(self, grads: tuple[int | None, ...]) -> tuple[Type | None, ...]:
        return tuple(None if g is None else self._grads[g] for g in grads)

    # --- terms

    def _forward(self) -> None:
        rules = {s.node: s.rule for s in self._steps}
        for n in self._stage.graph.nodes:
            if n.op == "placeholder":
                self._values[n, 0] = self._terms.given(n.name, self._shape(n, 0))
            elif is_call(n):
                rule = rules.get(n)
                if rule is not None and rule.forward is not None:
                    self._decomposed(n, rule)
                else:
                    self._called(n)

    def _called(self, n: fx.Node) -> None:
        def put(x: fx.Node) -> Any:
            return Term(self._values[producer_of(x)])

        single = not _several(n) or n.target is ops.gather_start  # its result is a handle
        args, kwargs = fx.map_arg(n.args, put), fx.map_arg(dict(n.kwargs), put)
        term = self._terms.call(n.target, args, kwargs, self._shape(n, 0) if single else None)
        if single:
            self._values[n, 0] = term
        else:
            for i in range(len(n.meta["value"])):
                self._values[n, i] = self._terms.call(operator.getitem, (Term(term), i), {}, self._shape(n, i))

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

    def _back(self, step: _Step, grads: dict[int, int]) -> None:
        n = step.node
        terms = dict(self._lines.get(n, {}))
        gradients = (tuple(None if g is None else grads[g] for g in each) for each in (step.tangents, step.before))
        inputs = dict(zip("gp", gradients, strict=True))
        for line in step.rule.backward:
            terms[line.number] = self._line(n, line, terms, inputs)
            self._fresh |= {terms[line.number]} if line.fresh else set()
        for r, g in zip(step.rule.grads, step.after, strict=True):
            if r is not None and g is not None:
                grads[g] = self._at(n, r, terms, inputs)

    def _line(self, n: fx.Node, line: Line, made: Mapping[int, int], given: Any) -> int:
        def put(r: Ref) -> Any:
            if r.kind == "n":
                return self._rules.template(n).names[r.index]
            return Term(self._at(n, r, made, given))

        args, kwargs = map_refs(line.args, put), {k: map_refs(v, put) for k, v in line.kwargs}
        shape = line.types.shape if isinstance(line.types, Type) and not line.types.ragged else None
        return self._terms.call(line.target, args, kwargs, shape)

    def _at(self, n: fx.Node, r: Ref, made: Mapping[int, int], given: Any) -> int:
        if r.kind == "x":
            return self._values[self._rules.template(n).operands[r.index]]
        if r.kind == "y":
            return self._values[n, r.index]
        if r.kind == "t":
            return made[r.index]
        if r.kind in ("g", "p"):
            return given[r.kind][r.index]  # type: ignore[no-any-return]
        return self._terms.given(r.kind)  # "mesh", "rng"


def _several(n: fx.Node) -> bool:
    return isinstance(n.meta.get("value"), tuple)
