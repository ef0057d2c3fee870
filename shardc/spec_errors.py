"""Checks what was written against the grammar, and says in a person's words where and what is wrong and what would be right."""

from __future__ import annotations

import copy
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shardc.errors import Errors
from shardc.patterns import nearest
from shardc.spec_form import Form
from shardc.spec_yaml import Document, Path, dotted, flow, reach, say, scalar, without

Details = Any  # pydantic_core.ErrorDetails: type, loc, msg, input, ctx

_BY_KEY = ("extra_forbidden", "missing", "invalid_key")  # cited by the key's place, the others by the value's
_MUST = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "string_type": "text", "model_type": "a mapping", "dict_type": "a mapping", "tuple_type": "a list",
}  # fmt: skip


def check_form(document: Document, errors: Errors) -> tuple[Form, frozenset[Path]]:
    """The form of the document, and the paths left out of it because they were wrong (which is added to `errors`).

    What is wrong is cut away and the rest checked on, so that a later check still sees the sections that are right.
    """
    value, cut = copy.deepcopy(document.value), set(document.broken)
    first = True
    while True:
        try:
            return Form.model_validate(value), frozenset(cut)
        except ValidationError as e:
            for details in e.errors():
                path = reach(value, details["loc"])
                if first and not any(path[: len(b)] == b for b in document.broken):
                    what, fix = explain(details, path)
                    by_value = details["type"] not in _BY_KEY and "[key]" not in details["loc"]
                    errors.add(what, where=document.places.where(path, value=by_value), fix=fix)
                cut.add(_cut(value, path))
        first = False  # what goes wrong after cutting is the cut's doing, not the user's


def _cut(value: Any, path: Path) -> Path:
    """Take the wrong entry out of the value. Returns what was taken."""
    if path[:1] in (("shard",), ("activations",)):
        path = path[:2]  # half an entry would be another entry
    while path and isinstance(path[-1], int) and not (len(path) == 2 and path[0] in ("shard", "activations")):
        path = path[:-1]  # taking out an item would renumber the others
    if path in ((), ("shardc",)):
        value["shardc"] = 1
    elif len(path) == 2 and path[0] == "mesh" and isinstance(path[1], str) and path[1].isidentifier():
        value["mesh"][path[1]] = 1  # the name stays known
    elif reach(value, path) == path:
        without(value, path)
    return path


def explain(details: Details, path: Path) -> tuple[str, str]:
    """What is wrong and the fix, of one of pydantic's errors at a path of the spec."""
    kind, got, ctx = details["type"], details["input"], details.get("ctx", {})
    is_key = "[key]" in details["loc"]
    field, section = _grammar(details["loc"][: -1 if kind in ("extra_forbidden", "missing") else None])
    name = f"`{dotted(path)}`" if path else "a spec"
    key = next((p for p in reversed(path) if isinstance(p, str)), "")
    if kind == "extra_forbidden":
        known = [n for n, f in section.model_fields.items() if not f.validation_alias]
        close = nearest(str(path[-1]), known)
        inside = f" in `{dotted(path[:-1])}`" if len(path) > 1 else ""
        return f"unknown {'key' if inside else 'section'} {say(path[-1])}{inside}", _did_you_mean(close, known)
    if kind == "missing":
        missing = str(details["loc"][-1])
        if missing == "shardc":
            return "`shardc` is missing: a spec says which version of the format it is in", "write `shardc: 1` as the first line"
        return f"{name} needs `{missing}`", f"write {_example(section.model_fields[missing], missing)}"
    if kind in ("literal_error", "word"):
        known = list(ctx["expected"]) if kind == "word" else [str(v) for v in _words(field)]
        label = ctx.get("kind", "style" if path[:1] == ("shard",) else key)
        return f"unknown {label} {say(got)}", _did_you_mean(nearest(str(got), known) if isinstance(got, str) else "", known)
    if kind == "invalid_key" or (is_key and kind == "string_type"):
        return f"{name}: a name is text, not {say(got)}", "quote it if it is a name"
    if is_key and kind in ("int_type", "int_parsing"):
        bare = isinstance(got, str) and got.isdecimal()
        return f"{name}: a dim is a whole number, not {say(got)}", f"write {got} without quotes" if bare else "e.g. {0: tp}"
    if kind == "greater_than_equal" and is_key:
        return f"{name}: dims count from 0, and {say(got)} is below", "use a dim >= 0: 0 is the first, the last of n dims is n - 1"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound, text = (ctx["ge"], "at least") if "ge" in ctx else (ctx["le"], "at most")
        return f"{name} must be {text} {bound}, not {say(got)}", f"write {_example(field, key)}"
    if kind == "form":
        return f"{name} must be {ctx['expected']}, not {say(got)}", str(ctx["fix"])
    if kind in ("wrong", "wrong_here"):
        return (f"{name} " if kind == "wrong_here" else "") + details["msg"], str(ctx["fix"])
    if kind in _MUST:
        return f"{name} must be {_MUST[kind]}, not {say(got)}", _typed(kind, got, field, key)
    return f"{name}: {details['msg']}", f"write {_example(field, key)}"


def _typed(kind: str, got: Any, field: FieldInfo | None, key: str) -> str:
    if isinstance(got, str) and kind == "bool_type":
        return f"write true or false: {key}: {'true' if got.lower() in ('yes', 'on', 'y', 'true', '1') else 'false'}"
    if isinstance(got, str) and kind in ("int_type", "float_type") and isinstance(number := scalar(got.strip()), (int, float)):
        return f"write {number} without quotes"
    if field is not None and field.examples:
        return f"write {_example(field, key)}"
    form = {"tuple_type": "[...]", "dict_type": "{...}", "model_type": "{...}"}.get(kind, _MUST[kind])
    return f"write `{key}: {form}`"


def _did_you_mean(close: str, known: list[str]) -> str:
    every = ", ".join(known)
    return f"did you mean {close!r}? ({every})" if close else f"one of {every}"


def _grammar(loc: tuple[str | int, ...]) -> tuple[FieldInfo | None, type[BaseModel]]:
    """The field that an error's location leads to, and the section that holds what comes next."""
    field: FieldInfo | None = None
    section: type[BaseModel] = Form
    for part in loc:
        for name, info in section.model_fields.items():
            if part in (name, info.validation_alias):
                field, section = info, _section(info.annotation) or section
                break
    return field, section


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for a in get_args(annotation) if (s := _section(a))), None)


def _words(field: FieldInfo | None) -> list[Any]:
    def leaves(annotation: Any) -> list[Any]:
        args = get_args(annotation)
        return [w for a in args for w in leaves(a)] if args else [annotation] if isinstance(annotation, str) else []

    return leaves(field.annotation) if field else []


def _example(field: FieldInfo | None, key: str) -> str:
    example = field.examples[0] if field is not None and field.examples else "..."
    return f"`{key}: {flow(example)}`"
