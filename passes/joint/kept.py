"""Decide which of forward's values are kept, on the device or the host, and which are recomputed.

Values of a region (shardc.passes.recompute) that it does not keep are recomputed. Values that have ops in common are
recomputed together, when backward needs the first of them: a *plan*.

    region h.0      n = norm(x)     backward needs n and g     one plan: n, g     x is kept
                    g = linear(n)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import fx

from shardc.ir.graph import operands_of, producer_of
from shardc.ir.program import Program
from shardc.passes.joint.derivatives.template import Made
from shardc.runtime.ops.local_math import UNEQUAL


class Wanted(NamedTuple):
    """A result ("y") of a call of forward, or a result ("t") of one of the lines in its place."""

    node: fx.Node
    kind: Literal["y", "t"] = "y"
    index: int = 0  # type: ignore[assignment]  # no tuple of it is searched


@dataclass(eq=False)
class RecomputePlan:
    """Calls that backward runs again, in order. wanted: their results that backward needs."""

    nodes: tuple[fx.Node, ...]
    wanted: list[Wanted]


class Recomputed:
    """Divides the values that backward needs into kept and recomputed ones.

    held: values kept from forward. plans: by value, how the others are recomputed. host: by held value that only ops in
    regions with `offload: cpu` need, its region; it may leave the device.

    needs: (op whose backward needs it, value) pairs. through: the values needed when a recomputed op takes a value:
    that value, or its sources. part_of: the value of which a value is a part, in the same memory. Such a part goes to
    the host separately, as backward may need one part and not the others.
    """

    def __init__(
        self,
        program: Program,
        graph: fx.Graph,
        needs: Iterable[tuple[fx.Node, Wanted]],
        through: Callable[[Made], Iterable[Wanted]],
        part_of: Callable[[Made], Made | None],
    ) -> None:
        self._through, self._part_of = through, part_of
        self._parents = {r.name: r.parent for r in program.regions}
        self._offloads = {r.name for r in program.regions if r.offload}
        self._here: set[Wanted] = set()
        self._regions: dict[Wanted, str] = {}
        self._requested: dict[str, set[Wanted]] = {}
        self._place = {n: i for i, n in enumerate(graph.nodes)}
        self.held: set[Wanted] = set()
        self.plans: dict[Wanted, RecomputePlan] = {}
        for by, w in needs:
            chain = self._chain(by)
            self._decide(chain, chain, w)
        for region in sorted(self._parents, key=self._depth, reverse=True):
            self._plan(region)
        self.host = {w: region for w, region in self._regions.items() if w not in self._here}

    def _plan(self, region: str) -> None:
        """Divide the ops that a region recomputes into plans: those that depend on each other are together."""
        wanted = [w for w in self._requested.get(region, ()) if w not in self.held]
        together: dict[fx.Node, list[fx.Node]] = {}
        edges: list[tuple[fx.Node, fx.Node]] = []
        chain = self._chain_of(region)
        todo = [w.node for w in wanted]
        while todo:
            n = todo.pop()
            if n in together:
                continue
            together[n] = [n]
            for producer in dict.fromkeys(map(producer_of, operands_of(n))):
                w = Wanted(producer[0], "y", producer[1])
                if self._recomputes(w, region) and w not in self.held:
                    todo.append(producer[0])
                    edges.append((n, producer[0]))
                else:
                    for x in self._through(producer):
                        self._decide(chain[1:], chain, x)
        for a, b in edges:
            few, many = sorted((together[a], together[b]), key=len)
            if few is not many:  # a node moves to a list at least twice as long: O(n log n) moves in all
                many += few
                together.update(dict.fromkeys(few, many))
        plans = {id(s): RecomputePlan(tuple(sorted(s, key=self._place.__getitem__)), []) for s in together.values()}
        for w in wanted:
            self.plans[w] = plan = plans[id(together[w.node])]
            plan.wanted.append(w)

    def _decide(self, regions: list[str], enclosing: list[str], w: Wanted) -> None:
        """Assign a value to the innermost region that may recompute it; if there is none, keep it.

        regions: those that may. enclosing: all regions around its reader.
        """
        region = next((r for r in regions if self._recomputes(w, r)), None)
        # what the lines of such an op return may be its operand on some ranks only: all ranks keep it
        if region is None or (w.kind == "t" and w.node.target in UNEQUAL):
            self.held.add(w)
            offloads = next((r for r in enclosing if r in self._offloads), None)
            if offloads is None:
                self._here.add(w)
            else:
                self._regions.setdefault(w, offloads)
        else:
            self._requested.setdefault(region, set()).add(w)

    def _chain_of(self, region: str) -> list[str]:
        chain = []
        while region:
            chain.append(region)
            region = self._parents[region]
        return chain

    def _chain(self, n: fx.Node) -> list[str]:
        return self._chain_of(n.meta.get("region", ""))

    def _depth(self, region: str) -> int:
        return len(self._chain_of(region))

    def _recomputes(self, w: Wanted, region: str) -> bool:
        """Return whether a region recomputes it. It does not recompute a part of what it holds on the host."""
        if not self._inside(w.node, region):
            return False
        whole = self._part_of((w.node, w.index)) if w.kind == "y" else None
        away = whole is not None and not self._offloads.isdisjoint(self._chain_of(region))
        return not away or whole is None or self._inside(whole[0], region)

    def _inside(self, n: fx.Node, region: str) -> bool:
        """Return whether the region recomputes the op's result."""
        return region in self._chain(n) and region not in n.meta.get("kept", ())
