"""Checkpoint regions: what is computed again is what was there, bit for bit; what a region does not keep is not there."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardc
from shardc.program import Program
from shardc.runtime.engine import Engine
from shardc.runtime.loopback import LoopbackMesh, loopback
from shardc.runtime.module import ShardedModule
from tests import zoo
from tests.test_equal import spec_of

LAYERS = {"gpt": "h.*", "llama": "model.layers.*", "bert": "bert.encoder.layer.*", "t5": "{encoder,decoder}.block.*", "resnet_bn": "blocks.*"}
EVERYTHING = ["linear", "attention", "collective", "matmul", "conv", "norm"]


def settings(name: str) -> dict[str, list[dict[str, Any]]]:
    match = LAYERS[name]
    return {
        "all": [{"match": match}],
        "save": [{"match": match, "save": ["linear", "attention", "collective"]}],
        "save linear": [{"match": match, "save": ["linear"]}],
        "save everything": [{"match": match, "save": EVERYTHING}],
        "nested": [{"match": match.removesuffix(".*")}, {"match": match, "save": ["collective"]}],
        "budget": [{"match": match, "budget": 0.5}],
        "every": [{"match": match, "every": 2, "offload": "cpu"}],
    }


SETTINGS = tuple(settings("gpt"))
MESHES: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "dp=2 tp=2": spec_of("gpt", {"dp": 2, "tp": 2}),
    "tp=2 sp": spec_of("gpt", {"dp": 1, "tp": 2}, sequence=True),
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.1}},
    "zero 2, bf16": {"mesh": {"dp": 2}, "data": {"zero": 2}, "precision": {"compute": "bfloat16"}},
    "microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
    "zero 3, tp=2, microbatches": spec_of("gpt", {"dp": 2, "tp": 2}) | {"data": {"zero": 3}, "batch": {"microbatches": 2}},
}


@functools.cache
def captured(name: str) -> tuple[Any, Any, Program]:
    dropout = {} if name == "resnet_bn" else {"dropout": 0.1}
    model, batch = zoo.ALL[name](dtype=torch.float32, **dropout) if name != "llama" else zoo.llama(torch.float32)
    return model, batch, shardc.capture.capture(model, batch, prove=False)


def compiled(name: str, spec: dict[str, Any], checkpoint: list[dict[str, Any]]) -> Program:
    model, batch, graph = captured(name)
    return shardc.compile(model, batch, {"shardc": 1, **spec, "checkpoint": checkpoint}, captured=graph)


def two_steps(name: str, program: Program) -> Any:
    model, batch, _ = captured(name)
    return shardc.simulate(program, model, batch, steps=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))


@functools.cache
def plain(name: str, mesh: str) -> Any:
    return two_steps(name, compiled(name, MESHES[mesh], []))


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit: loss, gradients and the state after two steps."""
    assert torch.equal(one.loss, other.loss)
    for a, b in ((one.grads, other.grads), (one.state, other.state)):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(a[n], b[n])] == []


# --- equality


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_bit_equal_to_the_program_without(setting: str, mesh: str) -> None:
    """Dropout on; two steps, so that masks of the second step are not those of the first."""
    program = compiled("gpt", MESHES[mesh], settings("gpt")[setting])
    assert program.regions
    assert_same(two_steps("gpt", program), plain("gpt", mesh))


@pytest.mark.parametrize("setting", ["all", "nested", "budget"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "resnet_bn"])
def test_models(name: str, setting: str) -> None:
    """T5: layers share a bias and the encoder's output. BatchNorm: statistics are updated once, and summed over ranks again."""
    program = compiled(name, {"mesh": {"dp": 2}}, settings(name)[setting])
    assert_same(two_steps(name, program), two_steps(name, compiled(name, {"mesh": {"dp": 2}}, [])))


def test_equal_to_one_device() -> None:
    """In float64, with dropout: `verify` runs the global graph, which knows no regions, on one device."""
    program = compiled("gpt", MESHES["dp=2 tp=2"], settings("gpt")["save"])
    report = program.verify()
    assert report.ok, str(report)


def test_evaluation_is_as_without() -> None:
    model, batch, _ = captured("gpt")

    def work(program: Program) -> Callable[[LoopbackMesh], Tensor]:
        return lambda mesh: Engine(program, model, None, mesh=mesh).evaluate(batch)

    a, b = (loopback(p.mesh, work(p))[0] for p in (compiled("gpt", MESHES["one"], s) for s in ([], settings("gpt")["all"])))
    assert torch.equal(a, b)


# --- awkward models


class Wild(nn.Module):
    """A module called four times, views of one value saved in several ways, a value used far outside, a result nobody uses, complex numbers."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.drop = nn.Linear(8, 16), nn.LayerNorm(8), nn.Dropout(0.2)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.fc(self.norm(x)).chunk(2, -1)
            y = torch.view_as_real(torch.complex(a, b) * torch.complex(a.flip(-1), b)).sum(-1)
            spare = y.softmax(-1)
            z = self.drop(y.transpose(0, 1)).transpose(0, 1) * self.scale.sigmoid() + torch.einsum("bi,bj->bi", a, b) * 1e-2
            mean = z.mean()
            return self.norm(x + z.tanh()) * (z * 0 + 1) + 0 * spare.sum(), mean

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = Wild.Layer(), Wild.Layer()
        self.again.fc.weight = self.layer.fc.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for _ in range(3):
            x, mean = self.layer(x)
            total = total + mean
        first = x
        x, mean = self.again(self.frozen(x))
        x, _ = self.layer(x)
        return F.mse_loss(x * first, first.detach()) + total + mean


@pytest.mark.parametrize(
    "checkpoint",
    [[{"match": "layer"}], [{"match": "{layer,again}", "save": ["linear"]}], [{"match": "*", "budget": 0.3}], [{"match": "layer.fc"}],
     [{"match": "again"}, {"match": "layer"}, {"match": "layer.norm"}, {"match": "layer.drop", "save": []}]],
)  # fmt: skip
@pytest.mark.parametrize("dp", [1, 2])
def test_awkward(checkpoint: list[dict[str, Any]], dp: int) -> None:
    torch.manual_seed(0)
    model, batch = Wild(), (torch.randn(4, 8),)
    programs = [shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": dp}, "checkpoint": c}, prove=False) for c in ([], checkpoint)]
    assert_same(*(shardc.simulate(p, model, batch, steps=2, optimizer=lambda q: torch.optim.SGD(q, 0.1)) for p in programs))


def test_each_call_of_a_module_is_a_region_of_its_own() -> None:
    def of(*entries: dict[str, Any]) -> list[tuple[str, str]]:
        spec = {"shardc": 1, "mesh": {}, "checkpoint": list(entries)}
        return [(r.name, r.parent) for r in shardc.compile(Wild(), (torch.randn(4, 8),), spec, prove=False).regions]

    assert of({"match": "layer"}) == [("layer", ""), ("layer@1", ""), ("layer@2", ""), ("layer@3", "")]
    assert [r for r in of({"match": "layer"}, {"match": "*.norm"}) if r[1]][:4] == [
        ("layer.norm", "layer"), ("layer.norm@1", "layer"), ("layer.norm@2", "layer@1"), ("layer.norm@3", "layer@1"),
    ]  # fmt: skip


def test_a_loop_of_ones_own() -> None:
    """The module's random state has moved on when backward asks for the masks of this step."""
    model, batch, _ = captured("gpt")

    def work(program: Program) -> Callable[[LoopbackMesh], dict[str, Tensor]]:
        def run(mesh: LoopbackMesh) -> dict[str, Tensor]:
            module = ShardedModule(program, model, mesh=mesh)
            for _ in range(2):
                loss = module(**batch)
                loss.backward()
            return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

        return run

    a, b = (loopback(p.mesh, work(p))[0] for p in (compiled("gpt", MESHES["one"], s) for s in ([], settings("gpt")["all"])))
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def test_backward_twice() -> None:
    """A graph that is kept can be run backward again; where an op reuses its memory, that is said instead of a wrong gradient."""
    model, batch, _ = captured("gpt")
    program = compiled("gpt", MESHES["one"], settings("gpt")["all"])

    def run(mesh: LoopbackMesh) -> tuple[Tensor, Tensor]:
        module = ShardedModule(program, model, mesh=mesh)
        loss = module(**batch)
        loss.backward(retain_graph=True)
        p = module.get_parameter("h.0.fc.weight")
        assert p.grad is not None
        once = p.grad.clone()
        loss.backward()
        return once, p.grad

    once, twice = loopback(program.mesh, run)[0]
    assert torch.equal(twice, 2 * once)
    tp = compiled("gpt", spec_of("gpt", {"dp": 1, "tp": 2}), [{"match": "*"}])  # the loss too
    assert any(n.target is shardc.runtime.ops.nll_parts for n in tp.stages[0].graph.nodes)


# --- memory


class Live(TorchDispatchMode):
    """Bytes of the storages that were made while it was open, and are there still."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.made = {StorageWeakRef(x.untyped_storage()): 0 for x in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and x.numel():
                self.made.setdefault(StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes())
        return found

    @property
    def bytes(self) -> int:
        return sum(n for ref, n in self.made.items() if not ref.expired())


def kept(model: Any, batch: Any, program: Program) -> tuple[int, int]:
    """(bytes alive after forward, peak of backward), of rank 0."""

    def run(mesh: LoopbackMesh) -> tuple[int, int]:
        module = ShardedModule(program, model, mesh=mesh)
        given = shardc.runtime.inputs.take(program, batch, mesh, local=False)
        with Live([*module.parameters(), *module.buffers(), *given]) as live:
            loss = module._running.run(mesh, module._running.rng, *module.parameters(), *(b for b in module.buffers()), *given)[0]
            gc.collect()
            after, peak = live.bytes, 0

            class Watch(TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    nonlocal peak
                    found = func(*args, **(kwargs or {}))
                    peak = max(peak, live.bytes)
                    return found

            with Watch():
                loss.backward()
        return after, peak

    return loopback(program.mesh, run)[0]


class Stack(nn.Module):
    """The classic demo: blocks of Linear and ReLU."""

    def __init__(self, layers: int = 16, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_is_not_kept_is_not_there() -> None:
    """The classic demo. A block keeps its input; with its linear results kept, these too."""
    model, batch = Stack(), (torch.randn(256, 64),)
    one = 256 * 64 * 4
    found = {}
    for name, checkpoint in {"none": [], "all": [{"match": "layers.*"}], "groups": [{"match": "layers"}]}.items():
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": {}, "checkpoint": checkpoint}, prove=False)
        found[name] = kept(model, batch, program)[0]
        said = sum(r.kept for r in program.regions)
        assert said == {"none": 0, "all": 16 * one, "groups": one}[name]
    print(found, one)
    assert found["none"] == pytest.approx(32 * one, rel=0.01)
    assert found["all"] == pytest.approx(16 * one, rel=0.01)
    assert found["groups"] == pytest.approx(one, rel=0.01)
