"""Accumulate: a step in microbatches, one after the other, exactly as if it were run at once (`batch: {microbatches: m}`).

Microbatches are placed as one more axis, the innermost that splits the batch. What placement then asks for tells what a step needs of
*all* its rows, and each kind is carried out without anybody to talk to:

    before   n   = sum(labels != -100)                       +microbatch +dp         known from the batch alone
             n_s = all_reduce(n, ("dp", "microbatch"))
             s_s = all_reduce(s, ("dp", "microbatch"))       s = sum(nll)            the loss, and linear in it all that follows
             loss = s_s / n_s
    after    n_t = total(mesh, 0)                            `counts` runs first, for all microbatches: their sum
             n_s = all_reduce(n_t, ("dp",))
             s_s = all_reduce(s, ("dp",))                    this microbatch's summand
             loss = s_s / n_s                                the losses of the microbatches add up to the step's

So means weigh every counted token alike, however unevenly padding falls on microbatches, and dropout's masks are those of the whole batch.
Gradients add up in the parameters. Anything else that needs all rows at once (BatchNorm's statistics) is refused, by name.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardc.calls import call_of, tensors
from shardc.errors import Errors
from shardc.mesh import Mesh
from shardc.placement import REPLICATE, Layout, Shard
from shardc.program import Collective, Input, Program, Source, Stage, Value
from shardc.rules import core
from shardc.runtime import ops
from shardc.spec import Spec

AXIS = "microbatch"
#: Conversions of what all microbatches have alike: they only look at which microbatch it is.
_ALONE = {ops.shard, ops.shard_varying, ops.unvary, ops.to_partial, ops.varying_to_partial, ops.unshard_partial}


def widened(spec: Spec) -> Spec:
    """The spec with its microbatches as one more axis, the innermost of those that split the batch."""
    if spec.batch.microbatches == 1:
        return spec
    mesh = Mesh((*spec.mesh.axes, (AXIS, spec.batch.microbatches)))
    return replace(spec, mesh=mesh, batch=spec.batch.model_copy(update={"axes": (*spec.data_axes, AXIS)}))


@dataclass(frozen=True)
class Accumulate:
    """Makes the program of one microbatch from one in which microbatches are an axis. where: the spec line that asked for them."""

    where: str = "batch.microbatches"

    def run(self, program: Program, mesh: Mesh) -> Program:
        if AXIS not in mesh.names:
            return program
        (stage,) = program.stages
        writer = _Writer(stage.graph, mesh, {p.name for p in program.params}, self.where)
        graph, counts = writer.run()
        rest = Mesh(tuple((a, n) for a, n in mesh.axes if a != AXIS))
        stripped = {x.name: _without(x.layout) for x in program.stored}
        program = program.with_layouts(stripped)
        cut = {x.name: x.layout for x in stage_inputs(stage.graph, program)}
        inputs = tuple(replace(x, microbatch=_cut(cut[x.name], mesh)) for x in program.inputs)
        return replace(
            program, mesh=rest, inputs=inputs, microbatches=mesh.size(AXIS), stages=(Stage(graph, stage.name),),
            counts=Stage(counts, "counts") if counts is not None else None,
        )  # fmt: skip


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


@dataclass
class _Writer:
    old: fx.Graph
    mesh: Mesh
    params: set[str]
    where: str

    def run(self) -> tuple[fx.Graph, fx.Graph | None]:
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(self.old, {}))
        self.errors = Errors()
        self.known = self._known()
        self.summands: set[fx.Node] = set()
        self.totals: list[fx.Node] = []
        self.mesh_node = next(n for n in self.graph.nodes if n.name == "mesh")
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self._node(node):
                self._propagate(node)
        self._output(next(n for n in self.graph.nodes if n.op == "output"))
        self.errors.raise_any()
        counts = self._counts() if self.totals else None
        self.graph.eliminate_dead_code()
        for graph in (self.graph, counts) if counts is not None else (self.graph,):
            self._types(graph)
            graph.lint()
        return self.graph, counts

    def _known(self) -> set[fx.Node]:
        """What follows from the batch and buffers alone, before any parameter is looked at."""
        found: set[fx.Node] = set()
        for n in self.graph.nodes:
            if n.op == "placeholder" and n.name not in self.params:
                found.add(n)
            elif n.op == "call_function" and all(u in found for u in n.all_input_nodes):
                found.add(n)
        return found

    def _node(self, node: fx.Node) -> bool:
        """Take the axis out of a conversion. False: the node is gone, or an error."""
        collective: Collective | None = node.meta.get("collective")
        axes: tuple[str, ...] = collective.axes if collective is not None else ()
        if node.target is ops.vary:
            axes = node.args[2]  # type: ignore[assignment]
        alone = node.target in _ALONE and node.args[2] == AXIS
        if AXIS not in axes and not alone:
            return True
        rest = tuple(a for a in axes if a != AXIS)
        if alone:
            if node.target is ops.shard:  # the gradients of other parts come with the other microbatches
                node.target = ops.shard_varying
            node.meta.pop("collective", None)
            return True
        if node.target is ops.vary:
            return self._over(node, node.args[0], rest) is node
        if node.target is ops.all_reduce and node in self.known:
            self._total(node, rest)
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
        node.replace_all_uses_with(x)
        self.graph.erase_node(node)
        assert isinstance(x, fx.Node)
        return x

    def _total(self, node: fx.Node, rest: tuple[str, ...]) -> None:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if any(n.target is ops.total for n in self._ancestors(x)):
            self._refuse(node, node)
            return
        with self.graph.inserting_before(node):
            total = self.graph.create_node("call_function", ops.total, (self.mesh_node, len(self.totals)), {}, name=f"{x.name}_total")
        total.meta = {"value": x.meta["value"], "source": x.meta.get("source", Source())}
        self.totals.append(x)
        self._over(node, total, rest)
        self.known.add(total)

    def _ancestors(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        todo = [node]
        while todo:
            n = todo.pop()
            if n not in found:
                found.add(n)
                todo += n.all_input_nodes
        return found

    # --- sums over the microbatches, of which each has a summand

    def _propagate(self, node: fx.Node) -> None:
        """An op on summands gives summands if it is linear in them."""
        operands = tensors(node)
        at = {i for i, x in enumerate(operands) if x in self.summands}
        if not at or node in self.summands:
            return
        if node.target is operator.getitem or node.target in (ops.all_reduce, ops.vary):
            self.summands.add(node)
            return
        rule = core.find(node.target)
        groups = rule.groups(call_of(node)) if rule is not None else ()
        for group in sorted(groups, key=len):
            others = [operands[i] for i in group if i not in at]
            if at <= set(group) and all(x.meta["value"].layout[AXIS] == REPLICATE for x in others):
                for x in dict.fromkeys(others):
                    node.replace_input_with(x, self._once(node, x))
                self.summands.add(node)
                return
        self._refuse(operands[min(at)], node)

    def _once(self, user: fx.Node, x: fx.Node) -> fx.Node:
        """x in the first microbatch, zeros in the others: what is added to a sum is added once."""
        with self.graph.inserting_before(user):
            new = self.graph.create_node("call_function", ops.to_partial, (x, self.mesh_node, AXIS), {}, name=f"{x.name}_once")
        new.meta = {"value": x.meta["value"], "source": x.meta.get("source", Source())}
        self.summands.add(new)
        return new

    def _output(self, node: fx.Node) -> None:
        loss, news = node.args[0]  # type: ignore[misc]
        assert isinstance(loss, fx.Node)
        for new in news:  # type: ignore[union-attr]
            if new in self.summands:
                self._refuse(new, new)  # type: ignore[arg-type]
        if loss not in self.summands:
            node.args = ((self._once(node, loss), news),)

    def _refuse(self, total: fx.Node, user: fx.Node) -> None:
        value, source = total.meta["value"], user.meta.get("source", Source())
        shown = value[0] if isinstance(value, tuple) else value
        self.errors.add(
            f"{source}: {total.name}, {replace(shown, layout=_without(shown.layout))}, takes all rows of the batch, and "
            f"{getattr(user.target, '__name__', user.target)} needs it before the step's last microbatch: statistics of a batch, as BatchNorm's, "
            f"are not those of its microbatches",
            where=self.where, fix="write microbatches: 1, or use a layer that looks at each row by itself (LayerNorm, GroupNorm)",
        )  # fmt: skip

    # --- what runs first

    def _counts(self) -> fx.Graph:
        """The graph that computes each total's summand of one microbatch: the same placeholders, output ((summands), ())."""
        needed = set().union(*(self._ancestors(x) for x in self.totals))
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
                node.meta["value"] = tuple(_one(v, self.mesh) for v in value) if isinstance(value, tuple) else _one(value, self.mesh)
