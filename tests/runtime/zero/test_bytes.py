"""What ZeRO keeps and sends: bytes of live tensors are the paper's formulas, and a step sends 2P elements, at ZeRO 3
3P.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3 and 7: P
parameters in 16 bits, gradients in 16 bits, and 12 bytes of optimizer state for each: the float32 copy and Adam's two
moments."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.report.comm import comm_rows
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from tests import live_bytes

WIDTHS = (64, 123, 64, 201, 64)  # odd sizes; the weight of 64 x 201 is larger than a bucket
BUCKET_MB = 0.03
MIXED = {"params": "float32", "compute": "bfloat16", "reduce": "bfloat16"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@functools.cache
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@functools.cache
def batch() -> Tensor:
    return torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(1))


P = sum(a * b + b for a, b in itertools.pairwise(WIDTHS))


@functools.cache
def compiled(
    ranks: int,
    zero: int,
    mixed: bool = True,
    tp: int = 1,
    microbatches: int = 1,
    outer: int = 1,
    keep: bool = False,
    prefetch: int = 1,
) -> Program:
    mesh = {"dp_outer": outer, "dp": ranks, "tp": tp}
    spec: dict[str, Any] = {"shardc": 1, "mesh": {a: n for a, n in mesh.items() if a == "dp" or n > 1}}
    data = {"zero": zero, "bucket_mb": BUCKET_MB, "keep": keep, "prefetch": prefetch}
    spec |= {"data": data, "batch": {"microbatches": microbatches}, "precision": MIXED if mixed else {}}
    if tp > 1:
        spec |= {"uneven": "pad"}
        spec["shard"] = {"layers.{0,2}": "column", "layers.{1,3}": "row"}
    return shardc.compile(net(), batch(), spec, captured=capture(net(), batch(), prove=False))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def live() -> int:
    """Bytes of the memory of every tensor that anybody holds, and that was not there before `gc.freeze()`; gradients
    too.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors if x.device.type == "cpu")}
    return sum(storages.values())


def kept(p: Program) -> tuple[float, list[Engine]]:
    """Bytes that a rank keeps after two steps, on average."""

    def work(mesh: LoopbackMesh) -> Engine:
        engine = p.engine(net(), adam, mesh=mesh)
        for _ in range(2):
            engine.step(batch())
        return engine

    batch(), net()
    gc.freeze()
    try:
        engines = loopback(p.mesh, work)
        return live() / p.mesh.world, engines
    finally:
        gc.unfreeze()


def slack(p: Program, n: int) -> float:
    """What padding of the buckets comes to, at most, and what stands once an engine or parameter: counters of steps, a
    loss.
    """
    return len(p.buckets) * 32 * n + len(p.params) * 32 + 256


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_a_rank(n: int) -> None:
    want = {0: 16 * P, 1: 4 * P + 12 * P / n, 2: 2 * P + 14 * P / n, 3: 16 * P / n}
    # without ZeRO, and at ZeRO 3, nothing in 16 bits is kept beside the float32 parameters: it is made when it is used
    want = {0: want[0] - 2 * P, 1: want[1], 2: want[2], 3: want[3] - 2 * P / n}
    for zero, formula in want.items():
        p = compiled(n, zero)
        assert len(p.buckets) > 3
        found, engines = kept(p)
        assert found == pytest.approx(formula, abs=slack(p, n)), (
            f"zero {zero}: {found / P:.3f} P, not {formula / P:.3f} P"
        )
        part = P if zero == 0 else P / n
        for engine in engines:
            assert engine.optimizer is not None
            moments = sum(x.nbytes for s in engine.optimizer.state.values() for x in s.values() if x.dim())
            masters = sum(x.nbytes for x in engine.params.values())
            grads = sum(x.grad.nbytes for x in engine.params.values() if x.grad is not None)
            assert [moments, masters, grads] == pytest.approx([8 * part, 4 * part, 2 * part], abs=2 * slack(p, n))


def test_bytes_in_one_precision() -> None:
    """All in float32: 4P parameters, 4P gradients, 8P moments."""
    for zero, formula in {0: 16 * P, 1: 8 * P + 8 * P / 4, 2: 4 * P + 12 * P / 4, 3: 16 * P / 4}.items():
        p = compiled(4, zero, mixed=False)
        assert kept(p)[0] == pytest.approx(formula, abs=slack(p, 4)), f"zero {zero}"


def test_bytes_of_a_hybrid_rank() -> None:
    """Split over the inner axis, alike over the outer one."""
    p = compiled(2, 3, outer=2)
    assert kept(p)[0] == pytest.approx(14 * P / 2, abs=slack(p, 2))


# --- what is sent

SENT = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
}  # elements that a rank sends, of n: an all_reduce is the other two


def elements(p: Program, steps: int = 2) -> tuple[float, dict[str, int], set[str]]:
    """(elements that rank 0 sends in one step over the data axes; how often a bucket is sent, by kind; buckets gathered
    in backward).
    """

    def work(mesh: LoopbackMesh) -> tuple[float, dict[str, int], set[str]]:
        engine = p.engine(net(), adam, mesh=mesh)
        for _ in range(steps):
            mesh.records.clear()
            engine.step(batch())
        found = [r for r in mesh.records if r.tag.startswith("bucket")]
        kinds = {k: sum(r.kind == k for r in found) for k in SENT if any(r.kind == k for r in found)}
        size = {f"bucket{i}": 2 if b.dtype == torch.bfloat16 else 4 for i, b in enumerate(p.buckets)}
        again = {r.tag for r in found if r.kind == "all_gather" and r.direction == "backward"}
        return sum(SENT[r.kind] * r.bytes / size[r.tag] for r in found), kinds, again

    return loopback(p.mesh, work)[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "float32"])
def test_elements_of_a_step(zero: int, mixed: bool) -> None:
    """At ZeRO 3 backward gathers again what it needs: of biases, and of a layer whose input needs no gradient, there is
    no need.
    """
    p = compiled(4, zero, mixed)
    found, kinds, again = elements(p)
    buckets = len(p.buckets)
    if zero == 3:
        spared = [b.params for i, b in enumerate(p.buckets) if f"bucket{i}" not in again]
        assert all("layers_0_" in name or "bias" in name for names in spared for name in names)
        found += sum(math.prod(p.param(name).shape) for names in spared for name in names)
        assert kinds == {"all_gather": 2 * buckets - len(spared), "reduce_scatter": buckets}
    assert found == pytest.approx((3 if zero == 3 else 2) * P, abs=4 * 3 * buckets)
    if zero < 3:
        assert kinds == ({"all_gather": buckets, "reduce_scatter": buckets} if zero else {"all_reduce": buckets})
    assert written(p) == pytest.approx(found, abs=4 * 3 * buckets)


def written(p: Program) -> float:
    """The same, from the program alone: its buckets, and the gathers in its graph."""
    gathers = [n for n in p.stages[0].graph.nodes if n.target is ops.gather_start]
    assert len(gathers) == sum(b.zero == 3 for b in p.buckets)
    total = 0.0
    for b in p.buckets:
        count = sum(math.prod(p.param(name).shape) for name in b.params)
        total += SENT["all_reduce"] * count  # or its halves: the sum goes to parts, and parts, updated, to all
    for node in gathers:
        collective = node.meta["collective"]
        assert (collective.kind, collective.backward) == ("all_gather", "reduce_scatter")
        total += collective.bytes / node.meta["value"][0].dtype.itemsize
    return total


def test_elements_of_a_hybrid_step() -> None:
    """The sums over the outer axis are of parts."""
    p = compiled(2, 2, outer=2)
    found, kinds, _ = elements(p)
    assert found == pytest.approx(2 * P + 2 * P / 2, abs=24 * len(p.buckets))
    assert kinds == dict.fromkeys(SENT, len(p.buckets))


@pytest.mark.parametrize(("zero", "sent"), [(0, 2 * P), (1, 2 * P), (2, P + 4 * P)])
def test_how_often_microbatches_are_reduced(zero: int, sent: int) -> None:
    """Once a step; at ZeRO 2 one by one, so that no whole gradients are kept."""
    p = compiled(2, zero, microbatches=4)
    assert elements(p)[0] == pytest.approx(sent, abs=16 * len(p.buckets))
    assert kept(p)[0] == pytest.approx({0: 14 * P, 1: 10 * P, 2: 9 * P}[zero], abs=slack(p, 2))


def test_between_microbatches_a_rank_has_its_part_of_the_gradients() -> None:
    """At ZeRO 2 as at ZeRO 3; the rest is of a bucket or two."""

    def gradients(zero: int) -> float:
        """The most bytes of them in any backward."""
        p = compiled(4, zero, microbatches=2)
        memory = p.cost().memory
        assert memory.peak == pytest.approx(live_bytes.measured(p, net(), batch())[0], rel=0.01)
        return max(point.live.get("gradients", 0) for point in memory.curve if "B" in point.part)

    assert gradients(1) >= 2 * P
    assert gradients(2) == gradients(3) < 0.9 * gradients(1)
    assert "reduce_scatter over dp of each microbatch" in str(compiled(4, 2, microbatches=2))


def test_what_is_kept_is_gathered_and_summed_once() -> None:
    """`keep: true`: whole from a step's first forward to its last backward, and only
    then; at rest a rank has its part.
    """
    for microbatches in (1, 4):
        p = compiled(2, 3, microbatches=microbatches, keep=True)
        found, kinds, again = elements(p)
        assert found == pytest.approx(2 * P, abs=8 * len(p.buckets))
        assert kinds == dict.fromkeys(("all_gather", "reduce_scatter"), len(p.buckets))
        assert not again
        assert kept(p)[0] == pytest.approx(14 * P / 2, abs=slack(p, 2))
        assert "all_gather once a step" in str(p)
    freed = compiled(2, 3, microbatches=4)
    assert elements(freed)[1] == {k: 4 * n for k, n in elements(compiled(2, 3))[1].items()}


@pytest.mark.parametrize(
    ("zero", "how"),
    [
        *itertools.product(range(4), ({}, {"outer": 2}, {"microbatches": 2}, {"tp": 2})),
        (3, {"keep": True, "microbatches": 2}),
    ],
    ids=str,
)
def test_the_report_says_what_runs(zero: int, how: dict[str, int]) -> None:
    p = compiled(2, zero, **how)

    def work(mesh: LoopbackMesh) -> dict[tuple[str, str, str], int]:
        engine = p.engine(net(), adam, mesh=mesh)
        engine.step(batch())
        mesh.records.clear()
        engine.step(batch())
        found: dict[tuple[str, str, str], int] = {}
        for r in mesh.records:
            found[r.axis, r.direction, r.kind] = found.get((r.axis, r.direction, r.kind), 0) + r.bytes
        return found

    said: dict[tuple[str, str, str], int] = {}
    for row in comm_rows(p.cost()):
        key = (row.axes, row.direction, row.kind)
        said[key] = said.get(key, 0) + row.bytes
    ran = loopback(p.mesh, work)[0]
    assert ran == said
