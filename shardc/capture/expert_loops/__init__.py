"""Loops over experts as the experts op: what shardc.capture.masked_rows made of them, all experts on all rows, becomes
`torch.ops.shardc.experts`.

    before   y = zeros
             y = index_add(y, 0, t, where(m0, linear(silu(linear(x[t], up0)), down0) * w, 0))        one step an expert
             y = index_add(y, 0, t, where(m1, linear(silu(linear(x[t], up1)), down1) * w, 0))
    after    y = experts(x, index, w, stack([up0, up1]), stack([down0, down1]), None, None, "silu(x)", False)

A mixture of experts is several steps that add to (or fill) the same tensor and differ in their parameters and masks
only. The steps are laid on top of each other (`Unifier.unified`): what is the same in all is of the tokens, parameters
are stacked, and what else differs are weights of the choices. How the model writes it down does not matter: it is read
off what it computes. Whether masks exclude each other, and whether `index` says what they say, is tried on random
choices, as shardc.passes.canonical.grouped_mm does; and the whole is proven against eager as any captured graph is
(shardc.capture.compare_eager). What is not of this kind stays: slow, and right.

    steps.py       the turns of a loop: what was written to one tensor, one turn after the other
    unify.py       the turns on top of each other: what is the same, and what each expert has of its own
    products.py    what one expert computes, read off that
    trial.py       what is tried on random choices
    writer.py      the op in place of the loop

Rows that a model sorts by expert itself stay sorted here, each with one choice; that pass then takes the order away.
"""

from __future__ import annotations

from dataclasses import replace

from shardc.capture.expert_loops.writer import Writer
from shardc.ir.program import Program


def with_experts(program: Program) -> Program:
    """The program with its loops over experts as ops; notes for those that stay loops."""
    writer = Writer(program)
    writer.run()
    return replace(program, graph=writer.graph, notes=(*program.notes, *writer.notes))
