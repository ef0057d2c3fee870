"""Move weights from one engine, or module, to another. The moves are planned once."""

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
    """The holder of a program's weights on a rank. owned: by placeholder name, as the optimizer has them."""

    program: Program
    mesh: Any
    buckets: Buckets

    @property
    def owned(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def reshards(self) -> MutableMapping[End, Reshard]:
        """The moves to other ends."""
        ...

    @property
    def checks(self) -> bool:
        """Whether calls are compared over ranks."""
        ...

    def sending(self) -> AbstractContextManager[None]:
        """Make local tensors current, to read them in this context. Collective."""
        ...

    def receiving(self) -> AbstractContextManager[None]:
        """Allow writes to local tensors, in all forms, in this context. Collective."""
        ...


class Reshard:
    """The moves of weights, and of `more`, between two ends on the same ranks. Making it is collective.

    So is calling it. all_buffers: of `weights`. more: other tensors to move, whose local tensors are arguments of the
    call. .sent, .received: bytes of this rank, by rank. .rounds: all_to_alls.
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
        """Move, between ends of the programs that it was made for."""
        local = {**local_tensors("from", old), **local_tensors("to", new), **more}
        for move in self._moves:
            move(local)


def move_weights(old: End, other: Any) -> Reshard:
    """Move weights to another end, or its owner; raise ShardcError if there is none. Collective."""
    new: End | None = getattr(other, "weights_end", None)
    if new is None:
        fault = f"a {type(other).__name__} holds no weights of a program"
        fix = "pass an engine, or the result of program.forward or program.module"
        raise ShardcError(fault, where="weights_to", fix=fix)
    with old.mesh.together("moving weights"), old.sending(), new.receiving():
        if old.checks:
            agreement.check(old.mesh, [], "moving weights")
        if new not in old.reshards:
            old.reshards[new] = Reshard(old, new)
        old.reshards[new](old, new, {})
    return old.reshards[new]
