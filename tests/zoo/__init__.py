"""Small models for tests: each builder returns (model in train mode, one global batch), seeded, every size divisible by
4.

    model, batch = zoo.llama(dtype=torch.float64)
    for name, build in zoo.ALL.items(): ...
    with zoo.Wide(): ...                # compare transformers models in float64

Batches are 8 × 16 tokens; labels are -100 at places that fall unevenly on the rows, so that ranks count different
numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH, SEQ, VOCAB, HIDDEN, HEADS = 8, 16, 128, 64, 8
Batch = dict[str, Tensor]
Built = tuple[nn.Module, Any]


def tokens(vocab: int = VOCAB, seed: int = 1) -> Tensor:
    """Random token ids, i64[8, 16], never 0 (padding in some models)."""
    return torch.randint(1, vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))


def labels(vocab: int = VOCAB, seed: int = 2) -> Tensor:
    """Random labels, i64[8, 16]; row i ignores its last (3 i) % 14 positions."""
    found = tokens(vocab, seed)
    for i in range(BATCH):
        found[i, SEQ - (3 * i) % 14 :] = -100
    return found


def ready(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In train mode, in `dtype`, every parameter random (also biases and gains, which start constant)."""
    plan_embedding(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.1 * noise if p.dim() < 2 else noise * p.shape[-1] ** -0.5)
    return model.to(dtype).train()


def plan_embedding(model: nn.Module) -> None:
    """Have a transformers model's own plan split `embed_tokens`, as theirs all do in 5.24; in 5.17 one does only where
    the head is tied to it."""
    for module in model.modules():
        plan = getattr(module, "_tp_plan", None)
        if plan and isinstance(getattr(module, "embed_tokens", None), nn.Embedding):
            module._tp_plan = {"embed_tokens": "embedding_rowwise", **plan}  # type: ignore[assignment]


class Wide(TorchFunctionMode):
    """`with Wide():` what a model casts to float32 (for stability in low precision) stays float64, in eager and in
    capture.

    transformers' norms and losses do so; without this a float64 comparison would see float32 noise. Tensors that are
    made without a dtype are float64 too: a mask filled with float32's least number among float64 scores is an error in
    some models."""

    _lock, _inside, _default = threading.Lock(), 0, torch.float32  # threads share the default dtype, and not the mode

    def __enter__(self) -> Any:
        with Wide._lock:
            if not Wide._inside:
                Wide._default = torch.get_default_dtype()
                torch.set_default_dtype(torch.float64)
            Wide._inside += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        with Wide._lock:
            Wide._inside -= 1
            if not Wide._inside:
                torch.set_default_dtype(Wide._default)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_strided:  # export copies constants with it, dtype by dtype
            return func(*args, **(kwargs or {}))
        args = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **named)


# --- a GPT of ordinary PyTorch ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.fc = nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(h, dim=2)
        q, k, v = (t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.proj(y.transpose(1, 2).contiguous().view(b, s, h)))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    """nanoGPT: learned positions, fused qkv, head tied to the embedding; returns (logits, loss)."""

    def __init__(self, vocab: int, seq: int, hidden: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100), logits


def gpt(dtype: torch.dtype = torch.float64, dropout: float = 0.0, layers: int = 2) -> Built:
    model = GPT(VOCAB, SEQ, HIDDEN, HEADS, layers, dropout)
    return ready(model, dtype), {"ids": tokens(), "targets": labels()}


# --- transformers -----------------------------------------------------------------------------------------------------


def llama(dtype: torch.dtype = torch.float64, layers: int = 2) -> Built:
    """Grouped-query attention: 8 heads, 4 key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    return ready(LlamaForCausalLM(config), dtype), {"input_ids": tokens(), "labels": labels()}


def gpt2(dtype: torch.dtype = torch.float64, dropout: float = 0.0, layers: int = 2) -> Built:
    """Conv1D weights lie transposed; the head is tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
    )
    return ready(GPT2LMHeadModel(config), dtype), {"input_ids": tokens(), "labels": labels()}


def bert(dtype: torch.dtype = torch.float64, dropout: float = 0.0, layers: int = 2) -> Built:
    """Masked language model: tied decoder, padding in the attention mask."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    for i in range(BATCH):
        mask[i, SEQ - i :] = 0
    return ready(BertForMaskedLM(config), dtype), {"input_ids": tokens(), "attention_mask": mask, "labels": labels()}


def t5(dtype: torch.dtype = torch.float64, dropout: float = 0.0, layers: int = 2) -> Built:
    """Encoder and decoder with cross attention, relative position biases shared by the
    layers, three tied embeddings.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=4 * HIDDEN,
        num_layers=layers,
        num_heads=HEADS,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return ready(T5ForConditionalGeneration(config), dtype), {"input_ids": tokens(), "labels": labels()}


# --- others -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """In-place activations and sums, and buffers that every step updates."""

    def __init__(self, channels: int = 8, classes: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(Residual(channels), Residual(channels))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.stem(x)), inplace=True), 2)
        return F.cross_entropy(self.fc(torch.flatten(self.pool(self.blocks(x)), 1)), y)


def resnet_bn(dtype: torch.dtype = torch.float64) -> Built:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return ready(ResNet(), dtype), {"x": x, "y": torch.randint(0, 12, (BATCH,), generator=generator)}


class MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, HIDDEN), nn.Linear(HIDDEN, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.drop(F.relu(self.up(x)))), y)


def mlp(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Built:
    """A batch given as a tuple."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(BATCH, n, generator=generator, dtype=torch.float64).to(dtype) for n in (16, 8))
    return ready(MLP(dropout), dtype), (x, y)


class MoE(nn.Module):
    """Every expert sees every token, weighted by the router: einsums over an experts' dim, no control flow."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(experts, 2 * HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        weights = self.router(x).softmax(-1)
        y = F.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        x = x + torch.einsum("bsef,efh,bse->bsh", y, self.down, weights)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def moe(dtype: torch.dtype = torch.float64) -> Built:
    return ready(MoE(), dtype), {"ids": tokens(), "targets": labels()}


ALL: dict[str, Callable[..., Built]] = {
    "gpt": gpt,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "resnet_bn": resnet_bn,
    "mlp": mlp,
    "moe": moe,
}
