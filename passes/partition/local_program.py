"""Write the graph of one rank op by op from a placed global graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from shardc.ir.conversions import Conversion
from shardc.ir.graph import enlarges, operands_of, producer_of, source_of, value_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL_GRAD, Layout, Partial, Placement, Shard
from shardc.ir.program import Program
from shardc.optional import needed, table
from shardc.passes import outputs
from shardc.passes.partition.collectives import collective_of, digit_arguments, gather_note
from shardc.passes.partition.conversion_order import Routes
from shardc.rules.core import registry
from shardc.rules.core.choices import Choices, choices_of
from shardc.rules.core.op_call import call_of
from shardc.rules.core.registry import LocalCall
from shardc.rules.core.strategy import Strategy, needs_sum_grad
from shardc.runtime import ops
from shardc.torch_private import add_node


@dataclass
class LocalProgram:
    """Writes the graph of one rank from a placed global graph, op by op.

    A value of the global graph may exist here in several *forms*, one for each layout in which an op needs it: the
    form in which it is produced, and its conversions (shardc.ir.conversions). Every op is written in three steps:

    1. Each operand is taken in the form that the op's strategies need. If there is none, the nearest form is converted,
       one row of the table after the other; each form on the way is kept for other users. So two ops that need an
       all_reduce share it.
    2. The op is written, by its rule's `local` if sizes or offsets in its arguments change (`view`, `embedding`).
    3. The result has one form, that of the strategies' outputs. A partial sum stays partial until an op needs it whole,
       in step 1 of that op.

    A conversion's cause is the annotation behind the op that made a sum, or behind the op that needs the value.
    """

    program: Program
    mesh: Mesh
    batch_axes: frozenset[str] = frozenset()  # as outputs.batch_axes
    graph: fx.Graph = field(default_factory=fx.Graph)
    # (global node, index of a result) -> {layout: local node}; the first is the form in which the value is produced
    forms: dict[tuple[fx.Node, int], dict[Layout, fx.Node]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)  # axes over which values are gathered without an annotation
    mesh_node: fx.Node | None = None
    # (local node, padded shard, number) -> the node with that number in its padding
    filled: dict[tuple[fx.Node, Shard, float], fx.Node] = field(default_factory=dict)
    choices: dict[Any, Choices] = field(default_factory=dict)
    inputs: set[str] = field(init=False)
    shared_lines: dict[Any, fx.Node] = field(default_factory=dict)  # written once, by their call (`_emit_for`)
    lines: list[fx.Node] = field(default_factory=list)  # of the op that its rule's `local` writes
    layouts: dict[tuple[tuple[str, Placement], ...], Layout] = field(default_factory=dict)  # see `_layout`

    def __post_init__(self) -> None:
        self.inputs = {x.name for x in self.program.inputs}

    def run(self) -> fx.Graph:
        stored = {p.name: p.layout for p in self.program.stored}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node, stored.get(node.name, Layout()))
            elif node.op == "output":
                self._output(node)
            elif node.target is not operator.getitem:
                if "pin" in node.meta:  # its strategies only name its operand's placement
                    self._pin(node)
                else:
                    self.call(node)
        self.graph.eliminate_dead_code()
        return self.graph

    def _output(self, node: fx.Node) -> None:
        """Write the output node: the loss whole, new buffers as stored, outputs as in shardc.passes.outputs."""
        returned: Any = node.args[0]
        loss, new_values = returned
        layouts = [b.layout for b in self.program.buffers if b.updated]
        for o, value in zip(self.program.outputs, new_values[len(layouts) :], strict=True):
            op, i = producer_of(value)
            produced = next(iter(self.forms[op, i]))
            layouts.append(outputs.layout_of(o, values_of(op)[i], dict(produced.items), self.batch_axes, self.mesh))
        causes = [""] * (len(layouts) - len(self.program.outputs)) + [
            o.cause or ("it is an output, returned whole" if loss is None else "") for o in self.program.outputs
        ]
        new = tuple(
            self._in_layout(v, layout, node, c) for v, layout, c in zip(new_values, layouts, causes, strict=True)
        )
        self.graph.output((self._in_layout(loss, Layout(), node) if loss is not None else None, new))

    def placeholder(self, node: fx.Node, layout: Layout) -> None:
        """Write a parameter, buffer or input as it is stored; `mesh` and `rng` have no layout."""
        value = node.meta.get("value")
        meta = {"source": source_of(node), "value": value and replace(value, layout=layout)}
        meta |= {"rows": node.meta["rows"]} if "rows" in node.meta else {}
        new = add_node(self.graph, "placeholder", node.name, (), name=node.name, meta=meta)
        self.forms[node, 0] = {layout: new}
        if node.name == "mesh":
            self.mesh_node = new

    def _pin(self, node: fx.Node) -> None:
        """Replace an annotated activation by the form that the annotation names; it is no op."""
        layout = Layout.of({a: s.outputs[0] for a, s in node.meta["strategies"].items()}, self.mesh)
        self.forms[node, 0] = {layout: self._in_layout(operands_of(node)[0], layout, node)}

    def call(self, node: fx.Node) -> None:
        """Write one op: convert its operands, make its arguments local, and type its result."""
        strategies: dict[str, Strategy] = node.meta["strategies"]
        operands = operands_of(node)
        need = [self._layout({a: s.inputs[i] for a, s in strategies.items()}) for i in range(len(operands))]
        out = [self._layout({a: s.outputs[i] for a, s in strategies.items()}) for i in range(len(values_of(node)))]
        if not any(map(needs_sum_grad, values_of(node))):
            need = [self._existing_form(n, layout) for n, layout in zip(operands, need, strict=True)]
        converted = [self._in_layout(n, layout, node) for n, layout in zip(operands, need, strict=True)]
        converted = [self._with_summable_padding(operands, x, i, need[i], strategies) for i, x in enumerate(converted)]
        in_order = iter(self._with_finite_padding(node, converted, need))

        def local_operand(n: fx.Node) -> fx.Node:
            if n.meta.get("value") is None:  # mesh or rng
                return next(iter(self.forms[n, 0].values()))
            return next(in_order)

        args = fx.node.map_arg(node.args, local_operand)
        kwargs = dict(fx.node.map_arg(dict(sorted(node.kwargs.items())), local_operand))
        typed = tuple(replace(v, layout=layout) for v, layout in zip(values_of(node), out, strict=True))
        emit = partial(self._emit_for, node, typed if isinstance(node.meta["value"], tuple) else typed[0])
        rule = registry.find(node.target)
        split = any(s.kind not in ("replicate", "partial_grad", "partial") for s in strategies.values())
        if rule is not None and rule.local is not None and split:
            assert self.mesh_node is not None
            call = LocalCall(
                call_of(node), self.mesh, strategies, tuple(need), tuple(out), tuple(args), kwargs, self.mesh_node, emit
            )
            self.lines = []
            new = rule.local(call)
            for line in self.lines if len(self.lines) > 1 else ():
                line.meta["op"] = node.name
        else:
            new = emit(node.target, tuple(args), kwargs)
            if "mixed" in node.meta:  # of mixed precision: see shardc.ir.metadata
                new.meta["mixed"] = True
        if not isinstance(node.meta["value"], tuple):
            self.forms[node, 0] = {out[0]: new}
            return
        for user in node.users:
            if user.target is operator.getitem:
                _, i = producer_of(user)
                if (node, i) not in self.forms:
                    item = self._emit(operator.getitem, (new, i), {}, typed[i], user, None)
                    self.forms[node, i] = {out[i]: item}

    def _emit_for(
        self,
        node: fx.Node,
        result: Any,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        value: Any = None,
        collective: Collective | None = None,
        once: str = "",
    ) -> fx.Node:
        """Write a line of a global op, with its source; a collective without a cause gets the op's.

        value: its type; default: `result`, that of the op. once: end of the name; ops that need the same
        line share it.
        """
        key = (target, args, tuple(kwargs.items()))
        if once and key in self.shared_lines:
            return self.shared_lines[key]
        if collective is not None and not collective.cause:
            causes = (node.meta.get("why", {}).get(digit, "") for digit in self.mesh.digits(*collective.axes))
            cause = "; ".join(dict.fromkeys(filter(None, causes)))
            collective = replace(collective, cause=cause, implicit=not cause)
        name = f"{node.name}_{once}" if once else ""
        new = self._emit(target, args, kwargs, result if value is None else value, node, collective, name)
        if once:
            self.shared_lines[key] = new
        self.lines.append(new)
        return new

    def _existing_form(self, node: fx.Node, need: Layout) -> Layout:
        """Return the layout in which an op without a gradient reads a value: of a form that it can use, else `need`.

        Such a form differs from `need` at most in PartialGrad.
        """

        def value(layout: Layout) -> list[tuple[str, Placement]]:
            return [(a, p) for a, p in layout.items if p != PARTIAL_GRAD]

        forms = self.forms[producer_of(node)]
        return need if need in forms else next((f for f in forms if value(f) == value(need)), need)

    def _layout(self, placements: dict[str, Placement]) -> Layout:
        """Return Layout.of, cached for equal placements: there are few."""
        key = tuple(placements.items())
        if key not in self.layouts:
            self.layouts[key] = Layout.of(placements, self.mesh)
        return self.layouts[key]

    def _emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,
        cause: fx.Node,
        collective: Collective | None,
        name: str = "",
    ) -> fx.Node:
        """Write a line, with its type and metadata. cause: the global node whose source it gets."""
        new = add_node(self.graph, "call_function", target, args, kwargs, name=name or cause.name)
        if collective is not None or "tag" in kwargs:
            new.kwargs = {**kwargs, "tag": new.name}
        if collective is not None:
            new.meta["collective"] = collective
        new.meta |= {"value": value, "source": source_of(cause)}
        return new

    def _with_summable_padding(
        self, operands: Sequence[fx.Node], local: fx.Node, i: int, layout: Layout, strategies: dict[str, Strategy]
    ) -> fx.Node:
        """Return operand i with zeros in the padding of dims that the op sums away.

        A weight's padding is zero. So is that of its gradient if the op multiplies it by another zero-padded operand.
        Otherwise an optimizer would change it, so an op zeroes it in forward, and its gradient in backward.
        """
        sums = [s for s in strategies.values() if s.sums_padding(i)]
        node, values = operands[i], [value_of(x) for x in operands]
        if not sums or (self._is_weight(node) and all(s.multiplies_padding(i, values) for s in sums)):
            return local
        dims = {p.dim for s in sums if isinstance(p := s.inputs[i], Shard)}
        return self._filled(node, local, layout, [s for s in layout.paddings() if s.dim in dims], 0.0)

    def _with_finite_padding(self, node: fx.Node, local: list[fx.Node], need: Sequence[Layout]) -> list[fx.Node]:
        """Return an op's local operands with padding for which the op and its derivatives are finite."""
        if not any(layout.paddings() for layout in need):
            return local
        strategies, choices = node.meta["strategies"].values(), choices_of(node, self.choices)
        # the padding of inputs has copies of real rows
        copies = frozenset(i for i, x in enumerate(local) if x.op == "placeholder" and x.name in self.inputs)
        filled = []
        for i, number in enumerate(choices.fills(node, strategies, copies)):
            dims = choices.kept_dims(strategies, i) if number is not None else ()
            paddings = [s for s in need[i].paddings() if s.dim in dims]
            filled.append(self._filled(operands_of(node)[i], local[i], need[i], paddings, number or 0.0))
        return filled

    def _filled(self, node: fx.Node, local: fx.Node, layout: Layout, paddings: Sequence[Shard], fill: float) -> fx.Node:
        """Return the local node of a value with a number in the padding of some dims."""
        op, index = producer_of(node)
        value = replace(values_of(op)[index], layout=layout)
        for s in paddings:
            if (local, s, fill) not in self.filled:
                assert self.mesh_node is not None
                emit = partial(self._emit, cause=node, collective=None, name=f"{local.name}_filled")
                self.filled[local, s, fill] = registry.fill_padding(emit, local, value, s.dim, self.mesh_node, fill)
            local = self.filled[local, s, fill]
        return local

    def _is_weight(self, node: fx.Node) -> bool:
        """Return whether a node is a parameter, or a view of one that enlarges nothing: its padding is zero."""
        while (
            node.op == "call_function"
            and len(operands_of(node)) == 1
            and (rule := registry.find(node.target))
            and rule.linear == "0"
            and not enlarges(node)
        ):
            (node,) = operands_of(node)
        return node.name in self.program.params_by_name

    # --- conversions

    def _in_layout(self, node: fx.Node, need: Layout, user: fx.Node, cause: str = "") -> fx.Node:
        """Return the local node of a value in the layout that a user needs, converted from the nearest form.

        cause: the spec line to name if the value's maker and the user have none.
        """
        key = producer_of(node)
        have = self.forms[key]
        if need in have:
            return have[need]
        value = values_of(key[0])[key[1]]
        if not needs_sum_grad(value):
            need = Layout(tuple((a, p) for a, p in need.items if p != PARTIAL_GRAD))
            if need in have:
                return have[need]
        routes = Routes(self.mesh)
        start = min(have, key=lambda layout: routes.distance(layout, need))
        layout, local = start, have[start]
        for row, axes in routes.in_order(start, need, value):
            layout, local = self._convert(row, axes, layout, need, local, value, key[0], user, cause)
            have[layout] = local
        assert layout == need, f"{node}: {start} -> {need} ended at {layout}"
        return local

    def _convert(
        self,
        row: Conversion,
        axes: tuple[str, ...],
        old: Layout,
        need: Layout,
        x: fx.Node,
        v: Value,
        producer: fx.Node,
        user: fx.Node,
        cause: str,
    ) -> tuple[Layout, fx.Node]:
        """Write one call of a conversion's op. Return the layout that it leads to, and its node.

        x: the local node. v: its global value. producer: the global node that it comes from. user: the node that needs
        it. cause: the spec line to name if the two have none.
        """
        digit, new = self.mesh.digits(axes[0])[0], Routes(self.mesh).after(row, axes, old, need)
        over = axes if row.merged else axes[0]
        args = (x, self.mesh_node, over, *digit_arguments(self.mesh, digit, old, new))
        line = producer if row.source is Partial else user  # a sum belongs to the op whose result is summed
        name = f"{producer.name}_{row.suffix}"
        collective = collective_of(self.mesh, row, axes, old, new, v, producer, user, cause)
        if collective is not None and collective.implicit and collective.kind == "all_gather":
            self.gathered.add(axes[0])
            param = self.program.params_by_name.get(producer.name)
            self.notes.append(gather_note(f"{param.fqn} {v}" if param is not None else str(v), axes[0], user))
        kwargs: dict[str, Any] = {}
        packed = table("ops", "PACKED").get(producer.target)
        if packed is not None and collective is not None and row.forward == "all_gather":
            kwargs["fp8"] = packed(*producer.args)  # the format; the granule: a block size for each dim, 0: whole
            message = needed("fp8", "rounding", "message_bytes")(old.local_shape(v.shape, self.mesh), kwargs["fp8"][1])
            collective = replace(collective, packed=self.mesh.size(axes[0]) * message)
        return new, self._emit(getattr(ops, row.op), args, kwargs, replace(v, layout=new), line, collective, name)
