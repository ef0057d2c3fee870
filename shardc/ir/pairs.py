"""Define the graph of an overlapped pair, and what its names mean (shardc.passes.joint.pair makes it)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from shardc.ir.program import Program


@dataclass(frozen=True)
class Pair:
    """A forward beside a backward (kind "FB") or beside another forward ("FF"). first, then: their stages.

    graph: takes what both graphs take, with other names for the second, and returns `(what the first graph returns,
    what the second returns)`: a forward's results, a backward's gradients.
    """

    kind: str
    first: int
    then: int
    graph: fx.Graph

    @property
    def key(self) -> tuple[str, int, int]:
        """The key in the form of `shardc.runtime.schedule.Action.of_pair`."""
        return self.kind, self.first, self.then


def prefix_of(kind: str, forward: fx.Graph) -> str:
    """Return the prefix of the second half's names: `back_` or `next_`, longer if the first half uses it."""
    prefix = "back_" if kind == "FB" else "next_"
    while any(n.name.startswith(prefix) for n in forward.nodes):
        prefix += "_"
    return prefix


def role(n: fx.Node) -> str:
    """Return "mesh" or "rng" if a placeholder is one (of either half); "" for anything else."""
    if n.name in ("mesh", "rng"):
        return n.name
    no_value = n.op == "placeholder" and n.meta.get("value") is None
    return "mesh" if no_value and re.fullmatch("(back|next)_+mesh", n.name) else ""


def shared(program: Program) -> frozenset[str]:
    """Return the names that both halves share, as the values are the same for all microbatches."""
    return frozenset(("rng", *(p.name for p in program.params)))
