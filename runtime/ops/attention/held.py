"""Find which queries and keys a rank holds, and which keys a batch's mask lets its queries reach.

With documents in a row, padding, or any mask of a batch, it is not known before the run which keys a query sees. So
each rank searches its rows of the mask, QUERIES at a time, for the first and the last key that any of them sees. The
ranks of a ring exchange these few hundred bytes. Keys outside are neither sent nor computed:

    keys       a a a a a b b b | b b c c c c c c       three documents on two ranks, causal
    rows 8..9  . . . . . # # #   # #                   they reach keys 5 to 9: of rank 0's eight keys three are sent

Between its first and its last key a stretch of rows may see none: those are computed, and hidden by the mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.ir.placement import Shard, runs
from shardc.runtime.ops.attention.spans import Span, stretches
from shardc.runtime.ops.host_copy import to_host
from shardc.runtime.rng import Digits, Paddings
from shardc.torch_private import FakeTensor


class Held(NamedTuple):
    """The part of weights [.., h, s, t] on each rank. shape: global; digits, paddings as of `ops.dropout`."""

    shape: tuple[int, ...]
    digits: Digits
    paddings: Paddings
    mesh: Any

    def spans(self, dim: int, coords: Mapping[str, int] | None = None) -> list[Span] | None:
        """Return the places of a dim that a rank has; None: all. coords: of the rank, default this one's."""
        pad = next(((padding, blocks) for d, padding, blocks in self.paddings if d == dim), (0, 1))
        at = coords or {}
        shards = [
            (
                Shard.of_signed(d, split, sections, *pad),
                self.mesh.size(a),
                at[a] if a in at else self.mesh.coordinate(a),
            )
            for d, a, split, sections in self.digits
            if d == dim
        ]
        places = [Span(start, local, length) for local, start, length in runs(self.shape[dim], shards)]
        return places if shards else None

    def places(self, dim: int, coords: Mapping[str, int] | None = None) -> list[Span]:
        """Return `spans`, and one span for all; none for a rank that has only padding."""
        spans = self.spans(dim, coords)
        return [Span(0, 0, self.shape[dim])] if spans is None else spans

    def every(self, dim: int, axis: str) -> tuple[tuple[Span, ...], ...]:
        """Return the places for each rank of an axis."""
        return tuple(tuple(self.places(dim, {axis: i})) for i in range(self.mesh.size(axis)))

    def stretches(self) -> int:
        """Return the largest number of stretches of QUERIES rows on any rank, also for a mesh without ranks."""
        dim = len(self.shape) - 2
        axes = [a for d, a, *_ in self.digits if d == dim]
        ranks = itertools.product(*(range(self.mesh.size(a)) for a in axes))
        every = (self.places(dim, dict(zip(axes, each, strict=True))) for each in ranks)
        return max(sum(1 for _ in stretches(rows)) for rows in every)


def attention_reach(
    mask: Tensor, mesh: Any, axis: str, shape: Sequence[int], digits: Digits, paddings: Paddings = (), *, tag: str = ""
) -> Tensor:
    """Return the first key, and the one after the last, that the queries of each stretch see; else (0, 0).

    i64[ranks of the axis, stretches of QUERIES rows, 2] on the CPU: it waits for the device, once for all attention
    under one mask. mask: bool, or float (-inf where nothing is seen), of this rank's rows and all keys [.., s or 1, t];
    shape, digits, paddings: of the weights, as in `attention`.
    """
    part = Held(tuple(shape), digits, paddings, mesh)
    reach = torch.zeros(part.stretches(), 2, dtype=torch.int64, device=mask.device)
    if isinstance(mask, FakeTensor):
        mesh.all_gather(reach, axis, tag=tag)
        return torch.empty(mesh.size(axis), *reach.shape, dtype=torch.int64)
    keys, same = mask.shape[-1], mask.dim() < 2 or mask.shape[-2] == 1
    for i, span in enumerate(stretches(part.places(len(shape) - 2))):
        if i and same:
            reach[i] = reach[0]
            continue
        some = mask if same else mask[..., span.local : span.local + span.length, :]
        seen = (some if some.dtype == torch.bool else some != -torch.inf).reshape(-1, keys).any(0)
        place = torch.arange(keys, device=mask.device)
        first, end = torch.where(seen, place, keys).amin(), torch.where(seen, place + 1, 0).amax()
        reach[i, 0], reach[i, 1] = torch.minimum(first, end), end
    return to_host(mesh.all_gather(reach, axis, tag=tag))


def reach_of(found: Tensor | None) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Return (first, end) of keys, by rank and stretch of its rows; None for tensors without data."""
    if found is None or isinstance(found, FakeTensor):
        return None
    return tuple(tuple((int(a), int(b)) for a, b in each) for each in found.tolist())
