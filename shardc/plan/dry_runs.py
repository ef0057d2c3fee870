"""What one microbatch is on one stage, for every way to split and recompute: from dry_runs of a model of a few
layers.

    five units of layers on four stages     [first, 1]   [1]   [2]   [1, last]      one compile, four dry_runs
    a stage of n units                      [1] + (n - 1) · ([2] - [1]),  likewise the first stage and the last one

A model without a long list of layers is rehearsed whole, as one stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardc.compile import compile as compiled
from shardc.cost.device import Device
from shardc.cost.dry_run import dry_run
from shardc.cost.ledger import KINDS
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.plan.model import UNITS, Subject
from shardc.plan.space import KEPT, Choice, Keep, SpecTemplate, spec
from shardc.plan.stage_vectors import FLOPS, Stage, Vector, lines, part_of, stage
from shardc.runtime.schedule import SCHEDULES
from shardc.runtime.step.engine import adamw


@dataclass(frozen=True)
class Stages:
    """Stages of one rank each. Of a model of layers: the first, a middle one of one unit and of two, the last; else all
    are `whole`'s.

    period: layers of a unit; before: layers of the first stage that are there beside its unit. casts: bytes of a unit's
    weights in the dtype of products, that each microbatch keeps for backward.
    """

    whole: Stage | None = None
    first: Stage = field(default_factory=dict)
    one: Stage = field(default_factory=dict)
    two: Stage = field(default_factory=dict)
    last: Stage = field(default_factory=dict)
    period: int = 1
    before: int = 0
    casts: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def at(self, index: int, count: int, layers: int) -> Stage:
        """Stage `index` of `count`, with so many layers (several stages)."""
        assert self.whole is None
        if index == 0:
            return lines(self.first, self.two, self.one, (layers - self.before) / self.period - 1)
        return lines(self.last if index == count - 1 else self.one, self.two, self.one, layers / self.period - 1)

    def alone(self, layers: int) -> Stage:
        """The whole model as one stage, from the first and the last stage run one after the other."""
        if self.whole is not None:
            return self.whole
        front = lines(self.first, self.two, self.one, (layers - self.before) / self.period - 2)
        found: Stage = {}
        for key in {**front, **self.last}:
            kind, which = key
            if kind.startswith(("SEND", "RECV")):
                continue
            a, b = part_of(front, kind, which), part_of(self.last, kind, which)
            found[key] = _then(b, a) if kind in ("B", "I", "W") else _then(a, b)
        return found


def _then(a: Vector, b: Vector) -> Vector:
    """One part behind another: what is highest is the first's height, or the second's above what the first left."""
    n = len(KINDS)
    made = a + b
    after = a[:n] + b[n : 2 * n]
    made[n : 2 * n] = a[n : 2 * n] if a[n : 2 * n].sum() >= after.sum() else after
    return made


@dataclass
class Library:
    """Rehearses what it is asked for, once. words: what all specs have in common. microbatches: of what is rehearsed
    for
    estimates: a first and a last one; 1 for a model that takes no more, as statistics of a batch are not those of its
        microbatches."""

    subject: Subject
    template: SpecTemplate
    device: Device
    sequence: int | None = None
    microbatches: int = 2
    _cores: dict[tuple[int, int, bool, Keep], Stages | ShardcError] = field(default_factory=dict)
    _rehearsed: dict[str, Stages] = field(default_factory=dict)
    _alone: dict[str, Stage] = field(default_factory=dict)

    def core(self, choice: Choice) -> Stages:
        """Of a choice's (tp, ep, sequence parallel, checkpoint): one row a microbatch, no data axis. Raises ShardcError
        if compile refuses it.
        """
        key = choice.core
        if key not in self._cores:
            tp, ep, sp, keep = key
            try:
                self._cores[key] = self._core(
                    Choice(ep=ep, tp=tp, sequence_parallel=sp, checkpoint=keep, microbatches=self.microbatches)
                )
            except ShardcError as e:
                self._cores[key] = e
        found = self._cores[key]
        if isinstance(found, ShardcError):
            raise found
        return found

    def knows(self, choice: Choice) -> bool:
        """Was its core asked for before?"""
        return choice.core in self._cores

    def compiled(self, asked: Mapping[str, Any], rows: int, units: int | None = None) -> Program:
        """The program of a spec for a global batch of so many rows: of the whole model, or of so many units of its
        layers.
        """
        captured = self.subject.captured(rows, units, self.sequence)
        example = self.subject.example(rows, self.sequence)
        return compiled(
            self.subject.model_of(units), example, asked, loss=self.subject.loss, captured=captured, prove=False
        )

    def pipelined(self, asked: Mapping[str, Any], rows: int, axis: str = "pp") -> Stages:
        """A spec's stages, from one that has four of them along `axis`, whatever it says itself."""
        layers = self.subject.layers
        assert layers is not None
        split = SCHEDULES[asked.get("pipeline", {}).get("schedule", "1f1b")].splits_backward
        mesh = {a: n for a, n in asked["mesh"].items() if a != axis}
        key = repr(({**asked, "pipeline": split, "mesh": mesh}, rows))
        if key not in self._rehearsed:
            program = self._four(asked, rows, axis, split)
            made = [self._stage(program, at) for at in range(4)]
            casts = [_casts(program, at) for at in range(4)]
            self._rehearsed[key] = Stages(
                None, made[0], made[1], made[2], made[3], layers.period, layers.first, (casts[0], casts[1], casts[3])
            )
        return self._rehearsed[key]

    def _four(self, asked: Mapping[str, Any], rows: int, axis: str = "pp", split: bool = False) -> Program:
        """The program of five units of layers on four stages."""
        layers = self.subject.layers
        assert layers is not None
        p = layers.period
        counts = [layers.first + p, p, 2 * p, p]
        mesh = {axis: 4, **asked["mesh"]} | {axis: 4}
        pipeline = {"axis": axis, "balance": counts, "schedule": "zb-h1" if split else "1f1b"}
        return self.compiled({**asked, "mesh": mesh, "pipeline": pipeline}, rows, UNITS)

    def alone(self, asked: Mapping[str, Any], rows: int) -> Stage:
        """The whole model on one stage: from two units of its layers and three, or as it is."""
        layers = self.subject.layers
        if layers is None:
            return self._stage(self.compiled(asked, rows), 0)
        key = repr((asked, rows))
        if key not in self._alone:
            few, more = (self._stage(self.compiled(asked, rows, units), 0) for units in (2, 3))
            self._alone[key] = lines(few, more, few, (layers.number - layers.first) / layers.period - 2)
        return self._alone[key]

    def _core(self, choice: Choice) -> Stages:
        asked = spec(choice, self.template)
        mixture = (
            choice.checkpoint in KEPT and choice.checkpoint != "none"
        )  # what is kept is chosen by cost: no worse than a mixture
        if self.subject.layers is None and not mixture:
            program = self.compiled(asked, choice.batch)
            return Stages(whole=self._stage(program, 0), casts=(_casts(program, 0), 0.0, 0.0))
        if choice.checkpoint == "none":
            return self.pipelined(asked, choice.batch)
        base = self.core(replace(choice, checkpoint="none"))
        if mixture:
            full, share = self.core(replace(choice, checkpoint="full")), KEPT[choice.checkpoint]
            if base.whole is not None and full.whole is not None:
                return replace(base, whole=lines(full.whole, base.whole, full.whole, share))
            mixed = [lines(b, a, b, share) for a, b in ((base.one, full.one), (base.two, full.two))]
        else:  # recomputation begins and ends with layers: what is before and behind them stays as it is
            program = self._four(asked, choice.batch)
            mixed = [self._stage(program, at) for at in (1, 2)]
        one, two = mixed
        return replace(
            base, one=one, two=two, first=lines(base.first, one, base.one, 1), last=lines(base.last, one, base.one, 1)
        )

    def _stage(self, program: Program, at: int) -> Stage:
        return stage(dry_run(program, at, adamw, cpu=self.device.kind == "cpu"), self.device, program)

    def takes_microbatches(self) -> None:
        """Find out whether the model may be run in microbatches. Raises ShardcError if
        compile does not take it at all.
        """
        try:
            self.core(Choice())
        except ShardcError as e:
            self.microbatches = 1
            self._cores.clear()
            try:
                self.core(Choice())
            except ShardcError:
                raise e from None

    @cached_property
    def flops(self) -> float:
        """Of the model and one row: three times forward's products, as gradients are two of each; nothing computed
        again.
        """
        found = self.core(Choice())
        whole = found.alone(self.subject.layers.number if self.subject.layers else 0)
        return 3 * float(part_of(whole, "F", "middle")[FLOPS])


def _casts(program: Program, at: int) -> float:
    """Bytes of a stage's weights that were cast for products."""
    graph = program.stages[at].graph
    total = 0.0
    for n in graph.nodes:
        if (
            n.op == "call_function"
            and len(n.all_input_nodes) == 1
            and n.all_input_nodes[0].op == "placeholder"
            and "_to_copy" in str(n.target)
        ):
            total += n.meta["value"].nbytes(program.mesh)
    return total
