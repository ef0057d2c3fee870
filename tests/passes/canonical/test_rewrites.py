"""The canonical spelling of recurrent layers, bags of embeddings, variances, norms and writes by index: equal to eager,
and splittable.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.ir.mesh import Mesh
from shardc.passes.canonical import Canonical
from shardc.runtime.mesh.loopback import loopback
from shardc.spec import Spec
from tests.passes.canonical.test_canonical import same

IDS = torch.tensor([[0, 1, 2], [3, 3, 0], [1, 0, 0], [0, 0, 0]])


def bag(w: Tensor, mode: str, **options: Any) -> Tensor:
    return (F.embedding_bag(IDS, w, mode=mode, **options) * torch.arange(1, 7)).square().sum()


def uneven(w: Tensor, mode: str, **options: Any) -> Tensor:
    """Bags of 5, 0, 2, 4 and 1 rows."""
    offsets = torch.tensor([0, 5, 5, 7, 11, *([12] if options.get("include_last_offset") else [])])
    return (F.embedding_bag(IDS.flatten(), w, offsets, mode=mode, **options) * torch.arange(1, 7)).square().sum()


#: Also F.linear_cross_entropy, which torch 2.11 lacks.
CHUNKED = pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="of a later torch")


def chunked_loss(w: Tensor, **options: Any) -> Tensor:
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    return F.linear_cross_entropy(w * 2, w, torch.tensor([0, 3, 1, 2]), options=chunks, **options)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w: bag(w, "sum"), {"embedding": 1, "embedding_bag": 0}),
        (lambda w: bag(w, "mean"), {"embedding": 1}),
        (lambda w: bag(w, "max"), {"max": 1}),
        *(
            (
                lambda w, kind=kind, more=more: uneven(w, kind, **more),
                {"embedding": 1, "embedding_bag": 0, "searchsorted": 1},
            )
            for kind in ("sum", "mean", "max")
            for more in ({}, {"padding_idx": 0}, {"include_last_offset": True})
        ),
        (lambda w: uneven(w, "sum", per_sample_weights=w.flatten()[:12]), {"index_add": 1}),
        (lambda w: bag(w, "sum", padding_idx=0), {"ne": 1}),
        (lambda w: bag(w, "mean", padding_idx=0), {"clamp_min": 1}),
        (lambda w: bag(w, "max", padding_idx=0), {"amax": 1}),
        (lambda w: bag(w, "sum", per_sample_weights=w[:, :3]), {"embedding": 1}),
        (
            lambda w: (
                F.bilinear(w, w[:, :3], w.repeat(1, 3).view(4, 3, 6).transpose(1, 2).contiguous(), w[:, 0])
                .square()
                .sum()
            ),
            {"einsum": 1},
        ),
        (
            lambda w: torch.addbmm(w[:3, :3], w.view(2, 3, 4), w.view(2, 4, 3), beta=0.5, alpha=2).square().sum(),
            {"einsum": 1, "addbmm": 0},
        ),
        (lambda w: w.sum().transpose(0, -1) ** 2, {"transpose": 0}),
        (lambda w: w.std(0).sum() + w.var(0, correction=0).sum() + w.std(), {"std": 0, "var": 0}),
        (lambda w: w.std(1).sum() + w.var(1, keepdim=True, correction=0).sum(), {"std": 1, "var": 1}),
        (
            lambda w: torch.var_mean(w, 0)[0].sum() + sum(torch.std_mean(w, 1, keepdim=True)).sum(),
            {"var_mean": 0, "var": 0, "std": 1},
        ),
        (
            lambda w: (
                w.sum() * ((w > 9).any() | (w > -9).all() & (w > 0).any(0, keepdim=True)[:, 0] & (w * 0 + 1).all(0)[1])
            ),
            {"any": 0, "all": 0},
        ),
        (lambda w: w.sum() * (w > -9).all(1).any(0) * w.detach().any(), {"any": 0, "all": 1}),
        (
            lambda w: w.norm() + w.norm(1) + w.norm(dim=0).sum() + w.norm(3) + w.norm(dim=1).sum(),
            {"linalg_vector_norm": 2, "sqrt": 2},
        ),
        (lambda w: (w * 0).norm() + torch.dist(w, w + 1), {"linalg_vector_norm": 0}),
        (
            lambda w: F.binary_cross_entropy(w.sigmoid(), w.detach().gt(0).double(), weight=w.detach()[0].exp()),
            {"binary_cross_entropy": 1},
        ),
        pytest.param(lambda w: chunked_loss(w), {"linear": 1, "nll": 1}, marks=CHUNKED),
        pytest.param(
            lambda w: (
                chunked_loss(w, weight=w.detach().exp()[:, 0], ignore_index=1)
                + chunked_loss(w, reduction="none").square().sum()
            ),
            {"nll": 2},
            marks=CHUNKED,
        ),
        (
            lambda w: F.multilabel_margin_loss(w, torch.tensor([[1, 3, -1, 0, 0, 0]] * 4)),
            {"multilabel_margin_loss": 1, "mean": 1},
        ),
        (
            lambda w: (w * torch.hann_window(6) * w.new_empty_strided((6,), (1,)).fill_(2.0)).sum(),
            {"hann_window": 1, "new_empty_strided": 0},
        ),
        (
            lambda w: torch.empty_permuted((4, 6), (1, 0), dtype=torch.float64).zero_().add(w).square().sum(),
            {"empty_permuted": 0},
        ),
        (lambda w: torch.cat(w.split([1, 3])).square().sum(), {"cat": 0, "split_with_sizes": 0}),
        (lambda w: (torch.cat(list(w)).view(6, 4) * torch.arange(4)).square().sum(), {"cat": 0, "unbind": 0}),
        (lambda w: (torch.cat(w.unbind(1)).view(6, 4) * torch.arange(4)).square().sum(), {"cat": 0, "transpose": 1}),
        (
            lambda w: (torch.stack([w[i] for i in range(4)], 1) * torch.arange(4)).square().sum(),
            {"stack": 0, "transpose": 1},
        ),
        (lambda w: (torch.cat(w.split(2)[::-1]) * torch.arange(6)).square().sum(), {"cat": 1}),
        (lambda w: (torch.cat([w[0], w[1], w[2]]) * torch.arange(18)).square().sum(), {"cat": 1}),
    ],
)
def test_rewrites(function: Any, expected: dict[str, int]) -> None:
    found = same(function)
    assert {n: found[n] for n in expected} == expected


FEW = torch.tensor([False, True, False, True])


def put(w: Tensor, *where: Any, to: Any) -> Tensor:
    x = w * 2
    x[where] = to
    return (x**2).sum()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w: put(w, w > 0, to=0.5), {"where": 1, "index_put": 0}),
        (lambda w: put(w, w[:, 0] > 0, to=w[0]), {"where": 1}),
        (lambda w: put(w, slice(None), w[0] > 0, to=1.5), {"where": 1}),
        (lambda w: put(w, ..., slice(None, None, 2), to=w[:, :3]), {"slice_scatter": 1}),
        (lambda w: torch.diagonal_scatter(w, w[0, :4]).square().sum(), {"diagonal_scatter": 1}),
        (lambda w: put(w, torch.arange(4), w.argmax(1), to=w[:, 0]), {"scatter": 1, "index_put": 0}),
        (lambda w: put(w, range(4), w.argmax(1), to=w[:, 0]), {"scatter": 1, "index_put": 0}),
        (lambda w: (w * 2)[[0, 1, 2, 3], w.argmax(1)].square().sum(), {"gather": 1, "index": 0}),
        (lambda w: put(w, torch.arange(4)[:, None], w.argsort(1)[:, :2], to=w[:, :2]), {"scatter": 1}),
        (
            lambda w: (w * 2).index_put((torch.arange(4), w.argmax(1)), w[:, 0], accumulate=True).square().sum(),
            {"scatter_add": 1},
        ),
        (lambda w: put(w, torch.tensor([2, 0]), to=w[:2]), {"index_put": 1}),
        (lambda w: (w * 2).index_put((w > 0,), w[0, 0], accumulate=True).square().sum(), {"where": 1}),
        (lambda w: put(w, FEW, to=w[:2] * 3), {"where": 1, "index_select": 1, "index_put": 0}),
        (lambda w: put(w, FEW, to=w[:2, :1] * 3), {"where": 1, "index_select": 1}),
        (lambda w: put(w, FEW, to=w[None, 3]), {"where": 1, "index_select": 0}),
        (
            lambda w: put(w, slice(None), torch.tensor([True, False, False, True, False, False]), to=w[:, :1]),
            {"where": 1},
        ),
        (lambda w: (w * 2).masked_scatter(w > 0, w.flip(0)).square().sum(), {"where": 1, "masked_scatter": 0}),
        (lambda w: (w * 2).masked_scatter(FEW[:, None], w.view(6, 4)).square().sum(), {"where": 1, "expand": 0}),
        (lambda w: (w * 2).masked_scatter(FEW[:, None].expand_as(w), w[:2]).square().sum(), {"index_select": 1}),
        (lambda w: (w[0] * 2).masked_scatter(w > 0, w.flatten()).square().sum(), {"where": 1}),
    ],
)
def test_writes_by_index(function: Any, expected: dict[str, int]) -> None:
    found = same(function)
    assert {n: found[n] for n in expected} == expected


class Layers(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.rnn(x)
        return y.square().sum() + sum(s.sum() for s in last)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_dropout_between_recurrent_layers_does_not_know_the_mesh(kind: str, bidirectional: bool) -> None:
    model = Layers(kind, num_layers=3, dropout=0.4, bidirectional=bidirectional, batch_first=True).double()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    program = Canonical(Spec(Mesh(()))).run(capture(model, (x,)))
    assert str(program.graph).count("dropout") >= 2
    one, two = (
        shardc.verify.simulate(shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": n}}), model, (x,), seed=3)
        for n in (1, 2)
    )
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-12, atol=0)
    for name, grad in one.grads.items():
        torch.testing.assert_close(two.grads[name], grad, rtol=1e-11, atol=1e-12)


class Dropped(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(x * self.weight) ** 2).sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout1d(x, 0.4),
        lambda x: F.alpha_dropout(x, 0.4, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    ],
)
def test_other_dropouts_do_not_know_the_mesh(function: Any) -> None:
    model, x = Dropped(function), torch.randn(8, 6, 4, dtype=torch.float64)
    one, two, other = (
        shardc.verify.simulate(shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": n}}), model, (x,), seed=seed)
        for n, seed in ((1, 3), (2, 3), (2, 4))
    )
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(one.grads["weight"], two.grads["weight"], rtol=1e-12, atol=0)
    assert abs(float(one.loss - other.loss)) > 1e-6


@pytest.mark.parametrize("kind", ["dropout", "alpha_dropout", "feature_alpha_dropout", "attention"])
def test_dropout_of_everything(kind: str) -> None:
    """Its gradient is zeros, not None, and it is off in evaluation."""

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            if kind == "attention":
                return F.scaled_dot_product_attention(y, y, y, dropout_p=1.0 if self.training else 0.0).sum()
            return getattr(F, kind)(y, 1.0, self.training).sum()  # type: ignore[no-any-return]

    model, x = All(), torch.randn(4, 6, 4, dtype=torch.float64)
    program = shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 2}})
    sim = shardc.simulate(program, model, (x,))
    model(x).backward()
    assert model.weight.grad is not None
    assert float(sim.grads["weight"]) == float(model.weight.grad) == 0
    assert program.verify().ok
    (value,) = {
        float(v) for v in loopback(program.mesh, lambda mesh: program.engine(model, None, mesh=mesh).evaluate((x,)))
    }
    assert value == pytest.approx(float(model.eval()(x).detach()), rel=1e-12)


def test_alpha_dropout_takes_torchs_two_values() -> None:
    """A constant becomes one of two numbers, and which they are is torch's definition."""
    model, x = Dropped(lambda x: F.alpha_dropout(x, 0.25, training=True)), torch.full((1,), 2.0, dtype=torch.float64)
    program = shardc.compile(model, (x,), {"shardc": 1, "mesh": {}})
    found = {round(float(shardc.verify.simulate(program, model, (x,), seed=s).loss), 9) for s in range(16)}
    assert found == {
        round(float(v) ** 2, 9) for v in torch.alpha_dropout(torch.full((99,), 2.0, dtype=torch.float64), 0.25, True)
    }


def test_refusal() -> None:
    with pytest.raises(shardc.ShardcError, match="an assignment through a mask"):
        same(lambda w: put(w, w[:, 0] > 0, torch.tensor([1]), to=1.0))
