"""`shardc run` with kill -9 of a random rank at a random moment, again and again: the run ends by itself, with the
weights of a run in which nothing happened, bit for bit.

    python tests/cli/kill.py --kills 100
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = "shardc: 1\nmesh: {dp: 2, tp: TP}\nshard: {up: column, down: row}\ndata: {zero: 1}\n"
MODEL = """
import time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x):
        return (self.down(self.drop(self.up(x).relu())) - x).square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.randn(8, 64)}

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return {"x": torch.randn(64, generator=torch.Generator().manual_seed(i))}

def data(split):
    return torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True) if split == "train" else None
"""


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "shardc", "run", "model.py", "spec.yaml", *map(str, args)]


def ranks(launcher: int) -> list[int]:
    """The processes of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                worker = b"shardc.cli.ranks.worker" in (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == launcher and worker:
                found.append(int(entry.name))
    return found


def begun(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tp", type=int, default=2, help="the mesh is dp=2 times this")
    parser.add_argument("--every", type=int, default=2, help="steps between saves")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model.py").write_text(MODEL)
        (folder / "spec.yaml").write_text(SPEC.replace("TP", str(args.tp)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        options = ("--steps", args.steps, "--save-every", args.every, "--max-restarts", 10 * args.kills)
        straight = subprocess.run(
            command(*options, "--save", "straight"), cwd=folder, env=environment, capture_output=True, text=True
        )
        assert straight.returncode == 0, straight.stderr
        start, kills, during_save = time.time(), 0, 0
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(
                command(*options, "--save", "out"), cwd=folder, env=environment, stdout=log, stderr=log
            )
            while run.poll() is None and kills < args.kills:
                saves = begun(folder / "out" / "checkpoint")
                # some while they start, most after a new checkpoint was begun, so that the run gets on
                deadline = time.time() + (rng.uniform(0, 4) if rng.random() < 0.2 else 60)
                while time.time() < deadline and run.poll() is None:
                    if begun(folder / "out" / "checkpoint") - saves - {".lock"}:
                        break
                    time.sleep(0.002)
                time.sleep(rng.choice((0.0, 0.002, 0.01, 0.05)) * rng.random())
                if not (alive := ranks(run.pid)):
                    continue
                saving = any(n.startswith(".saving-") for n in begun(folder / "out" / "checkpoint"))
                try:
                    os.kill(rng.choice(alive), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                kills, during_save = kills + 1, during_save + saving
                time.sleep(0.3)
            status = run.wait()
        if status:
            print((folder / "log").read_text()[-4000:])
            sys.exit(1)
        same = (folder / "out" / "model.safetensors").read_bytes() == (
            folder / "straight" / "model.safetensors"
        ).read_bytes()
        print(
            f"{kills} kills, {during_save} of them while a checkpoint was written, in {time.time() - start:.0f} s: "
            f"the run ended by itself, its weights are {'the same, bit for bit' if same else 'OTHERS'}"
        )
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
