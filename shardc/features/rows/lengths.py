"""Read a distribution of lengths, as counts by length.

lengths.txt     a line for each row: `300`; or a histogram: `300 17` is 17 rows of 300 tokens
lengths.json    [300, 17, ...]; {"300": 17, ...}; or [[120, 180], ...]: documents that are packed into a row
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError

Lengths = Counter[int]
#: No row is longer, and no length comes more often.
MOST = 1 << 40
_FIX = 'write a line for each row, `300`, or a histogram, `300 17`; or JSON: [300, ...], {"300": 17, ...}'


def of(rows: Iterable[int | Sequence[int]]) -> Lengths:
    """Return the lengths of the documents of a dataset's rows."""
    return Counter(n for row in rows for n in ((row,) if isinstance(row, int) else row))


def read(path: str | Path) -> Lengths:
    """Read a file. Raises ShardcError for one that is missing or empty, with the place of what is no length."""
    file, lengths = Path(path).expanduser(), Lengths()
    try:
        text = file.read_text(encoding="utf-8")
        entries = list(_json(json.loads(text)) if file.suffix == ".json" else _lines(text))
    except (OSError, ValueError) as e:
        raise ShardcError(f"the file of lengths cannot be read: {e}", where=str(path), fix=_FIX) from e
    for place, *pair in entries:
        if not all(str(n).isdecimal() and 0 < int(n) < MOST for n in pair) or len(pair) != 2:
            fault = f"a length and its number are whole numbers above 0, and this is {' '.join(map(str, pair))}"
            raise ShardcError(fault, where=f"{path}:{place}", fix=_FIX)
        lengths[int(pair[0])] += int(pair[1])
    if not lengths:
        raise ShardcError("the file has no lengths", where=str(path), fix=_FIX)
    return lengths


def _lines(text: str) -> Iterator[tuple[Any, ...]]:
    for i, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].replace(",", " ").split():
            yield (i, *words, *["1"] * (len(words) == 1))


def _json(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, Mapping):
        yield from ((n, n, number) for n, number in value.items())
    else:
        rows = value if isinstance(value, list) else [value]
        yield from ((i, n, 1) for i, row in enumerate(rows) for n in (row if isinstance(row, list) else [row]))
