"""Define `precision`: number formats of weights, computing, sums over ranks, and linear products."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec.fields import NONE, ONE_OR_MANY_SCHEMA, Choices, Section, number_or, number_schema

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES = get_args(Dtype)


Recipe = Literal["fp8-rowwise", "fp8-tensorwise", "mxfp8"]


RECIPES = get_args(Recipe)


class Products(Section):
    """Products of linear layers with numbers of 8 bits: inputs, weights and gradients are rounded to float8, with one
    scale for each row (fp8-rowwise), each tensor (fp8-tensorwise), or each block of 32 (mxfp8).
    """

    recipe: Recipe = Field(
        description="what shares one scale: a row, a tensor, or a block of 32 along the summed dim",
        examples=["fp8-rowwise"],
    )
    match: Choices = Field(
        default=("*",),
        description="linear layers (or their weights) that use the recipe; ! excludes; the last match wins",
        examples=[["*", "!lm_head"]],
    )

    @property
    def by_rows(self) -> bool:
        """Whether a row's result depends on that row alone. A tensor's scale depends on all rows."""
        return self.recipe != "fp8-tensorwise"


def _products(value: Any) -> Any:
    """Expand the short form: `fp8-rowwise` -> {recipe: fp8-rowwise}; none -> no section."""
    return None if value == "none" else {"recipe": value} if isinstance(value, str) else value


_PRODUCTS: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", *RECIPES]},
        {
            "type": "object",
            "required": ["recipe"],
            "additionalProperties": False,
            "properties": {"recipe": {"enum": list(RECIPES)}, "match": ONE_OR_MANY_SCHEMA},
        },
    ]
}


class Precision(Section):
    """Number formats. params: the master copy; compute: forward and backward; reduce: the sums of gradients over ranks.
    products: those of linear layers, in 8 bits.

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
    products: Annotated[Products | None, BeforeValidator(_products), WithJsonSchema(_PRODUCTS)] = Field(
        default=None,
        description="none, or how linear layers multiply numbers of 8 bits: fp8-rowwise, fp8-tensorwise, mxfp8",
        examples=["fp8-rowwise", {"recipe": "fp8-rowwise", "match": ["*", "!lm_head"]}],
    )
