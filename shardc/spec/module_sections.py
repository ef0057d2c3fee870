"""Define `experts` and `adapters`: modules that contain experts, and low-rank matrices beside weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from shardc.spec.fields import (
    NONE,
    Axis,
    Count,
    Pattern,
    Positive,
    Section,
    number_or,
    number_schema,
)

#: The axis over which the plans of `use` spread experts.
EXPERTS_AXIS = "ep"


class Expert(Section):
    """One kind of expert layer. capacity: None = dropless, else the factor of a fixed capacity, of the global batch or
    per microbatch.
    """

    match: Pattern = Field(description="modules that hold experts", examples=["*.mlp.experts"])
    axis: Axis = Field(description="mesh axis over which experts are spread", examples=["ep"])
    capacity: Annotated[float | None, BeforeValidator(number_or("none")), NONE, number_schema("none")] = Field(
        default=None,
        description="none = dropless; a factor = fixed capacity, overflow dropped",
        examples=["none", 1.25],
    )
    per: Literal["batch", "microbatch"] = Field(
        default="batch",
        description="tokens from which capacity is computed: batch = exactly as on one device",
        examples=["microbatch"],
    )


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
