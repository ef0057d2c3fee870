"""Accumulate: a step in microbatches, one after the other, exactly as if it were run at once (`batch: {microbatches:
m}`).

Microbatches are placed as one more axis, the innermost that splits the batch. What placement then asks for tells what a
step needs of *all* its rows, and each kind is carried out without anybody to talk to:

    before   n   = sum(labels != -100)                       +microbatch +dp         known from the batch alone
             n_s = all_reduce(n, ("dp", "microbatch"))
             s_s = all_reduce(s, ("dp", "microbatch"))       s = sum(nll)            the loss, and linear in it all that follows
             loss = s_s / n_s
    after    n_t = total(mesh, 0)                            `counts` runs first, for all microbatches: their sum
             n_s = all_reduce(n_t, ("dp",))
             s_s = all_reduce(s, ("dp",))                    this microbatch's summand
             loss = s_s / n_s                                the losses of the microbatches add up to the step's

So means weigh every counted token alike, however unevenly padding falls on microbatches, and dropout's masks are those
of the whole batch. What is gathered of the batch (all labels, to be counted on each rank) comes from `counts` too: the
sum of parts among zeros.

A sum that something else than sums is made of (a router's balance of experts: a product of two) takes a forward of all
microbatches first:

    before   loss = mul(f_s, p_s)                            f_s, p_s: sums of each microbatch's summands
    after    f = summed(f_s, mesh, 1); p = summed(p_s, mesh, 2)      their sums over all microbatches; backward: identity
             loss = to_partial(mul(f, p), mesh, "microbatch")        in the first microbatch; its gradient goes to every microbatch's summands

which is exact as long as nothing but the loss is made of it, or no gradient goes through it.
Gradients add up in the parameters, and a buffer's new value, where each microbatch has a summand of it (a moving
average of sums over rows, `batch_norm: local`), in the interpreter. Anything else that needs all rows at once
(BatchNorm's statistics, contrastive losses) is refused, by name."""  # noqa: E501 (a table)

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.conversions import CONVERSIONS, between
from shardc.ir.graph import operands_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Layout, PartialGrad, Replicate, Shard
from shardc.ir.program import Collective, Input, Program, Source, Stage, Value
from shardc.ir.types import behind
from shardc.passes.base import Pass
from shardc.rules import registry
from shardc.rules.calls import call_of
from shardc.runtime import ops
from shardc.spec import Spec

AXIS = MICROBATCH
#: Conversions that only look at which microbatch it is, and what becomes of them. The step's loss is the sum of the
#: microbatches' losses, so the step's gradient is the sum of theirs, if each op's backward is the plain derivative of
#: what it does here: what all microbatches have alike (Replicate) has the gradient of this one alone (PartialGrad).
_OF_ONE_MICROBATCH: dict[Any, Any] = {
    getattr(ops, row.op): getattr(ops, alone.op)
    for row in CONVERSIONS
    if row.forward in ("slice", "pad", "first")
    for alone in between(PartialGrad if row.source is Replicate else row.source, row.target)
}
#: Linear in their first operand, and blind to the axis: of a summand they give a summand. All conversions are.
_LINEAR = {*(getattr(ops, row.op) for row in CONVERSIONS), ops.partial_mean, ops.select_partial, operator.getitem}
#: A tensor and a number, added.
_PLUS = {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}


def widened(spec: Spec) -> Spec:
    """The spec with its microbatches as one more axis, the innermost of those that split the batch."""
    if spec.batch.microbatches == 1:
        return spec
    mesh = Mesh((*spec.mesh.axes, (AXIS, spec.batch.microbatches)))
    return replace(spec, mesh=mesh, batch=spec.batch.model_copy(update={"axes": (*spec.data_axes, AXIS)}))


@dataclass(frozen=True)
class Accumulate(Pass):
    """Makes the program of one microbatch from one in which microbatches are an axis."""

    def applies(self, program: Program) -> bool:
        return AXIS in program.mesh.names

    def run(self, program: Program) -> Program:
        mesh, where = program.mesh, self.spec.where(("batch", "microbatches"))
        (stage,) = program.stages
        writer = _Writer(stage.graph, mesh, {p.name for p in program.params}, where)
        graph, counts = writer.run()
        rest = Mesh(tuple((a, n) for a, n in mesh.axes if a != AXIS))
        stripped = {x.name: _without(x.layout) for x in program.stored}
        program = program.with_layouts(stripped)
        cut = {x.name: x.layout for x in stage_inputs(stage.graph, program)}
        inputs = tuple(replace(x, microbatch=_cut(cut[x.name], mesh)) for x in program.inputs)
        updated = iter(writer.adding)
        buffers = tuple(replace(b, adds=b.updated and next(updated)) for b in program.buffers)
        return replace(
            program,
            mesh=rest,
            buffers=buffers,
            inputs=inputs,
            microbatches=mesh.size(AXIS),
            stages=(Stage(graph, stage.name),),
            prologue=Stage(counts, "counts") if counts is not None else None,
            notes=(*program.notes, *writer.notes),
        )


def stage_inputs(graph: fx.Graph, program: Program) -> list[Input]:
    """The program's inputs with the layouts of a graph's placeholders."""
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    return [replace(x, layout=nodes[x.name].meta["value"].layout) for x in program.inputs]


def _without(layout: Layout) -> Layout:
    """The layout on the other axes. Microbatches are the innermost digit of the batch: that of the others stays."""
    return Layout(tuple((a, p) for a, p in layout.items if a != AXIS))


def _cut(layout: Layout, mesh: Mesh) -> Shard | None:
    """How a rank's part of an input is cut into microbatches."""
    s = layout[AXIS]
    return replace(s, split=layout.local_split(AXIS, mesh)) if isinstance(s, Shard) else None


def _one(value: Value, mesh: Mesh) -> Value:
    """The type of a value in one microbatch."""
    s = value.layout[AXIS]
    layout = _without(value.layout)
    if not isinstance(s, Shard):
        return replace(value, layout=layout)
    m, shape = mesh.size(AXIS), list(value.shape)
    shape[s.dim] = s.padded(shape[s.dim]) // m

    def inner(p: Any) -> Any:
        if not isinstance(p, Shard) or p.dim != s.dim:
            return p
        return replace(p, split=p.split // m if p.split > s.split else p.split, padding=0, blocks=1)

    return replace(value, shape=tuple(shape), layout=Layout(tuple((a, inner(p)) for a, p in layout.items)))


def _alike(node: fx.Node) -> bool:
    """Is what a node computes the same in all microbatches, if no microbatches had but a summand of it?"""
    return all(v.layout[AXIS] in (REPLICATE, PARTIAL_GRAD) for v in values_of(node))


def _trained(node: fx.Node) -> bool:
    return any(v.requires_grad for v in values_of(node))


@dataclass
class _Writer:
    old: fx.Graph
    mesh: Mesh
    params: set[str]
    where: str

    def run(self) -> tuple[fx.Graph, fx.Graph | None]:
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(self.old, {}))
        self.refused: dict[str, ShardcError] = {}  # by the place in the model
        self.known = self._known()
        self.summands: set[fx.Node] = set()
        self.apart: set[tuple[fx.Node, fx.Node]] = (
            set()
        )  # (user, summand): where parts of a sum are added to others, to be summed later
        self.totals: list[fx.Node] = []
        self.sums: dict[
            fx.Node, fx.Node
        ] = {}  # summand -> its sum over all microbatches, which a forward of all finds first
        self.wholes: set[fx.Node] = set()  # made of such sums, and the same in all microbatches; gradients go through
        self.mesh_node = next(n for n in self.graph.nodes if n.name == "mesh")
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self._node(node):
                self._propagate(node)
        self._output(next(n for n in self.graph.nodes if n.op == "output"))
        if self.refused:
            raise self._refusal()
        for i, node in enumerate(self.sums.values()):
            node.args = (*node.args[:2], len(self.totals) + i)
        counts = self._counts() if self.totals else None
        self.graph.eliminate_dead_code()
        for graph in (self.graph, counts) if counts is not None else (self.graph,):
            self._types(graph)
            graph.lint()
        return self.graph, counts

    @property
    def notes(self) -> tuple[str, ...]:
        """That a step takes a forward more, and for what."""
        what = dict.fromkeys(str(x.meta.get("source", Source())) or x.name for x in self.sums)
        twice = (
            f"{self.where}: a step runs forward of all microbatches once more before, for what is made of sums over the"
            " whole batch:"
        )
        return (f"{twice} {', '.join(what)}",) if what else ()

    def _known(self) -> set[fx.Node]:
        """What follows from the batch and buffers alone, before any parameter is looked at."""
        found: set[fx.Node] = set()
        for n in self.graph.nodes:
            if (n.op == "placeholder" and n.name not in self.params) or (
                n.op == "call_function" and all(u in found for u in n.all_input_nodes)
            ):
                found.add(n)
        return found

    def _node(self, node: fx.Node) -> bool:
        """Take the axis out of a conversion. False: the node is gone, or an error."""
        collective: Collective | None = node.meta.get("collective")
        axes: tuple[str, ...] = collective.axes if collective is not None else ()
        if node.target in (ops.sum_grad, ops.first_grad):
            axes = node.args[2] if node.target is ops.sum_grad else (node.args[2],)  # type: ignore[assignment]
        alone = node.target in _OF_ONE_MICROBATCH and node.args[2] == AXIS
        if AXIS not in axes and not alone:
            return True
        if node.args[0] in self.wholes:
            if node.target is ops.to_partial:
                self.summands.add(node)
            else:
                self._refuse(node, node)
            return False
        rest = tuple(a for a in axes if a != AXIS)
        if alone and node.args[0] in self.summands and node.target in (ops.to_partial, ops.partial_grad_to_partial):
            self._is(node, node.args[0], node)  # a part of a sum it is already
            return False
        if alone:
            node.target = _OF_ONE_MICROBATCH[node.target]
            node.meta.pop("collective", None)
            return True
        if node.target in (ops.sum_grad, ops.first_grad):
            return self._over(node, node.args[0], rest) is node
        if node.target is ops.all_reduce and node in self.known:
            self._over(node, self._total(node, node.args[0]), rest)
        elif node.target in (ops.all_gather, ops.all_gather_partial_grad) and node in self.known:
            self._joined(node)
        elif node.target is ops.all_reduce:
            self.summands.add(self._over(node, node.args[0], rest))
        else:
            self._refuse(node, node)
        return False

    def _over(self, node: fx.Node, x: Any, rest: tuple[str, ...]) -> fx.Node:
        """The conversion over the other axes only; x itself if there are none. What stands for the node now."""
        if rest:
            node.args = (x, *node.args[1:2], rest, *node.args[3:])
            if "collective" in node.meta:
                node.meta["collective"] = replace(node.meta["collective"], axes=rest)
            return node
        return self._is(node, x, x if node.target is ops.all_reduce else None)

    def _is(self, node: fx.Node, x: Any, parts: fx.Node | None) -> fx.Node:
        """x stands for node from here on. parts: which of the two is one part of several, that its users sum later."""
        assert isinstance(x, fx.Node)
        if parts is not None:
            if twice := [u for u in node.users if u in x.users]:
                self._refuse(node, twice[0])
            self.apart |= {(user, x) for user in parts.users if user is not node}
        node.replace_all_uses_with(x)
        self.graph.erase_node(node)
        return x

    def _total(self, node: fx.Node, x: Any) -> fx.Node:
        """What stands before node for the sum of x over all microbatches."""
        assert isinstance(x, fx.Node)
        if any(n.target is ops.total for n in behind([x])):
            self._refuse(node, node)
        value = replace(x.meta["value"], layout=_without(x.meta["value"].layout))
        total = self._before(node, ops.total, (self.mesh_node, len(self.totals)), f"{x.name}_total", value)
        self.totals.append(x)
        return total

    def _joined(self, node: fx.Node) -> None:
        """All microbatches' parts in one: each among zeros, and their sum. Truth values are counted."""
        x, value = node.args[0], node.meta["value"]
        assert isinstance(x, fx.Node)
        dtype = torch.uint8 if value.dtype == torch.bool else value.dtype
        cast = torch.ops.aten._to_copy.default
        if dtype != value.dtype:
            x = self._before(node, cast, (x,), f"{x.name}_counted", replace(x.meta["value"], dtype=dtype), dtype=dtype)
        whole = replace(value, dtype=dtype)
        total = self._total(
            node, self._before(node, ops.unshard_partial, (x, *node.args[1:]), f"{x.name}_among", whole)
        )
        if dtype != value.dtype:
            total = self._before(node, cast, (total,), f"{total.name}_found", value, dtype=value.dtype)
        node.replace_all_uses_with(total)
        self.graph.erase_node(node)

    def _before(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str, value: Value, **kwargs: Any
    ) -> fx.Node:
        """A new op before a node, known from the batch alone."""
        with self.graph.inserting_before(node):
            new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        new.meta = {"value": value, "source": node.meta.get("source", Source())}
        self.known.add(new)
        return new

    # --- sums over the microbatches, of which each has a summand

    def _propagate(self, node: fx.Node) -> None:
        """An op on summands gives summands if it is linear in them, and all else that it takes is alike in all
        microbatches.
        """
        operands = operands_of(node)
        at = {i for i, x in enumerate(operands) if x in self.summands and (node, x) not in self.apart}
        if node in self.summands:
            return
        if not at:
            self._whole(node, operands)
            return
        if all(_alike(x) for x in (node, *(x for i, x in enumerate(operands) if i not in at))):
            if at == {0} and (
                node.target in _LINEAR or (node.target is ops.fill_padding and (len(node.args) < 8 or not node.args[7]))
            ):
                self.summands.add(node)
                return
            rule = registry.find(node.target)
            for group in sorted(rule.groups(call_of(node)) if rule is not None else (), key=len):
                if at <= set(group) and not any(x in self.wholes for i, x in enumerate(operands) if i not in group):
                    for x in dict.fromkeys(operands[i] for i in group if i not in at):
                        node.replace_input_with(x, self._once(node, x))
                    self.summands.add(node)
                    return
            if node.target in _PLUS and at == {0} == set(range(len(operands))):
                self._plus(node)
                return
        for x in dict.fromkeys(operands[i] for i in at):
            if x in self.known or not self._sum(x, node):
                self._refuse(x, node)
                return
        self._whole(node, operands_of(node))

    # --- sums that are needed whole

    def _sum(self, x: fx.Node, user: fx.Node) -> bool:
        """A user gets the sum of x over all microbatches. False: x itself depends on such a sum, so one forward does
        not find it.
        """
        if x not in self.sums:
            if any(n.target is ops.summed for n in behind([x])):
                return False
            with self.graph.inserting_after(x):
                new = self.graph.create_node(
                    "call_function", ops.summed, (x, self.mesh_node, 0), {}, name=f"{x.name}_summed"
                )
            value = x.meta["value"]
            new.meta = {
                "value": replace(value, layout=_without(value.layout)),
                "source": x.meta.get("source", Source()),
            }
            self.sums[x] = new
            if _trained(x):
                self.wholes.add(new)
        user.replace_input_with(x, self.sums[x])
        return True

    def _whole(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """An op on sums over all microbatches. The loss's gradient with respect to them is whole in every microbatch as
        long as each computes the same of them, and of nothing else that is trained."""
        wholes = [x for x in operands if x in self.wholes]
        if not wholes or not _trained(node):
            return
        if _alike(node) and all(_alike(x) and (x in self.wholes or not _trained(x)) for x in operands):
            self.wholes.add(node)
        else:
            self._refuse(wholes[0], node)

    def _plus(self, node: fx.Node) -> None:
        """A number that is added to a sum is added in the first microbatch."""
        x, number, value = node.args[0], node.args[1], node.meta["value"]
        full = self._before(
            node,
            torch.ops.aten.full.default,
            ([], number),
            f"{node.name}_number",
            replace(value, shape=()),
            dtype=value.dtype,
        )
        node.args = (x, self._once(node, full), *node.args[2:])
        self.summands.add(node)

    def _once(self, user: fx.Node, x: fx.Node) -> fx.Node:
        """x in the first microbatch, zeros in the others: what is added to a sum is added once. Gradients of sums over
        all
        microbatches go to each."""
        once = ops.to_partial if x in self.wholes else ops.partial_grad_to_partial
        with self.graph.inserting_before(user):
            new = self.graph.create_node("call_function", once, (x, self.mesh_node, AXIS), {}, name=f"{x.name}_once")
        new.meta = {"value": x.meta["value"], "source": x.meta.get("source", Source())}
        self.summands.add(new)
        return new

    def _output(self, node: fx.Node) -> None:
        returned: Any = node.args[0]
        loss, news = returned
        self.adding = [new in self.summands for new in news]
        if loss not in self.summands:
            node.args = ((self._once(node, loss), news),)

    def _refuse(self, total: fx.Node, user: fx.Node) -> None:
        value, source = total.meta["value"], user.meta.get("source", Source())
        shown = value[0] if isinstance(value, tuple) else value
        found = ShardcError(
            f"{source}: {total.name}, {replace(shown, layout=_without(shown.layout))}, takes all rows of the batch, and"
            f" {getattr(user.target, '__name__', user.target)} needs it before the step's last microbatch: statistics"
            " of a batch, as BatchNorm's, are not those of its microbatches, and a gradient of every row goes through"
            " them",
            where=self.where,
            fix=(
                "write microbatches: 1, or batch_norm: local (each rank and microbatch has its own), "
                "or use a layer that looks at each row by itself (LayerNorm, GroupNorm)"
            ),
        )
        self.refused.setdefault(source.module or source.line, found)

    def _refusal(self) -> ShardcError:
        """The first, and where else: a network of fifty norms has one cause."""
        (_, first), *others = self.refused.items()
        if not others:
            return first
        rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
        also = f"; so do {', '.join(place for place, _ in others[:3])}{rest}"
        return ShardcError(f"{first.what}{also}", where=first.where, fix=first.fix)

    # --- what runs first

    def _counts(self) -> fx.Graph:
        """The graph that computes each total's summand of one microbatch: the same placeholders, output ((summands),
        ()).
        """
        needed = behind(self.totals)
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for n in self.graph.nodes:
            if n.op == "placeholder" or (n in needed and n.op == "call_function"):
                made[n] = graph.node_copy(n, made.__getitem__)
        graph.output((tuple(made[x] for x in self.totals), ()))
        return graph

    def _types(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("value")
            if node.op == "placeholder":
                if value is not None:
                    node.meta["value"] = replace(value, layout=_without(value.layout))
            elif value is not None:
                node.meta["value"] = (
                    tuple(_one(v, self.mesh) for v in value) if isinstance(value, tuple) else _one(value, self.mesh)
                )
