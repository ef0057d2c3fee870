"""Kill, stop or fail one of 4 ranks of `shardc run`: the table of docs/measured/faults.md.

Alone and under torchrun, one fault at a random moment in each run: is the right rank named, and how soon; is everything
gone then; and does the same command, which resumes by itself, end with the weights of a run without faults?

    python -m tests.cli.fault_table --faults 20
    python -m tests.cli.fault_table --kills 100     one run that restarts by itself, most kills at a save

Processes are forked from one that has imported torch (tests/warm.py): a start then takes 2 s, not 20.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from tests import warm

SPEC = "shardc: 1\nmesh: {dp: 2, tp: 2}\nshard: {up: column, down: row}\ndata: {zero: 1}\n"
MODEL = """
import os, shardc, torch
from torch import nn

if "RANK" in os.environ:
    open(f"rank{os.environ['RANK']}", "w").write(str(os.getpid()))

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
LAUNCHERS = {  # after `python`; docs/how-to/launching.md's lines
    "alone": ["-m", "shardc", "run"],
    "torchrun": [
        *("-m", "torch.distributed.run", "--nproc-per-node", "4", "--no-python"),
        *(sys.executable, "-m", "shardc", "run"),
    ],
}
BLAMED = re.compile(
    r"ranks? ((?:\d+(?: \(dp=\d, tp=\d\))?(?:, )?)+)"
    r" (?:was killed|were killed|was stopped|failed|died|does not answer|do not answer|keeps? the others)"
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
    equal: bool = False  # the weights at the end of the runs that went on


class Runs:
    """Runs under one launcher, in one folder, each going on where the last was ended. starting: the share of faults
    that come before the first step.
    """

    def __init__(
        self, folder: Path, launcher: str, steps: int, rng: random.Random, starting: float = 0, restarts: int = 0
    ) -> None:
        self.folder, self.launcher, self.rng, self.starting = folder, launcher, rng, starting
        self.temporary, self.before = folder / "tmp", descendants()
        self.temporary.mkdir(parents=True)
        (folder / "model.py").write_text(MODEL)
        (folder / "spec.yaml").write_text(SPEC)
        options = ["--steps", str(steps), "--save", "out", "--save-every", "2" if restarts else "5", "--auto-resume"]
        if restarts:
            options += ["--max-restarts", str(restarts)]
        os.chdir(folder)
        command = [sys.executable, "-m", "shardc", "compile", "model.py", "spec.yaml", "-o", "program"]
        subprocess.run(command, check=True, capture_output=True)
        self.command = [*LAUNCHERS[launcher], "program", *options]
        self.log = folder / "log"

    def start(self) -> warm.Popen:
        for file in (self.log, *self.folder.glob("rank?")):
            file.unlink(missing_ok=True)
        self.log.touch()
        os.chdir(self.folder)
        os.environ |= {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return warm.start(*self.command, log=self.log)

    def once(self, kind: str) -> Fault | None:
        """One run with one fault; None if the run ended before."""
        rank, begun = self.rng.randrange(4), time.monotonic()
        starting = self.rng.random() < self.starting and kind != "exception"
        moment = self.rng.uniform(0, 2) if starting else self.rng.uniform(0, 1.5)
        shared = set(os.listdir("/dev/shm"))
        process = self.start()
        while process.poll() is None:
            steps = re.search(r"^step ", self.log.read_text(), re.MULTILINE)
            there = (self.folder / f"rank{rank}").exists()
            if (starting and time.monotonic() > begun + moment and there) or (not starting and steps):
                break
            time.sleep(0.02)
        if not starting:
            time.sleep(moment)
        place, pids = self.rng.choice(PLACES), descendants() - self.before
        if process.poll() is not None:
            return None
        if kind == "exception":
            (self.folder / "fault.new").write_text(f"{rank} {place}")
            (self.folder / "fault.new").rename(self.folder / "fault")
        else:
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            try:
                os.kill(int((self.folder / f"rank{rank}").read_text()), number)
            except ProcessLookupError:  # the run has ended meanwhile
                return None
        when = "starting" if not steps else place if kind == "exception" else "training"
        fault = Fault(kind, self.launcher, rank, when)
        self.watch(process, fault, time.monotonic())
        fault.left += [f"/dev/shm/{n}" for n in set(os.listdir("/dev/shm")) - shared if any(str(p) in n for p in pids)]
        if (self.folder / "fault").exists():
            (self.folder / "fault").unlink()
            return None  # nobody came there any more
        if fault.named is None and fault.status == 0:
            return None  # the rank was done: what it leaves is compared in the end
        if not fault.where or fault.named is None:
            print(self.log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
        return fault

    def killed_often(self, kills: int) -> str:
        """Ranks are killed that many times, most soon after a checkpoint was begun: what came of it, and of the run."""
        checkpoints, begun, done, during_save = self.folder / "out" / "checkpoint", time.monotonic(), 0, 0

        def there() -> set[str]:
            return set(os.listdir(checkpoints)) - {".lock"} if checkpoints.exists() else set()

        process = self.start()
        while process.poll() is None and done < kills:
            saves = there()
            # some while they start, most after a new checkpoint was begun, so that the run gets on
            deadline = time.monotonic() + (self.rng.uniform(0, 4) if self.rng.random() < 0.2 else 60)
            while time.monotonic() < deadline and process.poll() is None and not there() - saves:
                time.sleep(0.002)
            time.sleep(self.rng.choice((0.0, 0.002, 0.01, 0.05)) * self.rng.random())
            named = {int(file.read_text() or 0) for file in self.folder.glob("rank?")}
            alive = sorted(named & (descendants() - self.before))
            if alive and process.poll() is None:
                saving = any(name.startswith(".saving-") for name in there())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(alive), signal.SIGKILL)
                    done, during_save = done + 1, during_save + saving
                time.sleep(0.3)
        assert process.wait() == 0, self.log.read_text()[-4000:]
        return (
            f"{done} kills, {during_save} of them while a checkpoint was written, in {time.monotonic() - begun:.0f} s"
        )

    def watch(self, process: warm.Popen, fault: Fault, begun: float, patience: float = 150) -> None:
        """See it through to its end, and note what is said, and when."""
        while (ended := time.monotonic() - begun) < patience:
            text, over = self.log.read_text(errors="replace"), process.poll() is not None
            said = [
                (int(rank), line)
                for line in text.splitlines()
                for m in BLAMED.finditer(line)
                for rank in re.findall(r"\d+", re.sub(r"\(.*?\)", "", m[1]))
            ]
            if root := re.search(r"rank +: (\d)", text.partition("Root Cause")[2]):  # torchrun's own words
                said.append((int(root[1]), "starting"))
            if fault.named is None and any(rank == fault.rank for rank, _ in said):
                fault.named = time.monotonic() - begun
            if over:
                break
            time.sleep(0.02)
        fault.wrong = sorted({rank for rank, _ in said if rank != fault.rank})
        words = "made on purpose" if fault.kind == "exception" else r"(in|after|before) (step|saving|writing|exporting)"
        fault.where = fault.moment == "starting" or any(
            rank == fault.rank and re.search(r"step \d+|in exporting", line) and re.search(words, text)
            for rank, line in said
        )
        fault.status, fault.ended = process.poll() or 0, ended if over else None
        patience = time.monotonic() + 6  # DataLoader's workers look every 5 s whether their rank is there
        while descendants() - self.before and time.monotonic() < patience:
            time.sleep(0.1)
        for pid in descendants() - self.before:
            fault.left.append(f"process {pid}")
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def finish(self) -> bytes:
        """Without a fault to the end: the weights."""
        process = self.start()
        assert process.wait() == 0, self.log.read_text()
        return self.weights()

    def weights(self) -> bytes:
        """Those of a run that is over; the next one begins anew."""
        weights = (self.folder / "out" / "model.safetensors").read_bytes()
        shutil.rmtree(self.folder / "out")
        return weights


def adopt_orphans() -> None:
    """Processes that lost their parents become children of this one, so that `descendants` has them (Linux)."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    warm.context()
    resource_tracker.ensure_running()
    forkserver.ensure_running()


def descendants() -> set[int]:
    """The processes that this one started, and they, and so on."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found, more = set[int](), {os.getpid()}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more}
        found |= more
    return found


def right(fault: Fault, within: float) -> bool:
    return fault.named is not None and fault.named <= within and fault.where and not fault.wrong


def row(kind: str, launcher: str, faults: list[Fault], within: float) -> str:
    named = sorted(f.named for f in faults if f.named is not None) or [float("nan")]
    ended = sorted(f.ended for f in faults if f.ended is not None) or [float("nan")]
    cells = (
        *(kind, launcher, len(faults), sum(right(f, within) for f in faults), sum(bool(f.wrong) for f in faults)),
        *(f"{statistics.median(named):.1f}", f"{named[-1]:.1f}", f"{statistics.median(ended):.1f}", f"{ended[-1]:.1f}"),
        *(sum(f.status != 0 for f in faults), sum(bool(f.left) for f in faults), sum(f.equal for f in faults)),
    )
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| fault | launcher | runs | named right | blamed wrongly | s to the name, median | worst | s to the end, median"
    " | worst | status not 0 | left behind | resumed equal |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="of each kind, with each launcher")
    parser.add_argument("--kills", type=int, default=0, help="instead of faults: this often, in one run")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--within", type=float, default=10.0, help="seconds in which the rank has to be named")
    parser.add_argument("--starting", type=float, default=0.15, help="share of faults before the first step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for what the runs printed")
    args = parser.parse_args()
    rng, faults = random.Random(args.seed), list[Fault]()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as temporary:
        straight = Runs(Path(temporary) / "straight", "alone", args.steps, rng).finish()
        if args.kills:
            runs = Runs(Path(temporary) / "killed", "alone", args.steps, rng, restarts=10 * args.kills)
            said, equal = runs.killed_often(args.kills), runs.weights() == straight
            print(f"{said}: the run ended by itself, its weights are {'the same, bit for bit' if equal else 'OTHERS'}")
            sys.exit(not equal)
        for launcher in args.launchers:
            runs = Runs(Path(temporary) / launcher, launcher, args.steps, rng, args.starting)
            wanted, chain = [*args.kinds] * args.faults, list[Fault]()
            while wanted:
                fault = runs.once(wanted[0])
                if fault is not None:
                    wanted.pop(0)
                    chain.append(fault)
                    print(json.dumps(vars(fault)), flush=True)
                    if args.keep:
                        args.keep.mkdir(parents=True, exist_ok=True)
                        shutil.copy(runs.log, args.keep / f"{launcher}-{len(wanted)}-{fault.kind}.log")
                if fault is None or not wanted:  # the chain of resumed runs is at its end
                    equal, files = runs.finish() == straight, [p.name for p in runs.temporary.iterdir()]
                    for f in chain:
                        f.equal = equal
                        f.left += [name for name in files if not name.startswith("torch")]  # its cache, and torchrun's
                    faults, chain = [*faults, *chain], []
    kinds = [(k, n) for n in args.launchers for k in args.kinds]
    rows = [row(k, n, [f for f in faults if (f.kind, f.launcher) == (k, n)], args.within) for k, n in kinds]
    print("\n".join([HEAD, *rows]))
    sys.exit(not all(right(f, args.within) and f.status and not f.left and f.equal for f in faults))


if __name__ == "__main__":
    main()
