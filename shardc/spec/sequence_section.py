"""Define `sequence`: how inputs are split along the sequence, and how attention runs then."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec.fields import ONE_OR_MANY, Axes, BatchDims, Pattern, Section, as_list

#: shardc.rules.attention_methods says what each does.
Method = Literal["auto", "gather", "ring", "ulysses"]
#: One for each axis of the sequence, or one for all.
Methods = Annotated[tuple[Method, ...], BeforeValidator(as_list), ONE_OR_MANY]
_METHODS = {"anyOf": [{"enum": list(get_args(Method))}, {"type": "array", "items": {"enum": list(get_args(Method))}}]}


def _methods(value: Any) -> Any:
    """Expand the short form: `ring` -> {"*": ring}."""
    return value if isinstance(value, dict) else {"*": value}


class Sequence(Section):
    """Context parallel: the inputs' sequence dim is split. Of several axes the first is the outermost: its ranks have
    the longest stretches.
    """

    axis: Annotated[Axes, Field(min_length=1), ONE_OR_MANY] = Field(
        description="mesh axis that splits the sequence; [outer, inner] = both, each with its own method",
        examples=["cp"],
    )
    dims: BatchDims = Field(default={"*": 1}, description="each input's sequence dim; null = none", examples=[{"*": 1}])
    method: Annotated[
        dict[Pattern, Methods],
        BeforeValidator(_methods),
        WithJsonSchema({"anyOf": [*_METHODS["anyOf"], {"type": "object", "additionalProperties": _METHODS}]}),
    ] = Field(
        default={"*": ("auto",)},
        description="how queries meet keys of other ranks; [ring, ulysses] of two axes; or {module: method}",
        examples=["ring"],
    )
    balance: Literal["auto", "zigzag", "none"] = Field(
        default="auto",
        description="tokens of a rank: zigzag = two stretches of even causal work; none = one; auto = zigzag where"
        " attention is causal",
    )
