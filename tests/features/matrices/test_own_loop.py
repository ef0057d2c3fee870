"""Whole matrices in a loop of the user's own, and with what is kept outside of the device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.runtime.mesh.agreement import DisagreementError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests.features.matrices.optimizers import alone
from tests.features.matrices.test_whole import (
    BATCH,
    CLIP,
    SPECS,
    TP,
    check,
    compiled,
    expected,
    matrices,
    model,
    several,
)
from tests.second_device import NAME, OnSecond, second_device

DATA = {f"zero {z}": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": z}} for z in (0, 1, 3)}


def loop(module: Any, optimizer: Any, steps: int) -> None:
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(steps):
        module(**module.local(BATCH)).backward()
        module.clip_grad_norm_(CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", [*DATA, "uneven", "hsdp"])
def test_a_module_steps_whole_matrices(name: str) -> None:
    """Two messages a step, one each way: that ZeRO gathers stretches in between is no change that owners see."""
    p = compiled({**DATA, **SPECS}[name])

    def work(mesh: LoopbackMesh) -> tuple[dict[str, Tensor], list[str]]:
        module = p.module(model(), mesh=mesh)
        optimizer = module.optimizer(several)
        loop(module, optimizer, 2)
        mesh.records.clear()
        loop(module, optimizer, 1)
        return module.full_state_dict(), [r.direction for r in mesh.records if r.tag.startswith("matrices")]

    ranks = loopback(p.mesh, work)
    check([state for state, _ in ranks], expected(3))
    assert all(sent == ["update", "update"] for _, sent in ranks)


def test_a_module_saves_and_loads(tmp_path: Path) -> None:
    """What a module saved, an engine of another mesh goes on from, and a module from that."""

    def first(mesh: Any, p: Program) -> None:
        module = p.module(model(), mesh=mesh)
        optimizer = module.optimizer(several)
        loop(module, optimizer, 2)
        module.save(tmp_path / "a", optimizer)

    def second(mesh: Any, p: Program) -> None:
        engine = p.engine(model(), several, mesh=mesh, clip_norm=CLIP)
        engine.load(tmp_path / "a")
        engine.step(BATCH)
        engine.save(tmp_path / "b")

    def third(mesh: Any, p: Program) -> dict[str, Tensor]:
        module = p.module(model(), mesh=mesh)
        optimizer = module.optimizer(several)
        module.load(tmp_path / "b", optimizer)
        loop(module, optimizer, 1)
        return module.full_state_dict()

    for work, name in ((first, "zero 1"), (second, "zero 3"), (third, "zero 0")):
        p = compiled(DATA[name])
        states = loopback(p.mesh, functools.partial(work, p=p))  # type: ignore[arg-type]
    check(states, expected(4))


def test_an_optimizer_without_whole_matrices_is_the_users() -> None:
    p = shardc.compile(model(), BATCH, {"shardc": 1, **DATA["zero 3"]})

    def work(mesh: Any) -> dict[str, Tensor]:
        module = p.module(model(), mesh=mesh)
        optimizer = module.optimizer(lambda ps: torch.optim.AdamW(shardc.groups(ps, {"*.bias": {"lr": 0.1}}), lr=1e-2))
        assert isinstance(optimizer, torch.optim.AdamW)
        loop(module, optimizer, 1)
        return module.full_state_dict()

    def plain(params: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(shardc.groups(params, {"*.bias": {"lr": 0.1}}), lr=1e-2)]

    whole = matrices(compiled({"mesh": {"dp": 1}}, {"matrices": "whole"}))
    check(loopback(p.mesh, work), alone(model(), BATCH, plain, whole, 1, CLIP))


def test_what_a_loop_gets_wrong() -> None:
    p = compiled(DATA["zero 3"], {"matrices": "whole"})

    def bare(mesh: Any) -> None:
        module = p.module(model(), mesh=mesh)
        module(**module.local(BATCH)).backward()
        torch.optim.Adafactor(module.parameters()).step()

    with pytest.raises(ShardcError, match=r"needs whole parameters(.|\n)*module\.optimizer\(lambda params"):
        loopback(p.mesh, bare)

    def rates(mesh: LoopbackMesh) -> None:
        module = p.module(model(), mesh=mesh)
        optimizer = module.optimizer(lambda ps: torch.optim.Adafactor(ps, lr=0.1 + mesh.rank))
        loop(module, optimizer, 1)

    with pytest.raises(DisagreementError, match="the learning rate"):
        loopback(p.mesh, rates)


OFFLOAD: dict[str, dict[str, Any]] = {
    "optimizer": {"mesh": {"dp": 2}, "data": {"zero": 1, "offload": {"optimizer": "cpu"}}},
    "both": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": 3, "offload": {"optimizer": "cpu"}}},
}
OFFLOAD["both"]["data"]["offload"]["parameters"] = "cpu"


@pytest.mark.parametrize("name", OFFLOAD)
def test_offload(name: str, tmp_path: Path) -> None:
    """The state of matrices is kept outside as any is, and parameters are read and filled where they are kept."""
    p = compiled(OFFLOAD[name])

    def work(mesh: Any, steps: int, load: bool = False) -> dict[str, Tensor]:
        engine = p.engine(model(), several, mesh=mesh, clip_norm=CLIP)
        if load:
            engine.load(tmp_path)
        for _ in range(steps):
            engine.step(BATCH)
        if not load:
            engine.save(tmp_path)
        return engine.full_state_dict()

    check(loopback(p.mesh, functools.partial(work, steps=3)), expected(3))
    check(loopback(p.mesh, functools.partial(work, steps=1, load=True)), expected(4))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.mid(self.up(x).tanh()).tanh()) - x).square().mean()


SMALL, X = Small(), torch.linspace(-1, 1, 64).view(8, 8).sin()


def muon(params: Any) -> list[torch.optim.Optimizer]:
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in params:
        kinds[p.dim() == 2].append((name, p))
    return [torch.optim.Muon(kinds[True], lr=0.02), torch.optim.AdamW(kinds[False], lr=1e-2)]


def test_on_another_device_than_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    # the trial leaves torch's modes, of which the made-up device is one
    monkeypatch.setattr("shardc.features.matrices.stand_ins.needs_whole", lambda m: isinstance(m, torch.optim.Muon))
    words = {"data": {"zero": 3}, "optimizer": {"matrices": "whole"}}
    p = shardc.compile(SMALL, X, {"shardc": 1, "mesh": {"dp": 2}, **words})

    def work(mesh: LoopbackMesh, device: str) -> list[float]:
        mesh.device = torch.device(device)
        engine = p.engine(SMALL, muon, mesh=mesh, check=False)
        losses = [engine.step(X) for _ in range(3)]
        assert all(q.device.type == device for g in engine.optimizer.param_groups for q in g["params"] if q.dim() == 2)
        return [float(x.numbers if isinstance(x, OnSecond) else x) for x in losses]

    def there(mesh: LoopbackMesh) -> list[float]:
        with second_device():
            return work(mesh, NAME)

    known = loopback(p.mesh, lambda mesh: work(mesh, "cpu"))
    assert loopback(p.mesh, there) == [pytest.approx(each, rel=1e-5) for each in known]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_messages_begin_while_backward_runs(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of gradients come one after the other: what the first ones have is on its way before the last one is
    summed, unless all have to be known first (clipping).
    """
    monkeypatch.setattr("shardc.features.matrices.exchange.BUCKET", 64)
    data = {"zero": zero, "bucket_mb": 1e-4}
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": data, "optimizer": {"matrices": "whole"}}
    p = shardc.compile(SMALL.double(), X.double(), spec)

    def work(mesh: LoopbackMesh, clip: float | None) -> tuple[list[str], dict[str, Tensor]]:
        engine = p.engine(SMALL, muon, mesh=mesh, clip_norm=clip)
        engine.step(X.double())
        mesh.records.clear()
        engine.step(X.double())
        tags = [r.tag.rstrip("0123456789") for r in mesh.records if r.direction != "forward"]
        return tags, engine.full_state_dict()

    early, late = (loopback(p.mesh, functools.partial(work, clip=clip)) for clip in (None, 1e9))
    SMALL.float()
    for tags, _ in late:
        assert "bucket" not in tags[tags.index("matrices") : len(tags) - tags[::-1].index("matrices")]
    for tags, _ in early:
        assert "bucket" in tags[tags.index("matrices") :][:-4]
    assert all(torch.equal(x, late[0][1][n]) for n, x in early[0][1].items())
