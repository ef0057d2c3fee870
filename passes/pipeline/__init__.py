"""Pipeline: cut one rank's graph into stages; each runs on the ranks of one pipeline coordinate.

    before   h4 = add(h3, y)                     model.layers.1
             h5 = rms_norm(h4, w2)               model.layers.2      the cut is here
             loss = ... cos ... h4 ...
    after    stage0(..., positions)              cos is computed by both: it depends on the batch alone
                 return None, (), (h4,)          what other stages use
             stage1(..., w2, positions, h4)      h4: f32[2@dp, 16, 64] grad | send_recv/send_recv pp 8192
                 return loss, (), ()

An op's operands decide which stages run it.

    main           the batch and parameters     one stage runs it: by position (cuts.py), then moved over a cut if
                                                fewer bytes cross then; its result is sent to every stage that uses it
    batch only     masks, rotary tables         every stage that uses it runs it again: every rank has the inputs
    weights only   norms of weights, biases     the same; a parameter that several stages use is shared: each has a
                   from tables                  copy, initialised equally, and their gradients are summed (`pp[0,3]`)

An op is also main if running it again would cost more than HEAVY of the whole model's products, or if it depends on
the batch alone and sends floating-point numbers. Ids are gathered again: that is cheaper than sending another stage
the masks computed from them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from shardc.ir.graph import operands_of, source_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.types import behind, requires_grad
from shardc.passes.base import Pass
from shardc.passes.pipeline import cuts
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of
from shardc.runtime import ops, schedule
from shardc.spec import Spec

#: Repeating an op on other stages may cost this share of the model's products.
HEAVY = 0.01


def stage_spec(spec: Spec) -> Spec:
    """Return the spec of one stage's ranks: without the pipeline's axis."""
    if spec.pipeline is None:
        return spec
    axes = tuple((a, n) for a, n in spec.mesh.axes if a != spec.pipeline.axis)
    return replace(spec, mesh=Mesh(axes), pipeline=None)


@dataclass(frozen=True)
class Pipeline(Pass):
    """Cuts the graph into the stages of the spec's `pipeline`.

    Then the program's mesh has the pipeline's axis, which placement did not see.
    """

    def applies(self, program: Program) -> bool:
        return self.spec.pipeline is not None

    def _with_axis(self, inner: Mesh) -> Mesh:
        """Return the spec's mesh, with the digits in which placement sees its other axes."""
        axes: list[tuple[str, int]] = []
        for axis, n in self.spec.mesh.axes:
            digits = [(a, size) for a, size in inner.axes if a == axis or a.startswith(f"{axis}.")]
            axes += digits or [(axis, n)]
        return Mesh(tuple(axes))

    def run(self, program: Program) -> Program:
        section, mesh = self.spec.pipeline, program.mesh
        assert section is not None
        (whole,) = program.stages
        cause = f"{self.spec.where(('pipeline',))} pipeline"
        beside = self.options.compatible_with
        running = {p.name: p.stages for p in beside.params} if beside is not None else None
        cut = _Cut(whole.graph, program, mesh, self.spec, cause, running)
        stages = cut.run()
        homes = {name: i for i, stage in enumerate(stages) for name in stage.outputs}
        outputs = tuple(replace(o, stage=homes[o.name]) for o in program.outputs)
        axis = section.axis
        program = replace(program, mesh=self._with_axis(mesh), stages=tuple(stages), axis=axis, outputs=outputs)
        counted = _looked_at(program.prologue.graph) if program.prologue is not None else set()
        used: dict[str, list[int]] = {name: list(range(len(stages))) for name in counted}  # every rank counts
        for i, stage in enumerate(stages):
            for name in stage.takes:
                used.setdefault(name, [])
                used[name] += [i] if i not in used[name] else []

        def put(x: Any) -> Any:  # unused ones stay with the first stage
            return replace(x, stages=tuple(used.get(x.name, (0,))))

        program = replace(program, params=tuple(map(put, program.params)), buffers=tuple(map(put, program.buffers)))
        trained = schedule.load(
            section.schedule,
            stages=len(stages),
            ranks=program.mesh.size(section.axis),
            microbatches=program.microbatches,
            edges=program.edges,
            where=self.spec.where(("pipeline", "schedule")),
        )
        order = schedule.forward_only(trained, program.edges) if program.forward_only else trained
        program = replace(program, schedule=order)
        return replace(program, notes=(*program.notes, *_notes(program)))


def _notes(program: Program) -> Iterable[str]:
    for p in program.params:
        if shared := program.replica_axis(p):
            yield (
                f"{p.fqn} is used by stages {', '.join(map(str, p.stages))}: each rank of {shared} has a copy, and"
                " their gradients are summed"
            )
    for b in program.buffers:
        home, others = program.broadcast_of(b)
        if others:
            stage = next(i for i, s in enumerate(program.stages) if b.name in s.updates)
            yield (
                f"{b.fqn} is updated by stage {stage}, and sent after the step: {program.axis} {home} ->"
                f" {', '.join(map(str, others))}"
            )


def _looked_at(graph: fx.Graph) -> set[str]:
    """Return the placeholders that something uses."""
    return {n.name for n in graph.find_nodes(op="placeholder") if n.users}


@dataclass
class _Cut:
    graph: fx.Graph
    program: Program
    mesh: Mesh
    spec: Spec
    cause: str
    running: dict[str, tuple[int, ...]] | None = None  # each parameter's stages, in the program that already runs
    stage: dict[fx.Node, int] = field(default_factory=dict)  # the stages of main ops

    def run(self) -> list[Stage]:
        self.light = self._light()
        self.main = [n for n in self.graph.nodes if n.op == "call_function" and n not in self.light]
        ops = [n for n in self.main if n.target is not operator.getitem]
        starts = cuts.positions(ops, self.spec, self.mesh, self.running)
        self.count = len(starts) + 1
        bounds = iter([*starts, len(ops)])
        stage, until = -1, 0
        order: dict[fx.Node, int] = {}
        for position, n in enumerate(ops):
            while position >= until:
                stage, until = stage + 1, next(bounds)
            order[n] = stage
        for n in self.main:
            self.stage[n] = self.stage[_op_behind(n)] if n.target is operator.getitem else order[n]
        self._settle(cuts.Ops.of(ops, self.mesh, self.program.microbatches))
        return self._stages()

    # --- ops that may be repeated

    def _light(self) -> set[fx.Node]:
        """Return the ops that depend on the batch alone, or on parameters alone, and cost little."""
        params = {p.name for p in self.program.params}
        inputs = {x.name for x in self.program.inputs}
        flops = {n: _flops(n) for n in self.graph.nodes}
        allowed = HEAVY * sum(flops.values())
        depends: dict[fx.Node, frozenset[str]] = {}
        spent: dict[fx.Node, float] = {}
        light: set[fx.Node] = set()
        for n in self.graph.nodes:
            kinds = {"weights"} if n.name in params else {"batch"} if n.name in inputs else set[str]()
            depends[n] = frozenset(kinds).union(*(depends[x] for x in n.all_input_nodes))
            spent[n] = flops[n] + sum(spent[x] for x in n.all_input_nodes if x in light)
            sends = n.meta.get("collective") is not None and "weights" not in depends[n] and not _counts(n)
            again = all(x in light or x.op == "placeholder" for x in n.all_input_nodes)
            on_host = n.target is ops.attention_reach  # its result is on the host, so no stage can send it
            if on_host or (
                n.op == "call_function" and len(depends[n]) < 2 and again and not sends and spent[n] <= allowed
            ):
                light.add(n)
        return light

    # --- the stages of main ops

    def _settle(self, ops: cuts.Ops) -> None:
        """Move ops other than products over a cut if fewer bytes cross then, and stages stay as even.

        Ops that make less move back; ops that make more move forward.
        """
        size = {n: sum(v.nbytes(self.mesh) for v in values_of(n)) for n in self.main}
        work = dict(zip(ops.nodes, ops.work, strict=True))
        loads, members = [0.0] * self.count, [0] * self.count
        for n in ops.nodes:
            loads[self.stage[n]] += work[n]
            members[self.stage[n]] += 1
        limit = cuts.SLACK * max(loads)
        position = {n: i for i, n in enumerate(self.main)}

        def move(n: fx.Node, to: int) -> None:
            stage = self.stage[n]
            if cuts.stages_of_weights(n, position, self.running or {}) - {to}:
                return
            if loads[to] + work[n] <= limit and members[stage] > 1:
                loads[stage], loads[to] = loads[stage] - work[n], loads[to] + work[n]
                members[stage], members[to] = members[stage] - 1, members[to] + 1
                self._put(n, to)

        for n in self.main:  # back, to where the operands are made
            operands = [_op_behind(x) for x in operands_of(n) if x in self.stage]
            if n.target is operator.getitem or "op" in n.meta or not operands or _flops(n):
                continue
            stage = max(self.stage[x] for x in operands)
            saved = sum(size[x] for x in dict.fromkeys(operands) if self._only(x, n, stage))
            if stage < self.stage[n] and 0 < size[n] < saved:
                move(n, stage)
        for n in reversed(self.main):  # forward, to where it is used
            users = [u for u in cuts.users(n) if u in self.stage]
            operands = list(dict.fromkeys(_op_behind(x) for x in operands_of(n) if x in self.stage))
            if n.target is operator.getitem or "op" in n.meta or _flops(n):
                continue
            if not users or len(users) < len(cuts.users(n)):
                continue
            stage = min(self.stage[u] for u in users)
            more = sum(
                size[x]
                for x in operands
                if not any(self.stage[u] >= stage for u in cuts.users(x) if u in self.stage and u is not n)
            )
            if stage > self.stage[n] and more < size[n]:
                move(n, stage)

    def _only(self, x: fx.Node, user: fx.Node, stage: int) -> bool:
        """Return whether nothing else takes x over the cut after `stage`."""
        return self.stage[x] == stage and all(
            u is user or self.stage.get(u, self.count) <= stage for u in cuts.users(x)
        )

    def _put(self, n: fx.Node, stage: int) -> None:
        self.stage[n] = stage
        for u in n.users:
            if u.target is operator.getitem:
                self._put(u, stage)

    # --- writing them

    def _stages(self) -> list[Stage]:
        output = self.graph.output_node()
        returned: Any = output.args[0]
        loss: fx.Node | None = returned[0]
        news: tuple[fx.Node, ...] = returned[1]
        updated = [b.name for b in self.program.buffers if b.updated]
        at_end = self.stage.get(loss, self.count - 1) if loss is not None else self.count - 1
        homes = [self._stage_of(new, name) for name, new in zip(updated, news, strict=False)]
        homes += [self.stage.get(new, at_end) for new in news[len(updated) :]]
        names = [*updated, *(o.name for o in self.program.outputs)]
        roots: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for n, s in self.stage.items():
            roots[s].append(n)
        if loss is not None:
            roots[at_end].append(loss)
        for home, new in zip(homes, news, strict=True):
            roots[home].append(new)
        needs = [self._behind(r, s) for s, r in enumerate(roots)]
        writers = [_Writer(self, s, needs[s]) for s in range(self.count)]
        stages: list[Stage] = []
        # values whose gradients come back: known from later stages first
        differentiated = {loss} if loss is not None else set[fx.Node]()
        for s, writer in reversed(list(enumerate(writers))):
            indices = [i for i, home in enumerate(homes) if home == s]
            sent = [n for n in self.main if self.stage[n] == s and any(n in other.received for other in writers)]
            returned = [n for n in (loss, *sent) if n is not None and self.stage.get(n, at_end) == s]
            trained = self._trained([n for n in returned if n in differentiated], s)
            differentiated |= trained.intersection(writer.received)
            graph = writer.write(loss if s == at_end else None, [news[i] for i in indices], sent, trained)
            updates, outputs = (
                tuple(names[i] for i in indices if (i < len(updated)) == buffers) for buffers in (True, False)
            )
            stages.append(Stage(graph, f"stage{s}", updates, outputs))
        return stages[::-1]

    def _trained(self, roots: list[fx.Node], stage: int) -> set[fx.Node]:
        """Return the nodes that gradients of these reach in a stage, and on its edge."""
        trained: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            n = todo.pop()
            if n not in trained and requires_grad(n):
                trained.add(n)
                if self.stage.get(n, stage) == stage:
                    todo += n.all_input_nodes
        return trained

    def _stage_of(self, new: fx.Node, buffer: str) -> int:
        """Return the stage that computes a buffer's new value; if any could, one that uses it or its sources."""
        if new in self.stage:
            return self.stage[new]
        made_of = [n for n in self._behind([new], -1) if n.op == "placeholder" and n.meta.get("value") is not None]
        for use in ([new], [n for n in made_of if n.name == buffer], made_of):
            if stages := {self.stage[u] for n in use for u in _reached(n) if u in self.stage}:
                return min(stages)
        module = next(b.fqn for b in self.program.buffers if b.name == buffer).rpartition(".")[0]
        return next((s for n, s in self.stage.items() if source_of(n).module == module), 0)

    def _behind(self, roots: list[fx.Node], stage: int) -> set[fx.Node]:
        """Return what a stage needs to compute these: placeholders, main or repeated ops, received values."""
        return behind(roots, lambda n: self.stage.get(n, stage) == stage)


def _reached(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that depend on a node."""
    reached: set[fx.Node] = set()
    todo = [node]
    while todo:
        for u in todo.pop().users:
            if u not in reached:
                reached.add(u)
                todo.append(u)
    return reached


def _op_behind(node: fx.Node) -> fx.Node:
    """Return the op behind a `getitem`."""
    return _op_behind(node.all_input_nodes[0]) if node.target is operator.getitem else node


def _counts(node: fx.Node) -> bool:
    """Return whether a node's results are all ids, counts or truth values."""
    return not any(v.dtype.is_floating_point or v.dtype.is_complex for v in values_of(node))


def _flops(node: fx.Node) -> int:
    rule = registry.find(node.target) if node.op == "call_function" else None
    return rule.flops(call_of(node)) if rule is not None and rule.flops is not None else 0


class _Writer:
    """Writes the graph of one stage. needs: its nodes, in the whole graph."""

    def __init__(self, cut: _Cut, stage: int, needs: set[fx.Node]) -> None:
        self.cut, self.stage, self.needs = cut, stage, needs
        self.received = [n for n in cut.main if n in needs and cut.stage[n] != stage]

    def write(self, loss: fx.Node | None, news: list[fx.Node], sent: list[fx.Node], trained: set[fx.Node]) -> fx.Graph:
        """Write the graph. trained: nodes that gradients reach; only those of received values go back."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        old = self.cut.graph.nodes
        for n in old:
            if n.op == "placeholder" and (n in self.needs or n.name in ("mesh", "rng")):
                copies[n] = graph.node_copy(n)
        for n in self.received:
            copies[n] = new = graph.placeholder(n.name)
            value = replace(n.meta["value"], requires_grad=n in trained)
            back = "send_recv" if value.requires_grad else "none"
            assert self.cut.spec.pipeline is not None
            axes = (self.cut.spec.pipeline.axis,)
            crossing = Collective("send_recv", back, axes, value.nbytes(self.cut.mesh), self.cut.cause)
            new.meta = {"value": value, "source": source_of(n), "collective": crossing}
        for n in old:
            if n.op == "call_function" and n in self.needs and n not in copies:
                copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output(
            (copies[loss] if loss is not None else None, tuple(copies[n] for n in news), tuple(copies[n] for n in sent))
        )
        graph.lint()
        return graph
