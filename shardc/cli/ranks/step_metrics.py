"""What a run measures of itself beside time: floating-point operations, the share of the device's peak, bytes sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardc.api import Program
from shardc.cost.device_file import device, measured_file, names
from shardc.machine.device import Device
from shardc.machine.flops import flops_of
from shardc.report.comm import comm_rows
from shardc.runtime.mesh import RankMesh
from shardc.torch_private import TorchDispatchMode


class ForwardFlops(TorchDispatchMode):
    """`with ForwardFlops() as counted:` counts the matrix products of a step's forward on this rank: `.flops`.

    Backward has twice as many, and what is computed again is not counted: a model's own operations are three times
    forward's (PaLM, Chowdhery et al. 2022, appendix B)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is None:
            self.flops += flops_of(func, args, kwargs or {}, result)
        return result


@contextmanager
def timed_ops(log: Path, step: int, mesh: RankMesh) -> Iterator[None]:
    """Time every op of a step, into a file of `log` (shardc.cost.op_times)."""
    from shardc.cost.op_times import OpTimes, file_of

    with OpTimes(mesh.device, mesh) as times:
        yield
    log.mkdir(parents=True, exist_ok=True)
    file_of(log, step, mesh.rank).write_text(json.dumps(times.measured(step).to_json()))


def speed(samples: int, tokens: int | None, steps: float) -> dict[str, float]:
    """Samples a second, and tokens if the model has any, of a step's and of the steps a second."""
    rates = {"samples_per_second": round(samples * steps, 1)}
    return rates | ({"tokens_per_second": round(tokens * steps, 1)} if tokens is not None else {})


def work(forward_flops: int, peak: float | None, steps: float) -> dict[str, float]:
    """TFLOP/s of the model's own operations on this rank, three times forward's, at so many steps a second; and the
    share of the device's peak, if that is known.
    """
    rate = 3 * forward_flops * steps
    return {"tflops": round(rate / 1e12, 4)} | ({"mfu": round(rate / peak, 4)} if peak else {})


def peak_flops(program: Program, where: torch.device) -> float | None:
    """Of this rank's device, a second, in the dtype that products are computed in: as `shardc device --measure` found,
    or of the file in shardc/machine/devices that has its name; None where neither knows it.
    """
    known = _known(where)
    if known is None:
        return None
    spec = program.spec
    compute = spec.precision.compute if spec is not None else None
    floating = [p.dtype for p in program.params if p.dtype.is_floating_point]
    dtype = compute or (str(floating[0]).removeprefix("torch.") if floating else "float32")
    return known.flops_per_second(dtype)


def _known(where: torch.device) -> Device | None:
    if measured_file(where.type).is_file():
        return device(where.type)
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where).lower()
        sizes = [n for n in names() if n.partition("-")[0] in name]
        return device(sizes[0]) if sizes else None
    return None


def bytes_by_axis(program: Program, coordinate: int, moved: Sequence[int]) -> dict[str, int]:
    """Of the collectives of a step on one rank. coordinate: its place in the pipeline; moved: bytes of each message of
    its optimizer's matrices.
    """
    total: Counter[str] = Counter()
    for row in comm_rows(program, coordinate if program.axis else None, moved):
        total[row.axes] += row.bytes
    return dict(total)
