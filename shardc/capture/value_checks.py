"""Checks of values in an exported graph: a compiled program does without them."""

from __future__ import annotations

import torch
from torch import fx

from shardc.torch_private import OpOverload

#: Ops that only check values.
_CHECKS = (
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
#: What a number of the graph is; torch 2.11 knows those that its checks took for true.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


def drop_checks(graph: fx.Graph) -> None:
    """Erase checks of values (`assert lengths.max().item() <= n`) and the numbers computed for them alone, in place.

    A compiled program does not look at values; the model itself checks them wherever it runs.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        checks = isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in _CHECKS
        if checks or isinstance(node.meta.get("val"), _NUMBERS):
            graph.erase_node(node)
