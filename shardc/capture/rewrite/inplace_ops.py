"""Replace in-place ops of an exported graph by their functional twins (functional_twins.py).

Only tensors that nothing else shares are replaced; writes through views are put back into base tensors
(view_writes.py).

`torch.export` leaves in-place ops as they are. `ExportedProgram.run_decompositions` would remove them, but it traces
everything a second time, which costs as much as the export, and drops no-grad regions *silently*, which changes
gradients. Capture falls back on it only if it is uncertain which tensors share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from shardc.capture.rewrite import call_like, view_writes
from shardc.capture.rewrite.functional_twins import (
    functional,
    is_inplace,
    is_view,
    new_statistics,
    updates_statistics,
    with_zeros,
    without_twin,
)
from shardc.errors import ShardcError
from shardc.ir import source, types
from shardc.torch_private import OpOverload

aten = torch.ops.aten


def remove_inplace(
    graph: fx.Graph, buffers: Mapping[fx.Node, str], params: Mapping[fx.Node, str], cut: set[fx.Node]
) -> dict[str, fx.Node] | None:
    """Replace in-place ops, in place. buffers, params: placeholders and their names.

    Returns {buffer: its new value}; None (and an unchanged graph) if a changed tensor has living views, or is `out=`.
    Raises ShardcError for a parameter that is written to, and for activations changed behind autograd's back.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    root, family = families(graph)
    inplace = [node for node in graph.nodes if is_inplace(node)]
    grads = _with_gradient(graph, params, cut) if inplace else set()
    shared: set[fx.Node] = set()  # writes that are visible elsewhere: through views, or to tensors with views
    for node in inplace:
        if any(a.is_out for a in node.target._schema.arguments):
            return None
        if not isinstance(node.args[0], fx.Node):  # a list: torch._foreach_add_
            raise without_twin(node)
        for x in () if is_view(node) else written(node):
            if (name := params.get(root[x])) is not None:
                raise writes_to_parameter(name, node)
            if (
                ((node in cut and root[x] not in cut) or _detached(x, grads))
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
            if not alone and (
                updates_statistics(node) or not view_writes.can_write(x, node, family[root[x]], order, _aliased)
            ):
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
                values = [with_zeros(node, values[0], lambda n: _flows(n, params, cut), whole=whole)]
            *new, result = values if len(values) > 1 else [values[0], values[0]]
            stored.update(() if is_view(node) else values)
            changed = dict(zip(changes, new, strict=True))
            if node in shared:
                part = call_like(new[0], aten.detach.default, new[0]) if node in cut else new[0]
                stored.add(part)
                base, value, result = view_writes.write(changes[0], part, node, order, aliased)
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


def writes_to_parameter(name: str, node: fx.Node) -> ShardcError:
    """Return the error for a forward that writes to a parameter. name: as it is exported; node: the op."""
    return ShardcError(
        f"the forward pass writes to the parameter {name.removeprefix('model.')!r}",
        where=source.place(node),
        fix="change parameters outside of forward, or make it a buffer",
    )


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


def _with_gradient(graph: fx.Graph, params: Mapping[fx.Node, str], cut: set[fx.Node]) -> set[fx.Node]:
    """Return the values through which a gradient flows to a parameter."""
    smooth: set[fx.Node] = set()
    for node in graph.nodes:
        if node in params or (
            node not in cut and node.target is not aten.detach.default and not smooth.isdisjoint(node.all_input_nodes)
        ):
            smooth.add(node)
    return smooth


def _flows(x: fx.Node, params: Mapping[fx.Node, str], cut: set[fx.Node]) -> bool:
    """Return whether a gradient flows through a value, in a graph without the in-place ops before it."""
    todo, seen = [x], set[fx.Node]()
    while todo:
        if (node := todo.pop()) in params:
            return True
        if node not in seen and node not in cut and not types.cuts(node.target):
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def _detached(x: fx.Node, grads: set[fx.Node]) -> bool:
    """Return whether a value without a gradient shares memory with a used one that has a gradient."""
    node: fx.Node | None = x
    while node is not None:
        before = _aliased(node)
        if node.target is aten.detach.default and before in grads and len(node.args[0].users) > 1:  # type: ignore[union-attr]
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
