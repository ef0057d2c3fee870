"""Answer what core asks at run time: what optimizers get, and the optimizer that costs assume.

If the spec says `optimizer: {matrices: ...}` and no optimizer is known, costs assume Muon for the matrices between
tables and head (`shardc.matrices`), AdamW for the rest. `inspect`, `plan` and the proof have only the program;
`program.cost(optimizer=...)` counts another one.
"""

from __future__ import annotations

from typing import Any

import torch

from shardc.features.matrices.stand_ins import MatrixStandIns
from shardc.runtime.step.engine_optimizer import LEARNING_RATE

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
