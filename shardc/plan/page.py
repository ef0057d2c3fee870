"""Build a plan's HTML page: this file collects the data, `shardc/report/page/plan.js` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardc.cost.recorded import KINDS
from shardc.ir.units import size
from shardc.plan import table
from shardc.report import page

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan


def html(plan: Plan) -> str:
    """Return the plan as one self-contained HTML page."""
    return page.file("plan", f"Plan of {plan.target.model}", '<div id="plan"></div>\n', data(plan), page.PLAN)


def data(plan: Plan) -> dict[str, Any]:
    """Return what the page shows, as JSON: bytes and seconds are numbers, rows are in the table's order."""
    a, first = plan.target, plan.candidates[0] if plan.candidates else None
    fits = first is not None and first.fits
    spent = f"{plan.considered} choices considered, {len(plan.candidates)} priced"
    return {
        "title": f"{a.model} on {a.devices} × {a.device.name}",
        "facts": [*str(table.heading(plan)).strip().splitlines(), spent],
        "spec": plan.spec() if fits else "",
        "lacking": [] if fits else plan.lacking().texts(),
        "device": a.device.name,
        "limit": a.usable,
        "rate": a.rate,
        "kinds": [*KINDS, "gaps", "outside"],
        "words": {name: table.cause(name) for name in table.CAUSES},
        "rows": [_row(c) for c in plan.candidates],
        "waterfall": table.falls(first) if first else [],
        "memory": f"{size(first.peak)} live at the peak; {table.needed(first)}" if first else "",
        "what_if": [dict(x) for x in plan.what_if],
        "answers": [table.answer(name, x) for name, x in plan.answers.items()],
        "refused": list(plan.refused.items()),
    }


def _row(c: Candidate) -> dict[str, Any]:
    settings = table.settings(c)
    return {
        "name": table.named(c),
        **settings,
        "mesh": settings["mesh"] + (", sp" if c.spec.activations else ""),
        **{name: getattr(c, name) for name in ("peak", "needs", "fits", "mfu", "shares")},
        "memory": table.parts(c),
        "seconds": c.step_seconds,
        "rate": c.tokens_per_second or c.rows_per_second,
        "limited": table.limit(c),
    }
