"""Rules: what may be split in an op, as strategies on one mesh axis.

    rule(aten.linear, "... k+, n k+, n -> ... n", linear="0 2 | 1 2", added=(2,))

A rule is data: a notation (or a function of the call that returns a `Signature`, for ops whose dims depend on
arguments), and what the notation cannot say:

linear  groups of operands in which the op is jointly linear, separated by `|`: partial sums of all operands of a group
        may pass through, every other operand staying whole.
added   operands that are added to the result once: when a summed factor is split they become partial themselves.
local   rewrites one call for a rank's part (sizes, offsets); gets a `LocalCall`, returns the node of the result.
extra   further strategies that no factor expresses (a vocabulary, unequal sections).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Placement, Shard
from shardc.ir.program import Value
from shardc.rules import notation
from shardc.rules.notation import Signature, parse
from shardc.runtime import ops


@dataclass(frozen=True)
class Call:
    """One call of an op, without the graph: the types of its tensor operands and results, and its arguments.

    args, kwargs: the arguments, with `Operand(i)` in the place of the i-th tensor operand.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def dim(self, d: int, operand: int = 0) -> int:
        """A dim >= 0 of an operand from one that may be negative."""
        return d % max(len(self.operands[operand].shape), 1)


@dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in `Call.args`."""

    index: int


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on one axis: what every operand must be, what every result then is.

    kind: "replicate" | "partial_grad" | "partial" | "split" | the name of an extra strategy.
    factor, digit: for "split": the factor and the product of the major digits within it.
    """

    kind: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""

    @property
    def base(self) -> str:
        """The factor alone, without the digit ("f/2") or the sections ("f by sections") of it that are split."""
        return self.factor.partition(" ")[0].partition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.factor}".strip()


@dataclass
class LocalCall:
    """What a rule's `local` gets: the call to rewrite, in the graph of one rank. Insert nodes with `emit`.

    strategies: axis -> strategy. inputs, outputs: layouts of operands as this op needs them, and of results.
    args, kwargs: arguments with nodes of the local graph in place of operands.
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

    def axes(self, kind: str) -> list[str]:
        """The axes on which the op runs by this kind of strategy."""
        return [a for a, s in self.strategies.items() if s.kind == kind]

    def split(self, factor: str) -> list[str]:
        """The axes on which a factor is split. Raises ShardcError for a factor that the
        rule's notation does not have.
        """
        rule = find(self.call.target)
        has = parse(rule.notation).factors() if rule is not None and isinstance(rule.notation, str) else {factor}
        if rule is not None and factor not in has and not re.fullmatch(r"e\d+", factor):  # e0, e1: the dims of "..."
            what = (
                f"`local` of the rule {rule.text!r} of {rule.op} asks for a factor {factor!r}, which the rule does not"
                " have"
            )
            raise ShardcError(what, where=rule.where, fix=f"one of {', '.join(sorted(has))}")
        return [a for a, s in self.strategies.items() if s.kind == "split" and s.base == factor]

    def without_padding(self, x: fx.Node, operand: int, dim: int, fill: float) -> fx.Node:
        """x, which is the operand as this rank has it, with `fill` in the padding of a dim."""
        return fill_padding(
            self.emit, x, replace(self.call.operands[operand], layout=self.inputs[operand]), dim, self.mesh_node, fill
        )

    def same(self, **other: Any) -> fx.Node:
        """The same call with some positional (`_0=`, `_1=`, ...) or named arguments replaced."""
        args = list(self.args)
        kwargs = dict(self.kwargs)
        for name, value in other.items():
            if name.startswith("_") and int(name[1:]) < len(args):
                args[int(name[1:])] = value
            elif not name.startswith("_"):
                kwargs[name] = value
        return self.emit(self.call.target, tuple(args), kwargs)


def fill_padding(
    emit: Callable[..., fx.Node], x: fx.Node, value: Value, dim: int, mesh_node: fx.Node, fill: float
) -> fx.Node:
    """A call that sets the padding of one dim of a rank's value, and of its gradient to zero."""
    shards = value.layout.shards(dim)
    digits, (_, s) = tuple((a, s.split) for a, s in shards), shards[0]
    return emit(
        ops.fill_padding, (x, mesh_node, dim, digits, value.shape[dim], s.padding, s.blocks, fill), {}, value=value
    )


SignatureOf = Callable[[Call], Signature]
LocalOf = Callable[[LocalCall], fx.Node]
ExtraOf = Callable[[Call, int, Sequence[frozenset[Placement]]], Iterable[Strategy]]


@dataclass(frozen=True)
class Rule:
    """See the module docstring. text: the notation, or the name of the function that makes it. where: file:line that
    registered it.
    """

    op: Any
    notation: str | SignatureOf
    linear: tuple[tuple[int, ...], ...] = ()
    added: tuple[int, ...] = ()
    local: LocalOf | None = None
    extra: ExtraOf | None = None
    linear_of: Callable[[Call], str] | None = None
    flops: Callable[[Call], int] | None = None
    where: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.notation if isinstance(self.notation, str) else f"<{self.notation.__name__}>"

    def signature(self, call: Call) -> Signature:
        """The rule bound to a call. Raises ShardcError where its notation does not fit the call's shapes."""
        if not isinstance(self.notation, str):
            return self.notation(call)
        try:
            return parse(self.notation).bind([v.shape for v in call.operands], [v.shape for v in call.results])
        except ValueError as e:
            types = f"{', '.join(map(str, call.operands))} -> {', '.join(map(str, call.results))}"
            what = f"the rule {self.text!r} of {self.op} does not fit a call ({types}): {e}"
            fix = (
                "every tensor operand and result has one part of the notation, every dim one factor; or give a function"
                " of the call"
            )
            raise ShardcError(what, where=self.where, fix=fix) from None

    def groups(self, call: Call) -> tuple[tuple[int, ...], ...]:
        return parse_linear(self.linear_of(call)) if self.linear_of else self.linear


RULES: dict[Any, Rule] = {}
Fallback = Callable[[Any], Rule | None]
_FALLBACKS: list[Fallback] = []


def parse_linear(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i) for i in group.split()) for group in text.split("|") if group.strip())


def rule(
    op: Any,
    notation: str | SignatureOf,
    *,
    linear: str | Callable[[Call], str] = "",
    added: tuple[int, ...] = (),
    local: LocalOf | None = None,
    extra: ExtraOf | None = None,
    flops: Callable[[Call], int] | None = None,
    where: str = "",
) -> Rule:
    """Register the rule of an op (an `OpOverload`, or a function that appears in graphs). Raises ValueError if it has
    one.

    For the families of this package; users' ops: `shardc.rule`, see shardc.rules.user_ops.
    """
    if isinstance(notation, str):
        parse(notation)
    if op in RULES:
        raise ValueError(f"{op} already has the rule {RULES[op].text!r} ({RULES[op].where})")
    fixed = parse_linear(linear) if isinstance(linear, str) else ()
    of_call = None if isinstance(linear, str) else linear
    new = Rule(op, notation, fixed, added, local, extra, of_call, flops, where or caller(__file__))
    RULES[op] = new
    find.cache_clear()  # it may have been asked for before it had a rule
    return new


def caller(*inside: str) -> str:
    """file:line of the innermost code that is outside of some files."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in inside:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fallback(find: Fallback) -> Fallback:
    """Register a function that finds the rule of a whole class of ops (such as every pointwise op)."""
    _FALLBACKS.append(find)
    return find


@lru_cache(maxsize=4096)
def find(op: Any) -> Rule | None:
    """The rule of an op, or None."""
    if op in RULES:
        return RULES[op]
    return next((r for f in _FALLBACKS if (r := f(op)) is not None), None)


# --- strategies -------------------------------------------------------------------------------------------------------


def needs_sum_grad(v: Value) -> bool:
    """Whether replicated and partial-grad differ for a value: only where a gradient flows."""
    return v.requires_grad and (v.dtype.is_floating_point or v.dtype.is_complex)


@dataclass
class Choices:
    """The strategies of one call on an axis of n ranks, given the placements that its operands and results may have."""

    rule: Rule
    call: Call
    signature: Signature
    places: dict[str, tuple[list[tuple[int, int] | None], list[tuple[int, int] | None]]] = field(default_factory=dict)
    matched: dict[tuple[int, int, Placement, int], Strategy | None] = field(
        default_factory=dict
    )  # placement asks for the same again and again

    def __post_init__(self) -> None:
        sig = self.signature
        for f in sig.splittable():
            self.places[f] = ([sig.places(o, f) for o in sig.inputs], [sig.places(o, f) for o in sig.outputs])

    @cached_property
    def flops(self) -> int:
        """Floating point operations, of ops that are worth splitting for their sake; else 0."""
        return self.rule.flops(self.call) if self.rule.flops else 0

    @cached_property
    def touched(self) -> int:
        """Bytes read and written."""
        return sum(v.nbytes() for v in (*self.call.operands, *self.call.results))

    @cached_property
    def replicate(self) -> Strategy:
        return Strategy("replicate", (REPLICATE,) * len(self.call.operands), (REPLICATE,) * len(self.call.results))

    @cached_property
    def partial_grad(self) -> Strategy:
        ins = tuple(PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE for v in self.call.operands)
        outs = tuple(PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE for v in self.call.results)
        return Strategy("partial_grad", ins, outs)

    @cached_property
    def partials(self) -> list[Strategy]:
        """One for every group of operands in which the op is linear."""
        made = []
        for group in self.rule.groups(self.call):
            ins = tuple(
                PARTIAL if i in group else PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE
                for i, v in enumerate(self.call.operands)
            )
            if all(i < len(self.call.operands) for i in group):
                made.append(Strategy("partial", ins, (PARTIAL,) * len(self.call.results)))
        return made

    def split(
        self, factor: str, digit: int, n: int, sections: tuple[int, ...] = (), padding: int = 0, blocks: int = 1
    ) -> Strategy | None:
        """Split a factor at an inner digit (or in sections, or padded) over n ranks; None if it does not divide.

        padding, blocks: as in `Shard`, counted in this factor. What sums a padded factor away gets operands whose
        padding is zero."""
        sig = self.signature
        if padding and (sections or digit % blocks or sig.sizes[factor] % blocks):
            return None
        size = sig.sizes[factor] + blocks * padding
        if size % (digit * n) or any(s % n for s in sections):
            return None

        def shard(v: Value, operand: notation.Operand, place: tuple[int, int]) -> Shard | None:
            dim, major = place
            if sections and len(operand[dim]) != 1:
                return None
            if not padding:
                return Shard(dim, major * digit, sections)
            return Shard(
                dim, major * digit, (), padding * (v.shape[dim] // (major * sig.sizes[factor])), major * blocks
            )

        ins: list[Placement] = []
        for i, (v, operand, place) in enumerate(
            zip(self.call.operands, sig.inputs, self.places[factor][0], strict=True)
        ):
            if place is not None:
                if (placed := shard(v, operand, place)) is None:
                    return None
                ins.append(placed)
            elif i in self.rule.added and factor in sig.summed:
                ins.append(PARTIAL)
            else:
                ins.append(PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE)
        outs: list[Placement] = []
        for v, operand, place in zip(self.call.results, sig.outputs, self.places[factor][1], strict=True):
            if place is not None:
                if (placed := shard(v, operand, place)) is None:
                    return None
                outs.append(placed)
            elif factor not in sig.summed:
                return None
            else:
                outs.append(PARTIAL)
        name = f"{factor} by sections" if sections else factor if digit == 1 else f"{factor}/{digit}"
        return Strategy("split", tuple(ins), tuple(outs), name)

    def from_operand(self, i: int, placement: Placement, n: int) -> Strategy | None:
        """The split that takes operand i as it lies."""
        return self._matching(0, i, placement, n)

    def from_result(self, i: int, placement: Placement, n: int) -> Strategy | None:
        """The split that makes result i lie so."""
        return self._matching(1, i, placement, n)

    def _matching(self, side: int, i: int, placement: Placement, n: int) -> Strategy | None:
        if not isinstance(placement, Shard):
            return None
        key = (side, i, placement, n)
        if key not in self.matched:
            self.matched[key] = self._match(side, i, placement, n)
        return self.matched[key]

    def _match(self, side: int, i: int, p: Shard, n: int) -> Strategy | None:
        if p.padding:
            return self._padded(side, i, p, n)
        operand, sizes = (self.signature.inputs, self.signature.outputs)[side][i], self.signature.sizes
        for factor, places in self.places.items():
            place = places[side][i]
            if place is None or place[0] != p.dim or p.split % place[1] or (p.sections and len(operand[p.dim]) != 1):
                continue
            digit = p.split // place[1]
            if sizes[factor] % (digit * n) == 0:
                return self.split(factor, digit, n, p.sections)
        return None

    def _padded(self, side: int, i: int, p: Shard, n: int) -> Strategy | None:
        """The split of the innermost factor that has whole blocks of padding: the same one for all axes that split the
        dim.
        """
        size, best = (self.call.operands, self.call.results)[side][i].shape[p.dim], None
        for factor, places in self.places.items():
            if (place := places[side][i]) is None or place[0] != p.dim or p.blocks % place[1]:
                continue
            inner = size // (place[1] * self.signature.sizes[factor])
            if p.padding % inner == 0 and (best is None or inner < best[1]):
                best = factor, inner, place[1]
        if best is None or p.split % best[2]:
            return None
        factor, inner, major = best
        return self.split(factor, p.split // major, n, (), p.padding // inner, p.blocks // major)
