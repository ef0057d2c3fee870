"""Define `choices`: which modules' discrete choices are recorded or replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec import Spec
from shardc.spec.fields import Pattern, Section
from shardc.spec.yaml_reader import Path


class Choice(Section):
    """What is done with the choices of some modules."""

    mode: Literal["record", "replay"] = Field(
        description="record: they are outputs; replay: they are inputs", examples=["replay"]
    )
    weights: bool = Field(
        default=False, description="also the weights beside the indices; replayed, no gradient flows through them"
    )


def _choice(value: Any) -> Any:
    """Expand the short form: `replay` -> {mode: replay}."""
    return {"mode": value} if isinstance(value, str) else value


Entry = Annotated[
    Choice,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["record", "replay"]}, Choice.model_json_schema()]}),
]


class Sections(Section):
    """The section of this feature."""

    choices: dict[Pattern, Entry] = Field(
        default={},
        description="discrete choices that modules make (topk, argmax, sort, comparisons), by pattern of modules:"
        " record = an output, replay = an input",
        examples=[{"*.gate": "replay"}],
    )

    def patterns(self) -> Iterator[tuple[Path, str, bool]]:
        """Yield nothing: no pattern of the section names a weight."""
        yield from ()


def of(spec: Spec) -> Mapping[str, Choice]:
    """Return the section of a spec; {} if it has none."""
    section: Mapping[str, Choice] = spec.sections.get("choices", {})
    return section
