"""What of the user's source a compiled folder was made from, so that a later change is seen.

A program keeps the forward and the loss of the day on which it was compiled; whoever trains the folder takes the
optimizer and the data from the files of today. So the folder's manifest has a digest of every definition that forward
and loss can reach: from the classes of the model's modules and the loss function (of a model file, its builder too),
through the names that they use, into every module of the user's that they import. What only data(), optimizer() or
batch() use is not among them.
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

#: Bytes of a source file that is looked at; the longest of transformers has a fifth.
LIMIT = 1 << 20
#: All of a file, as a name in it.
WHOLE = "*"
#: A file of the user's, and a name at its top level that forward and loss come from.
Origin = tuple[Path, str]
#: {path from the main file's folder, "" for that file itself: {name of a definition: digest}}
Digests = dict[str, dict[str, str]]


def origins(model: nn.Module, loss: Any = None) -> tuple[Origin, ...]:
    """Where a model and its loss function are defined, as far as that is the user's code: the model's own class first.
    What is defined inside of a function is not looked at: a script's `main()` holds all that trains, too.
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
    """What a folder's manifest has of the source. found: the file of the first one is the main one, from whose folder
    others are named.
    """
    wanted = list(found)
    if not wanted:
        return {}
    main = wanted[0][0].resolve()
    return {"source": digests(main, wanted), "source_main": str(main), "python": list(sys.version_info[:2])}


def digests(main: Path, found: Iterable[Origin]) -> Digests:
    """Of all definitions that these reach. Files that cannot be read as Python are left out."""
    wanted = [(path.resolve(), name) for path, name in found]
    result: Digests = {}
    while wanted:
        path, name = wanted.pop()
        seen = result.setdefault("" if path == main else os.path.relpath(path, main.parent), {})
        if name in seen or (file := _file(path)) is None:
            continue
        if (digest := file.digest(name)) is not None:
            seen[name] = digest
            wanted += file.reached(name)
    return {path: dict(sorted(names.items())) for path, names in sorted(result.items()) if names}


def stale(meta: Mapping[str, Any], main: Path | None = None) -> tuple[str, bool]:
    """(what of a compiled folder's source is not as it was, "" if all is; whether that is sure). meta: of its manifest.
    main: the main file, if not the one that it was compiled from. Not sure: another Python compiled it, which may read
    the same code otherwise.
    """
    if "source_main" not in meta:
        return "", True
    then = Path(meta["source_main"])
    main = then if main is None else main.resolve()
    changes = changed(meta["source"], main, other=main != then)
    if not changes:
        return "", True
    fault = f"{'; '.join(changes)} changed since this was compiled: forward and loss are still those of then"
    if meta["python"] == list(sys.version_info[:2]):
        return fault, True
    python = ".".join(map(str, meta["python"]))
    return f"{fault}, or only read otherwise: it was compiled with Python {python}", False


def changed(recorded: Digests, main: Path, *, other: bool = False) -> list[str]:
    """The definitions that are not what they were, as "Net of model.py". main: the main file of today.
    other: that is not the one that was compiled: names that it does not bind are not changed. A file that is
    not there, or cannot be read as Python, is left to whoever imports it.
    """
    folder, found = main.resolve().parent, []
    for relative, names in recorded.items():
        path = folder / relative if relative else main
        absent = (None,) if not relative and other else ()
        if (now := _file(path)) is None:
            continue
        today = {name: now.digest(name) for name in names}
        # another file than it was compiled from, `--model other.py`, need not have them
        different = [name for name, digest in names.items() if today[name] not in (digest, *absent)]
        if WHOLE in different:
            found.append(path.name)
        elif different:
            found.append(f"{', '.join(different)} of {path.name}")
    return found


def _file(path: Path) -> _File | None:
    """A file of the user's, or None if it is not there, or not Python."""
    try:
        if path.suffix not in (".py", ".json"):  # Python, or the config of a model of transformers
            return None
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LIMIT:  # a folder that is anybody's may name any file
            return None
        return _read(path, found.st_mtime_ns, found.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(64)
def _read(path: Path, *_: int) -> _File:
    return _File(path)


class _File:
    """One file of the user's, as its statements at top level and the names that they bind. Raises SyntaxError."""

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
        """Of what a name stands for, without comments and docstrings; None if the file does not bind it."""
        if self.path.suffix != ".py":
            return hashlib.sha256(self.text).hexdigest()[:16]
        statements = self._of(name)
        code = "\n".join(ast.unparse(_Undocumented().visit(x)) for x in statements)
        return hashlib.sha256(code.encode()).hexdigest()[:16] if statements else None

    def reached(self, name: str) -> Iterator[tuple[Path, str]]:
        """What the definition of a name uses, in this file and others of the user's."""
        for statement in self._of(name):
            yield from ((self.path, x) for x in self.reads[statement] if x in self.bound)
            yield from self._through_modules(statement)
            for node in ast.walk(statement):
                if isinstance(node, ast.Import):
                    for module in node.names:
                        if node is statement and (module.asname or "." not in module.name):
                            continue  # by what is used of it, where it is used
                        yield from ((path, WHOLE) for path in _module(module.name))
                elif isinstance(node, ast.ImportFrom):
                    yield from self._from(node)

    def _through_modules(self, statement: ast.stmt) -> Iterator[tuple[Path, str]]:
        """Of modules that `import m` at top level binds: the names in `m.name`, and all of one that is used bare."""
        modules = {
            x.asname or x.name: x.name
            for top in self.statements
            if isinstance(top, ast.Import)
            for x in top.names
            if x.asname or "." not in x.name
        }
        of_attributes = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                of_attributes.add(node.value)
                for path in _module(modules[node.value.id]):  # a name that comes by `import *` is not bound there
                    file = _file(path)
                    yield path, node.attr if file is not None and node.attr in file.bound else WHOLE
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in modules and node not in of_attributes:
                yield from ((path, WHOLE) for path in _module(modules[node.id]))

    def _of(self, name: str) -> list[ast.stmt]:
        return self.statements if name == WHOLE else self.bound.get(name, [])

    def _from(self, node: ast.ImportFrom) -> Iterator[tuple[Path, str]]:
        """`from module import names`, of which each may be a module by itself."""
        module = "." * node.level + (node.module or "")
        if node.level:
            package = next((getattr(m, "__package__", "") for m in _loaded(self.path)), "")
            if not package:
                return
            module = importlib.util.resolve_name(module, package)
        for imported in node.names:
            yield from ((path, imported.name) for path in _module(module))
            yield from ((path, WHOLE) for path in _module(f"{module}.{imported.name}"))


def _module(name: str) -> list[Path]:
    """The file of a module that is imported, if it is the user's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or not file.endswith(".py"):
        return []
    return [Path(file).resolve()] if is_users(file) else []


def _loaded(path: Path) -> list[object]:
    return [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(path)]


def _symbols(code: ast.AST) -> tuple[set[str], set[str]]:
    """The names that code at top level gives a value, and those that it reads, in functions too, and are not theirs."""
    top = symtable.symtable(ast.unparse(code), "source", "exec")
    binds = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    reads, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        reads |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    return binds, reads


def _of_builtin(statement: ast.stmt) -> bool:
    """`print(...)`: changes nothing of what it names."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    harmless = ("print", "repr", "len", "isinstance")
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in harmless


def _is_script(statement: ast.stmt) -> bool:
    """`if __name__ == "__main__":`"""
    return isinstance(statement, ast.If) and "__name__" in _symbols(statement.test)[1]


class _Undocumented(ast.NodeTransformer):
    """Leaves docstrings out."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node
