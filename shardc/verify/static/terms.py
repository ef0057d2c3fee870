"""Represent values as terms: ops on terms, down to a text's inputs. Equal terms are equal numbers.

    y = add(mm(x, w), b)    ("sum", (("mm", "x", "w"), "b"))

Each distinct term is one object, so that comparing costs nothing. Normal forms make equal values
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
from shardc.torch_private import OpOverload, pytree
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


@dataclass(eq=False, repr=False, slots=True)
class Term:
    """A value. key: an op and its arguments, which are terms or constants. shape: local, if known."""

    key: tuple[Any, ...]
    number: int
    shape: tuple[int, ...] | None = None


class Terms:
    """The distinct terms of one stage."""

    def __init__(self) -> None:
        self._terms: dict[Any, Term] = {}

    def given(self, name: str, shape: tuple[int, ...] | None = None) -> Term:
        """Return the term of a text's input."""
        return self._with(self._kept("given", name), shape)

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, ...] | None = None
    ) -> Term:
        """Return the term of a call. args, kwargs: with a `Term` for each node. shape: local, if known."""
        if _RESHAPES.get(target, target) is aten.reshape.default and shape is not None:
            return self._reshaped(args[0], shape)
        if target in _COPIES:
            return args[0]  # type: ignore[no-any-return]
        if target in _STEPS:  # the type shown may be global, as that of a received value
            return self._with(self._step(target, args[0]), shape if target is ops.wait else None)
        if target in _PRODUCTS and not kwargs and (term := self._product(target, args, shape)) is not None:
            return term
        if target is aten.sum.dim_IntList and shape is not None and args[1]:
            return self._summed(args, kwargs, shape)
        return self._with(self._called(target, args, kwargs), shape)

    def _with(self, term: Term, shape: tuple[int, ...] | None) -> Term:
        term.shape = term.shape if shape is None else tuple(shape)
        return term

    def _summed(self, args: tuple[Any, ...], kwargs: Any, shape: tuple[int, ...]) -> Term:
        """Return the term of a sum over dims: keepdim as a reshape, leading dims as one dim."""
        x, dims, *keeps = args
        if keeps == [True]:
            summed = {d % len(shape) for d in dims}
            rest = tuple(n for d, n in enumerate(shape) if d not in summed)
            return self._reshaped(self._summed((x, dims), kwargs, rest), shape)
        if x.shape is not None and len(dims) > 1 and sorted(dims) == list(range(len(dims))):
            args = (self._reshaped(x, (math.prod(x.shape[: len(dims)]), *x.shape[len(dims) :])), [0])
        return self._with(self._called(aten.sum.dim_IntList, args, kwargs), shape)

    def _product(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...] | None) -> Term | None:
        """Return a product as one of two matrices; None if it is not one, or if sizes are unknown."""
        x, w, bias = factors(target, args)
        if x.shape is None or w.shape is None or shape is None or len(x.shape) < 2 or len(w.shape) != 2:
            return None
        rows, columns = math.prod(x.shape[:-1]), w.shape[0 if target is aten.linear.default else 1]
        w = self._transposed(w) if target is aten.linear.default else w
        product = self._kept(aten.mm.default, (self._reshaped(x, (rows, x.shape[-1])), w), ())
        product = self._reshaped(self._with(product, (rows, columns)), shape)
        return product if bias is None else self._with(self.sum(product, bias), shape)

    def _transposed(self, x: Term) -> Term:
        return self._with(self._called(aten.t.default, (x,), {}), None if x.shape is None else x.shape[::-1])

    def _reshaped(self, x: Term, shape: tuple[int, ...]) -> Term:
        x = x.key[1] if x.key[0] == "reshaped" else x
        return x if x.shape == tuple(shape) else self._with(self._kept("reshaped", x, tuple(shape)), shape)

    def _called(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Term:
        if target in _SUMS and len(args) == 2 and not kwargs and all(isinstance(a, Term) for a in args):
            return self.sum(*args)
        if target in _BEGIN:
            op, *rest = args
            inner = (getattr(ops, op), tuple(rest)) if _BEGIN[target] is None else (_BEGIN[target], args)
            return self._kept("begun", self._called(inner[0], inner[1], kwargs))
        op, *inside = args[0].key if args and isinstance(args[0], Term) else (None,)
        if target is operator.getitem and op is ops.opaque_backward:
            return self._gradient(args[0], int(args[1]))
        if target is aten.t.default and op is aten.t.default:
            return inside[0][0]  # type: ignore[no-any-return]
        if target is aten.t.default and op is aten.mm.default:  # of a product: the product of transposes
            x, w = map(self._transposed, inside[0])
            return self._kept(aten.mm.default, (w, x), ())
        target = _AGAIN.get(target, _RESHAPES.get(target, target))
        named = {k: v for k, v in kwargs.items() if k not in _ASIDE}
        return self._kept(target, frozen(args, {}), frozen(named, {}))

    def _gradient(self, opaque_backward: Term, index: int) -> Term:
        """Return one gradient of an opaque op's backward, which may run once for all of them or for some."""
        (tape, grads, before, operands), named = opaque_backward.key[1:]
        only = dict(named).get("only", ())
        if only and frozen(index, {}) not in only:
            return self._kept("a gradient that is not asked for", opaque_backward)
        named = (*((k, v) for k, v in named if k != "only"), ("of", index))
        return self._kept(ops.opaque_backward, (tape, grads, before[index], operands), named)

    def _step(self, target: Any, x: Term) -> Term:
        """Return the term of a step to the host, back, or to a collective's end; in the wrong order it is no value."""
        before, after = _STEPS[target]
        if before and x.key[0] != before:
            return self._kept(f"{target.__name__} of what is not {before}", x)
        x = x.key[1] if before else x
        return self._kept(after, x) if after else x

    def sum(self, *terms: Term) -> Term:
        """Return the term of a sum, independent of order."""
        summands = [x for t in terms for x in (t.key[1] if t.key[0] == "sum" else (t,))]
        return self._kept("sum", tuple(sorted(summands, key=lambda t: t.number)))

    def _kept(self, *key: Any) -> Term:
        return self._terms.setdefault(key, Term(key, len(self._terms)))


def parts(term: Term) -> tuple[Any, list[Term]]:
    """Return what a term is, and the terms that it is made of."""
    op, *rest = term.key
    if op == "reshaped":
        return f"reshape to {list(rest[1])} of", [rest[0]]
    found: list[Term] = []
    pytree.tree_map_only(Term, found.append, rest)
    return op if op != "given" else rest[0], found
