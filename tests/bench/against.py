"""Step time of this tree against another commit's: `python tests/bench/against.py COMMIT --spec '{...}'`.

Both train the benchmark's Llama (SHARDC_BENCH is its size) on two gloo processes of one thread, from the same seed, and
take turns, a step each, round after round. Prints the median over rounds of (this tree / COMMIT), and fails if their
losses differ.

With `--link 3gbit` all of it runs in a network namespace of its own whose loopback carries no more than that (tc's token
bucket; needs root, unshare and tc). Bytes then wait in the kernel, not on a core: on a machine of two cores this is the
only way to see whether communication hides behind compute, as it does between machines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO, Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 2
ZERO_3 = '{mesh: {dp: 2}, data: {zero: 3, bucket_mb: 4}, checkpoint: [{match: "model.layers.*"}]}'


class Tree:
    """The processes of one tree: each reads orders from its standard input, and rank 0 answers."""

    def __init__(self, source: Path, folder: Path, spec: str) -> None:
        folder.mkdir()
        linked = folder / "linked"  # as the installed package looks
        (linked / "shardc").mkdir(parents=True)
        inside = {f.name: f for f in (*source.glob("shardc/*"), *(source / p for p in ("passes", "runtime", "specs")))}
        for name, f in inside.items():  # trees before 2026-11-29 have these three at the top alone
            (linked / "shardc" / name).symlink_to(f)
        here = {"PYTHONPATH": f"{linked}:{HERE}", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", str(folder / "meeting"), "--rank", str(rank), "--spec", spec],
                env=os.environ | here,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and its loss."""
        for process in self._ranks:
            _pipe(process.stdin).write("step\n")
            _pipe(process.stdin).flush()
        words, *_ = [_pipe(process.stdout).readline().split() for process in self._ranks]
        if len(words) != 2:
            raise SystemExit("a process failed: see above")
        return float(words[0]), float(words[1])

    def close(self) -> None:
        for process in self._ranks:
            _pipe(process.stdin).close()
            process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def serve(meeting: Path, rank: int, spec: dict[str, Any]) -> None:
    """One process: a step for each line that is read."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compile and torch print is no answer
    import llama
    import torch
    import torch.distributed as dist

    import shardc

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model, batch = llama.model(), llama.batch()
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
    engine = program.engine(model, optimizer=llama.optimizer)
    for _ in sys.stdin:
        began = time.perf_counter()
        loss = float(engine.step(batch))
        answers.write(f"{time.perf_counter() - began} {loss}\n")
    dist.destroy_process_group()


def linked(rate: str) -> None:
    """This command again, on a loopback of `rate` (as tc writes it: 500mbit, 3gbit). Does not return."""
    slow = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 512kb limit 256mb"
    words = [w for i, w in enumerate(sys.argv) if "--link" not in (w, sys.argv[i - 1]) and not w.startswith("--link=")]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", f'{slow} && exec "$@"', "sh", sys.executable, *words])


def main(commit: str, rounds: int, spec: str) -> int:
    with tempfile.TemporaryDirectory(prefix="shardc-against-") as name:
        folder = Path(name)
        tree = folder / "source"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            ours, theirs = Tree(ROOT, folder / "ours", spec), Tree(tree, folder / "theirs", spec)
            ratios, differ = [], 0.0
            for r in range(rounds + 2):
                pair = [ours.step(), theirs.step()] if r % 2 else [theirs.step(), ours.step()][::-1]
                (a, loss), (b, other) = pair
                differ = max(differ, abs(loss - other) / abs(other))
                if r > 1:  # what is learnt in the first steps is known
                    ratios.append(a / b)
                    print(f"round {r - 1} of {rounds}: {1000 * a:.0f} ms, {commit} {1000 * b:.0f} ms", flush=True)
            ours.close()
            theirs.close()
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
            shutil.rmtree(tree, ignore_errors=True)
    print(f"{median(ratios):.3f}x of {commit}'s step time ({min(ratios):.2f}-{max(ratios):.2f} over {rounds} rounds)")
    print(f"losses agree to {differ:.0e}")
    return 0 if differ < 1e-4 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--spec", default=ZERO_3, help=f"a spec's sections; by default {ZERO_3}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--link", metavar="RATE", help="of the network between the ranks: 500mbit, 3gbit")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rank, yaml.safe_load(given.spec))
    elif not given.commit:
        parser.error("name a commit")
    else:
        if given.link:
            linked(given.link)
        sys.exit(main(given.commit, given.rounds, given.spec))
