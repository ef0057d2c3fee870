"""Define adapters: matrices of low rank beside the frozen weights of a model (LoRA, Hu et al. 2021).

    y = W x + scale B A x                  lora, rslora        A [rank, in], B [out, rank]
    y = m * (W x + scale B A x) / |W + scale B A|    dora      m [out], lengths of rows (Liu et al. 2024, "DoRA")

Names are peft's, without the adapter's name: `q_proj.lora_A.weight` beside `q_proj.weight`. For a weight with another
name, the suffix follows the full name: `experts.down_proj.lora_A.weight`. For experts in one tensor A is
[experts, rank, in] and B [experts, out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from shardc.ir.program import Program
from shardc.ir.stored import whole_name

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class Adapter:
    """The matrices beside one weight. base, a, b, magnitude: placeholders; magnitude: "" except for dora.

    flipped: the weight is [.., in, out], not [.., out, in]. kind, rank, alpha, dropout: from the spec's entry.
    inside: the weight's own module multiplies by it, which peft adapts. whole: all uses of the weight have the adapter,
    so that they can be merged.
    """

    base: str
    a: str
    b: str
    magnitude: str
    kind: Literal["lora", "rslora", "dora"]
    rank: Annotated[int, Field(ge=1, lt=1 << 62)]
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    flipped: bool = False
    inside: bool = True
    whole: bool = True

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Its placeholders."""
        return (self.a, self.b, *([self.magnitude] if self.magnitude else []))


#: What `Program.features` may hold of this feature.
STORED = {"adapters": tuple[Adapter, ...]}


def adapter_fqn(weight: str, part: str) -> str:
    """Return the name of an adapter's part beside a weight."""
    return f"{whole_name(weight).removesuffix('.weight')}.{part}"


def adapted_weights(program: Program, adapter: Adapter) -> tuple[str, ...]:
    """Return the weights that it is beside: members of a stack; of the names of a tied weight, that of its module."""
    base, a = (program.params_by_name[n] for n in (adapter.base, adapter.a))
    named = base.members or (n for n in base.names if adapter_fqn(n, A) == a.fqn)
    return tuple(map(whole_name, named))


def adapters(program: Program) -> tuple[Adapter, ...]:
    """Return the adapters of a program."""
    added: tuple[Adapter, ...] = program.features.get("adapters", ())
    return added


def faults(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the adapters that name parameters which the program does not have, and these."""
    params = {p.name for p in program.params}
    for i, a in enumerate(adapters(program)):
        yield from ((f"adapters[{i}]", f"there is no {n!r:.60}") for n in (a.base, *a.names) if n not in params)
