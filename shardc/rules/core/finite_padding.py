"""Find the numbers that padding may have where an op reads it: results and gradients stay finite.

Padding is finite, and its gradient is zero. An op keeps that if its result and its derivatives are finite at the
padding's numbers: zero times an infinite derivative is nan, and a sum over padding carries it to the weights before.
These numbers are found by trial: the op and its backward run on tiny tensors that contain each of `GRID`, once for
each op and arguments. An op that is finite wherever its padding is needs nothing; for others `fills` searches the
operands and numbers that padding must be filled with. Of several numbers it takes the one with the smallest result
and derivatives: a scan multiplies its state by `exp` of the padding at every step, and would overflow. If no number is
suitable, the dim is not padded (shardc.rules.core.choices), but gathered.

Ops that are linear in each operand are finite wherever their operands are, and are not tried.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import operands_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import Layout, Shard
from shardc.ir.types import continuous
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall
from shardc.rules.core.strategy import Strategy
from shardc.torch_private import OpOverload, unintercepted

if TYPE_CHECKING:
    from shardc.rules.core.choices import Choices

#: Numbers that padding may be filled with. Of those with equally large results the first is taken.
NUMBERS = (1.0, 0.5, 2.0, 0.0, -0.5, -1.0, -2.0, 3.0)
#: More numbers, to try padding that is not filled: exponentials overflow at the last two.
GRID = (*NUMBERS, 0.25, -3.0, 1000.0, -1000.0)
#: Most elements of a call that is not elementwise: larger ones are not tried.
_LARGEST = 1 << 22
#: Most operands of a call.
_OPERANDS = 4
#: Operands that are padded at the same places: they have one padded factor.
Group = frozenset[int]
Fills = tuple[float | None, ...]
#: Errors of an op for numbers that it refuses, or without a mesh.
_RAISED = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ArithmeticError)


def kept(strategies: Iterable[Strategy], signature: Signature) -> list[Strategy]:
    """Return the splits of padded factors that results also have."""

    def padded(s: Strategy) -> bool:
        return any(isinstance(p, Shard) and p.padding for p in s.inputs)

    return [s for s in strategies if s.kind == "split" and s.base not in signature.summed and padded(s)]


@dataclass(frozen=True)
class Padded:
    """Where operands of a call are padded.

    groups: operands that are padded at the same places, as they share one padded factor. infinite: operands that are
    one number that is not finite, such as the -inf of a mask. Where the padding of several factors meets, the op is
    finite if it is in the padding of each: `_Table.finite` holds for all numbers of other operands.
    """

    groups: tuple[Group, ...]
    infinite: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, node: fx.Node, strategies: Iterable[Strategy], signature: Signature, copies: Group) -> Padded:
        """Find the padded operands. Padding that copies real entries (in `copies`) is as finite as those."""
        padded = {
            frozenset(i for i, p in enumerate(s.inputs) if isinstance(p, Shard)) - copies
            for s in kept(strategies, signature)
        } - {frozenset()}
        infinite = ((i, x) for i, n in enumerate(operands_of(node)) if not math.isfinite(x := _constant(n)))
        return cls(tuple(sorted(padded, key=sorted)), tuple(infinite))


def _constant(node: fx.Node) -> float:
    """Return the number that `full` fills a value with; 0 for other values."""
    number = node.args[1] if node.target is torch.ops.aten.full.default else 0
    return float(number) if isinstance(number, int | float) else 0.0


def fills(choices: Choices, padded: Padded) -> Fills | None:
    """Return per operand the number to fill its padding with (None: any); None if the op is never finite."""
    table = _table(choices, padded)
    count = len(choices.call.operands)
    if table is None:
        return (None,) * count
    operands = sorted(frozenset().union(*padded.groups))
    for filled in (subset for k in range(len(operands) + 1) for subset in itertools.combinations(operands, k)):
        for numbers in itertools.product(*(table.numbers(i) for i in filled)):
            chosen = dict(zip(filled, numbers, strict=True))
            filling = tuple(chosen.get(i) for i in range(count))
            if all(table.finite(group, filling) for group in padded.groups):
                return filling
    return None


def finite(choices: Choices, padded: Padded, holds: Fills) -> bool:
    """Return whether the op and its derivatives are finite if padding has these numbers (None: any)."""
    table = _table(choices, padded)
    return table is None or all(table.finite(group, holds) for group in padded.groups)


# --- the trials


@dataclass
class _Table:
    """Where an op is finite. largest: absolute number in results and derivatives, or inf; a dim for each operand.

    domains: for each operand, what it was tried with: a number, or None for different numbers.
    """

    domains: tuple[tuple[float | None, ...], ...]
    largest: Tensor

    @classmethod
    def of(cls, domains: tuple[tuple[float | None, ...], ...], each: list[Tensor | None]) -> _Table | None:
        """Build the table from the result at every point (None: the op raised), or None if it always raised."""
        if all(result is None for result in each):
            return None
        largest = torch.tensor([math.inf if result is None else float(result.max()) for result in each])
        return cls(domains, largest.view([len(d) for d in domains]))

    def numbers(self, operand: int) -> list[float]:
        """Return the numbers to fill an operand with, those with the smallest results first."""
        domain = self.domains[operand]
        by_number = self.largest.nan_to_num(posinf=0.0).movedim(operand, 0).reshape(len(domain), -1).amax(1)
        order = sorted(range(len(domain)), key=lambda i: float(by_number[i]))
        return [x for x in map(domain.__getitem__, order) if x is not None and x in NUMBERS]

    def finite(self, group: Group, holds: Fills) -> bool:
        """Return whether the op is finite where a group of operands is padding that has these numbers.

        Numbers of other operands count only if some padding would do: one device also divides by their zeros.
        """
        dims = sorted(group)
        possible = filled = self.largest.isfinite()
        for i in dims:
            possible = possible.any(i, keepdim=True)
            if (number := holds[i]) is None:
                filled = filled.all(i, keepdim=True)
            elif number in self.domains[i]:
                filled = filled.select(i, self.domains[i].index(number)).unsqueeze(i)
            else:
                return False
        return bool((filled | ~possible).all())


_TABLES: dict[Any, _Table | None] = {}


def _table(choices: Choices, padded: Padded) -> _Table | None:
    """Return the op's table, or None if nothing needs a trial or nothing can be tried."""
    call, signature = choices.call, choices.signature
    if (
        not padded.groups
        or not isinstance(call.target, OpOverload)
        or torch.Tag.nondeterministic_seeded in call.target.tags
        or len(call.operands) > _OPERANDS
        or _multilinear(choices, padded)
    ):
        return None
    one_by_one, operands = _elementwise(signature), frozenset().union(*padded.groups)
    types = tuple((v.dtype, v.requires_grad, () if one_by_one else v.shape) for v in call.operands)
    key = (call.target, repr(call.args), repr(call.kwargs), types, one_by_one or operands, padded.infinite)
    if key not in _TABLES:
        with unintercepted(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _TABLES[key] = _of_elements(call, dict(padded.infinite)) if one_by_one else _of_rows(choices, operands)
    return _TABLES[key]


def _multilinear(choices: Choices, padded: Padded) -> bool:
    """Return whether the op is linear in each operand, all finite, and no index operand is padded."""
    linear = {i for group in choices.rule.groups(choices.call) for i in group}
    places = frozenset().union(*padded.groups)
    checks = [
        i in linear if continuous(v) else i not in places or v.dtype == torch.bool
        for i, v in enumerate(choices.call.operands)
    ]
    return bool(linear) and all(checks) and not padded.infinite


def _elementwise(signature: Signature) -> bool:
    """Return whether each element of a result depends on one element of each operand, at the same place."""
    out = signature.outputs[0]
    sides = (*signature.inputs, *signature.outputs)
    return not (signature.summed or signature.whole) and all(
        len(o) <= len(out) and all(dim in ((), at) for dim, at in zip(o, out[len(out) - len(o) :], strict=True))
        for o in sides
    )


def _of_elements(call: Call, known: dict[int, float]) -> _Table | None:
    """Try every combination of numbers of the operands, in one call if the op takes them so."""
    grid = GRID if len(call.operands) <= 3 else GRID[:4]
    domains = tuple((known[i],) if i in known else _numbers_of(v, grid) for i, v in enumerate(call.operands))
    points = list(itertools.product(*domains))
    columns = [torch.tensor(x, dtype=v.dtype) for x, v in zip(zip(*points, strict=True), call.operands, strict=True)]
    run = _called(call)
    largest = _largest_of(run, call, columns)
    if largest is None or largest.shape != (len(points),):
        return _Table.of(domains, [_largest_of(run, call, [c[k] for c in columns]) for k in range(len(points))])
    return _Table(domains, largest.view([len(d) for d in domains]))


def _numbers_of(v: Value, grid: tuple[float, ...]) -> tuple[float, ...]:
    if v.dtype == torch.bool:
        return 1.0, 0.0
    if not continuous(v):
        return (1.0, 2.0, 0.0, 3.0) if v.dtype == torch.uint8 else (1.0, 2.0, 0.0, 3.0, -1.0)
    # in float16 a square overflows at 256
    return tuple(math.copysign(min(abs(x), 30.0), x) if v.dtype == torch.float16 else x for x in grid)


def _of_rows(choices: Choices, padded: Group) -> _Table | None:
    """Try padded operands with one number each, and the others with different numbers."""
    call = choices.call
    shapes, run = _smallest(choices)
    if sum(map(math.prod, shapes)) > _LARGEST:
        return None
    grid = {1: GRID, 2: (1.0, 0.5, 2.0, 0.0, -1.0)}.get(len(padded), (1.0, 2.0, 0.0))

    def domain(i: int, v: Value) -> tuple[float | None, ...]:
        if i not in padded:
            return (None,)
        return (0.0, None) if _is_place(call, i) else (*_numbers_of(v, grid), None)

    domains = tuple(domain(i, v) for i, v in enumerate(call.operands))
    results: list[Tensor | None] = []
    for point in itertools.product(*domains):
        if any(x is None and len(d) == 2 for x, d in zip(point, domains, strict=True)):
            results.append(None)  # not run: kernels do not check indices
        else:
            tensors = [_filled(v, s, x) for v, s, x in zip(call.operands, shapes, point, strict=True)]
            results.append(_largest_of(run, call, tensors))
    return _Table.of(domains, results)


def _is_place(call: Call, i: int) -> bool:
    """Return whether operand i has indices: integers beside other operands, or ones that make a new dim."""
    v = call.operands[i]
    more = len(call.operands) > 1 or len(call.results[0].shape) > len(v.shape)
    return more and not continuous(v) and v.dtype != torch.bool


Run = Callable[[list[Tensor]], Any]


def _called(call: Call) -> Run:
    """Return a function that runs the op on tensors in place of the call's operands."""
    return lambda x: call.target(*_put(call.args, x), **_put(dict(call.kwargs), x))


def _put(arguments: Any, tensors: list[Tensor]) -> Any:
    return fx.node.map_aggregate(arguments, lambda x: tensors[x.index] if isinstance(x, Operand) else x)


def _smallest(choices: Choices) -> tuple[list[tuple[int, ...]], Run]:
    """Return operand shapes with each factor split over as many ranks as it has entries, and a rank's op."""
    call, rule, sizes = choices.call, choices.rule, choices.signature.sizes
    cuts = {f: s for f in choices.signature.splittable() if (s := choices.split(f, 1, sizes[f])) is not None}
    mesh = Mesh(tuple((f, sizes[f]) for f in cuts))
    ins, outs = (
        tuple(Layout.of({f: (s.inputs, s.outputs)[side][i] for f, s in cuts.items()}, mesh) for i in range(len(values)))
        for side, values in enumerate((call.operands, call.results))
    )
    shapes = [layout.local_shape(v.shape, mesh) for layout, v in zip(ins, call.operands, strict=True)]
    if rule.local is None or not cuts:
        return shapes, _called(call)
    local = rule.local

    def emit(target: Any, args: Any, kwargs: Any, **_: Any) -> Any:
        return target(*args, **kwargs)

    def run(x: list[Tensor]) -> Any:
        no_mesh: Any = None
        args, kwargs = _put(call.args, x), _put(dict(call.kwargs), x)
        return local(LocalCall(call, mesh, cuts, ins, outs, tuple(args), dict(kwargs), no_mesh, emit))

    return shapes, run


def _filled(v: Value, shape: tuple[int, ...], number: float | None) -> Tensor:
    """Return a tensor of one number, or of different numbers in (0, 1); integers are 0, a valid index."""
    if number is not None:
        return torch.full(shape, number, dtype=v.dtype)
    if not continuous(v):
        return torch.zeros(shape, dtype=v.dtype)
    n = math.prod(shape)
    return ((torch.arange(1, n + 1, dtype=torch.float64) * 0.618034) % 1).view(shape).to(v.dtype)


def _largest_of(run: Run, call: Call, tensors: list[Tensor]) -> Tensor | None:
    """Return the largest absolute number in results and gradients, inf if one is not finite; None if the op raises.

    Per element if all have the same shape.
    """
    leaves = [x.clone().requires_grad_(v.requires_grad) for x, v in zip(tensors, call.operands, strict=True)]
    try:
        output = run(leaves)
    except _RAISED:
        return None
    results = [y for y in (output if isinstance(output, tuple | list) else [output]) if isinstance(y, Tensor)]
    values = [y.detach() for y in results]
    inputs, ends = [x for x in leaves if x.requires_grad], [y for y in results if y.requires_grad]
    if inputs and ends:
        with suppress(*_RAISED):  # it has no backward for one of them
            grads = torch.autograd.grad(ends, inputs, [torch.ones_like(y) for y in ends], allow_unused=True)
            values += [g for g in grads if g is not None]
    sizes = [x.abs().double().nan_to_num(math.inf, posinf=math.inf) for x in values if continuous(x)]
    if not sizes:
        return torch.zeros(values[0].shape if values else ())
    same_shape = len({x.shape for x in sizes}) == 1
    return torch.stack(sizes if same_shape else [x.max() for x in sizes]).amax(0)
