"""A step on another device than the CPU: no tensor is elsewhere, and the host waits for nothing but what experts send.

The device is made up (tests/second_device.py); what it computes is what the CPU does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import zoo
from tests.second_device import NAME, OnSecond, second_device
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

STRUCTURE = {"shard": {"use": "structure"}}
#: torch's own linear of a transposed batch of tensors that are wrapped takes a view that it may not.
NOT_WRAPPED = {"gru", "gru_bidirectional"}


def losses_and_waits(build: Callable[[], Any], spec: dict[str, Any], steps: int = 2) -> tuple[list[float], list[str]]:
    """Losses of some steps on the second device, compared with the CPU's, and for what the host waited in the last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = build()
        program = shardc.compile(model, batch, {"shardc": 1, **spec})

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-3)

    def on_second(mesh: LoopbackMesh) -> tuple[list[float], list[str]]:
        losses: list[float] = []
        with second_device() as device:
            mesh.device = torch.device(NAME)
            engine = program.engine(model, sgd, mesh=mesh)
            for _ in range(steps):
                device.syncs.clear()
                loss = engine.step(batch)
                waits = list(device.syncs)
                assert isinstance(loss, OnSecond)
                losses.append(float(loss.numbers))
        return losses, waits

    def on_cpu(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(model, sgd, mesh=mesh)
        return [float(engine.step(batch)) for _ in range(steps)]

    (losses, waits), *_ = loopback(program.mesh, on_second)
    expected, *_ = loopback(program.mesh, on_cpu)
    # torch takes composed ops (attention) apart for a tensor that is wrapped, and adds up in another order
    assert losses == pytest.approx(expected, rel=1e-12)
    return losses, waits


@pytest.mark.parametrize("name", sorted(set(plain.ALL) - NOT_WRAPPED))
def test_ordinary_models(name: str) -> None:
    _, waits = losses_and_waits(plain.ALL[name], {"mesh": {"dp": 2}}, steps=1)
    assert waits == []


@pytest.mark.parametrize("name", sorted(zoo.ALL))
def test_models_split_by_tensors_and_data(name: str) -> None:
    _, waits = losses_and_waits(zoo.ALL[name], {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE})
    assert waits == []


@pytest.mark.parametrize(
    "spec",
    [
        {
            "mesh": {"dp": 2},
            "data": {"axis": "dp", "zero": 3},
            "checkpoint": [{"match": "model.layers.*"}],
            "batch": {"microbatches": 2},
        },
        {"mesh": {"dp": 2}, "data": {"axis": "dp", "zero": 1}, "batch": {"microbatches": 2}},
        {"mesh": {"dp": 2, "tp": 2}, "data": {"axis": "dp", "zero": 2}, **STRUCTURE},
        {"mesh": {"tp": 3}, "uneven": "pad", **STRUCTURE},
        {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}},
        {
            "mesh": {"dp": 2},
            "checkpoint": [{"match": "model.layers.*", "save": ["linear", "attention"], "offload": "cpu"}],
        },
    ],
    ids=["zero 3, recompute", "zero 1", "zero 2, tp", "pad", "pipeline", "on the host"],
)
def test_features(spec: dict[str, Any]) -> None:
    _, waits = losses_and_waits(zoo.ALL["llama"], spec)
    assert waits == []


@pytest.mark.parametrize("spec", [{}, {"checkpoint": [{"match": "h.*"}]}, {"batch": {"microbatches": 2}}], ids=str)
def test_dropout(spec: dict[str, Any]) -> None:
    """Of hidden states and of attention's weights."""
    _, waits = losses_and_waits(lambda: zoo.gpt(dropout=0.1), {"mesh": {"dp": 2, "tp": 2}, **STRUCTURE, **spec})
    assert waits == []


def test_a_layer_of_experts_waits_once() -> None:
    """For how many tokens each rank gets; Mixtral has two layers here."""
    spec = {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.experts", "axis": "ep"}]}
    _, waits = losses_and_waits(lambda: hf.build(hf_more.FAMILIES["mixtral"]), spec)
    assert [w.rpartition(" ")[2] for w in waits] == ["to_host"] * 2


def test_what_waits_is_counted_and_what_is_elsewhere_refused() -> None:
    with second_device() as device:
        x = torch.arange(4.0, device=device.name)
        assert x.sum().item() == 6
        x[x > 1]
        x.cpu()
        x.to(device.name)
        assert [w.split(":")[0] for w in device.syncs] == [
            "_local_scalar_dense.default",
            "index.Tensor",
            "_to_copy.default",
        ]
        with pytest.raises(RuntimeError, match="operands on"):
            x + torch.ones(4)
