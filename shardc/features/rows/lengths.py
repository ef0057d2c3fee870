"""Read a distribution of lengths: of a file, or of a dataset.

lengths.txt     a line for each row: `300`; or a histogram: `300 17` is 17 rows of 300 tokens
lengths.json    [300, 17, ...]; {"300": 17, ...}; or [[120, 180], ...]: documents that are packed into a row
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError

_FIX = 'write a line for each row, `300`, or a histogram, `300 17`; or JSON: [300, ...], {"300": 17, ...}'
#: The longest row that is believed.
LONGEST = 1 << 31


@dataclass(frozen=True)
class Lengths:
    """Lengths of documents, and how often each comes."""

    counts: Mapping[int, int]

    @property
    def rows(self) -> int:
        return sum(self.counts.values())

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def mean(self) -> float:
        return sum(n * k for n, k in self.counts.items()) / self.rows

    def median(self) -> int:
        """Return the length that half of the rows do not exceed."""
        seen = 0
        for n in sorted(self.counts):
            seen += self.counts[n]
            if 2 * seen >= self.rows:
                return n
        return self.longest

    def drawn(self, number: int, seed: int = 0) -> list[int]:
        """Return so many lengths, each as often as it comes."""
        return random.Random(seed).choices(sorted(self.counts), [self.counts[n] for n in sorted(self.counts)], k=number)


def of(rows: Sequence[int | Sequence[int]]) -> Lengths:
    """Return the lengths of the documents of a dataset's rows."""
    counts: dict[int, int] = {}
    for one in rows:
        for n in (one,) if isinstance(one, int) else one:
            counts[n] = counts.get(n, 0) + 1
    return Lengths(counts)


def read(path: str | Path) -> Lengths:
    """Read a file. Raises ShardcError for one that is missing or empty, with the line of what is no length."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ShardcError(f"the file of lengths cannot be read: {e}", where=str(path), fix=_FIX) from e
    counts: dict[int, int] = {}
    for where, n, number in _json(text, file) if file.suffix == ".json" else _lines(text, file):
        if not _whole(n) or not _whole(number):
            fault = "a length and its number are whole numbers above 0"
            raise ShardcError(f"{fault}, not {n!r} and {number!r}", where=where, fix=_FIX)
        counts[int(n)] = counts.get(int(n), 0) + int(number)
    if not counts:
        raise ShardcError("the file has no lengths", where=str(path), fix=_FIX)
    return Lengths(counts)


def _whole(value: Any) -> bool:
    if isinstance(value, str):
        return value.isdecimal() and 0 < int(value) < LONGEST
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < LONGEST


def _lines(text: str, file: Path) -> list[tuple[str, Any, Any]]:
    """Return (place, length, number) of each line."""
    lines = [(i, line.partition("#")[0].replace(",", " ").split()) for i, line in enumerate(text.splitlines(), 1)]
    return [(f"{file}:{i}", w[0], w[1] if len(w) == 2 else 1 if len(w) == 1 else " ".join(w)) for i, w in lines if w]


def _json(text: str, file: Path) -> list[tuple[str, Any, Any]]:
    try:
        value: Any = json.loads(text)
    except ValueError as e:
        raise ShardcError(f"this is not JSON: {e}", where=str(file), fix=_FIX) from None
    if isinstance(value, Mapping):
        return [(f"{file}: {n!r}", n, number) for n, number in value.items()]
    if not isinstance(value, list):
        raise ShardcError(f"the file has a {type(value).__name__}", where=str(file), fix=_FIX)
    return [
        (f"{file}: entry {i}", n, 1) for i, row in enumerate(value) for n in (row if isinstance(row, list) else [row])
    ]
