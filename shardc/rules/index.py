"""Rules of look-ups: embedding, gather, indexing, scatter.

The dim that indices point into stays whole, unless a rule says how to split it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import all_whole, names_of, whole_names
from shardc.rules.core.strategy import over_dim
from shardc.rules.pointwise import first_only
from shardc.runtime import ops

aten = torch.ops.aten


def local_embedding(call: LocalCall) -> fx.Node:
    if not call.axes("vocabulary"):
        return call.same()
    digits, rows = call.digits(0, 0)
    args = (*call.args[:2], call.mesh_node, digits, rows, call.call.arg("padding_idx"))
    return call.emit(ops.embedding_partial, args, {})


def embedding(call: Call) -> Signature:
    """Split d and the ids: v! d, ... -> ... d. Keep ids whole if gradients are scaled by their frequency."""
    if _by_frequency(call):
        return call.fit([["v!", "d"], whole_names(call.operands[1], "i")], [[*whole_names(call.operands[1], "i"), "d"]])
    return call.fit("v! d, ... -> ... d")


def _by_frequency(call: Call) -> bool:
    return bool(call.arg("scale_grad_by_freq"))


# absent rows are zeros, the ranks' sum is the result
_vocabulary = over_dim("vocabulary", lambda c: () if _by_frequency(c) else (0,))
rule(aten.embedding.default, embedding, linear="0", local=local_embedding, extra=_vocabulary)


def gather(call: Call) -> Signature:
    """Keep dim whole in x.gather(dim, index); split the other dims where index covers all of x."""
    x, index, d = call.operands[0].shape, call.operands[1].shape, call.dim("dim")
    same = [i for i in range(len(x)) if i != d and x[i] == index[i]]
    other = [i for i in range(len(x)) if i not in same]
    right = [f"d{i}" if i in same else "o" if i == d else f"o{i}!" for i in range(len(x))]
    return call.fit([names_of(len(x), other), right], [right])


def local_gather(call: LocalCall) -> fx.Node:
    if not call.axes("entries"):
        return call.same()
    d = call.call.dim("dim")
    digits, size = call.digits(0, d)
    return call.emit(ops.gather_partial, (call.args[0], call.args[2], call.mesh_node, d, digits, size), {})


_entries = over_dim("entries", lambda c: (c.dim("dim"),))
rule(aten.gather.default, gather, linear="0", local=local_gather, extra=_entries)


def index_select(call: Call) -> Signature:
    x, d = len(call.operands[0].shape), call.dim("dim")
    names = names_of(x, {d})
    return call.fit([names, ["n"]], [[*names[:d], "n", *names[d + 1 :]]])


rule(aten.index_select.default, index_select, linear="0")


def _indexed(call: Call) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the dims of x in x[i, :, j], of each index, and of the result; the indexed dims of x are whole."""
    where = call.arg("indices")
    indexed = [d for d, i in enumerate(where) if isinstance(i, Operand)]
    names = names_of(len(call.operands[0].shape), indexed)
    picked = [len(call.operands[where[d].index].shape) for d in indexed]
    inner = [f"i{i}" for i in range(max(picked))]
    rest = [n for d, n in enumerate(names) if d not in indexed]
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    front = indexed[0] if together else 0  # dims of indices that are not adjacent come first
    return names, [inner[len(inner) - n :] for n in picked], [*rest[:front], *inner, *rest[front:]]


def _masked(call: Call) -> bool:
    """Return whether an index is a mask: then the result's size depends on data, and nothing can be split."""
    return any(isinstance(i, Operand) and call.operands[i.index].dtype == torch.bool for i in call.arg("indices"))


def index(call: Call) -> Signature:
    """Keep the indexed dims of x[i, :, j] whole; split the others, and the indices' own (broadcast) dims."""
    if _masked(call):
        return all_whole(call)
    names, picks, result = _indexed(call)
    return call.fit([names, *picks], [result])


rule(aten.index.Tensor, index, linear="0")


def index_put(call: Call) -> Signature:
    """Keep the indexed dims whole in x[i, :, j] = values, or += values; values are like `index`'s result.

    Values that are added up (accumulate) may be split: each rank then has a summand.
    """
    if _masked(call):
        return all_whole(call)
    names, picks, full = _indexed(call)
    values = call.operands[-1].shape
    own = full[len(full) - len(values) :]
    # values that are broadcast would be added for padded entries too
    added = {f for f, n in zip(own, values, strict=True) if n != 1 and call.arg("accumulate")}
    marked = [[f"{f}+" if f in added else f"{f}!" for f in p] for p in picks]
    return call.fit([names, *marked, own], [names])


def _put_linear(call: Call) -> str:
    """Return the linear operands of x[i] = v: x and v together."""
    return f"0 {len(call.operands) - 1}"


rule(aten.index_put.default, index_put, linear=_put_linear, added=(0,))
rules("nonzero nonzero_static repeat_interleave.Tensor unique_consecutive unique_dim bincount put", all_whole)


def index_add(call: Call) -> Signature:
    """Keep dim whole in x.index_add(dim, index, source); split the source's entries, which are summed."""
    d = call.dim("dim")
    names = names_of(len(call.operands[0].shape), {d})
    index, source = (len(v.shape) for v in call.operands[1:])
    return call.fit([names, ["n+"][:index], [*names[:d], "n+", *names[d + 1 :]][:source]], [names])


rule(aten.index_add.default, index_add, linear="0 2", added=(0,))


def index_copy(call: Call) -> Signature:
    """Keep dim whole in all operands of x.index_copy(dim, index, source)."""
    added = index_add(call)
    return replace(added, summed=frozenset(), whole=added.whole | {"n"})


rule(aten.index_copy.default, index_copy, linear="0 2")


def linear_mean(call: Call) -> str:
    """Return the linear operands: x and source together for means, none for products and extrema."""
    return "0 2" if call.arg("reduce") == "mean" else ""


rule(aten.index_reduce.default, index_copy, linear=linear_mean)


def _scattered(call: Call) -> list[list[str]]:
    """Return the dims of x, index and src in x.scatter(dim, index, src)."""
    x, d = call.operands[0].shape, call.dim("dim")
    same = [i for i in range(len(x)) if i != d and all(v.shape[i] == x[i] for v in call.operands)]
    return [[f"d{i}" if i in same else f"o{j}_{i}!" for i in range(len(v.shape))] for j, v in enumerate(call.operands)]


def scatter(call: Call) -> Signature:
    """Keep dim whole in x.scatter(dim, index, src); split other dims where index and src cover all of x."""
    return call.fit(ins := _scattered(call), ins[:1])


rule(aten.scatter.src, scatter, linear="0 2")
rule(aten.scatter.value, scatter, linear=lambda c: "0" if c.arg("value") == 0 else "")
rule(aten.scatter_reduce.two, scatter, linear=lambda c: "0 2" if c.arg("reduce") in ("sum", "mean") else "")


def scatter_add(call: Call) -> Signature:
    """Split as `scatter` does, and entries along dim where index and src have one size: they are summed."""
    ins, d = _scattered(call), call.dim("dim")
    index, src = (v.shape for v in call.operands[1:])
    for dims in ins[1:] if index and index[d] == src[d] else ():
        dims[d] = "n+"
    return call.fit(ins, ins[:1])


rule(aten.scatter_add.default, scatter_add, linear="0 2", added=(0,))


def searchsorted(call: Call) -> Signature:
    """Split values[..., m], keep sorted[..., n] whole along n; one sorted row may serve all values."""
    first = call.arg("sorted_sequence") == Operand(0)
    names = names_of(len(call.results[0].shape))
    row = ["n!"] if len(call.operands[not first].shape) == 1 else [*names[:-1], "n!"]
    return call.fit(([row, names] if first else [names, row])[: len(call.operands)], [names])


rule(aten.searchsorted.Tensor, searchsorted)
rule(aten.bucketize.Tensor, first_only)


def one_hot(call: Call) -> Signature:
    # without a number of classes it is the largest class + 1, which a part does not know
    n = len(call.operands[0].shape)
    names = names_of(n, () if call.arg("num_classes") > 0 else range(n))
    return call.fit([names], [[*names, "c!"]])


rule(aten.one_hot.default, one_hot)
