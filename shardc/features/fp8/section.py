"""Define `precision: {products: ...}`: linear layers that multiply numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec import Spec, precision_section
from shardc.spec.fields import ONE_OR_MANY_SCHEMA, Choices, Section

Recipe = Literal["fp8-rowwise", "fp8-tensorwise", "mxfp8"]


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
        {"enum": ["none", *get_args(Recipe)]},
        {
            "type": "object",
            "required": ["recipe"],
            "additionalProperties": False,
            "properties": {"recipe": {"enum": list(get_args(Recipe))}, "match": ONE_OR_MANY_SCHEMA},
        },
    ]
}


class Precision(precision_section.Precision):
    """Number formats. params: the master copy; compute: forward and backward; reduce: the sums of gradients over ranks.
    products: those of linear layers, in 8 bits.

    None: params as the model has them, compute as params, reduce as the parameter.
    """

    products: Annotated[Products | None, BeforeValidator(_products), WithJsonSchema(_PRODUCTS)] = Field(
        default=None,
        description="none, or how linear layers multiply numbers of 8 bits: fp8-rowwise, fp8-tensorwise, mxfp8",
        examples=["fp8-rowwise", {"recipe": "fp8-rowwise", "match": ["*", "!lm_head"]}],
    )


class Sections(Section):
    """The section of core that this feature extends."""

    precision: Precision = Field(default=Precision(), examples=[{"compute": "bfloat16"}])

    def patterns(self) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
        """Yield (place, pattern, False: it must name a weight) of each pattern."""
        for text in self.precision.products.match if self.precision.products is not None else ():
            if text not in ("*", "!*"):
                yield ("precision", "products"), text.removeprefix("!"), False


def of(spec: Spec) -> Products | None:
    """Return the section of a spec, if it has one."""
    return getattr(spec.precision, "products", None)
