"""Write and read layouts.json: the program and its dataclasses, as JSON objects by field types.

    str, int, float, bool      themselves; an int counts from 0, unless the field says otherwise
    tuple[X, ...]              a list
    shape, dtype, layout       one entry `type`: "f32[8, 16@tp]"
    torch.dtype                its name; of a Shard its fields
    Tensor                     true, if there is one: constants are in a separate file

So a field is declared once, in its dataclass. NOT_WRITTEN lists the fields that are not in the file: graphs and what
is made of them have their own files, the rest is not needed to run a compiled program.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, create_model
from torch import Tensor, fx

from shardc.artifact.folder_files import dtype
from shardc.ir.mesh import Mesh
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stage import Stage
from shardc.ir.stored import Buffer, Param
from shardc.ir.type_text import parse, show
from shardc.optional import FEATURES, table

_TYPE = ("shape", "dtype", "layout")
NOT_WRITTEN: dict[type, frozenset[str]] = {
    Buffer: frozenset(("members", "cache")),
    Param: frozenset(("added",)),
    Output: frozenset(("wanted", "cause", "as_made")),
    Stage: frozenset(("graph", "joint")),
    Program: frozenset(("mesh", "graph", "prologue", "schedule", "pairs", "spec", "meta", "recorded"))
    | {"resize", "check_attributes", "origins"},
}
#: Names in annotations of fields that are not written; their modules import them for type checkers only.
_UNSEEN = dict.fromkeys(("ForwardRecord", "Pair", "Schedule", "Spec"), object)
_NO_GRAPH = fx.Graph()


class Form(BaseModel):
    """A JSON object with these entries and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Positive = Annotated[int, Field(ge=1, lt=1 << 62)]


def row(x: Any) -> Any:
    """Return a field's value, or a dataclass of the IR, as JSON."""
    if isinstance(x, Mapping):
        return {name: row(y) for name, y in x.items()}
    if isinstance(x, (tuple, list)):
        return [row(y) for y in x]
    if isinstance(x, Tensor):
        return True
    if isinstance(x, torch.dtype):
        return str(x)
    kind: Any = type(x)
    if not _is_dataclass(kind):
        return x
    head = {"type": show(x.shape, x.dtype, x.layout)} if _has_type(kind) else {}
    return head | {name: row(getattr(x, name)) for name in _written(kind)}


@functools.cache
def form(kind: Any) -> Any:
    """Return the type with which pydantic reads rows of a dataclass and builds it, with an empty graph.

    A constant is True. The validation's context is the mesh.
    """
    entries = {name: _form_of(hint) for name, hint in _written(kind).items()}
    if _has_type(kind):
        entries |= {"type": Annotated[str, AfterValidator(_typed)]}
    if kind is Program:
        entries["features"] = _of_features()
    required: dict[str, Any] = {name: (entry, ...) for name, entry in entries.items()}
    model = create_model(kind.__name__, __base__=Form, **required)
    missing = {f.name for f in fields(kind)} & {"mesh", "graph"}

    def made(row: Any, info: ValidationInfo) -> Any:
        values = {name: getattr(row, name) for name in entries}
        if "type" in values:
            values |= dict(zip(_TYPE, values.pop("type"), strict=True))
        return kind(**values, **{name: info.context if name == "mesh" else _NO_GRAPH for name in missing})

    return Annotated[model, AfterValidator(made)]


def _of_features() -> Any:
    """Return the form of what optional features add to a program: an entry of each that has added something."""
    stored = table("program", "STORED")
    optional: dict[str, Any] = {name: (_form_of(hint), None) for name, hint in stored.items()}
    model = create_model("Features", __base__=Form, **optional)

    def installed(row: Any) -> Any:
        if isinstance(row, dict) and (gone := (FEATURES.keys() - stored) & row.keys()):
            raise ValueError(f"the feature {min(gone)} is not installed")
        return row

    values = AfterValidator(lambda row: {n: getattr(row, n) for n in row.model_fields_set})
    return Annotated[model, BeforeValidator(installed), values]


@functools.cache
def _written(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of the fields that are entries of a row, by name."""
    left_out = {name for k in kind.__mro__ for name in NOT_WRITTEN.get(k, ())} | {*(_TYPE if _has_type(kind) else ())}
    hints = get_type_hints(kind, localns=_UNSEEN | {"Mapping": Mapping}, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind) if f.name not in left_out}


def _is_dataclass(kind: Any) -> bool:  # mypy would narrow the type
    return is_dataclass(kind)


def _has_type(kind: Any) -> bool:
    return any(f.name == "layout" for f in fields(kind))


def _form_of(annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple and args[1:] == (...,):
        return Annotated[types.GenericAlias(list, (_form_of(args[0]),)), AfterValidator(tuple)]
    if origin is tuple:  # JSON has lists
        return Annotated[types.GenericAlias(tuple, tuple(map(_form_of, args))), Field(strict=False)]
    if origin is Mapping:
        return types.GenericAlias(dict, tuple(map(_form_of, args)))
    if origin in (Union, types.UnionType):
        return Literal[True] | None if Tensor in args else Union[tuple(map(_form_of, args))]  # noqa: UP007 (of a tuple)
    if annotation is torch.dtype:
        return Annotated[str, AfterValidator(dtype)]
    if annotation is int:
        return Number
    return form(annotation) if _is_dataclass(annotation) else annotation


def _typed(text: str, info: ValidationInfo) -> tuple[tuple[int, ...], torch.dtype, Layout]:
    return typed(text, info.context)


@functools.lru_cache(4096)
def typed(text: str, mesh: Mesh) -> tuple[tuple[int, ...], torch.dtype, Layout]:
    """Return shape, dtype and layout of a type. Raises ValueError if text, axis or parts are invalid."""
    shape, kind, placements = parse(text)
    for axis in placements:
        try:
            mesh.digits(axis)
        except KeyError:
            raise ValueError(f"the mesh has no axis {axis}") from None
    layout = Layout.of(placements, mesh)
    if why := layout.problem(shape, mesh):
        raise ValueError(f"{list(shape)} cannot be laid out so: {why}")
    return shape, kind, layout
