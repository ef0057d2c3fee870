"""Run a graph line by line on tensors without data, and report each line to a ledger.

Code as for a real step (fx.GraphModule) takes longer to write than such a graph takes to run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import last_uses
from shardc.cost.ledger import FakeLedger
from shardc.ir.fused_regions import fused_regions, moved
from shardc.ir.graph import values_of
from shardc.ir.program import Program
from shardc.passes.joint.fused_regions import fuses, shares_memory


@dataclass
class _Line:
    """A line. op: the forward op that it belongs to, None if the program does not have it. last: values it uses last.

    fuses: it begins a fused kernel; moves: it ends one, which moves so many bytes.
    """

    node: fx.Node
    last: list[fx.Node]
    op: str | None = None
    fuses: bool = False
    moves: int | None = None


class GraphLines:
    """A graph as a function, which frees each value after its last use, as generated code does.

    source: the program's graph that it was made from. Fused regions count as fused kernels.
    """

    def __init__(self, ledger: FakeLedger, program: Program, graph: fx.Graph, source: fx.Graph) -> None:
        self._ledger = ledger
        self._inputs = list(graph.find_nodes(op="placeholder"))
        self._returned = graph.output_node().args[0]
        last = last_uses(graph)
        lines = {n: _Line(n, last=last[n]) for n in graph.nodes if n.op not in ("placeholder", "output")}
        self._lines = list(lines.values())
        named = {n.name: line for n, line in lines.items()}
        ops = {n.name for s in program.stages for n in s.graph.nodes}
        for n in source.nodes:
            if n.op == "call_function":
                named[n.name].op = n.meta.get("of") or _belongs_to(n, ops)

        def size(n: fx.Node) -> int:
            return sum(v.nbytes(program.mesh) for v in values_of(n) if v is not None)

        for region in fused_regions(source):
            named[region.lines[0].name].fuses = True
            _, named[region.lines[-1].name].moves = moved(region, fuses, size, shares_memory)

    def __call__(self, *inputs: Any) -> Any:
        ledger, values = self._ledger, dict(zip(self._inputs, inputs, strict=True))
        value = values.__getitem__
        for line in self._lines:
            if line.op is not None:
                ledger.op = line.op
            if line.fuses:
                ledger.fuse()
            n = line.node
            values[n] = self._run(n, fx.map_arg(n.args, value), fx.map_arg(n.kwargs, value))
            for x in line.last:
                del values[x]
            if line.moves is not None:
                ledger.fused(line.moves)
        return fx.map_arg(self._returned, value)

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = n.target
        if n.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if isinstance(target, torch._ops.OpOverload):
            return self._ledger.run_line(target, args, kwargs)
        return target(*args, **kwargs)


def _belongs_to(n: fx.Node, ops: Collection[str]) -> str:
    """Return the op that a line of forward belongs to: of several lines, the last one has its name."""
    queue, seen = [n], {n}
    for x in queue:
        if x.name in ops:
            return x.name
        new = [u for u in x.users if u.op == "call_function" and u not in seen]
        queue += new
        seen.update(new)
    return n.name
