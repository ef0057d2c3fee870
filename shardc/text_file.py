"""Read a small text file of the user (spec, schedule, device, config); refuse what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError

#: Bytes. A spec has 1-2 thousand, a schedule of 64 ranks and 1,000 microbatches a few million, the tables of a
#: program of 400 billion parameters on 8,192 ranks a tenth.
LARGEST = 16 << 20


def read(path: str | os.PathLike[str], kind: str, *, where: str = "", fix: str = "", limit: int = LARGEST) -> str:
    """Return the text of a file. kind: what it is, for the error. where: the place to cite, if not path.

    Raises ShardcError if it cannot be read, is not a file (a folder, a pipe, a device), has more than `limit` bytes
    or is not UTF-8.
    """
    where, fix = where or os.fspath(path), fix or "give the path of a text file"
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # reading a pipe or a device may never end
            raise ShardcError(f"the {kind} {os.fspath(path)} is not a regular file", where=where, fix=fix)
        with Path(path).open("rb") as f:
            data = f.read(limit + 1)
    except OSError as e:
        raise ShardcError(f"the {kind} {os.fspath(path)} cannot be read: {e.strerror}", where=where, fix=fix) from None
    except ValueError as e:  # a null byte in the path
        raise ShardcError(f"the {kind} cannot be read: {e}", where=where, fix=fix) from None
    if len(data) > limit:
        raise ShardcError(f"the {kind} has more than {limit:,} bytes", where=where, fix=fix)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        before = data[: e.start]
        at = f"{os.fspath(path)}:{before.count(10) + 1}:{e.start - before.rfind(10)}"
        raise ShardcError(f"the {kind} is not UTF-8 text", where=at, fix="save it as UTF-8") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table for json.loads; raise ValueError if a key repeats."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice in one table")
    return table
