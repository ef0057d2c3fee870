"""Code that looks for layers finds them in a program's module, and what it changes works, or is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.module import ShardedModule


class Gate(nn.Module):
    """Of a class of one's own, with an attribute, a list of modules beside its children, and a mode that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.note = 0.5, "a gate"
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.BatchNorm1d(32)])
        self.order = [self.norms[1], self.norms[0]]
        self.empty = None

    def train(self, mode: bool = True) -> Gate:
        super().train(mode)
        self.norms[1].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.order:
            x = norm(x)
        return x * self.rate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.bn, self.gate = nn.Linear(16, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), Gate()
        self.plain, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 4)
        self.again = self.down

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.again(self.plain(self.gate(self.bn(self.drop(self.up(x)))))), y)


@pytest.fixture(scope="module")
def made() -> tuple[Net, dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    net = Net().double().train()
    batch = {"x": torch.randn(8, 16, dtype=torch.float64), "y": torch.arange(8) % 4}
    return net, batch, shardc.compile(net, batch, {"shardc": 1, "mesh": {"dp": 2}})


def on_ranks(made: Any, work: Callable[[ShardedModule, Any], Any]) -> None:
    net, batch, program = made

    def rank(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, copy.deepcopy(net), mesh=mesh)
        work(module, module.local(batch))

    loopback(program.mesh, rank)


def test_layers_are_found_by_class_name_and_attribute(made: Any) -> None:
    net = made[0]

    def work(module: ShardedModule, _: Any) -> None:
        for a, b in ((module, module), (module, copy.deepcopy(module))):
            del a
            assert {n: type(m) for n, m in b.named_modules() if n} == {n: type(m) for n, m in net.named_modules() if n}
            assert b.again is b.down
            assert b.down.in_features == 32
            assert b.drop.p == 0.5
            assert b.plain.bias is None
            assert b.gate.rate == 0.5
            assert b.gate.order[0] is b.gate.norms[1]
            assert b.gate.order[0] is not net.gate.order[0]
            assert [type(m) for m in b.gate.norms] == [nn.LayerNorm, nn.BatchNorm1d]
            assert list(b.state_dict()) == list(net.state_dict())
            assert "Dropout(p=0.5" in repr(b)

    on_ranks(made, work)


def test_groups_by_class_train_as_on_one_device(made: Any) -> None:
    net, batch, _ = made

    def groups(m: nn.Module) -> torch.optim.Optimizer:
        decay = [k.weight for k in m.modules() if isinstance(k, nn.Linear)]
        rest = [p for p in m.parameters() if all(p is not q for q in decay)]
        return torch.optim.SGD([{"params": decay, "weight_decay": 0.5}, {"params": rest}], lr=0.1)

    def init(m: nn.Module) -> None:
        if type(m) is nn.Linear:
            nn.init.constant_(m.weight, 0.02)
        if isinstance(m, nn.BatchNorm1d):
            m.reset_running_stats()

    def train(m: Any, batch: Any) -> list[torch.Tensor]:
        for k in m.modules():
            if isinstance(k, nn.Linear):
                k.weight.data.mul_(0.9)
        m.apply(init)
        optimizer, losses = groups(m), []
        for _ in range(3):
            loss = m(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain = copy.deepcopy(net)
    plain.drop.p = 0.0
    program = shardc.compile(plain, batch, {"shardc": 1, "mesh": {"dp": 2}})
    want = train(copy.deepcopy(plain), batch)

    def rank(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, plain, mesh=mesh)
        torch.testing.assert_close(train(module, module.local(batch)), want, rtol=1e-12, atol=1e-14)

    loopback(program.mesh, rank)


def _drop(m: Any) -> None:
    for k in m.modules():
        if isinstance(k, nn.Dropout):
            k.p = 0.0


def _replace(m: Any) -> None:
    m.down = nn.Linear(32, 4)


def _frozen_statistics(m: Any) -> None:
    for k in m.modules():
        if isinstance(k, nn.BatchNorm1d):
            k.eval()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dropout": (_drop, r"drop\.p: forward reads it, and it was 0\.5 .* now it is 0\.0"),
    "attribute": (lambda m: setattr(m.bn, "momentum", 0.9), r"bn\.momentum: forward reads it"),
    "own attribute": (lambda m: setattr(m.gate, "rate", 2.0), r"gate\.rate: forward reads it"),
    "replaced": (_replace, r"module\.down: this submodule was replaced"),
    "added": (lambda m: m.gate.add_module("more", nn.Linear(2, 2)), r"module\.gate\.more: this submodule is new"),
    "taken out": (lambda m: delattr(m, "drop"), r"module\.drop: this submodule was replaced or removed"),
    "parameter": (lambda m: setattr(m.up, "scale", nn.Parameter(torch.ones(1))), r"module\.up\.scale: .* is new"),
    "parametrized": (lambda m: nn.utils.parametrizations.spectral_norm(m.up), r"module\.up\.parametrizations: .* new"),
    "statistics": (_frozen_statistics, r"bn: this submodule is in eval mode"),
    "hook": (lambda m: m.drop.register_forward_hook(print), r"drop: a hook on this submodule would never run"),
    "compiled": (lambda m: m.compile(), r"torch\.compile\(module\): forward is a program with collectives"),
    "called": (lambda m: m.up(torch.ones(1, 16)), "a part of the module cannot run separately"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_nothing_is_refused(made: Any, change: str) -> None:
    do, said = CHANGES[change]

    def work(module: ShardedModule, part: Any) -> None:
        def changed() -> None:
            do(module)
            module(**part)

        with pytest.raises(ShardcError, match=said):
            changed()

    on_ranks(made, work)


def test_a_mode_that_a_class_keeps_is_kept(made: Any) -> None:
    """Gate's own train() leaves one norm in eval mode, as it was when the model was compiled."""

    def work(module: ShardedModule, part: Any) -> None:
        module.eval()
        module.train()
        assert not module.gate.norms[1].training
        module(**part)

    on_ranks(made, work)


def test_parts_hold_no_weights_of_the_model(made: Any) -> None:
    net, _, program = made

    def rank(mesh: LoopbackMesh) -> None:
        module = ShardedModule(program, net, mesh=mesh)
        own = {id(x) for x in (*module.parameters(), *module.buffers())}
        theirs = {id(x) for x in (*net.modules(), *net.parameters(), *net.buffers())}
        assert not own & theirs
        for m in module.modules():
            assert not theirs & {id(v) for v in vars(m).values()}

    loopback(program.mesh, rank)


def test_a_forward_inside_of_backward_is_refused(made: Any) -> None:
    """torch.utils.checkpoint, reentrant, runs it again there, and no gradient of it would arrive."""

    def work(module: ShardedModule, part: Any) -> None:
        anchor = torch.zeros((), requires_grad=True)
        loss = checkpoint(lambda anchor: module(**part), anchor, use_reentrant=True)
        with pytest.raises(ShardcError, match=r"module\.forward: forward is run inside of backward"):
            loss.backward()

    on_ranks(made, work)


def test_a_checkpoint_around_a_module_changes_nothing(made: Any) -> None:
    """It is handed nothing that autograd saves: the forward graph keeps what the backward graph takes."""

    def work(module: ShardedModule, part: Any) -> None:
        gradients = []
        for run in (module, partial(checkpoint, module, use_reentrant=False)):
            module._running.rng.step = 0  # the same dropout
            run(**part).backward()
            gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
            module.zero_grad()
        assert gradients[0]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    on_ranks(made, work)


@pytest.mark.parametrize("alive", [True, False])
def test_two_copies_of_a_model_are_told(made: Any, alive: bool, capfd: pytest.CaptureFixture[str]) -> None:
    net, batch, program = made

    def rank(mesh: LoopbackMesh) -> None:
        first = ShardedModule(program, net, mesh=mesh)
        second = ShardedModule(program, net, mesh=mesh)
        first(**first.local(batch))
        if not alive:
            del first
            gc.collect()
        mesh.barrier()
        second(**second.local(batch))

    loopback(program.mesh, rank)
    assert capfd.readouterr().err.count("the model: another engine or module was made from it") == alive
