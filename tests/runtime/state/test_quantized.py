"""Quantised frozen weights: stored, split, gathered and saved as they are quantised, and equal to one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.stored import whole_name
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state.quantized import plain
from tests.zoo.quantized import Quantized, quantized

torch.set_num_threads(1)
LORA = {"adapters": [{"match": "{up,down}", "rank": 3, "alpha": 6}]}


class Net(nn.Module):
    """up and down are quantised, and square, so that nothing tells rows from columns but the product."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.double()
        if kind:
            for layer in (self.up, self.down):
                layer.weight = quantized(layer.weight, kind)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x)
        return nn.functional.mse_loss(self.head(h + self.down(torch.tanh(self.up(h)))), y)


BATCH = {
    "x": torch.linspace(-2, 2, 8 * 6, dtype=torch.float64).sin().view(8, 6),
    "y": torch.linspace(-1, 1, 32, dtype=torch.float64).cos().view(8, 4),
}
SPLIT = {"shard": {"up": "column", "down": "row"}}
SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, **SPLIT},
    "structure": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 2}},
    "zero 1": {"mesh": {"dp": 2}, "data": {"zero": 1}, "batch": {"microbatches": 2}},
    "zero 3": {"mesh": {"dp": 2, "tp": 2}, **SPLIT, "data": {"zero": 3}},
    "pp": {"mesh": {"pp": 2, "tp": 2}, **SPLIT, "pipeline": {"axis": "pp", "cut": ["down"]}},
    "lowered": {"mesh": {"dp": 2, "tp": 2}, **SPLIT, "data": {"zero": 3}},
}
SPECS["pp"] |= {"batch": {"microbatches": 2}}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trained_alone(model: nn.Module, steps: int) -> tuple[float, dict[str, Tensor]]:
    """The plain model's last loss, and what was trained."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer, loss = sgd(params.values()), torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**BATCH)
        loss.backward()
        optimizer.step()
    return float(loss.detach()), {n: p.detach() for n, p in params.items()}


def check(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    off = {n: float((found[n] - x).norm() / x.norm().clamp(min=1e-3)) for n, x in want.items()}
    assert not {n: e for n, e in off.items() if not e <= 1e-12}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [*((s, "groups") for s in SPECS), *((s, k) for s in ("tp", "zero 3", "pp") for k in ("rows", "packed"))],
)
def test_equals_one_device(spec: str, kind: str) -> None:
    """Three steps of what is not quantised, and the proof."""
    model = Net(kind)
    program = shardc.compile(model, BATCH, {"shardc": 1, **SPECS[spec]})
    run = shardc.simulate(program, model, BATCH, steps=3, optimizer=sgd)
    loss, want = trained_alone(Net(kind), 3)
    assert float(run.loss) == pytest.approx(loss, rel=1e-12)
    check(run.state, want)
    assert program.prove().ok
    numbers = program.param("up.weight:numbers")
    assert numbers.dtype in (torch.int8, torch.uint8)
    assert not numbers.requires_grad
    if "tp" in SPECS[spec]["mesh"]:
        halved = ("up",) if kind == "packed" else ("up", "down")  # of numbers in a row, columns are not split
        sizes = [program.param(f"{n}.weight:numbers").value.nbytes(program.mesh) for n in halved]
        assert sizes == [numbers.value.nbytes() // 2] * len(halved)
    bucket = program.bucket(numbers)
    assert (bucket is not None and bucket.zero == 3 and bucket.compute is None) == (
        SPECS[spec].get("data") == {"zero": 3}
    )


class LowRank(nn.Module):
    """LoRA by hand around a layer."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.layer, self.a, self.b = layer.requires_grad_(False), nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = x @ self.a.t() @ self.b.t()
        return self.layer(x) + 2.0 * low


@pytest.mark.parametrize(
    ("spec", "kind"), [("tp", "rows"), ("zero 3", "rows"), ("tp", "groups"), ("pp", "groups"), ("zero 3", "packed")]
)
def test_adapters_beside_them(spec: str, kind: str) -> None:
    """QLoRA (Dettmers et al. 2023): five steps of A and B, which are kept in the dtype of the scales."""
    model = Net(kind)
    program = shardc.compile(model, BATCH, {"shardc": 1, **SPECS[spec], **LORA})

    def work(mesh: LoopbackMesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = program.engine(model, sgd, mesh=mesh)
        begun = engine.full_state_dict()
        for _ in range(5):
            engine.step(BATCH)
        return begun, engine.full_state_dict()

    begun, ended = loopback(program.mesh, work)[0]
    by_hand = Net(kind).requires_grad_(False)
    for name in ("up", "down"):
        a, b = (begun[f"{name}.lora_{x}.weight"].clone() for x in "AB")
        assert a.dtype == torch.float64
        setattr(by_hand, name, LowRank(getattr(by_hand, name), a, b))
    _, want = trained_alone(by_hand, 5)
    check(ended, {n.replace(".a", ".lora_A.weight").replace(".b", ".lora_B.weight"): x for n, x in want.items()})
    assert program.prove().ok
    if spec == "tp" and kind != "packed":  # numbers in a row: A and B are whole
        assert program.param("up.lora_B.weight").value.nbytes(program.mesh) == 16 * 3 * 8 // 2


def test_checkpoints_and_adapters_files(tmp_path: Path) -> None:
    """Of any mesh; peft's names have no parts in them; what would be rounded is not merged."""
    model = Net("groups")
    first, second = (shardc.compile(model, BATCH, {"shardc": 1, **SPECS[s], **LORA}) for s in ("zero 3", "tp"))

    def save(mesh: LoopbackMesh) -> dict[str, Tensor]:
        engine = first.engine(model, sgd, mesh=mesh)
        engine.step(BATCH)
        engine.save(tmp_path / "c")
        engine.export(tmp_path / "a")
        with pytest.raises(ShardcError, match=r"up\.weight is quantised: the added adapter would be rounded"):
            engine.export(tmp_path / "m", merge=True)
        return engine.full_state_dict()

    def load(mesh: LoopbackMesh) -> dict[str, Tensor]:
        engine = second.engine(model, sgd, mesh=mesh)
        engine.load(tmp_path / "c")
        return engine.full_state_dict()

    saved, loaded = loopback(first.mesh, save)[0], loopback(second.mesh, load)[0]
    assert all(torch.equal(x, loaded[n]) for n, x in saved.items())
    from safetensors import safe_open

    with safe_open(next((tmp_path / "a").glob("adapter_model*.safetensors")), "pt") as file:
        names = set(file.keys())
    assert "base_model.model.up.lora_A.weight" in names
    folder = tmp_path / "p"
    first.save(folder)
    assert shardc.load(folder).param("up.weight:numbers").layout == first.param("up.weight:numbers").layout


def test_the_model_stays_as_it_is() -> None:
    model = Net("rows")
    copied = plain(model)
    assert plain(model) is copied
    assert isinstance(model.up.weight, Quantized)
    assert type(model.up) is nn.Linear
    assert copied.head.weight is model.head.weight
    assert isinstance(copied.up, nn.Linear)
    assert torch.equal(copied(**BATCH), model(**BATCH))
    assert [whole_name(n) for n, _ in copied.up.named_parameters()] == ["bias", "weight", "weight"]
    assert plain(copied.head) is copied.head
    state = {n: x for n, x in copied.state_dict().items() if "up" in n}
    program = shardc.compile(model, BATCH, {"shardc": 1, "mesh": {"dp": 1}})
    flat = loopback(program.mesh, lambda mesh: program.engine(model.state_dict(), mesh=mesh).full_state_dict())[0]
    assert all(torch.equal(flat[n], x) for n, x in state.items())


def test_what_is_refused() -> None:
    trained = Net("rows")
    trained.up.weight.requires_grad_(True)
    with pytest.raises(ShardcError, match=r"up\.weight: it is a Quantized, but it is trained"):
        shardc.compile(trained, BATCH, {"shardc": 1, "mesh": {"dp": 1}})
    dora = {"adapters": [{"match": "up", "rank": 2, "kind": "dora"}]}
    with pytest.raises(ShardcError, match=r"kind: dora of up\.weight: it is quantised"):
        shardc.compile(Net("groups"), BATCH, {"shardc": 1, "mesh": {"dp": 1}, **dora})


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_of_torchao(kind: str) -> None:
    """Its own tensors, in float32, which they know (so 1e-5): where it is installed (0.18 was tried)."""
    torchao = pytest.importorskip("torchao.quantization")
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    def model() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 4))
        config = torchao.Int8WeightOnlyConfig()
        if kind == "int4":
            config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
        if kind == "nf4":
            for layer in (net[0], net[2]):
                layer.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach()), requires_grad=False)
        else:
            torchao.quantize_(net, config, filter_fn=lambda m, name: name in ("0", "2"))
        return net

    x, spec = (
        torch.randn(8, 64),
        {"mesh": {"dp": 2, "tp": 2}, "shard": {"0": "column", "2": "row"}, "data": {"zero": 3}},
    )
    net = model()
    program = shardc.compile(net, x, {"shardc": 1, **spec}, loss=lambda y, _: y.square().mean())
    run = shardc.simulate(program, net, x, steps=3, optimizer=sgd)
    one = model()
    optimizer = sgd([p for p in one.parameters() if p.requires_grad])
    for _ in range(3):
        optimizer.zero_grad()
        one(x).square().mean().backward()
        optimizer.step()
    for name, p in one.named_parameters():
        if p.requires_grad:
            assert torch.allclose(run.state[name], p, rtol=1e-5, atol=1e-6)
