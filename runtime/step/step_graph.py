"""Run a step's forward, backward and gradient sums as one CUDA graph: `execution: {graphs: true}`.

If ops are small, a step takes as long as the host needs to start them, some 10 us each. CUDA records a step once;
afterwards one call starts all of it (torch.cuda.CUDAGraph). A recorded step reads and writes at fixed addresses, so

    a batch            is copied to where the recorded step reads it; buffers too
    parameters         stay where they are; if one has moved, or was frozen, the step is recorded again
    random numbers     come from words on the device, which are written before the step (shardc.runtime.rng)
    gradients          are at the same addresses after every step, and the next one overwrites them
    loss and outputs   are returned as copies

The update is the optimizer's, op by op: schedules and clipping work as usual. The first steps of each batch size run
op by op, too: libraries then choose kernels and allocate memory. A step whose host waits for the device cannot be
recorded, and runs op by op, with a note: experts over several ranks (how many rows each gets), tensors that move to
the host and back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.ops.attention.held import attention_reach
from shardc.runtime.ops.experts.parallel import experts_route
from shardc.runtime.rng import Rng
from shardc.runtime.stage import outputs
from shardc.runtime.stage.run import Values
from shardc.runtime.zero.buckets import Buckets
from shardc.torch_private import watched

WARM = 2  # steps of a batch size before one is recorded
KEPT, UNUSED = 4, 50  # recorded steps kept, each with its gradients; steps after which an unused one may be replaced
SEEN = 50  # batch sizes whose steps are counted; then the count begins again: sizes differ in every batch
#: (the loss, buffers' new values, values beside the loss) of a step; its gradients are in `.grad`.
Result = tuple[Tensor, dict[str, Tensor], outputs.Values]


class CudaGraph:
    """A recorded graph. pool: memory that graphs share; only one of them runs at a time."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def recording(self) -> AbstractContextManager[Any]:
        """Record the ops inside this context without running them."""
        # other threads may continue meanwhile: those that save, read batches, watch NCCL
        graph: Any = torch.cuda.graph
        context: AbstractContextManager[Any] = graph(self._graph, self._pool, capture_error_mode="thread_local")
        return context

    def replay(self) -> None:
        self._graph.replay()


def graphs_of(device: torch.device) -> Callable[[], CudaGraph] | None:
    """Return a function that makes graphs for a device; None if it has none."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


@dataclass
class _Recorded:
    """A recorded step.

    inputs: per microbatch {name: where the graph reads it}; buffers: likewise. restore_grads: sets `.grad` again.
    """

    graph: CudaGraph
    inputs: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    result: Result
    restore_grads: Callable[[], None]
    used: int = 0  # the number of the last step

    def copy_inputs(self, values: Values) -> None:
        """Copy a step's inputs to where the graph reads them."""
        into, new = [], []
        for places, microbatch in zip(self.inputs, values, strict=True):
            into += list(places.values())
            new += [microbatch[name] for name in places]
        for name, place in self.buffers.items():
            if values[0][name] is not place:
                into.append(place)
                new.append(values[0][name])
        with torch.no_grad():
            for place, x in zip(into, new, strict=True):
                place.copy_(x)


@dataclass
class StepGraphs:
    """The recorded steps of an engine. A note says why if there are none."""

    program: Program
    mesh: Any
    rng: Rng
    buckets: Buckets
    _make: Callable[[], CudaGraph] | None = None
    _seen: dict[Any, int] = field(default_factory=dict)
    _recorded: dict[Any, _Recorded] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._inputs = [x.name for x in self.program.inputs]
        self._make = graphs_of(self.mesh.device)
        reason = "" if self._make is not None else f"a device of kind {self.mesh.device.type} has no CUDA graphs"
        self._refuse(reason or why_not(self.program))
        self.rng.in_place = self.records

    @property
    def records(self) -> bool:
        """Whether steps can be recorded."""
        return self._make is not None

    def _refuse(self, reason: str) -> None:
        if not reason:
            return
        self._make = None
        fault = f"execution: {{graphs: true}}: {reason}; steps run op by op"
        if self.program.spec.strict:
            raise ShardcError(fault, where="engine", fix="leave graphs out, or `strict: true`")
        self.mesh.note(fault)

    def step(self, key: Any, values: Values, work: Callable[[Values], Result]) -> Result:
        """Return the result of `work(values)`, with gradients in `.grad`. key: what else it depends on."""
        if self._make is None or watched():  # dispatch modes and the profiler must see the ops
            return work(values)
        self.buckets.wait_for_gathers()  # of the last update
        key, self._steps = (key, self._signature(values)), self._steps + 1
        if key not in self._recorded:
            if len(self._seen) > SEEN:
                self._seen.clear()
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM or not self._room():
                return work(values)
            recorded = self._record(values, work)
            if recorded is None:
                return work(values)
            self._recorded[key] = recorded
        replayed = self._recorded[key]
        replayed.used = self._steps
        replayed.copy_inputs(values)
        self.rng.renew()
        replayed.graph.replay()
        replayed.restore_grads()
        total, news, beside = replayed.result
        return total.clone(), news, {name: x.clone() for name, x in beside.items()}

    def _room(self) -> bool:
        """Return whether there is room for one more graph; an unused graph makes room.

        Without the limit, alternating sizes would be recorded again and again, slower than op by op.
        """
        if len(self._recorded) < KEPT:
            return True
        oldest = min(self._recorded, key=lambda key: self._recorded[key].used)
        if self._steps - self._recorded[oldest].used <= UNUSED:
            return False
        del self._recorded[oldest]
        return True

    def _record(self, values: Values, work: Callable[[Values], Result]) -> _Recorded | None:
        """Record a step; None: it cannot be recorded, from now on."""
        assert self._make is not None
        graph = self._make()
        inputs = [{n: v[n].clone() for n in self._inputs if isinstance(v[n], Tensor)} for v in values]
        buffers = {b.name: values[0][b.name] for b in self.program.buffers if isinstance(values[0].get(b.name), Tensor)}
        self.rng.renew()
        try:
            with graph.recording():
                result = work([{**v, **places} for v, places in zip(values, inputs, strict=True)])
        except ShardcError:
            raise
        except Exception as e:
            self.buckets.reset(forward=True)
            for p in self.buckets.owned.values():
                p.grad = None
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            self._refuse(f"CUDA cannot record this step ({first})")
            return None
        grads = {name: p.grad for name, p in self.buckets.owned.items()}
        restore_sums = self.buckets.sums_restorer()

        def restore_grads() -> None:
            for name, grad in grads.items():
                self.buckets.owned[name].grad = grad
            restore_sums()

        return _Recorded(graph, inputs, buffers, result, restore_grads)

    def _signature(self, values: Values) -> tuple[Any, ...]:
        """Return what a recorded step assumes of its values and parameters."""
        stored = tuple(_assumed(x) for name, x in values[0].items() if name not in self._inputs)
        trained = tuple((p.data_ptr(), p.requires_grad) for p in self.buckets.owned.values())
        return stored, trained, tuple(_assumed(v[n]) for v in values for n in self._inputs)


def _assumed(x: Any) -> Any:
    """Return what a recorded step assumes of a value: a parameter's address, a tensor's form, other values."""
    if isinstance(x, nn.Parameter):
        return x.data_ptr(), x.requires_grad
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return x if x is None or isinstance(x, (bool, int, float, str)) else id(x)


#: Ops for which the host waits, and why.
_WAITING = {
    experts_route: "the host must know how many rows experts receive",
    attention_reach: "the host must know where a mask allows attention",
}


def requested(program: Program) -> bool:
    """Return whether a program's spec says `execution: {graphs: true}`."""
    return program.spec.execution.graphs


def step_graphs(program: Program, mesh: Any, rng: Rng, buckets: Buckets) -> StepGraphs | None:
    """Return an engine's recorded steps if the spec requests them; None: steps run op by op."""
    if not requested(program):
        return None
    graphs = StepGraphs(program, mesh, rng, buckets)
    return graphs if graphs.records else None


def why_not(program: Program) -> str:
    """Return why the host waits for the device in a step, so that it cannot be recorded; "": it does not."""
    if program.spec.data.offload.used or any(c.offload != "none" for c in program.spec.checkpoint):
        return "tensors move between the device and the host"
    called = {n.target for s in program.stages for n in s.graph.nodes}
    return next((f"the host waits for the device: {why}" for op, why in _WAITING.items() if op in called), "")
