"""Split the text of an overlapped pair into the two texts that it consists of (shardc.ir.stage)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.program import Program
from shardc.ir.stage import names_in_both


class MixedError(Exception):
    """A line of one half takes a value of the other one: `line`."""

    def __init__(self, line: fx.Node) -> None:
        super().__init__(line.name)
        self.line = line


def halves(program: Program, graph: fx.Graph, prefix: str) -> tuple[fx.Graph, fx.Graph]:
    """Return the two texts of a pair, lines in their order, with their own names. Raises MixedError."""
    same = names_in_both(program)
    returned: Any = graph.output_node().args[0]
    return _half(graph, "", prefix, same, returned[0]), _half(graph, prefix, prefix, same, returned[1])


def _half(graph: fx.Graph, own: str, prefix: str, same: frozenset[str], returned: Any) -> fx.Graph:
    half, env = fx.Graph(), dict[fx.Node, fx.Node]()

    def look(x: fx.Node) -> fx.Node:
        if x not in env:
            raise MixedError(line)
        return env[x]

    for line in _of(graph, own, prefix, same):
        name = line.name.removeprefix(own)
        if line.op == "placeholder":
            env[line] = half.placeholder(name)
        else:
            args, kwargs = fx.map_arg(line.args, look), fx.map_arg(line.kwargs, look)
            env[line] = half.create_node("call_function", line.target, args, kwargs, name=name)
        env[line].meta = dict(line.meta)
    line = graph.output_node()
    half.output(fx.map_arg(returned, look))
    return half


def _of(graph: fx.Graph, own: str, prefix: str, same: frozenset[str]) -> Iterator[fx.Node]:
    """Yield the lines of one half and the placeholders it may take; those without a result are backward's."""
    for n in graph.nodes:
        belongs = (n.target in EFFECTS or n.name.startswith(prefix)) == bool(own)
        if n.op != "output" and (belongs or (n.op == "placeholder" and n.name in same)):
            yield n
