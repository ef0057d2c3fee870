"""Define adapters: matrices of low rank beside the frozen weights of a model (LoRA, Hu et al. 2021).

    y = W x + scale B A x                  lora, rslora        A [rank, in], B [out, rank]
    y = m * (W x + scale B A x) / |W + scale B A|    dora      m [out], lengths of rows (Liu et al. 2024, "DoRA")

Names are peft's, without the adapter's name: `q_proj.lora_A.weight` beside `q_proj.weight`. For a weight with another
name, the suffix follows the full name: `experts.down_proj.lora_A.weight`. For experts in one tensor A is
[experts, rank, in] and B [experts, out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardc.ir.patterns import enclosing, match

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class Adapter:
    """The matrices beside one weight. base, a, b, magnitude: placeholders; magnitude: "" except for dora.

    flipped: the weight is [.., in, out], not [.., out, in]. kind, rank, alpha, dropout: from the spec's entry.
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
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Its placeholders."""
        return (self.a, self.b, *([self.magnitude] if self.magnitude else []))


def adapter_fqn(weight: str, part: str) -> str:
    """Return the name of an adapter's part beside a weight."""
    return f"{whole_name(weight).removesuffix('.weight')}.{part}"


def whole_name(part: str) -> str:
    """Return the name of the weight that a stored tensor is or belongs to.

    It is `q_proj.weight` for `q_proj.weight:qdata`, a part of a quantised weight (shardc.runtime.state.quantized).
    """
    return part.partition(":")[0]


def frozen(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the `freeze` patterns freeze a parameter with these names. The last match decides."""
    for pattern in reversed(patterns):
        if any(match(pattern.removeprefix("!"), n) for name in names for n in (name, *enclosing(name))):
            return not pattern.startswith("!")
    return False
