"""Custom autograd Functions keep their own backward: equal to real autograd of the plain model, also where they are
split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import shardc
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.ir.program import Program
from tests import equality, zoo

Fn = torch.autograd.Function
BATCH, IN, WIDE = 8, 8, 16


class Net(nn.Module):
    """Column-parallel, something custom, row-parallel."""

    def __init__(self, middle: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(IN, WIDE), nn.Linear(WIDE, IN), middle
        self.other = nn.Parameter(torch.zeros(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.middle(self.up(x), self)), x)


def net(middle: Callable[[Tensor, nn.Module], Tensor]) -> zoo.Built:
    x = torch.randn(BATCH, IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return zoo.ready(Net(middle), torch.float64), (x,)


class Gelu(Fn):
    """The derivative by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi))


class Rounded(Fn):
    """Straight-through (Bengio et al. 2013): forward has no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Clamped(Fn):
    """Straight-through inside of an interval; options as attributes and as arguments; backward in place on a fresh
    tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float, unused: None) -> Tensor:
        ctx.limit, ctx.mask = limit, x.abs() <= limit
        ctx.set_materialize_grads(True)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = g.clone()
        found[~ctx.mask] = 0
        assert ctx.needs_input_grad == (True, False, False)
        return found / ctx.limit, None, None


class Reversed(Fn):
    """Gradient reversal (Ganin & Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.strength * g, None


class Smuggled(Fn):
    """Attaches the gradient of an auxiliary loss (fairscale's, Mixtral's and Megatron's MoE do)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (auxiliary,) = ctx.saved_tensors
        return g, torch.ones_like(auxiliary) * 0.3


class Product(Fn):
    """A linear layer by hand; Megatron's, with a backward that scales the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, 0.5 * (g.t() @ x), g.sum(0)


class Squared(Fn):
    """`once_differentiable`, and the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g.mul(2 * x)


class Scaled(Fn):
    """torch's newer way: setup_context; a gradient of the scale too, which broadcasts."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return g * scale * 2, (g * x).sum(0)


class Pair(Fn):
    """Two results and one that is not differentiable; a tuple goes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        above = x > y
        ctx.mark_non_differentiable(above)
        return x * y, torch.maximum(x, y), above

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return g * y + 2 * h, g * x + 3 * h


class Layered(Fn):
    """A softmax by hand, over the dim that is split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


class Again(Fn):
    """Backward runs forward again with autograd, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x) * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = torch.tanh(x) * x
        (found,) = torch.autograd.grad(y, x, g)
        return found


class Angles(Fn):
    """As YOSO's attention: no derivative of its forward, which is nan on random numbers, as acos is beyond 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        near = (1 - torch.acos(x @ weight.t()) / math.pi) ** 3 * mask
        ctx.save_for_backward(x, weight, near)
        return near @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, near = ctx.saved_tensors
        weighted = (g @ weight.t()) * near
        return weighted @ (1.5 * weight), weighted.t() @ (1.5 * x) + near.t() @ g, None


def _angles(x: Tensor, m: Any, mask: float) -> Tensor:
    return Angles.apply(F.normalize(x, dim=-1), F.normalize(m.other + 1, dim=-1), torch.full((BATCH, 1), mask))


def _smuggled(x: Tensor, m: Any) -> Tensor:
    return Smuggled.apply(x, x.square().mean() + m.other.sum())


def _pair(x: Tensor, m: Any) -> Tensor:
    product, largest, above = Pair.apply(x, m.other[0].expand_as(x))
    return product + largest * above


MIDDLES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "gelu": lambda x, m: Gelu.apply(x),
    "rounded": lambda x, m: Rounded.apply(x * 3),
    "clamped": lambda x, m: Clamped.apply(x, 0.7, None),
    "reversed": lambda x, m: F.gelu(Reversed.apply(x, 0.25)) + x,
    "smuggled": _smuggled,
    "product": lambda x, m: Product.apply(F.relu(x), m.other, m.other[1]),
    "squared": lambda x, m: Squared.apply(x),
    "scaled": lambda x, m: Scaled.apply(x, m.other[2]),
    "pair": _pair,
    "softmax": lambda x, m: Layered.apply(x),
    "angles": lambda x, m: _angles(x, m, 1.0),
    "masked angles": lambda x, m: _angles(x, m, 1),  # whole numbers are tried as 0
    "again": lambda x, m: Again.apply(x),
    "twice": lambda x, m: Gelu.apply(Reversed.apply(Rounded.apply(x), 2.0)),
}
MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}},
}


@pytest.mark.parametrize("name", MIDDLES)
def test_equals_autograd(name: str) -> None:
    one = equality.reference(lambda: net(MIDDLES[name]))
    assert set(one.grads) >= {"up.weight", "down.weight"}
    for spec in MESHES.values():
        equality.assert_equal(one.on({"shardc": 1, **spec}), one.loss, one.grads)


def ops(program: Program) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in program.graph.nodes if n.op == "call_function"]


def test_what_stands_in_the_graph() -> None:
    """A product that is its own derivative stays one; elementwise functions need no collective where they are split."""

    class Linear(Fn):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return g @ weight, g.t() @ x

    model, batch = net(lambda x, m: Linear.apply(x, m.other))
    found = ops(capture(model, batch))
    assert found.count("matmul.default") + found.count("mm.default") == 1
    assert "shardc.with_gradient_of.default" not in found

    one = equality.reference(lambda: net(MIDDLES["gelu"]))
    assert ops(one.captured).count("shardc.with_gradient_of.default") == 1
    sim = one.on({"shardc": 1, "mesh": {"tp": 4}, "shard": {"up": "column", "down": "row"}})
    assert equality.collectives(sim, "forward") == {"all_reduce": 1}
    assert equality.collectives(sim, "backward") == {}  # the input has no gradient


def test_nothing_happens_without_gradients() -> None:
    def middle(x: Tensor, m: nn.Module) -> Tensor:
        with torch.no_grad():
            scale = Gelu.apply(x).abs().max()
        return x / scale

    assert "shardc.with_gradient_of.default" not in ops(capture(*net(middle)))


# --- zeros and None ---------------------------------------------------------------------------------------------------


class Dropped(Fn):
    """The second operand has no part in the result, but a gradient: layer drop that keeps autograd's graph alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, torch.zeros_like(g)


class Zeroed(Fn):
    """No gradient depends on that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.zeros_like(g), g.new_zeros(g.shape)


class Summed(Fn):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.new_zeros(ctx.shape)


class Two(Fn):
    """Two results of two operands: autograd gives the gradient of a result that is not used as zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        return g * 2, h * 3


class Unmaterialized(Two):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        return None if g is None else g * 2, None if h is None else h * 3


class Auxiliary(Fn):
    """A term of the loss, through a backward that autograd runs only if the loss uses the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, torch.ones((), dtype=g.dtype)


class Turned(Fn):
    """A complex product with its derivative by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y.conj(), g * x.conj()


def _turned(x: Tensor, m: Any) -> Tensor:
    return torch.view_as_real(Turned.apply(torch.complex(x, x * x), torch.complex(m.other[0], m.other[1]))).sum(-1)


WITHOUT: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "dropped": lambda x, m: Dropped.apply(x, x @ m.other),
    "zeroed": lambda x, m: x + Zeroed.apply(x @ m.other, x),
    "first of two": lambda x, m: Two.apply(x, x @ m.other)[0],
    "second of two": lambda x, m: Two.apply(x @ m.other, x)[1],
    "first of two, not materialized": lambda x, m: Unmaterialized.apply(x, x @ m.other)[0],
    "all of it zeroed": lambda x, m: Zeroed.apply(x, x @ m.other),
    "zeroed, of other sizes": lambda x, m: x + Summed.apply(x @ m.other),
    "auxiliary": lambda x, m: Auxiliary.apply(x, m.other.square().sum()),
    "auxiliary, not used": lambda x, m: (Auxiliary.apply(x, m.other.square().sum()), x)[1],
    "complex": _turned,
}


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", WITHOUT)
def test_zeros_and_none_are_autograds(name: str, zero: int) -> None:
    """AdamW decays a weight with a gradient of zeros, and leaves one without a gradient as it is."""
    one = equality.reference(lambda: net(WITHOUT[name]))
    assert ("other" in one.grads) == (name not in ("first of two, not materialized", "auxiliary, not used"))
    for spec in (*MESHES.values(), {"mesh": {"dp": 2}, "batch": {"microbatches": 2}}):
        sim = one.on({"shardc": 1, **spec, "data": {"zero": zero}})
        assert sim.grads.keys() == one.grads.keys()
        equality.assert_equal(sim, one.loss, one.grads)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Clipped(Fn):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.1, 0.1)


class Looking(Fn):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 if g.norm() > 1 else g


def test_a_backward_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ShardcError) as e:
        capture(*net(lambda x, m: Clipped.apply(x)))
    assert "test_autograd_function.py:" in e.value.where
    assert (
        "the custom autograd function Clipped has a backward that is not linear in the gradients it gets"
        in e.value.what
    )
    assert "clip or change gradients in the optimizer's step" in e.value.fix


def test_a_backward_that_looks_at_values_is_refused() -> None:
    with pytest.raises(ShardcError) as e:
        capture(*net(lambda x, m: Looking.apply(x)))
    assert "a branch depends on a tensor's value" in e.value.what
    assert e.value.where.startswith("test_autograd_function.py:")


def test_a_program_with_its_own_backward_is_kept_on_disk(tmp_path: Any) -> None:
    model, batch = net(MIDDLES["clamped"])
    program = shardc.compile(model, batch, {"shardc": 1, **MESHES["tp"]})
    program.save(tmp_path)
    again = shardc.load(tmp_path)
    assert again.verify().ok
    assert again.text(full=True) == program.text(full=True)
