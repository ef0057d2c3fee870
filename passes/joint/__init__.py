"""Write the joint graph of each stage: a forward and a backward graph, which a training step runs.

    derivatives finds the derivative of each call, once for every distinct call
    saved       finds what the backward of each call keeps; `checkpoint` and cost use it
    autograd_order  orders backward's rules and sums of gradients, as autograd does
    kept        decides which values backward keeps, on the device or on the host, and which it recomputes
    write       writes the two graphs; take_over: reuses memory for sums; halves: splits backward in two for a schedule
    host_copies   places copies to the host and back (`checkpoint: {offload: cpu}`)
    overlap     splits collectives, and orders lines to hide them; seconds: the time of a line;
                memory: the bytes that are alive
    pair        joins a forward and a backward of two microbatches, or two forwards, into one graph
    fused_regions   marks the lines that are compiled together; fused_recompute: drops what a fused backward recomputes

docs/explanation/joint.md shows both graphs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock

from shardc.collector import uncollected
from shardc.errors import ShardcError
from shardc.ir.graph import producer_of
from shardc.ir.program import Program
from shardc.ir.stage import DeferredJoint, Joint, Stage
from shardc.passes.base import Pass
from shardc.passes.joint.autograd_order import Backward
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.fused_recompute import recompute_in_regions
from shardc.passes.joint.fused_regions import mark_fused_regions
from shardc.passes.joint.host_copies import arrange_copies
from shardc.passes.joint.memory import Sizes
from shardc.passes.joint.overlap import overlap_collectives
from shardc.passes.joint.pair import pairs_of
from shardc.passes.joint.saved import types_of
from shardc.passes.joint.seconds import Seconds
from shardc.passes.joint.write import Writer
from shardc.runtime import ops
from shardc.runtime.zero.trained_params import backward_roots
from shardc.spec.step_sections import Execution
from shardc.torch_modes import untraced


@dataclass(frozen=True)
class JointGraphs(Pass):
    """Writes the two graphs of every stage."""

    def applies(self, program: Program) -> bool:
        return not program.forward_only

    def run(self, program: Program) -> Program:
        if self.spec.execution.overlap != "none":
            self._check_overlap(program, self.spec.execution.overlap)
        return with_joint_graphs(program, self.spec.execution)

    def _check_overlap(self, program: Program, how: str) -> None:
        where = self.spec.where(("execution", "overlap"))
        if program.schedule is not None:
            fault = f"`overlap: {how}` does not work with a pipeline, whose schedule decides which microbatches overlap"
            fix = "`pipeline: {schedule: dualpipe-v}`, and leave `overlap` out"
            raise ShardcError(fault, where=where, fix=fix)
        if program.microbatches == 1:
            fault = f"`overlap: {how}` needs at least two microbatches, and there is one"
            raise ShardcError(fault, where=where, fix="`batch: {microbatches: 2}`, or leave `overlap` out")


def with_joint_graphs(program: Program, how: Execution) -> Program:
    """Add graphs to each stage, written on first access (those of pairs: at once). how: `execution`."""
    graphs, lock = Graphs(program, how), RLock()
    joint = (DeferredJoint(partial(_now, graphs.of, i), lock) for i in range(len(program.stages)))
    result = replace(program, stages=tuple(replace(s, joint=x) for s, x in zip(program.stages, joint, strict=True)))
    pairs = pairs_of(result, graphs.seconds, graphs.sizes, _pairs_to_run(result, how))
    for p in pairs:
        if how.compile == "layers":
            mark_fused_regions(p.graph, graphs.sizes)
    return replace(result, pairs=pairs)


def _now(write: Callable[[int], Joint], stage: int) -> Joint:
    """Return a stage's joint graph, written as in `shardc.compile`: without torch modes of the caller."""

    def quickly() -> Joint:
        with uncollected():
            return write(stage)

    return untraced(quickly)


#: The pairs of a program without a pipeline, by the spec's word.
_PAIR: dict[str, str] = {"microbatches": "FB", "forwards": "FF"}


def _pairs_to_run(program: Program, how: Execution) -> tuple[tuple[str, int, int], ...]:
    """Return the (kind, first stage, second stage) of each pair that a step runs: see `Schedule.pairs`."""
    if program.schedule is not None:
        return program.schedule.pairs()
    return ((_PAIR[how.overlap], 0, 0),) if how.overlap in _PAIR and program.microbatches > 1 else ()


class Graphs:
    """The graphs of a program's stages, each written once. how: the spec's section."""

    def __init__(self, program: Program, how: Execution) -> None:
        self._program, self._how, self._rules = program, how, Rules(program)
        self.seconds, self.sizes = Seconds(program, self._rules.rank), Sizes(program)
        self._written: dict[int, tuple[Joint, int]] = {}
        self._done: dict[int, Joint] = {}

    def of(self, stage: int) -> Joint:
        """Return the finished joint graph of a stage."""
        if stage not in self._done:
            joint, _ = self._with_backward(stage)
            overlap_collectives(joint.forward, self.seconds, self.sizes, self._room())
            if self._how.compile == "layers":
                for graph in joint.graphs.values():
                    mark_fused_regions(graph, self.sizes)
                recompute_in_regions(joint, self.sizes)
            self._done[stage] = joint
        return self._done[stage]

    def _room(self) -> int:
        """Return the live bytes allowed to a forward whose values leave: the smallest backward peak.

        A step needs that memory anyway.
        """
        if not any(r.offload for r in self._program.regions):
            return 0
        joints = [self._with_backward(i) for i in range(len(self._program.stages))]
        leaving = any(n.target is ops.offload_start for joint, _ in joints for n in joint.forward.nodes)
        return min(peak for _, peak in joints) if leaving else 0

    def _with_backward(self, stage: int) -> tuple[Joint, int]:
        """Return a stage's joint graph with backward's lines moved, and the least peak of its backward graphs."""
        if stage not in self._written:
            joint = self._write(self._program.stages[stage])
            for n in joint.forward.nodes:  # the size of tapes comes from forward's lines
                self.seconds.of(n)
            backward = [graph for name, graph in joint.graphs.items() if name != "forward"]
            peaks = [overlap_collectives(graph, self.seconds, self.sizes) for graph in backward]
            self._written[stage] = joint, min(peaks)
        return self._written[stage]

    def _write(self, stage: Stage) -> Joint:
        """Write a stage's graphs, with lines in the order in which autograd would run them."""
        program, rules, seconds, sizes = self._program, self._rules, self.seconds, self.sizes
        types, facts = types_of(program, stage.graph, rules)
        roots = backward_roots(program, stage)
        backward = Backward(stage.graph, program, rules, types)
        begin = backward.run([n for n in roots if (t := types[producer_of(n)]) is not None and t.grad])
        actions = [a for row in program.schedule.actions for a in row] if program.schedule is not None else []
        divided = any(a.kind == "I" and program.stages[a.stage] is stage for a in actions)
        writer = Writer(program, stage.graph, rules, facts, backward.events, begin, backward.input_gradients)
        joint = writer.joint((lambda n: sizes.bytes_of(n) + seconds.tape_bytes(n)) if divided else None)
        for graph in joint.graphs.values():
            arrange_copies(graph, seconds, sizes)
        return joint
