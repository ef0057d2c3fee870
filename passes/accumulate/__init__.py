"""Accumulate: run a step in microbatches, in turn, with the same result (`batch: {microbatches: m}`).

Microbatches are placed as one more mesh axis, the innermost that splits the batch. The collectives that partition
inserts over it show what a step needs of *all* its rows. This pass replaces each kind by an equivalent that one process
computes in time instead of m ranks at once:

    before   n     = sum(labels != -100)                       +microbatch +dp      known from the batch alone
             n_sum = all_reduce(n, ("dp", "microbatch"))
             s     = sum(nll)                                  +microbatch +dp
             s_sum = all_reduce(s, ("dp", "microbatch"))
             loss  = s_sum / n_sum
    after    n_sum = total(mesh, 0, ("dp",))                   the prologue has run on all microbatches: its sum,
                                                               over dp too, once a step
             s     = sum(nll)                                  +dp
             loss  = s / n_sum                                 +dp: this rank's and this microbatch's summand; they are
                                                               added up after the last backward

So means weigh every counted token equally, however unevenly padding falls on microbatches, and dropout's masks are
those of the whole batch. Values that are gathered of the batch (all labels, counted on each rank) also come from the
prologue: as a sum of parts among zeros.

If an op that is not linear takes such a sum (a router's balance of experts: a product of two), the step first runs
forward of all microbatches once:

    before   loss = mul(f_sum, p_sum)
    after    f    = summed(f_sum, mesh, 1)                     f_sum, p_sum: each microbatch's summands; f, p: their
             p    = summed(p_sum, mesh, 2)                     sums over all. Backward: identity
             loss = to_partial(mul(f, p), mesh, "microbatch")  the first microbatch brings it; its gradient goes to all

That is exact as long as only the loss is computed from it, or no gradient goes through it. The interpreter adds
gradients, and a buffer's new value if each microbatch has a summand of it (a moving average of sums over rows,
`batch_norm: local`). All else that needs all rows at once (BatchNorm's statistics, contrastive losses) is refused, by
name.

one_microbatch.py writes the graph of one microbatch and the prologue; loss_sum_after_step.py moves the loss's sums over
ranks to the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardc.errors import Errors
from shardc.ir.mesh import MICROBATCH as AXIS
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.passes.accumulate.one_microbatch import OneMicrobatch, without_microbatches
from shardc.passes.annotate.batch_rows import disagreements
from shardc.passes.base import Pass


@dataclass(frozen=True)
class Accumulate(Pass):
    """Makes the program of one microbatch from one in which microbatches are an axis."""

    def applies(self, program: Program) -> bool:
        return AXIS in program.mesh.names

    def run(self, program: Program) -> Program:
        mesh, where = program.mesh, self.spec.where(("batch", "microbatches"))
        (stage,) = program.stages
        writer = OneMicrobatch(stage.graph, mesh, {p.name for p in program.params}, where)
        errors = Errors()
        with errors.collect():
            graph, prologue = writer.run()
        if errors.found:  # if an input's rows are another dim, its sums may look like sums of rows
            errors.found[:0] = disagreements(self.spec, program).values()
            errors.raise_any()
        cuts = {x.name: _cut(x.layout, mesh) for x in program.inputs}
        program = program.with_layouts({x.name: without_microbatches(x.layout) for x in program.stored})
        inputs = tuple(replace(x, microbatch=cuts[x.name]) for x in program.inputs)
        adds = iter(writer.adds)  # of each updated buffer, then of each output
        buffers = tuple(replace(b, adds=b.updated and next(adds)) for b in program.buffers)
        outputs = tuple(
            replace(o, layout=without_microbatches(o.layout), microbatch=_cut(o.layout, mesh), adds=next(adds))
            for o in program.outputs
        )
        return replace(
            program,
            mesh=Mesh(tuple((a, n) for a, n in mesh.axes if a != AXIS)),
            buffers=buffers,
            inputs=inputs,
            outputs=outputs,
            microbatches=mesh.size(AXIS),
            stages=(Stage(graph, stage.name, outputs=stage.outputs),),
            prologue=Stage(prologue, "counts") if prologue is not None else None,
            notes=(*program.notes, *writer.notes),
        )


def _cut(layout: Layout, mesh: Mesh) -> Shard | None:
    """Return how a rank's part of an input or output is cut into microbatches; None if it is not."""
    s = layout[AXIS]
    return replace(s, split=layout.local_split(AXIS, mesh)) if isinstance(s, Shard) else None
