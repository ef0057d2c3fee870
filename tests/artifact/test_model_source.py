"""What of the user's source a compiled folder keeps, and which changes of it are seen."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from torch import nn

import shardc
from shardc.api import Program
from shardc.artifact import model_source
from shardc.cli import common, model_file
from shardc.cli.options import Named
from shardc.errors import ShardcError

MODEL = """
import torch
from layers import Block
SCALE = 2.0

class Net(Block):
    \"\"\"A net.\"\"\"
    def forward(self, x):
        data = super().forward(x)
        return scaled(data)

def scaled(x): return x * SCALE

def model(): return Net(8)

def loss(output, batch): return output.square().mean()

class Samples(torch.utils.data.Dataset):
    def __len__(self): return 8

def data(split): return Samples()
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
def batch(): return {"x": torch.ones(4, 8)}
"""
LAYERS = """
from torch import nn
WIDTH = 3
UNUSED = 1
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, WIDTH)
    def forward(self, x):
        return self.up(x)
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 2}\n")
    yield tmp_path
    sys.modules.pop("layers", None)


def recorded(ref: str = "net.py") -> model_source.Digests:
    file = model_file.load(ref)
    main = model_file.source_of(file.ref)
    names = [(main, name) for name in model_file.captured(file.ref)]
    return model_source.digests(main, [*names, *model_source.origins(file.on_meta(), file.loss)])


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        ("net.py", "output.square()", "output.abs()", ["loss of net.py"]),
        ("net.py", "data = super", "data = 2 * super", ["Net of net.py"]),
        ("net.py", "x * SCALE", "x + SCALE", ["scaled of net.py"]),
        ("net.py", "SCALE = 2.0", "SCALE = 3.0", ["SCALE of net.py"]),
        ("net.py", "def model(): return Net(8)", "def model(): return Net(9)", ["model of net.py"]),
        ("net.py", "def batch()", "Net.forward = lambda self, x: x\ndef batch()", ["Net of net.py"]),
        ("layers.py", "self.up(x)", "-self.up(x)", ["Block of layers.py"]),
        ("layers.py", "WIDTH = 3", "WIDTH = 4", ["WIDTH of layers.py"]),
        # what training takes from the file of today, and what changes nothing
        ("net.py", "return 8", "return 9", []),
        ("net.py", "return Samples()", "return None", []),
        ("net.py", "lr=0.1", "lr=0.2", []),
        ("net.py", "torch.ones(4, 8)", "torch.ones(4, 8) * 2", []),
        ("net.py", "A net.", "A good net.", []),
        ("net.py", "def scaled(x): return x * SCALE", "# scaled\ndef scaled(x):\n  return x*SCALE", []),
        ("layers.py", "UNUSED = 1", "UNUSED = 2", []),
        ("net.py", "def batch()", "print(Net, SCALE)\ndef batch()", []),
    ],
)
def test_a_change_is_seen_where_forward_or_loss_reach(
    files: Path, file: str, old: str, new: str, seen: list[str]
) -> None:
    before = recorded()
    text = (files / file).read_text()
    assert old in text
    (files / file).write_text(text.replace(old, new))
    assert model_source.changed(before, files / "net.py") == seen


def test_a_folder_that_went_stale_is_not_run_and_is_noted_elsewhere(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common.program_of(Named("net.py", Path("spec.yaml"), as_json=True)).save("out")

    def program(as_compiled: bool = False) -> None:
        common.program_of(Named("out"), as_compiled=as_compiled)

    program()
    (files / "net.py").write_text(MODEL.replace("output.square()", "output.abs()"))
    with pytest.raises(ShardcError, match=r"loss of net.py changed since this was compiled") as e:
        program()
    assert "shardc compile net.py SPEC -o out" in e.value.fix
    assert "--as-compiled" in e.value.fix
    assert "note" not in capsys.readouterr().err
    program(as_compiled=True)
    assert "note: out: loss of net.py changed since" in capsys.readouterr().err


@pytest.mark.parametrize(("use", "seen"), [("WIDTH", False), ("layers.UNUSED", True), ("len(vars(layers))", True)])
def test_of_an_imported_module_what_is_used_counts(files: Path, use: str, seen: bool) -> None:
    text = MODEL.replace("import torch\n", "import torch\nimport layers\nfrom layers import WIDTH\n")
    (files / "net.py").write_text(text.replace("output.square().mean()", f"output.mean() * {use}"))
    before = recorded()
    (files / "layers.py").write_text(LAYERS.replace("UNUSED = 1", "UNUSED = 2"))
    assert bool(model_source.changed(before, files / "net.py")) == seen


def test_nothing_is_compared_where_another_python_compiled_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may write the same code otherwise."""
    common.program_of(Named("net.py", Path("spec.yaml"), as_json=True)).save("out")
    manifest = files / "out" / "manifest.json"
    recorded = json.loads(manifest.read_text())
    recorded["meta"]["source"]["python"] = [3, 1]
    manifest.write_text(json.dumps(recorded))
    (files / "net.py").write_text(MODEL.replace("output.square()", "output.abs()"))
    common.program_of(Named("out"))
    assert "changed" not in capsys.readouterr().err


def test_another_model_file_need_not_have_what_was_compiled(files: Path) -> None:
    before = recorded()
    (files / "other.py").write_text(MODEL.replace("def loss(output, batch): return output.square().mean()", ""))
    assert model_source.changed(before, files / "other.py", other=True) == []
    assert model_source.changed(before, files / "other.py") == ["loss of other.py"]


def compiled(files: Path) -> Program:
    """In Python, as a script that imports its model would."""
    file = model_file.load("net.py")
    return shardc.compile(file.on_meta(), file.batch, "spec.yaml", loss=file.loss, prove=False)


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        ("net.py", "output.square()", "output.abs()", "loss of net.py"),
        ("net.py", "x * SCALE", "x + SCALE", "scaled of net.py"),
        ("layers.py", "self.up(x)", "-self.up(x)", "Block of layers.py"),
        # in Python nothing says what makes the model
        ("net.py", "def model(): return Net(8)", "def model(): return Net(9)", ""),
        ("net.py", "lr=0.1", "lr=0.2", ""),
    ],
)
def test_a_program_of_python_is_noted_where_its_source_changed(
    files: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, seen: str
) -> None:
    compiled(files).save("out")
    shardc.load("out").save("again")
    (files / file).write_text((files / file).read_text().replace(old, new))
    assert capsys.readouterr().err == ""
    for folder in ("out", "again"):
        shardc.load(folder)
        told = capsys.readouterr().err
        assert told.startswith(f"note: {folder}: {seen} changed since this was compiled") if seen else not told
    shardc.load("out", as_compiled=True)
    assert capsys.readouterr().err == ""


def test_the_note_is_the_first_ranks(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(files).save("out")
    (files / "net.py").write_text(MODEL.replace("output.square()", "output.abs()"))
    monkeypatch.setenv("RANK", "1")
    shardc.load("out")
    assert capsys.readouterr().err == ""


def test_what_is_defined_inside_of_a_function_has_no_digest() -> None:
    """A script's main() holds all that trains, too."""

    class Inside(nn.Module):
        pass

    assert model_source.origins(Inside(), lambda output, batch: output) == ()
    (place,) = model_source.origins(nn.Linear(2, 2), functools.partial(compiled))
    assert place == (Path(__file__).resolve(), "compiled")
