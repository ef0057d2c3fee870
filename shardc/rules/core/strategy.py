"""Define one way to run an op on one mesh axis. `Choices` (choices.py) lists those that a rule allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, REPLICATE, Partial, Placement, Shard
from shardc.ir.types import continuous
from shardc.rules.core.op_call import Call


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on one axis: the placement of every operand and of every result.

    kind: "replicate" | "partial_grad" | "partial" | "split" | "pin" | the name of an extra strategy.
    factor: for "split": its name, then "/d" if d parts of it are each split, " by sections", " mirrored".
    """

    kind: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""

    @property
    def base(self) -> str:
        """The factor alone, without the digit ("f/2") or the sections ("f by sections") of it that are split."""
        return self.factor.partition(" ")[0].partition("/")[0]

    def sums_padding(self, i: int) -> bool:
        """Return whether it sums a padded dim of operand i away."""
        p = self.inputs[i]
        partial = any(isinstance(o, Partial) for o in self.outputs)
        return self.kind == "split" and partial and isinstance(p, Shard) and p.padding > 0

    def multiplies_padding(self, i: int, operands: Sequence[Value]) -> bool:
        """Return whether a sum as in `sums_padding` is of products with another operand that is padded there.

        Integers beside it are indices (of index_add), not factors.
        """
        return any(
            isinstance(p, Shard) and p.padding > 0 and continuous(x)
            for j, (p, x) in enumerate(zip(self.inputs, operands, strict=True))
            if j != i
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.factor}".strip()


def splits_of(x: Value, dims: Collection[int], n: int, available: Iterable[Placement]) -> Iterator[Shard]:
    """Yield the available splits of one of these dims into n equal parts, without sections."""
    for p in sorted(available, key=repr):
        if isinstance(p, Shard) and p.dim in dims and not p.sections and p.padded(x.shape[p.dim]) % (p.split * n) == 0:
            yield p


def over_dim(
    kind: str, dims: Callable[[Call], Collection[int]], result: Placement = PARTIAL, *, padded_inside: bool = False
) -> Callable[[Call, int, Sequence[frozenset[Placement]]], Iterator[Strategy]]:
    """Return the `extra` of a rule: split a dim of the first operand of which each rank uses what it has.

    Other operands are whole. dims: which dims may be split. padded_inside: also with padding inside of the dim.
    """

    def strategies(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterator[Strategy]:
        for p in splits_of(call.operands[0], dims(call), n, available[0]):
            if padded_inside or p.by_digits_alone:
                yield Strategy(kind, (p, *[REPLICATE] * (len(call.operands) - 1)), (result,))

    return strategies


def needs_sum_grad(v: Value) -> bool:
    """Return whether replicated and partial-grad differ for a value: only if a gradient flows."""
    return v.requires_grad and continuous(v)
