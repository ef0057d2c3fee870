"""A plain training loop of a small GPT on one device. loop_after.py is the same on many: 14 lines are other ones."""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset
from torch.utils.tensorboard import SummaryWriter

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

decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 + 0.5 * math.cos(math.pi * i / args.steps))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
board = SummaryWriter(args.out)

losses = []
for step, batch in zip(range(args.steps), train, strict=False):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    losses.append(loss.item())
    board.add_scalars("train", {"loss": losses[-1], "norm": norm.item()}, step)

average.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    held_out = [average(**batch).item() for batch in valid]
weights = average.module.state_dict()
board.close()
torch.save({"average": weights, "losses": losses, "held_out": held_out}, args.out / "run.pt")
print(f"loss {losses[-1]:.4f}, held out {sum(held_out) / len(held_out):.4f}")
