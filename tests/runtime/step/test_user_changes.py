"""What users do to a module and its parameters as to those of a plain model: it works, or it is refused by name."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, NormedNet, of, on_modules


def net() -> NormedNet:
    made = copy.deepcopy(NORMED)
    made.down.bias.requires_grad_(False)
    return made


MODEL = net()
ONE = of({"mesh": {"dp": 1}}, MODEL)
MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}


@functools.cache
def compiled(mesh: str) -> shardc.Program:
    return ONE if mesh == "one" else of(MESHES[mesh], net())


def freeze(m: Any) -> None:
    m.get_parameter("up.weight").requires_grad_(False)


def release(m: Any) -> None:
    m.get_parameter("down.bias").requires_grad_(True)


def hook(m: Any) -> None:
    m.get_parameter("up.weight").register_hook(lambda g: 3 * g)


def sum_hook(m: Any) -> None:
    m.get_parameter("up.weight").register_post_accumulate_grad_hook(lambda p: None)


def forward_hook(m: Any) -> None:
    m.get_submodule("up").register_forward_hook(lambda *_: None)


def still_norm(m: Any) -> None:
    m.get_submodule("norm").eval()


def nothing(m: Any) -> None:
    m.train()


def train(mesh: LoopbackMesh, program: Any, change: Callable[[Any], None]) -> list[float]:
    """Two losses of a loop of one's own, with a change between them."""
    module = ShardedModule(program, MODEL, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for i in range(3):
        if i == 1:
            change(module)
        optimizer.zero_grad()
        loss = module(**module.local(BATCH))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mesh", [*MESHES, "one"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (release, r"down.bias.requires_grad: was frozen when the model was compiled"),
        (sum_hook, "up.weight: a hook on this parameter's gradient"),
        (forward_hook, "up: a hook on this submodule would never run"),
        (still_norm, "norm: this submodule is in eval mode and the module in training mode"),
        (freeze, "up.weight.requires_grad: was trained when the model was compiled, and is frozen now"),
        (hook, "up.weight: a hook on this parameter's gradient"),
        (nothing, None),
    ],
)
def test_it_is_as_on_one_device_or_refused(change: Callable[[Any], None], what: str | None, mesh: str) -> None:
    program = compiled(mesh)
    if what is None or (change is freeze and mesh != "zero 3") or (change is hook and mesh == "one"):
        plain = net()
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        expected = []
        for i in range(3):
            if i == 1:
                change(plain)
            optimizer.zero_grad()
            loss = plain(**BATCH)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        for losses in loopback(program.mesh, lambda m: train(m, program, change)):
            assert losses == pytest.approx(expected, rel=1e-5)
    else:
        with pytest.raises(ShardcError, match=what):
            loopback(program.mesh, lambda m: train(m, program, change))


def test_a_wrapper_that_sums_again_is_refused() -> None:
    @on_modules(compiled("dp"), MODEL)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match="DistributedDataParallel would sum gradients that are summed already"):
            hasattr(module, "_ddp_params_and_buffers_to_ignore")

    assert "_ddp_params_and_buffers_to_ignore" in inspect.getsource(DistributedDataParallel.__init__)


def _moved(module: Any) -> dict[str, Tensor]:
    return {name: p.detach() + 1 for name, p in module.named_parameters()}


def _functional(module: Any, weights: dict[str, Tensor]) -> Any:
    return torch.func.functional_call(module, weights, kwargs=BATCH)


TAKERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "jit.trace": (
        lambda m: torch.jit.trace(m, tuple(BATCH.values())),
        "module.forward: torch.jit.trace records what runs",
    ),
    "jit.script": (torch.jit.script, r"torch.jit.script\(module\): .*TorchScript"),
    "export": (lambda m: torch.export.export(m, (), dict(BATCH)), "module.forward: torch.export records what runs"),
    "make_fx": (lambda m: make_fx(m)(*BATCH.values()), "module.forward: make_fx records what runs"),
    "functional_call": (lambda m: _functional(m, _moved(m)), r"up.weight: .* was replaced: (.|\n)*functional_call"),
    "grad": (lambda m: torch.func.grad(lambda w: _functional(m, w))(_moved(m)), r"a transform of torch.func"),
    "jvp": (lambda m: torch.func.jvp(m, *[tuple(BATCH.values())] * 2), r"a transform of torch.func"),
    "vmap": (lambda m: torch.func.vmap(m)(*(x[None] for x in BATCH.values())), r"a transform of torch.func"),
}


@pytest.mark.filterwarnings("ignore")  # torch's of what it will drop
@pytest.mark.parametrize("taker", TAKERS)
def test_what_would_take_one_ranks_part_for_the_model_is_refused_in_its_own_name(taker: str) -> None:
    take, what = TAKERS[taker]

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=what):
            take(ShardedModule(ONE, MODEL, mesh=mesh))

    loopback(ONE.mesh, work)


def test_all_that_a_module_has_can_be_looked_at() -> None:
    (names,) = loopback(ONE.mesh, lambda m: [n for n, _ in inspect.getmembers(ShardedModule(ONE, MODEL, mesh=m))])
    assert {"clip_grad_norm_", "compile", "up", "forward"} <= {*names}


def test_an_engine_notices_what_was_frozen_since() -> None:
    other = net()
    other.up.weight.requires_grad_(False)

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"up.weight.requires_grad: was trained when the model was compiled"):
            Engine(ONE, other, mesh=mesh)
        engine = Engine(ONE, net(), mesh=mesh)
        release_here = next(p for p in engine.params.values() if not p.requires_grad)
        release_here.requires_grad_(True)
        with pytest.raises(ShardcError, match=r"down.bias.requires_grad: was frozen when the model was compiled"):
            engine.step(BATCH)

    loopback(ONE.mesh, work)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"clip_norm": -1.0}, "clip_norm: must be a positive number or None, not -1.0"),
        ({"clip_norm": 0.0}, "clip_norm: must be a positive number or None, not 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm: must be a positive number or None, not nan"),
        ({"clip_norm": "0.1"}, "clip_norm: must be a positive number or None, not '0.1'"),
        ({"nonfinite": "Stop"}, "nonfinite: must be one of 'ignore', 'stop', 'skip', not 'Stop'"),
        ({"nonfinite": True}, "nonfinite: must be one of .*, not True"),
        ({"seed": "a"}, "seed: must be a whole number, not 'a'"),
        (
            {"optimizer": lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            "none of the passed parameters",
        ),
    ],
)
def test_options_that_would_train_otherwise_than_meant(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ShardcError, match=what):
        loopback(ONE.mesh, lambda mesh: Engine(ONE, net(), mesh=mesh, **options))


def test_an_error_of_a_scheduler_leaves_the_state_of_a_step() -> None:
    """It can be saved, and the run goes on from there."""

    def work(mesh: LoopbackMesh) -> None:
        def scheduler(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 1.0, 1.0][step])

        engine = Engine(ONE, net(), scheduler=scheduler, mesh=mesh)
        engine.step(BATCH)
        engine.step(BATCH)
        with pytest.raises(IndexError):
            engine.step(BATCH)
        assert engine.consistent
        assert engine.step_count == 3

    loopback(ONE.mesh, work)


@pytest.mark.parametrize("mesh", ["tp", "zero 3"])
def test_clipping_by_hand_between_the_halves_of_an_engines_step_is_refused(mesh: str) -> None:
    """It would take the norm of this rank's part. The update works on these gradients as on any."""
    program = compiled(mesh)

    def work(mesh: LoopbackMesh) -> tuple[float, float]:
        engine, straight = (Engine(program, MODEL, mesh=mesh, clip_norm=0.1) for _ in range(2))
        engine.backward(BATCH)
        with pytest.raises(ShardcError, match="this would use this rank's part of the gradient"):
            nn.utils.clip_grad_norm_(engine.params.values(), 0.1)
        engine.update()
        straight.step(BATCH)
        return float(engine.step(BATCH)), float(straight.step(BATCH))

    for a, b in loopback(program.mesh, work):
        assert a == b


class Frozen(nn.Module):
    """An encoder with BatchNorm and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.drop, self.inert, self.head = nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.inert(self.drop(self.enc(x)))) - x).square().mean()


def frozen() -> Frozen:
    torch.manual_seed(0)
    model = Frozen()
    for part in (model.enc, model.drop, model.inert):
        part.eval()
    return model


def test_parts_that_were_in_eval_mode_stay_so(tmp_path: Path) -> None:
    """`module.train()` wakes all of them, which the program does not see; what the usual loop does then is right."""
    program = shardc.compile(frozen(), BATCH, {"shardc": 1, "mesh": {"dp": 2}})
    assert program.still == ("enc", "enc.1", "drop")  # the other dropout does nothing in either mode
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").still == program.still
    plain = frozen()
    losses = [plain(**BATCH).item()] * 2

    @on_modules(program, frozen())
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        found = [module(**module.local(BATCH)).item()]
        module.train()
        with pytest.raises(ShardcError, match=r"in training mode now(.|\n)*module.enc.eval\(\) after module.train"):
            module(**module.local(BATCH))
        module.enc.eval()
        with pytest.raises(ShardcError, match=r"drop: this submodule was in eval mode"):
            module(**module.local(BATCH))
        module.drop.eval()
        found.append(module(**module.local(BATCH)).item())
        assert found == pytest.approx(losses, rel=1e-5)
        copied: Any = copy.deepcopy(module)
        assert not copied.enc.training
        module.eval()
        module(**module.local(BATCH))
        module.train()
        module.head.eval()
        module.enc.eval()
        module.drop.eval()
        with pytest.raises(ShardcError, match=r"head: this submodule is in eval mode and the module in training mode"):
            module(**module.local(BATCH))


def test_an_engine_is_not_given_a_model_with_another_part_frozen() -> None:
    model = frozen()
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}})

    def work(mesh: LoopbackMesh) -> None:
        Engine(program, model, mesh=mesh).step(BATCH)
        with pytest.raises(ShardcError, match=r"enc: this submodule was in eval mode .* model.train\(\) does that"):
            Engine(program, model.train(), mesh=mesh)
        Engine(program, model.eval(), mesh=mesh)  # from here on only weights are read
        Engine(program, lambda: frozen().train(), mesh=mesh)

    loopback(program.mesh, work)


def test_a_module_does_not_scale_the_loss() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "float16", "loss_scale": "dynamic"}}
    program = shardc.compile(net(), BATCH, spec, prove=False)

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"precision.loss_scale: the engine scales(.|\n)*program.engine"):
            ShardedModule(program, net(), mesh=mesh)
        assert Engine(program, net(), mesh=mesh).step(BATCH).isfinite()

    loopback(program.mesh, work)


def test_what_the_loss_reads_of_its_own_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter of its own that nothing trains; a tensor around it that is written to later."""
    weights = torch.ones(4)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: Any, batch: Any) -> Any:
            return (output * self.temperature - batch["y"]).square().mean()

    def plain(output: Any, batch: Any) -> Any:
        return ((output - batch["y"]).square() * weights).mean()  # type: ignore[no-any-return]

    own, batch = Own(), {"input": torch.randn(4, 4), "y": torch.randn(4, 4)}
    for loss in (own, own.forward, lambda o, b: own(o, b)):
        told = shardc.compile(nn.Linear(4, 4), batch, {"shardc": 1, "mesh": {"dp": 1}}, loss=loss).notes
        assert [n for n in told if "shape [] requires a gradient" in n and "does not train it" in n] == [*told]
    model = nn.Linear(4, 4)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, loss=plain)
    assert program.notes == ()
    engine = program.engine(model, optimizer=None)
    engine.evaluate(batch)
    assert capsys.readouterr().err == ""
    weights.mul_(2)
    engine.evaluate(batch)
    assert "a tensor of shape [4] that is read here was written to" in capsys.readouterr().err


def replace(m: Any) -> None:
    m.up = nn.Linear(8, 16)


LATER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "freeze": (lambda m: m.up.requires_grad_(False), "up.weight and 1 more: requires_grad, changed after"),
    "load": (lambda m: m.load_state_dict(net().state_dict()), "up.weight and 5 more: its values, changed after"),
    "hook": (lambda m: m.up.register_forward_hook(lambda *given: given[2] * 2), "up: a hook, changed after"),
    "gradient hook": (lambda m: m.up.weight.register_hook(torch.neg), "up.weight: a gradient hook, changed after"),
    "replace": (replace, "up: another module, changed after"),
    "dtype": (lambda m: m.bfloat16(), "up.weight and 5 more: its dtype, changed after"),
    "part in eval mode": (lambda m: m.norm.eval(), "norm: in eval mode, changed after"),
}


@pytest.mark.parametrize("made", ["engine", "module"])
@pytest.mark.parametrize("change", LATER)
def test_what_is_done_to_the_model_afterwards_is_told(
    change: str, made: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine has a copy: a layer that is frozen after the first epoch would go on training without a word."""
    model = net()
    program = shardc.compile(model, BATCH, {"shardc": 1})
    engine = program.engine(model) if made == "engine" else program.module(model)
    step = (lambda: engine.step(BATCH)) if made == "engine" else (lambda: engine(**BATCH))
    step()
    assert "changed after" not in capsys.readouterr().err
    LATER[change][0](model)
    step(), step()
    told = LATER[change][1]
    assert capsys.readouterr().err.count(f"note: {told} this {made} was made") == 1


def test_weights_that_were_handed_out_may_be_put_into_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    engine = shardc.compile(model, BATCH, {"shardc": 1}).engine(model)
    engine.step(BATCH)
    model.load_state_dict(engine.full_state_dict())
    model.eval()  # of the whole model: to use it
    engine.step(BATCH)
    assert "changed after" not in capsys.readouterr().err
