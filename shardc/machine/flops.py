"""Count an op's floating-point operations and memory traffic, including ops that torch does not count.

`op_of` puts everything that a device's seconds depend on into one record. A compiler pass (for a line of a graph), a
dry run and a real step (for a call) get the same `Op`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.machine.work import Op
from shardc.torch_private import pytree

aten = torch.ops.aten


def op_of(func: Any, args: Any, kwargs: Any, result: Any) -> Op | None:
    """Return what a call computes and moves; None if it moves no memory."""
    if (moved := moved_by(func, args, kwargs, result)) is None:
        return None
    operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    floating = [x.dtype for x in (*operands, *results) if x.dtype.is_floating_point]
    dtype, name = floating[0] if floating else results[0].dtype, func._schema.name.removeprefix("aten::")
    op = Op(flops_of(func, args, kwargs, result), sum(n for _, n in moved), _name_of(dtype), name=name)
    if not op.flops:
        return op
    attention = func in _ATTENTION
    scales = [x for x in floating if x is torch.float8_e8m0fnu]  # block scales
    return op._replace(
        dtype=_name_of(scales[0] if scales else dtype),
        shape=tuple(map(int, results[0].shape)),
        matrices=matrices_of(func, args, result),
        aligned=aligned_of(func, args, result),
        attention=attention,
        masked=int(op.flops * masked_share(func, args, kwargs)) if attention else 0,
    )


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, again: bool = True) -> int:
    """Return the flops of a call's products, or 0. again: with the scores that attention recomputes."""
    if op in _ATTENTION:
        at, products = _ATTENTION[op]
        return (products - (at and not again)) * attention_flops(*(x.shape for x in args[at : at + 3])) // 2
    if op.overloadpacket in _UNCOUNTED:  # not counted by torch: rows by a matrix, or by group each pair of rows
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    if op is aten.convolution_backward.default:  # torch's count of the weight's gradient ignores groups
        grad, x, weight = args[:3]
        places = x if args[7] else grad  # args[7]: transposed
        return 2 * int(weight.numel()) * int(places.numel() // places.shape[1]) * int(sum(args[10][:2]))
    from torch.utils.flop_counter import flop_registry  # here: it imports triton

    count = flop_registry.get(op.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


#: For each attention op: the index of `is_causal` among the arguments. Kernels compute blocks of BLOCK rows and
#: columns, and skip those that the mask empties.
_CAUSAL = {
    aten._scaled_dot_product_flash_attention.default: 4,
    aten._scaled_dot_product_efficient_attention.default: 6,
    aten._scaled_dot_product_cudnn_attention.default: 6,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
    aten._scaled_dot_product_flash_attention_backward.default: 11,
    aten._scaled_dot_product_efficient_attention_backward.default: 11,
}
BLOCK = 128


def masked_share(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the share of attention's flops that a kernel skips, as `is_causal` empties their blocks.

    A mask tensor is not considered: kernels do not skip its blocks either.
    """
    at = _CAUSAL[op]
    if not (args[at] if len(args) > at else kwargs.get("is_causal", False)):
        return 0.0
    first = 1 if "backward" in op.overloadpacket.__name__ else 0
    rows, columns = (math.ceil(int(x.shape[-2]) / BLOCK) for x in args[first : first + 2])
    return 1 - sum(min(i + 1, columns) for i in range(rows)) / (rows * columns)


def matrices_of(op: Any, args: Sequence[Any], result: Any) -> tuple[int, int, int] | tuple[()]:
    """Return (count, rows, columns) of the results of an op's products of matrices; () for other ops.

    A convolution is one product over all positions. Grouped products count as equal. For attention: each head's scores.
    """
    if op in _ATTENTION:
        q, k, _ = args[_ATTENTION[op][0] : _ATTENTION[op][0] + 3]
        return math.prod(q.shape[:-2]), int(q.shape[-2]), int(k.shape[-2])
    x = result[0] if isinstance(result, (tuple, list)) else result
    if op.overloadpacket in _GROUPED and x.dim() == 2:
        count = int(args[1].shape[0])
        return count, -(-int(x.shape[0]) // count), int(x.shape[1])
    if op.overloadpacket in _PRODUCTS:
        return math.prod(x.shape[:-2]), int(x.shape[-2]), int(x.shape[-1])
    if op.overloadpacket in _CONVOLUTIONS and x.dim() > 2:
        return 1, x.numel() // x.shape[1], int(x.shape[1])
    return ()


def aligned_of(op: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes (a power of 2, 16 at most) that divide every row pitch of a product; else 16."""
    if op.overloadpacket not in _PRODUCTS:
        return WORD
    tensors = [x for x in pytree.tree_leaves((args, result)) if isinstance(x, Tensor) and x.dim() > 1]
    return math.gcd(WORD, *(_pitch(x) * x.element_size() for x in tensors))


#: Bytes that a GPU's units of products read at once.
WORD = 16


def _pitch(x: Tensor) -> int:
    """Return the elements between a matrix's rows (columns, if it is transposed); 0 if it has just one."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    if rows == 1 or columns == 1:
        return 0
    return int(down if across == 1 else across)


#: Grouped products: each group's rows by its matrix; or, for two matrices, one product per group.
_GROUPED = {aten._grouped_mm}
_UNCOUNTED = {aten._scaled_mm_v2, *_GROUPED}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm, *_UNCOUNTED}
_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten._slow_conv2d_forward}

#: Ops that only allocate memory or return their operand's: a GPU runs nothing for them.
_MOVES_NOTHING = {
    aten._unsafe_view.default,
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}


def moved_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[tuple[Tensor, int]] | None:
    """Return the tensors that a call reads and writes, each with its bytes.

    None for views, allocations and ops without tensors.
    """
    if op.is_view or op in _MOVES_NOTHING:
        return None
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    if not results:
        return None
    packet = op.overloadpacket
    if packet in _PICK:  # of the first operand only the picked part
        index = [x for x in pytree.tree_leaves(args[1:]) if isinstance(x, Tensor)]
        return [*((x, 2 * _bytes(x)) for x in results), *((x, _bytes(x)) for x in index)]
    rest = {k: x for k, x in kwargs.items() if k != "out"}
    skipped = args[_OF_CLASSES[packet]] if packet in _OF_CLASSES else None
    operands = pytree.tree_leaves((args[int(packet in _WRITTEN) :], rest))
    read = [x for x in operands if isinstance(x, Tensor) and x is not skipped]
    return [(x, _bytes(x)) for x in (*results, *read)]


def _bytes(x: Tensor) -> int:
    """Return the bytes that are moved: for an expanded tensor, those that it has in memory."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


#: Ops that read only the picked part of their first operand.
_PICK = {
    *(aten.embedding, aten.index_select, aten.index, aten.gather, aten.take, aten.take_along_dim, aten.slice_copy),
    *(aten.select_copy, aten._unsafe_index),
}
#: Ops that write their first operand or use its shape, and do not read it.
_WRITTEN = {
    *(aten.copy_, aten.zero_, aten.fill_, aten.normal_, aten.uniform_, aten.zeros_like, aten.ones_like),
    *(aten.full_like, aten.new_zeros, aten.new_full, aten.new_ones),
}
#: Classification losses: the operand with a number per class, of which they read at most one per row.
_OF_CLASSES = {
    aten.nll_loss_forward: 0,
    aten.nll_loss2d_forward: 0,
    aten.nll_loss_backward: 1,
    aten.nll_loss2d_backward: 1,
}


def attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    """Return the flops of forward's two products, [.., s, d] by [.., d, t] and [.., s, t] by [.., t, e]."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


#: Attention: the index of q among the arguments, and the number of products (backward recomputes the scores).
#: torch's own counts need as many heads of keys as of queries; kernels do not.
_ATTENTION = {op: (1, 5) if "backward" in op.overloadpacket.__name__ else (0, 2) for op in _CAUSAL}
