"""Test a model's choices on random numbers: whether masks exclude each other, or are empty together.

Integers and masks that a graph computes from floating-point numbers (topk, argmax, comparisons) or takes as input are
drawn, and the values that follow are computed. So the model's spelling does not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir import types as values
from shardc.torch_private import OpOverload


def typed(node: fx.Node) -> Any:
    """Return an object with the shape and dtype of a node's result; None if it is no single tensor."""
    value = node.meta["value"] if "value" in node.meta else node.meta.get("val")
    return value if hasattr(value, "dtype") and hasattr(value, "shape") else None


def numel(node: fx.Node) -> int:
    """Return the number of elements of a node's result."""
    return torch.Size(typed(node).shape).numel()


def leaves(roots: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values to draw: on the way back from `roots`, the first not computed from integers alone."""
    ends: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        maker = n.args[0] if n.target is operator.getitem else n
        assert isinstance(maker, fx.Node)
        if n.op == "placeholder" or any(_floats(x) and not _counted(x) for x in maker.all_input_nodes):
            ends[n] = None
        else:
            todo += n.all_input_nodes
    return list(ends)


def _floats(node: fx.Node) -> bool:
    v = typed(node)
    return v is not None and bool(v.dtype.is_floating_point)


def _counted(node: fx.Node) -> bool:
    """Return whether a float value depends only on integers and constants, as counts of choices often do."""

    def further(n: fx.Node) -> bool:
        return n.op != "call_function" or _limit(n) is None

    return all(n.op == "call_function" for n in values.behind([node], further))


def _limit(node: fx.Node) -> int | None:
    """Return how many different indices a topk, sort or argmax can return; None for anything else."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, fx.Node) or not isinstance(maker.target, OpOverload):
        return None
    name, x = values.op_name(maker.target), maker.args[0] if maker.args else None
    if name not in ("argmax", "topk", "sort", "max") or not isinstance(x, fx.Node) or not _floats(x):
        return None
    if name != "argmax" and (node.target is not operator.getitem or node.args[1] != 1):
        return None
    dim = maker.args[2 if name == "topk" else 1] if len(maker.args) > (2 if name == "topk" else 1) else -1
    return int(typed(x).shape[dim]) if isinstance(dim, int) else None


def unrepeated(node: fx.Node) -> bool:
    """Return whether it is the indices of a topk or sort along the last dim, without repetition."""
    if node.target is not operator.getitem or _limit(node) is None:
        return False
    maker: Any = node.args[0]
    position = 2 if values.op_name(maker.target) == "topk" else 1
    dim = maker.args[position] if len(maker.args) > position else -1
    return values.op_name(maker.target) != "max" and dim in (-1, len(typed(node).shape) - 1)


def draws(nodes: Sequence[fx.Node], count: int = 2) -> Iterator[dict[fx.Node, Any]]:
    """Yield values of leaves endlessly: any, few different numbers, and every third time equal rows.

    count: how many numbers there are, if the graph does not show it.
    """
    seed = 0
    while True:
        generator = torch.Generator().manual_seed(seed)
        yield {n: _draw(n, count, generator, seed) for n in nodes}
        seed += 1


def _draw(node: fx.Node, count: int, generator: torch.Generator, seed: int) -> Tensor:
    v, limit = typed(node), _limit(node) or count
    shape, equal_rows = tuple(v.shape), seed % 3 == 2
    drawn = (1,) * max(len(shape) - 1, 0) + shape[-1:] if equal_rows else shape
    if v.dtype == torch.bool:
        return (torch.rand(drawn, generator=generator) < (0.5, 0.1, 0.0)[seed % 3]).expand(shape).clone()
    if v.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(v.dtype)
    if unrepeated(node) and shape[-1] <= limit:
        scores = torch.rand((*drawn[:-1], limit), generator=generator)
        if seed % 3 == 1:
            scores[..., : shape[-1]] += 0.9
        return scores.topk(shape[-1], -1).indices.to(v.dtype).expand(shape).clone()
    if equal_rows:
        return torch.full(shape, int(torch.randint(limit, (), generator=generator)), dtype=v.dtype)
    numbers = torch.randint(limit, shape, generator=generator)
    return (numbers.clamp(max=1) if seed % 3 == 1 else numbers).to(v.dtype)


def run(nodes: Sequence[fx.Node], known: dict[fx.Node, Any]) -> list[Any]:
    """Return the values of nodes from `known`, and extend it. Raises KeyError for a missing leaf."""

    def value(n: fx.Node) -> Any:
        if n not in known:
            if n.op != "call_function":
                raise KeyError(n)
            args, kwargs = fx.map_arg((n.args, n.kwargs), value)
            known[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return known[n]

    return [value(n) for n in nodes]


class Draws:
    """Caches draws of the last conditions' leaves: other turns of a loop have the same leaves."""

    def __init__(self) -> None:
        self.drawn: list[fx.Node] = []
        self.known: list[dict[fx.Node, Any]] = []
        self.more: Iterator[dict[fx.Node, Any]] = iter(())

    def _each(self, drawn: list[fx.Node]) -> Iterator[dict[fx.Node, Any]]:
        if set(drawn) != set(self.drawn):
            self.drawn, self.known, self.more = drawn, [], draws(drawn)
        for i in range(96):
            if i == len(self.known):
                self.known.append(next(self.more))
            yield self.known[i]

    def implied(
        self,
        condition: Sequence[fx.Node],
        holds: Callable[[Any], bool],
        others: Sequence[fx.Node],
        quiet: Callable[[list[Any]], bool],
        tried: int = 3,
    ) -> bool:
        """Return whether other values are quiet whenever a condition fails; False if no draw makes it fail.

        holds, quiet: of the values of nodes. tried: the least number of draws.
        """
        empty = 0
        for i, known in enumerate(self._each(leaves([*condition, *others])), 1):
            try:
                numbers = run([*condition, *others], known)
            except (KeyError, RuntimeError, IndexError):
                return False
            if not holds(numbers[: len(condition)]):
                empty += 1
                if not quiet(numbers[len(condition) :]):
                    return False
            if empty >= 3 and i >= tried:
                return True
        return empty > 0
