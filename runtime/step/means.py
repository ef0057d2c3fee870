"""Compute exact means over several batches: each batch's mean is weighted by its divisor.

    loss = sum(nll) / sum(labels != -100)               the divisor is a sum over the batch's labels
    loss = sum(nll) / sum(labels != -100).clamp(min=1)  the same sum, with a guard for a batch without labels
    loss = mean((x - y)**2)                             the divisor is a number of elements

A divisor is a function of *amounts*: single numbers, each a sum over the batch, which add up over several batches. It
is found in the model's graph and computed from the batch alone. The mean over several batches is

    sum over batches of (mean * divisor(the batch's amounts)) / divisor(the amounts of all batches)

which is the model's own formula for all rows in one batch, with its guards. A number that is not such a mean (a sum,
the exponent of a mean) has no divisor. A sum of means over different things has that of the mean whose divisor comes
from the batch: no weight is right for all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.ir.graph import operands_of, placeholders, value_of
from shardc.ir.outputs import Output, divisors
from shardc.ir.program import Program
from shardc.ir.stored import Buffer
from shardc.ir.types import behind, op_name
from shardc.runtime.data import inputs
from shardc.runtime.stage import outputs

aten = torch.ops.aten
#: The name of the loss among divisors.
LOSS = ""
NO_DIVISOR = (
    "the loss is not a mean with a divisor from the batch: the mean over several batches is weighted by their "
    "rows. For another weight, return (loss, {name: (sum, count)}) from the loss function, and read that name"
)
SEVERAL_DIVISORS = (
    "the loss is a sum of means over different things: the mean over several batches is weighted by the one whose "
    "divisor is known. For exact means, return (loss, {name: (sum, count)}) from the loss function, a pair for each"
)
#: Ops that keep a mean a mean over the same things.
_THROUGH = {
    aten.neg.default,
    aten.detach.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.nan_to_num.default,
}
_PLUS = {aten.add.Tensor, aten.sub.Tensor}
_BY_NUMBER = {aten.mul.Tensor: -1, aten.mul.Scalar: -1, aten.div.Tensor: 1, aten.div.Scalar: 1}
_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
#: Ops whose result for two batches is the sum of theirs (`any` only asks whether it is 0).
_ADDITIVE = {*_SUMS, *_MEANS, aten.count_nonzero.default, aten.any.default}


@dataclass(frozen=True)
class Divisor:
    """The divisor of one mean of one batch: the product of `size` and of `of_amounts(amounts, constants)`.

    size: a number of elements. `size` and `amounts` add up over batches, `constants` do not.
    """

    size: float | None = None
    amounts: tuple[float, ...] = ()
    constants: tuple[float, ...] = ()
    of_amounts: fx.GraphModule | None = None

    @cached_property
    def value(self) -> float:
        value = 1.0 if self.size is None else self.size
        if self.of_amounts is None:
            return value
        dtypes = ((x, None if isinstance(x, bool) else torch.float64) for x in (*self.amounts, *self.constants))
        return value * math.prod(map(float, self.of_amounts(*(torch.tensor(x, dtype=dtype) for x, dtype in dtypes))))

    def joined(self, other: Divisor) -> Divisor:
        """Return the divisor of the rows of both batches."""
        if len(self.amounts) != len(other.amounts) or (self.size is None) != (other.size is None):
            return Divisor(self.value + other.value)  # batches of other sizes, with another formula
        size = None if self.size is None or other.size is None else self.size + other.size
        return replace(self, size=size, amounts=tuple(map(operator.add, self.amounts, other.amounts)))


class Means:
    """Means of several batches.

    Sums are divided by their counts, integers added up, means weighted by their divisors, other single numbers by rows.
    Values of several elements are left out.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._divisors: dict[str, Divisor] = {}
        self._by_rows: dict[str, tuple[float, float]] = {}  # sum and rows of each mean, if a batch has no divisor
        #: Means of which some batch has no divisor: they are weighted by rows.
        self.undivided: set[str] = set()

    def add(
        self,
        program: Program,
        loss: Tensor | None,
        values: Mapping[str, Tensor],
        rows: int,
        divided_by: Mapping[str, Divisor],
    ) -> None:
        """Add one batch. values: of `rows` rows, undivided. divided_by: its divisors, from `MeanDivisors`."""
        if loss is not None:
            self._add_mean("loss", loss, divided_by.get(LOSS), rows)
        divide = divisors(program.outputs)
        for o in program.outputs:
            if o.name in divide or values[o.name].numel() != 1:
                continue
            number = values[o.name].item()
            if o.divisor:
                self._add(o.name, number, Divisor(values[o.divisor].item()))
            elif o.dtype.is_floating_point or o.dtype == torch.bool:
                self._add_mean(o.name, values[o.name], divided_by.get(o.name), rows)
            else:
                self._sums[o.name] = self._sums.get(o.name, 0) + number

    def _add_mean(self, name: str, mean: Tensor, divisor: Divisor | None, rows: int) -> None:
        """Add a mean with its weight. A mean of nothing is nan, and has weight 0."""
        total, of_rows = self._by_rows.get(name, (0.0, 0.0))
        self._by_rows[name] = total + float(mean) * rows, of_rows + rows
        if divisor is None:
            self.undivided.add(name)
        divisor = divisor or Divisor(rows)
        self._add(name, float(mean) * divisor.value if divisor.value else 0.0, divisor)

    def _add(self, name: str, number: float, divisor: Divisor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + number
        self._divisors[name] = divisor.joined(self._divisors[name]) if name in self._divisors else divisor

    def counted(self, name: str) -> float:
        """Return the divisor of a mean so far, that is, the number of things it averages."""
        return self._divisors[name].value if name in self._divisors else 0.0

    def values(self) -> dict[str, float]:
        """Return {"loss": mean, name: mean or sum}; {} without any batch."""
        return {name: self._mean(name) if name in self._divisors else x for name, x in self._sums.items()}

    def _mean(self, name: str) -> float:
        total, divisor = self._by_rows[name] if name in self.undivided else (self._sums[name], self.counted(name))
        return total / divisor if divisor else float("nan")


@dataclass(frozen=True)
class _Term:
    """One of the means that a number is the sum of. divisors: nodes of the batch alone; size: elements.

    Without both it is no mean with a divisor that can be found.
    """

    divisors: tuple[fx.Node, ...] = ()
    size: float | None = None


@dataclass(frozen=True)
class _Formula:
    """How to compute the divisor of one number from a batch: see Divisor.

    amounts: (node, factor) pairs; without a node: the factor alone. constants: nodes.
    """

    size: float | None
    amounts: tuple[tuple[fx.Node | None, float], ...]
    constants: tuple[fx.Node, ...]
    of_amounts: fx.GraphModule

    def nodes(self) -> tuple[fx.Node, ...]:
        """Return the nodes that must be computed from a batch."""
        return (*(n for n, _ in self.amounts if n is not None), *self.constants)

    def divisor(self, numbers: Iterator[float]) -> Divisor:
        """Compute the divisor. numbers: the values of `nodes`."""
        amounts = tuple(factor if n is None else factor * next(numbers) for n, factor in self.amounts)
        return Divisor(self.size, amounts, tuple(next(numbers) for _ in self.constants), self.of_amounts)


class MeanDivisors:
    """The divisors of the means among a program's loss and outputs, for batches of its sizes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        batch = frozenset(x.name for x in program.inputs)
        sources = batch | {b.name for b in program.buffers if _is_replicated(program, b)}
        finder = _Finder(sources, batch, inputs.rows(program))
        self._fixed: dict[str, Divisor] = {}
        self._formulas: dict[str, _Formula] = {}
        #: Numbers that are sums of means over different things.
        self.several: set[str] = set()
        for name, node in _numbers(program):
            terms = list(finder.terms(node))
            known: dict[Any, int] = {}
            by_batch = {(tuple(_computed(d, known) for d in t.divisors), t.size): t for t in terms if t.divisors}
            sizes = {t.size for t in terms if not t.divisors}
            counts = [size for size in sizes if size is not None]
            formula = _formula(next(iter(by_batch.values())), batch) if len(by_batch) == 1 else None
            if formula is not None:
                self._formulas[name] = formula
            elif len(counts) == 1 and not by_batch:
                self._fixed[name] = Divisor(counts[0])
            if len(by_batch) + len(sizes) > 1:
                self.several.add(name)
        nodes = tuple(n for f in self._formulas.values() for n in f.nodes())
        self._run = fx.GraphModule(nn.Module(), _slice(program, nodes)) if nodes else None

    @torch.no_grad()
    def of(self, mesh: Any, values: Sequence[Mapping[str, Any]]) -> dict[str, Divisor]:
        """Return {name of an output, or LOSS: its divisor in a global batch}. Collective.

        values: what this rank's stages take of the batch, by microbatch: {placeholder: value}.
        """
        if self._run is None:
            return self._fixed
        takes = list(placeholders(self._run.graph))
        constants = {b.name: b.constant for b in self._program.buffers if b.constant is not None}
        batch = {x.name: x for x in self._program.inputs if x.name in takes}
        shown = tuple(Output(x.name, x.shape, x.dtype, x.layout, x.microbatch) for x in batch.values())
        parts = {o.name: outputs.joined(o, {m: v[o.name] for m, v in enumerate(values)}) for o in shown}
        whole = outputs.gathered(replace(self._program, outputs=shown), mesh, parts)
        for name in takes:
            if name not in whole:
                whole[name] = constants[name].to(mesh.device) if name in constants else values[0][name]
        numbers = iter([x.item() for x in self._run(*(whole[name] for name in takes))])
        return self._fixed | {name: formula.divisor(numbers) for name, formula in self._formulas.items()}


def _is_replicated(program: Program, b: Buffer) -> bool:
    """Return whether every rank has all of a buffer, the same before and after a step."""
    return b.constant is not None or not (b.updated or b.layout.shards() or program.axis)


def _numbers(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """Yield the loss, and single real numbers beside it that belong to no (sum, count) pair."""
    returned: Any = program.graph.output_node().args[0]
    loss, beside = returned
    if loss is not None:
        yield LOSS, loss
    counts = divisors(program.outputs)
    for o, node in zip(program.outputs, beside[len(beside) - len(program.outputs) :], strict=True):
        single = math.prod(o.shape) == 1 and o.dtype.is_floating_point
        if single and not o.divisor and o.name not in counts:
            yield o.name, node


@dataclass(frozen=True)
class _Finder:
    """Finds the means in a sum. given: values of the batch alone; batch: its inputs; rows: of the batch."""

    given: frozenset[str]
    batch: frozenset[str]
    rows: int

    def terms(self, number: fx.Node) -> Iterator[_Term]:
        """Yield the means that a number is the sum of, walking from it to its operands.

        Each value is visited with the divisors, the Python number that divides, and the first sum found above it.
        """
        todo: list[tuple[fx.Node, _Term, float, fx.Node | None]] = [(number, _Term(), 1.0, None)]
        while todo:
            n, term, by_number, summed = todo.pop()
            top = n
            operands = operands_of(n)
            fixed = [x for x in operands if self._decided(x)]
            of_model = [x for x in operands if x not in fixed]
            if n.target in _PLUS or n.target in _THROUGH:
                todo += [(x, term, by_number, summed) for x in operands]
            elif n.target in _BY_NUMBER and len(operands) == 1:
                if factor := _number(n):  # a summand times 0 is no mean
                    todo.append((operands[0], term, by_number * factor ** _BY_NUMBER[n.target], summed))
            elif op_name(n.target) in ("where", "masked_fill"):  # another value where the batch has nothing to count
                todo += [(x, term, by_number, summed) for x in of_model]
            elif n.target in (aten.mul.Tensor, aten.div.Tensor) and len(of_model) == 1:
                more = (*term.divisors, *self._divisors(n, of_model[0]))
                todo.append((of_model[0], replace(term, divisors=more), by_number, summed))
            elif n.target in _SUMS:
                todo.append((operands[0], term, by_number, summed or operands[0]))
            elif n.target in _MEANS and summed is None:
                while n.target in _MEANS | _THROUGH:
                    n = operands_of(n)[0]
                elements = _elements(n) / max(_elements(top), 1)
                yield replace(term, size=elements if term.divisors or elements % self.rows == 0 else None)
            elif term.divisors:
                yield term
            elif summed is not None and self._counts(by_number, summed):
                yield replace(term, size=by_number)
            elif any(x.op == "placeholder" for x in behind([n])):
                yield term

    def _decided(self, node: fx.Node) -> bool:
        """Return whether a value depends on the batch alone."""
        return all(n.name in self.given for n in behind([node]) if n.op == "placeholder")

    def _divisors(self, node: fx.Node, but: fx.Node | None = None) -> list[fx.Node]:
        """Return the single numbers of the batch that a product divides by, except in the factor `but`."""
        operands = operands_of(node)
        if node is but:
            return []
        if op_name(node.target) in ("reciprocal", "pow") and self._of_batch(operands[0]):
            return operands if node.target is aten.reciprocal.default or node.args[1] == -1 else []
        if node.target is aten.div.Tensor and len(operands) == 2 and self._of_batch(operands[1]):
            return [operands[1], *self._divisors(operands[0], but)]
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            return [d for x in operands[: 1 if node.target is aten.div.Tensor else 2] for d in self._divisors(x, but)]
        return self._divisors(operands[0], but) if node.target in _THROUGH else []

    def _of_batch(self, node: fx.Node) -> bool:
        """Return whether a node is a single number that depends on the batch."""
        inputs_behind = any(n.name in self.batch for n in behind([node]) if n.op == "placeholder")
        return _elements(node) == 1 and self._decided(node) and inputs_behind

    def _counts(self, number: float, summed: fx.Node) -> bool:
        """Return whether a Python number counts summed elements, as `x.numel()` does: a multiple of the rows."""
        whole = math.isfinite(number) and number == int(number) > 0
        return whole and _elements(summed) % int(number) == 0 and int(number) % self.rows == 0


def _number(n: fx.Node) -> float:
    """Return the number that a node multiplies or divides by; nan if there is none, or to divide by 0."""
    number: Any = n.args[1] if not isinstance(n.args[1], fx.Node) else n.args[0]
    divides = n.target in (aten.div.Tensor, aten.div.Scalar)
    return float(number) if isinstance(number, (int, float)) and (number or not divides) else math.nan


def _elements(node: fx.Node) -> int:
    return math.prod(value_of(node).shape)


def _formula(term: _Term, batch: frozenset[str]) -> _Formula | None:
    """Build the divisors of a term as a function of amounts. batch: names of placeholders.

    None: they depend on a number of the batch that does not add up, such as the longest row's length.
    """
    made_of = behind(term.divisors)
    depends = {n for n in made_of if any(m.name in batch for m in behind([n]) if m.op == "placeholder")}

    def computed(n: fx.Node) -> bool:
        """Return whether a node is computed from single numbers only."""
        single = n.op == "call_function" and all(_elements(x) == 1 for x in operands_of(n))
        return single and n in depends and n.target not in _SUMS | _MEANS

    leaves = [n for n in term.divisors[0].graph.nodes if n in behind(term.divisors, computed) and not computed(n)]
    for n in (n for n in leaves if n in depends and n.op == "call_function"):
        inner = (x for x in behind(operands_of(n)) if x in depends and x.op == "call_function")
        if n.target not in _ADDITIVE or any(getattr(x.meta["value"], "shape", None) == () for x in inner):
            return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    amounts = list[tuple[fx.Node | None, float]]()
    for n in (n for n in leaves if n in depends):
        copies[n] = graph.placeholder(n.name)
        elements = float(_elements(operands_of(n)[0])) if n.target in _MEANS else 1.0
        amounts.append((n, elements))
        if n.target in _MEANS:  # a sum and a number of elements add up
            copies[n] = graph.call_function(operator.truediv, (copies[n], graph.placeholder(f"{n.name}_elements")))
            amounts.append((None, elements))
    constants = [n for n in leaves if n not in depends]
    for n in constants:
        copies[n] = graph.placeholder(n.name)
    for n in (n for n in term.divisors[0].graph.nodes if n in made_of and computed(n)):
        if n.target is aten._to_copy.default:  # amounts are float64
            copies[n] = copies[operands_of(n)[0]]
        else:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[d] for d in term.divisors))
    return _Formula(term.size, tuple(amounts), tuple(constants), fx.GraphModule(nn.Module(), graph))


def _computed(node: fx.Node, known: dict[Any, int]) -> int:
    """Return a number for how a value is computed, the same for equal computations. known: numbers so far."""
    numbers: dict[fx.Node, int] = {}
    made_of = behind([node])
    for n in node.graph.nodes:
        if n in made_of:
            args = fx.map_arg((n.args, dict(n.kwargs)), lambda x: f"%{numbers[x]}")
            key = n.name if n.op == "placeholder" else (str(n.target), repr(args))
            numbers[n] = known.setdefault(key, len(known))
    return numbers[node]


def _slice(program: Program, nodes: tuple[fx.Node, ...]) -> fx.Graph:
    """Return the graph that computes these values from its placeholders."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = behind(nodes)
    for n in program.graph.nodes:
        if n in needed:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in nodes))
    return graph
