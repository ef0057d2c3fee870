"""Data: the gradients that are summed over ranks, in buckets, in the order in which backward finishes them.

    before   wte.weight  reduce (dp)    order 2        h.0.qkv.weight  reduce (dp)   order 1       ln_f.weight  reduce (dp, tp)  order 0
    after    bucket 0 over (dp, tp): ln_f.weight       bucket 1 over (dp): h.0.qkv.weight, wte.weight

A parameter's gradient is finished when backward has run the op that used it *first* in forward, which the graph tells; so there
is no warm-up step and no rebuilding (compare torch's DDP: Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from shardc.mesh import Mesh
from shardc.placement import Varying
from shardc.program import Bucket, Param, Program


@dataclass(frozen=True)
class Data:
    """Lifts the parameters' `vary` out into bucketed gradient reductions.

    bucket_mb: size of a bucket in MiB. The last bucket to finish is the one nobody can overlap with, so it is kept small.
    reduce: dtype in which gradients are summed; None: each parameter's own.
    """

    bucket_mb: float = 25.0
    reduce: torch.dtype | None = None

    def run(self, program: Program, mesh: Mesh) -> Program:
        first_use: dict[str, int] = {}
        for stage in program.stages:
            for i, node in enumerate(stage.graph.nodes):
                for used in node.all_input_nodes:
                    first_use.setdefault(used.name, i)
        last = len(first_use) + sum(len(s.graph.nodes) for s in program.stages)
        finish = sorted(program.params, key=lambda p: -first_use.get(p.name, -last))
        order = {p.name: i for i, p in enumerate(finish)}

        def reduced(p: Param) -> Param:
            axes = tuple(a for a, placement in p.layout.items if isinstance(placement, Varying)) if p.requires_grad else ()
            return replace(p, reduce=mesh.collapse(axes), order=order[p.name])

        params = tuple(reduced(p) for p in program.params)
        buckets: list[Bucket] = []
        open_at: dict[tuple[tuple[str, ...], torch.dtype], tuple[int, int]] = {}  # parameters of one dtype together
        for p in sorted(params, key=lambda p: p.order):
            if not p.reduce:
                continue
            dtype = self.reduce if self.reduce is not None and p.dtype.is_floating_point else p.dtype
            key, size = (p.reduce, p.dtype), replace(p.value, dtype=dtype).nbytes(mesh)
            at, filled = open_at.get(key, (-1, 0))
            if at < 0 or filled + size > self.bucket_mb * 2**20:
                at, filled = len(buckets), 0
                buckets.append(Bucket(p.reduce, dtype, ()))
            buckets[at] = replace(buckets[at], params=(*buckets[at].params, p.name))
            open_at[key] = (at, filled + size)
        # the engine starts buckets in one order on all ranks: the one in which their last gradients finish
        number = {p.name: p.order for p in params}
        buckets.sort(key=lambda b: max(number[n] for n in b.params))
        index = {name: i for i, b in enumerate(buckets) for name in b.params}
        return replace(program, params=tuple(replace(p, bucket=index.get(p.name, -1)) for p in params), buckets=tuple(buckets))
