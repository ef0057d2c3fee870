"""Check the tables of a compiled folder, manifest.json and layouts.json: their form and consistency.

The folder may come from anybody. Every entry is checked before it is used: its type, its size, and that its names and
numbers exist. An error names the entry: `layouts.json: params[3].bucket`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shardc.artifact.folder_files import AGAIN
from shardc.artifact.rows import Form, Positive
from shardc.errors import Errors
from shardc.ir.mesh import JOIN, MAX_RANKS, MICROBATCH, Mesh
from shardc.ir.program import Program
from shardc.optional import registered

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.\d{1,3})*", re.ASCII)


def _axis(text: str) -> str:
    if not _AXIS.fullmatch(text) or text == MICROBATCH:
        raise ValueError(f"{text[:40]!r} cannot be the name of an axis")
    return text


def _mesh(axes: dict[str, int]) -> Mesh:
    mesh = Mesh.of(axes)
    if mesh.world > MAX_RANKS:
        raise ValueError(f"{mesh.world:,} ranks, more than {MAX_RANKS:,}")
    return mesh


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Sources(Form):
    """What shardc.artifact.model_source records: digests by file and name. python: its version."""

    main: str
    python: Annotated[list[int], Field(min_length=2, max_length=2)]
    files: dict[str, dict[str, str]]


class Facts(BaseModel):
    """Facts for people and reports; unknown facts are kept unchanged."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str = ""
    capture_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    pass_seconds: dict[str, Seconds] = {}
    shard: list[str] = []
    model_ref: str = ""
    example: dict[Literal["batch", "seq", "data"], Positive | str | None] = {}
    source: Sources | None = None


class Manifest(Form):
    """The content of manifest.json: versions of shardc and torch, hashes of the files, mesh and facts."""

    format: int
    shardc: str
    torch: str
    sha256: dict[str, str]
    mesh: Annotated[
        dict[Annotated[str, AfterValidator(_axis)], Positive], Field(max_length=1000), AfterValidator(_mesh)
    ]
    meta: Facts
    record: dict[str, Any] | None  # shardc.ir.forward_record reads what anybody may have written


def of_form(kind: Any, values: Any, where: str, context: Any = None) -> Any:
    """Return the values in their form. where: their file.

    Raises ShardcError with all entries that have another form.
    """
    try:
        return TypeAdapter(kind).validate_python(values, context=context)
    except ValidationError as e:
        errors = Errors()
        for wrong in e.errors(include_url=False, include_context=False):
            place = "".join(f"[{x}]" if isinstance(x, int) else f".{_short(x)}" for x in wrong["loc"])
            value = _short(repr(wrong["input"])) if wrong["type"] != "missing" else "nothing"
            fault = wrong["msg"].removeprefix("Value error, ")
            errors.add(f"{place.lstrip('.') or 'it'}: {fault}; it is {value}", where=where, fix=AGAIN)
        errors.raise_any()
        raise


def _short(text: str) -> str:
    return text if len(text) < 60 else f"{text[:56]} ..."


def check(program: Program, where: str) -> None:
    """Raise ShardcError with every entry of layouts.json that contradicts another. where: the file."""
    errors = Errors()
    for at, fault in contradictions(program):
        errors.add(f"{at}: {fault}", where=where, fix=AGAIN)
    errors.raise_any()


def contradictions(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the entries of a program that contradict others, and why."""
    mesh, buckets, params = program.mesh, program.buckets, program.params_by_name
    bucket_of = {name: i for i, b in enumerate(buckets) for name in b.params}
    updated, outputs = {b.name for b in program.buffers if b.updated}, {o.name for o in program.outputs}

    def axes(at: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        yield from ((at, why) for axis in names if (why := axis_fault(axis, mesh)))

    def known(at: str, names: Iterable[str], there: Iterable[str]) -> Iterator[tuple[str, str]]:
        yield from ((at, f"there is no {_short(repr(name))}") for name in names if name not in there)

    def once(at: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        yield from ((at, f"{_short(name)!r} stands twice") for name, n in Counter(names).items() if n > 1)

    def stages(at: str, numbers: Iterable[int]) -> Iterator[tuple[str, str]]:
        if high := [s for s in numbers if s >= len(program.stages)]:
            yield at, f"there are {len(program.stages)} stages, and it is of {max(high)}"

    if program.axis and program.axis not in mesh.names:
        yield "axis", f"the mesh has no axis {program.axis!r}"
    if not program.stages or (len(program.stages) > 1 and not program.axis):
        yield "stages", f"{len(program.stages)} stages, and an axis {program.axis!r}"
    yield from once("params, buffers and inputs", (x.name for x in program.stored))
    yield from once("stages", (s.name for s in program.stages))
    yield from once("buckets", (n for b in buckets for n in b.params))
    for i, s in enumerate(program.stages):
        yield from known(f"stages[{i}].updates", s.updates, updated)
        yield from known(f"stages[{i}].outputs", s.outputs, outputs)
    for i, p in enumerate(program.params):
        yield from stages(f"params[{i}]", p.stages)
        yield from axes(f"params[{i}].reduce", p.reduce)
        if p.bucket >= len(buckets):
            yield f"params[{i}].bucket", f"there are {len(buckets)} buckets, and it is {p.bucket}"
        elif p.bucket != bucket_of.get(p.name, -1):
            fault = f"it is {p.bucket}, and the bucket that lists {p.name} is {bucket_of.get(p.name, 'none')}"
            yield f"params[{i}].bucket", fault
    for i, buffer in enumerate(program.buffers):
        yield from stages(f"buffers[{i}]", buffer.stages)
    for i, b in enumerate(buckets):
        yield from known(f"buckets[{i}].params", b.params, params)
        yield from axes(f"buckets[{i}].axes", (*b.axes, *(a for how in b.rounded for a in how.axes)))
        yield from axes(f"buckets[{i}].shard", [b.shard] if b.shard else [])
        yield from stages(f"buckets[{i}]", b.stages)
        if b.rounded and (len(b.rounded) != len(b.params) or b.zero != 3):
            yield f"buckets[{i}].rounded", "it says of other parameters how they are rounded"
        for how, name in zip(b.rounded, b.params, strict=False):
            if name in params and len(how.granule) != len(params[name].shape):
                yield f"buckets[{i}].rounded", f"{name} has not {len(how.granule)} dims"
        if not b.params or (b.zero and not b.shard):
            yield f"buckets[{i}]", "it has no parameters, or no axis over which it is cut"
    for i, o in enumerate(program.outputs):
        yield from stages(f"outputs[{i}]", [o.stage] if program.axis else [])
        yield from known(f"outputs[{i}].divisor", [o.divisor] if o.divisor else [], outputs)
    for key in ("inputs", "outputs"):  # the microbatches' cut has to divide the dim, of all or of a rank's part
        for i, x in enumerate(getattr(program, key)):
            cut = x.microbatch
            if cut and (
                cut.dim >= len(x.shape) or cut.split > max(x.shape[cut.dim], 1) << 20 or cut.blocks > cut.split
            ):
                yield f"{key}[{i}].microbatch", f"{cut} does not fit a tensor {list(x.shape)}"
    for faults in registered("program", "faults", program.features):
        yield from faults(program)
    before = {""}
    for i, r in enumerate(program.regions):
        yield from known(f"regions[{i}].parent", [r.parent], before)
        before.add(r.name)


def axis_fault(axis: str, mesh: Mesh) -> str:
    """Return what is wrong with an axis of the mesh, a part of it ("pp[0,3]"), or several ("dp+tp"); "" if nothing."""
    if JOIN in axis:
        names = axis.split(JOIN)
        faults = [why for name in names if (why := axis_fault(name, mesh))]
        return next(iter(faults), "" if len({*names}) == len(names) else f"{_short(repr(axis))} names an axis twice")
    whole, bracket, inside = axis.partition("[")
    if whole not in mesh.names and whole not in {n.rpartition(".")[0] for n in mesh.names}:
        return f"the mesh has no axis {_short(repr(axis))}"
    if bracket:
        coordinates = inside[:-1].split(",")
        if not inside.endswith("]") or not all(re.fullmatch(r"\d{1,7}", c, re.ASCII) for c in coordinates):
            return f"{_short(repr(axis))} is no part of an axis"
        if max(map(int, coordinates)) >= mesh.size(whole):
            return f"{whole} has {mesh.size(whole)} coordinates, and not {inside[:-1]}"
    return ""
