"""Write FlexAttention as ops: `score_mod` and `mask_mod`, made for one score, run on all scores.

    flex_attention(q, k, v, block_mask=create_block_mask(lambda b, h, i, j: i >= j, ...))
    ->    i, j = arange(queries)[:, None], arange(keys);  scaled_dot_product_attention(q, k, v, i >= j)

The functions are called once, on indices of four dims [batch, 1, 1, 1], [1, heads, 1, 1], [1, 1, queries, 1] and
[1, 1, 1, keys] that broadcast against each other, so that a mask has the dims that it depends on and no others; then
it is a mask like any other (bands of it are recognised, documents are cut to a rank's rows).

    mask_mod                           the mask of torch's attention
    score_mod: score + f(b, h, i, j)   the float mask of torch's attention, -inf where the block mask hides a key
    any other score_mod                the attention is written out: product, score_mod, softmax, product

Calls on whole tensors mean the same as calls on single numbers for ops that work element by element, and for
tensors from outside that are read at one index for each dim (`slopes[h]`, `documents[b, i]`, `documents[b][i]`); others
are refused. The blocks of a BlockMask contain the same as its mask_mod, and are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.source import Source
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, TorchDispatchMode, pytree, replaced_flex_attention

aten = torch.ops.aten
Mod = Callable[..., Tensor]


def as_ops() -> AbstractContextManager[None]:
    """Replace `flex_attention` by ops in the block, under any imported name, compiled or not.

    `create_block_mask` then computes no blocks.
    """
    return replaced_flex_attention(partial(_written_out, {}), blocks=False)


def in_eager() -> AbstractContextManager[None]:
    """Compute it by torch's own definition in the block, unfused: its kernels have no backward on a CPU."""
    return replaced_flex_attention(None, blocks=True)


def _written_out(
    masks: dict[tuple[object, ...], tuple[Sequence[Any], Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod,
    block_mask: Sequence[Any],
    scale: float,
    options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op below `flex_attention`, on traced tensors.

    masks: those made so far, each beside its block mask, which keeps its id alive: layers under one block mask share
    it.
    query: f[b, h, s, d], key: f[b or 1, g, t, d], value: f[b or 1, g, t, e]. Returns f[b, h, s, e], and, if `options`
    request them, log-sum-exps and greatest scores over log(2), f[b, h, s], float32 at least.
    """
    if query.shape[0] != key.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = *query.shape[:3], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    which = id(next(x for x in block_mask if isinstance(x, Tensor))), *sizes
    if which not in masks:
        _check_blocks(block_mask)
        masks[which] = block_mask, _mask(block_mask[-1], sizes, query)
    _, mask = masks[which]
    form = _form(score_mod, sizes, query, wide)
    grouped = query.shape[1] != key.shape[1]
    aux = options["OUTPUT_LOGSUMEXP"], options["OUTPUT_MAX"]
    out = lse = most = None
    if form == "score" or (form == "sum" and wide == query.dtype):
        bias = mask
        if form == "sum":
            zero = torch.zeros((1, 1, 1, 1), dtype=wide, device=query.device)
            bias = _called(score_mod, "score_mod", zero, *_indices(sizes, query))
            bias = bias if mask is None else torch.where(mask, bias, -math.inf)
        bias = None if bias is None else bias.expand(*bias.shape[:2], *sizes[2:])
        out = F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=grouped)
    if out is None or any(aux):
        if grouped:
            key, value = (_for_each_head(x, query.shape[1]) for x in (key, value))
        scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale
        if form != "score":
            scores = _called(score_mod, "score_mod", scores, *_indices(sizes, query))
        if mask is not None:
            scores = torch.where(mask, scores, -math.inf)
        hidden = scores == -math.inf
        if out is None:  # a row that sees no key is zeros: the softmax of equal numbers, hidden again
            weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(wide).min), -1).masked_fill(hidden, 0.0)
            out = weights.to(query.dtype) @ value
        if aux[0]:
            lse = torch.where(hidden.all(-1), -math.inf, scores.logsumexp(-1)) / math.log(2)
        if aux[1]:
            most = scores.max(-1)[0] / math.log(2)
    nothing = query.new_empty(0)
    return out, nothing if lse is None else lse, nothing if most is None else most


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values f[b, g, t, d] -> f[b, heads, t, d], each of them heads / g times in a row."""
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, heads // g, t, d).reshape(b, heads, t, d)


def _indices(sizes: Sequence[int], like: Tensor) -> list[Tensor]:
    """Return four i64 tensors of four dims, each counting along one of them: batch, head, query, key."""
    shapes = ([n if d == dim else 1 for d in range(4)] for dim, n in enumerate(sizes))
    return [torch.arange(n, device=like.device).view(shape) for n, shape in zip(sizes, shapes, strict=True)]


def _mask(mask_mod: Mod, sizes: Sequence[int], query: Tensor) -> Tensor | None:
    """Return bool [b or 1, h or 1, s or 1, t or 1]; None: all True, if there is no block mask."""
    _tried(mask_mod, sizes, query, "mask_mod")
    mask = _called(mask_mod, "mask_mod", *_indices(sizes, query))
    return mask if mask.dim() else None if mask_mod is _no_mask() else mask.view(1, 1, 1, 1)


def _check_blocks(block_mask: Sequence[Any]) -> None:
    """Refuse a mask made of blocks (`BlockMask.from_kv_blocks`) without a mask_mod.

    torch's kernels leave out blocks that its own definition computes. A mask made in forward has no values to check.
    """
    _, _, partial_blocks, which, full_blocks, *_ = block_mask
    if block_mask[-1] is not _no_mask() or isinstance(partial_blocks, FakeTensor):
        return
    counts = [x for x in (partial_blocks, full_blocks) if x is not None]
    if untraced(lambda: int(sum(x.long() for x in counts).min())) < which.shape[-1]:
        fault = "a block mask of flex_attention leaves out blocks, and has no mask_mod that says so"
        fix = "make it by create_block_mask(mask_mod, ...), or give from_kv_blocks a mask_mod that hides them, too"
        raise source.of_call().error(fault, fix)


def _no_mask() -> Mod:
    from torch.nn.attention.flex_attention import noop_mask  # already loaded by the caller of flex_attention

    return noop_mask


def _form(score_mod: Mod, sizes: Sequence[int], query: Tensor, dtype: torch.dtype) -> str:
    """Return a score's form: "score" unchanged, "sum" with something independent of it, or "other"."""
    tried, out = _tried(score_mod, sizes, query, "score_mod", dtype)
    form = tried.form(out)
    return "other" if form == "sum" and out.dtype != dtype else form


def _tried(
    mod: Mod, sizes: Sequence[int], query: Tensor, kind: str, dtype: torch.dtype | None = None
) -> tuple[_Ops, Tensor]:
    """Return the ops of a mod, called on fake indices outside of the trace. dtype: of scores, if any."""

    def call() -> tuple[_Ops, Tensor]:
        with query.fake_mode if isinstance(query, FakeTensor) else nullcontext():
            indices = _indices(sizes, query)
            scores = [] if dtype is None else [torch.zeros(tuple(sizes), dtype=dtype, device=query.device)]
            with torch.no_grad(), _Ops(kind, scores, indices) as ops:
                out = _called(mod, kind, *scores, *indices)
        return ops, out

    return untraced(call)


def _called(mod: Mod, kind: str, *args: Tensor) -> Tensor:
    """Call mod(*args), where `table[h][i]` reads table[h, i]."""
    with _ReadAtOnce(kind) as reads:
        out = mod(*args)
    if id(out) in reads.waiting:
        raise _refused(kind, *_FEW, source.of_function(mod))
    return out


class _ReadAtOnce(TorchFunctionMode):
    """A mode that joins reads of a tensor by one index after the other: on numbers, table[h] is a row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.waiting: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}  # by id of the row, kept alive

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is not Tensor.__getitem__:
            self.refuse_rows((args, kwargs))
            return function(*args, **(kwargs or {}))
        x, index = args
        self.refuse_rows(index)
        _, x, read = self.waiting.get(id(x), (x, x, ()))
        index = *read, *(index if isinstance(index, tuple) else (index,))
        plain = all(type(i) is int or (isinstance(i, Tensor) and i.dtype != torch.bool) for i in index)
        counts = any(isinstance(i, Tensor) and i.dim() == len(_DIMS) for i in index)  # else it is a tensor from outside
        if not (plain and counts) or len(index) >= x.dim():
            return x[index]
        if x.requires_grad:
            raise _refused(self.kind, *_NO_BACKWARD, source.of_call())
        row = x.view_as(x)
        self.waiting[id(row)] = row, x, index
        return row

    def refuse_rows(self, values: Any) -> None:
        """Refuse values that contain a partly read tensor: only another index may take it."""
        if any(id(x) in self.waiting for x in pytree.tree_leaves(values)):
            raise _refused(self.kind, *_FEW, source.of_call())


_DIMS = ("batch", "head", "query", "key")
_FEW = (
    "reads a tensor at fewer indices than it has dims, or at other ones",
    "name an index for each dim: table[b, h, q_idx]",
)
_NO_BACKWARD = (
    "reads a tensor that has a gradient by one index after the other, of which torch has no backward",
    "name them at once: table[h, q_idx] and not table[h][q_idx]",
)


def _refused(kind: str, said: str, fix: str, place: Source) -> ShardcError:
    return place.error(f"the {kind} of flex_attention {said}", fix)


#: Elementwise ops without torch's tag.
_ELEMENTWISE = {aten.floor_divide.default, aten._to_copy.default, aten.alias.default, aten.lift_fresh.default}
_SAME = {aten._to_copy.default, aten.alias.default, aten.clone.default}
_LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}


class _Ops(TorchDispatchMode):
    """Watches a mod's ops, and refuses those that differ between all scores at once and each one.

    known: by id, a tensor that has an element for each score, and its form: "score", "sum" or "other" as in `_form`, or
    "index" if it does not depend on scores. numbers: by id, a tensor that is one number, and that.
    """

    def __init__(self, kind: str, scores: list[Tensor], indices: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.known = {id(x): (x, "score") for x in scores} | {id(x): (x, "index") for x in indices}
        self.numbers: dict[int, tuple[Tensor, float]] = {}

    def form(self, x: Any) -> str:
        """Return the form of a result; "index" if it depends on no index."""
        return self.known[id(x)][1] if id(x) in self.known else "index"

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = op(*args, **(kwargs or {}))
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if op in (aten.scalar_tensor.default, aten.full.default) and isinstance(out, Tensor) and not out.dim():
            self.numbers[id(out)] = out, args[-1]
        if op is aten.lift_fresh.default and (constant := getattr(args[0], "constant", None)) is not None:
            self.numbers[id(out)] = out, constant.item()
        if op in _NEW or not isinstance(out, Tensor) or not any(id(x) in self.known for x in operands):
            return out
        self._check(op, args, operands)
        self.known[id(out)] = out, self._of(op, args, kwargs or {}, out)
        return out

    def _check(self, op: OpOverload, args: Sequence[Any], operands: Sequence[Tensor]) -> None:
        at = [x for x in operands if id(x) not in self.known and x.dim()]
        if op is aten.index.Tensor:
            base, index = args
            whole = id(base) not in self.known and len(index) == base.dim() and None not in index
            at = [x for x in at if x is not base]
            if whole and not at:
                return
            fault, fix = _FEW
        elif op._schema.is_mutable:
            fault, fix = "changes a tensor in place", "write x = x + y, and not x += y"
        elif at:
            fault = f"uses a tensor of {at[0].dim()} dims as a whole"
            fix = "read one element of it for each score: table[h], documents[b, q_idx]"
        elif torch.Tag.pointwise not in op.tags and op not in _ELEMENTWISE | _LIKE:
            fault = f"calls {op.__name__.partition('.')[0]}, which does not work element by element"
            fix = "compute it outside, and read one element of the result for each score"
        else:
            return
        raise _refused(self.kind, fault, fix, source.of_call())

    def _of(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> str:
        """Return the form of a result."""
        if op in _LIKE:
            return "index"
        forms = [self.form(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if set(forms) == {"index"}:
            return "index"
        if op in _SAME and args[0].dtype == out.dtype:
            return forms[0]
        sums = [f in ("score", "sum") for f in forms]
        if op in (aten.add.Tensor, aten.sub.Tensor) and sum(sums) == 1 and "other" not in forms:
            plain = kwargs.get("alpha", 1) == 1 or sums[0]
            return "sum" if plain and (op is aten.add.Tensor or sums[0]) else "other"
        if op is aten.where.self and forms[0] == "index" and "other" not in forms:
            hides = [s or self._is_hidden(x) for s, x in zip(sums[1:], args[1:], strict=True)]
            return "sum" if all(hides) else "other"
        if op in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and sums[0] and forms[1] == "index":
            return "sum" if args[2] == -math.inf or self._is_hidden(args[2]) else "other"
        return "other"

    def _is_hidden(self, x: Any) -> bool:
        """Return whether it is -inf for every score."""
        return id(x) in self.numbers and self.numbers[id(x)][1] == -math.inf
