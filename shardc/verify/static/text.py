"""Check one text, line by line: which value of the model each line computes, and which part of it.

The model's graph is walked from its inputs to the loss. An op's rule says which line of the text runs it on operands
with known claims; that line then has a claim. Claims of conversions follow from their operands. A line that remains
has no claim: it computes nothing that the model does, or not in a way that a rule allows.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, placeholders, producer_of, value_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import Layout, PartialGrad, Placement
from shardc.ir.stored import Bucket
from shardc.optional import table
from shardc.rules.core.registry import LocalCall
from shardc.runtime import ops
from shardc.verify.static import chunked_loss, op_strategies
from shardc.verify.static.follow import follow
from shardc.verify.static.same_values import Model, call_key, misreads
from shardc.verify.static.statement import Claim, of_one_microbatch

aten = torch.ops.aten
_PLUS = {aten.add.Tensor, aten.sub.Tensor}
#: A line that holds a part of a value, and which.
Form = tuple[fx.Node, Claim]


class TooLongError(Exception):
    """The proof takes longer than its time limit."""


@dataclass
class Text:
    """The check of one text.

    graph: of a stage, or of the prologue. given: the claims of its placeholders. totals: the sums of the prologue, by
    number. until: when to stop, on time.perf_counter.

    Then: claims of each line that is right (a constant has several: it is the same part of many values); wrong:
    line -> why it cannot be what the text says; unfit: line -> why nothing follows from one claim of its operands. This
    matters if nothing follows from any of them.
    """

    model: Model
    graph: fx.Graph
    given: Mapping[fx.Node, Sequence[Claim]]
    totals: tuple[tuple[Claim, ...], ...] = ()
    until: float = math.inf

    def __post_init__(self) -> None:
        self.mesh: Mesh = self.model.mesh
        self.claims: dict[fx.Node, list[Claim]] = {}
        self.wrong: dict[fx.Node, str] = {}
        self.unfit: dict[fx.Node, str] = {}
        #: one: each line's first equal line. twins: the lines that are equal to a first one.
        self.one: dict[fx.Node, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.twins: dict[fx.Node, list[fx.Node]] = {}
        #: Unwritten lines that read a line.
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        #: By value of the model: the lines that hold a part of it, with their claims.
        self.forms: dict[fx.Node, list[Form]] = {}
        #: By line that fetches parameters: these, and their bucket.
        self.fetched: dict[fx.Node, tuple[Sequence[fx.Node], Bucket]] = {}
        self.explained: set[fx.Node] = set()
        for node in self.graph.nodes:
            unique = node.op != "call_function" or misreads(node)
            key = chunked_loss.as_ops(self, node)
            key = key or (node if unique else call_key(node.target, node.args, node.kwargs, self.one))
            self.one[node] = self.by_call.setdefault(key, node)
            self.twins.setdefault(self.one[node], []).append(node)
        self.inputs = placeholders(self.graph)
        # a parameter of a cut bucket may be read only after its owners publish it
        cut = {name for b in self.model.program.buckets if b.zero for name in b.params}
        for node, claim in [(n, c) for n, claims in self.given.items() for c in claims if n.name not in cut]:
            self.claim(node, claim)
        for node in self.graph.nodes:  # lines that no claim leads to: they take only the mesh, or buckets
            if node.target in (ops.total, ops.gather_start, ops.updated):
                follow(self, node, node, None)
        others = dict(self._rewritten())
        for call in self.model.calls:
            if time.perf_counter() > self.until:
                raise TooLongError
            for op in (call, *others.get(call, ())):
                self.find(op)

    def _rewritten(self) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """Yield calls of the model that the text may compute by other calls, with these."""
        if any(n.target is aten.full.default and not n.args[0] for n in self.graph.nodes):
            # x + 3: where x is a summand in each microbatch, only one of them adds the 3
            for call in (c for c in self.model.calls if c.target in _PLUS and len(c.args) > 1):
                x, number, *rest = call.args
                if not isinstance(number, fx.Node):
                    of = Value((), dtype := value_of(call).dtype)
                    number = self.model.added(aten.full.default, ([], number), {"dtype": dtype}, of)
                    plus = self.model.added(call.target, (x, number, *rest), dict(call.kwargs), value_of(call), call)
                    yield call, [number, plus]

    def unexplained(self) -> Iterator[fx.Node]:
        """Yield the first unexplained lines: those whose operands are all explained."""
        for node in self.graph.nodes:
            if node.target is ops.in_chunks and node.users.keys() <= self.explained:  # its results are
                continue
            known = all(x in self.explained or x.op == "placeholder" for x in node.all_input_nodes)
            if node.op == "call_function" and node not in self.explained and known:
                yield node

    def unwritten(self, key: Any, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Return a node for a value that the text has no line for, and that other such lines may read."""
        if key not in self.by_call:
            node = fx.Node(fx.Graph(), "unwritten", "call_function", target, args, kwargs)
            for x in node.all_input_nodes:
                del x.users[node]  # the text's graph stays as it is
                self.readers.setdefault(x, []).append(node)
            self.by_call[key] = self.one[node] = node
            self.twins[node] = [node]
        return self.by_call[key]

    # --- claims

    def claim(self, node: fx.Node, claim: Claim) -> None:
        """Record the claim of a line, and follow the lines that read it."""
        one = self.one[node]
        forms = self.forms.setdefault(claim.of, [])
        if (one, claim) in forms:
            return
        forms.append((one, claim))
        for twin in self.twins[one]:
            self.explained.add(twin)
            self.claims.setdefault(twin, []).append(claim)
        for twin in self.twins[one]:
            for user in (*twin.users, *self.readers.get(twin, ())):
                follow(self, user, twin, claim)

    # --- the model's ops

    def find(self, call: fx.Node) -> None:
        """Find the lines that are this op of the model: any forms of its operands, any way its rule allows."""
        ways = list(product(*(self.forms.get(self.model.one[x], ()) for x in operands_of(call))))
        if not ways:
            return
        places = self.model.choices_of(call).places.values()
        if not any(all(place is None for place in ins) for ins, _ in places):
            for way in ways:  # try each: several lines may be this op
                self._match(call, way, {}, strict=False)
            return
        # a constant fits thousands of layouts: its lines in the text say which
        inputs, stored = self.model.program.inputs, [x.layout for x in self.model.program.stored]
        named = [n for n in self.graph.nodes if n.op == "call_function" and n.name in self.model.names[call]]
        shows = [v.layout for n in named for v in values_of(n)]
        hint = op_strategies.hints(call, shows, inputs, self.mesh)
        matched = [self._match(call, way, hint, strict=True) for way in ways]
        if not any(matched) or any(x.microbatch is not None and x.microbatch.padding for x in inputs):
            # no type shows padding of microbatches, or that a view moves
            hint = op_strategies.hints(call, [*stored, *shows], inputs, self.mesh, wide=True)
            for way in ways:
                self._match(call, way, hint, strict=False)

    def _match(self, call: fx.Node, forms: Sequence[Form], hint: op_strategies.Hints, *, strict: bool) -> bool:
        """Claim the lines that are this op on these forms, and return whether there are any.

        hint: see `op_strategies.hints`. strict: only lines count whose type in the text agrees.
        """
        choices, order = self.model.choices_of(call), (line for line, _ in forms)

        def local(n: fx.Node) -> fx.Node:
            return self.inputs[n.name] if n.meta.get("value") is None else next(order)  # the mesh, random numbers

        args = tuple(fx.node.map_arg(call.args, local))
        kwargs = dict(fx.node.map_arg(dict(sorted(call.kwargs.items())), local))
        claims = [claim for _, claim in forms]
        need = tuple(c.layout for c in claims)
        matches: list[tuple[fx.Node, list[fx.Node], tuple[Layout, ...]]] = []
        lines = [line for line, _ in forms]
        for strategies, layouts in op_strategies.fitting(choices, claims, hint, self.mesh):
            touched: list[fx.Node] = []

            def find(target: Any, a: Any, k: dict[str, Any], touched: list[fx.Node] = touched, **_: Any) -> fx.Node:
                touched.append(self.line(target, a, k))
                return touched[-1]

            whole = all(s.kind in ("replicate", "partial_grad", "partial") for s in strategies.values())
            try:
                if whole or choices.rule.local is None:
                    line = find(call.target, args, kwargs)
                else:  # the op as a rank runs it, line by line
                    of = (choices.call, self.mesh, strategies, need, layouts)
                    line = choices.rule.local(LocalCall(*of, args, kwargs, self.inputs["mesh"], find))
            except LookupError:
                continue
            if why := op_strategies.harm_of_padding(self.model, call, strategies, claims, lines):
                self.unfit[line] = why
                continue
            matches.append((line, touched, layouts))
        shown = [(line, touched, layouts) for line, touched, layouts in matches if self._shows(line, layouts)]
        if strict:
            matches = shown
        for line, touched, layouts in shown or matches:
            for node in touched:
                self.explained.update(self.twins[self.one[node]])
            for node in (line, *self._as_bytes(line.target, line.args, line.kwargs)):
                self._result(call, node, layouts)
        return bool(matches)

    def line(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Return the line that is this call. Raises LookupError if there is none."""
        key = call_key(target, args, kwargs, self.one)
        return self.by_call[key] if key in self.by_call else self._as_bytes(target, args, kwargs)[0]

    def _as_bytes(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[fx.Node]:
        """Return the line that computes a call's result as bytes, if there is one: it may be instead or beside."""
        if (as_bytes := table("proof", "AS_BYTES").get(target)) is None:
            return []
        target, args = as_bytes(*args)
        line = self.by_call.get(call_key(target, args, kwargs, self.one))
        return [line] if line is not None else []

    def _shows(self, line: fx.Node, layouts: tuple[Layout, ...]) -> bool:
        """Return whether the text shows these layouts for a line's results (several may fit a constant)."""
        return any(
            all(
                shown(v.layout, self.mesh) == shown(layout, self.mesh, own=True)
                for v, layout in zip(values_of(twin), layouts, strict=False)
            )
            for twin in self.twins[self.one[line]]
        )

    def _result(self, call: fx.Node, line: fx.Node, layouts: tuple[Layout, ...]) -> None:
        if not isinstance(call.meta["value"], tuple):
            self.claim(line, Claim(self.model.one[call], layouts[0]))
            return
        for twin in self.twins[self.one[line]]:
            self.explained.add(twin)
            for user in (u for u in twin.users if u.target is operator.getitem):
                _, index = producer_of(user)
                of = self.model.items.get((call, index))
                self.explained.add(user)
                if of is not None:
                    self.claim(user, Claim(of, layouts[index]))


def shown(layout: Layout, mesh: Mesh, *, own: bool = False, padded: bool = False) -> dict[str, Placement]:
    """Return a layout as texts show it, by axis, without partial gradients.

    own: the layout is a claim's, which has the microbatch axis too. padded: see `of_one_microbatch`.
    """
    if own and MICROBATCH in mesh.names:
        layout = of_one_microbatch(layout, mesh, padded=padded)
    return {a: p for a, p in layout.items if not isinstance(p, PartialGrad)}
