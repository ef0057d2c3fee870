"""Infer the types of graph nodes: shape and dtype of each result, and whether it carries a gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import map_value, values_of
from shardc.ir.metadata import Value
from shardc.torch_private import OpOverload, unintercepted

#: Ops whose result carries no gradient even if an argument does. Dtypes decide the rest (comparisons, indices).
_CUTS = {"detach", "largest", "top", "ties", "nll_top", "all_reduce_max"}
_LIKE = ("_like", "new_")
#: Exceptions of ops for operands outside their domain: a matrix that is not positive definite, lengths of zero.
OUTSIDE_DOMAIN = (RuntimeError, ValueError, IndexError)


def continuous(x: Tensor | Value) -> bool:
    """Return whether a gradient may flow through x: it holds real or complex numbers."""
    return x.dtype.is_floating_point or x.dtype.is_complex


def of_tensor(x: Tensor, requires_grad: bool = False) -> Value:
    return Value(tuple(int(s) for s in x.shape), x.dtype, requires_grad and continuous(x))


def op_name(target: Any) -> str:
    """Return an op's short name: `add` for torch.ops.aten.add.Tensor, `nll` for shardc.runtime.ops.nll."""
    if isinstance(target, OpOverload):
        return str(target._schema.name.partition("::")[2])
    return str(getattr(target, "__name__", target))


def full_op_name(target: Any) -> str:
    """Return an op's name for messages: `aten.add.Tensor`, or `nll` for shardc.runtime.ops.nll."""
    return str(target) if isinstance(target, OpOverload) else str(getattr(target, "__name__", target))


def cuts(target: Any) -> bool:
    """Return whether an op's result never carries a gradient. Dtypes are not considered."""
    name = op_name(target)
    return name in _CUTS or name.endswith(_LIKE[0]) or name.startswith(_LIKE[1])


def carries_gradient(target: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call's result depends differentiably on an argument with a gradient, dtypes aside."""
    return not cuts(target) and any(requires_grad(n) for n in nodes_in((args, kwargs)))


def nodes_in(x: Any) -> Iterable[fx.Node]:
    """Return the graph nodes in nested arguments."""
    nodes: list[fx.Node] = []
    fx.map_arg(x, nodes.append)
    return nodes


def typed_key(x: Any, of_node: Callable[[fx.Node], Any] | None = None) -> Any:
    """Return the arguments of a call as a hashable key, equal for arguments that compute the same.

    1, 1.0 and True differ, 0.0 and -0.0 too. of_node: returns a node's key; default: its type, or its name if it has
    none.
    """
    if isinstance(x, fx.Node):
        value = of_node(x) if of_node is not None else x.meta.get("value")
        return x.name if value is None else value
    if isinstance(x, (tuple, list)):
        return tuple([typed_key(y, of_node) for y in x])
    if isinstance(x, dict):
        return tuple([(k, typed_key(x[k], of_node)) for k in sorted(x)])
    if isinstance(x, slice):
        return "slice", x.start, x.stop, x.step
    return (type(x), repr(x)) if isinstance(x, (int, float)) else x


def requires_grad(node: fx.Node) -> bool:
    return any(v.requires_grad for v in values_of(node) if v is not None)


def typed(result: Any, target: Any, args: Any, kwargs: Any) -> Value | tuple[Any, ...] | None:
    """Return the `value` metadata of a call, from its `result`: a tensor without data, or a tuple of them."""
    if target is operator.getitem and isinstance(args[0].meta.get("value"), tuple):
        value: Value | None = args[0].meta["value"][args[1]]
        return value
    grad = carries_gradient(target, args, kwargs)
    if isinstance(result, (tuple, list)):
        return tuple(of_tensor(r, grad) if isinstance(r, Tensor) else None for r in result)
    return of_tensor(result, grad) if isinstance(result, Tensor) else None


def on_meta(x: Any) -> Any:
    """Replace every node in the arguments by an empty meta tensor, to run an op for its result's type."""

    def empty(v: Value) -> Tensor:
        return torch.empty(v.shape, dtype=v.dtype, device="meta")

    return fx.map_arg(x, lambda node: map_value(empty, node.meta["value"]))


#: Arguments about a tensor's device and memory: no part of the computation.
_PLACE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def without_place(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without those about a tensor's device and memory, which types do not need."""
    return {k: v for k, v in kwargs.items() if k not in _PLACE}


def infer(target: Any, args: Any, kwargs: Any) -> Value | tuple[Any, ...] | None:
    """Infer the value of `target(*args, **kwargs)` on the meta device. Only for aten ops and getitem."""
    if target is operator.getitem:
        return typed(None, target, args, kwargs)
    if op_name(target) in _QUANTISED:
        operand: Value = args[0].meta["value"]
        return replace(operand, requires_grad=carries_gradient(target, args, kwargs))
    with torch.no_grad(), unintercepted():
        if (value := _pointwise(target, args, kwargs)) is not None:
            return value
        options = dict(on_meta(kwargs))
        if any(a.name == "device" for a in target._schema.arguments):  # a factory op would allocate real memory
            options["device"] = "meta"
        return typed(target(*on_meta(args), **options), target, args, kwargs)


#: Their results have the type of their first operand, and they have no kernel on the meta device.
_QUANTISED = {"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"}
#: The CPU has every pointwise op for `_FLOATS`, also with some operands of `_OTHERS`.
_FLOATS = {torch.float32, torch.float64}
_OTHERS = {torch.int64, torch.int32, torch.bool}


def _pointwise(target: Any, args: Any, kwargs: Any) -> Value | None:
    """Infer the value of a pointwise op from its result on one-element tensors; None for other ops.

    On the meta device a pointwise op runs in Python, which takes 30 times as long.
    """
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    operands = [n.meta["value"] for n in nodes_in((args, kwargs))]
    dtypes = {v.dtype if isinstance(v, Value) else None for v in operands}
    if not dtypes & _FLOATS or not dtypes <= _FLOATS | _OTHERS:
        return None
    a, k = fx.map_arg(
        (args, kwargs), lambda n: torch.ones((1,) * len(n.meta["value"].shape), dtype=n.meta["value"].dtype)
    )
    result = target(*a, **k)
    if not isinstance(result, Tensor):
        return None
    shape: torch.Size = torch.broadcast_shapes(*(v.shape for v in operands))  # type: ignore[no-untyped-call]
    return replace(of_tensor(result, carries_gradient(target, args, kwargs)), shape=tuple(shape))


def behind(roots: Iterable[fx.Node], further: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """Return the roots and all nodes that they are computed from.

    further: if it returns False for a node, the search does not continue to that node's inputs.
    """
    reached: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        if (node := todo.pop()) not in reached:
            reached.add(node)
            if further(node):
                todo += node.all_input_nodes
    return reached
