"""Losses and ops, each on a small network (see zoo/plain.py): what is not a model of its own, but stands in many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.plain import ids, model, real

Made = tuple[nn.Module, Any]


class Head(nn.Module):
    """A linear layer and a function of its result and of the rest of the batch that is the loss."""

    def __init__(self, outputs: int, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, outputs), function

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.function(self.linear(x), *rest)


@model
def regression() -> Made:
    """Huber, smooth L1, L1, MSE, log-cosh and Gaussian losses, with weights and every reduction."""

    def loss(h: Tensor, y: Tensor, w: Tensor) -> Tensor:
        total = F.huber_loss(h, y, delta=0.5) + F.smooth_l1_loss(h, y, beta=0.3, reduction="sum") + F.l1_loss(h, y)
        total = (
            total
            + (F.mse_loss(h, y, reduction="none") * w[:, None]).sum() / w.sum()
            + torch.log(torch.cosh(h - y)).mean()
        )
        return (
            total
            + F.poisson_nll_loss(h, y.abs())
            + F.gaussian_nll_loss(h, y, F.softplus(h))
            + F.soft_margin_loss(h, y.sign())
        )

    return Head(4, loss), (real(8, 6), real(8, 4, seed=2), real(8, seed=3).abs())


@model
def classification() -> Made:
    """Cross-entropy with weights, smoothing, probabilities, ignored rows; NLL; BCE; KL;
    multi-label and margin losses.
    """

    def loss(h: Tensor, y: Tensor, soft: Tensor, many: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2, 4, dtype=h.dtype)
        total = F.cross_entropy(h, y, weight=weight, label_smoothing=0.1) + F.cross_entropy(
            h, soft, label_smoothing=0.1
        )
        total = (
            total
            + F.nll_loss(h.log_softmax(1), y, ignore_index=2)
            + F.kl_div(h.log_softmax(1), soft, reduction="batchmean")
        )
        total = (
            total + F.binary_cross_entropy(h.sigmoid(), many, weight=weight) + F.multilabel_soft_margin_loss(h, many)
        )
        return (
            total
            + F.multi_margin_loss(h, y)
            + F.hinge_embedding_loss(h, many * 2 - 1)
            + F.kl_div(h.log_softmax(1), soft.log(), log_target=True)
        )

    return Head(4, loss), (real(8, 6), ids(4, 8), real(8, 4, seed=2).softmax(1), ids(2, 8, 4, seed=3).double())


@model
def embedding_losses() -> Made:
    """Triplets, cosine embedding, margin ranking, pairwise distances, cosine similarity, p-norms."""

    def loss(h: Tensor, y: Tensor) -> Tensor:
        a, b, c = h.chunk(3, 1)
        total = (
            F.triplet_margin_loss(a, b, c)
            + F.cosine_embedding_loss(a, b, y)
            + F.margin_ranking_loss(a.sum(1), b.sum(1), y, margin=0.5)
        )
        total = total + F.pairwise_distance(a, c).mean() + F.cosine_similarity(a, b, dim=-1).mean() + torch.dist(a, b)
        return total + torch.linalg.norm(c, dim=1).mean() + a.norm(p=3, dim=1).mean() + h.renorm(2, 0, 1.0).sum()

    return Head(12, loss), (real(8, 6), ids(2, 8) * 2.0 - 1)


@model
def contrastive() -> Made:
    """InfoNCE with labels: supervised contrastive loss over all pairs of the batch."""

    def loss(h: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(h, dim=1)
        n = z.shape[0]
        apart = ~torch.eye(n, dtype=torch.bool)
        sim = (z @ z.T / 0.3).masked_fill(~apart, -1e9)
        same = (y[:, None] == y[None]) & apart
        logp = sim - sim.logsumexp(1, keepdim=True)
        return -((logp * same).sum(1) / same.sum(1).clamp(min=1)).mean()

    return Head(4, loss), (real(8, 6), ids(3, 8))


@model
def ordering() -> Made:
    """sort, topk, argmax, cumulative ops, searchsorted, kthvalue, median, unique positions of the largest."""

    def loss(h: Tensor, y: Tensor) -> Tensor:
        s, order = torch.sort(h, dim=1, descending=True)
        total = (
            (s * torch.arange(8, dtype=h.dtype)).mean()
            + h.gather(1, order.argsort(1)).square().mean()
            + h.median(1).values.mean()
        )
        total = (
            total
            + torch.cumprod(h.sigmoid(), 1).mean()
            + torch.logcumsumexp(h, 1).mean()
            + torch.cummax(h, 1).values.mean()
        )
        total = (
            total
            + h.kthvalue(3, dim=1).values.mean()
            + h.topk(3, largest=False).values.sum()
            + h.amax(1).mean()
            - h.aminmax(dim=1)[0].mean()
        )
        place = torch.searchsorted(torch.linspace(-1, 1, 5, dtype=h.dtype), h.detach())
        hit = (h.argmax(1) == y).to(h.dtype)
        return (
            total
            + (h * place).mean()
            + (hit * h[:, 0]).sum()
            + h.quantile(0.3, dim=1).mean()
            + h.flip(1).roll(1, 1)[:, 2:].prod(1).mean()
        )

    return Head(8, loss), (real(8, 6), ids(8, 8))


@model
def indexing() -> Made:
    """scatter, index_put, index_select, where, masked_fill, one_hot, unfold and fold, diagonals, repeat, meshgrid,
    tensordot.
    """

    def loss(h: Tensor, y: Tensor) -> Tensor:
        b = torch.arange(h.shape[0])
        total = torch.zeros_like(h).scatter(1, y[:, None], 2.0).mul(h).sum()
        put = h.clone()
        put[b, y] = 0.5
        put[:, 1] += 1.0
        total = (
            total
            + put.square().mean()
            + h.index_select(1, torch.tensor([3, 0, 3])).mean()
            + h.unfold(1, 4, 2).square().mean()
        )
        image = h.view(-1, 1, 2, 4)
        total = (
            total + F.fold(F.unfold(image, 2), (2, 4), 2).square().mean() + torch.diag_embed(h).triu(1).tril(2).sum()
        )
        total = (
            total
            + torch.tensordot(h, h.detach().mean(0), dims=1).mean()
            + h.repeat(1, 2).view(-1, 4, 4).diagonal(dim1=1, dim2=2).mean()
        )
        total = total + torch.einsum("bi,bj->bij", h, h).flatten(1).std(1).mean() + torch.where(h > 0, h, -h / 2).mean()
        grid = torch.meshgrid(torch.arange(2), torch.arange(4), indexing="ij")[0]
        return (
            total
            + (h.view(-1, 2, 4) * grid).mean()
            + torch.repeat_interleave(h, 2, dim=1).cumsum(1).mean()
            + h.tile((1, 2)).var(1).mean()
        )

    return Head(8, loss), (real(8, 6), ids(8, 8))


class Activations(nn.Module):
    """Every activation module, normalisations over several dims, bilinear layers, pools of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (
            nn.ReLU,
            nn.ReLU6,
            nn.ELU,
            nn.SELU,
            nn.CELU,
            nn.GELU,
            nn.SiLU,
            nn.Mish,
            nn.Softplus,
            nn.Softsign,
            nn.Tanhshrink,
            nn.Hardswish,
            nn.Hardtanh,
            nn.Hardsigmoid,
            nn.LogSigmoid,
            nn.Softshrink,
            nn.Hardshrink,
            nn.LeakyReLU,
            nn.PReLU,
            nn.Tanh,
            nn.Sigmoid,
        )
        self.each = nn.ModuleList(kind() for kind in kinds)
        self.bilinear, self.norm, self.local = nn.Bilinear(8, 8, 4), nn.LayerNorm([4, 4, 4]), nn.LocalResponseNorm(2)
        self.instance, self.group = nn.InstanceNorm2d(4), nn.GroupNorm(2, 4)
        self.pools = nn.ModuleList(
            (nn.LPPool2d(2, 2), nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = sum(f(x) for f in self.each)
        h = self.bilinear(h, x) + F.glu(h) + F.normalize(h[:, :4], p=1.0)
        image = self.group(
            self.instance(self.local(self.norm(x.view(-1, 8, 1, 1)[:, :4].expand(-1, -1, 4, 4) * h[:, None, :, None])))
        )
        return h.square().mean() + sum(pool(image.abs() + 0.1).square().mean() for pool in self.pools)


@model
def activations() -> Made:
    return Activations(), (real(8, 8),)
