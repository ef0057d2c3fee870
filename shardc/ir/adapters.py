"""Adapters: matrices of low rank beside the weights of a model, which are frozen (LoRA, Hu et al. 2021).

    y = W x + scale B A x                  lora, rslora        A [rank, in], B [out, rank]
    y = m * (W x + scale B A x) / |W + scale B A|    dora      m [out], lengths of rows (Liu et al. 2024, "DoRA")

Names are peft's, without that of the adapter: `q_proj.lora_A.weight` beside `q_proj.weight`; behind the name of a
weight that is called otherwise, `experts.down_proj.lora_A.weight`. Of experts in one tensor A is [experts, rank, in]
and B [experts, out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardc.ir.patterns import enclosing, match

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class Adapter:
    """What stands beside one weight. base, a, b, magnitude: placeholders; magnitude: "" but for dora.

    flipped: the weight is [.., in, out], not [.., out, in]. kind, rank, alpha, dropout: of the spec's entry.
    """

    base: str
    a: str
    b: str
    magnitude: str
    kind: str
    rank: int
    alpha: float
    dropout: float
    flipped: bool = False

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Its placeholders."""
        return (self.a, self.b, *([self.magnitude] if self.magnitude else []))


def name_beside(weight: str, part: str) -> str:
    """The name of an adapter's part, by the name of the weight that it is beside."""
    return f"{whole_name(weight).removesuffix('.weight')}.{part}"


def whole_name(part: str) -> str:
    """The name of the weight that a stored tensor is, or belongs to: `q_proj.weight` of `q_proj.weight:qdata`, which
    is a part of a quantised one (shardc.runtime.state.quantized).
    """
    return part.partition(":")[0]


def frozen(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Do the patterns of `freeze` freeze a parameter of these names? The last one that matches counts."""
    for pattern in reversed(patterns):
        if any(match(pattern.removeprefix("!"), n) for name in names for n in (name, *enclosing(name))):
            return not pattern.startswith("!")
    return False
