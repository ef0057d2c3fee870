"""What a rank is doing, in a file that whoever ends it can read: a process that is killed cannot say where it was."""

from __future__ import annotations

import mmap
from pathlib import Path

_SIZE = 160


class Progress:
    """file: made here. `note` costs a copy of some bytes, and what it wrote outlives the process."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as f:
            self._memory = mmap.mmap(f.fileno(), _SIZE)

    def note(self, text: str) -> None:
        self._memory[:] = text.encode()[:_SIZE].ljust(_SIZE, b"\0")

    @staticmethod
    def read(file: Path) -> str:
        """The last note; "" if there is none."""
        return file.read_bytes().rstrip(b"\0").decode(errors="replace") if file.exists() else ""
