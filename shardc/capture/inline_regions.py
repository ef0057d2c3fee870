"""The regions of an exported graph, inlined: an explicit `detach` where a value leaves one of `with torch.no_grad():`,
and the casts of `with torch.autocast(...):` (autocast_region.py).

`torch.export` leaves the code of such a region in a subgraph. `ExportedProgram.run_decompositions` would inline it, but
it drops no-grad regions *silently*, which changes gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.autocast_region import AutocastRegion
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.graph import call_like
from shardc.torch_private import HigherOrderOperator, OpOverload, decompositions

aten = torch.ops.aten


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
    graph: fx.Graph,
    owner: torch.nn.Module,
    call: fx.Node,
    args: Sequence[Any],
    grad: bool,
    cut: set[fx.Node],
    autocast: AutocastRegion | None = None,
) -> list[Any]:
    """Copy the region that `call` runs to the insertion point. grad: are gradients recorded outside of it? autocast:
    the region that is open around it.
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
        raise ShardcError(f"the model uses {name}, which shardc cannot split", where=source.place(call))
    module = getattr(owner, str(sub.target))

    def crossing(x: Any, to_grad: bool) -> Any:
        """A value made without gradients stays without where gradients are recorded again."""
        if to_grad and isinstance(x, fx.Node) and x in cut:
            return call_like(graph, aten.detach.default, (x,), {}, x)
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
            env[node] = _region(
                graph, module, node, fx.map_arg(node.args, lambda n: env.get(n, n)), inner, cut, autocast
            )
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif not inner and (same := unchanged(node)) is not None:
            env[node] = env[same]  # outside of the region the tensor goes by this name, with the gradient that it has
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
