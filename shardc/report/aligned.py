"""Align the columns of a table in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return rows as lines. sides: `<` or `>` for each column; the last one is also that of all further columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligners = [str.rjust if side == ">" else str.ljust for side in sides.ljust(len(widths), sides[-1])]
    return ["  ".join(a(c, w) for a, c, w in zip(aligners, row, widths, strict=False)).rstrip() for row in rows]
