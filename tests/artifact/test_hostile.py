"""Compiled folders that somebody made to do harm are refused with a place, or proven to be what they were.
`make hostile` tries many, with times and memory (tests/artifact/hostile.py).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import shardc
from shardc.artifact import folder_files, parser
from shardc.artifact.program_ops import OF_TORCH
from shardc.errors import ShardcError
from tests import harm
from tests.artifact import hostile

EVERY = 5  # of the fixed ones, in the suite


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return hostile.originals(tmp_path_factory.mktemp("artifacts"))


def test_folders_that_nobody_changed_load_and_are_proven(originals: list[Path]) -> None:
    """Else hostile ones would be refused for another reason."""
    for folder in originals:
        assert hostile.tried(folder, harm.Watch(folder)) == "proven"


def test_a_sample_of_hostile_folders(originals: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(originals[0].parent)
    found: Counter[str] = Counter()
    for folder in originals:
        shardc.load(folder)  # what is imported on the first call is no harm
    for i, (name, attack, which) in enumerate(hostile.every(100)):
        if not name[0].isdigit() and i % EVERY:
            continue
        folder = hostile.attacked(attack, originals[which])
        seen = harm.Watch(folder, Path(shardc.__file__).parent)
        found[hostile.tried(folder, seen).partition(":")[0]] += 1
        assert not seen.harm, f"{name}: {seen.harm}"
    assert not (originals[0].parent / "RAN").exists()
    assert found["refused"] > 150
    assert found["refused"] > 4 * (found["proven"] + found["not proven"])


def test_what_the_watch_notices(tmp_path: Path) -> None:
    """A test of harm that notices nothing would pass always."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").touch()
    (tmp_path / "out").touch()

    def reads(path: Path, mode: str = "r") -> str:
        with harm.Watch(tmp_path / "in") as seen, path.open(mode):
            pass
        return seen.harm

    assert not reads(tmp_path / "in" / "x")
    assert reads(tmp_path / "out").startswith("open")
    assert reads(tmp_path / "in" / "x", "a").startswith("open")
    with harm.Watch(tmp_path) as seen:
        exec("1")
    assert seen.harm.startswith("exec")


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten.empty_like.default", ""),
        ("torch.ops.prim.Print.default", "takes something else|nothing has registered|returns nothing"),
        ("aten.native_layer_norm_backward.default", "has no rule"),
        ("aten.from_file.default", "opens a file"),
        ("aten.is_nonzero.default", "gives something else than tensors"),
        ("aten.add_.Tensor", "changes its arguments"),
        ("torch.ops.c10d.barrier.default", "takes something else than tensors and numbers"),
    ],
)
def test_ops_are_those_that_a_rule_knows_and_that_only_compute(op: str, why: str, originals: list[Path]) -> None:
    attack = hostile._line(lambda line: re.sub(r" = [\w.]+\(", f" = {op}(", line), 2)
    folder = hostile.attacked(attack, originals[1])
    if not why:
        assert shardc.load(folder)
        return
    with pytest.raises(ShardcError, match=why) as caught:
        shardc.load(folder)
    assert re.search(r"stage0\.py:\d+$", caught.value.where)


def test_lowered_halves_call_backward_ops_that_have_no_rule(originals: list[Path]) -> None:
    text = (originals[2] / "stage0_backward.py").read_text()
    assert "_backward" in text
    assert shardc.load(originals[2]).stages[0].joint is not None


@pytest.mark.parametrize("unknown", ["error", "replicate"])
def test_ops_without_a_rule_where_the_spec_lets_them_run_whole(unknown: str, originals: list[Path]) -> None:
    def attack(folder: Path) -> None:
        hostile._line(lambda line: re.sub(r" = [\w.]+\(", " = aten.native_layer_norm_backward.default(", line), 2)(
            folder
        )
        spec = folder / "spec.yaml"
        spec.write_text(f"{spec.read_text()}\nunknown_ops: {unknown}\n")

    folder = hostile.attacked(attack, originals[1])
    if unknown == "replicate":
        assert shardc.load(folder)
    else:
        with pytest.raises(ShardcError, match="has no rule"):
            shardc.load(folder)


def test_a_table_of_too_many_values_is_refused_before_it_is_made(originals: list[Path]) -> None:
    many = hostile._bytes("layouts.json", b"[" + b"[]," * folder_files.VALUES + b"[]]")
    folder = hostile.attacked(many, originals[0])
    with harm.Watch(folder) as seen, pytest.raises(ShardcError, match="more than the 500,000 of any program"):
        shardc.load(folder)
    assert seen.nbytes < 16 << 20


def test_lines_are_read_one_by_one(originals: list[Path]) -> None:
    """A wrong line is refused before anything is made of the million behind it."""

    def attack(folder: Path) -> None:
        path = folder / "stage0.py"
        text = path.read_text()
        path.write_text(text.replace("):\n", "):\n    import os\n", 1) + "    a = (1, 2, 3, 4, 5)\n" * 500_000)

    folder = hostile.attacked(attack, originals[0])
    with harm.Watch(folder) as seen, pytest.raises(ShardcError, match="import os"):
        shardc.load(folder)
    assert seen.nbytes < 120 << 20


@pytest.mark.parametrize(
    ("comment", "module", "line", "code"),
    [
        ("# h.0 (a.py:3): x = f(y)", "h.0", "a.py:3", "x = f(y)"),
        ("# · (a.py:3)", "", "a.py:3", ""),
        ("# a (b) c (d)", "a", "b) c (d", ""),
        ("# a (b): c (d)", "a", "b", "c (d)"),
    ],
)
def test_sources_in_comments(comment: str, module: str, line: str, code: str) -> None:
    found = parser.source_of_text(comment)
    assert found is not None
    assert (found.module, found.line, found.code) == (module, line, code)


def test_every_entry_of_a_table_that_is_otherwise_is_named(originals: list[Path]) -> None:
    def attack(folder: Path) -> None:
        path = folder / "layouts.json"
        table = json.loads(path.read_text())
        table["params"][1]["order"] = "first"
        table["params"][3]["requires_grad"] = 1
        path.write_text(json.dumps(table))

    folder = hostile.attacked(attack, originals[0])
    with pytest.raises(ShardcError) as caught:
        shardc.load(folder)
    assert [e.what.partition(":")[0] for e in caught.value.errors] == ["params[1].order", "params[3].requires_grad"]
    assert {e.where for e in caught.value.errors} == {str(folder / "layouts.json")}


def test_a_graph_of_a_step_that_returns_what_a_stage_does(originals: list[Path]) -> None:
    def attack(folder: Path) -> None:
        (folder / "stage0_forward.py").write_bytes((folder / "stage0.py").read_bytes())

    with pytest.raises(ShardcError, match="does not return the loss, and what the tables list beside it") as caught:
        shardc.load(hostile.attacked(attack, originals[2]))
    assert caught.value.where.endswith("stage0_forward.py")


def test_namespaces_of_torch_are_words() -> None:
    """A missing comma once spread one into its letters, each of which may be a user's namespace."""
    assert {"xnnpack", "c10d", "quantized"} <= OF_TORCH
    assert min(map(len, OF_TORCH)) > 2
