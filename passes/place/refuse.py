"""Refuse annotated splits that placement could not carry out: they would be gathered silently."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import operands_of, producer_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.passes.annotate import fused_weights
from shardc.passes.annotate.indivisible import rank_counts
from shardc.rules import attention
from shardc.rules.core.choices import Choices
from shardc.rules.views import reshape

_TURNS = {torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.alias.default}


def refuse_pins(program: Program, mesh: Mesh) -> None:
    """Raise ShardcError for annotated activations whose dim cannot be split: another axis already does."""
    errors = Errors()
    for node in program.graph.nodes:
        if "pin" not in node.meta:
            continue
        v = node.meta["value"]
        layout = Layout.of({a: s.outputs[0] for a, s in node.meta["strategies"].items()}, mesh)
        for axis, shard in node.meta["pin"].shards():
            others = [a for a, _ in layout.shards(shard.dim) if a != axis]
            if others and (problem := layout.fits(v.shape, mesh)):
                errors.add(
                    f"dim {shard.dim} of {replace(v, layout=Layout(tuple(i for i in layout.items if i[0] != axis)))} is"
                    f" split over {' and '.join(others)} already, and cannot be split over {axis} as well: {problem}",
                    where=f"{node.meta['cause'].get(axis, '')}, {node.meta['source']}",
                    fix=f"name another dim for {axis}, or leave it out",
                )
    errors.raise_any()


def refuse_uneven(program: Program, mesh: Mesh, choices: dict[fx.Node, Choices], tokens: set[str]) -> None:
    """Raise ShardcError for heads or groups that an axis does not divide, where a view divides a dim.

    Such a value could be gathered, but that would silently undo the annotation. There is one error for each size and
    annotation. tokens: the axes of a sequence. Chunks of tokens that they do not divide are gathered, with a note.
    """
    errors, reported = Errors(), set()
    for node, c in choices.items():
        if c.rule.notation is not reshape:
            continue
        source, i = producer_of(operands_of(node)[0])
        for axis, n in mesh.axes:
            why = source.meta.get("why", {}).get(axis, "")
            if n == 1 or axis in tokens or not why or source.op != "call_function":
                continue
            produced, needed = source.meta["strategies"][axis].outputs[i], node.meta["strategies"][axis].inputs[0]
            if not isinstance(produced, Shard) or isinstance(needed, Shard):
                continue
            if produced.padding:  # it divides with padding: partition notes why it is gathered
                continue
            for factor, (places, _) in c.places.items():
                place_of, size = places[0], c.signature.sizes[factor]
                if (
                    place_of is None
                    or place_of[0] != produced.dim
                    or produced.split % place_of[1]
                    or size % (produced.split // place_of[1] * n) == 0
                ):
                    continue
                if produced.split // place_of[1] >= size or (why, size) in reported:
                    continue
                reported.add((why, size))
                better = fused_weights.suggest_split(program, axis)
                rest = (
                    f"or write {better} before the entries that split a fused weight as one"
                    if better
                    else "or leave that weight whole"
                )
                seen = f"of {list(c.call.operands[0].shape)} seen as {list(c.call.results[0].shape)}"
                errors.add(
                    f"{size}{_noun(node)} ({seen}) does not divide by {axis}={n}",
                    where=f"{why}, {node.meta['source']}",
                    fix=f"{rank_counts(axis, size, n)}; {rest}",
                )
    errors.raise_any()


def _noun(node: fx.Node) -> str:
    """Return the name of what a view makes of a dim: " heads" if attention uses the view, else ""."""
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in attention.OPS:
                return " heads"
            if user.target in _TURNS:
                todo.append(user)
    return ""
