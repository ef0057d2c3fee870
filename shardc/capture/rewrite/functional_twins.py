"""Find the functional twin of an op that writes: it computes the new value and writes nothing.

add_(x, y)                 add(x, y), cast to x's dtype
pow_(x, 2), bernoulli_(x)  pow.Tensor_Scalar(x, 2), bernoulli.p(x, 0.5)
copy_(x, y), fill_(x, y)   y, cast and expanded
batch_norm in training     the op that returns the new running statistics too

Twins follow from torch's schemas: the twin takes the same arguments, by name and type. Its overload may have another
name, and it may lack a default.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from shardc.capture.rewrite import call_like
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.types import continuous, op_name
from shardc.passes.canonical.rewrite import Args
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers shardc::with_gradient_of)
from shardc.torch_private import OpOverload

aten = torch.ops.aten


#: Norms that write their running statistics, arguments 3 and 4 (most schemas omit that); the norm that returns
#: them, None if it is written out, and their index in its results.
_STATISTICS: dict[Any, tuple[Any, int]] = {
    aten.batch_norm.default: (aten._native_batch_norm_legit_functional.default, 3),
    aten.native_batch_norm.default: (aten._native_batch_norm_legit_functional.default, 3),
    aten._native_batch_norm_legit.default: (aten._native_batch_norm_legit_functional.default, 3),
    aten._batch_norm_with_update.default: (aten._batch_norm_with_update_functional.default, 4),
    aten.instance_norm.default: (None, 0),
}


def is_inplace(node: fx.Node) -> bool:
    """Return whether an op writes to memory. A norm in eval mode does not."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return updates_statistics(node) if node.target in _STATISTICS else node.target._schema.is_mutable


def mutates(node: fx.Node) -> bool:
    """Return whether an op's schema says that it writes to an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def updates_statistics(node: fx.Node) -> bool:
    """Return whether it is a norm in training mode that has running statistics."""
    if node.target not in _STATISTICS or node.args[3] is None:
        return False
    return node.target is aten._batch_norm_with_update.default or bool(node.args[5])


#: Functional twins whose name is not the in-place op's without its underscore.
_RENAMED = {"normal": "normal_functional"}
#: Functional ops without a derivative. In place, or as torch.NAME, eager has none for their operands either.
_CONSTANT = {
    aten.normal_functional.default,
    aten.bernoulli.p,
    *(getattr(aten.randint_like, overload) for overload in aten.randint_like.overloads()),  # type: ignore[no-untyped-call]
}


@cache
def twin_of(op: OpOverload) -> OpOverload | None:
    """Return the op that returns what `op` writes, in place or to `out=`; None if torch has none."""
    namespace, _, name = op._schema.name.partition("::")
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # x &= y is __iand__
    packet = getattr(getattr(torch.ops, namespace), _RENAMED.get(name, name), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    twins = [x for x in overloads if not x._schema.is_mutable and _arguments(x) == _arguments(op)]
    return next(iter(twins), None)


def _arguments(op: OpOverload) -> dict[str, str]:
    """Return the types of an op's arguments by name, without `out=`. A few call the tensor `input`."""
    return {_name(a): str(a.type) for a in op._schema.arguments if not a.is_out}


def _name(argument: Any) -> str:
    return "self" if argument.name == "input" else str(argument.name)


def functional(node: fx.Node) -> fx.Node:
    """Write an in-place op's functional twin at the insertion point. Raises ShardcError without one."""
    assert isinstance(node.target, OpOverload)
    name, overload = node.target._schema.name.partition("::")[2], node.target._overloadname
    x, *rest = node.args
    val = node.meta["val"]
    if name == "copy_" or (name == "fill_" and overload != "Scalar"):
        return _copied(node)
    if name == "zero_":
        return call_like(node, aten.zeros_like.default, x)
    if name == "fill_":
        return call_like(node, aten.full_like.default, x, rest[0])
    if overload == "from":  # Python cannot write random.from, so the graph could not be written as code
        return call_like(node, aten.randint_like.low_dtype, x, *rest, dtype=val.dtype)
    if (twin := twin_of(node.target)) is None or sum(_writes(a) for a in node.target._schema.arguments) > 1:
        raise without_twin(node)
    args, kwargs = arguments_of(twin, node)
    result = call_like(node, twin, *args, **kwargs)
    with torch.no_grad():
        natural = twin(*fx.map_arg(args, _val), **fx.map_arg(kwargs, _val))
    if natural.dtype != val.dtype:  # the in-place op keeps its tensor's dtype, its twin promotes
        result.meta["val"] = natural
        result = call_like(node, aten._to_copy.default, result, dtype=val.dtype)
    if name in _UNSEEN and val.is_floating_point():
        result = call_like(node, torch.ops.shardc.with_gradient_of.default, result, x)
    return result


def without_twin(node: fx.Node) -> ShardcError:
    """Return the error for an in-place op that has no functional twin."""
    fault = f"{node.target} changes a tensor in place, and torch has no op that returns the result instead"
    fix = _INSTEAD.get(op_name(node.target), "use an op that returns a new tensor")
    return ShardcError(fault, where=source.place(node), fix=fix)


def with_zeros(node: fx.Node, value: fx.Node, flows: Callable[[fx.Node], bool], *, whole: bool = True) -> fx.Node:
    """Add autograd's zero gradients of overwritten or compared tensors to a new value.

    value: the functional twin's result; flows: whether a gradient flows through a value. whole: all of a tensor is
    written; else a gradient flows to the rest of it anyway.
    """
    name = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    over = node.all_input_nodes if name in _ZEROS else node.all_input_nodes[: name in _WRITTEN_OVER and whole]
    over = [n for n in over if continuous(_val(n)) and not _keeps(value, n)]
    if not continuous(_val(value)) or not any(map(flows, over)):
        return value
    kept = [value] if value.target is aten.expand.default and flows(value) else []  # copies have their gradient
    path, *terms = *kept, *(call_like(node, aten.mul.Scalar, n, 0, val=_val(n)) for n in over)
    for term in terms:
        path = call_like(node, aten.add.Tensor, path, term)
    return call_like(node, torch.ops.shardc.with_gradient_of.default, value, path)


def _keeps(value: fx.Node, x: fx.Node) -> bool:
    """Return whether a value is `x` with rows replaced: where(mask, y, x), whose gradient reaches x."""
    while value.target is aten.expand.default and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value.target is aten.where.self and x in value.args[1:]


def is_view(node: fx.Node) -> bool:
    """Return whether an in-place op only changes the view of its tensor, as transpose_ does."""
    twin = twin_of(node.target)
    return twin is not None and any(r.alias_info is not None for r in twin._schema.returns)


#: Writes that autograd ignores: a gradient passes as if nothing had been written.
_UNSEEN = {"logical_and_", "logical_or_", "logical_xor_", "logical_not_"}
#: Ops whose operands get zeros from autograd, while their twins have no gradient: comparisons, draws.
_ZEROS = {"eq_", "ne_", "lt_", "le_", "gt_", "ge_", "bernoulli_"}
_ZEROS |= {"not_equal_", "less_", "less_equal_", "greater_", "greater_equal_"}
#: Ops that do not read the tensor they overwrite, whose gradient is then zeros.
_WRITTEN_OVER = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_"}
_WRITTEN_OVER |= {"exponential_", "geometric_", "log_normal_", "cauchy_"}
#: Fixes for ops that have no twin.
_INSTEAD = {
    "fill_diagonal_": "write to the diagonal: x.diagonal().fill_(value)",
    "requires_grad_": "leave it out: parameters require gradients, and x.detach() does not",
}


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _val(node: fx.Node) -> Any:
    return node.meta["val"]


def arguments_of(twin: OpOverload, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an in-place call's arguments for its twin, with another order and fewer defaults if needed."""
    values = Args(node.target, node.args, node.kwargs).named  # type: ignore[arg-type]
    args, kwargs, parameters = list[Any](), dict[str, Any](), twin._schema.arguments
    for a in parameters:
        if not a.kwarg_only:
            args.append(values[_name(a)])
        elif values[_name(a)] != a.default_value:
            kwargs[a.name] = values[_name(a)]
    while args and (last := parameters[len(args) - 1]).has_default_value() and args[-1] == last.default_value:
        args.pop()
    return tuple(args), kwargs


def cut_gradients(graph: fx.Graph) -> None:
    """Detach the operands of ops that have no derivative, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _CONSTANT:
            with graph.inserting_before(node):
                for x in node.all_input_nodes:
                    node.replace_input_with(x, call_like(node, aten.detach.default, x, val=_val(x)))


def differentiable_copies(graph: fx.Graph) -> None:
    """Replace the non-differentiable form of `x.copy_(y)` that functionalisation leaves, in place."""
    for node in list(graph.nodes):
        if node.target is aten.copy.default:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_copied(node))
            graph.erase_node(node)


def _copied(node: fx.Node) -> fx.Node:
    """Write `copy(x, y)` as y in the shape and dtype of the result."""
    other: Any = node.args[1]
    val = _val(node)
    if _val(other).dtype != val.dtype:
        other = call_like(node, aten._to_copy.default, other, dtype=val.dtype, val=_val(other).to(val.dtype))
    return call_like(node, aten.expand.default, other, list(val.shape))


def new_statistics(node: fx.Node) -> list[fx.Node]:
    """Write a norm that returns its new statistics: [running mean, running variance, output or outputs]."""
    twin, at = _STATISTICS[node.target]
    if twin is None:
        return _means_of_images(node)
    stats = [_val(node.args[i]) for i in (3, 4)]  # type: ignore[arg-type]
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"], *stats)
    call = call_like(node, twin, *node.args[: len(twin._schema.arguments)], val=(*results, *stats))

    def result(i: int) -> fx.Node:
        return call_like(node, operator.getitem, call, i, val=_val(call)[i])

    return [result(at), result(at + 1), result(0) if node.target is aten.batch_norm.default else call]


def _means_of_images(node: fx.Node) -> list[fx.Node]:
    """Write instance_norm without updates, and running means over images of means and unbiased variances."""
    x, weight, bias, *running, _training, momentum, eps, cudnn = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(momentum, float)

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        return call_like(node, op, *args, val=op(*fx.map_arg(args, _val), **kwargs), **kwargs)

    space = list(range(2, x.meta["val"].dim()))
    data = call(aten.detach.default, x)
    means = (
        call(aten.mean.dim, data, [0, *space]),
        call(aten.mean.dim, call(aten.var.correction, data, space, correction=1), [0]),
    )
    new = []
    for old, now in zip(running, means, strict=True):
        assert isinstance(old, fx.Node)
        new.append(call(aten.lerp.Scalar, old, call(aten._to_copy.default, now, dtype=_val(old).dtype), momentum))
    return [*new, call_like(node, node.target, x, weight, bias, None, None, True, momentum, eps, cudnn)]
