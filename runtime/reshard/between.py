"""From one engine, or module, to another: the moves that it takes, made once."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.reshard.moves import BUCKET, Key, Moves, Wanted
from shardc.runtime.reshard.places import Plan
from shardc.runtime.reshard.wanted import local_tensors, weights
from shardc.runtime.zero.buckets import Buckets


class End(Protocol):
    """What has the weights of a program on a rank. owned: what the optimizer works on; both by placeholder name."""

    program: Program
    mesh: Any
    buckets: Buckets

    @property
    def owned(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def reshards(self) -> MutableMapping[End, Reshard]:
        """To other ends."""
        ...

    @property
    def checks(self) -> bool:
        """Are calls compared over ranks?"""
        ...

    def sending(self) -> AbstractContextManager[None]:
        """In it local tensors are up to date, and are read. Collective."""
        ...

    def receiving(self) -> AbstractContextManager[None]:
        """In it they are written to, in all forms. Collective."""
        ...


class Reshard:
    """The moves of weights, and of whatever else, from one end to another over the same ranks. Making it is collective,
    and so is doing it.

    all_buffers: of `weights`. more: what moves besides; its local tensors are given when it is done.
    .sent, .received: bytes of this rank, by rank. .rounds: all_to_alls.
    """

    def __init__(
        self, old: End, new: End, more: Sequence[Wanted] = (), *, all_buffers: bool = False, bucket: int = BUCKET
    ) -> None:
        first, second = weights(Plan(old.program), Plan(new.program), all_buffers=all_buffers)
        self._moves = [Moves(old.mesh, each, bucket) for each in ([*first, *more], second) if each]
        self.sent = [sum(n) for n in zip(*(m.sent for m in self._moves), strict=True)]
        self.received = [sum(n) for n in zip(*(m.received for m in self._moves), strict=True)]
        self.rounds = sum(m.rounds for m in self._moves)

    def __call__(self, old: End, new: End, more: Mapping[Key, Tensor]) -> None:
        """Do it, between ends of the programs that it was made for."""
        local = {**local_tensors("from", old), **local_tensors("to", new), **more}
        for move in self._moves:
            move(local)


def move_weights(old: End, other: Any) -> Reshard:
    """Into another end, or what has one (`.weights_end`). Collective. Raises ShardcError for anything else."""
    new: End | None = getattr(other, "weights_end", None)
    if new is None:
        fault = f"a {type(other).__name__} holds no weights of a program"
        fix = "give it an engine, or what program.forward or program.module returns"
        raise ShardcError(fault, where="weights_to", fix=fix)
    with old.mesh.together("moving weights"), old.sending(), new.receiving():
        if old.checks:
            agreement.check(old.mesh, [], "moving weights")
        if new not in old.reshards:
            old.reshards[new] = Reshard(old, new)
        old.reshards[new](old, new, {})
    return old.reshards[new]
