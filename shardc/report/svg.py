"""Pictures as SVG that any renderer draws: colours are attributes, nothing is CSS but the dark mode.

A picture has a background of its own, as viewers show it on any page. Its classes `ink` and `soft` are the colours of
text: a style sheet turns them for readers who prefer a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from shardc.report.colours import BACK, DARK, INK, LINE, SOFT

#: Pixels of a character, at 12 px.
CHARACTER = 7.0


class Picture:
    """Collects shapes; `str` is the file."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        title: str = "",
        opacity: float = 1.0,
        stroke: str = "",
        kind: str = "",
        round_: float = 0,
    ) -> None:
        more = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        more += f' stroke="{stroke}"' if stroke else ""
        more += f' class="{kind}"' if kind else ""
        more += f' rx="{round_:g}"' if round_ else ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        head = f'<rect {place} fill="{fill}"{more}'
        self._parts.append(f"{head}>{_title(title)}</rect>" if title else f"{head}/>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        kind: str = "ink",
        fill: str = "",
        bold: bool = False,
        over: bool = False,
        title: str = "",
    ) -> None:
        """kind: `ink` or `soft`; fill: another colour, for both modes; over: lines below end beside the letters."""
        colour = f'fill="{fill}"' if fill else f'fill="{INK if kind == "ink" else SOFT}" class="{kind}"'
        weight = ' font-weight="600"' if bold else ""
        head = f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"'
        if over:
            edge = f'fill="none" stroke="{BACK}" stroke-width="4" stroke-linejoin="round" class="over"'
            self._parts.append(f'{head} {edge}{weight} aria-hidden="true">{escape(text)}</text>')
        self._parts.append(f"{head} {colour}{weight}>{_title(title)}{escape(text)}</text>")

    def path(
        self,
        d: str,
        *,
        fill: str = "none",
        stroke: str = "",
        width: float = 1,
        dashed: bool = False,
        title: str = "",
        kind: str = "",
    ) -> None:
        more = f' stroke="{stroke}" stroke-width="{width:g}"' if stroke else ""
        more += ' stroke-dasharray="4 3"' if dashed else ""
        more += f' class="{kind}"' if kind else ""
        self._parts.append(f'<path d="{d}" fill="{fill}"{more}>{_title(title)}</path>')

    def line(self, x: float, y: float, to_x: float, to_y: float, *, stroke: str = LINE, dashed: bool = False) -> None:
        kind = "line" if stroke == LINE else ""
        self.path(f"M{x:.1f},{y:.1f}L{to_x:.1f},{to_y:.1f}", stroke=stroke, dashed=dashed, kind=kind)

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> float:
        """(colour, words) in rows that fit. Returns where the next row would be."""
        left = x
        for colour, words in entries:
            wide = 30 + CHARACTER * len(words)
            if x > left and x + wide > self.width - 10:
                x, y = left, y + 20
            self.rect(x, y, 14, 14, colour)
            self.text(x + 19, y + 11.5, words, kind="soft")
            x += wide
        return y + 20

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}"'
                f' viewBox="0 0 {self.width:.0f} {self.height:.0f}" font-family="Helvetica, Arial, sans-serif"'
                f' role="img"><title>{escape(self.title)}</title><style>{DARK}</style>',
                f'<rect width="{self.width:.0f}" height="{self.height:.0f}" fill="{BACK}" class="back"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def cut(text: str, pixels: float, size: float = 12) -> str:
    """A text that fits, with ... at its end where something is left out."""
    most = max(int(pixels / (CHARACTER * size / 12)), 1)
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def ticks(top: float, most: int = 5, *, binary: bool = False) -> list[float]:
    """Round numbers from 0 to top. binary: of bytes, 1, 2 or 4 times a power of 1024 and so on."""
    if top <= 0:
        return [0.0]
    base, bases = (2.0, (1.0,)) if binary else (10.0, (1.0, 2.0, 5.0))
    power = base ** math.floor(math.log(top / most, base))
    step = next(s for k in range(3) for b in bases if (s := b * power * base**k) * most >= top)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]
