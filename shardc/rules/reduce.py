"""Rules of reductions over dims, and of ops that need one dim whole (cumsum, sort)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from shardc.rules.core.along_split_dim import local_cumsum, of_cumsum
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.reduce_parts import by_parts, local_parts
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import all_whole, every_operand, names_of, whole_dims
from shardc.runtime import ops

aten = torch.ops.aten


def _over_dims(call: Call, mark: str) -> Signature:
    gone, names, kept = call.dims(), names_of(len(call.operands[0].shape)), bool(call.arg("keepdim"))
    out = ["" if i in gone else n for i, n in enumerate(names) if kept or i not in gone]
    return call.fit([[n + mark if i in gone else n for i, n in enumerate(names)]], [out for _ in call.results])


def summed(call: Call) -> Signature:
    """Sum over the dims that the op reduces, which may be split."""
    return _over_dims(call, "+")


def reduced(call: Call) -> Signature:
    """Keep the dims that the op reduces whole."""
    return _over_dims(call, "!")


def local_mean(call: LocalCall) -> fx.Node:
    """Divide the rank's sum by the *global* number of elements if a reduced dim is split."""
    dims = sorted(call.call.dims())
    if not any(call.split(f"d{d}") for d in dims):
        return call.same()
    value, dtype = call.call.operands[0], call.call.results[0].dtype
    count = math.prod(value.shape[d] for d in dims)
    keep = bool(call.call.arg("keepdim"))
    terms = call.args[0]
    if dtype != value.dtype:  # mean(x, dtype=...) casts before it adds
        cast = replace(value, dtype=dtype, layout=call.inputs[0])
        terms = call.emit(aten._to_copy.default, (terms,), {"dtype": dtype}, value=cast)
    return call.emit(ops.partial_mean, (terms, dims, keep, count), {})


rules("sum.dim_IntList sum", summed, linear="0")
rules("mean.dim mean", summed, linear="0", local=local_mean)
rule(aten.count_nonzero.dim_IntList, summed)
rules("amax amin prod.dim_int linalg_vector_norm max min prod", reduced, local=local_parts, extra=by_parts)
rules(
    "any.dim any.dims all.dim all.dims any all argmax argmin max.dim min.dim mode kthvalue median.dim nanmedian.dim "
    "median nanmedian var.correction std.correction var_mean.correction var.dim std.dim norm.ScalarOpt_dim "
    "linalg_matrix_norm linalg_matrix_norm.str_ord",
    reduced,
)
rules(
    "cumprod logcumsumexp cummax cummin glu sort sort.stable argsort argsort.stable topk",
    whole_dims,
)
rule(aten.cumsum.default, whole_dims, linear="0", local=local_cumsum, extra=of_cumsum)


def histc(call: Call) -> Signature:
    """Split counts of elements, which are summed, if the range is given; otherwise keep x whole."""
    mark = "+" if call.arg("min") != call.arg("max") else "!"
    return call.fit([[f"{n}{mark}" for n in names_of(len(call.operands[0].shape))]], [["bins!"]])


def local_histc(call: LocalCall) -> fx.Node:
    """Fill padding with a number outside of the range."""
    x, above = call.args[0], float(call.call.arg("max")) + 1
    for d in range(len(call.call.operands[0].shape)):
        x = call.without_padding(x, 0, d, above)
    return call.same(self=x)


rule(aten.histc.default, histc, local=local_histc)
rules("histogram.bin_ct histogram.bins_tensor", all_whole)


def diff(call: Call) -> Signature:
    """Keep dim whole in x and in what is put before and behind it; split the other dims."""
    d, ndim = call.dim("dim"), len(call.results[0].shape)
    sides = [[f"x{j}!" if i == d else f"d{i}" for i in range(ndim)] for j in range(len(call.operands) + 1)]
    return call.fit(sides[:-1], sides[-1:])


rule(aten.diff.default, diff, linear=every_operand)
