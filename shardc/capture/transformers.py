"""Patch the transformers library during capture: experts as one op, attention sinks, no cache, few masks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.capture.constants import constant
from shardc.errors import ShardcError
from shardc.nn import experts
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor

Attention = Callable[..., tuple[Tensor, Any]]
DIMS = 8


@contextmanager
def replaced_interface(module: str, name: str, replace: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let an interface of transformers return `replace(chosen, default)` inside the block.

    The library chooses implementations by name. Does nothing if transformers is not imported, or is older than its
    interface.
    """
    interface = getattr(sys.modules.get(f"transformers.{module}"), name, None)
    if (original := getattr(interface, "get_interface", None)) is None:
        yield
        return

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        return replace(original(self, implementation, default), default)

    with mock.patch.object(interface, "get_interface", get_interface):
        yield


def as_one_op() -> AbstractContextManager[None]:
    """Make layers of experts call `shardc.nn.experts` inside the block.

    This replaces all implementations that compute every expert's products at once ("grouped_mm", "batched_mm", kernels
    of GPUs). "eager", the default, is a Python loop over experts (shardc.capture.masked_rows.experts).
    """
    return replaced_interface(
        "integrations.moe",
        "ExpertsInterface",
        lambda chosen, default: chosen if chosen is default else partial(_forward, chosen),
    )


def _forward(chosen: Callable[..., Any], module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """Compute what transformers' implementations do, as one op; call the chosen one if the op cannot."""
    block: Any = module
    up, act = ("gate_up_proj", block._apply_gate) if block.has_gate else ("up_proj", block.act_fn)
    bias = (getattr(block, f"{up}_bias"), block.down_proj_bias) if block.has_bias else (None, None)
    if getattr(block, "has_post_expert_norm", False):  # earlier versions have no such norm
        return chosen(module, x, index, weights)
    try:
        return experts(
            x,
            index,
            weights,
            getattr(block, up),
            block.down_proj,
            activation=act,
            up_bias=bias[0],
            down_bias=bias[1],
            transposed=block.is_transposed,
        )
    except ShardcError:  # an activation with parameters, or matrices of another form
        return chosen(module, x, index, weights)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn off the caches of transformers models inside the block: a step needs none.

    With one, the library does not look for positions that restart, and packed sequences attend to one another.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
    with ExitStack() as stack:
        for config in configs:
            if getattr(config, "use_cache", None) is True:
                stack.enter_context(mock.patch.object(config, "use_cache", False))
        yield


@contextmanager
def few_masks() -> Iterator[None]:
    """Make transformers models build only the masks they need, inside the block.

    transformers writes dense [batch, 1, seq, seq] masks when it is exported, because an exported graph may run on other
    values. Ours runs only at these shapes, so a mask that depends on shapes alone may stay `is_causal`, as in eager
    mode. That also leaves grouped-query heads to the attention op. Does nothing if transformers is not imported.
    """
    masking: ModuleType | None = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    packed, filled = masking.find_packed_sequence_indices, masking.prepare_padding_mask

    def find_packed_sequence_indices(position_ids: Tensor) -> Any:
        known = constant(position_ids)
        return packed(position_ids) if known is None or untraced(packed, known) is not None else None

    def prepare_padding_mask(mask: Any, kv_length: int, kv_offset: Any) -> Any:
        """Return the mask as it is if key positions are a tensor (a cache): it has all keys."""
        return mask if isinstance(kv_offset, Tensor) else filled(mask, kv_length, kv_offset)

    patches: dict[str, Any] = {
        "prepare_padding_mask": prepare_padding_mask,
        "find_packed_sequence_indices": find_packed_sequence_indices,
        # true only for tensors whose values are unknown
        "is_tracing": lambda x=None: isinstance(x, FakeTensor),
    }
    if hasattr(masking, "is_torchdynamo_exporting"):  # earlier versions call only is_tracing
        patches["is_torchdynamo_exporting"] = lambda: False
    with mock.patch.multiple(masking, **patches):
        yield


# --- attention sinks --------------------------------------------------------------------------------------------------


def as_one_more_key(*, written_out: bool) -> AbstractContextManager[None]:
    """Compute attention with sinks, as in GPT-OSS, by torch's attention with one more key, inside the block.

        weights = softmax(cat([q k^T * scale + mask, sink]))[..., :-1];   weights v
        ->   attention([q, sink], [[k, 0], [0, 1 / scale]], [v; 0], [mask, visible], scale)

    So no one stores all scores. A sink is a score of each head that is in the sum of the softmax, and has no value. So
    it is the score of a key whose value is 0: queries have one more dim, which contains the sink, and in which only
    that key has 1 / scale. torch's fused kernels then compute it, with any mask and window; heads, rows and grouped
    queries are split as in any attention. The dims are padded to a multiple of 8, which those kernels need.

    transformers writes it out ("eager"), or takes FlexAttention's log-sum-exps, which it does not have on a CPU. Here
    nothing has to be computed, so FlexAttention's is replaced, and, if `written_out`, the one in torch's ops. Does
    nothing if transformers has none.
    """
    flex, masks = sys.modules.get("transformers.integrations.flex_attention"), dict[tuple[int, ...], Any]()

    def replace(chosen: Attention, default: Attention) -> Attention:
        if chosen is getattr(flex, "flex_attention_forward", None):
            return partial(_flex, chosen, masks)
        return partial(_fused, chosen) if written_out and chosen is default and _is_known(chosen) else chosen

    return replaced_interface("modeling_utils", "AttentionInterface", replace)


def _is_known(attention: Attention) -> bool:
    """Return whether it has the same bytecode as GPT-OSS's function."""
    known = getattr(sys.modules.get("transformers.models.gpt_oss.modeling_gpt_oss"), "eager_attention_forward", None)
    ours, theirs = getattr(attention, "__code__", None), getattr(known, "__code__", None)
    return (
        ours is not None and theirs is not None and ours.co_code == theirs.co_code and ours.co_names == theirs.co_names
    )


def _fused(chosen: Attention, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """Compute written-out attention by torch's op; call the model's if it drops or returns weights."""
    if options.get("dropout") or options.get("output_attentions") or not isinstance(mask, Tensor | None):
        return chosen(module, q, k, v, mask, **options)
    scale = options["scaling"]
    q, k, v = with_one_more_key(q, k, v, module.sinks, scale)  # type: ignore[arg-type]
    if mask is not None:
        mask = F.pad(mask[..., : k.shape[2] - 1], (0, 1), value=mask.dtype == torch.bool)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous(), None


def _flex(
    chosen: Attention,
    masks: dict[tuple[int, ...], Any],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    **options: Any,
) -> Any:
    """Call FlexAttention with a mask that shows the additional key.

    masks: (id of the block mask, sizes) -> the block mask and the new one, which layers share.
    """
    sinks = options.get("s_aux")
    if sinks is None or options.get("softcap") is not None or isinstance(mask, Tensor):
        return chosen(module, q, k, v, mask, **options)
    scale = options.pop("scaling", None) or q.shape[-1] ** -0.5
    if mask is not None:
        key = id(mask), q.shape[2], k.shape[2]
        if key not in masks:
            masks[key] = mask, _with_one_more_key(mask, q, k)
        mask = masks[key][1]
    return chosen(
        module, *with_one_more_key(q, k, v, sinks, scale), mask, **{**options, "s_aux": None, "scaling": scale}
    )


def _with_one_more_key(mask: Any, q: Tensor, k: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask  # at call time, as it may be patched

    shown, keys = mask.mask_mod, k.shape[2]

    def shows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen: Tensor = shown(b, h, i, j.clamp(max=keys - 1))
        return seen | (j >= keys)

    return create_block_mask(shows, mask.shape[0], None, q.shape[2], keys + 1, device=q.device)


def with_one_more_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands of an attention that computes attention with sinks.

    q: f[b, h, s, d]. k: f[b, g, t, d], v: f[b, g, t, e], of h / g heads each. sinks: f[h]. Returns f[b, h, s, d + 8],
    f[b, g, t + 1, d + 8], f[b, g, t + 1, e].
    """
    b, h, s, d = q.shape
    sink = sinks.to(q.dtype).reshape(1, h, 1, 1).expand(b, h, s, 1)
    last = F.pad(k.new_full((b, k.shape[1], 1, 1), 1 / scale), (d, DIMS - 1))
    queries = torch.cat([q, F.pad(sink, (0, DIMS - 1))], -1)
    return queries, torch.cat([F.pad(k, (0, DIMS)), last], 2), F.pad(v, (0, 0, 0, 1))
