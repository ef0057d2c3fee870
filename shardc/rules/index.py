"""Rules of look-ups: embedding, gather, indexing, scatter.

The dim that indices point into stays whole, unless a rule says how to split it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from shardc.ir.placement import PARTIAL, REPLICATE, Placement, Shard
from shardc.rules.core.notation import Dim, Signature, parse
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.shared_signatures import all_whole
from shardc.rules.core.strategy import Strategy
from shardc.runtime import ops

aten = torch.ops.aten


def by_vocabulary(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split the table's rows: absent rows are zeros, the ranks' sum is the result."""
    for rows in sorted(available[0], key=repr):
        if not isinstance(rows, Shard) or rows.dim != 0 or not rows.by_digits_alone or _by_frequency(call):
            continue
        if rows.padded(call.operands[0].shape[0]) % (rows.split * n) == 0:
            yield Strategy("vocabulary", (rows, REPLICATE), (PARTIAL,))


def local_embedding(call: LocalCall) -> fx.Node:
    axes = call.axes("vocabulary")
    if not axes:
        return call.same()
    shards = call.inputs[0].shards(0)
    digits, rows = tuple((a, s.signed) for a, s in shards), shards[0][1].padded(call.call.operands[0].shape[0])
    return call.emit(
        ops.embedding_partial, (*call.args[:2], call.mesh_node, digits, rows, call.call.arg(2, "padding_idx", -1)), {}
    )


def embedding(call: Call) -> Signature:
    """Split d and the ids: v! d, ... -> ... d. Keep ids whole if gradients are scaled by their frequency."""
    sig = parse("v! d, ... -> ... d").bind([v.shape for v in call.operands], [v.shape for v in call.results])
    return replace(sig, whole=frozenset(sig.sizes) - {"d"}) if _by_frequency(call) else sig


def _by_frequency(call: Call) -> bool:
    return bool(call.arg(3, "scale_grad_by_freq", False))


rule(aten.embedding.default, embedding, linear="0", local=local_embedding, extra=by_vocabulary)


def gather(call: Call) -> Signature:
    """Keep dim whole in x.gather(dim, index); split the other dims where index covers all of x."""
    x, index, d = call.operands[0].shape, call.operands[1].shape, call.dim(call.arg(1, "dim"))
    same = [i for i in range(len(x)) if i != d and x[i] == index[i]]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {f"o{i}": s for i, s in enumerate(index)}
    left: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(x)))
    right: tuple[Dim, ...] = tuple((f"d{i}",) if i in same else (f"o{i}",) for i in range(len(x)))
    other = [i for i in range(len(x)) if i not in same]
    whole = {f"d{i}" for i in other} | {f"o{i}" for i in other if i != d}
    return Signature((left, right), (right,), sizes, frozenset(), frozenset(whole))


def by_entries(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split the dim that indices point into, as `by_vocabulary` does."""
    x, d = call.operands[0].shape, call.dim(call.arg(1, "dim"))
    for p in sorted(available[0], key=repr):
        if isinstance(p, Shard) and p.dim == d and p.by_digits_alone and p.padded(x[d]) % (p.split * n) == 0:
            yield Strategy("entries", (p, REPLICATE), (PARTIAL,))


def local_gather(call: LocalCall) -> fx.Node:
    if not call.axes("entries"):
        return call.same()
    d = call.call.dim(call.call.arg(1, "dim"))
    shards = call.inputs[0].shards(d)
    digits, size = tuple((a, s.signed) for a, s in shards), shards[0][1].padded(call.call.operands[0].shape[d])
    return call.emit(ops.gather_partial, (call.args[0], call.args[2], call.mesh_node, d, digits, size), {})


rule(aten.gather.default, gather, linear="0", local=local_gather, extra=by_entries)


def index_select(call: Call) -> Signature:
    x, d = call.operands[0].shape, call.dim(call.arg(1, "dim"))
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {"n": call.results[0].shape[d]}
    out = [*names[:d], ("n",), *names[d + 1 :]]
    return Signature((tuple(names), (("n",),)), (tuple(out),), sizes, frozenset(), frozenset({f"d{d}"}))


rule(aten.index_select.default, index_select, linear="0")


def index(call: Call) -> Signature:
    """Keep the indexed dims of x[i, :, j] whole; split the others, and the indices' own (broadcast) dims."""
    x, where = call.operands[0].shape, call.arg(1, "indices")
    indexed = [d for d, i in enumerate(where) if isinstance(i, Operand)]
    picked = [call.operands[where[d].index].shape for d in indexed]
    masks = any(call.operands[where[d].index].dtype == torch.bool for d in indexed)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    if masks:  # the result's size depends on data: nothing can be split
        out = [(f"o{i}",) for i in range(len(call.results[0].shape))]
        ins = [tuple(names), *[tuple((f"m{j}_{i}",) for i in range(len(s))) for j, s in enumerate(picked)]]
        sizes |= {f"o{i}": s for i, s in enumerate(call.results[0].shape)}
        sizes |= {f"m{j}_{i}": s for j, p in enumerate(picked) for i, s in enumerate(p)}
        return Signature(tuple(ins), (tuple(out),), sizes, frozenset(), frozenset(sizes))
    shape: tuple[int, ...] = torch.broadcast_shapes(*picked)  # type: ignore[no-untyped-call]
    sizes |= {f"i{i}": s for i, s in enumerate(shape)}
    inner: list[Dim] = [(f"i{i}",) if s != 1 else () for i, s in enumerate(shape)]
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    rest_before = [names[d] for d in range(len(x)) if d not in indexed and (d < indexed[0] if together else False)]
    rest_after = [names[d] for d in range(len(x)) if d not in indexed and not (d < indexed[0] if together else False)]
    result: tuple[Dim, ...] = (*rest_before, *inner, *rest_after)
    operands: list[tuple[Dim, ...]] = [tuple(names)]
    for p in picked:
        skip = len(shape) - len(p)
        operands.append(tuple((f"i{skip + i}",) if s == shape[skip + i] and s != 1 else () for i, s in enumerate(p)))
    return Signature(tuple(operands), (result,), sizes, frozenset(), frozenset(f"d{d}" for d in indexed))


rule(aten.index.Tensor, index, linear="0")


def index_put(call: Call) -> Signature:
    """Keep the indexed dims whole in x[i, :, j] = values, or += values; values are like `index`'s result.

    Values that are added up (accumulate) may be split: each rank then has a summand.
    """
    x, where, values = call.operands[0].shape, call.arg(1, "indices"), call.operands[-1].shape
    indexed = [d for d, i in enumerate(where) if isinstance(i, Operand)]
    picked = [call.operands[where[d].index].shape for d in indexed]
    if any(call.operands[where[d].index].dtype == torch.bool for d in indexed):
        return all_whole(call)
    shape: tuple[int, ...] = torch.broadcast_shapes(*picked)  # type: ignore[no-untyped-call]
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {f"i{i}": s for i, s in enumerate(shape)}
    inner: list[Dim] = [(f"i{i}",) for i in range(len(shape))]
    together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    before = [names[d] for d in range(indexed[0])] if together else []
    full = [*before, *inner, *(names[d] for d in range(len(x)) if d not in indexed and names[d] not in before)]

    def own(dims: list[Dim], shape: tuple[int, ...]) -> tuple[Dim, ...]:
        """Return the last of `dims`, without those that are broadcast."""
        return tuple(
            d if sizes[d[0]] == s and s != 1 else () for d, s in zip(dims[len(dims) - len(shape) :], shape, strict=True)
        )

    ins = (tuple(names), *(own(inner, p) for p in picked), own(full, values))
    picks = {f"i{i}" for i in range(len(shape))}
    # values that are broadcast would be added for padded entries too
    summed = {f for f in picks if call.arg(3, "accumulate", False) and (f,) in ins[-1]}
    return Signature(
        ins, (tuple(names),), sizes, frozenset(summed), frozenset({f"d{d}" for d in indexed} | (picks - summed))
    )


def _put_linear(call: Call) -> str:
    """Return the linear operands of x[i] = v: x and v together."""
    return f"0 {len(call.operands) - 1}"


rule(aten.index_put.default, index_put, linear=_put_linear, added=(0,))
for _op in (
    aten.nonzero.default,
    aten.nonzero_static.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.put.default,
):
    rule(_op, all_whole)


def index_add(call: Call) -> Signature:
    """Keep dim whole in x.index_add(dim, index, source); split the source's entries, which are summed."""
    x, source, d = call.operands[0].shape, call.operands[2].shape, call.dim(call.arg(1, "dim"))
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {"n": source[d] if source else 1}
    ins = (
        tuple(names),
        (("n",),) if call.operands[1].shape else (),
        tuple([*names[:d], ("n",), *names[d + 1 :]][: len(source)]),
    )
    return Signature(ins, (tuple(names),), sizes, frozenset({"n"}), frozenset({f"d{d}"}))


rule(aten.index_add.default, index_add, linear="0 2", added=(0,))


def index_copy(call: Call) -> Signature:
    """Keep dim whole in all operands of x.index_copy(dim, index, source)."""
    added = index_add(call)
    return replace(added, summed=frozenset(), whole=added.whole | {"n"})


rule(aten.index_copy.default, index_copy, linear="0 2")


def linear_mean(call: Call) -> str:
    """Return the linear operands: x and source together for means, none for products and extrema."""
    return "0 2" if call.arg(4, "reduce") == "mean" else ""


rule(aten.index_reduce.default, index_copy, linear=linear_mean)


def scatter(call: Call) -> Signature:
    """Keep dim whole in x.scatter(dim, index, src); split other dims where index and src cover all of x."""
    x, d = call.operands[0].shape, call.dim(call.arg(1, "dim"))
    same = [i for i in range(len(x)) if i != d and all(v.shape[i] == x[i] for v in call.operands)]
    sizes: dict[str, int] = {f"d{i}": s for i, s in enumerate(x)}
    ins: list[tuple[Dim, ...]] = []
    for j, v in enumerate(call.operands):
        dims: list[Dim] = []
        for i, s in enumerate(v.shape):
            name = f"d{i}" if j == 0 or i in same else f"o{j}_{i}"
            sizes[name] = s
            dims.append((name,))
        ins.append(tuple(dims))
    keep = {f"d{i}" for i in same}
    return Signature(tuple(ins), (ins[0],), sizes, frozenset(), frozenset(set(sizes) - keep))


def _scatter_linear(call: Call) -> str:
    return "0 2" if len(call.operands) > 2 else ""


rule(aten.scatter.src, scatter, linear=_scatter_linear)
rule(aten.scatter.value, scatter, linear=lambda c: "0" if c.arg(3, "value") == 0 else "")
rule(aten.scatter_reduce.two, scatter, linear=lambda c: "0 2" if c.arg(4, "reduce") in ("sum", "mean") else "")


def scatter_add(call: Call) -> Signature:
    """Split as `scatter` does, and entries along dim where index and src have one size: they are summed."""
    plain, d = scatter(call), call.dim(call.arg(1, "dim"))
    index, src = (v.shape for v in call.operands[1:])
    if not index or index[d] != src[d]:
        return plain
    ins = [plain.inputs[0], *((*dims[:d], ("n",), *dims[d + 1 :]) for dims in plain.inputs[1:])]
    sizes = {f: s for f, s in plain.sizes.items() if f not in (f"o1_{d}", f"o2_{d}")} | {"n": index[d]}
    return Signature(tuple(ins), plain.outputs, sizes, frozenset({"n"}), plain.whole & set(sizes))


rule(aten.scatter_add.default, scatter_add, linear=_scatter_linear, added=(0,))


def searchsorted(call: Call) -> Signature:
    """Split values[..., m], keep sorted[..., n] whole along n; one sorted row may serve all values."""
    position = 0 if call.arg(0, "sorted_sequence") == Operand(0) else 1
    row, x = call.operands[position].shape, call.operands[1 - position].shape if len(call.operands) > 1 else ()
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {"n": row[-1]}
    ins = [(("n",),) if len(row) == 1 else (*names[:-1], ("n",)), names][: len(call.operands)]
    return Signature(tuple(ins if position == 0 else reversed(ins)), (names,), sizes, frozenset(), frozenset({"n"}))


rule(aten.searchsorted.Tensor, searchsorted)


def one_hot(call: Call) -> Signature:
    x = call.operands[0].shape
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(x)))
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {"c": call.results[0].shape[-1]}
    # without a number of classes it is the largest class + 1, which a part does not know
    whole = frozenset({"c"} if call.arg(1, "num_classes", -1) > 0 else sizes)
    return Signature((names,), ((*names, ("c",)),), sizes, frozenset(), whole)


rule(aten.one_hot.default, one_hot)
