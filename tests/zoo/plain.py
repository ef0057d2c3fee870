"""Ordinary PyTorch models that people train, tiny: every one takes a batch of 8 and returns its loss.

    model, batch = plain.ALL["unet"]()          # conventions of tests/zoo/__init__.py

Here: the kinds everybody knows. zoo/plain_more.py has less common ones, zoo/plain_losses.py losses and ops on a small
network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests import zoo

BATCH, VOCAB = zoo.BATCH, 32
Make = Callable[[], tuple[nn.Module, Any]]
ALL: dict[str, Callable[..., zoo.Built]] = {}


def built(make: Make, *, initialised: bool = False) -> Callable[..., zoo.Built]:
    """A builder in the shape of the zoo's: seeded; `make` gives a module and a float64 batch. initialised: weights stay
    as made.
    """

    def build(dtype: torch.dtype = torch.float64) -> zoo.Built:
        torch.manual_seed(0)
        model, batch = make()
        cast = torch.utils._pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch
        )
        return (model.to(dtype).train() if initialised else zoo.ready(model, dtype)), cast

    build.__name__, build.__doc__ = make.__name__, make.__doc__
    return build


def model(make: Make) -> Make:
    """Add a model to the zoo under its function's name."""
    ALL[make.__name__] = built(make)
    return make


def as_made(make: Make) -> Make:
    """Like `model`, for modules whose parameters are constrained (norms, orthogonal matrices): they keep the values
    they have.
    """
    ALL[make.__name__] = built(make, initialised=True)
    return make


def real(*shape: int, seed: int = 1) -> Tensor:
    """f64[shape], standard normal."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ids(high: int, *shape: int, seed: int = 2) -> Tensor:
    """i64[shape] in [0, high)."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def padding(seq: int) -> Tensor:
    """bool[8, seq], True where row i ends early: its last i % (seq - 2) places."""
    return torch.arange(seq) >= seq - torch.arange(BATCH)[:, None] % (seq - 2)


# --- transformers -----------------------------------------------------------------------------------------------------


class EncoderClassifier(nn.Module):
    """nn.TransformerEncoder, padded rows, a mean over what is there, a head."""

    def __init__(self, norm_first: bool, activation: str) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, 16, padding_idx=0), nn.Parameter(torch.zeros(1, 12, 16))
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor, pad: Tensor, labels: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens) + self.position, src_key_padding_mask=pad)
        kept = (~pad).unsqueeze(-1).to(x.dtype)
        return F.cross_entropy(self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1)), labels)


@model
def encoder() -> tuple[nn.Module, Any]:
    return EncoderClassifier(False, "relu"), {
        "tokens": ids(VOCAB, 8, 12),
        "pad": padding(12),
        "labels": ids(8, 8, seed=3),
    }


@model
def encoder_norm_first() -> tuple[nn.Module, Any]:
    return EncoderClassifier(True, "gelu"), {
        "tokens": ids(VOCAB, 8, 12),
        "pad": padding(12),
        "labels": ids(8, 8, seed=3),
    }


class Decoder(nn.Module):
    """nn.TransformerDecoder over a memory given with the batch (captions of images)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, memory: Tensor, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, dtype=memory.dtype)
        x = self.decoder(self.embed(tokens[:, :-1]), memory, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).transpose(1, 2), tokens[:, 1:])


@model
def decoder() -> tuple[nn.Module, Any]:
    return Decoder(), {"memory": real(8, 6, 16), "tokens": ids(VOCAB, 8, 9)}


class Seq2Seq(nn.Module):
    """nn.Transformer, sequence first, sine positions in a buffer, masks for padding and for the future."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 16), nn.Embedding(VOCAB, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0)
        self.generator = nn.Linear(16, VOCAB)
        at, rate = torch.arange(16.0)[:, None], torch.exp(torch.arange(0, 16, 2) * (-math.log(10000.0) / 16))
        table = torch.zeros(16, 1, 16)
        table[:, 0, 0::2], table[:, 0, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table)

    def forward(self, src: Tensor, tgt: Tensor, src_pad: Tensor, tgt_pad: Tensor) -> Tensor:
        s, t = (e(x.t()) * 4.0 for e, x in ((self.source, src), (self.target, tgt[:, :-1])))
        s, t = (x + self.table[: x.size(0)] for x in (s, t))
        future = torch.triu(torch.ones(t.size(0), t.size(0), dtype=torch.bool), diagonal=1)
        out = self.transformer(
            s,
            t,
            tgt_mask=future,
            src_key_padding_mask=src_pad,
            tgt_key_padding_mask=tgt_pad[:, :-1],
            memory_key_padding_mask=src_pad,
        )
        goal = tgt[:, 1:].t().masked_fill(tgt_pad[:, 1:].t(), -100)
        return F.cross_entropy(self.generator(out).reshape(-1, VOCAB), goal.reshape(-1))


@model
def seq2seq() -> tuple[nn.Module, Any]:
    return Seq2Seq(), {
        "src": ids(VOCAB, 8, 10),
        "tgt": ids(VOCAB, 8, 9, seed=3),
        "src_pad": padding(10),
        "tgt_pad": padding(9),
    }


class Attention(nn.Module):
    """nn.MultiheadAttention with other sizes of keys and values, a bias in k and v, a float mask, and the weights
    returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            16, 4, add_bias_kv=True, add_zero_attn=True, kdim=12, vdim=8, batch_first=True
        )
        self.head = nn.Linear(16, 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> Tensor:
        mask = torch.full((q.shape[1], k.shape[1]), -1.0, dtype=q.dtype).tril(-1)
        x, weights = self.attention(q, k, v, attn_mask=mask, average_attn_weights=True)
        return F.mse_loss(self.head(x), y) - 0.1 * (weights * (weights + 1e-9).log()).sum(-1).mean()


@model
def attention_weights() -> tuple[nn.Module, Any]:
    return Attention(), {
        "q": real(8, 4, 16),
        "k": real(8, 6, 12, seed=2),
        "v": real(8, 6, 8, seed=3),
        "y": real(8, 4, 4, seed=4),
    }


# --- images -----------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inner: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=2, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    """torchvision's form: a strided stem, max pool, grouped bottlenecks with downsampling, average pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(4, 8), Bottleneck(4, 16))
        self.layer2 = nn.Sequential(Bottleneck(8, 16, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        return F.cross_entropy(self.fc(torch.flatten(self.avgpool(x), 1)), y, label_smoothing=0.1)


@model
def resnet50() -> tuple[nn.Module, Any]:
    return ResNet50(), {"x": real(8, 3, 16, 16), "y": ids(8, 8)}


def sinusoid(t: Tensor, dim: int) -> Tensor:
    """Timestep embedding: f[b] -> f[b, dim]."""
    rate = torch.exp(-math.log(10000.0) * torch.arange(dim // 2, dtype=t.dtype) / (dim // 2))
    angle = t[:, None] * rate[None]
    return torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1)


class UNetBlock(nn.Module):
    def __init__(self, i: int, o: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, i), nn.Conv2d(i, o, 3, padding=1)
        self.time = nn.Linear(time, 2 * o)
        self.norm2, self.conv2 = nn.GroupNorm(4, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        return self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift)) + self.skip(x)


class UNet(nn.Module):
    """Diffusion's U-Net: skips, a strided and an average-pooled way down, ConvTranspose2d and interpolate up, attention
    at the bottom.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inp, self.down1 = nn.Conv2d(3, 8, 3, padding=1), UNetBlock(8, 8, 16)
        self.pool1, self.down2 = nn.Conv2d(8, 8, 3, stride=2, padding=1), UNetBlock(8, 16, 16)
        self.middle, self.norm = UNetBlock(16, 16, 16), nn.GroupNorm(4, 16)
        self.qkv, self.proj = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.up2, self.out2 = nn.ConvTranspose2d(16, 16, 2, stride=2), UNetBlock(32, 8, 16)
        self.out1, self.last = UNetBlock(16, 8, 16), nn.Conv2d(8, 3, 3, padding=1)

    def attend(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 4, c // 4, h * w).unbind(1)
        weights = torch.einsum("bhcq,bhck->bhqk", q * (c // 4) ** -0.5, k).softmax(dim=-1)
        return x + self.proj(torch.einsum("bhqk,bhck->bhcq", weights, v).reshape(b, c, h, w))

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        alpha = torch.cos(t / 1000 * math.pi / 2).to(x.dtype).pow(2).view(-1, 1, 1, 1)
        y, time = alpha.sqrt() * x + (1 - alpha).sqrt() * noise, self.time(sinusoid(t.to(x.dtype), 16))
        one = self.down1(self.inp(y), time)
        two = self.down2(self.pool1(one), time)
        low = self.attend(self.middle(F.avg_pool2d(two, 2), time))
        up = self.out2(torch.cat([self.up2(low), two], dim=1), time)
        up = self.out1(torch.cat([F.interpolate(up, scale_factor=2, mode="nearest"), one], dim=1), time)
        return F.mse_loss(self.last(up), noise)


@model
def unet() -> tuple[nn.Module, Any]:
    return UNet(), {"x": real(8, 3, 8, 8), "noise": real(8, 3, 8, 8, seed=2), "t": ids(1000, 8)}


class DiTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, k1, g1, s2, k2, g2 = self.modulation(c).chunk(6, dim=1)
        b, n, h = x.shape
        y = self.norm1(x) * (1 + k1.unsqueeze(1)) + s1.unsqueeze(1)
        q, k, v = self.qkv(y).reshape(b, n, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, h)
        x = x + g1.unsqueeze(1) * self.proj(y)
        y = self.norm2(x) * (1 + k2.unsqueeze(1)) + s2.unsqueeze(1)
        return x + g2.unsqueeze(1) * self.fc2(F.gelu(self.fc1(y), approximate="tanh"))


class DiT(nn.Module):
    """adaLN-zero blocks, patchify by convolution, unpatchify by einsum, label dropout given with the batch, fixed 2-d
    positions.
    """

    def __init__(self, hidden: int = 16, heads: int = 4, patch: int = 2, size: int = 8) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.embed = nn.Conv2d(4, hidden, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(16, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Embedding(10 + 1, hidden)
        self.position = nn.Parameter(torch.randn(1, self.side**2, hidden), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(hidden, heads) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(hidden, elementwise_affine=False), nn.Linear(hidden, patch * patch * 8)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x: Tensor, t: Tensor, y: Tensor, drop: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2) + self.position
        c = self.time(sinusoid(t.to(x.dtype), 16)) + self.label(torch.where(drop, 10, y))
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        h = self.out(self.norm(h) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        h = h.reshape(h.shape[0], self.side, self.side, self.patch, self.patch, 8)
        h = torch.einsum("nhwpqc->nchpwq", h).reshape(h.shape[0], 8, self.side * self.patch, self.side * self.patch)
        predicted, _variance = torch.split(h, 4, dim=1)
        return F.mse_loss(predicted, target)


@model
def dit() -> tuple[nn.Module, Any]:
    drop = torch.tensor([True, False, False, True, False, False, False, True])
    return DiT(), {
        "x": real(8, 4, 8, 8),
        "t": ids(1000, 8),
        "y": ids(10, 8),
        "drop": drop,
        "target": real(8, 4, 8, 8, seed=3),
    }


# --- recurrent networks -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model over nn.LSTM, nn.GRU or nn.RNN."""

    def __init__(self, kind: str, *, batch_first: bool, bidirectional: bool = False, **options: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, 8)
        self.rnn = getattr(nn, kind)(8, 8, 2, batch_first=batch_first, bidirectional=bidirectional, **options)
        out = options.get("proj_size") or 8
        self.head = nn.Linear(out * (1 + bidirectional), VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens if self.batch_first else tokens.t())
        x, last = self.rnn(x)
        final = last[0] if isinstance(last, tuple) else last
        logits = self.head(x if self.batch_first else x.transpose(0, 1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * final.square().mean()


def _language() -> dict[str, Tensor]:
    return {"tokens": ids(VOCAB, 8, 6), "labels": ids(VOCAB, 8, 6, seed=3)}


@model
def lstm() -> tuple[nn.Module, Any]:
    return Recurrent("LSTM", batch_first=True), _language()


@model
def lstm_bidirectional() -> tuple[nn.Module, Any]:
    return Recurrent("LSTM", batch_first=False, bidirectional=True), _language()


@model
def lstm_projected() -> tuple[nn.Module, Any]:
    return Recurrent("LSTM", batch_first=True, proj_size=4), _language()


@model
def gru() -> tuple[nn.Module, Any]:
    return Recurrent("GRU", batch_first=True), _language()


@model
def gru_bidirectional() -> tuple[nn.Module, Any]:
    return Recurrent("GRU", batch_first=True, bidirectional=True), _language()


@model
def rnn() -> tuple[nn.Module, Any]:
    return Recurrent("RNN", batch_first=False, nonlinearity="relu"), _language()


class Cells(nn.Module):
    """Loops over LSTMCell and GRUCell with a state given by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.LSTMCell(4, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor, y: Tensor) -> Tensor:
        h, c, g = state, torch.zeros_like(state), torch.zeros_like(state)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.one(x[:, t], (h, c))
            g = self.two(h, g)
            outs.append(self.head(g))
        return F.smooth_l1_loss(torch.stack(outs, 1), y)


@model
def cells() -> tuple[nn.Module, Any]:
    return Cells(), {"x": real(8, 4, 4), "state": real(8, 8, seed=2), "y": real(8, 4, 4, seed=3)}


# --- audio, reparametrised weights, nested batches --------------------------------------------------------------------


class Audio(nn.Module):
    """Convolutions over samples: strides, GroupNorm, GELU, depthwise and dilated ones, GLU, a global average."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(1, 8, 10, stride=5, bias=False), nn.GroupNorm(8, 8)
        self.depth, self.point = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8), nn.Conv1d(8, 16, 1)
        self.batch_norm, self.conv = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, padding="same", padding_mode="reflect")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.stem(x.unsqueeze(1))))
        h = h + F.glu(self.point(self.depth(h)), dim=1)
        h = h + F.silu(self.conv(self.batch_norm(h)))
        return F.binary_cross_entropy_with_logits(self.head(h.mean(-1)), y, pos_weight=torch.ones(4, dtype=x.dtype) * 2)


@model
def audio() -> tuple[nn.Module, Any]:
    return Audio(), {"x": real(8, 60), "y": ids(2, 8, 4).double()}


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Reparametrised(nn.Module):
    """torch.nn.utils.parametrizations: weight norm, an orthogonal matrix, one of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(8, 16))
        self.mix = parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="cayley")
        self.even = nn.Linear(16, 16)
        parametrize.register_parametrization(self.even, "weight", Symmetric())
        self.down = parametrizations.weight_norm(nn.Linear(16, 4), dim=None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.relu(self.even(self.mix(F.relu(self.up(x)))))), y)


@as_made
def parametrised() -> tuple[nn.Module, Any]:
    return Reparametrised(), {"x": real(8, 8), "y": real(8, 4, seed=2)}


class WaveNet(nn.Module):
    """Dilated causal convolutions, padded by hand, gated, with weight norm in hooks (the old nn.utils.weight_norm)."""

    def __init__(self) -> None:
        super().__init__()
        old = torch.nn.utils.weight_norm
        self.embed = nn.Embedding(16, 8)
        self.dilated = nn.ModuleList(old(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(3))
        self.skip = nn.ModuleList(old(nn.Conv1d(8, 16, 1)) for _ in range(3))
        self.head = nn.Conv1d(8, 16, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        skips = 0.0
        for i, (dilated, skip) in enumerate(zip(self.dilated, self.skip, strict=True)):
            a, b = dilated(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            residual, more = skip(torch.tanh(a) * torch.sigmoid(b)).split(8, dim=1)
            x, skips = (x + residual) * math.sqrt(0.5), skips + more
        return F.cross_entropy(self.head(F.relu(skips)), tokens[:, 1:])


@as_made
def wavenet() -> tuple[nn.Module, Any]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm says that it is old
        return WaveNet(), {"tokens": ids(16, 8, 9)}


class Spectral(nn.Module):
    """A critic under spectral norm: power iterations update buffers in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.head = parametrizations.spectral_norm(nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        both = torch.cat([real, fake], dim=0)
        score = self.head(F.leaky_relu(self.conv(both), 0.2).mean((2, 3))).squeeze(-1)
        good, bad = score.chunk(2)
        return F.relu(1 - good).mean() + F.relu(1 + bad).mean()


@as_made
def spectral() -> tuple[nn.Module, Any]:
    return Spectral(), {"real": real(8, 3, 6, 6), "fake": real(8, 3, 6, 6, seed=2)}


class Nested(nn.Module):
    """A batch of dicts in dicts and lists, with a plain number and a flag among the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.EmbeddingBag(VOCAB, 8, mode="mean"), nn.Linear(12, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 2)})

    def forward(
        self, inputs: dict[str, Any], targets: dict[str, Tensor], weight: float, both: bool
    ) -> dict[str, Tensor]:
        x = torch.cat([self.text(inputs["text"]["ids"]), self.image(inputs["views"][0] - inputs["views"][1])], dim=-1)
        losses = {k: F.cross_entropy(h(F.relu(x)), targets[k]) for k, h in self.heads.items()}
        return {"loss": losses["a"] + weight * losses["b"] if both else losses["a"], "logits": x}


@model
def nested() -> tuple[nn.Module, Any]:
    inputs = {"text": {"ids": ids(VOCAB, 8, 5)}, "views": [real(8, 12), real(8, 12, seed=2)]}
    return Nested(), {"inputs": inputs, "targets": {"a": ids(4, 8), "b": ids(2, 8)}, "weight": 0.5, "both": True}
