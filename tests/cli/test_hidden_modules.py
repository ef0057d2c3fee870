"""Files named as a module that shardc imports are refused; others are modules that every process can import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shardc.cli import hidden_modules, model_file
from shardc.errors import ShardcError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["torch", "shardc", "random"])
def test_a_model_file_of_that_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text("raise AssertionError('it is not read')")
    with pytest.raises(ShardcError, match=rf"a file of this name hides the module '{name}' that shardc imports") as e:
        model_file.load(str(path))
    assert e.value.where == str(path)
    assert e.value.fix == f"rename the file, such as to my_{name}.py"


def test_every_file_and_package_where_processes_begin(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    for name in ("numpy/__init__.py", "copy.py", "model.py", "torch.yaml", "builtins.py"):
        (tmp_path / name).touch()
    (tmp_path / "shardc").mkdir()  # of a clone: no package
    with pytest.raises(ShardcError) as e:
        hidden_modules.check_folder(tmp_path)
    assert [Path(x.where).name for x in e.value.errors] == ["copy.py", "numpy"]


def test_shardcs_own_folder_and_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_modules.check_folder(ROOT)
    mine = ModuleType("layers")
    mine.__file__ = "/home/somebody/layers.py"
    monkeypatch.setitem(sys.modules, "layers", mine)
    (tmp_path / "layers.py").touch()
    hidden_modules.check_folder(tmp_path)


# --- the name by which other processes import a model file

LAYERS = "import torch\nclass Wide(torch.nn.Linear): ...\n"
MADE = "\ndef model(): return Wide(8, 8)\ndef batch(): return {'input': torch.ones(4, 8)}\n"
#: The file, its imports, files beside it that are packages' or modules' -> its name.
NAMES: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "in a folder": ("model.py", "from layers import Wide", ("layers.py",), "model"),
    "by dots": ("pkg/model.py", "from .layers import Wide", ("pkg/__init__.py", "pkg/layers.py"), "pkg.model"),
    "by its name": ("pkg/model.py", "from pkg.layers import Wide", ("pkg/__init__.py", "pkg/layers.py"), "pkg.model"),
    "without __init__": ("pkg/model.py", "from .layers import Wide", ("pkg/layers.py",), "pkg.model"),
    "by name, without __init__": ("pkg/model.py", "from pkg.layers import Wide", ("pkg/layers.py",), "pkg.model"),
    "from a package around": ("pkg/sub/m.py", "from ..layers import Wide", ("pkg/layers.py",), "pkg.sub.m"),
    "named as its package": ("pkg/sub/pkg.py", "from pkg.layers import Wide", ("pkg/layers.py",), "pkg.sub.pkg"),
    "package in a folder of its name": ("pkg/m.py", "from pkg.layers import Wide", ("pkg/pkg/layers.py",), "m"),
    "a module of its folder's name": ("pkg/m.py", "from pkg import Wide", ("pkg/pkg.py",), "m"),
    "as an installed package": ("yaml.py", "from layers import Wide", ("layers.py",), "shardc_model_yaml"),
    "beside a folder of its name": (
        "m.py",
        "from m.layers import Wide",
        ("m/__init__.py", "m/layers.py"),
        "shardc_model_m",
    ),
}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and folders of the test are unknown after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.usefixtures("forgotten")
def test_a_model_file_is_a_module_that_other_processes_can_import(case: str, tmp_path: Path) -> None:
    file, imports, others, name = NAMES[case]
    for other in (file, *others):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text("" if "__init__" in other else LAYERS)
    (tmp_path / file).write_text(f"import torch\n{imports}\n{MADE}")
    if file == "yaml.py":  # loaded, it would be refused
        sys.modules.pop("yaml", None)
    build = model_file.load(str(tmp_path / file)).build()
    assert type(build).__name__ == "Wide"
    assert sys.modules[name].__file__ == str(tmp_path / file)
    assert name.startswith("shardc_model_") or importlib.util.find_spec(name).origin == str(tmp_path / file)  # type: ignore[union-attr]


@pytest.mark.usefixtures("forgotten")
def test_a_package_that_imports_its_model_file(tmp_path: Path) -> None:
    """Its classes are those of the file: workers get objects of them by name."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("from .model import model, Wide")
    (tmp_path / "pkg/layers.py").write_text(LAYERS)
    (tmp_path / "pkg/model.py").write_text(f"import torch\nfrom .layers import Wide\n{MADE}")
    module = model_file.imported(str(tmp_path / "pkg/model.py"))
    assert module.model is sys.modules["pkg"].model


FIXES = {
    "from layers import Wide\n": (
        "pkg/layers.py",
        "from pkg.base import Wide\n",
        "PYTHONPATH={} shardc ...: that folder",
    ),
    "from layers import Wide \n": (
        "pkg/layers.py",
        "from .base import Wide\n",
        "write `from .module import ...` in model.py",
    ),
    "import nowhere\n": ("pkg/layers.py", "", "pip install nowhere, or put that module beside model.py"),
}


@pytest.mark.parametrize("imports", FIXES)
@pytest.mark.usefixtures("forgotten")
def test_what_to_do_where_an_import_fails(imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, text, fix = FIXES[imports]
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/base.py").write_text(LAYERS)
    (tmp_path / other).write_text(text)
    (tmp_path / "pkg/model.py").write_text(f"import torch\n{imports}{MADE}")
    with pytest.raises(ShardcError) as e:
        model_file.load(str(tmp_path / "pkg/model.py"))
    assert fix.format(tmp_path) in e.value.fix
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShardcError, match=r"no model file pkg\.model(.|\n)*did you mean pkg/model\.py\?"):
        model_file.load("pkg.model")
