"""Define the options that several commands share, and those of `shardc run`.

`run` has one for each key of the spec's section `run:`, with its description and default.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from shardc.runtime.storage.urls import expanded
from shardc.spec.run_section import Run


def option(help: str, *names: str, **how: Any) -> Any:
    """Describe an option. names: default: that of the parameter. A flag has no opposite (see Command)."""
    return typer.Option(*names, help=help, **how)


class Command(TyperCommand):
    """A command whose flags have no opposites, such as --no-debug."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        for flag in self.params:
            if flag.default is False:
                flag.secondary_opts = []


Source = Annotated[
    str, typer.Argument(help="model.py, model.py:builder, hf:config.json, or a compiled DIR", show_default=False)
]
JsonOption = Annotated[bool, option("print one JSON document on stdout and nothing else", "--json")]
BatchOption = Annotated[int | None, option("batch size of an hf: model's example batch", min=1)]
SeqOption = Annotated[int | None, option("sequence length of an hf: model's example batch", min=1)]
NprocOption = Annotated[int | None, option("processes on this machine; default: what the mesh needs", min=1)]
DataOption = Annotated[
    str | None, option("train an hf: model on this: a Python file with data(split), or chats.jsonl of conversations")
]
FullOption = Annotated[bool, option("show every layer (by default equal layers are folded)")]
DebugOption = Annotated[bool, option("show the traceback of an error")]
LengthsOption = Annotated[
    str | None,
    option(
        "predict what balanced rows gain: a file of lengths (`300`, or `300 17` for 17 rows), or `data`: data('train')"
    ),
]
PushOption = Annotated[str | None, option("upload the weights and their card to ORG/NAME of the Hugging Face hub")]


@dataclass(frozen=True)
class Named:
    """The program that a command works on: a model and a spec to compile, or a compiled DIR to read.

    model_file: the Python file that registers a compiled DIR's ops, if not the one that it was compiled from. forward,
    score: the program is compiled forward-only.
    """

    model: Source
    spec: Annotated[Path | None, typer.Argument(help="spec.yaml (not with a compiled DIR)", show_default=False)] = None
    mesh: Annotated[list[str] | None, option("sizes instead of the spec's: dp=4,tp=1")] = None
    overrides: Annotated[list[str] | None, option("a setting instead of the spec's: data.bucket_mb=50", "--set")] = None
    forward: Annotated[
        bool,
        option("forward only: return outputs(output, batch) of the model file, or all tensors that the model returns"),
    ] = False
    score: Annotated[bool, option("forward only: return the log-probability of each target of the loss")] = False
    batch: BatchOption = None
    seq: SeqOption = None
    data: DataOption = None
    trust: Annotated[bool, option("accept a compiled DIR whose files were edited")] = False
    model_file: Annotated[
        str | None, option("with a compiled DIR: the model file, if not the one it was compiled from", "--model")
    ] = None
    as_json: JsonOption = False
    debug: DebugOption = False


#: The options of `shardc run` by the panel of the help, in their order; "": the ten that are used most.
PANELS = {
    "": ("steps", "epochs", "lr", "weights", "save", "resume", "log", "eval_every", "mesh", "overrides"),
    "Data": ("data", "batch", "seq", "seed", "eval_batches", "new_data", "choices"),
    "Saving": (
        *("save_every", "keep", "metric", "metric_mode", "patience", "min_delta", "auto_resume", "overwrite"),
        *("last_good", "new_schedule"),
    ),
    "Logging": ("track", "tensorboard", "log_every", "routing", "as_json"),
    "Faults": ("clip", "nonfinite", "max_restarts", "check_links", "watch", "timeout", "debug"),
    "Profiling": ("trace", "breakdown", "memory_snapshot"),
    "Program": ("nproc", "model_file", "as_compiled", "trust"),
}


def _in_panels(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Sort options of `shardc run` by panel; those that the table does not name are in the last one."""
    named, last = {name: (panel, i) for panel, names in PANELS.items() for i, name in enumerate(names)}, [*PANELS][-1]
    placed = []
    for p in parameters:
        panel, number = named.get(p.name, (last, len(named)))
        kind, info = get_args(p.annotation)
        info = copy.copy(info)  # other commands share it
        info.rich_help_panel = panel or None
        placed.append(([*PANELS].index(panel), number, p.replace(annotation=Annotated[kind, info])))
    return [p for *_, p in sorted(placed, key=lambda entry: entry[:2])]


def names_program(*without: str, model: Any = Source) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the fields of Named to a command as arguments and options, without some of them.

    The command's first parameter is a Named. If it has `**settings`, it also gets an option for each key of the spec's
    section `run:` (None: not set). model: the annotation of that argument. typer reads the signature made here.
    """

    def of(command: Callable[..., None]) -> Callable[..., None]:
        types, hints = (get_type_hints(x, include_extras=True) for x in (command, Named))
        hints["model"] = model
        _, *parameters = inspect.signature(command).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        settings = Run.model_fields if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else {}
        others = [p.replace(kind=kind, annotation=types[p.name]) for p in parameters[: -1 if settings else None]]
        fields = {
            f.name: inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])
            for f in dataclasses.fields(Named)
            if f.name not in without
        }
        fields["model"] = fields["model"].replace(default=inspect.Parameter.empty)
        run = [inspect.Parameter(n, kind, default=None, annotation=_option(n, f)) for n, f in settings.items()]
        first = {name: fields.pop(name) for name in ("model", "spec")}

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            named = Named(**{name: given.pop(name) for name in (*first, *fields)})
            command(named, **given)

        options = [*run, *others, *fields.values()]
        ordered = [*first.values(), *(_in_panels(options) if run else options)]
        with_options.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return with_options

    return of


def given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user set, as the spec's section `run:` has them."""
    values = {name: x for name, x in settings.items() if x not in (None, [])}
    for name, x in values.items():
        if isinstance(x, Path):
            values[name] = str(expanded(x))  # a shell leaves the `~` of --save=~/runs as it is
        elif isinstance(x, list):
            values[name] = tuple(x)
    return values


def _option(name: str, field: FieldInfo) -> Any:
    """Return the annotation of the option for a field of the spec's section `run:`, as typer reads it."""
    one = field.default[0] if isinstance(field.default, tuple) and field.default else field.default
    default = f"{one:g}" if isinstance(one, float) else str(one)
    text = (field.description or "") + (f" (default: {default})" if field.default else "")
    for other in Run.model_fields:
        text = text.replace(f"`{other}`", f"--{other.replace('_', '-')}")
    kind: Any = field.annotation  # a type, or what Annotated makes of one
    least = next((x.ge for x in field.metadata if hasattr(x, "ge")), None)
    flags: list[str] = []
    if kind is bool:
        flag = name.replace("_", "-")
        flags = [f"--{flag}/--no-{flag}"]
    elif name in ("save", "log"):
        kind = Path
    elif get_origin(kind) is tuple:
        of = get_args(kind)[0]  # typer takes no list of Literal
        kind, least = (list[str], None) if get_origin(of) is Literal or str in get_args(of) else (list[int], 1)
    elif int in get_args(kind):
        kind = int
    elif kind not in (int, str) and get_origin(kind) is not Literal:
        kind = float
    return Annotated[Optional[kind], option(text, *flags, min=least)]  # noqa: UP045 (of a value)
