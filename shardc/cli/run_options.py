"""Options of `shardc run`: one for each key of the spec's section `run:`, with its description and its default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from shardc.spec.run_section import Run


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Make options of a command's `**settings`: typer reads them from its signature. None: not given."""
    signature, types = inspect.signature(command), get_type_hints(command, include_extras=True)
    model, spec, *others, _ = (p.replace(annotation=types[p.name]) for p in signature.parameters.values())
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field))
        for name, field in Run.model_fields.items()
    ]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others]
    command.__signature__ = signature.replace(parameters=[model, spec, *options, *keywords])  # type: ignore[attr-defined]
    return command


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, as the section has them."""
    values = {name: x for name, x in settings.items() if x not in (None, [])}
    for name, x in values.items():
        if isinstance(x, Path):
            values[name] = str(x.expanduser())  # a shell leaves the `~` of --save=~/runs as it is
        elif isinstance(x, (Enum, list)):
            values[name] = x.value if isinstance(x, Enum) else tuple(x)
    return values


def _words(name: str, words: tuple[str, ...]) -> Any:
    return Enum(name, {word: word for word in words})


def _option(name: str, field: FieldInfo) -> Any:
    """The type of an option, and what typer has to know of it."""
    default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    text = (field.description or "") + (f" (default: {default})" if field.default else "")
    text = text.replace("`save`", "--save").replace("`log`", "--log")
    kind: Any = field.annotation  # a type, or what Annotated makes of one
    least = next((x.ge for x in field.metadata if hasattr(x, "ge")), None)
    flags: list[str] = []
    if kind is bool:
        flag = name.replace("_", "-")
        flags = [f"--{flag}/--no-{flag}"]
    elif kind is str:
        kind = Path
    elif get_origin(kind) is Literal:
        kind = _words(name, get_args(kind))
    elif get_origin(kind) is tuple:
        kind, least = list[int], 1
    elif kind is not int:
        kind = float
    return Annotated[Optional[kind], typer.Option(*flags, min=least, help=text)]  # noqa: UP045 (of a value)
