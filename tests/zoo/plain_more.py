"""More ordinary PyTorch models (see zoo/plain.py): vision, sequences, graphs, recommendation, generative ones."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.plain import BATCH, VOCAB, ids, model, real

Made = tuple[nn.Module, Any]


# --- vision -----------------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """Convolutional patches, a class token in front, attention written with @ and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls, self.position = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.norm2, self.mlp = (
            nn.LayerNorm(16),
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16)),
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(b, -1, -1), h], dim=1) + self.position
        q, k, v = self.qkv(self.norm1(h)).reshape(b, -1, 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 4**-0.5).softmax(dim=-1)
        h = h + self.proj((weights @ v).transpose(1, 2).reshape(b, -1, 16))
        h = h + self.mlp(self.norm2(h))
        return F.cross_entropy(self.head(h[:, 0]), y)


@model
def vit() -> Made:
    return ViT(), {"x": real(8, 3, 8, 8), "y": ids(8, 8)}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm1, self.norm2 = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.LayerNorm(8)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).mT
        h = h + self.tokens(self.norm1(h).mT).mT
        h = h + self.channels(self.norm2(h))
        return F.multi_margin_loss(self.head(h.mean(dim=1)), y)


@model
def mixer() -> Made:
    return Mixer(), {"x": real(8, 3, 8, 8), "y": ids(4, 8)}


class MAE(nn.Module):
    """Keeps a part of the patches, which a permutation given with the batch chooses, and reconstructs the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(12, 16), nn.Parameter(torch.zeros(1, 16, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.mask, self.out = nn.Parameter(torch.zeros(1, 1, 16)), nn.Linear(16, 12)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        b = x.shape[0]
        patches = x.reshape(b, 3, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, 16, 12)
        order = noise.argsort(dim=1)
        back = order.argsort(dim=1)
        h = self.embed(patches) + self.position
        kept = torch.gather(h, 1, order[:, :4, None].repeat(1, 1, 16))
        h = torch.cat([self.encoder(kept), self.mask.repeat(b, 12, 1)], dim=1)
        h = torch.gather(h, 1, back.unsqueeze(-1).expand(-1, -1, 16)) + self.position
        hidden = torch.ones(b, 16, dtype=x.dtype)
        hidden[:, :4] = 0
        hidden = torch.gather(hidden, 1, back)
        goal = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5
        return (((self.out(h) - goal) ** 2).mean(-1) * hidden).sum() / hidden.sum()


@model
def mae() -> Made:
    return MAE(), {"x": real(8, 3, 8, 8), "noise": real(8, 16, seed=2)}


class Swin(nn.Module):
    """Windows shifted by roll, their attention with a relative bias table and a mask;
    patches merged by strided slices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.zeros(9, 2))
        place = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("index", apart[..., 0] * 3 + apart[..., 1])
        zones = torch.zeros(1, 4, 4, 1)
        for i, a in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
            for j, b in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
                zones[:, a, b] = 3 * i + j
        zones = self.windows(zones).squeeze(-1)
        self.register_buffer("mask", (zones[:, None] - zones[:, :, None]).ne(0) * -100.0)
        self.merge, self.head = nn.Linear(32, 16, bias=False), nn.Linear(16, 4)

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, c)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, h, w, c = x.shape
        t = self.windows(torch.roll(self.norm(x), shifts=(-1, -1), dims=(1, 2)))
        q, k, v = self.qkv(t).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        score = q * (c // 2) ** -0.5 @ k.transpose(-2, -1)
        score = score + self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        n = self.mask.shape[0]
        score = (score.view(-1, n, 2, 4, 4) + self.mask.unsqueeze(1).unsqueeze(0)).view(-1, 2, 4, 4).softmax(-1)
        t = self.proj((score @ v).transpose(1, 2).reshape(-1, 4, c))
        t = t.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        x = x + torch.roll(t, shifts=(1, 1), dims=(1, 2))
        x = self.merge(torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1))
        return F.cross_entropy(self.head(x.mean((1, 2))), y)


@model
def swin() -> Made:
    return Swin(), {"x": real(8, 4, 4, 8), "y": ids(4, 8)}


class SuperResolution(nn.Module):
    """Pixel shuffle and unshuffle, instance norm, PReLU, bicubic skip, total variation in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.act = (
            nn.Conv2d(12, 16, 3, padding=1, padding_mode="replicate"),
            nn.InstanceNorm2d(16, affine=True),
            nn.PReLU(16),
        )
        self.up, self.shuffle = nn.Conv2d(16, 48, 3, padding=1, padding_mode="circular"), nn.PixelShuffle(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.shuffle(self.up(self.act(self.norm(self.one(F.pixel_unshuffle(x, 2))))))
        h = h + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        variation = (h[..., 1:, :] - h[..., :-1, :]).abs().mean() + (h.diff(dim=-1)).abs().mean()
        return F.l1_loss(h, y) + 0.01 * variation


@model
def super_resolution() -> Made:
    return SuperResolution(), {"x": real(8, 3, 8, 8), "y": real(8, 3, 16, 16, seed=2)}


class Warp(nn.Module):
    """A spatial transformer: affine_grid and grid_sample; then 3-d convolutions, transposed ones and pools over the
    frames.
    """

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 6))
        self.conv, self.norm = nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(8)
        self.back, self.pool = nn.ConvTranspose3d(8, 4, 2, stride=2, groups=2), nn.AdaptiveMaxPool3d((1, 2, 2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        still = F.grid_sample(
            x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False, padding_mode="border"
        )
        clip = torch.stack([x, still], dim=2)
        h = F.avg_pool3d(F.elu(self.norm(self.conv(clip))), (1, 2, 2))
        h = self.pool(F.interpolate(self.back(h), size=(2, 8, 8), mode="trilinear"))
        return F.cross_entropy(self.head(h.flatten(1)), y)


@model
def warp() -> Made:
    return Warp(), {"x": real(8, 3, 6, 6), "y": ids(4, 8)}


class Segment(nn.Module):
    """Dilated and depthwise convolutions, squeeze and excitation, bilinear upsampling, cross-entropy and Dice over
    pixels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish())
        self.depth, self.wide = nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Conv2d(16, 8, 3, padding=2, dilation=2)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu6(self.depth(self.stem(x)))
        h = h * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        logits = F.interpolate(self.head(self.wide(h)), size=x.shape[2:], mode="bilinear", align_corners=False)
        p, t = logits.softmax(1), F.one_hot(y.clamp(min=0), 4).permute(0, 3, 1, 2).to(x.dtype)
        dice = 1 - (2 * (p * t).sum((0, 2, 3)) + 1) / ((p + t).sum((0, 2, 3)) + 1)
        return F.cross_entropy(logits, y, ignore_index=-1) + dice.mean()


@model
def segment() -> Made:
    y = ids(4, 8, 8, 8)
    y[1, :4], y[5] = -1, -1
    return Segment(), {"x": real(8, 3, 8, 8), "y": y}


class Detector(nn.Module):
    """DETR's form: queries attend to a feature map; boxes and classes against targets that are matched already; focal
    loss, GIoU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features, self.queries = nn.Conv2d(3, 16, 4, 4), nn.Embedding(5, 16)
        self.row, self.column = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))
        self.decoder = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0)
        self.classes, self.box = nn.Linear(16, 6), nn.Linear(16, 4)

    def forward(self, x: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        h = self.features(x)
        b, _, n, m = h.shape
        place = torch.cat([self.column[:m].unsqueeze(0).repeat(n, 1, 1), self.row[:n].unsqueeze(1).repeat(1, m, 1)], -1)
        memory = place.flatten(0, 1).unsqueeze(1) + 0.1 * h.flatten(2).permute(2, 0, 1)
        q = self.decoder(self.queries.weight.unsqueeze(1).repeat(1, b, 1), memory).transpose(0, 1)
        logits, found = self.classes(q), self.box(q).sigmoid()
        goal = F.one_hot(classes, 6).to(x.dtype)
        p = logits.sigmoid()
        focal = (
            F.binary_cross_entropy_with_logits(logits, goal, reduction="none")
            * (1 - (p * goal + (1 - p) * (1 - goal))) ** 2
        )
        (ax, ay, aw, ah), (bx, by, bw, bh) = found.unbind(-1), boxes.unbind(-1)
        left, right = torch.maximum(ax - aw / 2, bx - bw / 2), torch.minimum(ax + aw / 2, bx + bw / 2)
        top, bottom = torch.maximum(ay - ah / 2, by - bh / 2), torch.minimum(ay + ah / 2, by + bh / 2)
        inter = (right - left).clamp(min=0) * (bottom - top).clamp(min=0)
        iou = inter / (aw * ah + bw * bh - inter + 1e-6)
        there = classes > 0
        count = there.sum().clamp(min=1)
        l1 = (F.l1_loss(found, boxes, reduction="none").sum(-1) * there).sum() / count
        return focal.sum() / count + l1 + ((1 - iou) * there).sum() / count


@model
def detector() -> Made:
    return Detector(), {"x": real(8, 3, 8, 8), "classes": ids(6, 8, 5), "boxes": real(8, 5, 4, seed=2).sigmoid()}


# --- sequences --------------------------------------------------------------------------------------------------------


def rotary(x: Tensor, turns: Tensor) -> Tensor:
    """Llama's complex form: pairs of dims as complex numbers."""
    c = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(c * turns[None, :, None]).flatten(3)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaLike(nn.Module):
    """Meta's own code: complex rotary, RMSNorm, SwiGLU, a causal mask of -inf by triu, repeated key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2, self.norm = (
            nn.Embedding(VOCAB, 16),
            RMSNorm(16),
            RMSNorm(16),
            nn.RMSNorm(16),
        )
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, n, bias=False) for n in (16, 8, 8, 16))
        self.w1, self.w2, self.w3 = (
            nn.Linear(16, 32, bias=False),
            nn.Linear(32, 16, bias=False),
            nn.Linear(16, 32, bias=False),
        )
        self.output = nn.Linear(16, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        b, s = tokens.shape
        h = self.embed(tokens)
        rate = 1.0 / 10000 ** (torch.arange(0, 4, 2, dtype=h.dtype) / 4)
        turns = torch.polar(torch.ones(s, 2, dtype=h.dtype), torch.outer(torch.arange(s, dtype=h.dtype), rate))
        x = self.norm1(h)
        q, k, v = self.wq(x).view(b, s, 4, 4), self.wk(x).view(b, s, 2, 4), self.wv(x).view(b, s, 2, 4)
        q, k = rotary(q, turns), rotary(k, turns)
        k, v = (t[:, :, :, None, :].expand(b, s, 2, 2, 4).reshape(b, s, 4, 4) for t in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = torch.triu(torch.full((s, s), float("-inf"), dtype=h.dtype), diagonal=1)
        scores = F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(4) + mask, dim=-1)
        h = h + self.wo(torch.matmul(scores, v).transpose(1, 2).contiguous().view(b, s, -1))
        x = self.norm2(h)
        h = h + self.w2(F.silu(self.w1(x)) * self.w3(x))
        return F.cross_entropy(self.output(self.norm(h)).view(-1, VOCAB), labels.view(-1))


@model
def llama_like() -> Made:
    return LlamaLike(), {"tokens": ids(VOCAB, 8, 6), "labels": ids(VOCAB, 8, 6, seed=3)}


class Biased(nn.Module):
    """ALiBi, T5's relative buckets, and a masked mean, in one attention; z-loss on the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.relative = nn.Embedding(VOCAB, 16), nn.Embedding(8, 4)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        s = tokens.shape[1]
        q, k, v = rearranged(self.qkv(self.embed(tokens)), 4).unbind(0)
        apart = torch.arange(s)[None] - torch.arange(s)[:, None]
        near = apart.abs().clamp(min=1)
        far = (2 + (torch.log(near / 2.0) / math.log(4) * 2).long()).clamp(max=3)
        bucket = (apart > 0).long() * 4 + torch.where(apart.abs() < 2, apart.abs(), far)
        slopes = 2.0 ** (-2.0 * torch.arange(1, 5, dtype=q.dtype))
        bias = self.relative(bucket).permute(2, 0, 1) - slopes[:, None, None] * apart.abs()
        there = torch.arange(s)[None] < lengths[:, None]
        score = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5 + bias
        score = score.masked_fill(~there[:, None, None], torch.finfo(score.dtype).min)
        h = torch.einsum("bhij,bhjd->bihd", score.softmax(-1), v).flatten(2)
        h = (self.out(h) * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        logits = self.head(h)
        return F.cross_entropy(logits, y) + 1e-3 * torch.logsumexp(logits, -1).pow(2).mean()


def rearranged(x: Tensor, heads: int) -> Tensor:
    """einops: b s (three h d) -> three b h s d."""
    b, s, n = x.shape
    return x.reshape(b, s, 3, heads, n // 3 // heads).permute(2, 0, 3, 1, 4)


@model
def biased() -> Made:
    return Biased(), {"tokens": ids(VOCAB, 8, 6), "lengths": torch.arange(8) % 5 + 2, "y": ids(VOCAB, 8)}


class LinearAttention(nn.Module):
    """Kernel features and cumulative sums over time; a shift of tokens; squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, 24), nn.Linear(8, VOCAB)
        self.mix = nn.Parameter(torch.zeros(8))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        before = F.pad(x, (0, 0, 1, -1))
        x = torch.lerp(before, x, torch.sigmoid(self.mix))
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.relu(k).square() + 1e-3
        state = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), dim=1)
        h = torch.einsum("bsd,bsde->bse", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        return F.nll_loss(F.log_softmax(self.out(h), -1).flatten(0, 1), labels.flatten())


@model
def linear_attention() -> Made:
    return LinearAttention(), {"tokens": ids(VOCAB, 8, 6), "labels": ids(VOCAB, 8, 6, seed=3)}


class StateSpace(nn.Module):
    """Mamba's form: a causal depthwise convolution, an input-dependent scan as a loop over time, a gate; an S4 kernel
    by FFT.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.conv = nn.Linear(4, 16), nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.x_proj, self.dt = nn.Linear(8, 2 + 2 * 3), nn.Linear(2, 8)
        self.log_a, self.d, self.out = nn.Parameter(torch.zeros(8, 3)), nn.Parameter(torch.ones(8)), nn.Linear(8, 4)
        self.decay, self.gain = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[1]
        u, z = self.inp(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :n].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([2, 3, 3], -1)
        dt, a = F.softplus(self.dt(dt)), -torch.exp(self.log_a)
        h, outs = u.new_zeros(u.shape[0], 8, 3), []
        for t in range(n):
            h = torch.exp(dt[:, t, :, None] * a) * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None, :]
            outs.append((h * c[:, t, None, :]).sum(-1))
        out = self.out((torch.stack(outs, 1) + u * self.d) * F.silu(z))
        kernel = self.gain * torch.exp(-F.softplus(self.decay) * torch.arange(n, dtype=x.dtype))
        long = torch.fft.irfft(torch.fft.rfft(out.mT, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n].mT
        return F.huber_loss(long, y)


@model
def state_space() -> Made:
    return StateSpace(), {"x": real(8, 6, 4), "y": real(8, 6, 4, seed=2)}


class FNet(nn.Module):
    """Fourier mixing of tokens and features; Gumbel noise given with the batch; a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.codes, self.head = (
            nn.Embedding(VOCAB, 8),
            nn.LayerNorm([6, 8]),
            nn.Linear(8, 4),
            nn.Linear(8, VOCAB),
        )
        self.book = nn.Parameter(torch.zeros(4, 8))

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        soft = ((self.codes(x) + noise) / 0.5).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        x = (hard - soft.detach() + soft) @ self.book
        return F.cross_entropy(self.head(x).transpose(1, 2), tokens, label_smoothing=0.1)


@model
def fnet() -> Made:
    return FNet(), {"tokens": ids(VOCAB, 8, 6), "noise": real(8, 6, 4)}


class Perceiver(nn.Module):
    """Latents that are parameters attend to the input; the answer is read by a query."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.query = nn.Parameter(torch.zeros(4, 16)), nn.Parameter(torch.zeros(1, 16))
        self.read, self.write = (
            nn.MultiheadAttention(16, 2, kdim=6, vdim=6, batch_first=True),
            nn.MultiheadAttention(16, 2, batch_first=True),
        )
        self.think, self.head = (
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation=F.gelu),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        z = self.read(self.latents.expand(b, -1, -1), x, x, need_weights=False)[0]
        z = self.think(self.think(z))
        out = self.write(self.query.repeat(b, 1, 1), z, z, need_weights=False)[0].squeeze(1)
        return F.cross_entropy(self.head(out), y, weight=torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=x.dtype))


@model
def perceiver() -> Made:
    return Perceiver(), {"x": real(8, 7, 6), "y": ids(4, 8)}


class Pointer(nn.Module):
    """The last real token of every row by advanced indexing, top-k over time, sorting, a loss on chosen positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 1), nn.Linear(24, VOCAB)

    def forward(self, tokens: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        x = self.embed(tokens)
        b = torch.arange(x.shape[0])
        last = x[b, lengths - 1]
        score = self.score(x).squeeze(-1)
        value, place = score.topk(2, dim=1)
        best = (x[b[:, None], place] * value.softmax(1)[..., None]).sum(1)
        low = torch.take_along_dim(x, score.sort(dim=1).indices[..., None], dim=1)[:, 0]
        logits = self.head(torch.cat([last, best, low], 1))
        return -logits.log_softmax(1)[b, y].mean()


@model
def pointer() -> Made:
    return Pointer(), {"tokens": ids(VOCAB, 8, 6), "lengths": torch.arange(8) % 5 + 2, "y": ids(VOCAB, 8)}


# --- graphs, points, tables, fields -----------------------------------------------------------------------------------


class GCN(nn.Module):
    """Dense adjacency matrices, normalised in the model; attention over neighbours; a readout by max and mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.a, self.b, self.head = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 1),
            nn.Linear(8, 1),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Tensor:
        a = adjacency + torch.eye(adjacency.shape[-1], dtype=x.dtype)
        d = a.sum(-1).clamp(min=1).pow(-0.5)
        h = F.relu(d[..., None] * a * d[:, None] @ self.one(x))
        e = F.leaky_relu(self.a(h) + self.b(h).transpose(1, 2), 0.2)
        h = torch.bmm(torch.where(a > 0, e, -9e15).softmax(-1), self.two(h))
        return F.cross_entropy(self.head(torch.cat([h.amax(1), h.mean(1)], -1)), y)


@model
def gcn() -> Made:
    return GCN(), {"x": real(8, 5, 4), "adjacency": (real(8, 5, 5, seed=2) > 0).double(), "y": ids(3, 8)}


class Messages(nn.Module):
    """One graph, whose edges are the batch: gather, index_add, scatter_reduce over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.message, self.head = nn.Embedding(6, 8), nn.Linear(17, 8), nn.Linear(8, 1)

    def forward(self, source: Tensor, target: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        x = self.nodes.weight
        m = F.relu(self.message(torch.cat([x[source], x[target], weight[:, None]], -1)))
        total = torch.zeros_like(x).index_add(0, target, m)
        count = x.new_zeros(6).scatter_add(0, target, torch.ones_like(weight)).clamp(min=1)
        most = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand(-1, 8), m, "amax")
        x = x + total / count[:, None] + most
        return F.mse_loss(self.head(x[source] * x[target]).squeeze(-1), y)


@model
def messages() -> Made:
    return Messages(), {"source": ids(6, 8), "target": ids(6, 8, seed=3), "weight": real(8), "y": real(8, seed=2)}


class PointNet(nn.Module):
    """Points in convolutions of width one, max over points, a learned transform and its orthogonality; farthest
    features by cdist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 16, 1)
        self.turn, self.head = nn.Linear(16, 9), nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.max(self.two(F.relu(self.norm(self.one(x)))), 2)[0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        eye = torch.eye(3, dtype=x.dtype).flatten().repeat(x.shape[0], 1)
        t = (self.turn(self.features(x)) * 0.1 + eye).view(-1, 3, 3)
        turned = torch.bmm(x.transpose(2, 1), t).transpose(2, 1)
        off = torch.norm(torch.eye(3, dtype=x.dtype)[None] - torch.bmm(t, t.transpose(2, 1)), dim=(1, 2)).mean()
        near = torch.cdist(turned.mT, x.mT).topk(3, dim=-1, largest=False).values.mean()
        return F.nll_loss(F.log_softmax(self.head(self.features(turned)), 1), y) + 0.1 * off + 0.1 * near


@model
def pointnet() -> Made:
    return PointNet(), {"x": real(8, 3, 7), "y": ids(4, 8)}


class DLRM(nn.Module):
    """Many tables, bags, interactions of pairs by tril_indices; a factorisation machine and a cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (10, 6, 4))
        self.cross, self.top = nn.Linear(32, 32), nn.Linear(6 + 8 + 32, 1)

    def forward(self, dense: Tensor, sparse: list[Tensor], y: Tensor) -> Tensor:
        x = self.dense(dense)
        every = torch.stack([x, *(t(s) for t, s in zip(self.tables, sparse, strict=True))], dim=1)
        i, j = torch.tril_indices(4, 4, offset=-1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, i, j]
        flat = every.flatten(1)
        crossed = flat * self.cross(flat) + flat
        machine = 0.5 * (every.sum(1).square() - every.square().sum(1)).sum(1)
        return F.binary_cross_entropy(
            torch.sigmoid(self.top(torch.cat([pairs, x, crossed], 1)).squeeze(1) + machine), y
        )


@model
def dlrm() -> Made:
    return DLRM(), {"dense": real(8, 4), "sparse": [ids(10, 8, 3), ids(6, 8, 2), ids(4, 8, 1)], "y": ids(2, 8).double()}


class Images(nn.Module):
    """Instance norm that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(F.relu(self.norm(self.conv(x))).mean((2, 3))), y)


@model
def images() -> Made:
    return Images(), {"x": real(8, 3, 6, 6), "y": ids(4, 8)}


class Clicks(nn.Module):
    """Bags of different sizes by offsets, and tables with sparse gradients; quantised in
    training; one output, by rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.table = nn.EmbeddingBag(20, 8, mode="mean", sparse=True), nn.Embedding(20, 8, sparse=True)
        self.up, self.out = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, words: Tensor, offsets: Tensor, item: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.up(torch.cat([self.bags(words, offsets), self.table(item)], dim=1)))
        h = torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)
        return F.binary_cross_entropy_with_logits(self.out(h).squeeze(1), y)


@model
def clicks() -> Made:
    offsets = torch.tensor([0, 5, 5, 7, 11, 12, 20, 21])
    return Clicks(), {"words": ids(20, 24), "offsets": offsets, "item": ids(20, 8), "y": ids(2, 8).double()}


class NeRF(nn.Module):
    """Sines and cosines of positions, skips, and volume rendering with a cumulative product along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.sigma, self.color = (
            nn.Linear(39, 16),
            nn.Linear(16 + 39, 16),
            nn.Linear(16, 1),
            nn.Linear(16 + 3, 3),
        )

    def forward(self, origin: Tensor, direction: Tensor, depth: Tensor, color: Tensor) -> Tensor:
        points = origin[:, None] + direction[:, None] * depth[..., None]
        rate = 2.0 ** torch.arange(6, dtype=points.dtype)
        angle = (points[..., None] * rate).flatten(-2)
        code = torch.cat([points, angle.sin(), angle.cos()], -1)
        h = F.relu(self.two(torch.cat([F.relu(self.one(code)), code], -1)))
        rgb = self.color(torch.cat([h, F.normalize(direction, dim=-1)[:, None].expand_as(points)], -1)).sigmoid()
        gap = torch.cat([depth.diff(dim=-1), torch.full_like(depth[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-F.relu(self.sigma(h).squeeze(-1)) * gap)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * clear)[..., None] * rgb).sum(1), color)


@model
def nerf() -> Made:
    depth = real(8, 6, seed=3).abs().cumsum(-1)
    return NeRF(), {
        "origin": real(8, 3),
        "direction": real(8, 3, seed=2),
        "depth": depth,
        "color": real(8, 3, seed=4).sigmoid(),
    }


# --- generative, metric and physical ones -----------------------------------------------------------------------------


class VAE(nn.Module):
    """Noise given with the batch; transposed convolutions; a batch-wise regulariser by
    matrix products over the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 8))
        self.decode = nn.Sequential(nn.Linear(4, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 4, 2, 1))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + torch.exp(0.5 * log_var) * noise
        rebuilt = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="sum") / x.shape[0]
        divergence = torch.mean(-0.5 * torch.sum(1 + log_var - mean**2 - log_var.exp(), dim=1), dim=0)
        near = torch.exp(-(z[:, None] - z[None]).pow(2).sum(-1)).mean()
        return rebuilt + divergence + near


@model
def vae() -> Made:
    return VAE(), {"x": real(8, 1, 8, 8).sigmoid(), "noise": real(8, 4, seed=2)}


class GAN(nn.Module):
    """Generator and discriminator losses in one step, each with the other detached; a mini-batch standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))

    def judge(self, x: Tensor) -> Tensor:
        spread = x.std(dim=0).mean().expand(x.shape[0], 1)
        return self.critic(torch.cat([x, spread], 1)).squeeze(1)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        fake = self.generator(z)
        good, bad = self.judge(x), self.judge(fake.detach())
        d = F.binary_cross_entropy_with_logits(good, torch.ones_like(good)) + F.binary_cross_entropy_with_logits(
            bad, torch.zeros_like(bad)
        )
        return d + F.softplus(-self.judge(fake)).mean()


@model
def gan() -> Made:
    return GAN(), {"z": real(8, 4), "x": real(8, 8, seed=2)}


class CLIP(nn.Module):
    """In-batch negatives: the batch is used twice, in rows and in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(12, 8), nn.EmbeddingBag(VOCAB, 8), nn.Parameter(torch.zeros(()))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        labels = torch.arange(a.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@model
def clip() -> Made:
    return CLIP(), {"image": real(8, 12), "text": ids(VOCAB, 8, 5)}


class SelfSupervised(nn.Module):
    """SimCLR, Barlow Twins and VICReg on two views: masks of the diagonal, correlations over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        a, b = self.net(one), self.net(two)
        n = a.shape[0]
        z = F.normalize(torch.cat([a, b]), dim=1)
        sim = z @ z.T / 0.5
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        goal = torch.cat([torch.arange(n) + n, torch.arange(n)])
        simclr = F.cross_entropy(sim, goal)
        na, nb = ((x - x.mean(0)) / (x.std(0) + 1e-4) for x in (a, b))
        c = na.T @ nb / n
        barlow = (torch.diagonal(c) - 1).pow(2).sum() + 0.01 * (c - torch.diag(torch.diag(c))).pow(2).sum()
        variance = F.relu(1 - torch.sqrt(a.var(dim=0) + 1e-4)).mean()
        return simclr + barlow + variance


@model
def self_supervised() -> Made:
    return SelfSupervised(), {"one": real(8, 6), "two": real(8, 6, seed=2)}


class Prototypes(nn.Module):
    """Few-shot episodes: means of support embeddings, distances of queries to them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, support: Tensor, query: Tensor, y: Tensor) -> Tensor:
        centres = self.net(support).mean(2)
        distance = torch.cdist(self.net(query), centres)
        return F.cross_entropy(-distance.flatten(0, 1), y.flatten())


@model
def prototypes() -> Made:
    return Prototypes(), {"support": real(8, 3, 2, 6), "query": real(8, 4, 6, seed=2), "y": ids(3, 8, 4)}


class Mixture(nn.Module):
    """A mixture density network, quantile regression, and a Gaussian with a full covariance by its Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.quantiles, self.factor = nn.Linear(4, 9), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, pair: Tensor) -> Tensor:
        weight, mean, scale = self.net(x).chunk(3, -1)
        part = -0.5 * ((y[:, None] - mean) / F.softplus(scale)) ** 2 - F.softplus(scale).log()
        mixture = -torch.logsumexp(F.log_softmax(weight, -1) + part, -1).mean()
        off = y[:, None] - self.quantiles(x)
        q = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)
        pinball = torch.maximum(q * off, (q - 1) * off).mean()
        a, b, c = self.factor(x).unbind(-1)
        low = torch.stack(
            [torch.stack([F.softplus(a), torch.zeros_like(a)], -1), torch.stack([b, F.softplus(c)], -1)], -2
        )
        cov = low @ low.mT + 0.1 * torch.eye(2, dtype=x.dtype)
        solved = torch.linalg.solve(cov, pair)
        gauss = (
            0.5 * ((pair * solved).sum(-1) + torch.logdet(cov)).mean()
            + torch.linalg.inv(cov).diagonal(dim1=-2, dim2=-1).mean()
        )
        return mixture + pinball + gauss + torch.linalg.cholesky(cov).square().mean()


@model
def mixture() -> Made:
    return Mixture(), {"x": real(8, 4), "y": real(8, seed=2), "pair": real(8, 2, seed=3)}


class Flow(nn.Module):
    """Coupling layers, an invertible mixing matrix with its log determinant, a
    Runge-Kutta loop, a matrix exponential.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mix = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Parameter(torch.eye(4))
        self.field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, ::2], x[:, 1::2]
        log_scale, shift = self.net(a).chunk(2, 1)
        x = torch.cat([a, b * log_scale.exp() + shift], 1) @ (torch.eye(4, dtype=x.dtype) + 0.1 * self.mix)
        volume = log_scale.sum(1) + torch.linalg.slogdet(torch.eye(4, dtype=x.dtype) + 0.1 * self.mix)[1]
        for _ in range(2):
            k1 = self.field(x)
            k2 = self.field(x + 0.25 * k1)
            x = x + 0.5 * k2
        turn = torch.matrix_exp(self.mix - self.mix.T)
        return (0.5 * (x @ turn).square().sum(1) - volume).mean()


@model
def flow() -> Made:
    return Flow(), {"x": real(8, 4)}


class Actor(nn.Module):
    """PPO's clipped objective, with entropies and generalised advantages accumulated backwards in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, seen: Tensor, action: Tensor, old: Tensor, reward: Tensor, done: Tensor) -> Tensor:
        h = torch.tanh(self.body(seen))
        logp, v = self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)
        with torch.no_grad():
            gain, gains = torch.zeros_like(reward[:, 0]), []
            for t in reversed(range(reward.shape[1])):
                after = v[:, t + 1] if t + 1 < reward.shape[1] else torch.zeros_like(gain)
                gain = reward[:, t] + 0.9 * after * (1 - done[:, t]) - v[:, t] + 0.8 * (1 - done[:, t]) * gain
                gains.insert(0, gain)
            adv = torch.stack(gains, 1)
            goal = adv + v
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = torch.exp(logp.gather(-1, action[..., None]).squeeze(-1) - old)
        clipped = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return clipped + 0.5 * F.mse_loss(v, goal) - 0.01 * entropy


@model
def actor() -> Made:
    done = (real(8, 4, seed=5) > 1).double()
    return Actor(), {
        "seen": real(8, 4, 6),
        "action": ids(3, 8, 4),
        "old": -real(8, 4, seed=3).abs(),
        "reward": real(8, 4, seed=4),
        "done": done,
    }


class Ensemble(nn.Module):
    """Members of stacked weights under torch.func.vmap and functional_call; how much they
    differ is a term of the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = (nn.Parameter(torch.zeros(4, *shape)) for shape in ((8, 16), (16, 5), (5,)))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def member(up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
            h = torch.func.functional_call(self.norm, dict(self.norm.named_parameters()), torch.tanh(x @ up))
            return h @ down + bias

        logits = torch.func.vmap(member)(self.up, self.down, self.bias)
        return F.cross_entropy(logits.mean(dim=0), y) - 0.1 * logits.var(dim=0).mean()


@model
def ensemble() -> Made:
    return Ensemble(), {"x": real(8, 8), "y": ids(5, 8)}


class Quantised(torch.autograd.Function):
    """Rounded forward; backward a straight-through estimator that stops outside of [-1, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: float) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * steps) / steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1).to(x.dtype), None


class VectorQuantiser(nn.Module):
    """VQ-VAE (van den Oord et al. 2017) whose codes are running means, in buffers; an
    encoder with quantised weights.
    """

    code: Tensor
    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("code", real(16, 4, seed=5))
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("total", real(16, 4, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = Quantised.apply(self.enc.weight, 16.0)  # type: ignore[no-untyped-call]
        z = F.linear(x, weight, self.enc.bias)
        nearest = (z.square().sum(-1, keepdim=True) - 2 * z @ self.code.T + self.code.square().sum(-1)).argmin(-1)
        q = self.code[nearest]
        with torch.no_grad():
            one = F.one_hot(nearest, 16).to(z.dtype)
            self.count.mul_(0.9).add_(one.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(one.T @ z, alpha=0.1)
            self.code.copy_(self.total / self.count[:, None])
        return F.mse_loss(self.dec(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q.detach())


@model
def vector_quantiser() -> Made:
    return VectorQuantiser(), {"x": real(8, 8)}


class MixtureOfDepths(nn.Module):
    """Half of the tokens, the router's first, pass a layer, and go back to their places (Raposo et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.up, self.down = (
            nn.Embedding(VOCAB, 16),
            nn.Linear(16, 1),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        scores = self.router(h).squeeze(-1)
        chosen = scores.topk(4, 1).indices.sort(1).values
        index = chosen[..., None].expand(-1, -1, 16)
        through = self.down(F.silu(self.up(h.gather(1, index)))) * scores.gather(1, chosen).sigmoid()[..., None]
        return F.cross_entropy(self.head(h.scatter_add(1, index, through)).transpose(1, 2), y)


@model
def mixture_of_depths() -> Made:
    return MixtureOfDepths(), {"x": ids(VOCAB, 8, 8), "y": ids(VOCAB, 8, 8, seed=4)}


class Hypernetwork(nn.Module):
    """Every sample has convolution kernels of its own, made by a network: one grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8 * 3 * 9))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        kernels = self.make(z).view(b * 8, 3, 3, 3)
        h = F.conv2d(x.reshape(1, b * 3, 8, 8), kernels, padding=1, groups=b).view(b, 8, 8, 8)
        return F.cross_entropy(self.head(F.relu(h).mean((2, 3))), y)


@model
def hypernetwork() -> Made:
    return Hypernetwork(), {"x": real(8, 3, 8, 8), "z": real(8, 4, seed=5), "y": ids(4, 8)}


class FourierOperator(nn.Module):
    """A Fourier neural operator (Li et al. 2021): low frequencies times complex weights, written into a spectrum of
    zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.project = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 1, 1)
        self.scale = nn.Parameter(torch.zeros(1))  # one number: what lies behind it in a bucket begins at an odd place
        self.modes = nn.Parameter(torch.zeros(8, 8, 4, 3, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x)
        for _ in range(2):
            f = torch.fft.rfft2(h)
            kept = torch.zeros_like(f)
            kept[:, :, :4, :3] = torch.einsum("bixy,ioxy->boxy", f[:, :, :4, :3], torch.view_as_complex(self.modes))
            kept[:, :, -1, :3] = f[:, :, -1, :3].conj()
            kept.diagonal(dim1=2, dim2=3)[:, 0] = 1j
            kept = kept + 0.1 * (kept @ f.mH @ kept)
            h = F.gelu(torch.fft.irfft2(kept, s=(8, 8)) + self.scale * self.skip(h))
        return F.mse_loss(self.project(h), y)


@model
def fourier_operator() -> Made:
    return FourierOperator(), {"x": real(8, 2, 8, 8), "y": real(8, 1, 8, 8, seed=2)}


class Spectrogram(nn.Module):
    """Audio by stft, mel-like bins, log, SpecAugment masks from the batch, a strided convolution, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.mel, self.conv, self.head = nn.Linear(5, 6, bias=False), nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, wave: Tensor, hidden: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        power = torch.stft(wave, 8, 4, window=self.window, return_complex=True).abs().pow(2)
        mel = torch.log(self.mel(power.mT).square() + 1e-6)
        mel = mel.masked_fill(hidden[:, None], 0.0)
        x = self.head(F.gelu(self.conv(mel.mT)).mT).log_softmax(-1)
        return F.ctc_loss(x.transpose(0, 1), targets, frames, lengths, zero_infinity=True)


@model
def spectrogram() -> Made:
    frames, lengths = torch.full((BATCH,), 9), torch.arange(8) % 3 + 1
    hidden = real(8, 6, seed=2) > 1
    return Spectrogram(), {
        "wave": real(8, 32),
        "hidden": hidden,
        "targets": ids(4, 8, 3) + 1,
        "frames": frames,
        "lengths": lengths,
    }
