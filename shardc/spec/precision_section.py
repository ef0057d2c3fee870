"""Define `precision`: number formats of weights, computing, and sums over ranks."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from shardc.spec.fields import NONE, Section, number_or, number_schema

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES = get_args(Dtype)


class Precision(Section):
    """Number formats. params: the master copy; compute: forward and backward; reduce: the sums of gradients over ranks.

    None: params as the model has them, compute as params, reduce as the parameter.
    """

    params: Dtype | None = Field(
        default=None, description="dtype of the stored (master) weights (default: the model's)", examples=["float32"]
    )
    compute: Dtype | None = Field(
        default=None,
        description="dtype of products and activations (default: that of the weights)",
        examples=["bfloat16"],
    )
    reduce: Dtype | None = Field(
        default=None,
        description="dtype in which gradients are summed over ranks (default: that of the weights)",
        examples=["float32"],
    )
    loss_scale: Annotated[
        float | Literal["dynamic"] | None,
        BeforeValidator(number_or("none", "dynamic")),
        NONE,
        number_schema("none", "dynamic"),
    ] = Field(default=None, description="none, dynamic, or a number (for float16)", examples=["none", "dynamic"])
