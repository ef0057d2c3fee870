"""Values beside the loss: on every mesh what one device gets, exact over the whole batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step.means import LOSS, MeanDivisors

ROWS, CLASSES = 12, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.b(self.a(x).relu()) * self.scale)
        return y


def batch_of(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    y[::3] = -100  # not counted, and unevenly spread over ranks
    return {"x": torch.randn(rows, 8, dtype=torch.float64, generator=generator), "y": y}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    y = batch["y"]
    right, counted = (output.argmax(-1) == y), y != -100
    nll = F.cross_entropy(output, y)
    return nll, {
        "accuracy": (right.sum(), counted.sum()),
        "right": right.sum(),
        "mean square": output.square().mean(),
        "loss again": nll,
        "log": nll.log(),
        "logits": output,
        "hit": right,
        "histogram": F.one_hot(output.argmax(-1), CLASSES).sum(0),
        "x": batch["x"],
        "weight": SCALE.scale,
    }


torch.manual_seed(0)
SCALE = NET = Net()
BATCH = batch_of(1)
TP = {"a": "column", "b": "row", "head": "column"}
SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": TP},
    "dp tp zero3": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": 3}},
    "microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 3}},
    "uneven": {"mesh": {"dp": 5}, "uneven": "pad"},
    "uneven microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 5}, "uneven": "pad"},
    "pp": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "shard": TP,
        "pipeline": {"axis": "pp", "cut": ["b"], "schedule": "gpipe"},
        "batch": {"microbatches": 3},
    },
    "recomputed": {"mesh": {"dp": 2}, "checkpoint": [{"match": "*"}]},
}


def compiled(spec: dict[str, Any], model: nn.Module = NET, batch: Any = BATCH, function: Any = loss) -> Program:
    return shardc.compile(model, batch, {"shardc": 1, **spec}, loss=function)


def plain(batch: dict[str, Tensor] = BATCH) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.no_grad():
        value, beside = loss(NET(batch["x"]), batch)
        right, counted = beside["accuracy"]
        return value, {**beside, "accuracy": right / counted}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, x in one.items():
        assert x.dtype == other[name].dtype, name
        torch.testing.assert_close(x, other[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", SPECS)
def test_equal_to_one_device(name: str, tmp_path: Path) -> None:
    """In a step, in an evaluation, and of a program read from its folder; whole, and as each rank's own rows."""
    program = compiled(SPECS[name])
    assert program.verify().ok
    program.save(tmp_path / "p")
    read = shardc.load(tmp_path / "p")
    assert (read.outputs, [s.outputs for s in read.stages]) == (program.outputs, [s.outputs for s in program.stages])
    expected, beside = plain()

    def work(mesh: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        engine = read.engine(NET, lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh)
        evaluated, first = engine.evaluate(BATCH, gather=True)
        step, second = engine.step(BATCH, gather=True)
        for value, values in ((evaluated, first), (step, second)):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
            same(values, beside)
        return read.engine(NET, None, mesh=mesh).evaluate(BATCH)[1], {
            "data": mesh.coordinate("dp") if "dp" in read.mesh.names else 0
        }

    ranks = loopback(program.mesh, work)
    rows = {r[1]["data"]: r[0]["x"] for r in ranks}  # of every coordinate of dp once
    assert sum(len(x) for x in rows.values()) == ROWS
    for own, _ in ranks:
        assert not any(x.requires_grad for x in own.values())
        for row, logits in zip(own["x"], own["logits"], strict=True):  # rows of one input stay together
            i = int((BATCH["x"] == row).all(1).nonzero()[0])
            torch.testing.assert_close(logits, beside["logits"][i], rtol=1e-12, atol=1e-12)
        same({n: own[n] for n in ("accuracy", "right", "log")}, {n: beside[n] for n in ("accuracy", "right", "log")})


def test_one_collective_for_all_sums() -> None:
    sim = shardc.simulate(compiled(SPECS["dp"]), NET, BATCH)
    summed = [c for c in sim.comms if c.cause == "outputs beside the loss"]
    assert [(c.kind, c.axis, c.bytes) for c in summed] == [("all_reduce", "dp", 8 * (2 + 1 + 1 + CLASSES))]
    same(sim.outputs, plain()[1])


def test_module() -> None:
    program = compiled(SPECS["dp tp zero3"])

    def work(mesh: Any) -> dict[str, Tensor]:
        module = program.module(NET, mesh=mesh)
        rows = slice(mesh.coordinate("dp") * ROWS // 2, (mesh.coordinate("dp") + 1) * ROWS // 2)
        value, values = module(**{name: x[rows] for name, x in BATCH.items()})
        value.backward()
        assert any(p.grad is not None for p in module.parameters())
        torch.testing.assert_close(values["x"], BATCH["x"][rows])
        return values

    for values in loopback(program.mesh, work):
        same(
            {n: values[n] for n in ("accuracy", "mean square")}, {n: plain()[1][n] for n in ("accuracy", "mean square")}
        )


@pytest.mark.parametrize("spec", ["dp", "dp tp zero3", "uneven microbatches", "pp"])
def test_over_batches(spec: str) -> None:
    """Means over all that counts in all batches, whatever number of it is in each, and in none; on any mesh."""
    program = compiled(SPECS[spec])
    batches = [batch_of(2), batch_of(3), batch_of(4, rows=8), batch_of(5)]
    batches[1]["y"][2:] = -100  # two tokens at most count; one of the rows above
    batches[3]["y"][:] = -100  # and none
    wholes = {n: torch.cat([b[n] for b in batches]) for n in BATCH}
    whole, beside = plain(wholes)

    def work(mesh: Any) -> dict[str, float]:
        return program.engine(NET, None, mesh=mesh).evaluate_all(batches)

    for values in loopback(program.mesh, work):
        assert values["accuracy"] == pytest.approx(float(beside["accuracy"]), rel=1e-6)  # divided in float32
        assert values["right"] == int(beside["right"])
        assert isinstance(values["right"], int)
        assert "logits" not in values
        assert values["loss"] == pytest.approx(float(whole), rel=1e-12)
        assert values["loss again"] == pytest.approx(float(whole), rel=1e-12)
        assert values["mean square"] == pytest.approx(float(beside["mean square"]), rel=1e-12)


def mean_of_two(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"]) + output.square().sum(-1).sqrt().mean()


def sum_over_weights(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    y = batch["y"]
    nll = F.cross_entropy(output, y.clamp(min=0), reduction="none") * (y != -100)
    return 0.5 * nll.sum() / (y != -100).sum().clamp(min=1)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda o, b: F.cross_entropy(o, b["y"]), 8),
        (lambda o, b: F.cross_entropy(o, b["y"], label_smoothing=0.1), 8),
        (lambda o, b: F.mse_loss(o, b["x"]), ROWS * CLASSES),
        (sum_over_weights, 8),
        (lambda o, b: F.cross_entropy(o, b["y"]) + 0.1 * F.cross_entropy(2 * o, b["y"]), 8),
        (mean_of_two, 8),  # of which the batch decides
        (lambda o, b: o.square().mean(-1).mean(), ROWS * CLASSES),
        (lambda o, b: F.cross_entropy(o, b["y"]) + (o * 0).sum(), 8),
        (lambda o, b: F.cross_entropy(o, b["y"], reduction="sum") / b["x"].sum(-1).max(), None),  # does not add up
        (lambda o, b: F.cross_entropy(o, b["y"]).exp(), None),
        (lambda o, b: F.cross_entropy(o, b["y"], reduction="sum"), None),
        (lambda o, b: F.cross_entropy(o, b["y"]) + (o * (b["x"] > 0)).sum() / (b["x"] > 0).sum(), None),
    ],
)
def test_what_a_loss_is_the_mean_of(function: Any, count: float | None) -> None:
    program = compiled({"mesh": {"dp": 1}}, function=function)
    divisor = MeanDivisors(program).of(SimpleNamespace(device="cpu"), [BATCH]).get(LOSS)
    assert (None if divisor is None else divisor.value) == count


def masked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["y"], reduction="none")


def counted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["y"] != -100).sum()


MEANS: dict[str, Any] = {
    "sum / count": lambda o, b: masked(o, b).sum() / counted(b),
    "clamp": lambda o, b: masked(o, b).sum() / counted(b).clamp(min=1),
    "clamp at more": lambda o, b: masked(o, b).sum() / counted(b).clamp(min=3),
    "maximum": lambda o, b: masked(o, b).sum() / torch.maximum(counted(b), torch.ones_like(counted(b))),
    "epsilon": lambda o, b: masked(o, b).sum() / (counted(b) + 1e-3),
    "twice": lambda o, b: masked(o, b).sum() / (2 * counted(b)).clamp(min=1),
    "in 16 bits": lambda o, b: masked(o, b).sum() / (b["y"] != -100).bfloat16().sum().clamp(min=1),
    "where": lambda o, b: torch.where(counted(b) > 0, masked(o, b).sum() / counted(b).clamp(min=1), 0.0),
    "where in the count": lambda o, b: masked(o, b).sum() / torch.where(counted(b) > 0, counted(b), 1),
    "nan_to_num": lambda o, b: (masked(o, b).sum() / counted(b)).nan_to_num(0.0),
    "times the inverse": lambda o, b: masked(o, b).sum() * (1.0 / counted(b).clamp(min=1)),
    "to the power of -1": lambda o, b: masked(o, b).sum() * counted(b).clamp(min=1).double() ** -1,
    "numel": lambda o, b: masked(o, b).sum() / b["y"].numel(),
    "times 1 / numel": lambda o, b: masked(o, b).sum() * (1 / b["y"].numel()),
    "mean of means": lambda o, b: (o - b["x"]).square().mean(0).mean(),
    "mean over mean": lambda o, b: masked(o, b).mean() / (b["y"] != -100).double().mean().clamp(min=1e-6),
    "divided, then summed": lambda o, b: (masked(o, b) / counted(b).clamp(min=1)).sum(),
    "normalised weights": lambda o, b: (masked(o, b) * ((b["y"] != -100) / counted(b).clamp(min=1))).sum(),
}


FLOAT32 = {"epsilon", "times the inverse", "normalised weights"}


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_over_batches_is_that_of_all_rows(name: str) -> None:
    """With one token, with many, with none, and of other sizes."""
    batches = [batch_of(2), batch_of(3), batch_of(4, rows=8), batch_of(5), batch_of(6, rows=10)]
    batches[1]["y"][2:] = -100
    batches[3]["y"][:] = -100
    function = MEANS[name]
    wholes = {n: torch.cat([b[n] for b in batches]) for n in BATCH}
    expected = float(function(NET(wholes["x"]), wholes).detach())
    program = compiled({"mesh": {"dp": 2}}, function=function)
    # the model rounds its count to 8 bits, to 24 bits, or not at all
    rounding = 3e-3 if name == "in 16 bits" else 1e-7 if name in FLOAT32 else 1e-12
    for value in loopback(program.mesh, lambda mesh: program.engine(NET, None, mesh=mesh).evaluate_all(batches)):
        assert value["loss"] == pytest.approx(expected, rel=rounding)


def test_a_loss_without_a_divisor_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled({"mesh": {"dp": 2}}, function=lambda o, b: masked(o, b).sum())
    loopback(program.mesh, lambda mesh: program.engine(NET, None, mesh=mesh).evaluate_all([batch_of(2), batch_of(3)]))
    assert capsys.readouterr().err.count("the loss is not a mean with a divisor from the batch") == 1


def test_a_loss_with_several_divisors_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled({"mesh": {"dp": 2}}, function=mean_of_two)
    loopback(program.mesh, lambda mesh: program.engine(NET, None, mesh=mesh).evaluate_all([batch_of(2), batch_of(3)]))
    assert capsys.readouterr().err.count("the loss is a sum of means over different things") == 1


class Returns(nn.Module):
    """What a model may return itself."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        value, mean = y.square().mean(), y.mean()
        forms = {
            "pair": (value, {"mean": mean, "y": y}),
            "dict": {"loss": value, "mean": mean, "y": y},
            "tuple": (value, y),
            "scalar": value,
        }
        return forms[self.form]


@pytest.mark.parametrize(
    ("form", "names"), [("pair", ["mean", "y"]), ("dict", ["mean"]), ("tuple", []), ("scalar", [])]
)
def test_what_a_model_returns(form: str, names: list[str]) -> None:
    program = compiled({"mesh": {"dp": 2}}, Returns(form), torch.randn(4, 4), None)
    assert [o.name for o in program.outputs] == names


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (
            lambda out, b: (out.mean(), {"rate": 0.1}),
            r"the output 'rate' is the Python number 0.1, not a tensor\n  fix: write torch.tensor\(0.1\)",
        ),
        (
            lambda out, b: (out.mean(), {"rate": out.mean().item()}),
            "the output 'rate' is a Python number, from .item.*\n  fix: remove that call",
        ),
        (lambda out, b: (out.mean(), {"z": out.to(torch.complex64)}), "the output 'z' is a tensor of shape"),
        (lambda out, b: (out, {"z": out}), "the loss is a tuple, not a scalar"),
    ],
)
def test_what_a_loss_may_not_return(function: Any, error: str) -> None:
    with pytest.raises(ShardcError, match=f"(?s){error}"):
        compiled({"mesh": {"dp": 1}}, nn.Linear(4, 4), torch.randn(4, 4), function)


def test_the_text_and_the_cost_name_them() -> None:
    program = compiled(SPECS["pp"])
    assert "# outputs beside the loss: name, type" in str(program)
    assert "accuracy  i64[] +dp  summed over microbatches, divided by 'accuracy (count)', made by stage1" in str(
        program
    )
    assert program.cost("h100-80g").memory.peak > 0


def test_nothing_is_kept_that_nobody_asked_for() -> None:
    """Sums alone do not keep the logits alive."""

    def alone(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return loss(output, batch)[0], {"mean": output.mean()}

    program = compiled(SPECS["dp"], function=alone)
    with_logits = compiled(SPECS["dp"], function=lambda o, b: (loss(o, b)[0], {"logits": o}))
    bare = compiled(SPECS["dp"], function=lambda o, b: loss(o, b)[0])
    peaks = [p.cost("h100-80g").memory.peak for p in (bare, program, with_logits)]
    assert peaks[0] <= peaks[1] <= peaks[0] + 64
    assert peaks[2] > peaks[1]
