"""Cut parameters into the matrices that an optimizer needs whole (`optimizer: {matrices: ...}`).

    whole      the parameter as the model has it: what one device's optimizer steps
    experts    each entry of dim 0 of a parameter of three dims or more
    heads      of weights that make queries, keys and values: each head's rows (attention ops show how many)
    {0: 3}     so many equal parts of a dim, or parts of these sizes

See program.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.matrices.program import Cut, Cuts, fault, with_cuts
from shardc.features.matrices.section import rules
from shardc.ir.graph import operands_of
from shardc.ir.patterns import names_weight
from shardc.ir.program import Program
from shardc.passes import Entry
from shardc.passes.annotate.kv_heads import shape_of, source_params
from shardc.passes.base import Pass
from shardc.rules import attention
from shardc.spec import Spec
from shardc.spec.names import Names

aten = torch.ops.aten


@dataclass(frozen=True)
class Matrices(Pass):
    """Records the cuts of every parameter; the graph stays the same."""

    def applies(self, program: Program) -> bool:
        return rules(self.spec) is not None

    def run(self, program: Program) -> Program:
        note = (
            "optimizer: {matrices: ...}: the traffic to owners of matrices and back is priced for Muon (AdamW for"
            " tables, head, norms and biases); program.cost(optimizer=...) prices it for another optimizer"
        )
        return replace(with_cuts(program, cuts_of(self.spec, program)), notes=(*program.notes, note))


#: Each with the pass that it follows.
PASSES = (("stack_experts", Entry("matrices", Matrices, "experts are matrices now, and attention ops show heads")),)
