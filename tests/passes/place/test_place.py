"""Placement chooses what a good engineer would: sums are done once, where they are smallest, and shared by all that
need them.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests import zoo
from tests.test_equal import assert_equal

N = 32


def collectives(
    model: nn.Module, batch: Any, shard: dict[str, Any], **more: Any
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """What runs forward and backward over tp=2, by kind; equality is checked on the way."""
    model = zoo.ready(model, torch.float64)
    loss = model(batch)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": shard, **more})
    sim = shardc.verify.simulate(program, model, batch)
    assert_equal(sim, loss.detach(), grads)
    forward, backward = (
        collections.Counter(c.kind for c in sim.comms if c.direction == d) for d in ("forward", "backward")
    )
    return forward, backward


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N, bias=False), nn.Linear(2 * N, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class RMS(nn.Module):
    """Written by hand, so that the value it normalises is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centred(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Parallel(nn.Module):
    """x + a(n(x)) + b(n(x)), and a norm that starts with something linear: x - mean(x)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Centred() for _ in range(blocks + 1))
        self.a, self.b = (nn.ModuleList(MLP() for _ in range(blocks)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, a, b in zip(self.norms, self.a, self.b, strict=False):
            y = norm(x)
            x = x + a(y) + b(y)
        return self.norms[-1](x).square().mean()


class After(nn.Module):
    """x + norm(mlp(norm(x))): Gemma 2's blocks."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.start = nn.Linear(N, N)
        self.before, self.after = (nn.ModuleList(RMS() for _ in range(blocks)) for _ in range(2))
        self.mlps = nn.ModuleList(MLP() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for before, mlp, after in zip(self.before, self.mlps, self.after, strict=True):
            x = x + after(mlp(before(x)))
        return x.square().mean()


MEGATRON = {"*.up": "column", "*.down": "row"}


def values() -> Tensor:
    return torch.randn(4, 16, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_parallel_blocks_are_summed_once() -> None:
    forward, backward = collectives(Parallel(), values(), MEGATRON)
    assert forward == {"all_reduce": 2}
    assert backward == {"all_reduce": 2}


def test_a_norm_after_a_block_works_on_the_scattered_sum() -> None:
    """Only the first value is annotated: the sums find the sequence dim by themselves."""
    forward, backward = collectives(After(), values(), MEGATRON, activations={"start": {1: "tp"}})
    assert forward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}, "one all_reduce: the loss"
    assert backward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}, "one all_reduce: the bucket"


def test_a_norm_after_a_block_takes_one_sum() -> None:
    forward, backward = collectives(After(), values(), MEGATRON)
    assert forward == {"all_reduce": 2}
    assert backward == {"all_reduce": 2}


class Channels(nn.Module):
    """A pair of convolutions with a BatchNorm between them, and one token picked of a sequence at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv1d(N, 2 * N, 1), nn.BatchNorm1d(2 * N), nn.Conv1d(2 * N, N, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.norm(self.one(x.transpose(1, 2))))).square().mean()


def test_statistics_of_split_channels_are_stored_split() -> None:
    model, batch = zoo.ready(Channels(), torch.float64), values()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"one": "column", "two": "row"}})
    assert not program.notes
    assert {str(b.value) for b in program.buffers if b.updated and b.shape} == {f"f64[{2 * N}@tp]"}
    sim = shardc.verify.simulate(program, model, batch)
    assert [c.kind for c in sim.comms if c.direction == "forward"] == ["all_reduce"]
    model(batch)  # eager updates its own statistics
    assert all(torch.allclose(sim.state[n], b, rtol=1e-12) for n, b in model.named_buffers())


class First(After):
    """Classifies by the first token of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for before, mlp, after in zip(self.before, self.mlps, self.after, strict=True):
            x = x + after(mlp(before(x)))
        return x[:, 0].square().mean()


class Flat(nn.Module):
    """Rows of all sequences as one dim, as Conv1D has them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.start, self.end = nn.Linear(N, N), nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return (h + self.end(F.relu(self.start(h.reshape(-1, N)))).view_as(h)).square().mean()


def test_one_token_of_a_split_sequence_is_sent_alone() -> None:
    forward, _ = collectives(First(), values(), MEGATRON, activations={"start": {1: "tp"}})
    assert forward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}


@pytest.mark.parametrize("axes", [("tp", "dp"), ("dp", "tp")])
def test_a_padded_batch_keeps_its_split_whatever_the_order_of_axes(axes: tuple[str, str]) -> None:
    """4 sequences on 3 ranks, flattened with a sequence that tp splits: the sequence is gathered, and noted; the batch
    is not.
    """
    model, batch = zoo.ready(Flat(), torch.float64), values()
    spec = {
        "shardc": 1,
        "mesh": {a: {"tp": 2, "dp": 3}[a] for a in axes},
        "shard": {"start": "column", "end": "row"},
        "uneven": "pad",
    }
    program = shardc.compile(model, batch, {**spec, "activations": {"before": {1: "tp"}}})
    text = (
        f"f64[4, 16, {N}] is gathered over tp, because aten.reshape.default needs it whole there, but no "
        "annotation implies this"
    )
    assert [n.partition(": ")[2] for n in program.notes] == [text]
    sim = shardc.verify.simulate(program, model, batch)
    loss = model(batch)
    loss.backward()
    assert torch.allclose(sim.loss, loss.detach(), rtol=1e-12)
    assert all(
        torch.allclose(sim.grads[n], p.grad, rtol=1e-11, atol=1e-14)
        for n, p in model.named_parameters()
        if p.grad is not None
    )


class Critic(nn.Module):
    """A weight under spectral norm, whose power iteration gives new values of two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(N, 2 * N)), nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))).square().mean()


def test_a_new_value_that_comes_split_is_gathered_for_its_buffer() -> None:
    model, batch = zoo.ready(Critic(), torch.float64), values()
    shard = {"up.parametrizations.weight.original": "column", "down": "row"}
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": shard})
    assert any("because the buffer that it updates" in n for n in program.notes)
    sim = shardc.verify.simulate(program, model, batch)
    loss = model(batch)  # eager updates its own
    assert torch.allclose(sim.loss, loss.detach(), rtol=1e-12)
    assert all(torch.allclose(sim.state[n], b, rtol=1e-12) for n, b in model.named_buffers())


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [({"dp": 2, "tp": 2}, 1), ({"tp": 2, "dp": 2}, 1), ({"tp": 2}, 2), ({"tp": 2, "dp": 2}, 2)],
)
def test_an_annotation_splits_what_the_batch_leaves_of_a_dim(mesh: dict[str, int], microbatches: int) -> None:
    """tp on the batch's dim is the digit below those of dp and microbatches: what follows is computed in parts,
    dropout's masks as well.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(N, N), nn.Dropout(0.5), nn.GELU(), nn.Linear(N, 1), nn.Flatten(0), nn.Softplus(), Mean()
    ).double()
    batch = torch.randn(8, N, dtype=torch.float64)
    spec = {"shardc": 1, "mesh": mesh, "batch": {"microbatches": microbatches}, "activations": {"0": {0: "tp"}}}
    one = shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 1}}), model, batch, seed=3)
    program = shardc.compile(model, batch, spec)
    assert_equal(shardc.verify.simulate(program, model, batch, seed=3), one.loss, one.grads)
    assert "@tp" in next(line for line in str(program).splitlines() if "ops.dropout(" in line)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_an_annotation_of_a_dim_that_the_batch_uses_up_is_refused() -> None:
    model, batch = (
        nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, 1), Mean()).double(),
        torch.randn(4, N, dtype=torch.float64),
    )
    text = (
        r"(?s)dim 0 of .* is split over dp already, and cannot be split over tp as well: 4 .*fix: name another dim"
        r" for tp"
    )
    with pytest.raises(shardc.ShardcError, match=text):
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2, "dp": 4}, "activations": {"0": {0: "tp"}}})
