"""Replace in-place ops of an exported graph by their functional twins (functional_twins.py).

Only tensors that nothing else shares are replaced; writes through views are put back into their base tensors:

    before    v = slice(x, 1, 0, 4);  copy_(v, y);                     use(x), use(v)
    after     v' = y;                 x' = slice_scatter(x, v', 1, 0, 4);  use(x'), use(v')

`torch.export` leaves in-place ops as they are. `ExportedProgram.run_decompositions` would remove them, but it traces
everything a second time, which costs as much as the export, and drops no-grad regions *silently*, which changes
gradients. Capture falls back on it only if it is uncertain which tensors share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.capture.rewrite import call_like
from shardc.capture.rewrite.functional_twins import (
    functional,
    is_inplace,
    is_view,
    mutates,
    new_statistics,
    updates_statistics,
    with_zeros,
    without_twin,
)
from shardc.errors import ShardcError
from shardc.ir import source, types
from shardc.passes.canonical.rewrite import Args
from shardc.torch_private import OpOverload

aten = torch.ops.aten


def remove_inplace(
    graph: fx.Graph, buffers: Mapping[fx.Node, str], params: Mapping[fx.Node, str], cut: set[fx.Node]
) -> dict[str, fx.Node] | None:
    """Replace in-place ops, in place. buffers, params: placeholders and their names.

    Returns {buffer: its new value}; None (and an unchanged graph) if a changed tensor has living views, or is `out=`.
    Raises ShardcError for a parameter that is written to, and for activations changed behind autograd's back.
    """

    def flows(x: fx.Node) -> bool:
        """Return whether a gradient flows through a value, in a graph without the in-place ops before it."""
        todo, seen = [x], set[fx.Node]()
        while todo:
            if (node := todo.pop()) in params:
                return True
            if node not in seen and node not in cut and not types.cuts(node.target):
                seen.add(node)
                todo += node.all_input_nodes
        return False

    order = {node: i for i, node in enumerate(graph.nodes)}
    root, family = families(graph)
    inplace = [node for node in graph.nodes if is_inplace(node)]
    shared: set[fx.Node] = set()  # writes that are visible elsewhere: through views, or to tensors with views
    for node in inplace:
        if _is_out(node):
            return None
        if not isinstance(node.args[0], fx.Node):  # a list: torch._foreach_add_
            raise without_twin(node)
        for x in () if is_view(node) else written(node):
            if (name := params.get(root[x])) is not None:
                raise writes_to_parameter(name, node)
            if (
                ((node in cut and root[x] not in cut) or _detached(x, flows))
                and root[x] not in buffers
                and root[x].op != "placeholder"
            ):
                raise ShardcError(
                    f"{node.target} changes an activation in place under no_grad or through .detach(), .data: autograd "
                    "does not see it",
                    where=source.place(node),
                    fix="compute a new tensor instead",
                )
            alone = _only_one_lives(x, node, family[root[x]], order)
            if not alone and (updates_statistics(node) or not _can_write(x, node, family[root[x]], order)):
                return None
            if not alone:
                shared.add(node)
    latest: dict[fx.Node, fx.Node] = {}  # placeholder of a buffer -> node of its newest value
    holds: dict[fx.Node, fx.Node] = {p: p for p in buffers}  # node -> the buffer whose newest value it is
    stored: set[fx.Node] = set()  # new values: no aliases, even if made by a view op

    def aliased(n: fx.Node) -> fx.Node | None:
        return None if n in stored else _aliased(n)

    for node in inplace:
        changes = written(node)
        with graph.inserting_before(node):
            values = new_statistics(node) if updates_statistics(node) else [functional(node)]
            base = root.get(changes[0], changes[0])
            whole = node not in shared or changes[0].meta["val"].numel() == base.meta["val"].numel()
            if node not in cut and not updates_statistics(node):
                values = [with_zeros(node, values[0], flows, whole=whole)]
            *new, result = values if len(values) > 1 else [values[0], values[0]]
            stored.update(() if is_view(node) else values)
            changed = dict(zip(changes, new, strict=True))
            if node in shared:
                part = call_like(new[0], aten.detach.default, new[0]) if node in cut else new[0]
                stored.add(part)
                base, value, result = _write(changes[0], part, node, order, aliased)
                changed = {base: value}
        if node in cut:
            cut.update(values, changed.values())
        stored.update(() if is_view(node) else changed.values())
        for old, fresh in changed.items():
            order[fresh] = order[node]
            for user in [u for u in old.users if order.get(u, -1) > order[node]]:
                user.replace_input_with(old, fresh)
            if (buffer := holds.pop(old, None)) is not None:
                holds[fresh], latest[buffer] = buffer, fresh
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return {buffers[p]: node for p, node in latest.items()}


def detach_written(graph: fx.Graph, cut: set[fx.Node]) -> None:
    """Detach, in place, what is written without gradients: a second trace does not see that."""
    for node in graph.nodes:
        if node in cut and is_inplace(node) and not _is_out(node):
            with graph.inserting_before(node):
                for x in set(node.all_input_nodes) - set(written(node)):
                    node.replace_input_with(x, call_like(x, aten.detach.default, x))


def _is_out(node: fx.Node) -> bool:
    return any(a.is_out for a in node.target._schema.arguments)  # type: ignore[union-attr]


def writes_to_parameter(name: str, node: fx.Node) -> ShardcError:
    """Return the error for a forward that writes to a parameter. name: as it is exported; node: the op."""
    fault = f"the forward pass writes to the parameter {name.removeprefix('model.')!r}"
    return ShardcError(fault, where=source.place(node), fix="change parameters outside of forward, or make it a buffer")


def families(graph: fx.Graph) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, list[fx.Node]]]:
    """Group nodes that may share memory. Returns {node: first owner of its memory}, {owner: its nodes}."""
    root: dict[fx.Node, fx.Node] = {}
    family: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        root[node] = root.get(first, first) if (first := _aliased(node)) is not None else node
        family.setdefault(root[node], []).append(node)
    return root, family


def _aliased(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory the result of `node` shares, or may share."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0]
    if isinstance(node.target, OpOverload) and not updates_statistics(node):
        declared = any(r.alias_info is not None for r in node.target._schema.returns)
        if declared or torch.Tag.maybe_aliasing_or_mutating in node.target.tags:  # the latter: dropout, type_as, ...
            return node.args[0]
    return None


def _detached(x: fx.Node, flows: Callable[[fx.Node], bool]) -> bool:
    """Return whether a value without a gradient shares memory with a used one that has a gradient."""
    node: fx.Node | None = x
    while node is not None:
        before = _aliased(node)
        if node.target is aten.detach.default and before is not None and len(before.users) > 1 and flows(before):
            return True
        node = before
    return False


def written(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an op writes to."""
    if updates_statistics(node):
        return [node.args[3], node.args[4]]  # type: ignore[list-item]
    return [node.args[0]]  # type: ignore[list-item]


def _only_one_lives(x: fx.Node, write: fx.Node, family: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> bool:
    """Return whether a new tensor may replace `x` at `write`: no other name of its memory is read later."""

    def read_later(node: fx.Node) -> bool:
        return any(order[user] > order[write] for user in node.users)

    def before_writes(node: fx.Node) -> fx.Node:
        """Return the same whole tensor before in-place ops on it."""
        while is_inplace(node) and not updates_statistics(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    base = before_writes(x)
    others = [n for n in family if before_writes(n) is not base]
    if _aliased(base) is not None and any(read_later(n) or n.op == "placeholder" for n in others):
        return False
    return not any(read_later(n) for n in others if order[n] < order[write])


# --- writes through views ---------------------------------------------------------------------------------------------

Aliased = Callable[[fx.Node], fx.Node | None]
#: Views of a part -> the op that puts the part back: (whole, part, *the view's other arguments).
_PARTS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
#: Views of the whole in the same order: put back by their shape.
_SAME_ORDER = {
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.squeeze.dims,
    aten.detach.default,
    aten.flatten.using_ints,
    aten.alias.default,
    aten.unflatten.int,
}


def _can_write(x: fx.Node, writer: fx.Node, family: list[fx.Node], order: Mapping[fx.Node, int]) -> bool:
    """Return whether a write to the view `x` can be put back into its base and all later-read views."""
    node: fx.Node | None = x
    while node is not None and (parent := _aliased(node)) is not None:
        if not mutates(node) and node.target not in {*_PARTS, *_SAME_ORDER} and _transposed(node) is None:
            return False
        node = parent
    return all(
        _certain(n) for n in family if order[n] < order[writer] and any(order[u] > order[writer] for u in n.users)
    )


def _write(
    x: fx.Node, new: fx.Node, writer: fx.Node, order: dict[fx.Node, int], aliased: Aliased
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Put `new`, the value of the view `x` from `writer` on, into its base tensor, at the insertion point.

    Later reads of the tensor or its views get the new value. Returns the tensor, its new value, and the view of that.
    """

    def call(target: Any, *args: Any, **options: Any) -> fx.Node:
        added = call_like(writer, target, *args, **options)
        order[added] = order[writer]
        return added

    root, value = x, new
    while (whole := aliased(root)) is not None:
        root, value = whole, _replaced(root, whole, value, call)
    fresh = {root: value}

    def renewed(view: fx.Node) -> fx.Node:
        """Return the same view of the new value, in which later writes through other views must show."""
        if view not in fresh:
            parent = aliased(view)
            assert parent is not None
            options: dict[str, Any] = dict(view.kwargs)
            fresh[view] = call_like(view, view.target, renewed(parent), *view.args[1:], **options)
            order[fresh[view]] = order[writer]
        return fresh[view]

    for view in list(_family(root, aliased)):
        later = [u for u in view.users if order.get(u, -1) > order[writer]]
        if order[view] < order[writer] and later:
            for user in later:
                user.replace_input_with(view, renewed(view))
    seen = renewed(x) if writer.users else new
    order.setdefault(value, order[writer])
    return root, value, seen


def _family(root: fx.Node, aliased: Aliased) -> Iterator[fx.Node]:
    """Yield a tensor and all its views, in the order in which they are made."""
    yield root
    for user in list(root.users):
        if aliased(user) is root:
            yield from _family(user, aliased)


def _replaced(view: fx.Node, whole: fx.Node, part: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Return the whole with a part of it replaced. call: adds a call."""
    val = whole.meta["val"]
    if view.target in _PARTS and val.is_complex():
        return _replaced_complex(view, whole, part, call)
    if view.target in _PARTS:
        return call(_PARTS[view.target], whole, part, *view.args[1:], **view.kwargs, val=val)
    if (order := _transposed(view)) is not None:
        return call(aten.permute.default, part, [order.index(d) for d in range(len(order))], val=val)
    return call(aten.reshape.default, part, list(val.shape), val=val)


def _replaced_complex(view: fx.Node, whole: fx.Node, part: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Put back complex parts as pairs of reals: torch cannot differentiate those ops on complex numbers."""
    val = whole.meta["val"]
    assert isinstance(view.target, OpOverload)
    _, *arguments = Args(view.target, view.args, view.kwargs).named.items()
    rest = [x % val.dim() if name.startswith("dim") else x for name, x in arguments]

    def paired(x: fx.Node) -> fx.Node:
        plain = call(aten.resolve_conj.default, x, val=x.meta["val"].resolve_conj())
        return call(aten.view_as_real.default, plain, val=torch.view_as_real(plain.meta["val"]))

    real, pairs = paired(whole), paired(part)
    if view.target is aten.diagonal.default:  # a diagonal is the last dim of its view
        pairs = call(aten.transpose.int, pairs, -2, -1, val=pairs.meta["val"].transpose(-2, -1))
    put = call(_PARTS[view.target], real, pairs, *rest, val=real.meta["val"])
    return call(aten.view_as_complex.default, put, val=val)


def _transposed(view: fx.Node) -> list[int] | None:
    """Return the order in which a transposing view has its dims; None for other views."""
    n = view.meta["val"].dim() if isinstance(view.meta.get("val"), torch.Tensor) else 0
    order = list(range(n))
    if view.target is aten.permute.default:
        return [int(d) % n for d in view.args[1]]  # type: ignore[union-attr, arg-type]
    if view.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default, aten.mT.default):
        a, b = view.args[1:3] if view.target is aten.transpose.int else (0, 1) if n == 2 else (None, None)
        if a is None or b is None:
            return order if n < 2 else None
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


def _certain(node: fx.Node) -> bool:
    """Return whether it is certain what a node shares memory with. (`reshape` and `contiguous` may copy.)"""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op == "placeholder"
    return torch.Tag.maybe_aliasing_or_mutating not in node.target.tags and node.target not in (
        aten.reshape.default,
        aten.contiguous.default,
    )
