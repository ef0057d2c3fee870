"""GRPO with a mixture of experts: training on two ranks, rollouts in another process that runs plain transformers.

    python examples/grpo.py FOLDER [--steps 20]        starts all processes, and again those of a run that was killed

A step: the weights go to the rollouts' process (`engine.weights_to`), which writes samples, their log-probabilities and
the experts that its routers chose. Training replays these choices (`choices: replay`), so that both compute the same
function, and its own log-probabilities are the rollouts'. The task: write even tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardc
from shardc import engines

VOCAB, PROMPT, TOKENS = 32, 2, 6  # tokens of a prompt, and of an answer
GROUPS, SAMPLES = 4, 8  # prompts of a step, and answers to each
CLIP, RATE, TRAINERS = 0.2, 0.02, 2
SPEC = {
    "shardc": 1,
    "mesh": {"dp": TRAINERS},
    "data": {"zero": 3},
    "choices": {"*.mlp.gate": "replay"},
}


def policy() -> nn.Module:
    """Return a small mixture of experts."""
    size = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**size, **heads, **experts))
    return model


class Grpo(nn.Module):
    """The clipped loss of a group's answers, by their advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy()

    def forward(self, ids: Tensor, old: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        scores = self.policy(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        each = scores.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        ratio = (each - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return {"loss": -gain.mean(), "log_probabilities": each}


class Task:
    """What is trained: examples/on_policy.py is another one."""

    spec: dict[str, Any] = SPEC

    def rollout_model(self) -> nn.Module:
        return policy()

    def model(self) -> nn.Module:
        return Grpo()

    def example(self) -> dict[str, Tensor]:
        rows = GROUPS * SAMPLES
        old, advantages = torch.zeros(rows, TOKENS), torch.zeros(rows, 1)
        return {"ids": torch.zeros(rows, PROMPT + TOKENS, dtype=torch.int64), "old": old, "advantages": advantages}

    def scored(self, ids: Tensor, old: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a batch, and the reward of each answer."""
        reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1)
        group = reward.view(GROUPS, SAMPLES)
        better = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
        return {"ids": ids, "old": old, "advantages": better.view(-1, 1), "reward": reward}


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return output["loss"], {"log_probabilities": output["log_probabilities"]}


# --- rollouts: plain transformers -------------------------------------------------------------------------------------


def rollouts(task: Task, folder: Path, address: str, first: int, steps: int) -> None:
    """Write the samples of each step, with the weights that arrive before it."""
    model, layout = task.rollout_model().eval(), engines.Layout.load(folder / "layout.json")
    sync = engines.receive(address, layout, dict(model.named_parameters()), trainers=TRAINERS)
    chosen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, out, name=name: chosen.update({f"policy.{name}": out[-1]}))
    for step in range(first, steps):
        with torch.no_grad():
            sync()
            draw = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCAB, (GROUPS, PROMPT), generator=draw).repeat_interleave(SAMPLES, 0)
            for _ in range(TOKENS):
                odds = model(ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(odds, 1, generator=draw)], 1)
            scores = model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)  # the hooks have all choices now
            old = scores.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        tensors = task.scored(ids, old)
        choices = {f"choices {name}": x.view(len(ids), -1, x.shape[-1]).int() for name, x in chosen.items()}
        save_file({k: x.contiguous() for k, x in (tensors | choices).items()}, folder / "writing")
        os.replace(folder / "writing", folder / f"rollout-{step}.safetensors")


# --- training ---------------------------------------------------------------------------------------------------------


def train(task: Task, folder: Path, address: str, first: int, steps: int) -> None:
    """Train on the samples of each step; save each step."""
    model = task.model()
    program = shardc.compile(model, task.example(), task.spec, loss=loss)
    engine = program.engine(model, lambda params: torch.optim.Adam(params, RATE))
    if first:
        engine.load(folder / "checkpoint")
    target = engines.at(address, engines.Layout.load(folder / "layout.json"))
    while engine.step_count < steps:
        step = engine.step_count
        engine.weights_to(target)
        tensors = arrived(folder / f"rollout-{step}.safetensors")
        reward = tensors.pop("reward")
        choices = {k.removeprefix("choices "): tensors.pop(k) for k in [*tensors] if k.startswith("choices ")}
        old = tensors["old"] if "old" in task.example() else tensors.pop("old")
        now, outputs = engine.step(tensors, **({"choices": choices} if choices else {}), gather=True)
        off = float((outputs["log_probabilities"] - old).abs().max())
        engine.save(folder / "checkpoint", keep=2)
        if engine.mesh.rank == 0:
            line = {"step": step, "loss": float(now), "reward": float(reward.mean()), "off": off}
            with (folder / "steps.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(
                f"step {step:3}  loss {line['loss']:8.4f}  reward {line['reward']:.3f}  log-probabilities off by {off:.1e}",
                flush=True,
            )
    engine.close()


def arrived(file: Path) -> dict[str, Tensor]:
    """Wait for a step's samples."""
    while not file.exists():
        time.sleep(0.01)
    return load_file(file)


# --- all processes ----------------------------------------------------------------------------------------------------


def run(task: Task, file: str, folder: Path, steps: int, attempts: int = 20) -> None:
    """Start rollouts and training; start all again, from the last checkpoint, where one of them ended early."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = engines.transformers(task.rollout_model(), 1, dtype="float32", within="policy")
    layout.save(folder / "layout.json")
    for _ in range(attempts):
        saved = sorted(folder.glob("checkpoint/step-*"))
        first = int(saved[-1].name.removeprefix("step-")) if saved else 0
        forget(folder, first)
        ports = [str(shardc.runtime.launch.free_port()) for _ in range(2)]
        jobs = [("rollouts", 0), *(("train", rank) for rank in range(TRAINERS))]
        processes = []
        for job, rank in jobs:
            world = {
                "RANK": str(rank),
                "WORLD_SIZE": str(TRAINERS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": ports[0],
            }
            words = [file, str(folder), "--steps", str(steps), "--job", job, "--first", str(first)]
            command = [sys.executable, *words, "--address", f"127.0.0.1:{ports[1]}"]
            processes.append(subprocess.Popen(command, env=os.environ | (world if job == "train" else {})))
        (folder / "pids").write_text(" ".join(str(p.pid) for p in processes))
        while all(p.poll() in (None, 0) for p in processes) and any(p.poll() is None for p in processes):
            time.sleep(0.05)
        failed = any(p.poll() for p in processes)
        for p in processes:
            p.kill()
            p.wait()
        if not failed:
            return
    raise SystemExit(f"given up after {attempts} starts")


def forget(folder: Path, first: int) -> None:
    """Remove what a killed run wrote after its last checkpoint."""
    for file in folder.glob("rollout-*"):
        if int(file.stem.removeprefix("rollout-")) >= first:
            file.unlink()
    if (log := folder / "steps.jsonl").exists():
        log.write_text("".join(x + "\n" for x in log.read_text().splitlines()[:first]))


def main(task: Task, file: str) -> None:
    torch.set_num_threads(1)
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("folder", type=Path)
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--job", choices=["rollouts", "train"])
    words.add_argument("--address")
    words.add_argument("--first", type=int, default=0)
    given: Any = words.parse_args()
    if given.job is None:
        run(task, file, given.folder, given.steps)
    else:
        job = rollouts if given.job == "rollouts" else train
        job(task, given.folder, given.address, given.first, given.steps)


if __name__ == "__main__":
    main(Task(), __file__)
