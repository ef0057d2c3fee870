"""Move an optimizer's state from one engine to another: tensors, counts, settings, schedules.

Every rank sends all others what a checkpoint would record of it; its tensors are then sent as any others. Tensors of a
parameter's shape are split as it is. Others, such as a count of steps, or those of a matrix with an owner, are whole on
the ranks that report them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardc.features.reshard.moves import Kept, Wanted
from shardc.features.reshard.places import InPlan, Plan, Whole
from shardc.features.reshard.wanted import Side
from shardc.ir.program import Program
from shardc.runtime.mesh import agreement
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_index import DTYPES, Index, Stored, json_number
from shardc.runtime.state.saving_optimizer import combined

#: A rank's report of its tensors: {key: (dtype, global shape, whether it is split as its parameter)}.
Said = Mapping[str, Sequence[Any]]


def gather_reports(mesh: Any, parts: Mapping[str, Part], **facts: Any) -> list[dict[str, Any]]:
    """Return each rank's report: `facts`, for JSON, and "tensors" of the optimizer's state. Collective."""
    tensors = {}
    for key, part in parts.items():
        split = part.shard is not None or part.member is not None or bool(part.layout.items)
        tensors[key] = [str(part.local.dtype).removeprefix("torch."), part.shape, split]
    texts = agreement.texts(mesh, json.dumps({**facts, "tensors": tensors}, default=json_number))
    read = {text: json.loads(text) for text in texts}
    return [read[text] for text in texts]


def index_of(program: Program, every: Sequence[Mapping[str, Any]]) -> Index:
    """Build a checkpoint's index of the ranks' facts: `optimizer`, `extra` and tensors."""
    stored: dict[str, Stored] = {}
    for p in program.params:
        stored |= {f"model.{n}": Stored(p.dtype, p.shapes[n]) for n in p.members or (p.fqn,)}
    for facts in reversed(every):
        stored |= {key: Stored(DTYPES[dtype], tuple(shape)) for key, (dtype, shape, _) in facts["tensors"].items()}
    facts = combined(every)
    model, mesh = str(program.meta.get("model", "")), dict(program.mesh.axes)
    return Index("", int(facts["extra"]["step"]), model, "", mesh, **facts, tensors=stored)


def states(old: Plan, new: Plan, have: Sequence[Said], need: Sequence[Said]) -> list[Wanted]:
    """Return the state tensors that the new plan takes from the old one. have, need: by rank, as reported."""
    of, to = _kept("from", old, have), _kept("to", new, need)
    return [Wanted(key, of[key], kept) for key, kept in to.items()]


def _kept(side: Side, plan: Plan, every: Sequence[Said]) -> dict[str, Kept]:
    ranks: dict[str, set[int]] = {}
    forms: dict[str, Sequence[Any]] = {}
    for r, tensors in enumerate(every):
        for key, form in tensors.items():
            ranks.setdefault(key, set()).add(r)
            forms[key] = form
    result = {}
    for key in sorted(forms):
        dtype, shape, split = forms[key]
        these, param = frozenset(ranks[key]), key.removeprefix("optimizer.").rpartition(".")[0]
        place = InPlan(plan, param, cut=True).on(these) if split else Whole(tuple(shape), these)
        result[key] = Kept((side, "state", key), DTYPES[dtype], place)
    return result
