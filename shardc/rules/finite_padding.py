"""What padding may hold where an op reads it, so that results and gradients are finite.

Padding is finite, and its gradient is zero. An op keeps that if its result and its derivatives are finite at what its
padding holds: a zero times an infinite derivative is nan, and a sum over padding carries it to the weights before.
Which numbers those are is tried out: the op and its backward run on tiny tensors that hold each of `GRID`, once for
each op and arguments. An op that is finite wherever its padding is needs nothing; for others `fills` looks for the
operands and the numbers that padding has to be filled with. Where no number will do, the dim is not padded
(shardc.rules.choices), but gathered.

Ops that are linear in each operand are finite wherever their operands are, and are not tried.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.metadata import Value
from shardc.ir.placement import Shard
from shardc.rules.notation import Signature
from shardc.rules.op_call import Call, Operand
from shardc.rules.registry import Rule
from shardc.rules.strategy import Strategy
from shardc.torch_private import OpOverload

#: Numbers that padding may be filled with, in the order in which they are tried.
NUMBERS = (1.0, 0.5, 2.0, 0.0, -0.5, -1.0, -2.0, 3.0)
#: What padding that is not filled is tried with besides: exponentials overflow at the last two.
GRID = (*NUMBERS, 0.25, -3.0, 1000.0, -1000.0)
#: Elements of a call that is not elementwise, at most: of larger ones nothing is known.
_LARGEST = 1 << 22
#: Operands of a call, at most.
_OPERANDS = 4
#: Operands that lie in padding together: those that have one padded factor.
Group = frozenset[int]
Fills = tuple[float | None, ...]
#: What an op raises for numbers, or for shapes, that it does not take.
_RAISED = (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError, NotImplementedError)


def kept(strategies: Iterable[Strategy], signature: Signature) -> list[Strategy]:
    """The splits of padded factors that results have, too."""
    return [
        s
        for s in strategies
        if s.kind == "split" and s.base not in signature.summed and any(isinstance(p, Shard) and p.padding for p in s.inputs)
    ]


def groups_of(strategies: Iterable[Strategy], signature: Signature) -> tuple[Group, ...]:
    """The operands that are in padding together: those that have one padded factor, or one of several."""
    each = {
        frozenset(i for i, p in enumerate(s.inputs) if isinstance(p, Shard)) for s in kept(strategies, signature)
    }
    return tuple(sorted({frozenset().union(*some) for some in _subsets(each)}, key=sorted))


def _subsets(groups: set[Group]) -> Iterator[tuple[Group, ...]]:
    for count in range(1, len(groups) + 1):
        yield from itertools.combinations(sorted(groups, key=sorted), count)


def fills(rule: Rule, call: Call, signature: Signature, groups: tuple[Group, ...]) -> Fills | None:
    """By operand, the number that its padding has to be filled with; None: it may hold anything. None in all: there are
    no numbers with which the op is finite.
    """
    table = _table(rule, call, signature, groups)
    nothing: Fills = (None,) * len(call.operands)
    if table is None:
        return nothing
    padded = sorted(frozenset().union(*groups))
    for count in range(len(padded) + 1):
        for which in itertools.combinations(padded, count):
            for numbers in itertools.product(*(table.numbers(i) for i in which)):
                chosen = dict(zip(which, numbers, strict=True))
                given = tuple(chosen.get(i) for i in range(len(call.operands)))
                if all(table.finite(group, given) for group in groups):
                    return given
    return None


def finite(rule: Rule, call: Call, signature: Signature, groups: tuple[Group, ...], holds: Fills) -> bool:
    """Is the op finite in its padding, and its derivatives, where an operand's padding holds a number? None: any."""
    table = _table(rule, call, signature, groups)
    return table is None or all(table.finite(group, holds) for group in groups)


# --- what was tried


@dataclass
class _Table:
    """Where an op is finite. domains: by operand, what it was tried with, a number or None for numbers that differ;
    good: bool, a dim for each operand.
    """

    domains: tuple[tuple[float | None, ...], ...]
    good: Tensor

    def numbers(self, operand: int) -> list[float]:
        return [x for x in self.domains[operand] if x is not None and x in NUMBERS]

    def finite(self, group: Group, holds: Fills) -> bool:
        """Is it finite where the operands of a group are padding that holds this, for all numbers of the others for
        which any padding would do? A quotient by a zero that one device has is no matter of padding.
        """
        dims = sorted(group)
        possible, here = self.good, self.good
        for i in dims:
            possible = possible.any(i, keepdim=True)
            if (number := holds[i]) is None:
                here = here.all(i, keepdim=True)
            elif number in self.domains[i]:
                here = here.select(i, self.domains[i].index(number)).unsqueeze(i)
            else:
                return False
        return bool((here | ~possible).all())


_TABLES: dict[Any, _Table | None] = {}


def _table(rule: Rule, call: Call, signature: Signature, groups: tuple[Group, ...]) -> _Table | None:
    """None: nothing has to be tried, or nothing can be."""
    if not groups or not isinstance(call.target, OpOverload) or torch.Tag.nondeterministic_seeded in call.target.tags:
        return None
    if _multilinear(rule, call) or not 0 < len(call.operands) <= _OPERANDS:
        return None
    padded = frozenset().union(*groups)
    one_by_one = _elementwise(signature)
    types = tuple((v.dtype, v.requires_grad, () if one_by_one else v.shape) for v in call.operands)
    key = (call.target, repr(call.args), repr(call.kwargs), types, one_by_one or padded)
    if key not in _TABLES:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _TABLES[key] = _of_elements(call) if one_by_one else _of_rows(call, signature, padded)
    return _TABLES[key]


def _multilinear(rule: Rule, call: Call) -> bool:
    linear = {i for group in rule.groups(call) for i in group}
    return all(i in linear for i, v in enumerate(call.operands) if v.dtype.is_floating_point or v.dtype.is_complex)


def _elementwise(signature: Signature) -> bool:
    """Does each element of a result come of one element of each operand, at the same place?"""
    out = signature.outputs[0]
    sides = (*signature.inputs, *signature.outputs)
    return not (signature.summed or signature.whole) and all(
        len(o) <= len(out) and all(dim in ((), at) for dim, at in zip(o, out[len(out) - len(o) :], strict=True))
        for o in sides
    )


def _of_elements(call: Call) -> _Table | None:
    """Every number of each operand with every one of the others, in one call where the op takes them so."""
    domains = tuple(_numbers_of(v, GRID if len(call.operands) <= 3 else GRID[:4]) for v in call.operands)
    points = list(itertools.product(*domains))
    columns = [torch.tensor(each, dtype=v.dtype) for each, v in zip(zip(*points, strict=True), call.operands, strict=True)]
    good = _good(call, columns)
    if good is None or good.shape != (len(points),):
        each = [_good(call, [c[k] for c in columns]) for k in range(len(points))]
        if all(g is None for g in each):
            return None
        good = torch.stack([g.all() if g is not None else torch.tensor(False) for g in each])
    return _Table(domains, good.view([len(d) for d in domains]))


def _numbers_of(v: Value, grid: tuple[float, ...]) -> tuple[float, ...]:
    if v.dtype == torch.bool:
        return 1.0, 0.0
    if not v.dtype.is_floating_point and not v.dtype.is_complex:
        return (1.0, 2.0, 0.0, 3.0) if v.dtype == torch.uint8 else (1.0, 2.0, 0.0, -1.0, 3.0)
    # in float16 a square overflows at 256
    return tuple(math.copysign(min(abs(x), 30.0), x) if v.dtype == torch.float16 else x for x in grid)


def _of_rows(call: Call, signature: Signature, padded: Group) -> _Table | None:
    """Operands that are padded, by one number each; those that are not, by numbers that differ."""
    shapes = _smallest(call, signature)
    if shapes is None:
        return None
    varied = [i for i in padded if call.operands[i].dtype.is_floating_point or call.operands[i].dtype.is_complex]
    grid = {0: (), 1: GRID, 2: (1.0, 0.5, 2.0, 0.0, -1.0)}.get(len(varied), (1.0, 2.0, 0.0))
    domains = tuple((*_numbers_of(v, grid), None) if i in varied else (None,) for i, v in enumerate(call.operands))
    good = []
    for point in itertools.product(*domains):
        filled = [_filled(v, s, x) for v, s, x in zip(call.operands, shapes, point, strict=True)]
        good.append(_good(call, filled))
    if all(g is None for g in good):
        return None
    each = [bool(g.all()) if g is not None else False for g in good]
    return _Table(domains, torch.tensor(each).view([len(d) for d in domains]))


def _smallest(call: Call, signature: Signature) -> list[tuple[int, ...]] | None:
    """Shapes of operands that the op takes, factors that may be split of size one as far as its arguments allow."""
    ones = dict.fromkeys(signature.splittable(), 1)
    kept = [ones, *({f: 1 for f in ones if f != g} for g in ones), {}] if ones else [{}]
    for cut in kept:
        sizes = {**signature.sizes, **cut}
        shapes = [
            tuple(math.prod(sizes[f] for f in dim) if dim else size for dim, size in zip(o, v.shape, strict=True))
            for o, v in zip(signature.inputs, call.operands, strict=True)
        ]
        if sum(map(math.prod, shapes)) > _LARGEST:
            continue
        if _good(call, [_filled(v, s, None) for v, s in zip(call.operands, shapes, strict=True)]) is not None:
            return shapes
    return None


def _filled(v: Value, shape: tuple[int, ...], number: float | None) -> Tensor:
    """A tensor of one number, or of numbers between 0 and 1 that differ; whole numbers are 0, a place that there is."""
    if number is not None:
        return torch.full(shape, number, dtype=v.dtype)
    if not v.dtype.is_floating_point and not v.dtype.is_complex:
        return torch.zeros(shape, dtype=v.dtype)
    n = math.prod(shape)
    return ((torch.arange(1, n + 1, dtype=torch.float64) * 0.618034) % 1).view(shape).to(v.dtype)


def _good(call: Call, tensors: list[Tensor]) -> Tensor | None:
    """bool, of elementwise calls by element: are all results and all gradients finite? None where the op raises."""
    leaves = [x.clone().requires_grad_(v.requires_grad) for x, v in zip(tensors, call.operands, strict=True)]

    def put(x: Any) -> Any:
        return leaves[x.index] if isinstance(x, Operand) else x

    try:
        made = call.target(*fx.node.map_aggregate(call.args, put), **dict(fx.node.map_aggregate(dict(call.kwargs), put)))
    except _RAISED:
        return None
    results = [y for y in (made if isinstance(made, tuple | list) else [made]) if isinstance(y, Tensor)]
    each = [y.detach() for y in results]
    wanted, ends = [x for x in leaves if x.requires_grad], [y for y in results if y.requires_grad]
    if wanted and ends:
        try:
            grads = torch.autograd.grad(ends, wanted, [torch.ones_like(y) for y in ends], allow_unused=True)
            each += [g for g in grads if g is not None]
        except _RAISED:  # it has no backward for one of them
            pass
    flags = [torch.isfinite(x) for x in each if x.dtype.is_floating_point or x.dtype.is_complex]
    alike = len({f.shape for f in flags}) == 1
    if not flags:
        return torch.ones(each[0].shape if each else (), dtype=torch.bool)
    return torch.stack(flags).all(0) if alike else torch.stack([f.all() for f in flags]).all()
