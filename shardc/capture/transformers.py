"""Patch the transformers library during capture: experts as one op, no cache, few masks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor, nn

from shardc.capture.constants import constant
from shardc.errors import ShardcError
from shardc.nn import experts
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor


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
    of GPUs). "eager", the default, is a Python loop over experts (shardc.capture.expert_loops).
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
def lean_transformers(model: nn.Module) -> Iterator[None]:
    """Make transformers models build no cache and only the masks they need, inside the block.

    transformers writes dense [batch, 1, seq, seq] masks when it is exported, because an exported graph may run on other
    values. Ours runs only at these shapes, so a mask that depends on shapes alone may stay `is_causal`, as in eager
    mode. That also leaves grouped-query heads to the attention op. Does nothing if transformers is not imported.
    """
    masking: ModuleType | None = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
        cached = [c for c in configs if getattr(c, "use_cache", None) is True]
        for config in cached:
            stack.enter_context(mock.patch.object(config, "use_cache", False))
        if masking is not None:
            packed = masking.find_packed_sequence_indices
            # a model with a cache does not search for packed sequences; checkpointing turns its cache off
            looks = not cached or any(getattr(m, "gradient_checkpointing", False) for m in model.modules())

            def find_packed_sequence_indices(position_ids: Tensor) -> Any:
                if not looks:
                    return None
                known = constant(position_ids)
                return packed(position_ids) if known is None or untraced(packed, known) is not None else None

            filled = masking.prepare_padding_mask

            def prepare_padding_mask(mask: Any, kv_length: int, kv_offset: Any) -> Any:
                """Return the mask as it is if key positions are a tensor (a cache): it has all keys."""
                return mask if isinstance(kv_offset, Tensor) else filled(mask, kv_length, kv_offset)

            stack.enter_context(mock.patch.object(masking, "prepare_padding_mask", prepare_padding_mask))
            if hasattr(masking, "is_torchdynamo_exporting"):  # earlier versions call only is_tracing
                stack.enter_context(mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False))
            # true only for tensors whose values are unknown
            stack.enter_context(mock.patch.object(masking, "is_tracing", lambda x=None: isinstance(x, FakeTensor)))
            stack.enter_context(
                mock.patch.object(masking, "find_packed_sequence_indices", find_packed_sequence_indices)
            )
        yield
