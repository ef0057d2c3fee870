"""Write the graph of one microbatch from a local graph with an axis of microbatches, and the prologue.

The prologue counts what is known from the batch alone. `OneMicrobatch` describes each op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.conversions import CONVERSIONS, between
from shardc.ir.graph import copy_graph, operands_of, source_of, values_of
from shardc.ir.mesh import MICROBATCH as AXIS
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Layout, Partial, PartialGrad, Replicate, Shard
from shardc.ir.types import behind, requires_grad
from shardc.passes.accumulate.loss_sum_after_step import CONVERTERS, sum_after_step
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of, rounds
from shardc.runtime import ops

#: Conversions over the axis that send nothing in forward, each with its replacement. The replacement sends nothing in
#: backward either: it only depends on the microbatch's number. So a value that is equal in all microbatches, which was
#: Replicate, becomes PartialGrad: it gets this microbatch's gradient, and the interpreter adds up those of all.
_OF_ONE_MICROBATCH: dict[Any, Any] = {
    getattr(ops, row.op): getattr(ops, replacement.op)
    for row in CONVERSIONS
    if row.forward in ("slice", "pad", "first")
    for replacement in between(PartialGrad if row.source is Replicate else row.source, row.target)
}
#: Linear in their first operand, and independent of the axis: a summand stays one. All conversions are.
_LINEAR = {*CONVERTERS, ops.partial_mean, ops.select_partial, operator.getitem}
#: Ops that add a number to a tensor.
_PLUS = {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}


def without_microbatches(layout: Layout) -> Layout:
    """Return the layout on the other axes. Microbatches are the innermost digit of the batch: others stay."""
    return Layout(tuple((a, p) for a, p in layout.items if a != AXIS))


def _of_one_microbatch(value: Value, mesh: Mesh) -> Value:
    """Return the type of a value in one microbatch."""
    s = value.layout[AXIS]
    layout = without_microbatches(value.layout)
    if not isinstance(s, Shard):
        return replace(value, layout=layout)
    m, shape = mesh.size(AXIS), list(value.shape)
    shape[s.dim] = s.padded(shape[s.dim]) // m

    def without_axis(p: Any) -> Any:
        if not isinstance(p, Shard) or p.dim != s.dim:
            return p
        return replace(p, split=p.split // m if p.split > s.split else p.split, padding=0, blocks=1)

    return replace(value, shape=tuple(shape), layout=Layout(tuple((a, without_axis(p)) for a, p in layout.items)))


def _same_in_all(node: fx.Node) -> bool:
    """Return whether all microbatches compute the same value. It must be no summand: types do not show summands."""
    return all(v.layout[AXIS] in (REPLICATE, PARTIAL_GRAD) for v in values_of(node))


@dataclass
class OneMicrobatch:
    """Writes one microbatch's graph, and the prologue, from a local graph with an axis of microbatches.

    Each op is visited once, from front to back. A conversion over the axis is replaced according to its operand:

        all_reduce, gather   of a value of the batch alone: `ops.total`, and its operand joins the prologue, which also
                             sums over other axes
        all_reduce           else: removed. The operand is this microbatch's *summand* of the value
        sum_grad, first_grad removed: gradients add up over microbatches anyway
        shard, pad, first    stays, and depends on the microbatch's number (`_OF_ONE_MICROBATCH`)

    An op linear in its summands returns a summand (`_propagate`); a value that is added to one is added in the first
    microbatch alone (`_once`). An op that is not linear takes the sum over all microbatches, `ops.summed` (`_sum`). At
    the end, the step's loss is a summand. For `loss = s_sum / n_sum` above: n_sum is a total, s_sum a summand, and a
    quotient is linear in its first operand. So loss is a summand, as needed.

    Last (loss_sum_after_step.py), if the loss is linear in sums over other axes too, ranks keep their summands of it:
    its gradient is the same, and no rank waits for others between microbatches.
    """

    old: fx.Graph
    mesh: Mesh
    params: set[str]
    where: str
    #: Errors, by the place in the model.
    refused: dict[str, ShardcError] = field(default_factory=dict)
    #: This microbatch's parts of sums over all.
    summands: set[fx.Node] = field(default_factory=set)
    #: (user, summand): the user read a partial sum before this pass too, which is summed later: nothing changes for it.
    partial_reads: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)
    #: Values that the prologue computes for each microbatch.
    totals: list[fx.Node] = field(default_factory=list)
    #: Summand -> its sum over all microbatches, from a forward of all of them.
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    #: Values that depend on such sums, equal in all microbatches; gradients go through.
    whole_sums: set[fx.Node] = field(default_factory=set)
    #: Whether each microbatch has a summand of a new value, for updated buffers and then outputs; known after `run`.
    adds: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = copy_graph(self.old)
        self.from_batch = self._made_of_batch()
        self.mesh_node = next(n for n in self.graph.nodes if n.name == "mesh")

    def run(self) -> tuple[fx.Graph, fx.Graph | None]:
        """Return the graph of one microbatch, and the prologue if there is one. Raises ShardcError."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self._take_axis_out(node):
                self._propagate(node)
        self._output(self.graph.output_node())
        if self.refused:
            raise self._refusal()
        sum_after_step(self.graph, self.summands, self.mesh_node, self.mesh)
        for i, node in enumerate(self.sums.values()):
            node.args = (*node.args[:2], len(self.totals) + i)
        prologue = self._prologue() if self.totals else None
        self.graph.eliminate_dead_code()
        for graph in (self.graph, prologue) if prologue is not None else (self.graph,):
            self._retype(graph)
            graph.lint()
        return self.graph, prologue

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on the extra forward that a step needs, and for which values."""
        places = dict.fromkeys(str(source_of(x)) or x.name for x in self.sums)
        twice = (
            f"{self.where}: a step first runs forward of all microbatches once more, for values made from sums "
            "over the whole batch:"
        )
        return (f"{twice} {', '.join(places)}",) if places else ()

    def _made_of_batch(self) -> set[fx.Node]:
        """Return the nodes that depend on the batch and buffers alone, not on parameters."""
        from_batch: set[fx.Node] = set()
        for n in self.graph.nodes:
            if (n.op == "placeholder" and n.name not in self.params) or (
                n.op == "call_function" and all(u in from_batch for u in n.all_input_nodes)
            ):
                from_batch.add(n)
        return from_batch

    def _take_axis_out(self, node: fx.Node) -> bool:
        """Remove the axis from a conversion. Return whether the node is left, for `_propagate` to look at."""
        collective: Collective | None = node.meta.get("collective")
        axes: tuple[str, ...] = collective.axes if collective is not None else ()
        if node.target in (ops.sum_grad, ops.first_grad):
            axes = node.args[2] if node.target is ops.sum_grad else (node.args[2],)  # type: ignore[assignment]
        by_number = node.target in _OF_ONE_MICROBATCH and node.args[2] == AXIS
        if AXIS not in axes and not by_number:
            return True
        if node.args[0] in self.whole_sums:
            if node.target is ops.to_partial:
                self.summands.add(node)  # it stays, and is known to be a summand
            else:
                self._refuse(node, node)
            return False
        rest = tuple(a for a in axes if a != AXIS)
        if by_number and node.args[0] in self.summands and node.target in (ops.to_partial, ops.partial_grad_to_partial):
            self._replace_by(node, node.args[0], summand=node)  # it is a summand already
            return False
        if by_number:
            node.target = _OF_ONE_MICROBATCH[node.target]
            node.meta.pop("collective", None)
            return True
        if node.target in (ops.sum_grad, ops.first_grad):
            return self._restrict_to(rest, node, node.args[0]) is node
        if node.target is ops.all_reduce and node in self.from_batch:
            self._sum_in_prologue(node, rest)
        elif node.target in (ops.all_gather, ops.all_gather_partial_grad) and node in self.from_batch:
            self._gather_in_prologue(node)
        elif node.target is ops.all_reduce:
            self.summands.add(self._restrict_to(rest, node, node.args[0]))
        else:
            self._refuse(node, node)
        return False

    def _restrict_to(self, rest: tuple[str, ...], node: fx.Node, x: Any) -> fx.Node:
        """Restrict a conversion of x to the other axes; if there are none, replace it by x. Return what is left."""
        if rest:
            node.args = (x, *node.args[1:2], rest, *node.args[3:])
            if "collective" in node.meta:
                node.meta["collective"] = replace(node.meta["collective"], axes=rest)
            return node
        return self._replace_by(node, x, summand=x if node.target is ops.all_reduce else None)

    def _replace_by(self, node: fx.Node, x: Any, *, summand: fx.Node | None) -> fx.Node:
        """Replace a node by x.

        summand: which of the two was a partial sum before this pass, while the other was the whole sum; None: neither.
        Afterwards x is both, so an op that used both is refused.
        """
        assert isinstance(x, fx.Node)
        if summand is not None:
            if twice := [u for u in node.users if u in x.users]:
                self._refuse(node, twice[0])
            self.partial_reads |= {(user, x) for user in summand.users if user is not node}
        node.replace_all_uses_with(x)
        self.graph.erase_node(node)
        return x

    def _add_total(self, node: fx.Node, x: Any) -> fx.Node:
        """Let the prologue compute x, and add an op before the node: the total of x over all microbatches."""
        assert isinstance(x, fx.Node)
        if any(n.target is ops.total for n in behind([x])):
            self._refuse(node, node, nested=True)
        value = replace(x.meta["value"], layout=without_microbatches(x.meta["value"].layout))
        total = self._add_before(node, ops.total, (self.mesh_node, len(self.totals)), f"{x.name}_total", value)
        self.totals.append(x)
        return total

    def _sum_in_prologue(self, node: fx.Node, rest: tuple[str, ...]) -> None:
        """Replace a sum known from the batch alone by its total: over microbatches, and once over other axes."""
        total = self._add_total(node, node.args[0])
        if rest:
            total.args = (*total.args, rest)
            total.kwargs = {"tag": total.name}
            total.meta |= {"value": node.meta["value"], "collective": replace(node.meta["collective"], axes=rest)}
        node.replace_all_uses_with(total)
        self.graph.erase_node(node)

    def _gather_in_prologue(self, node: fx.Node) -> None:
        """Gather all microbatches' parts: put each among zeros, and sum them. Truth values are counted."""
        x, value = node.args[0], node.meta["value"]
        assert isinstance(x, fx.Node)
        dtype = torch.uint8 if value.dtype == torch.bool else value.dtype
        cast = torch.ops.aten._to_copy.default
        if dtype != value.dtype:
            counts = replace(x.meta["value"], dtype=dtype)
            x = self._add_before(node, cast, (x,), f"{x.name}_counted", counts, dtype=dtype)
        whole = replace(value, dtype=dtype)
        among_zeros = self._add_before(node, ops.unshard_partial, (x, *node.args[1:]), f"{x.name}_among", whole)
        total = self._add_total(node, among_zeros)
        if dtype != value.dtype:
            total = self._add_before(node, cast, (total,), f"{total.name}_found", value, dtype=value.dtype)
        node.replace_all_uses_with(total)
        self.graph.erase_node(node)

    def _add_before(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str, value: Value, **kwargs: Any
    ) -> fx.Node:
        """Add an op before a node; it is known from the batch alone."""
        with self.graph.inserting_before(node):
            new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        new.meta = {"value": value, "source": source_of(node)}
        self.from_batch.add(new)
        return new

    # --- sums over the microbatches, of which each has a summand

    def _propagate(self, node: fx.Node) -> None:
        """Mark an op as a summand if it is linear in summands, and all else is equal in all microbatches."""
        operands = operands_of(node)
        summed = {i for i, x in enumerate(operands) if x in self.summands and (node, x) not in self.partial_reads}
        if node in self.summands:
            return
        if not summed:
            self._use_whole_sums(node, operands)
            return
        if all(_same_in_all(x) for x in (node, *(x for i, x in enumerate(operands) if i not in summed))):
            if summed == {0} and (
                node.target in _LINEAR or (node.target is ops.fill_padding and (len(node.args) < 8 or not node.args[7]))
            ):
                self.summands.add(node)
                return
            rule = registry.find(node.target)
            # if a loss is rounded last, a step adds rounded values: the sum itself would need one more forward
            whole = rounds(node) and any(u.op != "output" for u in node.users)
            for group in sorted(rule.groups(call_of(node)) if rule is not None and not whole else (), key=len):
                if summed <= set(group) and not any(
                    x in self.whole_sums for i, x in enumerate(operands) if i not in group
                ):
                    for x in dict.fromkeys(operands[i] for i in group if i not in summed):
                        node.replace_input_with(x, self._once(node, x))
                    self.summands.add(node)
                    return
            if node.target in _PLUS and summed == {0} == set(range(len(operands))):
                self._add_number(node)
                return
        for x in dict.fromkeys(operands[i] for i in summed):
            if x in self.from_batch or not self._sum(x, node):
                self._refuse(x, node, nested=True)
                return
        self._use_whole_sums(node, operands_of(node))

    # --- sums that are needed whole

    def _sum(self, x: fx.Node, user: fx.Node) -> bool:
        """Replace x for a user by its sum over all microbatches; False if x depends on such a sum itself."""
        if x not in self.sums:
            if any(n.target is ops.summed for n in behind([x])):
                return False
            with self.graph.inserting_after(x):
                new = self.graph.create_node(
                    "call_function", ops.summed, (x, self.mesh_node, 0), {}, name=f"{x.name}_summed"
                )
            value = x.meta["value"]
            new.meta = {"value": replace(value, layout=without_microbatches(value.layout)), "source": source_of(x)}
            self.sums[x] = new
            if requires_grad(x):
                self.whole_sums.add(new)
        user.replace_input_with(x, self.sums[x])
        return True

    def _use_whole_sums(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """Track an op on sums over all microbatches, or refuse it.

        The loss's gradient with respect to them is whole in every microbatch if each computes the same of them, and of
        nothing else that is trained.
        """
        wholes = [x for x in operands if x in self.whole_sums]
        if not wholes or not requires_grad(node):
            return
        if _same_in_all(node) and all(
            _same_in_all(x) and (x in self.whole_sums or not requires_grad(x)) for x in operands
        ):
            self.whole_sums.add(node)
        else:
            self._refuse(wholes[0], node)

    def _add_number(self, node: fx.Node) -> None:
        """Add a number to a sum in the first microbatch only."""
        x, number, value = node.args[0], node.args[1], node.meta["value"]
        full_op, name = torch.ops.aten.full.default, f"{node.name}_number"
        scalar = replace(value, shape=(), requires_grad=False)
        full = self._add_before(node, full_op, ([], number), name, scalar, dtype=value.dtype)
        node.args = (x, self._once(node, full), *node.args[2:])
        self.summands.add(node)

    def _once(self, user: fx.Node, x: fx.Node) -> fx.Node:
        """Return x in the first microbatch and zeros in the others, so that it is added to a sum once.

        Gradients of sums over all microbatches go to each.
        """
        once = ops.to_partial if x in self.whole_sums else ops.partial_grad_to_partial
        with self.graph.inserting_before(user):
            new = self.graph.create_node("call_function", once, (x, self.mesh_node, AXIS), {}, name=f"{x.name}_once")
        new.meta = {"value": x.meta["value"], "source": source_of(x)}
        self.summands.add(new)
        return new

    def _output(self, node: fx.Node) -> None:
        """Make the loss a summand, and find which new values of buffers and outputs are summands."""
        returned: Any = node.args[0]
        loss, new_values = returned
        self.adds = [x in self.summands or isinstance(x.meta["value"].layout[AXIS], Partial) for x in new_values]
        if loss is not None and loss not in self.summands:
            node.args = ((self._once(node, loss), new_values),)

    def _refuse(self, total: fx.Node, user: fx.Node, nested: bool = False) -> None:
        """Record an error for a value that needs all rows. nested: the summed value takes such a sum itself."""
        value, source = total.meta["value"], source_of(user)
        shown: Value = value[0] if isinstance(value, tuple) else value
        shown = replace(shown, layout=Layout())
        code = f" ({source.shown})" if source.code else ""
        why = ", and a gradient of every row goes through it" if requires_grad(total) else ""
        if nested and not why:
            why = ", and it is a sum over values that depend on such a sum (as a variance depends on the mean)"
        known = total in self.from_batch or user in self.from_batch
        error = ShardcError(
            f"{source}: a value of {shown}{code} takes all rows of the batch, and is needed before the step's last "
            "microbatch: a result of all rows (BatchNorm's statistics, a contrastive loss, rows that are"
            f" mixed, a maximum) is not the result of microbatches{why}",
            where=self.where,
            fix=(
                "it follows from the batch alone: compute it where the batch is made, and make it an input; or write"
                " batch: {microbatches: 1}"
            )
            if known
            else (
                "write batch: {microbatches: 1}; where it is BatchNorm, batch_norm: local (each rank and microbatch has"
                " its own statistics), or a layer that works on each row separately (LayerNorm, GroupNorm)"
            ),
        )
        self.refused.setdefault(source.module or source.line, error)

    def _refusal(self) -> ShardcError:
        """Return the first error, with the other places: a network of fifty norms has one cause."""
        first, *_ = self.refused.values()
        others = [place for place in list(self.refused)[1:] if place]  # nodes made by passes have no place
        if not others:
            return first
        rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
        also = f"; so do {', '.join(others[:3])}{rest}"
        return ShardcError(f"{first.what}{also}", where=first.where, fix=first.fix)

    # --- what runs first

    def _prologue(self) -> fx.Graph:
        """Return the graph of all totals' summands in one microbatch, with output ((summands), ())."""
        needed = behind(self.totals)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for n in self.graph.nodes:
            if n.op == "placeholder" or (n in needed and n.op == "call_function"):
                copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output((tuple(copies[x] for x in self.totals), ()))
        return graph

    def _retype(self, graph: fx.Graph) -> None:
        """Set the types of a graph's nodes to those of one microbatch."""
        for node in graph.nodes:
            value = node.meta.get("value")
            if node.op == "placeholder":
                if value is not None:
                    node.meta["value"] = replace(value, layout=without_microbatches(value.layout))
            elif value is not None:
                node.meta["value"] = (
                    tuple(_of_one_microbatch(v, self.mesh) for v in value)
                    if isinstance(value, tuple)
                    else _of_one_microbatch(value, self.mesh)
                )
