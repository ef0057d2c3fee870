"""Separate a call from its graph, so that the calls of equal layers are differentiated once.

    h_3_sum = all_reduce(out_7, mesh, ('tp',), tag='h_3_sum')  all_reduce(x0, mesh, ('tp',), tag=n0), names ('h_3_sum',)
    h_3_drop = dropout(h_3_sum, 0.1, rng, 7)                   dropout(x0, 0.1, rng, n0), names (7,)

A call's *names* differ between equal layers, and are parameters of the call and of its derivative: the tag in the
record of what ran, and the number of its stream of random numbers.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

from torch import fx

from shardc.ir.graph import operands_of, producer_of
from shardc.ir.types import typed_key
from shardc.passes.joint.derivatives.record import Ref, map_refs
from shardc.torch_private import OpOverload

#: One value of a graph: (the node that makes it, the index of the result).
Made = tuple[fx.Node, int]


class Template(NamedTuple):
    """target(*args, **kwargs), with Refs in place of nodes and names. kwargs: in alphabetical order.

    operands: the call's distinct tensors, for Ref("x", i). names: for Ref("n", i). key: equal for calls that differ
    only in operands and names.
    """

    target: Any
    operands: tuple[Made, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[Any, ...]
    key: int

    def split_operands(self) -> tuple[Template, list[int]]:
        """Return (the call with one operand per place of a tensor in its arguments, which operand each was)."""
        places: list[int] = []

        def put(r: Ref) -> Ref:
            if r.kind != "x":
                return r
            places.append(r.index)
            return Ref("x", len(places) - 1)

        args = map_refs(self.args, put)
        return self._replace(args=args, kwargs={k: map_refs(a, put) for k, a in self.kwargs.items()}), places


#: Numbers of the distinct calls of this process.
_NUMBERS: dict[Hashable, int] = {}
_NEXT = itertools.count()


def template(node: fx.Node) -> Template:
    """Return the template of a call in a graph."""
    order = {n: i for i, n in enumerate(dict.fromkeys(operands_of(node)))}
    at, called = _named(node.target)
    names: list[Any] = []

    def name(a: Any) -> Ref:
        names.append(a)
        return Ref("n", len(names) - 1)

    def put(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return Ref("x", order[a]) if a in order else Ref(a.name)  # type: ignore[arg-type]  # "mesh", "rng"
        if isinstance(a, tuple):
            return tuple(map(put, a))
        return list(map(put, a)) if isinstance(a, list) else a  # fx stores lists in its own class

    args = tuple(name(a) if i in at else put(a) for i, a in enumerate(node.args))
    kwargs = {k: name(node.kwargs[k]) if k in called else put(node.kwargs[k]) for k in sorted(node.kwargs)}
    operands = tuple(map(producer_of, order))
    key = _NUMBERS.setdefault((node.target, typed_key((args, kwargs))), next(_NEXT))
    return Template(node.target, operands, args, kwargs, tuple(names), key)


def item_name(node: fx.Node, i: int) -> str:
    """Return the name of a call's result in a stage's graph."""
    if not isinstance(node.meta.get("value"), tuple):
        return node.name
    names = (u.name for u in node.users if u.target is operator.getitem and u.args[1] == i)
    return next(names, f"{node.name}_{i}")


@cache
def _named(target: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return where names are among an op's arguments: places, and keywords."""
    if isinstance(target, OpOverload):
        return frozenset(), frozenset()
    parameters = list(inspect.signature(target).parameters)
    called = {"tag", "index"} if "rng" in parameters else {"tag"}
    return frozenset(i for i, p in enumerate(parameters) if p in called), frozenset(called.intersection(parameters))
