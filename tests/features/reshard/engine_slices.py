"""What engines keep, written again from their loaders with torch's own chunk, narrow and cat: vLLM's
model_executor/layers/linear.py (weight_loader), vocab_parallel_embedding.py and fused_moe/layer.py, and transformers'
distributed/tensor_parallel.py. No box of shardc's is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def vllm(model: nn.Module, tp: int, rank: int, *, ep: bool = False) -> dict[str, Tensor]:
    """The tensors of a rank of vLLM, by its names."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    kv: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    state, made = own(model), dict[str, Tensor]()

    def column(x: Tensor) -> Tensor:
        return x.chunk(tp, 0)[rank]

    def heads(x: Tensor, total: int) -> Tensor:
        if tp <= total:
            return x.chunk(tp, 0)[rank]
        return x.chunk(total, 0)[rank // (tp // total)]

    for name, x in state.items():
        parent, _, last = name.rpartition(".")
        above, _, module = parent.rpartition(".")
        dot = f"{above}." if above else ""
        if module == "experts" and last == "gate_up_proj":
            gate, up = x.chunk(2, 1)
            parts = torch.cat([gate.chunk(tp, 1)[rank], up.chunk(tp, 1)[rank]], 1)
            made[f"{parent}.w13_weight"] = x.chunk(tp, 0)[rank] if ep else parts
        elif module == "experts" and last == "down_proj":
            made[f"{parent}.w2_weight"] = x.chunk(tp, 0)[rank] if ep else x.chunk(tp, 2)[rank]
        elif module in ("k_proj", "v_proj", "up_proj"):
            assert any(f"{dot}{m}.{last}" in state for m in ("q_proj", "gate_proj"))
        elif module == "q_proj" and f"{dot}k_proj.{last}" in state:
            k, v = state[f"{dot}k_proj.{last}"], state[f"{dot}v_proj.{last}"]
            made[f"{dot}qkv_proj.{last}"] = torch.cat([column(x), heads(k, kv), heads(v, kv)])
        elif module == "gate_proj":
            made[f"{dot}gate_up_proj.{last}"] = torch.cat([column(x), column(state[f"{dot}up_proj.{last}"])])
        elif module == "gate_up_proj":
            made[name] = torch.cat([part.chunk(tp, 0)[rank] for part in x.chunk(2, 0)])
        elif module == "kv_a_proj_with_mqa" and f"{dot}q_a_proj.{last}" in state:
            made[f"{dot}fused_qkv_a_proj.{last}"] = torch.cat([state[f"{dot}q_a_proj.{last}"], x])
        elif module == "q_a_proj":
            pass
        elif module in ("q_proj", "q_b_proj", "kv_b_proj", "fc1"):
            made[name] = column(x)
        elif module in ("o_proj", "out_proj", "down_proj", "fc2"):
            made[name] = x.chunk(tp, 1)[rank] if last == "weight" else x
        elif module in ("embed_tokens", "lm_head"):
            padded = torch.cat([x, x.new_zeros(-len(x) % 64, *x.shape[1:])])
            made[name] = padded.chunk(tp, 0)[rank]
        else:
            made[name] = x
    return made


def transformers(model: Any, tp: int, rank: int) -> dict[str, Tensor]:
    """The tensors of a rank of transformers with `tp_plan="auto"`, by its names."""
    made = {}
    for name, x in own(model).items():
        module, _, last = name.rpartition(".")
        words = [w for of in (module, name) for p, w in model.tp_plan.items() if _fits(p, of)]  # a parameter's own wins
        word = words[-1] if words else ""
        if word in ("colwise", "colwise_rep", "colwise_gather_output"):
            made[name] = _chunk(x, tp, max(0, x.dim() - 2), rank)
        elif word in ("rowwise", "rowwise_rep", "rowwise_split_input"):
            made[name] = x if last == "bias" else _chunk(x, tp, x.dim() - 1, rank)
        elif word == "embedding_rowwise":
            made[name] = _chunk(x, tp, 0, rank)
        elif word == "packed_colwise" and x.dim() > 1:
            dim = x.dim() - 2
            made[name] = torch.cat([_chunk(part, tp, dim, rank) for part in x.chunk(2, dim)], dim)
        elif word == "packed_rowwise" and x.dim() > 1:
            made[name] = torch.cat([_chunk(part, tp, -1, rank) for part in x.chunk(2, -1)], -1)
        elif word == "packed_colwise":
            made[name] = _chunk(x, tp, 0, rank)
        else:
            assert word in ("", "moe_tp_experts", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce"), word
            made[name] = x
    return made


def own(model: nn.Module) -> dict[str, Tensor]:
    """A model's numbers, each under its first name."""
    kept, seen = model.state_dict(keep_vars=True), set[int]()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        n: x.detach()
        for n, x in named
        if n in kept and x.is_floating_point() and not (id(x) in seen or seen.add(id(x)))
    }  # type: ignore[func-returns-value]


def _chunk(x: Tensor, tp: int, dim: int, rank: int) -> Tensor:
    pieces = x.chunk(tp, dim)
    return pieces[rank] if rank < len(pieces) else x.narrow(dim, 0, 0)


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def equal(made: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and each the same to the bit."""
    assert made.keys() == expected.keys(), sorted(made.keys() ^ expected.keys())
    off = [n for n, x in expected.items() if made[n].shape != x.shape or not torch.equal(made[n], x.to(made[n].dtype))]
    assert not off, off
