"""Combine the ranks' records of expert routing in a step (`program.engine(..., routing=True)`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.runtime.mesh.step_context import Routing
from shardc.runtime.ops.experts.parallel import experts_route


@dataclass(frozen=True)
class Load:
    """The load of one layer of experts, over a step of the global batch.

    tokens: choices that each expert got. dropped: share of all choices that no expert took. imbalance: rows of the
    busiest rank over those of the average one; 1 = even.
    """

    module: str
    tokens: tuple[int, ...]
    dropped: float
    imbalance: float

    def __str__(self) -> str:
        drops = f", {self.dropped:.1%} dropped" if self.dropped else ""
        return (
            f"{self.module or 'experts'}: {min(self.tokens)}-{max(self.tokens)} tokens an expert, busiest rank"
            f" x{self.imbalance:.2f}{drops}"
        )


class Loads:
    """Combines the ranks' routing records. Collective over the mesh."""

    def __init__(self, program: Program, mesh: Any) -> None:
        self.mesh = mesh
        #: (op, module, experts, ranks with the same tokens, ranks with the layer) of each.
        self.layers: list[tuple[str, str, int, int, int]] = []
        for stage in program.stages:
            for node in stage.graph.find_nodes(op="call_function", target=experts_route):
                index, _, _, experts, *_ = cast(Any, node.args)
                having = program.mesh.world // (program.mesh.size(program.axis) if program.axis else 1)
                split = [a for a, _ in index.meta["value"].layout.shards(0)]
                same = having // math.prod(program.mesh.size(a) for a in split)
                self.layers.append((node.name, source_of(node).module, int(experts), same, having))

    def __call__(self, routings: Sequence[Routing]) -> tuple[Load, ...]:
        """Return the loads of all layers, in their order, on every rank."""
        if not self.layers:
            return ()
        row = {name: i for i, (name, *_) in enumerate(self.layers)}
        width = max(experts for _, _, experts, _, _ in self.layers)
        # tokens of each expert, dropped, rows here
        counts = torch.zeros(len(self.layers), width + 2, dtype=torch.float64)
        for tag, chosen, rows in routings:
            if tag in row:
                *tokens, dropped = chosen.tolist()
                counts[row[tag], : len(tokens)] += torch.tensor(tokens)
                counts[row[tag], -2:] += torch.tensor([dropped, rows])
        names = self.mesh.layout.names
        local = counts.to(self.mesh.device)
        total = self.mesh.all_reduce(local, names, direction="update", tag="routing").cpu()
        most = self.mesh.all_reduce(local[:, -1].contiguous(), names, op="max", direction="update", tag="routing").cpu()
        loads = []
        for i, (_, module, experts, same, having) in enumerate(self.layers):
            load, none, mean = total[i, :experts] / same, float(total[i, -2]) / same, float(total[i, -1]) / having
            share = none / max(float(load.sum()) + none, 1)
            loads.append(Load(module, tuple(map(round, load.tolist())), share, float(most[i]) / mean if mean else 1.0))
        return tuple(loads)
