"""The recipes of examples/, at tiny sizes: each equals one device, or gives what its page says."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

import shardc
from examples import distill, dit, dpo, pretrain, vit
from tests import zoo
from tests.equality import assert_equal, gathered

ROOT = Path(__file__).parents[1] / "examples"


def rows(module: Any) -> Any:
    """The first global batch of a file's training data."""
    samples = module.data("train")
    make = getattr(module, "collate", default_collate)
    return make([samples[i] for i in range(next(iter(module.batch().values())).shape[0])])


def wide(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve files as tokens."""
    for name, number in (("FILES", 10), ("HELD_OUT", 2), ("READ", 4), ("VOCAB", 300), ("FOLDER", tmp_path / "tokens")):
        monkeypatch.setattr(pretrain, name, number)
    monkeypatch.setattr(pretrain, "files", lambda: sorted((ROOT.parent / "docs" / "how-to").glob("*.md"))[:12])
    pretrain.prepare(pretrain.FOLDER)
    return pretrain.FOLDER


def test_tokens_are_made_once(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f.name: f.stat().st_mtime_ns for f in tokens.iterdir()}
    first = pretrain.prepare(tokens)
    assert {f.name: f.stat().st_mtime_ns for f in tokens.iterdir()} == made
    assert len(np.memmap(tokens / "train.bin", np.uint16)) == first["train"]
    monkeypatch.setattr(pretrain, "VOCAB", 299)
    assert pretrain.prepare(tokens)["digest"] != first["digest"]
    (tokens / "valid.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"valid.bin is not what tokens.json says"):
        pretrain.data("valid")


MODELS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "pretrain": (pretrain, pretrain.model),
    "distill": (distill, lambda: distill.Distillation(distill.llama(1, 16), distill.llama(1, 32))),
    "dpo": (dpo, lambda: dpo.Preference(dpo.llama(1, 16))),
    "vit": (vit, vit.OfTransformers),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("tokens")
def test_a_step_is_that_of_one_device(name: str) -> None:
    """In float64, by the example's own spec: nothing as large as logits is gathered."""
    module, make = MODELS[name]
    batch = wide(rows(module))
    with zoo.Wide():
        torch.manual_seed(0)
        model = make()
        model.double()
        loss = getattr(module, "loss", None)
        program = shardc.compile(model, batch, str(ROOT / f"{name}.yaml"), loss=loss)
        assert gathered(program) == []
        assert not [c for s in program.stages for c in s.graph.nodes if "all_gather" in str(c.target)]
        output = model(**{k: x for k, x in batch.items() if k != "label"})
        want = loss(output, batch)[0] if loss else getattr(output, "loss", output)
        want.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_equal(shardc.simulate(program, model, batch), want.detach(), grads)


def test_scores_replace_a_reference() -> None:
    """The log-probabilities of the reference, computed forward only on a mesh, give the same loss and gradients."""
    batch = rows(dpo)
    with zoo.Wide():
        torch.manual_seed(0)
        model = dpo.Preference(dpo.llama(1, 16)).double()
        for p in model.reference.parameters():
            p.data.mul_(1.1)
        want = model(**batch)
        want.backward()
        ids = torch.cat([batch["chosen"], batch["rejected"]])
        answer = torch.cat([batch["chosen_answer"], batch["rejected_answer"]])

        class Reference(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model.reference

            def forward(self, ids: Tensor, answer: Tensor) -> Tensor:
                return dpo.log_probability(self.model, ids, answer)

        spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"*.lm_head": "column"}}
        program = shardc.compile(Reference(), {"ids": ids, "answer": answer}, spec, forward=True)
        values = shardc.simulate(program, Reference(), {"ids": ids, "answer": answer}).outputs["output"]
        scored = {**batch, "reference": values.view(2, -1).t().contiguous()}
        policy = dpo.Scored(model.policy)
        program = shardc.compile(policy, scored, {"shardc": 1, "mesh": {"dp": 2}, "loss": {"chunks": 2}})
        grads = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
        assert_equal(shardc.simulate(program, policy, scored), want.detach(), grads)


def test_noise_is_the_same_on_every_mesh() -> None:
    batch = wide(rows(dit))
    with zoo.Wide():
        torch.manual_seed(0)
        model = dit.DiT(layers=2).double()
        for block in model.blocks:  # as they begin, they do nothing
            nn.init.normal_(block.condition.weight, std=0.1)
        meshes = [str(ROOT / "dit.yaml"), {"shardc": 1, "mesh": {"dp": 1}}]
        four, one = (shardc.simulate(shardc.compile(model, batch, spec), model, batch) for spec in meshes)
        assert_equal(four, one.loss, one.grads)
        assert len(one.grads) == len(list(model.parameters()))


def test_a_vit_of_timm() -> None:
    timm = pytest.importorskip("timm")
    batch = wide(rows(vit))
    model = vit.model().double()
    assert isinstance(model, timm.models.vision_transformer.VisionTransformer)
    program = shardc.compile(model, batch, str(ROOT / "vit.yaml"), loss=vit.loss)
    want, _ = vit.loss(model(batch["x"]), batch)
    want.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(shardc.simulate(program, model, batch), want.detach(), grads)


def test_the_notebook_runs() -> None:
    """Its cells, one after the other; it holds no outputs, which would grow old."""
    cells = json.loads((ROOT / "simulate.ipynb").read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert not any(c["outputs"] or c["execution_count"] for c in code)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for i, cell in enumerate(code):
            exec(compile("".join(cell["source"]), f"simulate.ipynb, cell {i}", "exec"), names)
    assert names["program"].mesh.world == 8
    assert "all_reduce   tp   backward" in printed.getvalue()


def run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_loop_before_and_after(tmp_path: Path) -> None:
    """At most 15 lines are new or changed, and the numbers stay: losses, held-out losses and the averaged weights.

    Without autocast, whose rounding depends on the mesh.
    """
    before, after = ((ROOT / f"loop_{name}.py").read_text() for name in ("before", "after"))
    changed = [d for d in difflib.ndiff(before.splitlines()[1:], after.splitlines()[1:]) if d[:2] == "+ " and d[2:]]
    assert 8 < len(changed) <= 15, changed
    for name, text in (("before", before), ("after", after)):
        (tmp_path / f"loop_{name}.py").write_text(text.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)"))
    (tmp_path / "loop.yaml").write_text((ROOT / "loop.yaml").read_text().replace("precision: {compute: bfloat16}", ""))
    (tmp_path / "gpt.py").write_text((ROOT / "gpt.py").read_text())
    steps = ["--steps", "3", "--out"]
    run(str(tmp_path / "loop_before.py"), *steps, str(tmp_path / "one"))
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "4", str(tmp_path / "loop_after.py")]
    run(*ranks, *steps, str(tmp_path / "four"), OMP_NUM_THREADS="1")
    one, four = (torch.load(tmp_path / name / "run.pt") for name in ("one", "four"))
    for key in ("losses", "held_out"):
        assert four[key] == pytest.approx(one[key], rel=1e-5)
    assert len(one["losses"]) == 3
    assert four["average"].keys() == one["average"].keys()
    for name, x in one["average"].items():
        torch.testing.assert_close(four["average"][name], x, rtol=1e-3, atol=1e-4)
    assert list((tmp_path / "four").glob("events.out*"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls transformers' older names
def test_pretraining_resumes_and_its_folder_is_fine_tuned(tokens: Path, tmp_path: Path) -> None:
    """On processes: 2 steps on four ranks and 1 more on two; then LoRA of the folder, which peft loads."""
    peft = pytest.importorskip("peft")
    shard = ["-m", "shardc", "run", str(ROOT / "pretrain.py"), str(ROOT / "pretrain.yaml"), "--save"]
    small = {"TOKENS": str(tokens), "OMP_NUM_THREADS": "1"}
    base = str(tmp_path / "base")
    run(*shard, base, "--steps", "2", **small)
    printed = run(*shard, base, "--steps", "3", "--mesh", "dp=1,tp=2", "--auto-resume", "--json", **small)
    assert json.loads(printed)["steps"] == 1
    for file in tokens.glob("tokenizer*"):
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    lora = ["-m", "shardc", "run", str(ROOT / "lora.py"), str(ROOT / "lora.yaml"), "--save", str(tmp_path / "lora")]
    summary = json.loads(run(*lora, "--steps", "2", "--json", BASE=base, OMP_NUM_THREADS="1"))
    os.environ["BASE"] = base
    try:
        held_out = importlib.import_module("examples.lora").data("valid")
    finally:
        del os.environ["BASE"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.PeftModel.from_pretrained(plain, str(tmp_path / "lora")).eval()
    parts = [
        default_collate([held_out[i] for i in range(k, min(k + 8, len(held_out)))]) for k in range(0, len(held_out), 8)
    ]
    with torch.no_grad():
        losses = [(float(tuned(**part).loss) * len(part["labels"]), len(part["labels"])) for part in parts]
    theirs = sum(x for x, _ in losses) / sum(n for _, n in losses)
    assert summary["held_out"] == pytest.approx(theirs, rel=1e-5)


TRAINED = """
import json, os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from examples.trainer import ShardedTrainer
out, steps, spec = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, bos_token_id=None, eos_token_id=None))
ids = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in ids]
options = {"max_steps": steps, "per_device_train_batch_size": 8, "logging_steps": 1, "save_steps": 2, "report_to": []}
options |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_grad_norm": 0.5, "use_cpu": True}
args = TrainingArguments(output_dir=out, disable_tqdm=True, **options)
given = {"model": model, "args": args, "train_dataset": rows[:48], "eval_dataset": rows[48:61]}
trainer = ShardedTrainer(**given, spec=spec) if spec else Trainer(**given)
trainer.train(resume_from_checkpoint=len(sys.argv) > 4 or None)
held_out = trainer.evaluate()["eval_loss"]
trainer.save_model(out + "/final")
if trainer.args.process_index == 0:
    kept = [x[name] for x in trainer.state.log_history if "loss" in x for name in ("loss", "grad_norm")]
    print("RESULT", json.dumps([*kept, held_out]), flush=True)
os._exit(0)  # torch's own threads now and then abort a process that ends
"""


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    """Losses, norms and held-out losses are those of one device; two more steps on another mesh, too."""
    pytest.importorskip("accelerate")
    script = tmp_path / "trained.py"
    script.write_text(TRAINED)

    def trained(out: str, steps: int, spec: dict[str, Any], *more: str) -> list[float]:
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if spec else []
        path = {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
        printed = run(*ranks, str(script), str(tmp_path / out), str(steps), json.dumps(spec), *more, **path)
        numbers: list[float] = json.loads(printed.rpartition("RESULT ")[2])
        return numbers

    one = trained("one", 4, {})
    assert len(one) == 9
    data = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 1}}
    assert trained("two", 4, data) == pytest.approx(one, rel=1e-5)
    shutil.rmtree(tmp_path / "two" / "checkpoint-4")
    tensor = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "model"}}
    assert trained("two", 4, tensor, "resume") == pytest.approx(one, rel=1e-5)
    whole, again = (AutoModelForCausalLM.from_pretrained(tmp_path / out / "final") for out in ("one", "two"))
    for (name, x), y in zip(whole.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, msg=name)
