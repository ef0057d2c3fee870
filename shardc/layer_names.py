"""Find layer numbers in names (layer 3 of list "h" in "h.3.attn"), and merge texts about layers.

Texts that differ only in layer numbers become one: a mistake in 80 layers is one mistake.

blocks.0.q: 4 heads are not divisible by tp=3
blocks.1.q: 4 heads are not divisible by tp=3      ->   blocks.{0-2}.q: 4 heads are not divisible by tp=3 (3 alike)
blocks.2.q: 4 heads are not divisible by tp=3

Which layers compute the same: shardc.ir.repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

#: At most so many notes are shown; the rest is counted.
NOTES = 12
_NAME = re.compile(r"(?:\b\d+\.)?\b[A-Za-z_]\w*(?:\.\w+)*")  # a dotted name, which may begin with a number
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of it that is a number
_HOLE = "\0"


def layer_of(name: str) -> tuple[str, str] | None:
    """Return (outermost list of layers, number) of a module or parameter; None if it is in no list.

    >>> layer_of("h.3.attn.2.weight"), layer_of("0.bias"), layer_of("head")
    (('h', '3'), ('', '0'), None)
    """
    m = _NUMBER.search(name)
    return None if m is None else (name[: max(m.start() - 1, 0)], m[0])


def enclosing_layers(name: str) -> list[str]:
    """Return the layers that contain a module or parameter, outermost first.

    >>> enclosing_layers("h.3.attn.2.weight")
    ['h.3', 'h.3.attn.2']
    """
    return [name[: m.end()] for m in _NUMBER.finditer(name)]


def of_every_layer(name: str) -> str:
    """Return the pattern that matches a name in all layers.

    >>> of_every_layer("layers.3.fc"), of_every_layer("0.bias"), of_every_layer("3")
    ('layers.*.fc', '*.bias', '3')
    """
    return _NUMBER.sub("*", name) if "." in name else name


def of_every_outer_layer(name: str) -> str:
    """Return the same pattern, but keep the last number.

    >>> of_every_outer_layer("blocks.3.0")
    'blocks.*.0'
    """
    outer = enclosing_layers(name)[-1].rpartition(".")[0] if layer_of(name) else name
    return of_every_layer(outer) + name[len(outer) :]


def ranges(numbers: Iterable[str]) -> str:
    """Format numbers as ranges.

    >>> ranges(["0", "1", "2", "7", "3"])
    '0-3,7'
    """
    runs: list[list[int]] = []
    for n in sorted(map(int, numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def blank(text: str, numbers: list[str] | None = None) -> str:
    """Replace every layer number in a text by a hole. numbers: a list that receives the numbers.

    >>> blank("h.3.fc: f32[3]") == blank("h.4.fc: f32[3]")
    True
    """

    def hole(m: re.Match[str]) -> str:
        if numbers is not None:
            numbers.append(m[0])
        return _HOLE

    return _NAME.sub(lambda m: _NUMBER.sub(hole, m[0]), text)


def fold(texts: Iterable[str]) -> list[str]:
    """Merge texts that differ only in layer numbers into one text with ranges and their count.

    Only a number that is a whole part of a dotted name is a layer's: "layers.3.fc", not "f32[3]" or "model.py:3".
    """
    kinds: dict[str, list[tuple[str, ...]]] = {}
    for text in texts:
        numbers: list[str] = []
        pattern = blank(text, numbers)
        kinds.setdefault(pattern, []).append(tuple(numbers))
    return [_joined(pattern, list(dict.fromkeys(names))) for pattern, names in kinds.items()]


def note_lines(notes: Iterable[str]) -> list[str]:
    """Return a program's notes as lines: merged, and at most NOTES of them."""
    folded = fold(notes)
    more = len(folded) - NOTES
    rest = [f"... and {more} more notes: all are in program.notes, and in `shardc inspect --json`"] if more > 1 else []
    return [*(f"note: {n}" for n in (folded[:NOTES] if rest else folded)), *rest]


def _joined(pattern: str, alike: Sequence[tuple[str, ...]]) -> str:
    columns = [list(dict.fromkeys(column)) for column in zip(*alike, strict=True)]
    varied = {tuple(column) for column in columns if len(column) > 1}
    together = len(varied) == 1 and len(alike) == len(next(iter(varied)))  # the same layer everywhere in each text
    is_grid = together or len(alike) == math.prod(map(len, columns))
    numbers = [c[0] if len(c) == 1 else "{" + ranges(c) + "}" for c in columns] if is_grid else list(alike[0])
    parts = pattern.split(_HOLE)
    text = parts[0] + "".join(n + part for n, part in zip(numbers, parts[1:], strict=True))
    if len(alike) == 1:
        return text
    head, newline, rest = text.partition("\n")  # of an error: its fix is on the second line
    return f"{head} ({len(alike)} alike){newline}{rest}"
