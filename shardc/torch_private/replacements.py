"""Replace functions of torch while a model is captured or initialised.

A model may have imported a function under any name, so the function that it calls in turn is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def replaced_trunc_normal(function: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Let `torch.nn.init.trunc_normal_` call `function(tensor, mean, std, a, b, generator=None)`.

    While open, in every thread. It is the only initialiser that reads its numbers, and no mode of torch sees it as a
    whole.
    """
    return mock.patch("torch.nn.init._no_grad_trunc_normal_", function)


def replaced_engine(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace the engine of torch.autograd's `grad` and `backward` while open, under any name.

    They call `function(original, outputs, weights, retain, create, inputs, allow_unused, ...)`.
    """
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    return mock.patch.object(torch.autograd, "_engine_run_backward", partial(function, original))


def plain_checkpoints() -> AbstractContextManager[Any]:
    """Let non-reentrant checkpoints just call their function: if nested, their trace would turn gradients off."""

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    later = f"{name}_impl"  # since torch 2.15
    return mock.patch.object(torch.utils.checkpoint, later if hasattr(torch.utils.checkpoint, later) else name, nothing)


def plain_indexing() -> AbstractContextManager[Any]:
    """Use an ordinary op to index masks of single positions that `torch.vmap` makes, while open.

    transformers makes such masks. Export would leave torch's op in the graph as a call of a Python object.
    """
    name = "torch._dynamo._trace_wrapped_higher_order_op.mod_index"
    return mock.patch(name, lambda x, indices: torch.ops.aten.index(x, indices))


def replaced_packing(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Let torch.nn.utils.rnn pack by `function(original, input, lengths, batch_first)`, while open."""
    original = torch._VF._pack_padded_sequence
    return mock.patch.object(torch._VF, "_pack_padded_sequence", partial(function, original), create=True)


@contextmanager
def replaced_flex_attention(function: Callable[..., Any] | None, *, blocks: bool) -> Iterator[None]:
    """Replace FlexAttention, compiled or not, by `function` while open.

    It calls `function(query, key, value, score_mod, block_mask, scale, options)`; the mask_mod is the last item of
    `block_mask`. None: torch's own definition, on any device, which autograd differentiates. blocks: whether
    `create_block_mask` reads values; otherwise all its blocks are present. A model may have imported `flex_attention`,
    so the names that it looks up are replaced.
    """
    from torch.nn.attention import flex_attention as flex  # imports torch._dynamo, as export does: a second

    eager = function is None
    if eager:
        from torch._higher_order_ops.flex_attention import math_attention as function

    def whole(blocks: Any, mask_mod: Any, sizes: tuple[int, int], q_block: int, kv_block: int) -> Any:
        (batch, heads, device), _ = blocks
        rows, columns = (-(-n // size) for n, size in zip(sizes, (q_block, kv_block), strict=True))
        many = torch.full((batch, heads, rows), columns, dtype=torch.int32, device=device)
        which = torch.arange(columns, dtype=torch.int32, device=device).expand(batch, heads, rows, columns)
        return flex.BlockMask.from_kv_blocks(
            many, which, BLOCK_SIZE=(q_block, kv_block), mask_mod=mask_mod, seq_lengths=sizes, compute_q_blocks=False
        )

    with ExitStack() as stack:
        if eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        replaced: dict[str, Any] = {
            "flex_attention_hop": function,
            "_validate_device": lambda *_: None,  # refuses gradients on a CPU
            "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # calls the op itself, not the result of torch.compile
        }
        if not blocks:
            replaced |= {
                "create_mask": lambda _, batch, heads, *sizes_and_device: (batch, heads, sizes_and_device[-1]),
                "_convert_mask_to_block_mask": lambda sizes, **_: (sizes, None),
                "_create_sparse_block_from_block_mask": whole,
            }
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(flex, name, replacement))
        yield
