"""Bugs that trained wrong without an error, from public issue trackers, each in its situation here: a small model
(models.py), a spec, and what shardc does with them. tests/verify/test_field_bugs.py runs every one;
docs/generate.py makes the table of docs/measured/field-bugs.md.

Only bugs of training, and only those that a step on CPUs can have: races of CUDA streams are not here.

bug        a bug, and parts of specs
models     small models
functions  smaller ones, of a function each
losses, layers, training, batch, gradients
"""

from __future__ import annotations

from tests.verify.field_bugs import functions as functions  # fills the table of models
from tests.verify.field_bugs.batch import ALL_ROWS, STATE
from tests.verify.field_bugs.bug import Bug
from tests.verify.field_bugs.gradients import DERIVATIVES, OPS
from tests.verify.field_bugs.layers import MOE, RANDOM, SEQUENCES, TENSOR
from tests.verify.field_bugs.losses import ACCUMULATION, LOSSES, TIED
from tests.verify.field_bugs.training import BUFFERS, CLIPPING, DATA, UPDATES

CHAPTERS: dict[str, list[Bug]] = {
    "The loss and what it is divided by": LOSSES,
    "Losses over all rows": ALL_ROWS,
    "Gradients of several microbatches, buckets": ACCUMULATION,
    "Tied weights and stages": TIED,
    "Tensor and sequence parallel, views, uneven sizes": TENSOR,
    "Ops along a split dim": OPS,
    "Context parallel": SEQUENCES,
    "Random numbers": RANDOM,
    "Experts": MOE,
    "Clipping": CLIPPING,
    "Optimizer": UPDATES,
    "Gradients of gradients, and none": DERIVATIVES,
    "Batch norm": BUFFERS,
    "Buffers that forward updates": STATE,
    "Order of data": DATA,
}
BUGS = [bug for chapter in CHAPTERS.values() for bug in chapter]
