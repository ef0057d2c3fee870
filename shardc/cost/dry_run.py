"""Run one rank's step on tensors without data, to find what it holds, computes and sends.

The engine itself runs the step, so nothing is modelled twice: what is kept for backward, what a checkpoint recomputes,
when buckets are gathered, filled and freed, and what a schedule keeps alive are as in training. Of many microbatches
only the first ones and the last are run. All between are the same, so `shardc.cost.peak_memory` assembles the whole
schedule from these.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardc.collector import uncollected
from shardc.cost import host_memory
from shardc.cost.fake_mesh import FakeMesh, rank_of
from shardc.cost.graph_lines import GraphLines
from shardc.cost.growth import Growth
from shardc.cost.known_ops import KnownOps
from shardc.cost.ledger import FakeLedger
from shardc.cost.recorded import DryRun
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Input, Param
from shardc.machine.work import Part, Sent, Waited
from shardc.runtime import schedule as schedules
from shardc.runtime.rng import Rng
from shardc.runtime.schedule import Action, computed
from shardc.runtime.schedule.actions import PAIRS
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import Run, Training, Values
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.engine_optimizer import OptimizerOf
from shardc.runtime.zero.named_parameters import NamedParameters
from shardc.runtime.zero.several_optimizers import as_one, class_of, prefer_fused
from shardc.torch_private import fake_mode

#: The most ops of a rank's forward that a dry run executes, over all microbatches.
OPS = 4000


@uncollected()
def dry_run(
    program: Program,
    coordinate: int = 0,
    optimizer: OptimizerOf | None = None,
    *,
    cpu: bool = False,
    known: KnownOps | None = None,
    growth: Growth | None = None,
    **options: Any,
) -> DryRun:
    """Run the second step of a rank, in which the optimizer has its state. cpu: the device is a CPU.

    known: results of ops from other dry runs. growth: finds the part of ops that grows with rows. options: of Engine.
    """
    ledger = FakeLedger(known, growth)
    with fake_mode(of_gpu=not cpu, remembers=False), ledger:
        rank = rank_of(program.mesh, program.axis, coordinate)
        buckets = {f"bucket{i}" for i in range(len(program.buckets))}
        mesh = FakeMesh(program.mesh, rank, ledger, streams=not cpu, buckets=buckets)
        ledger.again, ledger.in_backward = lambda: mesh.step.repeats, lambda: mesh.step.in_backward
        offload = host_memory.offload(ledger.host, cpu=cpu)
        make = optimizer if cpu or optimizer is None else _as_on_gpu(program, optimizer)
        offloaded = OffloadedTensors if cpu else host_memory.offloaded_tensors(ledger.host, ledger)
        engine = _Engine(
            program,
            _weights(program),
            make,
            mesh=mesh,
            interpreter=partial(_Recorded, offloaded=offloaded, make=partial(GraphLines, ledger, program)),
            # tensors without data are "on the CPU", whose Rng hashes block by block; a GPU's hashes all at once
            rng=Rng if cpu else partial(Rng, block=sys.maxsize),
            offload=offload,
            check=False,
            **options,
        )
        recorded = engine.interpreter
        assert isinstance(recorded, _Recorded)
        recorded.ledger, recorded.buckets, recorded.rng = ledger, engine.buckets, engine.rng
        ledger.mark(engine.owned.values(), "parameters")
        ledger.mark(engine.buffers.values(), "buffers")
        _mark_rest(ledger, "parameters")
        batch = _batch(program)
        *_, first = _step(engine, recorded, batch, 1)
        ledger.mark([p.grad for p in engine.owned.values()], "gradients")
        _mark_rest(ledger, "optimizer")  # new after the first step, and still there
        resident = tuple(ledger.live())
        before, after, update = _step(engine, recorded, batch, _affordable(program, coordinate))
        _carry(first, before, update)
        name = class_of(engine.optimizer) if engine.optimizer is not None else ""
        return DryRun(coordinate, mesh.rank, resident, before, tuple(recorded.performed), after, update, name)


def _affordable(program: Program, rank: int) -> int:
    """Return how many microbatches are run: all, unless they are many and large."""
    placement = schedules.of(program).placement
    nodes = sum(len(s.graph.nodes) for s, at in zip(program.stages, placement, strict=True) if at == rank)
    return max(min(program.microbatches, OPS // nodes), 3, _for_pairs(schedules.of(program).actions[rank]))


def _for_pairs(actions: Sequence[Action]) -> int:
    """Return how many microbatches include two pairs of every kind that are without the last microbatch."""
    seen: dict[Any, list[int]] = {}
    for a in actions:
        if a.kind in PAIRS:
            seen.setdefault(a.of_pair, []).append(max(a.microbatch, a.other[1]))
    return max((sorted(each)[:2][-1] for each in seen.values()), default=-2) + 2


def _weights(program: Program) -> dict[str, Tensor]:
    """Return weights of the model's shapes that take no memory."""
    stored: list[Param | Buffer] = [x for x in program.stored if not isinstance(x, Input) and x.fqn]
    return {name: torch.empty((), dtype=x.dtype).expand(shape) for x in stored for name, shape in x.shapes.items()}


def _as_on_gpu(program: Program, make: OptimizerOf) -> OptimizerOf:
    """Make the optimizer update as on a GPU: all parameters in one kernel (fused), or op by op (foreach).

    foreach is for optimizers without such kernels or with offloaded state. A CPU updates one parameter after the other.
    """

    def make_optimizer(params: NamedParameters) -> Any:
        optimizer = make(params)
        if not program.spec.data.offload.used:
            prefer_fused(as_one(optimizer))
        for group in as_one(optimizer).param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        return optimizer

    return make_optimizer


def _batch(program: Program) -> Any:
    """Return a global batch that takes no memory. Mappings also replace sequences: only paths count."""
    batch: Any = {}
    for x in program.inputs:
        leaf = torch.empty((), dtype=x.dtype).expand(x.shape)
        if not x.path:
            batch[None] = leaf
            continue
        parent = batch
        for key in x.path[:-1]:
            parent = parent.setdefault(key, {})
        parent[x.path[-1]] = leaf
    return batch[None] if batch.keys() == {None} else batch


class _Recorded(Interpreter):
    """Records what each action does, of the first microbatches and the last one."""

    compiles = False

    ledger: FakeLedger
    buckets: Any
    rng: Rng
    microbatches: int

    def step(self, values: Values, training: Training) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        losses, new_values, outputs = self._recorded(values, training)
        return self._total(losses), self._share_buffers(new_values), self._outputs(outputs)

    def evaluate(self, values: Values) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Run the step of a forward-only program."""
        _, _, outputs = self._recorded(values, None)
        return None, self._outputs(outputs)

    def _recorded(self, values: Values, training: Training | None) -> Any:
        """Run the selected actions; return (losses, new values of buffers, outputs)."""
        names = {x.name for x in self.program.inputs}
        self.ledger.mark((x for microbatch in values for name, x in microbatch.items() if name in names), "inputs")
        last = max((a.microbatch for a in computed(self.actions)), default=0)

        def is_run(m: int) -> bool:
            return m < self.microbatches - 1 or m == last

        run = _Run(self, values, [x for a in self.actions for x in a.among(is_run)], training)
        run.run_all()
        self.performed = run.performed
        self.begin("sums")
        return run.losses, run.new_values, run.outputs

    def begin(self, name: str) -> Part:
        """Start the next part of the step."""
        self.ledger.op = ""
        return self.ledger.begin(name)


class _Run(Run):
    interpreter: _Recorded

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.performed: list[tuple[Action, Part]] = []

    def run_action(self, action: Action) -> None:
        self.performed.append((action, self.interpreter.begin(str(action))))
        super().run_action(action)
        self._sort(action)

    def _sort(self, action: Action) -> None:
        """Set the kind of all storages that an action leaves: they are kept for a purpose."""
        ledger = self.interpreter.ledger
        passing: list[Tensor] = [x for box in self.inbox.values() for x in box.values()]
        passing += [x for box in self.grads.values() for x in box.values()]
        passing += [x for box in self.outbox.values() for x in box]
        passing += [x for posted in self.posted.values() for _, into, _ in posted for x in into.values()]
        ledger.mark(self.interpreter.rng.tensors(), "buffers")  # later steps use them too
        ledger.mark((x for copies in self.weight_copies.values() for x in copies.values()), "parameters")
        grads = [p.grad for p in self.interpreter.buckets.given.values() if isinstance(p, Tensor)]
        ledger.mark(grads, "gradients")
        ledger.mark_fixed_size([*grads, *self.interpreter.buckets.buffers])
        if action.kind == "F":
            _mark_rest(ledger, "activations")
            return
        ledger.mark(passing, "communication")
        # the other storages that a pair leaves are its forward's; its gradients are already marked
        _mark_rest(ledger, "gradients" if action.kind in ("B", "W", "REDUCE") else "activations")


def _step(engine: _Engine, recorded: _Recorded, batch: Any, microbatches: int) -> list[Part]:
    """Run a step. Return its parts: before the actions, after them, the update."""
    recorded.microbatches = microbatches
    before = recorded.begin("the batch")
    if engine.program.forward_only:
        engine.evaluate(batch)
        engine.last_parts = recorded.ledger.parts[-1], recorded.begin("update")  # an empty part
    else:
        engine.step(batch)
    after, update = engine.last_parts
    recorded.begin("")
    return [before, after, update]


def _carry(first: Part, before: Part, update: Part) -> None:
    """Move collectives that an update starts (ZeRO's gathers of updated parameters) to the next step.

    Its forward waits for them. first: the update of the previous step, whose gathers replace those of this one.
    """
    before.work[:0] = _started(first)
    started = _started(update)
    update.work[:] = [w for w in update.work if w not in started]


def _started(part: Part) -> list[Sent]:
    """Return the collectives of a part that nothing in it waits for."""
    waited = {w.key for w in part.work if isinstance(w, Waited)}
    return [w for w in part.work if isinstance(w, Sent) and w.key is not None and w.key not in waited]


class _Engine(Engine):
    """Records where backward ends and the update begins. last_parts: the last step's parts after actions."""

    _tries_optimizer = False  # tensors without data prove nothing

    def _update(self) -> None:
        recorded = self.interpreter
        assert isinstance(recorded, _Recorded)
        ledger = recorded.ledger
        ledger.mark(self.buffers.values(), "buffers")
        kinds = "temporaries", "communication", "activations"
        ledger.mark((p.grad for p in self.owned.values()), "gradients", over=kinds)
        self.last_parts = ledger.parts[-1], recorded.begin("update")
        super()._update()


def _mark_rest(ledger: FakeLedger, kind: str) -> None:
    """Set the kind of all storages that are still temporaries."""
    for storage in ledger.storages.values():
        if storage.kind == "temporaries":
            storage.kind = kind
