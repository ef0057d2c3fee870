"""Define `experts`: modules that contain experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardc.spec.fields import NONE, Axis, Pattern, Section, number_or, number_schema

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
