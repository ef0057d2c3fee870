"""What one rank's step holds, computes and sends: the very engine runs it, alone, on tensors without data.

So nothing is modelled twice: what autograd keeps, what a checkpoint computes again, when buckets are gathered, filled
and freed, what a schedule keeps alive are what they are in training. Of many microbatches the first ones and the last
are run; `shardc.cost.replay` puts the whole schedule together from their actions, as all others between are alike.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost import host_memory
from shardc.cost.fake_mesh import GhostMesh, rank_of
from shardc.cost.ledger import Held, Ledger, Part, Sent, Waited
from shardc.ir.program import Buffer, Input, Param, Program, Stage
from shardc.runtime.rng import Rng
from shardc.runtime.schedule import Action
from shardc.runtime.step import param_groups
from shardc.runtime.step.activation_offload import OffloadedTensor
from shardc.runtime.step.engine import Engine, OptimizerOf
from shardc.runtime.step.interpreter import Interpreter, Run, StepHooks, Values
from shardc.torch_private import fake_mode, sequence_number

#: Kinds of what stays from step to step.
RESIDENT = ("parameters", "optimizer", "buffers")


#: Ops of a rank's forward, over all microbatches, that are run one by one.
OPS = 4000


@dataclass(frozen=True)
class Rehearsal:
    """Of one rank. at: its coordinate on the pipeline's axis. resident: what is there before a step; before: what is
    done
    before the first action (taking the batch); actions: (action, what it does) of those that were run; after: sums,
    norms; update."""

    at: int
    rank: int
    resident: tuple[Held, ...]
    before: Part
    actions: tuple[tuple[Action, Part], ...]
    after: Part
    update: Part


def rehearse(
    program: Program, at: int = 0, optimizer: OptimizerOf | None = None, *, cpu: bool = False, **options: Any
) -> Rehearsal:
    """One step of a rank, the second one: the optimizer has its state. cpu: it runs on one. options: of Engine."""
    ledger = Ledger()
    with fake_mode(), ledger:
        names = _Names(ledger)
        mesh = GhostMesh(program.mesh, rank_of(program.mesh, program.axis, at), ledger)
        offload = host_memory.offload(ledger.host, cpu=cpu)
        make = optimizer if cpu or optimizer is None else _at_once(optimizer)
        offloaded = OffloadedTensor if cpu else host_memory.offloaded_tensor(ledger.host)
        engine = _Engine(
            _told(program, names),
            _weights(program),
            make,
            mesh=mesh,
            interpreter=partial(_Recorded, offloaded=offloaded),
            # tensors without data are "on the CPU", which hashes block by block; a GPU hashes all numbers at once
            rng=Rng if cpu else partial(Rng, block=sys.maxsize),
            offload=offload,
            **options,
        )
        recorded = engine.interpreter
        assert isinstance(recorded, _Recorded)
        recorded.ledger, recorded.buckets = ledger, engine.buckets
        ledger.mark(engine.params.values(), "parameters")
        ledger.mark(engine.buffers.values(), "buffers")
        _all(ledger, "parameters")
        batch = _batch(program)
        *_, first = _step(engine, recorded, batch, 1)
        ledger.mark([p.grad for p in engine.params.values()], "gradients")
        _all(ledger, "optimizer")  # what is new after the first step, and stays
        resident = tuple(ledger.live())
        before, after, update = _step(engine, recorded, batch, _affordable(program, at))
        _carry(first, before, update)
        return Rehearsal(at, mesh.rank, resident, before, tuple(recorded.found), after, update)


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

        tell.__module__ = "shardc.cost.dry_run"
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


def _at_once(make: OptimizerOf) -> OptimizerOf:
    """An optimizer of torch's that is not told otherwise updates all parameters at once on a GPU, and one after the
    other on a CPU.
    """

    def made(params: param_groups.Parameters) -> torch.optim.Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        return optimizer

    return made


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


class _Recorded(Interpreter):
    """Notes what each action does, of the first microbatches and the last one."""

    ledger: Ledger
    buckets: Any
    microbatches: int

    def step(self, values: Values, hooks: StepHooks) -> tuple[Tensor, dict[str, Tensor]]:
        names = {x.name for x in self.program.inputs}
        self.ledger.mark((x for given in values for name, x in given.items() if name in names), "inputs")
        last = max((a.microbatch for a in self.actions), default=0)
        run = _Run(
            self,
            values,
            [a for a in self.actions if a.microbatch < self.microbatches - 1 or a.microbatch == last],
            hooks,
        )
        run.go()
        self.found = run.found
        self.turn("sums")
        losses, news = run.losses, run.news
        del run
        return self._total(losses), self._spread(news)

    def turn(self, name: str) -> Part:
        """The next part of the step begins."""
        self._close()
        self.ledger.at = ""
        return self.ledger.turn(name)

    def _close(self) -> None:
        self.ledger.parts[-1].sent = tuple(self.mesh.records)
        self.mesh.records.clear()


class _Run(Run):
    on: _Recorded

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[tuple[Action, Part]] = []

    def do(self, action: Action) -> None:
        self.found.append((action, self.on.turn(str(action))))
        super().do(action)
        self._sort(action)

    def _sort(self, action: Action) -> None:
        """After an action: what is left is kept for something."""
        ledger = self.on.ledger
        passing: list[Tensor] = [x for each in self.inbox.values() for x in each.values()]
        passing += [x for each in self.grads.values() for x in each.values()]
        passing += [x for each in self.outbox.values() for x in each]
        passing += [x for posted in self.posted.values() for _, into, _ in posted for x in into.values()]
        ledger.mark([p.grad for p in self.on.buckets.given.values() if isinstance(p, Tensor)], "gradients")
        if action.kind == "F":
            _all(ledger, "activations")
            return
        ledger.mark(passing, "communication")
        _all(ledger, "gradients" if action.kind in ("B", "W", "REDUCE") else "activations")


def _step(engine: _Engine, recorded: _Recorded, batch: Any, microbatches: int) -> list[Part]:
    """Its parts: before the actions, after them, the update."""
    recorded.microbatches = microbatches
    before = recorded.turn("the batch")
    engine.step(batch)
    after, update = engine.found
    recorded.turn("")
    return [before, after, update]


def _carry(first: Part, before: Part, update: Part) -> None:
    """What an update begins (ZeRO's gathers of updated parameters), the next step's forward waits for: it runs beside
    that
    step's beginning.

    first: the update of the step before, whose gathers take the place of those that this one's begins.
    """
    before.work[:0] = _begun(first)
    begun = _begun(update)
    update.work[:] = [w for w in update.work if w not in begun]


def _begun(part: Part) -> list[Sent]:
    """The collectives of a part that nothing in it waits for."""
    waited = {w.key for w in part.work if isinstance(w, Waited)}
    return [w for w in part.work if isinstance(w, Sent) and w.key is not None and w.key not in waited]


class _Engine(Engine):
    """Notes where a step's backward ends and its update begins. .found: the parts of the
    last step after its actions.
    """

    def _prove(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        """Tensors without data prove nothing."""

    def update(self) -> None:
        recorded = self.interpreter
        assert isinstance(recorded, _Recorded)
        ledger = recorded.ledger
        ledger.mark(self.buffers.values(), "buffers")
        ledger.mark(
            (p.grad for p in self.params.values()), "gradients", over=("temporaries", "communication", "activations")
        )
        self.found = ledger.parts[-1], recorded.turn("update")
        super().update()


def _all(ledger: Ledger, kind: str) -> None:
    """All that is left of what nobody has said anything about."""
    for held in ledger.held.values():
        if held.kind == "temporaries":
            held.kind = kind
