"""Move weights, or all of training, from one engine or module to another.

The optimizer's state: every rank sends all others what a checkpoint would record of it; its tensors are then sent as
any others. Tensors of a parameter's shape are split as it is. Others, such as a count of steps, or those of a matrix
with an owner, are whole on the ranks that report them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.reshard.engines import Target
from shardc.features.reshard.moves import Moves
from shardc.features.reshard.places import InPlan, Kept, Key, Plan, Wanted, Whole, check, weights
from shardc.features.reshard.transports import OverMesh
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_index import DTYPES, Index, Stored, json_number
from shardc.runtime.state.saving_optimizer import combined, fill, room_for, state_parts
from shardc.runtime.zero.buckets import Buckets

if TYPE_CHECKING:
    from shardc.runtime.step.engine_state import Saver


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
    """Move weights to another end, its owner, or an engine; raise ShardcError if it is none. Collective."""
    if isinstance(other, Target):
        with old.mesh.together("moving weights"), old.sending():
            return other.take(old.program, old.mesh, old.buckets, local_tensors(old))
    new: End | None = getattr(other, "weights_holder", None)
    if new is None:
        fault = f"a {type(other).__name__} holds no weights of a program"
        fix = "pass an engine, the result of program.forward or program.module, or one of shardc.engines"
        raise ShardcError(fault, where="weights_to", fix=fix)
    with old.mesh.together("moving weights"), old.sending(), new.receiving():
        moves = _MOVES.setdefault(old.buckets, WeakKeyDictionary())
        if new.buckets not in moves:
            moves[new.buckets] = Moves(
                OverMesh(old.mesh), weights(Plan(old.program), Plan(new.program), all_buffers=False)
            )
        moves[new.buckets](local_tensors(old), local_tensors(new))
    return moves[new.buckets]


def local_tensors(end: End) -> dict[Key, Tensor]:
    """Return the local tensors of an end's parameters and buffers, in all forms."""
    whole = {n: end.buckets.kept_whole(n) for n in end.owned}
    tensors: dict[Key, Tensor] = {("own", n): p.detach() for n, p in end.owned.items()}
    tensors |= {("whole", n): x for n, x in whole.items() if x is not None}
    return tensors | {("buffer", n): b for n, b in end.buffers.items()}


class TrainingMove:
    """The move of all of an engine's state. Making it raises ShardcError if the programs are of different models."""

    def __init__(self, old: Program, new: Program) -> None:
        self._old, self._new = Plan(old), Plan(new)
        check(self._old, self._new, all_buffers=True)

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
            senders, need = _gather_reports(mesh, have, **facts), dict[str, Part]()
            index = _index_of(old.program, senders)
            rooms, optimizer = dict[str, dict[str, Any]](), new.update.optimizer
            if optimizer is not None and index.optimizer is not None:
                room = new.update.paged.room if new.update.paged is not None else None
                rooms = room_for(new.held, optimizer, index, need, "engine.to", room)
            new.accept(index.extra)
            of, to = _kept(self._old, senders), _kept(self._new, _gather_reports(mesh, need))
            moved = weights(self._old, self._new, all_buffers=True) + [Wanted(k, of[k], x) for k, x in to.items()]
            tensors = (
                local_tensors(end) | {("state", k): part.local.detach() for k, part in parts.items()}
                for end, parts in ((old, have), (new, need))
            )
            Moves(OverMesh(mesh), moved)(*tensors)
            if optimizer is not None and index.optimizer is not None:
                fill(new.held, optimizer, index.optimizer, rooms)
        new.go_on_from(index.extra)


#: A rank's facts, with "tensors": {key: (dtype, global shape, whether it is split as its parameter)}.
_Report = dict[str, Any]


def _gather_reports(mesh: Any, parts: Mapping[str, Part], **facts: Any) -> list[_Report]:
    """Return each rank's report: facts, for JSON, and the tensors of the optimizer's state. Collective."""
    tensors = {}
    for key, part in parts.items():
        split = part.shard is not None or part.member is not None or bool(part.layout.items)
        tensors[key] = [str(part.local.dtype).removeprefix("torch."), part.shape, split]
    texts = agreement.texts(mesh, json.dumps({**facts, "tensors": tensors}, default=json_number))
    read = {text: json.loads(text) for text in texts}
    return [read[text] for text in texts]


def _index_of(program: Program, every: Sequence[_Report]) -> Index:
    """Build a checkpoint's index of the ranks' facts: `optimizer`, `extra` and tensors."""
    stored: dict[str, Stored] = {}
    for p in program.params:
        stored |= {f"model.{n}": Stored(p.dtype, p.shapes[n]) for n in p.members or (p.fqn,)}
    for facts in reversed(every):
        stored |= {key: Stored(DTYPES[dtype], tuple(shape)) for key, (dtype, shape, _) in facts["tensors"].items()}
    facts = combined(every)
    model, mesh = str(program.meta.get("model", "")), dict(program.mesh.axes)
    return Index("", int(facts["extra"]["step"]), model, "", mesh, **facts, tensors=stored)


def _kept(plan: Plan, every: Sequence[_Report]) -> dict[str, Kept]:
    """Return how ranks keep the state tensors under a plan. every: by rank, as reported."""
    ranks: dict[str, set[int]] = {}
    forms: dict[str, Sequence[Any]] = {}
    for r, report in enumerate(every):
        for key, form in report["tensors"].items():
            ranks.setdefault(key, set()).add(r)
            forms[key] = form
    result = {}
    for key in sorted(forms):
        dtype, shape, split = forms[key]
        these, param = frozenset(ranks[key]), key.removeprefix("optimizer.").rpartition(".")[0]
        place = InPlan(plan, param, cut=True).on(these) if split else Whole(tuple(shape), these)
        result[key] = Kept(("state", key), DTYPES[dtype], place)
    return result
