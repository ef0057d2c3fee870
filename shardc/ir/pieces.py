"""Pieces of a graph: lines that stand together, and that a compiler may run as one (`execution: {compile: layers}`).

The lines of a piece carry its number (`meta["piece"]`), follow each other, and stand in the order in which they run
without a compiler: so a text with pieces is a text as any other. shardc.passes.joint.pieces chooses them;
shardc.runtime.compiled runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from shardc.ir.graph import copy_graph, is_call
from shardc.ir.program import Program
from shardc.ir.stage import Joint


@dataclass(frozen=True)
class Piece:
    """lines: in order. takes: values of other lines, in the order in which they are first used; gives: its values that
    others use.
    """

    number: int
    lines: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]

    def __repr__(self) -> str:
        return f"<Piece {self.number}: {len(self.lines)} lines>"


def piece_of(number: int, lines: Iterable[fx.Node]) -> Piece:
    """What these lines take and give."""
    lines = tuple(lines)
    inside = set(lines)
    takes = dict.fromkeys(x for n in lines for x in n.all_input_nodes if x not in inside)
    gives = (n for n in lines if any(u not in inside for u in n.users))
    return Piece(number, lines, tuple(takes), tuple(gives))


def pieces_of(graph: fx.Graph) -> list[Piece]:
    """The pieces of a text, in order."""
    marked = groupby(graph.nodes, key=lambda n: n.meta.get("piece"))
    return [piece_of(number, lines) for number, lines in marked if number is not None]


def without_pieces(program: Program) -> Program:
    """The same program, whose graphs of a step run line by line."""

    def plain(graph: fx.Graph) -> fx.Graph:
        copy = copy_graph(graph)
        for n in copy.nodes:
            n.meta.pop("piece", None)
        return copy

    stages = [s.joint and Joint(*map(plain, s.joint.graphs.values())) for s in program.stages]
    return replace(
        program,
        stages=tuple(replace(s, joint=x) for s, x in zip(program.stages, stages, strict=True)),
        pairs=tuple(replace(p, graph=plain(p.graph)) for p in program.pairs),
    )


def moved(piece: Piece, bytes_of: Callable[[fx.Node], int], shares: Callable[[fx.Node], bool]) -> tuple[int, int]:
    """(bytes that its lines read and write one by one, bytes that the piece reads and writes as one).

    bytes_of: of a value; shares: whether a line's result lies in the memory of its first operand, as a view does."""
    root: dict[fx.Node, fx.Node] = {}
    for n in piece.lines:
        base = n.args[0] if n.args else None
        root[n] = root.get(base, base) if shares(n) and isinstance(base, fx.Node) else n

    def size(values: Iterable[fx.Node]) -> int:
        return sum(map(bytes_of, dict.fromkeys(root.get(x, x) for x in values)))

    one_by_one = sum(size(n.all_input_nodes) + bytes_of(n) for n in piece.lines if is_call(n) and root[n] is n)
    return one_by_one, size(piece.takes) + size(n for n in piece.gives if root[n] in root)
