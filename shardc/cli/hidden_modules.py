"""Python files whose name is that of a module which shardc itself imports, such as torch.py or shardc.py.

Python looks in the folder that it is started in before it looks at what is installed. So in a rank's process the
user's torch.py would be `torch`, and the first line that fails is one of torch's or shardc's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from shardc.errors import Errors
from shardc.ir.source import is_users


def check(files: Iterable[Path]) -> None:
    """Raises ShardcError for Python files, and folders that are packages, that hide a module which is imported now.
    Modules of the user's own, and such as are built into Python, are not hidden.
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
    """The same of all files in a folder that processes are started in."""
    if not getattr(sys.flags, "safe_path", False):  # Python's own switch: then it does not look there
        check(sorted(folder.iterdir()))
