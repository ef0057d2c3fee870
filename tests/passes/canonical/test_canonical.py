"""The canonical global graph computes what the model computes, in few spellings."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardc.capture import capture, default_loss
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.passes.canonical import Canonical
from shardc.runtime import ops
from shardc.runtime.rng import Rng
from shardc.runtime.stage.runnable import on_device
from shardc.spec import Spec
from shardc.torch_private import OpOverload
from shardc.verify.reference import interpret
from shardc.verify.to_float64 import graph_to_float64
from tests import zoo
from tests.one_device import tensors_of

torch.set_num_threads(1)
aten = torch.ops.aten


class Case(nn.Module):
    """A model made of a function of its one weight, f64[4, 6], and the inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, *xs: Tensor) -> Tensor:
        return self.function(self.w, *xs)


def compiled(function: Any, *xs: Tensor) -> tuple[Case, Program]:
    model = Case(function if xs else lambda w, _: function(w))
    return model, Canonical(Spec(Mesh(()))).run(capture(model, xs or (torch.zeros(1),)))


def check(program: Program, model: nn.Module, batch: Any, want: Tensor, rng: Rng | None = None) -> None:
    """Loss and gradients of the program against `want`, the eager loss."""
    params, buffers, inputs = tensors_of(program, model, batch)
    got, *_ = interpret(program, params, buffers, inputs, rng)
    assert torch.allclose(got, want, rtol=1e-12, atol=0), f"loss {got} for {want}"
    grads = [torch.autograd.grad(x, list(params.values()), allow_unused=True) for x in (want, got)]
    for name, a, b in zip(params, *grads, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a - b).abs().max() <= 1e-12 * a.abs().max(), name


def same(function: Any, *xs: Tensor) -> Counter[str]:
    """Check a function against its program; returns the names of the program's ops."""
    model, program = compiled(function, *xs)
    batch = xs or (torch.zeros(1),)
    check(program, model, batch, model(*batch), Rng(0))
    return Counter(op_name(n.target) for n in program.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("name", zoo.ALL)
def test_equals_eager(name: str) -> None:
    model, batch = zoo.ALL[name]()
    with zoo.Wide():
        program = Canonical(Spec(Mesh(()))).run(capture(model, batch))
        params, buffers, inputs = tensors_of(program, model, batch)
        before = {n: b.clone() for n, b in buffers.items()}
        want = default_loss(model(**batch) if isinstance(batch, dict) else model(*batch))
    got, news, _ = interpret(program, params, before, inputs, Rng(0))
    assert abs(got - want) <= 1e-12 * abs(want)
    grads = [torch.autograd.grad(x, list(params.values()), allow_unused=True) for x in (want, got)]
    for p, a, b in zip(program.params, *grads, strict=True):
        assert (a is None) == (b is None), p.fqn
        if a is not None:  # keys' biases have a zero gradient: noise is measured against the weights' size
            assert (a - b).abs().max() <= 1e-12 * max(a.abs().max().item(), 1e-2), p.fqn
    assert set(news) == {b.name for b in program.buffers if b.updated}
    assert bool(news) == (name == "resnet_bn")
    for b in program.buffers:
        if b.updated:
            assert torch.allclose(news[b.name].double(), buffers[b.name].double(), rtol=1e-12), b.fqn
            assert not torch.equal(news[b.name], before[b.name]), b.fqn


@pytest.mark.parametrize("name", zoo.ALL)
def test_every_node_is_typed_and_has_a_source(name: str) -> None:
    model, batch = zoo.ALL[name]()
    program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
    seen: list[tuple[Any, Any]] = []

    class Checked(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            result = super().run_node(node)
            seen.append((node, result))
            return result

    params, buffers, inputs = tensors_of(program, model, batch)
    constants = [b.constant if b.constant is not None else buffers[b.name] for b in program.buffers]
    Checked(torch.fx.GraphModule(nn.Module(), program.graph)).run(
        None, Rng(0), *params.values(), *constants, *inputs.values()
    )
    for node, result in seen:
        if node.op != "call_function":
            continue
        assert node.meta["source"].line, node
        assert set(node.meta) - {"through"} == {"value", "source"}, node
        for v, r in zip(
            *((x if isinstance(x, (tuple, list)) else (x,)) for x in (node.meta["value"], result)), strict=True
        ):
            assert (v.shape, v.dtype, v.requires_grad) == (tuple(r.shape), r.dtype, r.requires_grad), (
                f"{node.format_node()}: {v}"
            )
        if node.target not in (ops.nll, ops.dropout, ops.attention, ops.batch_stat, operator.getitem):
            assert isinstance(node.target, OpOverload)
            assert not node.target._schema.is_mutable
            assert "device" not in node.kwargs


def test_llama_keeps_attention_whole() -> None:
    model, batch = zoo.llama()
    program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
    attention = [n for n in program.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert len(attention) == 2
    for node in attention:
        q, k, _v, mask, p, causal = node.args
        assert (mask, p, causal, node.kwargs["enable_gqa"]) == (None, 0.0, True, True)
        assert q.meta["value"].shape == (8, 8, 16, 8)
        assert k.meta["value"].shape == (8, 4, 16, 8)
    assert not [n for n in program.graph.nodes if op_name(n.target) in ("cumsum", "diff", "tril")]


def test_dropouts_are_numbered_in_order() -> None:
    for build, count in ((zoo.gpt, 1 + 2 * 3), (zoo.bert, 1 + 2 * 3), (zoo.gpt2, 1 + 2 * 3)):
        model, batch = build(dropout=0.1)
        program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
        at = {ops.dropout: (1, 2, 3), ops.attention: (4, 8, 9)}  # of p, rng, index among the arguments
        drops = [[n.args[i] for i in at[n.target]] for n in program.graph.nodes if n.target in at]
        assert [index for _, _, index in drops] == list(range(count))
        assert all(p == 0.1 and rng.name == "rng" for p, rng, _ in drops)
        assert not [n for n in program.graph.nodes if n.target is aten.scaled_dot_product_attention.default]


@pytest.mark.parametrize("build", [zoo.gpt, zoo.gpt2, zoo.bert, zoo.t5, zoo.mlp])
def test_dropout_is_off_in_evaluation(build: Any) -> None:
    model, batch = build(dropout=0.5)
    with zoo.Wide():
        program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
        model.eval()
        want = default_loss(model(**batch) if isinstance(batch, dict) else model(*batch))
    got, *_ = interpret(program, *tensors_of(program, model, batch), Rng(0, training=False))
    assert torch.allclose(got, want, rtol=1e-12)
    other, *_ = interpret(program, *tensors_of(program, model, batch), Rng(0))
    assert not torch.allclose(other, want, rtol=1e-3)


def test_batch_norm_evaluates_with_running_statistics() -> None:
    model, batch = zoo.resnet_bn()
    program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
    got, *_ = interpret(program, *tensors_of(program, model, batch), Rng(0, training=False))
    assert torch.allclose(got, model.eval()(**batch), rtol=1e-12)
    captured = Canonical(Spec(Mesh(()))).run(capture(model, batch))  # captured in evaluation mode
    assert torch.allclose(interpret(captured, *tensors_of(captured, model, batch))[0], got, rtol=1e-12)


def test_program_is_copied() -> None:
    model, batch = zoo.mlp(dropout=0.1)
    program = capture(model, batch, prove=False)
    text = str(program.graph)
    assert str(Canonical(Spec(Mesh(()))).run(program).graph) != text
    assert str(program.graph) == text


# --- single rewrites --------------------------------------------------------------------------------------------------

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w: (w.view(2, -1, 3) ** 2).sum(), {"reshape": 1}),
        (lambda w: (w.flatten() * w.reshape(-1)).sum(), {"reshape": 2}),
        (lambda w: (w.unflatten(1, (2, -1)).squeeze() ** 2).sum(), {"reshape": 1}),
        (lambda w: (w.unsqueeze(-1).squeeze(-1) ** 2).sum(), {"reshape": 1, "unsqueeze": 1}),
        (
            lambda w: (w.expand(4, 6).contiguous().clone().to(torch.float64) ** 2).sum(),
            {"expand": 0, "clone": 0, "_to_copy": 0},
        ),
        (lambda w: (w.expand(3, -1, -1) ** 2).sum(), {"expand": 1}),
        (lambda w: (w.float().double() ** 2).sum(), {"_to_copy": 2}),
        (lambda w: (w[:, 0:] ** 2).sum(), {"slice": 0}),
        (lambda w: (w[:, -2:] ** 2).sum(), {"slice": 1}),
        (lambda w: (w[1:4:2, :-1] ** 2).sum(), {"slice": 2}),
        (lambda w: (w[-1] ** 2).sum(), {"select": 1}),
        (lambda w: (w.narrow(1, 2, 3) ** 2).sum(), {"slice": 1, "narrow": 0}),
        (lambda w: sum((p**2).sum() * i for i, p in enumerate(w.chunk(3, -1), 1)), {"split_with_sizes": 1, "chunk": 0}),
        (lambda w: sum((p**2).sum() * i for i, p in enumerate(w.split(4, 1), 1)), {"split_with_sizes": 1}),
        (lambda w: sum((p**2).sum() * i for i, p in enumerate(w.split([1, 2, 3], 1), 1)), {"split_with_sizes": 1}),
        (lambda w: sum((p**2).sum() * i for i, p in enumerate(w.tensor_split(4, 1), 1)), {"split_with_sizes": 1}),
        (lambda w: (w.split(6, 1)[0] ** 2).sum(), {"split_with_sizes": 0}),
        (lambda w: (w.T @ w).sum(), {"transpose": 1, "numpy_T": 0}),
        (lambda w: (w.t() @ w.mT.mT).sum(), {"transpose": 3}),
        (lambda w: (w.unsqueeze(0).movedim(0, -1).permute(1, 0, 2) ** 2 * 2).sum(), {"permute": 1, "transpose": 1}),
        (lambda w: (w.swapaxes(0, -1).transpose(-1, 0) ** 2).sum(), {"transpose": 2}),
        (lambda w: (torch.cat([torch.zeros(0), w], -1) ** 2).sum(), {"cat": 0}),
        (lambda w: (F.pad(w, (0, 1, 2, 0)) ** 2).sum(), {"constant_pad_nd": 1, "pad": 0}),
        (lambda w: (F.pad(w, (0, 0)) ** 2).sum(), {"constant_pad_nd": 0}),
        (lambda w: (w[torch.arange(4)[:, None], torch.arange(6)] ** 2).sum(), {"index": 0}),
        (
            lambda w: (w[torch.arange(4)[None, :, None], torch.arange(6)[None, None, :]] ** 2).sum(),
            {"index": 0, "reshape": 1},
        ),
        (lambda w: (w[torch.arange(3, -1, -1)] * torch.arange(4)[:, None]).sum(), {"index": 1}),
        (lambda w: (w[torch.arange(4), torch.arange(4)] ** 2).sum(), {"index": 0, "gather": 1}),
        (lambda w: (w[torch.arange(4), w.argmax(-1) - 6] ** 2).sum(), {"index": 0, "gather": 1, "remainder": 1}),
        (lambda w: (w.reshape(4, 3, 2)[torch.arange(4), w[:, 0].gt(0).long()] ** 2).sum(), {"index": 0, "gather": 1}),
        (lambda w: (w[torch.arange(4)[:, None], w[:, :2].argmax(0)] ** 3).sum(), {"index": 0, "gather": 1}),
        (
            lambda w: (w.reshape(2, 3, 4)[:, torch.arange(3), w[0, :3].gt(0).long()] ** 3).sum(),
            {"index": 0, "gather": 1},
        ),
        (
            lambda w: (
                w.reshape(2, 3, 4)[torch.arange(2)[:, None], torch.arange(3), w[:2, :3].gt(0).long()] ** 3
            ).sum(),
            {"index": 0, "gather": 1},
        ),
        (lambda w: (w[torch.arange(6)[:, None] % 4, torch.arange(6)] ** 2).sum(), {"index": 1}),
        (lambda w: (torch.add(w + 0, w * 1.0, alpha=2) / 1).sum(), {"add": 1, "div": 0, "mul": 1}),
        (lambda w: (1 - w).sum(), {"rsub": 0}),
        (lambda w: torch.rsub(w, w * w, alpha=3).sum(), {"rsub": 0}),
        (lambda w: torch.min(w, w * w).sum() + torch.max(w) + w.max(1).values.sum(), {"minimum": 1}),
        (lambda w: ((w > 0) & (w < 1)).sum() * w.sum(), {"__and__": 0, "bitwise_and": 1}),
        (lambda w: w.softmax(-1, dtype=torch.float64).log_softmax(0)[0, 0], {"softmax": 1, "log_softmax": 1}),
        (lambda w: w.float().sum(dtype=torch.float64), {"_to_copy": 2, "sum": 1}),
        (lambda w: ((w > 0).cumsum(0, dtype=torch.int32) * w).sum(), {"cumsum": 1, "_to_copy": 1}),
        (lambda w: F.dropout(w, 0.0).sum() + F.dropout(w, 0.5, training=False).sum(), {"dropout": 0}),
        (lambda w: F.dropout(w, 1.0).sum() + w.sum(), {"dropout": 1}),
        (lambda w: torch.broadcast_tensors(w, w[:1])[1].sum(), {"expand": 1}),
        (lambda w: (w.detach() * w).sum() + torch.ones(2).detach().sum(), {"detach": 1}),
    ],
)
def test_rewrites(function: Any, expected: dict[str, int]) -> None:
    found = same(function)
    assert {n: found[n] for n in expected} == expected


def _inplace_views(w: Tensor) -> Tensor:
    x = w * 2
    x[:, 1:3] = w[:, :2] * 3
    x[0] = 7.0
    x[:, -1].mul_(2)
    return (x**2).sum()


def _inplace(w: Tensor) -> Tensor:
    x = w * 2
    x += w
    x.mul_(torch.ones((), dtype=torch.float32)).relu_()
    y = torch.empty(6, dtype=torch.float64).copy_(x[0])
    z = torch.empty_like(x).fill_(2.0).add_(x).masked_fill_(x > 1, 0.5)
    return (x**2).sum() + y.sum() + z.zero_().sum() + z.sum()


@pytest.mark.parametrize("function", [_inplace_views, _inplace])
def test_inplace_ops_are_gone(function: Any) -> None:
    found = same(function)
    assert not {"copy", "fill", "slice_scatter", "select_scatter"} & set(found)


TARGET = torch.tensor([1, -100, 5, 0])
WEIGHT = torch.tensor([1.0, 2, 0.5, 3, 1, 4], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction: str, weight: Tensor | None, smoothing: float) -> None:
    def indices(w: Tensor, t: Tensor) -> Tensor:
        return (F.cross_entropy(w, t, weight, reduction=reduction, label_smoothing=smoothing) ** 2).sum()

    def probabilities(w: Tensor, t: Tensor) -> Tensor:
        return (F.cross_entropy(w, t, weight, reduction=reduction, label_smoothing=smoothing) ** 2).sum()

    assert same(indices, TARGET)["nll"] == 1
    assert same(probabilities, X.softmax(-1))["nll"] == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_nll_loss(reduction: str, weight: Tensor | None) -> None:
    assert (
        same(lambda w, t: (F.nll_loss(w.log_softmax(-1), t, weight, reduction=reduction) ** 2).sum(), TARGET)["nll"]
        == 1
    )
    assert same(lambda w, t: (F.nll_loss(w * 2, t, weight, reduction=reduction) ** 2).sum(), TARGET)["gather"] == 1


def test_cross_entropy_of_more_dims() -> None:
    target = torch.tensor([[1, -100, 0], [2, 2, 1]])
    same(lambda w, t: F.cross_entropy(w.view(2, 4, 3), t), target)
    same(lambda w, t: F.cross_entropy(w.view(2, 4, 3), t, label_smoothing=0.2, weight=WEIGHT[:4]), target)
    same(lambda w, t: F.cross_entropy(w[0], t), torch.tensor(3))
    same(lambda w, t: F.cross_entropy(w, t, ignore_index=0), torch.tensor([1, 0, 5, 0]))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        F.soft_margin_loss,
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_elementwise_losses(loss: Any, reduction: str) -> None:
    found = same(lambda w, t: (loss(w, t, reduction=reduction) ** 2).sum(), X.sigmoid())
    assert found["mean"] == (reduction == "mean")


def _heads(w: Tensor) -> Tensor:
    return (w[:, :, None, None] * torch.linspace(1, 2, 60, dtype=torch.float64).reshape(5, 12)).reshape(4, 6, 5, 12)


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "grouped"])
def test_attention_with_dropout_is_one_op(kind: str) -> None:
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[2] = False  # a query that sees nothing
    extra: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": mask.double()},
        "grouped": {"enable_gqa": True, "scale": 0.3},
    }[kind]

    def function(w: Tensor, p: float = 0.25) -> Tensor:
        q = _heads(w)
        k = q.cos()[:, :3] if kind == "grouped" else q.cos()
        return (F.scaled_dot_product_attention(q, k, k.sin(), dropout_p=p, **extra) ** 2).sum()

    model, program = compiled(function)
    names = Counter(op_name(n.target) for n in program.graph.nodes if n.op == "call_function")
    assert (names["attention"], names["dropout"], names["scaled_dot_product_attention"]) == (1, 0, 0)
    check(program, model, (torch.zeros(1),), function(model.w, 0.0), Rng(0, training=False))


def test_a_float32_program_can_be_run_in_float64() -> None:
    model, batch = zoo.llama(dtype=torch.float32)
    program = Canonical(Spec(Mesh(()))).run(capture(model, batch, prove=False))
    model.double()
    loss, *_ = interpret(program, *tensors_of(program, model, batch), graph=graph_to_float64(program.graph))
    with zoo.Wide():
        want = model(**batch).loss
    assert loss.dtype == torch.float64
    assert torch.allclose(loss, want, rtol=1e-12)
    assert next(n for n in program.graph.nodes if n.name == "linear").meta["value"].dtype == torch.float32


def test_factories_run_on_any_device() -> None:
    _, program = compiled(lambda w: (w * torch.arange(6)).sum() + torch.zeros(2).sum() + torch.zeros_like(w).sum())
    assert all("device" not in n.kwargs for n in program.graph.nodes)
    moved = on_device(program.graph, torch.device("meta"))
    assert {op_name(n.target) for n in moved.nodes if "device" in n.kwargs} == {"arange", "zeros", "full"}
    assert [n.meta.get("value") for n in moved.nodes] == [n.meta.get("value") for n in program.graph.nodes]


def test_dead_code_goes() -> None:
    def function(w: Tensor) -> Tensor:
        w.exp().sum()
        torch.rand(3)
        return (w**2).sum()

    assert sum(same(function).values()) == 2


def test_nll_value() -> None:
    _, program = compiled(lambda w, t: F.cross_entropy(w, t), TARGET)
    nll = next(n for n in program.graph.nodes if n.target is ops.nll)
    assert nll.meta["value"] == Value((4,), torch.float64, True)
    assert nll.args[2] == -100
