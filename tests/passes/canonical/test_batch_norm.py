"""`batch_norm: local`: statistics of each rank's rows of each microbatch, as eager
BatchNorm has them on those chunks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests import zoo
from tests.equality import OF_BUCKETS
from tests.passes.pipeline.test_pipeline import spec


def eager(
    model: nn.Module, batch: dict[str, Tensor], ranks: int, microbatches: int
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, buffers) of one step: each rank's chunks one after the other, from the same running statistics;
    their average.
    """
    starts, ends, total = dict(model.named_buffers()), [], torch.zeros((), dtype=torch.float64)
    grads: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for rank in range(ranks):
        one = copy.deepcopy(model)
        for i in range(microbatches):
            loss = one(**{k: x.chunk(ranks)[rank].chunk(microbatches)[i] for k, x in batch.items()}) / (
                ranks * microbatches
            )
            loss.backward()
            total += loss.detach()
        grads = {n: grads[n] + p.grad for n, p in one.named_parameters() if p.grad is not None}
        ends.append(dict(one.named_buffers()))
    means = {n: sum(end[n] for end in ends) / ranks for n, x in starts.items() if x.is_floating_point()}
    return total, grads, means  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("asked", "ranks", "microbatches"),
    [
        ({"mesh": {"dp": 2}}, 2, 1),
        ({"mesh": {}, "batch": {"microbatches": 4}}, 1, 4),
        (
            {
                "mesh": {"dp": 2, "tp": 2},
                "batch": {"microbatches": 2},
                "shard": {"*.conv1": "column", "*.bn1.*": {0: "tp"}, "*.conv2": "row"},
            },
            2,
            2,
        ),
        ({"mesh": {"dp_outer": 2, "dp": 2}, "data": {"axis": ["dp_outer", "dp"], "zero": 3}}, 4, 1),
        (spec({"pp": 2}, 4), 1, 4),
        (spec({"pp": 2, "dp": 2}, 2, schedule="zb-v"), 2, 2),
        (spec({"pp": 2}, 2, schedule="interleaved"), 1, 2),
    ],
    ids=lambda x: "",
)
def test_equals_eager_on_the_same_chunks(asked: dict[str, Any], ranks: int, microbatches: int) -> None:
    model, batch = zoo.resnet_bn()
    loss, grads, buffers = eager(model, batch, ranks, microbatches)
    program = shardc.compile(model, batch, {"shardc": 1, **asked, "batch_norm": "local"}, prove=False)
    sim = shardc.verify.simulate(program, model, batch)
    torch.testing.assert_close(sim.loss, loss, rtol=1e-12, atol=0)
    for found, expected in ((sim.grads, grads), (sim.state, buffers)):
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)
    assert int(sim.state["bn.num_batches_tracked"]) == 1  # counts steps


def test_forward_waits_for_no_other_rank() -> None:
    """What is sent is on its way to the running statistics and the loss, and nothing comes back: gradients of
    statistics are local.
    """
    model, batch = zoo.resnet_bn()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "batch_norm": "local"}, prove=False)
    sim = shardc.verify.simulate(program, model, batch)
    assert not [c for c in sim.comms if c.direction == "backward" and c.cause not in OF_BUCKETS]


def test_it_evaluates_with_the_running_statistics() -> None:
    model, batch = zoo.resnet_bn()
    expected = copy.deepcopy(model).eval()(**batch)
    program = shardc.compile(model, batch, {**spec({"pp": 2}, 2), "batch_norm": "local"}, prove=False)
    from shardc.runtime.mesh.loopback import loopback

    for loss in loopback(program.mesh, lambda mesh: program.engine(model, mesh=mesh).evaluate(batch)):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_verify_compares_the_same_statistics() -> None:
    model, batch = zoo.resnet_bn(dtype=torch.float32)
    program = shardc.compile(model, batch, {**spec({"pp": 2}, 2), "batch_norm": "local"}, prove=False)
    assert program.verify().ok


def test_sync_with_microbatches_names_the_way_out() -> None:
    model, batch = zoo.resnet_bn()
    with pytest.raises(shardc.ShardcError, match="takes all rows of the batch") as e:
        shardc.compile(model, batch, spec({"pp": 2}, 2), prove=False)
    (error,) = e.value.errors  # one, however many norms there are
    assert "batch_norm: local" in (error.fix or "")
    assert "; so do " in error.what


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x).square().mean()
        return found


@pytest.mark.parametrize(
    ("rows", "what", "fix"),
    [
        (
            6,
            "takes statistics of 2 ranks and 2 microbatches: 6 rows cannot be cut into 4 equal parts",
            "a multiple of 4",
        ),
        (
            4,
            "`batch_norm: local` takes statistics of 2 ranks and 2 microbatches: each part has one value per channel",
            "more rows",
        ),
    ],
)
def test_chunks_that_have_no_statistics_are_refused(rows: int, what: str, fix: str) -> None:
    asked = {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 2}, "batch_norm": "local"}
    with pytest.raises(shardc.ShardcError) as e:
        shardc.compile(Normed(), (torch.randn(rows, 3),), asked, prove=False)
    assert what in str(e.value)
    assert fix in str(e.value)
    assert "norm" in str(e.value)
