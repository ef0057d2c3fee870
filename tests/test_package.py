"""The package as it is installed: which folders are in it, which data files, and that its public names load lazily."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

import shardc
from shardc.errors import ShardcError
from shardc.optional import EXTRAS, install, library
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
    kinds = ("py.typed", "*.yaml", "*.html", "*.css", "*.js", "*.LICENSE")
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


def test_what_a_command_loads_of_shardc_is_what_it_needs() -> None:
    """Each of these takes a tenth of a second or more, and torch loads none of them when it is imported."""
    slow = {"sympy", "networkx", "triton", "shardc.runtime.step.engine", "shardc.cost.step"}
    rank = {"sympy", "networkx", "shardc.passes.joint", "shardc.capture", "shardc.verify"}
    for module, without in (("shardc.compile", slow), ("shardc.cli.ranks.worker", rank)):
        code = f"import sys, {module}; print(sorted({without} & set(sys.modules)))"
        assert in_a_new_process(code) == "[]\n", module


def test_a_command_leaves_with_its_status_and_all_of_its_output(tmp_path: Path) -> None:
    """The process ends without Python's own end: what runs then and what is still in buffers must not be lost."""
    code = """
import atexit, sys
from shardc.cli import main
atexit.register(print, "at the end")
sys.argv = ["shardc", *sys.argv[1:]]
main()
"""
    for arguments, status, out in ((["--version"], 0, f"shardc {shardc.__version__}\n"), (["inspect", "none"], 2, "")):
        ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (status, f"{out}at the end\n"), ended.stderr
    assert "this file or compiled DIR does not exist" in ended.stderr


def test_every_extra_has_the_libraries_that_errors_name() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    other_name = {"mlflow": "mlflow-skinny", "opentelemetry": "opentelemetry-sdk"}
    for name, extra in EXTRAS.items():
        assert any(re.match(rf"{other_name.get(name, name)}\b(?!-)", x) for x in extras[extra]), name
    assert set(re.findall(r"\w+", extras["all"][0])) == {"shardc", *EXTRAS.values()}
    sources = "".join(f.read_text() for top in TOPS for f in top.rglob("*.py"))
    assert not [x for x in re.findall(r"pip install '?([\w-]+)", sources) if x in EXTRAS]


@pytest.mark.parametrize("name", ["hidden", "hidden.part"])
def test_a_library_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "hidden", "hf")
    with pytest.raises(ShardcError, match="hidden is not installed") as e:
        library(name, "--here")
    assert (e.value.where, e.value.fix) == ("--here", "pip install 'shardc[hf]'")
    assert install("other") == "pip install other"


def test_a_library_that_lacks_another_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        library("broken_library", "--here")


SCRIPT = """
from pathlib import Path
import shardc, torch
from torch import nn

def train(model: nn.Module, batch: dict[str, torch.Tensor], folder: Path) -> None:
    program = shardc.compile(model, batch, "spec.yaml", mesh={"tp": 4})
    program.save(folder)
    engine = shardc.load(folder).engine(model, optimizer=lambda ps: torch.optim.AdamW(ps, lr=3e-4))
    engine.step(batch)
    reveal_type((program, engine, program.module(model), program.verify().ok, program.prove(), program.cost()))
    reveal_type((shardc.simulate(program, model, batch), shardc.plan(model, batch, devices=64), program.text()))
"""
REVEALED = [
    "tuple[shardc.api.Program, shardc.runtime.step.engine.Engine, shardc.runtime.step.module.ShardedModule, bool,"
    " shardc.verify.static.proof.Proof, shardc.cost.step.Cost]",
    "tuple[shardc.verify.simulate.Simulation, shardc.plan.result.Plan, str]",
]
#: Libraries' own types play no part, and take mypy most of its time.
MYPY = """
[mypy]
strict = True
follow_imports = silent
[mypy-torch.*,numpy.*,pydantic.*,transformers.*,rich.*,typer.*,networkx.*,yaml.*,safetensors.*,huggingface_hub.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_a_users_script_sees_types(tmp_path: Path) -> None:
    names = "".join(f"reveal_type(shardc.{name})\n" for name in shardc.__all__)
    (tmp_path / "script.py").write_text(SCRIPT + names)
    (tmp_path / "wrong.py").write_text("import shardc\nshardc.compile(1)\nshardc.complie\nshardc.load('x').verfy()\n")
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "script.py", "wrong.py"]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = checked.stdout.splitlines()
    revealed = [x.partition("Revealed type is ")[2].strip('"') for x in lines if "Revealed type" in x]
    assert revealed[:2] == REVEALED, checked
    assert len(revealed) == 2 + len(shardc.__all__)
    assert "Any" not in revealed
    errors = [x for x in lines if "error:" in x]
    assert all(x.startswith("wrong.py:") for x in errors), errors
    kinds = {re.search(r"\[([\w-]+)\]$", x)[1] for x in errors}  # type: ignore[index]
    assert kinds == {"call-arg", "attr-defined"}


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
