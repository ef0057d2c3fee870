"""The text of an overlapped pair, and what its names say (shardc.passes.lower.pair makes it)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from shardc.ir.program import Program


@dataclass(frozen=True)
class Pair:
    """forward, backward: the stages of its halves, by number. graph: takes what both texts take, those of backward with
    names of their own, and returns `(what forward's text returns, the gradients that backward's text returns)`.
    """

    forward: int
    backward: int
    graph: fx.Graph


def prefix_of(forward: fx.Graph) -> str:
    """With what the names of the other half begin: `back_`, and more where names of a stage's forward begin so."""
    prefix = "back_"
    while any(n.name.startswith(prefix) for n in forward.nodes):
        prefix += "_"
    return prefix


def role(n: fx.Node) -> str:
    """ "mesh" or "rng" of what a text is given besides values: those of one microbatch; "" of anything else."""
    if n.name in ("mesh", "rng"):
        return n.name
    given = n.op == "placeholder" and n.meta.get("value") is None
    return "mesh" if given and re.fullmatch("back_+mesh", n.name) else ""


def shared(program: Program) -> frozenset[str]:
    """What both halves take under one name: it is the same for all microbatches."""
    return frozenset(("rng", *(p.name for p in program.params)))
