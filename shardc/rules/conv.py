"""Rules of convolutions and pooling: batch and channels may be split, space stays whole.

Parts of space would need the edges of their neighbours.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.rules.core.along_split_dim import local_conv1d, of_conv1d
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import bias_or_not, names_of, whole_names
from shardc.runtime import ops

aten = torch.ops.aten


def _transposed(call: Call) -> bool:
    return bool(call.arg("transposed")) if call.target is aten.convolution.default else "transpose" in str(call.target)


def convolution(call: Call) -> Signature:
    """Split batch and channels: x[b, (g i), ...], w[(g o), i, ...] (transposed [(g i), o, ...]) -> y[b, (g o), ...]."""
    x, w, y = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    groups = call.arg("groups")
    space, batched = len(w) - 2, int(len(x) == len(w))
    lead, into, out = ["b"] * batched, "i+", "o"
    if groups > 1:  # depthwise: the dim is one factor, which may be split in sections
        depthwise = groups == x[batched] == y[batched]
        into, out = ("g", "g") if depthwise else ("g i+", "g o")
    weight = [into, "o"] if _transposed(call) else [out, "i+"]

    def at(prefix: str) -> list[str]:
        return [f"{prefix}{d}!" for d in range(space)]

    ins = [[*lead, into, *at("x")], [*weight, *at("k")], *[[out]] * (len(call.operands) - 2)]
    return call.fit(ins, [[*lead, out, *at("y")]], **({"g": groups} if groups > 1 else {}))


def local_groups(call: LocalCall) -> fx.Node:
    """Set the op's groups to those of a rank, padding included."""
    x, w = call.out_shape if _transposed(call.call) else call.local(0), call.local(1)
    return call.same(groups=x[len(x) - len(w) + 1] // w[1])


def _flops(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * math.prod(call.operands[1].shape[1:])


rules(
    "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input",
    convolution,
    linear=bias_or_not,
    added=(2,),
    flops=_flops,
    local=local_groups,
)
rule(ops.conv1d, convolution, linear=bias_or_not, added=(2,), flops=_flops, local=local_conv1d, extra=of_conv1d)


def pooled(call: Call) -> Signature:
    """Keep space whole on both sides; split the dims before it."""
    x, y = len(call.operands[0].shape), len(call.results[0].shape)
    lead = max(x - (1 if "1d" in str(call.target) else 2 if "2d" in str(call.target) else 3), 0)
    names = names_of(x, range(lead, x))
    out = [*names[:lead], *(f"o{i}!" for i in range(lead, y))]
    return call.fit([names], [out for _ in call.results])


rules(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    pooled,
)
rules(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_linear1d.vec "
    "upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec _upsample_bilinear2d_aa.vec "
    "_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    pooled,
    linear="0",
)


def unpooled(call: Call) -> Signature:
    """Split the dims before space in the gradient of an average pool: grad[n, c, ...], x[n, c, ...] -> x."""
    lead = len(call.operands[1].shape) - (2 if "2d" in str(call.target) else 3)
    grad, x = ([*names_of(lead), *whole_names(v, mark)[lead:]] for v, mark in zip(call.operands, "gx", strict=True))
    return call.fit([grad, x], [x])


rules(
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    unpooled,
    linear="0",
)


def fractional(call: Call) -> Signature:
    """Keep space whole: x[n, c, ...], places[n or 1, c, 2 or 3] -> [n, c, ...], twice."""
    x, places = call.operands
    space = places.shape[-1]
    names, out = whole_names(x, "d"), whole_names(call.results[0], "o")
    names[:-space] = out[:-space] = names_of(len(x.shape) - space)
    first = names[0] if len(x.shape) == space + 2 else ""
    return call.fit([names, [first, names[-space - 1], "place!"]], [out for _ in call.results])


rules("fractional_max_pool2d fractional_max_pool3d", fractional)


def sampled(call: Call) -> Signature:
    """Split images n and channels c of grid_sampler: x[n, c, ...], grid[n, ..., 2] -> [n, c, ...]."""
    read, pixels = whole_names(call.operands[0], "x")[2:], [f"y{i}" for i in range(2, len(call.results[0].shape))]
    return call.fit([["n", "c", *read], ["n", *pixels, "pair!"]], [["n", "c", *pixels]])


rules("grid_sampler grid_sampler_2d grid_sampler_3d", sampled, linear="0")


def windows(call: Call) -> Signature:
    """Split n and c: im2col x[n, c, h, w] -> [n, (c k), l]; col2im is the reverse. n may be missing."""
    x, y = len(call.operands[0].shape), len(call.results[0].shape)
    image, columns = "... c h! w!", "... (c k!) l!"
    return call.fit(f"{image} -> {columns}" if x > y else f"{columns} -> {image}")


rules("im2col col2im", windows, linear="0")
