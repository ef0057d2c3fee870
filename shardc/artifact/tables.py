"""The tables of a compiled folder, manifest.json and layouts.json: their form, and what has to agree in them.

The folder may be anybody's. Every entry is checked before anything is made of it: its type, its size, and that the
names and numbers in it are those of something. An error says which entry it is: `layouts.json: params[3].bucket`.
"""

from __future__ import annotations

import keyword
import re
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Optional, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from shardc.artifact.folder_files import AGAIN, LAYOUTS, MANIFEST
from shardc.artifact.rows import Form, Number, Positive, form, of_row
from shardc.errors import Errors
from shardc.ir import matrices
from shardc.ir.adapters import Adapter
from shardc.ir.buckets import Bucket
from shardc.ir.matrices import Cut
from shardc.ir.mesh import MAX_RANKS, MICROBATCH, Mesh
from shardc.ir.offload import OffloadPlaces
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout
from shardc.ir.stage import Region
from shardc.ir.stored import Buffer, Input, Param
from shardc.ir.type_text import parse

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.\d{1,3})*", re.ASCII)
#: Names that the texts use themselves.
_TAKEN = {"mesh", "rng", "ops", "aten", "torch"}


def _name(text: str) -> str:
    """A name in the texts: of a placeholder."""
    if not text.isascii() or not text.isidentifier() or keyword.iskeyword(text) or text in _TAKEN or "__" in text[:2]:
        raise ValueError(f"{text[:40]!r} cannot be a name in a program")
    return text


def _axis(text: str) -> str:
    if not _AXIS.fullmatch(text) or text == MICROBATCH:
        raise ValueError(f"{text[:40]!r} cannot be the name of an axis")
    return text


Name = Annotated[str, AfterValidator(_name)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: layouts.json.
_ROWS: dict[str, Any] = {
    "params": form(Param, Name),
    "buffers": form(Buffer, Name),
    "inputs": form(Input, Name),
    "outputs": form(Output),
    "buckets": form(Bucket),
    "regions": form(Region),
    "adapters": form(Adapter),
}
_LAYOUTS: dict[str, Any] = {name: (types.GenericAlias(list, (each,)), ...) for name, each in _ROWS.items()}
Layouts: Any = create_model(
    "Layouts", __base__=Form, microbatches=(Annotated[int, Field(ge=1, lt=1 << 31)], ...), **_LAYOUTS
)


class StageRow(Form):
    name: Name
    updates: list[str]
    outputs: list[str]


class Example(Form):
    batch: Positive | None = None
    seq: Positive | None = None


class Facts(BaseModel):
    """Facts for people and reports; others than these are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str = ""
    capture_seconds: Seconds = 0.0
    compile_seconds: Seconds = 0.0
    pass_seconds: dict[str, Seconds] = {}
    shard: list[str] = []
    model_ref: str = ""
    example: Example = Example()
    source: dict[str, dict[str, str]] = {}
    source_main: str = ""
    python: Annotated[list[int], Field(min_length=2, max_length=2)] = [0, 0]

    @model_validator(mode="after")
    def _of_source(self) -> Facts:
        given = {"source", "source_main", "python"} & self.model_fields_set
        if len(given) not in (0, 3):
            raise ValueError(f"of source, source_main and python there is only {', '.join(sorted(given))}")
        return self


class _Manifest(Form):
    format: int
    shardc: str
    torch: str
    sha256: dict[str, str]
    mesh: Annotated[dict[Annotated[str, AfterValidator(_axis)], Positive], Field(max_length=1000)]
    stages: Annotated[list[StageRow], Field(max_length=4096)]
    axis: str
    notes: list[str]
    meta: dict[str, Any]
    shared_modules: list[list[str]]
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["dynamic"] | None
    evaluates: Literal["alike", "otherwise", "untried"]
    eval_mode: bool
    still: list[str]
    record: dict[str, Any] | None  # shardc.ir.forward_record reads what anybody may have written
    baked: list[Annotated[tuple[list[str | Number], float | str], Field(strict=False)]]  # JSON has lists


#: manifest.json, but for what says which shardc and torch wrote it, which is checked first.
_MATRICES: Any = form(Cut)
Manifest: Any = create_model(
    "Manifest",
    __base__=_Manifest,
    offload=(form(OffloadPlaces), ...),
    matrices=(Optional[dict[str, list[_MATRICES]]], ...),  # noqa: UP045 (a value)
)

FormT = TypeVar("FormT", bound=BaseModel)


def of_form(kind: type[FormT], values: Any, where: str, at: str = "") -> FormT:
    """The table in its form. where: its file; at: the entry in it that `values` are. Raises ShardcError with all
    entries that are otherwise.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        errors = Errors()
        for wrong in e.errors(include_url=False, include_context=False):
            place = "".join(f"[{x}]" if isinstance(x, int) else f".{_short(x)}" for x in wrong["loc"])
            given = _short(repr(wrong["input"])) if wrong["type"] != "missing" else "nothing"
            fault = wrong["msg"].removeprefix("Value error, ")
            errors.add(f"{(at + place).lstrip('.') or 'it'}: {fault}; it is {given}", where=where, fix=AGAIN)
        errors.raise_any()
        raise


def _short(text: str) -> str:
    return text if len(text) < 60 else f"{text[:56]} ..."


class Checked:
    """What the rows of both tables stand for, after everything that they name was found."""

    def __init__(self, manifest: Any, layouts: Any, folder: str) -> None:
        self.manifest, self.layouts, self.folder = manifest, layouts, folder
        self.mesh = Mesh.of(manifest.mesh)
        self.errors = Errors()
        self._seen: dict[str, tuple[tuple[int, ...], Any, Layout]] = {}

    def run(self) -> None:
        """Raises ShardcError with every entry that does not agree with others."""
        manifest, layouts = self.manifest, self.layouts
        if self.mesh.world > MAX_RANKS:
            self._wrong(MANIFEST, "mesh", f"{self.mesh.world:,} ranks, more than {MAX_RANKS:,}")
        if manifest.axis and manifest.axis not in self.mesh.names:
            self._wrong(MANIFEST, "axis", f"the mesh has no axis {manifest.axis!r}")
        if not manifest.stages or (len(manifest.stages) > 1 and not manifest.axis):
            self._wrong(MANIFEST, "stages", f"{len(manifest.stages)} stages, and an axis {manifest.axis!r}")
        self.errors.raise_any()
        rows = [*layouts.params, *layouts.buffers, *layouts.inputs]
        self._once(LAYOUTS, "params, buffers and inputs", [x.name for x in rows])
        self._once(MANIFEST, "stages", [s.name for s in manifest.stages])
        params, buckets = {p.name for p in layouts.params}, len(layouts.buckets)
        updated, outputs = {b.name for b in layouts.buffers if b.updated}, {o.name for o in layouts.outputs}
        for i, stage in enumerate(manifest.stages):
            self._known(MANIFEST, f"stages[{i}].updates", stage.updates, updated)
            self._known(MANIFEST, f"stages[{i}].outputs", stage.outputs, outputs)
        for key in ("params", "buffers", "inputs"):
            for i, x in enumerate(getattr(layouts, key)):
                self._typed(f"{key}[{i}].type", x.type)
                self._stages(f"{key}[{i}]", getattr(x, "stages", []))
        for i, p in enumerate(layouts.params):
            self._axes(f"params[{i}].reduce", p.reduce)
            if p.bucket >= buckets:
                self._wrong(LAYOUTS, f"params[{i}].bucket", f"there are {buckets} buckets, and it is {p.bucket}")
            elif p.bucket >= 0 and p.name not in layouts.buckets[p.bucket].params:
                self._wrong(LAYOUTS, f"params[{i}].bucket", f"bucket {p.bucket} does not list {p.name}")
        for i, b in enumerate(layouts.buckets):
            self._known(LAYOUTS, f"buckets[{i}].params", b.params, params)
            self._axes(f"buckets[{i}].axes", b.axes)
            self._axes(f"buckets[{i}].shard", [b.shard] if b.shard else [])
            self._stages(f"buckets[{i}]", b.stages)
            if b.rounded and not self.errors.found:
                shapes = {p.name: p.type for p in layouts.params}
                if len(b.rounded) != len(b.params) or b.zero != 3:
                    self._wrong(LAYOUTS, f"buckets[{i}].rounded", "it says of other parameters how they are rounded")
                for how, name in zip(b.rounded, b.params, strict=False):
                    self._axes(f"buckets[{i}].rounded", how.axes)
                    if name in shapes and len(how.granule) != len(self.typed(shapes[name])[0]):
                        self._wrong(LAYOUTS, f"buckets[{i}].rounded", f"{name} has not {len(how.granule)} dims")
            if not b.params or (b.zero and not b.shard):
                self._wrong(LAYOUTS, f"buckets[{i}]", "it has no parameters, or no axis over which it is cut")
        self._once(LAYOUTS, "buckets", [n for b in layouts.buckets for n in b.params])
        for i, o in enumerate(layouts.outputs):
            self._typed(f"outputs[{i}].type", o.type)
            self._stages(f"outputs[{i}]", [o.stage] if manifest.axis else [])
            self._known(LAYOUTS, f"outputs[{i}].divisor", [o.divisor] if o.divisor else [], outputs)
        cuts = {"inputs": layouts.inputs, "outputs": layouts.outputs}
        for key, each in cuts.items():
            for i, cut in enumerate(each):
                if cut.microbatch is not None:
                    self._cut(f"{key}[{i}].microbatch", cut)
        self._cuts()
        for i, a in enumerate(layouts.adapters):
            self._known(LAYOUTS, f"adapters[{i}]", [x for x in (a.base, a.a, a.b, a.magnitude) if x], params)
        before = {""}
        for i, r in enumerate(layouts.regions):
            self._known(LAYOUTS, f"regions[{i}].parent", [r.parent], before)
            before.add(r.name)
        self.errors.raise_any()

    def _cuts(self) -> None:
        """Cuts of parameters, and what they cut."""
        rows = {p.name: p for p in self.layouts.params}
        self._known(MANIFEST, "matrices", self.manifest.matrices or (), rows)
        for name, cuts in (self.matrices() or {}).items():
            try:
                shape = self.typed(rows[name].type)[0] if name in rows else ()
            except ValueError:
                continue  # told already
            if name in rows and (why := matrices.fault(shape[1:] if rows[name].members else shape, cuts)):
                self._wrong(MANIFEST, f"matrices[{name}]", why)

    def matrices(self) -> dict[str, tuple[Cut, ...]] | None:
        """Of which matrices parameters consist."""
        if self.manifest.matrices is None:
            return None
        return {name: tuple(of_row(Cut, c, self.typed) for c in cuts) for name, cuts in self.manifest.matrices.items()}

    def typed(self, text: str) -> tuple[tuple[int, ...], Any, Layout]:
        """Shape, dtype and layout of a type. Raises ValueError for what is none on this mesh."""
        if text not in self._seen:
            shape, dtype, placements = parse(text)
            self._seen[text] = shape, dtype, layout_of(shape, placements, self.mesh)
        return self._seen[text]

    def _typed(self, at: str, text: str) -> None:
        try:
            self.typed(text)
        except ValueError as e:
            self._wrong(LAYOUTS, at, str(e))

    def _cut(self, at: str, x: Any) -> None:
        """The microbatches' cut has to divide the dim, of the global tensor or of a rank's part."""
        try:
            shape, _, _ = self.typed(x.type)
        except ValueError:
            return  # told already
        cut = x.microbatch
        assert cut is not None
        if cut.dim >= len(shape) or cut.split > max(shape[cut.dim], 1) << 20 or cut.blocks > cut.split:
            self._wrong(LAYOUTS, at, f"{cut} does not fit a tensor {x.type}")

    def _axes(self, at: str, axes: Iterable[str]) -> None:
        for axis in axes:
            if why := axis_fault(axis, self.mesh):
                self._wrong(LAYOUTS, at, why)

    def _stages(self, at: str, stages: Iterable[int]) -> None:
        if any(s >= len(self.manifest.stages) for s in stages):
            self._wrong(LAYOUTS, at, f"there are {len(self.manifest.stages)} stages, and it is of {max(stages)}")

    def _known(self, file: str, at: str, names: Iterable[str], known: Iterable[str]) -> None:
        for name in names:
            if name not in known:
                self._wrong(file, at, f"there is no {_short(repr(name))}")

    def _once(self, file: str, at: str, names: list[str]) -> None:
        if twice := [n for n, count in Counter(names).items() if count > 1]:
            self._wrong(file, at, f"{_short(twice[0])!r} stands twice")

    def _wrong(self, file: str, at: str, what: str) -> None:
        self.errors.add(f"{at}: {what}", where=f"{self.folder}/{file}", fix=AGAIN)


def layout_of(shape: tuple[int, ...], placements: Mapping[str, Any], mesh: Mesh) -> Layout:
    """The layout of a value. Raises ValueError where the mesh has no such axis, or the parts do not fit the shape."""
    for axis in placements:
        try:
            mesh.parts(axis)
        except KeyError:
            raise ValueError(f"the mesh has no axis {axis}") from None
    layout = Layout.of(placements, mesh)
    if why := layout.problem(shape, mesh):
        raise ValueError(f"{list(shape)} cannot be laid out so: {why}")
    return layout


def axis_fault(axis: str, mesh: Mesh) -> str:
    """What is wrong with the name of an axis of the mesh, or of some of its coordinates ("pp[0,3]"); "" if nothing."""
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
