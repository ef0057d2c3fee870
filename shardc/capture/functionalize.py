"""An exported graph without regions and without in-place ops.

`torch.export` leaves the code of `with torch.no_grad():` in a subgraph and in-place ops as they are.
`ExportedProgram.run_decompositions` would take both away, but it drops no-grad regions *silently*, which changes
gradients, and traces everything a second time, which costs as much as the export. So regions are inlined here, with an
explicit `detach` where a value leaves one, and in-place ops on tensors that nothing else shares become their functional
twins. Writes through views are put back into what they are views of (view_writes.py); capture falls back on
`run_decompositions` only where it is not certain what shares memory with what.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture import view_writes
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.torch_private import HigherOrderOperator, OpOverload, decompositions

aten = torch.ops.aten


# --- regions ----------------------------------------------------------------------------------------------------------


def inline_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """Inline the subgraphs of `gm`, in place; a value that leaves a no-grad region is detached.

    Returns the nodes that were computed without gradients. Raises ShardcError for autocast regions and unknown regions.
    """
    cut: set[fx.Node] = set()
    regions = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, HigherOrderOperator)]
    if not regions:
        return cut
    for node in regions:
        with gm.graph.inserting_before(node):
            _replace(node, _region(gm.graph, gm, node, node.args, True, cut))
    for node in reversed(gm.graph.nodes):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return cut


def _replace(call: fx.Node, results: Sequence[Any]) -> None:
    """Put the results of an inlined region in the place of its `getitem`s."""
    for user in list(call.users):
        assert user.target is operator.getitem, f"{user.format_node()} uses a region's results as a whole"
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        user.graph.erase_node(user)
    call.graph.erase_node(call)


def _region(
    graph: fx.Graph, owner: torch.nn.Module, call: fx.Node, args: Sequence[Any], grad: bool, cut: set[fx.Node]
) -> list[Any]:
    """Copy the region that `call` runs to the insertion point. grad: are gradients recorded outside of it?"""
    name = str(call.target)
    inner = grad
    if name == "wrap_with_set_grad_enabled":
        enabled, sub, *operands = args
        inner = bool(enabled)
    elif name == "wrap_with_autocast":
        _device, dtype, enabled, _cache, sub, *operands = args
        if enabled:
            where = _where_inside(owner, sub) or source.of_node(call)
            raise ShardcError(
                f"the model turns autocast ({dtype}) on inside its forward",
                where=source.where(where),
                fix="take the autocast region out of the model",
            )
    elif name == "tag_activation_checkpoint":
        sub, *operands = args
    else:
        raise ShardcError(f"the model uses {name}, which shardc cannot split", where=source.place(call))
    module = getattr(owner, str(sub.target))

    def crossing(x: Any, to_grad: bool) -> Any:
        """A value made without gradients stays without where gradients are recorded again."""
        if to_grad and isinstance(x, fx.Node) and x in cut:
            return _like(graph, aten.detach.default, (x,), {}, x)
        return x

    env: dict[fx.Node, Any] = {}
    each = iter(operands)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = crossing(next(each), inner)
        elif node.op == "get_attr":
            env[node] = node  # a nested region: looked up in its owner by name
        elif node.op == "output":
            out = node.args[0]
            results = [
                env[r] if isinstance(r, fx.Node) else r for r in (out if isinstance(out, (tuple, list)) else (out,))
            ]
            return [crossing(r, grad) if not inner else r for r in results]
        elif isinstance(node.target, HigherOrderOperator):
            env[node] = _region(graph, module, node, fx.map_arg(node.args, lambda n: env.get(n, n)), inner, cut)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif not inner and (same := _unchanged(node)) is not None:
            env[node] = env[same]  # outside of the region the tensor goes by this name, with the gradient that it has
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if not inner:
                cut.add(env[node])
    raise AssertionError("a region without output")


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The operand that a call gives back as it is, no view of it: `x.to(dtype)` of that dtype, `x.contiguous()`,
    dropout in evaluation.
    """
    x = node.args[0] if node.args else None
    if not isinstance(node.target, OpOverload) or not isinstance(x, fx.Node) or node.target._schema.is_mutable:
        return None
    value, result = x.meta.get("val"), node.meta.get("val")
    same = (
        isinstance(value, Tensor)
        and isinstance(result, Tensor)
        and (value.shape, value.dtype) == (result.shape, result.dtype)
    )
    if not same or not decompositions(node.target):  # only ops that are written in others do so
        return None
    with torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return x if node.target(*args, **kwargs) is value else None


#: Ops that only check values.
_CHECKS = (
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


def drop_checks(graph: fx.Graph) -> None:
    """Erase checks of values (`assert lengths.max().item() <= n`) and the numbers computed for them alone, in place.

    A compiled program does not look at values; the model itself checks them wherever it runs.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        checks = isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in _CHECKS
        if checks or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            graph.erase_node(node)


def _where_inside(owner: torch.nn.Module, sub: fx.Node) -> source.Source | None:
    for node in getattr(owner, str(sub.target)).graph.nodes:
        if node.op == "call_function" and (place := source.of_node(node)).line:
            return place
    return None


def _like(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: fx.Node, **meta: Any
) -> fx.Node:
    """A new call at the insertion point, with the metadata of `model`."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update(model.meta, **meta)
    return node


# --- in-place ops -----------------------------------------------------------------------------------------------------


def is_inplace(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target._schema.is_mutable or _updates_statistics(node)


def _updates_statistics(node: fx.Node) -> bool:
    """batch_norm in training mode and instance_norm write their running statistics, which their schemas do not say."""
    return (
        node.target in (aten.batch_norm.default, aten.instance_norm.default)
        and bool(node.args[5])
        and node.args[3] is not None
    )


def remove_inplace(
    graph: fx.Graph, buffers: Mapping[fx.Node, str], params: Mapping[fx.Node, str], cut: set[fx.Node]
) -> dict[str, fx.Node] | None:
    """Replace in-place ops, in place. buffers, params: placeholders and their names.

    Returns {buffer: its new value}; None (and an unchanged graph) where a changed tensor has living views.
    Raises ShardcError for a parameter that is written to, and for activations changed behind autograd's back.
    """
    if not view_writes.without_out(graph, _like):
        return None
    order = {node: i for i, node in enumerate(graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    family: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        root[node] = root.get(first, first) if (first := _aliased(node)) is not None else node
        family.setdefault(root[node], []).append(node)

    inplace = [node for node in graph.nodes if is_inplace(node)]
    grads = _with_gradient(graph, params, cut) if inplace else set()
    shared: set[fx.Node] = set()  # writes that others see: through views, or to what has views
    for node in inplace:
        for x in _written(node):
            if (name := params.get(root[x])) is not None:
                raise ShardcError(
                    f"the forward pass writes to the parameter {name.removeprefix('model.')!r}",
                    where=source.place(node),
                    fix="change parameters outside of forward, or make it a buffer",
                )
            if (
                ((node in cut and root[x] not in cut) or _detached(x, grads))
                and root[x] not in buffers
                and root[x].op != "placeholder"
            ):
                raise ShardcError(
                    f"{node.target} changes an activation in place under no_grad or through .detach(), .data: behind"
                    " autograd's back",
                    where=source.place(node),
                    fix="compute a new tensor instead",
                )
            alone = _only_one_lives(x, node, family[root[x]], order)
            if not alone and (
                _updates_statistics(node) or not view_writes.can_write(x, node, family[root[x]], order, _aliased)
            ):
                return None
            if not alone:
                shared.add(node)
    latest: dict[fx.Node, fx.Node] = {}  # placeholder of a buffer -> node of its newest value
    holds: dict[fx.Node, fx.Node] = {p: p for p in buffers}  # node -> the buffer whose newest value it is
    stored: set[fx.Node] = set()  # values of their own, though some are views of what was copied

    def aliased(n: fx.Node) -> fx.Node | None:
        return None if n in stored else _aliased(n)

    for node in inplace:
        written = _written(node)
        with graph.inserting_before(node):
            values = _statistics(graph, node) if _updates_statistics(node) else [_functional(graph, node)]
            *new, result = values if len(values) > 1 else [values[0], values[0]]
            stored.update(values)
            changed = dict(zip(written, new, strict=True))
            if node in shared:
                part = _like(graph, aten.detach.default, (new[0],), {}, new[0]) if node in cut else new[0]
                stored.add(part)
                base, value, result = view_writes.write(graph, written[0], part, node, order, aliased, _like)
                changed = {base: value}
        if node in cut:
            cut.update(values, changed.values())
        stored.update(changed.values())
        for old, fresh in changed.items():
            order[fresh] = order[node]
            for user in [u for u in old.users if order.get(u, -1) > order[node]]:
                user.replace_input_with(old, fresh)
            if (buffer := holds.pop(old, None)) is not None:
                holds[fresh], latest[buffer] = buffer, fresh
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return {buffers[p]: node for p, node in latest.items()}


def _aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result of `node` shares, or may share."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0]
    if isinstance(node.target, OpOverload) and not _updates_statistics(node):
        declared = any(r.alias_info is not None for r in node.target._schema.returns)
        if declared or torch.Tag.maybe_aliasing_or_mutating in node.target.tags:  # the latter: dropout, type_as, ...
            return node.args[0]
    return None


def _with_gradient(graph: fx.Graph, params: Mapping[fx.Node, str], cut: set[fx.Node]) -> set[fx.Node]:
    """The values through which a gradient flows to a parameter."""
    smooth: set[fx.Node] = set()
    for node in graph.nodes:
        if node in params or (
            node not in cut and node.target is not aten.detach.default and not smooth.isdisjoint(node.all_input_nodes)
        ):
            smooth.add(node)
    return smooth


def _detached(x: fx.Node, grads: set[fx.Node]) -> bool:
    """Does a value share the memory of one that has a gradient and is a result of its
    own, without having one itself?
    """
    node: fx.Node | None = x
    while node is not None:
        before = _aliased(node)
        if node.target is aten.detach.default and before in grads and len(node.args[0].users) > 1:  # type: ignore[union-attr]
            return True
        node = before
    return False


def _written(node: fx.Node) -> list[fx.Node]:
    if _updates_statistics(node):
        return [node.args[3], node.args[4]]  # type: ignore[list-item]
    return [node.args[0]]  # type: ignore[list-item]


def _only_one_lives(x: fx.Node, write: fx.Node, family: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> bool:
    """May `x` be replaced by a new tensor at `write`? Only if no other name of its memory is read from then on."""

    def read_later(node: fx.Node) -> bool:
        return any(order[user] > order[write] for user in node.users)

    def same(node: fx.Node) -> bool:
        """Is `node` the whole of the same tensor: itself, or the result of earlier in-place ops on it?"""
        while is_inplace(node) and not _updates_statistics(node):
            node = node.args[0]  # type: ignore[assignment]
        return node is base

    base = x
    while is_inplace(base) and not _updates_statistics(base):
        base = base.args[0]  # type: ignore[assignment]
    if _aliased(base) is not None and any(read_later(n) or n.op == "placeholder" for n in family if not same(n)):
        return False
    return not any(read_later(n) for n in family if not same(n) and order[n] < order[write])


#: Functional twins that are called otherwise.
_RENAMED: dict[Any, OpOverload] = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The functional twin of one in-place op, at the insertion point."""
    assert isinstance(node.target, OpOverload)
    name, overload = node.target._schema.name.partition("::")[2], node.target._overloadname
    x, *rest = node.args
    val = node.meta["val"]
    if name == "copy_":
        return _copied(graph, node)
    if name == "zero_":
        return _like(graph, aten.zeros_like.default, (x,), {}, node)
    if name == "fill_":
        if overload == "Scalar":
            return _like(graph, aten.full_like.default, (x, rest[0]), {}, node)
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
    result = _like(graph, twin, node.args, dict(node.kwargs), node)
    if (natural := _dtype(twin, node)) != val.dtype:  # the in-place op keeps its tensor's dtype, its twin promotes
        result.meta["val"] = val.to(natural)
        result = _like(graph, aten._to_copy.default, (result,), {"dtype": val.dtype}, node)
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


def differentiable(graph: fx.Graph) -> None:
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
        other = _like(
            graph, aten._to_copy.default, (other,), {"dtype": val.dtype}, node, val=other.meta["val"].to(val.dtype)
        )
    return _like(graph, aten.expand.default, (other, list(val.shape)), {}, node)


def _statistics(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """A norm that returns its new statistics: [running mean, running variance, output]."""
    x, weight, bias, mean, var, _training, momentum, eps, *_ = node.args
    if node.target is aten.instance_norm.default:
        return _means_of_images(graph, node)
    operands = (x, weight, bias, mean, var, True, momentum, eps)
    call = _like(graph, aten._native_batch_norm_legit_functional.default, operands, {}, node)
    stats = [m.meta["val"] for m in (mean, var)]  # type: ignore[union-attr]
    call.meta["val"] = (node.meta["val"], *stats, *stats)
    return [_like(graph, operator.getitem, (call, i), {}, node, val=call.meta["val"][i]) for i in (3, 4, 0)]


def _means_of_images(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """instance_norm without the writes, and the running means over all images of their
    means and variances (unbiased).
    """
    x, weight, bias, *running, _training, momentum, eps, cudnn = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(momentum, float)

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        vals = fx.map_arg(args, lambda n: n.meta["val"])
        return _like(graph, op, args, kwargs, node, val=op(*vals, **kwargs))

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
        _like(graph, aten.instance_norm.default, (x, weight, bias, None, None, True, momentum, eps, cudnn), {}, node),
    ]
