"""Refuse Python files that hide a module that shardc imports, such as torch.py or shardc.py.

Python searches the folder where it starts before the installed packages. In a rank's process the user's torch.py would
be `torch`, and the first error would come from a line of torch or shardc.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from shardc.errors import Errors
from shardc.ir.source import is_users


def check(files: Iterable[Path]) -> None:
    """Raise ShardcError if a Python file or a package hides a module that is imported now.

    The user's modules and modules built into Python do not count.
    """
    errors = Errors()
    for path in files:
        name = path.stem
        loaded = getattr(sys.modules.get(name), "__file__", None)
        source = path / "__init__.py" if path.is_dir() else path
        if loaded is None or is_users(loaded) or source.resolve() == Path(loaded).resolve():
            continue
        if source.is_file() and source.suffix == ".py":
            kind = "folder" if path.is_dir() else "file"
            fault = f"a {kind} of this name hides the module {name!r} that shardc imports ({loaded})"
            errors.add(fault, where=str(path), fix=f"rename the {kind}, such as to my_{path.name}")
    errors.raise_any()


def check_folder(folder: Path) -> None:
    """Check all files of the folder in which processes are started."""
    if not getattr(sys.flags, "safe_path", False):  # python -P: the current folder is not searched
        check(sorted(folder.iterdir()))
