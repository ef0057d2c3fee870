"""Prove a whole program: its texts, microbatches, stages, schedule and buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import fx

from shardc.artifact import emit
from shardc.artifact.tables import contradictions
from shardc.errors import ShardcError
from shardc.ir.graph import operands_of, placeholders, source_of, values_of
from shardc.ir.mesh import MICROBATCH
from shardc.ir.metadata import Value
from shardc.ir.outputs import Output
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Layout, Partial, PartialGrad
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.stored import Buffer, Input, Param
from shardc.ir.types import full_op_name
from shardc.ir.units import plural
from shardc.optional import registered, table
from shardc.passes.joint.derivatives import Rules
from shardc.runtime.schedule import proof as schedule_proof
from shardc.verify.static import assumptions, gradient_sums, joint_graphs
from shardc.verify.static.op_strategies import misfit
from shardc.verify.static.same_values import Model
from shardc.verify.static.statement import Claim, mesh_of, normal, of_input
from shardc.verify.static.text import Text, TooLongError, shown


@dataclass(frozen=True)
class Gap:
    """One thing that is not proven.

    where: stage and line; line: its text; source: line of the model; what: the fault; right: what would be right.
    """

    where: str
    what: str
    line: str = ""
    source: str = ""
    right: str = ""

    def __str__(self) -> str:
        rest = {"line": self.line, "model": self.source, "right": self.right}
        return "\n".join([f"{self.where}: {self.what}", *(f"  {name}: {text}" for name, text in rest.items() if text)])


@dataclass(frozen=True)
class Proof:
    """The result of a proof, under ASSUMPTIONS (assumptions.py).

    gaps: what is not proven. lines, texts: how many were checked; ranks: how many run them. seconds: duration.
    """

    gaps: tuple[Gap, ...]
    lines: int
    texts: int
    ranks: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.gaps

    def __repr__(self) -> str:
        return f"<Proof: {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        texts = f"{plural(self.lines, 'line')} in {plural(self.texts, 'graph')}"
        of = f"{texts} for {plural(self.ranks, 'rank')}, {self.seconds:.1f} s"
        if self.ok:
            return f"proven equal to one device: {of}\n{assumptions.short()}"
        return "\n".join([f"not proven: {plural(len(self.gaps), 'gap')}; {of}", *map(str, self.gaps)])


def prove(program: Program) -> Proof:
    """Prove, without running it, that a program computes the model's loss, gradients and update.

    The package's docstring says what is trusted. Takes a compiled or loaded program; writes nothing.
    """
    proof = prove_within(program, math.inf)
    assert proof is not None
    return proof


def prove_within(program: Program, seconds: float) -> Proof | None:
    """Prove as `prove` does, or return None if it takes longer."""
    start = time.perf_counter()
    checker = _Checker(program, start + seconds)
    try:
        gaps = tuple(checker.run())
        gaps = gaps or tuple(checker.joint())  # a gap would show again in the joint graphs
    except TooLongError:
        return None
    took = time.perf_counter() - start
    return Proof(gaps, checker.lines, checker.graphs, program.mesh.world, took)


@dataclass
class _Checker:
    program: Program
    until: float
    lines: int = 0
    graphs: int = 0
    #: The claims of values that stages send.
    sent: dict[str, list[Claim]] = field(default_factory=dict)

    def run(self) -> Iterator[Gap]:
        program = self.program
        if not program.stages:
            yield Gap("program", "it is not compiled: there is no text to prove")
            return
        if faults := [Gap(f"program.{at}", fault) for at, fault in contradictions(program)]:
            yield from faults
            return
        self.mesh = mesh_of(program)
        self.model = Model(program)
        nodes = placeholders(self.model.graph)
        self.stored = {x.name: self._stored(x, nodes[x.name]) for x in program.stored if x.name in nodes}
        totals: tuple[tuple[Claim, ...], ...] = ()
        if program.prologue is not None:
            text = yield from self._text(program.prologue, ())
            returned: Any = program.prologue.graph.output_node().args[0]
            totals = tuple(tuple(text.claims.get(n, ())) for n in returned[0])
            if not all(totals):
                return
        texts = []
        for stage in program.stages:
            self.graphs += 1
            text = yield from self._text(stage, totals)
            texts.append(text)
            sends = set(stage.sends)
            self.sent |= {n.name: c for n, c in text.claims.items() if n.name in sends}  # several claims of a constant
        yield from self._results(texts)
        features = (wrong(program, self.until) for wrong in registered("proof", "wrong", program.features))
        yield from (Gap(name, fault) for name, fault in chain(gradient_sums.wrong(program), *features))
        yield from self._pipeline()

    def _stored(self, x: Param | Buffer | Input, node: fx.Node) -> Claim:
        """Return the claim of a placeholder; a parameter's gradient is a summand on axes that sum it later."""
        layout, fills = of_input(x, self.mesh) if isinstance(x, Input) else x.layout, frozenset[tuple[int, float]]()
        if isinstance(x, Param):
            summed = [a for a in x.reduce if "[" not in a] + [a for a in self.mesh.names if a == MICROBATCH]
            placed = {a: p for a, p in layout.items if not isinstance(p, PartialGrad)}
            layout = Layout.of(placed | dict.fromkeys(summed, PARTIAL_GRAD), self.mesh)
            fills = frozenset((s.dim, 0.0) for s in layout.paddings())
        return Claim(node, normal(layout, node.meta["value"]), fills)

    def _text(self, stage: Stage, totals: tuple[tuple[Claim, ...], ...]) -> Any:
        claims: dict[fx.Node, list[Claim]] = {}
        for n in stage.graph.find_nodes(op="placeholder"):
            if n.name in self.stored and "collective" not in n.meta:
                claims[n] = [self.stored[n.name]]
            elif n.name in self.sent:
                claims[n] = self.sent[n.name]
            elif n.meta.get("value") is not None:
                fault = "no earlier stage makes it, and it is neither stored nor an input"
                yield self._gap(stage.name, n, fault)
        text = Text(self.model, stage.graph, claims, totals, self.until)
        self.lines += _calls(stage.graph)
        for node in text.unexplained():
            call = next((n for n in self.model.calls if n.name == node.name), None)
            known = text.wrong.get(node) or text.unfit.get(node)
            right = f"{full_op_name(call.target)} by its rule" if call is not None and not known else ""
            yield self._gap(stage.name, node, known or self._why(text, node, call), right)
        for node, why in text.wrong.items():
            if node in text.explained:
                yield self._gap(stage.name, node, why)
        yield from self._declared(stage, text)
        return text

    def _declared(self, stage: Stage, text: Text) -> Iterator[Gap]:
        """Check that the types shown in a text are those of its claims."""
        for node, claims in text.claims.items():
            value = node.meta.get("value")
            stored = node.op == "placeholder" and "collective" not in node.meta  # it has its stored type
            own = node.target in table("proof", "BYTES")  # their layout is each rank's own; no other rank reads them
            if stored or own or not isinstance(value, Value):
                continue
            expected = [shown(c.layout, self.mesh, own=True) for c in claims]
            if shown(value.layout, self.mesh) not in expected:
                fault = f"its type says ({value.layout or 'whole'}), it is ({claims[0].layout or 'whole'})"
                yield self._gap(stage.name, node, fault)

    def _results(self, texts: list[Text]) -> Iterator[Gap]:
        """Check that loss, new buffers and outputs are the model's, in the layouts that the program declares."""
        program = self.program
        returned: Any = self.model.graph.output_node().args[0]
        of_loss, values = returned
        new = [b for b in program.buffers if b.updated]
        buffers = {b.name: (b, of) for b, of in zip(new, values, strict=False)}
        outputs = {o.name: (o, of) for o, of in zip(program.outputs, values[len(new) :], strict=True)}
        losses = 0
        for stage, text in zip(program.stages, texts, strict=True):
            returned = stage.graph.output_node().args[0]
            if returned[0] is not None:
                losses += 1
                yield from self._result(stage, text, returned[0], of_loss, None)
            updates = stage.updates or (buffers if len(program.stages) == 1 else ())
            made: list[Any] = [*map(buffers.__getitem__, updates), *map(outputs.__getitem__, stage.outputs)]
            for node, (declared, of) in zip(returned[1], made, strict=True):
                yield from self._result(stage, text, node, of, declared)
        if losses != (of_loss is not None):
            right = "one does" if of_loss is not None else "none does: the program is forward-only"
            yield Gap("program", f"{losses} stages give the loss", right=right)

    def _result(
        self, stage: Stage, text: Text, node: fx.Node, of: fx.Node, declared: Buffer | Output | None
    ) -> Iterator[Gap]:
        """Check a returned line. of: the model's node; declared: that buffer or output, None for the loss."""
        name = declared.name if declared is not None else "the loss that the stage returns"
        claims = text.claims.get(node, [])
        same = [c for c in claims if c.of is self.model.one[of]]
        if claims and not same:
            yield self._gap(stage.name, node, f"{name} is another value of the model", of.name)
        if not same:
            return
        if declared is None:
            yield from self._loss(stage, node, same[0].layout)
            return

        def as_declared(c: Claim) -> bool:
            return shown(c.layout, self.mesh, own=True, padded=True) == shown(declared.layout, self.mesh)

        layout = next(filter(as_declared, same), same[0]).layout
        if MICROBATCH in self.mesh.names and declared.adds != (layout[MICROBATCH] == Partial()):
            fault = f"{name}: its microbatches {'are no summands' if declared.adds else 'are summands'}"
            yield self._gap(stage.name, node, fault)
        if not any(map(as_declared, same)):
            yield self._gap(stage.name, node, f"{name} is ({layout or 'whole'})", f"({declared.layout or 'whole'})")

    def _loss(self, stage: Stage, node: fx.Node, layout: Layout) -> Iterator[Gap]:
        if MICROBATCH in self.mesh.names and layout[MICROBATCH] != Partial():
            fault = "each microbatch gives the whole loss: the step counts it as often"
            yield self._gap(stage.name, node, fault, "a summand in each")
        for _ in (a for a in self.mesh.names if a != MICROBATCH and layout[a] not in (REPLICATE, Partial())):
            yield self._gap(stage.name, node, f"the loss is {layout}", "whole, or a summand of each rank")

    def _pipeline(self) -> Iterator[Gap]:
        """Check sends, receives and parameters of the stages, and that the schedule ends."""
        program = self.program
        if program.schedule is None:
            return
        makers, all_sent = {name: i for i, s in enumerate(program.stages) for name in s.sends}, True
        for i, stage in enumerate(program.stages):
            for name, value in stage.receives.items():
                if makers.get(name, i) == i:
                    yield Gap(f"{stage.name}: {name}", "no other stage sends it")
                    all_sent = False
                    continue
                maker = program.stages[makers[name]]
                (sent,) = values_of(next(n for n in maker.graph.nodes if n.name == name))
                if (sent.shape, sent.dtype, sent.layout) != (value.shape, value.dtype, value.layout):
                    yield Gap(f"{stage.name}: {name}", f"it receives {value}, and {maker.name} sends {sent}")
        takes = [set(stage.takes) for stage in program.stages]
        for p in program.params:
            users = [i for i, names in enumerate(takes) if p.name in names]
            if p.stages and not set(users) <= set(p.stages):
                yield Gap(p.fqn, f"stages {users} use it, and it is of stages {list(p.stages)}")
        try:
            training = not program.forward_only
            schedule_proof.prove(program.schedule, program.edges if all_sent else None, training=training)
        except ShardcError as e:
            for error in e.errors:
                yield Gap("schedule", error.what, right=error.fix or "")

    def joint(self) -> Iterator[Gap]:
        """Check the joint graphs of each stage, and the graphs of overlapped pairs."""
        rules = Rules(self.program)
        for stage in self.program.stages:
            if stage.joint is not None:
                self.graphs += len(stage.joint.graphs)
                self.lines += sum(map(_calls, stage.joint.graphs.values()))
                for w in joint_graphs.wrong(self.program, stage, rules, self.until):
                    yield self._of_joint(stage.name, w)
        for p in self.program.pairs:
            self.graphs, self.lines = self.graphs + 1, self.lines + _calls(p.graph)
            for w in joint_graphs.wrong_in_pair(self.program, p, rules, self.until):
                yield self._of_joint(emit.pair_name(p), w)

    def _of_joint(self, name: str, w: joint_graphs.Wrong) -> Gap:
        place = f"{name}, {w.text}"
        return Gap(place, w.what, right=w.right) if w.line is None else self._gap(place, w.line, w.what, w.right)

    # --- messages

    def _gap(self, place: str, node: fx.Node, what: str, right: str = "") -> Gap:
        start = f"    {node.name} = "
        text = emit.function(node.graph, self.program)
        line = next((line.strip() for line in text.splitlines() if line.startswith(start)), "")
        return Gap(f"{place}: {node.name}", what, line, str(source_of(node)), right)

    def _why(self, text: Text, node: fx.Node, call: fx.Node | None) -> str:
        """Return why a line is no op of the model. call: the model's op of its name, if there is one."""
        if call is None or call.target != node.target:
            return "it is no op of the model on these operands, nor what a rule makes of one"
        expected = [self.model.one[x] for x in operands_of(call)]
        candidates = [text.claims.get(x, []) for x in operands_of(node)]
        have = [next((c for c in cs if c.of is w), cs[0]) for cs, w in zip(candidates, expected, strict=False) if cs]
        others = [f"{c.of.name} for {w.name}" for c, w in zip(have, expected, strict=False) if c.of is not w]
        if others:
            return f"it takes other values than the model's op: {', '.join(others)}"
        choices = self.model.choices_of(call)
        if len(have) == len(choices.call.operands) and (why := misfit(choices, have, self.mesh)):
            return why
        return "its sizes, digits or constants are not those that its rule gives a rank's part"


def _calls(graph: fx.Graph) -> int:
    return sum(n.op == "call_function" for n in graph.nodes)
