"""Measure the seconds of each op of a real step.

`shardc run --log RUN --breakdown 5` writes RUN/ops-step5-rank0.json. As in a dry run, the ledger (shardc.cost.ledger)
counts what an op computes and moves; here the tensors are real, and a clock runs beside it. So a measured op and a
predicted one are the same record, and nothing has to be matched by name.

On a CPU the op runs when it is called. On a GPU it is queued: the device is kept busy first, so that the host is
ahead, and two events around the op time its kernels. The whole step takes longer when measured; its ops do not. Ops
inside of a collective count as part of it; its wait is measured (shardc.runtime.mesh.wait_times).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardc.cost.ledger import Ledger, tensors_in
from shardc.machine.work import Op
from shardc.runtime.mesh.base import RankMesh
from shardc.runtime.mesh.wait_times import Wait, event
from shardc.torch_private import busy_gpu

#: The kind of storages that no op of the step has made.
BEFORE = "before"
#: Calls that find the time that measuring adds to an op.
CALLS = 200


@dataclass
class OpTime:
    """Equal ops of one part ("forward", "backward", "update"): count, total and least seconds."""

    part: str
    op: Op
    count: int
    seconds: float
    least: float


@dataclass
class MeasuredStep:
    """A step whose ops were measured, on one rank of a mesh {axis: size}. kind: "cpu" or "cuda".

    device: its name. made: the most bytes at once of tensors that the step itself made. seconds: of the whole step,
    including the measuring.
    """

    step: int
    rank: int
    mesh: dict[str, int]
    kind: str
    device: str
    made: int
    seconds: float
    ops: list[OpTime] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        ops = [{**vars(x), "op": x.op._asdict()} for x in self.ops]
        return {**vars(self), "ops": ops, "waits": [asdict(x) for x in self.waits]}

    @staticmethod
    def of_json(value: dict[str, Any]) -> MeasuredStep:
        """Return the step of `to_json`. Raises ValueError (pydantic's) for anything else."""
        return TypeAdapter(MeasuredStep).validate_python(value)


class OpTimes(Ledger):
    """`with OpTimes(device) as times:` measures the ops that run; then `times.measured(step)`.

    mesh: its collectives and recomputed ops are recorded separately.
    """

    def __init__(self, device: torch.device, mesh: RankMesh | None = None) -> None:
        super().__init__()
        self.device, self.mesh = device, mesh
        if mesh is not None:
            self.again, self.in_backward = lambda: mesh.step.repeats, lambda: mesh.step.in_backward
        self._found: dict[tuple[str, Op], OpTime] = {}
        self._last: Callable[[], float] = float
        self._waiting: list[tuple[str, Op, Callable[[], float]]] = []  # queued on the device
        self._updates = 0
        self._hooks: list[RemovableHandle] = []
        self._added = 0.0
        self._began = 0.0
        self._seconds = 0.0

    def __enter__(self) -> OpTimes:
        self._added = self._overhead()
        if self.mesh is not None:
            self.mesh.waits.keep()
        self._hooks = [register_optimizer_step_pre_hook(self._update), register_optimizer_step_post_hook(self._updated)]
        self._began = time.perf_counter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds = time.perf_counter() - self._began
        for part, op, took in self._waiting:
            self._note(part, op, took())
        self._waiting.clear()

    def measured(self, step: int) -> MeasuredStep:
        """Return the measurements as a step."""
        live = most = 0
        for part in self.parts:
            for sign, storage in part.changes:
                live += sign * storage.nbytes * (storage.kind != BEFORE)
                most = max(most, live)
        cpu = self.device.type == "cpu"
        name = f"cpu, {torch.get_num_threads()} threads" if cpu else torch.cuda.get_device_name(self.device)
        waits: list[Wait] = []
        if self.mesh is not None:
            self.mesh.waits.read_times()
            waits, self.mesh.waits.kept = self.mesh.waits.kept or [], None
        rank, mesh = (self.mesh.rank, dict(self.mesh.layout.axes)) if self.mesh is not None else (0, {})
        ops = list(self._found.values())
        return MeasuredStep(step, rank, mesh, self.device.type, name, most, self._seconds, ops, waits)

    # --- what the ledger sees

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.kind = BEFORE
        for x in tensors_in((args, kwargs)):
            self.observe(x)
        self.kind = "temporaries"
        if self.device.type == "cpu":
            begin = time.perf_counter()
            result = func(*args, **kwargs)
            took = max(time.perf_counter() - begin - self._added, 0.0)
            self._last = lambda: took
            return result
        with torch.cuda.device(self.device):
            busy_gpu()
            before, after = event(), event()
            before.record()
            result = func(*args, **kwargs)
            after.record()
        self._last = lambda: before.elapsed_time(after) / 1e3
        return result

    def ran(self, op: Op) -> None:
        if op.name.startswith("c10d::") or (self.mesh is not None and self.mesh.waits.inside):
            return
        part = "update" if self._updates else "backward" if self.in_backward() else "forward"
        if self.device.type == "cpu":
            self._note(part, op._replace(of=""), self._last())
        else:
            self._waiting.append((part, op._replace(of=""), self._last))

    def _note(self, part: str, op: Op, seconds: float) -> None:
        entry = self._found.setdefault((part, op), OpTime(part, op, 0, 0.0, seconds))
        entry.count += 1
        entry.seconds += seconds
        entry.least = min(entry.least, seconds)

    def _update(self, *_: Any) -> None:
        self._updates += 1

    def _updated(self, *_: Any) -> None:
        self._updates -= 1

    def _overhead(self) -> float:
        """Return the seconds that a call from Python adds to an op, from an op that takes almost no time."""
        if self.device.type != "cpu":
            return 0.0
        x: Tensor = torch.zeros(1)
        call, least = torch.ops.aten.alias.default, float("inf")
        for _ in range(CALLS):
            begin = time.perf_counter()
            call(x)
            least = min(least, time.perf_counter() - begin)
        return least


def file_of(log: Path, step: int, rank: int) -> Path:
    return log / f"ops-step{step}-rank{rank}.json"
