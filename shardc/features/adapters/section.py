"""Define `adapters` and `freeze`: low-rank matrices beside weights, and weights that are not trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardc.spec import Spec
from shardc.spec.fields import Choices, Count, Pattern, Positive, Section, as_tuple


class Adapter(Section):
    """Matrices of low rank beside the weights of linear layers and experts: W x + scale B A x. What the model has
    itself is frozen then, unless `freeze` says otherwise.
    """

    match: Pattern = Field(description="modules (or weights) that get an adapter", examples=["*.{q,v}_proj"])
    kind: Literal["lora", "rslora", "dora"] = Field(
        default="lora",
        description="lora: scale = alpha/rank; rslora: alpha/sqrt(rank); dora: the length of each row is a parameter",
    )
    rank: Count = Field(description="rows of A", examples=[16])
    alpha: Positive | None = Field(
        default=None, description="numerator of the scale (default: the rank)", examples=[32]
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="dropout of the input of A, in training", examples=[0.05]
    )


class Sections(Section):
    """The sections of this feature."""

    adapters: Annotated[tuple[Adapter, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "*.{q,v}_proj", "rank": 16, "alpha": 32}]]
    )
    freeze: Choices = Field(
        default=(),
        description="weights that are not trained: patterns of modules, with all weights in them, or of weights; ! "
        "excludes; the last match wins",
        examples=[["*", "!score"]],
    )

    def patterns(self) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
        """Yield (place, pattern, whether it may name a module that has no weight itself) of each pattern."""
        yield from ((("adapters", i, "match"), entry.match, False) for i, entry in enumerate(self.adapters))
        yield from ((("freeze", i), text.removeprefix("!"), True) for i, text in enumerate(self.freeze))


def of(spec: Spec) -> Sections:
    """Return these sections of a spec."""
    return Sections.model_construct(**{n: x for n, x in spec.sections.items() if n in Sections.model_fields})
