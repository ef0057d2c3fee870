"""Count what a step keeps, holds and sends of one layer, in numbers, as papers count it: what tests of closed forms
compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from shardc.cost import Cost
from shardc.cost.kept_activations import forwards, storages
from shardc.ir.graph import source_of, value_of
from shardc.layer_names import layer_of
from shardc.machine.work import Op, Sent
from shardc.runtime import ops


def _of_layer(cost: Cost, name: str, number: int) -> dict[str, fx.Node]:
    """The program's nodes in one layer of a list, by name."""
    nodes = (n for s in cost.program.stages for n in s.graph.nodes if n.op == "call_function")
    return {n.name: n for n in nodes if layer_of(source_of(n).module) == (name, str(number))}


def kept(cost: Cost, number: int, name: str = "h") -> int:
    """Bytes that a layer's forward keeps for its backward, of one microbatch."""
    nodes = _of_layer(cost, name, number)
    return sum(x.nbytes for x in storages(cost.dry_runs[0]) if x.op in nodes)


def kept_as_papers(cost: Cost, number: int, name: str = "h") -> float:
    """The same as "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022) counts:

    - a dropout keeps its mask, a byte an element, unless a region computes it again: a program computes all masks
      again;
    - numbers per row (a norm's mean and deviation) are left out;
    - what is gathered for a product (sequence parallelism) counts as the part that it was gathered from, as Megatron
      gathers it again in backward, while a program keeps it.
    """
    nodes, mesh = _of_layer(cost, name, number), cost.program.mesh
    found, rows = 0.0, math.prod(cost.program.inputs[0].shape)
    for x in (x for x in storages(cost.dry_runs[0]) if x.op in nodes):
        c = nodes[x.op].meta.get("collective")
        over = math.prod(map(mesh.size, c.axes)) if c is not None and c.kind == "all_gather" else 1
        found += x.nbytes / over if math.prod(x.shape) > rows else 0
    stages = {stage for stage, _ in forwards(cost.dry_runs[0])}
    assert stages == {0}
    for n in nodes.values():
        if n.target is ops.dropout and "region" not in n.meta:
            found += math.prod(value_of(n).local_shape(mesh))
    return found


def _first(cost: Cost) -> Iterator[Any]:
    return (w for a, part in cost.dry_runs[0].actions if a.microbatch == 0 for w in part.work)


def flops(cost: Cost, number: int, name: str = "h") -> int:
    """Of a layer's matrix products in one microbatch: forward, backward and recomputed."""
    nodes = _of_layer(cost, name, number)
    return sum(w.flops for w in _first(cost) if isinstance(w, Op) and w.of in nodes)


def sent(cost: Cost, number: int, name: str = "h") -> Counter[tuple[str, str]]:
    """{(axis, kind): bytes of whole tensors} of a layer's own collectives in one microbatch."""
    nodes = _of_layer(cost, name, number)
    found = Counter[tuple[str, str]]()
    for r in (w.record for w in _first(cost) if isinstance(w, Sent) and w.record.tag in nodes):
        found[r.axis, r.kind] += r.bytes
    return found


def state(cost: Cost) -> int:
    """Bytes of parameters, gradients and the optimizer's state between two steps, and of what a forward keeps: with few
    tokens these are copies of weights in another dtype.
    """
    r = cost.dry_runs[0]
    kinds = ("parameters", "gradients", "optimizer")
    return sum(x.nbytes for x in (*(x for x in r.resident if x.kind in kinds), *storages(r)))
