"""Floating-point operations of an op, forward or backward: torch's own counts, and those that it lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Of one call of an OpOverload; 0 for an op that multiplies no matrices."""
    if op in _ATTENTION:
        q, k, v = args[_ATTENTION[op][0] : _ATTENTION[op][0] + 3]
        return _ATTENTION[op][1] * _attention(q, k, v)
    count = flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of one product of [.., s, d] by [.., d, t]; forward has two of them, backward five."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]) // 2


#: Attention on the CPU: the index of q among the arguments, and the number of products (backward computes the scores
#: again).
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (1, 5),
}
