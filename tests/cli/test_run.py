"""`shardc run` loses nothing: data that differs, fails or ends, a loss of nan, a signal, folders that are taken."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from shardc import torch_private
from shardc.cli.model_file import load, seed_everything
from shardc.cli.options import given
from shardc.cli.ranks import save_lock
from shardc.cli.ranks.make_job import run_folder
from shardc.cli.ranks.save_lock import check_shared, lock, lock_all
from shardc.cli.ranks.step_lines import StepLines, duration
from shardc.cli.ranks.training_data import Batches
from shardc.cli.run import _settings
from shardc.cli.run import command as command_of_run
from shardc.errors import ShardcError
from shardc.runtime.launch import free_port
from shardc.spec import Run
from tests import warm
from tests.cli.test_cli import MODEL as MLP

MODEL = """
import os, signal, time, shardc, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps = 0

@torch.library.custom_op("test_run::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    global steps
    steps += 1
    once = os.path.exists("failed")
    if MODE in ("op raises", "op raises once") and steps == 3 and os.environ.get("RANK") == "1" and not once:
        if MODE == "op raises once":
            open("failed", "w").close()
        raise OSError("the machine is tired")
    if MODE == "asks for a save" and steps == 3 and "RANK" in os.environ:
        os.kill(os.getpid(), signal.SIGUSR1)
    if MODE in ("op hangs", "op stops") and steps == 3 and os.environ.get("RANK") == "1":
        if MODE == "op stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    return x.clone()

checked.register_fake(torch.empty_like)
checked.register_autograd(lambda ctx, g: g)
shardc.rule(checked, "... -> ...", linear="0", samples=[lambda: (torch.randn(4, 6),)])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return (self.down(checked(self.up(x)).relu()) - x).square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.randn(8, 8)}

def data(split):
    if split != "train":
        return None
    if MODE == "loader":
        rows = TensorDataset(torch.randn(24, 8))
        return DataLoader(rows, batch_size=8, shuffle=True, collate_fn=lambda s: {"x": torch.stack([x for x, in s])})
    if MODE in ("a dataset", "a longer dataset"):
        return Dicts(3 if MODE == "a dataset" else 6)
    return stream()

class Dicts(torch.utils.data.Dataset):
    def __init__(self, batches):
        self.rows = torch.linspace(-1, 1, 64 * batches).view(-1, 8)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return {"x": self.rows[i]}

def optimizer(params):
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            # not while it is tried on a small sample, before any data is read; the first batch is read twice
            if MODE == "optimizer raises" and read == 4 and os.environ.get("RANK") == "1":
                raise OSError("no room for its state")
            super().step()

    return Mine(params, lr=1e-2)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1 if MODE == "a longer dataset" else 1.0)

read = 0

def stream():
    global read
    for i in range(3):
        read += 1
        time.sleep(0.05 if MODE == "slow" else 0)
        if MODE == "raises" and i == 2 and os.environ.get("RANK") == "1":
            raise OSError("the disk is gone")
        x = batch()["x"]
        yield {"x": x * float("nan") if MODE == "nan" and i == 2 else x}

if MODE == "parts":
    def data(split, part, parts):
        with open(f"part{os.environ['RANK']}", "a") as f:
            print(part, parts, file=f)
        rows = ({"x": torch.linspace(-1, 1, 64).view(8, 8).chunk(parts)[part] + i} for i in range(3))
        return rows if split == "train" else None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 1, tp: 2}\nshard: {up: column, down: row}\n")
    return tmp_path


def command(folder: Path, mode: str, *args: str) -> list[str]:
    (folder / "model.py").write_text(MODEL.replace("MODE", repr(mode)))
    return [sys.executable, "-m", "shardc", "run", "model.py", "spec.yaml", *args]


def run(folder: Path, mode: str, *args: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*command(folder, mode, *args)[3:], cwd=folder)  # type: ignore[no-any-return]


def test_a_shuffling_data_loader_trains_alike_on_every_mesh(folder: Path) -> None:
    found: list[dict[str, Any]] = []
    for mesh in ("dp=1,tp=1", "dp=1,tp=2"):
        done = run(folder, "loader", "--steps", "5", "--mesh", mesh, "--json")
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-6)
    assert len(set(found[0]["losses"])) == 5


def test_data_that_ends_begins_again_and_a_header_says_what_runs(folder: Path) -> None:
    done = run(folder, "stream", "--steps", "7", "--mesh", "dp=1,tp=1")
    assert done.returncode == 0, done.stderr
    for text in ("Net: 280 parameters, float32", "Mine, lr 0.01; 7 steps", "data: global batches of a generator"):
        assert text in done.stdout
    assert "step     7" in done.stdout


def test_an_error_in_data_on_one_rank_saves_first(folder: Path) -> None:
    done = run(folder, "raises", "--steps", "9", "--save", "out")
    assert done.returncode == 1
    said = "rank 1 (dp=0, tp=1) failed in data(), after step 2: saved to out; continue with --resume out"
    assert said in done.stderr
    assert "OSError: the disk is gone" in done.stderr
    done = run(folder, "stream", "--steps", "3", "--resume", "out", "--json")
    assert json.loads(done.stdout)["step"] == 3


def test_a_loss_of_nan_stops_and_keeps_what_was_before(folder: Path) -> None:
    done = run(folder, "nan", "--steps", "9", "--save", "out", "--save-every", "1")
    assert done.returncode == 2
    assert "step 3: the loss of step 3 is nan; mul of " in done.stderr or "of up" in done.stderr
    assert "the state before that step is in out/step-3-not-finite" in done.stderr
    assert (folder / "out" / "checkpoint").is_dir()
    assert not (folder / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("mesh", ["dp=2,tp=1", "dp=1,tp=2"])
def test_an_error_in_a_step_on_one_rank_ends_all_and_saves_first(folder: Path, mesh: str) -> None:
    done = run(folder, "op raises", "--steps", "9", "--save", "out", "--mesh", mesh)
    assert done.returncode == 1, done.stderr
    assert "step 3 failed: after step 2: saved to out; continue with --resume out" in done.stderr
    assert "OSError: the machine is tired" in done.stderr
    done = run(folder, "stream", "--steps", "3", "--resume", "out", "--json")
    assert json.loads(done.stdout)["step"] == 3


def test_an_error_in_an_update_on_one_rank_ends_all(folder: Path) -> None:
    done = run(folder, "optimizer raises", "--steps", "9", "--save", "out", "--save-every", "2")
    assert done.returncode == 1, done.stderr
    assert "rank 1 (dp=0, tp=1) failed with exit status 1 in step 3, at " in done.stderr
    assert "step 3 failed: some ranks had already updated, so nothing was saved" in done.stderr
    assert "the last checkpoint is in out" in done.stderr
    assert "OSError: no room for its state" in done.stderr
    assert [p.name for p in (folder / "out" / "checkpoint").iterdir() if p.is_dir()] == ["step-000002"]


HOLES = (
    MLP
    + """
from torch.utils.data import DataLoader, Dataset, default_collate

class Rows(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):  # the first batch lacks a row, the third is nan
        x = torch.full((8,), i / 40.0)
        return None if i == 5 else {"x": x * float("nan") if 16 <= i < 24 else x}

def batch():
    return {"x": torch.ones(8, 8)}

def collate(samples):
    return default_collate([x for x in samples if x is not None])

def data(split):
    return DataLoader(Rows() if split == "train" else torch.utils.data.Subset(Rows(), range(8)), 8, collate_fn=collate)
"""
)


def test_a_run_with_bad_samples_that_goes_back(folder: Path) -> None:
    """Rows that collate leaves out, a skipped update, an older checkpoint, the last held-out loss."""
    (folder / "model.py").write_text(HOLES)
    options = ("--steps", "4", "--nonfinite", "skip", "--save", "a", "--save-every", "1", "--keep", "9", "--log", "log")
    common = ("run", "model.py", "spec.yaml", *options)
    done = warm.run(*common, "--mesh", "dp=1,tp=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "1 of 4 updates were left out: their loss or gradient was nan or inf" in done.stdout
    assert done.stdout.count("1 skipped") == 1
    alone = (folder / "log" / "steps.jsonl").read_text()
    done = warm.run(*common, "--mesh", "dp=2,tp=2", "--resume", "a/checkpoint/step-000002", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    again = (folder / "log" / "steps.jsonl").read_text()
    assert "NaN" not in alone + again + done.stdout + (folder / "log" / "summary.json").read_text()
    first, second = ([json.loads(line) for line in text.splitlines()] for text in (alone, again))
    assert [x["step"] for x in second] == [1, 2, 3, 4]
    assert (
        [x.get("updated", True) for x in first] == [x.get("updated", True) for x in second] == [True, True, False, True]
    )
    assert second[:2] == first[:2]
    assert [x["loss"] for x in second[2:]] == [None, pytest.approx(first[3]["loss"], rel=1e-5)]
    summary = json.loads(done.stdout)
    assert (summary["skipped"], summary["losses"][0]) == (1, None)
    assert second[3]["held_out"] == summary["held_out"] == pytest.approx(first[3]["held_out"], rel=1e-5)


def test_variables_that_another_job_left_behind(folder: Path) -> None:
    left = {"RANK": "3", "LOCAL_RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (folder / "taken" / "checkpoint" / "step-000001").mkdir(parents=True)
    args = command(folder, "stream", "--steps", "1", "--json")[3:]
    done = warm.run(*args, cwd=folder, env=left)
    assert json.loads(done.stdout)["step"] == 1, done.stderr
    done = warm.run(*args, "--save", "taken", cwd=folder, env=left)
    assert "an earlier run's checkpoint is in taken" in done.stderr, "it is no restart of torchrun's"
    meeting = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for more, text in (
        (left, "the environment has RANK=3, but not MASTER_ADDR, MASTER_PORT"),
        (meeting, "the mesh has 2 ranks (dp=1 × tp=2), and the world has 4"),
    ):
        done = warm.run(*args, cwd=folder, env={"WORLD_SIZE": "4", **more})
        assert done.returncode == 2, done.stderr
        assert text in done.stderr
        assert "`unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE`" in done.stderr


def test_the_spec_says_how_to_run_and_options_win(folder: Path) -> None:
    section = "{steps: 3, save: out, auto_resume: true, log: log, trace: [2]}"
    (folder / "spec.yaml").write_text(
        f"shardc: 1\nmesh: {{dp: 1, tp: 2}}\nshard: {{up: column, down: row}}\nrun: {section}\n"
    )
    done = run(folder, "stream", "--json")
    assert json.loads(done.stdout)["step"] == 3, done.stderr
    done = run(folder, "stream", "--json", "--steps", "5")  # the same command goes on
    summary = json.loads(done.stdout)
    assert (summary["step"], summary["steps"]) == (5, 2), done.stderr
    lines = [json.loads(line) for line in (folder / "log" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {"seconds", "data_wait", "tflops", "bytes", "loss", "grad_norm", "lr", "memory_mb"} <= lines[-1].keys()
    assert lines[-1]["bytes"] == {"tp": 256 + 4}  # with the norm of gradients
    trace = json.loads((folder / "log" / "trace-step2-rank0.json").read_text())
    ranges = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"}
    assert {"linear up", "linear_1 down", "linear_1_sum down"} <= ranges


def test_numbers_are_read_every_so_many_steps(folder: Path) -> None:
    """All steps are in steps.jsonl nevertheless, with the losses of a run that reads each; what was not read when a
    step fails, is read then."""
    told = {}
    for log, every in (("each", "1"), ("rarely", "3")):
        done = run(
            folder, "stream", "--json", "--steps", "5", "--mesh", "dp=1,tp=1", "--log", log, "--log-every", every
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / log / "steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        told[log] = [(line["loss"], line["grad_norm"], line["lr"]) for line in lines]
        assert json.loads(done.stdout)["losses"] == [line["loss"] for line in lines]
    assert told["each"] == told["rarely"]
    done = run(folder, "raises", "--steps", "9", "--log", "failed", "--log-every", "9")
    assert done.returncode != 0
    lines = [json.loads(line) for line in (folder / "failed" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_data_may_give_a_part_of_each_batch(folder: Path) -> None:
    """Ranks of one tensor-parallel group have one part; steps are those of global batches; a resume goes on in it."""
    whole = run(folder, "parts", "--steps", "3", "--mesh", "dp=1,tp=1", "--json")
    done = run(folder, "parts", "--steps", "2", "--mesh", "dp=2,tp=1", "--json", "--save", "out")
    assert done.returncode == 0, done.stderr
    assert {(folder / f"part{r}").read_text().splitlines()[-1] for r in range(2)} == {"0 2", "1 2"}
    losses = json.loads(done.stdout)["losses"]
    done = run(folder, "parts", "--steps", "3", "--mesh", "dp=1,tp=2", "--json", "--resume", "out")
    assert done.returncode == 0, done.stderr
    assert [(folder / f"part{r}").read_text().splitlines()[-1] for r in range(2)] == ["0 1", "0 1"]
    assert losses + json.loads(done.stdout)["losses"] == pytest.approx(json.loads(whole.stdout)["losses"], rel=1e-5)


def test_each_key_of_the_section_is_an_option() -> None:
    options = inspect.signature(command_of_run).parameters
    for name, text in {
        "steps": "(default: 100, or what --epochs needs)",
        "keep": "to keep in --save",
        "timeout": "0 = torch's",
    }.items():
        _, option = get_args(options[name].annotation)
        assert text in option.help
    assert Run.model_fields.keys() < options.keys()
    assert given({"save": Path("~/a"), "trace": [2], "steps": 0, "clip": None, "breakdown": []}) == {
        "save": str(Path.home() / "a"),
        "trace": (2,),
        "steps": 0,
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trace": (2,)}, "trace needs a folder to write to"),
        ({"memory_snapshot": (2,)}, "memory-snapshot needs a folder to write to"),
        ({"tensorboard": True}, "tensorboard needs a folder to write to"),
        ({"track": ("tensorboard",)}, "tensorboard needs a folder to write to"),
        ({"auto_resume": True}, "a restart needs a saved checkpoint"),
        ({"save_every": 2}, "checkpoints need a folder"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        _settings(Run(), **options)
    _settings(Run(save="out"), auto_resume=True)


def test_sigusr1_asks_for_a_checkpoint(folder: Path) -> None:
    done = run(folder, "asks for a save", "--steps", "9", "--save", "out")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (folder / "out" / "checkpoint").glob("step-*")) == ["step-000004", "step-000009"]


def test_a_rank_that_hangs_is_named_while_the_others_wait(folder: Path) -> None:
    done = run(folder, "op hangs", "--steps", "9", "--watch", "1", "--timeout", "6", "--log", "log")
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    line = MODEL.splitlines().index("        time.sleep(1000)") + 1
    assert re.fullmatch(
        rf"rank 1 \(dp=0, tp=1\) keeps the others waiting for 1 s: it is at model.py:{line}, in checked, in step 3, at"
        r" all_reduce .*; rank 0 waits for it in step 3, at all_reduce 'linear_1_sum' over tp",
        first,
    ), first
    assert (
        "the time limit passed before another rank reached all_reduce 'linear_1_sum' over tp, in step 3" in done.stderr
    )
    others = [line for line in done.stderr.splitlines() if not line.startswith("rank 1 (dp=0, tp=1) keeps the others")]
    assert not any("rank 0" in line for line in others), "it is not the one that failed"

    for rank in range(2):  # of both, what torch's flight recorder has
        record = json.loads((folder / "log" / f"flight-rank{rank}.json").read_text())
        assert {"gloo:all_reduce"} <= {e["profiling_name"] for e in record["entries"]}


def test_snapshots_of_memory_are_refused_where_there_is_no_gpu(folder: Path) -> None:
    done = run(folder, "stream", "--steps", "1", "--memory-snapshot", "1", "--log", "log", "--mesh", "dp=1,tp=1")
    assert done.returncode == 2
    assert "--memory-snapshot: CUDA's allocator holds nothing: the run is on cpu" in done.stderr


def test_a_snapshot_of_memory_ends_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's allocator: recording begins, is written, and ends, also where the step fails."""
    did: list[Any] = []
    monkeypatch.setattr(torch_private.gpu, "_record_memory_history", lambda **how: did.append(how))
    monkeypatch.setattr(torch_private.gpu, "_dump_snapshot", did.append)
    file = tmp_path / "log" / "memory-step1-rank0.pickle"
    with pytest.raises(OSError, match="tired"), torch_private.memory_recorded(file):
        raise OSError("tired")
    assert did == [{"max_entries": 1_000_000}, str(file), {"enabled": None}]
    assert file.parent.is_dir()


def test_a_rank_that_is_stopped_is_named_and_ends_all(folder: Path) -> None:
    done = run(folder, "op stops", "--steps", "9")
    assert done.returncode == 1
    assert "rank 1 (dp=0, tp=1) was stopped (SIGSTOP) for 6 s in step 3, at all_reduce" in done.stderr
    assert "all ranks were ended" in done.stderr


def test_a_run_that_failed_begins_again_from_its_last_checkpoint(folder: Path) -> None:
    args = ("--steps", "5", "--save", "out", "--json")
    done = run(folder, "op raises once", *args, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, from the checkpoint in out" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 5


def test_a_signal_saves_and_says_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (log := folder / "log").touch()
    process = warm.start(*command(folder, "slow", "--steps", "100000", "--save", "out")[1:], log=log)
    while not re.search("^step ", log.read_text(), re.MULTILINE):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step" in log.read_text()
    assert "saved to out; continue with --resume out" in log.read_text()
    assert (folder / "out" / "checkpoint").is_dir()


def test_a_terminal_that_closes_saves_too(folder: Path) -> None:
    """Nobody reads its lines any more, then SIGHUP comes."""
    with subprocess.Popen(
        command(folder, "slow", "--steps", "100000", "--save", "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("step ") for line in process.stdout)
        process.stdout.close()
        time.sleep(3.0)  # some lines more
        assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGHUP
    assert errors.count("note: standard output is closed (Broken pipe): the run goes on") == 1
    assert "stopped by SIGHUP after step" in errors
    assert (folder / "out" / "checkpoint").is_dir()


def test_output_that_cannot_be_written_is_left_out() -> None:
    """A disk that is full: all prints of a process, ours and the user's, and no error at its end."""
    code = "from shardc.cli.ranks import lasting_output\nlasting_output.install()\n"
    code += "for i in range(3): print('x' * 99, flush=True)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.count("standard output is closed (No space left on device)") == 1
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == ("x" * 99 + "\n") * 3


def test_a_run_goes_on_with_more_data_and_another_schedule(folder: Path) -> None:
    done = run(folder, "a dataset", "--steps", "2", "--mesh", "dp=1,tp=1", "--save", "first")
    assert done.returncode == 0, done.stderr
    go_on = ("--steps", "6", "--mesh", "dp=1,tp=1", "--resume", "first", "--save", "second")
    done = run(folder, "a longer dataset", *go_on)
    assert done.returncode == 2
    assert "the checkpoint is in the middle of 24 samples, but this one is 48 samples" in done.stderr
    assert "begin with this one: load(folder, new_data=True), run: --new-data" in done.stderr
    options = ("--new-data", "--new-schedule", "--max-restarts", "1")
    done = run(folder, "a longer dataset", *go_on, *options, "--log", "log", "--save-every", "1")
    assert done.returncode == 0, done.stderr
    assert "data: from its beginning" in done.stdout
    assert "learning rates: the model file's, at its step" in done.stdout
    lines = [json.loads(x) for x in (folder / "log" / "steps.jsonl").read_text().splitlines()]
    assert [x["lr"] for x in lines if "lr" in x] == pytest.approx([1e-4, 1e-5, 1e-6, 1e-7])
    saved = json.loads(next((folder / "second" / "checkpoint" / "step-000006").glob("*.json")).read_text())
    (state,) = saved["extra"]["loaders"].values()
    assert (state["epoch"], state["consumed"], state["size"]) == (0, 32, 48)


def test_new_data_wants_checkpoints_apart(folder: Path) -> None:
    done = run(folder, "a dataset", "--new-data")
    assert done.returncode == 2
    assert "it needs a checkpoint, but none is resumed" in done.stderr
    done = run(folder, "a dataset", "--new-data", "--resume", "a", "--save", "a")
    assert done.returncode == 2
    assert "a restart could not know which data its checkpoints are of" in done.stderr


def test_one_run_at_a_time_saves_to_a_folder(folder: Path) -> None:
    file = lock(folder / "out")
    done = run(folder, "stream", "--steps", "3", "--save", "out")
    assert done.returncode == 2
    assert f"--save: another run trains into out (process {os.getpid()} on " in done.stderr
    assert "use another folder for this run" in done.stderr
    os.close(file)
    code = "import os, time; from pathlib import Path; from shardc.cli.ranks.save_lock import lock\n"
    code += "lock(Path('out'))\n"
    code += "if os.fork(): print('held', flush=True)\ntime.sleep(100)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=folder, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ShardcError, match="another run trains into"):
            lock(folder / "out")
        holder.kill()  # what it forked lives on, as a worker of a DataLoader would
        holder.wait()
        os.close(lock(folder / "out"))
        os.close(lock_all({"--save": str(folder / "out"), "--log": str(folder / "log")})[0])
        assert len(lock_all({"--save": str(folder / "out"), "--log": str(folder / "log" / ".." / "out")})) == 1
        os.killpg(holder.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--save", "taken"], "an earlier run's checkpoint is in taken"),
        (["--log", "logged"], "an earlier run's steps.jsonl is in logged"),
        (["--save", "file"], "--save: file is a file, not a folder"),
        (["--save", "file/below"], "file is a file, not a folder"),
    ],
)
def test_folders_are_tried_before_anything_runs(folder: Path, args: list[str], text: str) -> None:
    (folder / "taken" / "checkpoint" / "step-000001").mkdir(parents=True)
    (folder / "logged").mkdir()
    (folder / "logged" / "steps.jsonl").touch()
    (folder / "file").touch()
    done = run(folder, "stream", *args)
    assert done.returncode == 2
    assert text in done.stderr


# --- the parts


def test_an_iterator_is_made_again_for_each_epoch_and_draws_the_same_on_every_rank() -> None:
    def make() -> Any:
        return (torch.randn(()) for _ in range(2))

    seed_everything(5)
    first, second = (iter(Batches(make(), make, 5, local=False, description="")) for _ in range(2))
    drawn = [float(next(first)) for _ in range(5)]
    assert drawn == [float(next(second)) for _ in range(5)]
    assert len(set(drawn)) == 5


def test_data_without_a_batch_is_an_error() -> None:
    with pytest.raises(Exception, match=r"data\(\) returns no batch"):
        next(iter(Batches([], list, 0, local=False, description="")))


def test_lines_come_by_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    lines = StepLines(1000, sys.stdout, None, append=False)
    line = {"loss": 1.0, "grad_norm": 0.0, "lr": None, "samples_per_second": 1.0, "memory_mb": 1.0}
    for step in range(1, 1001):
        clock[0] += 0.5
        lines.add({"step": step, **line})
    printed = capsys.readouterr().out.splitlines()
    assert 40 < len(printed) < 100  # every 1 to 10 seconds of 500
    assert printed[1].startswith("note: lines come every 1 to 10 s")
    assert printed[2].endswith("left")
    assert printed[-1].startswith("step  1000")


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (725, "12 min 5 s"), (12000, "3 h 20 min"), (187200, "2 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_loss_may_be_a_module(tmp_path: Path) -> None:
    text = "import torch\nfrom torch import nn\nclass Loss(nn.Module):\n"
    text += "    def forward(self, output, batch): return output.mean()\n"
    text += "def model(): return nn.Linear(2, 2)\ndef batch(): return (torch.ones(2, 2),)\nloss = Loss()\n"
    (tmp_path / "model.py").write_text(text)
    file = load(str(tmp_path / "model.py"))
    assert file.loss is not None
    assert file.loss(torch.ones(2), None) == 1


@pytest.mark.parametrize("call", ["dist.init_process_group('gloo')", "torch.distributed.init_process_group()"])
def test_a_model_file_does_not_join_the_world_itself(tmp_path: Path, call: str) -> None:
    """It would wait for ranks that wait elsewhere."""
    text = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    text += "def model(): return nn.Linear(2, 2)\ndef batch(): return (torch.ones(2, 2),)\n"
    (tmp_path / "model.py").write_text(text + f"if __name__ == '__main__':\n    {call}\n")
    load(str(tmp_path / "model.py"))
    (tmp_path / "model.py").write_text(text + call)
    with pytest.raises(ShardcError, match=r"model.py:6: init_process_group: shardc run joins(.|\n)*__name__ ==") as e:
        load(str(tmp_path / "model.py"))
    assert call in str(e.value)
    inside = text.replace(
        "def model(): return nn.Linear(2, 2)", f"def model():\n    {call}\n    return nn.Linear(2, 2)"
    )
    (tmp_path / "model.py").write_text(inside)
    with pytest.raises(ShardcError, match=r"model.py:5: init_process_group: shardc run joins"):
        load(str(tmp_path / "model.py")).build()


def test_what_a_killed_run_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a long name would not be used (launch.temporary_folder)
        monkeypatch.setattr(tempfile, "tempdir", short)
        left = Path(short, "shardc-run-left")
        left.mkdir()
        (left / ".lock").touch()
        (left / "program").touch()
        with run_folder() as one, run_folder() as two:
            assert {*Path(short).iterdir()} == {one, two}, "one that is in use stays"
        assert not [*Path(short).iterdir()]


def test_a_save_folder_on_a_disk_of_one_machine_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no rank of another machine could save, and the first save would report it: at the end, perhaps."""
    monkeypatch.setattr(save_lock, "FAILING", 0.1)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    with pytest.raises(ShardcError, match=f"on node7, {tmp_path}/out is not the folder of rank 0") as e:
        check_shared(str(tmp_path / "out"))
    assert (e.value.where, "that all machines see" in e.value.fix) == ("--save", True)
    os.close(lock(tmp_path / "out"))
    for shared in (str(tmp_path / "out"), "", "s3://bucket/run"):
        check_shared(shared)
