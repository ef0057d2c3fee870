"""Gather a result of `fp8_round` in 8 bits: the moves of shardc.runtime.ops.convert with `fp8=`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.features.fp8.rounding import packed, unpacked
from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import trim
from shardc.runtime.ops import shard_parts
from shardc.runtime.ops.convert import Packed, Record, Started


def all_gather(x: Tensor, mesh: Any, axis: str, old: Shard, new: None, record: Record, fp8: Packed) -> Tensor:
    """Gather at once. x: this rank's part; old: the shards of which it is one."""
    return _whole(mesh.all_gather(packed(x, *fp8), axis, **record), x, old, fp8)


def start_all_gather(x: Tensor, mesh: Any, axis: str, old: Shard, record: Record, fp8: Packed) -> Started:
    """Start to gather."""
    message = packed(x, *fp8)
    stack = message.new_empty(mesh.size(axis), *message.shape)
    work = mesh.start_all_gather(message, stack.view(-1), axis, **record)
    return Started(work, lambda: _whole(stack, x, old, fp8))


def _whole(messages: Tensor, x: Tensor, old: Shard, fp8: Packed) -> Tensor:
    """Join the value from all ranks' messages. x: this rank's part."""
    parts = torch.stack([unpacked(m, x, *fp8) for m in messages])
    return trim(shard_parts.unstack(parts, old), old)
