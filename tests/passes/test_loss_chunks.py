"""The head's logits in chunks of rows: the same loss and gradients, without the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.graph import calls
from shardc.ir.program import Program
from shardc.runtime import ops
from shardc.verify.simulate import simulate
from shardc.verify.static import prove
from tests import equality, live_bytes, zoo

CHUNKS = {"loss": {"chunks": 3}}  # of 128 rows: not of one size
MESHES: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "dp, tp, sp": {
        "mesh": {"dp": 2, "tp": 2},
        "shard": {"use": "structure"},
        "activations": {"model.layers.*": {1: "tp"}},
    },
    "zero 3, microbatches": {"mesh": {"dp": 2}, "data": {"zero": 3}, "batch": {"microbatches": 2}},
    "1f1b, tp": {
        "mesh": {"pp": 2, "tp": 2},
        "shard": {"use": "structure"},
        "pipeline": {"axis": "pp"},
        "batch": {"microbatches": 4},
    },
    "zb-h1": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "schedule": "zb-h1"}, "batch": {"microbatches": 4}},
    "recomputed": {"mesh": {"dp": 2}, "checkpoint": [{"match": "model.layers.*"}]},
}


def chunked(program: Program) -> int:
    """Lines in chunks; nothing else is as large as logits."""
    lines = [n for s in program.stages for n in calls(s.graph)]
    assert not [n for n in lines if n.target in (ops.nll, ops.nll_stats, ops.largest)]
    return sum(n.target is ops.in_chunks for n in lines)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_llama_equals_one_device(mesh: str) -> None:
    """transformers shifts labels and ignores -100."""
    one = equality.reference(zoo.ALL["llama"])
    spec = {"shardc": 1, **MESHES[mesh], **CHUNKS}
    assert chunked(one.compile(spec)) == 1
    equality.assert_equal(one.on(spec), one.loss, one.grads)


class Capped(nn.Module):
    """A Llama with a soft cap, smoothed labels, and an answer's log-probability, of which positions are shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.batch = zoo.llama(dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        z = 7 * torch.tanh(self.llama(input_ids).logits / 7)
        y = labels[:, 1:]
        each = z[:, :-1].log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).squeeze(-1) * (y >= 0)
        smooth = F.cross_entropy(z[:, :-1].flatten(0, 1), y.flatten(), label_smoothing=0.1)
        return smooth - 0.1 * F.logsigmoid(each.sum(-1)).mean()


@functools.cache
def capped() -> tuple[Capped, Tensor, dict[str, Tensor]]:
    with zoo.Wide():
        model = Capped()
        loss = model(model.batch["input_ids"], model.batch["labels"])
        loss.backward()
    return model, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_of_several_parts_equals_one_device(mesh: str) -> None:
    model, loss, grads = capped()
    batch = {name: model.batch[name] for name in ("input_ids", "labels")}
    text = {**MESHES[mesh], **CHUNKS}
    if "activations" in text:
        text |= {"activations": {"llama.model.layers.*": {1: "tp"}}}
    if "checkpoint" in text:
        text |= {"checkpoint": [{"match": "llama.model.layers.*"}]}
    with zoo.Wide():
        program = shardc.compile(model, batch, {"shardc": 1, **text})
        assert chunked(program) >= 1
        assert prove(program).ok, str(prove(program))
        equality.assert_equal(simulate(program, model, batch), loss, grads)


class Head(nn.Module):
    """A classifier with a bias, of 37 classes; loss: of (its logits, targets, class weights)."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(12, 16, dtype=torch.float64), nn.Linear(16, 37, dtype=torch.float64)
        self.register_buffer("weight", torch.rand(37, dtype=torch.float64))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.body(x))), y, self.weight)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(8, 6, 12, dtype=torch.float64), torch.randint(37, (8, 6))
    y[0] = y[3, 2] = -1
    return x, y


#: Calls for split classes, where there are more than one.
CALLS = {"smoothed": 2, "of probabilities": 2, "divergence": 3, "log-probabilities": 3}
CALLS |= {"entropy and z": 4, "all elements": 3}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mean": lambda z, y, w: F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1),
    "sum": lambda z, y, w: F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"),
    "weights of classes": lambda z, y, w: F.cross_entropy(z.flatten(0, 1), y.flatten(), w, ignore_index=-1),
    "shifted": lambda z, y, w: F.cross_entropy(z[:, :-1].reshape(-1, 37), y[:, 1:].reshape(-1), ignore_index=-1),
    "smoothed": lambda z, y, w: F.cross_entropy(z.flatten(0, 1), y.flatten(), w, ignore_index=-1, label_smoothing=0.1),
    "soft cap": lambda z, y, w: F.cross_entropy((4 * torch.tanh(z / 4)).flatten(0, 1), y.flatten(), ignore_index=-1),
    "of probabilities": lambda z, y, w: F.cross_entropy(z[:, 1:].flatten(0, 1), soft(z)[:, 1:].flatten(0, 1), w),
    "divergence": lambda z, y, w: F.kl_div(
        (z / 2).log_softmax(-1).flatten(0, 1), soft(z).log().flatten(0, 1), None, None, "batchmean", True
    ),
    "log-probabilities": lambda z, y, w: (
        ((z[:, :-1].log_softmax(-1).gather(-1, y[:, 1:, None].clamp(min=0)).squeeze(-1) * (y[:, 1:] >= 0)).sum(1))
        .sigmoid()
        .mean()
    ),
    "entropy and z": lambda z, y, w: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1)
        + 0.1 * z.logsumexp(-1).square().mean()
        - 0.2 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
    ),
    "each class alone": lambda z, y, w: F.binary_cross_entropy_with_logits(z, soft(z), reduction="sum"),
    "all elements": lambda z, y, w: (z.softmax(-1) - w).square().mean(),
    "rows weigh": lambda z, y, w: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
        .view(8, 6)
        .sum(1)
        .square()
        .mean()
    ),
}


def soft(z: Tensor) -> Tensor:
    """Another model's probabilities, of the size of logits; here made of nothing but numbers."""
    return torch.linspace(0, 3, z[0].numel(), dtype=z.dtype).view(z.shape[1:]).sin().expand_as(z).softmax(-1)


@functools.cache
def alone(loss: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = Head(LOSSES[loss])
    value = model(*batch())
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tp", [1, 2])
def test_losses(loss: str, tp: int) -> None:
    """37 classes on 2 ranks: one of them is padding."""
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": tp}, "shard": {"head": "column"}, "uneven": "pad", **CHUNKS}
    model = Head(LOSSES[loss])
    program = shardc.compile(model, batch(), spec)
    assert chunked(program) == (CALLS.get(loss, 1) if tp > 1 else 1)
    assert program.notes == ()
    equality.assert_equal(simulate(program, model, batch()), *alone(loss), rtol=1e-12)
    assert prove(program).ok, str(prove(program))


def test_two_models_and_a_teacher(tmp_path: Path) -> None:
    """Distillation: both products are in the same chunks, and a rank holds neither's logits."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.student, self.teacher = (nn.Linear(12, 37, dtype=torch.float64) for _ in range(2))
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            p, q = self.student(x).log_softmax(-1), self.teacher(x.sin()).log_softmax(-1)
            return (p.exp() * (p - q)).sum(-1).mean() + F.cross_entropy(self.student(x), q.exp())

    x, model = torch.randn(16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), Two()
    want = model(x)
    want.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for mesh in ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}):
        spec = {"shardc": 1, "mesh": mesh, "uneven": "pad", **CHUNKS}
        program = shardc.compile(model, (x,), spec | ({"shard": {"*": "column"}} if "tp" in mesh else {}))
        assert chunked(program) >= 1
        assert prove(program).ok, str(prove(program))
        equality.assert_equal(simulate(program, model, (x,)), want.detach(), grads, rtol=1e-12)
        program.save(tmp_path / "out")
        assert str(shardc.load(tmp_path / "out")) == str(program)


def test_a_rank_with_more_padding_than_classes() -> None:
    """37 classes on 8 ranks, 5 on each: the last has 2."""
    spec = {"shardc": 1, "mesh": {"tp": 8}, "shard": {"head": "column"}, "uneven": "pad", **CHUNKS}
    model = Head(LOSSES["mean"])
    program = shardc.compile(model, batch(), spec)
    assert chunked(program) == 1
    equality.assert_equal(simulate(program, model, batch()), *alone("mean"), rtol=1e-12)


UNREACHED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "across rows": (
        lambda z, y, w: F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1) + z.cumsum(1).square().mean(),
        "cumsum",
    ),
    "sorted classes": (lambda z, y, w: z.sort(-1)[0].diff().square().mean(), "finds no loss of a linear layer"),
}


@pytest.mark.parametrize("loss", UNREACHED)
def test_what_is_not_reached_is_noted(loss: str) -> None:
    make, said = UNREACHED[loss]
    spec = {"shardc": 1, "mesh": {"dp": 2}, **CHUNKS}
    model = Head(make)
    program = shardc.compile(model, batch(), spec)
    assert any("loss: {chunks: 3}" in note and said in note for note in program.notes), program.notes
    value = model(*batch())
    assert torch.allclose(simulate(program, model, batch()).loss, value, rtol=1e-12)


class Wide(nn.Module):
    """A head that is large beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1024, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_never_held(precision: str | None, tp: int) -> None:
    rows, classes = 512, 1024 // tp
    inputs = torch.randn(rows, 8), torch.randint(1024, (rows,))

    def peak(chunks: int) -> int:
        spec: dict[str, Any] = {
            "shardc": 1,
            "mesh": {"tp": tp},
            "shard": {"head": "column"},
            "loss": {"chunks": chunks},
        }
        spec["precision"] = {"compute": precision} if precision else {}
        program = shardc.compile(Wide(), inputs, spec, prove=False)
        found = program.cost().memory.peak
        assert found == pytest.approx(live_bytes.measured(program, Wide(), inputs)[0], rel=0.01)
        return found

    whole, parts = peak(1), peak(16)
    logits = 4 * rows * classes
    assert whole > 1.9 * logits
    assert parts < 0.4 * logits


def test_bf16_rounds_as_little_as_in_one() -> None:
    """The weight's gradient adds up over chunks in float32."""
    torch.manual_seed(0)
    x, w = torch.randn(256, 32, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    y = torch.randint(64, (256,))

    def grads(dtype: torch.dtype, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        a, b = x.to(dtype, copy=True).requires_grad_(), w.to(dtype, copy=True).requires_grad_()
        loss(a, b).backward()
        assert a.grad is not None
        assert b.grad is not None
        return a.grad.double(), b.grad.double()

    def chunked(chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(a: Tensor, b: Tensor) -> Tensor:
            body = (
                ("aten.linear.default", ("%0", "%2"), ()),
                ("aten._to_copy.default", ("%3",), (("dtype", torch.float32),)),
                ("ops.nll", ("%4", "%1"), ()),
            )
            return ops.in_chunks(chunks, body, ((5, 0),), (a, y), (b,), None)[0].sum()

        return loss

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy((a @ b.t()).to(torch.promote_types(a.dtype, torch.float32)), y, reduction="sum")

    exact, rounded = grads(torch.float64, plain), grads(torch.bfloat16, plain)
    for n in (1, 64):
        for one, by_torch, right in zip(grads(torch.bfloat16, chunked(n)), rounded, exact, strict=True):
            assert float((one - right).norm()) < 1.05 * float((by_torch - right).norm())


def test_it_is_written_and_read(tmp_path: Path) -> None:
    model = Head(LOSSES["mean"])
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"head": "column"}, "uneven": "pad", **CHUNKS}
    first = shardc.compile(model, batch(), spec, prove=False)
    first.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert str(again) == str(first)
    one, other = (simulate(p, model, batch()) for p in (first, again))
    assert all(torch.equal(one.grads[n], other.grads[n]) for n in one.grads)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_label_that_is_no_class_is_named(tp: int) -> None:
    model, (x, y) = Head(LOSSES["mean"]), batch()
    spec = {"shardc": 1, "mesh": {"tp": tp}, "shard": {"head": "column"}, "uneven": "pad", **CHUNKS}
    program = shardc.compile(model, (x, y), spec, prove=False)
    y = y.clone()
    y[4, 4] = 40
    with pytest.raises(ShardcError, match=r"a label is not a class: target 40(.|\n)*labels are classes"):
        simulate(program, model, (x, y))
