"""Find the ops of a model that have no rule, with their lines. No spec is needed.

text = str(shardc.coverage(model, batch))
assert shardc.coverage(model, batch).covered
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, fx, nn

from shardc.capture import capture
from shardc.ir.graph import calls, is_call, source_of
from shardc.ir.source import Source
from shardc.passes.canonical import rewritten
from shardc.passes.canonical.grouped_mm import with_experts
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of
from shardc.rules.core.registry import Rule

#: How an op is covered, worst first -> what that means to the user.
KINDS = {
    "refused": "cannot be compiled",
    "no rule": (
        "refused by compile, unless the spec says `unknown_ops: replicate` (every rank runs them whole);"
        " shardc.rule(op, ...) adds one"
    ),
    "whole": (
        "a rule, but nothing to split in these calls of values that depend on parameters or the batch: every rank runs"
        " them whole"
    ),
    "decomposed": "no rule of their own: torch's decompositions turn them into ops that have rules",
}


@dataclass(frozen=True)
class Line:
    """A line of the model ("file.py:31") that calls an op, and the first module that runs it."""

    line: str
    code: str
    module: str
    count: int


@dataclass(frozen=True)
class Row:
    """An op without a rule, or whose rule cannot split it. how: a key of KINDS; why: why it is refused."""

    op: str
    how: str
    count: int
    lines: tuple[Line, ...]
    why: str = ""


@dataclass(frozen=True)
class Coverage:
    """The ops of a model without a rule. calls: number of calls in the captured graph; ops: distinct ops."""

    model: str
    calls: int
    ops: int
    rows: tuple[Row, ...]

    @property
    def covered(self) -> bool:
        """Whether every op can be compiled without `unknown_ops: replicate`."""
        return not any(r.how in ("refused", "no rule") for r in self.rows)

    def __repr__(self) -> str:
        return f"<Coverage {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        missing = sum(r.how in ("refused", "no rule") for r in self.rows)
        verdict = f"{missing} without a rule" if missing else "every op has a rule"
        lines = [f"{self.model}: {self.calls} calls of {self.ops} ops; {verdict}"]
        for how, rows in groupby(self.rows, lambda r: r.how):
            lines += ["", f"{how}: {KINDS[how]}"]
            for r in rows:
                lines.append(f"  {r.count:>4}×  {r.op}" + (f": {r.why}" if r.why else ""))
                lines += [f"         {_place(at)}" for at in r.lines]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "covered": self.covered}


def _place(at: Line) -> str:
    often = f"{at.count}×, first in {at.module or 'the model'}" if at.count > 1 else at.module
    return at.line + (f" ({often})" if often else "") + (f": {at.code}" if at.code else "")


def coverage(model: nn.Module, batch: Any, *, loss: Callable[[Any, Any], Tensor] | None = None) -> Coverage:
    """Capture a model and return which of its ops have no rule, with the model's lines.

    Arguments as of `shardc.compile`; the model may be on the meta device. Raises ShardcError if capture fails.
    """
    captured = capture(model, batch, loss=loss, prove=False)
    canonical = rewritten(captured.graph)
    ops = [n.target for n in calls(captured.graph)]
    missing: defaultdict[tuple[str, str], list[tuple[Source, str]]] = defaultdict(list)  # (op, how): (place, why)
    roots = {p.name for p in captured.params} | {i.name for i in captured.inputs}
    dependent: set[fx.Node] = set()  # nodes that depend on a parameter or the batch
    graph = canonical.graph if canonical.refused else with_experts(canonical.graph)
    for node in graph.nodes:
        if node.name in roots or any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
        if node in canonical.refused:
            missing[str(node.target), "refused"].append((source_of(node), canonical.refused[node].what))
        elif is_call(node):
            rule = registry.find(node.target)
            if rule is None or (node in dependent and _whole(rule, node)):
                missing[str(node.target), "whole" if rule else "no rule"].append((source_of(node), ""))
    for op, at in canonical.decomposed:
        missing[str(op), "decomposed"].append((at, ""))
    rows = [_row(op, how, places) for (op, how), places in missing.items()]
    name = str(captured.meta.get("model", "the model"))
    ordered = sorted(rows, key=lambda r: (list(KINDS).index(r.how), -r.count, r.op))
    return Coverage(name, len(ops), len(set(ops)), tuple(ordered))


def _row(op: str, how: str, places: Sequence[tuple[Source, str]]) -> Row:
    modules: dict[tuple[str, str], list[str]] = {}
    for at, _ in places:
        modules.setdefault((at.line, at.code), []).append(at.module)
    lines = tuple(Line(line, code, of[0], len(of)) for (line, code), of in modules.items())
    return Row(op, how, len(places), lines, places[0][1])


def _whole(rule: Rule, node: fx.Node) -> bool:
    """Return whether a call cannot be split although its tensors have dims to split."""
    call = call_of(node)
    sizes = [s for v in (*call.operands, *call.results) for s in v.shape]
    if rule.extra is not None or max(sizes, default=1) == 1:
        return False
    return not rule.signature(call).splittable()
