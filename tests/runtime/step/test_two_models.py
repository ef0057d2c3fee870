"""Two models that share parts, an engine each: generator and discriminator (docs/how-to/own-loop.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 16), nn.Linear(16, 2)


def generator_loss(n: Networks, noise: Tensor) -> Tensor:
    return softplus(-n.discriminator(n.generator(noise))).mean()


def discriminator_loss(n: Networks, noise: Tensor, real: Tensor) -> Tensor:
    return softplus(-n.discriminator(real)).mean() + softplus(n.discriminator(n.generator(noise))).mean()


class Generating(nn.Module):
    """One of the two: its loss trains the generator; the discriminator stands still."""

    def __init__(self, networks: Networks) -> None:
        super().__init__()
        self.networks = networks
        networks.discriminator.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return generator_loss(self.networks, noise)


class Discriminating(nn.Module):
    def __init__(self, networks: Networks) -> None:
        super().__init__()
        self.networks = networks
        networks.generator.requires_grad_(False)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        return discriminator_loss(self.networks, noise, real)


torch.manual_seed(0)
NETWORKS = Networks().double()
NOISE, REAL = torch.randn(3, 8, 4).double(), torch.randn(3, 8, 16).double()
SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"dp": 2, "tp": 2}, "shard": {"networks.generator": "column", "networks.discriminator": "row"}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize("spec", SPECS)
def test_two_engines_that_send_each_other_weights_are_one_device(spec: str) -> None:
    batch = {"noise": NOISE[0], "real": REAL[0]}
    d, g = Discriminating(copy.deepcopy(NETWORKS)), Generating(copy.deepcopy(NETWORKS))
    of_d = shardc.compile(d, batch, {"shardc": 1, **SPECS[spec]})
    of_g = shardc.compile(g, {"noise": NOISE[0]}, {"shardc": 1, **SPECS[spec]})

    def work(mesh: LoopbackMesh) -> dict[str, Tensor]:
        discriminator, generator = (p.engine(m, adamw, mesh=mesh) for p, m in ((of_d, d), (of_g, g)))
        for noise, real in zip(NOISE, REAL, strict=True):
            discriminator.step({"noise": noise, "real": real})
            discriminator.weights_to(generator)
            generator.step({"noise": noise})
            generator.weights_to(discriminator)
        return discriminator.full_state_dict()

    plain = copy.deepcopy(NETWORKS)
    d_steps, g_steps = adamw(plain.discriminator.parameters()), adamw(plain.generator.parameters())
    for noise, real in zip(NOISE, REAL, strict=True):
        d_steps.zero_grad()
        discriminator_loss(plain, noise, real).backward()
        d_steps.step()
        g_steps.zero_grad()
        generator_loss(plain, noise).backward()
        g_steps.step()
    for weights in loopback(of_d.mesh, work):
        for name, x in plain.state_dict().items():
            torch.testing.assert_close(weights[f"networks.{name}"], x, rtol=1e-12, atol=1e-13)


def test_weights_that_two_engines_took_of_one_module_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Each engine has a copy, also of a part that the models share: without a word, neither would see the other's."""
    networks = copy.deepcopy(NETWORKS)
    whole, part = Discriminating(networks), networks.discriminator
    batch = {"noise": NOISE[0], "real": REAL[0]}
    first = shardc.compile(whole, batch, {"shardc": 1}, prove=False).engine(whole)
    rows = {"input": REAL[0]}
    other = shardc.compile(part, rows, {"shardc": 1}, prove=False, loss=lambda o, b: o.mean()).engine(part)
    first.step(batch)
    assert "another engine" not in capsys.readouterr().err
    other.step(rows)
    first.step(batch)
    told = [n for n in capsys.readouterr().err.splitlines() if "another engine or module was made from it" in n]
    assert [n.partition(": another")[0] for n in told] == ["note: the model", "note: networks.discriminator"]
