"""Refuse annotated splits that placement could not carry out: they would be gathered silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import operands_of, producer_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.passes.annotate import to_spec
from shardc.passes.annotate.indivisible import rank_counts
from shardc.rules import attention
from shardc.rules.core.choices import Choices
from shardc.rules.views import reshape

#: Ops that only reorder dims, or do nothing, between a view and attention.
_REORDERS = {torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.alias.default}


def refuse_pins(program: Program, mesh: Mesh) -> None:
    """Raise ShardcError for annotated activations (pins) whose dim cannot be split again: another axis has it."""
    errors = Errors()
    for node in program.graph.nodes:
        if "pin" not in node.meta:
            continue
        v = node.meta["value"]
        layout = Layout.of({a: s.outputs[0] for a, s in node.meta["strategies"].items()}, mesh)
        for axis, shard in node.meta["pin"].shards():
            others = [a for a, _ in layout.shards(shard.dim) if a != axis]
            if others and (problem := layout.problem(v.shape, mesh)):
                errors.add(
                    f"dim {shard.dim} of {replace(v, layout=Layout(tuple(i for i in layout.items if i[0] != axis)))} is"
                    f" split over {' and '.join(others)} already, and cannot be split over {axis} as well: {problem}",
                    where=f"{node.meta['cause'].get(axis, '')}, {node.meta['source']}",
                    fix=f"name another dim for {axis}, or leave it out",
                )
    errors.raise_any()


def refuse_uneven(program: Program, mesh: Mesh, choices: dict[fx.Node, Choices], tokens: set[str]) -> None:
    """Raise ShardcError where a view splits a dim into heads or groups that an axis does not divide.

    Such a value could be gathered, but that would silently undo the annotation. There is one error for each size and
    annotation. tokens: the axes of a sequence. Chunks of tokens that they do not divide are gathered, with a note. Rows
    of a part with another mesh are gathered behind its border.
    """
    errors, reported = Errors(), set()
    borders = {why for node in choices if node.meta.get("border") for why in node.meta["cause"].values()}
    for node, c in choices.items():
        if c.rule.notation is not reshape:
            continue
        source, i = producer_of(operands_of(node)[0])
        for axis, n in mesh.axes:
            why = source.meta.get("why", {}).get(axis, "")
            if n == 1 or axis in tokens or not why or why in borders or source.op != "call_function":
                continue
            produced, needed = source.meta["strategies"][axis].outputs[i], node.meta["strategies"][axis].inputs[0]
            if not isinstance(produced, Shard) or isinstance(needed, Shard):
                continue
            if produced.padding:  # it divides with padding: partition notes why it is gathered
                continue
            for size in _indivisible_factors(c, produced, n):
                if (why, size) in reported:
                    continue
                reported.add((why, size))
                shapes = f"of {list(c.call.operands[0].shape)} seen as {list(c.call.results[0].shape)}"
                fault = f"{size}{_noun(node)} ({shapes}) is not divisible by {axis}={n}"
                fix = f"{rank_counts(axis, size, n)}; or {_other_fix(program, axis, why)}"
                errors.add(fault, where=f"{why}, {node.meta['source']}", fix=fix)
    errors.raise_any()


def _other_fix(program: Program, axis: str, why: str) -> str:
    """Return what to do with the value if the number of ranks is to stay. why: the annotation that split it."""
    if entries := to_spec.suggest_split(program, axis):
        return f"split the fused weight by its parts: write {entries} before its entry"
    return "keep the batch's rows a dim of their own there" if "batch dim" in why else "leave that weight whole"


def _indivisible_factors(c: Choices, shard: Shard, n: int) -> Iterator[int]:
    """Yield the factors of a view ([72] as [3, 6, 4]: 3, 6, 4) that a shard cuts, but n does not divide."""
    for factor, (places, _) in c.places.items():
        dim, outer = places[0] or (None, 1)  # outer: the product of the factors before this one
        size, (split, rest) = c.signature.sizes[factor], divmod(shard.split, outer)  # split: of this factor
        if dim == shard.dim and not rest and split < size and size % (split * n):
            yield size


def _noun(node: fx.Node) -> str:
    """Return the name of what a view makes of a dim: " heads" if attention uses the view, else ""."""
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in attention.OPS:
                return " heads"
            if user.target in _REORDERS:
                todo.append(user)
    return ""
