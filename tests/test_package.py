"""The package as it is installed: which folders are in it, which data files, and that its public names load lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import find_packages

import shardc
from tests.test_budget import PRODUCT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


#: The folders of the product in git: shardc/{passes,runtime,specs} are links to three of them.
TOPS = [ROOT / name for name in PRODUCT]


def folder(package: str) -> Path:
    """Where a package's files are in the repository."""
    return (ROOT / package.replace(".", "/")).resolve()


def test_the_version() -> None:
    assert shardc.__version__ == PROJECT["project"]["version"]


def test_every_folder_with_modules_is_a_package_that_is_installed() -> None:
    modules = {f.parent for top in TOPS for f in top.rglob("*.py")}
    packages = find_packages(str(ROOT), include=SETUPTOOLS["packages"]["find"]["include"])
    assert sorted(map(folder, packages)) == sorted(modules)
    assert all((f / "__init__.py").is_file() for f in modules)


def test_the_data_files_are_installed() -> None:
    data = {p: [f for g in globs for f in folder(p).glob(g)] for p, globs in SETUPTOOLS["package-data"].items()}
    assert {f.name for f in data["shardc.machine"]} >= {"h100-80g.yaml", "a100-80g.yaml", "h200.yaml"}
    assert {f.name for f in data["shardc.specs"]} >= {"gpt.yaml", "llama.yaml", "mixtral.yaml"}
    listed = {f for files in data.values() for f in files}
    kinds = ("*.yaml", "*.html", "*.css", "*.js", "*.LICENSE")
    assert {f for top in TOPS for kind in kinds for f in top.rglob(kind)} == listed


def in_a_new_process(code: str, folder: Path = ROOT) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder).stdout


def test_a_clone_in_the_working_directory_does_not_hide_the_package(tmp_path: Path) -> None:
    (tmp_path / "shardc").mkdir()
    code = "import shardc.runtime.rng as m; print(m.__file__)"
    assert in_a_new_process(code, tmp_path) == f"{Path(shardc.__file__).parent}/runtime/rng.py\n"


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
