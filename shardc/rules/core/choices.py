"""Derive the ways to run one call on one mesh axis from the call's rule: `Choices`.

    y = mm(x, w)    rule "m k+, k+ n -> m n", linear in each operand alone

    replicate       every rank computes all of y
    split m         x split by rows               -> y split by rows
    split n         w split by columns            -> y split by columns
    split k         x and w split where summed    -> y a partial sum
    partial         x a partial sum, w whole      -> y a partial sum

If an operand is whole on every rank while others are split, each rank uses it only for its part: its gradient is a sum
over the ranks (`PARTIAL_GRAD`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Placement, Shard
from shardc.ir.types import full_op_name, typed_key
from shardc.rules.core import finite_padding, notation, registry
from shardc.rules.core.finite_padding import Fills, Group, Padded
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call, call_of
from shardc.rules.core.registry import Rule
from shardc.rules.core.shared_signatures import all_whole
from shardc.rules.core.strategy import Strategy, needs_sum_grad


@dataclass
class Choices:
    """The strategies of one call on an axis of n ranks, for given placements of operands or results."""

    rule: Rule
    call: Call
    signature: Signature
    places: dict[str, tuple[list[tuple[int, int] | None], list[tuple[int, int] | None]]] = field(default_factory=dict)
    matched: dict[tuple[int, int, Placement, int], Strategy | None] = field(
        default_factory=dict
    )  # placement requests the same many times

    def __post_init__(self) -> None:
        sig = self.signature
        for f in sig.splittable():
            self.places[f] = ([sig.places(o, f) for o in sig.inputs], [sig.places(o, f) for o in sig.outputs])

    @cached_property
    def flops(self) -> int:
        """Floating point operations of an op that is worth splitting for them; else 0."""
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
        if self.rule.whole_grad:
            return self.replicate
        ins = tuple(PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE for v in self.call.operands)
        outs = tuple(PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE for v in self.call.results)
        return Strategy("partial_grad", ins, outs)

    @cached_property
    def partials(self) -> list[Strategy]:
        """One strategy for every group of operands in which the op is linear."""
        strategies = []
        for group in self.rule.groups(self.call):
            ins = tuple(
                PARTIAL if i in group else PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE
                for i, v in enumerate(self.call.operands)
            )
            strategies.append(Strategy("partial", ins, (PARTIAL,) * len(self.call.results)))
        return strategies

    def split(
        self,
        factor: str,
        digit: int,
        n: int,
        sections: tuple[int, ...] = (),
        padding: int = 0,
        blocks: int = 1,
        *,
        mirrored: bool = False,
    ) -> Strategy | None:
        """Split a factor over n ranks at an inner digit, in sections, padded or mirrored; None if impossible.

        padding, blocks: as in `Shard`, counted in this factor. If it is summed away, the operands' padding is zero.
        """
        sig = self.signature
        if padding and (sections or digit % blocks or sig.sizes[factor] % blocks or factor in sig.unpadded):
            return None
        if padding and mirrored and digit % (2 * blocks):
            return None
        if padding and factor not in sig.summed and finite_padding.fills(self, Padded((self._having(factor),))) is None:
            return None
        size = sig.sizes[factor] + blocks * padding
        if size % (digit * n) or any(s % n for s in sections) or (mirrored and digit % 2):
            return None

        def shard(v: Value, operand: notation.Operand, place: tuple[int, int]) -> Shard | None:
            dim, major = place
            if sections and len(operand[dim]) != 1:
                return None
            if not padding:
                return Shard(dim, major * digit, sections, mirrored=mirrored)
            inner = v.shape[dim] // (major * sig.sizes[factor])
            return Shard(dim, major * digit, (), padding * inner, major * blocks, mirrored)

        def without(i: int, v: Value) -> Placement:
            added = i in self.rule.added and factor in sig.summed
            return PARTIAL if added else PARTIAL_GRAD if needs_sum_grad(v) else REPLICATE

        before, after = self.places[factor]
        ins: list[Placement | None] = [
            without(i, v) if place is None else shard(v, operand, place)
            for i, (v, operand, place) in enumerate(zip(self.call.operands, sig.inputs, before, strict=True))
        ]
        partial = PARTIAL if factor in sig.summed else None
        outs: list[Placement | None] = [
            partial if place is None else shard(v, operand, place)
            for v, operand, place in zip(self.call.results, sig.outputs, after, strict=True)
        ]
        inputs, outputs = (tuple(p for p in each if p is not None) for each in (ins, outs))
        if len(inputs) < len(ins) or len(outputs) < len(outs):
            return None
        name = f"{factor} by sections" if sections else factor if digit == 1 else f"{factor}/{digit}"
        name += " mirrored" if mirrored else ""
        return Strategy("split", inputs, outputs, name)

    def fills(self, node: fx.Node, strategies: Iterable[Strategy], copies: Group) -> Fills:
        """Return for each operand the number that its padding must be filled with; None: no fill is needed.

        node: the call; copies: operands whose padding copies real entries. Raises ShardcError if no numbers suit all
        dims.
        """
        numbers = finite_padding.fills(self, Padded.of(node, strategies, self.signature, copies))
        if numbers is None:
            shown = " and ".join(str(s) for s in strategies)
            fault = f"{full_op_name(self.call.target)} has no finite gradient in the padding of {shown} at once"
            raise ShardcError(fault, where=self.rule.where, fix="make one of the two sizes divide by its ranks")
        return numbers

    def finite(self, node: fx.Node, strategies: Iterable[Strategy], holds: Fills, copies: Group) -> bool:
        """Return whether the op and its derivatives are finite if padding has these numbers (None: any)."""
        return finite_padding.finite(self, Padded.of(node, strategies, self.signature, copies), holds)

    def kept_dims(self, strategies: Iterable[Strategy], i: int) -> set[int]:
        """Return the padded dims of operand i that results also have."""
        kept = finite_padding.kept(strategies, self.signature)
        return {p.dim for s in kept if isinstance(p := s.inputs[i], Shard) and p.padding}

    def _having(self, factor: str) -> Group:
        """Return the operands that have a factor."""
        return frozenset(i for i, place in enumerate(self.places[factor][0]) if place is not None)

    def from_operand(self, i: int, placement: Placement, n: int) -> Strategy | None:
        """Return the split that takes operand i in this placement, or None."""
        return self._matching(0, i, placement, n)

    def from_result(self, i: int, placement: Placement, n: int) -> Strategy | None:
        """Return the split that makes result i in this placement, or None."""
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
            # the digit begins in this factor, also if there is only one rank
            if digit < sizes[factor] and sizes[factor] % (digit * n) == 0 and not (p.mirrored and digit % 2):
                return self.split(factor, digit, n, p.sections, mirrored=p.mirrored)
        return None

    def _padded(self, side: int, i: int, p: Shard, n: int) -> Strategy | None:
        """Split the innermost factor that has whole blocks of padding: the same on all axes of the dim."""
        shape, best = (self.call.operands, self.call.results)[side][i].shape, None
        if p.dim >= len(shape):
            return None
        size = shape[p.dim]
        for factor, places in self.places.items():
            if (place := places[side][i]) is None or place[0] != p.dim or p.blocks % place[1]:
                continue
            inner = size // (place[1] * self.signature.sizes[factor])
            if p.padding % inner == 0 and (best is None or inner < best[1]):
                best = factor, inner, place[1]
        if best is None or p.split % best[2]:
            return None
        factor, inner, major = best
        return self.split(factor, p.split // major, n, (), p.padding // inner, p.blocks // major, mirrored=p.mirrored)


def choices_of(node: fx.Node, cache: dict[Any, Choices]) -> Choices:
    """Return the call's choices; equal calls (repeated layers) share them."""
    key = (node.target, typed_key((node.args, node.kwargs)), node.meta["value"])
    if key not in cache:
        call = call_of(node)
        rule = registry.find(call.target)
        if rule is None:  # unknown_ops: replicate; `check_rules` refused it otherwise
            rule = registry.Rule(call.target, all_whole)
        cache[key] = Choices(rule, call, rule.signature(call))
    return cache[key]
