"""A folder of transformers, and chats: `shardc run hf:DIR --data`, and what `shardc init` writes, run as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardc.cli import model_file
from shardc.spec import Spec
from tests import warm
from tests.features.text.chat_folder import PLAIN, TAGGED, tokenizer, write_chats, write_folder

SPEC = "shardc: 1\nmesh: {dp: 2}\n"
SIZES = ("--seq", "160", "--batch", "4")


def run(folder: Path, *args: str, fails: bool = False) -> Any:
    done = warm.run(*args, cwd=folder)
    assert done.returncode == (2 if fails else 0), done.stderr
    return done


def losses(folder: Path, *args: str) -> list[float]:
    found: list[float] = json.loads(run(folder, "run", *args, "--json").stdout)["losses"]
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_folder(folder / "base", TAGGED)
    write_chats(folder / "chats.jsonl", 60)
    (folder / "spec.yaml").write_text(SPEC)
    return folder


def test_a_folder_trains_on_chats_and_goes_on_on_another_mesh(base: Path) -> None:
    command = ("hf:base", "spec.yaml", "--data", "chats.jsonl", *SIZES)
    whole = losses(base, *command, "--steps", "6")
    first = losses(base, *command, "--steps", "3", "--save", "runs/a")
    rest = losses(base, *command, "--steps", "6", "--resume", "runs/a", "--mesh", "dp=1")
    assert first + rest == pytest.approx(whole, rel=1e-5), "the same rows, in the same order"
    done = run(base, "run", *command, "--steps", "6", "--resume", "runs/a", "--seq", "161", fails=True)
    assert "the checkpoint is in the middle of other data" in done.stderr


DATA = """
from pathlib import Path
from shardc import text
BASE, FILE = Path(__file__).parent / "base", Path(__file__).parent / "chats.jsonl"
def data(split):
    records = text.read(FILE)
    rows = {name: text.chats(records[part::3], BASE, 160) for part, name in enumerate(("one", "two", "held"))}
    if split == "train":
        return text.mix({n: rows[n] for n in ("one", "two")}, {"one": 0.7, "two": 0.3})
    return {"one": rows["one"], "held": rows["held"]}
"""


def test_a_folder_trains_on_a_python_file_and_each_held_out_set_has_its_loss(base: Path) -> None:
    (base / "more.py").write_text(DATA)
    command = ("hf:base", "spec.yaml", "--data", "more.py", "--batch", "4")
    done = run(base, "run", *command, "--steps", "2", "--log", "log", "--eval-every", "1", "--tensorboard")
    assert re.search(r"data: a mix: one 70% \(20 conversations.*; two 30%", done.stdout)
    assert re.search(r"held-out data: one: 20 conversations.*; held: 20 conversations", done.stdout)
    assert re.search(r"held-out loss [\d.]+  one/loss [\d.]+  held/loss [\d.]+", done.stdout)
    for line in map(json.loads, (base / "log" / "steps.jsonl").read_text().splitlines()):
        of_sets = line["held_out_outputs"]
        assert of_sets.keys() == {"one/loss", "held/loss"}
        assert line["held_out"] == pytest.approx(sum(of_sets.values()) / 2)
    assert list((base / "log").glob("events.out*"))
    (base / "none.py").write_text("x = 1\n")
    done = run(base, "run", "hf:base", "spec.yaml", "--data", "none.py", fails=True)
    assert "none.py: the file has no data()" in done.stderr


@pytest.mark.parametrize("kind", ["chats", "texts", "without positions"])
def test_what_init_writes_runs_as_it_is(kind: str, tmp_path: Path) -> None:
    if kind == "without positions":
        from transformers import BloomConfig, BloomForCausalLM

        torch.manual_seed(0)
        bloom = BloomConfig(vocab_size=384, hidden_size=32, n_layer=1, n_head=4)
        BloomForCausalLM(bloom).save_pretrained(tmp_path / "base")
        tokenizer(PLAIN).save_pretrained(tmp_path / "base")
    else:
        write_folder(tmp_path / "base", PLAIN if kind == "chats" else None)
    done = run(tmp_path, "init", "hf:base", "tune", "--batch", "4", "--seq", "128")
    names = ["model.py", "spec.yaml", "texts.jsonl" if kind == "texts" else "chats.jsonl"]
    assert sorted(x.name for x in (tmp_path / "tune").iterdir()) == sorted(names)
    assert done.stdout.endswith("train with: shardc run tune/model.py tune/spec.yaml\n")
    done = run(tmp_path / "tune", "compile", "model.py", "spec.yaml", "-o", "out")
    assert "proven equal to one device" in done.stdout
    done = run(tmp_path / "tune", "run", "model.py", "spec.yaml", "--steps", "2")
    assert "held-out loss" in done.stdout
    assert (tmp_path / "tune" / "runs" / "a" / "model.safetensors").is_file()
    done = run(tmp_path, "init", "hf:base", "tune", fails=True)
    assert f"tune has {', '.join(names)} already\n  fix: name another folder" in done.stderr


def test_each_line_of_the_written_spec_that_is_a_comment_is_a_setting(tmp_path: Path) -> None:
    write_folder(tmp_path / "base")
    write_chats(tmp_path / "mine.jsonl", 3)
    run(tmp_path, "init", "hf:base", "--data", "mine.jsonl")
    assert f'DATA = "{(tmp_path / "mine.jsonl").resolve()}"' in (tmp_path / "model.py").read_text()
    written = (tmp_path / "spec.yaml").read_text()
    settings = re.findall(r"^# (.*)$", written, re.MULTILINE)
    assert len(settings) == 6
    for setting in settings:
        Spec.load(yaml.safe_load(written) | yaml.safe_load(setting))


def test_weights_of_few_bits_get_a_precision(tmp_path: Path) -> None:
    write_folder(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    run(tmp_path, "init", "hf:base")
    assert "\nprecision: {params: float32, compute: bfloat16}" in (tmp_path / "spec.yaml").read_text()


def test_what_init_and_data_refuse(base: Path) -> None:
    assert "fix: write hf:base" in run(base, "init", "base", fails=True).stderr
    (base / "model.py").write_text("def model(): ...\n")
    done = run(base, "run", "model.py", "spec.yaml", "--data", "chats.jsonl", fails=True)
    assert "--batch, --seq and --data belong to hf: models" in done.stderr
    done = run(base, "run", "hf:base", "spec.yaml", "--data", "chat.jsonl", fails=True)
    assert "there is no file" in done.stderr
    assert "chats.jsonl" in done.stderr
    done = run(base, "run", "hf:base", "spec.yaml", "--data", "more.py", "--seq", "64", fails=True)
    assert "error --seq: the rows of a Python file have their own length" in done.stderr


def test_a_model_with_a_convolution_is_noted_where_rows_are_packed(tmp_path: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = Lfm2Config(vocab_size=384, num_hidden_layers=2, layer_types=["conv", "full_attention"], **small)
    Lfm2ForCausalLM(made).save_pretrained(tmp_path / "base")
    tokenizer(TAGGED).save_pretrained(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", 8)
    (tmp_path / "spec.yaml").write_text(SPEC)
    done = run(tmp_path, "compile", "hf:base", "spec.yaml", "--data", "chats.jsonl", *SIZES)
    assert "this convolution, and a scan after it, run from one sequence into the next" in done.stdout + done.stderr


def test_rows_are_as_long_as_the_model_reads_and_one_of_twenty_is_held_out(base: Path) -> None:
    file = model_file.load(f"hf:{base / 'base'}", data=str(base / "chats.jsonl"))
    assert file.batch["input_ids"].shape == (8, 256)
    assert file.data is not None
    assert (file.data("train").counts["read"], file.data("valid").counts["read"]) == (57, 3)


def test_init_tries_the_first_record(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", None)
    write_chats(tmp_path / "mine.jsonl", 3)
    done = run(tmp_path, "init", "hf:base", "new", "--data", "mine.jsonl", fails=True)
    assert "the tokenizer has no chat template" in done.stderr
    assert not (tmp_path / "new").exists()
    write_folder(tmp_path / "with")
    (tmp_path / "mine.jsonl").write_text('{"msgs": []}\n')
    done = run(tmp_path, "init", "hf:with", "new", "--data", "mine.jsonl", fails=True)
    assert "mine.jsonl:1: this is no conversation: it has msgs" in done.stderr


def test_the_learning_rate_of_what_init_writes_is_an_option(tmp_path: Path) -> None:
    write_folder(tmp_path / "base")
    run(tmp_path, "init", "hf:base", "--batch", "4", "--seq", "64")
    done = run(tmp_path, "run", "model.py", "spec.yaml", "--steps", "1", "--lr", "0.5")
    assert "AdamW, lr 0.5" in done.stdout
