"""Share key-value heads between ranks without gathers: an axis is seen as (kv heads × ranks per head).

    before   tp=4, k_proj: f32[32, 64] "column", 2 key-value heads of 16 for 8 query heads
    after    tp = tp.0 × tp.1 = 2 × 2, k_proj: f32[32@tp.0, 64], q_proj: f32[128@tp.0@tp.1/2, 64]

Each rank then computes the keys of its head, as every rank that shares it does, and the gradients of k_proj are summed
over tp.1. Megatron-LM and vLLM copy heads for this (vllm: QKVParallelLinear.num_kv_head_replicas); here digits do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, producer_of, values_of
from shardc.ir.mesh import Mesh
from shardc.rules import attention
from shardc.rules.core import registry
from shardc.rules.core.choices import Choices, choices_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Shared:
    """Key-value heads that several query heads use. heads: their number (1 in multi-query attention).

    queries: the number of query heads. fused: one weight makes both.
    """

    heads: int
    queries: int
    fused: bool = False

    def shareable(self, n: int) -> bool:
        """Return whether n ranks can share heads: each head has as many ranks, and each rank as many query heads."""
        return n % self.heads == 0 and self.queries % n == 0


def shared(graph: fx.Graph) -> dict[fx.Node, Shared]:
    """Return the placeholders that are the weights (and biases) of key-value heads."""
    by_param: dict[fx.Node, Shared] = {}
    known: dict[Any, Choices] = {}
    for value, heads in _repeated_values(graph):
        for parameter, fused in _weights(value, known):
            by_param.setdefault(parameter, replace(heads, fused=fused))
    return by_param


def cuts(n: int, heads: Iterable[Shared]) -> Iterator[int]:
    """Yield the ranks after which a digit of n ranks ends: with more ranks than heads, (heads × ranks that share one).

    With layers of 2 and of 4 heads, 8 ranks have the digits 2, 2, 2: the first one splits 2 heads, the first two 4.
    """
    outer = 1
    for count in sorted({h.heads for h in heads if 1 < h.heads < n and h.shareable(n)}):
        if count % outer == 0:
            yield (outer := count)


def shares(mesh: Mesh, digits: Iterable[str], heads: Shared) -> list[str]:
    """Return those of an axis's digits whose ranks hold the same key-value heads."""
    digits = list(digits)
    sharing, outer, ranks = [], 1, math.prod(map(mesh.size, digits))  # outer: ranks of the digits up to this one
    for digit in digits:
        outer *= mesh.size(digit)
        divided = heads.heads % outer == 0
        if not divided and outer % heads.heads == 0 and heads.queries % ranks == 0:
            sharing.append(digit)
    return sharing


def _repeated_values(graph: fx.Graph) -> Iterator[tuple[fx.Node, Shared]]:
    """Yield values whose heads an op repeats or uses several times, as they are before that."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        used = operands_of(node)
        if node.target in attention.OPS:
            q, k, v = used[:3]
            queries, keys = shape_of(q), shape_of(k)
            if len(queries) > 3 and len(keys) > 3 and keys[-3] < queries[-3]:
                yield from ((x, Shared(keys[-3], queries[-3])) for x in (k, v))
        elif node.target is aten.repeat_interleave.self_int and node.args[2:]:
            shape, out = shape_of(used[0]), shape_of(node)
            d = int(node.args[2]) % len(shape)
            yield used[0], Shared(shape[d], out[d])
        elif node.target in (aten.expand.default, aten.broadcast_to.default):
            yield from _expanded(node, used[0])
        elif node.target is aten.matmul.default:
            a, b = map(shape_of, used)
            if len(a) == len(b) > 3 and b[-3] == 1 < a[-3]:
                yield used[1], Shared(1, a[-3])


def _expanded(node: fx.Node, x: fx.Node) -> Iterator[tuple[fx.Node, Shared]]:
    """Yield x for [.., g, 1, ..] -> [.., g, r, ..], if a user joins these two dims."""
    old, new = shape_of(x), shape_of(node)
    if len(old) != len(new):
        return
    stretched = [d for d, (s, t) in enumerate(zip(old, new, strict=True)) if s != t]
    if len(stretched) != 1 or (d := stretched[0]) == 0:
        return
    for user in node.users:
        out = shape_of(user) if user.op == "call_function" else ()
        if len(out) == len(new) - 1 and out == (*new[: d - 1], new[d - 1] * new[d], *new[d + 1 :]):
            yield x, Shared(new[d - 1], new[d - 1] * new[d])
            return


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the global shape of a value, also of one of several results."""
    op, i = producer_of(node)
    return values_of(op)[i].shape


def source_params(heads: fx.Node) -> list[fx.Node]:
    """Return the parameters (and inputs) of the products from which a value with heads comes."""
    return [x for x, _ in _weights(heads, {})]


def _weights(heads: fx.Node, known: dict[Any, Choices]) -> Iterator[tuple[fx.Node, bool]]:
    """Yield operands of the products from which a value comes, and whether the product makes more than it.

    Only views, parts and pointwise ops may be in between. known: see `choices_of`.
    """
    todo, seen = [(heads, False)], {heads}
    while todo:
        node, part = todo.pop()
        op, _ = producer_of(node)
        if op.op != "call_function":
            continue
        rule = registry.find(op.target)
        if rule is not None and rule.flops is not None and _by_channel(op, known):
            yield from ((x, True) for x in _operands(op))  # its weights are split like its input
        elif rule is not None and rule.flops is not None:
            if part or _numel(node) == _numel(heads):  # a fused weight that makes other heads too, or just these
                yield from ((x, _numel(node) > _numel(heads)) for x in _operands(op))
            continue
        for source in operands_of(op):
            if source not in seen:
                seen.add(source)
                todo.append((source, part or _numel(node) < _numel(source)))


def _by_channel(product: fx.Node, known: dict[Any, Choices]) -> bool:
    """Return whether each channel is separate: a depthwise convolution, which mixes no heads."""
    sig = choices_of(product, known).signature
    return math.prod(sig.sizes[f] for f in sig.summed) == 1


def _numel(node: fx.Node) -> int:
    return math.prod(shape_of(node))


def _operands(product: fx.Node) -> Iterator[fx.Node]:
    """Yield the placeholders that an op uses through views alone."""
    todo = list(operands_of(product))
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            yield node
        elif len(operands_of(node)) == 1:
            todo += operands_of(node)
