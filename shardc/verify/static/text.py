"""One text, line by line: which value of the model each line computes, and which part of it.

The model's graph is walked from its inputs to the loss. An op of the model is found in the text as the line that its
rule makes of it on operands whose claims are known; that line then has a claim. Conversions follow from what they are
given. What is left has no claim: it computes nothing that the model does, or not in a way that a rule allows.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import fx

from shardc.ir.buckets import Bucket, Rounded
from shardc.ir.graph import calls, operands_of, producer_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import REPLICATE, Layout, Partial, PartialGrad, Placement
from shardc.ir.program import Program
from shardc.rules.choices import Choices, choices_of
from shardc.runtime import ops
from shardc.runtime.ops.fp8_recipe import RECIPES, along
from shardc.verify.static import chunked_loss, op_types
from shardc.verify.static.conversion_types import ROWS, WrongError, converted
from shardc.verify.static.statement import Claim, mesh_of, of_one_microbatch

aten = torch.ops.aten
#: Named arguments that change nothing of what is computed.
_ASIDE = {"tag", "overlap"}
_SAME = {aten.alias.default}
_PLUS = {aten.add.Tensor, aten.sub.Tensor}


class TooLongError(Exception):
    """It takes longer than was asked for."""


class Model:
    """The model's graph, and what is the same in it: two calls of one op on the same values are one value."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.mesh = program, program.graph, mesh_of(program)
        self.weights = op_types.weight_like(program.graph, {p.name for p in program.params})
        self.choices: dict[Any, Choices] = {}
        self.one: dict[fx.Node, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.items: dict[tuple[fx.Node, int], fx.Node] = {}
        #: The padded or split layouts that inputs have: hints for what is made without operands.
        self.seen: list[Layout] = []
        #: Values that are no node of the model's: the number that is added to a sum, truth values as counts.
        self.others: dict[Any, fx.Node] = {}
        self.stand_ins = fx.Graph()
        for node in self.graph.nodes:
            self.one[node] = node
            if node.op != "call_function":
                continue
            if node.target in _SAME:
                self.one[node] = self.one[node.args[0]]
                continue
            key = call_key(node.target, node.args, node.kwargs, self.one)
            self.one[node] = self.by_call.setdefault(key, node)
            if node.target is operator.getitem:
                op, i = producer_of(node)
                self.items[self.one[op], i] = self.one[node]
        self.calls = [n for n in calls(self.graph) if self.one[n] is n and n.target not in _SAME]
        #: All names that one value has.
        self.names: dict[fx.Node, set[str]] = {}
        for node, one in self.one.items():
            self.names.setdefault(one, set()).add(node.name)

    def choices_of(self, node: fx.Node) -> Choices:
        return choices_of(node, self.choices)

    def value(self, of: fx.Node) -> Value:
        (value,) = values_of(of)
        return value

    def added(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Value) -> fx.Node:
        """A call that the model does not write, but that is equal to what it does."""
        node = fx.Node(self.stand_ins, f"added{len(self.one)}", "call_function", target, (), {})
        node.args, node.kwargs, node.meta["value"] = args, kwargs, value
        self.one[node] = node
        return node

    def stand_in(self, key: Any, value: Value) -> fx.Node:
        """A node for a value that the model's graph does not name."""
        if key not in self.others:
            node = self.stand_ins.placeholder(f"other{len(self.others)}")
            node.meta["value"] = value
            self.others[key] = node
        return self.others[key]


def frozen(x: Any, one: Mapping[fx.Node, fx.Node]) -> Any:
    """An argument as a key: equal for what is computed alike."""
    if isinstance(x, fx.Node):
        return one.get(x, x)
    if isinstance(x, tuple | list):
        return tuple(frozen(i, one) for i in x)
    if isinstance(x, dict):
        return tuple(sorted((k, frozen(v, one)) for k, v in x.items()))
    if isinstance(x, slice):
        return ("slice", x.start, x.stop, x.step)
    return (type(x).__name__, repr(x)) if isinstance(x, bool | int | float) else x


def call_key(target: Any, args: Any, kwargs: Mapping[str, Any], one: Mapping[fx.Node, fx.Node]) -> Any:
    named = {k: v for k, v in kwargs.items() if k not in _ASIDE}
    if target is ops.fp8_linear and len(args) > 5 and (x := packed_input(args[5], args[0], args[3], one)) is not None:
        args = (x, *args[1 : 5 if args[4] else 4])  # in whatever form it has its input
    return target, frozen(args, one), frozen(named, one)


@dataclass
class Text:
    """The check of one text.

    graph: of a stage, or of the prologue. given: the claims of its placeholders. totals: what the prologue sums, by
    number. until: when to give up, on time.perf_counter.

    After `run`: claims of each line that is right (a constant has several: it is the same part of many values); wrong:
    line -> why it cannot be what it is written as; unfit: line -> why it is nothing that follows from one of the claims
    of what it takes, which matters where it follows from none.
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
        #: Each line, or the first that reads the same; the lines that do.
        self.one: dict[fx.Node, fx.Node] = {}
        self.by_call: dict[Any, fx.Node] = {}
        self.twins: dict[fx.Node, list[fx.Node]] = {}
        #: The lines that hold a part of a value of the model, with what they hold.
        self.forms: dict[fx.Node, list[tuple[fx.Node, Claim]]] = {}
        #: Lines that fetch parameters: their names.
        self.fetched: dict[fx.Node, tuple[str, ...]] = {}
        self.explained: set[fx.Node] = set()
        for node in self.graph.nodes:
            own = node.op != "call_function" or misreads(node)
            key = node if own else call_key(node.target, node.args, node.kwargs, self.one)
            self.one[node] = self.by_call.setdefault(key, node)
            self.twins.setdefault(self.one[node], []).append(node)
        nodes = {n.name: n for n in self.graph.nodes}
        self.mesh_node = nodes["mesh"]
        self.no_tensors = {
            n: nodes[n.name] for n in self.model.graph.nodes if n.op == "placeholder" and n.meta.get("value") is None
        }
        for node, claims in self.given.items():
            for claim in list(claims):
                self.claim(node, claim)
        for node in self.graph.nodes:  # what is made of nothing but the mesh
            if node.op == "call_function" and node.target in (ops.total, aten.full.default):
                self._follow(node, node, None)
        chunked = {}
        if any(n.target is ops.linear_nll for n in self.graph.nodes):
            chunked = {way.loss: way for way in chunked_loss.reordered(self.model)}
        for call in self.model.calls:
            if time.perf_counter() > self.until:
                raise TooLongError
            self.find(call)
            if call in chunked:
                chunked_loss.find(self, chunked[call])

    def unexplained(self) -> Iterator[fx.Node]:
        """The first lines that hold nothing known: all that they take does."""
        for node in self.graph.nodes:
            known = all(x in self.explained or x.op == "placeholder" for x in node.all_input_nodes)
            if node.op == "call_function" and node not in self.explained and known:
                yield node

    # --- what has a claim

    def claim(self, node: fx.Node, claim: Claim) -> None:
        """A line holds this; and what follows of it."""
        one = self.one[node]
        if claim in self.claims.get(one, ()):
            return
        self.forms.setdefault(claim.of, []).append((one, claim))
        for twin in self.twins[one]:
            self.claims.setdefault(twin, []).append(claim)
            self.explained.add(twin)
        for twin in self.twins[one]:
            for user in list(twin.users):
                self._follow(user, twin, claim)

    def _follow(self, user: fx.Node, x: fx.Node, claim: Claim | None) -> None:
        """A line that is no op of the model's, but a conversion of a value, or the fetching of a parameter."""
        target = user.target
        if misreads(user):
            self.unfit[user] = "it reads the bytes of 8-bit numbers as values"
        elif target is ops.total:
            self._total(user)
        elif target in (ops.gather_start, ops.updated, ops.gather_wait):
            self._fetch(user)
        elif target is operator.getitem and user.args[0] in self.fetched:
            self._parameter(user)
        elif target is aten.full.default:
            self._number(user)
        elif claim is None or user.op != "call_function" or not user.args or user.args[0] is not x:
            return
        elif target in ROWS:
            try:
                self.claim(user, converted(user, claim, self.model.value(claim.of), self.mesh))
            except WrongError as e:
                self.unfit[user] = str(e)
        elif target in _SAME:
            self.claim(user, claim)
        elif target is ops.all_reduce_max:
            self._maximum(user, claim)
        elif target is ops.fill_padding:
            self._fill(user, claim)
        elif target is ops.fp8_pack and len(user.args) < 4:  # else it is the model's `fp8_round`: see `line`
            if claim.of.target is ops.fp8_round and frozen(user.args[1:], {}) == frozen(claim.of.args[2:], {}):
                self.explained.add(user)
            else:
                self.unfit[user] = "it makes 8 bits of what is not rounded to them"
        elif target is ops.cast_once:
            cast = self._cast(claim, user.args[2])
            if cast is not None:
                self.claim(user, replace(claim, of=cast))
        elif target is ops.summed:
            if claim.layout[MICROBATCH] == Partial():
                self.claim(user, replace(claim, layout=claim.layout.replace(MICROBATCH, REPLICATE, self.mesh)))
            else:
                self.unfit[user] = "it adds up over microbatches what is no summand of them"
        elif target is aten._to_copy.default:
            self._counted(user, claim)

    def _fill(self, node: fx.Node, claim: Claim) -> None:
        """`fill_padding(x, mesh, dim, digits, size, padding, blocks, fill)`: all but the last follow from the claim."""
        dim: Any = node.args[2]
        number: Any = node.args[7] if len(node.args) > 7 else 0.0
        shards = claim.layout.shards(dim)
        if shards:
            s, size = shards[0][1], self.model.value(claim.of).shape[dim]
            right = (tuple((a, t.signed) for a, t in shards), size, s.padding, s.blocks)
            if frozen(node.args[3:7], {}) == frozen(right, {}):
                fills = {(d, x) for d, x in claim.fills if d != dim} | {(dim, float(number))}
                self.claim(node, replace(claim, fills=frozenset(fills)))
                return
        self.unfit[node] = f"it fills the padding of another part than {claim.layout or 'the whole'}"

    def _maximum(self, node: fx.Node, claim: Claim) -> None:
        axes: Any = node.args[2]
        parts = [part for a in axes for part in self.mesh.parts(a)]
        if all(claim.layout[p] == Partial("max") for p in parts):
            layout = claim.layout
            for p in parts:
                layout = layout.replace(p, REPLICATE, self.mesh)
            self.claim(node, replace(claim, layout=layout))

    def _cast(self, claim: Claim, dtype: Any) -> fx.Node | None:
        """The model's cast of a value to a dtype; the value itself, if it has that already."""
        if self.model.value(claim.of).dtype == dtype:
            return claim.of
        key = call_key(aten._to_copy.default, (claim.of,), {"dtype": dtype}, self.model.one)
        return self.model.by_call.get(key)

    def _total(self, node: fx.Node) -> None:
        """A sum over all microbatches, and maybe axes, that the prologue has made."""
        number: Any = node.args[1]
        over: Any = node.args[2] if len(node.args) > 2 else ()
        if not isinstance(number, int) or number >= len(self.totals):
            self.wrong[node] = f"the prologue has no sum {number}"
            return
        for claim in self.totals[number]:
            layout = claim.layout
            parts = (MICROBATCH, *(p for a in over for p in self.mesh.parts(a)))
            if late := [p for p in parts if layout[p] != Partial()]:
                self.wrong[node] = f"over {', '.join(late)} it adds up what is no summand there"
                continue
            for part in parts:
                layout = layout.replace(part, REPLICATE, self.mesh)
            self.claim(node, replace(claim, layout=layout))

    def _counted(self, node: fx.Node, claim: Claim) -> None:
        """Truth values as numbers, to be added up among zeros; and back."""
        value, dtype = self.model.value(claim.of), node.kwargs.get("dtype")
        back = {of: key[1] for key, of in self.model.others.items() if key[0] == "counted"}
        if value.dtype == torch.bool and dtype == torch.uint8 and self._cast(claim, dtype) is None:
            counted = self.model.stand_in(("counted", claim.of), replace(value, dtype=torch.uint8))
            self.claim(node, replace(claim, of=counted))
        elif claim.of in back and dtype == torch.bool:
            self.claim(node, replace(claim, of=back[claim.of]))

    def _number(self, node: fx.Node) -> None:
        """A number by itself, as where a sum of microbatches gets it once."""
        dtype = node.kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and not node.args[0]:
            of = self.model.stand_in(("number", frozen(node.args[1], {})), Value((), dtype))
            self.claim(node, Claim(of, Layout()))

    # --- parameters in buckets

    def _fetch(self, node: fx.Node) -> None:
        """The lines that give a bucket's parameters whole on the data axis; anew for each that has a claim."""
        first: Any = node.args[0]
        if node.target is ops.gather_wait:
            if first not in self.fetched:
                return
            names = self.fetched[first]
        else:
            names = tuple(x.name for x in first)
            bucket = self._bucket(node.args[1])
            if bucket is None or bucket.params != names:
                has = ", ".join(bucket.params) if bucket else "none"
                self.wrong[node] = f"{node.args[1]} has other parameters: {has}"
                return
            if node.target is not (ops.gather_start if bucket.zero == 3 else ops.updated):
                self.wrong[node] = f"{node.args[1]} is at zero {bucket.zero}"
                return
        self.fetched[node] = names
        self.explained.add(node)
        for user in node.users:
            self._follow(user, node, None)

    def _bucket(self, name: Any) -> Bucket | None:
        return {f"bucket{i}": b for i, b in enumerate(self.model.program.buckets)}.get(name)

    def _parameter(self, node: fx.Node) -> None:
        """One of a bucket's parameters, in the dtype that ops want."""
        behind, index = producer_of(node)
        if behind.target is ops.gather_start:
            self.wrong[node] = "it reads a bucket that is still on its way"
            return
        started: Any = behind.args[0] if behind.target is ops.gather_wait else behind
        bucket = self._bucket(started.args[1])
        assert bucket is not None
        source = started.args[0][index]
        for claim in self.claims.get(source, ()):
            of = claim.of if bucket.compute is None else self._cast(claim, bucket.compute)
            if of is None:
                self.wrong[node] = f"the model has no cast of {source.name} to {bucket.compute}"
            elif not bucket.rounded:
                self.claim(node, replace(claim, of=of))
            else:
                self._rounded(node, replace(claim, of=of), bucket.rounded[index])

    def _rounded(self, node: fx.Node, claim: Claim, how: Rounded) -> None:
        """A parameter that is rounded before it is gathered: it stands for what the model rounds, and, as rounding
        changes no scale, for the parameter where the model looks for one. Nothing else may read it.
        """
        readers = [n for n in self.model.graph.nodes if n.op == "call_function" and claim.of in operands_of(n)]
        rounds = [n for n in readers if rounds_so(n, claim.of, how)]
        scales = [n for n in readers if n.target is ops.fp8_amax and tuple(n.args[1]) == how.granule]
        other = [n for n in readers if n not in rounds and n not in scales]
        split = {a for a, s in claim.layout.shards() if how.granule[s.dim] == 0}
        if other or not rounds:
            what = f"{other[0].name} reads it otherwise" if other else "the model does not round it"
            self.wrong[node] = f"it is rounded to float8 before it is gathered, and {what}"
        elif split != {part for a in how.axes for part in self.mesh.parts(a)}:
            over = ", ".join(sorted(split)) or "no axis"
            self.wrong[node] = f"its scales are compared over {how.axes}, and what has one scale is split over {over}"
        else:
            self.claim(node, claim)

    # --- the model's ops

    def find(self, call: fx.Node) -> None:
        """The lines that are this op of the model: on any forms of its operands, by any way that its rule allows."""
        operands = [self.model.one[x] for x in operands_of(call)]
        forms = {x: self.forms.get(x, []) for x in operands}
        if not all(forms.values()):
            return
        choices = self.model.choices_of(call)
        # an operand that is used twice is mostly used in one form: so first, and by each for itself only if need be
        once = (dict(zip(forms, chosen, strict=True)) for chosen in product(*forms.values()))
        alike = [[by[x] for x in operands] for by in once]
        apart = [list(each) for each in product(*(forms[x] for x in operands))] if len(forms) < len(operands) else []

        def matches(hint: op_types.Hints, *, shown_alone: bool = False) -> bool:
            """Each way is tried: several lines may be this op."""
            for ways in (alike, apart):
                if sum(self._match(call, choices, way, hint, shown_alone=shown_alone) for way in ways):
                    return True
            return False

        if not any(all(place is None for place in ins) for ins, _ in choices.places.values()):
            matches({})
            return
        shows = self._shown_of(call)  # what its lines show is tried first: what a constant may be is thousands of ways
        if not matches(op_types.hints(call, shows, self.mesh, shows=True), shown_alone=True):
            matches(op_types.hints(call, [*self.model.seen, *shows], self.mesh))

    def _match(
        self,
        call: fx.Node,
        choices: Choices,
        forms: list[tuple[fx.Node, Claim]],
        hint: op_types.Hints,
        *,
        shown_alone: bool,
    ) -> bool:
        """Is there a line that is this op on these forms? It gets its claim. shown_alone: only if the text says so."""
        order = iter(line for line, _ in forms)

        def local(n: fx.Node) -> fx.Node:
            return self.no_tensors[n] if n.meta.get("value") is None else next(order)

        args = tuple(fx.node.map_arg(call.args, local))
        kwargs = dict(fx.node.map_arg(dict(sorted(call.kwargs.items())), local))
        claims = [claim for _, claim in forms]
        need = tuple(c.layout for c in claims)
        found: list[tuple[fx.Node, list[fx.Node], tuple[Layout, ...]]] = []
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
            if why := op_types.harm_of_padding(call, strategies, claims, self.model.weights, lines):
                self.unfit[line] = why
                continue
            found.append((line, touched, layouts))
        shown = [(line, touched, layouts) for line, touched, layouts in found if self._shows(line, layouts)]
        if shown_alone:
            found = shown
        for line, touched, layouts in shown or found:
            for each in touched:
                self.explained.update(self.twins[self.one[each]])
            for each in (line, *self._as_bytes(line)):
                self._result(call, each, layouts)
        if not found and call.target in _PLUS and len(forms) == 1:
            return self._plus_number(call, *forms[0])
        return bool(found)

    def line(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The line that is this call. Raises LookupError if there is none."""
        key = call_key(target, args, kwargs, self.one)
        if target is ops.fp8_round and key not in self.by_call:  # it gives bytes at once
            x, amax, format, granule = args
            key = call_key(ops.fp8_pack, (x, format, granule, amax), kwargs, self.one)
        return self.by_call[key]

    def _as_bytes(self, line: fx.Node) -> list[fx.Node]:
        """The line that gives bytes of what this one rounds, beside it: of two products one takes what is gathered."""
        if line.target is not ops.fp8_round:
            return []
        x, amax, format, granule = line.args
        also = self.by_call.get(call_key(ops.fp8_pack, (x, format, granule, amax), line.kwargs, self.one))
        return [also] if also is not None else []

    def _shows(self, line: fx.Node, layouts: tuple[Layout, ...]) -> bool:
        """Does the text say that a line is this? Of the ways that all fit a constant, the one that the text means."""
        return any(
            all(
                shown(v.layout, self.mesh) == shown(layout, self.mesh, own=True)
                for v, layout in zip(values_of(twin), layouts, strict=False)
            )
            for twin in self.twins[self.one[line]]
        )

    def _shown_of(self, call: fx.Node) -> list[Layout]:
        """The layouts that lines of an op's names have."""
        names = self.model.names[call]
        named = [n for n in self.graph.nodes if n.op == "call_function" and n.name in names]
        return [v.layout for n in named for v in values_of(n)]

    def _result(self, call: fx.Node, line: fx.Node, layouts: tuple[Layout, ...]) -> None:
        if not isinstance(call.meta["value"], tuple):
            self.claim(line, Claim(call, layouts[0]))
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
        """x + 3, where x is a sum of microbatches: the first of them brings the 3."""
        number = self.model.others.get(("number", frozen(call.args[1], {}))) if len(call.args) > 1 else None
        for brought, one in self.forms.get(number, []) if number is not None else []:
            line = self.by_call.get(call_key(call.target, (x, brought, *call.args[2:]), call.kwargs, self.one))
            summands = {a for a, p in claim.layout.items if p == Partial()}
            if line is not None and {a for a, p in one.layout.items if p == Partial()} == summands:
                self.claim(line, Claim(call, claim.layout))
                return True
        return False


def packed_input(kept: Any, x: Any, recipe: Any, one: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The line that is a product's rounded input, where these are its bytes as the product reads them: x, or, where
    the bytes were made of what was not rounded, they themselves. None where they are something else.
    """
    if not isinstance(kept, fx.Node) or kept.target is not ops.fp8_pack:
        return None
    of, format, granule, *amax = kept.args
    how = format, tuple(granule)  # type: ignore[arg-type]
    if frozen(of, one) is not frozen(x, one) or how != ("e4m3", along(RECIPES[recipe].x, len(how[1]))):
        return None
    return kept if amax else one.get(x, x)


def misreads(node: fx.Node) -> bool:
    """Does an op read bytes of 8-bit numbers as values?"""
    kept = node.args[5:6] if node.target is ops.fp8_linear else ()
    return any(x.target is ops.fp8_pack and x not in kept for x in node.all_input_nodes)


def rounds_so(reader: fx.Node, x: fx.Node, how: Rounded) -> bool:
    """Does an op of the model round x so, and do nothing else with it?"""
    if reader.target is ops.fp8_experts:
        granule = (1, 0, 1) if reader.args[8] else (1, 1, 0)
        weight = x in reader.args[3:5] and sum(a is x for a in reader.args) == 1
        return weight and (how.format, how.granule) == ("e4m3", granule)
    if reader.target is ops.fp8_linear:
        recipe, transposed = RECIPES[str(reader.args[3])], len(reader.args) > 4 and bool(reader.args[4])
        return reader.args[1] is x is not reader.args[0] and (how.format, how.granule) == (
            "e4m3",
            recipe.of_weight(transposed),
        )
    return False


def shown(layout: Layout, mesh: Mesh, *, own: bool = False, padded: bool = False) -> dict[str, Placement]:
    """A layout as texts show it, by axis; whether a gradient is a summand is left out. own: it is not a text's, but has
    the microbatches too. padded: `of_one_microbatch`.
    """
    if own and MICROBATCH in mesh.names:
        layout = of_one_microbatch(layout, mesh, padded=padded)
    return {a: p for a, p in layout.items if not isinstance(p, PartialGrad)}
