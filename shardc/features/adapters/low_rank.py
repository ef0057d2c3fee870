"""Write the ops of an adapter beside those that use its weight.

    linear(x, w, b)              + scale * linear(linear(dropout(x), A), B)
    addmm(b, x, w), mm(x, w)     the same; w is [in, out]
    experts(x, .., up, down)     up + scale * bmm(B, A) in the place of up: an expert's rows are known in the op alone

They are the same as peft's (tuners/lora/layer.py, dora.py): A and B are weights of linear layers without biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.adapters.program import MAGNITUDE, A, Adapter, B, adapter_fqn
from shardc.features.adapters.section import of
from shardc.ir.graph import operands_of, placeholders, source_of, stored_alone, value_of
from shardc.ir.patterns import names_weight
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param, whole_name
from shardc.passes.canonical.random_streams import number_random
from shardc.passes.canonical.rewrite import Emit
from shardc.rules.experts import DOWN, TRANSPOSED, UP
from shardc.runtime import ops
from shardc.spec import Spec
from shardc.spec.yaml_reader import Path

aten = torch.ops.aten
_CAST = aten._to_copy.default
#: Products with a matrix: (places of input, weight and bias among the arguments, is the weight [in, out]?).
_PRODUCTS: dict[Any, tuple[int, int, int, bool]] = {
    aten.linear.default: (0, 1, 2, False),
    aten.mm.default: (0, 1, -1, True),
    aten.matmul.default: (0, 1, -1, True),
    aten.addmm.default: (1, 2, 0, True),
}


@dataclass(frozen=True)
class _Use:
    """A call that multiplies by a weight, or leads to the op of experts. place: of the weight, or -1.

    weight: as the call takes it. flipped, stored: whether it is [.., in, out] there, and as the model stores it.
    """

    call: fx.Node
    weight: fx.Node
    place: int
    flipped: bool
    stored: bool


@dataclass
class LowRank:
    """Writes the adapters of a spec into a program's graph, which it changes."""

    spec: Spec
    program: Program
    errors: Errors
    wrong: Set[Path]  # entries with an error already
    made: list[Param] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)

    def run(self) -> Program:
        program, graph = self.program, self.program.graph
        nodes = placeholders(graph)
        self.entries = of(self.spec).adapters
        self.emit = Emit(graph, nodes["rng"])
        self.last = nodes[program.params[-1].name]
        self.aliases = program.module_aliases
        adapted, beaten = set[int](), set[int]()
        parts = sorted(filter(_quantised, program.params), key=lambda p: math.prod(p.shape))
        largest = {whole_name(p.fqn): p.name for p in parts}.values()  # the part with the numbers, not the scales
        for p in program.params:
            quantised = _quantised(p)
            if (len(p.shape) < 2 and not quantised) or (quantised and p.name not in largest):
                continue
            every = list((_quantised_uses if quantised else _uses)(nodes[p.name]))
            groups: dict[tuple[str, ...], list[_Use]] = {}
            for use in filter(None, every):  # by the names of the weight in the module that multiplies
                names = (self._inside(p, use) or (p.fqn,)) if p.aliases else p.names
                groups.setdefault(names, []).append(use)
            for names, uses in groups.items():
                matching = [i for i, e in enumerate(self.entries) if any(names_weight(e.match, n) for n in names)]
                if matching:
                    adapted.add(matching[0])
                    beaten.update(matching[1:])
                    self._adapt(p, names, matching[0], uses, whole=None not in every and len(groups) == 1)
        for i, e in enumerate(self.entries):
            if i in adapted or ("adapters", i, "match") in self.wrong:
                continue
            fault = f"{e.match!r} names no weight of a product that supports an adapter"
            fix = "name linear layers, or experts; not embeddings, norms, convolutions or biases"
            if i in beaten:
                fault, fix = f"{e.match!r} never wins: entries before it match all that it matches", "move it up"
            self.errors.add(fault, where=self.spec.where(("adapters", i, "match")), fix=fix)
        number_random(graph)
        graph.eliminate_dead_code()
        graph.lint()
        features = {**program.features, "adapters": tuple(self.adapters)}
        return replace(program, params=(*program.params, *self.made), features=features)

    # --- one weight

    def _inside(self, p: Param, use: _Use) -> tuple[str, ...]:
        """Return the names of a weight in the module that multiplies by it; () if that is the module of others."""
        module = source_of(use.call).module
        around = self.aliases.get(module, (module,))
        return tuple(n for n in p.names if whole_name(n).rpartition(".")[0] in around)

    def _adapt(self, p: Param, names: Sequence[str], number: int, uses: Sequence[_Use], *, whole: bool) -> None:
        """Write adapter `number` of the spec beside one weight, where it is used by these names."""
        where, entry = self.spec.where(("adapters", number)), self.entries[number]
        fqn = p.fqn if p.members else names[0]
        grouped, flipped = any(u.place < 0 for u in uses), uses[0].stored
        if len(p.shape) > 3 or any(u.stored != flipped for u in uses):
            fault = f"{fqn} is multiplied in a way that adapters do not support: {source_of(uses[0].call)}"
            self.errors.add(fault, where=where, fix="leave it out of `match`")
            return
        if grouped and (entry.dropout or entry.kind == "dora"):
            option = "dropout" if entry.dropout else "kind: dora"
            fault = f"{option} of adapters of experts ({fqn}): the input of an expert is known only inside its op"
            self.errors.add(fault, where=where, fix=f"a separate entry for experts, without {option}")
            return
        if entry.kind == "dora" and _quantised(p):
            fault = f"kind: dora of {whole_name(fqn)}: it is quantised, and has no rows whose lengths are known"
            self.errors.add(fault, where=where, fix="kind: lora, or rslora")
            return
        *experts, rows, columns = shape = _shape(p, uses[0])
        n, k = (columns, rows) if flipped else (rows, columns)
        out, into = (len(shape) - 1, len(shape) - 2) if flipped else (len(shape) - 2, len(shape) - 1)
        last = len(shape) - 1
        dtype = p.dtype if not _quantised(p) else _floating(uses[0])
        a = self._param(p, fqn, dtype, A, (*experts, entry.rank, k), {0: 0, into: last} if experts else {into: last})
        b_dims = {0: 0, out: last - 1} if experts else {out: last - 1}
        b = self._param(p, fqn, dtype, B, (*experts, n, entry.rank), b_dims)
        m = self._param(p, fqn, dtype, MAGNITUDE, (n,), {out: 0}) if entry.kind == "dora" else None
        made, alpha = (a.name, b.name, m.name if m is not None else ""), entry.alpha or float(entry.rank)
        inside = all(u.place < 0 or self._inside(p, u) for u in uses)
        adapter = Adapter(p.name, *made, entry.kind, entry.rank, alpha, entry.dropout, flipped, inside, whole)
        self.adapters.append(adapter)
        for use in uses:
            self.emit.source = source_of(use.call)
            # both are read at the call, in the dtype in which it takes the weight
            dtype = value_of(use.weight).dtype
            if grouped:
                with self.program.graph.inserting_before(use.call):
                    factors = [self.emit.cast(x, dtype) for x in (a, b)]
                    summed = self._summed(use, use.weight, factors, adapter)
                use.call.replace_input_with(use.weight, summed)
                continue
            with self.program.graph.inserting_before(_result(use.call).next):
                factors = [self.emit.cast(x, dtype) for x in (a, b)]
                self._add_adapter(use, factors, self.emit.cast(m, dtype) if m is not None else None, adapter)

    def _param(
        self, base: Param, named: str, dtype: torch.dtype, part: str, shape: tuple[int, ...], dims: dict[int, int]
    ) -> fx.Node:
        """Add a parameter beside a weight of this name; return its node. dims: {dim of the weight: its own dim}."""
        shards = {
            axis: replace(s, dim=dims[s.dim]) if isinstance(s, Shard) and s.dim in dims else None
            for axis, s in (base.layout.items if len(base.shape) > 1 else ())  # nothing is known of blocks in a row
        }
        layout = Layout(tuple((axis, s) for axis, s in shards.items() if s is not None))
        fqn = adapter_fqn(named, part)
        graph = self.program.graph
        with graph.inserting_after(self.last):
            node = graph.placeholder("".join(c if c.isalnum() else "_" for c in fqn).strip("_"))
        node.target = node.name
        members = tuple(adapter_fqn(n, part) for n in base.members)
        p = Param(node.name, fqn, shape, dtype, True, layout=layout, members=members, added=True)
        beside = placeholders(graph)[base.name].meta
        cause = {axis: text for axis, text in beside.get("cause", {}).items() if shards.get(axis) is not None}
        node.meta = {**beside, "value": replace(p.value, layout=Layout()), "cause": cause}
        self.made.append(p)
        self.last = node
        return node

    # --- ops

    def _add_adapter(self, use: _Use, factors: Sequence[fx.Node], m: fx.Node | None, adapter: Adapter) -> None:
        """Add the adapter's result to the result of a product with a matrix."""
        emit, call = self.emit, use.call
        x_at, _, bias_at, _ = _PRODUCTS[call.target]
        scaled = _result(call)
        x = call.args[x_at]
        bias = call.args[bias_at] if 0 <= bias_at < len(call.args) else None
        assert isinstance(x, fx.Node)
        (a, b), users = factors, list(scaled.users)
        dropped = emit.dropout(x, adapter.dropout)
        low = emit(aten.linear.default, emit(aten.linear.default, dropped, a), b)
        low = emit(aten.mul.Tensor, low, adapter.scale) if adapter.scale != 1 else low
        if m is None:
            result = emit(aten.add.Tensor, scaled, low)
        else:
            gain = self._gain(use, factors, m, adapter)
            if adapter.dropout:  # dropout also applies to the product that lengths scale
                whole = self._product(use, dropped)
                less = emit(aten.mul.Tensor, whole, emit(aten.sub.Tensor, gain, 1.0))
                result = emit(aten.add.Tensor, emit(aten.add.Tensor, call, less), emit(aten.mul.Tensor, low, gain))
            else:
                whole = call if bias is None else self._product(use, x)
                result = emit(aten.mul.Tensor, emit(aten.add.Tensor, whole, low), gain)
                result = result if bias is None else emit(aten.add.Tensor, result, bias)
        for user in users:
            user.replace_input_with(scaled, result)

    def _product(self, use: _Use, x: fx.Node) -> fx.Node:
        """Return the product of x and the weight, without a bias."""
        target = aten.mm.default if use.call.target is aten.addmm.default else use.call.target
        return self.emit(target, x, use.weight)

    def _gain(self, use: _Use, factors: Sequence[fx.Node], m: fx.Node, adapter: Adapter) -> fx.Node:
        """Return m / |W + scale B A|, by out-features; lengths are constants to backward (DoRA, section 4.3)."""
        emit, dtype = self.emit, value_of(m).dtype
        summed = self._summed(use, emit.detach(use.weight), [emit.detach(x) for x in factors], adapter)
        wide = emit.cast(summed, torch.promote_types(dtype, torch.float32))
        squares = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, wide, wide), [0 if use.flipped else 1])
        return emit(aten.div.Tensor, m, emit.cast(emit(aten.sqrt.default, squares), dtype))

    def _summed(self, use: _Use, w: fx.Node, factors: Sequence[fx.Node], adapter: Adapter) -> fx.Node:
        """Return W + scale B A, of one matrix or of experts', as the call takes W."""
        emit, dims = self.emit, len(value_of(w).shape)
        product = aten.bmm.default if dims == 3 else aten.mm.default
        if use.flipped:
            delta = emit(product, *(emit(aten.transpose.int, x, dims - 2, dims - 1) for x in factors))
        else:
            delta = emit(product, *reversed(factors))
        delta = emit(aten.mul.Tensor, delta, adapter.scale) if adapter.scale != 1 else delta
        return emit(aten.add.Tensor, w, delta)


def _quantised(p: Param) -> bool:
    return whole_name(p.fqn) != p.fqn


def _floating(use: _Use) -> torch.dtype:
    """Return the dtype of the scales of a quantised weight, in which its adapters are stored."""
    todo = [use.weight, *operands_of(_result(use.call))]
    while todo:
        node = todo.pop(0)
        if node.op == "placeholder" and node.meta.get("stored") and value_of(node).dtype.is_floating_point:
            return value_of(node).dtype
        todo += operands_of(node) if stored_alone(node) else []
    return value_of(use.call).dtype


def _result(call: fx.Node) -> fx.Node:
    """Return the result of a product, after its scaling by a quantised weight's scales if there is one."""
    users = list(call.users)
    scaled = len(users) == 1 and users[0].target is aten.mul.Tensor
    if scaled and any(x is not call and stored_alone(x) for x in operands_of(users[0])):
        return users[0]
    return call


def _shape(p: Param, use: _Use) -> tuple[int, ...]:
    """Return the shape of a weight; if p holds its numbers in a row, [out, in]."""
    if len(p.shape) > 1:
        return p.shape
    shape = value_of(use.weight).shape
    return shape[::-1] if use.flipped else shape


def _quantised_uses(part: fx.Node) -> Iterator[_Use]:
    """Yield the products that take a quantised weight, which is computed from its numbers and scales.

    part: the numbers, in the weight's shape, or in a row.
    """
    stored = value_of(part).shape
    todo, seen = [(part, False)], set[fx.Node]()
    while todo:
        node, turned = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.target in _PRODUCTS and user.args[_PRODUCTS[user.target][1]] is node:
                _, place, _, flipped = _PRODUCTS[user.target]
                if len(stored) == 1:
                    yield _Use(user, node, place, flipped, stored=False)
                elif value_of(node).shape == (stored[::-1] if turned else stored):
                    yield _Use(user, node, place, flipped, flipped != turned)
            elif user.op == "call_function" and stored_alone(user):
                turns = user.target is aten.transpose.int and len(value_of(node).shape) == 2
                todo.append((user, turned != turns))


def _uses(node: fx.Node) -> Iterator[_Use | None]:
    """Yield the products that take a weight, unchanged, cast or transposed; None for any other use."""
    matrix = len(value_of(node).shape) == 2
    for user in node.users:
        if user.target is _CAST:
            yield from _uses(user)
        elif (flipped := _of_experts(user, node)) is not None:
            yield _Use(user, node, -1, flipped, flipped)
        elif user.target is aten.bmm.default and user.args[1] is node:
            yield _Use(user, node, -1, flipped=True, stored=True)
        elif matrix and user.target in _PRODUCTS and user.args[(at := _PRODUCTS[user.target])[1]] is node:
            yield _Use(user, node, at[1], at[3], at[3])
        elif matrix and user.target is aten.transpose.int:
            yield from (u and replace(u, stored=not u.stored) for u in _uses(user))
        else:
            yield None


#: Ops that weights pass on their way to `ops.experts`.
_MOVES = {_CAST, aten.cat.default, aten.stack.default, aten.transpose.int}


def _of_experts(user: fx.Node, node: fx.Node) -> bool | None:
    """Return whether experts use a node as [experts, in, out]; False: [experts, out, in]; None: no use."""
    if user.target is ops.experts and node in (user.args[UP], user.args[DOWN]):
        transposed = user.args[TRANSPOSED] if len(user.args) > TRANSPOSED else user.kwargs.get("transposed")
        return bool(transposed)
    if user.target not in _MOVES or len(value_of(node).shape) not in (2, 3):
        return None
    ways = {_of_experts(u, user) for u in user.users}
    if len(ways) != 1 or (flipped := ways.pop()) is None:
        return None
    if user.target is aten.transpose.int:
        dims = len(value_of(node).shape)
        return flipped != ({d % dims for d in user.args[1:]} == {dims - 2, dims - 1})  # type: ignore[operator]
    return flipped
