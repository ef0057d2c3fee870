"""Reports about the run loops of others (docs/measured/faults.md), as small runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardc.cli.ranks.best import Best
from shardc.runtime import launch
from shardc.runtime.state.checkpoint_folder import generations
from shardc.spec import Run
from tests import warm
from tests.cli.test_run_loop import Engine, folder, run  # noqa: F401 (a fixture)


def logged(folder: Path, name: str, key: str) -> list[Any]:  # noqa: F811
    lines = (folder / name / "steps.jsonl").read_text().splitlines()
    return [json.loads(x).get(key) for x in lines]


def ended(done: Any) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_last_checkpoints_stay_beside_the_best(folder: Path) -> None:  # noqa: F811
    """transformers#11748: the last checkpoint was removed in place of the oldest, once the best had its turn."""
    each = ("--eval-every", "1", "--save-every", "1", "--keep", "2", "--keep", "best", "--json")
    assert ended(run(folder, "--steps", "6", "--save", "out", *each))["best"]["step"] == 1
    assert [g.step for g in generations(folder / "out" / "checkpoint")] == [6, 5, 1]


def test_a_folder_that_was_moved_keeps_its_best_and_another_one_says_where_it_is(folder: Path) -> None:  # noqa: F811
    """transformers#48315, #10412: the path of the best checkpoint was of a folder that is not there any more."""
    each = ("--eval-every", "1", "--keep", "1", "--keep", "best")
    ended(run(folder, "--steps", "3", "--save", "out", *each, "--json"))
    (folder / "out").rename(folder / "moved")
    summary = ended(run(folder, "--steps", "4", "--resume", "moved", "--save", "moved", *each, "--json"))
    assert summary["best"]["checkpoint"] == "moved/checkpoint/step-000001"
    other = run(folder, "--steps", "5", "--resume", "moved", "--save", "other", *each)
    assert "after step 1 (saved before the resume, to another folder)\n" in other.stdout, other.stderr
    found = warm.run("export", "model.py", "other", "weights", "--best", cwd=folder)
    assert found.returncode == 2
    assert "the best checkpoint of the run is not in this folder" in found.stderr
    assert "name the folder that the run saved to before a resume" in found.stderr


def test_the_last_step_is_evaluated_once_and_saved(folder: Path) -> None:  # noqa: F811
    """transformers#44146, #30160: a last step between two evaluations or saves had neither."""
    each = ("--eval-every", "2", "--save-every", "2", "--save", "out", "--log", "out", "--json", "--overwrite")
    for steps, evaluations in ((5, 3), (4, 2)):
        assert ended(run(folder, "--steps", str(steps), *each))["held_out"] is not None
        assert [x is not None for x in logged(folder, "out", "held_out")] == [
            n % 2 == 0 or n == steps for n in range(1, steps + 1)
        ]
        assert generations(folder / "out" / "checkpoint")[0].step == steps
        assert (folder / "calls-0").read_text().count("evaluated") == evaluations
        (folder / "calls-0").unlink()


def test_a_run_that_ends_with_its_patience_has_finished(folder: Path) -> None:  # noqa: F811
    """The last evaluation of all steps stops nothing. One earlier does."""
    for steps, state in ((3, "finished"), (4, "stopped early")):
        done = run(folder, "--steps", str(steps), "--eval-every", "1", "--patience", "2", "--json")
        assert ended(done)["state"] == state


def test_held_out_losses_that_are_nan_are_never_the_best_and_count_for_patience() -> None:
    """pytorch-lightning#2636: after a first nan nothing was better. ultralytics#19357: nan was best, without end."""
    engine = Engine()
    best = Best(Run(keep=("best",), patience=2, eval_every=1), engine)
    better = []
    for engine.step_count, value in enumerate((float("nan"), 2.0, float("nan"), float("nan")), 1):
        better.append(best.evaluated({"loss": value}))
    assert better == [False, True, False, False]
    assert best.stopped


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_a_schedule_counts_steps_and_takes_the_new_number_of_them(folder: Path, mesh: str) -> None:  # noqa: F811
    """diffusers#8312: warmup grew with the ranks. insightface#2143: a longer run kept the first run's end."""
    ended(run(folder, "--steps", "10", "--log", "straight", "--mesh", mesh, "--json"))
    ended(run(folder, "--steps", "4", "--save", "out", "--log", "out", "--json"))
    ended(run(folder, "--steps", "10", "--resume", "out", "--save", "out", "--log", "out", "--mesh", mesh, "--json"))
    straight, longer = logged(folder, "straight", "lr"), logged(folder, "out", "lr")
    assert straight[:3] == pytest.approx([0.025, 0.05, 0.05])
    assert straight[-1] == pytest.approx(0.05 / 8)
    assert longer[3] == pytest.approx(0.05 / 2), "as the shorter run took it"
    assert longer[4:] == pytest.approx(straight[4:])


def test_a_resume_at_and_after_the_last_step(folder: Path) -> None:  # noqa: F811
    """prime-rl#3352: it waited forever. pytorch-lightning#1922: it went on."""
    ended(run(folder, "--steps", "3", "--save", "out", "--json"))
    assert ended(run(folder, "--steps", "3", "--resume", "out", "--save", "out", "--json"))["steps"] == 0
    done = run(folder, "--steps", "2", "--resume", "out")
    assert done.returncode == 2
    assert "the checkpoint is of step 3, after the last step of this run, 2" in done.stderr


def test_an_interactive_shell_of_slurm_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch-lightning#16955: the variables of `srun --pty bash` were taken for those of a task."""
    shell = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    for name, value in {**shell, "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    launch.join_slurm()
    assert not launch.in_world()
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")  # a batch script, outside of any srun
    assert not launch.in_world()
