"""`shardc run` with a spec that has adapters: saved as peft's, gone on with, begun from, exported merged."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardc.cli import app
from tests.cli.test_weights import llama, run

SPEC = """
shardc: 1
mesh: {dp: 1, tp: 2}
shard: {use: model}
adapters: [{match: "*.{q,v}_proj", rank: 4, alpha: 8, dropout: 0.05}]
"""


def test_saved_resumed_begun_from_and_merged(tmp_path: Path) -> None:
    llama(tmp_path / "pre")
    (tmp_path / "spec.yaml").write_text(SPEC)
    what = ("hf:pre", "spec.yaml", "--batch", "4", "--seq", "16")
    said = run(tmp_path, *what, "--steps", "2", "--save", "a")
    assert "of them frozen" in said
    assert "adapters: with their initial values" in said
    assert "load it with peft" in said
    said = run(tmp_path, *what, "--steps", "3", "--save", "a", "--resume", "a", "--mesh", "dp=2,tp=1")
    assert "1 steps in" in said
    (tmp_path / "adapters").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(tmp_path / "a" / name, tmp_path / "adapters" / name)
    said = run(tmp_path, *what, "--steps", "0", "--weights", "adapters", "--save", "b")
    assert "adapters: 8 tensors of" in said
    a, b = (load_file(tmp_path / x / "adapter_model.safetensors") for x in "ab")
    assert len(a) == 8
    assert all(torch.equal(a[n], x) for n, x in b.items())

    invoked = CliRunner().invoke(app, ["export", f"hf:{tmp_path / 'pre'}", str(tmp_path / "a"), str(tmp_path / "m")])
    assert invoked.exit_code == 2
    assert "lora_A.weight, which the model lacks" in invoked.output
    more = ["--spec", str(tmp_path / "spec.yaml"), "--merge"]
    for saved, merged in (("a", "m"), ("b", "n")):
        folders = [f"hf:{tmp_path / 'pre'}", str(tmp_path / saved), str(tmp_path / merged)]
        invoked = CliRunner().invoke(app, ["export", *folders, *more])
        assert invoked.exit_code == 0, invoked.output
    auto = transformers.AutoModelForCausalLM
    before, after, begun_from = (auto.from_pretrained(tmp_path / x).state_dict() for x in ("pre", "m", "n"))
    assert all(torch.equal(x, begun_from[n]) for n, x in after.items())  # the model's own weights, too
    changed = {n for n, x in before.items() if not torch.equal(x, after[n])}
    assert changed == {n for n in before if n.endswith(("q_proj.weight", "v_proj.weight"))}
    name = "model.layers.0.self_attn.q_proj"
    low = a[f"base_model.model.{name}.lora_B.weight"] @ a[f"base_model.model.{name}.lora_A.weight"]
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + 2 * low)
