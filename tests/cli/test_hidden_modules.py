"""Files named as a module that shardc imports are refused by name; other files are not."""

from __future__ import annotations

import sys
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
