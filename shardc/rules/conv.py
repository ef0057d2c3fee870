"""Rules of convolutions and pooling: batch and channels may be split, space stays whole.

Parts of space would need the edges of their neighbours.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from shardc.rules.core import along_split_dim
from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, LocalOf, rule
from shardc.rules.core.shared_signatures import bias_or_not
from shardc.runtime import ops

aten = torch.ops.aten


def convolution(call: Call, groups: int, transposed: bool = False) -> Signature:
    """Split batch and channels: x[b, (g i), ...], w[(g o), i, ...] -> y[b, (g o), ...].

    transposed: w[(g i), o, ...].
    """
    x, w, y = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    space = len(w) - 2
    lead: list[Dim] = [("b",)] if len(x) == space + 2 else []
    sizes = {"g": groups, "i": x[len(lead)] // groups, "o": y[len(lead)] // groups} | ({"b": x[0]} if lead else {})
    sizes |= {f"{k}{d}": s for k, shape in (("x", x), ("k", w), ("y", y)) for d, s in enumerate(shape[-space:])}
    whole = {f"{k}{d}" for k in "xky" for d in range(space)}
    group: Dim = ("g",) if groups > 1 else ()
    # depthwise: the dim is one factor, which may be split in sections
    into, out = (group, group) if groups > 1 and sizes["i"] == sizes["o"] == 1 else ((*group, "i"), (*group, "o"))
    channels: list[Dim] = [into, ("o",)] if transposed else [out, ("i",)]

    def at(prefix: str) -> list[Dim]:
        return [(f"{prefix}{d}",) for d in range(space)]

    ins: list[tuple[Dim, ...]] = [(*lead, into, *at("x")), (*channels, *at("k"))]
    if len(call.operands) > 2:
        ins.append((out,))
    outs = ((*lead, out, *at("y")),)
    used = {f for side in (*ins, *outs) for dim in side for f in dim}
    sizes = {f: n for f, n in sizes.items() if f in used}
    return Signature(tuple(ins), outs, sizes, frozenset({"i"} & used), frozenset(whole))


def conv(call: Call) -> Signature:
    return convolution(call, call.arg(6, "groups", 1))


def conv_ends(call: Call) -> Signature:
    return convolution(call, call.arg(5, "groups", 1))


def conv_general(call: Call) -> Signature:
    return convolution(call, call.arg(8, "groups", 1), bool(call.arg(6, "transposed", False)))


def conv_transpose(call: Call) -> Signature:
    return convolution(call, call.arg(6, "groups", 1), transposed=True)


def local_groups(position: int, transposed: int | None = None) -> LocalOf:
    """Return a `local` that sets the op's groups to those of a rank, padding included.

    transposed: position of that argument, if the op has it.
    """

    def local(call: LocalCall) -> fx.Node:
        x, w, y = call.call.operands[0].shape, call.call.operands[1].shape, call.call.results[0].shape
        backwards = (
            call.call.arg(transposed, "transposed") if transposed is not None else "transpose" in str(call.call.target)
        )
        wide = call.outputs[0].local_shape(y, call.mesh) if backwards else call.inputs[0].local_shape(x, call.mesh)
        groups = wide[len(x) - len(w) + 1] // call.inputs[1].local_shape(w, call.mesh)[1]
        return call.same(**{f"_{position}": groups} if len(call.args) > position else {"groups": groups})

    return local


def _flops(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * math.prod(call.operands[1].shape[1:])


for _op in (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
):
    rule(_op, conv, linear=bias_or_not, added=(2,), flops=_flops, local=local_groups(6))
rule(
    ops.conv1d,
    conv_ends,
    linear=bias_or_not,
    added=(2,),
    flops=_flops,
    local=along_split_dim.local_conv1d,
    extra=along_split_dim.of_conv1d,
)
rule(aten.convolution.default, conv_general, linear=bias_or_not, added=(2,), flops=_flops, local=local_groups(8, 6))
for _op in (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input):
    rule(_op, conv_transpose, linear=bias_or_not, added=(2,), flops=_flops, local=local_groups(6))


def pooled(call: Call) -> Signature:
    """Keep space whole on both sides; split the dims before it."""
    x, y = call.operands[0].shape, call.results[0].shape
    lead = max(len(x) - (1 if "1d" in str(call.target) else 2 if "2d" in str(call.target) else 3), 0)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    out = [*names[:lead], *((f"o{i}",) for i in range(lead, len(y)))]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {f"o{i}": y[i] for i in range(lead, len(y))}
    whole = {f"{k}{i}" for i in range(lead, len(x)) for k in "do"}
    return Signature((tuple(names),), tuple(tuple(out) for _ in call.results), sizes, frozenset(), frozenset(whole))


for _op in (
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
):
    rule(_op, pooled)
for _op in (
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
    aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.vec,
    aten.upsample_trilinear3d.vec,
    aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.vec,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
):
    rule(_op, pooled, linear="0")


def unpooled(call: Call) -> Signature:
    """Split the dims before space in the gradient of an average pool: grad[n, c, ...], x[n, c, ...] -> x."""
    grad, x = (v.shape for v in call.operands)
    whole = len(x) - (2 if "2d" in str(call.target) else 3)

    def dims(size: tuple[int, ...], name: str) -> tuple[Dim, ...]:
        return tuple((f"d{i}" if i < whole else f"{name}{i}",) for i in range(len(size)))

    sizes = {f"g{i}": s for i, s in enumerate(grad)} | {f"{k}{i}": s for i, s in enumerate(x) for k in "dx"}
    ins = dims(grad, "g"), dims(x, "x")
    used = {f for o in ins for (f,) in o}
    return Signature(
        ins,
        (ins[1],),
        {k: v for k, v in sizes.items() if k in used},
        frozenset(),
        frozenset(f for f in used if f[0] != "d"),
    )


for _op in (
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
):
    rule(_op, unpooled, linear="0")


def fractional(call: Call) -> Signature:
    """Keep space whole: x[n, c, ...], places[n or 1, c, 2 or 3] -> [n, c, ...], twice."""
    space = call.operands[1].shape[-1]
    sig = pooled(call)
    (x,) = sig.inputs
    first: Dim = x[0] if len(x) == space + 2 else ()
    sizes = {**sig.sizes, "place": space}
    return replace(sig, inputs=(x, (first, x[-space - 1], ("place",))), sizes=sizes, whole=sig.whole | {"place"})


for _op in (aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default):
    rule(_op, fractional)


def sampled(call: Call) -> Signature:
    """Split images n and channels c of grid_sampler: x[n, c, ...], grid[n, ..., 2] -> [n, c, ...]."""
    x, grid, y = (v.shape for v in (*call.operands, *call.results))
    read: tuple[Dim, ...] = tuple((f"x{i}",) for i in range(2, len(x)))
    pixels: tuple[Dim, ...] = tuple((f"y{i}",) for i in range(2, len(y)))
    sizes = (
        {"n": x[0], "c": x[1], "pair": grid[-1]}
        | {f"x{i}": x[i] for i in range(2, len(x))}
        | {f"y{i}": y[i] for i in range(2, len(y))}
    )
    ins = ((("n",), ("c",), *read), (("n",), *pixels, ("pair",)))
    return Signature(ins, ((("n",), ("c",), *pixels),), sizes, frozenset(), frozenset({"pair", *(f for (f,) in read)}))


for _op in (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default):
    rule(_op, sampled, linear="0")


def windows(call: Call) -> Signature:
    """Split n and c: im2col x[n, c, h, w] -> [n, (c k), l]; col2im is the reverse. n may be missing."""
    x, y = call.operands[0].shape, call.results[0].shape
    image, columns = (x, y) if len(x) > len(y) else (y, x)
    lead: list[Dim] = [("n",)] if len(columns) == 3 else []
    channels = image[-3]
    sizes = {"c": channels, "k": columns[-2] // channels, "l": columns[-1], "h": image[-2], "w": image[-1]} | (
        {"n": image[0]} if lead else {}
    )
    sides = ((*lead, ("c",), ("h",), ("w",)), (*lead, ("c", "k"), ("l",)))
    ins, outs = sides if len(x) > len(y) else (sides[1], sides[0])
    return Signature((ins,), (outs,), sizes, frozenset(), frozenset("klhw"))


rule(aten.im2col.default, windows, linear="0")
rule(aten.col2im.default, windows, linear="0")
