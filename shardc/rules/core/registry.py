"""Define and register rules: what may be split in an op, as strategies on one mesh axis.

    rule(aten.linear, "... k+, n k+, n -> ... n", linear="0 2 | 1 2", added=(2,))

A rule is data: a notation (or a function of the call that returns `call.fit(notation)`, for ops whose dims depend on
arguments), and what the notation cannot say:

linear  groups of operands in which the op is jointly linear, separated by `|`: partial sums of all operands of a group
        may pass through, while every other operand stays whole.
added   operands that are added to the result once: when a summed factor is split they become partial themselves.
local   rewrites one call for a rank's part (sizes, offsets); gets a `LocalCall`, returns the node of the result.
extra   further strategies that no factor expresses (a vocabulary, unequal sections).
whole_grad  the backward is not linear in the gradient of the result (it rounds it), so it cannot take partial sums.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import Layout, Placement
from shardc.machine.assumed import work_seconds
from shardc.rules.core.notation import Signature, parse
from shardc.rules.core.op_call import Call, arguments_of, call_of
from shardc.rules.core.shared_signatures import broadcast
from shardc.rules.core.strategy import Strategy
from shardc.runtime import ops
from shardc.torch_private import OpOverload


class NoSuchCallError(LookupError):
    """A rank cannot run an op by these strategies at once. Placement does not choose them."""


@dataclass
class LocalCall:
    """The argument of a rule's `local`: the call to rewrite, in the graph of one rank.

    emit: inserts a node; once: a name for a node that all ops share. strategies: axis -> strategy. inputs, outputs:
    layouts of operands as this op needs them, and of results. args, kwargs: with local nodes in place of operands.
    """

    call: Call
    mesh: Mesh
    strategies: dict[str, Strategy]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh_node: fx.Node
    emit: Callable[..., fx.Node]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.outputs[0].local_shape(self.call.results[0].shape, self.mesh)

    def local(self, i: int) -> tuple[int, ...]:
        """Return the shape of this rank's part of an operand."""
        return self.inputs[i].local_shape(self.call.operands[i].shape, self.mesh)

    def axes(self, kind: str) -> list[str]:
        """Return the axes on which the op runs by this kind of strategy."""
        return [a for a, s in self.strategies.items() if s.kind == kind]

    def split(self, factor: str) -> list[str]:
        """Return the axes on which a factor is split. Raises ShardcError for a factor not in the notation."""
        rule = find(self.call.target)
        known = parse(rule.notation).factors() if rule is not None and isinstance(rule.notation, str) else {factor}
        if rule is not None and factor not in known and not re.fullmatch(r"e\d+", factor):  # e0, e1: the dims of "..."
            fault = (
                f"`local` of the rule {rule.text!r} of {rule.op} needs a factor {factor!r}, which the rule does not"
                " have"
            )
            raise ShardcError(fault, where=rule.where, fix=f"one of {', '.join(sorted(known))}")
        return [a for a, s in self.strategies.items() if s.kind == "split" and s.base == factor]

    def digits(self, operand: int, dim: int) -> tuple[tuple[tuple[str, int], ...], int]:
        """Return how a dim of an operand is split, each axis with its signed split, and the dim's padded size."""
        shards, size = self.inputs[operand].shards(dim), self.call.operands[operand].shape[dim]
        return tuple((a, s.signed) for a, s in shards), shards[0][1].padded(size) if shards else size

    def without_padding(self, x: fx.Node, operand: int, dim: int, fill: float) -> fx.Node:
        """Fill the padding of a dim of x, this rank's part of the operand, with `fill`, if it has any."""
        value = replace(self.call.operands[operand], layout=self.inputs[operand])
        if all(s.dim != dim for s in value.layout.paddings()):
            return x
        return fill_padding(self.emit, x, value, dim, self.mesh_node, fill)

    def all_reduce(
        self, op: Any, x: fx.Node, axes: tuple[str, ...], value: Value, cause: str, **kwargs: Any
    ) -> fx.Node:
        """Emit a sum or maximum of x over axes that has no collective in backward. value: its type."""
        collective = Collective("all_reduce", "none", axes, value.nbytes(self.mesh), cause)
        return self.emit(op, (x, self.mesh_node, axes), kwargs, value=value, collective=collective)

    def same(self, /, **other: Any) -> fx.Node:
        """Emit the same call, with some arguments, by the op's names for them, replaced."""
        args, kwargs, places = list(self.args), dict(self.kwargs), arguments_of(self.call.target)
        for name, value in other.items():
            at = places[name][0]
            if at < len(args):
                args[at] = value
            else:
                kwargs[name] = value
        return self.emit(self.call.target, tuple(args), kwargs)


def fill_padding(
    emit: Callable[..., fx.Node], x: fx.Node, value: Value, dim: int, mesh_node: fx.Node, fill: float
) -> fx.Node:
    """Emit a call that fills the padding of one dim of a rank's value, and zeroes that of its gradient."""
    shards = value.layout.shards(dim)
    digits, (_, s) = tuple((a, s.signed) for a, s in shards), shards[0]
    return emit(
        ops.fill_padding, (x, mesh_node, dim, digits, value.shape[dim], s.padding, s.blocks, fill), {}, value=value
    )


SignatureOf = Callable[[Call], Signature]
LinearOf = Callable[[Call], str]
LocalOf = Callable[[LocalCall], fx.Node]
ExtraOf = Callable[[Call, int, Sequence[frozenset[Placement]]], Iterable[Strategy]]


@dataclass(frozen=True)
class Rule:
    """One rule: see the module docstring. where: file:line of its registration."""

    op: Any
    notation: str | SignatureOf
    linear: str | LinearOf = ""
    added: tuple[int, ...] = ()
    local: LocalOf | None = None
    extra: ExtraOf | None = None
    flops: Callable[[Call], int] | None = None
    whole_grad: bool = False
    where: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.notation if isinstance(self.notation, str) else f"<{self.notation.__name__}>"

    def signature(self, call: Call) -> Signature:
        """Bind the rule to a call. Raises ShardcError if its notation does not fit the call's shapes."""
        if not isinstance(self.notation, str):
            return self.notation(call)
        try:
            return call.fit(self.notation)
        except ValueError as e:
            types = f"{', '.join(map(str, call.operands))} -> {', '.join(map(str, call.results))}"
            fault = f"the rule {self.text!r} of {self.op} does not fit a call ({types}): {e}"
            fix = (
                "every tensor operand and result has one part of the notation, every dim one factor; or pass a "
                "function of the call"
            )
            raise ShardcError(fault, where=self.where, fix=fix) from None

    def groups(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Return the groups of operands in which a call is linear, without those that it has a number for."""
        groups = parse_linear(self.linear if isinstance(self.linear, str) else self.linear(call))
        return tuple(g for g in groups if max(g) < len(call.operands))


RULES: dict[Any, Rule] = {}


@lru_cache(maxsize=4096)
def parse_linear(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in group.split()) for group in text.split("|") if group.strip())


def rule(op: Any, notation: str | SignatureOf, *, where: str = "", **options: Any) -> Rule:
    """Register the rule of an op (`OpOverload`, or a function in graphs). Raises ValueError if it has one.

    options: of `Rule`. It is for the families of this package; users' ops: `shardc.rule`, see
    shardc.rules.core.user_ops.
    """
    if isinstance(notation, str):
        parse(notation)
    if op in RULES:
        raise ValueError(f"{op} already has the rule {RULES[op].text!r} ({RULES[op].where})")
    RULES[op] = new = Rule(op, notation, where=where or caller(__file__), **options)
    find.cache_clear()  # it may have been looked up before
    return new


def overloads(names: str) -> list[OpOverload]:
    """Return torch's ops of these names, such as "conv1d conv1d.padding": an overload, or `default`."""
    parts = (name.partition(".") for name in names.split())
    return [getattr(getattr(torch.ops.aten, packet), overload or "default") for packet, _, overload in parts]


def rules(names: str, notation: str | SignatureOf, **options: Any) -> None:
    """Register one rule for several of torch's ops. names: see `overloads`."""
    for op in overloads(names):
        rule(op, notation, **options)


def caller(*inside: str) -> str:
    """Return file:line of the innermost code that is outside of some files."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in inside:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@lru_cache(maxsize=4096)
def find(op: Any) -> Rule | None:
    """Return the rule of an op, or None. Any op that torch tags as pointwise has one."""
    pointwise = isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags and not op._schema.is_mutable
    return RULES.get(op) or (Rule(op, broadcast) if pointwise else None)


def flops_of(call: Call) -> int:
    """Count the operations that the call's rule counts; 0 for an op without products."""
    rule = find(call.target)
    return rule.flops(call) if rule is not None and rule.flops is not None else 0


def seconds_of(call: Call) -> float:
    """Estimate a call's seconds on the machine that passes assume, from its products or its bytes."""
    return work_seconds(flops_of(call), sum(v.nbytes() for v in (*call.operands, *call.results)))


def rank_seconds(node: fx.Node, mesh: Mesh) -> float:
    """Estimate a node's seconds on one rank of a mesh; selecting one of several results takes none."""
    if node.target is operator.getitem:
        return 0.0
    call = call_of(node)

    def local(v: Value) -> Value:
        return Value(v.local_shape(mesh), v.dtype, v.requires_grad)

    return seconds_of(replace(call, operands=tuple(map(local, call.operands)), results=tuple(map(local, call.results))))
