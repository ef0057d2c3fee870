"""Floating-point operations and memory traffic of an op, forward or backward: torch's own counts, and those that it
lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardc.torch_private import pytree

aten = torch.ops.aten


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Of one call of an OpOverload; 0 for an op that multiplies no matrices."""
    if op in _ATTENTION:
        q, k, v = args[_ATTENTION[op][0] : _ATTENTION[op][0] + 3]
        return _ATTENTION[op][1] * _attention(q, k, v)
    count = flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


#: Ops that take memory and leave it as it is: they move nothing, and a GPU runs nothing for them.
_ALLOCATES = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}


def traffic_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Bytes of memory that one call of an OpOverload reads and writes; None for a view, for an op that only takes
    memory, and for one that makes no tensor: these do not run on a device.
    """
    if op.is_view or op in _ALLOCATES:
        return None
    results, operands = pytree.tree_leaves(result), pytree.tree_leaves((args, kwargs))
    if not any(isinstance(x, Tensor) for x in results):
        return None
    return sum(x.numel() * x.element_size() for x in (*operands, *results) if isinstance(x, Tensor))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of one product of [.., s, d] by [.., d, t]; forward has two of them, backward five."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]) // 2


#: Attention on the CPU: the index of q among the arguments, and the number of products (backward computes the scores
#: again).
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 5),
}
