"""What an update makes beside what stays, by optimizer and by how it goes over its parameters: predicted and real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.cost.dry_run import dry_run
from shardc.cost.measured.op_times import OpTimes

MATRICES = ((96, 64), (192, 96), (64, 192), (300, 64))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in MATRICES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def named(kind: str, **options: Any) -> Any:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)([p for _, p in params], lr=1e-3, **options)
        return optimizer

    return make


WAYS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    **{f"{kind}, {way}": named(kind, **how) for kind in ("Adam", "AdamW") for way, how in WAYS.items()},
    **{f"SGD, {way}": named("SGD", momentum=0.9, **how) for way, how in WAYS.items()},
    "SGD alone": named("SGD", foreach=False),
    "Adafactor, loop": named("Adafactor", foreach=False),
    "Adafactor, foreach": named("Adafactor", foreach=True),
    "RMSprop, foreach": named("RMSprop", foreach=True),
    "Muon": named("Muon"),
}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_what_an_update_makes(name: str, zero: int) -> None:
    if zero and name in ("Adafactor, loop", "Adafactor, foreach", "Muon"):
        pytest.skip("wants whole matrices, which ZeRO flattens")
    make = OPTIMIZERS[name]
    batch = torch.randn(8, 64)
    program = shardc.compile(Net(), batch, {"shardc": 1, "mesh": {"dp": 1}, "data": {"zero": zero}}, prove=False)
    live = predicted = 0
    for sign, storage in dry_run(program, 0, make, cpu=True).update.changes:
        live += sign * storage.nbytes
        predicted = max(predicted, live)
    engine = program.engine(Net(), optimizer=make)
    engine.step(batch)
    engine.backward(batch)
    with OpTimes(torch.device("cpu")) as times:
        engine.update()
    assert predicted == pytest.approx(times.measured(1).made, rel=0.02, abs=64)
    if "foreach" in name and name != "SGD, foreach":
        assert predicted >= 4 * sum(m * n for m, n in MATRICES)
    if "fused" in name:
        assert predicted < 4 * sum(m * n for m, n in MATRICES) / 8
