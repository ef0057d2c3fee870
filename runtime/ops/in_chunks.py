"""Compute products, and what follows them row by row, in chunks of rows: few rows of classes exist at a time.

    parts = ops.in_chunks(4, (('aten.linear.default', ('%0', '%2'), ()),
                              ('ops.sum_exp', ('%3', '%1', [1]), ())), ((4, 0),), (x, top), (weight,), mesh)

The body has lines (op, arguments, keyword arguments). `%i` is a value: first the tensors with rows, of which a chunk
has a part along dim 0, then the whole ones, then the results of the lines; `%mesh` is the mesh. Backward computes the
lines of a chunk again, under autograd, and adds up gradients of whole tensors in float32 at least. So only the operands
are saved, and products are computed twice. Gradients of products are added in place, and a cross entropy of nothing but
a product works in the memory of its logits: a rank holds one chunk of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.ops.local_math import Mesh, nll, nll_overwriting, nll_stats
from shardc.runtime.ops.opaque import op_of
from shardc.runtime.ops.with_backward import with_backward
from shardc.torch_private import OpOverload

aten = torch.ops.aten
#: Ops on elements that torch does not tag so.
_ON_ELEMENTS = {
    *(aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default),
    *(aten.kl_div.default, aten.binary_cross_entropy_with_logits.default, aten.smooth_l1_loss.default),
}
#: Ops along classes -> the place of the argument that names dims. The first keep a row of classes, the others leave a
#: few numbers of it.
_KEEP = {aten.softmax.int: 1, aten.log_softmax.int: 1}
_REDUCE: dict[Any, int] = {
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default), 1),
    **dict.fromkeys((aten.argmax.default, aten.gather.default, "largest", "partial_mean"), 1),
    **{"sum_exp": 2, "gather_partial": 3},
}
_LOSSES = {"nll", "nll_stats"}
#: Losses that may take the memory of their logits, if only such lines are before them.
_IN_PLACE: dict[Any, Any] = {nll: nll_overwriting, nll_stats: functools.partial(nll_stats, overwrite=True)}
_NOT_SAVED = {"aten.linear.default", "aten._to_copy.default", "ops.fill_padding", "ops.nll", "ops.nll_stats"}
#: A line of a body, and the value that it names by its number.
Line = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def by_rows(target: Any, args: Sequence[Any], ndim: int) -> str:
    """Return "keeps" for an op on rows of classes, the last of `ndim` dims, whose result has them too.

    "reduces": its result has a few numbers of each row. "": it may mix rows, so it has no chunks.
    """
    name: Any = target if isinstance(target, OpOverload) else getattr(target, "__name__", "")
    if name in _LOSSES:
        return "reduces" if ndim == 2 else ""
    if name == "fill_padding":
        return "keeps" if args[2] == ndim - 1 else ""
    place = _KEEP.get(name, _REDUCE.get(name))
    if place is not None:
        dims = args[place] if len(args) > place else None
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        along = len(dims) == 1 and dims[0] in (-1, ndim - 1)
        return ("keeps" if name in _KEEP else "reduces") if along else ""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return ""
    names = [a.name for a in target._schema.arguments]
    if "reduction" in names and 0 not in args[names.index("reduction") :][:1]:
        return ""  # a loss that adds its elements up
    return "keeps" if torch.Tag.pointwise in target.tags or target in _ON_ELEMENTS else ""


def named(x: Any, values: Sequence[Any], mesh: Any) -> Any:
    """Return an argument of a line with the values in place of their names."""
    if isinstance(x, str) and x.startswith("%"):
        return mesh if x == "%mesh" else values[int(x[1:])]
    return type(x)([named(y, values, mesh) for y in x]) if isinstance(x, (list, tuple)) else x


def lines(body: Sequence[Line], values: list[Any], mesh: Any) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Yield each line's op and arguments. `values` has to get each result before the next.

    Raises ShardcError for an op that may mix rows: programs may come from untrusted sources.
    """
    for name, args, kwargs in body:
        target, of_line = op_of(name), named(args, values, mesh)
        if target is not aten.linear.default and not by_rows(target, args, 2):
            raise ShardcError(f"{name} is not an op on rows", where="ops.in_chunks", fix="compile again")
        yield target, of_line, {k: named(v, values, mesh) for k, v in kwargs}


class _Layer(NamedTuple):
    """The result of a linear layer, and the numbers of its operands."""

    result: Tensor
    operands: list[int]


def _run(
    body: Sequence[Line], outputs: Sequence[tuple[int, int]], values: list[Any], mesh: Mesh, needs: Sequence[bool] = ()
) -> tuple[list[Tensor], list[_Layer]]:
    """Return the results, and the linear layers, whose results are leaves of autograd. needs: of the given values."""
    layers, read = list[_Layer](), [[int(x[1:]) for x in _names(rest)] for _, *rest in body]
    given, last = len(values), {i: at for at, of_line in enumerate(read) for i in of_line}
    results = Counter(i for of_line in read for i in of_line if i >= given)
    in_place = {name for name, _, _ in body} <= _NOT_SAVED and max(results.values(), default=0) < 2
    kept = {i for i, _ in outputs}
    for at, (target, args, kwargs) in enumerate(lines(body, values, mesh)):
        if target is aten.linear.default:
            with torch.no_grad():
                values.append(target(*args, **kwargs))
            layers.append(_Layer(values[-1].requires_grad_(any(needs[i] for i in read[at] if needs)), read[at]))
        else:
            values.append((_IN_PLACE.get(target, target) if in_place else target)(*args, **kwargs))
        for i in {*read[at]} - kept:
            if last[i] == at:
                values[i] = None
    return [values[i] for i, _ in outputs], layers


def _names(x: Any) -> Iterator[str]:
    """Yield the names of values in an argument."""
    if isinstance(x, str) and x.startswith("%") and x != "%mesh":
        yield x
    for y in x if isinstance(x, (list, tuple)) else ():
        yield from _names(y)


def _forward(*given: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    *tensors, (size, rows, body, outputs, mesh) = given
    parts = []
    for top in range(0, tensors[0].shape[0], size):
        values = [x[top : top + size] if i < rows else x for i, x in enumerate(tensors)]
        parts.append(_run(body, outputs, values, mesh)[0])
    joined = (torch.cat(xs, dim) for xs, (_, dim) in zip(zip(*parts, strict=True), outputs, strict=True))
    return tuple(joined), given


def _backward(needs: Sequence[bool], *given: Any) -> list[Tensor | None]:
    *tensors, (size, rows, body, outputs, mesh) = given
    gs, tensors = tensors[: len(outputs)], tensors[len(outputs) :]
    wanted = [i for i in range(len(tensors)) if needs[i]]
    whole = [x.detach().requires_grad_(needs[i]) if i >= rows else x for i, x in enumerate(tensors)]
    totals = {
        i: torch.zeros_like(x, dtype=x.dtype if i < rows else torch.promote_types(x.dtype, torch.float32))
        for i, x in ((i, tensors[i]) for i in wanted)
    }
    for top in range(0, tensors[0].shape[0], size):
        part = slice(top, top + size)
        leaves = [x[part].detach().requires_grad_(needs[i]) if i < rows else x for i, x in enumerate(whole)]
        with torch.enable_grad():
            results, layers = _run(body, outputs, list(leaves), mesh, needs)
        pairs = [
            (y, g.narrow(dim, top, y.shape[dim]))
            for y, g, (_, dim) in zip(results, gs, outputs, strict=True)
            if g is not None and y.requires_grad
        ]
        if not pairs:
            continue
        of = [x for x in layers if x.result.requires_grad]
        ys, of_ys = zip(*pairs, strict=True)
        sources = [*(leaves[i] for i in wanted), *(x.result for x in of)]
        grads: list[Any] = list(torch.autograd.grad(ys, sources, of_ys, allow_unused=True))
        operands = [x.operands for x in of]
        del results, layers, of, sources, ys, of_ys, pairs
        for i, g in zip(wanted, grads[: len(wanted)], strict=True):
            if g is not None:
                (totals[i][part] if i < rows else totals[i]).add_(g)
        for (x, weight, *bias), g in zip(operands, grads[len(wanted) :], strict=True):
            if g is None:
                continue
            if needs[x]:
                totals[x][part] += g @ tensors[weight]
            if needs[weight]:
                _add_product(totals[weight], g.t(), tensors[x][part])
            for i in bias:
                if needs[i]:
                    totals[i] += g.sum(0, dtype=totals[i].dtype)
        del grads, g  # before the next chunk: they have the memory of its logits
    return [totals[i].to(x.dtype) if i in totals else None for i, x in enumerate(tensors)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, which may be in a narrower dtype, to total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def in_chunks(
    chunks: int,
    body: Sequence[Line],
    outputs: Sequence[tuple[int, int]],
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    mesh: Mesh,
    *,
    trains: bool = True,
) -> tuple[Tensor, ...]:
    """Return results of the body's lines, computed in `chunks` chunks of rows. outputs: (number, its dim of rows).

    rows: tensors with rows in dim 0. whole: tensors that each chunk reads. trains: False: nothing has a gradient.
    """
    size = max(-(-rows[0].shape[0] // chunks), 1)
    tensors = [x if trains else x.detach() for x in (*rows, *whole)]
    result: tuple[Tensor, ...] = with_backward(_forward, _backward, *tensors, (size, len(rows), body, outputs, mesh))
    return result
