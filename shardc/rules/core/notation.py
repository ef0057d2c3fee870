"""Define and parse the notation of op rules.

    "... k+, n k+, n -> ... n"        linear(input, weight, bias)

Operands are separated by commas, results follow the arrow. Each dim of an operand is a factor; `(a b)` is one dim made
of the factors a (major) and b (minor); `1` is a dim of size one; `...` means any leading dims, the same in all places.
Marks on a factor, at any of its places: `+` it is summed away: splitting it leaves partial sums; `!` it must stay
whole. A factor that reaches every result may be split. A dim of size one broadcasts: bound to such a call, it has no
factor if the factor is larger elsewhere.

`Signature` is a rule bound to the shapes of one call: the factors, their sizes and places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_FACTOR = r"(?:[A-Za-z_]\w*[+!]?|1\b)"
_DIM = re.compile(rf"\s*(\.\.\.|{_FACTOR}|\((?:\s*{_FACTOR})*\s*\))")

Dim = tuple[str, ...]  # factors, major first; () is a dim of size one
Operand = tuple[Dim, ...]


@dataclass(frozen=True)
class Signature:
    """A rule bound to shapes: factors of every dim of operands and results, sizes, what may be split.

    unpadded: factors that may be split only where they divide: padding of any number would cause an error in the op, or
    gradients that are not finite (the inverse of a matrix of zeros).
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    sizes: Mapping[str, int]
    summed: frozenset[str] = field(default_factory=frozenset)
    whole: frozenset[str] = field(default_factory=frozenset)
    unpadded: frozenset[str] = field(default_factory=frozenset)

    def places(self, operand: Operand, factor: str) -> tuple[int, int] | None:
        """Return (dim, product of the major factors before it in that dim) of a factor in an operand, or None."""
        for d, dim in enumerate(operand):
            if factor in dim:
                return d, math.prod(self.sizes[f] for f in dim[: dim.index(factor)])
        return None

    def splittable(self) -> list[str]:
        seen = dict.fromkeys(f for o in (*self.inputs, *self.outputs) for dim in o for f in dim)
        return [f for f in seen if f not in self.whole and self.sizes[f] > 1]

    def __str__(self) -> str:
        def one(f: str) -> str:
            return f + "+" * (f in self.summed) + "!" * (f in self.whole)

        def dim(d: Dim) -> str:
            return "1" if not d else one(d[0]) if len(d) == 1 else f"({' '.join(map(one, d))})"

        def side(operands: Sequence[Operand]) -> str:
            return ", ".join(" ".join(map(dim, o)) for o in operands)

        return f"{side(self.inputs)} -> {side(self.outputs)}"


@dataclass(frozen=True)
class Notation:
    """A parsed rule. `...` is kept as a separate dim with the factor "..."."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    summed: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> Notation:
        """Read operands and results, each dim as in a rule: `["n", "g c!", "k+", ""]`; "" is a dim of size one."""
        marked: dict[str, set[str]] = {"+": set(), "!": set()}

        def factor(token: str) -> str:
            name = token.rstrip("+!")
            if token != name:
                marked[token[-1]].add(name)
            return name

        ins, outs = (
            tuple(tuple(tuple(map(factor, dim.split())) for dim in operand) for operand in side)
            for side in (inputs, outputs)
        )
        return cls(ins, outs, frozenset(marked["+"]), frozenset(marked["!"]))

    def factors(self) -> set[str]:
        """Return the names of all factors that may be split or are whole."""
        return {f for o in (*self.inputs, *self.outputs) for d in o for f in d} - {"..."}

    def bind(
        self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], sizes: Mapping[str, int] | None = None
    ) -> Signature:
        """Fit the notation to shapes. sizes: known sizes of factors. Raises ValueError where they do not fit."""
        bound = dict(sizes or {})
        if len(inputs) > len(self.inputs) or len(outputs) > len(self.outputs):
            counts = f"{len(self.inputs)} and {len(self.outputs)}"
            raise ValueError(f"{len(inputs)} operands and {len(outputs)} results, but the rule has {counts}")
        pairs = [*zip(self.inputs, inputs, strict=False), *zip(self.outputs, outputs, strict=False)]
        lead = max((len(s) - len(o) + 1 for o, s in pairs if o and o[0] == ("...",)), default=0)
        ops = [_expand(o, len(s), lead) for o, s in pairs]
        large = {
            d
            for o, (_, s) in zip(ops, pairs, strict=True)
            for d, size in zip(o, s, strict=True)
            if len(d) == 1 and size != 1
        }
        ops = [  # where others have more, a dim of size one broadcasts: it has no factor
            tuple(() if size == 1 and d in large else d for d, size in zip(o, s, strict=True))
            for o, (_, s) in zip(ops, pairs, strict=True)
        ]
        todo = [(d, size) for o, (_, s) in zip(ops, pairs, strict=True) for d, size in zip(o, s, strict=True)]
        while todo:
            rest = []
            for dim, size in todo:
                unknown = [f for f in dim if f not in bound]
                known = math.prod(bound[f] for f in dim if f in bound)
                if len(unknown) == 1 and size % max(known, 1) == 0:
                    bound[unknown[0]] = size // max(known, 1)
                elif not unknown and known != size:
                    raise ValueError(f"dim {dim} has size {size}, not {known}")
                elif unknown:
                    rest.append((dim, size))
            if len(rest) == len(todo):
                raise ValueError(f"the sizes of {rest} are ambiguous")
            todo = rest
        n = len(inputs)
        return Signature(tuple(ops[:n]), tuple(ops[n:]), bound, self.summed, self.whole)


def _expand(operand: Operand, ndim: int, lead: int) -> Operand:
    if not operand or operand[0] != ("...",):
        if len(operand) != ndim:
            raise ValueError(f"{len(operand)} dims in the rule, {ndim} in the tensor")
        return operand
    count = ndim - len(operand) + 1
    if count < 0:
        raise ValueError(f"{len(operand) - 1} dims in the rule, {ndim} in the tensor")
    # right-aligned, so that operands with fewer leading dims broadcast
    return (*((f"e{lead - count + i}",) for i in range(count)), *operand[1:])


def _dims(text: str) -> list[str]:
    """Read one operand or result: its dims, each as the names of its factors."""
    dims: list[str] = []
    at = 0
    while text[at:].strip():
        if not (m := _DIM.match(text, at)):
            raise ValueError(f"cannot read {text[at:].strip()!r}")
        if m[1] == "..." and dims:
            raise ValueError("'...' must lead")
        dims.append(" ".join(f for f in m[1].strip("()").split() if f != "1"))
        at = m.end()
    return dims


@lru_cache(maxsize=4096)
def parse(text: str) -> Notation:
    """Parse a rule. Raises ValueError that shows the place."""
    if text.count("->") != 1:
        raise ValueError(f"rule {text!r}: needs exactly one '->'")
    before, after = text.split("->")
    try:
        notation = Notation.of(
            list(map(_dims, before.split(",") if before.strip() else [])), list(map(_dims, after.split(",")))
        )
    except ValueError as e:
        raise ValueError(f"rule {text!r}: {e}") from None
    named_in = {f for o in notation.inputs for d in o for f in d}
    for f in named_in - {"..."} - notation.whole - notation.summed:
        if not all(any(f in d for d in o) for o in notation.outputs):
            raise ValueError(f"rule {text!r}: factor {f} is not in every result: mark it {f}+ (summed) or {f}! (whole)")
    return notation
