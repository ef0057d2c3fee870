"""Of how many things a mean is the mean: what weighs a batch among several, so that the mean over all of them is exact.

    loss = sum(nll) / sum(labels != -100)        weighs as many tokens as the batch counts: `sum(labels != -100)`
    loss = mean((x - y)**2)                      as many numbers as the mean is of

What a loss, or a number beside it, is divided by is found in the model's graph, and computed from the batch alone. A
number that is no such mean (a sum, the exponent of a mean, means over different things that are added up) has no count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shardc.ir.graph import operands_of, placeholders, value_of
from shardc.ir.outputs import Output, divisors
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Input
from shardc.ir.types import behind
from shardc.runtime.step import outputs

aten = torch.ops.aten
#: The name under which the loss is counted.
LOSS = ""
#: Ops through which a mean is still one over the same things.
_THROUGH = {
    aten.neg.default,
    aten.detach.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dims,
}
_PLUS = {aten.add.Tensor, aten.sub.Tensor}
_BY_NUMBER = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


class MeanCounts:
    """The counts of the means among a program's loss and outputs, for batches of its sizes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        #: What the batch alone decides: it, and what is stored alike on all ranks.
        self._given: tuple[Input | Buffer, ...] = (
            *program.inputs,
            *(b for b in program.buffers if b.constant is not None or _alike(program, b)),
        )
        self._fixed: dict[str, float] = {}
        counted: dict[str, fx.Node] = {}
        for name, node in _numbers(program):
            found = list(_counts(node, {x.name for x in self._given}))
            known: dict[Any, int] = {}
            nodes = {_computed(x, known): x for x in found if isinstance(x, fx.Node)}
            fixed = {x for x in found if not isinstance(x, fx.Node)}
            if len(nodes) == 1:
                (counted[name],) = nodes.values()
            elif len(fixed) == 1 and not nodes:
                (self._fixed[name],) = fixed
        self._names = tuple(counted)
        self._run = fx.GraphModule(nn.Module(), _slice(program, tuple(counted.values()))) if counted else None

    @torch.no_grad()
    def of(self, mesh: Any, values: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """{name of an output, or LOSS: its count in a global batch}. values: what the stages of this rank take of it,
        by microbatch: {placeholder: value}. All ranks together: what things are counted in is gathered.
        """
        if self._run is None:
            return self._fixed
        takes = list(placeholders(self._run.graph))
        constants = {b.name: b.constant for b in self._program.buffers if b.constant is not None}
        inputs = {x.name: x for x in self._program.inputs if x.name in takes}
        shown = tuple(Output(x.name, x.shape, x.dtype, x.layout, x.microbatch) for x in inputs.values())
        parts = {o.name: outputs.joined(o, {m: v[o.name] for m, v in enumerate(values)}) for o in shown}
        whole = outputs.gathered(replace(self._program, outputs=shown), mesh, parts)
        for name in takes:
            if name not in whole:
                whole[name] = constants[name].to(mesh.device) if name in constants else values[0][name]
        counts = self._run(*(whole[name] for name in takes))
        return {**self._fixed, **{name: float(x) for name, x in zip(self._names, counts, strict=True)}}


def _alike(program: Program, b: Buffer) -> bool:
    """Has every rank all of a buffer, the same before and after a step?"""
    return not (b.updated or b.layout.shards() or program.axis)


def _numbers(program: Program) -> Iterator[tuple[str, fx.Node]]:
    """The loss, and single real numbers beside it that nothing divides."""
    returned: Any = program.graph.output_node().args[0]
    loss, beside = returned
    if loss is not None:
        yield LOSS, loss
    counts = divisors(program.outputs)
    for o, node in zip(program.outputs, beside[len(beside) - len(program.outputs) :], strict=True):
        single = math.prod(o.shape) == 1 and o.dtype.is_floating_point
        if single and not o.divisor and o.name not in counts:
            yield o.name, node


def _counts(number: fx.Node, given: set[str]) -> Iterator[fx.Node | float]:
    """What the terms of a number are divided by: nodes that the batch alone decides, and numbers."""
    todo = [number]
    while todo:
        n = todo.pop()
        operands = operands_of(n)
        if n.target in _PLUS or n.target in _THROUGH or (n.target in _BY_NUMBER and len(operands) == 1):
            todo += operands
        elif n.target is aten.div.Tensor and _decided(operands[1], given):
            yield operands[1]
        elif n.target is aten.mul.Tensor:  # a number, as a tensor, scales a mean
            todo += [x for x in operands if not _decided(x, set())]
        elif n.target in (aten.mean.default, aten.mean.dim):
            yield float(math.prod(value_of(operands[0]).shape) // max(math.prod(value_of(n).shape), 1))


def _decided(node: fx.Node, given: set[str]) -> bool:
    """Is it a single number that these alone decide?"""
    made_of = [n for n in behind([node]) if n.op == "placeholder"]
    return math.prod(value_of(node).shape) == 1 and all(n.name in given for n in made_of)


def _computed(node: fx.Node, known: dict[Any, int]) -> int:
    """A number for how a value is computed: equal for two nodes that compute the same. known: those given by now."""
    numbers: dict[fx.Node, int] = {}
    made_of = behind([node])
    for n in node.graph.nodes:
        if n in made_of:
            args = fx.map_arg((n.args, dict(n.kwargs)), lambda x: f"%{numbers[x]}")
            key = n.name if n.op == "placeholder" else (str(n.target), repr(args))
            numbers[n] = known.setdefault(key, len(known))
    return numbers[node]


def _slice(program: Program, nodes: tuple[fx.Node, ...]) -> fx.Graph:
    """The graph of these values: it takes what they are made of."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = behind(nodes)
    for n in program.graph.nodes:
        if n in needed:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in nodes))
    return graph
