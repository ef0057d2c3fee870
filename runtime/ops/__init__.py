"""Define the ops that programs call by name, such as `ops.all_reduce(x, mesh, ('tp',), tag='x_sum')`.

These are conversions between placements, random numbers, experts, ZeRO's gathers, and ops whose local part is no torch
op. x is this rank's tensor, mesh the runtime mesh (shardc.runtime.mesh), axis / axes name mesh axes. tag: the graph
node's name, for the records.

convert           conversions between placements; shard_parts: cuts and joins shards; one_way: single directions of ops
                  that communicate, at once or started
cast_once         weights in the dtype of products, one copy a step
zero              the gathers of ZeRO 3, gradients for buckets; host_copy: copies that do not block
host_handle       values that are kept on the host from forward to backward, for backward graphs
random_ops        random numbers by global index; dropout: masks by global index
attention/        with dropout, or of a part of the queries: blocks; ring: also of a part of the keys; spans: which keys
                  rows see; held: which of them a rank has, and a mask shows
experts/          mixtures of experts
factors           which arguments of a product are its input, weight and bias
in_chunks         a linear layer and ops on its rows of classes, such as losses, in chunks of rows
along_split_dim   cumulative sums and convolutions along a split dim
extremum          the largest element along split dims
softmax_parts     a softmax's normaliser over split dims
local_math        losses on split classes, look-ups in a part of a table
with_backward     ops with a custom backward: pairs of functions, and the autograd.Function that runs them
opaque            an op with its backward as one op, for backward graphs
by_storage        values for memory that tensors share
torch_library     torch ops that a captured graph cannot hold

Optional features add theirs (`named`).
"""

from __future__ import annotations

from typing import Any

from shardc.optional import table
from shardc.runtime.ops.along_split_dim import conv1d, cumsum
from shardc.runtime.ops.attention import attention
from shardc.runtime.ops.attention.held import attention_reach
from shardc.runtime.ops.cast_once import cast_once
from shardc.runtime.ops.convert import (
    all_gather,
    all_gather_partial_grad,
    all_reduce,
    all_reduce_max,
    all_to_all,
    first_grad,
    partial_grad_to_partial,
    reduce_scatter,
    shard,
    shard_partial_grad,
    sum_grad,
    to_partial,
    unshard_partial,
)
from shardc.runtime.ops.dropout import dropout
from shardc.runtime.ops.experts.parallel import (
    experts_combine,
    experts_keep,
    experts_return,
    experts_route,
    experts_send,
)
from shardc.runtime.ops.experts.products import experts, experts_apply
from shardc.runtime.ops.extremum import extremum, ties, top
from shardc.runtime.ops.host_handle import offload_start, offload_wait, reload_start, reload_wait
from shardc.runtime.ops.in_chunks import in_chunks
from shardc.runtime.ops.local_math import (
    batch_stat,
    embedding_partial,
    fill_padding,
    gather_partial,
    nll,
    nll_join,
    nll_parts,
    nll_stats,
    nll_top,
    partial_mean,
    select_partial,
    summed,
    total,
)
from shardc.runtime.ops.one_way import start, transpose, transpose_start, wait
from shardc.runtime.ops.opaque import OPS, opaque, opaque_backward
from shardc.runtime.ops.random_ops import random
from shardc.runtime.ops.softmax_parts import largest, log_sum, sum_exp
from shardc.runtime.ops.zero import (
    accumulate,
    add_into,
    gather_start,
    gather_wait,
    launch,
    regather_start,
    regather_wait,
    scatter,
    updated,
)

#: Ops that only backward graphs call.
OF_GRAPHS = {
    *("add_into", "launch", "accumulate", "regather_start", "regather_wait", "scatter", "opaque", "opaque_backward"),
    *("start", "transpose", "transpose_start", "wait"),
    *("offload_start", "offload_wait", "reload_start", "reload_wait"),
}
__all__ = [
    "accumulate",
    "add_into",
    "all_gather",
    "all_gather_partial_grad",
    "all_reduce",
    "all_reduce_max",
    "all_to_all",
    "attention",
    "attention_reach",
    "batch_stat",
    "cast_once",
    "conv1d",
    "cumsum",
    "dropout",
    "embedding_partial",
    "experts",
    "experts_apply",
    "experts_combine",
    "experts_keep",
    "experts_return",
    "experts_route",
    "experts_send",
    "extremum",
    "fill_padding",
    "first_grad",
    "gather_partial",
    "gather_start",
    "gather_wait",
    "in_chunks",
    "largest",
    "launch",
    "log_sum",
    "nll",
    "nll_join",
    "nll_parts",
    "nll_stats",
    "nll_top",
    "offload_start",
    "offload_wait",
    "opaque",
    "opaque_backward",
    "partial_grad_to_partial",
    "partial_mean",
    "random",
    "reduce_scatter",
    "regather_start",
    "regather_wait",
    "reload_start",
    "reload_wait",
    "scatter",
    "select_partial",
    "shard",
    "shard_partial_grad",
    "start",
    "sum_exp",
    "sum_grad",
    "summed",
    "ties",
    "to_partial",
    "top",
    "total",
    "transpose",
    "transpose_start",
    "unshard_partial",
    "updated",
    "wait",
]
OPS.update((name, globals()[name]) for name in __all__ if name not in OF_GRAPHS)


def named(name: str, *, joint: bool) -> Any:
    """Return the op of a name, also of optional features; None if programs call none. joint: in a backward graph."""
    return globals()[name] if joint and name in OF_GRAPHS else OPS.get(name) or table("ops", "OPS").get(name)
