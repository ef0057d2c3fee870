"""What Python may ask of traced tensors: constants' values, and whether a check is fine.
CTC without reading lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.capture.value_reads import ctc_loss
from tests import equality

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight).sum()


def captured(function: Callable[[Tensor], Tensor]) -> list[Any]:
    program = capture(Model(function), (torch.rand(2, 4) + 0.1,))
    return [n.target for n in program.graph.nodes if n.op == "call_function"]


def test_constants_have_values() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        if (mask == torch.full((4, 4), True).triu(1)).all() and int(mask.sum()) == 6:
            x = x.sin()
        return x * float(mask[0, 1]) * mask.sum().item() * len(mask.tolist())

    assert aten.sin.default in captured(function)


def written(x: Tensor) -> Tensor:
    """What is written in place counts, also through a view."""
    sizes = torch.empty((2, 2), dtype=torch.long)
    for i in range(2):
        sizes[i, 0], sizes[i, 1] = i + 1, 3
    return x * int(sizes.prod(1).sum()) if sizes[1, 0] == 2 else x


def of_lists(x: Tensor) -> Tensor:
    counts = torch.tensor([2, 1])
    lengths = torch.repeat_interleave(torch.tensor([4, 2]), counts)
    ends = F.pad(lengths.cumsum(0), (1, 0))
    parts = torch.split(x.flatten().repeat(2)[: int(ends[-1])], lengths.tolist())
    turns = torch.arange(counts.sum()) + torch.unique_consecutive(torch.tensor([1, 1, 2, 3])).to(x.dtype)
    return torch.stack([p.sum() for p in parts]) * turns * counts.nonzero().shape[0]


def masked(x: Tensor) -> Tensor:
    mask = torch.tensor([True, False, True, True])
    rows, columns = torch.where(torch.eye(2) > 0)
    return (
        x[:, mask] * x[rows, columns].repeat_interleave(torch.tensor([2, 1]), dim=0)
        + torch.masked_select(mask, mask).sum()
    )


def padded(x: Tensor) -> Tensor:
    left, right = torch.tensor([1, 2])
    y = F.pad(x, (left, right))[:, left : torch.tensor(-1)]
    return F.interpolate(y[None, None], size=(right, left + 2)).view(right, -1).sum(0) * torch.ones(left + 2)


@pytest.mark.parametrize("function", [written, of_lists, masked, padded])
def test_sizes_that_constants_decide(function: Callable[[Tensor], Tensor]) -> None:
    """Proven against eager when it is captured."""
    assert captured(function)


CORRCOEF = torch.corrcoef  # as `from torch import corrcoef` would have it


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cov(x.T),
        lambda x: x.T.cov(correction=0).square(),
        lambda x: CORRCOEF(x.T).square(),
        lambda x: CORRCOEF(torch.complex(x, x.flip(1)).T).abs().square(),
        lambda x: x[:, 1].cov() + x[:, 0].corrcoef(),
    ],
)
def test_covariances_over_rows_are_one_devices(function: Callable[[Tensor], Tensor]) -> None:
    """Losses of redundancy (Barlow Twins, VICReg) are made of them; torch asks there whether a size is above 0."""
    model, x = (
        Model(function).double(),
        torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 2}})
    run = shardc.simulate(program, model, x)
    model(x).backward()
    torch.testing.assert_close(run.loss, model(x).detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(run.grads["weight"], model.weight.grad, rtol=1e-12, atol=1e-12)


def test_weighted_covariances_are_refused() -> None:
    with pytest.raises(shardc.ShardcError, match="depends on a tensor's value"):
        captured(lambda x: torch.cov(x, aweights=x[0].detach()))


class Counter(nn.Module):
    def __init__(self, step: int, persistent: bool = False) -> None:
        super().__init__()
        self.step, self.weight = step, nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.tensor(3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight if self.count > 2 else x
        if self.step:
            self.count = self.count + self.step
        return y.sum()


def test_a_buffer_that_is_not_saved_has_a_value() -> None:
    assert aten.mul.Tensor in [n.target for n in capture(Counter(0), (torch.rand(2, 4),)).graph.nodes]
    with pytest.raises(shardc.ShardcError, match="depends on the value of the buffer 'count', which it changes"):
        capture(Counter(1), (torch.rand(2, 4),))
    with pytest.raises(shardc.ShardcError, match="a branch depends on a tensor's value"):
        capture(Counter(0, persistent=True), (torch.rand(2, 4),))


def raises(x: Tensor) -> Tensor:
    if torch.isnan(x).any() or (x > 100).any():
        raise ValueError("not a number")
    return x


def raises_unless(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    elif (x < -100).any():
        raise ValueError("too small")
    return x


def asserts(x: Tensor) -> Tensor:
    assert torch.all(x > -100).item(), "too small"
    assert (x.abs() < 50).all()
    return x


def raises_on_either(x: Tensor) -> Tensor:
    if (x > 50).any() or not torch.isfinite(x).all():
        raise ValueError("too large")
    return x


@pytest.mark.parametrize(
    "function", [raises, raises_unless, asserts, lambda x: F.gaussian_nll_loss(x, x.flip(0), x + 1)]
)
def test_checks_that_only_raise_are_left_out(function: Callable[[Tensor], Tensor]) -> None:
    captured(function)


def test_writes_to_a_mask_need_no_condition() -> None:
    def function(x: Tensor) -> Tensor:
        x, mask = x * 1, x > 0
        if mask.any():
            x[mask] = -2.0
        if torch.any(mask):
            x[mask] = 1.0
        return x

    assert {aten.index_put.default, aten.masked_fill.Scalar} & {*captured(function)}  # torch 2.15: the second

    def other(x: Tensor) -> Tensor:
        mask = x > 0
        if mask.any():
            x = x * 2
        return x

    with pytest.raises(shardc.ShardcError, match="a branch depends on a tensor's value"):
        captured(other)


def test_random_numbers_are_known_only_where_all_agree() -> None:
    """LayerDrop: at rate 0 no layer is dropped; at another rate nobody knows."""

    def layer(rate: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            dropout_probability = torch.rand([])
            if not dropout_probability < rate:
                x = x.sin()
            return x

        return function

    assert aten.sin.default in captured(layer(0.0))
    assert aten.sin.default not in captured(layer(1.0))
    with pytest.raises(shardc.ShardcError, match="LayerDrop leaves out layers at random"):
        captured(layer(0.1))


def clamps(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        most = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-most, max=most)
    if x.isinf().any() or x.isnan().any():
        x = x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
    return x


def drops(x: Tensor) -> Tensor:
    hidden: Tensor | None = x < 0
    if not hidden.any():
        hidden = None
    kept: Tensor | None = x > -1
    if kept is not None and torch.all(kept):
        kept = None
    assert hidden is not None
    assert kept is not None
    return x.masked_fill(hidden, 0) * kept


@pytest.mark.parametrize(("function", "op"), [(clamps, aten.clamp.default), (drops, aten.masked_fill.Scalar)])
def test_branches_that_change_nothing(function: Callable[[Tensor], Tensor], op: Any) -> None:
    """What is clamped or masked where nothing has to be stays as it is. `drops`: eager runs on tensors that are hidden
    somewhere.
    """
    assert op in [n.target for n in capture(Model(function), (torch.linspace(-2, 3, 8).view(2, 4),)).graph.nodes]


def branches(x: Tensor) -> Tensor:
    if (x > 0.5).all():
        x = x * 2
    return x


def branches_or_raises(x: Tensor) -> Tensor:
    if (x > 0.5).all():
        x = x * 2
        raise ValueError(x)
    return x


@pytest.mark.parametrize("function", [branches, branches_or_raises, raises_on_either])
def test_what_does_more_than_raise_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    """`raises_on_either` asks for two truth values on one line, which do not tell which of them is asked for."""
    with pytest.raises(shardc.ShardcError, match="a branch depends on a tensor's value"):
        captured(function)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor.clone, lambda n: tuple(n.tolist())])
def test_ctc_loss(reduction: str, zero_infinity: bool, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 cannot be aligned: three symbols in one frame."""
    torch.manual_seed(0)
    x = torch.randn(9, 4, 5, dtype=torch.float64).log_softmax(-1).requires_grad_()
    targets, frames, lengths = (
        torch.randint(1, 5, (4, 3)),
        kind(torch.tensor([1, 9, 9, 8])),
        kind(torch.tensor([3, 2, 1, 3])),
    )
    results = []
    for _ in range(2):
        loss = F.ctc_loss(x, targets, frames, lengths, reduction=reduction, zero_infinity=zero_infinity)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
        monkeypatch.setattr(torch, "ctc_loss", ctc_loss)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_ctc_loss_of_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target, n, m = torch.randn(9, 5).log_softmax(-1), torch.tensor([1, 2]), torch.tensor(9), torch.tensor(2)
    want = F.ctc_loss(x, target, n, m, reduction="none")
    monkeypatch.setattr(torch, "ctc_loss", ctc_loss)
    torch.testing.assert_close(F.ctc_loss(x, target, n, m, reduction="none"), want)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        frames, lengths = (torch.full((x.shape[0],), n) for n in (x.shape[1], targets.shape[1]))
        return F.ctc_loss(self.head(x).log_softmax(-1).transpose(0, 1), targets, frames, lengths)


def test_our_own_ops_are_saved_and_loaded(tmp_path: Path) -> None:
    model, batch = Speech(), (torch.randn(4, 6, 3), torch.randint(1, 5, (4, 2)))
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    program.save(tmp_path)
    loaded = shardc.load(tmp_path)
    assert "torch.ops.shardc.ctc_loss.default" in str(loaded)
    torch.testing.assert_close(shardc.verify.simulate(loaded, model, batch).loss, model(*batch).detach())


class Grids(nn.Module):
    """Cuts its rows into windows as a grid says: [[height, width], ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        sizes = torch.repeat_interleave(grid[:, 1], grid[:, 0])
        return torch.stack([part.square().mean() for part in torch.split(self.fc(x), sizes.tolist())]).sum()


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Grids()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, torch.tensor([[2, 2], [1, 4]]))


def test_an_input_that_decides_sizes_is_named_and_may_be_a_constant() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    with pytest.raises(shardc.ShardcError, match="namely that of grid in the batch") as e:
        capture(Grids().double(), {"x": x, "grid": torch.tensor([[2, 2], [1, 4]])})
    assert "let a module around the model add it as a constant" in str(e.value)
    model = Fixed().double()
    program = shardc.compile(model, {"x": x}, {"shardc": 1, "mesh": {"dp": 2}})
    torch.testing.assert_close(shardc.verify.simulate(program, model, {"x": x}).loss, model(x).detach())


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        i, j = torch.combinations(torch.arange(4)).T
        y = self.fc(x)
        return (y[:, i] - y[:, j]).square().mean()


def test_combinations_of_constants_are_constants() -> None:
    """torch finds them by a mask."""
    capture(Pairs().double(), {"x": torch.randn(8, 4, 3, dtype=torch.float64)})


def test_a_mask_of_single_positions_by_vmap() -> None:
    """As transformers makes masks that read a tensor of the batch: index by index, under torch.vmap."""
    from transformers.masking_utils import TransformGetItemToIndex

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            each = torch.vmap(torch.vmap(lambda b, i: kept[b, i], (None, 0)), (0, None))
            with TransformGetItemToIndex():
                mask = each(torch.arange(8), torch.arange(6))
            return torch.where(mask[..., None], self.up(x), 0).sin().sum()

    kept = torch.arange(8)[:, None] > torch.arange(6)
    one = equality.reference(lambda: (Masked().double(), {"x": torch.randn(8, 6, 4).double(), "kept": kept}))
    equality.assert_equal(one.on({"shardc": 1, "mesh": {"dp": 2}}), one.loss, one.grads)
