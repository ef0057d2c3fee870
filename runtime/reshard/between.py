"""From one engine to another: the moves that it takes, made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardc.runtime.reshard.moves import BUCKET, Key, Moves, Wanted
from shardc.runtime.reshard.places import Plan
from shardc.runtime.reshard.wanted import local_tensors, weights


class Reshard:
    """The moves of weights, and of whatever else, from an engine to another one over the same ranks. Making it is
    collective, and so is doing it.

    all_buffers: of `weights`. more: what moves besides; its local tensors are given when it is done.
    .sent, .received: bytes of this rank, by rank. .rounds: all_to_alls."""

    def __init__(
        self, old: Any, new: Any, more: Sequence[Wanted] = (), *, all_buffers: bool = False, bucket: int = BUCKET
    ) -> None:
        first, second = weights(Plan(old.program), Plan(new.program), all_buffers=all_buffers)
        self._moves = [Moves(old.mesh, each, bucket) for each in ([*first, *more], second) if each]
        self.sent = [sum(n) for n in zip(*(m.sent for m in self._moves), strict=True)]
        self.received = [sum(n) for n in zip(*(m.received for m in self._moves), strict=True)]
        self.rounds = sum(m.rounds for m in self._moves)

    def __call__(self, old: Any, new: Any, more: Mapping[Key, Tensor]) -> None:
        """Do it, between engines of the programs that it was made for."""
        local = {**local_tensors("from", old), **local_tensors("to", new), **more}
        for move in self._moves:
            move(local)
