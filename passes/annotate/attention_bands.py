"""Turn masks that a model makes of positions into bands: the keys that each row may see.

    before   mask = (keys > rows - 1024) & (keys <= rows); scaled_dot_product_attention(q, k, v, mask)
    after    attention(q, k, v, window=(-1023, 0))

Values are followed from `arange`: sums of indices (j - i + 3), comparisons of them (the half of the square on one side
of a diagonal), and their `and`, `or`, `not`. Where nothing is known, a row may see the key. So the band is a bound, and
the mask stays beside it, unless the mask is known completely. If the sequence is not split, a bound saves no
communication, and attention stays as the model has it, except for a mask that equals `is_causal`, which kernels know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.rules.attention import OPS
from shardc.rules.core.op_call import call_of
from shardc.runtime import ops
from shardc.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class _Affine:
    """Integers that are known: (sum over dims of scale * index, plus a constant) divided by `over`, rounded down.

    Dims count from the end, so that they are the same after broadcasting.
    """

    scale: dict[int, int] = field(default_factory=dict)
    constant: int = 0
    over: int = 1


@dataclass(frozen=True)
class _Band:
    """Truth values with known bounds: False where j - i, for indices [..., i, j], is below low or above high.

    None: no bound. exact: all others are True.
    """

    low: int | None = None
    high: int | None = None
    exact: bool = False


_Fact = _Affine | _Band


def use_bands(spec: Spec, program: Program) -> None:
    """Add the known bounds of masks to their attention, and drop masks that are known completely."""
    facts: dict[fx.Node, _Fact | None] = {}
    for node in program.graph.nodes:
        facts[node] = _fact_of(node, facts) if node.op == "call_function" else None
        if node.target in OPS:
            _use_band(program.graph, node, facts, causal_only=spec.token_ranks == 1)
    for node in reversed(list(program.graph.nodes)):
        if node in facts and isinstance(facts[node], _Fact) and not node.users:
            program.graph.erase_node(node)


def _use_band(graph: fx.Graph, node: fx.Node, facts: dict[fx.Node, _Fact | None], causal_only: bool) -> None:
    """Replace one attention by one with the bounds of its mask, if they are known.

    causal_only: replace it only if the mask equals `is_causal`.
    """
    call = call_of(node)
    position = {"query": 0, "key": 1, "value": 2, "attn_mask": 3}
    args: list[Any] = [*node.args[:4], *[None] * (4 - len(node.args))]
    for name, i in position.items():
        args[i] = node.kwargs.get(name, args[i])
    mask = args[3]
    band = facts.get(mask) if isinstance(mask, fx.Node) else None
    if not isinstance(band, _Band) or (band.low, band.high) == (None, None):
        return
    rows, keys = call.operands[0].shape[-2], call.operands[1].shape[-2]
    if value_of(mask).shape[-2:] != (rows, keys):
        return
    p, scale, grouped = call.arg("dropout_p", call.arg("p")), call.arg("scale"), call.arg("enable_gqa")
    rng, index = (node.args[8], node.args[9]) if node.target is OPS[1] else (None, 0)
    without_mask = band.exact and not p
    causal = without_mask and (band.low, band.high) == (None, 0) and rows == keys
    if causal_only and not causal:
        return
    window: dict[str, Any] = {} if causal else {"window": (band.low, band.high)}
    with graph.inserting_before(node):
        operands = (*args[:3], None if without_mask else mask, p, causal)
        if causal_only:
            new = graph.call_function(
                aten.scaled_dot_product_attention.default, operands, {"scale": scale, "enable_gqa": grouped}
            )
        else:
            new = graph.call_function(ops.attention, (*operands, scale, grouped, rng, index), window)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _fact_of(node: fx.Node, facts: dict[fx.Node, _Fact | None]) -> _Fact | None:
    """Return what is known of an op's result from what is known of its operands; None: nothing."""
    value = node.meta.get("value")
    if not isinstance(value, Value) or value.dtype.is_floating_point or value.dtype.is_complex:
        return None
    rule = _RULES.get(node.target)
    xs = [facts.get(a) if isinstance(a, fx.Node) else a for a in node.args]
    return rule(node, xs) if rule is not None else None


def _arange(node: fx.Node, xs: list[Any]) -> _Fact | None:
    start, step = (xs[0] if len(xs) > 1 else 0), (xs[2] if len(xs) > 2 else 1)
    return _Affine({-1: step}, start) if isinstance(start, int) and isinstance(step, int) else None


def _full(node: fx.Node, xs: list[Any]) -> _Fact | None:
    """Return what is known of a filled tensor: a number; for truth values only True, which is no bound."""
    fill = xs[1]
    if isinstance(fill, (bool, int)) and value_of(node).dtype == torch.bool:
        return _Band(exact=True) if fill else None
    return _Affine({}, fill) if isinstance(fill, int) else None


def _same(node: fx.Node, xs: list[Any]) -> _Fact | None:
    """Return what is known of the same elements in another shape or integer type, or along new dims."""
    x = xs[0]
    old, new = value_of(node.args[0]).shape, value_of(node).shape  # type: ignore[arg-type]
    if isinstance(x, _Band):
        same_square = len(old) > 1 and 1 not in old[-2:] and old[-2:] == new[-2:]
        return x if same_square or (x.low, x.high) == (None, None) else None
    if not isinstance(x, _Affine) or value_of(node).dtype == torch.bool:
        return None
    if not x.scale:
        return x
    if node.target is aten.expand.default:
        return x  # dims of size one have no index
    long_old = [d - len(old) for d, s in enumerate(old) if s != 1]
    long_new = [d - len(new) for d, s in enumerate(new) if s != 1]
    if [old[d] for d in long_old] != [new[d] for d in long_new]:
        return None
    moved = dict(zip(long_old, long_new, strict=True))
    return _Affine({moved[d]: s for d, s in x.scale.items() if d in moved}, x.constant, x.over)


def _affine(x: Any) -> _Affine | None:
    """Return an integer or affine values as `_Affine`; None for all else."""
    return _Affine({}, x) if isinstance(x, int) and not isinstance(x, bool) else x if isinstance(x, _Affine) else None


def _plus(a: Any, b: Any, sign: int) -> _Affine | None:
    """Return a + sign * b."""
    a, b = _affine(a), _affine(b)
    if a is None or b is None or a.over != 1 or b.over != 1:
        return None
    scale = {d: a.scale.get(d, 0) + sign * b.scale.get(d, 0) for d in {**a.scale, **b.scale}}
    return _Affine({d: s for d, s in scale.items() if s}, a.constant + sign * b.constant)


def _sum(sign: int) -> Any:
    def add(node: fx.Node, xs: list[Any]) -> _Fact | None:
        return None if node.kwargs.get("alpha", 1) != 1 or len(xs) > 2 else _plus(xs[0], xs[1], sign)

    return add


def _times(node: fx.Node, xs: list[Any]) -> _Fact | None:
    if value_of(node).dtype == torch.bool:
        return _and(node, xs)
    a, b = _affine(xs[0]), _affine(xs[1])
    if a is None or b is None or a.over != 1 or b.over != 1:
        return None
    if a.scale and b.scale:
        return None
    a, b = (a, b) if a.scale else (b, a)
    return _Affine({d: s * b.constant for d, s in a.scale.items() if s * b.constant}, a.constant * b.constant)


def _divided(node: fx.Node, xs: list[Any]) -> _Fact | None:
    x, by = _affine(xs[0]), xs[1]
    floor = node.kwargs.get("rounding_mode", "floor") == "floor"
    return _Affine(x.scale, x.constant, by) if x and x.over == 1 and floor and isinstance(by, int) and by > 0 else None


#: Comparisons a ? b as bounds of a - b: (low, high).
_SIGNS: dict[str, tuple[int | None, int | None]] = {
    "lt": (None, -1), "le": (None, 0), "gt": (1, None), "ge": (0, None), "eq": (0, 0),
}  # fmt: skip


def _compared(name: str) -> Any:
    low, high = _SIGNS[name]

    def compare(node: fx.Node, xs: list[Any]) -> _Fact | None:
        a, b = _affine(xs[0]), _affine(xs[1])
        if a is None or b is None:
            return None
        loose = 0  # by how much the true bounds may be further out
        if name == "eq" and a.over == b.over > 1:  # indices in the same stretch are less than its length apart
            loose, a, b = a.over - 1, _Affine(a.scale, a.constant), _Affine(b.scale, b.constant)
        if (x := _plus(a, b, -1)) is None:
            return None
        bounds = tuple(None if n is None else n - x.constant for n in (low, high))
        if x.scale == {-1: -1, -2: 1}:  # i - j
            bounds = tuple(None if n is None else -n for n in reversed(bounds))
        elif x.scale != {-1: 1, -2: -1}:
            return None
        least, most = bounds
        return _Band(None if least is None else least - loose, None if most is None else most + loose, not loose)

    return compare


def _and(node: fx.Node, xs: list[Any]) -> _Fact | None:
    parts = [x if isinstance(x, _Band) else _Band() for x in xs[:2]]
    lows, highs = [s.low for s in parts if s.low is not None], [s.high for s in parts if s.high is not None]
    return _Band(max(lows, default=None), min(highs, default=None), all(s.exact for s in parts))


def _or(node: fx.Node, xs: list[Any]) -> _Fact | None:
    parts = [x if isinstance(x, _Band) else _Band() for x in xs[:2]]
    lows, highs = [s.low for s in parts if s.low is not None], [s.high for s in parts if s.high is not None]
    low, high = (min(lows) if len(lows) == 2 else None), (max(highs) if len(highs) == 2 else None)
    return _Band(low, high, parts[0] == parts[1] and parts[0].exact)


def _not(node: fx.Node, xs: list[Any]) -> _Fact | None:
    x = xs[0]
    if not isinstance(x, _Band) or not x.exact or (x.low is None) == (x.high is None):
        return None
    return _Band(x.high + 1, None, True) if x.high is not None else _Band(None, x.low - 1, True)  # type: ignore[operator]


def _triangle(lower: bool) -> Any:
    def cut(node: fx.Node, xs: list[Any]) -> _Fact | None:
        diagonal = xs[1] if len(xs) > 1 else 0
        if not isinstance(xs[0], _Band) or not isinstance(diagonal, int):
            return None
        return _and(node, [xs[0], _Band(None, diagonal, True) if lower else _Band(diagonal, None, True)])

    return cut


_RULES: dict[Any, Any] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full.default: _full,
    aten.ones.default: lambda node, xs: _full(node, [xs[0], True if value_of(node).dtype == torch.bool else 1]),
    aten.zeros.default: lambda node, xs: _full(node, [xs[0], False if value_of(node).dtype == torch.bool else 0]),
    **dict.fromkeys(
        (
            aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
            aten.expand.default, aten.alias.default, aten.clone.default, aten._to_copy.default,
        ),
        _same,
    ),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _times),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode), _divided),
    **{getattr(getattr(aten, n), form): _compared(n) for n in _SIGNS for form in ("Tensor", "Scalar")},
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _and),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _or),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
    aten.tril.default: _triangle(True),
    aten.triu.default: _triangle(False),
}  # fmt: skip
