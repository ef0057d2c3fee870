"""A cast of the model's own to fewer bits takes sums, as on one device; mixed precision's own casts take summands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import calls, value_of
from tests import equality

Narrow = Callable[[Tensor, torch.dtype], Tensor]


def written(h: Tensor, dtype: torch.dtype) -> Tensor:
    parts = torch.zeros(h.shape[0], 2, h.shape[1], dtype=dtype)
    parts[:, 0] = h
    return parts


NARROWED: dict[str, Narrow] = {
    "to": lambda h, dtype: h.to(dtype),
    "type_as": lambda h, dtype: h.type_as(torch.zeros((), dtype=dtype)),
    "copy_": lambda h, dtype: torch.zeros(h.shape, dtype=dtype).copy_(h),
    "written": written,
    "sum(dtype=)": lambda h, dtype: h.sum(1, dtype=dtype),
    "after a sum": lambda h, dtype: h.sum(0).to(dtype),
    "times": lambda h, dtype: torch.ones(3, dtype=dtype) * h.sum(),
}
SPLIT = {"up": "column", "down": "row"}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 4}, "shard": SPLIT},
    "dp, tp": {"mesh": {"dp": 2, "tp": 2}, "shard": SPLIT},
    "microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
}


class Narrowing(nn.Module):
    def __init__(self, narrow: Narrow, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.narrow, self.narrower = nn.Linear(16, 32), nn.Linear(32, 16), narrow, dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(self.down(self.up(x).relu()), self.narrower)
        return h.to(x.dtype).square().mean()


class RoundedLoss(Narrowing):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum().to(self.narrower) / 64


def built(kind: type[Narrowing], narrow: str, wide: torch.dtype, narrower: torch.dtype) -> tuple[Narrowing, Any]:
    torch.manual_seed(0)
    return kind(NARROWED[narrow], narrower).to(wide), {"x": torch.randn(8, 16, dtype=wide)}


def check(model: nn.Module, batch: Any, spec: dict[str, Any], rtol: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compared in float64, a float16 inside deserves a note
        program = shardc.compile(model, batch, {"shardc": 1, **spec})
    sim = shardc.simulate(program, model, batch)
    loss = model(**batch)
    loss.backward()
    equality.assert_equal(
        sim, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, rtol
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("narrow", NARROWED)
@pytest.mark.parametrize(
    ("wide", "narrower", "rtol"),
    [
        (torch.float64, torch.float16, equality.RTOL),
        (torch.float32, torch.bfloat16, 1e-6),  # the rest is float32
    ],
    ids=["float16", "bfloat16"],
)
def test_a_model_that_rounds_equals_one_device(
    wide: torch.dtype, narrower: torch.dtype, rtol: float, narrow: str, mesh: str
) -> None:
    check(*built(Narrowing, narrow, wide, narrower), MESHES[mesh], rtol)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_that_is_rounded_equals_one_devices(mesh: str) -> None:
    check(*built(RoundedLoss, "to", torch.float64, torch.float16), MESHES[mesh], equality.RTOL)


class Found(nn.Module):
    """A look-up in a table that ranks split by rows, which mixed precision casts; and a cast of the model's."""

    def __init__(self, narrower: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.narrower = nn.Embedding(8, 32), nn.Linear(32, 16), narrower

    def forward(self, ids: Tensor) -> Tensor:
        h = self.up(ids)
        if self.narrower != torch.float32:
            h = h.to(self.narrower)
        return self.down(h.float()).square().mean()


@pytest.mark.parametrize(
    ("narrower", "summed"),
    [
        (torch.float32, [("embedding_bf16", torch.bfloat16)]),
        (torch.float16, [("embedding_bf16", torch.bfloat16)]),  # the model's own cast is of the sum
    ],
)
def test_mixed_precision_rounds_summands(narrower: torch.dtype, summed: list[tuple[str, torch.dtype]]) -> None:
    model, batch = Found(narrower), {"ids": torch.arange(8)}
    spec = {"shardc": 1, "mesh": {"tp": 4}, "shard": {"up": "row"}, "precision": {"compute": "bfloat16"}}
    (stage,) = shardc.compile(model, batch, spec).stages
    found = [n for n in calls(stage.graph) if "collective" in n.meta and n.meta["collective"].kind == "all_reduce"]
    assert [(str(n.args[0]), value_of(n).dtype) for n in found] == summed
