"""Inline the regions of an exported graph: no-grad as explicit `detach`, autocast as casts.

    with autocast(bfloat16): y = linear(x, w, b)        y = linear(to(x, bfloat16), to(w, bfloat16), to(b, bfloat16))

`torch.export` leaves the code of such a region in a subgraph. `ExportedProgram.run_decompositions` would inline it, but
it drops no-grad regions *silently*, which changes gradients.

To find the operands that an op casts, it runs on tensors without data, with and without autocast: the casts that are
added to its operands are those of autocast. A weight is cast once in a region, as in autocast's cache: its gradients
are added up in the narrow dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.rewrite import call_like, replace_results
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.torch_private import HigherOrderOperator, OpOverload, TorchDispatchMode, decompositions, pytree

aten = torch.ops.aten
FIX = "take the region out of the model: write `.to(dtype)` on what it is to compute in other dtypes"


def inline_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """Inline the subgraphs of `gm`, in place; a value that leaves a no-grad region is detached.

    Returns the nodes that were computed without gradients. Raises ShardcError for unknown regions, and for autocast of
    ops that cast inside.
    """
    cut: set[fx.Node] = set()
    regions = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, HigherOrderOperator)]
    if not regions:
        return cut
    for node in regions:
        with gm.graph.inserting_before(node):
            replace_results(node, _region(gm.graph, gm, node, node.args, True, cut))
    for node in reversed(gm.graph.nodes):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return cut


def _region(
    graph: fx.Graph,
    owner: torch.nn.Module,
    call: fx.Node,
    args: Sequence[Any],
    grad: bool,
    cut: set[fx.Node],
    autocast: AutocastRegion | None = None,
) -> list[Any]:
    """Copy the region that `call` runs to the insertion point.

    grad: whether gradients are recorded outside of it. autocast: the open region around it.
    """
    name = str(call.target)
    inner = grad
    if name == "wrap_with_set_grad_enabled":
        enabled, sub, *operands = args
        inner = bool(enabled)
    elif name == "wrap_with_autocast":
        device, dtype, enabled, _cache, sub, *operands = args
        autocast = AutocastRegion(device, dtype or torch.get_autocast_dtype(device), autocast) if enabled else None
    elif name == "tag_activation_checkpoint":
        sub, *operands = args
    else:
        fix = "write it with torch.where, batched ops, or a loop of fixed length"
        raise ShardcError(f"the model uses {name}, which shardc cannot split", where=source.place(call), fix=fix)
    module = getattr(owner, str(sub.target))

    def crossing(x: Any, to_grad: bool) -> Any:
        """Detach a value made without gradients where gradients are recorded again."""
        if to_grad and isinstance(x, fx.Node) and x in cut:
            return call_like(x, aten.detach.default, x)
        return x

    env: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = crossing(next(remaining), inner)
        elif node.op == "get_attr":
            env[node] = node  # a nested region: looked up in its owner by name
        elif node.op == "output":
            out = node.args[0]
            results = [
                env[r] if isinstance(r, fx.Node) else r for r in (out if isinstance(out, (tuple, list)) else (out,))
            ]
            return [crossing(r, grad) if not inner else r for r in results]
        elif isinstance(node.target, HigherOrderOperator):
            env[node] = _region(
                graph, module, node, fx.map_arg(node.args, lambda n: env.get(n, n)), inner, cut, autocast
            )
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif not inner and (same := unchanged(node)) is not None:
            env[node] = env[same]  # outside of the region it is this node, with its gradient
        else:
            casts: list[fx.Node] = []
            if autocast is not None and isinstance(node.target, OpOverload):
                env[node], casts = autocast.copy(node, graph, env, inner)
            else:
                env[node] = graph.node_copy(node, lambda n: env[n])
            if not inner:
                cut.update((env[node], *casts))
    raise AssertionError("a region without output")


def unchanged(node: fx.Node) -> fx.Node | None:
    """Return the operand that a call returns as it is, not as a view, or None.

    Examples: `x.to(dtype)` of the same dtype, `x.contiguous()`, dropout in eval mode.
    """
    x = node.args[0] if node.args else None
    if not isinstance(node.target, OpOverload) or not isinstance(x, fx.Node) or node.target._schema.is_mutable:
        return None
    value, result = x.meta.get("val"), node.meta.get("val")
    same = (
        isinstance(value, Tensor)
        and isinstance(result, Tensor)
        and (str(value.shape), value.dtype) == (str(result.shape), result.dtype)  # sizes may be symbols
    )
    if not same or not decompositions(node.target):  # only composite ops do so
        return None
    with torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return x if node.target(*args, **kwargs) is value else None


# --- autocast ---------------------------------------------------------------------------------------------------------


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the casts of some tensors: {id: dtype}."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids = set(map(id, tensors))
        self.dtypes: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and id(args[0]) in self._ids and kwargs.get("dtype") is not None:
            self.dtypes[id(args[0])] = kwargs["dtype"]
        return func(*args, **kwargs)


class AutocastRegion:
    """One autocast region. device: a device's type; dtype: of products. It shares the outer one's cache."""

    def __init__(self, device: str, dtype: torch.dtype, outer: AutocastRegion | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._cache: dict[tuple[fx.Node, torch.dtype], fx.Node] = outer._cache if outer is not None else {}

    def copy(
        self, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any], grad: bool
    ) -> tuple[fx.Node, list[fx.Node]]:
        """Copy an op of the region to the insertion point. Returns the copy, and its new casts.

        env: {node of the region: its copy}; grad: whether gradients are recorded. Raises ShardcError for an op that
        casts more than its operands, and for tensors of another device.
        """
        operands = {n: n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
        devices = {x.device.type for x in operands.values() if x.is_floating_point()} - {self._device}
        if devices:
            fault = f"the model turns autocast of {self._device} on, around tensors of {', '.join(sorted(devices))}"
            raise ShardcError(fault, where=source.place(node), fix=FIX)
        dtypes = self._dtypes(node, list(operands.values()))
        casts: list[fx.Node] = []

        def cast(n: fx.Node) -> fx.Node:
            dtype = dtypes.get(id(operands.get(n)))
            if dtype is None:
                return env[n]  # type: ignore[no-any-return]
            key = env[n], dtype
            casted = self._cache.get(key)
            if casted is None:
                wide = operands[n].to(dtype)
                casted = call_like(node, aten._to_copy.default, env[n], dtype=dtype, val=wide, graph=graph)
                casts.append(casted)
                if env[n].op == "placeholder" and grad and dtype is self._dtype:
                    self._cache[key] = casted
            return casted

        copied = graph.node_copy(node, cast)
        with torch.no_grad():
            results = _dtypes_of(_call(node, dtypes))
        if results != _dtypes_of(node.meta["val"]):
            fault = f"the model turns autocast ({self._dtype}) on around {node.target}, which casts inside"
            raise ShardcError(fault, where=source.place(node), fix=FIX)
        return copied, casts

    def _dtypes(self, node: fx.Node, operands: list[Tensor]) -> dict[int, torch.dtype]:
        """Return the dtypes to which autocast casts operands, by their id."""
        with_region, without = _Casts(operands), _Casts(operands)
        with torch.no_grad(), with_region, torch.autocast(self._device, self._dtype, cache_enabled=False):
            _call(node, {})
        with torch.no_grad(), without, suppress(RuntimeError):  # if operands have several dtypes
            _call(node, {})
        return {i: dtype for i, dtype in with_region.dtypes.items() if without.dtypes.get(i) != dtype}


def _call(node: fx.Node, dtypes: dict[int, torch.dtype]) -> Any:
    """Run an op on its operands' tensors without data, cast to these dtypes."""

    def value(n: fx.Node) -> Any:
        val = n.meta["val"]
        return val.to(dtypes[id(val)]) if id(val) in dtypes else val

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _dtypes_of(values: Any) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
