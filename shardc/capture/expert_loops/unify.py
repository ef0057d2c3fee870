"""Turns of a loop laid on top of each other: what is the same in all of them, and what each expert has of its own.

linear(x[t], up0), linear(x[t], up1)      Op(linear, (Same(x[t]), Stack((up0, up1))))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.capture.expert_loops.steps import bare, shape_of
from shardc.ir import types as values
from shardc.torch_private import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Same:
    """One value for all experts."""

    node: fx.Node


@dataclass(frozen=True)
class Stack:
    """Parameters of the experts: one each, or one of them all, [experts, ...]."""

    nodes: tuple[fx.Node, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.nodes[0])[1:] if len(self.nodes) == 1 else shape_of(self.nodes[0])


@dataclass(frozen=True)
class Each:
    """A value for each expert."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Op:
    """A call in each of the steps. nodes: those calls."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    nodes: tuple[fx.Node, ...]


@dataclass
class Unifier:
    """What several steps have in common. sums: {sum of masked rows: (masks, values)}: for rows of one expert, its value
    alone."""

    count: int
    masks: tuple[fx.Node, ...]
    sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def unified(self, turns: Sequence[Any]) -> Any:
        nodes = tuple(bare(n) for n in turns)
        if nodes not in self.known:
            self.known[nodes] = self._unified(nodes)
        return self.known[nodes]

    def _unified(self, nodes: tuple[Any, ...]) -> Any:
        first = nodes[0]
        if not isinstance(first, fx.Node):
            return first if all(type(n) is type(first) and n == first for n in nodes) else None
        if first in self.sums and all(n is first for n in nodes) and self.sums[first][0] == self.masks:
            return self.unified(self.sums[first][1])
        one = all(n is first for n in nodes)
        if one and not any(s in self.sums and self.sums[s][0] == self.masks for s in values.behind([first])):
            return Same(first)
        if not all(isinstance(n, fx.Node) and n.meta["value"] == first.meta["value"] for n in nodes):
            return None
        if all(n.op == "placeholder" for n in nodes):
            return Stack(nodes) if len(set(nodes)) == len(nodes) else Each(nodes)
        if (whole := _parts(nodes)) is not None:
            return Stack((whole,)) if whole.op == "placeholder" else Each(nodes)
        if not all(n.op == "call_function" and n.target == first.target for n in nodes):
            return Each(nodes)
        args = self._arguments([n.args for n in nodes])
        kwargs = self._arguments([tuple(sorted(n.kwargs.items())) for n in nodes])
        if args is None or kwargs is None:
            return Each(nodes)
        drawn = isinstance(first.target, OpOverload) and torch.Tag.nondeterministic_seeded in first.target.tags
        if not drawn and not any(map(_has, (*args, *kwargs))):
            return Same(first)
        return Op(first.target, args, kwargs, nodes)

    def _arguments(self, many: Sequence[Any]) -> Any:
        """Arguments laid on top of each other; None where they differ in more than nodes."""
        first = many[0]
        if isinstance(first, (tuple, list)):
            if any(not isinstance(m, (tuple, list)) or len(m) != len(first) for m in many):
                return None
            parts = [self._arguments(p) for p in zip(*many, strict=True)]
            wrong = any(p is None and q is not None for p, q in zip(parts, first, strict=True))
            return None if wrong else tuple(parts)
        return self.unified(many)


def _has(x: Any) -> bool:
    """Is there anything of an expert in a template?"""
    if isinstance(x, tuple):
        return any(map(_has, x))
    return isinstance(x, (Stack, Each, Op))


def _parts(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The stack that these are the entries of, in order."""
    wholes = set()
    for e, n in enumerate(nodes):
        if n.target is aten.select.int and n.args[1] == 0 and n.args[2] == e:
            wholes.add(bare(n.args[0]))
        elif n.target is operator.getitem and n.args[1] == e and n.args[0].target is aten.unbind.int:  # type: ignore[union-attr]
            wholes.add(bare(n.args[0].args[0]))  # type: ignore[union-attr]
        else:
            return None
    (whole, *others) = wholes
    return whole if not others and shape_of(whole)[0] == len(nodes) else None
