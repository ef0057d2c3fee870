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
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, producer_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import Layout, Partial, PartialGrad, Placement
from shardc.optional import table
from shardc.rules.core.choices import Choices
from shardc.runtime import ops
from shardc.verify.static import chunked_loss, op_types
from shardc.verify.static.follow import follow
from shardc.verify.static.same_values import Model, call_key, frozen, misreads
from shardc.verify.static.statement import Claim, of_one_microbatch

aten = torch.ops.aten
_PLUS = {aten.add.Tensor, aten.sub.Tensor}


class TooLongError(Exception):
    """The proof takes longer than its time limit."""


@dataclass
class Text:
    """The check of one text.

    graph: of a stage, or of the prologue. given: the claims of its placeholders. totals: the sums of the prologue, by
    number. until: when to stop, on time.perf_counter.

    After `run`: claims of each line that is right (a constant has several: it is the same part of many values); wrong:
    line -> why it cannot be what the text says; unfit: line -> why nothing follows from one claim of its operands. This
    matters if nothing follows from any of them.
    """

    model: Model
    graph: fx.Graph
    given: Mapping[fx.Node, Sequence[Claim]]
    totals: tuple[tuple[Claim, ...], ...] = ()
    until: float = math.inf
    claims: dict[fx.Node, list[Claim]] = field(default_factory=dict)
    wrong: dict[fx.Node, str] = field(default_factory=dict)
    unfit: dict[fx.Node, str] = field(default_factory=dict)

    def run(self) -> None:
        self.mesh: Mesh = self.model.mesh
        #: one: each line's first equal line. twins: the lines that are equal to a first one.
        self.one: dict[fx.Node, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.twins: dict[fx.Node, list[fx.Node]] = {}
        #: By value of the model: the lines that hold a part of it, with their claims.
        self.forms: dict[fx.Node, list[tuple[fx.Node, Claim]]] = {}
        #: By line that fetches parameters: the names of these.
        self.fetched: dict[fx.Node, tuple[str, ...]] = {}
        self.explained: set[fx.Node] = set()
        for node in self.graph.nodes:
            unique = node.op != "call_function" or misreads(node)
            key = chunked_loss.as_ops(self, node)
            key = key or (node if unique else call_key(node.target, node.args, node.kwargs, self.one))
            self.one[node] = self.by_call.setdefault(key, node)
            self.twins.setdefault(self.one[node], []).append(node)
        nodes = {n.name: n for n in self.graph.nodes}
        self.mesh_node = nodes["mesh"]
        self.no_tensors = {
            n: nodes[n.name] for n in self.model.graph.nodes if n.op == "placeholder" and n.meta.get("value") is None
        }
        # a parameter of a cut bucket may be read only after its owners publish it
        cut = {name for b in self.model.program.buckets if b.zero for name in b.params}
        for node, claims in self.given.items():
            for claim in list(claims) if node.name not in cut else ():
                self.claim(node, claim)
        for node in self.graph.nodes:  # lines that no claim leads to: they take only the mesh, or buckets
            if node.target in (ops.total, aten.full.default, ops.gather_start, ops.updated):
                follow(self, node, node, None)
        in_chunks = any(n.target is ops.linear_nll for n in self.graph.nodes)
        chunked = dict(chunked_loss.reordered(self.model)) if in_chunks else {}
        for call in self.model.calls:
            if time.perf_counter() > self.until:
                raise TooLongError
            for op in (call, *chunked.get(call, ())):
                self.find(op)

    def unexplained(self) -> Iterator[fx.Node]:
        """Yield the first unexplained lines: those whose operands are all explained."""
        for node in self.graph.nodes:
            known = all(x in self.explained or x.op == "placeholder" for x in node.all_input_nodes)
            if node.op == "call_function" and node not in self.explained and known:
                yield node

    def unwritten(self, key: Any) -> fx.Node:
        """Return a node for a value that the text has no line for."""
        node = self.by_call.setdefault(key, fx.Node(fx.Graph(), "unwritten", "call_function", ops.start, (), {}))
        self.one[node] = node
        self.twins.setdefault(node, [node])
        return node

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
            if twin.target is not ops.linear_nll:  # its loss lines read it as logits; others may not
                self.claims.setdefault(twin, []).append(claim)
        for twin in self.twins[one]:
            for user in list(twin.users):
                follow(self, user, twin, claim)

    # --- the model's ops

    def find(self, call: fx.Node) -> None:
        """Find the lines that are this op of the model: any forms of its operands, any way its rule allows."""
        operands = [self.model.one[x] for x in operands_of(call)]
        forms = {x: self.forms.get(x, []) for x in operands}
        if not all(forms.values()):
            return
        choices = self.model.choices_of(call)
        # an operand that occurs twice mostly has one form: try that first, and independent forms only if it fails
        once = (dict(zip(forms, chosen, strict=True)) for chosen in product(*forms.values()))
        uniform = [[by[x] for x in operands] for by in once]
        mixed = [list(each) for each in product(*(forms[x] for x in operands))] if len(forms) < len(operands) else []
        padded = any(x.microbatch is not None and x.microbatch.padding for x in self.model.program.inputs)
        for hint, strict in self._hints(call, choices):
            for ways in (uniform, mixed):
                # try each: several lines may be this op
                if sum(self._match(call, choices, way, hint, strict=strict) for way in ways):
                    if not strict or not padded:
                        return
                    break  # a constant: no type shows what microbatches pad

    def _hints(self, call: fx.Node, choices: Choices) -> Iterator[tuple[op_types.Hints, bool]]:
        """Yield hints of the result's placements, for `_match`, and whether the text has to agree."""
        if not any(all(place is None for place in ins) for ins, _ in choices.places.values()):
            yield {}, False
            return
        program = self.model.program
        shows = self._shown_of(call)  # a constant fits thousands of layouts: its lines in the text say which
        yield op_types.hints(call, shows, program.inputs, self.mesh), True
        stored = [x.layout for x in program.stored]  # padding that a view moves is in no type
        yield op_types.hints(call, [*stored, *shows], program.inputs, self.mesh, wide=True), False

    def _match(
        self,
        call: fx.Node,
        choices: Choices,
        forms: list[tuple[fx.Node, Claim]],
        hint: op_types.Hints,
        *,
        strict: bool,
    ) -> bool:
        """Claim the lines that are this op on these forms, and return whether there are any.

        hint: see `op_types.hints`. strict: only lines count whose type in the text agrees.
        """
        order = iter(line for line, _ in forms)

        def local(n: fx.Node) -> fx.Node:
            return self.no_tensors[n] if n.meta.get("value") is None else next(order)

        args = tuple(fx.node.map_arg(call.args, local))
        kwargs = dict(fx.node.map_arg(dict(sorted(call.kwargs.items())), local))
        claims = [claim for _, claim in forms]
        need = tuple(c.layout for c in claims)
        matches: list[tuple[fx.Node, list[fx.Node], tuple[Layout, ...]]] = []
        for strategies in op_types.fitting(choices, claims, hint, self.mesh):
            layouts = op_types.results(choices, strategies, self.mesh)
            if layouts is None:
                continue
            touched: list[fx.Node] = []

            def find(target: Any, a: tuple[Any, ...], k: dict[str, Any], touched: list[fx.Node] = touched) -> fx.Node:
                line = self.line(target, a, k)
                touched.append(line)
                return line

            try:
                line = op_types.written(
                    choices, strategies, (need, layouts), args, kwargs, self.mesh, self.mesh_node, find
                )
            except LookupError:
                continue
            lines = [line for line, _ in forms]
            if why := op_types.harm_of_padding(self.model, call, strategies, claims, lines):
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
        if not matches and call.target in _PLUS and len(forms) == 1:
            return self._plus_number(call, *forms[0])
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

    def _shown_of(self, call: fx.Node) -> list[Layout]:
        """Return the layouts of lines that have one of an op's names."""
        names = self.model.names[call]
        named = [n for n in self.graph.nodes if n.op == "call_function" and n.name in names]
        return [v.layout for n in named for v in values_of(n)]

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

    def _plus_number(self, call: fx.Node, x: fx.Node, claim: Claim) -> bool:
        """Claim x + 3, where x is a summand in each microbatch: only one of them adds the 3."""
        number = self.model.others.get(("number", frozen(call.args[1], {}))) if len(call.args) > 1 else None
        for brought, one in self.forms.get(number, []) if number is not None else []:
            line = self.by_call.get(call_key(call.target, (x, brought, *call.args[2:]), call.kwargs, self.one))
            summands = {a for a, p in claim.layout.items if p == Partial()}
            if line is not None and {a for a, p in one.layout.items if p == Partial()} == summands:
                self.claim(line, Claim(call, claim.layout))
                return True
        return False


def shown(layout: Layout, mesh: Mesh, *, own: bool = False, padded: bool = False) -> dict[str, Placement]:
    """Return a layout as texts show it, by axis, without partial gradients.

    own: the layout is a claim's, which has the microbatch axis too. padded: see `of_one_microbatch`.
    """
    if own and MICROBATCH in mesh.names:
        layout = of_one_microbatch(layout, mesh, padded=padded)
    return {a: p for a, p in layout.items if not isinstance(p, PartialGrad)}
