"""Random ops other than dropout: every mesh draws what one device draws, in torch's distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.passes.canonical import Canonical
from shardc.runtime.rng import Rng
from shardc.spec import Spec
from shardc.verify.reference import interpret
from tests import zoo
from tests.differentiable import ops
from tests.zoo import hf

ROWS, WIDE = 8, 16
Middle = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Column-parallel, something random, row-parallel."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(8, WIDE), nn.Linear(WIDE, 4), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x))).square().mean()


def net(middle: Middle) -> zoo.Built:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return zoo.ready(Net(middle), torch.float64), (x,)


def _normal(y: Tensor) -> Tensor:
    return torch.distributions.Normal(y, y.exp()).rsample()


def _shuffled(y: Tensor) -> Tensor:
    return y[torch.randperm(ROWS)] * torch.randint(1, 4, (ROWS, 1))


def _masked(y: Tensor) -> Tensor:
    """SpecAugment as a module of tensors: stretches of random places are zeroed."""
    start = torch.randint(0, WIDE - 4, (ROWS, 1))
    at = torch.arange(WIDE)
    return torch.where((at >= start) & (at < start + 4), 0.0, y)


MIDDLES: dict[str, Middle] = {
    "rand": lambda y: y + torch.rand(ROWS, WIDE),
    "rand_like": lambda y: y + torch.rand_like(y),
    "randn": lambda y: y * torch.randn(WIDE, dtype=torch.float64),
    "randn_like": lambda y: y + 0.1 * torch.randn_like(y),
    "new_normal": lambda y: y + y.new_empty(ROWS, 1).normal_(1.0, 0.5),
    "uniform_": lambda y: y + torch.empty_like(y).uniform_(-1, 2),
    "normal": lambda y: y + torch.normal(y.sigmoid(), 0.5),
    "normal_std": lambda y: y + torch.normal(0.0, y.exp()),
    "rsample": _normal,
    "bernoulli": lambda y: y * torch.bernoulli(y.sigmoid()),
    "bernoulli_": lambda y: y * torch.empty(ROWS, 1, dtype=y.dtype).bernoulli_(0.7) / 0.7,
    "log_normal_": lambda y: y * torch.empty_like(y).log_normal_(0.1, 0.2),
    "geometric_": lambda y: y * torch.empty_like(y).geometric_(0.4),
    "cauchy_": lambda y: y * torch.empty_like(y).cauchy_(),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y, tau=0.7),
    "gumbel_hard": lambda y: F.gumbel_softmax(y.view(ROWS, 4, 4), hard=True).flatten(1) * y,
    "multinomial": lambda y: y.gather(1, torch.multinomial(y.softmax(-1), WIDE, replacement=True)),
    "multinomial_1": lambda y: y * torch.multinomial(y.exp(), 1),
    "multinomial_n": lambda y: y.gather(1, torch.multinomial(y.exp(), WIDE)),
    "shuffled": _shuffled,
    "rrelu": lambda y: F.rrelu(y, training=True) + F.rrelu(y),
    "dropout2d": lambda y: F.dropout2d(y.view(ROWS, 4, 2, 2), 0.5).flatten(1),
    "alpha": lambda y: F.feature_alpha_dropout(F.alpha_dropout(y, 0.3).view(ROWS, 4, 4), 0.3).flatten(1),
    "masked": _masked,
    "bool": lambda y: y * (torch.rand(ROWS, 1, 1) < 0.5).view(ROWS, 1),
}
SPECS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "dp": {"mesh": {"dp": 2}},
    "both": {"mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}},
    "steps": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
}


@pytest.mark.parametrize("name", MIDDLES)
def test_every_mesh_draws_what_one_device_draws(name: str) -> None:
    model, batch = net(MIDDLES[name])
    captured = capture(model, batch)  # proven equal to eager, drawing torch's numbers
    found = {}
    for mesh, spec in SPECS.items():
        if mesh == "steps" and name == "shuffled":
            continue  # rows of one microbatch are not those of another
        program = shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured)
        found[mesh] = shardc.verify.simulate(program, model, batch, seed=5)
        if mesh == "both":
            report = program.verify()
            assert report.ok, str(report)
    one = found.pop("one")
    for sim in found.values():
        torch.testing.assert_close(sim.loss, one.loss, rtol=1e-12, atol=0)
        for n, g in one.grads.items():
            torch.testing.assert_close(sim.grads[n], g, rtol=1e-11, atol=1e-12)


#: What is drawn -> its mean and mean square, by the textbook.
MOMENTS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 7 / 3),
    "rand": (lambda x: torch.rand_like(x, dtype=torch.float32), 0.5, 1 / 3),
    "normal": (lambda x: torch.normal(x + 0.5, 2.0), 0.5, 4.25),
    "normal_": (lambda x: x.clone().normal_(1.0, 0.5), 1.0, 1.25),
    "log_normal": (lambda x: torch.empty_like(x).log_normal_(0.0, 0.5), math.exp(1 / 8), math.exp(1 / 2)),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.5), 2.0, 6.0),
    "integers": (lambda x: torch.randint(-1, 3, x.shape).to(x), 0.5, 1.5),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), 0.3, 0.3),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.8), 0.8, 0.8),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.1, 0.6, 0.3]), x.numel(), replacement=True).to(x),
        1.2,
        1.8,
    ),
    "without": (lambda x: torch.multinomial((x + 1).view(-1, 2), 2)[:, 1].to(x), 0.5, 0.5),
    "permutation": (lambda x: torch.randperm(x.numel()).to(x) / x.numel(), 0.5, 1 / 3),
    "gumbel": (lambda x: F.gumbel_softmax(torch.stack([x, x + math.log(3)], -1), hard=True)[..., 1], 0.75, 0.75),
    "rrelu": (lambda x: F.rrelu(x - 1, 0.25, 0.75, training=True), -0.5, 1 / 4 + 1 / 48),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_distributions_are_torchs(name: str) -> None:
    function, mean, square = MOMENTS[name]

    class Drawn(nn.Module):
        def __init__(self, power: int) -> None:
            super().__init__()
            self.zero, self.power = nn.Parameter(torch.zeros((), dtype=torch.float64)), power

        def forward(self, x: Tensor) -> Tensor:
            return self.zero + function(x).double().pow(self.power).mean()

    x = torch.zeros(20000, dtype=torch.float64)
    for power, want in ((1, mean), (2, square)):
        program = Canonical(Spec(Mesh(()))).run(capture(Drawn(power), x, prove=False))
        values = {p.name: torch.zeros((), dtype=torch.float64) for p in program.params}
        found, other = (
            float(interpret(program, values, {}, {i.name: x for i in program.inputs}, Rng(seed))[0]) for seed in (0, 1)
        )
        assert found == pytest.approx(want, abs=0.05 * max(abs(want), 1.0) + 0.02)
        assert found != other or name in ("permutation", "without", "rrelu")


# --- one generator for all


def test_numbers_differ_by_op_step_and_seed(tmp_path: Any) -> None:
    """Two ops of one kind, two steps and two seeds differ; the same seed gives the same; a saved program draws as
    before.
    """
    model, batch = net(lambda y: y + torch.rand_like(y) - torch.rand_like(y))
    program = shardc.compile(model, batch, {"shardc": 1, **SPECS["both"]})
    losses = [float(shardc.verify.simulate(program, model, batch, seed=seed).loss) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    still = shardc.verify.simulate(
        program, model, batch, steps=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)
    ).loss
    assert float(still) != losses[0]
    program.save(tmp_path)
    assert (
        "ops.random('uniform', (0.0, 1.0), [8, 16], torch.float64, rng, 1, mesh, "
        in (tmp_path / "stage0.py").read_text()
    )
    assert float(shardc.verify.simulate(shardc.load(tmp_path), model, batch).loss) == losses[0]


def test_a_rank_draws_its_part_only() -> None:
    """Noise of an activation is split as it is: nothing is sent, nothing is drawn twice."""
    model, batch = net(lambda y: y + torch.randn_like(y))
    program = shardc.compile(model, batch, {"shardc": 1, **SPECS["both"]})
    drawn = [n for n in program.stages[0].graph.nodes if "random" in str(n.target)]
    assert [n.meta["value"].local_shape(program.mesh) for n in drawn] == [(ROWS // 2, WIDE // 2)]


def test_padded_and_narrow() -> None:
    """Dims that do not divide; 16 bits, in which rounding must not reach the upper end of a range."""

    def middle(y: Tensor) -> Tensor:
        return y * torch.rand_like(y)

    model, batch = net(middle)
    spec = {"shardc": 1, "mesh": {"tp": 3}, "shard": {"up": "column", "down": "row"}, "uneven": "pad"}
    report = shardc.compile(model, batch, spec).verify()
    assert report.ok, str(report)
    for dtype in (torch.bfloat16, torch.float16):
        x = ops.random("uniform", (0.0, 1.0), [100000], dtype, Rng(), 0)
        assert x.dtype == dtype
        assert 0.99 < float(x.max()) < 1
    assert float(ops.random("uniform", (1.0, 5.0), [100000], torch.bfloat16, Rng(), 0).max()) < 5


# --- what cannot be drawn

REFUSED: list[tuple[Middle, str, str]] = [
    (
        lambda y: y * torch.poisson(y.exp()),
        r"aten.poisson.default draws random numbers that would differ",
        "pass them in with the batch",
    ),
    (
        lambda y: y * torch._standard_gamma(y.detach().exp()),
        r"aten._standard_gamma.default would draw other random numbers on every mesh",
        "rand, randn",
    ),
    (
        lambda y: y * torch.binomial(y.detach().exp().round(), y.detach().sigmoid()),
        r"aten.binomial.default draws random numbers",
        "rand, randn",
    ),
    (
        lambda y: y * torch.randint(0, 2**40, (WIDE,)),
        r"aten.randint.low draws integers from a range of 1099511627776",
        "at most 2^31",
    ),
    (
        lambda y: y * torch.empty(WIDE, dtype=torch.int64).random_(),
        r"aten.random.default draws integers from a range that is wider than 2\^31, or no Python numbers",
        "randint",
    ),
    (
        lambda y: y * torch.randn(WIDE, dtype=torch.complex128).real,
        r"aten.randn.default draws complex numbers",
        "torch.complex(",
    ),
]


@pytest.mark.parametrize(("middle", "what", "fix"), REFUSED)
def test_what_cannot_be_drawn_is_refused(middle: Middle, what: str, fix: str) -> None:
    model, batch = net(middle)
    with pytest.raises(ShardcError, match=what) as e:
        shardc.compile(model, batch, {"shardc": 1, **SPECS["dp"]})
    assert "test_random.py:" in e.value.where
    assert fix in e.value.fix


# --- models that draw


class VAE(nn.Module):
    """Kingma & Welling 2013: the noise of the reparametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 2 * WIDE), nn.Linear(WIDE, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return F.mse_loss(self.decoder(z), x) + 0.5 * (mean.square() + log_var.exp() - log_var - 1).mean()


class Diffusion(nn.Module):
    """Ho et al. 2020: a random step and random noise for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.time, self.down = nn.Linear(8, WIDE), nn.Embedding(10, WIDE), nn.Linear(WIDE, 8)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t].unsqueeze(1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.down(F.silu(self.up(noisy) + self.time(t))), noise)


def pretrained() -> zoo.Built:
    """wav2vec2 2.0: quantised by gumbel-softmax, masked frames and negatives given with the batch."""
    mask = torch.zeros(8, 16, dtype=torch.bool)
    mask[:, 3:7], mask[3, 9:12] = True, True
    negatives = torch.randint(0, 16, (8, 16, 5), generator=torch.Generator().manual_seed(0))
    codes = {"codevector_dim": 16, "proj_codevector_dim": 16, "num_codevectors_per_group": 8, "num_negatives": 5}
    batch = {"input_values": hf.random(8, 323), "mask_time_indices": mask, "sampled_negative_indices": negatives}
    return hf.build(hf.row("Wav2Vec2ForPreTraining", lambda: batch, **hf.CONVS | codes), torch.float32)


@pytest.mark.parametrize("name", ["vae", "diffusion", "wav2vec2"])
def test_models_that_draw(name: str) -> None:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    model, batch = pretrained() if name == "wav2vec2" else (VAE() if name == "vae" else Diffusion(), (x,))
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}})
    report = program.verify()
    assert report.ok, str(report)
    kinds = {
        c.kind
        for s in program.stages
        for n in s.graph.nodes
        if (c := n.meta.get("collective")) is not None and "dp" in c.axes
    }
    assert kinds <= {"all_reduce", "none"} or name == "wav2vec2"  # whose negatives come from the whole batch


def test_a_loss_that_is_no_number_is_told() -> None:
    model, batch = net(lambda y: (y - 100).sqrt())
    report = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, prove=False).verify()
    assert not report.ok
    assert "the model's loss is nan on one device: nothing can be compared" in str(report)
    assert str(report).startswith("not compared with one device\nloss: ")


class Hides(nn.Module):
    """Attention over 4 places by a mask that is stored: it hides where it is False, as integers or as truth values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril().to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ x.mT).masked_fill(self.mask == 0, float("-inf")).softmax(-1).square().mean()  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_stored_mask_does_not_hide_everything(dtype: torch.dtype) -> None:
    report = shardc.compile(Hides(dtype), torch.randn(4, 4, 4), {"shardc": 1, "mesh": {"dp": 2}}).verify()
    assert report.ok, str(report)


class Guess(nn.Module):
    """A loss that is only defined for targets between 0 and 1, times a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.linear(x).sigmoid(), target * self.scale)


def test_inputs_that_have_to_be_probabilities_are() -> None:
    batch = (torch.randn(8, 4), torch.rand(8, 4) * 0.1)
    report = shardc.compile(Guess(1.0), batch, {"shardc": 1, "mesh": {"dp": 2}}).verify()
    assert report.ok, str(report)
    report = shardc.compile(Guess(9.0), batch, {"shardc": 1, "mesh": {"dp": 2}}).verify()
    assert not report.ok
    assert (
        "the model fails on one device (RuntimeError: all elements of target should be between 0 and 1): nothing can be"
        " compared" in str(report)
    )
