"""Decide whether programs for several lengths may run in one step, each on microbatches and ranks of its own.

They run on the same parameters and buckets (shardc.recompile). Beside that a step needs:

    counts       what a program divides by comes from the batch, and not from a length
    values       of sizes that do not depend on the length, where a step adds them up over microbatches
    collectives  the same, in one order, between ranks with several lengths. Where their sizes depend on the length, as
                 in an exchange of tokens between experts, or their order does, ranks need one length
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise, zip_longest
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import calls, operands_of, source_of, values_of
from shardc.ir.placement import Partial
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.runtime import ops
from shardc.runtime.data.inputs import batch_dims
from shardc.runtime.data.ragged import Size

_WHERE = "batch.balance"
#: Ops whose result depends on how many numbers they reduce, beside these.
_MEANS = ("mean", "var", "std", "var_mean", "std_mean", "partial_mean")
#: Ops whose plain number is part of the result, and no size.
_BY_NUMBER = ("mul", "div", "add", "sub", "rsub", "pow", "full")


def joined_axes(programs: Mapping[Size, Program]) -> frozenset[str]:
    """Return the axes over which ranks need one size, of programs by their sizes.

    Axes are those of the program with the fewest rows: one with more rows may see an axis of tokens as digits.
    """
    order = sorted(programs, key=lambda size: (size.times, size.length))
    base = programs[order[0]]
    return frozenset().union(*(_joined(base, programs, sizes) for sizes in pairwise(order)))


def _joined(base: Program, programs: Mapping[Size, Program], sizes: tuple[Size, Size]) -> frozenset[str]:
    """Return the axes over which ranks need one size in a microbatch, of two of the programs.

    Raises ShardcError if the two may not run in one step.
    """
    one, other = (programs[size] for size in sizes)
    said = " and ".join(f"{s.length}{f' ({s.times} times as many)' if s.times > 1 else ''}" for s in sizes)
    _check_model(one, other, said)
    edges = [[(e.source, e.target, e.gradient) for e in p.edges] for p in (one, other)]
    if _sums(one) != _sums(other) or edges[0] != edges[1] or _summed(base, one) != _summed(base, other):
        fault = f"the programs for rows of {said} are split in different ways, so they cannot run in one step"
        fix = "give lengths that are nearer to each other, or name the splits in `shard`; or leave out balance"
        raise ShardcError(fault, where=_WHERE, fix=fix)
    by_rows = _within(base, base, axes_of_rows(base))
    collectives = [[(n, _within(base, p, axes), size) for n, axes, size in _collectives(p)] for p in (one, other)]
    nbytes: dict[frozenset[str], list[list[int]]] = {}
    for i, some in enumerate(collectives):
        for _, axes, size in some:
            nbytes.setdefault(axes, [[], []])[i].append(size)
    differ = [axes for axes, (a, b) in nbytes.items() if sorted(a) != sorted(b)]
    joined = frozenset().union(*differ) & by_rows
    # the collectives between ranks that may have several sizes
    mine, theirs = ([(n, axes) for n, axes, _ in some if axes & (by_rows - joined)] for some in collectives)
    return joined if mine == theirs else by_rows


def _within(base: Program, program: Program, axes: Iterable[str]) -> frozenset[str]:
    """Return axes of a program as digits of the base's mesh."""
    return base.mesh.coarser(program.mesh.digits(*axes))


def axes_of_rows(program: Program) -> set[str]:
    """Return the mesh's axes that split rows."""
    dims = batch_dims(program)
    return {a for x in program.inputs if (d := dims[x.name]) is not None for a, _ in x.layout.shards(d)}


def _collectives(program: Program) -> list[tuple[str, tuple[str, ...], int]]:
    """Return the collectives of a step's graphs in order: (kinds and name, axes, bytes)."""
    graphs = [g for s in program.stages for g in (s.joint.graphs.values() if s.joint is not None else [s.graph])]
    collectives = [(n.name, c) for graph in graphs for n in graph.nodes if (c := n.meta.get("collective")) is not None]
    return [(f"{c.kind}/{c.backward} {name}", c.axes, c.bytes) for name, c in collectives]


def _sums(program: Program) -> list[tuple[Any, ...]]:
    """Return the shapes and shards of what a step adds up over microbatches."""
    if program.prologue is None:
        return []
    returned: Any = program.prologue.graph.output_node().args[0]
    return [(v.shape, v.layout.shards()) for n in returned[0] for v in values_of(n)]


def _summed(base: Program, program: Program) -> list[frozenset[str]]:
    """Return over which axes ranks have summands of outputs, and of values that a forward of all microbatches adds."""
    sums = [n for s in program.stages for n in s.graph.find_nodes(op="call_function", target=ops.summed)]
    partial = [[a for a, p in values_of(n)[0].layout.items if isinstance(p, Partial)] for n in sums]
    return [_within(base, program, axes) for axes in (*partial, *(o.summed_over for o in program.outputs))]


def _check_model(one: Program, other: Program, said: str) -> None:
    """Raise ShardcError if the model computes something else at the other length, or divides by a number of places."""
    fault = fix = ""
    for a, b in zip_longest(calls(one.graph), calls(other.graph)):
        if a is None or b is None or a.target is not b.target:
            where = source_of(a or b)
            fault, fix = (
                f"{where}: forward computes something else for rows of {said}",
                "give lengths on one side of it",
            )
            break
        name = op_name(a.target)
        by_number = name in _BY_NUMBER and _numbers(a) != _numbers(b)
        if by_number or (name in _MEANS and _reduced(a) != _reduced(b)):
            fault = f"{source_of(a)}: it counts places of a row, padding too, so rows of {said} would weigh otherwise"
            fix = (
                "count what the batch says: cross_entropy with ignore_index, or a sum divided by labels.ne(-100).sum()"
            )
            break
    if fault:
        raise ShardcError(fault, where=_WHERE, fix=f"{fix}; or leave out balance")


def _numbers(node: fx.Node) -> list[Any]:
    return [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (int, float))]


def _reduced(node: fx.Node) -> float:
    """Return how many numbers an op makes one of."""
    made_of, made = (math.prod(values_of(n)[0].shape) for n in (operands_of(node)[0], node))
    return made_of / max(made, 1)
