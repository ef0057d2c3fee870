"""The package as it is installed: which folders are in it, which data files, and that its public names load lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import shardc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def folder(package: str) -> Path:
    """Where a package's files are in the repository, by package-dir."""
    prefix = max((p for p in SETUPTOOLS["package-dir"] if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT / SETUPTOOLS["package-dir"][prefix] / package.removeprefix(prefix).lstrip(".").replace(".", "/")


def test_the_version() -> None:
    assert shardc.__version__ == PROJECT["project"]["version"]


def test_every_folder_with_modules_is_a_package_that_is_installed() -> None:
    tops = [ROOT / name for name in SETUPTOOLS["package-dir"].values()]
    modules = {f.parent for top in tops for f in top.rglob("*.py")}
    assert {folder(p) for p in SETUPTOOLS["packages"]} == modules
    assert all((f / "__init__.py").is_file() for f in modules)


def test_the_data_files_are_installed() -> None:
    data = {p: [f for g in globs for f in folder(p).glob(g)] for p, globs in SETUPTOOLS["package-data"].items()}
    assert {f.name for f in data["shardc.machine"]} >= {"h100-80g.yaml", "a100-80g.yaml", "h200.yaml"}
    assert {f.name for f in data["shardc.specs"]} >= {"gpt.yaml", "llama.yaml", "mixtral.yaml"}
    listed = {f for files in data.values() for f in files}
    tops = [ROOT / name for name in SETUPTOOLS["package-dir"].values()]
    kinds = ("*.yaml", "*.html", "*.css", "*.js", "*.LICENSE")
    assert {f for top in tops for kind in kinds for f in top.rglob(kind)} == listed


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_needs_no_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
from shardc.cli import app
for command in [], ["run"], ["inspect"], ["rules"]:
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0
print([m for m in ("torch", "numpy", "sympy") if m in sys.modules])
"""
    assert in_a_new_process(code) == "[]\n"


def test_public_names_are_what_they_say_whatever_was_imported_before() -> None:
    """`shardc.compile` and `shardc.plan` are functions, and modules of the same name are imported here first."""
    code = """
import shardc.compile, shardc.plan.result
print(shardc.compile.__name__, shardc.plan.__name__, callable(shardc.compile), callable(shardc.plan))
"""
    assert in_a_new_process(code) == "compile plan True True\n"
    assert set(shardc.__all__) <= set(dir(shardc))
    for name in shardc.__all__:
        assert getattr(shardc, name).__name__ == name
