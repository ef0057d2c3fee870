"""Rules of reductions over dims, and of ops that need one dim whole (cumsum, sort)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.rules.core import along_split_dim
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.reduce_parts import by_parts, local_parts, reduced_dims
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.shared_signatures import all_whole, every_operand, names_of, whole_dims
from shardc.runtime import ops

aten = torch.ops.aten


def reduced(
    position: int, name: str, *, summed: bool, keep: tuple[int, str] = (2, "keepdim"), default: Any = None
) -> Any:
    """Return the rule of a reduction over the dims of an argument (None, []: all): summed or kept whole."""

    def reduction(call: Call) -> Signature:
        dims, ndim = call.arg(position, name, default), len(call.operands[0].shape)
        gone = {call.dim(d) for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}
        names = [f"d{i}{'+' if summed else '!'}" if i in gone else f"d{i}" for i in range(ndim)]
        shown = "" if call.arg(*keep, False) else None
        kept = [shown if i in gone else n for i, n in enumerate(names)]
        return call.fit([names], [[n for n in kept if n is not None] for _ in call.results])

    reduction.__name__ = "sum over dims" if summed else "reduce over whole dims"
    return reduction


rule(aten.sum.dim_IntList, reduced(1, "dim", summed=True), linear="0")
rule(aten.count_nonzero.dim_IntList, reduced(1, "dim", summed=True))
rule(aten.sum.default, reduced(9, "", summed=True, keep=(9, "")), linear="0")


def local_mean(call: LocalCall) -> fx.Node:
    """Divide the rank's sum by the *global* number of elements if a reduced dim is split."""
    dims = reduced_dims(call.call)
    if not any(call.split(f"d{d}") for d in dims):
        return call.same()
    value, dtype = call.call.operands[0], call.call.results[0].dtype
    count = math.prod(value.shape[d] for d in dims)
    keep = bool(call.call.arg(2, "keepdim", False))
    terms = call.args[0]
    if dtype != value.dtype:  # mean(x, dtype=...) casts before it adds
        cast = replace(value, dtype=dtype, layout=call.inputs[0])
        terms = call.emit(aten._to_copy.default, (terms,), {"dtype": dtype}, value=cast)
    return call.emit(ops.partial_mean, (terms, dims, keep, count), {})


rule(aten.mean.dim, reduced(1, "dim", summed=True), linear="0", local=local_mean)
rule(aten.mean.default, reduced(9, "", summed=True, keep=(9, "")), linear="0", local=local_mean)

for _op in (
    aten.any.dim,
    aten.any.dims,
    aten.all.dim,
    aten.all.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
):
    rule(_op, reduced(1, "dim", summed=False))
rule(aten.kthvalue.default, reduced(2, "dim", summed=False, keep=(3, "keepdim")))
for _op in (aten.amax.default, aten.amin.default, aten.prod.dim_int):
    rule(_op, reduced(1, "dim", summed=False), local=local_parts, extra=by_parts)
for _op in (aten.max.default, aten.min.default, aten.prod.default):
    rule(_op, reduced(9, "", summed=False, keep=(9, "")), local=local_parts, extra=by_parts)
for _op in (aten.any.default, aten.all.default, aten.median.default, aten.nanmedian.default):
    rule(_op, reduced(9, "", summed=False, keep=(9, "")))
rule(aten.var.correction, reduced(1, "dim", summed=False, keep=(9, "keepdim")))
rule(aten.std.correction, reduced(1, "dim", summed=False, keep=(9, "keepdim")))
rule(aten.var_mean.correction, reduced(1, "dim", summed=False, keep=(9, "keepdim")))
rule(aten.var.dim, reduced(1, "dim", summed=False, keep=(3, "keepdim")))
rule(aten.std.dim, reduced(1, "dim", summed=False, keep=(3, "keepdim")))
rule(
    aten.linalg_vector_norm.default,
    reduced(2, "dim", summed=False, keep=(3, "keepdim")),
    local=local_parts,
    extra=by_parts,
)
rule(aten.norm.ScalarOpt_dim, reduced(2, "dim", summed=False, keep=(3, "keepdim")))

for _op in (
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
):
    rule(_op, whole_dims((1, "dim", -1)))
rule(aten.glu.default, whole_dims((1, "dim", -1)))
rule(
    aten.cumsum.default,
    whole_dims((1, "dim", -1)),
    linear="0",
    local=along_split_dim.local_cumsum,
    extra=along_split_dim.of_cumsum,
)
rule(aten.sort.default, whole_dims((1, "dim", -1)))
rule(aten.sort.stable, whole_dims((2, "dim", -1)))
rule(aten.argsort.default, whole_dims((1, "dim", -1)))
rule(aten.argsort.stable, whole_dims((2, "dim", -1)))
rule(aten.topk.default, whole_dims((2, "dim", -1)))


def histc(call: Call) -> Signature:
    """Split counts of elements, which are summed, if the range is given; otherwise keep x whole."""
    mark = "+" if call.arg(2, "min", 0) != call.arg(3, "max", 0) else "!"
    return call.fit([[f"{n}{mark}" for n in names_of(len(call.operands[0].shape))]], [["bins!"]])


def local_histc(call: LocalCall) -> fx.Node:
    """Fill padding with a number outside of the range."""
    x, above = call.args[0], float(call.call.arg(3, "max", 0)) + 1
    for d in range(len(call.call.operands[0].shape)):
        x = call.without_padding(x, 0, d, above)
    return call.same(_0=x)


rule(aten.histc.default, histc, local=local_histc)
for _op in (aten.histogram.bin_ct, aten.histogram.bins_tensor):
    rule(_op, all_whole)


def diff(call: Call) -> Signature:
    """Keep dim whole in x and in what is put before and behind it; split the other dims."""
    d, ndim = call.dim(call.arg(2, "dim", -1)), len(call.results[0].shape)
    sides = [[f"x{j}!" if i == d else f"d{i}" for i in range(ndim)] for j in range(len(call.operands) + 1)]
    return call.fit(sides[:-1], sides[-1:])


rule(aten.diff.default, diff, linear=every_operand)
