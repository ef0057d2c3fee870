"""loop_before.py on 4 processes: `torchrun --nproc-per-node 4 examples/loop_after.py` (`make loop`)."""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset
from torch.utils.tensorboard import SummaryWriter

import shardc

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt import GPT, Config, Windows, text

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--out", type=Path, default=Path("runs/loop"))
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(Config(layers=2))
shuffled = torch.Generator().manual_seed(0)
train = DataLoader(Windows(text("train")), batch_size=16, shuffle=True, generator=shuffled)
valid = DataLoader(Subset(Windows(text("valid")), range(0, 40_000, 1250)), batch_size=16)
program = shardc.compile(model, next(iter(valid)), str(Path(__file__).with_name("loop.yaml")))
model = program.module(model)
first = torch.distributed.get_rank() == 0

decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 + 0.5 * math.cos(math.pi * i / args.steps))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
board = SummaryWriter(args.out) if first else None

losses = []
for step, batch in zip(range(args.steps), train, strict=False):
    loss = model(**program.local(batch))
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    losses.append(loss.item())
    if first:
        board.add_scalars("train", {"loss": losses[-1], "norm": norm.item()}, step)

average.eval()
with torch.no_grad():
    held_out = [average(**program.local(batch)).item() for batch in valid]
weights = average.module.full_state_dict()
if not first:
    sys.exit()
board.close()
torch.save({"average": weights, "losses": losses, "held_out": held_out}, args.out / "run.pt")
print(f"loss {losses[-1]:.4f}, held out {sum(held_out) / len(held_out):.4f}")
