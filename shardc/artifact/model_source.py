"""Record the user's source that a compiled folder was made from, so that a later change is noticed.

A program keeps forward and loss as they were when it was compiled; training takes the optimizer and the data from the
current files. So the folder's manifest has a digest of every definition that forward and loss can reach: from the
classes of the model's modules and the loss function (of a model file, its builder, too), through the names that they
use, into every user's module that they import. What only data(), optimizer() or batch() use is not included.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import stat
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shardc.ir.source import is_users

#: The most bytes of a source file that is read; the longest of transformers has a fifth.
LIMIT = 1 << 20
#: The name that means all of a file.
WHOLE = "*"
#: A user's file, and a name at its top level that defines forward or loss.
Origin = tuple[Path, str]
#: {path from the main file's folder, "" for that file itself: {name of a definition: digest}}
Digests = dict[str, dict[str, str]]


def origins(model: nn.Module, loss: Any = None) -> tuple[Origin, ...]:
    """Return where the user's code defines a model and its loss function, the model's own class first.

    Definitions inside functions are skipped: a script's `main()` contains all that trains, too.
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    things: list[Any] = [c for m in model.modules() for c in type(m).__mro__]
    things += [loss] if hasattr(loss, "__qualname__") else type(loss).__mro__
    return tuple(
        dict.fromkeys(
            (path, thing.__qualname__.partition(".")[0])
            for thing in things
            if "<locals>" not in thing.__qualname__
            for path in _module(thing.__module__)
        )
    )


def record(found: Iterable[Origin]) -> dict[str, Any]:
    """Return a manifest's entry on the source. found: the file of the first one is the main file.

    Other files are named relative to the main file's folder.
    """
    listed = list(found)
    if not listed:
        return {}
    main = listed[0][0].resolve()
    return {"source": {"main": str(main), "python": list(sys.version_info[:2]), "files": digests(main, listed)}}


def digests(main: Path, found: Iterable[Origin]) -> Digests:
    """Return digests of all definitions that these reach. Files that are not valid Python are left out."""
    pending = [(path.resolve(), name) for path, name in found]
    result: Digests = {}
    while pending:
        path, name = pending.pop()
        seen = result.setdefault("" if path == main else os.path.relpath(path, main.parent), {})
        if name in seen or (file := _file(path)) is None:
            continue
        if (digest := file.digest(name)) is not None:
            seen[name] = digest
            pending += file.reached(name)
    return {path: dict(sorted(names.items())) for path, names in sorted(result.items()) if names}


def stale(meta: Mapping[str, Any], main: Path | None = None) -> str:
    """Return what has changed since a folder was compiled, or "". main: the main file, if it is another one.

    meta: of its manifest. Where another Python compiled it, which may parse the same code differently, nothing is
    compared.
    """
    source = meta.get("source")
    if not source or source["python"] != list(sys.version_info[:2]):
        return ""
    then = Path(source["main"])
    main = then if main is None else main.resolve()
    changes = "; ".join(changed(source["files"], main, other=main != then))
    return f"{changes} changed since this was compiled: forward and loss are still those of then" if changes else ""


def changed(recorded: Digests, main: Path, *, other: bool = False) -> list[str]:
    """Return the definitions that changed, as "Net of model.py". main: the current main file.

    other: main is not the file that was compiled; names that it does not bind are not changed. A missing or invalid
    file is left to the code that imports it.
    """
    folder, changes = main.resolve().parent, []
    for relative, names in recorded.items():
        path = folder / relative if relative else main
        absent = (None,) if not relative and other else ()
        if (now := _file(path)) is None:
            continue
        today = {name: now.digest(name) for name in names}
        # another file than it was compiled from, `--model other.py`, need not have them
        different = [name for name, digest in names.items() if today[name] not in (digest, *absent)]
        if WHOLE in different:
            changes.append(path.name)
        elif different:
            changes.append(f"{', '.join(different)} of {path.name}")
    return changes


def _file(path: Path) -> _File | None:
    """Return a user's Python or JSON file, or None if it is missing, too large or invalid."""
    try:
        if path.suffix not in (".py", ".json"):  # Python, or the config of a model of transformers
            return None
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:  # a folder from anybody may name any file
            return None
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(64)
def _read(path: Path, *_: int) -> _File:
    return _File(path)


class _File:
    """A user's file: its top-level statements and the names that they bind. Raises SyntaxError."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_bytes()
        self.bound: dict[str, list[ast.stmt]] = {}
        self.statements: list[ast.stmt] = []
        self.reads: dict[ast.stmt, set[str]] = {}
        if path.suffix != ".py":
            return
        self.statements = [x for x in ast.parse(self.text).body if not _is_script(x)]
        loose = []
        for statement in self.statements:
            binds, self.reads[statement] = _symbols(statement)
            for name in binds:
                self.bound.setdefault(name, []).append(statement)
            if not binds and not _of_builtin(statement):
                loose.append(statement)
        for statement in loose:  # Net.forward = other, torch.set_default_dtype(...): of all that they name
            for name in self.reads[statement] & self.bound.keys():
                self.bound[name].append(statement)

    def digest(self, name: str) -> str | None:
        """Return the digest of a name's definition without comments and docstrings; None if it is not bound."""
        if self.path.suffix != ".py":
            return hashlib.sha256(self.text).hexdigest()[:16]
        statements = self._of(name)
        code = "\n".join(ast.unparse(_Undocumented().visit(x)) for x in statements)
        return hashlib.sha256(code.encode()).hexdigest()[:16] if statements else None

    def reached(self, name: str) -> Iterator[tuple[Path, str]]:
        """Yield what the definition of a name uses, in this file and in the user's other files.

        Of `import m` it is all of m; of `from m import x` it is x, which may be a module.
        """
        for statement in self._of(name):
            yield from ((self.path, x) for x in self.reads[statement] if x in self.bound)
            for node in ast.walk(statement):
                if isinstance(node, ast.Import):
                    yield from ((path, WHOLE) for module in node.names for path in _module(module.name))
                elif isinstance(node, ast.ImportFrom):
                    yield from self._from(node)

    def _of(self, name: str) -> list[ast.stmt]:
        return self.statements if name == WHOLE else self.bound.get(name, [])

    def _from(self, node: ast.ImportFrom) -> Iterator[tuple[Path, str]]:
        module = "." * node.level + (node.module or "")
        if node.level:
            here = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(self.path))
            if not (package := next((getattr(m, "__package__", "") for m in here), "")):
                return
            module = importlib.util.resolve_name(module, package)
        for imported in node.names:
            yield from ((path, imported.name) for path in _module(module))
            yield from ((path, WHOLE) for path in _module(f"{module}.{imported.name}"))


def _module(name: str) -> list[Path]:
    """Return the file of an imported module in a list, or [] if it is not the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or not file.endswith(".py"):
        return []
    return [Path(file).resolve()] if is_users(file) else []


def _symbols(code: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that code binds at top level, and the globals that it reads, also in functions."""
    top = symtable.symtable(ast.unparse(code), "source", "exec")
    binds = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    reads, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        reads |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    return binds, reads


def _of_builtin(statement: ast.stmt) -> bool:
    """Return whether it is `print(...)` or similar, which changes nothing that it names."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    harmless = ("print", "repr", "len", "isinstance")
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in harmless


def _is_script(statement: ast.stmt) -> bool:
    """Return whether it is `if __name__ == "__main__":`."""
    return isinstance(statement, ast.If) and "__name__" in _symbols(statement.test)[1]


class _Undocumented(ast.NodeTransformer):
    """Removes docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node
