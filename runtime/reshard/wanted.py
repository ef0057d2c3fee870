"""Which weights are to move from one program's ranks to another's, and the local tensors of an engine that they are
read from and written to.

Of a parameter a rank may have two forms: its stretch as stored, and, at ZeRO 1 and 2 with another dtype to compute in,
a whole copy in that dtype. Where the other program wants that dtype, it is had from the copy. And a new copy takes from
its own rank's new stretch what that has.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.ir.stored import Param
from shardc.runtime.reshard.moves import Kept, Key, Wanted
from shardc.runtime.reshard.places import Lying, Plan
from shardc.runtime.state.boxes import kept
from shardc.runtime.state.sources import check_names

Side = Literal["from", "to"]


def weights(old: Plan, new: Plan, *, all_buffers: bool) -> tuple[list[Wanted], list[Wanted]]:
    """Parameters, and the buffers that both programs have: (first, what may be read from what came first).

    all_buffers: both have to have all that a checkpoint has. Raises ShardcError for programs of different models.
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
            have, need = (Kept((side, "buffer", x.name), x.dtype, Lying(plan, x.name, name)) for side, plan, x in ends)
            first.append(Wanted(name, have, need))
    return first, second


def forms(side: Side, plan: Plan, p: Param, name: str) -> tuple[Kept, Kept | None]:
    """(a parameter as it is stored, the whole copy in another dtype if there is one), of a rank of a program."""
    bucket, zero = plan.program.bucket(p), plan.zero(p)
    compute = bucket.compute if bucket is not None and zero in (1, 2) else None
    cut = zero == 3 or compute not in (None, p.dtype)
    stored = Kept((side, "own" if cut else "whole", p.name), p.dtype, Lying(plan, p.name, name, cut))
    if zero == 3 or not cut or compute is None:
        return stored, None  # or a view of the copy
    return stored, Kept((side, "whole", p.name), compute, Lying(plan, p.name, name))


def local_tensors(side: Side, end: Any) -> dict[Key, Tensor]:
    """The local tensors of an end's parameters and buffers, in all forms."""
    whole = {n: end.buckets.whole(n) for n in end.owned}
    found: dict[Key, Tensor] = {(side, "own", n): p.detach() for n, p in end.owned.items()}
    found |= {(side, "whole", n): x for n, x in whole.items() if x is not None}
    return found | {(side, "buffer", n): b for n, b in end.buffers.items()}


def check(old: Plan, new: Plan, *, all_buffers: bool) -> None:
    """Raises ShardcError for programs of other numbers of ranks, or of different models. all_buffers: of `weights`."""
    before, after = old.program.mesh, new.program.mesh
    if before.world != after.world:
        fault = f"the mesh {before} has {before.world} ranks, and {after} has {after.world}"
        fix = "give both as many ranks; to go on with other ranks, save, and load there"
        raise ShardcError(fault, where="mesh", fix=fix)
    errors = Errors()
    have, want = (_shapes(plan, all_buffers) for plan in (old, new))
    check_names(errors, want, have, want, "the engine whose weights are to move")
    errors.raise_any()


def _shapes(plan: Plan, all_buffers: bool) -> dict[str, tuple[int, ...]]:
    found = {n: p.shapes[n] for n, p in plan.params.items()}
    return found | {b.fqn: b.shape for b in kept(plan.program) if all_buffers}
