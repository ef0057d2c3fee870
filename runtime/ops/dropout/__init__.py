"""Compute dropout by hashing a key and each element's *global* index (shardc.runtime.rng).

`torch.ops.shardc.dropout` runs in forward and backward (dropout is linear: its gradient is the same op on the
gradient). It saves no mask: backward computes the numbers again, which on a GPU costs nothing besides reading the
gradient. There it is one kernel (kernel.py); elsewhere the form below, to which the kernel is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.ops.with_backward import with_backward
from shardc.runtime.rng import BLOCK, Digits, Paddings, Rng, bits, key_of, threshold

torch.library.define(
    "shardc::dropout",
    "(Tensor x, Tensor words, Tensor rows, Tensor columns, int stream, float p) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def by_blocks(x: Tensor, words: Tensor, rows: Tensor, columns: Tensor, stream: int, p: float) -> Tensor:
    """Scale kept elements by 1 / (1 - p), zero the others; contiguous. In blocks that fit a CPU's cache.

    words: i64[3], of Rng.words; rows, columns: of rng.row_and_column_offsets, i32, or i64 where the global tensor has
    2^31 elements or more. stream: the op's ordinal.
    """
    k = key_of(words.tolist(), stream)
    x = x.contiguous()
    out = torch.empty_like(x)
    source, target, limit, scale = x.view(-1), out.view(-1), threshold(p), 1 / (1 - p)
    width = len(columns)
    height = max(BLOCK // max(width, 1), 1)
    for top in range(0, len(rows), height):
        block = slice(top * width, min((top + height) * width, len(source)))
        indices = (rows[top : top + height, None] + columns).view(-1)[: block.stop - block.start]
        torch.mul(source[block], bits(k, indices) < limit, out=target[block]).mul_(scale)
    return out


def by_kernel(x: Tensor, words: Tensor, rows: Tensor, columns: Tensor, stream: int, p: float) -> Tensor:
    """Run the GPU kernel of `by_blocks`. Raises ShardcError without Triton (it comes with torch for CUDA)."""
    try:
        from shardc.runtime.ops.dropout import kernel as dropout_kernel
    except ModuleNotFoundError as e:
        fault = "dropout on a GPU is a Triton kernel, and Triton is not installed"
        fix = "pip install triton, of the version that this torch names"
        raise ShardcError(fault, where=f"dropout {stream}", fix=fix) from e
    return dropout_kernel.launch(x, words, rows, columns, stream, p)


torch.library.impl("shardc::dropout", "CompositeExplicitAutograd", by_blocks)
torch.library.impl("shardc::dropout", "CUDA", by_kernel)


@torch.library.register_fake("shardc::dropout")  # type: ignore[untyped-decorator]
def _(x: Tensor, words: Tensor, rows: Tensor, columns: Tensor, stream: int, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dropped(x: Tensor, *where: Any) -> Tensor:
    """Run `torch.ops.shardc.dropout` with its gradient. where: words, rows, columns, stream, p."""
    # `where` is not saved as tensors, so that a recomputed region need not compute it again
    result: Tensor = with_backward(
        lambda x: (torch.ops.shardc.dropout(x, *where), ()), lambda needs, g: (dropped(g, *where),), x, once=False
    )
    return result


def dropout(
    x: Tensor,
    p: float,
    rng: Rng | None,
    index: int,
    mesh: Any = None,
    shape: Sequence[int] | None = None,
    digits: Digits = (),
    paddings: Paddings = (),
) -> Tensor:
    """Zero each element with probability p, scale the others by 1 / (1 - p); identity when not training.

    index: ordinal of this dropout in the graph. shape: the *global* shape (default: x's own); digits, paddings: which
    elements of that shape x holds. Saves nothing for backward.
    """
    if rng is None or not rng.training or p == 0:
        return x
    if p == 1:
        return x * 0
    where = rng.row_and_column_offsets(x.shape if shape is None else shape, digits, mesh, x.device, paddings)
    return dropped(x, rng.words(x.device), *where, index, p)
