"""Define `shardc rules`: list the rules of ops, or prove them against the unsplit ops."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardc.cli.common import reporting
from shardc.cli.options import DebugOption, JsonOption, option
from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest

if TYPE_CHECKING:
    from shardc.rules.core.registry import Rule


def command(
    ops: Annotated[
        list[str] | None,
        typer.Argument(help="names or globs: aten.mm.default 'aten.*norm*' (default: all)", show_default=False),
    ] = None,
    check: Annotated[bool, option("prove them against the whole ops; exit status 1 if one is wrong")] = False,
    file: Annotated[str | None, option("a Python file that registers rules; without names: only its rules")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the rules of ops: how each op may be split.

    --check proves the rules of a file, forward and backward, on 2, 3, 4, 6 parts and on two axes.
    """
    with reporting(debug, as_json) as show:
        from shardc.ir.types import full_op_name
        from shardc.report.rule_table import TAGGED, check_text, row, rule_table
        from shardc.rules.core.user_ops import SAMPLES
        from shardc.verify.rules.check import check_op
        from shardc.verify.rules.prove import too_strict

        rules = _rules(ops or [], file)
        rows = [row(op, r) for op, r in rules.items()]
        if not check:
            table = rule_table(rows) + ("" if ops or file else TAGGED)
            show(table, [asdict(r) for r in rows])
            return
        if unproven := [op for op in rules if op not in SAMPLES]:
            fault = f"there is no sample call of {full_op_name(unproven[0])} on which its rule could be proven"
            fix = "name a file that registers rules with samples (--file); those of shardc's own rules are in its"
            raise ShardcError(fault, where="shardc rules --check", fix=f"{fix} tests: pytest tests/rules")
        reports = [check_op(op, SAMPLES[op]) for op in rules]
        wrong = any(r.wrong for r in reports)
        strict = [] if wrong else [f for op in rules for f in too_strict(op, SAMPLES[op])]
        result = {"ok": not wrong, "ops": [asdict(r) for r in reports], "too_strict": [asdict(f) for f in strict]}
        show(check_text(reports, strict, {r.op: r.where for r in rows}), result)
        raise typer.Exit(int(wrong))


def _rules(patterns: Sequence[str], file: str | None) -> dict[Any, Rule]:
    """Return the rules that the command names: those that match, else those of the file, else all."""
    from shardc.ir.types import full_op_name
    from shardc.rules import RULES
    from shardc.rules.core.registry import find

    before = set(RULES)
    if file:
        from shardc.cli import model_file

        model_file.imported(file)
    if not patterns:
        rules = {op: r for op, r in RULES.items() if not file or op not in before}
        if not rules:
            fix = "call shardc.rule(op, ...) where the op is defined"
            raise ShardcError(f"{file} registers no rule", where=str(file), fix=fix)
        return rules
    selected: dict[Any, Rule] = {}
    for pattern in patterns:
        globs = (pattern, f"{pattern}.*")
        matches = {op: r for op, r in RULES.items() if any(fnmatch.fnmatchcase(full_op_name(op), g) for g in globs)}
        if not matches and (op := _op(pattern)) is not None and (rule := find(op)) is not None:
            matches = {op: rule}
        if not matches:
            names = list(map(full_op_name, RULES))
            stems = dict.fromkeys(n.rpartition(".")[0] for n in names)
            near = nearest(pattern, names if pattern.count(".") > 1 else stems)
            fix = f"did you mean {near}?" if near else "`shardc rules` lists all; --file loads yours"
            raise ShardcError(f"no op with a rule matches {pattern!r}", where="shardc rules", fix=fix)
        selected |= matches
    return selected


def _op(name: str) -> Any:
    """Find an op by name, such as `aten.asinh.default` or `aten.asinh`; return None if torch has none."""
    import torch

    op: Any = torch.ops
    for part in (*name.split("."), "default")[:3]:
        op = getattr(op, part, None)
    return op if hasattr(op, "_schema") else None
