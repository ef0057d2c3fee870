"""`shardc generate` on real processes: texts and ids, on two ranks over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm

END = 63


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, and a tokenizer of the words w0, w1, ... <end>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("generate")
    words = [*(f"w{i}" for i in range(END)), "<end>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path / "m")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, eos_token_id=END))
    model.save_pretrained(path / "m")
    (path / "spec.yaml").write_text("shardc: 1\nmesh: {tp: 2}\nshard: {use: structure}\n")
    return path


def theirs(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder / "m")
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_texts_are_continued(folder: Path) -> None:
    args = ("--prompt", "w5 w6 w7", "--prompt", "w3", "--max-new-tokens", "6")
    done = warm.run("generate", "hf:m", "spec.yaml", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    wanted = [" ".join(f"w{i}" for i in (*p, *theirs(folder, p, 6))) for p in ([5, 6, 7], [3])]
    assert [
        line for line in done.stdout.splitlines() if line.startswith("w5 w6 w7 ") or line.startswith("w3 ")
    ] == wanted
    assert "12 tokens in " in done.stdout


def test_ids_are_drawn_the_same_on_other_meshes_and_end_with_stop_tokens(folder: Path) -> None:
    args = ("--ids", "5,6,7", "--ids", "3", "--temperature", "1", "--top-k", "9", "--json", "--max-new-tokens", "8")
    found = []
    for mesh in ("tp=2", "tp=1,dp=2"):
        done = warm.run("generate", "hf:m", "spec.yaml", *args, "--mesh", mesh, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["tokens"])
    assert found[0] == found[1]
    assert all(len(row) == 8 or row[-1] == END for row in found[0])
    third = found[0][0][2]
    done = warm.run("generate", "hf:m", "spec.yaml", *args, "--stop", f"w{third}", "--stop", "<end>", cwd=folder)
    cut = [row[: row.index(third) + 1] if third in row else row for row in found[0]]
    assert json.loads(done.stdout)["tokens"] == cut


WRONG = [
    (("--ids", "5,x"), "--ids: '5,x' are not token ids"),
    ((), "generate: there is no prompt"),
    (("--ids", "5", "--top-k", "3"), "temperature 0 does not sample"),
    (("--ids", "5", "--stop", "w1 w2"), "--stop: 'w1 w2' is 2 tokens"),
]


@pytest.mark.parametrize(("args", "error"), WRONG, ids=[e for _, e in WRONG])
def test_what_is_wrong_is_said_before_a_rank_starts(args: tuple[str, ...], error: str, folder: Path) -> None:
    done = warm.run("generate", "hf:m", "spec.yaml", *args, cwd=folder)
    assert done.returncode == 2
    assert error in done.stderr


def test_a_text_needs_a_tokenizer(folder: Path) -> None:
    done = warm.run("generate", "hf:m/config.json", "spec.yaml", "--prompt", "w1", cwd=folder)
    assert done.returncode == 2
    assert "there is no tokenizer in hf:m/config.json" in done.stderr
