"""The text of an overlapped pair, and what its names say (shardc.passes.lower.pair makes it)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


class MixedError(Exception):
    """A line of one half takes what belongs to the other one: `line`."""

    def __init__(self, line: fx.Node) -> None:
        super().__init__(line.name)
        self.line = line


def halves(program: Program, graph: fx.Graph, prefix: str) -> tuple[fx.Graph, fx.Graph]:
    """The two texts that a pair's text consists of, lines in their order, with their own names. Raises MixedError."""
    same = shared(program)
    returned: Any = graph.output_node().args[0]
    return _half(graph, "", prefix, same, returned[0]), _half(graph, prefix, prefix, same, returned[1])


def _half(graph: fx.Graph, own: str, prefix: str, same: frozenset[str], returned: Any) -> fx.Graph:
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()

    def look(x: fx.Node) -> fx.Node:
        if x not in env:
            raise MixedError(line)
        return env[x]

    for line in _of(graph, own, prefix, same):
        name = line.name.removeprefix(own)
        if line.op == "placeholder":
            env[line] = made.placeholder(name)
        else:
            args, kwargs = fx.map_arg(line.args, look), fx.map_arg(line.kwargs, look)
            env[line] = made.create_node("call_function", line.target, args, kwargs, name=name)
        env[line].meta = dict(line.meta)
    line = graph.output_node()
    made.output(fx.map_arg(returned, look))
    return made


def _of(graph: fx.Graph, own: str, prefix: str, same: frozenset[str]) -> Iterator[fx.Node]:
    """The lines of one half, and what it may take."""
    for n in graph.nodes:
        mine = n.name.startswith(prefix) == bool(own)
        if n.op != "output" and (mine or (n.op == "placeholder" and n.name in same)):
            yield n
