"""Mistakes of an ordinary user's first loops: each error names the place, the cause and what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.cli.run import _settings
from shardc.errors import ShardcError
from shardc.ir.stored import UnknownParameterError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state.weight_files import open_weights
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from shardc.runtime.step.param_groups import NamedParameters
from shardc.spec import Run
from tests.runtime.step.small import on_engines, on_modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
        return strength * (self.down(self.up(x).relu()) - x).square().mean()


torch.manual_seed(0)
MODEL = Net()
BATCH = {"x": torch.randn(8, 8), "strength": 2.0}
PROGRAM = shardc.compile(
    MODEL, BATCH, {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}}
)
SAMPLES = [{"x": torch.randn(4 + i % 3)} for i in range(16)]
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def scaled(module: ShardedModule) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(module(**module.local(BATCH))).backward()
    scaler.unscale_(torch.optim.SGD(module.parameters(), lr=0.1))


def looked_at(engine: Engine) -> None:
    engine.step(BATCH)
    gradients = [p.grad for p in engine.params.values()]  # of a step that was before anybody asked
    assert gradients[0] is None or type(gradients[0]) is not torch.Tensor
    engine.step(BATCH)
    engine.params["up.weight"].grad.norm()  # type: ignore[union-attr]


def summed_again(module: ShardedModule) -> None:
    module(**module.local(BATCH)).backward()
    for p in module.parameters():
        torch.distributed.all_reduce(p.grad)


MODULES: dict[str, tuple[Callable[[ShardedModule], Any], str]] = {
    "whole weights": (
        lambda m: m.load_state_dict(MODEL.state_dict()),
        r"load_state_dict: up.weight: a whole weight \[16, 8\], of which this rank has a part \[8, 8\] \(3 such\)\n"
        r"  fix: .*program.module\(model, weights=state_dict\)",
    ),
    "another dtype": (
        lambda m: m.half()(**m.local(BATCH)),
        r"up.weight: the module's parameter, or its memory, was replaced: the program still uses the old one "
        r"\(4 such\)\n  fix: [^\n]*`precision`[^\n]*$",
    ),
    "another number": (
        lambda m: m(**(m.local(BATCH) | {"strength": 3.0})),
        r"strength: the batch gives the number 3.0, but the program was compiled with 2.0 there\n"
        r"  fix: pass it as a tensor, also to compile: torch.tensor\(3.0\)",
    ),
    "torch.compile": (
        lambda m: torch.compile(m, backend="eager"),
        r"torch.compile\(module\): forward is a program with collectives(.|\n)*use the module as it is",
    ),
    "a part by itself": (
        lambda m: m.get_submodule("up")(BATCH["x"]),
        r"a submodule of program.module\(...\): a part of the module cannot run separately(.|\n)*loss function return",
    ),
    "a batch as one argument": (
        lambda m: m(m.local(BATCH)),
        r"module\(batch\): the batch came as one argument, (.|\n)*module\(\*\*batch\)",
    ),
    "a part of a part": (
        lambda m: m.local(m.local(BATCH)),
        r"if this is a rank's part already, as local\(batch\) returns it: pass it directly",
    ),
    "a smaller last batch": (
        lambda m: m(x=m.local(BATCH)["x"][:2], strength=2.0),
        r"drop the last, smaller batch of an epoch \(drop_last=True\), or use engine.step",
    ),
    "an input that waits for a gradient": (
        lambda m: m(x=m.local(BATCH)["x"].clone().requires_grad_() * 1, strength=2.0),
        r"x: it depends on other parameters, which would get no gradient(.|\n)*detach it",
    ),
    "a gradient scaler": (
        scaled,
        r"torch.amp.GradScaler: each rank would look for overflows(.|\n)*`precision: \{loss_scale: dynamic\}`",
    ),
    "gradients that are summed again": (
        summed_again,
        r"torch.distributed.all_reduce of up.weight.grad: ranks have different parts (.|\n)*remove it: backward",
    ),
    "weights of the first rank": (
        lambda m: torch.distributed.broadcast(m.get_parameter("up.weight").data, 0),
        r"torch.distributed.broadcast of up.weight: ranks have different parts (.|\n)*broadcast=True of program.module",
    ),
    "a name of a parameter": (
        lambda m: m.get_parameter("up.weigth"),
        r"module.get_parameter\('up.weigth'\): the module has no parameter 'up.weigth'\n  fix: .* 'up.weight'",
    ),
    "a module of a program, compiled again": (
        lambda m: shardc.compile(m, BATCH, ONE),
        r"the model: the module is already compiled and has only this rank's part\n  fix: pass the plain model",
    ),
    "a name of a module": (lambda m: m.get_submodule("upp"), r"no submodule 'upp'\n  fix: did you mean 'up'\?"),
    "a name of a buffer": (lambda m: m.get_buffer("mean"), r"no buffer 'mean'\n  fix: it has no buffer"),
    "an argument that was not compiled": (
        lambda m: m(**m.local(BATCH), temperature=0.5),
        r"temperature: the program was compiled without this argument, 0.5\n  fix: leave it out, or compile again",
    ),
}
if torch.__version__ < "2.13":  # in 2.11 a class of tensors is not told of it
    del MODULES["weights of the first rank"]
ENGINES: dict[str, tuple[Callable[[LoopbackMesh], Any], str]] = {
    "an optimizer": (
        lambda mesh: Engine(PROGRAM, MODEL, SGD, mesh=mesh),  # type: ignore[arg-type]
        r"optimizer: this SGD is not a function: .*\n  fix: pass a function: optimizer=lambda params",
    ),
    "a scheduler": (
        lambda mesh: Engine(PROGRAM, MODEL, scheduler=torch.optim.lr_scheduler.StepLR(SGD, 1), mesh=mesh),  # type: ignore[arg-type]
        r"scheduler: this StepLR is not a function: .*\n  fix: pass a function: scheduler=lambda optimizer",
    ),
    "a scheduler's class": (
        lambda mesh: Engine(PROGRAM, MODEL, scheduler=torch.optim.lr_scheduler.StepLR, mesh=mesh),
        r"scheduler: StepLR is called with optimizer only, but also needs step_size\n  fix: pass a function",
    ),
    "an option that there is not": (
        lambda mesh: PROGRAM.engine(MODEL, mesh=mesh, grad_clip=1.0),
        r"program.engine\(grad_clip=...\): there is no such option\n  fix: did you mean 'clip_norm'",
    ),
    "an option of optimizers": (
        lambda mesh: PROGRAM.engine(MODEL, mesh=mesh, lr=1e-3),
        r"program.engine\(lr=...\): there is no such option\n  fix: it is an option of the optimizer: "
        r"optimizer=lambda params",
    ),
    "a key of another name": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).step({"images": BATCH["x"], "strength": 2.0}),
        r"images: the program was compiled without this input, f32\[8, 8\]\n  fix: name it 'x'",
    ),
    "a device": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).to("cuda"),  # type: ignore[arg-type]
        r"engine.to: 'cuda' is neither a program nor a spec: this call moves .*\n  fix: ranks choose their devices",
    ),
    "a number of a device": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).to(0),  # type: ignore[arg-type]
        r"engine.to: 0 is neither a program nor a spec: .*\n  fix: engine.to\('spec.yaml'\)",
    ),
    "a dtype of a program": (
        lambda mesh: PROGRAM.to(torch.float64),  # type: ignore[arg-type]
        r"program.to: torch.float64 is neither a program nor a spec(.|\n)*`precision` of the spec sets the dtype",
    ),
    "a part of what a step returns": (
        lambda mesh: (Engine(PROGRAM, MODEL, mesh=mesh).step(BATCH) / 4).backward(),
        r"loss.backward\(\): the engine has already run backward(.|\n)*remove .backward\(\)",
    ),
    "no batches": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).evaluate_all(iter(())),
        r"engine.evaluate_all: there is no batch\n  fix: .*shorter than a batch with drop_last=True",
    ),
    "no batches at all": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).evaluate_all(None),  # type: ignore[arg-type]
        "engine.evaluate_all: there are no batches: None",
    ),
    "a number of batches": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).evaluate_all(3),  # type: ignore[arg-type]
        r"engine.evaluate_all: 3 is not an iterable of batches\n  fix: engine.evaluate_all\(\[batch\]\), or a "
        r"DataLoader",
    ),
    "a scheduler of another optimizer": (
        lambda mesh: Engine(PROGRAM, MODEL, scheduler=lambda _: torch.optim.lr_scheduler.StepLR(SGD, 1), mesh=mesh),
        r"scheduler: StepLR was made from another optimizer(.|\n)*lambda optimizer: StepLR\(optimizer",
    ),
    "the norm of a gradient after a step": (
        lambda mesh: looked_at(Engine(PROGRAM, MODEL, mesh=mesh)),
        r"norm of up.weight.grad: this would use this rank's part of the gradient(.|\n)*norms\(grad=True\)",
    ),
    "a group that is added": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).optimizer.add_param_group({"params": []}),  # type: ignore[union-attr]
        r"engine.optimizer.add_param_group: the groups of an engine's optimizer (.|\n)*fix: make all",
    ),
    "Muon of all parameters": (
        lambda mesh: Engine(PROGRAM, MODEL, lambda params: torch.optim.Muon(params), mesh=mesh),
        r"optimizer: an optimizer takes only matrices, (.|\n)*fix: .*matrices, rest = shardc.matrices\(params\)",
    ),
    "another model": (
        lambda mesh: Engine(PROGRAM, torch.nn.Linear(3, 3), mesh=mesh),
        r"of another model: of 4 tensors 4 missing",
    ),
    "another option": (
        lambda mesh: PROGRAM.module(MODEL, mesh=mesh, brodcast=True),
        r"program.module\(brodcast=...\): there is no such option\n  fix: did you mean 'broadcast'",
    ),
    "another number": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).step({**BATCH, "strength": 1.0}),
        "strength: the batch gives the number 1.0",
    ),
    "a batch without data": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).step({**BATCH, "x": BATCH["x"].to("meta")}),  # type: ignore[attr-defined]
        r"x: f32\[8, 8\] is on the device 'meta', so it has no numbers\n  fix: pass a tensor with data",
    ),
    "a call": (
        lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh)(BATCH),
        r"engine\(...\): an engine cannot be called\n  fix: engine.step\(batch\) trains",
    ),
    "a pickle": (
        lambda mesh: pickle.dumps(Engine(PROGRAM, MODEL, mesh=mesh)),
        r"neither pickled nor copied\n  fix: engine.save\(folder\)",
    ),
    "a copy": (lambda mesh: copy.deepcopy(Engine(PROGRAM, MODEL, mesh=mesh)), "neither pickled nor copied"),
    "a state_dict in a dict": (
        lambda mesh: Engine(PROGRAM, {"net": MODEL.state_dict(), "epoch": 3}, mesh=mesh),
        r"the weights are a state_dict under the key 'net'\n  fix: pass that one: state_dict\['net'\]",
    ),
    "a seed as text": (
        lambda mesh: PROGRAM.verify(seed="a"),  # type: ignore[arg-type]
        "program.verify: 'a' is no seed",
    ),
    "samples of several sizes": (
        lambda mesh: list(Engine(PROGRAM, MODEL, mesh=mesh).loader(SAMPLES, shuffle=False)),
        r"engine.loader: the samples of a batch have several sizes, and are not padded (.|\n)*  fix: pad them",
    ),
    "a rank that there is not": (
        lambda mesh: PROGRAM.local(BATCH, 9),
        r"program.local: there is no rank 9: the mesh dp=2 × tp=2 has 4\n  fix: name one of 0 ... 3",
    ),
    "devices as text": (
        lambda mesh: shardc.plan(MODEL, BATCH, devices="8", device="h100-80g"),  # type: ignore[arg-type]
        "--devices: '8' is no number of devices",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_of_a_module(name: str) -> None:
    act, said = MODULES[name]

    @on_modules(PROGRAM, MODEL)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        module.load_state_dict(module.state_dict())
        with pytest.raises(ShardcError, match=said):
            act(module)


@pytest.mark.parametrize("name", ENGINES)
def test_of_an_engine(name: str) -> None:
    act, said = ENGINES[name]

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=said):
            act(mesh)

    loopback(PROGRAM.mesh, work)


def test_a_misspelled_option_of_a_step_is_no_part_of_the_batch() -> None:
    @on_engines(PROGRAM, MODEL)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'locl'"):
            engine.step(BATCH, locl=True)
        assert engine.step(batch=BATCH) > 0


def test_the_loss_of_a_step_is_a_number_as_any() -> None:
    def work(mesh: LoopbackMesh) -> None:
        loss = Engine(PROGRAM, MODEL, mesh=mesh).step(BATCH)
        file = io.BytesIO()
        torch.save([loss, copy.deepcopy(loss)], file)
        file.seek(0)
        assert torch.load(file) == [loss, loss]
        assert torch.stack([loss, 2 * loss]).mean() == 1.5 * loss
        assert f"{loss:.2f} {loss}" == f"{loss.item():.2f} {loss.item()}"
        assert repr(loss).startswith("tensor(")

    loopback(PROGRAM.mesh, work)


def test_a_whole_model_in_a_file_is_told_in_plain_words(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "whole.pt")
    with pytest.raises(ShardcError, match=r"it contains objects other than tensors, such as a whole model") as e:
        open_weights(tmp_path / "whole.pt")
    assert "\x1b" not in str(e.value)


def test_a_home_folder_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    @on_engines(PROGRAM, MODEL)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        engine.save("~/saved")
        engine.load("~/saved")
        engine.save("~/saved")
        engine.export("~/out/w.safetensors")
        Engine(PROGRAM, MODEL, weights="~/out/w.safetensors", mesh=mesh)

    assert {p.name for p in tmp_path.iterdir()} == {"saved", "out"}
    run = _settings(Run(save="~/a", log="~/b"))
    assert (run.save, run.log) == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_methods_of_other_trainers_are_named() -> None:
    @on_engines(PROGRAM, MODEL)
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        with pytest.raises(AttributeError, match=r"no 'train': step\(batch\) trains, evaluate\(batch\) evaluates"):
            engine.train()
        with pytest.raises(AttributeError, match=r"no 'cuda': ranks choose their devices"):
            engine.cuda()
        assert not hasattr(engine, "weights")


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mode: str = "mean", scale: float = 1.0) -> torch.Tensor:
        return getattr(self.up(x) * scale, mode)()


def test_a_text_of_a_call_stays_what_it_was(tmp_path: Any) -> None:
    model, batch = Modes(), {"x": torch.randn(8, 8), "mode": "sum"}
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}).save(tmp_path / "out")
    program = shardc.load(tmp_path / "out")
    assert program.baked == ((("mode",), "sum"),)

    @on_modules(program, model)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        module(**module.local(batch), scale=1.0)  # the default: as if it was left out
        said = r"mode: the batch gives 'mean', but the program was compiled with 'sum' in its place"
        with pytest.raises(ShardcError, match=said):
            module(**module.local(batch) | {"mode": "mean"})
        engine = Engine(program, model, mesh=mesh)
        engine.step({**batch, "scale": 1.0, "names": ["a", "b"]})
        with pytest.raises(ShardcError, match=said):
            engine.step({**batch, "mode": "mean"})
        with pytest.raises(ShardcError, match=r"scale: the program was compiled without this argument, 2\.0"):
            engine.step({**batch, "scale": 2.0})


def test_a_number_of_the_batch_stays_what_it_was_in_an_artifact(tmp_path: Any) -> None:
    PROGRAM.save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    assert loaded.baked == PROGRAM.baked == ((("strength",), 2.0),)


@pytest.mark.parametrize("value", [True, False, 3, -3, (1 << 70) + 1, 0.5, float("inf")])
def test_a_constant_of_the_batch_is_the_same_in_an_artifact(value: Any, tmp_path: Any) -> None:
    replace(PROGRAM, baked=((("flags", 0), value),)).save(tmp_path / "out")
    ((_, loaded),) = shardc.load(tmp_path / "out").baked
    assert (type(loaded), loaded) == (type(value), value)


def test_a_parameter_that_there_is_not() -> None:
    with pytest.raises(UnknownParameterError, match=r"no parameter 'up.weigth'\n  fix: did you mean 'up.weight'\?"):
        PROGRAM.param("up.weigth")
    with pytest.raises(KeyError, match=r"'zzz'\n  fix: names are the model's, such as 'up.weight', "):
        PROGRAM.param("zzz")
    parts = loopback(PROGRAM.mesh, lambda mesh: Engine(PROGRAM, MODEL, mesh=mesh).params)[0]
    with pytest.raises(KeyError, match=r"engine.params\['up.weigth'\]: (.|\n)*did you mean 'up.weight'\?"):
        parts["up.weigth"]


def test_an_optimizer_function_that_takes_its_argument_for_the_model() -> None:
    pairs = NamedParameters([("w", nn.Parameter(torch.ones(2)))], {})
    with pytest.raises(AttributeError, match=r"pairs, not the model, so there is no \.parameters\(\): .*AdamW\(params"):
        torch.optim.AdamW(pairs.parameters())
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = pairs.other


def test_nothing_to_train_is_said() -> None:
    """A step would give a loss of 0, and change nothing; evaluating works, and has a price."""
    model = copy.deepcopy(MODEL).requires_grad_(False)
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)

    def rank(mesh: LoopbackMesh) -> float:
        engine = program.engine(model, mesh=mesh)
        for call in (engine.step, engine.backward):
            with pytest.raises(ShardcError, match=r"no parameter of the model is trained: .* for all 4"):
                call(BATCH)
        return float(engine.evaluate(BATCH))

    with torch.no_grad():
        assert loopback(program.mesh, rank) == pytest.approx([float(model(**BATCH))] * 2)
    assert program.cost().step_seconds > 0
    with pytest.raises(ShardcError, match="no parameter of the model is trained"):
        program.verify()


def test_what_a_wrapped_module_would_have_is_named() -> None:
    @on_modules(PROGRAM, MODEL)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        with pytest.raises(AttributeError, match=r"has no 'no_sync': .* they add up in .grad as on one device"):
            module.no_sync()
        with pytest.raises(AttributeError, match="object has no attribute 'other'"):
            _ = module.other


def test_what_one_looks_for_first_is_named() -> None:
    with pytest.raises(AttributeError, match=r"a program has no 'step': program.engine\(model\).step\(batch\) trains"):
        _ = PROGRAM.step  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"a program has no 'other'$"):
        _ = PROGRAM.other  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="cannot assign to field 'spec'"):
        PROGRAM.spec = None  # type: ignore[misc]
    with pytest.raises(ShardcError, match="a program is not pickled"):
        pickle.dumps(PROGRAM)
    with pytest.raises(ShardcError, match=r"a program is not called\n  fix: program.engine"):
        PROGRAM(BATCH)
    with pytest.raises(AttributeError, match=r"no attribute 'train': shardc.compile\(model, batch, spec\) gives"):
        _ = shardc.train  # type: ignore[attr-defined]


def test_a_model_that_is_cast_after_it_was_compiled_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = copy.deepcopy(MODEL)
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    held = next(model.parameters()).dtype
    program.engine(model)
    assert "dtype" not in capsys.readouterr().err
    engine = program.engine(model.bfloat16())
    assert next(iter(engine.params.values())).dtype == held
    assert "the model's dtype: its weights were" in capsys.readouterr().err


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, **given: torch.Tensor) -> Any:
        return self.inner(**given)


def distance(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch["y"]).square().mean()


def classes(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


LABELS = {"input": torch.randn(8, 8)}
ROWS = {"input": torch.randn(8, 8), "y": torch.randn(8, 4)}
ONE = {"shardc": 1}


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a wrapped model": (
        lambda: shardc.compile(nn.DataParallel(nn.Linear(8, 4)), ROWS, ONE, loss=distance),
        r"the model: it is wrapped in DataParallel, .*\n  fix: pass the wrapped model.module:",
    ),
    "a forward that takes all": (
        lambda: shardc.compile(Keywords(), ROWS, ONE, loss=distance),
        r"unexpected keyword argument 'y'(.|\n)*fix: a forward with \*\*keywords gets every key of the batch",
    ),
    "a loss of a library": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, loss=nn.MSELoss()),
        r"the loss failed(.|\n)*whole batch: loss=lambda output, batch: f\(output, batch\['y'\]\)",
    ),
    "the text of a spec": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, "shardc: 1\nmesh: {dp: 2}", loss=distance),
        r"spec: this is the text of a spec, not its path\n  fix: .*yaml.safe_load",
    ),
    "spec and batch swapped": (
        lambda: shardc.compile(nn.Linear(8, 4), "spec.yaml", ROWS, loss=distance),
        r"the batch is a str, which looks like the spec\n  fix: .*compile\(model, batch, spec\)",
    ),
    "a keyword that there is not": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, los=distance),  # type: ignore[call-arg]
        r"shardc.compile\(los=...\): there is no such argument\n  fix: did you mean 'loss'\?",
    ),
    "a keyword of the engine's": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, optimizer=SGD),  # type: ignore[call-arg]
        r"shardc.compile\(optimizer=...\): there is no such argument\n  fix: it is the engine's: program.engine",
    ),
    "a setting of the spec's": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, zero=3),  # type: ignore[call-arg]
        r'zero=...\): there is no such argument\n  fix: it belongs into the spec, or overrides=\("data.zero=...",\)',
    ),
    "an axis of the mesh": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, tp=2),  # type: ignore[call-arg]
        r"fix: it is an axis of the mesh: mesh=\{'tp': ...\}",
    ),
    "no spec": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS),  # type: ignore[call-arg]
        r"shardc.compile: spec is missing\n  fix: shardc.compile\(model, batch, spec\)",
    ),
    "a mesh without its name": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, {"dp": 2}),  # type: ignore[misc]
        r"shardc.compile: it takes model, batch, spec by place, and 4 arguments came so\n  fix: .*such as mesh=...",
    ),
    "an axis that is a number": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, {**ONE, "mesh": {"dp": 1}}, mesh={1: 2}, loss=distance),  # type: ignore[dict-item]
        "the spec's mesh has no axis 1",
    ),
    "what is compiled": (
        lambda: shardc.compile(PROGRAM, BATCH, ONE),  # type: ignore[arg-type]
        r"shardc.compile: this is already compiled: <Program Net .*\n  fix: pass the plain model",
    ),
    "no number of steps": (
        lambda: shardc.simulate(PROGRAM, MODEL, BATCH, steps=0),
        r"shardc.simulate: steps must be a number, not 0\n  fix: give a whole number",
    ),
    "a loss that is a class": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, loss=nn.MSELoss),
        r"loss is the class MSELoss, not a function\n  fix: call it on the tensors: .*nn.MSELoss\(\)\(output,",
    ),
    "two losses": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, loss=lambda o, b: (distance(o, b), o.mean())),
        r"the loss is a tuple, not a scalar\n  fix: return one number, such as their sum; to log them too, \(loss,",
    ),
    "labels of another dtype": (
        lambda: shardc.compile(nn.Linear(8, 4), LABELS | {"y": torch.ones(8)}, ONE, loss=classes),
        r"the loss failed(.|\n)*fix: labels that are classes are int64 numbers: labels.long\(\)",
    ),
    "labels of another shape": (
        lambda: shardc.compile(nn.Linear(8, 4), LABELS | {"y": torch.ones(8, 1).long()}, ONE, loss=classes),
        r"the loss failed(.|\n)*fix: a cross entropy takes logits \[rows, classes\] and labels \[rows\]",
    ),
    "too few labels": (
        lambda: shardc.compile(nn.Linear(8, 4), LABELS | {"y": torch.ones(6).long()}, ONE, loss=classes),
        r"the loss failed(.|\n)*fix: logits and labels need the same number of rows",
    ),
    "a model of another dtype": (
        lambda: shardc.compile(nn.Linear(8, 4).double(), ROWS, ONE, loss=distance),
        r"the model's forward failed: .*dtype(.|\n)*fix: give the model and its inputs one dtype",
    ),
    "a loss that is a number": (
        lambda: shardc.compile(nn.Linear(8, 4), ROWS, ONE, loss=lambda o, b: distance(o, b).item()),
        r"the loss is a Python number, from .item\(\), .*\n  fix: remove that call",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_of_compile(name: str) -> None:
    call, said = CALLS[name]
    with pytest.raises(ShardcError, match=said):
        call()


def test_what_torch_compile_wraps_has_arguments_with_names() -> None:
    """Keys of the batch that forward does not name are for the loss, as of the model itself."""
    model = nn.Linear(8, 4)
    program = shardc.compile(torch.compile(model, backend="eager"), ROWS, ONE, loss=distance)  # type: ignore[arg-type]
    loss = program.engine(torch.compile(model, backend="eager"), optimizer=None).evaluate(ROWS)
    torch.testing.assert_close(loss, distance(model(ROWS["input"]), ROWS).detach())


def test_what_torch_warns_of_is_a_note() -> None:
    """A loss that spreads [8] over [8, 1] gives a number, and a wrong one: torch says so where the model runs."""
    loss = "lambda output, batch: nn.functional.mse_loss(output, batch['y'])"
    batch = {"input": torch.randn(8, 8), "y": torch.randn(8)}
    program = shardc.compile(nn.Linear(8, 1), batch, ONE, loss=eval(loss))
    assert not program.notes  # of no file
    program = shardc.compile(nn.Linear(8, 1), batch, ONE, loss=spread)
    assert any("test_mistakes.py:" in n and "torch warns: Using a target size" in n for n in program.notes)


def test_the_plain_models_optimizer_beside_an_engine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = copy.deepcopy(MODEL)
    program = shardc.compile(model, BATCH, ONE)
    engine, optimizer = program.engine(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        engine.step(BATCH)
        optimizer.step()
    said = capsys.readouterr().err
    assert said.count("note: the optimizer SGD: it steps the parameters of the model, which get no gradients") == 1


def test_a_hook_that_came_after_compiling_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = copy.deepcopy(MODEL)
    model.down.register_forward_hook(lambda *_: None)
    program = shardc.compile(model, BATCH, ONE)
    program.engine(model)
    assert "a hook" not in capsys.readouterr().err
    model.up.register_forward_hook(lambda *_: None)
    program.engine(model)
    assert "note: up: a hook was added after the model was compiled, and never runs" in capsys.readouterr().err


def test_a_module_that_computes_otherwise_since_compiling_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    program = shardc.compile(model, ROWS["input"], ONE, loss=lambda output, _: output.square().mean())
    program.module(model)(ROWS["input"]).backward()
    assert "the class" not in capsys.readouterr().err
    model[1], model[2].forward = nn.GELU(), torch.tanh
    program.engine(model)
    notes = capsys.readouterr().err
    assert "the class of 1: it was ReLU when the model was compiled, and is GELU now" in notes
    assert "the class of 2: it was Linear when the model was compiled, and is Linear with another forward now" in notes


def test_weights_that_are_tied_since_compiling_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = shardc.compile(model, ROWS["input"], ONE, loss=lambda output, _: output.square().mean())
    model[1].weight = model[0].weight
    with pytest.raises(ShardcError, match=r"1.weight: it is one tensor with 0.weight now, but the program has two"):
        program.engine(model)


def test_ranks_freeze_and_evaluate_alike() -> None:
    def freezes(mesh: LoopbackMesh) -> None:
        module = ShardedModule(PROGRAM, MODEL, mesh=mesh)
        module.requires_grad_(mesh.rank != 3)
        module(**module.local(BATCH))

    def evaluates(mesh: LoopbackMesh) -> None:
        module = ShardedModule(PROGRAM, MODEL, mesh=mesh)
        with torch.set_grad_enabled(mesh.rank != 3):
            module(**module.local(BATCH))

    def engine(mesh: LoopbackMesh) -> None:
        made = Engine(PROGRAM, MODEL, mesh=mesh)
        made.params["up.bias"].requires_grad_(mesh.rank != 3)
        made.step(BATCH)

    for work, said in (
        (freezes, "which parameters are frozen differs on rank 3 .*: nothing on rank 0, up.weight"),
        (evaluates, "whether gradients are on differs on rank 3 .*: True on rank 0, False on rank 3"),
        (engine, "which parameters are frozen differs on rank 3 .*: nothing on rank 0, up.bias on rank 3"),
    ):
        with pytest.raises(ShardcError, match=said):
            loopback(PROGRAM.mesh, work)


@pytest.mark.parametrize("form", ["a model", "a state_dict"])
def test_a_split_weight_that_one_rank_has_otherwise_is_named(form: str) -> None:
    """Each rank has another slice of it, so no copies differ."""
    program = shardc.compile(
        MODEL, BATCH, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}, prove=False
    )

    def work(mesh: LoopbackMesh) -> None:
        model = copy.deepcopy(MODEL)
        with torch.no_grad():
            model.up.weight.mul_(1 + mesh.rank)
        program.engine(model if form == "a model" else model.state_dict(), mesh=mesh)

    with pytest.raises(ShardcError, match=r"the weight up.weight differs between ranks 0 .*, 1 "):
        loopback(program.mesh, work)


def spread(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def test_a_nan_of_float16_parameters_says_what_they_do_to_adam() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8).half(), {"input": torch.randn(8, 8).half()}
    program = shardc.compile(model, batch, ONE, prove=False, loss=lambda output, batch: output.square().mean() * 1e-4)
    engine = program.engine(model, nonfinite="stop")
    engine.step(batch)
    with pytest.raises(ShardcError, match=r"parameters are float16, in which the eps of Adam \(1e-8\) is 0"):
        engine.step(batch)


class Large(nn.Module):
    """Runs where it is captured, and has no room to run for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layer(x).square().mean()


def test_a_model_that_one_device_has_no_room_for_is_checked_statically() -> None:
    program = shardc.compile(Large(), {"x": torch.randn(8, 8)}, ONE)
    note = "capture was checked statically only: this machine has too little memory for a forward"
    assert note in program.notes


class Clips(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1e-3)
        return super().step(closure)


def test_an_optimizer_that_clips_is_told_where_clipping_is() -> None:
    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"fix: if it clips gradients, use the engine's option: clip_norm=1.0"):
            Engine(PROGRAM, MODEL, lambda params: Clips(params, lr=0.1), mesh=mesh)

    loopback(PROGRAM.mesh, work)
