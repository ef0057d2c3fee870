"""transformers' Trainer over a mesh: `class MyTrainer(Sharded, Trainer)`, with `spec=` (docs/recipes/trainers.md).

    torchrun --nproc-per-node 2 examples/trainer.py

The batch size of TrainingArguments is that of the whole batch, and every rank reads the same one. Checkpoints load on
any mesh; `save_model` writes a folder of transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import shardc

sys.path.insert(0, str(Path(__file__).resolve().parent))


class Sharded:
    """Put it before Trainer, or before a trainer that is made of it."""

    def __init__(self, *args: Any, spec: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps > 1 or self.args.bf16 or self.args.fp16:
            raise ValueError("write `batch: {microbatches: N}` and `precision: {compute: bfloat16}` in the spec")
        if self.args.optim == "adamw_torch_fused":  # after a load, the check of optimizers refuses it over tp
            self.args.optim = "adamw_torch"
        self.plain, self.by_accelerate = self.model, self.accelerator.prepare
        self.accelerator.prepare = self.prepared
        self.accelerator.prepare_model = lambda model, **_: model
        # losses are global: each counts for the rows of its batch
        self.accelerator.gather_for_metrics = self.gather_function = lambda x, *_, **__: x[: self.counted]
        batch = {k: x for k, x in next(iter(self.get_train_dataloader())).items() if isinstance(x, Tensor)}
        self.program = shardc.compile(self.plain, batch, spec)
        self.rows = len(next(iter(batch.values())))
        self.model = self.model_wrapped = self.program.module(self.plain)

    def prepared(self, *objects: Any, **options: Any) -> Any:
        """In place of accelerate's: the model is split already, and batches are global."""
        made = []
        for x in objects:
            if isinstance(x, DataLoader):
                x = prepare_data_loader(x, num_processes=1, process_index=0, use_seedable_sampler=True)
            elif not isinstance(x, nn.Module):
                x = self.by_accelerate(x, **options)
            made.append(x)
        return made[0] if len(made) == 1 else tuple(made)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """The mean over the global batch, on every rank."""
        missing = self.rows - len(next(iter(inputs.values())))
        if missing:  # a program has one size: rows of which no label counts
            more = {k: x[:1].expand(missing, *x.shape[1:]) for k, x in inputs.items()}
            more["labels"] = torch.full_like(more["labels"], -100)
            inputs = {k: torch.cat([x, more[k]]) for k, x in inputs.items()}
        loss = model(**model.local(inputs))
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
        self.counted = len(next(iter(inputs.values())))
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.model.full_state_dict()  # all ranks
        if self.args.should_save:
            self.plain.save_pretrained(output_dir or self.args.output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        scheduler = {"scheduler": self.lr_scheduler.state_dict()}
        self.model.save(f"{output_dir}/shardc", self.optimizer.optimizer, extra=scheduler)

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Weights come with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint:
            extra = self.model.load(f"{checkpoint}/shardc", self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])


class ShardedTrainer(Sharded, Trainer):
    pass


if __name__ == "__main__":
    from llama import Windows, model, text

    torch.manual_seed(0)
    options = {"max_steps": 20, "per_device_train_batch_size": 16, "logging_steps": 5, "report_to": [], "use_cpu": True}
    ShardedTrainer(
        model=model(),
        args=TrainingArguments(output_dir="runs/trainer", save_strategy="no", **options),
        train_dataset=Windows(text("train")),
        spec={"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "model"}},
    ).train()
