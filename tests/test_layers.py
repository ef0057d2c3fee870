"""What imports what. The order of folders is a contract of import-linter (pyproject.toml), which `make lint` runs.

A room is a folder of shardc, or a module at its top. Imports within functions count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]


def files() -> Iterator[tuple[str, Path]]:
    """(module, file) of all product code."""
    for name in sorted(glob("shardc/**/*.py", root_dir=ROOT, recursive=True)):
        parts = Path(name).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ROOT / name


FILES = dict(files())
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "shardc"


def imports(module: str) -> Iterator[tuple[str, str, str]]:
    """(imported module, name taken of it, file:line) of the imports of shardc."""
    for node, name in _imported(module):
        if name.split(".")[0] == "shardc":
            target, _, taken = (name, "", "") if name in FILES else name.rpartition(".")
            yield target, taken, f"{FILES[module].relative_to(ROOT)}:{node.lineno}"


def _imported(module: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    tree = TREES[module]
    names_only = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {x for n in names_only for x in ast.walk(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in skipped:
            yield from ((node, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            yield from ((node, f"{node.module}.{a.name}") for a in node.names)


def refuse(title: str, lines: list[str]) -> None:
    assert not lines, "\n".join([title, *lines])


def test_no_circle_of_files() -> None:
    """import-linter (pyproject.toml) does not see one through the `__init__` of a folder."""
    edges = [(m, t) for m in FILES for t, *_ in imports(m) if t != m]
    refuse("circles:", [str(c) for c in nx.strongly_connected_components(nx.DiGraph(edges)) if len(c) > 1])


def test_no_private_name_is_imported_from_another_room() -> None:
    private = [
        f"{at}: {target}.{name}"
        for module in FILES
        for target, name, at in imports(module)
        if room(target) != room(module)
        and any(p.startswith("_") and not p.endswith("__") for p in (*target.split("."), name))
    ]
    refuse("private names of other rooms:", private)


def test_product_code_patches_no_module_of_its_own() -> None:
    """`mock.patch` is for libraries that leave no other way; our own code takes an argument instead."""
    patched = []
    for module, tree in TREES.items():
        ours = {taken or target.split(".")[-1] for target, taken, _ in imports(module)} | {"shardc"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and "patch" in ast.unparse(node.func).split("."):
                root = ast.unparse(node.args[0]).strip("'\"").split(".")[0]
                if root in ours:
                    patched.append(f"{FILES[module].relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    refuse("patches of our own modules:", patched)


def test_private_modules_of_torch_are_imported_in_one_room() -> None:
    private = [
        f"{FILES[module].relative_to(ROOT)}:{node.lineno}: {name}"
        for module in FILES
        if room(module) != "torch_private"
        for node, name in _imported(module)
        if name.startswith("torch.") and "._" in name
    ]
    refuse("put these into shardc/torch_private:", private)


def _defined(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Functions, classes and constants of a file, and those of its classes, as `Class.name`."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _defined(node))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))


def test_a_decision_is_where_contributing_says_and_nowhere_else() -> None:
    rows = re.findall(r"^\| .* \| `(\S+\.py): (\S+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(rows) >= 30
    files: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        for name in _defined(tree):
            files.setdefault(name, set()).add(str(FILES[module].resolve().relative_to(ROOT)))
    refuse("elsewhere:", [f"{n}: {files.get(n)}" for path, n in rows if files.get(n) != {path}])


@pytest.mark.parametrize("package", [m for m, path in FILES.items() if path.name == "__init__.py"])
def test_a_folder_says_what_its_files_are_for(package: str) -> None:
    """In the docstring of its `__init__`, or, as the passes, in the list that its code is."""
    path = FILES[package]
    here = {p.stem for p in path.parent.glob("*.py")} | {p.parent.name for p in path.parent.glob("*/__init__.py")}
    told = set(re.findall(r"\w+", path.read_text()))
    assert sorted(here - {"__init__", "__main__"} - told) == []
