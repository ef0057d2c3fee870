"""What plans found out, on disk: `$XDG_CACHE_HOME/shardc/plans` (else `~/.cache`), a file for each answer.

A file is the digest of what follows, and JSON, compressed. So it cannot run anything; one that is torn or changed is
taken for missing. It gets its name when it is complete, so that several processes may write the same. Beyond a limit
those are removed that were not read for longest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.runtime.state import disk_calls

#: Bytes of all files; a plan of a large model leaves two or three millions.
LIMIT = 256 << 20
#: Bytes of one answer's text. More is not read: a small file may hold very much.
LONGEST = 64 << 20
_SUFFIX = ".plan"


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardc" / "plans"


def packed(answer: Any) -> bytes:
    """Plain values as compressed JSON: in a third of the time, for a fourth more bytes, than as small as can be."""
    return zlib.compress(json.dumps(answer, separators=(",", ":")).encode(), 1)


def unpacked(data: bytes) -> Any:
    """The values; None if they are no whole text, or a longer one than any answer."""
    inflate = zlib.decompressobj()
    text = inflate.decompress(data, LONGEST)
    return json.loads(text) if inflate.eof else None


@dataclass(frozen=True)
class DiskCache:
    """path: of the folder, which need not be there. A disk that cannot be read or written is one that has nothing."""

    path: Path
    limit: int = LIMIT

    def get(self, question: Any) -> Any:
        """The answer to a question of plain values; None if there is none."""
        data = self.packed(question)
        return None if data is None else unpacked(data)

    def packed(self, question: Any) -> bytes | None:
        """The same, as it is kept; None if there is none, or a torn one."""
        file = self._file(question)
        try:
            data = disk_calls.read_file(file, LONGEST)
        except OSError:
            return None
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return data[32:]

    def put(self, question: Any, answer: Any) -> None:
        self.keep(question, packed(answer))

    def keep(self, question: Any, data: bytes) -> None:
        """data: an answer, `packed`."""
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path)
            try:
                with os.fdopen(descriptor, "wb") as f:
                    f.write(hashlib.sha256(data).digest() + data)
                disk_calls.rename(Path(name), self._file(question))
            except BaseException:
                disk_calls.unlink(Path(name))
                raise
            self._make_room()

    def _file(self, question: Any) -> Path:
        text = json.dumps(question, separators=(",", ":"))
        return self.path / (hashlib.sha256(text.encode()).hexdigest()[:40] + _SUFFIX)

    def _make_room(self) -> None:
        """Other processes may remove the same files."""
        files = []
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                files.append((found.st_mtime_ns, found.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files) if total > self.limit else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
            if total <= self.limit * 3 // 4:
                break
