"""What is tried on random choices: whether masks exclude each other, and which numbers say what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.expert_loops.steps import SAME_ELEMENTS, bare, constant_of, numel_of, shape_of
from shardc.capture.random_choices import draws, leaves, run, unrepeated
from shardc.ir import types as values
from shardc.torch_private import OpOverload

aten = torch.ops.aten


class StaysLoop(Exception):
    """Steps that are no mixture of experts of this form."""


class Trial:
    """Masks on random choices."""

    def __init__(self, masks: tuple[fx.Node, ...], count: int) -> None:
        self.masks, self.count = masks, count
        self.drawn = leaves(masks)
        self.known: list[dict[fx.Node, Any]] = []
        self.found: list[Tensor] = []  # [experts, n]
        for _, known in zip(range(3), draws(self.drawn, count), strict=False):
            try:
                results = run(masks, known)
            except (RuntimeError, IndexError, KeyError) as e:
                raise StaysLoop("its masks cannot be tried") from e
            self.known.append(known)
            self.found.append(torch.stack([m.reshape(-1).bool() for m in results]))

    def disjoint(self) -> bool:
        return all(bool((f.sum(0) <= 1).all()) for f in self.found)

    def _numbers(self, numel: int | None, n: int) -> Iterator[fx.Node]:
        for leaf in self.drawn:
            dtype = leaf.meta["value"].dtype
            fits = numel_of(leaf) == numel or (numel is None and numel_of(leaf) % n == 0)
            if fits and not dtype.is_floating_point and dtype != torch.bool:
                yield leaf

    def index(self, order: Tensor) -> fx.Node | None:
        """What says, in this order of the masks' rows, which of them is true."""
        numbers = torch.arange(self.count).view(-1, *[1] * order.dim())
        for leaf in self._numbers(order.numel(), 1):
            each = [(k[leaf].reshape(order.shape), f[:, order]) for k, f in zip(self.known, self.found, strict=True)]
            if all(torch.equal(v == numbers, f) for v, f in each):
                return leaf
        return None

    def covering(self, n: int) -> fx.Node | None:
        """Numbers of experts [n, k], none twice, among which are all whose mask is true."""
        numbers = torch.arange(self.count).view(-1, 1, 1)
        for leaf in self._numbers(None, n):
            has = [(k[leaf].reshape(n, -1) == numbers).any(-1) for k in self.known]
            more = any(bool((f & ~h).any()) for f, h in zip(self.found, has, strict=True))
            if not more and unrepeated(leaf) and shape_of(leaf)[-1] == numel_of(leaf) // n:
                return leaf
        return None


def taken(x: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """(y, which row of y each row of x is) of rows picked by a constant index."""
    node = bare(x, rows=True)
    if node.target is aten.index.Tensor:
        where: Any = node.args[1]
        indexed = [d for d, i in enumerate(where) if i is not None]
        shape = shape_of(node.args[0])
        if len(indexed) == 1 and indexed[0] == len(shape) - 2 and torch.Size(shape[: indexed[0]]).numel() == 1:
            return bare(node.args[0], rows=True), constant_of(where[indexed[0]])
    elif node.target is aten.index_select.default and node.args[1] == 0 and len(shape_of(node.args[0])) == 2:
        return node.args[0], constant_of(node.args[2])
    return node, None


_MOVES = SAME_ELEMENTS | {"index", "transpose", "permute", "t", "expand", "select", "slice", "index_select", "gather"}


def moved(node: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """(y, position in flattened y of every element of a node) where it has y's elements in another order, all once."""
    path = [node]
    while True:
        n = path[-1]
        x = n.args[0] if n.args else None
        if (
            not isinstance(n.target, OpOverload)
            or values.op_name(n.target) not in _MOVES
            or not isinstance(x, fx.Node)
            or any(constant_of(o) is None for o in n.all_input_nodes if o is not x)
        ):
            break
        path.append(x)
    for source in reversed(path[1:]):
        if numel_of(source) == numel_of(node):
            try:
                (positions,) = run([node], {source: torch.arange(numel_of(source)).view(shape_of(source))})
            except RuntimeError:
                continue
            return source, positions.reshape(-1)
    return node, None
