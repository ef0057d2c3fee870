"""A plan as one self-contained page: the best spec and why, the plot, every priced spec, where a step's time and memory
go, what would help. It has the style of `inspect --html` (shardc.report.page), and no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from shardc.cost.recorded import KINDS
from shardc.ir.units import count, seconds, size
from shardc.plan import table
from shardc.plan.picture import svg
from shardc.report import page

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan

#: Colours of bars, which both themes show: of kinds of memory, and of causes of time.
_COLOURS = ("#8db4e8", "#e8ca7c", "#b9a0d8", "#bdbdae", "#86cfd3", "#8fc99a", "#d9a37e", "#e08f86", "#a9b18f")
_KINDS = {**dict(zip(KINDS, _COLOURS, strict=True)), "gaps": "#d3c3b4", "outside": "#9a9a9a"}
_CAUSES = dict(zip(table.CAUSES, _COLOURS, strict=True))
_STYLE = """
html, body { height: auto; }
body { display: block; max-width: 1180px; margin: 0 auto; padding: 18px 20px 40px; }
section { margin-top: 26px; }
pre, figure svg { border: 1px solid var(--line); border-radius: 6px; }
pre { background: var(--raised); padding: 10px 14px; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
.bar { display: flex; width: 130px; height: 12px; background: var(--sunk); border-radius: 2px; overflow: hidden; }
.bar i { display: block; }
.keys span { margin-right: 14px; white-space: nowrap; }
.keys i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; border-radius: 2px; }
"""


def html(plan: Plan) -> str:
    """The page."""
    a, fits = plan.target, bool(plan.candidates) and plan.candidates[0].fits
    parts = [f"<h1>{escape(a.model)} on {a.devices} × {escape(a.device.name)}</h1>", *_facts(plan)]
    if fits:
        parts += [_section("The best spec", f"<pre>{escape(plan.spec())}</pre>")]
    elif plan.candidates:
        parts += [_section("Nothing fits", *(f'<p class="bad">{escape(t)}</p>' for t in plan.lacking().texts()))]
    if plan.candidates:
        parts += [_section("Time and memory", f"<figure>{svg(plan)}</figure>")]
        parts += [_section("Specs that were priced", _rows(plan), _keys(plan))]
        parts += [_section("Where a step of the first one goes", _waterfall(plan.candidates[0]))]
        parts += [_section("Memory of a device, of the rank that needs most", _memory(plan.candidates[0]))]
    if plan.what_if:
        some = [(x["what"], seconds(x["step_seconds"]), f"{x['ratio']:.2f}×", _yes(x["fits"])) for x in plan.what_if]
        parts += [_section("What would help", _table(("", "step", "of today's", "fits"), some))]
    parts += [_section("Answers", _table(("", ""), _answers(plan)))] if plan.answers else []
    if plan.refused:
        parts += [_section("Not possible", _table(("", ""), [(k, why) for k, why in plan.refused.items()]))]
    style = files(page).joinpath("page.css").read_text(encoding="utf-8") + _STYLE
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="shardc plan --html">\n'
        f"<title>Plan of {escape(a.model)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _facts(plan: Plan) -> list[str]:
    lines = str(table.heading(plan)).strip().splitlines()
    spent = f"{plan.considered} choices considered, {len(plan.candidates)} priced"
    return [f'<p class="{"soft" if i else ""}">{escape(x)}</p>' for i, x in enumerate([*lines, spent])]


def _rows(plan: Plan) -> str:
    """Every spec, in the order and with the numbers of the plot."""
    a = plan.target
    heads = [
        "",
        "mesh",
        "zero",
        "schedule",
        "recompute",
        "microbatches",
        "live",
        "needs",
        f"of {size(a.usable)}",
        "fits",
    ]
    heads += ["step", "MFU", "tokens/s" if a.sequence else "samples/s", "time", "limited by"]
    rows = []
    for i, (c, _) in enumerate(table.distinct(plan.candidates), 1):
        mesh = " ".join(f"{axis}={n}" for axis, n in c.spec.mesh.axes) + (", sp" if c.spec.activations else "")
        memory = _bar(table.parts(c), max(a.usable, c.needs), _KINDS)
        how = (str(i), mesh, table.zero(c), table.running(c), table.recompute(c), table.microbatches(c))
        says = (*how, size(c.peak), size(c.needs))
        speed = (seconds(c.step_seconds), f"{c.mfu:.1%}", count(c.tokens_per_second or c.rows_per_second))
        rows.append((*says, memory, _yes(c.fits), *speed, _bar(c.shares, 1.0, _CAUSES), table.limit(c)))
    return _table(heads, rows)


def _keys(plan: Plan) -> str:
    kinds = {k for c in plan.candidates for k, n in table.parts(c).items() if n > 0.005 * c.needs}
    spent = {k for c in plan.candidates for k, n in c.shares.items() if n > 0.005}
    keys = [(name, c) for name, c in _KINDS.items() if name in kinds]
    times = [(table.cause(name), c) for name, c in _CAUSES.items() if name in spent]
    return "".join(
        f'<p class="keys hint">{what}: '
        + "".join(f'<span><i style="background:{c}"></i>{name}</span>' for name, c in some)
        + "</p>"
        for what, some in (("memory", keys), ("time", times))
    )


def _waterfall(c: Candidate) -> str:
    rows, sofar = [], 0.0
    for name, n in c.waterfall.items():
        sofar += n
        key = name if name in _CAUSES else "compute"
        bar = _bar({"before": max(sofar - abs(n), 0), key: abs(n)}, c.step_seconds, {"before": "none", **_CAUSES})
        said = table.WATERFALL.get(name, table.cause(name))
        rows.append((said, f"{'+' if n > 0 else '-'} {seconds(abs(n))}", f"{sofar / c.step_seconds:.0%}", bar))
    return _table(("from the device's peak to a step", "", "so far", ""), rows)


def _memory(c: Candidate) -> str:
    kinds = sorted(((k, n) for k, n in table.parts(c).items() if n > 0), key=lambda x: -x[1])
    said = f"<p>{escape(f'{size(c.peak)} live at the peak; {table.needed(c)}')}</p>"
    return said + _table(("", "", ""), [(k, size(n), _bar({k: n}, c.needs, _KINDS)) for k, n in kinds])


def _answers(plan: Plan) -> list[tuple[str, str]]:
    found = []
    for name, answer in plan.answers.items():
        value = answer.get("value")
        said = f"{value:,.4g}" if isinstance(value, float) else str(value) if value else "none"
        if name == "clusters":
            said = ", then ".join(f"{x['devices']} × {x['device']}" for x in answer["clusters"])
        found.append((name, f"{said} {answer['what']}" if value else said))
    return found


def _yes(fits: bool) -> str:
    return _Markup('<span class="good">yes</span>' if fits else '<span class="bad">no</span>')


class _Markup(str):
    """Text that is HTML already."""


def _bar(parts: Mapping[str, float], whole: float, colours: Mapping[str, str]) -> str:
    """Parts of a whole."""
    drawn = [
        f'<i style="width:{100 * parts[k] / whole:.1f}%;background:{c}" title="{escape(k)}"></i>'
        for k, c in colours.items()
        if parts.get(k, 0) > 0
    ]
    return _Markup(f'<span class="bar">{"".join(drawn)}</span>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(kind: str, some: Sequence[str]) -> str:
        return "".join(f"<{kind}>{x if isinstance(x, _Markup) else escape(x)}</{kind}>" for x in some)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    return f'<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div>'
