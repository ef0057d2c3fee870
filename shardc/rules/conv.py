"""Convolutions and pooling: batch and channels split, space stays whole (its parts would need their neighbours' edges)."""

from __future__ import annotations

import math

import torch

from shardc.rules.core import Call, rule
from shardc.rules.notation import Dim, Signature

aten = torch.ops.aten


def convolution(call: Call, groups: int, transposed: bool = False) -> Signature:
    """x[b, i, ...], w[o, i, ...] -> y[b, o, ...]; with groups the channels of both are grouped and stay whole."""
    x, w, y = call.operands[0].shape, call.operands[1].shape, call.results[0].shape
    space = len(w) - 2
    lead: list[Dim] = [("b",)] if len(x) == space + 2 else []
    sizes = {"i": x[len(lead)], "o": y[len(lead)]} | ({"b": x[0]} if lead else {})
    sizes |= {f"{k}{d}": s for k, shape in (("x", x), ("k", w), ("y", y)) for d, s in enumerate(shape[-space:])}
    whole = {f"{k}{d}" for k in "xky" for d in range(space)}
    summed = {"i"}
    channels: list[Dim] = [("i",), ("o",)] if transposed else [("o",), ("i",)]
    if groups > 1:
        whole |= {"i", "o", "wi", "wo"}
        summed = set()
        sizes |= {"wo": w[0], "wi": w[1]}
        channels = [("wo",), ("wi",)]

    def at(prefix: str) -> list[Dim]:
        return [(f"{prefix}{d}",) for d in range(space)]

    ins: list[tuple[Dim, ...]] = [(*lead, ("i",), *at("x")), (*channels, *at("k"))]
    if len(call.operands) > 2:
        ins.append((("o",),))
    return Signature(tuple(ins), ((*lead, ("o",), *at("y")),), sizes, frozenset(summed), frozenset(whole))


def conv(call: Call) -> Signature:
    return convolution(call, call.arg(6, "groups", 1))


def conv_general(call: Call) -> Signature:
    return convolution(call, call.arg(8, "groups", 1), bool(call.arg(6, "transposed", False)))


def conv_transpose(call: Call) -> Signature:
    return convolution(call, call.arg(6, "groups", 1), transposed=True)


def _flops(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * math.prod(call.operands[1].shape[1:])


def _linear(call: Call) -> str:
    return "0 2 | 1 2" if len(call.operands) == 3 else "0 | 1"


for _op in (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
):  # fmt: skip
    rule(_op, conv, linear=_linear, added=(2,), flops=_flops)
rule(aten.convolution.default, conv_general, linear=_linear, added=(2,), flops=_flops)
for _op in (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input):
    rule(_op, conv_transpose, linear=_linear, added=(2,), flops=_flops)


def pooled(call: Call) -> Signature:
    """Dims before space are factors, space is whole on both sides."""
    x, y = call.operands[0].shape, call.results[0].shape
    same = 0
    limit = len(x) - (1 if "1d" in str(call.target) else 2 if "2d" in str(call.target) else 3)
    same = max(limit, 0)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    out = [*names[:same], *((f"o{i}",) for i in range(same, len(y)))]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {f"o{i}": y[i] for i in range(same, len(y))}
    whole = {f"{k}{i}" for i in range(same, len(x)) for k in "do"}
    return Signature((tuple(names),), tuple(tuple(out) for _ in call.results), sizes, frozenset(), frozenset(whole))


for _op in (
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.max_pool2d_with_indices.default,
):  # fmt: skip
    rule(_op, pooled)
for _op in (
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
    aten.upsample_nearest1d.vec,
):  # fmt: skip
    rule(_op, pooled, linear="0")
