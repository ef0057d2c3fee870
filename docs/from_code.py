"""The reference pages that the code itself holds: functions with their docstrings, commands, errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

#: What reference/python.md shows, in its order.
FUNCTIONS = ("compile", "load", "coverage", "simulate", "plan")
ENGINES = ("vllm", "sglang", "transformers", "described", "at", "receive", "here", "files", "through")
PARTS = ("groups", "matrices", "whole", "rule", "check_rule")
PROGRAM = (
    "engine",
    "forward",
    "module",
    "local",
    "text",
    "joint",
    "save",
    "verify",
    "prove",
    "html",
    "cost",
    "reshard",
    "to",
)
ENGINE = (
    "step",
    "backward",
    "update",
    "evaluate",
    "evaluate_all",
    "score",
    "score_all",
    "generate",
    "norms",
    "set",
    "loader",
    "local",
    "part",
    "save",
    "finish_save",
    "saving",
    "load",
    "export",
    "full_state_dict",
    "to",
    "weights_to",
    "close",
)
MODULE = (
    "forward",
    "clip_grad_norm_",
    "optimizer",
    "local",
    "train",
    "norms",
    "save",
    "load",
    "full_state_dict",
    "weights_to",
)
FORWARD = ("loader",)
PLAN = (
    "best",
    "spec",
    "save",
    "html",
)
#: Errors that a user may want to catch: they are ShardcErrors.
ERRORS = (
    "shardc.runtime.mesh.agreement:DisagreementError",
    "shardc.runtime.mesh.watch:RankFailedError",
    "shardc.runtime.mesh.replicas:ReplicasDifferError",
    "shardc.runtime.stage.not_finite:NotFiniteError",
    "shardc.runtime.stage.op_errors:OutOfMemoryError",
    "shardc.runtime.stage.op_errors:OutOfRangeError",
    "shardc.runtime.state.checkpoint_folder:DamagedError",
    "shardc.runtime.state.checkpoint_folder:SavingError",
    "shardc.runtime.step.evaluation:NoBatchesError",
    "shardc.ir.stored:UnknownParameterError",
    "shardc.ir.stored:UnknownNameError",
)
#: Wrong specs, each with one mistake, behind `shardc: 1` and `mesh: {dp: 2, tp: 2}`.
WRONG = (
    "shrad: {use: model}",
    "shard: {'*.up': colum}",
    "shard: {'*.up': {0: tq}}",
    "data: {zero: 4}",
    "data: {zeor: 1}",
    "pipeline: {axis: pp, stages: two}",
    "batch: {microbatches: 0}",
    "experts: [{match: '*.moe'}]",
    "pipeline: {axis: dp, stages: 3}",
    "fsdp: true",
)


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


# --- docstrings as Markdown


_PAGE = re.compile(r"(?<![\w/])docs/((?:tutorial|how-to|reference|explanation|measured)/([\w-]+)\.md)")


def markdown(owner: Any) -> str:
    """Write a docstring as Markdown: its arguments as a list, examples and names of modules as code."""
    text = inspect.getdoc(owner) or ""
    names = set(inspect.signature(owner).parameters) if callable(owner) else set()
    if dataclasses.is_dataclass(owner):
        names |= set(dir(owner))
    return "\n\n".join(filter(None, (paragraph(p, names) for p in re.split(r"\n\s*\n", text.strip()))))


def paragraph(text: str, names: set[str]) -> str:
    """Write one paragraph. names: of arguments and attributes, each of which begins an item of a list."""
    if text.lstrip().startswith(">>>"):
        return "```text\n" + re.sub(r"\s+# doctest.*", "", text) + "\n```"
    begins = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)"
    item = rf"(?:\.\w+|{begins})(?:, (?:\.\w+|{begins}))*:\s"
    out: list[str] = []
    for piece in re.split(rf"(?:(?<=[.;)])\s+|\n\s*)(?={item})|(?<=[.])\s+(?=Raises [A-Z])", text):
        if re.match(item, piece):
            name, _, rest = " ".join(piece.split()).partition(": ")
            shown = f"- {', '.join(f'`{n}`' for n in name.split(', '))}: {_inline(rest.rstrip(';'))}"
            out.append(("" if out and out[-1].lstrip().startswith("- ") else "\n") + _filled(shown, "  "))
        else:
            out.append(("\n" if out else "") + _filled(_inline(" ".join(piece.split()))))
    return "\n".join(out).strip()


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _inline(line: str) -> str:
    """Write names of modules, dunders and options as code, and paths of pages as links, outside of code."""

    def outside(text: str) -> str:
        text = _PAGE.sub(lambda m: f"[{m[2]}](../{m[1]})", text)
        text = re.sub(r"\bshardc(?:\.\w+)+(?:\([^()]*\))?", lambda m: f"`{m[0]}`", text)
        text = re.sub(r"\b(shardc/[\w/.]+\.py)", r"`\1`", text)
        text = re.sub(r"(?<!\w)__\w+__", lambda m: f"`{m[0]}`", text)
        text = re.sub(r"(?<![\w-])--[a-z][\w-]*", lambda m: f"`{m[0]}`", text)  # no dash of typographers
        return text.replace("<", "&lt;").replace("**", "\\*\\*")

    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(piece if piece.startswith("`") else outside(piece) for piece in pieces)


def signature(name: str, function: Any) -> str:
    """Write a call with its arguments and defaults, wrapped at 100 columns."""
    parameters = list(inspect.signature(function).parameters.values())
    shown, star = [], False
    for p in parameters:
        if p.name == "self" or (p.name in ("_", "__")):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        shown.append(f"{prefix}{p.name}{'' if p.default is p.empty else f'={_default(p.default)}'}")
    line, lines = f"{name}(", []
    for i, each in enumerate(shown):
        each += ", " if i < len(shown) - 1 else ""
        if len(line) + len(each) > 100:
            lines.append(line.rstrip())
            line = "    "
        line += each
    return "\n".join([*lines, f"{line})"])


def _default(value: Any) -> str:
    if value is ...:
        return "..."
    if callable(value):
        return getattr(value, "__name__", "...").replace("<lambda>", "...")
    return repr(value)


def entry(name: str, function: Any, level: int = 3) -> str:
    body = markdown(function)
    if isinstance(function, property):
        return f"{'#' * level} {name.rpartition('.')[2]}\n\n{body}"
    return f"{'#' * level} {name.rpartition('.')[2]}\n\n```text\n{signature(name, function)}\n```\n\n{body}"


def members(owner: Any, shown: str, names: Sequence[str]) -> str:
    """Write a class's docstring and its methods."""
    parts = [markdown(owner)]
    for name in names:
        member = inspect.getattr_static(owner, name)
        member = getattr(member, "func", getattr(member, "__func__", member))
        parts.append(entry(f"{shown}.{name}", member))
    return "\n\n".join(parts)


def python() -> dict[str, str]:
    """Return the blocks of reference/python.md: functions, and the methods of what they return."""
    import shardc
    from shardc.cost import Cost
    from shardc.runtime.step.engine import Engine
    from shardc.runtime.step.forward import Forward
    from shardc.runtime.step.module import ShardedModule
    from shardc.verify.equality import Report
    from shardc.verify.static import Proof

    def functions(names: tuple[str, ...]) -> str:
        return "\n\n".join(entry(f"shardc.{n}", getattr(shardc, n)) for n in names)

    results = {"Cost": Cost, "Report": Report, "Proof": Proof, "Simulation": shardc.Simulation}
    return {
        "compile": entry("shardc.compile", shardc.compile),
        "functions": functions(tuple(n for n in FUNCTIONS if n != "compile")),
        "program": members(shardc.Program, "program", PROGRAM),
        "engine": members(Engine, "engine", ENGINE),
        "module": members(ShardedModule, "module", MODULE),
        "forward": members(Forward, "forward", FORWARD),
        "plan": members(shardc.Plan, "plan", PLAN),
        "parts": functions(PARTS),
        "rows": "\n\n".join(entry(f"shardc.text.{n}", getattr(shardc.text, n)) for n in shardc.text.__all__),
        "engines": "\n\n".join(entry(f"shardc.engines.{n}", getattr(shardc.engines, n)) for n in ENGINES),
        "results": "\n\n".join(f"### {n}\n\n{markdown(c)}" for n, c in results.items()),
    }


# --- commands


def cli() -> dict[str, str]:
    """Return the block of reference/cli.md: every command, with its arguments and options."""
    import typer

    from shardc.cli import app

    return {"commands": "\n\n".join(_commands("shardc", typer.main.get_command(app)))}


def _commands(path: str, group: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(f"{path} {name}", command)
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(_argument(p) for p in arguments)
        about = _filled(_inline(" ".join((command.help or "").split())))
        call = f"{path} {name} {usage} [options]".replace("  ", " ")
        lines = [f"## {path} {name}", "", about, "", "```text", call, "```", ""]
        lines += ["| argument or option | value | |", "|---|---|---|"]
        lines += [f"| `{_argument(p)}` | | {_cell(getattr(p, 'help', '') or '')} |" for p in arguments]
        for p in command.params:
            if p.param_type_name == "option" and not getattr(p, "hidden", False):
                names = ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
                lines.append(f"| {names} | {_value(p)} | {_cell(p.help or '')}{_shown_default(p)} |")
        yield "\n".join(lines)


def _argument(p: Any) -> str:
    name = p.name.upper() + ("..." if p.nargs == -1 else "")
    return name if p.required else f"[{name}]"


def _value(p: Any) -> str:
    """Name what an option takes."""
    annotation = p.type_descriptor.annotation
    text = getattr(annotation, "__name__", str(annotation))
    if text == "bool":
        return ""
    if choices := get_args(annotation) if get_origin(annotation) is Literal else ():
        return " \\| ".join(f"`{c}`" for c in choices)
    many = ", may be repeated" if getattr(p, "multiple", False) else ""
    words = {"int": "integer", "float": "number", "str": "text", "Path": "path", "list": "text"}
    return words.get(text, text) + many


def _shown_default(p: Any) -> str:
    if p.default in (None, False, ..., (), []) or "default" in (p.help or "") or not p.show_default:
        return ""
    return f" (default: `{p.default}`)"


def _cell(text: str) -> str:
    return _inline(" ".join(text.split())).replace("|", "\\|")


# --- errors


def errors() -> dict[str, str]:
    """Return the blocks of reference/errors.md: classes, mistakes in a spec, causes for which a model is refused."""
    from shardc.capture.refusals import _ADVICE, REFUSALS
    from shardc.errors import ShardcError
    from shardc.spec import Spec

    classes = []
    for name in ERRORS:
        module, _, attribute = name.partition(":")
        about = _cell((inspect.getdoc(load(name)) or "").split("\n\n")[0])
        classes.append(f"| `{attribute}` | `{module}` | {about} |")
    specs = []
    for line in WRONG:
        try:
            Spec.parse(f"shardc: 1\nmesh: {{dp: 2, tp: 2}}\n{line}\n", "spec.yaml")
        except ShardcError as error:
            first = error.errors[0]
            specs.append(f"| `{line}` | `{first.where}` | {_cell(first.what)} | {_cell(first.fix)} |")
        else:
            raise AssertionError(f"{line!r} is no mistake")
    causes = dict.fromkeys((c.what.replace("{op}", "OP"), c.fix) for c in REFUSALS)
    rows = [_bullet(_inline(what), fix) for what, fix in causes]
    advice = [_bullet(f"`{re.sub(r'[.][*]', '...', text.split('|')[0])}`", fix) for text, fix in _ADVICE]
    return {
        "classes": "\n".join(["| class | module | |", "|---|---|---|", *classes]),
        "specs": "\n".join(["| line 3 of the spec | place | error | fix |", "|---|---|---|---|", *specs]),
        "models": "\n".join(rows),
        "torch": "\n".join(advice),
    }


def _bullet(head: str, fix: str) -> str:
    return _filled(f"- {head}. **Fix:** {_inline(fix)}", "  ")
