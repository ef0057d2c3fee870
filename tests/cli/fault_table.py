"""What becomes of `shardc run` when one of its 4 ranks is killed, is stopped or raises: docs/training.md's table.

Alone and under torchrun, one fault at a random moment in each run: is the right rank named, and how soon; is everything
gone then; and does the same command, which resumes by itself, end with the weights of a run without faults?

    python tests/cli/fault_table.py --faults 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = "shardc: 1\nmesh: {dp: 2, tp: 2}\nshard: {up: column, down: row}\ndata: {zero: 1}\n"
MODEL = """
import os, shardc, torch
from torch import nn

def fault(place):  # raises where the file `fault` names this rank and place, once
    wanted = f"{os.environ.get('RANK')} {place}"
    if os.path.exists("fault") and open("fault").read() == wanted:
        os.unlink("fault")
        raise OSError(f"made on purpose in {place}")

@torch.library.custom_op("fault_table::tried", mutates_args=())
def tried(x: torch.Tensor, place: str) -> torch.Tensor:
    fault(place)
    return x.clone()

tried.register_fake(lambda x, place: torch.empty_like(x))
tried.register_autograd(lambda ctx, g: (g, None))
shardc.rule(tried, "... -> ...", linear="0", samples=[lambda: (torch.randn(4, 6), "model")])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.drop(tried(self.up(x), "model").relu()))

def model():
    return Net()

def batch():
    return {"x": torch.randn(8, 64), "y": torch.randn(8, 64)}

def loss(output, batch):
    return (tried(output, "loss") - batch["y"]).square().mean()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        fault("data")
        x = torch.randn(64, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x.sin()}

def data(split):
    rows = Rows()
    return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, num_workers=1) if split == "train" else None
"""
PLACES = ("model", "data", "loss")
KINDS = ("kill", "stop", "exception")
LAUNCHERS = {
    "alone": [sys.executable, "-m", "shardc.cli", "run"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--no-python"),
        *(sys.executable, "-m", "shardc.cli", "run"),
    ],
}
MARK = "SHARDC_FAULT_TABLE"  # in the environment of every process of a run, also of one that lost its parents
BLAMED = re.compile(
    r"rank (\d+) \(dp=\d, tp=\d\)(?: and \w+)? (?:was killed|was stopped|failed|died|does not answer|keeps the others)"
)


@dataclass
class Fault:
    """What came of one. named: seconds until the right rank was; where: whether also the step; wrong: other ranks that
    were blamed; ended: seconds until no process was left; left: processes, files in /dev/shm and TMPDIR.
    """

    kind: str
    launcher: str
    rank: int
    moment: str
    named: float | None = None
    where: bool = False
    wrong: list[int] = field(default_factory=list)
    ended: float | None = None
    left: list[str] = field(default_factory=list)
    status: int = 0


class Runs:
    """Runs of one kind of fault under one launcher, in one folder, each going on where the last was ended."""

    def __init__(self, folder: Path, kind: str, launcher: str, steps: int, rng: random.Random) -> None:
        self.folder, self.kind, self.launcher, self.rng = folder, kind, launcher, rng
        self.mark = f"{kind}-{launcher}-{os.getpid()}"
        self.temporary = folder / "tmp"
        for f in (folder, self.temporary):
            f.mkdir()
        (folder / "model.py").write_text(MODEL)
        (folder / "spec.yaml").write_text(SPEC)
        options = ["--steps", str(steps), "--save", "out", "--save-every", "5", "--auto-resume"]
        self.command = [*LAUNCHERS[launcher], "model.py", "spec.yaml", *options]
        self.log = folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), MARK: self.mark}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            return subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def processes(self) -> dict[int, dict[str, str]]:
        """{pid: environment} of all that belong to the run."""
        return {pid: env for pid, env in environments() if env.get(MARK) == self.mark}

    def rank(self, rank: int) -> int | None:
        """The process of a rank; what it started itself has its environment too."""
        mine = [pid for pid, env in self.processes().items() if env.get("RANK") == str(rank)]
        return next((pid for pid in mine if parent(pid) not in mine), None)

    def once(self) -> Fault | None:
        """One run with one fault; None if the run ended before."""
        rank, begun = self.rng.randrange(4), time.monotonic()
        starting = self.rng.random() < 0.15 and self.kind != "exception"
        moment = self.rng.uniform(0.5, 8) if starting else self.rng.uniform(0, 1.5)
        shared = set(os.listdir("/dev/shm"))
        process = self.start()
        pids = set[int]()
        while process.poll() is None:
            steps = re.search(r"^step ", self.log.read_text(), re.MULTILINE)
            if (starting and time.monotonic() > begun + moment and self.rank(rank)) or (not starting and steps):
                break
            time.sleep(0.02)
        if not starting:
            time.sleep(moment)
        place = self.rng.choice(PLACES)
        pids |= set(self.processes())
        if process.poll() is not None or (pid := self.rank(rank)) is None:
            process.wait()
            return None
        if self.kind == "exception":
            (self.folder / "fault.new").write_text(f"{rank} {place}")
            (self.folder / "fault.new").rename(self.folder / "fault")
        else:
            os.kill(pid, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        when = "starting" if not steps else place if self.kind == "exception" else "training"
        fault = Fault(self.kind, self.launcher, rank, when)
        self.watch(process, fault, time.monotonic())
        fault.left += [f"/dev/shm/{n}" for n in set(os.listdir("/dev/shm")) - shared if any(str(p) in n for p in pids)]
        fault.left += [f"TMPDIR/{n}" for n in os.listdir(self.temporary)]
        shutil.rmtree(self.temporary)
        self.temporary.mkdir()
        if (self.folder / "fault").exists():
            (self.folder / "fault").unlink()
            return None  # nobody came there any more
        return fault

    def watch(self, process: subprocess.Popen[bytes], fault: Fault, begun: float, patience: float = 150) -> None:
        """See it through to its end, and note what is said, and when."""
        while (ended := time.monotonic() - begun) < patience:
            text, over = self.log.read_text(errors="replace"), process.poll() is not None
            said = [(int(m[1]), line) for line in text.splitlines() for m in BLAMED.finditer(line)]
            if fault.named is None and any(rank == fault.rank for rank, _ in said):
                fault.named = time.monotonic() - begun
            if over:
                break
            time.sleep(0.02)
        fault.wrong = sorted({rank for rank, _ in said if rank != fault.rank})
        words = "made on purpose" if self.kind == "exception" else r"(in|after|before) (step|saving|writing)"
        fault.where = fault.moment == "starting" or any(
            rank == fault.rank and re.search(r"step \d+", line) and re.search(words, text) for rank, line in said
        )
        fault.status, fault.ended = process.poll() or 0, ended if over else None
        time.sleep(0.2)  # in which the kernel buries
        for pid in self.processes():
            fault.left.append(f"process {pid}")
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def finish(self) -> bytes:
        """Without a fault to the end: the weights."""
        process = self.start()
        assert process.wait() == 0, self.log.read_text()
        weights = (self.folder / "out" / "model.safetensors").read_bytes()
        shutil.rmtree(self.folder / "out")
        return weights


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if MARK in text:
                yield int(entry.name), dict(x.split("=", 1) for x in text.split("\0") if "=" in x)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def row(kind: str, launcher: str, faults: list[Fault], equal: int, within: float) -> str:
    right = [f for f in faults if f.named is not None and f.named <= within and f.where and not f.wrong]
    named = sorted(f.named for f in faults if f.named is not None) or [float("nan")]
    ended = sorted(f.ended for f in faults if f.ended is not None) or [float("nan")]
    cells = (
        *(kind, launcher, len(faults), len(right), sum(bool(f.wrong) for f in faults)),
        *(f"{statistics.median(named):.1f}", f"{named[-1]:.1f}", f"{statistics.median(ended):.1f}", f"{ended[-1]:.1f}"),
        *(sum(f.status != 0 for f in faults), sum(len(f.left) for f in faults), equal),
    )
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| fault | launcher | runs | named right | blamed wrongly | s to the name, median | worst | s to the end, median"
    " | worst | status not 0 | left behind | resumed equal |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="of each kind, with each launcher")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--within", type=float, default=10.0, help="seconds in which the rank has to be named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what the runs printed")
    args = parser.parse_args()
    rng, rows, good = random.Random(args.seed), list[str](), True
    with tempfile.TemporaryDirectory() as temporary:
        straight = Runs(Path(temporary) / "straight", "none", "alone", args.steps, rng).finish()
        for launcher in args.launchers:
            for kind in args.kinds:
                runs = Runs(Path(temporary) / f"{kind}-{launcher}", kind, launcher, args.steps, rng)
                faults, resumed, equal = list[Fault](), 0, 0
                while len(faults) < args.faults:
                    fault = runs.once()
                    if fault is not None:
                        faults.append(fault)
                        resumed += 1
                        print(json.dumps(vars(fault)), flush=True)
                        if args.keep:
                            args.keep.mkdir(parents=True, exist_ok=True)
                            shutil.copy(runs.log, args.keep / f"{kind}-{launcher}-{len(faults)}.log")
                    if fault is None or len(faults) == args.faults:  # the chain of resumed runs is at its end
                        equal += resumed * (runs.finish() == straight)
                        resumed = 0
                rows.append(row(kind, launcher, faults, equal, args.within))
                cells = [int(x) for x in re.findall(r"(?<=\| )\d+(?= \|)", rows[-1])]
                good &= cells[0] == cells[1] == cells[3] == cells[5] and cells[2] == cells[4] == 0
    print("\n".join([HEAD, *rows]))
    sys.exit(not good)


if __name__ == "__main__":
    main()
