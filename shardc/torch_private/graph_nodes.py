"""Nodes of a graph, written faster than `fx.Graph.create_node` does: passes write and copy hundreds for a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._C import _NodeBase  # what a node consists of, without checks
from torch.fx.graph import _illegal_names  # names that fx changes


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str,
    meta: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A node at the insertion point, as `create_node(op, target, args, kwargs, name)` makes it, in less than half its
    time: that one looks for symbols among the arguments, and parses the name, which is mostly one that is free.
    """
    names = graph._graph_namespace
    if name in names._used_names or not name.isidentifier() or not name.isascii() or graph.owning_module is not None:
        return _created(graph, op, target, args, kwargs, name, meta)
    base, _, number = name.rpartition("_")
    if base and number.isdecimal():
        names._base_count[base] = int(number)
    elif name in _illegal_names:
        return _created(graph, op, target, args, kwargs, name, meta)
    else:
        names._base_count.setdefault(name, 0)
    names._used_names.add(name)
    node = fx.Node.__new__(fx.Node)
    _NodeBase.__init__(node, graph, name, op, target, None)
    node._update_args_kwargs(args, {**kwargs} if kwargs else {})
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    if meta:
        node.meta.update(meta)
    return node


def _created(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    name: str,
    meta: Mapping[str, Any] | None,
) -> fx.Node:
    """By fx itself, which gives it a name that is free and legal. A node whose attributes are set is taken out of its
    graph's table of targets and put in again, though the table has neither arguments nor metadata.
    """
    node = graph.create_node(op, target, name=name)
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
    node.meta.update(meta or {})
    return node
