"""Microbatches: a step in parts equals the step at once, whatever the parts share, and however unevenly padding falls
on them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import equality, zoo
from tests.test_equal import SHARD

ROWS = 8


def rows(*shape: int, seed: int = 0, n: int = ROWS) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """Weights of 6 x 6, and a loss of one's own."""

    def __init__(self, loss: Callable[[Any, Tensor, Tensor], Tensor], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
        self.q = nn.Parameter(torch.randn(1, 6, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


def means(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Several means with different counts, sums, a constant, and a term without any rows."""
    h = m.b(torch.tanh(m.a(x)))
    weight = (y > 0).to(x.dtype)
    return (
        F.mse_loss(h, x)
        + (h[:, 0] * weight).sum() / weight.sum()
        + F.cross_entropy(h, y.clamp(0), ignore_index=2)
        + 1e-2 * (m.a.weight.square().sum() + m.q.norm())
        + 3.0
        + (2 - F.cosine_similarity(h, x).mean())
        + (x.mean() - 1)
    )


def shared(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """What all rows share, spread over them and cut again: a learned query, weights of rows, an outer product."""
    q = m.q.expand(x.shape[0], 6)
    scale = m.b.weight.sum(0).expand(x.shape[0], 6)
    spread = torch.cat([m.q, m.q * 2]).repeat_interleave(x.shape[0] // 2, 0)
    return (m.a(x) * q * scale + spread).square().mean() + m.a(q).sum() * m.b.bias.sum()


def counted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weights of classes from all labels; a normalised weight of rows; a buffer that counts steps."""
    freq = F.one_hot(y.clamp(0), 6).sum(0).to(x.dtype)
    m.seen.add_(1.0)
    weights = (x.abs().sum(1) + 1) / (x.abs().sum(1) + 1).sum()
    logits = m.a(x)
    nll = F.cross_entropy(logits, y.clamp(0), weight=1.0 / (1.0 + freq), reduction="none")
    return (nll * weights).sum() + m.b(x).mean() * m.q.sum()


def alone(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss that looks at no row."""
    return (m.a(m.q) * m.b.bias).sum() + m.a.weight.norm()


LOSSES = [means, shared, counted, alone]


@functools.cache
def reference(name: str) -> equality.Reference:
    own = {f.__name__: f for f in LOSSES}
    if name in own:
        y = torch.randint(-2, 6, (ROWS,), generator=torch.Generator().manual_seed(3))
        return equality.reference(lambda: (Model(own[name]), {"x": rows(6), "y": y}))
    return equality.reference(zoo.ALL[name])


def spec(name: str, mesh: dict[str, int], microbatches: int, **more: Any) -> dict[str, Any]:
    return {
        "shardc": 1,
        "mesh": mesh,
        "shard": SHARD[name] if "tp" in mesh else {},
        "batch": {"microbatches": microbatches},
        **more,
    }


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}], ids=["one device", "dp2"])
@pytest.mark.parametrize("name", [f.__name__ for f in LOSSES])
def test_what_microbatches_share(name: str, mesh: dict[str, int], microbatches: int) -> None:
    one = reference(name)
    program = one.compile(spec(name, mesh, microbatches))
    equality.assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)
    assert program.prove().ok, str(program.prove())


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_models(name: str, mesh: dict[str, int]) -> None:
    """Labels fall unevenly on the rows: microbatches count from 0 to 13 ignored ones a row."""
    one = reference(name)
    microbatches = 4 if name == "gpt" else 2
    program = one.compile(spec(name, mesh, microbatches))
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.assert_equal(sim, one.loss, one.grads)
    assert program.prologue is not None
    assert sum(n.target is ops.total for n in program.stages[0].graph.nodes) == 1


def ordered(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The batch's own order: a threshold between its rows, and how many rows before each have a label."""
    threshold = x[:, 0].sort().values[ROWS // 2]
    before = (y > 0).cumsum(0).to(x.dtype)
    return (m.a(x)[:, 0] * before * (x[:, 0] > threshold).to(x.dtype)).mean() + m.b(x).mean() * threshold


def test_what_is_gathered_of_the_batch_is_put_together_first() -> None:
    """Microbatches have nobody to gather from: each brings its part, truth values too."""
    one = equality.reference(lambda: (Model(ordered), {"x": rows(6), "y": torch.arange(ROWS) % 3}))
    for mesh in ({"dp": 1}, {"dp": 2}):
        program = one.compile(spec("ordered", mesh, 2))
        assert program.prologue is not None
        assert sum(n.target is ops.unshard_partial for n in program.prologue.graph.nodes) >= 2
        equality.assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"dp": 4}], ids=str)
def test_rows_that_do_not_divide(mesh: dict[str, int]) -> None:
    """Six rows in four microbatches, and on four ranks: with `uneven: pad`, rows of padding count for nothing."""
    model, batch = zoo.gpt()
    one = equality.reference(lambda: (model, {k: v[:6] for k, v in batch.items()}))
    sim = one.on(spec("gpt", mesh, 4, uneven="pad"))
    equality.assert_equal(sim, one.loss, one.grads)
    with pytest.raises(shardc.ShardcError, match="6"):
        one.compile(spec("gpt", mesh, 4))


@pytest.mark.parametrize(("ranks", "count"), [(1, ROWS // 2), (2, ROWS // 4)])
def test_fewer_ranks_have_more_microbatches(ranks: int, count: int) -> None:
    """The loss is that of the same global batch."""
    one = reference("means")
    program = one.compile({**spec("means", {"dp": ranks}, 1), "batch": {"rows": 2}})
    assert program.microbatches == count
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.assert_equal(sim, one.loss, one.grads)


def test_microbatches_are_said_once() -> None:
    with pytest.raises(shardc.ShardcError, match="`microbatches` and `rows` both say"):
        reference("means").compile({**spec("means", {"dp": 1}, 1), "batch": {"rows": 2, "microbatches": 2}})


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}], ids=str)
def test_masks_are_those_of_the_whole_batch(mesh: dict[str, int]) -> None:
    model, batch = zoo.gpt(dropout=0.2)

    def run(microbatches: int, mesh: dict[str, int]) -> Any:
        program = shardc.compile(model, batch, spec("gpt", mesh, microbatches), prove=False)
        return shardc.verify.simulate(program, model, batch, steps=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))

    whole = run(1, {"dp": 1})
    equality.assert_equal(run(4, mesh), whole.loss, {n: g for n, g in whole.grads.items() if n != "head.weight"})


def test_buffers_step_once() -> None:
    one = reference("counted")
    sim = one.on(spec("counted", {"dp": 2}, 4))
    assert float(sim.state["seen"]) == float(one.model.get_buffer("seen")) + 1


def test_evaluation_takes_microbatches_too() -> None:
    one = reference("means")
    program = one.compile(spec("means", {"dp": 2}, 4))

    def work(mesh: LoopbackMesh) -> float:
        return float(program.engine(one.model, mesh=mesh).evaluate(one.batch))

    assert loopback(program.mesh, work) == pytest.approx([float(one.loss)] * 2, rel=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).square().mean()


def test_statistics_of_a_batch_are_refused() -> None:
    with pytest.raises(
        shardc.ShardcError, match=r"takes all rows of the batch, and is needed before the step's last microbatch"
    ) as e:
        shardc.compile(Normed(), rows(6), {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 2}})
    assert "norm" in str(e.value)
    assert "GroupNorm" in str(e.value)


def test_running_statistics_are_not() -> None:
    model = Normed()
    model.norm.eval()
    x = rows(6)
    loss = model(x)
    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 2}})
    torch.testing.assert_close(shardc.verify.simulate(program, model, x).loss, loss.detach())


def of_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Every row is compared with all rows."""
    h = m.a(x)
    return (h @ h.T).logsumexp(1).mean()


def of_means(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A row with the mean row: bilinear, and yet no sum of microbatches' own."""
    h = m.a(x)
    return (h @ h.detach().mean(0)[:, None]).mean()


def squared(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x).mean().square()


def product(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.a(x).mean() * m.b(x).mean()


def importance(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Shazeer et al. 2017: the squared coefficient of variation of gates' sums, beside losses that are sums; and a
    buffer that follows.
    """
    gates = m.a(x).softmax(-1)
    total = gates.sum(0)
    m.seen.add_(torch.sign(total.detach().mean() - total.detach()[0]))
    return (
        F.cross_entropy(m.b(x), y.clamp(0))
        + 0.1 * total.var() / total.mean().square()
        + 1e-2 * gates.logsumexp(-1).square().mean()
        + m.q.sum()
    )


@pytest.mark.parametrize("loss", [of_means, squared, product, importance])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}], ids=str)
def test_what_is_made_of_sums(loss: Any, mesh: dict[str, int]) -> None:
    """A forward of all microbatches finds the sums first, in training and in evaluation; gradients go to each one's
    summand.
    """
    y = torch.randint(-2, 6, (ROWS,), generator=torch.Generator().manual_seed(3))
    one = equality.reference(lambda: (Model(loss), {"x": rows(6), "y": y}))
    seen = float(one.model.get_buffer("seen"))  # after the reference's own step, which the next one repeats
    program = one.compile(spec("", mesh, 4))
    assert any("a step first runs forward of all microbatches once more" in n for n in program.notes)
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.assert_equal(sim, one.loss, one.grads)
    assert float(sim.state["seen"]) == 2 * seen
    found = loopback(program.mesh, lambda runtime: float(program.engine(one.model, mesh=runtime).evaluate(one.batch)))
    assert found == pytest.approx([float(one.loss)] * len(found), rel=1e-12)
    assert program.verify().ok


def learned(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """What is made of a sum, times a parameter: each microbatch would give it the whole gradient."""
    return m.q.sum() * m.a(x).mean().square()


def twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A sum of what another sum was needed for."""
    far = (m.a(x) > m.a(x).mean().detach()).to(x.dtype)
    return (far * m.b(x)).mean().square()


def doubled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A sum, and again in a product with each of its own summands."""
    h = m.a(x)
    return (h * h.mean()).mean()


@pytest.mark.parametrize("loss", [of_rows, doubled, learned, twice])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}], ids=str)
def test_what_needs_all_rows_is_refused(loss: Any, mesh: dict[str, int]) -> None:
    """Or right: never a product of microbatches' own sums."""
    y = torch.zeros(ROWS, dtype=torch.long)
    with pytest.raises(shardc.ShardcError, match="before the step's last microbatch") as e:
        shardc.compile(Model(loss), {"x": rows(6), "y": y}, spec("", mesh, 2), prove=False)
    for error in e.value.errors:  # the user's line and code, not a name of the program's, and others only where known
        assert re.search(r"\(test_accumulate.py:\d+\): a value of f64\[[\d, ]*\] \(.*\) takes all rows", error.what), (
            error
        )
        assert "so do" not in error.what or re.search(r"so do \S", error.what)


def whitened(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """By a deviation of the batch's own numbers: no gradient, but a sum of what takes a mean."""
    r = y.to(x.dtype)
    return (m.a(x)[:, 0] * (r - r.mean()) / (r.std() + 1)).mean()


def test_what_follows_from_the_batch_can_be_computed_before() -> None:
    y = torch.arange(ROWS)
    with pytest.raises(shardc.ShardcError, match="a sum over values that depend on such a sum") as e:
        shardc.compile(Model(whitened), {"x": rows(6), "y": y}, spec("", {"dp": 2}, 2), prove=False)
    assert "compute it where the batch is made" in str(e.value)
    assert "gradient" not in str(e.value)


def test_counts_are_summed_once_and_the_loss_after_the_step() -> None:
    """Over ranks: no collective in forward of a microbatch is left."""
    model, batch = Model(lambda m, x, y: F.cross_entropy(m.a(x), y, ignore_index=2)), (rows(6), torch.arange(ROWS) % 6)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 4}})
    sim = shardc.simulate(program, model, batch)
    forward = [c for c in sim.comms if c.direction == "forward"]
    assert [(c.kind, c.axis) for c in forward] == [("all_reduce", "dp")] * 2
    torch.testing.assert_close(sim.loss, model(*batch).detach(), rtol=1e-12, atol=0.0)


def test_a_loss_that_is_also_an_output_keeps_its_sum() -> None:
    def loss(m: Any, x: Tensor, y: Tensor) -> Any:
        each = F.mse_loss(m.a(x), x)
        return {"loss": 2 * each, "each": each}

    model, batch = Model(loss), (rows(6), torch.arange(ROWS))
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 4}})
    sim = shardc.simulate(program, model, batch)
    whole = model(*batch)
    torch.testing.assert_close(sim.loss, whole["loss"].detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(sim.outputs["each"], whole["each"].detach(), rtol=1e-12, atol=0.0)
