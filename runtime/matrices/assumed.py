"""Assume an optimizer for costs, where the spec says `optimizer: {matrices: ...}` but none is known.

It is Muon for the matrices between tables and head (`shardc.matrices`), AdamW for the rest. `inspect`, `plan` and the
proof have only the program; `program.cost(optimizer=...)` counts another one.
"""

from __future__ import annotations

from typing import Any

import torch

from shardc.ir.matrices import Matrix, inner
from shardc.ir.program import Program
from shardc.runtime.matrices.exchange import bytes_sent, planned
from shardc.runtime.matrices.owners import work
from shardc.runtime.matrices.routes import Routes
from shardc.runtime.matrices.shown import matrices_here
from shardc.runtime.matrices.whole import routes_of
from shardc.runtime.zero.trained_params import trained_params

#: Of every default optimizer.
LEARNING_RATE = 3e-4


def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    """Make the optimizers. params: the argument of `optimizer=`."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in params:
        kinds[name in params.inner and p.dim() == 2].append((name, p))
    makes = {True: torch.optim.Muon, False: torch.optim.AdamW}
    return [makes[kind](some, lr=LEARNING_RATE) for kind, some in kinds.items() if some]


def costs_of(program: Program, coords: dict[str, int]) -> dict[Matrix, float]:
    """Return {matrix that Muon would step: its work} of a rank."""
    names = inner(program) & trained_params(program)
    local = {p.name: None for p in program.params if p.name in names and program.has(p, coords)}
    return {m: work(m.shape) for m in matrices_here(program, local) if len(m.shape) == 2}


def routes(program: Program, rank: int) -> Routes:
    """Return the routes of one rank under this optimizer."""
    return routes_of(program, rank, costs_of(program, program.mesh.coords(rank)))


def messages(program: Program, rank: int) -> list[int]:
    """Return the bytes of each message of a rank in a step, to owners and back; [] with a single rank."""
    if program.matrices is None or program.forward_only:
        return []
    paths = routes(program, rank)
    return bytes_sent(planned(paths, {p.name: p.dtype for p in program.params})) if len(paths.ranks) > 1 else []
