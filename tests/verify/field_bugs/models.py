"""Small models: each name gives (model, one global batch of 8 rows), in float64.

The language model has what the bugs were about as options; labels are -100 at places that fall unevenly on the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc.nn
from tests import zoo

VOCAB, HIDDEN, SEQ, ROWS, EXPERTS = 16, 16, 8, 8, 4
MODELS: dict[str, Callable[[], zoo.Built]] = {}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))


def labels() -> Tensor:
    """Row i has 8 - i % 7 labels: ranks and microbatches count differently."""
    found = tokens(2)
    for i in range(ROWS):
        found[i, SEQ - i % 7 :] = -100
    return found


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of [b, heads, s, d] at positions i64[b, s]."""
    half = x.shape[-1] // 2
    angle = position[:, None, :, None].to(x.dtype) * torch.logspace(0, -2, half, dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class LoRA(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__()
        heads, kv = o.get("heads", 4), o.get("kv", o.get("heads", 4))
        self.heads, self.kv, self.size, self.o = heads, kv, HIDDEN // heads, o
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        if o.get("fused"):
            self.qkv, self.up = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        else:
            self.q = nn.Linear(HIDDEN, HIDDEN)
            self.k, self.v = nn.Linear(HIDDEN, kv * self.size), nn.Linear(HIDDEN, kv * self.size)
            self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        if wide := o.get("qk"):
            size = HIDDEN if wide == "all heads" else self.size
            self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.out, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(o.get("dropout", 0.0))
        if o.get("lora"):
            self.q, self.out, self.up, self.down = (LoRA(m) for m in (self.q, self.out, self.up, self.down))

    def attend(self, x: Tensor, mask: Tensor | None, position: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1) if self.o.get("fused") else (self.q(x), self.k(x), self.v(x))
        if self.o.get("qk") == "all heads":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(b, s, -1, self.size) for t in (q, k, v))
        if self.o.get("qk") == "each head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if position is not None:
            q, k = rotated(q, position), rotated(k, position)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.kv != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(b, s, HIDDEN))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, mask: Tensor | None, position: Tensor | None) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x), mask, position))
        y = self.up(self.norm2(x))
        if self.o.get("fused"):
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        return x + self.drop(self.down(F.gelu(y)))  # type: ignore[no-any-return]


class LM(nn.Module):
    """Options: layers, heads, kv, qk ("each head", "all heads"), fused, dropout, tied, lora, window, shift (the model
    shifts the labels), pad (a token whose embedding is not trained), mtp (a second head for the token after the next),
    loss ("smooth", "gathered").
    """

    def __init__(self, **o: Any) -> None:
        super().__init__()
        self.o = o
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=o.get("pad"))
        self.layers = nn.ModuleList(Layer(o) for _ in range(o.get("layers", 1)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        if o.get("tied"):
            self.head.weight = self.embed.weight
        if o.get("mtp"):
            self.next = nn.Linear(HIDDEN, VOCAB, bias=False)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.o.get("shift"):
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.o.get("loss") == "gathered":
            there = labels != -100
            picked = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            return -(picked * there).sum() / there.sum()
        return F.cross_entropy(logits, labels, label_smoothing=0.1 if self.o.get("loss") == "smooth" else 0.0)

    def forward(
        self, ids: Tensor, labels: Tensor, padding: Tensor | None = None, position: Tensor | None = None
    ) -> Tensor:
        x, mask = self.embed(ids), None
        if self.o.get("window"):
            at = torch.arange(SEQ)
            far = at[:, None] - at[None]
            mask = ((far >= 0) & (far < 3))[None, None]
        if padding is not None:
            mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()[None, None] & padding[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask, position)
        x = self.norm(x)
        loss = self.loss(self.head(x), labels)
        if self.o.get("mtp"):
            later = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss = loss + 0.3 * self.loss(self.next(x), later)
        return loss


def lm(name: str, **o: Any) -> None:
    def build() -> zoo.Built:
        batch = {"ids": tokens(), "labels": labels()}
        if o.get("padding"):
            batch["padding"] = torch.arange(SEQ) < SEQ - torch.arange(ROWS)[:, None] % 7
        if o.get("packed"):
            batch["position"] = (torch.arange(SEQ) % 5).expand(ROWS, SEQ).clone()
        return zoo.ready(LM(**o), torch.float64), batch

    MODELS[name] = build


lm("lm")
lm("two layers", layers=2)
lm("tied", layers=2, tied=True)
lm("dropout", dropout=0.3)
lm("qk norm", qk="each head")
lm("qk norm over all heads", qk="all heads")
lm("one kv head", kv=1)
lm("fused", fused=True)
lm("padding index", pad=2)
lm("lora", lora=True)
lm("window", window=True)
lm("padding mask", padding=True)
lm("rotary", packed=True)
lm("shifting", shift=True)
lm("next tokens", mtp=True)
lm("label smoothing", loss="smooth")
lm("gathered log-probabilities", loss="gathered")


class Experts(nn.Module):
    """lora: the first weights are frozen, and have a factor of rank 2 beside them."""

    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, HIDDEN), requires_grad=not lora)
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, HIDDEN))
        if lora:
            self.a = nn.Parameter(torch.empty(EXPERTS, 2, HIDDEN))
            self.b = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, 2))
        self.lora = lora

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up = self.up + self.b @ self.a if self.lora else self.up
        return shardc.nn.experts(x, index, weights, up, self.down, activation="silu")


class MoE(nn.Module):
    """A router, experts, and the router's two losses: balance and z. idle: nothing is sent to the last expert."""

    def __init__(self, lora: bool, idle: bool) -> None:
        super().__init__()
        self.idle = idle
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), Experts(lora)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.router(x)
        if self.idle:
            scores = scores - torch.tensor([0.0, 0.0, 0.0, 1e4], dtype=scores.dtype)
        p = scores.softmax(-1)
        weights, index = p.topk(2, -1)
        share = F.one_hot(index, EXPERTS).to(p.dtype).mean((0, 1, 2))
        balance = EXPERTS * (share * p.mean((0, 1))).sum()
        z = scores[..., :3].logsumexp(-1).square().mean()
        loss = F.cross_entropy(self.head(x + self.experts(x, index, weights)).flatten(0, 1), labels.flatten())
        return loss + 0.1 * balance + 0.01 * z


def moe(name: str, *, lora: bool = False, idle: bool = False) -> None:
    MODELS[name] = lambda: (
        zoo.ready(MoE(lora, idle), torch.float64),
        {"ids": tokens(), "labels": labels()},
    )


moe("experts")
moe("experts with lora", lora=True)
moe("an idle expert", idle=True)


class Towers(nn.Module):
    """CLIP's loss: every row of one tower against every row of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, HIDDEN), nn.Linear(4, HIDDEN)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        right = torch.arange(len(image))
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.t(), right)) / 2


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.bn(self.conv(x)).relu().mean((2, 3))), y)


class Stages(nn.Module):
    """Plain layers: some frozen, reshaped so that dims merge and part again."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.up = nn.Linear(6, 12), nn.Linear(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 6)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, n, _ = x.shape
        h = self.up(self.trunk(x).relu()).view(b, n, 4, 3).transpose(1, 2).reshape(b * 4, n * 3)
        h = h.view(b, 4, n, 3).transpose(1, 2).flatten(2)
        return (self.head(self.norm(h)) - y).square().mean()


class Twice(nn.Module):
    """A weight that is used twice in a row, on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(self.first(x).tanh()).tanh()
        return F.mse_loss(self.last(self.last(x).tanh()), y)


MODELS["a weight used twice"] = lambda: (
    zoo.ready(Twice(), torch.float64),
    {"x": drawn(ROWS, 6), "y": drawn(ROWS, 6, seed=2)},
)
MODELS["towers"] = lambda: (zoo.ready(Towers(), torch.float64), {"image": drawn(ROWS, 6), "text": drawn(ROWS, 4)})
MODELS["batch norm"] = lambda: (
    zoo.ready(Picture(), torch.float64),
    {"x": drawn(ROWS, 2, 4, 8), "y": drawn(ROWS, 3)},
)
MODELS["layers"] = lambda: (zoo.ready(Stages(), torch.float64), {"x": drawn(ROWS, 2, 6), "y": drawn(ROWS, 2, 6)})
