"""Models that take gradients inside their forward (see zoo/plain.py): penalties, physics, forces, inner steps,
adversarial directions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from tests.zoo.plain import ids, model, real

Made = tuple[nn.Module, Any]


class Critic(nn.Module):
    """A convolutional critic with WGAN-GP's penalty between real and made images (Gulrajani et al. 2017) and R1 at the
    real ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(4, 3 * 64)
        self.critic = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.ConvTranspose2d(8, 4, 2, 2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 1),
        )

    def forward(self, x: Tensor, z: Tensor, share: Tensor) -> Tensor:
        x.requires_grad_(True)
        true = self.critic(x)
        (at_true,) = grad(outputs=true.sum(), inputs=x, create_graph=True)
        made = self.generator(z).view_as(x)
        between = share * x + (1 - share) * made
        score = self.critic(between)
        slope = grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)[0]
        penalty = (slope.view(len(x), -1).norm(2, dim=1) - 1).square().mean()
        return F.softplus(-true).mean() + 5 * at_true.square().flatten(1).sum(1).mean() + 10 * penalty


@model
def critic() -> Made:
    return Critic(), {"x": real(8, 3, 8, 8), "z": real(8, 4), "share": real(8, 1, 1, 1).sigmoid()}


class Burgers(nn.Module):
    """A physics-informed network (Raissi et al. 2019): first and second derivatives of its output in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, points: Tensor) -> Tensor:
        points = points.requires_grad_(True)
        u = self.net(points)
        (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, :1]
        return (first[:, 1:] + u * first[:, :1] - self.viscosity * second).square().mean()


@model
def burgers() -> Made:
    return Burgers(), {"points": real(8, 2)}


class Forces(nn.Module):
    """An interatomic potential in SchNet's form: forces are minus the gradient of the energy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.filter, self.mix = (
            nn.Embedding(5, 8),
            nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8)),
            nn.Linear(8, 8),
        )
        self.norm, self.out = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
        self.register_buffer("centers", torch.linspace(0, 3, 6))

    def forward(self, kinds: Tensor, places: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        places = places.detach().requires_grad_(True)
        apart = places[:, :, None] - places[:, None]
        same = torch.eye(places.shape[1], dtype=torch.bool)
        r = torch.sqrt(apart.square().sum(-1) + same.to(apart.dtype))
        near = torch.exp(-(r[..., None] - self.centers).square())
        cutoff = 0.5 * (torch.cos(r * math.pi / 5) + 1) * (r < 5) * ~same
        h = self.embed(kinds)
        h = h + torch.tanh(torch.einsum("bijh,bjh->bih", self.filter(near) * cutoff[..., None], self.mix(self.norm(h))))
        found = self.out(h).sum((1, 2))
        (slope,) = torch.autograd.grad(found.sum(), places, create_graph=self.training)
        return F.mse_loss(found, energy) + F.mse_loss(-slope, forces)


@model
def forces() -> Made:
    return Forces(), {
        "kinds": ids(5, 8, 4),
        "places": real(8, 4, 3),
        "energy": real(8),
        "forces": real(8, 4, 3, seed=5),
    }


class InnerStep(nn.Module):
    """MAML (Finn et al. 2017): a step on the support set, differentiated; a running mean of its first gradient in a
    buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rate = (
            nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)),
            nn.Parameter(torch.tensor(0.1)),
        )
        self.register_buffer("seen", torch.zeros(8, 3))

    def forward(self, support: Tensor, labels: Tensor, query: Tensor, wanted: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        slopes = torch.autograd.grad(
            F.cross_entropy(self.net(support), labels), list(weights.values()), create_graph=True
        )
        self.seen.copy_(0.9 * self.seen + 0.1 * slopes[0].detach())
        fast = {name: w - self.rate * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(self.net, fast, (query,)), wanted)


@model
def inner_step() -> Made:
    return InnerStep(), {
        "support": real(8, 3),
        "labels": ids(2, 8),
        "query": real(8, 3, seed=3),
        "wanted": ids(2, 8, seed=4),
    }


class Adversarial(nn.Module):
    """Fast gradient signs, and virtual adversarial training (Miyato et al. 2018): directions that are constants of the
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(self.net(x), y)
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        with torch.no_grad():
            p = self.net(x).softmax(1)
        noise = F.normalize(noise, dim=1).requires_grad_()
        apart = F.kl_div(self.net(x.detach() + 0.1 * noise).log_softmax(1), p, reduction="batchmean")
        (worst,) = torch.autograd.grad(apart, noise)
        smooth = F.kl_div(self.net(x.detach() + F.normalize(worst, dim=1)).log_softmax(1), p, reduction="batchmean")
        return loss + F.cross_entropy(self.net((x + 0.1 * slope.sign()).detach()), y) + smooth


@model
def adversarial() -> Made:
    return Adversarial(), {"x": real(8, 6), "y": ids(3, 8), "noise": real(8, 6, seed=9)}
