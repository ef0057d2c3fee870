"""Find the fewest bytes from which backward can compute its values, running only cheap ops again.

    f = to(x, float32)       cheap         backward needs f, s, h, g, u and a
    s = rsqrt(mean(f * f))   cheap         x, s, g, u          are kept: from these follow
    h = to(f * s)            cheap         f, h, a             without a product
    g = linear(h, w1)
    u = linear(h, w2)
    a = silu(g) * u          cheap

It is a minimum cut (Ford and Fulkerson 1956; torch's partitioner of joint graphs also uses one). Every value is a pipe
as wide as its bytes. Water enters at values that cannot be computed again, region inputs and results of ops that are
not cheap. It flows through cheap ops, from each operand to the result, and leaves at values that backward needs. To
keep a value is to close its pipe. The pipes of a minimum cut are the fewest bytes that stop all water; of several such
cuts the last one in forward is taken, after which least is computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

#: A value with this many times fewer bytes than its operands is kept rather than computed again: a mean costs
#: reading its whole operand.
STATISTIC = 32


@dataclass
class MinCut:
    """Values, their costs, and their operands: any hashable objects. `cut()` returns which to keep."""

    pipes: list[tuple[Hashable, Hashable, dict[str, float]]] = field(default_factory=list)

    def value(self, v: Hashable, nbytes: float | None, operands: Iterable[Hashable] | None) -> None:
        """Add a value. nbytes: cost of keeping v; None: it cannot be kept (a view: its base can).

        operands: of the cheap op that computes it again; None: nothing can.
        """
        self._edge((v, "in"), (v, "out"), nbytes)
        if operands is None:
            self._edge("source", (v, "in"), None)
            return
        for u in operands:
            self._edge((u, "out"), (v, "in"), None)

    def require(self, v: Hashable) -> None:
        """Record that backward needs v."""
        self._edge((v, "out"), "sink", None)

    def cut(self) -> list[Any]:
        """Return the values to keep."""
        import networkx  # type: ignore[import-untyped]  # here: most programs need no cut
        from networkx.algorithms.flow import boykov_kolmogorov  # type: ignore[import-untyped]

        graph = networkx.DiGraph(self.pipes)
        if "sink" not in graph or "source" not in graph:
            return []
        # `late`: the nodes from which water would still reach the sink, the smallest such set of all minimum cuts
        _, (_, late) = networkx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)
        return [v for v, end in (n for n in late if isinstance(n, tuple)) if end == "out" and (v, "in") not in late]

    def _edge(self, a: Hashable, b: Hashable, capacity: float | None) -> None:
        self.pipes.append((a, b, {} if capacity is None else {"capacity": capacity}))
