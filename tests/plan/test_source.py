"""A model that is known by its config is not made again: neither torch nor transformers is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardc.cli import app
from shardc.plan.disk_cache import DiskCache
from shardc.plan.few_layers import Subject
from shardc.plan.installed import installed
from shardc.plan.source import Source

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
AGAIN = """
import sys
from shardc.cli import app
app(sys.argv[1:], standalone_mode=False)
print([name for name in ("torch", "transformers", "shardc.compile") if name in sys.modules], file=sys.stderr)
"""


def test_the_same_question_in_another_process_loads_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    asked = ["plan", f"hf:{config}", "--batch", "4", "--seq", "16", "--devices", "1", "--json"]
    first = CliRunner().invoke(app, asked)
    assert first.exit_code == 0, first.output
    second = subprocess.run([sys.executable, "-c", AGAIN, *asked], capture_output=True, text=True, check=True)
    one, other = json.loads(first.stdout), json.loads(second.stdout)
    assert one.pop("seconds") > 0
    assert other.pop("seconds") > 0
    assert one == other
    assert second.stderr.splitlines()[-1] == "[]"


def test_what_setuptools_brings_along_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = installed()
    for folder, counts in (("_vendor", False), ("site", True)):
        (tmp_path / folder / "thing-1.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
        assert (installed() != before) == counts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).square().mean()  # type: ignore[no-any-return]


def source(made_from: object, made: list[object]) -> Source:
    def make() -> Subject:
        made.append(made_from)
        return Subject.of(Net(), {"x": torch.ones(4, 8)})

    return Source(make, {"it": made_from} if made_from is not None else None)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_SOMETHING", "1")


def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Source.__module__], "installed", lambda: ["transformers-99.dist-info"])


def edited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Source.__module__], "_digests", lambda files: dict.fromkeys(files, "another"))


@pytest.mark.parametrize("change", [elsewhere, newer, edited])
def test_a_model_is_made_again_where_it_may_be_another(
    change: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, made = DiskCache(tmp_path), list[object]()
    known = source(1, made).fingerprint(disk)
    assert known is not None
    assert source(1, made).fingerprint(disk) == known
    assert made == [1]
    assert source(2, made).fingerprint(disk) == known  # the same model, of another config
    change(monkeypatch)
    assert source(1, made).fingerprint(disk) == known
    assert made == [1, 2, 1]


def test_code_of_the_users_runs_each_time(tmp_path: Path) -> None:
    disk, made = DiskCache(tmp_path), list[object]()
    assert source(None, made).fingerprint(disk) == source(None, made).fingerprint(disk)
    assert made == [None, None]
    assert not list(tmp_path.iterdir())
