"""What one rank's step holds, computes and sends: the very engine runs it, alone, on tensors without data.

So nothing is modelled twice: what autograd keeps, what a checkpoint computes again, when buckets are gathered, filled and freed, what a
schedule keeps alive are what they are in training. Of many microbatches the first ones and the last are run; `shardc.cost.replay` puts the
whole schedule together from their actions, as all others between are alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.ghost import GhostMesh, rank_of
from shardc.cost.ledger import Held, Ledger, Part
from shardc.program import Buffer, Input, Param, Program, Stage
from shardc.runtime.engine import Engine, OptimizerOf
from shardc.runtime.interpreter import Around, Run
from shardc.runtime.schedule import Action
from shardc.torch_private import fake_mode, sequence_number

#: Kinds of what stays from step to step.
RESIDENT = ("parameters", "optimizer", "buffers")


#: Ops of a rank's forward, over all microbatches, that are run one by one.
OPS = 4000


@dataclass(frozen=True)
class Rehearsal:
    """Of one rank. at: its coordinate on the pipeline's axis. resident: what is there before a step; before: what is done before the
    first action (taking the batch); actions: (action, what it does) of those that were run; after: sums, norms; update."""

    at: int
    rank: int
    resident: tuple[Held, ...]
    before: Part
    actions: tuple[tuple[Action, Part], ...]
    after: Part
    update: Part


def rehearse(program: Program, at: int = 0, optimizer: OptimizerOf | None = None, **options: Any) -> Rehearsal:
    """One step of a rank, the second one: the optimizer has its state. options: of Engine."""
    with fake_mode(), Ledger() as ledger:
        names = _Names(ledger)
        mesh = GhostMesh(program.mesh, rank_of(program.mesh, program.axis, at), ledger)
        engine = Engine(_told(replace(program, meta={**program.meta, "offload": {}}), names), _weights(program), optimizer, mesh=mesh, **options)
        ledger.mark(engine.params.values(), "parameters")
        ledger.mark(engine.buffers.values(), "buffers")
        _all(ledger, "parameters")
        local = _batch(program)
        step = _Step(engine, program, mesh, ledger)
        step.run(local, microbatches=1)
        step.settle()
        ledger.parts = [Part("")]
        resident = tuple(ledger.live())
        for held in resident:
            held.born = 0
        return step.run(local, resident, at, microbatches=_affordable(program, mesh.coordinate(program.axis) if program.axis else 0))


def _affordable(program: Program, at: int) -> int:
    """How many microbatches are run: all, unless they are many and large."""
    placement = program.schedule.placement if program.schedule is not None else (0,)
    nodes = sum(len(s.graph.nodes) for s, coordinate in zip(program.stages, placement, strict=True) if coordinate == at)
    return max(min(program.microbatches, OPS // nodes), 3)


class _Names:
    """Tells the ledger which op of the program runs, and finds the one that a node of autograd belongs to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.numbers: list[int] = []
        self.ops: list[str] = []
        ledger.op_of = self.op_of

    def teller(self, name: str) -> Callable[[], None]:
        def tell() -> None:
            self.ledger.at = name
            number = sequence_number()
            if not self.numbers or self.numbers[-1] < number:
                self.numbers.append(number)
                self.ops.append(name)
            else:
                self.ops[-1] = name

        tell.__module__ = "shardc.cost.rehearse"
        return tell

    def op_of(self, number: int) -> str:
        at = bisect_right(self.numbers, number) - 1
        return self.ops[at] if at >= 0 else ""


def _told(program: Program, names: _Names) -> Program:
    """The program, whose stages say which op they are at."""
    return replace(program, stages=tuple(replace(s, graph=_telling(s, names)) for s in program.stages))


def _telling(stage: Stage, names: _Names) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(stage.graph, {}))
    for n in list(copy.nodes):
        if n.op == "call_function":
            with copy.inserting_before(n):
                copy.call_function(names.teller(n.name))
    return copy


def _weights(program: Program) -> dict[str, Tensor]:
    """Weights of the model's shapes that take no memory."""
    stored: list[Param | Buffer] = [x for x in program.stored if not isinstance(x, Input) and x.fqn]
    return {name: torch.empty((), dtype=x.dtype).expand(x.shape) for x in stored for name in (x.fqn, *x.aliases)}


def _batch(program: Program) -> Any:
    """A global batch, without memory; mappings stand for sequences too: only paths count."""
    batch: Any = {}
    for x in program.inputs:
        leaf = torch.empty((), dtype=x.dtype).expand(x.shape)
        if not x.path:
            return leaf
        into = batch
        for key in x.path[:-1]:
            into = into.setdefault(key, {})
        into[x.path[-1]] = leaf
    return batch


class _Step:
    """A step in parts."""

    def __init__(self, engine: Engine, program: Program, mesh: GhostMesh, ledger: Ledger) -> None:
        self.engine, self.program, self.mesh, self.ledger = engine, program, mesh, ledger
        self.resident: set[int] = set()

    def settle(self) -> None:
        """After the first step: what is new and stays is the optimizer's."""
        self.engine._buckets.settled()
        grads = [p.grad for p in self.engine.params.values()]
        self.ledger.mark(grads, "gradients")
        _all(self.ledger, "optimizer")

    def run(self, batch: Any, resident: tuple[Held, ...] = (), at: int = 0, *, microbatches: int) -> Rehearsal:
        engine, ledger = self.engine, self.ledger
        interpreter = engine._interpreter
        actions = interpreter.actions
        last = max((a.microbatch for a in actions), default=0)
        chosen = [a for a in actions if a.microbatch < microbatches - 1 or a.microbatch == last]
        before = self._turn("the batch")
        found: list[tuple[Action, Part]] = []
        on = self

        class Rehearsed(Run):
            def do(self, action: Action) -> None:
                part = on._turn(str(action))
                found.append((action, part))
                super().do(action)
                on._sort(action, self)
                part.sent = tuple(on.mesh.records)

        engine._check()
        engine._buckets.reset(forward=True)
        values = engine._take(batch, local=False)
        ledger.mark((x for given in values for name, x in given.items() if name in {i.name for i in self.program.inputs}), "inputs")
        for p in engine.params.values():
            p.grad = None
        engine.rng.training = True
        engine._norm.start()
        scaled = engine.scaler.scale if engine.scaler is not None else lambda loss: loss
        around = Around(engine._buckets.saving, engine._buckets.start, engine._buckets.pause, engine._buckets.reduce, scaled)
        before.sent = tuple(self.mesh.records)
        run = Rehearsed(interpreter, values, chosen, around)
        run.go()
        after = self._turn("sums")
        interpreter._total(run.losses)
        news = run.news
        del run, values
        engine._buckets.finish(engine._reduced)
        engine._reduced(engine._unbucketed)
        if engine.scaler is not None:
            engine.scaler.agree()
        engine.buffers |= news
        ledger.mark(news.values(), "buffers")
        ledger.mark((p.grad for p in engine.params.values()), "gradients", over=("temporaries", "communication", "activations"))
        after.sent = tuple(self.mesh.records)
        update = self._turn("update")
        engine.update()
        engine._buckets.settled()
        update.sent = tuple(self.mesh.records)
        return Rehearsal(at, self.mesh.rank, resident, before, tuple(found), after, update)

    def _turn(self, name: str) -> Part:
        self.mesh.records.clear()
        self.ledger.at = ""
        return self.ledger.turn(name)

    def _sort(self, action: Action, run: Any) -> None:
        """After an action: what is left is kept for something."""
        ledger = self.ledger
        passing: list[Tensor] = [x for each in run.inbox.values() for x in each.values()]
        passing += [x for each in run.grads.values() for x in each.values()]
        passing += [x for each in run.outbox.values() for x in each]
        passing += [x for posted in run.posted.values() for _, into, _ in posted for x in into.values()]
        grads = [p.grad for p in self.engine._buckets.given.values() if isinstance(p, Tensor)]
        ledger.mark(grads, "gradients", over=("temporaries",))
        if action.kind != "F":
            ledger.mark(passing, "communication", over=("temporaries",))
            _all(ledger, "gradients" if action.kind in ("B", "W", "REDUCE") else "activations")
        else:
            _all(ledger, "activations")


def _all(ledger: Ledger, kind: str) -> None:
    """All that is left of what nobody has said anything about."""
    for held in ledger.held.values():
        if held.kind == "temporaries":
            held.kind = kind
