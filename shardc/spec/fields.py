"""Define field kinds of a spec (an axis, a pattern, a positive number), and errors for other values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import LiteralString

from shardc.ir.mesh import MICROBATCH, is_axis
from shardc.ir.patterns import faults
from shardc.runtime.schedule import SCHEDULES
from shardc.spec.yaml_reader import say


class Section(BaseModel):
    """A frozen section; unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def unknown(kind: str, expected: tuple[str, ...], also: str) -> PydanticCustomError:
    """Make an error for a word that is none of the expected ones.

    kind: what they are ("" = nothing special); also: what else is allowed.
    """
    return PydanticCustomError("word", "unknown word", {"expected": expected, "kind": kind, "also": also})


def wrong(message: LiteralString, fix: str, **ctx: object) -> PydanticCustomError:
    """Make an error whose message is a whole sentence; {names} in it are filled in from ctx."""
    return PydanticCustomError("wrong", message, {**ctx, "fix": fix})


def wrong_here(message: LiteralString, fix: str, **ctx: object) -> PydanticCustomError:
    """Make an error whose message continues the name of the wrong value. fix: "" = the field's example."""
    return PydanticCustomError("wrong_here", message, {**ctx, "fix": fix})


def malformed(expected: str, fix: str) -> PydanticCustomError:
    """Make an error that says that the value should be `expected`."""
    return PydanticCustomError("form", "form", {"expected": expected, "fix": fix})


def one_or_many(value: Any) -> Any:
    """Convert one word, or a list of words, to a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) if isinstance(value, str) else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def axis_name(value: str) -> str:
    """Check the name of an axis in a section, which may be the compiler's MICROBATCH."""
    if value != MICROBATCH and not is_axis(value):
        raise wrong(
            "{value} is not a valid axis name", "letters, digits and _, e.g. dp, tp, dp_outer", value=say(value)
        )
    return value


def mesh_axis(value: str) -> str:
    """Check the name of an axis of the mesh, which may not be the compiler's."""
    if value == MICROBATCH:
        fix = "choose another name, e.g. dp; microbatches are `batch: {microbatches: N}`"
        raise wrong("{value} is an axis name that the compiler uses", fix, value=say(value))
    return axis_name(value)


def module_pattern(value: str) -> str:
    if fault := faults(value):
        raise wrong("the pattern {value} {fault}", 'e.g. "*.{q,k,v}_proj"', value=say(value), fault=fault)
    return value


def positive(value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise wrong_here("must be a number above 0, not {value}", "", value=f"{value:g}")
    return value


def number_or(*words: str) -> Callable[[Any], Any]:
    """Return a validator for a positive number, or one of the words; "none" becomes None."""

    def check(value: Any) -> float | str | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return positive(float(value))
        if value is None or value == "none":
            return None
        if not isinstance(value, str) or value not in words:
            raise unknown("", words, "or a number")
        return value

    return check


def memory_place(value: str) -> str:
    """Check a place: none, cpu, or a directory; any other word is a mistake."""
    if value not in ("none", "cpu") and "/" not in value and not value.startswith((".", "~")):
        raise unknown("place", ("none", "cpu"), "or a directory, with a / in it")
    return value


def schedule_name(value: str) -> str:
    if value not in SCHEDULES and "/" not in value and "." not in value:
        raise unknown("schedule", tuple(SCHEDULES), "or the path of a file")
    return value


def number_schema(*words: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"enum": list(words)}]})


def is_dim(key: object) -> bool:
    """Return whether a key is the number of a dim, in YAML (1) or JSON ("1")."""
    return isinstance(key, int) or (isinstance(key, str) and key.lstrip("-").isdecimal())  # "0" is refused later


def _chosen(value: str) -> str:
    """Check a pattern that may begin with an exclamation mark."""
    module_pattern(value.removeprefix("!"))
    return value


Axis = Annotated[str, AfterValidator(axis_name)]
Pattern = Annotated[str, AfterValidator(module_pattern)]
ONE_OR_MANY_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Axes = Annotated[tuple[Axis, ...], BeforeValidator(one_or_many), WithJsonSchema(ONE_OR_MANY_SCHEMA)]
ONE_OR_MANY = PlainSerializer(lambda value: value[0] if len(value) == 1 else list(value))
#: Patterns that choose modules or weights; a leading ! excludes them; the last match counts.
Choices = Annotated[
    tuple[Annotated[str, AfterValidator(_chosen)], ...],
    BeforeValidator(one_or_many),
    WithJsonSchema(ONE_OR_MANY_SCHEMA),
]
Positive = Annotated[float, AfterValidator(positive), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})]
Count = Annotated[int, Field(ge=1)]
Dim = Annotated[int, Field(ge=0)]
Place = Annotated[str, AfterValidator(memory_place)]
_DIM_OR_NULL: dict[str, Any] = {"type": "object", "additionalProperties": {"type": ["integer", "null"], "minimum": 0}}
BatchDims = Annotated[dict[Pattern, Dim | None], WithJsonSchema(_DIM_OR_NULL)]
NONE = PlainSerializer(lambda value: "none" if value is None else value)
