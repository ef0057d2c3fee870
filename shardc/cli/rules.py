"""The table of rules, and what a check of it found, as text and JSON."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from shardc import errors
from shardc.errors import ShardcError
from shardc.rules.registry import RULES, Rule, find
from shardc.rules.samples import SAMPLES
from shardc.verify.rules import OpReport, check_ops, name_of

#: Findings of one op that are printed; the rest is counted.
SHOWN = 4
TAGGED = "\nand every other op that torch itself tags as elementwise: broadcasting, every dim splits"


@dataclass(frozen=True)
class RuleRow:
    """One rule. notation, linear: as they were written, or `<name>` of the function of a call that makes them.

    about: `<name>` -> what the function's docstring says, in a line. family: its file in shardc/rules, or "own".
    extras: what is beside the notation: local | extra | flops. where: file:line that registered it. samples: how many
    calls prove it."""

    op: str
    notation: str
    linear: str
    about: dict[str, str]
    family: str
    extras: tuple[str, ...]
    where: str
    samples: int


def named(function: Callable[[Any], Any]) -> str:
    """What stands in the table for a function of the call: `<conv>`."""
    return f"<{function.__name__.strip('_<>')}>"


def row(op: Any, rule: Rule) -> RuleRow:
    functions = [f for f in (rule.notation, rule.linear_of) if f is not None and not isinstance(f, str)]
    about = {named(f): (inspect.getdoc(f) or "").partition("\n")[0] for f in functions}
    where = rule.where
    if not where:  # found by torch's tag
        where = f"{inspect.getfile(functions[0])}:{functions[0].__code__.co_firstlineno}"
    path = Path(where.rpartition(":")[0])
    own = path.parent != Path(errors.__file__).parent / "rules"
    linear = named(rule.linear_of) if rule.linear_of else " | ".join(" ".join(map(str, g)) for g in rule.linear)
    extras = tuple(n for n in ("local", "extra", "flops") if getattr(rule, n) is not None)
    text = rule.text if isinstance(rule.notation, str) else named(rule.notation)
    return RuleRow(
        name_of(op), text, linear, about, "own" if own else path.stem, extras, where, len(SAMPLES.get(op, ()))
    )


def selected(patterns: Sequence[str]) -> tuple[dict[Any, Rule], list[str]]:
    """Ops whose name matches one of the globs, with their rules, and the patterns that match none.

    Without patterns: all that have a line of their own, and those elementwise ops found by torch's tag that have
    samples."""
    every = {op: r for op in (*RULES, *(op for op in SAMPLES if op not in RULES)) if (r := find(op)) is not None}
    if not patterns:
        return every, []
    found: dict[Any, Rule] = {}
    missed = []
    for pattern in patterns:
        mine = {
            op: r
            for op, r in every.items()
            if any(fnmatch.fnmatchcase(name_of(op), g) for g in (pattern, f"{pattern}.*"))
        }
        if not mine and (op := _op(pattern)) is not None and (r := find(op)) is not None:
            mine = {op: r}
        if not mine:
            missed.append(pattern)
        found |= mine
    return found, missed


def _op(name: str) -> Any:
    """`aten.asinh.default` or `aten.asinh`: an op that has no line of its own."""
    found: Any = torch.ops
    parts = name.split(".")
    for part in (*parts, "default")[:3]:
        found = getattr(found, part, None)
    return found if hasattr(found, "_schema") else None


def rule_table(rows: Iterable[RuleRow]) -> str:
    """A line a rule, by family; what functions make of a call, before the ops that share them."""
    lines: list[tuple[str, ...]] = [("op", "rule", "linear in", "beside it", "registered at")]
    by_family = {
        f: list(g) for f, g in groupby(sorted(rows, key=lambda r: (r.family == "own", r.family)), lambda r: r.family)
    }
    for family, mine in by_family.items():
        about = {name: text for r in mine for name, text in r.about.items() if text}
        lines += [("",), (f"# {family}",), *((f"#   {name}: {text}",) for name, text in about.items())]
        lines += [(r.op, r.notation, r.linear, ", ".join(r.extras), short(r.where)) for r in mine]
    widths = [max(len(line[i]) for line in lines if len(line) > 1) for i in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)


def short(where: str) -> str:
    """A place as seen from the current folder, or, inside of it, from the package's."""
    path, _, line = where.rpartition(":")
    base = Path(errors.__file__).parents[1]
    if Path(path).is_relative_to(base / "shardc"):
        return f"{Path(path).relative_to(base)}:{line}"
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def check_text(reports: Sequence[OpReport], places: dict[str, str], seconds: float) -> str:
    """What a check found: wrong rules, rules that are too strict, what is known to be strict and why, the counts, the
    slowest.

    places: op -> where its rule was registered.
    """
    lines: list[str] = []
    for r in reports:
        for f in r.wrong[:SHOWN]:
            lines += [f"WRONG {f.op}, {f.strategy}, {f.ranks} ranks: {f.what}", f"      call: {f.call}"]
        if r.wrong:
            more = f"and {len(r.wrong) - SHOWN} more; " if len(r.wrong) > SHOWN else ""
            lines.append(f"      {more}its rule: {short(places[r.op])}")
    for r in reports:
        lines += [f"too strict: {f.op}, {f.strategy}: {f.what}; call: {f.call}" for f in r.strict if not f.why]
    known = [f for r in reports for f in r.strict if f.why]
    if known:
        lines += ["strict for a reason:", *(f"  {f.op}, {f.strategy}: {f.why}" for f in known)]
    forward = [r for r in reports if r.forward_only]
    lines += [f"forward only: {r.op}: {r.forward_only}" for r in forward]
    wrong = [r.op for r in reports if r.wrong]
    strict = sum(not f.why for r in reports for f in r.strict)
    slow = sorted(reports, key=lambda r: -r.seconds)[:3] if len(reports) > SHOWN else []
    lines += [f"slowest: {', '.join(f'{r.op} {r.seconds:.1f} s' for r in slow)}"] if slow else []
    lines.append(
        f"{len(reports)} rules on {sum(r.calls for r in reports)} calls in {seconds:.0f} s: "
        f"{len(wrong)} wrong, {strict} too strict, {len(known)} strict for a reason"
    )
    return "\n".join(lines)


@contextmanager
def without_torchs_warnings() -> Iterator[Console]:
    """While open, what C++ writes to stderr is dropped: warnings about odd calls, which the check makes on purpose.
    Gives a console there.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere, os.fdopen(os.dup(kept), "w") as screen:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield Console(file=screen, highlight=False)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def checked(ops: Sequence[Any]) -> list[OpReport]:
    """Check the rules of ops, on one thread, with a bar on stderr where that is a terminal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: threads inside ops only cost
    try:
        with (
            without_torchs_warnings() as console,
            Progress(*Progress.get_default_columns(), console=console, transient=True) as bar,
        ):
            task = bar.add_task("", total=len(ops))
            reports = []
            for report in check_ops(ops, lambda name: bar.update(task, description=name)):
                reports.append(report)
                bar.advance(task)
            return reports
    finally:
        torch.set_num_threads(threads)


def command(
    patterns: Sequence[str], *, check: bool, file: str | None, as_json: bool, show: Callable[[str], None]
) -> int:
    """`shardc rules`: lists or checks, and returns the exit status. Raises ShardcError
    for patterns that match nothing.
    """
    before = set(RULES)
    if file:
        from shardc.cli import model_file

        model_file.imported(file)
    found, missed = selected(patterns)
    if missed:
        names = [name_of(op) for op in {**RULES, **SAMPLES}]
        stems = dict.fromkeys(n.rpartition(".")[0] for n in names)
        near = difflib.get_close_matches(missed[0], names if missed[0].count(".") > 1 else stems, 3)
        fix = f"did you mean {' or '.join(near)}?" if near else "`shardc rules` lists all; --file loads yours"
        raise ShardcError(f"no rule of an op matches {missed[0]!r}", where="shardc rules", fix=fix)
    if file and not patterns:
        found = {op: r for op, r in found.items() if op in RULES and op not in before}
        if not found:
            raise ShardcError(
                f"{file} registers no rule", where=file, fix="shardc.rule(op, ...) where the op is defined"
            )
    rows = [row(op, r) for op, r in found.items()]
    if not check:
        show(
            json.dumps([asdict(r) for r in rows])
            if as_json
            else rule_table(rows) + ("" if patterns or file else TAGGED)
        )
        return 0
    started = time.perf_counter()
    reports = checked(list(found))
    seconds = time.perf_counter() - started
    wrong = any(r.wrong for r in reports)
    if as_json:
        show(json.dumps({"ok": not wrong, "seconds": round(seconds, 1), "ops": [r.to_json() for r in reports]}))
    else:
        show(check_text(reports, {r.op: r.where for r in rows}, seconds))
    return int(wrong)
