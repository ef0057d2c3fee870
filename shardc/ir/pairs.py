"""The graph of an overlapped pair, and what its names say (shardc.passes.joint.pair makes it)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from shardc.ir.program import Program


@dataclass(frozen=True)
class Pair:
    """kind: "FB": a forward beside a backward; "FF": beside another forward. first, then: the stages of its halves, by
    number. graph: takes what both graphs take, those of the second with names of their own, and returns `(what the
    first graph returns, what the second returns)`: a forward's results, a backward's gradients.
    """

    kind: str
    first: int
    then: int
    graph: fx.Graph

    @property
    def key(self) -> tuple[str, int, int]:
        """As `shardc.runtime.schedule.Action.of_pair`."""
        return self.kind, self.first, self.then


def prefix_of(kind: str, forward: fx.Graph) -> str:
    """With what the names of the second half begin: `back_` or `next_`, and more where names of the first half's stage
    begin so.
    """
    prefix = "back_" if kind == "FB" else "next_"
    while any(n.name.startswith(prefix) for n in forward.nodes):
        prefix += "_"
    return prefix


def role(n: fx.Node) -> str:
    """ "mesh" or "rng" of what a graph is given besides values: those of one microbatch; "" of anything else."""
    if n.name in ("mesh", "rng"):
        return n.name
    no_value = n.op == "placeholder" and n.meta.get("value") is None
    return "mesh" if no_value and re.fullmatch("(back|next)_+mesh", n.name) else ""


def shared(program: Program) -> frozenset[str]:
    """What both halves take under one name: it is the same for all microbatches."""
    return frozenset(("rng", *(p.name for p in program.params)))
