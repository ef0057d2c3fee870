"""Decide which results one region keeps, by `save`, by `recompute` or by the budget, and the outcome."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.machine.assumed import byte_seconds
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.saved import LocalTypes, saved_of
from shardc.passes.recompute.fewest_bytes import STATISTIC, MinCut
from shardc.passes.recompute.kinds import kinds
from shardc.rules.core.registry import seconds_of
from shardc.runtime import ops
from shardc.runtime.ops.local_math import UNEQUAL
from shardc.spec import Checkpoint as Entry
from shardc.spec.step_sections import CHEAP

#: Ops with small results that ranks had to exchange: always kept.
ROUTING = (ops.experts_route, ops.experts_keep, ops.attention_reach)


class StageGraph:
    """A stage's graph with what backward keeps of every op. base: the node that a node views, or itself."""

    def __init__(self, graph: fx.Graph, program: Program, rules: Rules) -> None:
        self.nodes = list(graph.nodes)
        self._types, self._mesh = LocalTypes(program), program.mesh
        inside = any("region" in n.meta for n in self.nodes)
        self.saved = saved_of(program, graph, rules) if inside else {}
        self.base: dict[fx.Node, fx.Node] = {}
        stored = {"mesh", *(p.name for p in program.params), *(b.name for b in program.buffers)}
        self.weights: set[fx.Node] = set()
        self.stored: set[fx.Node] = set()  # available even if no region holds them
        self.parents = {r.name: r.parent for r in program.regions}
        self.held: dict[str, frozenset[fx.Node]] = {}  # by region, for regions that are decided
        self._costs: dict[fx.Node, float] = {}
        for n in self.nodes:
            self.base[n] = n
            if n.op == "placeholder":
                self.weights |= {n} if n.name in stored else set()
                self.stored = set(self.weights)
                continue
            if n.op != "call_function" or not inside:
                continue
            if n.all_input_nodes and all(u in self.weights for u in n.all_input_nodes):
                self.weights.add(n)
            if n.target is operator.getitem:
                whole: Any = n.args[0]
                views = self.saved[whole].views if whole in self.saved else ()
                viewed = views[n.args[1]] if isinstance(n.args[1], int) and n.args[1] < len(views) else None
            else:
                (viewed,) = self.saved[n].views if len(self.saved[n].views) == 1 else (None,)
            self.base[n] = n if viewed is None else self.base[viewed]

    def members(self, region: str) -> list[fx.Node]:
        """Return the ops of a region, and of regions inside it, in order."""
        names = {region}
        names |= {name for name in self.parents if names & set(self._around(name))}
        return [n for n in self.nodes if n.meta.get("region") in names]

    def _around(self, region: str) -> Iterable[str]:
        while region := self.parents[region]:
            yield region

    def nbytes(self, node: fx.Node) -> int:
        """Return the bytes of a node's own result on one rank: 0 for a view."""
        if self.base[node] is not node:
            return 0
        return sum(v.nbytes() for v in self._types.of(node))

    def read(self, node: fx.Node) -> int:
        """Return the bytes of an op's operands on one rank."""
        return sum(v.nbytes() for v in self._types.call(node).operands)

    def cost(self, node: fx.Node) -> float:
        """Return the seconds of running an op again."""
        if node not in self._costs:
            self._costs[node] = self._cost(node)
        return self._costs[node]

    def _cost(self, node: fx.Node) -> float:
        if self.base[node] is not node or node.target is operator.getitem:
            return 0.0
        c: Collective | None = node.meta.get("collective")
        sent = c.forward_bytes * byte_seconds(c.kind, self._mesh.group(0, c.axes)) if c and c.kind != "none" else 0.0
        return seconds_of(self._types.call(node)) + sent


@dataclass(frozen=True)
class Outcome:
    """The outcome of a choice. held: values without parameters. again: the collectives that are repeated.

    kept, dropped: bytes. cost: of computing again, in seconds.
    """

    kept: int
    dropped: int
    again: tuple[fx.Node, ...]
    cost: float
    held: frozenset[fx.Node]


@dataclass
class Choice:
    """Decides which results one region keeps. members: its ops.

    kept_positions: by key, what equal regions keep, as positions in a region: equal layers are decided once.
    """

    graph: StageGraph
    region: str
    entry: Entry
    members: list[fx.Node]
    kept_positions: dict[Any, list[int]]

    def run(self) -> Outcome:
        self.inside = set(self.members)
        self._find_needed()
        if self.entry.budget is not None:
            keep = self._keep_within_budget(self.entry.budget)
        elif self.entry.recompute is not None:
            keep = self._fewest(set(CHEAP if self.entry.recompute == "cheap" else self.entry.recompute))
        else:
            words = set(self.entry.save or ())
            keep = {
                n for n in self.members if n.target is not operator.getitem and words & kinds(n, self.graph.weights)
            }
        keep |= {n for n in self.members if n.target in ROUTING}
        outcome = self._outcome_of(keep)
        self.graph.held[self.region] = outcome.held
        for n in self.members:
            whole: Any = n.args[0] if n.target is operator.getitem else n
            if whole in keep and (
                whole in self.own or whole in outcome.held or any(u in outcome.held for u in whole.users)
            ):
                n.meta["kept"] = (*n.meta.get("kept", ()), self.region)
        for n in outcome.again:
            n.meta["again"] = n.meta.get("again", 0) + 1
        return outcome

    def _find_needed(self) -> None:
        """Find what backward keeps of the region: results, ops' internal values, and what inner regions hold."""
        self.wanted: dict[fx.Node, None] = {}
        self.own: dict[fx.Node, int] = {}
        for n in self.members:
            saved = self.graph.saved.get(n)
            if saved is None or n.meta["region"] != self.region:
                continue
            self.wanted |= {self.graph.base[x]: None for x in saved.operands}
            if saved.results:
                self.wanted[n] = None
            if saved.own:
                self.own[n] = saved.own
        for name, parent in self.graph.parents.items():
            if parent == self.region:
                self.wanted |= dict.fromkeys(self.graph.held.get(name, ()))

    def _outcome_of(self, keep: set[fx.Node]) -> Outcome:
        """Return the outcome of keeping the results of these ops, as far as they are needed."""
        graph = self.graph
        held: dict[fx.Node, None] = {}
        needed: set[fx.Node] = set()

        def need(n: fx.Node) -> None:
            whole: Any = n.args[0] if n.target is operator.getitem else n
            if n in self.inside and whole not in keep:
                needed.add(n)
            elif graph.base[n] not in graph.stored:
                held[graph.base[n] if graph.base[n] not in self.inside else n] = None

        for n in self.wanted:
            need(n)
        kept_own = sum(size for n, size in self.own.items() if n in keep)
        needed.update(n for n in self.own if n not in keep)
        for n in reversed(self.members):
            if n in needed:
                for u in n.all_input_nodes:
                    if u.meta.get("value") is not None:
                        need(u)
        bases = {graph.base[n] for n in held}
        # values of weights alone are one copy for all microbatches (shardc.passes.weight_casts)
        kept = kept_own + sum(graph.nbytes(n) for n in bases if n not in graph.weights)
        dropped = sum(graph.nbytes(n) for n in self.wanted if n in needed) + sum(
            size for n, size in self.own.items() if n in needed
        )
        again = tuple(
            n
            for n in self.members
            if n in needed
            and (c := n.meta.get("collective")) is not None
            and c.kind != "none"
            and n.target is not ops.total
        )
        return Outcome(kept, dropped, again, sum(map(graph.cost, needed)), frozenset(held))

    def _fewest(self, again: set[str]) -> set[fx.Node]:
        """Return the ops to keep for the fewest bytes, if only ops of these kinds may run again."""
        graph, cut = self.graph, MinCut()
        dear: set[fx.Node] = set()  # ops that do not run again

        def held(u: fx.Node) -> fx.Node | None:
            """Return what the region holds for u, inside or from outside; None if it is available anyway."""
            u = u if u in self.inside else graph.base[u]
            return None if graph.base[u] in graph.stored or u in graph.weights or u.meta.get("value") is None else u

        def take(n: fx.Node, nbytes: int | None, whole: fx.Node, name: Any = None) -> None:
            operands = [h for u in whole.all_input_nodes if (h := held(u)) is not None]
            for u in operands:
                if u not in self.inside:
                    cut.value(u, graph.nbytes(u), None)
            cut.value(name or n, nbytes, None if whole in dear else operands)

        for n in self.members:
            whole: Any = n.args[0] if n.target is operator.getitem else n
            if n is whole and not self._runs_again(n, again):
                dear.add(n)
            view = graph.base[n] is not n
            take(n, None if view else graph.nbytes(n), whole)
            if n in self.own:  # kept, if the op is, in a separate pipe
                take(n, self.own[n], n, name=("own", n))
                cut.require(("own", n))
        for n in self.wanted:
            if (h := held(n)) is not None:
                if h not in self.inside:
                    cut.value(h, graph.nbytes(h), None)
                cut.require(h)
        keep = {v[1] if isinstance(v, tuple) else v for v in cut.cut()}
        keep = {n.args[0] if n.target is operator.getitem else n for n in keep if n in self.inside}
        return keep | dear

    def _runs_again(self, n: fx.Node, again: set[str]) -> bool:
        """Return whether an op may run again, and its result is not so small that it is kept anyway."""
        graph = self.graph
        if n in graph.weights or n.target in ROUTING:
            return False  # values of weights alone are the same for all microbatches, and kept
        if graph.base[n] is not n:
            return True  # a view needs no memory
        large = n in self.own or graph.nbytes(n) * STATISTIC > graph.read(n)
        return large and bool(again & kinds(n, graph.weights))

    def _keep_within_budget(self, share: float) -> set[fx.Node]:
        """Return the ops whose results the budget pays for."""
        position = {n: i for i, n in enumerate(self.members)}
        look = [
            (
                str(n.target),
                self.graph.cost(n),
                self.graph.nbytes(n),
                n in self.wanted,
                self.own.get(n),
                [position.get(u, -1) for u in n.all_input_nodes],
            )
            for n in self.members
        ]
        key = repr((share, look, sorted(self.graph.nbytes(n) for n in self.wanted if n not in self.inside)))
        if key not in self.kept_positions:
            keep = self._budget(share)
            self.kept_positions[key] = [position[n] for n in keep]
        return {self.members[i] for i in self.kept_positions[key]}

    def _budget(self, share: float) -> set[fx.Node]:
        """Choose greedily the results that save most work per byte, within the budget.

        The budget is a share of the bytes that would be kept without a checkpoint.
        """
        solid = [n for n in self.members if self._solid(n)]
        keep: set[fx.Node] = set()
        now = self._outcome_of(keep)
        everything = self._outcome_of(set(solid))
        allowed = share * (everything.kept + everything.dropped)
        while True:
            best: tuple[float, fx.Node, Outcome] | None = None
            for n in solid:
                if n in keep:
                    continue
                then = self._outcome_of(keep | {n})
                bytes_, gain = then.kept - now.kept, now.cost - then.cost
                if gain <= 0 or then.kept > max(allowed, now.kept):
                    continue
                worth = gain / max(bytes_, 1)
                if best is None or worth > best[0]:
                    best = worth, n, then
            if best is None:
                return keep
            keep.add(best[1])
            now = best[2]

    def _solid(self, n: fx.Node) -> bool:
        """Return whether an op's result is always a separate tensor, on every rank. Views are free."""
        views = self.graph.saved[n].views if n in self.graph.saved else (n,)
        return n.target not in UNEQUAL and all(viewed is None for viewed in views)
