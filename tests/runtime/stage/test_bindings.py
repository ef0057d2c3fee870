"""What a rank runs calls ops by their Python bindings; the program names overloads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardc
from shardc.runtime.stage.bindings import _BINDINGS, binding, bound
from shardc.runtime.stage.interpreter import Interpreter
from shardc.torch_private import TorchDispatchMode
from tests import zoo
from tests.zoo import hf, hf_more

aten = torch.ops.aten
SQUARE, OTHER = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 3, dtype=torch.float64)
MATRIX, ROW = SQUARE[0], SQUARE[0, 0]
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten._softmax_backward_data.default: [((SQUARE, OTHER.softmax(2), 2, torch.float64), {})],
    aten.add.Tensor: [((SQUARE, OTHER), {}), ((SQUARE, OTHER), {"alpha": 2}), ((SQUARE, 3), {})],
    aten.addmm.default: [((ROW, MATRIX, MATRIX), {}), ((ROW, MATRIX, MATRIX), {"beta": 2, "alpha": 3})],
    aten.bmm.default: [((SQUARE, OTHER), {})],
    aten.cat.default: [(([SQUARE, OTHER], 1), {}), (([SQUARE, OTHER],), {})],
    aten.clone.default: [((SQUARE.mT,), {}), ((SQUARE.mT,), {"memory_format": torch.contiguous_format})],
    aten.cos.default: [((SQUARE,), {})],
    aten.div.Tensor: [((SQUARE, OTHER), {}), ((SQUARE, 3), {}), ((torch.tensor(3), 2), {})],
    aten.expand.default: [((ROW, [2, 3]), {}), ((ROW, [4, -1]), {"implicit": True})],
    aten.linear.default: [((SQUARE, MATRIX), {}), ((SQUARE, MATRIX, ROW), {})],
    aten.masked_fill.Scalar: [((SQUARE, OTHER > 0, float("-inf")), {})],
    aten.matmul.default: [((SQUARE, MATRIX), {})],
    aten.mean.dim: [((SQUARE, [-1], True), {}), ((SQUARE, [0, 1]), {}), ((SQUARE, None), {}), ((SQUARE, []), {})],
    aten.mm.default: [((MATRIX, MATRIX), {})],
    aten.mul.Tensor: [((SQUARE, OTHER), {}), ((SQUARE, 0.3), {}), ((torch.tensor(3), 0.5), {})],
    aten.native_layer_norm.default: [((SQUARE, [3], ROW, ROW, 1e-5), {}), ((SQUARE, [3, 3], None, None, 1e-5), {})],
    aten.neg.default: [((SQUARE,), {})],
    aten.permute.default: [((SQUARE, [2, 0, 1]), {})],
    aten.pow.Tensor_Scalar: [((SQUARE, 2), {}), ((SQUARE.abs(), 0.5), {})],
    aten.reshape.default: [((SQUARE.mT, [6, -1]), {})],
    aten.rsqrt.default: [((SQUARE.abs(),), {})],
    aten.scaled_dot_product_attention.default: [
        ((SQUARE[None], OTHER[None], OTHER[None]), {"scale": 0.3}),
        ((SQUARE[None], OTHER[None], OTHER[None], OTHER > 0), {}),
        ((SQUARE[None], OTHER[None], OTHER[None], None, 0.0, True), {}),
    ],
    aten.select.int: [((SQUARE, 1, -1), {})],
    aten.silu.default: [((SQUARE,), {})],
    aten.sin.default: [((SQUARE,), {})],
    aten.softmax.int: [((SQUARE, -1), {}), ((SQUARE, 1, torch.float32), {})],
    aten.sub.Tensor: [((SQUARE, OTHER), {}), ((SQUARE, 2), {"alpha": 3})],
    aten.sum.default: [((SQUARE,), {}), ((SQUARE > 0,), {"dtype": torch.int32})],
    aten.sum.dim_IntList: [((SQUARE, [0]), {}), ((SQUARE, [0, 1], True), {}), ((SQUARE, None), {}), ((SQUARE, []), {})],
    aten.t.default: [((MATRIX,), {}), ((ROW,), {})],
    aten.transpose.int: [((SQUARE, 0, -1), {})],
    aten.unsqueeze.default: [((SQUARE, -1), {})],
    aten.view.default: [((SQUARE, [6, 3]), {})],
}


class Watch(TorchDispatchMode):
    """The overloads that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_every_row_is_called_here() -> None:
    assert CALLS.keys() == _BINDINGS.keys()


@pytest.mark.every_case
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_a_binding_does_what_the_op_does(op: Any) -> None:
    for args, kwargs in CALLS[op]:
        seen, results = [], []
        for way in (op, binding(op)):
            with Watch() as watch:
                out = way(*args, **kwargs)
            seen.append(watch.seen)
            results.append(out if isinstance(out, tuple) else (out,))
        assert seen[0] == seen[1]
        for a, b in zip(*results, strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(self.norm(x)).relu()) + x).square().sum()


def test_a_rank_runs_bindings_and_the_program_keeps_overloads() -> None:
    made: list[fx.Graph] = []

    def watched(graph: fx.Graph, source: fx.Graph) -> fx.GraphModule:
        made.append(graph)
        return bound(graph, source)

    program = shardc.compile(Net(), {"x": torch.randn(4, 8)}, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    program.engine(Net(), interpreter=partial(Interpreter, make=watched)).step({"x": torch.randn(4, 8)})
    ran = {n.target for g in made for n in g.nodes}
    assert torch.nn.functional.linear in ran
    assert not ran & _BINDINGS.keys()
    stage = program.stages[0]
    assert stage.joint is not None
    assert aten.linear.default in {n.target for g in stage.joint.graphs.values() for n in g.nodes}


def test_gradients_of_ops_with_several_results_are_taken_over_as_they_are() -> None:
    """Those of a norm's weights are nobody else's: `.grad` is what the op made, not a copy."""
    program = shardc.compile(Net(), {"x": torch.randn(4, 8)}, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    text = program.joint()
    assert text.count("ops.accumulate(") == text.count("own=True") == 6


def test_gradients_of_experts_are_taken_over_as_they_are() -> None:
    """Their op stays whole; nobody else has the memory of what its backward makes."""
    with zoo.Wide():
        model, batch = hf.build(hf_more.FAMILIES["mixtral"])
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    puts = [line for line in program.joint().splitlines() if "ops.accumulate(" in line and "experts" in line]
    assert puts
    assert all("own=True" in line for line in puts)
