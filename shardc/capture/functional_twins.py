"""The functional twin of one in-place op: what computes the new value and writes nothing.

add_(x, y)                 add(x, y), cast to x's dtype
copy_(x, y), fill_(x, y)   y, cast and expanded
batch_norm in training     the op that returns the new running statistics too
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.graph import call_like
from shardc.torch_private import OpOverload

aten = torch.ops.aten


def updates_statistics(node: fx.Node) -> bool:
    """batch_norm in training mode and instance_norm write their running statistics, which their schemas do not say."""
    return (
        node.target in (aten.batch_norm.default, aten.instance_norm.default)
        and bool(node.args[5])
        and node.args[3] is not None
    )


#: Functional twins that are called otherwise.
_RENAMED: dict[Any, OpOverload] = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}


def functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The functional twin of one in-place op, at the insertion point."""
    assert isinstance(node.target, OpOverload)
    name, overload = node.target._schema.name.partition("::")[2], node.target._overloadname
    x, *rest = node.args
    val = node.meta["val"]
    if name == "copy_":
        return _copied(graph, node)
    if name == "zero_":
        return call_like(graph, aten.zeros_like.default, (x,), {}, node)
    if name == "fill_":
        if overload == "Scalar":
            return call_like(graph, aten.full_like.default, (x, rest[0]), {}, node)
        return _copied(graph, node)
    packet = getattr(aten, name.removesuffix("_"), None)
    twin = _RENAMED.get(node.target)
    if twin is None and name.endswith("_"):
        twin = getattr(packet, overload, None)
    if twin is None:
        raise ShardcError(
            f"{node.target} changes a tensor in place",
            where=source.place(node),
            fix="use an op that returns a new tensor",
        )
    result = call_like(graph, twin, node.args, dict(node.kwargs), node)
    if (natural := _dtype(twin, node)) != val.dtype:  # the in-place op keeps its tensor's dtype, its twin promotes
        result.meta["val"] = val.to(natural)
        result = call_like(graph, aten._to_copy.default, (result,), {"dtype": val.dtype}, node)
    return result


def _dtype(twin: Any, node: fx.Node) -> torch.dtype:
    """The dtype of what the functional twin of `node` returns."""
    dtypes: set[torch.dtype] = {n.meta["val"].dtype for n in node.all_input_nodes}
    if len(dtypes) == 1 and (same := dtypes.pop()).is_floating_point:  # the usual case, for which nothing has to be run
        return same

    def empty(n: fx.Node) -> torch.Tensor:
        return torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta")

    args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
    with torch.no_grad():
        dtype: torch.dtype = twin(*args, **kwargs).dtype
    return dtype


def differentiable_copies(graph: fx.Graph) -> None:
    """Replace what functionalisation leaves of `x.copy_(y)` and has no derivative, in place."""
    for node in list(graph.nodes):
        if node.target is aten.copy.default:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_copied(graph, node))
            graph.erase_node(node)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`copy(x, y)`: y in the shape and dtype of the result."""
    other: Any = node.args[1]
    val = node.meta["val"]
    if other.meta["val"].dtype != val.dtype:
        other = call_like(
            graph, aten._to_copy.default, (other,), {"dtype": val.dtype}, node, val=other.meta["val"].to(val.dtype)
        )
    return call_like(graph, aten.expand.default, (other, list(val.shape)), {}, node)


def new_statistics(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """A norm that returns its new statistics: [running mean, running variance, output]."""
    x, weight, bias, mean, var, _training, momentum, eps, *_ = node.args
    if node.target is aten.instance_norm.default:
        return _means_of_images(graph, node)
    operands = (x, weight, bias, mean, var, True, momentum, eps)
    call = call_like(graph, aten._native_batch_norm_legit_functional.default, operands, {}, node)
    stats = [m.meta["val"] for m in (mean, var)]  # type: ignore[union-attr]
    call.meta["val"] = (node.meta["val"], *stats, *stats)
    return [call_like(graph, operator.getitem, (call, i), {}, node, val=call.meta["val"][i]) for i in (3, 4, 0)]


def _means_of_images(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """instance_norm without the writes, and the running means over all images of their
    means and variances (unbiased).
    """
    x, weight, bias, *running, _training, momentum, eps, cudnn = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(momentum, float)

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        vals = fx.map_arg(args, lambda n: n.meta["val"])
        return call_like(graph, op, args, kwargs, node, val=op(*vals, **kwargs))

    space = list(range(2, x.meta["val"].dim()))
    data = call(aten.detach.default, x)
    means = (
        call(aten.mean.dim, data, [0, *space]),
        call(aten.mean.dim, call(aten.var.correction, data, space, correction=1), [0]),
    )
    new = []
    for old, now in zip(running, means, strict=True):
        assert isinstance(old, fx.Node)
        new.append(call(aten.lerp.Scalar, old, call(aten._to_copy.default, now, dtype=old.meta["val"].dtype), momentum))
    return [
        *new,
        call_like(
            graph, aten.instance_norm.default, (x, weight, bias, None, None, True, momentum, eps, cudnn), {}, node
        ),
    ]
