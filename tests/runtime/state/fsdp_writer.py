"""Train a small model with FSDP2 for three steps, and save it as other libraries do: in processes of their own.

torchrun --nproc-per-node 4 tests/runtime/state/fsdp_writer.py FOLDER
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}


class LM(nn.Module):
    """Of 17 tokens, which 4 ranks do not divide; the head is tied; names begin with `model.`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "emb": nn.Embedding(17, 6),
                "layers": nn.ModuleList(
                    nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6)) for _ in range(2)
                ),
            }
        )
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.model["emb"].weight
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0]))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.model["emb"](ids) * self.scale.sum()
        for layer in self.model["layers"]:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def lm(dtype: torch.dtype = torch.float64) -> LM:
    torch.manual_seed(0)
    return LM().to(dtype)


def data() -> dict[str, Tensor]:
    ids = torch.arange(8 * 5).view(8, 5) * 7 % 17
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **SETTINGS)


def trained(dtype: torch.dtype, kind: Any = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = lm(dtype)
    for layer in model.model["layers"]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = kind(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(**data()).backward()
        optimizer.step()
    return model, optimizer


def main(root: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = trained(torch.float64)
    flat = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    weights = sd.get_model_state_dict(model)
    titan: dict[str, Any] = {**weights, "optimizer": sd.get_optimizer_state_dict(model, optimizer, options=flat)}
    titan["lr_scheduler"] = {"base_lrs": [0.02], "last_epoch": 3}
    titan["train_state"] = {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": 120}
    titan["dataloader"] = {"dp_rank_0": b"opaque"}
    save(titan, checkpoint_id=root / "titan" / "step-3")
    states = dict(zip(("model", "optim"), sd.get_state_dict(model, optimizer), strict=True))
    save({"app": states}, checkpoint_id=root / "app")
    save({"model": weights}, checkpoint_id=root / "model")
    save({k: v for k, v in weights.items() if not k.startswith("head")}, checkpoint_id=root / "untied")
    save({f"_orig_mod.{k}": v for k, v in weights.items()}, checkpoint_id=root / "compiled")
    save({"model": weights, "optimizer": optimizer.state_dict()}, checkpoint_id=root / "numbered")
    half, _ = trained(torch.bfloat16)
    save({"model": sd.get_model_state_dict(half)}, checkpoint_id=root / "bfloat16")
    sgd, momentum = trained(torch.float64, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    states = dict(zip(("model", "optimizer"), sd.get_state_dict(sgd, momentum), strict=True))
    save(states, checkpoint_id=root / "sgd")
    whole = sd.StateDictOptions(full_state_dict=True)
    full = {name: sd.get_model_state_dict(x, options=whole) for name, x in (("model", model), ("bfloat16", half))}
    full = copy.deepcopy(full)
    for _ in range(2):  # where the training would have gone
        optimizer.zero_grad()
        model(**data()).backward()
        optimizer.step()
    full["later"] = sd.get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        torch.save(full, root / "whole.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]))
    os._exit(0)  # torch's own threads now and then abort a process that ends: "terminate called without an exception"
