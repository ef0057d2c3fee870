"""Measure a run's steps beside time: FLOPs, the share of the device's peak, bytes sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardc.api import Program
from shardc.cost.measured.device_file import device, measured_file, names
from shardc.machine.flops import flops_of
from shardc.runtime.mesh import RankMesh
from shardc.runtime.mesh.step_context import StepContext
from shardc.torch_private import TorchDispatchMode


class ModelFlops(TorchDispatchMode):
    """Counts FLOPs of a step's matrix products on this rank, without what backward recomputes.

    `with ModelFlops(mesh.step) as counted:`, then `counted.flops` (PaLM, Chowdhery et al. 2022, appendix B).
    """

    def __init__(self, step: StepContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self.flops = step, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._step.repeats:
            self.flops += flops_of(func, args, kwargs or {}, result, again=False)
        return result


@contextmanager
def timed_ops(log: Path, step: int, mesh: RankMesh) -> Iterator[None]:
    """Time every op of a step, and write the times to a file in `log` (shardc.cost.measured.op_times)."""
    from shardc.cost.measured.op_times import OpTimes, file_of

    with OpTimes(mesh.device, mesh) as times:
        yield
    log.mkdir(parents=True, exist_ok=True)
    file_of(log, step, mesh.rank).write_text(json.dumps(times.measured(step).to_json()))


class Meter:
    """The constants of a step from which speeds are computed.

    samples, tokens: of a global batch (tokens is None without any). Of a step on this rank, when one was counted:
    flops: of its products; bytes: of its collectives, by axis.
    """

    def __init__(self, program: Program, mesh: RankMesh) -> None:
        self.samples, self.tokens = max((x.shape[0] for x in program.inputs if x.shape), default=1), program.tokens
        self._mesh, self._peak = mesh, peak_flops(program, mesh.device)
        self.flops, self.bytes = 0, dict[str, int]()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the products and collectives of a step."""
        self._mesh.recording = True
        try:
            with ModelFlops(self._mesh.step) as counted:
                yield
        finally:
            self._mesh.recording = False
        total: Counter[str] = Counter()
        for r in self._mesh.records:
            total[r.axis] += r.bytes
        self.flops, self.bytes = counted.flops, dict(total)
        self._mesh.records.clear()

    def speed(self, steps: float) -> dict[str, float]:
        """Return samples a second, and tokens a second if the model has any. steps: steps a second."""
        rates = {"samples_per_second": round(self.samples * steps, 1)}
        return rates | ({"tokens_per_second": round(self.tokens * steps, 1)} if self.tokens is not None else {})

    def work(self, steps: float) -> dict[str, float]:
        """Return TFLOP/s of the model on this rank, and the share of the device's peak if known, as `mfu`."""
        rate = self.flops * steps
        return {"tflops": round(rate / 1e12, 4)} | ({"mfu": round(rate / self._peak, 4)} if self._peak else {})


def peak_flops(program: Program, where: torch.device) -> float | None:
    """Return the peak FLOP/s of this rank's device in the dtype of the model's products; None if unknown.

    Source: `shardc device --measure`, else the file in shardc/machine/devices that has the device's name.
    """
    name = where.type if measured_file(where.type).is_file() else ""
    if not name and where.type == "cuda":
        gpu = torch.cuda.get_device_name(where).lower()
        name = next((n for n in names() if n.partition("-")[0] in gpu), "")
    if not name:
        return None
    floating = [p.dtype for p in program.params if p.dtype.is_floating_point]
    dtype = program.spec.precision.compute or (str(floating[0]).removeprefix("torch.") if floating else "float32")
    return device(name).flops_per_second(dtype)
