"""Represent values as terms: ops on terms, down to a text's inputs. Equal terms are equal numbers.

    y = add(mm(x, w), b)    ("sum", (("mm", "x", "w"), "b"))

A term is a number: each distinct one is stored once, so that comparing costs nothing. Normal forms make equal values
equal terms: a collective in two lines and in one; a value that was on the host; a sum in any order and memory (tests
check the last bits); two transposes or reshapes in a row; a product of rows and that of a matrix; the transpose of a
product; what is recomputed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardc.runtime import ops
from shardc.runtime.ops.factors import PRODUCTS, factors
from shardc.torch_private import OpOverload
from shardc.verify.static.same_values import frozen

aten = torch.ops.aten

#: Keyword arguments that do not change the result: names, and whose memory it is.
_ASIDE = {"tag", "overlap", "own", "keep"}
#: First lines of collectives in two lines, with the op that they begin.
_BEGIN = {ops.start: None, ops.transpose_start: ops.transpose}
#: Gathering a bucket again yields the same as in forward: no parameter changes within a step.
_AGAIN = {ops.regather_start: ops.gather_start, ops.regather_wait: ops.gather_wait}
#: Lines that take a value on its way, with where it is before and after: on the host and back in four lines, and a
#: collective in two. After the last one it is here: "".
_STEPS = {
    ops.offload_start: ("", "leaving"),
    ops.offload_wait: ("leaving", "on the host"),
    ops.reload_start: ("on the host", "coming"),
    ops.reload_wait: ("coming", ""),
    ops.wait: ("begun", ""),
}
_SUMS = {aten.add.Tensor, ops.add_into}
_PRODUCTS = {op for op in PRODUCTS if isinstance(op, OpOverload)}
_COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
_RESHAPES = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


class Terms:
    """The distinct terms of one stage."""

    def __init__(self) -> None:
        self._number: dict[Any, int] = {}
        self._known: list[tuple[Any, ...]] = []
        self._shape: dict[int, tuple[int, ...]] = {}

    def given(self, name: str, shape: tuple[int, ...] | None = None) -> int:
        """Return the term of a text's input."""
        return self._with(self._kept(("given", name)), shape)

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, ...] | None = None
    ) -> int:
        """Return the term of a call. args, kwargs: with a `Term` for each node. shape: local, if known."""
        if _RESHAPES.get(target, target) is aten.reshape.default and shape is not None:
            return self._reshaped(args[0].number, shape)
        if target in _COPIES:
            return args[0].number  # type: ignore[no-any-return]
        if target in _STEPS:  # the type shown may be global, as that of a received value
            return self._step(target, args[0].number)
        if target in _PRODUCTS and not kwargs and (term := self._product(target, args, shape)) is not None:
            return term
        if target is aten.sum.dim_IntList and shape is not None and args[1]:
            return self._summed(args, kwargs, shape)
        return self._with(self._called(target, args, kwargs), shape)

    def _summed(self, args: tuple[Any, ...], kwargs: Any, shape: tuple[int, ...]) -> int:
        """Return the term of a sum over dims: keepdim as a reshape, leading dims as one dim."""
        x, dims, *keeps = args
        if keeps == [True]:
            summed = {d % len(shape) for d in dims}
            rest = tuple(n for d, n in enumerate(shape) if d not in summed)
            return self._reshaped(self._summed((x, dims), kwargs, rest), shape)
        known = self._shape.get(x.number)
        if known is not None and len(dims) > 1 and sorted(dims) == list(range(len(dims))):
            flat = (math.prod(known[: len(dims)]), *known[len(dims) :])
            args = (Term(self._reshaped(x.number, flat)), [0])
        return self._with(self._called(aten.sum.dim_IntList, args, kwargs), shape)

    def _product(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...] | None) -> int | None:
        """Return a product as one of two matrices; None if it is not one, or if sizes are unknown."""
        x, w, bias = factors(target, args)
        rows, matrix = self._shape.get(x.number), self._shape.get(w.number)
        if rows is None or matrix is None or shape is None or len(rows) < 2 or len(matrix) != 2:
            return None
        if target is aten.linear.default:
            w, matrix = Term(self._transposed(w)), matrix[::-1]
        flat = (math.prod(rows[:-1]), rows[-1])
        product = self._with(
            self._kept((aten.mm.default, (Term(self._reshaped(x.number, flat)), w), ())), (flat[0], matrix[1])
        )
        product = self._reshaped(product, shape)
        return product if bias is None else self._with(self.sum(product, bias.number), shape)

    def _transposed(self, x: Term) -> int:
        shape = self._shape.get(x.number)
        return self._with(self._called(aten.t.default, (x,), {}), None if shape is None else shape[::-1])

    def _with(self, term: int, shape: tuple[int, ...] | None) -> int:
        if shape is not None:
            self._shape[term] = tuple(shape)
        return term

    def _reshaped(self, x: int, shape: tuple[int, ...]) -> int:
        op, *rest = self._known[x]
        if op == "reshaped":
            x = rest[0]
        return x if self._shape.get(x) == tuple(shape) else self._with(self._kept(("reshaped", x, tuple(shape))), shape)

    def _called(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        if target in _SUMS and len(args) == 2 and not kwargs and all(isinstance(a, Term) for a in args):
            return self.sum(args[0].number, args[1].number)
        if target in _BEGIN:
            op, *rest = args
            inner = (getattr(ops, op), tuple(rest)) if _BEGIN[target] is None else (_BEGIN[target], args)
            return self._kept(("begun", self._called(inner[0], inner[1], kwargs)))
        if target is operator.getitem and self._known[args[0].number][0] is ops.opaque_backward:
            return self._gradient(args[0].number, int(args[1]))
        if target is aten.t.default:
            inside = self._known[args[0].number]
            if inside[0] is aten.t.default:
                ((x,), _) = inside[1:]
                return x.number  # type: ignore[no-any-return]
            if inside[0] is aten.mm.default:  # the transpose of a product is the product of transposes
                ((x, w), _) = inside[1:]
                return self._kept((aten.mm.default, (Term(self._transposed(w)), Term(self._transposed(x))), ()))
        target = _AGAIN.get(target, _RESHAPES.get(target, target))
        named = {k: v for k, v in kwargs.items() if k not in _ASIDE}
        return self._kept((target, frozen(args, {}), frozen(named, {})))

    def _gradient(self, opaque_backward: int, index: int) -> int:
        """Return one gradient of an opaque op's backward, which may run once for all of them or for some."""
        (tape, grads, before, operands), named = self._known[opaque_backward][1:]
        only = dict(named).get("only", ())
        if only and frozen(index, {}) not in only:
            return self._kept(("a gradient that is not asked for", opaque_backward))
        named = tuple((k, v) for k, v in named if k != "only")
        return self._kept((ops.opaque_backward, (tape, grads, before[index], operands), (*named, ("of", index))))

    def _step(self, target: Any, x: int) -> int:
        """Return the term of a step to the host, back, or to a collective's end; in the wrong order it is no value."""
        before, after = _STEPS[target]
        if before:
            state, *rest = self._known[x]
            if state != before:
                return self._kept((f"{target.__name__} of what is not {before}", x))
            x = rest[0]
        return self._kept((after, x)) if after else x

    def sum(self, *terms: int) -> int:
        """Return the term of a sum, independent of order."""
        summands: list[int] = []
        for t in terms:
            known = self._known[t]
            summands += known[1] if known[0] == "sum" else (t,)
        return self._kept(("sum", tuple(sorted(summands))))

    def _kept(self, key: tuple[Any, ...]) -> int:
        if key not in self._number:
            self._number[key] = len(self._known)
            self._known.append(key)
        return self._number[key]

    def parts(self, term: int) -> tuple[Any, list[int]]:
        """Return what a term is, and the terms that it is made of."""
        op, *rest = self._known[term]
        if op == "sum":
            return op, list(rest[0])
        if op == "reshaped":
            return f"reshape to {list(rest[1])} of", [rest[0]]
        if isinstance(op, str) and op != "given":
            return op, [rest[0]]
        numbers: list[int] = []

        def visit(a: Any) -> None:
            if isinstance(a, Term):
                numbers.append(a.number)
            elif isinstance(a, tuple):
                for x in a:
                    visit(x)

        visit(tuple(rest))
        return op if op != "given" else rest[0], numbers


@dataclass(unsafe_hash=True, slots=True)
class Term:
    """A term among arguments, where plain numbers occur too."""

    number: int
