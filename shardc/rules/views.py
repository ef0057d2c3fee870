"""Rules of ops that only move elements: reshapes, permutations, slices, splits, concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from shardc.ir.placement import Placement, Shard
from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, rule, rules
from shardc.rules.core.shared_signatures import every_operand, names_of, whole_dims
from shardc.rules.core.strategy import Strategy, over_dim
from shardc.rules.pointwise import local_size
from shardc.runtime import ops

aten = torch.ops.aten


# --- reshape ----------------------------------------------------------------------------------------------------------


def walk(old: Sequence[int], new: Sequence[int]) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """Find common factors of two shapes of equal size: (old dims, new dims, sizes, whole factors).

    Both shapes are read from the left; the gcd of the remainders of the two current dims is a factor of both. Where it
    is one, the shortest runs of dims with equal products form a block: common factors are then peeled off its right
    end, and the remainder is ordered differently in both and stays whole.

    >>> walk([4, 6], [2, 12])[:2]
    ([('f0', 'f1'), ('f2',)], [('f0',), ('f1', 'f2')])
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in old], [[] for _ in new])

    def factor(size: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    if math.prod(old) == 0:
        for side, shape in enumerate((old, new)):
            for d, s in enumerate(shape):
                if s != 1:
                    dims[side][d].append(factor(s))
        return [tuple(d) for d in dims[0]], [tuple(d) for d in dims[1]], sizes, set(sizes)

    # (dim, remaining size), without sizes of one
    left = [(d, s) for d, s in enumerate(old) if s != 1]
    right = [(d, s) for d, s in enumerate(new) if s != 1]
    while left and right:
        (i, a), (j, b) = left[0], right[0]
        g = math.gcd(a, b)
        if g > 1:
            name = factor(g)
            dims[0][i].append(name)
            dims[1][j].append(name)
            left[0:1] = [(i, a // g)] if a > g else []
            right[0:1] = [(j, b // g)] if b > g else []
            continue
        m = n = 1
        while (p := math.prod(s for _, s in left[:m])) != (q := math.prod(s for _, s in right[:n])):
            m, n = (m + 1, n) if p < q else (m, n + 1)
        blocks = (left[:m], right[:n])
        left, right = left[m:], right[n:]
        tail: list[tuple[int, int, str]] = []
        while (g := math.gcd(blocks[0][-1][1], blocks[1][-1][1])) > 1:
            name = factor(g)
            tail.append((blocks[0][-1][0], blocks[1][-1][0], name))
            for block in blocks:
                d, s = block.pop()
                if s > g:
                    block.append((d, s // g))
        for side, block in enumerate(blocks):
            for d, s in block:
                name = factor(s)
                whole.add(name)
                dims[side][d].append(name)
        for i, j, name in reversed(tail):
            dims[0][i].append(name)
            dims[1][j].append(name)
    return [tuple(d) for d in dims[0]], [tuple(d) for d in dims[1]], sizes, whole


def reshape(call: Call) -> Signature:
    old, new, sizes, whole = walk(call.operands[0].shape, call.results[0].shape)
    return Signature((tuple(old),), (tuple(new),), sizes, frozenset(), frozenset(whole))


def local_reshape(call: LocalCall) -> fx.Node:
    """Emit reshape, never view: a rank's part may have other strides than the whole."""
    return call.emit(aten.reshape.default, (call.args[0], list(call.out_shape)), {})


rules(
    "view reshape _unsafe_view flatten.using_ints unflatten.int squeeze squeeze.dim squeeze.dims unsqueeze",
    reshape,
    linear="0",
    local=local_reshape,
)


# --- permutations -----------------------------------------------------------------------------------------------------


def _permuted(call: Call, order: Sequence[int]) -> Signature:
    names = names_of(len(order))
    return call.fit([names], [[names[d] for d in order]])


def permute(call: Call) -> Signature:
    return _permuted(call, [call.dim(d) for d in call.arg("dims")])


def transpose(call: Call) -> Signature:
    order = list(range(len(call.operands[0].shape)))
    a, b = call.dim("dim0"), call.dim("dim1")
    order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def transpose_all(call: Call) -> Signature:
    return _permuted(call, list(reversed(range(len(call.operands[0].shape)))))


rule(aten.permute.default, permute, linear="0")
rule(aten.transpose.int, transpose, linear="0")
rules("t numpy_T", transpose_all, linear="0")


# --- repeating --------------------------------------------------------------------------------------------------------


def expand(call: Call) -> Signature:
    """Split every dim; new and stretched dims are factors that the operand lacks."""
    names = names_of(len(call.results[0].shape))
    return call.fit([names[len(names) - len(call.operands[0].shape) :]], [names])


rules("expand broadcast_to", expand, linear="0", local=local_size)


def repeat(call: Call) -> Signature:
    """Split every dim as (repeats, dim): major digits are copies, of which each rank may make some."""
    x, times = call.operands[0].shape, call.arg("repeats")
    names = [""] * (len(times) - len(x)) + names_of(len(x))
    out = [f"r{i} {n}" if t != 1 else n for i, (t, n) in enumerate(zip(times, names, strict=True))]
    return call.fit([names_of(len(x))], [out], **{f"r{i}": t for i, t in enumerate(times) if t != 1})


def local_repeat(call: LocalCall) -> fx.Node:
    """Repeat as often as this rank needs."""
    x, times = call.call.operands[0].shape, call.call.arg("repeats")
    local = (1,) * (len(times) - len(x)) + call.local(0)
    return call.same(repeats=[t if not s else o // s for t, s, o in zip(times, local, call.out_shape, strict=True)])


rule(aten.repeat.default, repeat, linear="0", local=local_repeat)


def repeat_interleave(call: Call) -> Signature:
    n, dim = len(call.operands[0].shape), call.arg("dim")
    if dim is None or not isinstance(call.arg("repeats"), int):
        return call.fit([names_of(n, range(n))], [["o!"]])
    d, names = call.dim(dim), names_of(n)
    return call.fit([names], [[*names[:d], f"d{d} r", *names[d + 1 :]]])


def local_repeat_interleave(call: LocalCall) -> fx.Node:
    """Repeat as often as this rank needs, and set output_size where the call has it."""
    dim, news = call.call.arg("dim"), {}
    if dim is not None and isinstance(call.call.arg("repeats"), int):
        d = call.call.dim(dim)
        size = call.local(0)[d]
        news = {"repeats": call.out_shape[d] // size} if call.split("r") else {}
        news |= {"output_size": call.out_shape[d]} if call.call.arg("output_size") is not None else {}
    return call.same(**news)


rule(aten.repeat_interleave.self_int, repeat_interleave, linear="0", local=local_repeat_interleave)


# --- parts ------------------------------------------------------------------------------------------------------------


def cut(call: Call) -> Signature:
    """Split x[a:b:c] outside of dim, and inside it where the slice is one of equal parts.

    One of equal parts: the dim is (part, place in it); every k-th entry: (place, part); the place may be split. A slice
    of all entries is the tensor itself; for any other range the dim stays whole.
    """
    x, d = call.operands[0].shape, call.dim("dim")
    size, names = call.results[0].shape[d], names_of(len(x))
    start, _, step = _range(call)
    if size == x[d] and step == 1:
        return call.fit([names], [names])
    inside, out = f"d{d}!", "o!"
    if size and x[d] % size == 0 and (step == x[d] // size or (step == 1 and start % size == 0)):
        inside, out = "part! o" if step == 1 else "o part!", "o"
    return call.fit(*([[*names[:d], dim, *names[d + 1 :]]] for dim in (inside, out)))


def _range(call: Call) -> tuple[int, int, int]:
    """Return start, stop and step of a slice, as numbers from 0 to the dim's size."""
    size = call.operands[0].shape[call.dim("dim")]
    return slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(size)


def local_range(call: Call, size: int, own: int) -> tuple[int, ...]:
    """Return a rank's slice arguments: `size` entries of its `own` entries."""
    start, _, step = _range(call)
    if step != 1:
        return start, own, step
    start = start // call.results[0].shape[call.dim("dim")] * size
    return start, start + size


def local_cut(call: LocalCall) -> fx.Node:
    """Slice the same part of this rank's entries if the dim is split; do nothing if all are taken."""
    d = call.call.dim("dim")
    if not call.inputs[0].shards(d):
        return call.same()
    size, local = call.out_shape[d], call.local(0)[d]
    if size in (local, 0):  # an empty part has no rule that splits the dim
        return call.args[0]  # type: ignore[no-any-return]
    return call.emit(aten.slice.Tensor, (call.args[0], d, *local_range(call.call, size, local)), {})


rule(aten.slice.Tensor, cut, linear="0", local=local_cut)
rules("narrow flip roll", whole_dims, linear="0")


def select(call: Call) -> Signature:
    """Keep the dim of x.select(dim, i) or x.unbind(dim) whole; results lack it."""
    n, d = len(call.operands[0].shape), call.dim("dim")
    names = names_of(n, {d})
    return call.fit([names], [names[:d] + names[d + 1 :] for _ in call.results])


def local_select(call: LocalCall) -> fx.Node:
    d = call.call.dim("dim")
    if not call.axes("owner"):
        return call.same()
    size, (digits, wide) = call.call.operands[0].shape[d], call.digits(0, d)
    index, (_, s) = call.call.arg("index") % size, call.inputs[0].shards(d)[0]
    index += index // (size // s.blocks) * s.padding  # its index in the padded dim
    return call.emit(ops.select_partial, (call.args[0], call.mesh_node, d, digits, wide, index), {})


# the others add zeros, cheaper than a gather
_owner = over_dim("owner", lambda c: (c.dim("dim"),), padded_inside=True)
rule(aten.select.int, select, linear="0", local=local_select, extra=_owner)
rule(aten.unbind.int, select, linear="0")


def pad(call: Call) -> Signature:
    n, amounts = len(call.operands[0].shape), call.arg("pad")
    touched = {n - 1 - i // 2 for i, a in enumerate(amounts) if a}
    names = names_of(n, touched)
    return call.fit([names], [[f"o{i}!" if i in touched else n for i, n in enumerate(names)]])


rule(aten.constant_pad_nd.default, pad, linear=lambda c: "0" if c.arg("value") == 0 else "")
rule(aten.pad.default, pad, linear=lambda c: "" if c.arg("value") else "0")


def split(call: Call) -> Signature:
    """Split a digit inside equal parts: the dim is (parts, part). Unequal parts: see `by_sections`."""
    d = call.dim("dim")
    parts = [r.shape[d] for r in call.results]
    before, after = (names := names_of(len(call.operands[0].shape)))[:d], names[d + 1 :]
    equal = len(set(parts)) == 1
    outs = [[*before, "c" if equal else f"c{i}!", *after] for i in range(len(parts))]
    return call.fit([[*before, "k! c" if equal else f"d{d}!", *after]], outs)


def by_sections(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies for a dim that is split part by part: every part becomes one shard, or sections.

    [16] by sections 8|2 2|4, in parts of 8, 4 and 4:   8 plain, 4 by its digit 2, 4 plain
    """
    d = call.dim("dim")
    parts = tuple(r.shape[d] for r in call.results)
    cut = (p for p in available[0] if isinstance(p, Shard) and p.dim == d and p.sections)
    for p in sorted(cut, key=lambda p: p.sections):
        outs = _in_parts(p, parts) if all(s % n == 0 for s in p.sections) else None
        if outs is not None and (len(set(parts)) > 1 or p.sections != parts):  # equal parts are a plain digit
            yield Strategy("sections", (p,), outs)


def _in_parts(p: Shard, parts: Sequence[int]) -> tuple[Shard, ...] | None:
    """Return how each part of a dim in sections is split; None if a section is in two parts."""
    left, shards = list(p.sections), []
    for part in parts:
        inside: list[int] = []
        while left and sum(inside) < part:
            inside.append(left.pop(0))
        if sum(inside) != part:
            return None
        shards.append(Shard(p.dim, len(inside)) if len(set(inside)) <= 1 else Shard(p.dim, 1, tuple(inside)))
    return tuple(shards)


def in_sections(p: Shard, size: int) -> tuple[int, ...]:
    """Return the sections of one part of this size: the reverse of `_in_parts`."""
    return p.sections or (size // p.split,) * p.split


def local_split(call: LocalCall) -> fx.Node:
    d = call.call.dim("dim")
    sizes = [o.local_shape(r.shape, call.mesh)[d] for o, r in zip(call.outputs, call.call.results, strict=True)]
    return call.emit(aten.split_with_sizes.default, (call.args[0], sizes, d), {})


rules("split.Tensor split_with_sizes chunk split.sizes", split, linear="0", local=local_split, extra=by_sections)


def cat(call: Call) -> Signature:
    """Split a digit inside equal parts, as one inside (parts, part). Unequal parts: the dim stays whole.

    Empty parts do not count; torch allows them to be 1-d where the others have more dims.
    """
    d = call.dim("dim") if len(call.operands[0].shape) > 1 else call.arg("dim") % len(call.results[0].shape)
    n = len(call.results[0].shape)
    before, after = (names := names_of(n))[:d], names[d + 1 :]
    parts = [v.shape[d] if len(v.shape) == n else 0 for v in call.operands]
    equal = len({p for p in parts if p}) == 1
    dims = ["z!" if p == 0 else "c" if equal else f"c{i}!" for i, p in enumerate(parts)]
    ins = [[*before, o, *after] if len(v.shape) == n else [o] for o, v in zip(dims, call.operands, strict=True)]
    return call.fit(ins, [[*before, "k! c" if equal else f"d{d}!", *after]])


def stack(call: Call) -> Signature:
    n = len(call.results[0].shape)
    names = names_of(n, {d := call.arg("dim") % n})
    return call.fit([names[:d] + names[d + 1 :] for _ in call.operands], [names])


rule(aten.cat.default, cat, linear=every_operand)
rule(aten.stack.default, stack, linear=every_operand)


def last_two_whole(call: Call) -> Signature:
    names = names_of(n := len(call.operands[0].shape), {n - 1, n - 2})
    return call.fit([names], [names])


rules("tril triu", last_two_whole, linear="0")


def diagonal(call: Call) -> Signature:
    """Keep both dims of x.diagonal(offset, dim1, dim2) whole; they become one, the last."""
    a, b = call.dim("dim1"), call.dim("dim2")
    names = names_of(len(call.operands[0].shape), {a, b})
    return call.fit([names], [[*(n for i, n in enumerate(names) if i not in (a, b)), "o!"]])


rule(aten.diagonal.default, diagonal, linear="0")


def diag_embed(call: Call) -> Signature:
    """Keep the last dim whole, and the two dims that it becomes."""
    x, y = len(call.operands[0].shape), len(call.results[0].shape)
    pair = [call.arg("dim1") % y, call.arg("dim2") % y]
    names = names_of(x, {x - 1})
    rest = iter(names)
    return call.fit([names], [[f"o{i}!" if i in pair else next(rest) for i in range(y)]])


rule(aten.diag_embed.default, diag_embed, linear="0")


def unfold(call: Call) -> Signature:
    """Keep dim whole in x.unfold(dim, size, step): windows along dim, their elements in a new last dim."""
    d = call.dim("dimension")
    names = names_of(len(call.operands[0].shape), {d})
    return call.fit([names], [[*names[:d], "o!", *names[d + 1 :], "w!"]])


rule(aten.unfold.default, unfold, linear="0")
