"""Show a step's seconds by cause, and where a run differs in time or memory: tables and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardc.cost import Cost
from shardc.cost.waterfall import Comparison, Difference, predicted
from shardc.ir.units import seconds, size
from shardc.report.aligned import aligned

#: Number of ops that are shown, those that differ most.
SHOWN = 8


def waterfall_table(cost: Cost) -> str:
    """Format the predicted seconds of a step by cause, one column for each rank that differs."""
    places = [predicted(cost, at) for at in range(len(cost.ranks))]
    names = list({name: None for lines in places for name in lines})
    head = ["", *(f"rank {r.rank}" if len(cost.ranks) > 1 else "each rank" for r in cost.ranks)]
    rows = [[name, *(_short(lines.get(name, 0.0)) for lines in places)] for name in names]
    rows.append(["step", *(_short(sum(lines.values())) for lines in places)])
    title = f"on {cost.device.name}: {cost.step_words}, by what its seconds go to"
    return "\n".join([title, *aligned([head, *rows], "<>")])


def comparison_table(found: Sequence[Comparison]) -> str:
    """Compare predicted and measured seconds by cause, memory, and the ops that differ most."""
    texts = []
    for c in found:
        place = f", {c.cost.program.axis}={c.cost.ranks[c.at].at}" if c.cost.program.axis else ""
        steps = f"{len(c.run.quiet)} steps, and {len({x.step for x in c.run.timed})} whose ops were timed"
        rows = [["", "predicted", "measured", "difference"]]
        rows += [[name, *map(_short, pair), _short(pair[0] - pair[1], "+")] for name, pair in c.lines.items()]
        expected, actual = c.seconds
        rows.append(["step", _short(expected), _short(actual), f"{expected / actual - 1:+.1%}"])
        for name, (ours, theirs) in c.bytes.items():
            name = "a step's own" if name == "made" else name
            rows.append([name, size(ours), size(theirs), f"{ours / max(theirs, 1) - 1:+.1%}"])
        texts.append("\n".join([f"{c.run.folder} on {c.cost.device.name}{place}: {steps}", *aligned(rows, "<>")]))
        ops = [["op", "of", "times", "predicted", "measured"], *map(_op, c.ops[:SHOWN])]
        texts.append("\n".join(["ops that differ most", *aligned(ops, "<>")]))
    return "\n\n".join(texts)


def comparison_json(found: Iterable[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "at": c.cost.ranks[c.at].at,
            "device": c.cost.device.name,
            "lines": _pairs(c.lines),
            **_pairs({"step": c.seconds, **{f"{name}_bytes": pair for name, pair in c.bytes.items()}}),
            "ops": [
                {"name": x.op.name, "part": x.part, "count": x.count, "flops": x.op.flops, "traffic": x.op.traffic}
                | {"predicted": x.predicted, "measured": x.measured}
                for x in c.ops
            ],
        }
        for c in found
    ]


def _pairs(lines: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {name: {"predicted": expected, "measured": actual} for name, (expected, actual) in lines.items()}


def _op(x: Difference) -> list[str]:
    count, *shape = x.op.matrices or (1,)
    sizes = "×".join(map(str, ([count] if count > 1 else []) + shape))
    moved = f"[{sizes}]" if sizes else size(x.op.traffic)
    name = f"{x.op.name} {moved} {x.op.dtype}"
    return [name, x.part, f"{x.count:.0f}", seconds(x.predicted), seconds(x.measured)]


def _short(s: float, plus: str = "") -> str:
    return f"-{seconds(-s)}" if s < 0 else f"{plus}{seconds(s)}"
