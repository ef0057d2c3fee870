"""Numbers read back as products of named sizes, and sums of them by layer.

A program is compiled for numbers, so sizes are found by number: those that have names have to differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer, Symbol
from torch import fx

from shardc.cost.ledger import Held
from shardc.errors import ShardcError
from shardc.ir.graph import operands_of, values_of
from shardc.ir.placement import Shard
from shardc.ir.program import Collective, Program, Value
from shardc.ir.types import op_name
from shardc.runtime.step.inputs import name_of

#: Sizes that are a small multiple of the hidden one are written as such: 3h of a fused qkv, 4h of an MLP.
MULTIPLES = (2, 3, 4, 5, 6, 8)


class Sums:
    """Expressions by layer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str] | None, Expr] = {}

    def add(self, at: tuple[str, str] | None, x: Expr) -> None:
        self._found[at] = self._found.get(at, Integer(0)) + x

    def lists(self) -> dict[str, int]:
        return dict(Counter(at[0] for at in self._found if at is not None))

    def total(self, symbols: Mapping[str, Symbol]) -> Expr:
        """All of it, with a symbol for how many layers each list has."""
        layers, rest = self.forms()
        found: Expr = sum((symbols.get(name, Integer(self.lists()[name])) * x for name, x in layers.items()), rest)
        return sympy.expand(found)

    def forms(self) -> tuple[dict[str, Expr], Expr]:
        """(by list what the layer in its middle keeps, all else): first and last layers may keep more or less."""
        layers: dict[str, Expr] = {}
        rest = self._found.get(None, Integer(0))
        for name in self.lists():
            mine = [x for at, x in self._found.items() if at is not None and at[0] == name]
            layers[name] = sympy.expand(mine[len(mine) // 2])
            rest += sum((x - layers[name] for x in mine), Integer(0))
        return layers, sympy.expand(rest)


class Names:
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
            raise ShardcError(
                what,
                where="cost.symbolic",
                fix="compile for sizes that differ (a batch of 5), or name them: cost.forms(...)",
            )
        single = [
            f"{name_of(x.path)}, {whole} over {program.mesh}"
            for x in program.inputs
            for here, whole in zip(x.layout.local_shape(x.shape, program.mesh), x.shape, strict=True)
            if here == 1 < whole
        ]
        if single:
            raise ShardcError(
                f"each rank has one of {single[0]}: a size of 1 says nothing about what it is",
                where="cost.symbolic",
                fix="compile for a larger batch",
            )
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
        """Bytes of a storage."""
        found, whole = self.elements(held.shape, node), math.prod(held.shape)
        return found * sympy.Rational(held.nbytes, max(whole, 1))

    def elements(self, shape: Sequence[int], node: fx.Node | None) -> Expr:
        """The product of sizes of a tensor of a node: they are those of what the op takes and makes, on this rank; or
        products of them.
        """
        known = self._around(node)
        return reduce(lambda a, b: a * b, (known.get(n, self.size(n)) for n in shape), Integer(1))

    def summed(self, n: int, node: fx.Node | None) -> Expr:
        """A size that a node sums over, or as many times that as the op has products (attention)."""
        known = {k: x for k, x in self._around(node).items() if not x.is_number}
        for times in (1, 2, 5):
            if n % times == 0 and n // times in known:
                return times * known[n // times]
        return self.size(n)

    def _around(self, node: fx.Node | None) -> dict[int, Expr]:
        """What the numbers are that a node's tensors have as sizes on this rank, and products of sizes that lie beside
        each other.
        """
        known: dict[int, Expr] = {1: Integer(1)}
        collective: Collective | None = node.meta.get("collective") if node is not None else None
        if collective is not None:  # what is gathered comes as a stack of parts
            known |= {self.program.mesh.size(a): self.axis(a) for a in collective.axes}
        some: Iterable[fx.Node] = (node, *operands_of(node)) if node is not None else ()
        mesh = self.program.mesh
        for v in (v for x in some for v in values_of(x) if v is not None):
            local, expressions = v.local_shape(mesh), self.dims(v)
            for i in range(len(local)):
                for j in range(i + 1, len(local) + 1):
                    product = reduce(lambda a, b: a * b, expressions[i:j], Integer(1))
                    number = math.prod(local[i:j])
                    if number not in known or (j == i + 1 and known[number].is_number):
                        known[number] = product
        return known


def _detected(program: Program) -> dict[str, int]:
    """Batch and sequence: of the inputs; vocab and hidden: of the first look-up, or hidden of the first product; heads:
    of attention.
    """
    found: dict[str, int] = {}
    wide = sorted((x for x in program.inputs if x.shape), key=lambda x: x.dtype.is_floating_point)
    if wide:
        part = max(program.microbatches, 1) if wide[0].microbatch is not None else 1
        found |= dict(zip(("batch", "sequence"), (wide[0].shape[0] // part, *wide[0].shape[1:2]), strict=False))
    for s in program.stages:
        for n in s.graph.nodes:
            if n.op != "call_function":
                continue
            name, given = op_name(n.target), [values_of(x)[0] for x in operands_of(n)]
            if name in ("embedding", "embedding_partial") and "hidden" not in found:
                found |= {"vocab": given[0].shape[0], "hidden": given[0].shape[1]}
            if name == "linear" and "hidden" not in found:
                found["hidden"] = given[1].shape[1]
            v = values_of(n)[0]
            if (
                name in ("scaled_dot_product_attention", "softmax", "_softmax")
                and len(v.shape) == 4
                and "heads" not in found
            ):
                found["heads"] = v.shape[1]
    return {k: n for k, n in found.items() if n > 1}
