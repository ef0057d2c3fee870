"""ChooseOutside: make the choices of modules outputs (record) or inputs (replay) of the program.

    before   topk = topk(scores, 2)                         scores: f32[64, 8]      4 rows of 16 tokens
             values, index = topk[0], topk[1]               f32[64, 2], i64[64, 2]
    replay   choice = placeholder                           i32[4, 16, 2]           input choices.layers.0.gate
             index = reshape(to(choice, i64), [64, 2])
             values = gather(scores, 1, index)              gradients flow to the scores
    record   reshape(to(index, i32), [4, 16, 2])            output layers.0.gate

A choice is a value of integer or bool type that an op makes of floating-point numbers. Choices that nothing reads when
the others are given, such as groups of experts, are left out. The input has rows and tokens as two dims, so placement
splits it as the batch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.choices import section
from shardc.ir.graph import calls, copy_graph, operands_of, placeholders, source_of, value_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.outputs import OtherForward, Output
from shardc.ir.patterns import enclosing
from shardc.ir.program import Program
from shardc.ir.stored import Choice, Input
from shardc.ir.types import behind, continuous, infer, op_name
from shardc.passes import Entry
from shardc.passes.annotate.batch_rows import batch_rows
from shardc.passes.base import Pass
from shardc.passes.canonical.rewrite import Args
from shardc.runtime.data.inputs import CHOICES
from shardc.spec.model_names import Selector, select_modules

aten = torch.ops.aten
#: Ops whose indices along their dim differ.
_DISTINCT = {"topk", "sort", "argsort"}
#: Ops that move dims: their rows may no longer be the first.
_MOVES = {"t", "transpose", "permute", "movedim"}
#: The name of a choice that the model itself makes, in no module inside it.
ROOT = "choice"


@dataclass(frozen=True)
class _Made:
    """A choice in the graph: result `index` of an op. entry: the spec's, mode and weights."""

    op: fx.Node
    index: int
    entry: section.Choice
    name: str = ""


@dataclass(frozen=True)
class ChooseOutside(Pass):
    """Makes choices outputs or inputs. A program that generates makes its own."""

    def applies(self, program: Program) -> bool:
        return bool(section.of(self.spec)) and not isinstance(self.options.forward, OtherForward)

    def run(self, program: Program) -> Program:
        made, notes = self._selected(program)
        program = replace(program, notes=(*program.notes, *notes))
        trial = _Writer(replace(program, graph=copy_graph(program.graph)), self.spec)
        names = {n.name: n for n in trial.graph.nodes}
        given = [trial.replay(replace(m, op=names[m.op.name]), "choice") for m in made]
        needed = behind([trial.graph.output_node()])
        made = [m for m, placeholder in zip(made, given, strict=True) if placeholder in needed]
        writer = _Writer(replace(program, graph=copy_graph(program.graph)), self.spec)
        names = {n.name: n for n in writer.graph.nodes}
        errors = Errors()
        for m in _named(made):
            with errors.collect():
                writer.write(replace(m, op=names[m.op.name]))
        errors.raise_any()
        return writer.program()

    def _selected(self, program: Program) -> tuple[list[_Made], list[str]]:
        """Return the choices of the modules that the spec names, in the order of the graph, and notes."""
        entries, errors, notes = section.of(self.spec), Errors(), list[str]()
        every, modules = list(_choices(program)), {""}
        for node in calls(program.graph):
            modules.update(enclosing(source_of(node).module))
        making = sorted({source_of(op).module for op, _ in every})
        selectors = [Selector(pattern, self.spec.where(("choices", pattern))) for pattern in entries]
        chosen: dict[tuple[fx.Node, int], section.Choice] = {}
        selected = select_modules(selectors, sorted(modules), program.module_aliases, errors)
        for s, entry, names in zip(selectors, entries.values(), selected, strict=True):
            inside = {name: [c for c in every if _inside(source_of(c[0]).module, name)] for name in names}
            none = [name for name, choices in inside.items() if not choices]
            if none and len(none) == len(names):
                fault = f"pattern {s.pattern!r} matches {none[0] or 'the model'}, which makes no choice"
                known = ", ".join(name or ROOT for name in making[:12]) + (", ..." if len(making) > 12 else "")
                fix = f"modules that make one: {known}" if making else "no module of the model makes a choice"
                errors.add(fault, where=s.where, fix=fix)
            elif none and none != [""]:
                left = ", ".join(name or "the model" for name in none)
                notes.append(f"{s.where}: pattern {s.pattern!r} also matches modules that make no choice: {left}")
            for choices in inside.values():
                chosen |= {c: entry for c in choices if c not in chosen}
        errors.raise_any()
        return [_Made(*c, chosen[c]) for c in every if c in chosen], notes


def _inside(module: str, name: str) -> bool:
    return module == name or not name or module.startswith(f"{name}.")


def _choices(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Yield (op, index of the result) of each choice: made of floats that depend on weights, batch or random draws."""
    varying = {"rng", *(p.name for p in program.params), *(x.name for x in program.inputs)}
    depends = {n for n in program.graph.nodes if n.op == "placeholder" and n.name in varying}
    for node in program.graph.nodes:
        if node.op == "placeholder" or depends.isdisjoint(node.all_input_nodes):
            continue
        depends.add(node)
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if any(continuous(v) for x in operands_of(node) if x in depends for v in values_of(x) if v is not None):
            values = values_of(node)
            yield from ((node, i) for i, v in enumerate(values) if v is not None and not continuous(v))


def _named(made: Sequence[_Made]) -> Iterator[_Made]:
    """Yield the choices with names: of their module, numbered if it makes several."""
    modules = [source_of(m.op).module or ROOT for m in made]
    for i, (m, module) in enumerate(zip(made, modules, strict=True)):
        several = modules.count(module) > 1
        yield replace(m, name=f"{module}.{modules[:i].count(module)}" if several else module)


class _Writer:
    """Writes choices into the graph of a program, which it changes."""

    def __init__(self, program: Program, spec: Any) -> None:
        self._program, self.graph, self._spec = program, program.graph, spec
        self._inputs: list[Input] = []
        self._outputs: list[tuple[Output, fx.Node]] = []
        self._last = list(placeholders(self.graph).values())[-1]
        self._rows = batch_rows(spec, program)

    def program(self) -> Program:
        """Return the program with the inputs and outputs that were written."""
        node, program = self.graph.output_node(), self._program
        returned: Any = node.args[0]
        node.args = ((returned[0], (*returned[1], *(n for _, n in self._outputs))),)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        outputs, features = tuple(o for o, _ in self._outputs), dict(program.features)
        if outputs:
            features["choices"] = tuple(o.name for o in outputs)
        inputs, outputs = (*program.inputs, *self._inputs), (*program.outputs, *outputs)
        return replace(program, inputs=inputs, outputs=outputs, features=features)

    def write(self, m: _Made) -> None:
        """Make a choice an output or an input. Raises ShardcError where weights are wanted and there are none."""
        weights, replays = self._weights(m) if m.entry.weights else None, m.entry.mode == "replay"
        if not replays:
            self._record(m.name, self._result(m), m)
        if weights is not None and not replays:
            self._record(f"{m.name}.weights", weights, m)
        if weights is not None and replays:
            weights.replace_all_uses_with(self._input(f"{m.name}.weights", weights, m))
        if replays:
            self.replay(m, m.name)

    def replay(self, m: _Made, name: str) -> fx.Node:
        """Replace a choice, and the values that its op gives beside it, by what is given. Return the placeholder."""
        op, old, (dim, along) = m.op, self._result(m), _along(m.op)
        value, x = value_of(old), op.args[0]
        new = self._input(name, old, m)
        placeholder = next(n for n in behind([new]) if n.op == "placeholder")
        old.replace_all_uses_with(new)
        beside = [u for u in op.users if u.target is operator.getitem and u is not old and u.users]
        for values in beside:
            v = value_of(values)
            if not continuous(v) or dim is None or v.shape != value.shape:
                fault = f"{op_name(op.target)} gives {v.dtype} beside the choice, which do not follow from it"
                raise source_of(op).error(fault, "leave this module out of `choices`")
            emit = partial(self._emit, op)
            index = new if len(value.shape) == len(along) else emit(aten.unsqueeze.default, new, dim)
            taken = emit(aten.gather.default, x, dim, index)
            if index is not new:
                taken = emit(aten.squeeze.dim, taken, dim)
            values.replace_all_uses_with(taken)
        return placeholder

    def _record(self, name: str, node: fx.Node, m: _Made) -> None:
        value, emit = value_of(node), partial(self._emit, self.graph.output_node(), like=m.op)
        shape, _ = self._shape(m, value)
        if continuous(value):
            node = emit(aten.detach.default, node) if value.requires_grad else node
        elif value.dtype != torch.bool:
            node = emit(aten._to_copy.default, node, dtype=torch.int32)
        if shape != value.shape:
            node = emit(aten.reshape.default, node, list(shape))
        self._outputs.append((Output(name, shape, value_of(node).dtype, as_made=True), node))

    def _input(self, name: str, old: fx.Node, m: _Made) -> fx.Node:
        """Add an input in place of a value; return it in the type of that value."""
        value = value_of(old)
        shape, choice = self._shape(m, value)
        dtype = value.dtype if continuous(value) or value.dtype == torch.bool else torch.int32
        with self.graph.inserting_after(self._last):
            self._last = self.graph.placeholder(re.sub(r"\W", "_", f"choice_{name}"))
        placeholder = self._last
        placeholder.meta = {"value": Value(shape, dtype), "source": source_of(m.op)}
        placeholder.target = placeholder.name
        self._inputs.append(Input(placeholder.name, (CHOICES, name), shape, dtype, choice=choice))
        emit, new = partial(self._emit, m.op), placeholder
        new = emit(aten._to_copy.default, new, dtype=value.dtype) if dtype != value.dtype else new
        return emit(aten.reshape.default, new, list(value.shape)) if shape != value.shape else new

    def _shape(self, m: _Made, value: Value) -> tuple[tuple[int, ...], Choice]:
        """Return the shape of a choice, or of its weights, with rows and tokens as two dims; and what it is."""
        (dim, along), own, (rows, lengths) = _along(m.op), value.shape, self._rows
        choice = Choice(source_of(m.op).module, own)
        if not continuous(value) and value.dtype != torch.bool and along:
            distinct = dim if op_name(m.op.target) in _DISTINCT else None
            choice = replace(choice, below=math.prod(along) if dim is None else along[dim], distinct=distinct)
        kept = dim == 0 and op_name(m.op.target) in _DISTINCT  # it chooses among rows
        if not own or kept or _moved(m.op) or not rows or own[0] % rows:
            return own, choice
        merged = own[0] != rows
        shape = (rows, own[0] // rows, *own[1:]) if merged else own
        tokens = next((d for d, n in enumerate(shape) if d and n in lengths), None)
        distinct = choice.distinct + merged if choice.distinct is not None else None
        return shape, replace(choice, rows=0, tokens=tokens, distinct=distinct)

    def _weights(self, m: _Made) -> fx.Node:
        """Return the weights beside a choice: of its op, or else what is gathered at its indices."""
        for user in m.op.users:
            if user.target is operator.getitem and user.args[1] != m.index and user.users:
                return user
        todo, seen = list(self._result(m).users), set[fx.Node]()
        while todo:
            node = todo.pop(0)
            if node in seen or not isinstance(node.meta.get("value"), Value):
                continue
            seen.add(node)
            if node.target is aten.gather.default and continuous(value_of(node)):
                return node
            if not continuous(value_of(node)):
                todo += node.users
        fault = f"weights: true, but the choice of {source_of(m.op).module or 'the model'} has no weights beside it"
        raise source_of(m.op).error(fault, "leave `weights` out for it")

    def _result(self, m: _Made) -> fx.Node:
        """Return the node of a choice."""
        op, i = m.op, m.index
        if not isinstance(op.meta["value"], tuple):
            return op
        known = next((u for u in op.users if u.target is operator.getitem and u.args[1] == i), None)
        if known is None:  # nothing has read it so far
            with self.graph.inserting_after(op):
                known = self.graph.call_function(operator.getitem, (op, i))
            known.meta = {"value": op.meta["value"][i], "source": source_of(op)}
        return known

    def _emit(self, before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {"value": infer(target, args, kwargs), "source": source_of(like or before)}
        return new


def _along(op: fx.Node) -> tuple[int | None, tuple[int, ...]]:
    """Return the dim along which an op chooses (None: among all elements), and the shape of what it chooses from.

    The shape is () where an op has no such dim, as a comparison.
    """
    named = Args(op.target, op.args, op.kwargs).named  # type: ignore[arg-type]
    value = op.args[0].meta.get("value") if op.args and isinstance(op.args[0], fx.Node) else None
    if "dim" not in named or not isinstance(value, Value) or not value.shape:
        return None, ()
    dim = named["dim"]
    return dim if dim is None else dim % len(value.shape), value.shape


def _moved(node: fx.Node) -> bool:
    """Return whether dims were moved on the way to a choice, back to the first product."""
    while node.op == "call_function":
        if op_name(node.target) in _MOVES:
            return True
        operands, before = node.all_input_nodes, node
        node = operands[0] if operands else node
        if not operands or not values_of(node) or len(values_of(node)[0].shape) != len(values_of(before)[0].shape):
            return False
        if op_name(node.target) in ("linear", "mm", "matmul", "addmm"):
            return False
    return False


#: With the pass that it follows.
PASSES = (
    ("grouped_mm", Entry("choices", ChooseOutside, "experts are matched by their choices; before place splits these")),
)
