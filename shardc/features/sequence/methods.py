"""List how attention over a split sequence may run on the sequence's axis: `sequence: {method: ...}`.

gather      queries stay split, keys and values are gathered
ring        queries stay split, keys and values travel (shardc.runtime.ops.attention.ring)
ulysses     sequence to heads by all_to_all, each rank computes some heads of all tokens, and back (Jacobs et al. 2023,
            "DeepSpeed Ulysses"); if only the query heads within a group divide, keys and values are gathered
auto        ring (gather if no ring is possible) or ulysses: the one that sends fewer bytes

Attention that a model writes out (products and a softmax) has its method on the softmax: its operands follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardc.errors import ShardcError
from shardc.ir.placement import Placement, Shard
from shardc.rules.attention import OPS, RING
from shardc.rules.core.choices import Choices
from shardc.rules.core.strategy import Strategy


@dataclass(frozen=True)
class Method:
    """The spec's method for one attention on one axis.

    inner: ranks that may split heads first (weights' axes, earlier ulysses or auto axes). where: place in the spec.
    module: the attention module. ring: whether this axis may have the ring: that of method `ring`, else the first.
    """

    name: str
    inner: int
    where: str
    module: str
    ring: bool = True

    def applies(self, choices: Choices, available: Sequence[Sequence[Placement]]) -> bool:
        """Return whether an attention's queries, or the rows of its scores, arrive split by their sequence."""
        rows = len(choices.call.operands[0].shape) - 2
        return any(isinstance(p, Shard) and p.dim == rows for p in available[0])

    def candidates(
        self,
        choices: Choices,
        n: int,
        available: Sequence[Sequence[Placement]],
        taken: Callable[[int], int],
        fits: Callable[[Strategy], bool],
    ) -> Iterator[Strategy]:
        """Yield the strategies that the method allows. Raises ShardcError if there are none.

        taken, fits: of this op on this axis, as in shardc.passes.place.one_axis.Axis; taken is for a dim of the result.
        """
        whole, yielded = choices.call.target in OPS, False
        ring = _ring(choices, n, available) if whole and self.ring and self.name in ("ring", "auto") else []
        if self.name == "gather" or (self.name == "auto" and not ring):
            split = (choices.from_operand(0, p, n) for p in available[0])
            ring = [s for s in split if s is not None]
        heads = _by_heads(self, choices, n, taken, fits) if self.name in ("ulysses", "auto") else []
        for s in filter(fits, (*ring, *heads)):
            yielded = True
            yield s
        if not yielded:
            fault, fix = _why_not(self, choices, n)
            raise ShardcError(f"{self.module or 'attention'}: {fault}", where=self.where, fix=fix)


def _ring(choices: Choices, n: int, available: Sequence[Sequence[Placement]]) -> list[Strategy]:
    assert choices.rule.extra is not None
    strategies = choices.rule.extra(choices.call, n, [frozenset(a) for a in available])
    return [s for s in strategies if s.kind == RING]


def _by_heads(
    method: Method, choices: Choices, n: int, taken: Callable[[int], int], fits: Callable[[Strategy], bool]
) -> list[Strategy]:
    """Split heads at the digit inside the axes that may already split them.

    Heads that a view merged with rows are split inside the axes that split the rows.
    """
    call, sizes = choices.call, choices.signature.sizes
    out = call.results[0].shape
    if len(out) < 3:
        return []
    dim = len(out) - 3
    factors = [f for f in choices.signature.outputs[0][dim] if f in choices.places]
    for factor in factors:  # the outer group first: then keys and values are split too
        digit = method.inner if sizes[factor] % (method.inner * n) == 0 else 1
        for split in (digit, digit * taken(dim)) if method.inner == 1 or digit > 1 else ():
            if (s := choices.split(factor, split, n)) is not None and fits(s):
                return [s]
    return []


def _why_not(method: Method, choices: Choices, n: int) -> tuple[str, str]:
    call = choices.call
    if method.name == "ring":
        if call.target not in OPS:
            return (
                "attention written as products and a softmax has no ring method",
                "write method: gather or ulysses for it, or use torch's scaled_dot_product_attention",
            )
        if len(call.results[0].shape) > 4:
            return "a ring needs [batch, heads, sequence, features]", "write method: gather for it"
        return (
            "a ring computes no gradient of its mask, and needs keys whose sequence is split",
            "write method: gather or ulysses for it",
        )
    shape = call.results[0].shape
    heads = shape[-3] if len(shape) > 2 else 1
    keys = call.operands[1].shape[-3] if call.target in OPS and len(shape) > 2 else heads
    ranks = f"{n} ranks" + (f" × {method.inner} that split weights" if method.inner > 1 else "")
    return (
        f"{heads} heads, {keys} of keys, do not divide over {ranks}",
        f"write method: {'ring or gather' if method.ring else 'gather'} for it, or fewer ranks",
    )
