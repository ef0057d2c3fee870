"""Answer what core asks at run time: what optimizers get, and the optimizer that costs assume.

If the spec says `optimizer: {matrices: ...}` and no optimizer is known, costs assume Muon for the matrices between
tables and head (`shardc.matrices`), AdamW for the rest. `inspect`, `plan` and the proof have only the program;
`program.cost(optimizer=...)` counts another one.
"""

from __future__ import annotations

from shardc.features.matrices.stand_ins import MatrixStandIns

#: The parameters that optimizers get.
StandIns = MatrixStandIns
#: The cause of a collective, by its tag without a number.
CAUSES = {"matrices": "matrices of the optimizer"}
#: The optimizer that costs assume: Muon for the matrices, AdamW for the rest.
ASSUMED_OPTIMIZER = "muon"
