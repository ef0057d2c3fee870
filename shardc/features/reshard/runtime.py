"""Move weights from one engine, or module, to another. The moves are planned once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.reshard import training, wanted
from shardc.features.reshard.moves import Moves
from shardc.features.reshard.places import Plan
from shardc.features.reshard.wanted import local_tensors, weights
from shardc.ir.program import Program
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.saving_optimizer import fill, room_for, state_parts
from shardc.runtime.zero.buckets import Buckets

if TYPE_CHECKING:
    from shardc.runtime.step.saver import Saver


class End(Protocol):
    """The holder of a program's weights on a rank. owned: by placeholder name, as the optimizer has them."""

    program: Program
    mesh: Any
    buckets: Buckets

    @property
    def owned(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def sending(self) -> AbstractContextManager[None]:
        """Make local tensors current, to read them in this context. Collective."""
        ...

    def receiving(self) -> AbstractContextManager[None]:
        """Allow writes to local tensors, in all forms, in this context. Collective."""
        ...


#: The moves from one end to another, by their buckets.
_MOVES: WeakKeyDictionary[Buckets, WeakKeyDictionary[Buckets, Moves]] = WeakKeyDictionary()


def move_weights(old: End, other: Any) -> Moves:
    """Move weights to another end, or its owner; raise ShardcError if there is none. Collective."""
    new: End | None = getattr(other, "weights_holder", None)
    if new is None:
        fault = f"a {type(other).__name__} holds no weights of a program"
        fix = "pass an engine, or the result of program.forward or program.module"
        raise ShardcError(fault, where="weights_to", fix=fix)
    with old.mesh.together("moving weights"), old.sending(), new.receiving():
        moves = _MOVES.setdefault(old.buckets, WeakKeyDictionary())
        if new.buckets not in moves:
            moves[new.buckets] = Moves(old.mesh, weights(Plan(old.program), Plan(new.program), all_buffers=False))
        moves[new.buckets](local_tensors("from", old) | local_tensors("to", new))
    return moves[new.buckets]


class TrainingMove:
    """The move of all of an engine's state. Making it raises ShardcError if the programs are of different models."""

    def __init__(self, old: Program, new: Program) -> None:
        self._old, self._new = Plan(old), Plan(new)
        wanted.check(self._old, self._new, all_buffers=True)

    def __call__(self, old: Saver, new: Saver) -> None:
        """Move it into an engine whose training has not begun. Collective."""
        old.finish()
        new.like, new.folder, new.model.forward_arguments = old.like, old.folder, old.model.forward_arguments
        new.hooks.follow(old.hooks)
        mesh = old.mesh
        with mesh.together("moving to another plan"), old.sending(), new.receiving():
            have: dict[str, Part] = {}
            settings: dict[str, Any] | None = None
            if (optimizer := old.update.optimizer) is not None:
                have, settings = state_parts(old.held, optimizer, copies=True)
            facts = {"optimizer": settings, "extra": old.extra_state()}
            senders = training.gather_reports(mesh, have, **facts)
            index, need = training.index_of(old.program, senders), dict[str, Part]()
            rooms, optimizer = dict[str, dict[str, Any]](), new.update.optimizer
            if optimizer is not None and index.optimizer is not None:
                room = new.update.paged.room if new.update.paged is not None else None
                rooms = room_for(new.held, optimizer, index, need, "engine.to", room)
            new.accept(index.extra)
            receivers = training.gather_reports(mesh, need)
            tensors_of = ([each["tensors"] for each in ranks] for ranks in (senders, receivers))
            more = training.states(self._old, self._new, *tensors_of)
            tensors = local_tensors("from", old) | local_tensors("to", new)
            tensors |= {("from", "state", k): part.local.detach() for k, part in have.items()}
            tensors |= {("to", "state", k): part.local for k, part in need.items()}
            Moves(mesh, [*weights(self._old, self._new, all_buffers=True), *more])(tensors)
            if optimizer is not None and index.optimizer is not None:
                fill(new.held, optimizer, index.optimizer, rooms)
        new.go_on_from(index.extra)
