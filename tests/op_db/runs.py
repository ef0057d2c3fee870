"""What becomes of a case on meshes: by shardc, and by DTensor on the same ones.

dp2                 rows of the batch over 2 ranks         tp2 p0.1         dim 1 of parameter p0 over 2 ranks
dp3 padded          rows over 3, padded                    tp3 padded p0.1  over 3, padded
dp2 x tp2 p0.1      both
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import shardc
from shardc import ShardcError
from shardc.capture import capture
from shardc.ir.program import Program
from tests.op_db.cases import Reference, difference, splits

#: Relative, in float64, of the largest number: kernels of a part add in another order than those of the whole, and a
#: matrix's inverse or logarithm multiplies that.
BOUND = 1e-10


@dataclass(frozen=True)
class Outcome:
    """Of one case on one mesh. how: "equal", "refused" by name, "wrong", "skip", or "raw": an exception that is no
    ShardcError.

    gathers: collectives of forward but sums: where there is none, what came split stayed split.
    """

    spec: str
    how: str
    what: str = ""
    fix: str = ""
    gathers: int = 0


def specs(case: Reference, mode: str) -> Iterator[tuple[str, dict[str, Any]]]:
    x0, params = case.model.batch["x0"], dict(case.model.named_parameters())

    def on(mesh: dict[str, int], name: str = "", dim: int = 0, **more: Any) -> dict[str, Any]:
        shard = {"shard": {name: {dim: "tp"}}} if name else {}
        return {"shardc": 1, "mesh": mesh, **shard, **more}

    rows = x0.shape[0]
    if rows % 2 == 0:
        yield "dp2", on({"dp": 2})
    for d in splits(x0):
        yield f"tp2 p0.{d}", on({"tp": 2}, "p0", d)
    if mode == "inplace":
        return
    others = [(n, d) for n, p in params.items() if n != "p0" and p.ndim for d in splits(p)]
    for name, d in others[:3]:
        yield f"tp2 {name}.{d}", on({"tp": 2}, name, d)
    if mode == "second" and rows > 3:
        yield "dp3 padded", on({"dp": 3}, uneven="pad")
    long = max(range(x0.ndim), key=lambda i: (x0.shape[i] > 2, i if mode == "first" else -i))
    yield f"tp3 padded p0.{long}", on({"tp": 3}, "p0", long, uneven="pad")
    inner = [d for d in splits(x0) if d]
    if inner and rows % 2 == 0:
        yield f"dp2 x tp2 p0.{inner[-1]}", on({"dp": 2, "tp": 2}, "p0", inner[-1])


def by_shardc(case: Reference, mode: str, seeded: bool = False) -> Iterator[Outcome]:
    """seeded: the database sets a seed around the op, which tracing does not see."""
    batch = case.model.batch if mode == "first" else case.model.other_batch()  # no value of the batch may be baked in
    try:
        captured = capture(case.model, batch)
    except Exception as e:
        outcome = _error("capture", e)
        random = seeded and "differs from the model's own" in outcome.what
        yield Outcome("", "skip", "random") if random else outcome
        return
    for name, spec in specs(case, mode):
        yield _on(case, name, spec, captured, batch)


def _on(case: Reference, name: str, spec: dict[str, Any], captured: Program, batch: dict[str, Tensor]) -> Outcome:
    try:
        program = shardc.compile(case.model, batch, spec, captured=captured)
        torch.manual_seed(1)
        sim = shardc.simulate(program, case.model, case.model.batch)
    except Exception as e:  # what is no ShardcError is what this looks for
        return _error(name, e)
    worst, of = difference(sim.loss, sim.grads, case.loss, case.grads)
    summed = ("all_reduce", "reduce_scatter")
    moved = [c for c in sim.comms if c.direction == "forward" and not c.kind.startswith(summed)]
    return _judged(name, worst, of, len(moved))


def _judged(name: str, worst: float, of: str, gathers: int) -> Outcome:
    return Outcome(name, "equal" if worst <= BOUND else "wrong", f"{of}: {worst:.1e}", gathers=gathers)


def _error(name: str, e: Exception) -> Outcome:
    if isinstance(e, ShardcError):
        return Outcome(name, "refused", "; ".join(x.what for x in e.errors), "; ".join(x.fix for x in e.errors))
    differs = isinstance(e, AssertionError) and "differs from its replica" in str(e)
    return Outcome(name, "wrong" if differs else "raw", f"{type(e).__name__}: {e}"[:300])


# --- DTensor


def by_dtensor(case: Reference) -> Iterator[Outcome]:
    """The first sample, with x0 and p0 split as on shardc's meshes of two ranks, in one process."""
    x0 = case.model.batch["x0"]
    places = [("dp2", 0)] if x0.shape[0] % 2 == 0 else []
    for name, d in (*places, *((f"tp2 p0.{d}", d) for d in splits(x0))):
        try:
            yield _dtensor(case, name, d)
        except Exception as e:  # as torch's own messages tell refusals from faults
            said = f"{type(e).__name__}: {e}"
            refused = ("sharding strategy", "not supported", "mixed torch.Tensor", "NotImplementedError")
            yield Outcome(name, "refused" if any(x in said for x in refused) else "raw", said[:300])


@cache
def _mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", rank=0, world_size=2)
    torch.autograd._enable_record_function(False)
    return init_device_mesh("cpu", (2,))


def _dtensor(case: Reference, name: str, d: int) -> Outcome:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, model, rows = _mesh(), case.model, name == "dp2"

    def whole(x: Any) -> Any:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def put(x: Tensor, split: bool) -> Any:
        return distribute_tensor(x.detach().clone(), mesh, [Shard(d) if split else Replicate()])

    with LocalTensorMode(frozenset(range(2))):
        given: dict[str, Any] = {n: put(x, rows or n == "x0") for n, x in model.batch.items()}
        for n, p in model.named_parameters():
            given[n] = put(p, n == "p0" or (rows and p.shape == model.p0.shape)).requires_grad_()
        given |= {n: put(b, False) for n, b in model.named_buffers()}
        with CommDebugMode() as counted:
            results = model.call(given)
        weights = [given[f"k{i}"].full_tensor() for i in range(model.results)]
        loss = model.weighed([whole(y) for y in results], whole(given["p0"]), weights)
        loss.backward()
        found = {n: whole(given[n].grad) for n, _ in model.named_parameters() if given[n].grad is not None}
        # of the two ranks the first: that nan differs from nan is no difference
        loss, *grads = (getattr(x, "_local_tensors", {0: x})[0] for x in (loss.detach(), *found.values()))
    worst, of = difference(loss, dict(zip(found, grads, strict=True)), case.loss, case.grads)
    kinds = {str(k): n for k, n in counted.get_comm_counts().items()}
    gathers = sum(n for k, n in kinds.items() if "all_reduce" not in k and "reduce_scatter" not in k)
    return _judged(name, worst, of, gathers)


def one_thread() -> None:
    """What takes place at once is processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
