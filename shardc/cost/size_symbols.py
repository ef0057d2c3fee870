"""Symbols for a program's sizes, and sums of symbolic expressions by layer.

A program is compiled for numbers. Each number is read back as a product of named sizes, so these have to differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer, Symbol
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import operands_of, values_of
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.machine.work import Storage
from shardc.runtime.step.inputs import name_of

#: Sizes that are a small multiple of the hidden one are written as such: 3h of a fused qkv, 4h of an MLP.
MULTIPLES = (2, 3, 4, 5, 6, 8)


class LayerSums:
    """Sums of expressions by layer: (list of layers, number), or None outside of all lists."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str] | None, Expr] = {}

    def add(self, layer: tuple[str, str] | None, x: Expr) -> None:
        self._sums[layer] = self._sums.get(layer, Integer(0)) + x

    def lists(self) -> dict[str, int]:
        """The number of layers of each list."""
        return dict(Counter(layer[0] for layer in self._sums if layer is not None))

    def total(self, symbols: Mapping[str, Symbol]) -> Expr:
        """The sum of all. symbols: for the number of layers of each list."""
        layers, rest = self.forms()
        total: Expr = sum((symbols.get(name, Integer(self.lists()[name])) * x for name, x in layers.items()), rest)
        return sympy.expand(total)

    def forms(self) -> tuple[dict[str, Expr], Expr]:
        """(the middle layer of each list, by list; all else): the first and last layers may have more or less."""
        layers: dict[str, Expr] = {}
        rest = self._sums.get(None, Integer(0))
        for name in self.lists():
            sums = [x for layer, x in self._sums.items() if layer is not None and layer[0] == name]
            layers[name] = sympy.expand(sums[len(sums) // 2])
            rest += sum((x - layers[name] for x in sums), Integer(0))
        return layers, sympy.expand(rest)


class Symbols:
    """The symbols of a program's sizes, and numbers as products of them. sizes: more names than those detected."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program = program
        named = {**_detected(program), **sizes}
        by_number: dict[int, list[str]] = {}
        for name, n in named.items():
            by_number.setdefault(n, []).append(name)
        equal = [f"{' and '.join(each)} are both {n}" for n, each in by_number.items() if len(each) > 1 and n > 1]
        if equal:
            what = f"sizes that are equal cannot be distinguished: {'; '.join(equal)}"
            raise ShardcError(
                what,
                where="cost.symbolic",
                fix="compile for sizes that differ (a batch of 5), or name them: cost.forms(...)",
            )
        single = [
            f"{name_of(x.path)!r} ({whole} over {program.mesh})"
            for x in program.inputs
            for here, whole in zip(x.layout.local_shape(x.shape, program.mesh), x.shape, strict=True)
            if here == 1 < whole
        ]
        if single:
            raise ShardcError(
                f"a dim of input {single[0]} has size 1 on each rank, which cannot be recognized",
                where="cost.symbolic",
                fix="compile for a larger batch",
            )
        self.known = {n: self._symbol(name) for name, n in named.items() if n > 1}
        self.sizes = {self._symbol(name): n for name, n in named.items()}
        self.sizes |= {self._symbol(a): n for a, n in program.mesh.axes}
        self.hidden = named.get("hidden", 0)
        self._cache: dict[int, Expr] = {}

    @staticmethod
    def _symbol(name: str) -> Symbol:
        return Symbol(name, positive=True)

    def axis(self, name: str) -> Expr:
        """The size of a mesh axis; of an axis that is split into digits, the product of theirs."""
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
        dims: list[Expr] = [self.size(n) for n in v.shape]
        for axis, placement in v.layout.items:
            if isinstance(placement, Shard):
                dims[placement.dim] = dims[placement.dim] / self.axis(axis)
        return dims

    def storage(self, storage: Storage, node: fx.Node | None) -> Expr:
        """Bytes of a storage."""
        elements, number = self.elements(storage.shape, node), math.prod(storage.shape)
        return elements * sympy.Rational(storage.nbytes, max(number, 1))

    def elements(self, shape: Sequence[int], node: fx.Node | None) -> Expr:
        """The product of the sizes of a tensor that belongs to a node: each is a size of its operands or results on
        this rank, or a product of such sizes.
        """
        known = self._local_sizes(node)
        return reduce(lambda a, b: a * b, (known.get(n, self.size(n)) for n in shape), Integer(1))

    def contracted(self, n: int, node: fx.Node | None) -> Expr:
        """A size that a node sums over, or a multiple of it for an op with several products (attention)."""
        known = {k: x for k, x in self._local_sizes(node).items() if not x.is_number}
        for times in (1, 2, 5):
            if n % times == 0 and n // times in known:
                return times * known[n // times]
        return self.size(n)

    def _local_sizes(self, node: fx.Node | None) -> dict[int, Expr]:
        """Expressions of the sizes on this rank of a node's operands and results, and of products of adjacent sizes."""
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
    """Sizes by name. batch, sequence: of the inputs; vocab, hidden: of the first embedding, or hidden of the first
    linear; heads: of attention.
    """
    sizes: dict[str, int] = {}
    wide = sorted((x for x in program.inputs if x.shape), key=lambda x: x.dtype.is_floating_point)
    if wide:
        part = max(program.microbatches, 1) if wide[0].microbatch is not None else 1
        sizes |= dict(zip(("batch", "sequence"), (wide[0].shape[0] // part, *wide[0].shape[1:2]), strict=False))
    for s in program.stages:
        for n in s.graph.nodes:
            if n.op != "call_function":
                continue
            name, operands = op_name(n.target), [values_of(x)[0] for x in operands_of(n)]
            if name in ("embedding", "embedding_partial") and "hidden" not in sizes:
                sizes |= {"vocab": operands[0].shape[0], "hidden": operands[0].shape[1]}
            if name == "linear" and "hidden" not in sizes:
                sizes["hidden"] = operands[1].shape[1]
            v = values_of(n)[0]
            if (
                name in ("scaled_dot_product_attention", "attention", "softmax", "_softmax")
                and len(v.shape) == 4
                and "heads" not in sizes
            ):
                sizes["heads"] = v.shape[1]
    return {k: n for k, n in sizes.items() if n > 1}
