"""Define `shard`, `activations` and `outputs`: dims of weights and values that are split over axes.

"*.q_proj": column                      a style; the op decides which dim that is (passes/annotate/weight_roles.py)
"*.qkv": {0: {axis: tp, split: 3}}      dim 0 is three fused parts, each of which is split
"*.emb": {0: [dp, tp]}                  one dim over two axes, the outermost first

Values of `activations` and `outputs` have dims only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from shardc.ir.similar_names import nearest
from shardc.spec.fields import (
    Axis,
    Count,
    Dim,
    Pattern,
    Section,
    as_tuple,
    is_dim,
    malformed,
    module_pattern,
    wrong,
    wrong_here,
)

#: Styles of a weight; `shardc.passes.annotate.weight_roles` decides which dim each of them splits.
Style = Literal["column", "row", "vocab", "replicate"]


STYLES = get_args(Style)


Use = Literal["model", "structure"]


USES = get_args(Use)


class DimShard(Section):
    """One axis on one dim, seen as [split, axis, rest]: the middle digit is spread over the axis."""

    axis: Axis = Field(description="mesh axis that splits this dim", examples=["tp"])
    split: Count = Field(
        default=1, description="the dim is made of this many equal fused parts, each split", examples=[3]
    )
    sections: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="the dim is made of fused parts of these sizes, each split", examples=[[512, 128, 128]]
    )


def _dim_shards(value: Any) -> Any:
    """Expand `tp`, `{axis: tp, split: 3}`, or a list of them, outermost first, to a tuple of mappings."""
    if isinstance(value, (str, Mapping)):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not value:
        raise malformed("an axis, a list of axes or a mapping with `axis`", "e.g. {0: tp}")
    return tuple({"axis": v} if isinstance(v, str) else v for v in value)


_DIM_SHARD: dict[str, Any] = {
    "type": "object",
    "required": ["axis"],
    "additionalProperties": False,
    "properties": {
        "axis": {"type": "string"},
        "split": {"type": "integer", "minimum": 1},
        "sections": {"type": "array", "items": {"type": "integer", "minimum": 1}},
    },
}


_ONE: dict[str, Any] = {"anyOf": [{"type": "string"}, _DIM_SHARD]}


_DIMS: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "patternProperties": {"^[0-9]+$": {"anyOf": [*_ONE["anyOf"], {"type": "array", "minItems": 1, "items": _ONE}]}},
}


def _some(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise malformed("a mapping from dim to axis", "e.g. {1: tp}")
    if not value:
        raise wrong_here("names no dim", "e.g. {0: tp}")
    return value


Dims = Annotated[
    dict[Dim, Annotated[tuple[DimShard, ...], BeforeValidator(_dim_shards)]],
    BeforeValidator(_some),
    WithJsonSchema(_DIMS),
]


def _output(value: Any) -> Any:
    """Convert `whole` to None."""
    if value == "whole":
        return None
    if not isinstance(value, Mapping):
        raise malformed("`whole`, or a mapping from dim to axis", "e.g. {2: tp}")
    return value


def _rule(value: Any) -> Any:
    """Expand `column`, `{style: column, axis: tp}` or `{0: tp}` to a mapping of style and axis, or dims."""
    if isinstance(value, str):
        return {"style": value}
    if not isinstance(value, Mapping):
        raise malformed(f"a style ({', '.join(STYLES)}) or a mapping from dim to axis", "e.g. column, or {0: tp}")
    if all(map(is_dim, value)):
        return {" dims": dict(value)}
    if any(map(is_dim, value)):
        raise wrong_here("mixes dims and words", "write {style: column, axis: tp}, or {0: {axis: tp, split: 3}}")
    if value and not any(nearest(key, RuleForm.model_fields) for key in value):
        raise wrong_here("names neither a style nor a dim", "dims are numbers: {0: tp} splits dim 0, {1: tp} dim 1")
    return dict(value)


class RuleForm(Section):
    """How a pattern's weights are split: by a style word, or by dims (no spec has a key " dims")."""

    style: Style | None = Field(default=None, examples=["column"])
    axis: Axis | None = Field(default=None, examples=["tp"])
    dims: Dims | None = Field(default=None, validation_alias=" dims")

    @model_validator(mode="after")
    def _check_not_empty(self) -> RuleForm:
        if self.style is None and self.dims is None:
            raise wrong_here("names neither a style nor a dim", "e.g. {style: column, axis: tp}, or {0: tp}")
        return self


Rule = Annotated[RuleForm, BeforeValidator(_rule)]


def _shard(value: Any) -> Any:
    """Separate `use`, the one keyword of the section, from the patterns."""
    if not isinstance(value, Mapping):
        raise malformed("a mapping from pattern to style or dims", 'e.g. "*.o_proj": row')
    return {
        " rules": {k: v for k, v in value.items() if k != "use"},
        **({"use": value["use"]} if "use" in value else {}),
    }


def _use(value: Any) -> Any:
    """Expand `model` or `{plan: model, axis: tp}` to a mapping."""
    if isinstance(value, (str, Mapping)):
        return {"plan": value} if isinstance(value, str) else dict(value)
    raise malformed(f"a plan ({', '.join(USES)})", "e.g. use: model, or use: {plan: model, axis: tp}")


class UseForm(Section):
    """The source of the weights' splits: the plan that the model carries, or the structure of its graph."""

    plan: Use = Field(examples=["model"])
    axis: Axis | None = Field(default=None, examples=["tp"])


class ShardForm(Section):
    """The section `shard`."""

    use: Annotated[UseForm | None, BeforeValidator(_use)] = Field(default=None, examples=["model"])
    rules: dict[Pattern, Rule] = Field(default={}, validation_alias=" rules")


_STYLE: dict[str, Any] = {"enum": list(STYLES)}


_STYLED: dict[str, Any] = {
    "type": "object",
    "required": ["style"],
    "additionalProperties": False,
    "properties": {"style": _STYLE, "axis": {"type": "string"}},
}


_SHARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "use": {
            "description": (
                "start from the model's own plan, or from the structure of its graph; entries beside it override"
            ),
            "anyOf": [
                {"enum": list(USES)},
                {
                    "type": "object",
                    "required": ["plan"],
                    "additionalProperties": False,
                    "properties": {"plan": {"enum": list(USES)}, "axis": {"type": "string"}},
                },
            ],
        }
    },
    "additionalProperties": {"anyOf": [_STYLE, _DIMS, _STYLED]},
}


def _boundary(value: str) -> str:
    """Check a module pattern, followed by `:in` for the module's input."""
    name, colon, side = value.partition(":")
    if colon and side != "in":
        raise wrong(
            "unknown side {side} of a module", f'"{name}" is its output, "{name}:in" its input', side=f"':{side}'"
        )
    return module_pattern(name) + colon + side


ShardSection = Annotated[ShardForm, BeforeValidator(_shard), WithJsonSchema(_SHARD)]
Boundary = Annotated[str, AfterValidator(_boundary)]
DimsOrWhole = Annotated[Dims | None, BeforeValidator(_output), WithJsonSchema({"anyOf": [{"const": "whole"}, _DIMS]})]
