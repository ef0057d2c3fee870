"""Texts that differ only in the numbers of layers are told once: a mistake in 80 layers is one mistake.

blocks.0.q: 4 heads do not divide by tp=3
blocks.1.q: 4 heads do not divide by tp=3      ->   blocks.{0-2}.q: 4 heads do not divide by tp=3 (3 alike)
blocks.2.q: 4 heads do not divide by tp=3
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

#: So many notes are shown at most; the others are counted.
NOTES = 12
_NAME = re.compile(r"(?:\b\d+\.)?\b[A-Za-z_]\w*(?:\.\w+)*")  # a dotted name, which may begin with a number
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of it that is a number
_HOLE = "\0"


def fold(texts: Iterable[str]) -> list[str]:
    """The texts, in the order of the first of each kind; those that are alike as one, with ranges and their number.

    Only a number that is a whole part of a dotted name is a layer's: "layers.3.fc", not "f32[3]" or "model.py:3".
    """
    kinds: dict[str, list[tuple[str, ...]]] = {}
    for text in texts:
        pattern, numbers = _split(text)
        kinds.setdefault(pattern, []).append(numbers)
    return [_joined(pattern, list(dict.fromkeys(alike))) for pattern, alike in kinds.items()]


def note_lines(notes: Iterable[str]) -> list[str]:
    """The notes of a program as lines, folded, and no more than a person reads."""
    folded = fold(notes)
    more = len(folded) - NOTES
    rest = [f"... and {more} more notes: all are in program.notes, and in `shardc inspect --json`"] if more > 1 else []
    return [*(f"note: {n}" for n in (folded[:NOTES] if rest else folded)), *rest]


def _split(text: str) -> tuple[str, tuple[str, ...]]:
    """The text with a hole for every layer's number, and those numbers."""
    numbers: list[str] = []

    def hole(m: re.Match[str]) -> str:
        numbers.append(m[0])
        return _HOLE

    return _NAME.sub(lambda m: _NUMBER.sub(hole, m[0]), text), tuple(numbers)


def _joined(pattern: str, alike: Sequence[tuple[str, ...]]) -> str:
    columns = [list(dict.fromkeys(column)) for column in zip(*alike, strict=True)]
    varied = {tuple(column) for column in columns if len(column) > 1}
    together = len(varied) == 1 and len(alike) == len(next(iter(varied)))  # the same layer everywhere in each text
    every = together or len(alike) == math.prod(map(len, columns))
    numbers = [c[0] if len(c) == 1 else "{" + _ranges(c) + "}" for c in columns] if every else list(alike[0])
    parts = pattern.split(_HOLE)
    text = parts[0] + "".join(n + part for n, part in zip(numbers, parts[1:], strict=True))
    if len(alike) == 1:
        return text
    head, newline, rest = text.partition("\n")  # of an error: its fix is on the second line
    return f"{head} ({len(alike)} alike){newline}{rest}"


def _ranges(numbers: Iterable[str]) -> str:
    """ "0-3,7" of 0, 1, 2, 3, 7"""
    runs: list[list[int]] = []
    for n in sorted(map(int, numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
