"""The loops of examples/grpo.py and examples/on_policy.py: they learn, they compute what the rollouts' process computed,
and kills change nothing. More kills: `python -m tests.test_post_training FOLDER 10`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples import grpo

ROOT = Path(__file__).parents[1]


def started(example: str, folder: Path, steps: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(ROOT / "examples" / f"{example}.py"), str(folder), "--steps", str(steps)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)  # type: ignore[call-overload,no-any-return]


def finished(process: subprocess.Popen[str], folder: Path) -> list[dict[str, Any]]:
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def killed(process: subprocess.Popen[str], folder: Path, victims: dict[int, int]) -> None:
    """Kill the processes of these numbers (0: the rollouts) when these many steps are done."""
    for steps, number in victims.items():
        while process.poll() is None and _done(folder) < steps:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, OSError, IndexError, ValueError):
            os.kill(int((folder / "pids").read_text().split()[number]), signal.SIGKILL)


def _done(folder: Path) -> int:
    return (folder / "steps.jsonl").read_text().count("\n") if (folder / "steps.jsonl").exists() else 0


def test_grpo_learns_and_kills_change_nothing(tmp_path: Path) -> None:
    lines = finished(started("grpo", tmp_path / "one", 9), tmp_path / "one")
    assert [x["step"] for x in lines] == list(range(9))
    assert lines[0]["reward"] < 0.65
    assert lines[-1]["reward"] > 0.9  # 192 tokens by chance: 0.5 ± 0.04
    assert max(x["off"] for x in lines) < 1e-5  # float32 on both sides
    process = started("grpo", tmp_path / "two", 4)
    killed(process, tmp_path / "two", {1: 0, 3: 2})
    assert finished(process, tmp_path / "two") == lines[:4]


def test_on_policy_distillation_learns(tmp_path: Path) -> None:
    lines = finished(started("on_policy", tmp_path, 25), tmp_path)
    first, last = (sum(x["loss"] for x in part) for part in (lines[:3], lines[-3:]))
    assert last < 0.75 * first
    assert max(x["off"] for x in lines) < 1e-5


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    undisturbed = finished(started("grpo", folder / "one", 2 * kills), folder / "one")
    process = started("grpo", folder / "two", 2 * kills)
    killed(process, folder / "two", {2 * i + 1: i % (1 + grpo.TRAINERS) for i in range(kills)})
    assert finished(process, folder / "two") == undisturbed
    print(f"{kills} kills, {len(undisturbed)} steps: the same to the bit")


if __name__ == "__main__":
    main()
