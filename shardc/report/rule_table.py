"""Format the table of rules, and the results of their check, as text and JSON."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from shardc import errors
from shardc.ir.types import full_op_name
from shardc.report.aligned import aligned
from shardc.rules.core.registry import Rule
from shardc.verify.rules.case import Finding
from shardc.verify.rules.check import OpReport

#: Number of findings of one op that are printed; the rest is counted.
SHOWN = 4
TAGGED = "\nand every other op that torch itself tags as elementwise: broadcasting, every dim splits"


@dataclass(frozen=True)
class RuleRow:
    """One rule. where: file:line that registered it.

    notation, linear: as written, or `<name>` of the function that makes them from a call. about: `<name>` -> the first
    paragraph of that function's docstring, in one line. family: its file in shardc/rules, or "own" for a custom rule.
    extras: parts beside the notation: local | extra | flops.
    """

    op: str
    notation: str
    linear: str
    about: dict[str, str]
    family: str
    extras: tuple[str, ...]
    where: str


def named(function: Callable[[Any], Any]) -> str:
    """Return the entry in the table for a function that makes a notation from a call: `<conv>`."""
    return f"<{function.__name__.strip('_<>')}>"


def row(op: Any, rule: Rule) -> RuleRow:
    functions = [f for f in (rule.notation, rule.linear) if not isinstance(f, str)]
    about = {named(f): " ".join((inspect.getdoc(f) or "").partition("\n\n")[0].split()) for f in functions}
    # without a place it was found by torch's tag
    where = rule.where or f"{inspect.getfile(functions[0])}:{functions[0].__code__.co_firstlineno}"
    path = Path(where.rpartition(":")[0])
    ours = path.parent == Path(errors.__file__).parent / "rules"
    family = "pointwise" if not rule.where else path.stem if ours else "own"
    linear = rule.linear if isinstance(rule.linear, str) else named(rule.linear)
    extras = tuple(n for n in ("local", "extra", "flops") if getattr(rule, n) is not None)
    text = rule.text if isinstance(rule.notation, str) else named(rule.notation)
    return RuleRow(full_op_name(op), text, linear, about, family, extras, where)


def rule_table(rows: Iterable[RuleRow]) -> str:
    """Format one line for each rule, by family; descriptions of functions that make rules come first."""
    ordered = sorted(rows, key=lambda r: (r.family == "own", r.family))
    cells = [(r.op, r.notation, r.linear, ", ".join(r.extras), short(r.where)) for r in ordered]
    head, *texts = aligned([("op", "rule", "linear in", "beside it", "registered at"), *cells], "<")
    lines = [head]
    for family, members in groupby(zip(ordered, texts, strict=True), lambda x: x[0].family):
        rules, of_rules = zip(*members, strict=True)
        lines += ["", f"# {family}"]
        for name, text in {name: text for r in rules for name, text in r.about.items() if text}.items():
            lines += wrap(f"{name}: {text}", 118, initial_indent="#   ", subsequent_indent="#     ")
        lines += of_rules
    return "\n".join(lines)


def short(where: str) -> str:
    """Shorten file:line: relative to the package's parent for shardc's files, else to the current folder."""
    path, _, line = where.rpartition(":")
    base = Path(errors.__file__).parents[1]
    if Path(path).is_relative_to(base / "shardc"):
        return f"{Path(path).relative_to(base)}:{line}"
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def check_text(reports: Sequence[OpReport], strict: Sequence[Finding], places: dict[str, str]) -> str:
    """Format a check: wrong rules, rules that are too strict, ops without gradients, the counts.

    places: op -> where its rule was registered.
    """
    lines: list[str] = []
    for r in reports:
        lines += [f"WRONG {f}" for f in r.wrong[:SHOWN]]
        if r.wrong:
            more = f"and {len(r.wrong) - SHOWN} more; " if len(r.wrong) > SHOWN else ""
            lines.append(f"      {more}its rule: {short(places[r.op])}")
    lines += [f"too strict: {f}" for f in strict]
    lines += [f"forward only: {r.op}: {r.forward_only}" for r in reports if r.forward_only]
    calls, wrong = sum(r.calls for r in reports), sum(bool(r.wrong) for r in reports)
    lines.append(f"{len(reports)} rules on {calls} calls: {wrong} wrong, {len(strict)} too strict")
    return "\n".join(lines)
