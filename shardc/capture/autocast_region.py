"""The casts of `with torch.autocast(...)` inside a model's forward, as ops of the graph.

    with autocast(bfloat16): y = linear(x, w, b)        y = linear(to(x, bfloat16), to(w, bfloat16), to(b, bfloat16))

Which operands an op casts is asked of torch: the op runs on tensors without data, with autocast and without it, and the
casts that it adds to its operands are those of autocast. A weight's cast is made once in a region, as autocast's cache
does: its gradients are added up in the narrow dtype.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.graph import call_like
from shardc.torch_private import TorchDispatchMode, pytree

aten = torch.ops.aten
FIX = "take the region out of the model: write `.to(dtype)` on what it is to compute in other dtypes"


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the casts of some tensors: {id: dtype}."""

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
    """One region, to the end of the outermost one that it is in. device: a device's type; dtype: that of products."""

    def __init__(self, device: str, dtype: torch.dtype, outer: AutocastRegion | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._cache: dict[tuple[fx.Node, torch.dtype], fx.Node] = outer._cache if outer is not None else {}

    def copy(
        self, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any], grad: bool
    ) -> tuple[fx.Node, list[fx.Node]]:
        """Copy an op of the region to the insertion point. env: {node of the region: its copy}; grad: are gradients
        recorded? Returns the copy, and the casts that it takes. Raises ShardcError for an op whose casts are not all
        casts of its operands, and for tensors of another device.
        """
        operands = {n: n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
        devices = {x.device.type for x in operands.values() if x.is_floating_point()} - {self._device}
        if devices:
            what = f"the model turns autocast of {self._device} on, around tensors of {', '.join(sorted(devices))}"
            raise ShardcError(what, where=source.place(node), fix=FIX)
        dtypes = self._dtypes(node, list(operands.values()))
        casts: list[fx.Node] = []

        def cast(n: fx.Node) -> fx.Node:
            dtype = dtypes.get(id(operands.get(n)))
            if dtype is None:
                return env[n]  # type: ignore[no-any-return]
            key = env[n], dtype
            made = self._cache.get(key)
            if made is None:
                made = call_like(
                    graph, aten._to_copy.default, (env[n],), {"dtype": dtype}, node, val=operands[n].to(dtype)
                )
                casts.append(made)
                if env[n].op == "placeholder" and grad and dtype is self._dtype:
                    self._cache[key] = made
            return made

        copied = graph.node_copy(node, cast)
        if self._result(node, dtypes) != _dtypes_of(node.meta["val"]):
            what = f"the model turns autocast ({self._dtype}) on around {node.target}, which casts inside"
            raise ShardcError(what, where=source.place(node), fix=FIX)
        return copied, casts

    def _dtypes(self, node: fx.Node, operands: list[Tensor]) -> dict[int, torch.dtype]:
        """The dtypes to which autocast casts operands, by their id."""
        with_region, without = _Casts(operands), _Casts(operands)
        with torch.no_grad(), with_region, torch.autocast(self._device, self._dtype, cache_enabled=False):
            _call(node, {})
        with torch.no_grad(), without, suppress(RuntimeError):  # of operands of several dtypes
            _call(node, {})
        return {i: dtype for i, dtype in with_region.dtypes.items() if without.dtypes.get(i) != dtype}

    def _result(self, node: fx.Node, dtypes: dict[int, torch.dtype]) -> list[torch.dtype]:
        with torch.no_grad():
            return _dtypes_of(_call(node, dtypes))


def _call(node: fx.Node, dtypes: dict[int, torch.dtype]) -> Any:
    """Run an op on the tensors without data that its operands are known by, cast to these dtypes."""

    def value(n: fx.Node) -> Any:
        val = n.meta["val"]
        return val.to(dtypes[id(val)]) if id(val) in dtypes else val

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _dtypes_of(values: Any) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
