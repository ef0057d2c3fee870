"""Models of one function each, of the same two layers: losses over all rows, buffers that forward writes, gradients of
gradients, ops that look along a dim that may be split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.verify.field_bugs.models import MODELS, ROWS, drawn

IN, WIDE, OUT, CODES = 6, 8, 6, 4
Function = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """up, down: 6 -> 8 -> 6. more: modules by name. What its function computes of x and y is the loss."""

    def __init__(self, loss: Function, **more: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT)
        for name, module in more.items():
            self.add_module(name, module)
        self.loss = loss

    def apart(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


class Numbers(nn.Module):
    """Buffers that forward updates: statistics of numbers, and of codes."""

    def __init__(self) -> None:
        super().__init__()
        codes = drawn(CODES, OUT, seed=5)
        for name, x in {
            "mean": torch.zeros(OUT),
            "var": torch.ones(OUT),
            "count": torch.tensor(1e-2),
            "codes": codes,
            "sums": codes.clone(),
            "sizes": torch.ones(CODES),
        }.items():
            self.register_buffer(name, x.to(torch.float64))


def model(name: str, parts: Callable[[], dict[str, nn.Module]] = dict, x: Tensor | None = None) -> Any:
    """Register a function's model."""

    def register(loss: Function) -> Function:
        def build() -> zoo.Built:
            rows = drawn(ROWS, IN) if x is None else x
            return zoo.ready(Model(loss, **parts()), torch.float64), {"x": rows, "y": drawn(ROWS, OUT, seed=2)}

        MODELS[name] = build
        return loss

    return register


# --- losses over all rows ---------------------------------------------------------------------------------------------


@model("focal")
def focal(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Divided by the number of positives, which are on the last rows only."""
    positive = (torch.arange(len(x))[:, None] > 4) & (y > 0)
    p = m.apart(x).sigmoid()
    p = torch.where(positive, p, 1 - p)
    return (-((1 - p) ** 2) * p.log()).sum() / positive.sum().clamp(min=1)


@model("dice")
def dice(m: Model, x: Tensor, y: Tensor) -> Tensor:
    p, t = m.apart(x).sigmoid(), (y > 0).to(x.dtype)
    return 1 - ((2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()


@model("covariance")
def covariance(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """VICReg: variances and covariances of the batch."""
    z = m.apart(x)
    cov = (z - z.mean(0)).t() @ (z - z.mean(0)) / (len(z) - 1)
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + (cov - cov.diag().diag()).square().sum()


@model("cross-correlation")
def correlation(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Barlow Twins."""
    a, b = ((z - z.mean(0)) / z.std(0) for z in (m.apart(x), m.apart(y)))
    return (a.t() @ b / len(x) - torch.eye(OUT)).square().sum()


@model("sinkhorn")
def sinkhorn(m: Model, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        q = m.apart(y).exp().t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / OUT
            q = q / q.sum(0, keepdim=True) / len(x)
    return -(q.t() * m.apart(x).log_softmax(-1)).sum() / len(x)


@model("whitened advantages")
def whitened(m: Model, x: Tensor, y: Tensor) -> Tensor:
    reward = y[:, 0]
    return (m.apart(x).log_softmax(-1)[:, 0] * (reward - reward.mean()) / (reward.std() + 1e-8)).mean()


@model("groups of rows")
def groups(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """GRPO: a prompt has two answers, which are a rank's; means of answers of different lengths."""
    reward = y[:, 0].view(-1, 2)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
    mask = torch.arange(OUT) <= torch.arange(len(x))[:, None] % OUT
    each = m.apart(x).log_softmax(-1) * advantage[:, None]
    return ((each * mask).sum(1) / mask.sum(1)).mean()


@model("all tokens")
def tokens(m: Model, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.arange(OUT) <= torch.arange(len(x))[:, None] % OUT
    return (m.apart(x).log_softmax(-1) * y * mask).sum() / mask.sum().clamp(min=1)


@model("pairs in halves")
def halves(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """DPO: chosen and rejected go through the model as one batch, the second half the rejected."""
    z = m.apart(torch.cat([x, y])).mean(1)
    return -F.logsigmoid(z[: len(x)] - z[len(x) :]).mean()


@model("pairs in turn")
def in_turn(m: Model, x: Tensor, y: Tensor) -> Tensor:
    z = m.apart(torch.stack([x, y], 1).flatten(0, 1)).mean(1)
    return -F.logsigmoid(z[0::2] - z[1::2]).mean()


@model("valid pairs")
def valid(m: Model, x: Tensor, y: Tensor) -> Tensor:
    there = torch.arange(len(x)) % 3 != 1
    each = -F.logsigmoid(m.apart(x).mean(1) - m.apart(y).mean(1))
    return torch.where(there, each, 0).sum() / there.sum().clamp(min=1)


# --- buffers ----------------------------------------------------------------------------------------------------------


def numbers() -> dict[str, nn.Module]:
    return {"numbers": Numbers()}


def quantized(m: Model, z: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest code of each row, whose gradient is the row's; codes move towards the means of their rows."""
    n: Any = m.numbers
    which = (n.codes.square().sum(1) - 2 * z @ n.codes.t()).argmin(1)
    code = F.embedding(which, n.codes.clone())
    with torch.no_grad():
        hot = F.one_hot(which, CODES).to(z.dtype)
        n.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        n.sums.lerp_(hot.t() @ z, 0.1)
        n.codes.copy_(n.sums / (n.sizes[:, None] + 1e-5))
    return z + (code - z).detach(), F.mse_loss(z, code)


@model("codebook", numbers)
def codebook(m: Model, x: Tensor, y: Tensor) -> Tensor:
    z, loss = quantized(m, m.apart(x))
    return F.mse_loss(z, y) + loss


@model("codebook twice", numbers)
def residual(m: Model, x: Tensor, y: Tensor) -> Tensor:
    z = m.apart(x)
    first, a = quantized(m, z)
    second, b = quantized(m, z - first.detach())
    return F.mse_loss(first + second, y) + a + b


@model("learned codebook", lambda: {"codes": nn.Embedding(CODES, OUT)})
def learned(m: Model, x: Tensor, y: Tensor) -> Tensor:
    z, codes = m.apart(x), m.codes.weight
    code = m.codes((codes.square().sum(1) - 2 * z @ codes.t()).argmin(1))
    return F.mse_loss(z + (code - z).detach(), y) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


@model("running moments", numbers)
def moments(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """An input normaliser, which merges the batch's moments with those so far."""
    n: Any = m.numbers
    with torch.no_grad():
        far, all_rows = x.mean(0) - n.mean, n.count + len(x)
        n.var.copy_(
            (n.var * n.count + x.var(0, unbiased=False) * len(x) + far.square() * n.count * len(x) / all_rows)
            / all_rows
        )
        n.mean.add_(far * len(x) / all_rows)
        n.count.copy_(all_rows)
    return F.mse_loss(m.apart((x - n.mean) / (n.var + 1e-8).sqrt()), y)


@model("center", numbers)
def center(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """DINO: the teacher's center is a running mean."""
    n: Any = m.numbers
    with torch.no_grad():
        teacher = m.apart(y)
        target = ((teacher - n.mean) / 0.1).softmax(-1)
        n.mean.mul_(0.9).add_(teacher.mean(0), alpha=0.1)
    return -(target * m.apart(x).log_softmax(-1)).sum(-1).mean()


def hinge(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A discriminator on real and on made-up rows: two forwards, one backward."""
    return F.relu(1 - m.norm(m.apart(x))).mean() + F.relu(1 + m.norm(m.apart(y))).mean()


model("spectral norm", lambda: {"norm": nn.utils.parametrizations.spectral_norm(nn.Linear(OUT, OUT))})(hinge)
model("spectral norm, with hooks", lambda: {"norm": nn.utils.spectral_norm(nn.Linear(OUT, OUT))})(hinge)
model("batch norm twice", lambda: {"norm": nn.BatchNorm1d(OUT)})(hinge)
model("batch norm without buffers", lambda: {"norm": nn.BatchNorm1d(OUT, track_running_stats=False)})(hinge)


@model("buffer twice", numbers)
def buffer_twice(m: Model, x: Tensor, y: Tensor) -> Tensor:
    n: Any = m.numbers
    loss = x.new_zeros(())
    for z in (x, y):
        with torch.no_grad():
            n.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        loss = loss + (m.apart(z) * n.mean.clone()).square().mean()
    return loss


# --- gradients of gradients, and none ---------------------------------------------------------------------------------


@model("gradient penalty")
def penalty(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """The last bias has no gradient through the penalty."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(m.down(F.softplus(m.up(x))).sum(), x, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


@model("a step inside")
def inside(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """MAML: the loss after a step of gradient descent."""

    def loss(params: dict[str, Tensor], rows: Tensor) -> Tensor:
        h = F.linear(rows, params["up.weight"], params["up.bias"]).tanh()
        return (F.linear(h, params["down.weight"], params["down.bias"]) - y).square().mean()

    params = dict(m.named_parameters())
    grads = torch.autograd.grad(loss(params, x), list(params.values()), create_graph=True)
    return loss({n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}, x + y)


@model("two losses", lambda: {"judge": nn.Linear(OUT, 1)})
def adversarial(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A GAN's two losses in one step: each is blind to the other's parameters."""
    made = m.apart(x)
    fixed = {n: p.detach() for n, p in m.judge.named_parameters()}
    generator = F.softplus(-torch.func.functional_call(m.judge, fixed, (made,))).mean()
    return generator + F.softplus(m.judge(made.detach())).mean() + F.softplus(-m.judge(y)).mean()


@model("unused", lambda: {"idle": nn.Linear(OUT, OUT)})
def unused(m: Model, x: Tensor, y: Tensor) -> Tensor:
    m.idle(x)
    return F.mse_loss(m.apart(x), y)


@model("shared head", lambda: {"head": nn.Linear(OUT, OUT)})
def shared_head(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A teacher without and a student with a gradient, through one head."""
    return F.mse_loss(m.head(m.apart(x)), m.head(y).detach())


@model("own checkpoints")
def recomputed(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h: Any = checkpoint(m.up, x, use_reentrant=False)
    return F.mse_loss(x + checkpoint(m.down, h.relu(), use_reentrant=False), y)


@model("own checkpoint of a batch norm", lambda: {"norm": nn.BatchNorm1d(OUT)})
def recomputed_norm(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h: Any = checkpoint(m.norm, m.apart(x), use_reentrant=False)
    return F.mse_loss(h, y)


# --- ops --------------------------------------------------------------------------------------------------------------


@model("largest of features")
def largest(m: Model, x: Tensor, y: Tensor) -> Tensor:
    value, place = m.up(x).max(-1)
    return (value * (place + 1)).square().mean() + m.apart(x).square().mean()


@model("straight through")
def straight(m: Model, x: Tensor, y: Tensor) -> Tensor:
    p = m.up(x).softmax(-1)
    hot = F.one_hot(p.argmax(-1), WIDE).to(p.dtype)
    return F.mse_loss(m.down(hot + p - p.detach()), y)


@model("filled features")
def filled(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.down(m.up(x).index_fill(1, torch.tensor([0, 3]), 0.5)), y)


@model("added at places")
def added(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h = m.up(x)
    places = (torch.arange(len(x))[:, None], torch.tensor([[0, 3]]))
    return F.mse_loss(m.down(h.index_put(places, h[:, :2], accumulate=True)), y)


@model("norm of weights")
def regularised(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.apart(x), y) + 0.1 * torch.stack([p.norm() for p in m.parameters()]).sum()


@model("number of a norm")
def number(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.apart(x) / m.up.weight.norm().item(), y)


@model("numbers and sums")
def sums(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h = m.down(m.up(x).tanh())
    return (h.sum() + 10) / (h.detach().abs().sum() + 1) + 2 * (h.mean() + 3) - (5 - h.sum(0)).mean() + y.mean()


@model("other dims")
def other_dims(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.down(m.up(x).view(-1, 2 * WIDE).tanh().cumsum(1).view(-1, WIDE)), y)


@model("parts of features")
def parts(m: Model, x: Tensor, y: Tensor) -> Tensor:
    a, b = m.up(x).chunk(2, -1)
    return F.mse_loss(m.down(torch.cat([a.softmax(-1), F.layer_norm(b, b.shape[-1:])], -1)), y)


@model("an encoder run twice")
def encoded_twice(m: Model, x: Tensor, y: Tensor) -> Tensor:
    h, other = m.up(x).tanh(), m.up(x.flip(-1)).tanh()
    return F.mse_loss(m.down(h), y) + 0.3 * F.cosine_similarity(h, other, dim=-1).mean()


@model("group norm", lambda: {"norm": nn.GroupNorm(2, WIDE)})
def group_norm(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.down(m.norm(m.up(x)).relu()), y)


@model("rows by lot")
def by_lot(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Stochastic depth of DINO v2: the branch is computed for some rows."""
    rows = torch.randperm(len(x))[:5]
    return F.mse_loss(torch.index_add(x, 0, rows, m.apart(x[rows]), alpha=8 / 5), y)


def ids(limit: int) -> Tensor:
    found = torch.randint(limit, (ROWS, 3), generator=torch.Generator().manual_seed(1))
    found[:4] = 0
    return found


def looked_up(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.table(x).sum(1), y)


model("counted rows of a table", lambda: {"table": nn.Embedding(12, OUT, scale_grad_by_freq=True)}, ids(12))(looked_up)
model("padding only", lambda: {"table": nn.Embedding(12, OUT, padding_idx=0)}, ids(12))(looked_up)


@model("skip", lambda: {"last": nn.Linear(OUT, OUT), "mid": nn.Linear(OUT, OUT)})
def skip(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Later stages take what earlier ones only hand on: numbers without a gradient, and the first layer's input."""
    place, keep = (x > 0).long().cumsum(1), x[:, :1] > -1
    h = m.apart(x) * keep
    h = m.mid(h).tanh() * keep + F.one_hot(place.clamp(max=5), OUT).to(x.dtype).sum(1)
    return F.mse_loss(m.last(h) + x, y)
