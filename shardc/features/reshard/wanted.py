"""Choose the weights that move between two programs, and find an engine's local tensors of them.

Of a parameter a rank may have two forms: its stretch as stored, and, at ZeRO 1 and 2 with another dtype to compute in,
a whole copy in that dtype. If the other program needs that dtype, it is read from the copy. And a new copy takes what
it can from its own rank's new stretch.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.features.reshard.moves import Kept, Key, Wanted
from shardc.features.reshard.places import InPlan, Plan
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import kept
from shardc.runtime.state.sources import check_tensors

Side = Literal["from", "to"]


def weights(old: Plan, new: Plan, *, all_buffers: bool) -> tuple[list[Wanted], list[Wanted]]:
    """Return (first, second) moves of parameters and common buffers; the second may read the first's.

    all_buffers: both need all buffers of a checkpoint. Raises ShardcError for programs of different models.
    """
    check(old, new, all_buffers=all_buffers)
    first, second = list[Wanted](), list[Wanted]()
    for name, p in new.params.items():
        stored, copy = forms("to", new, p, name)
        of, copied = forms("from", old, old.params[name], name)
        first.append(Wanted(name, copied if copied is not None and copied.dtype == stored.dtype else of, stored))
        if copy is not None:
            have = copied if copied is not None and copied.dtype == copy.dtype else of
            second.append(Wanted(name, have, copy, beside=stored))
    for name, b in new.buffers.items():
        if name in old.buffers:
            a = old.buffers[name]
            ends = (("from", old, a), ("to", new, b))
            have, need = (Kept((side, "buffer", x.name), x.dtype, InPlan(plan, x.name, name)) for side, plan, x in ends)
            first.append(Wanted(name, have, need))
    return first, second


def forms(side: Side, plan: Plan, p: Param, name: str) -> tuple[Kept, Kept | None]:
    """Return a rank's forms of a parameter: (as stored, the whole copy in another dtype or None)."""
    bucket, zero = plan.program.bucket(p), plan.zero(p)
    compute = bucket.compute if bucket is not None and zero in (1, 2) else None
    cut = zero == 3 or compute not in (None, p.dtype)
    stored = Kept((side, "own" if cut else "whole", p.name), p.dtype, InPlan(plan, p.name, name, cut))
    if zero == 3 or not cut or compute is None:
        return stored, None  # also where it is a view of the copy
    return stored, Kept((side, "whole", p.name), compute, InPlan(plan, p.name, name))


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
