"""The run loop: the best step, early stops, epochs, schedules that wait for losses, callbacks, the spec's optimizer."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset
from typer.testing import CliRunner

import shardc
from shardc.cli import app
from shardc.cli.options import PANELS
from shardc.cli.ranks.best import Best
from shardc.cli.ranks.training_data import Batches
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.checks.callbacks import MOMENTS, Callbacks
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state.checkpoint_folder import best_of, generations, prune
from shardc.runtime.step.schedulers import factor
from shardc.spec import Run
from tests import warm

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x, y):
        return (self.down(self.norm(self.up(x)).relu()) - y).square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.ones(8, 8), "y": torch.ones(8, 8)}

def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

def data(split):
    x = torch.linspace(-1, 1, 8 * (24 if split == "train" else 8)).view(-1, 8)
    return TensorDataset(x, x if split == "train" else -x)  # held-out data get worse and worse

class Log:
    rank0 = ONCE

    def __getattr__(self, moment):
        if moment not in ("run_begins", "logged", "evaluated", "saved", "run_ends"):
            raise AttributeError(moment)
        def write(engine, facts):
            if moment == FAILS:
                raise KeyError("a key of the user")
            with open(f"calls-{engine.mesh.rank}", "a") as f:
                print(moment, facts.get("step", facts.get("begun", "")), facts.get("state", ""), file=f)
        return write

callbacks = [Log()]
"""
SPEC = """
shardc: 1
mesh: {dp: 2}
optimizer: {name: sgd, lr: 0.05, momentum: 0.5, no_decay: ["*.bias", norm], schedule: {name: linear, warmup: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def run(folder: Path, *args: str, fails: str = "", once: bool = True) -> Any:
    (folder / "model.py").write_text(MODEL.replace("FAILS", repr(fails)).replace("ONCE", str(once)))
    return warm.run("run", "model.py", "spec.yaml", *args, cwd=folder)


def test_the_best_checkpoint_stays_and_a_run_stops_early_and_both_survive_a_resume(folder: Path) -> None:
    args = ("--epochs", "4", "--save", "out", "--log", "out", "--eval-every", "1", "--keep", "1", "--keep", "best")
    done = run(folder, *args, "--patience", "9", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    lines = [json.loads(x) for x in (folder / "out" / "steps.jsonl").read_text().splitlines()]
    held_out = [x["held_out"] for x in lines]
    best = held_out.index(min(held_out)) + 1
    assert summary["state"] == "stopped early"
    assert summary["step"] == len(lines) == best + 9
    assert summary["best"]["step"] == best
    assert summary["best"]["value"] == min(held_out)
    assert [x["epoch"] for x in lines] == pytest.approx([n / 3 for n in range(1, len(lines) + 1)], abs=1e-6)
    kept = generations(folder / "out" / "checkpoint")
    assert [g.step for g in kept] == [best + 9, best]
    assert (found := best_of(folder / "out" / "checkpoint")) is not None
    assert found.path == folder / summary["best"]["checkpoint"]

    # on one rank, with more patience, it goes on; with the same, it has stopped already
    again = run(folder, *args, "--patience", "9", "--resume", "out", "--mesh", "dp=1", "--json")
    assert json.loads(again.stdout)["steps"] == 0, again.stderr
    more = run(folder, *args, "--patience", "10", "--resume", "out", "--mesh", "dp=1")
    assert more.returncode == 0, more.stderr
    assert f"stopped early after step {best + 10}: 10 evaluations brought nothing better" in more.stdout
    assert f"best held-out loss {min(held_out):.4g} after step {best}: out/checkpoint/step-{best:06d}" in more.stdout
    assert [g.step for g in generations(folder / "out" / "checkpoint")] == [best + 10, best]
    prune(folder / "out" / "checkpoint", 1)
    assert [g.step for g in generations(folder / "out" / "checkpoint")] == [best + 10, best]
    calls = (folder / "calls-0").read_text().splitlines()
    assert calls[0] == "run_begins 0 "
    assert calls[1:3] == ["evaluated  ", "logged 1 "]
    assert "saved 1 " in calls
    assert [x for x in calls if "run_" in x][1:3] == [f"run_ends {best + 9} stopped early", f"run_begins {best + 9} "]
    assert not (folder / "calls-1").exists(), "rank0 = True"


@pytest.mark.parametrize("moment", ["run_begins", "evaluated", "saved"])
def test_an_error_in_a_callback_names_it_and_saves_first(folder: Path, moment: str) -> None:
    done = run(folder, "--steps", "3", "--save", "out", "--eval-every", "2", fails=moment, once=False)
    assert done.returncode == 1
    assert f"in the callback Log, {moment}" in done.stderr
    assert "a key of the user" in done.stderr
    assert "after step" in done.stderr
    assert generations(folder / "out" / "checkpoint"), done.stderr


def test_what_a_callback_may_be() -> None:
    class Mistyped:
        def on_step_done(self) -> None: ...

    with pytest.raises(
        ShardcError, match=r"callbacks\[0\]: a Mistyped has none of the(.|\n)*'step_done' by 'on_step_done'"
    ):
        Callbacks([Mistyped()])
    with pytest.raises(ShardcError, match=r"the class Mistyped, not an object"):
        Callbacks([Mistyped])
    calls: list[Any] = []
    first, second = SimpleNamespace(rank0=True, step_done=lambda *x: calls.append(x)), lambda *x: calls.append(x)
    of = Callbacks([first, second])
    for rank in range(2):
        engine = SimpleNamespace(mesh=SimpleNamespace(rank=rank, activity=Activity(), layout=Mesh.of({"dp": 2})))
        of.call("step_done", engine, rank)
        of.call("logged", engine, rank)
    assert [rank for _, rank in calls] == [0, 0, 1]
    assert "step_done" in MOMENTS


@pytest.mark.parametrize(
    ("name", "meant"),
    [("on_stepp", "step_done"), ("logg", "logged"), ("evaluate", "evaluated"), ("on_fit_start", ""), ("log", None)],
)
def test_a_misspelt_method_beside_a_right_one(name: str, meant: str | None) -> None:
    one = SimpleNamespace(saved=print, **{name: print})
    if meant is None:  # a helper
        Callbacks([one])
        return
    fix = f"did you mean '{meant}' by '{name}'" if meant else "run_begins, step_done"
    with pytest.raises(ShardcError, match=rf"callbacks\[0\]: nothing calls {name} of a(.|\n)*fix: {fix}"):
        Callbacks([one])


class Engine(SimpleNamespace):
    """As much of an engine as `Best` reads."""

    def __init__(self, **more: Any) -> None:
        program = SimpleNamespace(outputs=[SimpleNamespace(name="accuracy")])
        mesh = SimpleNamespace(rank=0, sum_on_host=list)
        super().__init__(program=program, mesh=mesh, extra={}, step_count=0, **more)


def test_the_best_of_a_metric() -> None:
    engine = Engine()
    best = Best(
        Run(keep=("best",), metric="accuracy", metric_mode="max", min_delta=0.1, patience=2, eval_every=1), engine
    )
    better = []
    for engine.step_count, value in enumerate([math.nan, 0.5, 0.55, 0.7, 0.1, math.nan], 1):
        better.append(best.evaluated({"accuracy": value, "loss": 0.0}))
        engine.extra = json.loads(json.dumps(engine.extra))  # as a checkpoint keeps it
    assert better == [False, True, False, True, False, False]
    assert engine.extra["best"] == {"metric": "max accuracy", "value": 0.7, "step": 4, "stale": 2}
    assert best.stopped
    assert not Best(Run(patience=2), engine).state, "another metric"
    with pytest.raises(ShardcError, match=r"no held-out value 'acuracy'(.|\n)*did you mean 'accuracy'"):
        Best(Run(patience=2, metric="acuracy"), engine).check(held_out=True)
    with pytest.raises(ShardcError, match="no held-out data to choose the best step by"):
        best.check(held_out=False)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


def test_epochs_of_data_with_and_without_a_length() -> None:
    listed = Batches([1, 2, 3, 4], list, 0, local=False, description="")
    stream = iter(listed)
    positions = [(next(stream), listed.position)[1] for _ in range(6)]
    assert positions == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert listed.steps(2.5, 6) == 10
    assert listed.steps(0.3, 0) == 2
    for source in (Stream(), DataLoader(Stream()), (x for x in range(3))):
        unsized = Batches(source, list, 0, local=False, description="")
        with pytest.raises(ShardcError, match=r"does not say how many batches an epoch has(.|\n)*--steps N"):
            unsized.steps(1.0, 0)
        assert unsized.position == 0.0
    assert Batches([1], list, 0, local=False, description="", endless=True).position is None


def test_epochs_on_any_mesh_and_after_a_resume(folder: Path) -> None:
    """The first of --steps and --epochs to end counts."""
    done = run(folder, "--epochs", "1.5", "--json", "--save", "out")
    assert json.loads(done.stdout)["step"] == 5, done.stderr  # of 3 batches each
    done = run(folder, "--epochs", "3", "--json", "--resume", "out", "--mesh", "dp=1")
    assert json.loads(done.stdout)["step"] == 9, done.stderr
    done = run(folder, "--epochs", "3", "--steps", "2", "--json", "--mesh", "dp=1")
    assert json.loads(done.stdout)["step"] == 2, done.stderr


# --- optimizers and schedules


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.norm(self.up(x)).relu()) - x).square().mean()


X = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)


def program(mesh: dict[str, int], **more: Any) -> Any:
    return shardc.compile(Mlp().double(), {"x": X}, {"shardc": 1, "mesh": mesh, **more}, prove=False)


def trained(program: Any, steps: int = 4, **options: Any) -> dict[str, Tensor]:
    """The weights after some steps."""
    model = Mlp().double()  # ranks are threads, which share the seed

    def work(mesh: Any) -> dict[str, Tensor]:
        engine = program.engine(model, mesh=mesh, **options)
        for _ in range(steps):
            engine.step({"x": X})
        return engine.full_state_dict()  # type: ignore[no-any-return]

    return loopback(program.mesh, work)[0]


SECTION = {"name": "adamw", "lr": 0.01, "weight_decay": 0.3, "betas": [0.8, 0.9], "no_decay": ["*.bias", "norm"]}
SCHEDULE = {"name": "cosine", "warmup": 2, "least": 0.1, "steps": 6}


@pytest.mark.parametrize("more", [{}, {"data": {"zero": 3}}, {"shard": {"up": "column", "down": "row"}}], ids=str)
def test_the_specs_optimizer_is_one_devices(more: dict[str, Any]) -> None:
    """On two ranks as torch's AdamW, groups and LambdaLR make it in a plain loop."""
    model = Mlp().double()
    rest = [p for n, p in model.named_parameters() if n in ("up.weight", "down.weight")]
    none = [p for n, p in model.named_parameters() if n not in ("up.weight", "down.weight")]
    groups = [{"params": rest}, {"params": none, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3, betas=(0.8, 0.9))
    rates = [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2]
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()
    mesh = {"tp": 2} if "shard" in more else {"dp": 2}
    weights = trained(program(mesh, optimizer={**SECTION, "schedule": SCHEDULE}, **more))
    for name, want in model.state_dict().items():
        assert torch.allclose(weights[name], want, rtol=1e-12, atol=1e-12), name


def test_muon_of_the_spec_updates_matrices_and_adamw_the_rest() -> None:
    section = {"name": "muon", "lr": 0.01, "weight_decay": 0.1, "matrices": "whole"}

    def make(params: Any) -> Any:
        matrices, rest = shardc.matrices(params)
        return [
            torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
        ]

    wide = program({"dp": 2}, data={"zero": 1}, optimizer=section)
    weights, want = trained(wide), trained(program({"dp": 1}), optimizer=make)
    assert all(torch.allclose(weights[n], want[n], rtol=1e-9, atol=1e-12) for n in want)
    assert "Muon" in wide.cost("h100-80g").premises


def test_costs_and_modules_take_the_specs_optimizer() -> None:
    of_spec = program({"dp": 1}, optimizer={"name": "sgd", "lr": 0.5})
    assert "SGD" in of_spec.cost("h100-80g").premises
    assert "AdamW" in program({"dp": 1}).cost("h100-80g").premises
    (made,) = loopback(of_spec.mesh, lambda mesh: of_spec.module(Mlp().double(), mesh=mesh).optimizer())
    assert type(made) is torch.optim.SGD
    assert made.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"name": "adamv"}, "unknown optimizer 'adamv'(.|\n)*did you mean 'adam"),
        ({"weigth_decay": 0.1}, "AdamW has no argument 'weigth_decay'(.|\n)*did you mean 'weight_decay'"),
        ({"shedule": "cosine"}, "AdamW has no argument 'shedule'(.|\n)*did you mean 'schedule'"),
        ({"name": "sgd", "betas": [0.9, 0.9]}, "SGD has no argument 'betas'"),
        ({"betas": [2.0, 0.9]}, "AdamW refuses its arguments: Invalid beta parameter"),
        ({"groups": {"*.bias": {"lrr": 0.1}}}, "no argument 'lrr'(.|\n)*did you mean 'lr'"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"lr": 0}, "`optimizer.lr` must be a number above 0, not 0"),
    ],
)
def test_mistakes_in_the_specs_optimizer(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        shardc.Spec.load({"shardc": 1, "mesh": {"dp": 1}, "optimizer": section})


def test_mistakes_that_a_model_shows() -> None:
    wrong = program({"dp": 1}, optimizer={"no_decay": ["*.bias", "*.wieght"]})
    with pytest.raises(ShardcError, match=r"'\*.wieght'(.|\n)*matches no trainable(.|\n)*did you mean '\*.weight'"):
        trained(wrong)
    with pytest.raises(ShardcError, match="the schedule needs a number of steps"):
        trained(program({"dp": 1}, optimizer={"schedule": "cosine"}))
    spec = shardc.Spec.load({"shardc": 1, "mesh": {"dp": 1}, "optimizer": {**SECTION, "schedule": SCHEDULE}})
    assert shardc.Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 0.7, 0.4]),
        ("cosine", [0.5, 1, *(0.7 + 0.3 * math.cos(math.pi * n / 6) for n in range(7))]),
    ],
)
def test_the_factor_of_a_schedule(name: str, want: list[float]) -> None:
    schedule = SimpleNamespace(name=name, warmup=2, decay=2, least=0.4)
    assert [factor(schedule, step, 8) for step in range(9)] == pytest.approx(want)
    shares = SimpleNamespace(name=name, warmup=0.25, decay=0.25, least=0.4)
    assert [factor(shares, step, 8) for step in range(9)] == pytest.approx(want)
    assert factor(schedule, 5, None) == 1.0, "nobody knows the end"


def test_the_model_file_wins_and_that_is_said(folder: Path) -> None:
    own = "\ndef optimizer(params):\n    return torch.optim.SGD(params, lr=0.125)\n"
    (folder / "model.py").write_text(MODEL.replace("FAILS", "''").replace("ONCE", "True") + own)
    done = warm.run("run", "model.py", "spec.yaml", "--mesh", "dp=1", "--steps", "2", "--lr", "0.5", cwd=folder)
    assert "note: --lr is not used: optimizer(params) of the model file makes the optimizer" in done.stdout, done.stderr
    assert "SGD, lr 0.0625;" in done.stdout, "the spec's schedule warms it up"
    done = run(folder, "--mesh", "dp=1", "--steps", "2", "--lr", "0.5")
    assert "SGD, lr 0.25, 2 groups" in done.stdout, done.stderr
    done = run(
        folder, "--mesh", "dp=1", "--steps", "2", "--set", "optimizer.lr=0.7", "--set", "optimizer.schedule=constant"
    )
    assert "SGD, lr 0.7, 2 groups" in done.stdout, done.stderr


def test_a_plateau_waits_for_held_out_losses_and_survives_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.0),
    }
    losses, of = [3.0, 2.0, 2.5, 2.0, 2.5, 1.0, 1.5, 1.5], program({"dp": 2})
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau, want = options["scheduler"](plain), []
    for loss in losses:
        plateau.step(loss)
        want.append(plain.param_groups[0]["lr"])
    assert want[-1] == 0.25
    model = Mlp().double()

    def work(mesh: Any, parts: list[list[float]]) -> list[float]:
        rates = []
        for i, part in enumerate(parts):
            engine = of.engine(model, mesh=mesh, **options)
            if i:
                engine.load(tmp_path)
            for loss in part:
                engine.step({"x": X})
                engine.evaluated(loss)
                rates.append(engine.lr)
            engine.save(tmp_path, overwrite=True)
        return rates

    for parts in ([losses], [losses[:3], losses[3:7], losses[7:]]):
        assert loopback(of.mesh, lambda mesh, parts=parts: work(mesh, parts)) == [want, want]


def test_a_plateau_needs_evaluations(folder: Path) -> None:
    own = "\ndef scheduler(optimizer):\n    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    (folder / "model.py").write_text(MODEL.replace("FAILS", "''").replace("ONCE", "True") + own)
    done = warm.run("run", "model.py", "spec.yaml", "--mesh", "dp=1", "--steps", "2", cwd=folder)
    assert done.returncode == 2
    assert "ReduceLROnPlateau needs held-out losses" in done.stderr
    assert "note: the spec's schedule is not used" not in done.stderr


def test_help_has_panels_with_each_option_in_one() -> None:
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(Run.model_fields) <= set(listed)
    assert len(PANELS[""]) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "100"}).output
    heads = [line.split()[1] for line in text.splitlines() if line.startswith("╭─")]
    assert heads == ["Arguments", "Options", *[panel for panel in PANELS if panel]]
    assert text.count("shardc run model.py spec.yaml --") == 2
