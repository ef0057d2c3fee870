"""A rank's step as a picture: one row for what it computes, one for each communicator's stream.

    compute   ▇▇▇▇▇▇▇  ▇▇▇▇▇▇▇▇▇▇▇▇▇     a gap: the rank waits
    tp            ▇▇▇▇▇    ▇▇▇           under the gap: what it waits for; under computing: what is hidden

Ranks of a pipeline stand below each other, each without what it waits for from other stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardc.cost.step import Cost
from shardc.cost.streams import PAIR, Span, Streams
from shardc.ir.units import seconds
from shardc.report.colours import BLUE, CYAN, GREEN, GREY, LINE, RED, SOFT, VIOLET
from shardc.report.svg import Picture, cut, ticks

#: Pixels of the picture, what is beside the rows, and a row.
WIDTH, _LEFT, _RIGHT, _ROW = 1100, 110, 150, 26
_FILLS = {"forward": BLUE, "backward": GREEN, PAIR: CYAN}
_SENT, _WAITED = VIOLET, RED
#: Waiting that rounding makes of none.
_NOTHING = 1e-9


def svg(cost: Cost) -> str:
    """A complete SVG file. Titles show each collective's name, seconds, and what hides it."""
    ranks = cost.streams()
    rows = sum(2 + len(_by_axes(each.spans)) for each in ranks)
    end = max((each.now for each in ranks), default=0.0) or 1.0
    title = f"one step on {cost.device.name}: {seconds(cost.step_seconds)}"
    picture = Picture(WIDTH, 52 + _ROW * rows + 60, title)
    picture.text(12, 22, title, size=14, bold=True)
    if len(ranks) > 1:
        picture.text(_LEFT, 44, "each rank without its waits for other stages", kind="soft")
    scale = (WIDTH - _LEFT - _RIGHT) / end
    y = 52.0
    for at, (each, rank) in enumerate(zip(ranks, cost.ranks, strict=True)):
        picture.text(12, y + 15, f"rank {rank.rank}" + (f", of stage {at}" if len(ranks) > 1 else ""), kind="soft")
        y = _rows(picture, each, y + _ROW, scale)
    _axis(picture, end, y, scale)
    words = {**{fill: name for name, fill in _FILLS.items()}, GREY: "other", _SENT: "hidden", _WAITED: "waited for"}
    picture.legend(_LEFT, y + 34, words.items())
    return str(picture)


def _rows(picture: Picture, streams: Streams, y: float, scale: float) -> float:
    """One rank's. Returns where the next rank's would be."""
    right = WIDTH - _RIGHT
    picture.text(12, y + 15, "compute")
    picture.rect(_LEFT, y, right - _LEFT, _ROW - 4, LINE, opacity=0.4)
    for part, begin, end in streams.computing:
        about = f"{part}: {seconds(end - begin)} from {seconds(begin)}"
        wide = max((end - begin) * scale, 0.2)
        picture.rect(_LEFT + begin * scale, y, wide, _ROW - 4, _FILLS.get(part, GREY), title=about, kind="computing")
    picture.text(right + 10, y + 15, f"{100 * (1 - streams.waited / (streams.now or 1)):.1f} % computing", size=11)
    for axes, spans in _by_axes(streams.spans).items():
        y += _ROW
        picture.text(12, y + 15, cut(axes, _LEFT - 16))
        picture.rect(_LEFT, y, right - _LEFT, _ROW - 4, LINE, opacity=0.4)
        for span in spans:
            for begin, end, fill in _parts(span):
                picture.rect(
                    _LEFT + begin * scale,
                    y,
                    max((end - begin) * scale, 0.2),
                    _ROW - 4,
                    fill,
                    title=_about(span),
                    kind="collective",
                )
        taken, exposed = sum(s.seconds for s in spans), sum(s.exposed for s in spans)
        hidden = max(taken - exposed, 0.0)
        picture.text(right + 10, y + 15, f"{seconds(hidden)} of {seconds(taken)} hidden", size=11)
    return y + _ROW


def _parts(span: Span) -> Iterator[tuple[float, float, str]]:
    """The hidden part of a collective, then the one that the rank waits for: the last."""
    middle = max(span.end - span.exposed, span.begin)
    if middle - span.begin > _NOTHING:
        yield span.begin, middle, _SENT
    if span.end - middle > _NOTHING:
        yield middle, span.end, _WAITED


def _about(span: Span) -> str:
    r = span.record
    behind = sorted({of or part for part, of in span.behind})
    hidden = f"behind {', '.join(behind[:3])}{', ...' if len(behind) > 3 else ''}" if behind else "behind nothing"
    return f"{r.kind} {r.tag}, {r.direction}: {seconds(span.seconds)}, {seconds(span.exposed)} exposed, {hidden}"


def _by_axes(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.record.axis, []).append(span)
    return found


def _axis(picture: Picture, end: float, y: float, scale: float) -> None:
    factor, name = next((u, n) for u, n in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if end * u >= 1 or u == 1e6)
    for time in ticks(end * factor, 8):
        x = _LEFT + time / factor * scale
        picture.line(x, y, x, y + 5, stroke=SOFT)
        picture.text(x, y + 17, f"{time:,.6g} {name}", size=10, anchor="middle", kind="soft")
