"""`shardc run` from pretrained weights, on processes: where it begins is what the files hold, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardc.cli import app
from tests import warm
from tests.cli.test_cli import MODEL as MLP
from tests.runtime.state.test_pretrained import FAMILIES, SPECS, family

MODEL = (
    MLP
    + """
weights = "w.pt"

def model():
    net = Net()
    net.up.bias.requires_grad_(False)
    return net
"""
)
SPEC = "shardc: 1\nmesh: {tp: 2}\nshard: {use: structure}\n"


def run(folder: Path, *args: str) -> str:
    done = warm.run("run", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def llama(folder: Path) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def test_a_folder_of_the_hub_is_trained_from_its_weights(folder: Path) -> None:
    model = llama(folder / "pre")
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    expected = float(model(input_ids=ids, labels=ids).loss.detach())
    (folder / "pre" / "tokenizer_config.json").write_text("{}")
    said = run(
        folder, "hf:pre", "spec.yaml", "--batch", "4", "--seq", "16", "--steps", "1", "--save", "log", "--log", "log"
    )
    assert f"weights: 21 tensors of {folder / 'pre'} (safetensors)" in said
    first = json.loads((folder / "log" / "steps.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert "load them with transformers: from_pretrained('log')" in said
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "log").state_dict()
    args = ["export", f"hf:{folder / 'pre'}", str(folder / "log"), str(folder / "out"), "--dtype", "bfloat16"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert {"config.json", "tokenizer_config.json"} <= {f.name for f in (folder / "out").iterdir()}
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    assert all(torch.equal(again[n], x.to(torch.bfloat16)) for n, x in exported.items())
    done = CliRunner().invoke(app, ["export", f"hf:{folder / 'pre'}", str(folder / "pre"), str(folder / "out")])
    assert "there is no checkpoint in" in done.stderr.replace("\n", " ")


FORMS = ("one file", "many files", "tied")
#: Each family with another mesh and form of files; `tried` takes any.
ROWS = [(name, (*SPECS,)[i % 3], FORMS[(i + i // 3) % 3]) for i, name in enumerate(FAMILIES)]


def tried(folder: Path, name: str, axis: str, form: str) -> None:
    """In from a folder of transformers, a step, and out to from_pretrained, by the command alone. The loss of the first
    step is that of the plain model, and logits of what comes out are those of a plain model after such a step.
    """
    model = family(name, tied=form == "tied")
    model.save_pretrained(folder / "pre", max_shard_size="30KB" if form == "many files" else "5GB")  # type: ignore[operator]
    (folder / "spec.yaml").write_text(json.dumps(SPECS[axis]))  # JSON is YAML
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    options = ("--batch", "4", "--seq", "16", "--steps", "1", "--save", "out", "--log", "out")
    run(folder, "hf:pre", "spec.yaml", *options)
    first = json.loads((folder / "out" / "steps.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.optim.AdamW(model.parameters(), lr=3e-4).step()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    assert type(again) is type(model)
    with torch.no_grad():
        # Adam's first step is the gradient's sign: where that is rounding alone, a number may go either way by 3e-4
        torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, rtol=0, atol=5e-3)


@pytest.mark.parametrize(("name", "axis", "form"), ROWS)
def test_families_in_and_out(name: str, axis: str, form: str, tmp_path: Path) -> None:
    tried(tmp_path, name, axis, form)


def test_a_model_file_names_its_weights_and_an_option_names_others(folder: Path) -> None:
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    model: torch.nn.Module = scope["model"]()  # type: ignore[operator]
    batch: dict[str, torch.Tensor] = scope["batch"]()  # type: ignore[operator]
    torch.save(model.state_dict(), folder / "w.pt")
    said = run(folder, "model.py", "spec.yaml", "--steps", "2", "--save", "a", "--log", "a")
    assert "16 of them frozen" in said
    assert f"weights: 4 tensors of {folder / 'w.pt'} (torch)" in said
    first, _ = (json.loads(line) for line in (folder / "a" / "steps.jsonl").read_text().splitlines())
    assert first["loss"] == pytest.approx(float(model(**batch).detach()), rel=1e-5)
    said = run(folder, "model.py", "spec.yaml", "--steps", "0", "--weights", "a", "--mesh", "tp=1")
    assert f"weights: 4 tensors of {folder / 'a'} (checkpoint)" in said


def test_a_folder_of_weights_is_not_saved_over(folder: Path) -> None:
    (folder / "pre").mkdir()
    save_file({"a": torch.ones(1)}, there := folder / "pre" / "model.safetensors")
    before = there.read_bytes()
    args = ["run", str(folder / "model.py"), str(folder / "spec.yaml"), "--save", str(folder / "pre")]
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2
    said = " ".join(found.stderr.split())
    assert "the weights in model.safetensors were not written by shardc, and would be replaced" in said
    assert "add --overwrite" in said
    assert there.read_bytes() == before
    torch.save({"up.bias": torch.zeros(16)}, folder / "w.pt")
    run(folder, "model.py", "spec.yaml", "--steps", "0", "--save", "pre", "--overwrite")
    assert "up.weight" in load_file(there)


def test_weights_that_are_not_there(folder: Path) -> None:
    (folder / "empty").mkdir()
    args = ["run", str(folder / "model.py"), str(folder / "spec.yaml"), "--weights", str(folder / "empty")]
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2
    assert "there are no weights at this path" in found.stderr.replace("\n", " ")
