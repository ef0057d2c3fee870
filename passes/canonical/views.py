"""Rewrite ops that move elements: sizes and dims are explicit and counted from the left; no-ops go."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.masked_writes import in_order
from shardc.passes.canonical.rewrite import Args, Emit, Result, dim, rewrite, shape

aten = torch.ops.aten


@rewrite("view _unsafe_view reshape _reshape_alias flatten unflatten view_as reshape_as")
def reshape(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x.view(b, -1, 8)` as `reshape(x, [4, 16, 8])`."""
    if a.get("dtype") is not None:
        return emit(aten.view.dtype, a.first, a.dtype)
    return emit.reshape(a.first, out.shape)


@rewrite("squeeze squeeze_")
def squeeze(emit: Emit, a: Args, out: Value) -> Result:
    return emit.reshape(a.first, out.shape)


@rewrite("unsqueeze")
def unsqueeze(emit: Emit, a: Args, out: Value) -> Result:
    return emit(aten.unsqueeze.default, a.first, dim(a.dim, len(out.shape)))


@rewrite("expand expand_as broadcast_to")
def expand(emit: Emit, a: Args, out: Value) -> Result:
    return emit.expand(a.first, out.shape)


@rewrite("to _to_copy type_as clone contiguous alias lift_fresh lift_fresh_copy positive _to_cpu")
def copied(emit: Emit, a: Args, out: Value) -> Result:
    """Reduce copies to a change of dtype: the program decides on memory formats and devices."""
    return emit.cast(a.first, out.dtype)


@rewrite("view_as_complex")
def as_complex(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `view_as_complex(x)` as `complex(x[..., 0], x[..., 1])`.

    The view needs an even memory offset, which a rank's part, or a parameter in a bucket, may not have.
    """
    last = len(out.shape)
    return emit(aten.complex.default, *(emit(aten.select.int, a.first, last, i) for i in (0, 1)))


@rewrite("as_strided as_strided_copy")
def strided(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite a read of memory by strides as a read of the flat tensor's entries by number.

    A rank's part, or a parameter in a bucket, has other strides. Capture has made the operand contiguous.
    """
    x: fx.Node = a.first
    flat = emit.reshape(x, (math.prod(shape(x)),))
    picked = emit(aten.index_select.default, flat, 0, _entries(emit, a))
    return emit.reshape(picked, out.shape)


@rewrite("as_strided_scatter")
def written_by_strides(emit: Emit, a: Args, out: Value) -> Result:
    x: fx.Node = a.first
    flat, source = (emit.reshape(y, (math.prod(shape(y)),)) for y in (x, a.src))
    return emit.reshape(emit(aten.index_put.default, flat, [_entries(emit, a)], source), out.shape)


def _entries(emit: Emit, a: Args) -> fx.Node:
    """Return the places in memory, i64[n], that `size`, `stride` and `storage_offset` name."""
    places = emit(aten.full.default, [1] * len(a.size), a.storage_offset or 0, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(a.size, a.stride, strict=True)):
        steps = emit(aten.mul.Tensor, emit(aten.arange.default, size), stride)
        along = emit.reshape(steps, [size if i == d else 1 for i in range(len(a.size))])
        places = emit(aten.add.Tensor, places, along)
    return emit.reshape(places, (math.prod(a.size),))


@rewrite("detach")
def detach(emit: Emit, a: Args, out: Value) -> Result:
    return emit.detach(a.first)


@rewrite("slice")
def cut(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x[:, 4:]` as `slice(x, 1, 4, 8)`; a slice of the whole dim is the tensor itself."""
    x: fx.Node = a.first
    d = dim(a.dim, len(out.shape))
    n = shape(x)[d]
    start, stop, step = slice(a.start, a.end, a.step).indices(n)
    stop = max(start, stop)
    if (start, stop, step) == (0, n, 1):
        return x
    return emit(aten.slice.Tensor, x, d, start, stop, *([step] if step != 1 else []))


@rewrite("narrow")
def narrow(emit: Emit, a: Args, out: Value) -> Result:
    d = dim(a.dim, len(out.shape))
    start = dim(a.start, shape(a.first)[d])
    return a.first if out.shape == shape(a.first) else emit(aten.slice.Tensor, a.first, d, start, start + a.length)


@rewrite("select")
def select(emit: Emit, a: Args, out: Value) -> Result:
    d = dim(a.dim, len(shape(a.first)))
    return emit(aten.select.int, a.first, d, dim(a["index"], shape(a.first)[d]))


@rewrite("split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk tensor_split split_copy")
def split(emit: Emit, a: Args, out: Any) -> Result:
    """Rewrite every split as `split_with_sizes(x, sizes, dim)`; one part is the tensor itself."""
    x: fx.Node = a.first
    parts: tuple[Value, ...] = out
    d = dim(a.dim, len(shape(x)))
    if len(parts) == 1:
        return (x,)
    return emit(aten.split_with_sizes.default, x, [p.shape[d] for p in parts], d)


@rewrite("t T mT numpy_T matrix_H adjoint transpose swapaxes swapdims permute movedim moveaxis")
def permute(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite every reordering of dims as `transpose` of two of them, or as `permute`."""
    x: fx.Node = a.first
    n = len(shape(x))
    order = list(range(n))
    if a.op_name == "permute":
        order = [dim(d, n) for d in a.dims]
    elif a.op_name in ("movedim", "moveaxis"):
        froms, tos = (
            [dim(d, n) for d in (v if isinstance(v, (list, tuple)) else [v])] for v in (a.source, a.destination)
        )
        rest = iter(d for d in range(n) if d not in froms)
        order = [froms[tos.index(d)] if d in tos else next(rest) for d in range(n)]
    elif a.op_name in ("transpose", "swapaxes", "swapdims"):
        i, j = (dim(v, max(n, 1)) for v in list(a.named.values())[1:3])
        if n:
            order[i], order[j] = order[j], order[i]
    elif a.op_name in ("numpy_T", "T", "t"):
        order.reverse()
    else:
        order[-2:] = order[:-3:-1]
    turned = emit.permute(x, order)
    return _conjugate(emit, turned) if a.op_name in ("matrix_H", "adjoint") else turned


@rewrite("conj _conj resolve_conj resolve_neg _neg_view")
def conj(emit: Emit, a: Args, out: Value) -> Result:
    """Compute conjugates and negatives that torch only marks: marks are on tensors, not in a graph."""
    if a.op_name == "_neg_view":
        return emit(aten.neg.default, a.first)
    return a.first if a.op_name.startswith("resolve") else _conjugate(emit, a.first)


@rewrite("fft_ifft fft_ihfft fft_ihfft2 fft_ihfftn linalg_lu_solve svd")
def unmarked(emit: Emit, a: Args, out: Any) -> Result:
    """Resolve results that these kernels mark as conjugates: messages and `view_as_real` take no marks."""
    y = emit(a.op, *a.args, **a.kwargs)
    if not isinstance(out, tuple):
        return emit(aten.resolve_conj.default, y) if out.dtype.is_complex else y
    parts = [emit.typed(v, operator.getitem, y, i) for i, v in enumerate(out)]
    return tuple(emit(aten.resolve_conj.default, x) if value_of(x).dtype.is_complex else x for x in parts)


def _conjugate(emit: Emit, x: fx.Node) -> fx.Node:
    return emit(aten.conj_physical.default, x) if value_of(x).dtype.is_complex else x


@rewrite("cat concat concatenate")
def cat(emit: Emit, a: Args, out: Value) -> Result:
    """Leave out empty tensors (an empty cache); all parts of one tensor, in order, are that tensor."""
    parts = [x for x in a.tensors if shape(x) != (0,)]
    if len(parts) == 1:
        return emit.cast(parts[0], out.dtype)
    d = dim(a.dim, len(out.shape))
    if (unbound := _all_parts(parts)) is not None:
        x, along, kept = unbound
        if kept and along == d:
            return x
        if not kept:
            return emit.reshape(_moved(emit, x, along, d), out.shape)
    return emit(aten.cat.default, parts, d)


@rewrite("stack")
def stack(emit: Emit, a: Args, out: Value) -> Result:
    d = dim(a.dim, len(out.shape))
    if (unbound := _all_parts(a.tensors)) is not None and not unbound[2]:
        return _moved(emit, unbound[0], unbound[1], d)
    return emit(aten.stack.default, list(a.tensors), d)


def _all_parts(parts: Sequence[fx.Node]) -> tuple[fx.Node, int, bool] | None:
    """Return (tensor, dim, whether parts keep the dim) if `parts` are all its parts in order; else None."""
    sources: set[tuple[Any, fx.Node, int]] = set()
    for i, part in enumerate(parts):
        whole = part.args[0] if part.args else None
        if part.target is aten.select.int and isinstance(whole, fx.Node) and part.args[2] == i:
            sources.add((aten.unbind.int, whole, int(part.args[1])))  # type: ignore[arg-type]
        elif part.target is operator.getitem and isinstance(whole, fx.Node) and part.args[1] == i:
            if whole.target not in (aten.unbind.int, aten.split_with_sizes.default) or len(whole.meta["value"]) != len(
                parts
            ):
                return None
            x = whole.args[0]
            assert isinstance(x, fx.Node)
            sources.add((whole.target, x, dim(int(whole.args[-1]) if len(whole.args) > 1 else 0, len(shape(x)))))  # type: ignore[arg-type]
        else:
            return None
    op, x, d = next(iter(sources), (None, parts[0], 0))
    if len(sources) != 1 or (op is aten.unbind.int and shape(x)[d] != len(parts)):
        return None
    return x, d, op is not aten.unbind.int


def _moved(emit: Emit, x: fx.Node, old: int, new: int) -> fx.Node:
    """Return `x` with its dim `old` at `new`."""
    order = [i for i in range(len(shape(x))) if i != old]
    return emit.permute(x, [*order[:new], old, *order[new:]])


@rewrite("pad constant_pad_nd")
def pad(emit: Emit, a: Args, out: Value) -> Result:
    if not any(a.pad):
        return a.first  # type: ignore[no-any-return]
    if a.get("mode", "constant") != "constant":
        return emit(aten.pad.default, a.first, list(a.pad), a.mode)
    number = a.value or 0
    return emit(
        aten.constant_pad_nd.default, a.first, list(a.pad), number if out.dtype.is_floating_point else int(number)
    )


@rewrite("broadcast_tensors")
def broadcast_tensors(emit: Emit, a: Args, out: Any) -> Result:
    return tuple(emit.expand(x, v.shape) for x, v in zip(a.tensors, out, strict=True))


@rewrite("copy")
def copy(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite functionalised `x.copy_(y)`, which has no derivative, as y in x's shape and dtype."""
    return emit.expand(emit.cast(a.src, out.dtype), out.shape)


@rewrite("fill")
def fill(emit: Emit, a: Args, out: Value) -> Result:
    if isinstance(a.value, fx.Node):
        return emit.expand(emit.cast(a.value, out.dtype), out.shape)
    return emit(aten.full_like.default, a.self, a.value)


@rewrite("slice_scatter")
def slice_scatter(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x[:, 1:] = y` as `cat([x[:, :1], y], 1)`."""
    d = dim(a.dim, len(out.shape))
    n = out.shape[d]
    start, stop, step = slice(a.start, a.end, a.step).indices(n)
    src = emit.cast(a.src, out.dtype)
    if step != 1:
        return emit(aten.slice_scatter.default, a.self, src, d, start, stop, step)
    return _written(emit, a.self, src, d, start, max(start, stop))


@rewrite("select_scatter")
def select_scatter(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x[:, 0] = y` as `cat([unsqueeze(y, 1), x[:, 1:]], 1)`."""
    d = dim(a.dim, len(out.shape))
    position = dim(a["index"], out.shape[d])
    return _written(
        emit, a.self, emit(aten.unsqueeze.default, emit.cast(a.src, out.dtype), d), d, position, position + 1
    )


def _written(emit: Emit, x: fx.Node, src: fx.Node, d: int, start: int, stop: int) -> fx.Node:
    """Return `x` with the range of dim `d` replaced by `src`."""
    n = shape(x)[d]
    parts = [emit(aten.slice.Tensor, x, d, 0, start)] if start else []
    parts += [src] if stop > start else []
    parts += [emit(aten.slice.Tensor, x, d, stop, n)] if stop < n else []
    return parts[0] if len(parts) == 1 else emit(aten.cat.default, parts, d)


@rewrite("index")
def index(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite indexing with `arange`s of whole dims, as mask builders do, as a reshape.

    Else it would hide the dims from sharding.
    """
    x: fx.Node = a.first
    indices = list(a.indices)
    known = [emit.constant(i) if i is not None else None for i in indices]
    if _keeps_order(shape(x), out.shape, indices, known):
        return emit.reshape(x, out.shape)
    rows = _per_row(emit, x, indices, known)
    return (
        emit(aten.index.Tensor, x, indices)
        if rows is None
        else emit.reshape(emit(aten.gather.default, x, *rows), out.shape)
    )


@rewrite("index_fill")
def index_fill(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `index_fill(x, 1, i, v)` as `masked_fill(x, any(arange(n) == i), v)`: all dims may be split."""
    d, index = dim(a.dim, len(out.shape)), emit.reshape(a["index"], (1, math.prod(shape(a["index"]))))
    n = (*out.shape, 1)[d]
    along = emit.reshape(emit(aten.arange.default, n), (n, 1))
    mask = emit(aten.any.dim, emit(aten.eq.Tensor, along, emit(aten.remainder.Scalar, index, n)), 1)
    mask = emit.reshape(mask, [n if i == d else 1 for i in range(len(out.shape))])
    fill = aten.masked_fill.Tensor if isinstance(a["value"], fx.Node) else aten.masked_fill.Scalar
    return emit(fill, a.self, mask, a["value"])


@rewrite("index_put")
def index_put(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite `x[mask] = 0` as `where(mask, 0, x)`, and `x[arange(b), i] = v` as `scatter(x, 1, i, v)`."""
    x, indices, values = a.self, list(a.indices), a["values"]
    indexed = [d for d, i in enumerate(indices) if i is not None]
    masks = [i for i in indices if i is not None and value_of(i).dtype == torch.bool]
    if masks:
        (mask,) = masks if len(indexed) == 1 else (None,)
        behind = len(out.shape) - indexed[0] - len(shape(mask)) if mask is not None else 0  # dims of x after the mask's
        n = shape(values)[-behind - 1] if len(shape(values)) > behind else 1
        if mask is None or (n > 1 and indexed[0] > 0):
            raise emit.refuse(
                "an assignment through a mask has a separate value for each masked position",
                "use torch.where with values in x's shape",
            )
        mask = emit.reshape(mask, (*shape(mask), *[1] * behind))
        if n > 1:
            values = emit.reshape(values, shape(values)[-behind - 1 :])
            values = in_order(emit, mask, emit.expand(values, (n, *out.shape[len(out.shape) - behind :])), out.shape)
        elif len(shape(values)) > behind:
            before, after = shape(values)[: -behind - 1], shape(values)[len(shape(values)) - behind :]
            values = emit.reshape(values, (*before, *[1] * (len(out.shape) - indexed[0] - behind), *after))
        return emit(aten.where.self, mask, emit(aten.add.Tensor, x, values) if a.accumulate else values, x)
    rows = _per_row(emit, x, indices, [emit.constant(i) if i is not None else None for i in indices])
    if rows is None:
        return emit(aten.index_put.default, x, indices, values, *([True] if a.accumulate else []))
    d, index = rows
    picked: tuple[int, ...] = torch.broadcast_shapes(*(shape(i) for i in indices if i is not None))  # type: ignore[no-untyped-call]
    values = emit.expand(values, (*shape(x)[: indexed[0]], *picked, *shape(x)[indexed[-1] + 1 :]))
    return emit(
        aten.scatter_add.default if a.accumulate else aten.scatter.src, x, d, index, emit.reshape(values, shape(index))
    )


def _per_row(emit: Emit, x: fx.Node, indices: list[Any], known: list[Tensor | None]) -> tuple[int, fx.Node] | None:
    """Return (dim, index) for `gather` and `scatter` if indices pick one entry per row; else None.

    Then rows stay separate, and can be split. The indices are whole `arange`s, each along a different dim, and then one
    other index.
    """
    indexed = [d for d, i in enumerate(indices) if i is not None]
    *counted, d = indexed
    if not counted or indexed != list(range(indexed[0], indexed[-1] + 1)):
        return None
    picked = shape(indices[d])
    ndim = max(len(shape(indices[i])) for i in indexed)
    for nth, i in enumerate(counted):
        k = known[i]
        wide = tuple(shape(x)[i] if j == nth else 1 for j in range(ndim))
        if (
            k is None
            or ((1,) * (ndim - k.dim()) + tuple(k.shape)) != wide
            or not torch.equal(k.flatten(), torch.arange(k.numel()))
        ):
            return None
    before, rows, rest = shape(x)[: indexed[0]], shape(x)[indexed[0] : d], shape(x)[d + 1 :]
    inner = ((1,) * (ndim - len(picked)) + picked)[len(counted) :]
    index, where = indices[d], known[d]
    if where is None or bool((where < 0).any()):
        index = emit(aten.remainder.Scalar, index, shape(x)[d])  # negative indices count from the end
    index = emit.expand(emit.reshape(index, (1,) * (ndim - len(picked)) + picked), (*rows, *inner))
    index = emit.reshape(index, (*[1] * len(before), *rows, math.prod(inner), *[1] * len(rest)))
    return d, emit.expand(index, (*before, *rows, math.prod(inner), *rest))


def _keeps_order(old: tuple[int, ...], new: tuple[int, ...], indices: list[Any], known: list[Tensor | None]) -> bool:
    """Return whether x[indices] holds x's elements in order. indices: by leading dim; known: their values."""
    indexed = [d for d, i in enumerate(indices) if i is not None]
    if not indexed or indexed != list(range(indexed[0], indexed[-1] + 1)) or any(known[d] is None for d in indexed):
        return False
    ndim = max(k.dim() for k in known if k is not None)
    last = -1
    for d in indexed:
        k = known[d]
        assert k is not None
        k = k.reshape((1,) * (ndim - k.dim()) + tuple(k.shape))
        wide = [i for i, s in enumerate(k.shape) if s != 1]
        if len(wide) > 1 or k.numel() != old[d] or not torch.equal(k.flatten(), torch.arange(old[d])):
            return False
        if wide:
            if wide[0] <= last:
                return False
            last = wide[0]
    return torch.Size(old).numel() == torch.Size(new).numel()
