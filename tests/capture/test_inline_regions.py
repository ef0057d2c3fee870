"""`with torch.autocast(...)` inside a model's forward: the casts of autocast, and one device's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc.capture import capture
from shardc.capture.rewrite.inline_regions import AutocastRegion
from shardc.errors import ShardcError

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


class Net(nn.Module):
    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.middle, self.a, self.b, self.norm = middle, nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, x).float()).square().mean()


def products(m: Net, x: Tensor) -> Tensor:
    with AUTOCAST:
        return m.a(x).relu() + x


def shared(m: Net, x: Tensor) -> Tensor:
    """A weight that is used twice is cast once: its gradients are added up in 16 bits."""
    with AUTOCAST:
        return m.a(m.a(x).tanh())


def off_inside(m: Net, x: Tensor) -> Tensor:
    with AUTOCAST:
        y = m.a(x)
        with torch.autocast("cpu", enabled=False):
            return m.b(y.float()) + m.norm(x)


def many(m: Net, x: Tensor) -> Tensor:
    with AUTOCAST:
        y = m.norm(m.a(x))
        y = torch.cat([y, m.conv(y[..., None])[..., 0]], -1).softmax(-1)
        z = torch.einsum("bi,bj->bij", y, x) @ x
        z = F.scaled_dot_product_attention(z, z, z).bmm(z.mT)
        return z.sum(1) @ torch.ones(16, 8) + F.cross_entropy(m.a(x), x.argmax(-1))


def without_gradients(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad(), AUTOCAST:
        scale = m.a(x).exp()
    return m.b(x) * scale.float()


@pytest.mark.parametrize("middle", [products, shared, off_inside, many, without_gradients])
def test_autocast_is_one_devices(middle: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(middle)
    loss = model(X)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    program = shardc.compile(model, X, {"shardc": 1, "mesh": {"dp": 1}})
    assert "torch.bfloat16" in str(program)
    sim = shardc.simulate(program, model, X)
    assert torch.equal(sim.loss, loss.detach())
    assert sim.grads.keys() == grads.keys()
    assert [n for n, g in grads.items() if not torch.equal(sim.grads[n], g)] == []
    split = shardc.compile(model, X, {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"a": "column"}})
    assert split.prove().ok
    # rows in another order: 16 bits have 8 digits
    assert float(shardc.simulate(split, model, X).loss) == pytest.approx(float(loss.detach()), rel=1e-2)


def test_no_grad_inside_is_refused() -> None:
    """torch.export loses it: the gradient would be another one."""

    def middle(m: Net, x: Tensor) -> Tensor:
        with AUTOCAST, torch.no_grad():
            return m.a(x)

    with pytest.raises(ShardcError, match=r"no_grad begins inside an autocast region.*\n  fix: let it begin outside"):
        capture(Net(middle), X, prove=False)


def test_another_device_is_refused() -> None:
    graph, made = fx.Graph(), fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    x.meta["val"] = y.meta["val"] = X
    with pytest.raises(ShardcError, match=r"autocast of cuda on, around tensors of cpu\n  fix: take the region out"):
        AutocastRegion("cuda", torch.bfloat16).copy(y, made, {x: made.placeholder("x")}, grad=True)
