"""Closed forms: what is kept, in batch, sequence, hidden, heads, layers and the mesh's sizes, as sympy expressions.

    cost = program.cost()
    cost.symbolic.layers["h"]            per layer and microbatch: 5*batch*heads*sequence**2/tp + ...
    cost.symbolic.activations            of a microbatch: layers*(...) + ...
    cost.symbolic.parameters, .gradients, .optimizer

What is kept is what the rehearsal kept; its sizes are read back as products of named ones. A program is compiled for numbers, so the
names are found by number: sizes have to differ (a batch of 5, not of 8 where there are 8 heads); they may be named: `cost.forms(heads=96)`.

`papers` counts as "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022) does:
    - numbers per row (a norm's mean and deviation) are left out: it keeps what has a factor hidden or heads;
    - what is gathered for a product (sequence parallelism) counts as the part that it was gathered from, as Megatron gathers it
      again in backward, while a program keeps it, if no checkpoint region says otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer, Symbol
from torch import fx

from shardc.calls import tensors, values
from shardc.cost.ledger import Held
from shardc.cost.rehearse import Rehearsal
from shardc.errors import ShardcError
from shardc.passes.cutting import layer_of
from shardc.placement import Shard
from shardc.program import Collective, Program, Source, Value
from shardc.values import op_name

#: Sizes that are a small multiple of the hidden one are written as such: 3h of a fused qkv, 4h of an MLP.
MULTIPLES = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Symbolic:
    """Bytes of one rank. sizes: what the symbols are in this program.

    layers: by list of layers, what one of them keeps for backward, of one microbatch; rest: what is outside of them. lists: how many
    layers each list has on this rank, as a symbol and a number. states: parameters, gradients, optimizer.
    """

    sizes: Mapping[Symbol, int]
    layers: Mapping[str, Expr]
    rest: Expr
    lists: Mapping[str, Symbol]
    parameters: Expr
    gradients: Expr
    optimizer: Expr
    elements: Expr  # of the model's parameters, all of them
    papers: Symbolic | None = field(default=None, repr=False)

    @property
    def activations(self) -> Expr:
        """What a microbatch keeps for backward."""
        total: Expr = sum((self.lists[name] * each for name, each in self.layers.items()), self.rest)
        return sympy.expand(total)

    def value(self, expression: Expr, **sizes: float) -> float:
        """An expression with this program's sizes, or with others by name."""
        at = {s: sizes.get(s.name, n) for s, n in self.sizes.items()}
        return float(expression.subs(at))


def symbolic(program: Program, rehearsals: Sequence[Rehearsal], sizes: Mapping[str, int]) -> Symbolic:
    """Of the rank that was rehearsed first. sizes: names for numbers, beside those that are found."""
    r = rehearsals[0]
    names = _Names(program, sizes)
    kept = _kept(r)
    nodes = {n.name: n for s in program.stages for n in s.graph.nodes}
    weights = _of_weights(program)
    casts: list[Expr] = []
    ours, theirs = _Sums(), _Sums()
    for held in kept:
        node = nodes.get(held.op)
        found = names.held(held, node)
        if node is not None and node in weights:
            casts.append(found)
            continue
        at = layer_of(node.meta.get("source", Source()).module) if node is not None else None
        ours.add(at, found)
        theirs.add(at, _as_papers(names, found, node))
    lists = {name: Symbol("layers" if len(ours.lists()) == 1 else f"layers_{name}", positive=True) for name in ours.lists()}
    numbers = names.sizes | {lists[name]: n for name, n in ours.lists().items()}
    states = _states(program, names, lists, r.at)
    states["parameters"] = states["parameters"] + _repeated(casts, kept, weights, nodes, lists)
    layers, rest = ours.forms()
    other = Symbolic(numbers, *theirs.forms(), lists, **states)
    return Symbolic(numbers, layers, rest, lists, **states, papers=other)


def _kept(r: Rehearsal) -> list[Held]:
    """What is there when the first forward is done, and was not before."""
    action, part = next((a, p) for a, p in r.actions if a.kind == "F")
    live: dict[int, Held] = {}
    for sign, held in part.changes:
        if sign > 0:
            live[id(held)] = held
        else:
            live.pop(id(held), None)
    assert action.kind == "F"
    return [h for h in live.values() if h.kind in ("activations", "communication")]


def _of_weights(program: Program) -> set[fx.Node]:
    """What follows from parameters alone."""
    params = {p.name for p in program.params}
    found: set[fx.Node] = set()
    for s in program.stages:
        for n in s.graph.nodes:
            given = [x for x in n.all_input_nodes if x.meta.get("value") is not None]
            if n.name in params or (n.op == "call_function" and given and all(x in found for x in given)):
                found.add(n)
    return found


class _Sums:
    """Expressions by layer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str] | None, Expr] = {}

    def add(self, at: tuple[str, str] | None, x: Expr) -> None:
        self._found[at] = self._found.get(at, Integer(0)) + x

    def lists(self) -> dict[str, int]:
        return dict(Counter(at[0] for at in self._found if at is not None))

    def forms(self) -> tuple[dict[str, Expr], Expr]:
        """(by list what the layer in its middle keeps, all else): first and last layers may keep more or less."""
        layers: dict[str, Expr] = {}
        rest = self._found.get(None, Integer(0))
        for name in self.lists():
            mine = [x for at, x in self._found.items() if at is not None and at[0] == name]
            layers[name] = sympy.expand(mine[len(mine) // 2])
            rest += sum((x - layers[name] for x in mine), Integer(0))
        return layers, sympy.expand(rest)


def _as_papers(names: _Names, x: Expr, node: fx.Node | None) -> Expr:
    collective: Collective | None = node.meta.get("collective") if node is not None else None
    if collective is not None and collective.kind == "all_gather":
        for axis in collective.axes:
            x = x / names.axis(axis)
    wide = [s for s in x.free_symbols if s.name in ("hidden", "heads")]
    return x if wide else Integer(0)


def _repeated(casts: Sequence[Expr], kept: Sequence[Held], weights: set[fx.Node], nodes: Mapping[str, fx.Node], lists: Mapping[str, Symbol]) -> Expr:
    """Copies of weights in another dtype."""
    sums = _Sums()
    held = [h for h in kept if nodes.get(h.op) in weights]
    for h, x in zip(held, casts, strict=True):
        sums.add(layer_of(nodes[h.op].meta.get("source", Source()).module), x)
    layers, rest = sums.forms()
    total: Expr = sum((lists.get(name, Integer(sums.lists()[name])) * x for name, x in layers.items()), rest)
    return sympy.expand(total)


def _states(program: Program, names: _Names, lists: Mapping[str, Symbol], at: int) -> dict[str, Expr]:
    """Parameters, gradients and optimizer state (AdamW) between two steps, as the buckets keep them."""
    sums = {kind: _Sums() for kind in ("parameters", "gradients", "optimizer", "elements")}
    for p in program.params:
        layer = layer_of(p.fqn)
        whole = math.prod(p.shape)
        sums["elements"].add(layer, reduce(lambda a, b: a * b, map(names.size, p.shape), Integer(1)) if whole else Integer(0))
        if program.axis and at not in program.holders(p):
            continue
        n = names.value(p.value)
        bucket = program.bucket(p)
        zero = bucket.zero if bucket is not None else 0
        ranks = names.axis(bucket.shard) if bucket is not None and zero else Integer(1)
        stored = p.dtype.itemsize
        moments = 2 * n * stored / ranks if p.requires_grad else Integer(0)
        if zero in (1, 2) and bucket is not None and bucket.compute is not None:
            sums["parameters"].add(layer, n * bucket.compute.itemsize)
            moments += n * stored / ranks
        else:
            sums["parameters"].add(layer, n * stored / (ranks if zero == 3 else 1))
        sums["optimizer"].add(layer, moments)
        if p.requires_grad:
            width = bucket.dtype.itemsize if bucket is not None else stored
            sums["gradients"].add(layer, n * width / (ranks if zero >= 2 else 1))
    found = {}
    for kind, each in sums.items():
        layers, rest = each.forms()
        total: Expr = sum((lists.get(name, Integer(each.lists()[name])) * x for name, x in layers.items()), rest)
        found[kind] = sympy.expand(total)
    return found


class _Names:
    """Numbers read back as products of named sizes."""

    def __init__(self, program: Program, given: Mapping[str, int]) -> None:
        self.program = program
        found = {**_detected(program), **given}
        by_number: dict[int, list[str]] = {}
        for name, n in found.items():
            by_number.setdefault(n, []).append(name)
        alike = [f"{' and '.join(each)} are both {n}" for n, each in by_number.items() if len(each) > 1 and n > 1]
        if alike:
            what = f"sizes cannot be told apart by their numbers: {'; '.join(alike)}"
            raise ShardcError(what, where="cost.symbolic", fix="compile for sizes that differ (a batch of 5), or name them: cost.forms(...)")
        self.known = {n: self._symbol(name) for name, n in found.items() if n > 1}
        self.sizes = {self._symbol(name): n for name, n in found.items()}
        self.sizes |= {self._symbol(a): n for a, n in program.mesh.axes}
        self.hidden = found.get("hidden", 0)
        self._cache: dict[int, Expr] = {}

    @staticmethod
    def _symbol(name: str) -> Symbol:
        return Symbol(name, positive=True)

    def axis(self, name: str) -> Expr:
        """A mesh axis's size. One that is seen in digits has a symbol for each."""
        return reduce(lambda a, b: a * b, map(self._symbol, self.program.mesh.parts(name)), Integer(1))

    def size(self, n: int) -> Expr:
        """A global size."""
        if n not in self._cache:
            self._cache[n] = self._size(n)
        return self._cache[n]

    def _size(self, n: int) -> Expr:
        if n in self.known:
            return self.known[n]
        h = self.hidden
        if h and n % h == 0 and n // h in MULTIPLES:
            return Integer(n // h) * self.known[h]
        for a, x in self.known.items():
            for b, y in self.known.items():
                if a * b == n:
                    return x * y
                if b > 1 and a % b == 0 and a // b == n:
                    return x / y
        for a, x in self.known.items():
            for b, y in self.known.items():
                if a * b > 1 and n % (a * b) == 0 and n // (a * b) in self.known:
                    return x * y * self.known[n // (a * b)]
        return Integer(n)

    def value(self, v: Value) -> Expr:
        """Elements of one rank's part."""
        return reduce(lambda a, b: a * b, self.dims(v), Integer(1))

    def dims(self, v: Value) -> list[Expr]:
        """One rank's sizes."""
        found: list[Expr] = [self.size(n) for n in v.shape]
        for axis, placement in v.layout.items:
            if isinstance(placement, Shard):
                found[placement.dim] = found[placement.dim] / self.axis(axis)
        return found

    def held(self, held: Held, node: fx.Node | None) -> Expr:
        """Bytes of a storage: its tensor's sizes are those of what the op takes and makes, on this rank; or products of them."""
        known: dict[int, Expr] = {1: Integer(1)}
        collective: Collective | None = node.meta.get("collective") if node is not None else None
        if collective is not None:  # what is gathered comes as a stack of parts
            known |= {self.program.mesh.size(a): self.axis(a) for a in collective.axes}
        some: Iterable[fx.Node] = (node, *tensors(node)) if node is not None else ()
        mesh = self.program.mesh
        for v in (v for x in some for v in values(x) if v is not None):
            local, expressions = v.local_shape(mesh), self.dims(v)
            for i in range(len(local)):
                for j in range(i + 1, len(local) + 1):
                    product = reduce(lambda a, b: a * b, expressions[i:j], Integer(1))
                    number = math.prod(local[i:j])
                    if number not in known or (j == i + 1 and known[number].is_number):
                        known[number] = product
        found = reduce(lambda a, b: a * b, (known.get(n, self.size(n)) for n in held.shape), Integer(1))
        whole = math.prod(held.shape) * held.dtype.itemsize
        return found * held.dtype.itemsize if whole == held.nbytes else found * sympy.Rational(held.nbytes, max(math.prod(held.shape), 1))


def _detected(program: Program) -> dict[str, int]:
    """Batch and sequence: of the inputs; vocab and hidden: of the first look-up, or hidden of the first product; heads: of attention."""
    found: dict[str, int] = {}
    wide = sorted((x for x in program.inputs if x.shape), key=lambda x: x.dtype.is_floating_point)
    if wide:
        part = max(program.microbatches, 1) if wide[0].microbatch is not None else 1
        found |= dict(zip(("batch", "sequence"), (wide[0].shape[0] // part, *wide[0].shape[1:2]), strict=False))
    for s in program.stages:
        for n in s.graph.nodes:
            if n.op != "call_function":
                continue
            name, given = op_name(n.target), [values(x)[0] for x in tensors(n)]
            if name in ("embedding", "embedding_partial") and "hidden" not in found:
                found |= {"vocab": given[0].shape[0], "hidden": given[0].shape[1]}
            if name == "linear" and "hidden" not in found:
                found["hidden"] = given[1].shape[1]
            v = values(n)[0]
            if name in ("scaled_dot_product_attention", "softmax", "_softmax") and len(v.shape) == 4 and "heads" not in found:
                found["heads"] = v.shape[1]
    return {k: n for k, n in found.items() if n > 1}
