"""Gather in 8 bits: results of `fp8_round` (shardc.runtime.ops.convert with `fp8=`), and ZeRO 3's parameters.

Parameters that all ops round by `fp8_round` are rounded before:

    scales      each rank finds the largest numbers of its stretches; one all_reduce for each set of axes makes them
                the maxima of whole granules
    message     a byte for each element of the rank's part
    whole       all ranks' bytes times the scales, in the dtype that ops take

A stretch may begin and end in the middle of a row. It is handled as whole rows, with zeros for the elements of others.
Rounding the result again changes nothing, so ops read it as they would read the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.features.fp8 import casts, rounding
from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import trim
from shardc.ir.stored import Bucket
from shardc.runtime.mesh import Work
from shardc.runtime.ops import shard_parts
from shardc.runtime.ops.convert import Packed, Record, Started
from shardc.runtime.zero.flat_partition import Flat, FlatShard


def all_gather(x: Tensor, mesh: Any, axis: str, old: Shard, record: Record, fp8: Packed, *, start: bool) -> Any:
    """Gather at once, or start to. x: this rank's part; old: the shards of which it is one."""
    message = rounding.fp8_pack(x, *fp8)

    def whole(messages: Tensor) -> Tensor:
        parts = torch.stack([rounding.unpacked(m, x, *fp8) for m in messages])
        return trim(shard_parts.unstack(parts, old), old)

    if not start:
        return whole(mesh.all_gather(message, axis, **record))
    stack = message.new_empty(mesh.size(axis), *message.shape)
    work = mesh.start_all_gather(message, stack.view(-1), axis, **record)
    return Started(work, lambda: whole(stack))


# --- parameters


@dataclass(frozen=True)
class _Stretch:
    """A rank's shard of one parameter, and its granules: rows first .. last of the first dim."""

    shard: FlatShard
    granule: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int]:
        size, inner = self.shard.shape[0], math.prod(self.shard.shape[1:])
        step = self.granule[0] or size
        first, last = self.shard.start // inner, -(-self.shard.stop // inner)
        return first // step * step, -(-last // step) * step

    def as_rows(self, values: Tensor) -> Tensor:
        """Return the shard's values in their place in whole rows; the rest is zero."""
        first, last = self.rows
        inner = math.prod(self.shard.shape[1:])
        flat = values.new_zeros((last - first) * inner)
        flat[self.shard.start - first * inner : self.shard.stop - first * inner] = values
        return flat.view(last - first, *self.shard.shape[1:])

    def of_rows(self, rows: Tensor) -> Tensor:
        first, _ = self.rows
        inner = math.prod(self.shard.shape[1:])
        return rows.reshape(-1)[self.shard.start - first * inner : self.shard.stop - first * inner]

    def of_scales(self, scales: Tensor) -> Tensor:
        """Return the scales of the shard's granules."""
        first, last = self.rows
        return scales if self.granule[0] == 0 else scales[first // self.granule[0] : last // self.granule[0]]


class RoundedGather:
    """The gather of one bucket on one rank."""

    def __init__(self, bucket: Bucket, flat: Flat, shards: Mapping[str, FlatShard], mesh: Any, tag: str) -> None:
        self._bucket, self._flat, self._mesh, self._tag = bucket, flat, mesh, tag
        self._hows = dict(zip(bucket.params, bucket.rounded, strict=True))
        self._stretches = {n: _Stretch(shards[n], how.granule) for n, how in self._hows.items()}

    def start(self, part: Tensor, slices: Mapping[str, Tensor], direction: str) -> tuple[Tensor, Work]:
        """Start to gather; return the whole bucket and the work. part: this rank's; slices: its stretches."""
        with torch.no_grad():
            scales = self._scales(slices, direction)
            message = torch.zeros(self._flat.part, dtype=torch.uint8, device=part.device)
            for name, x in slices.items():
                s = self._stretches[name]
                if s.shard.size:
                    low = x.storage_offset() - part.storage_offset()
                    narrow = casts.narrow(s.as_rows(x), s.of_scales(scales[name]), *self._how(name))
                    message[low : low + x.numel()] = s.of_rows(narrow)
            messages = message.new_empty(self._flat.padded)
            whole = torch.empty(self._flat.padded, dtype=part.dtype, device=part.device)
            work = self._mesh.start_all_gather(
                message, messages, self._bucket.shard, direction=direction, tag=self._tag
            )

        def wide() -> None:
            with torch.no_grad():
                for name, start, shape in zip(self._hows, self._flat.starts, self._flat.shapes, strict=True):
                    size = math.prod(shape)
                    x = messages[start : start + size].view(shape)
                    whole[start : start + size] = casts.wide(x, scales[name], part.dtype, *self._how(name)).view(-1)

        return whole, Work(work, wide, messages)

    def _how(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._hows[name].format, self._hows[name].granule

    def _scales(self, slices: Mapping[str, Tensor], direction: str) -> dict[str, Tensor]:
        """Return the exponents of each parameter's scales."""
        groups: dict[tuple[str, ...], list[str]] = {}
        largest: dict[str, Tensor] = {}
        for name, x in slices.items():
            s, how = self._stretches[name], self._hows[name]
            wide = torch.promote_types(x.dtype, torch.float32)
            largest[name] = x.new_zeros(rounding.granules(s.shard.shape, how.granule), dtype=wide)
            if s.shard.size:
                s.of_scales(largest[name]).copy_(rounding.fp8_amax(s.as_rows(x), how.granule))
            axes = self._mesh.layout.merge(
                (self._bucket.shard, *how.axes)
            )  # that a parameter's granules are spread over
            groups.setdefault(axes, []).append(name)
        for axes, names in groups.items():
            flat = torch.cat([largest[n].view(-1) for n in names])
            flat = self._mesh.all_reduce(flat, axes, op="max", direction=direction, tag=self._tag)
            for n, part in zip(names, flat.split([largest[n].numel() for n in names]), strict=True):
                largest[n] = part.view(largest[n].shape)
        return {n: casts.exponents(x, self._hows[n].format) for n, x in largest.items()}
