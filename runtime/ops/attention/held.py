"""Which of attention's queries and keys a rank holds; and what its mask lets them reach, found when the batch is there.

Documents in a row, padding, any mask of a batch: which keys a query sees is not known before it runs. So each rank
looks at its rows of the mask, QUERIES at a time, for the first and the last key that any of them sees; ranks of a ring
tell each other, which are a few hundred bytes; and what lies outside is neither sent nor computed:

    keys       a a a a a b b b | b b c c c c c c       three documents on two ranks, causal
    rows 8..9  . . . . . # # #   # #                   they reach keys 5 to 9: of rank 0's eight keys three are sent

Between its first and its last key a stretch of rows may see none: that is computed, and hidden by the mask."""

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
    """What ranks have of weights [.., h, s, t]: shape is global; digits, paddings as of `ops.dropout`."""

    shape: tuple[int, ...]
    digits: Digits
    paddings: Paddings
    mesh: Any

    def spans(self, dim: int, coords: Mapping[str, int] | None = None) -> list[Span] | None:
        """Which places of a dim a rank has; None: all of them. coords: of the rank on some axes, this one's on
        others.
        """
        pad = next(((padding, blocks) for d, padding, blocks in self.paddings if d == dim), (0, 1))
        at = coords or {}
        own = [
            (
                Shard.of_signed(d, split, sections, *pad),
                self.mesh.size(a),
                at[a] if a in at else self.mesh.coordinate(a),
            )
            for d, a, split, sections in self.digits
            if d == dim
        ]
        found = [Span(start, local, length) for local, start, length in runs(self.shape[dim], own)]
        return found if own else None

    def every(self, dim: int, axis: str) -> tuple[tuple[Span, ...], ...]:
        """The same, of each rank of an axis."""
        whole = [Span(0, 0, self.shape[dim])]
        return tuple(tuple(self.spans(dim, {axis: i}) or whole) for i in range(self.mesh.size(axis)))

    def stretches(self) -> int:
        """The most stretches of QUERIES rows that any rank has; to be asked with a mesh that has no ranks, too."""
        dim = len(self.shape) - 2
        axes = [a for d, a, *_ in self.digits if d == dim]
        whole = [Span(0, 0, self.shape[dim])]
        places = itertools.product(*(range(self.mesh.size(a)) for a in axes))
        every = (self.spans(dim, dict(zip(axes, each, strict=True))) or whole for each in places)
        return max(sum(1 for _ in stretches(rows)) for rows in every)


def attention_reach(
    mask: Tensor,
    mesh: Any,
    axis: str,
    shape: Sequence[int],
    digits: Digits,
    paddings: Paddings = (),
    *,
    tag: str = "",
) -> Tensor:
    """i64[ranks of the axis, stretches, 2] on the CPU: the first key, and the one behind the last, that any query of a
    stretch of QUERIES rows sees; (0, 0) where they see none. To read it is to wait for the device, once for all
    attention under one mask.

    mask: bool, or float (-inf where nothing is seen), of this rank's rows and all keys [.., s or 1, t]; shape, digits,
    paddings: of the weights, as in `attention`.
    """
    held = Held(tuple(shape), digits, paddings, mesh)
    found = torch.zeros(held.stretches(), 2, dtype=torch.int64, device=mask.device)
    if isinstance(mask, FakeTensor):
        mesh.all_gather(found, axis, tag=tag)
        return torch.empty(mesh.size(axis), *found.shape, dtype=torch.int64)
    keys, same = mask.shape[-1], mask.dim() < 2 or mask.shape[-2] == 1
    for i, span in enumerate(stretches(held.spans(len(shape) - 2) or [Span(0, 0, shape[-2])])):
        if i and same:
            found[i] = found[0]
            continue
        some = mask if same else mask[..., span.local : span.local + span.length, :]
        seen = (some if some.dtype == torch.bool else some != -torch.inf).reshape(-1, keys).any(0)
        place = torch.arange(keys, device=mask.device)
        first, end = torch.where(seen, place, keys).amin(), torch.where(seen, place + 1, 0).amax()
        found[i, 0], found[i, 1] = torch.minimum(first, end), end
    return to_host(mesh.all_gather(found, axis, tag=tag))


def reach_of(found: Tensor | None) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """(first, end) of keys, by rank and stretch of its rows; None where nothing is known, as of a tensor without
    data.
    """
    if found is None or isinstance(found, FakeTensor):
        return None
    return tuple(tuple((int(a), int(b)) for a, b in each) for each in found.tolist())
