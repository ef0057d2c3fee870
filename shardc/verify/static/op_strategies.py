"""Find the strategies by which an op computes its result, and the op's lines in a rank's text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from torch import fx

from shardc.ir.graph import enlarges, operands_of, value_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import Layout, Partial, Placement, Shard
from shardc.rules.core import registry
from shardc.rules.core.choices import Choices
from shardc.rules.core.strategy import Strategy
from shardc.runtime import ops
from shardc.verify.static.statement import NAMES, Claim, on_axis

if TYPE_CHECKING:
    from shardc.ir.stored import Input
    from shardc.verify.static.same_values import Model

#: Views that merge more parts of a dim than this, with microbatches inside each, are not tried.
_PARTS = 4096
#: The strategies of a call, by axis.
Strategies = dict[str, Strategy]
#: Placements that an op's result may have, by axis, if its operands do not decide.
Hints = Mapping[str, Sequence[Placement]]


def _by_axis(
    choices: Choices, claims: Sequence[Claim], hint: Hints, mesh: Mesh
) -> Iterator[tuple[str, list[Placement], list[Strategy]]]:
    """Yield for each axis how it has the operands, and the strategies that take them so."""
    for axis, n in mesh.axes:
        have = [on_axis(c.layout[axis], v) for c, v in zip(claims, choices.call.operands, strict=True)]
        possible, values = _possible(choices, have, hint.get(axis, ()), n), choices.call.operands
        yield axis, have, list(dict.fromkeys(s for s in possible if list(map(on_axis, s.inputs, values)) == have))


def fitting(
    choices: Choices, claims: Sequence[Claim], hint: Hints, mesh: Mesh
) -> Iterator[tuple[Strategies, tuple[Layout, ...]]]:
    """Yield each choice of strategies, one per axis, that takes operands with these layouts, and its results' layouts.

    hint: for an op without operands, the placements that its result may have, by axis; they are still checked.
    """
    results = choices.call.results
    for combination in product(*(strategies for *_, strategies in _by_axis(choices, claims, hint, mesh))):
        by_axis = dict(zip(mesh.names, combination, strict=True))
        placed = [{a: on_axis(s.outputs[i], v) for a, s in by_axis.items()} for i, v in enumerate(results)]
        layouts = tuple(Layout.of(each, mesh) for each in placed)
        if not any(layout.problem(v.shape, mesh) for layout, v in zip(layouts, results, strict=True)):
            yield by_axis, layouts


def misfit(choices: Choices, claims: Sequence[Claim], mesh: Mesh) -> str:
    """Return in words the axis on which no strategy takes these operands; "" if each axis has one."""
    for axis, have, strategies in _by_axis(choices, claims, {}, mesh):
        if not strategies:
            return f"on {axis} its operands are ({', '.join(map(_shown, have))}), and no way to run it takes them so"
    return ""


def _shown(p: Placement) -> str:
    if isinstance(p, Shard):
        return f"{NAMES[Shard]} by dim {p.dim}" + (f" after {p.split}" if p.split > 1 else "")
    return f"a {p.op} still to be done" if isinstance(p, Partial) else NAMES[type(p)]


def _possible(choices: Choices, have: Sequence[Placement], hint: Sequence[Placement], n: int) -> Iterator[Strategy]:
    yield choices.replicate
    yield choices.partial_grad
    yield from choices.partials
    for i, p in enumerate(have):
        if (s := choices.from_operand(i, p, n)) is not None:
            yield s
    for p in hint:
        for i in range(len(choices.call.results)):
            if (s := choices.from_result(i, p, n)) is not None:
                yield s
    if choices.rule.extra is not None:
        yield from choices.rule.extra(choices.call, n, [frozenset({p}) for p in have])


def harm_of_padding(
    model: Model, node: fx.Node, strategies: Strategies, claims: Sequence[Claim], lines: Sequence[fx.Node]
) -> str:
    """Return how padding of the operands harms the op's result or gradients; "" if it does not.

    Padding that is summed must be zero; elsewhere the op and its derivatives must be finite. lines: of the operands.
    """
    if not any(claim.layout.paddings() for claim in claims):
        return ""
    choices, weights = model.choices_of(node), model.weights
    operands = list(map(value_of, operands_of(node)))
    numbers = [
        {dict(claim.fills).get(d) for d in choices.kept_dims(strategies.values(), i)} for i, claim in enumerate(claims)
    ]
    padded_by = tuple(each.pop() if len(each) == 1 else None for each in numbers)
    copies = frozenset(i for i, x in enumerate(lines) if x.op == "placeholder" and claims[i].of in model.inputs)
    if not choices.finite(node, strategies.values(), padded_by, copies):
        return "it is not finite, or its derivative is not, wherever the padding of its operands may be"
    for i, (operand, claim) in enumerate(zip(operands_of(node), claims, strict=True)):
        if not claim.layout.paddings():
            continue
        fills = dict(claim.fills)
        summed = {p.dim for s in strategies.values() if s.sums_padding(i) and isinstance(p := s.inputs[i], Shard)}
        if operand not in weights and any(fills.get(d) != 0 for d in summed):
            return f"it sums over the padding of its operand {operand.name}, which is not zero"
        alone = any(s.sums_padding(i) and not s.multiplies_padding(i, operands) for s in strategies.values())
        cleared = lines[i].target is ops.fill_padding  # its gradient too
        if operand in weights and alone and not cleared and operands[i].requires_grad:
            return f"the gradient of its sum reaches the padding of the parameter {operand.name}"
    return ""


def hints(
    call: fx.Node, shows: Sequence[Layout], inputs: Iterable[Input], mesh: Mesh, *, wide: bool = False
) -> dict[str, list[Placement]]:
    """Return the placements that a result may have, by axis, if the op's operands do not decide.

    These are the placements that the text shows. No text shows the microbatch axis: there, any dim may be split at any
    digit that the sizes of axes make, within each part that a view makes, padded as rows of the program's inputs are.
    wide: the same on every axis.
    """
    placements: dict[str, dict[Placement, None]] = {a: {} for a in mesh.names}
    microbatches = mesh.size(MICROBATCH) if MICROBATCH in mesh.names else 1
    splits = [(axis, p) for layout in shows for axis, p in layout.items if isinstance(p, Shard) and axis in placements]
    for axis, p in splits:
        placements[axis] |= {p: None, replace(p, split=p.split * microbatches): None}  # a text shows one microbatch
    sizes = [n for _, n in mesh.axes if n > 1]
    digits = {math.prod(sizes[i:j]) for i in range(len(sizes)) for j in range(i, len(sizes) + 1)} | {1}
    axes = [(axis, n) for axis, n in mesh.axes if n > 1 and (wide or axis == MICROBATCH)]
    known = {p.split for each in placements.values() for p in each if isinstance(p, Shard)} | {1}
    paddings = {p.padding for _, p in splits} | {0}
    rows = {(x.shape[s.dim], s.padding) for x in inputs if (s := x.microbatch) is not None and s.padding}
    for v in values_of(call)[:1]:
        for (axis, n), (d, size) in product(axes, enumerate(v.shape)):
            before = range(1, min(size, _PARTS) + 1) if axis == MICROBATCH else known
            # a view may merge m rows with `inner` elements that follow each
            merged = {p * inner for m, p in rows for inner in range(1, size // m + 1) if size % (m * inner) == 0}
            placements[axis] |= dict.fromkeys(
                Shard(d, parts * digit, (), padding, parts if padding else 1)
                for padding in paddings | merged
                for parts, digit in product(before, sorted(digits))
                if size % parts == 0 and (size // parts + padding) % (digit * n) == 0
            )
            of_dim = [(a, p) for a, p in splits if p.dim == d and axis == MICROBATCH]
            for (a, p), padding in product(of_dim, merged):  # inside of a microbatch's padded rows
                placements[a][replace(p, split=p.split * microbatches, padding=padding)] = None
    return {a: list(each) for a, each in placements.items()}


def weight_like(graph: fx.Graph, params: set[str]) -> set[fx.Node]:
    """Return parameters, and values that only move their elements, each once: their padding is zero."""
    weights: set[fx.Node] = set()
    for node in graph.nodes:
        operands = operands_of(node) if node.op == "call_function" else []
        rule = registry.find(node.target) if len(operands) == 1 else None
        moves = rule is not None and rule.linear == "0" and operands[0] in weights and not enlarges(node)
        if moves or (node.op == "placeholder" and node.name in params):
            weights.add(node)
    return weights
