"""Define `sequence`: how inputs are split along the sequence, and how attention runs then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.spec import Spec
from shardc.spec.check import Check
from shardc.spec.fields import ONE_OR_MANY, Axes, BatchDims, Pattern, Section, one_or_many
from shardc.spec.yaml_reader import Path, reach

#: methods.py says what each does.
Method = Literal["auto", "gather", "ring", "ulysses"]
#: One for each axis of the sequence, or one for all.
Methods = Annotated[tuple[Method, ...], BeforeValidator(one_or_many), ONE_OR_MANY]
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
        description="tokens of a rank: zigzag = two stretches, for even causal work; none = one; auto = zigzag for"
        " causal attention, if the tokens divide",
    )


class Sections(Section):
    """The section of this feature."""

    sequence: Sequence | None = Field(default=None, examples=[{"axis": "cp"}])

    def patterns(self) -> Iterator[tuple[Path, str, bool]]:
        """Yield nothing: no pattern of the section names a weight."""
        yield from ()


def of(spec: Spec) -> Sequence | None:
    """Return the section of a spec; None if the sequence is not split over ranks."""
    section: Sequence | None = spec.sections.get("sequence")
    return section if spec.token_ranks > 1 else None


def with_rows(spec: Spec, times: int) -> Spec:
    """Return the spec for `times` as many rows: of the first axis the outer `times` ranks split rows, not tokens."""
    section = spec.sections["sequence"]
    axis, *others = section.axis
    mesh = spec.mesh if times == spec.mesh.size(axis) else spec.mesh.refine(axis, times)
    rows, *tokens = mesh.digits(axis)
    sections = {name: x for name, x in spec.sections.items() if name != "sequence"}
    if tokens or others:
        method = section.method if tokens else {p: m[1:] or m for p, m in section.method.items()}
        left = {"axis": (*tokens, *others), "method": method}
        sections["sequence"] = section.model_copy(update=left)
    batch = spec.batch.model_copy(update={"axes": (*spec.data_axes, rows)})
    return replace(spec, mesh=mesh, batch=batch, sections=sections)


def token_axes(sections: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield each axis that splits the sequence, outermost first, with its place in the spec."""
    section = sections.get("sequence")
    for i, axis in enumerate(section.axis if section is not None else ()):
        yield axis, ("sequence", "axis", i)


def check(spec: Check) -> None:
    """Check that each axis of the sequence occurs once, and has a method."""
    section: Sequence | None = dict(spec.form).get("sequence")
    if section is None:
        return
    for i, axis in enumerate(section.axis):
        if axis in section.axis[:i]:
            spec.add(("sequence", "axis", i), f"axis {axis!r} is written twice", "write it once")
    for pattern, methods in section.method.items():
        path = reach(spec.value, ("sequence", "method", pattern))
        if len(methods) not in (1, len(section.axis)):
            fault = f"{len(methods)} methods for the {len(section.axis)} axes of the sequence"
            spec.add(path, fault, "write one for all axes, or one for each in their order")
        elif (methods * len(section.axis))[: len(section.axis)].count("ring") > 1:
            spec.add(path, "a ring runs over one axis", "write [ring, ulysses] or [ring, gather]")
