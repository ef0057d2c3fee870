"""Choose the weights that move between two programs, and find an engine's local tensors of them.

At ZeRO 1 and 2 a rank stores a stretch of a parameter, and has a copy of all of it, perhaps in another dtype to compute
in. The old copy is read if its dtype fits. The new copy is not moved: it is gathered from the stretches, as after an
update.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.features.reshard.moves import Kept, Key, Wanted
from shardc.features.reshard.places import InPlan, Plan
from shardc.runtime.state.boxes import kept
from shardc.runtime.state.fitting import check_tensors

Side = Literal["from", "to"]


def weights(old: Plan, new: Plan, *, all_buffers: bool) -> list[Wanted]:
    """Return the moves of parameters and common buffers.

    all_buffers: both need all buffers of a checkpoint. Raises ShardcError for programs of different models.
    """
    check(old, new, all_buffers=all_buffers)
    wanted = []
    for name, p in new.params.items():
        need = Kept(("to", "own", p.name), p.dtype, InPlan(new, name, cut=True))
        wanted.append(Wanted(name, _read(old, name, p.dtype), need))
    for name, b in new.buffers.items():
        if name in old.buffers:
            ends = (("from", old, old.buffers[name]), ("to", new, b))
            have, need = (Kept((side, "buffer", x.name), x.dtype, InPlan(plan, name)) for side, plan, x in ends)
            wanted.append(Wanted(name, have, need))
    return wanted


def _read(plan: Plan, name: str, dtype: torch.dtype) -> Kept:
    """Return the form of a parameter that is read: whole, unless ZeRO 3 cut it, or the copy is in a third dtype."""
    p = plan.params[name]
    bucket = plan.program.bucket(p)
    zero = bucket.zero if bucket is not None else 0
    whole = (bucket.compute if bucket is not None and zero else None) or p.dtype
    cut = zero == 3 or whole not in (p.dtype, dtype)
    return Kept(("from", "own" if cut else "whole", p.name), p.dtype if cut else whole, InPlan(plan, name, cut))


def local_tensors(side: Side, end: Any) -> dict[Key, Tensor]:
    """Return the local tensors of an end's parameters and buffers, in all forms."""
    whole = {n: end.buckets.kept_whole(n) for n in end.owned}
    tensors: dict[Key, Tensor] = {(side, "own", n): p.detach() for n, p in end.owned.items()}
    tensors |= {(side, "whole", n): x for n, x in whole.items() if x is not None}
    return tensors | {(side, "buffer", n): b for n, b in end.buffers.items()}


def check(old: Plan, new: Plan, *, all_buffers: bool) -> None:
    """Raise ShardcError for programs of different models, or numbers of ranks. all_buffers: of `weights`."""
    before, after = old.program.mesh, new.program.mesh
    if before.world != after.world:
        fault = f"the mesh {before} has {before.world} ranks, and {after} has {after.world}"
        fix = "use the same number of ranks for both; to continue on another number of ranks, save, and load there"
        raise ShardcError(fault, where="mesh", fix=fix)
    errors = Errors()
    have, want = (_shapes(plan, all_buffers) for plan in (old, new))
    check_tensors(errors, want, have, want, "the engine whose weights are to move")
    errors.raise_any()


def _shapes(plan: Plan, all_buffers: bool) -> dict[str, tuple[int, ...]]:
    shapes = {n: p.shapes[n] for n, p in plan.params.items()}
    return shapes | {b.fqn: b.shape for b in kept(plan.program) if all_buffers}
