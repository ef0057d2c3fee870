"""Answer what core asks at run time: what optimizers get, the optimizer that costs assume, and its messages.

If the spec says `optimizer: {matrices: ...}` and no optimizer is known, costs assume Muon for the matrices between
tables and head (`shardc.matrices`), AdamW for the rest. `inspect`, `plan` and the proof have only the program;
`program.cost(optimizer=...)` counts another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardc.features.matrices.exchange import bytes_sent, planned
from shardc.features.matrices.owners import work
from shardc.features.matrices.program import axes, of_param
from shardc.features.matrices.stand_ins import MatrixStandIns
from shardc.features.matrices.whole import routes_of
from shardc.ir.program import Program
from shardc.runtime.step.engine_optimizer import LEARNING_RATE
from shardc.runtime.zero.named_parameters import inner_matrices
from shardc.runtime.zero.trained_params import trained_params

#: The parameters that optimizers get.
StandIns = MatrixStandIns
#: The cause of a collective, by its tag without a number.
CAUSES = {"matrices": "matrices of the optimizer"}


def assumed_optimizer(params: Any) -> list[torch.optim.Optimizer]:
    """Make the assumed optimizers. params: the argument of `optimizer=`."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in params:
        kinds[name in params.inner and p.dim() == 2].append((name, p))
    makes = {True: torch.optim.Muon, False: torch.optim.AdamW}
    return [makes[kind](some, lr=LEARNING_RATE) for kind, some in kinds.items() if some]


def messages(
    program: Program, rank: int, moved: Sequence[int] | None
) -> Iterator[tuple[tuple[str, ...], str, str, int]]:
    """Yield (axes, kind, cause, bytes) of each message of a rank in a step, to owners and back.

    moved: the bytes, if the optimizer is known.
    """
    if moved is None and not program.forward_only:
        inner, coords = inner_matrices(program) & trained_params(program), program.mesh.coords(rank)
        here = [p for p in program.params if p.name in inner and program.has(p, coords)]
        stepped = [m for p in here for m in of_param(program, p) if len(m.shape) == 2]  # by Muon
        routes = routes_of(program, rank, {m: work(m.shape) for m in stepped})
        dtypes = {p.name: p.dtype for p in program.params}
        moved = bytes_sent(planned(routes, dtypes)) if len(routes.ranks) > 1 else []
    yield from ((axes(program), "all_to_all", CAUSES["matrices"], nbytes) for nbytes in moved or ())
