"""Find fused regions: consecutive lines of a graph that are compiled as one (`compile: layers`).

The lines of a region carry its number (`meta["fused"]`) and stay in the order in which they run without a compiler, so
a graph with fused regions is an ordinary graph. shardc.passes.joint.fused_regions chooses them;
shardc.runtime.compiled runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from shardc.ir.graph import copy_graph
from shardc.ir.program import Program
from shardc.ir.stage import Joint


@dataclass(frozen=True)
class FusedRegion:
    """Lines that are compiled together, in order.

    takes: values of other lines, in the order of first use. gives: values of these lines that others use.
    """

    number: int
    lines: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]

    def __repr__(self) -> str:
        return f"<FusedRegion {self.number}: {len(self.lines)} lines>"


def region_of(number: int, lines: Iterable[fx.Node]) -> FusedRegion:
    """Return the region of these lines."""
    lines = tuple(lines)
    inside = set(lines)
    inputs = dict.fromkeys(x for n in lines for x in n.all_input_nodes if x not in inside)
    gives = (n for n in lines if any(u not in inside for u in n.users))
    return FusedRegion(number, lines, tuple(inputs), tuple(gives))


def fused_regions(graph: fx.Graph) -> list[FusedRegion]:
    """Return the fused regions of a graph, in order."""
    marked = groupby(graph.nodes, key=lambda n: n.meta.get("fused"))
    return [region_of(number, lines) for number, lines in marked if number is not None]


def without_fused_regions(program: Program) -> Program:
    """Return the same program with step graphs that run line by line."""

    def plain(graph: fx.Graph) -> fx.Graph:
        copy = copy_graph(graph)
        for n in copy.nodes:
            n.meta.pop("fused", None)
        return copy

    stages = [s.joint and Joint(*map(plain, s.joint.graphs.values())) for s in program.stages]
    return replace(
        program,
        stages=tuple(replace(s, joint=x) for s, x in zip(program.stages, stages, strict=True)),
        pairs=tuple(replace(p, graph=plain(p.graph)) for p in program.pairs),
    )


def moved(
    region: FusedRegion,
    fuses: Callable[[fx.Node], bool],
    bytes_of: Callable[[fx.Node], int],
    shares: Callable[[fx.Node], bool],
) -> tuple[int, int]:
    """Return the bytes that a region's fusing lines read and write: (line by line, in fused kernels).

    In a fused kernel, values that fused lines pass to each other are never written. Other lines, such as products, are
    separate kernels either way and are not counted. fuses: whether a line joins a fused kernel; bytes_of: of a value;
    shares: whether a line's result shares the memory of its first operand, as a view does.
    """
    root: dict[fx.Node, fx.Node] = {}
    for n in region.lines:
        base = n.args[0] if n.args else None
        root[n] = root.get(base, base) if shares(n) and isinstance(base, fx.Node) else n
    fused = {n for n in region.lines if root[n] is n and fuses(n)}
    inside = set(region.lines)

    def size(values: Iterable[fx.Node]) -> int:
        return sum(map(bytes_of, dict.fromkeys(root.get(x, x) for x in values)))

    def leaves(n: fx.Node) -> bool:
        """Return whether anything but a fused kernel uses the value."""
        return any(u not in inside or not (u in fused or (root[u] is not u and not leaves(u))) for u in n.users)

    one_by_one = sum(size(n.all_input_nodes) + bytes_of(n) for n in fused)
    read = (x for n in fused for x in n.all_input_nodes if root.get(x, x) not in fused)
    return one_by_one, size(read) + size(n for n in fused if leaves(n))
