"""Prove a whole program: its texts, microbatches, stages, schedule and buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardc.artifact import emit
from shardc.errors import ShardcError
from shardc.ir.graph import operands_of, source_of, values_of
from shardc.ir.mesh import MICROBATCH
from shardc.ir.placement import REPLICATE, Partial
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.units import plural
from shardc.optional import registered, table
from shardc.passes.joint.derivatives import Rules
from shardc.runtime.schedule import proof as schedule_proof
from shardc.verify.static import assumptions, gradient_sums, joint_graphs
from shardc.verify.static.op_types import misfit
from shardc.verify.static.same_values import Model
from shardc.verify.static.statement import Claim, mesh_of, normal, of_input, with_partial_grad
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
        rest = [
            f"  {name}: {text}"
            for name, text in (("line", self.line), ("model", self.source), ("right", self.right))
            if text
        ]
        return "\n".join([f"{self.where}: {self.what}", *rest])


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
    texts = sum(1 + len(s.joint.graphs if s.joint is not None else ()) for s in program.stages) + len(program.pairs)
    return Proof(gaps, checker.lines, texts, program.mesh.world, took)


@dataclass
class _Checker:
    program: Program
    until: float
    lines: int = 0
    sent: dict[str, list[Claim]] = field(default_factory=dict)

    def run(self) -> Iterator[Gap]:
        program = self.program
        if not program.stages:
            yield Gap("program", "it is not compiled: there is no text to prove")
            return
        self.mesh = mesh_of(program)
        self.model = Model(program)
        nodes = {n.name: n for n in self.model.graph.nodes if n.op == "placeholder"}
        self.stored = {x.name: self._stored(x, nodes[x.name]) for x in program.stored if x.name in nodes}
        totals: tuple[tuple[Claim, ...], ...] = ()
        if program.prologue is not None:
            text = yield from self._text(program.prologue, ())
            returned: Any = program.prologue.graph.output_node().args[0]
            missing = [n for n in returned[0] if n not in text.claims]
            if missing:
                return
            totals = tuple(tuple(text.claims[n]) for n in returned[0])
        texts = []
        for stage in program.stages:
            text = yield from self._text(stage, totals)
            texts.append(text)
            for name in stage.sends:
                node = next(n for n in stage.graph.nodes if n.name == name)
                if node in text.claims:
                    self.sent[name] = text.claims[node]  # several claims if it is a constant
        yield from self._results(texts)
        for name, fault in gradient_sums.wrong(program):
            yield Gap(name, fault)
        for wrong in registered("proof", "wrong", program.features):
            yield from (Gap(name, fault) for name, fault in wrong(program, self.until))
        yield from self._pipeline()

    def _stored(self, x: Any, node: fx.Node) -> Claim:
        """Return the claim of a placeholder; a parameter's gradient is a summand on axes that sum it later."""
        names = {p.name for p in self.program.params}
        layout = of_input(x, self.mesh) if hasattr(x, "microbatch") else x.layout
        if x.name in names:
            axes = tuple(a for a in x.reduce if "[" not in a)
            layout = with_partial_grad(
                layout, (*axes, MICROBATCH) if MICROBATCH in self.mesh.names else axes, self.mesh
            )
        fills = {(s.dim, 0.0) for s in layout.paddings()} if x.name in names else set()
        return Claim(node, normal(layout, node.meta["value"]), frozenset(fills))

    def _text(self, stage: Stage, totals: tuple[tuple[Claim, ...], ...]) -> Any:
        claims: dict[fx.Node, list[Claim]] = {}
        known = {**self.stored}
        for n in stage.graph.nodes:
            if n.op != "placeholder" or n.meta.get("value") is None:
                continue
            if n.name in known and "collective" not in n.meta:
                claims[n] = [known[n.name]]
            elif n.name in self.sent:
                claims[n] = self.sent[n.name]
            else:
                yield self._gap(stage, n, "no earlier stage makes it, and it is neither stored nor an input")
        text = Text(self.model, stage.graph, claims, totals, self.until)
        text.run()
        self.lines += sum(n.op == "call_function" for n in stage.graph.nodes)
        for node in text.unexplained():
            yield self._gap(
                stage,
                node,
                text.wrong.get(node) or text.unfit.get(node) or self._why(text, node),
                self._right(text, node),
            )
        for node, why in text.wrong.items():
            if node in text.explained:
                yield self._gap(stage, node, why)
        yield from self._declared(stage, text)
        return text

    def _declared(self, stage: Stage, text: Text) -> Iterator[Gap]:
        """Check that the types shown in a text are those of its claims."""
        for node, claims in text.claims.items():
            value = node.meta.get("value")
            if (
                value is None
                or isinstance(value, tuple)
                or (node.op == "placeholder" and "collective" not in node.meta)  # it has its stored type
                or node.target in table("proof", "BYTES")  # their layout is each rank's own; no other rank reads them
            ):
                continue
            expected = [shown(c.layout, self.mesh, own=True) for c in claims]
            if shown(value.layout, self.mesh) not in expected:
                yield self._gap(
                    stage, node, f"its type says ({value.layout or 'whole'}), it is ({claims[0].layout or 'whole'})"
                )

    def _results(self, texts: list[Text]) -> Iterator[Gap]:
        """Check that loss, new buffers and outputs are the model's, in the layouts that the program declares."""
        program = self.program
        model_output: Any = self.model.graph.output_node().args[0]
        model_loss, model_values = model_output
        new_buffers = dict(zip([b.name for b in program.buffers if b.updated], model_values, strict=False))
        outs = dict(zip([o.name for o in program.outputs], model_values[len(new_buffers) :], strict=True))
        stored = {b.name: b for b in program.buffers}
        outputs = {o.name: o for o in program.outputs}
        losses = 0
        for stage, text in zip(program.stages, texts, strict=True):
            returned: Any = stage.graph.output_node().args[0]
            loss, values = returned[0], returned[1]
            if loss is not None:
                losses += 1
                yield from self._loss(stage, text, loss, model_loss)
            updates = stage.updates or (tuple(new_buffers) if len(program.stages) == 1 else ())
            for name, node in zip((*updates, *stage.outputs), values, strict=True):
                buffer, output = stored.get(name), outputs.get(name)
                of = new_buffers[name] if name in updates else outs[name]
                declared = buffer if name in updates else output
                yield from self._result(stage, text, node, of, declared)
        if losses != (model_loss is not None):
            right = "one does" if model_loss is not None else "none does: the program is forward-only"
            yield Gap("program", f"{losses} stages give the loss", right=right)

    def _claims(
        self, stage: Stage, text: Text, node: fx.Node, of: fx.Node, name: str
    ) -> Generator[Gap, None, list[Claim]]:
        """Return the claims of a returned line about a value of the model; report a line that is another value."""
        claims = text.claims.get(node, [])
        same = [c for c in claims if c.of is self.model.one[of]]
        if claims and not same:
            yield self._gap(stage, node, f"{name} is another value of the model", of.name)
        return same

    def _loss(self, stage: Stage, text: Text, node: fx.Node, of: fx.Node) -> Iterator[Gap]:
        same = yield from self._claims(stage, text, node, of, "the loss that the stage returns")
        for axis in self.mesh.names if same else ():
            p = same[0].layout[axis]
            if axis == MICROBATCH and p != Partial():
                yield self._gap(
                    stage,
                    node,
                    "each microbatch gives the whole loss: the step counts it as often",
                    "a summand in each",
                )
            elif p not in (REPLICATE, Partial()):
                yield self._gap(stage, node, f"the loss is {same[0].layout}", "whole, or a summand of each rank")

    def _result(self, stage: Stage, text: Text, node: fx.Node, of: fx.Node, declared: Any) -> Iterator[Gap]:
        """Check the new value of a buffer or an output. declared: that buffer or output; of: the model's node."""
        name, expected, adds = declared.name, declared.layout, declared.adds
        same = yield from self._claims(stage, text, node, of, name)
        if not same:
            return

        def as_declared(c: Claim) -> bool:
            return shown(c.layout, self.mesh, own=True, padded=True) == shown(expected, self.mesh)

        claim = next(filter(as_declared, same), same[0])
        layout = claim.layout
        if MICROBATCH in self.mesh.names and adds != (layout[MICROBATCH] == Partial()):
            yield self._gap(stage, node, f"{name}: its microbatches {'are no summands' if adds else 'are summands'}")
        if not as_declared(claim):
            yield self._gap(stage, node, f"{name} is ({layout or 'whole'})", f"({expected or 'whole'})")

    def _pipeline(self) -> Iterator[Gap]:
        """Check sends, receives and parameters of the stages, and that the schedule ends."""
        program = self.program
        if program.schedule is None:
            return
        makers, all_sent = {name: i for i, s in enumerate(program.stages) for name in s.sends}, True
        for i, stage in enumerate(program.stages):
            for name, value in stage.receives.items():
                maker = makers.get(name)
                if maker is None or maker == i:
                    yield Gap(f"{stage.name}: {name}", "no other stage sends it")
                    all_sent = False
                    continue
                node = next(n for n in program.stages[maker].graph.nodes if n.name == name)
                (sent,) = values_of(node)
                if (sent.shape, sent.dtype, sent.layout) != (value.shape, value.dtype, value.layout):
                    yield Gap(
                        f"{stage.name}: {name}", f"it receives {value}, and {program.stages[maker].name} sends {sent}"
                    )
        used: dict[str, set[int]] = {}
        for i, stage in enumerate(program.stages):
            for name in stage.takes:
                used.setdefault(name, set()).add(i)
        for p in program.params:
            if p.stages and not used.get(p.name, set()) <= set(p.stages):
                yield Gap(p.fqn, f"stages {sorted(used[p.name])} use it, and it is of stages {list(p.stages)}")
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
                self.lines += sum(map(_calls, stage.joint.graphs.values()))
                for w in joint_graphs.wrong(self.program, stage, rules, self.until):
                    yield self._of_joint(stage.name, w)
        for p in self.program.pairs:
            self.lines += _calls(p.graph)
            for w in joint_graphs.wrong_in_pair(self.program, p, rules, self.until):
                yield self._of_joint(emit.pair_name(p), w)

    def _of_joint(self, name: str, w: joint_graphs.Wrong) -> Gap:
        if w.line is None:
            return Gap(f"{name}, {w.text}", w.what, right=w.right)
        line = _line(w.line.graph, self.program, w.line)
        return Gap(f"{name}, {w.text}: {w.line.name}", w.what, line, str(source_of(w.line)), w.right)

    # --- messages

    def _gap(self, stage: Stage, node: fx.Node, what: str, right: str = "") -> Gap:
        return Gap(
            f"{stage.name}: {node.name}", what, _line(stage.graph, self.program, node), str(source_of(node)), right
        )

    def _why(self, text: Text, node: fx.Node) -> str:
        """Return why a line is no op of the model: compare it with the op of its name, if there is one."""
        call = next((n for n in self.model.calls if n.name == node.name), None)
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

    def _right(self, text: Text, node: fx.Node) -> str:
        call = next((n for n in self.model.calls if n.name == node.name), None)
        return f"{call.target} by its rule" if call is not None and node not in text.wrong | text.unfit else ""


def _calls(graph: fx.Graph) -> int:
    return sum(n.op == "call_function" for n in graph.nodes)


def _line(graph: fx.Graph, program: Program, node: fx.Node) -> str:
    """Return the line of the program's text that shows a node."""
    start = f"    {node.name} = "
    text = emit.function(graph, program)
    return next((line.strip() for line in text.splitlines() if line.startswith(start)), "")
