"""Show a plan as a ranked table, with bars of memory by kind and of time by cause."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardc.cost.recorded import KINDS
from shardc.ir.units import count, per_second, seconds, si, size
from shardc.plan.stage import WHAT
from shardc.runtime.schedule import default_stages

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan

_OF_KINDS = ("blue", "cyan", "magenta", "white", "white", "green", "yellow", "red", "bright_black")
COLORS = {**dict(zip(KINDS, _OF_KINDS, strict=True)), "gaps": "bright_white", "outside": "bright_blue"}
_OF_CAUSES = ("green", "yellow", "bright_black", "magenta", "bright_magenta", "cyan", "blue", "red", "bright_red")
CAUSES = dict(zip((*WHAT, "bubble"), _OF_CAUSES, strict=True))
LIMITS = {"compute": "compute", "memory": "memory bandwidth", "launch": "small ops", "bubble": "pipeline bubble"}
WATERFALL = {
    "peak": "the model's products, at the device's peak",
    "again": "products computed again, or divided unevenly",
    "below": "products below the peak",
    "memory": "ops that wait for memory",
    "launch": "starting small ops",
}
#: Letters of a bar; the most rows of a table.
WIDTH, MOST = 12, 12
#: The letters of a bar without colours.
LETTERS = dict(zip((*COLORS, *CAUSES), "POGBIAWCTgxcmstqedp-", strict=True))


def parts(c: Candidate) -> dict[str, float]:
    """Return the bytes that a device needs: live bytes by kind at the peak, the allocator's gaps, outside."""
    return {**c.memory, "gaps": c.reserved - c.peak, "outside": c.outside}


def needed(c: Candidate) -> str:
    """Return the reserved and the outside bytes in words."""
    return f"{size(c.reserved)} reserved and {size(c.outside)} outside of it, of {size(c.usable)}"


def rate(c: Candidate) -> str:
    """Return the throughput of all devices as text."""
    return per_second(c.tokens_per_second or c.rows_per_second, c.target.rate)


def limit(c: Candidate) -> str:
    return f"{LIMITS.get(c.limit, f'communication on {c.limit}')} {c.shares[c.limit]:.0%}"


def named(c: Candidate) -> str:
    """Return a candidate as one line of text."""
    s = c.spec
    parts = [f"{a}={n}" for a, n in s.mesh.axes]
    parts += ["sequence parallel"] if s.activations else []
    parts += [f"zero {zero(c)}"] if s.data.zero or s.data.offload.optimizer != "none" else []
    parts += [schedule(c)] if s.pipeline else []
    return ", ".join([*parts, f"recompute {recompute(c)}", *more(c), microbatches(c)])


def more(c: Candidate) -> list[str]:
    """Return the other settings of the spec: rows of modules split over more axes, compiled layers."""
    dims_of = c.spec.to_dict().get("activations", {})
    rows = [f"rows of {name} over more" for name, dims in dims_of.items() if 0 in dims]
    return rows + (["compiled"] if c.spec.execution.compile != "none" else [])


def running(c: Candidate) -> str:
    """Return the schedule, and the other settings of the spec."""
    return ", ".join([schedule(c), *more(c)]) if c.spec.pipeline or not more(c) else ", ".join(more(c))


def zero(c: Candidate) -> str:
    """Return the level of ZeRO, and the other settings of `data:`."""
    d, sizes = c.spec.data, dict(c.spec.mesh.axes)
    said = [str(d.zero)]
    said += ["kept"] if d.keep else []
    if d.zero and len(d.axis) > 1:  # ep splits experts already, so ZeRO shards them over dp
        over_experts = d.axis[-1] in c.spec.expert_axes
        said += [f"over {d.axis[-1]}, experts {d.axis[0]}" if over_experts else f"{sizes[d.axis[0]]} replicas"]
    said += [f"{x} on host" for x in ("optimizer", "parameters") if getattr(d.offload, x) != "none"]
    return ", ".join(said)


def schedule(c: Candidate) -> str:
    p = c.spec.pipeline
    if p is None:
        return "-"
    ranks = c.spec.mesh.size(p.axis)
    per = (len(c.counts) or p.stages or default_stages(p.schedule, ranks)) // ranks
    return p.schedule + (f" ×{per}" if per > 1 else "")


def recompute(c: Candidate) -> str:
    if not c.spec.checkpoint:
        return "none"
    one = c.spec.checkpoint[0]
    if one.budget is not None:
        return f"budget {one.budget:g}"
    if one.recompute is not None:
        return one.recompute if isinstance(one.recompute, str) else ", ".join(one.recompute)
    return f"but {', '.join(one.save)}" if one.save else "all"


def microbatches(c: Candidate) -> str:
    m = c.spec.batch.microbatches
    return f"{m} × {c.batch // (c.spec.data_ranks * m)}"


def settings(c: Candidate) -> dict[str, str]:
    """Return the columns of a candidate's settings, as text."""
    return {
        "mesh": " ".join(f"{axis}={n}" for axis, n in c.spec.mesh.axes),
        "zero": zero(c),
        "schedule": running(c),
        "recompute": recompute(c),
        "microbatches": microbatches(c),
    }


def bar(shares: Mapping[str, float], whole: float, colors: Mapping[str, str], *, plain: bool) -> Text:
    """Return a bar of the parts of a whole, as blocks of colour; plain: as letters."""
    text, done, drawn = Text(), 0.0, 0
    for name, color in colors.items():
        done += shares.get(name, 0.0)
        until = min(round(WIDTH * done / whole), WIDTH)
        text.append((LETTERS[name] if plain else "█") * (until - drawn), style="" if plain else color)
        drawn = max(until, drawn)
    return text.append(("·" if plain else "░") * (WIDTH - drawn), style="bright_black")


def table(plan: Plan, *, plain: bool = False) -> RenderableType:
    a = plan.target
    rows = Table(header_style="bold", pad_edge=False, box=None)
    right = ("", "zero", "microbatches", "live", "needs", "step", "MFU", rate_name := f"{a.rate}/s")
    names = ("", "mesh", "sp", "zero", "schedule", "recompute", "microbatches", "live", "needs")
    for name in (*names, f"of {size(a.usable)}", "fits", "step", "MFU", rate_name, "time", "limited by"):
        wrapped = name in ("recompute", "limited by")
        rows.add_column(name, justify="right" if name in right else "left", no_wrap=not wrapped)
    for i, c in enumerate(plan.candidates[:MOST], 1):
        mesh, *others = settings(c).values()
        fits = Text("yes", "green") if c.fits else Text("no", "red")
        memory = bar(parts(c), max(a.usable, c.needs), COLORS, plain=plain)
        spec = [str(i), mesh, "yes" if c.spec.activations else "-", *others]
        step = [seconds(c.step_seconds), f"{c.mfu:.1%}", count(c.tokens_per_second or c.rows_per_second)]
        time = bar(c.shares, 1.0, CAUSES, plain=plain)
        rows.add_row(*spec, size(c.peak), size(c.needs), memory, fits, *step, time, limit(c))
    return Group(heading(plan), rows, keys(plan, plain=plain))


def plain_table(plan: Plan) -> str:
    """Return the table as text without colours."""
    console = Console(file=io.StringIO(), width=200, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table(plan, plain=True))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def cause(name: str) -> str:
    return f"waiting for {name}" if name in ("tp", "cp", "ep", "dp", "pp") else name


def heading(plan: Plan) -> Text:
    a = plan.target
    text = Text(f"{a.model} on {a.devices} × {a.device.name}: global batch of {a.batch} rows")
    text.append(f" of {a.sequence} tokens" if a.sequence else "").append(f", {si(a.flops, 'FLOP')} a row\n")
    text.append("".join(f"assumed: {x}\n" for x in a.assumed), style="bright_black")
    return text


def keys(plan: Plan, *, plain: bool) -> Text:
    """Return the meaning of the bars' colours, notes, and the choices that were refused."""
    text = Text()
    used = {k for c in plan.candidates for k, n in parts(c).items() if n > 0.005 * c.needs}
    spent = {k for c in plan.candidates for k, n in c.shares.items() if n > 0.005}
    for title, shown, colors in (("memory", used, COLORS), ("time  ", spent, CAUSES)):
        text.append(f"\n{title} ")
        for name in (name for name in colors if name in shown):
            text.append(f"{LETTERS[name] if plain else '█'} ", style=colors[name]).append(f"{cause(name)}  ")
    for c in plan.candidates[:1]:
        if c.devices < plan.target.devices:
            text.append(f"\nthe best uses {c.devices} of {plan.target.devices} devices: with more it is slower")
    if any(zero(c).endswith("host") for c in plan.candidates):
        text.append("\ncopies to and from the host have no price: steps with `on host` take longer than shown")
    text.append(f"\n{plan.considered} choices considered, {len(plan.candidates)} priced, in {plan.seconds:.1f} s")
    for name, why in plan.refused.items():
        text.append(f"\nnot possible: {name}: {why}", style="bright_black")
    return text


def _columns(*names: str, right: Sequence[int] = ()) -> Table:
    """Return a table without lines. right: the numbers of columns of numbers."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        rows.add_column(name, justify="right" if i in right else "left", no_wrap=True)
    return rows


def breakdown(c: Candidate, *, plain: bool = False) -> RenderableType:
    """Return a table of one candidate: memory by kind, time by cause."""
    rows = _columns("memory of a device", "", "", "time of a step", "", "")
    total = sum(c.spent.values())
    sides: list[list[tuple[RenderableType, ...]]] = []
    for of, whole, shown, colors in ((parts(c), c.needs, size, COLORS), (c.spent, total, seconds, CAUSES)):
        most = [(k, n) for k, n in sorted(of.items(), key=lambda x: -x[1]) if n > 0]
        sides.append([(cause(k), shown(n), bar({k: n}, whole, {k: colors[k]}, plain=plain)) for k, n in most])
    for memory, time in zip_longest(*sides, fillvalue=("", "", "")):
        rows.add_row(*memory, *time)
    fits = Text("fits", "green") if c.fits else Text("does not fit", "red")
    line = Text(f"{named(c)}\n{size(c.peak)} live at the peak; {needed(c)}: ").append(fits)
    line.append(f"; step {seconds(c.step_seconds)}, MFU {c.mfu:.1%}, {rate(c)}, limited by {limit(c)}")
    return Group(line, rows)


def waterfall(c: Candidate, *, plain: bool = False) -> RenderableType:
    """Return a table from the model's products at the device's peak to the whole step, cause by cause."""
    rows = _columns("from the device's peak to a step", "", "", "", right=(1, 2))
    total, sofar = c.step_seconds, 0.0
    for name, key, n in falls(c):
        sofar += n
        shown = bar({key: abs(n)}, total, {key: CAUSES[key]}, plain=plain)
        rows.add_row(name, f"{'+' if n > 0 else '-'} {seconds(abs(n))}", f"{sofar / total:.0%}", shown)
    return rows


def falls(c: Candidate) -> list[tuple[str, str, float]]:
    """Return the lines of the waterfall: a name, the cause whose colour it has, seconds."""
    return [(WATERFALL.get(k, cause(k)), k if k in CAUSES else "compute", n) for k, n in c.waterfall.items()]


def helpful(plan: Plan) -> RenderableType:
    """Return a table of what would make the best candidate faster."""
    rows = _columns("what would help", "step", "of today's", right=(1, 2))
    for x in plan.what_if:
        fits = "" if x["fits"] else ", does not fit"
        rows.add_row(f"{x['what']}{fits}", seconds(x["step_seconds"]), f"{x['ratio']:.2f}x")
    return rows


def answer(name: str, answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return an answer of a plan in words: what it is about, and what it says."""
    value = answer.get("value")
    if name == "duration":
        return f"{answer['tokens']:.3g} tokens", f"{value:,.1f} hours, {answer['device_hours']:,.0f} device-hours"
    if name == "clusters":
        return name, ", then ".join(f"{x['devices']} × {x['device']}" for x in answer["clusters"])
    if not value:
        return name, "none" if value is None else "nothing fits"
    following = answer.get("next_needs_bytes")
    text = f"{value} {answer['what']}, with {size(answer['needs_bytes'])}"
    return name, text + (f"; {answer['next']} would need {size(following)}" if following else "")


def of_clusters(answer: Mapping[str, Any]) -> RenderableType:
    """Return a table of the compared clusters, the best first."""
    names = ("clusters, " + answer["what"] + " first", "step", "MFU", "an hour", "a million tokens")
    rows = _columns(*names, right=range(1, 5))
    for x in answer["clusters"]:
        prices = [x.get("price_per_hour"), x.get("price_per_million_tokens")]
        shown = [seconds(x["step_seconds"]), f"{x['mfu']:.1%}"] if x["fits"] else ["does not fit", "-"]
        rows.add_row(f"{x['devices']} × {x['device']}", *shown, *("-" if n is None else f"{n:,.4g}" for n in prices))
    return rows
