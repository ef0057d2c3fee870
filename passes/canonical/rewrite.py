"""Share helpers of rewrites: typed emission of calls, arguments by name, values known at compile time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.ir.source import Source
from shardc.ir.type_text import DTYPES
from shardc.rules.core.op_call import arguments_of
from shardc.runtime import ops
from shardc.torch_private import OpOverload, add_node

aten = torch.ops.aten
#: Results of a rewrite: the node that replaces the op's result, or one node per result.
Result = fx.Node | tuple[fx.Node | None, ...]
Rewrite = Callable[["Emit", "Args", Value], Result]
#: Rewrites by the op's name without overload: "view" for all of aten.view.*.
TABLE: dict[str, Rewrite] = {}
#: Constants up to this many elements are computed at compile time, to recognise them.
KNOWN_LIMIT = 1 << 20


def rewrite(*names: str) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite for ops: one name, or several as in "view reshape".

    It is a function of the emitter, the call's arguments and the result's type.
    """

    def register(function: Rewrite) -> Rewrite:
        for name in " ".join(names).split():
            assert name not in TABLE, f"{name} is rewritten twice"
            TABLE[name] = function
        return function

    return register


class Args:
    """The arguments of a call by the names of its schema, defaults included.

    a.input, a["index"], a.get("dtype"); `a.op` is the op, `a.op_name` its name, `a.first` its first argument; `a.args`
    and `a.kwargs` are as in the call.
    """

    def __init__(self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        known = arguments_of(target)
        self.op, self.op_name = target, values.op_name(target)
        self.named: dict[str, Any] = {name: default for name, (_, default) in known.items()}
        self.named |= {**dict(zip(known, args, strict=False)), **kwargs}
        self.first: Any = args[0] if args else None
        self.args, self.kwargs = args, kwargs

    def __getattr__(self, name: str) -> Any:
        try:
            return self.named[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.named.get(name, default)


def shape(node: fx.Node) -> tuple[int, ...]:
    return value_of(node).shape


def dim(d: int, ndim: int) -> int:
    """Return a dimension counted from the left."""
    return d + ndim if d < 0 else d


class Emit:
    """Adds typed calls to the new graph. source: of the op being rewritten. chunks: see `rewritten`."""

    def __init__(self, graph: fx.Graph, rng: fx.Node, chunks: tuple[int, int] = (1, 1)) -> None:
        self.graph, self.rng, self.chunks = graph, rng, chunks
        self.source = Source()
        self.mark: dict[str, bool] = {}  # the mark of mixed precision's casts (shardc.ir.metadata)
        self.inferred: dict[Any, Any] = {}  # types of results, by call
        self.known: dict[fx.Node, Tensor | None] = {}
        self.decomposed: dict[str, fx.GraphModule | None] = {}  # calls that were decomposed (decompose.py)
        self.replaced: list[tuple[OpOverload, Source]] = []  # their ops, and where the model calls them

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an aten op with its inferred type; equal calls, as in equal layers, infer it once."""
        key = (target, values.typed_key(args), values.typed_key(kwargs))
        if key not in self.inferred:
            self.inferred[key] = values.infer(target, args, kwargs)
        return self.typed(self.inferred[key], target, *args, **kwargs)

    def typed(self, result: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call with a result of this type."""
        return add_node(
            self.graph, "call_function", target, args, kwargs, meta={"value": result, "source": self.source}
        )

    # the few ops that many rewrites use

    def reshape(self, x: fx.Node, size: Sequence[int]) -> fx.Node:
        return x if shape(x) == tuple(size) else self(aten.reshape.default, x, list(size))

    def expand(self, x: fx.Node, size: Sequence[int]) -> fx.Node:
        return x if shape(x) == tuple(size) else self(aten.expand.default, x, list(size))

    def cast(self, x: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """Cast `x` to a dtype, with a name such as linear_bf16."""
        if dtype is None or value_of(x).dtype == dtype:
            return x
        args, kwargs = (x,), {"dtype": dtype}
        name = f"{x.name}_{DTYPES.get(dtype, 'cast')}"
        node = self.graph.call_function(aten._to_copy.default, args, {**kwargs}, name=name)
        node.meta = {"value": values.infer(aten._to_copy.default, args, kwargs), "source": self.source, **self.mark}
        return node

    def detach(self, x: fx.Node) -> fx.Node:
        if not value_of(x).requires_grad:
            return x
        return self.typed(replace(value_of(x), requires_grad=False), aten.detach.default, x)

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        """Reorder the dims of `x`; an exchange of two is a transpose."""
        moved = [i for i, d in enumerate(order) if i != d]
        if not moved:
            return x
        if len(moved) == 2:
            return self(aten.transpose.int, x, *moved)
        return self(aten.permute.default, x, list(order))

    def reduce(self, x: fx.Node, reduction: int) -> fx.Node:
        """Apply a loss's `reduction` to its elements: 0 none, 1 mean, 2 sum."""
        return x if reduction == 0 else self(aten.mean.default if reduction == 1 else aten.sum.default, x)

    def dropout(self, x: fx.Node, p: float) -> fx.Node:
        """Add the counter-based dropout; its index is set when the graph is finished."""
        if p <= 0:
            return x
        return self.typed(value_of(x), ops.dropout, x, p, self.rng, 0)

    def attention(self, result: Value, *args: Any) -> fx.Node:
        """Add attention with dropout (shardc/runtime/ops/attention/). Its index is set at the end.

        args: up to `enable_gqa`.
        """
        grad = values.carries_gradient(ops.attention, args, {})
        return self.typed(replace(result, requires_grad=grad), ops.attention, *args, self.rng, 0)

    def random(self, kind: str, options: Sequence[float], size: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Add random numbers (shardc/runtime/ops/random_ops.py). Their index is set at the end."""
        return self.typed(Value(tuple(size), dtype), ops.random, kind, tuple(options), list(size), dtype, self.rng, 0)

    def constant(self, node: fx.Node) -> Tensor | None:
        """Return the value of a small tensor that is known at compile time; None for others."""
        if node not in self.known:
            self.known[node] = self._evaluate(node)
        return self.known[node]

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        v = node.meta.get("value")
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not isinstance(v, Value):
            return None
        if v.nbytes() > KNOWN_LIMIT * v.dtype.itemsize or any(self.constant(n) is None for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        result = node.target(*args, **kwargs)
        assert isinstance(result, Tensor)
        return result

    def refuse(self, what: str, fix: str) -> ShardcError:
        code = f" ({self.source.shown})" if self.source.code else ""
        return ShardcError(what + code, where=source.where(self.source), fix=fix)
