"""Define `parts` and `pipeline: {meshes: ...}`: parts of the model that see the ranks as another mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from shardc.ir.similar_names import nearest
from shardc.spec import Spec, step_sections
from shardc.spec import check as spec_check
from shardc.spec.fields import ONE_OR_MANY_SCHEMA, Axis, Pattern, Section, one_or_many, wrong
from shardc.spec.yaml_reader import Path


def _size(value: int) -> int:
    if value < 1 and value != -1:
        raise wrong("a mesh axis cannot have size {value}", "sizes are at least 1; -1 is what is left", value=value)
    return value


_SIZE = WithJsonSchema({"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]})
Sizes = Annotated[dict[Axis, Annotated[int, AfterValidator(_size), _SIZE]], Field(min_length=1)]


class Part(Section):
    """Modules, and the mesh of the ranks for them: as many ranks as the spec's mesh has beside the pipeline."""

    modules: Annotated[
        tuple[Pattern, ...], BeforeValidator(one_or_many), WithJsonSchema(ONE_OR_MANY_SCHEMA), Field(min_length=1)
    ] = Field(description="modules of the part, with all that is in them", examples=["vision_tower"])
    mesh: Sizes = Field(
        description="axis: size; axes of the spec's mesh, those left out have size 1; -1 = the ranks that are left",
        examples=[{"dp": 4}],
    )


class Pipeline(step_sections.Pipeline):
    """Pipeline stages: a number of them cut by cost, or before the modules `cut`, or by
    counts of the repeated layers. meshes: of stages whose ranks form another mesh.
    """

    meshes: dict[Annotated[int, Field(ge=0)], Sizes] = Field(
        default={},
        description="stage: the mesh of its ranks, if it is another one; needs cut or balance",
        examples=[{0: {"dp": 4}}],
    )


class Sections(Section):
    """The section of this feature, and the one of core that it extends."""

    parts: dict[str, Part] = Field(
        default={},
        description="parts of the model for which the ranks form another mesh, such as an encoder",
        examples=[{"vision": {"modules": "vision_tower", "mesh": {"dp": 4}}}],
    )
    pipeline: Pipeline | None = Field(default=None, examples=[{"axis": "pp", "stages": 4}])

    def patterns(self) -> Iterator[tuple[Path, str, bool]]:
        """Yield nothing: no pattern of the section names a weight."""
        yield from ()


def of(spec: Spec) -> Mapping[str, Part]:
    """Return the section of a spec; {} if it has none."""
    section: Mapping[str, Part] = spec.sections.get("parts", {})
    return section


def meshes(spec: Spec) -> Mapping[int, Mapping[str, int]]:
    """Return the meshes of stages that the spec names; {} if all stages have the same."""
    return getattr(spec.pipeline, "meshes", {})


def resolved(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the sizes of a mesh of so many ranks, with the one that is -1 computed; it stays if they do not divide."""
    known = math.prod(n for n in sizes.values() if n > 0)
    return {a: ranks // known if n == -1 and ranks % known == 0 else n for a, n in sizes.items()}


def check(spec: spec_check.Check) -> None:
    """Check the axes and sizes of each part's mesh, and the numbers of stages."""
    form: Any = spec.form
    for name, part in form.parts.items():
        _check_mesh(spec, ("parts", name, "mesh"), f"part {name!r}", part.mesh)
    pipeline = form.pipeline
    for stage, sizes in (pipeline.meshes if pipeline is not None else {}).items():
        path = ("pipeline", "meshes", stage)
        count = len(pipeline.cut) + 1 if pipeline.cut is not None else len(pipeline.balance or ())
        if not count:
            fix = "name the modules before which stages begin, `cut: [...]`, or count layers, `balance: [...]`"
            spec.add(("pipeline", "meshes"), "`meshes` needs to know the stages of each op", fix, value=False)
            return
        if stage >= count:
            spec.add(path, f"there is no stage {stage}", f"the stages are 0 to {count - 1}", value=False)
        _check_mesh(spec, path, f"stage {stage}", sizes)


def _check_mesh(spec: spec_check.Check, path: Path, name: str, sizes: Mapping[str, int]) -> None:
    """Check that a mesh has the axes of the spec's mesh, and as many ranks as it has beside the pipeline."""
    pipeline = spec.form.pipeline
    axes = [a for a in spec.names if pipeline is None or a != pipeline.axis]
    unknown = [a for a in sizes if a not in axes]
    for axis in unknown:
        close = nearest(axis, axes)
        known = f"the axes are {', '.join(axes)}" if axes else "the mesh has no axes"
        fix = (
            f"did you mean {close!r}? {known}" if close else f"{known}; an axis of size 1 in `mesh` may be larger here"
        )
        spec.add(
            (*path, axis), f"the mesh of {name} has an axis {axis!r}, which `mesh` does not have", fix, value=False
        )
    if unknown or spec.mesh is None:
        return
    ranks = math.prod(spec.mesh.size(a) for a in axes)
    if list(sizes.values()).count(-1) > 1:
        spec.add(path, f"two sizes of the mesh of {name} are -1", "write all but one of them", value=False)
        return
    given, sizes = math.prod(n for n in sizes.values() if n > 0), resolved(sizes, ranks)
    own = given if -1 in sizes.values() else math.prod(sizes.values())
    if own != ranks:
        beside = f" beside {pipeline.axis}" if pipeline is not None else ""
        fix = f"sizes whose product is {ranks}" if -1 not in sizes.values() else f"sizes that divide {ranks}"
        spec.add(path, f"the mesh of {name} has {own} ranks, and `mesh` has {ranks}{beside}", fix, value=False)
        return
    f = spec.form
    tokens = spec_check.token_axes(dict(f))
    movable = {
        *spec_check.data_axes(f.batch, f.data, spec.names, tokens),
        *(a for a, _, job in spec.uses() if job == "weights"),
    }
    for axis, size in sizes.items():
        if axis not in movable and size not in (1, spec.mesh.size(axis)):
            job = "splits the sequence" if axis in tokens else "has experts"
            fix = f"write {axis}: {spec.mesh.size(axis)}, or leave it out: then its ranks belong to other axes"
            spec.add((*path, axis), f"axis {axis!r} {job}: it cannot have another size in {name}", fix, value=False)
