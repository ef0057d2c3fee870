"""Rows of layouts.json and manifest.json: dataclasses of the IR as JSON objects, by the types of their fields.

    str, int, float, bool      themselves; an int counts from 0, unless BOUNDS says otherwise
    tuple[X, ...]              a list
    shape, dtype, layout       one entry `type`: "f32[8, 16@tp]"
    torch.dtype                its name; of a Shard its fields
    Tensor                     whether there is one: constants are in a file of their own

So a field is declared once, in its dataclass. NOT_WRITTEN are those that a compiled program does not need.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from torch import Tensor

from shardc.artifact.folder_files import dtype
from shardc.ir.adapters import Adapter
from shardc.ir.buckets import Bucket, Rounded
from shardc.ir.matrices import Cut
from shardc.ir.offload import OffloadPlaces
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout, Shard
from shardc.ir.stored import Buffer, Param
from shardc.ir.type_text import show

T = TypeVar("T")
#: Of a tensor: shape, dtype, layout.
Typed = tuple[tuple[int, ...], torch.dtype, Layout]
_TYPE = ("shape", "dtype", "layout")
NOT_WRITTEN: dict[type, frozenset[str]] = {
    Buffer: frozenset(("members", "cache")),
    Output: frozenset(("wanted", "cause", "as_made")),
}


class Form(BaseModel):
    """A JSON object with these entries and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _dtype(text: str) -> str:
    dtype(text)
    return text


def _place(text: str) -> str:
    if text not in ("none", "cpu") and "/" not in text and not text.startswith((".", "~")):
        raise ValueError(f"{text[:40]!r} is neither none, cpu nor a folder")
    return text


Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Positive = Annotated[int, Field(ge=1, lt=1 << 62)]
_Index = Annotated[int, Field(ge=-1, lt=1 << 31)]
_Place = Annotated[str, AfterValidator(_place)]
#: What a field may be, where its type allows more.
BOUNDS: dict[tuple[type, str], Any] = {
    (Param, "order"): Annotated[int, Field(ge=-1, lt=1 << 62)],
    (Param, "bucket"): _Index,
    (Bucket, "zero"): Annotated[int, Field(ge=0, le=3)],
    (Rounded, "format"): Literal["e4m3", "e5m2"],
    (Adapter, "kind"): Literal["lora", "rslora", "dora"],
    (Adapter, "rank"): Positive,
    (Adapter, "alpha"): Annotated[float, Field(gt=0, allow_inf_nan=False)],
    (Adapter, "dropout"): Annotated[float, Field(ge=0, lt=1)],
    (OffloadPlaces, "optimizer"): _Place,
    (OffloadPlaces, "parameters"): _Place,
    (OffloadPlaces, "page_mb"): Annotated[float, Field(gt=0, allow_inf_nan=False)],
    (Cut, "sizes"): Annotated[list[Positive], Field(min_length=1)],
    (Shard, "split"): Positive,
    (Shard, "blocks"): Positive,
}


@functools.cache
def form(kind: type, name: Any = str) -> Any:
    """The form of a dataclass's rows. name: what its field `name` may be."""
    entries: dict[str, Any] = {"type": (str, ...)} if _has_type(kind) else {}
    for field_name, annotation in _written(kind).items():
        entry = name if field_name == "name" else BOUNDS.get((kind, field_name)) or _form_of(annotation)
        entries[field_name] = (entry, ...)
    return create_model(kind.__name__, __base__=Form, **entries)


def row(x: Any) -> dict[str, Any]:
    """A dataclass of the IR as a row."""
    kind: Any = type(x)
    head = {"type": show(x.shape, x.dtype, x.layout)} if _has_type(kind) else {}
    return head | {name: _plain(annotation, getattr(x, name)) for name, annotation in _written(kind).items()}


def of_row(kind: Callable[..., T], row: Any, typed: Callable[[str], Typed], **others: Any) -> T:
    """A dataclass of the IR from its row, which has its form. typed: reads a type. others: fields that no row has."""
    values: dict[str, Any] = {
        name: _value(annotation, getattr(row, name), typed) for name, annotation in _written(kind).items()
    }
    if _has_type(kind):
        values |= dict(zip(_TYPE, typed(row.type), strict=True))
    return kind(**values | others)


@functools.cache
def _written(kind: Any) -> Mapping[str, Any]:
    """The annotations of the fields that are entries of a row, by name."""
    hints, left_out = get_type_hints(kind), {*NOT_WRITTEN.get(kind, ()), *(_TYPE if _has_type(kind) else ())}
    return {f.name: hints[f.name] for f in fields(kind) if f.name not in left_out}


def _is_dataclass(kind: Any) -> bool:
    return is_dataclass(kind)


def _has_type(kind: Any) -> bool:
    return any(f.name == "layout" for f in fields(kind))


def _form_of(annotation: Any) -> Any:
    if get_origin(annotation) is tuple:
        return list[_form_of(get_args(annotation)[0])]  # type: ignore[misc]
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = get_args(annotation)
        return bool if Tensor in kinds else Union[tuple(_form_of(k) for k in kinds)]  # noqa: UP007 (of a tuple)
    if annotation is torch.dtype:
        return Annotated[str, AfterValidator(_dtype)]
    if annotation is int:
        return Number
    return form(annotation) if _is_dataclass(annotation) else annotation


def _plain(annotation: Any, x: Any) -> Any:
    if Tensor in get_args(annotation):
        return x is not None
    if isinstance(x, (tuple, list)):
        return [_plain(None, y) for y in x]
    if isinstance(x, torch.dtype):
        return str(x)
    return row(x) if _is_dataclass(x) else x


def _value(annotation: Any, x: Any, typed: Callable[[str], Typed]) -> Any:
    if get_origin(annotation) is tuple:
        return tuple(_value(get_args(annotation)[0], y, typed) for y in x)
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [k for k in get_args(annotation) if k is not type(None)]
        return x if x is None or len(kinds) > 1 else _value(kinds[0], x, typed)
    if annotation is torch.dtype:
        return dtype(x)
    return of_row(annotation, x, typed) if _is_dataclass(annotation) else x
