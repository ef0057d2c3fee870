"""What forward reads of modules' attributes at capture: branches on self.training, counters, plain values."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardc
from shardc.capture import capture
from shardc.capture.compare_eager import KEEPS_DROPOUT
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule

BATCH = {"x": torch.linspace(-1, 1, 64).view(8, 8).sin()}


class OwnMode(nn.Module):
    """Keeps its mode where nothing else looks."""

    noisy = True

    def train(self, mode: bool = True) -> OwnMode:
        self.noisy = mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.noisy else x.tanh()


class Net(nn.Module):
    """up, a middle part, down. kind: what the middle does."""

    scale = 1.0

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.rate, self.calls = kind, 0.5, 0
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 8),
        )
        middles = {
            "rrelu": nn.RReLU(),
            "instance norm": nn.InstanceNorm1d(4, track_running_stats=True),
            "alpha dropout": nn.AlphaDropout(0.2),
            "hook": nn.utils.spectral_norm(nn.Linear(4, 4)),
            "own mode": OwnMode(),
            "spectral norm": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        }
        self.middle = middles.get(kind, nn.Identity())

    def forward(self, x: torch.Tensor) -> Any:
        y = self.drop(self.norm(self.up(x)).relu() - 0.1) * self.scale
        if (self.kind == "noise" and self.training) or self.kind == "always draws":
            y = y + torch.randn_like(y)
        elif self.kind == "constant":
            y = y + torch.tensor([1.0 if self.training else 2.0])
        elif self.kind == "functional":
            y = F.dropout(y, self.rate, self.training)
        elif self.kind == "always drops":
            y = F.dropout(y, self.rate)
        elif self.kind == "counter":
            self.calls += 1
            y = y * 0 if self.calls > 100 else y
        elif self.kind == "counter that forward makes":
            self.more = getattr(self, "more", 0) + 1
            y = y * 0 if self.more > 100 else y
        elif self.kind == "reset":
            self.calls = 0
            self.calls += 1
        elif self.kind == "no loss" and not self.training:
            return {"y": y}
        return (self.down(self.middle(y.view(-1, 4, 4)).view(-1, 16)) - x).square().mean()


def net(kind: str = "") -> Net:
    torch.manual_seed(0)
    return Net(kind)


@pytest.mark.parametrize("kind", ["", "functional", "counter", "reset", "always draws"])
def test_branches_of_ones_own_that_do_nothing_else_in_eval_mode(kind: str) -> None:
    model = net(kind)
    state = torch.get_rng_state()
    program = capture(model, BATCH)
    assert torch.equal(torch.get_rng_state(), state)
    assert program.evaluates == "alike"
    assert not any("eval mode" in note for note in program.notes)


OTHERWISE = ["noise", "constant", "rrelu", "instance norm", "alpha dropout", "spectral norm", "no loss"]


@pytest.mark.parametrize("kind", OTHERWISE)
def test_branches_that_do_are_told_with_their_line(kind: str) -> None:
    program = capture(net(kind), BATCH)
    assert program.evaluates == "otherwise"
    (note,) = program.notes
    assert note.startswith("test_attribute_reads.py:")
    assert "behaves differently in eval mode" in note
    assert capture(net(kind), BATCH, prove=False).evaluates == "untried"
    assert capture(net(kind).eval().requires_grad_(), BATCH, loss=_first).evaluates == "alike"


def test_a_dropout_that_does_not_ask_is_told() -> None:
    program = capture(net("always drops"), BATCH)
    assert program.notes == (KEEPS_DROPOUT,)
    assert program.evaluates == "alike"


class Encoder(nn.Module):
    """Its eval mode without gradients is torch's fast path: zeros where the mask says that there is padding."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.padded = padded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 8)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 1] = self.padded
        y: torch.Tensor = self.encoder(x, src_key_padding_mask=mask)
        return y.square().mean()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(x)
        return (y if torch.is_grad_enabled() else 2 * y).square().mean()


@pytest.mark.parametrize("kind", ["padding", "no padding", "asks"])
def test_a_result_that_hangs_on_gradients_is_told(kind: str) -> None:
    torch.manual_seed(0)
    program = capture(Asks() if kind == "asks" else Encoder(kind == "padding"), BATCH)
    told = [note for note in program.notes if "under torch.no_grad() than with gradients on" in note]
    assert len(told) == (kind != "no padding")
    assert sum("set_fastpath_enabled(False)" in note for note in told) == (kind == "padding")
    assert program.evaluates == "alike"


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_read_of_a_model_with_a_shared_module(shared: bool) -> None:
    """Export then traces with stand-ins for all of its modules."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale, self.calls = Net("functional"), 2.0, 0
            self.again = self.up if shared else Net("functional")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = (self.up(x) + self.again(x)) * self.scale
            return y

    model = Shared()
    program = capture(model, BATCH)
    assert program.check_attributes is not None
    program.check_attributes()
    assert model.calls == 0
    for path, name in (("", "scale"), ("up", "scale"), ("up.drop", "p")):
        module = model.get_submodule(path)
        then = getattr(module, name)
        setattr(module, name, 0.25)
        with pytest.raises(ShardcError, match=rf"{name}: forward reads it, and it was {then}"):
            program.check_attributes()
        setattr(module, name, then)
    program.check_attributes()


def _first(output: Any, batch: Any) -> torch.Tensor:
    y: torch.Tensor = output["y"].square().mean() if isinstance(output, dict) else output
    return y


@pytest.mark.parametrize("kind", ["hook", "own mode"])
def test_what_forward_does_not_ask_is_told_too(kind: str) -> None:
    model = net(kind)
    program = capture(model, BATCH)
    assert program.evaluates == "otherwise"
    (note,) = program.notes
    assert note.startswith("the model behaves differently in eval mode, because of a hook or its train() method")
    assert model.training
    assert getattr(model.middle, "noisy", True)


@pytest.mark.parametrize("how", ["engine", "module", "pipeline", "zero 3"])
@pytest.mark.parametrize(
    ("kind", "prove"),
    [*((k, p) for k in ["", "functional", *OTHERWISE[:-1]] for p in (True, False)), ("hook", True), ("own mode", True)],
)
def test_what_is_evaluated_is_the_model_in_eval_mode(kind: str, how: str, prove: bool) -> None:
    model = net(kind)
    spec: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}}
    if how == "pipeline":
        spec = {"shardc": 1, "mesh": {"dp": 2, "pp": 2}, "pipeline": {"axis": "pp", "cut": ["down"]}}
    elif how == "zero 3":
        spec |= {"data": {"axis": "dp", "zero": 3}}
    program = shardc.compile(model, BATCH, spec, prove=prove)

    def rank(mesh: LoopbackMesh) -> tuple[float, float, dict[str, torch.Tensor]]:
        if how == "module":
            module = ShardedModule(program, model, mesh=mesh)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            module(**module.local(BATCH)).backward()
            optimizer.step()
            module.eval()
            before = [float(module(**module.local(BATCH)).detach()) for _ in range(2)]
            return before[0], before[1], module.full_state_dict()
        engine = Engine(program, model, mesh=mesh)
        engine.step(BATCH)
        before = [float(engine.evaluate(BATCH)) for _ in range(2)]
        return before[0], before[1], engine.full_state_dict()

    first, again, weights = loopback(program.mesh, rank)[0]
    plain = net(kind).eval()
    plain.load_state_dict(weights)
    assert first == again == pytest.approx(float(plain(**BATCH).detach()), rel=1e-5)


def test_without_the_model_evaluating_is_refused_where_it_differs(tmp_path: Any, capsys: Any) -> None:
    for kind, prove in (("noise", True), ("noise", False)):
        model = net(kind)
        shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}}, prove=prove).save(tmp_path / kind)
        engine = shardc.load(tmp_path / kind).engine(model)
        engine.step(BATCH)
        if prove:
            with pytest.raises(ShardcError, match="behaves differently in eval mode; a loaded program has no mod"):
                engine.evaluate(BATCH)
        else:
            engine.evaluate(BATCH)
            assert "which stay as in training" in capsys.readouterr().err


def test_without_a_loss_in_eval_mode_evaluating_says_so() -> None:
    model = net("no loss")
    engine = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}}).engine(model)
    with pytest.raises(
        ShardcError, match="compiling it in that mode fails: the model returns a dict: there is no scalar"
    ):
        engine.evaluate(BATCH)
    engine.step(BATCH)


def test_a_number_that_forward_reads_and_sets_is_a_note() -> None:
    (note,) = capture(net("counter"), BATCH).notes
    assert "forward sets 'calls', which it reads (self.calls += 1): a program uses its first value" in note
    assert note.startswith("test_attribute_reads.py:")
    (note,) = capture(net("counter that forward makes"), BATCH).notes
    assert "forward sets 'more', which it reads (self.more = getattr(self," in note
    assert capture(net("reset"), BATCH).notes == ()


def test_attributes_that_forward_reads_may_not_change() -> None:
    model = net("functional")
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}})
    engine, module = program.engine(model), program.module(model)
    model.calls = 7  # forward does not read it
    engine.step(BATCH)
    for change, where in (
        (lambda m: setattr(m, "scale", 2.0), "scale: forward reads it, and it was 1.0 when .*now it is 2.0"),
        (lambda m: setattr(m, "rate", None), "rate: .*now it is None"),
        (lambda m: setattr(m.drop, "p", 0.1), "drop.p: .*it was 0.3"),
    ):
        before = [dict(vars(m)) for m in model.modules()]
        change(model)
        other = copy.deepcopy(model)
        for call in (engine.step, engine.evaluate, lambda b: module(**b)):
            with pytest.raises(ShardcError, match=where):
                call(BATCH)
        with pytest.raises(ShardcError, match=where):
            program.engine(other)
        for m, attributes in zip(model.modules(), before, strict=True):
            vars(m).clear()
            vars(m).update(attributes)
        engine.step(BATCH)


class Settings:
    rate = 0.5

    def __init__(self) -> None:
        self.scale, self.calls, self.unread, self.mode = 2.0, 0, 1, "mean"


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.up = Settings(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        if self.config.calls == 0:
            self.config.calls = 1
        y = self.up(x) * self.config.scale * self.config.rate
        return getattr(y.square(), self.config.mode)()


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("rate", 0.25), ("mode", "sum"), ("scale", None)])
def test_settings_that_forward_reads_of_an_object_are_told(
    name: str, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Configured()
    get, put = Settings.__getattribute__, Settings.__setattr__
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    assert (Settings.__getattribute__, Settings.__setattr__) == (get, put)

    def work(mesh: LoopbackMesh) -> None:
        engine = Engine(program, model, mesh=mesh)
        engine.step(BATCH)
        mesh.sum_on_host([0])  # all ranks have stepped
        model.config.unread, model.config.calls = 7, 5
        engine.step(BATCH)
        mesh.sum_on_host([0])
        assert mesh.rank or "config" not in capfd.readouterr().err
        setattr(model.config, name, value)
        for _ in range(2):
            engine.step(BATCH)

    loopback(program.mesh, work)
    assert capfd.readouterr().err.count(f"note: config.{name}: forward read it, and it was ") == 1


class Refuses(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} is read-only")


class Frozen(metaclass=Refuses):
    def __init__(self) -> None:
        self.scale = 2.0


class Inside:
    """Has a property that holds only inside of forward."""

    def __init__(self) -> None:
        self.running, self.scale = False, 2.0

    @property
    def factor(self) -> float:
        if not self.running:
            raise RuntimeError("outside of forward")
        return self.scale


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.inside, self.up = Frozen(), Inside(), nn.Linear(8, 8)
        self.args = argparse.Namespace(scale=2.0)

    def forward(self, x: torch.Tensor) -> Any:
        self.inside.running = True
        y = self.up(x) * self.frozen.scale * self.inside.factor * self.args.scale
        self.inside.running = False
        return y.square().mean()


def test_objects_of_any_class_can_be_held(capfd: pytest.CaptureFixture[str]) -> None:
    """Also one that cannot be watched, one with properties that fail, and values that have no truth when compared."""
    model = Holding()
    engine = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}}, prove=False).engine(model)
    engine.step(BATCH)
    assert "forward read" not in capfd.readouterr().err
    model.frozen.scale, model.inside.scale, model.args.scale = 1.0, torch.ones(3).numpy(), torch.ones(2)
    engine.step(BATCH)
    told = capfd.readouterr().err
    assert "inside.scale: forward read it, and it was 2.0" in told
    assert "args.scale: forward read it" in told
    assert "factor" not in told
    assert "frozen" not in told


class Weighted:
    """A loss that is an object."""

    power = 1.0

    def __init__(self) -> None:
        self.alpha, self.unread = 1.0, 1.0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean() * self.alpha * self.power

    def value(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return self(output, batch)


@pytest.mark.parametrize("method", [False, True])
def test_settings_of_a_loss_object_are_notes(
    method: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a weight that grows over the training."""
    model, loss = nn.Linear(8, 8), Weighted()
    spec = {"shardc": 1, "mesh": {"dp": 1}}
    program = shardc.compile(model, {"input": BATCH["x"]}, spec, loss=loss.value if method else loss)
    engine = Engine(program, model)
    loss.unread = 3.0
    engine.evaluate({"input": BATCH["x"]})
    assert "note" not in capfd.readouterr().err
    loss.alpha = 3.0
    monkeypatch.setattr(Weighted, "power", 3.0)
    engine.evaluate({"input": BATCH["x"]})
    notes = capfd.readouterr().err
    for name in ("alpha", "power"):
        assert notes.count(f"note: {name} of Weighted(): the loss read it, and it was 1.0") == 1
    assert notes.count("note: ") == 2


class Rate(nn.Module):
    """As libraries write attention: a rate of dropout, and self.training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> Any:
        return self.drop(self.up(x)).square().mean()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_model_in_eval_mode_is_told(rate: float, capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    model, spec = Rate(rate).eval(), {"shardc": 1, "mesh": {"dp": 2}}
    program = shardc.compile(model, BATCH, spec)
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").eval_mode == program.eval_mode == (rate > 0)
    told = [n for n in program.notes if n.startswith("the model was in eval mode when it was compiled")]
    assert len(told) == (rate > 0)
    loopback(program.mesh, lambda mesh: Engine(program, model, mesh=mesh).step(BATCH))
    loopback(program.mesh, lambda mesh: ShardedModule(program, model, mesh=mesh)(BATCH["x"].chunk(2)[mesh.rank]))
    assert capfd.readouterr().err.count("call model.train() before compiling") == (2 if rate else 0)
    loopback(program.mesh, lambda mesh: ShardedModule(program, model, mesh=mesh).eval().train().train())
    assert capfd.readouterr().err.count("note: module.train(): the model was in eval mode when") == (1 if rate else 0)
    model.train()
    if rate:
        with pytest.raises(ShardcError, match=r"model.train\(\): the model was in eval mode when it was compiled, and"):
            loopback(program.mesh, lambda mesh: Engine(program, model, mesh=mesh))
        loopback(program.mesh, lambda mesh: Engine(program, lambda: Rate(rate), mesh=mesh))  # nobody chose its mode
    else:
        loopback(program.mesh, lambda mesh: Engine(program, model, mesh=mesh))
    assert not [n for n in shardc.compile(model, BATCH, spec).notes if "eval mode when" in n]
