"""Precision: write the casts of mixed precision into the program (`precision: {compute: bfloat16}`).

    before                                      after
    h = layer_norm(x, [64], w, b)     f32       x_f32 = to(x, float32)                    x: bf16
                                                h_f32 = layer_norm(x_f32, [64], w, b)     statistics in float32
                                                h = to(h_f32, bfloat16)
    y = linear(h, p)                  f32       p_bf16 = to(p, bfloat16)                  p: f32, the master copy
                                                y = linear(h, p_bf16)                     bf16
    loss = cross_entropy_loss(y, t)   f32       y_f32 = to(y, float32)
                                                loss = cross_entropy_loss(y_f32, t)

The pass works on the captured graph, whose ops are those of torch.autocast's lists (op_lists.py). Canonical then
rewrites norms and losses in the dtypes that this pass has set. For placement, casts are elementwise ops: the cast
of a weight is split like the weight, and the narrow tensor is gathered or summed. Gradients reach a parameter through
its cast, in its own dtype.

Only values that depend on parameters or on floating inputs change: position tables, masks and running statistics keep
their dtypes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.ir import types as values
from shardc.ir.graph import value_of
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Param
from shardc.passes.base import Pass
from shardc.passes.precision.op_lists import CASTS, LOOKUPS, LOW, MOVES, NARROWED, PROMOTE, STAY, is_wide
from shardc.torch_private import OpOverload

aten = torch.ops.aten


UNSCALED = (
    "float16 has no numbers below 6e-8, and gradients are often smaller: they silently become 0. Write `loss_scale:"
    " dynamic`, or compute in bfloat16"
)


@dataclass(frozen=True)
class Precision(Pass):
    """Adds casts to a captured program: parameters get `precision.params`, products `precision.compute`.

    Activations between products also have the compute dtype. Without `compute` they are computed as stored, without
    `params` stored as in the model. Sums, statistics and losses run in float32, or wider if operands are.
    """

    def applies(self, program: Program) -> bool:
        return bool(self.spec.precision.compute or self.spec.precision.params)

    def run(self, program: Program) -> Program:
        stored, compute = dtype_of(self.spec.precision.params), dtype_of(self.spec.precision.compute)
        compute = compute or stored
        assert compute is not None
        params = tuple(
            replace(p, dtype=stored) if stored is not None and p.dtype.is_floating_point else p for p in program.params
        )
        scaled = compute is not torch.float16 or self.spec.precision.loss_scale is not None or program.forward_only
        notes = program.notes if scaled else (*program.notes, self.spec.where(("precision",)) + f": {UNSCALED}")
        graph = _Writer(program, compute, {p.name: p for p in params}).run()
        return replace(program, params=params, graph=graph, notes=notes)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that the spec names; None if it names none."""
    return getattr(torch, name) if name else None


@dataclass(frozen=True)
class _NewValue:
    """A value of the old graph in the new one.

    node: in the dtype in which it is made. lean: it is wider than the compute dtype because of a wide operand; ops that
    follow their operands read it in the compute dtype. stored: it depends on parameters and constants by moves and
    elementwise ops alone; if it is wide, activations decide the dtype. scoped: capture dropped a cast of it that
    changed nothing there (see `_cast`): the module in which the cast counts, and its dtype.
    """

    node: fx.Node
    live: bool  # depends on parameters or floating inputs
    lean: bool = False
    stored: bool = False
    scoped: tuple[str, torch.dtype] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return value_of(self.node).dtype

    @property
    def floats(self) -> bool:
        return _floating(self.node)


@dataclass
class _Writer:
    program: Program
    compute: torch.dtype
    params: dict[str, Param]
    graph: fx.Graph = field(default_factory=fx.Graph)
    held: dict[fx.Node, _NewValue] = field(default_factory=dict)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    source: Source = field(default_factory=Source)

    def __post_init__(self) -> None:
        self.wide = torch.promote_types(self.compute, torch.float32)
        self.alive, self.body = _reach(self.program.graph)

    def run(self) -> fx.Graph:
        floating = {i.name for i in self.program.inputs if i.dtype.is_floating_point}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                new = self.graph.placeholder(node.name)
                new.meta = dict(node.meta)
                if (p := self.params.get(node.name)) is not None:
                    new.meta["value"] = replace(node.meta["value"], dtype=p.dtype)
                self.held[node] = _NewValue(new, p is not None or node.name in floating, stored=p is not None)
            elif node.op == "output":
                self._output(node)
            elif node in self.alive:
                self.source = node.meta["source"]
                self.held[node] = self._call(node)
        self.graph.lint()
        return self.graph

    def _output(self, node: fx.Node) -> None:
        """Write the output: the loss and other scalars at least in float32, new buffers in their dtypes."""
        output: Any = node.args[0]
        loss, news = output
        dtypes = [b.dtype for b in self.program.buffers if b.updated]
        buffers = [self._cast_to(self.held[n].node, d) for n, d in zip(news, dtypes, strict=False)]
        outputs = [self._number(n) for n in news[len(dtypes) :]]
        self.graph.output((self._number(loss) if loss is not None else None, (*buffers, *outputs)))

    def _number(self, old: fx.Node) -> fx.Node:
        """Return a result of the step; a scalar that the compute dtype reaches becomes float32 or wider."""
        entry = self.held[old]
        v = value_of(entry.node)
        narrow = entry.live and math.prod(v.shape) == 1 and v.dtype.is_floating_point
        return self._cast_to(entry.node, torch.promote_types(v.dtype, torch.float32)) if narrow else entry.node

    # --- one op

    def _call(self, node: fx.Node) -> _NewValue:
        name = values.op_name(node.target)
        used = {n: self._as_seen_by(n, node) for n in node.all_input_nodes}
        floats = [h for h in used.values() if h.floats]
        live = any(h.live for h in used.values())
        if not any(h.live for h in floats):
            return _NewValue(self._copy(node, {n: h.node for n, h in used.items()}), live)
        if not _is_listed(node.target):  # only capture knows the dtypes that foreign kernels and custom backwards take
            return _NewValue(self._copy(node, {n: self._captured(n, h) for n, h in used.items()}), True)
        if name in CASTS:
            return self._cast(node, used)
        if name in MOVES:
            return self._move(node, used)
        if name in LOW:
            stay = {node.args[i] for i in STAY.get(name, ())}
            return _NewValue(
                self._copy(node, {n: h.node if n in stay else self._low(h, name) for n, h in used.items()}), True
            )
        if name in LOOKUPS:
            return self._narrowed(self._copy(node, {n: h.node for n, h in used.items()}), True)
        if is_wide(name):
            return self._widened(node, used, name)
        return self._following(node, used, name)

    def _captured(self, node: fx.Node, h: _NewValue) -> fx.Node:
        """Return an operand in the dtype that it had in capture."""
        return (
            h.node
            if isinstance(node.meta["value"], tuple)
            else self._cast_to(h.node, value_of(node).dtype)
            if h.floats
            else h.node
        )

    def _low(self, h: _NewValue, name: str) -> fx.Node:
        """Return an operand in the compute dtype.

        A mask's least number must not become -inf: a row that sees nothing would become NaN.
        """
        node = h.node
        if not h.floats or h.dtype == self.compute:
            return node
        limit = torch.finfo(self.compute)
        if name.endswith("attention") and not h.live and limit.max < torch.finfo(h.dtype).max:
            if (node, self.compute) not in self.casts:
                v = value_of(node)
                inside = self._emit(v, aten.clamp.default, node, limit.min, limit.max)
                endless = self._emit(replace(v, dtype=torch.bool, requires_grad=False), aten.isinf.default, node)
                kept = self._emit(v, aten.where.self, endless, node, inside)
                self.casts[node, self.compute] = self._cast_to(kept, self.compute)
            return self.casts[node, self.compute]
        return self._cast_to(node, self.compute)

    def _widened(self, node: fx.Node, used: dict[fx.Node, _NewValue], name: str) -> _NewValue:
        """Compute in float32, or in the widest dtype of the operands."""
        dtype = self.wide
        for h in used.values():
            dtype = torch.promote_types(dtype, h.dtype) if h.floats else dtype
        first = next(h for h in used.values() if h.floats)
        new = self._copy(node, {n: self._cast_to(h.node, dtype) if h.floats else h.node for n, h in used.items()})
        if name in NARROWED and node in self.body and self._read(first) == self.compute:
            return self._narrowed(new, True)
        return _NewValue(new, True)

    def _narrowed(self, new: fx.Node, live: bool) -> _NewValue:
        """Return a result in the compute dtype; of several results only the first is cast."""
        if isinstance(new.meta["value"], tuple):
            first = self._emit(new.meta["value"][0], operator.getitem, new, 0)
            self.casts[new, self.compute] = self._cast_to(first, self.compute)  # found again by `_move`
            return _NewValue(new, live)
        return _NewValue(self._cast_to(new, self.compute), live) if _floating(new) else _NewValue(new, live)

    def _move(self, node: fx.Node, used: dict[fx.Node, _NewValue]) -> _NewValue:
        first = next(h for h in used.values() if h.floats)
        if node.target is operator.getitem and node.args[1] == 0 and (first.node, self.compute) in self.casts:
            return _NewValue(self.casts[first.node, self.compute], True)
        new = self._copy(node, {n: h.node for n, h in used.items()})
        return _NewValue(new, True, first.lean, first.stored)

    def _cast(self, node: fx.Node, used: dict[fx.Node, _NewValue]) -> _NewValue:
        """Keep the model's own casts.

        A cast that changed nothing in capture (`x.float()` of float32) counts within its own module, and only widens.
        Capture replaced it by its operand, so a residual sum outside may use the cast where the model uses the operand.
        """
        (operand, *_), h = node.all_input_nodes, used[node.all_input_nodes[0]]
        was, now = value_of(operand), value_of(node)
        if not h.floats or was.dtype != now.dtype:
            fits = value_of(h.node).dtype == now.dtype
            return _NewValue(h.node if fits else self._emit(now, aten._to_copy.default, h.node, dtype=now.dtype), True)
        return replace(h, scoped=(node.meta["source"].module, now.dtype))

    def _following(self, node: fx.Node, used: dict[fx.Node, _NewValue], name: str) -> _NewValue:
        """Compute in the dtype of the operands, the widest of several.

        Between two products, a value that depends on an activation in the compute dtype is an activation itself: its
        readers get it in the compute dtype. After the last product nothing is narrowed: only the loss is left.
        """
        floats = {n: h for n, h in used.items() if h.floats}
        acts = [h for h in floats.values() if h.live and not h.stored]
        if not acts:
            new = self._copy(node, {n: h.node for n, h in used.items()})
            return _NewValue(new, True, stored=True)
        big = [h for h in acts if value_of(h.node).shape] or acts
        narrow = any(h.dtype == self.compute for h in big)
        if not narrow:  # values that are read wide are computed wide
            floats = {n: replace(h, lean=False) for n, h in floats.items()}
        if narrow and not self._fits(node):
            new = self._copy(
                node,
                {
                    n: self._cast_to(h.node, torch.promote_types(h.dtype, self.wide)) if h.floats else h.node
                    for n, h in used.items()
                },
            )
            return _NewValue(new, True)
        read = {n: h.node for n, h in used.items()}
        for n, h in floats.items():
            read[n] = self._cast_to(h.node, self.compute if narrow and h.stored else self._read(h))
        if name not in PROMOTE and len({value_of(read[n]).dtype for n in floats}) > 1:
            shaped = {
                value_of(read[n]).dtype for n in floats if value_of(read[n]).shape
            }  # the dtypes of tensors come before those of numbers, as in torch
            dtype = (
                self.compute
                if narrow and node in self.body
                else _widest(shaped or {value_of(read[n]).dtype for n in floats})
            )
            read |= {n: self._cast_to(read[n], dtype) for n in floats}
        new = self._copy(node, read)
        wider = _floating(new) and not isinstance(new.meta["value"], tuple) and value_of(new).dtype != self.compute
        return _NewValue(new, True, lean=wider and node in self.body and (narrow or any(h.lean for h in acts)))

    def _read(self, h: _NewValue) -> torch.dtype:
        """Return the dtype in which ops that follow their operands read a value."""
        return self.compute if h.lean else h.dtype

    def _fits(self, node: fx.Node) -> bool:
        """Return whether the numbers in a call's arguments can be represented in the compute dtype.

        Masks are filled with float32's least number.
        """
        limit = torch.finfo(self.compute)
        numbers = [abs(a) for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
        return all(a == 0 or a == float("inf") or a != a or limit.tiny <= a <= limit.max for a in numbers)

    # --- values of the new graph

    def _as_seen_by(self, node: fx.Node, user: fx.Node) -> _NewValue:
        """Return a value as one user sees it."""
        h = self.held[node]
        if h.scoped is None:
            return h
        (module, dtype), place = h.scoped, user.meta["source"].module
        h = replace(h, scoped=None)
        if not (place == module or place.startswith(f"{module}." if module else "")):
            return h
        wider = torch.promote_types(self._read(h), dtype)
        return h if h.stored or wider == self._read(h) else _NewValue(self._cast_to(h.node, wider), h.live)

    def _cast_to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a floating value in a dtype, cast once. For moved parameters the parameter itself is cast."""
        if not _floating(node) or isinstance(node.meta["value"], tuple) or value_of(node).dtype == dtype:
            return node
        if (node, dtype) not in self.casts:
            v = replace(value_of(node), dtype=dtype)
            root = self._root(node)
            if root is not None:
                moved = self._cast_to(root, dtype)
                new = self._emit(
                    v, node.target, *fx.map_arg(node.args, lambda n: moved if n is root else n), **node.kwargs
                )
            else:
                new = self._emit(v, aten._to_copy.default, node, dtype=dtype)
                new.meta["mixed"] = True
            self.casts[node, dtype] = new
        return self.casts[node, dtype]

    def _root(self, node: fx.Node) -> fx.Node | None:
        """Return the operand of which a node is a view, if that comes from a parameter by views."""
        if node.op != "call_function" or values.op_name(node.target) not in MOVES or node.target is operator.getitem:
            return None
        operands = [n for n in node.all_input_nodes if _floating(n)]
        ancestor = operands[0] if len(operands) == 1 else None
        while ancestor is not None and ancestor.op == "call_function":
            ancestor = self._parent(ancestor)
        return operands[0] if ancestor is not None and ancestor.name in self.params else None

    def _parent(self, node: fx.Node) -> fx.Node | None:
        operands = [n for n in node.all_input_nodes if _floating(n)]
        fit = values.op_name(node.target) in MOVES and node.target is not operator.getitem and len(operands) == 1
        return operands[0] if fit else None

    def _emit(self, value: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {"value": value, "source": self.source}
        return new

    def _copy(self, node: fx.Node, read: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a call with other operands, and infer its type again if theirs differ."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: read[n])
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        value = node.meta["value"]
        if any(_types(old) != _types(now) for old, now in read.items()):
            value = values.infer(node.target, args, values.without_place(kwargs))
            value = _regraded(value, node.meta["value"])
        new.meta = {**node.meta, "value": value}
        return new


# --- types ------------------------------------------------------------------------------------------------------------


def _all(node: fx.Node) -> tuple[Any, ...]:
    v = node.meta.get("value")
    return v if isinstance(v, tuple) else (v,)


def _is_listed(target: Any) -> bool:
    """Return whether torch's lists, or shardc's, apply to an op."""
    return target is operator.getitem or (
        isinstance(target, OpOverload) and (target.namespace == "aten" or values.op_name(target) in STAY)
    )


def _types(node: fx.Node) -> list[Any]:
    return [v and v.dtype for v in _all(node)]


def _floating(node: fx.Node) -> bool:
    return any(v is not None and v.dtype.is_floating_point for v in _all(node))


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    first, *rest = dtypes
    for d in rest:
        first = torch.promote_types(first, d)
    return first


def _regraded(new: Any, old: Any) -> Any:
    """Return `new`'s shapes and dtypes with the gradients of `old`."""
    if isinstance(new, tuple):
        return tuple(map(_regraded, new, old))
    return replace(new, requires_grad=old.requires_grad) if new is not None and old is not None else new


def _reach(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return (the nodes on which the output depends, the nodes on which some product depends)."""
    nodes = list(graph.nodes)
    alive, body = set(nodes[-1:]), set()
    for node in reversed(nodes):
        if node in alive:
            alive.update(node.all_input_nodes)
            if node in body or (node.op == "call_function" and values.op_name(node.target) in LOW):
                body.update(node.all_input_nodes)
    return alive, body
