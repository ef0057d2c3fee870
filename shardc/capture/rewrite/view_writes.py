"""Write functional ops for writes through views.

before    v = slice(x, 1, 0, 4);  copy_(v, y);                     use(x), use(v)
after     v' = y;                 x' = slice_scatter(x, v', 1, 0, 4);  use(x'), use(v')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shardc.capture.rewrite import call_like
from shardc.capture.rewrite.functional_twins import mutates
from shardc.passes.canonical.rewrite import Args
from shardc.torch_private import OpOverload

aten = torch.ops.aten
Aliased = Callable[[fx.Node], fx.Node | None]

#: Views of a part -> the op that puts the part back: (whole, part, *the view's other arguments).
_PARTS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
#: Views of the whole in the same order: put back by their shape.
_SAME_ORDER = {
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.squeeze.dims,
    aten.detach.default,
    aten.flatten.using_ints,
    aten.alias.default,
    aten.unflatten.int,
}


def can_write(
    x: fx.Node, writer: fx.Node, family: list[fx.Node], order: Mapping[fx.Node, int], aliased: Aliased
) -> bool:
    """Return whether a write to the view `x` can be put back into its base and all later-read views."""
    node: fx.Node | None = x
    while node is not None and (parent := aliased(node)) is not None:
        if (
            not mutates(node)
            and node.target not in _PARTS
            and node.target not in _SAME_ORDER
            and _transposed(node) is None
        ):
            return False
        node = parent
    return all(
        _certain(n) for n in family if order[n] < order[writer] and any(order[u] > order[writer] for u in n.users)
    )


def write(
    x: fx.Node, new: fx.Node, writer: fx.Node, order: dict[fx.Node, int], aliased: Aliased
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Put `new`, the value of the view `x` from `writer` on, into its base tensor, at the insertion point.

    Later reads of the tensor or its views get the new value. Returns the tensor, its new value, and the view of that.
    """

    def call(target: Any, *args: Any, **options: Any) -> fx.Node:
        added = call_like(writer, target, *args, **options)
        order[added] = order[writer]
        return added

    root, value = x, new
    while (whole := aliased(root)) is not None:
        root, value = whole, _replaced(root, whole, value, call)
    fresh = {root: value}

    def renewed(view: fx.Node) -> fx.Node:
        """Return the same view of the new value, in which later writes through other views must show."""
        if view not in fresh:
            parent = aliased(view)
            assert parent is not None
            options: dict[str, Any] = dict(view.kwargs)
            fresh[view] = call_like(view, view.target, renewed(parent), *view.args[1:], **options)
            order[fresh[view]] = order[writer]
        return fresh[view]

    for view in list(_family(root, aliased)):
        later = [u for u in view.users if order.get(u, -1) > order[writer]]
        if order[view] < order[writer] and later:
            for user in later:
                user.replace_input_with(view, renewed(view))
    seen = renewed(x) if writer.users else new
    order.setdefault(value, order[writer])
    return root, value, seen


def _family(root: fx.Node, aliased: Aliased) -> Iterator[fx.Node]:
    """Yield a tensor and all its views, in the order in which they are made."""
    yield root
    for user in list(root.users):
        if aliased(user) is root:
            yield from _family(user, aliased)


def _replaced(view: fx.Node, whole: fx.Node, part: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Return the whole with a part of it replaced. call: adds a call."""
    val = whole.meta["val"]
    if view.target in _PARTS and val.is_complex():
        return _replaced_complex(view, whole, part, call)
    if view.target in _PARTS:
        return call(_PARTS[view.target], whole, part, *view.args[1:], **view.kwargs, val=val)
    if (order := _transposed(view)) is not None:
        return call(aten.permute.default, part, [order.index(d) for d in range(len(order))], val=val)
    return call(aten.reshape.default, part, list(val.shape), val=val)


def _replaced_complex(view: fx.Node, whole: fx.Node, part: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Put back complex parts as pairs of reals: torch cannot differentiate those ops on complex numbers."""
    val = whole.meta["val"]
    assert isinstance(view.target, OpOverload)
    _, *arguments = Args(view.target, view.args, view.kwargs).named.items()
    rest = [x % val.dim() if name.startswith("dim") else x for name, x in arguments]

    def paired(x: fx.Node) -> fx.Node:
        plain = call(aten.resolve_conj.default, x, val=x.meta["val"].resolve_conj())
        return call(aten.view_as_real.default, plain, val=torch.view_as_real(plain.meta["val"]))

    real, pairs = paired(whole), paired(part)
    if view.target is aten.diagonal.default:  # a diagonal is the last dim of its view
        pairs = call(aten.transpose.int, pairs, -2, -1, val=pairs.meta["val"].transpose(-2, -1))
    put = call(_PARTS[view.target], real, pairs, *rest, val=real.meta["val"])
    return call(aten.view_as_complex.default, put, val=val)


def _transposed(view: fx.Node) -> list[int] | None:
    """Return the order in which a transposing view has its dims; None for other views."""
    n = view.meta["val"].dim() if isinstance(view.meta.get("val"), torch.Tensor) else 0
    order = list(range(n))
    if view.target is aten.permute.default:
        return [int(d) % n for d in view.args[1]]  # type: ignore[union-attr, arg-type]
    if view.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default, aten.mT.default):
        a, b = view.args[1:3] if view.target is aten.transpose.int else (0, 1) if n == 2 else (None, None)
        if a is None or b is None:
            return order if n < 2 else None
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


def _certain(node: fx.Node) -> bool:
    """Return whether it is certain what a node shares memory with. (`reshape` and `contiguous` may copy.)"""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op == "placeholder"
    return torch.Tag.maybe_aliasing_or_mutating not in node.target.tags and node.target not in (
        aten.reshape.default,
        aten.contiguous.default,
    )
