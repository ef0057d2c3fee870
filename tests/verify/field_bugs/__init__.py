"""Bugs that trained wrong without an error, from public issue trackers, each in its situation here: a small model
(models.py), a spec, and what shardc does with them. tests/verify/test_field_bugs.py runs every one;
docs/generate.py makes the table of docs/field-bugs.md.

Only bugs of training, and only those that a step on CPUs can have: races of CUDA streams are not here.

bug        a bug, and parts of specs
models     small models
losses, layers, training
"""

from __future__ import annotations

from tests.verify.field_bugs.bug import Bug
from tests.verify.field_bugs.layers import MOE, RANDOM, SEQUENCES, TENSOR
from tests.verify.field_bugs.losses import ACCUMULATION, LOSSES, TIED
from tests.verify.field_bugs.training import BUFFERS, CLIPPING, DATA, UPDATES

CHAPTERS: dict[str, list[Bug]] = {
    "The loss and what it is divided by": LOSSES,
    "Gradients of several microbatches, buckets": ACCUMULATION,
    "Tied weights and stages": TIED,
    "Tensor and sequence parallel, views, uneven sizes": TENSOR,
    "Context parallel": SEQUENCES,
    "Random numbers": RANDOM,
    "Experts": MOE,
    "Clipping": CLIPPING,
    "Optimizer": UPDATES,
    "Batch norm": BUFFERS,
    "Order of data": DATA,
}
BUGS = [bug for chapter in CHAPTERS.values() for bug in chapter]
