"""Check a document against the grammar, and turn pydantic's errors into sentences: where, what, fix."""

from __future__ import annotations

import copy
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shardc import optional
from shardc.errors import Errors
from shardc.ir.mesh import is_axis
from shardc.ir.similar_names import nearest
from shardc.spec.foreign_words import ours
from shardc.spec.schema import Form, whole_form
from shardc.spec.yaml_reader import Document, Path, dotted, flow, reach, say, scalar, without

Details = Any  # pydantic_core.ErrorDetails: type, loc, msg, input, ctx
Field = tuple[str, FieldInfo | None]

_BY_KEY = ("extra_forbidden", "missing", "invalid_key")  # cited by the key's place, the others by the value's
_MUST = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
}


def check_form(document: Document, errors: Errors) -> tuple[Form, frozenset[Path]]:
    """Return the form of the document, and the paths removed from it because they were invalid.

    Errors are added to `errors`. Invalid entries are removed and the rest is checked again, so that later checks still
    see the valid sections.
    """
    value, cut = copy.deepcopy(document.value), set(document.broken)
    first = True
    while True:
        try:
            return whole_form().model_validate(value), frozenset(cut)
        except ValidationError as e:
            invalid = [(details, reach(value, details["loc"])) for details in e.errors()]
        before = len(cut)
        unknown = [details["loc"] for details, _ in invalid if details["type"] == "extra_forbidden"]
        for details, path in invalid:
            if first and not any(path[: len(b)] == b for b in document.broken) and not _misspelt(details, unknown):
                fault, fix = explain(details, path)
                by_value = details["type"] not in _BY_KEY and "[key]" not in details["loc"]
                errors.add(fault, where=document.places.where(path, value=by_value), fix=fix)
            cut.add(_cut(value, path))
        if len(cut) == before:  # nothing more can be removed
            errors.raise_any()
        first = False  # errors after a removal are due to the removal, not the user


def _misspelt(details: Details, unknown: list[tuple[int | str, ...]]) -> bool:
    """Return whether a key is missing where one of the unknown ones is nearly it."""
    *parent, key = details["loc"] or ("",)
    near = (loc[-1] for loc in unknown if list(loc[:-1]) == parent)
    return details["type"] == "missing" and any(nearest(str(n), [str(key)]) for n in near)


def _cut(value: Any, path: Path) -> Path:
    """Remove the invalid entry from the value. Returns the path that was removed."""
    if path[:1] in (("shard",), ("activations",), ("outputs",)):
        path = path[:2]  # a part of an entry would be a different entry
    path = reach(value, path)  # an earlier error may have removed it
    while path and isinstance(_at(value, path[:-1]), list):
        path = path[:-1]  # removing an item would renumber the others
    if path in ((), ("shardc",)):
        value["shardc"] = 1
    elif len(path) == 2 and path[0] == "mesh" and isinstance(path[1], str) and is_axis(path[1]):
        value["mesh"][path[1]] = 1  # the name stays known
    else:
        without(value, path)
    return path


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def explain(details: Details, path: Path) -> tuple[str, str]:
    """Return what and fix of one of pydantic's errors at a path of the spec."""
    kind, got, ctx = details["type"], details["input"], details.get("ctx", {})
    is_key = "[key]" in details["loc"]
    field, section = _grammar(details["loc"][: -1 if kind in ("extra_forbidden", "missing") else None])
    name = f"`{dotted(path)}`" if path else "a spec"
    if kind == "extra_forbidden":
        known = [n for n, f in section.model_fields.items() if not f.validation_alias]
        inside = f" in `{dotted(path[:-1])}`" if len(path) > 1 else ""
        noun = "key" if inside else "section"
        fault = f"unknown {noun} {say(path[-1])}{inside}"
        if path == ("lower",):
            return (
                "the section `lower` was removed: each training step runs a forward and a backward graph",
                "leave it out; its options are those of `execution`, e.g. `execution: {compile: layers}`",
            )
        if feature := optional.missing(dotted(path)):
            fault = f"the {noun} {say(path[-1])}{inside} belongs to the feature {feature}, which is not installed"
            return fault, f"install shardc with shardc/features/{feature}, or leave the {noun} out"
        homes = [name for name, f in whole_form().model_fields.items() if path[-1] in _keys(f.annotation)]
        if homes and not nearest(str(path[-1]), known):
            return fault, f"it is a key of {' and of '.join(f'`{h}`' for h in homes)}"
        return fault, _did_you_mean(path[-1], known, key=True)
    if kind == "missing":
        missing = str(details["loc"][-1])
        if missing == "shardc":
            return (
                "`shardc` is missing: a spec says which version of the format it is in",
                "write `shardc: 1` as the first line",
            )
        return f"{name} needs `{missing}`", f"add e.g. {_example((missing, section.model_fields[missing]))}"
    if kind in ("literal_error", "word"):
        known = list(ctx["expected"]) if kind == "word" else _words(field)
        label = ctx.get("kind") or (("plan" if path[1:2] == ("use",) else "style") if path[:1] == ("shard",) else "")
        fault = f"unknown {label} {say(got)}" if label else f"unknown value {say(got)} for {name}"
        return fault, _did_you_mean(got, known, ctx.get("also", ""))
    if kind == "invalid_key" or (is_key and kind == "string_type"):
        return f"{name}: a name is text, not {say(got)}", "quote it if it is a name"
    if is_key and kind == "int_type":
        bare = isinstance(got, str) and got.isdecimal()
        return (
            f"{name}: a dim is a whole number, not {say(got)}",
            f"write {got} without quotes" if bare else "e.g. {0: tp}",
        )
    if is_key and kind == "greater_than_equal":
        return (
            f"{name}: dims count from 0, so {say(got)} is not a dim",
            "use a dim >= 0: 0 is the first, the last of n dims is n - 1",
        )
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {ctx['ge']:g}" if "ge" in ctx else f"at most {ctx['le']:g}"
        return f"{name} must be {bound}, not {say(got)}", f"e.g. {_example(field)}"
    if kind == "form":
        return f"{name} must be {ctx['expected']}, not {say(got)}", str(ctx["fix"])
    if kind in ("wrong", "wrong_here"):
        return (f"{name} " if kind == "wrong_here" else "") + details["msg"], str(
            ctx["fix"]
        ) or f"e.g. {_example(field)}"
    must = _MUST.get(kind)
    return f"{name} must be {must}, not {say(got)}" if must else f"{name}: {details['msg']}", _typed(kind, got, field)


def _typed(kind: str, got: Any, field: Field) -> str:
    """Return the fix of a value of the wrong type: the same value spelled correctly, else an example."""
    if isinstance(got, str) and kind == "bool_type":
        return f"write {'true' if got.lower() in ('yes', 'on', 'y', 'true') else 'false'}"
    if (
        isinstance(got, str)
        and kind in ("int_type", "float_type")
        and isinstance(number := scalar(got.strip()), (int, float))
    ):
        return f"write {number} without quotes"
    return f"e.g. {_example(field)}"


def _did_you_mean(got: object, known: list[str], also: str = "", *, key: bool = False) -> str:
    meant = ours(got, key=key)
    if " " in meant:  # more than a word
        return meant if meant.startswith("no") else f"here that is {meant}"
    close = meant if meant in known else nearest(got, known) if isinstance(got, str) else ""
    choices = ", ".join(known) + (f", {also}" if also else "")
    if not close:
        return f"one of {choices}"
    return f"did you mean {close!r}?" + (f" ({choices})" if len(known) < 8 else "")


def _example(field: Field) -> str:
    name, info = field
    default = info.default if info is not None and isinstance(info.default, (int, float)) else "..."
    example = info.examples[0] if info is not None and info.examples else default
    return f"`{name}: {flow(example)}`"


def _grammar(loc: tuple[str | int, ...]) -> tuple[Field, type[BaseModel]]:
    """Return the field that an error's location leads to, and the section that contains what comes next."""
    field: Field = ("", None)
    section: type[BaseModel] = whole_form()
    for part in loc:
        for name, info in section.model_fields.items():
            if part in (name, info.validation_alias):
                field, section = (name, info), _section(info.annotation) or section
                break
    return field, section


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section."""
    section = _section(annotation)
    return [n for n, f in section.model_fields.items() if not f.validation_alias] if section else []


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in get_args(annotation) if (s := _section(a))), None)


def _words(field: Field) -> list[str]:
    """Return the words that a field's Literal allows."""

    def leaves(annotation: Any) -> list[str]:
        args = get_args(annotation)
        return [w for a in args for w in leaves(a)] if args else [annotation] if isinstance(annotation, str) else []

    return leaves(field[1].annotation) if field[1] else []
