"""Sizes that ranks do not divide: padded where the spec says so, equal to one device;
else errors with what would fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.placement import Shard
from shardc.runtime.data.inputs import take
from shardc.runtime.mesh.loopback import loopback
from tests import equality, zoo
from tests.passes.annotate.test_kv_heads import equal
from tests.test_equal import FIRST, SHARD
from tests.zoo import plain, plain_more  # noqa: F401 (its models are in plain.ALL)

ODD = 127  # vocabulary


def llama(heads: int = 6, kv: int = 6, batch: int = 8) -> zoo.Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ODD,
        hidden_size=48,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=8,
    )
    return zoo.ready(LlamaForCausalLM(config), torch.float64), {
        "input_ids": zoo.tokens(ODD)[:batch],
        "labels": zoo.labels(ODD)[:batch],
    }


def gpt2(heads: int = 5, batch: int = 8, dropout: float = 0.0) -> zoo.Built:
    """Fused thirds: each of q, k and v is padded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=ODD,
        n_positions=64,
        n_embd=16 * heads,
        n_layer=2,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
        loss_type="ForCausalLM",
    )
    return zoo.ready(GPT2LMHeadModel(config), torch.float64), {
        "input_ids": zoo.tokens(ODD)[:batch],
        "labels": zoo.labels(ODD)[:batch],
    }


def bert(batch: int = 7) -> zoo.Built:
    """Padding in the attention mask: a row of padding that was all masked would give nan."""
    model, data = zoo.bert()
    return model, {k: v[:batch] for k, v in data.items()}


def spec(name: str, mesh: dict[str, int], *, sequence: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {"shardc": 1, "mesh": mesh, "shard": SHARD[name] if "tp" in mesh else {}, "uneven": "pad"}
    return made | ({"activations": {FIRST[name]: {1: "tp"}}} if sequence else {})


CASES: dict[str, tuple[zoo.Built, dict[str, Any]]] = {
    "6 heads, odd vocabulary and width on 4": (llama(), spec("llama", {"tp": 4})),
    "12 heads for 6 on 4": (llama(12, 6), spec("llama", {"tp": 4})),
    "3 ranks": (llama(), spec("llama", {"tp": 3})),
    "5 heads in fused thirds on 2": (gpt2(), spec("gpt2", {"tp": 2})),
    "5 heads in fused thirds on 4": (gpt2(), spec("gpt2", {"tp": 4})),
    "batch of 6 on 4": (llama(batch=6), spec("llama", {"dp": 4})),
    "batch of 5 on 4: a rank has none": (gpt2(batch=5), spec("gpt2", {"dp": 4})),
    "batch of 7 on 2 × 2": (bert(), spec("bert", {"dp_outer": 2, "dp": 2})),
    "everything at once": (llama(batch=7), spec("llama", {"dp": 2, "tp": 4}, sequence=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_padded_equals_one_device(case: str) -> None:
    program, _ = equal(*CASES[case])
    assert any(x.layout.paddings() for x in program.stored)


def test_padding_stays_with_the_batch_where_it_shares_a_dim() -> None:
    """8 rows on 2 × 2 ranks of 4 microbatches, behind 4 latents in one dim, [4 · (8+8)]: no axis may take it for 4+4
    times 8.
    """
    one = equality.reference(plain.ALL["perceiver"])
    sim = one.on({"shardc": 1, "mesh": {"dp_outer": 2, "dp": 2}, "batch": {"microbatches": 4}, "uneven": "pad"})
    equality.assert_equal(sim, one.loss, one.grads)


def test_a_sequence_that_does_not_divide() -> None:
    model, data = llama(heads=4, kv=4)
    batch = {k: v[:, :15] for k, v in data.items()}
    program, sim = equal((model, batch), spec("llama", {"tp": 2}, sequence=True))
    assert not program.notes
    planned = [n.meta["collective"] for n in program.stages[0].graph.nodes if "collective" in n.meta]
    for kind in ("all_gather", "reduce_scatter"):  # what is sent is padded
        assert sum(c.bytes for c in planned if c.kind == kind) == sum(
            c.bytes for c in sim.comms if (c.kind, c.direction) == (kind, "forward")
        )


def test_heads_set_the_grain_of_what_they_share() -> None:
    """96 columns divide by 4, but 6 heads do not: each rank gets whole heads."""
    program, _ = equal(*CASES["6 heads, odd vocabulary and width on 4"])
    shards = {
        n: program.param(f"model.layers.0.{n}.weight").layout["tp"]
        for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    assert shards == {
        "self_attn.q_proj": Shard(0, 1, (), 16),
        "self_attn.o_proj": Shard(1, 1, (), 16),
        "mlp.down_proj": Shard(1, 1, (), 2),
    }
    assert "f64[48+16@tp, 48]" in program.text(full=True)


def test_dropout_on_padded_values_is_that_of_one_rank() -> None:
    model, batch = gpt2(batch=7, dropout=0.2)
    with zoo.Wide():
        one = shardc.compile(model, batch, spec("gpt2", {"dp": 1, "tp": 1}))
        two = shardc.compile(model, batch, spec("gpt2", {"dp": 2, "tp": 2}))
    a, b = shardc.verify.simulate(one, model, batch, seed=5), shardc.verify.simulate(two, model, batch, seed=5)
    assert abs(float(a.loss - b.loss)) <= 1e-12 * abs(float(a.loss))
    assert all(float((a.grads[n] - b.grads[n]).norm()) <= 1e-12 * max(float(a.grads[n].norm()), 1e-3) for n in a.grads)


def test_padding_stays_zero_over_optimizer_steps() -> None:
    """simulate compares every rank's part with the joined weight, padding included, after each step."""
    model, batch = llama()

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    with zoo.Wide():
        one = shardc.compile(model, batch, spec("llama", {"tp": 1}))
        four = shardc.compile(model, batch, spec("llama", {"tp": 4}))
    a, b = (shardc.verify.simulate(p, model, batch, steps=3, optimizer=adamw) for p in (one, four))
    assert all(torch.allclose(a.state[n], b.state[n], rtol=1e-9, atol=1e-9) for n in a.state)


def test_an_artifact_keeps_paddings(tmp_path: Path) -> None:
    model, batch = llama(batch=7)
    with zoo.Wide():
        program = shardc.compile(model, batch, spec("llama", {"dp": 2, "tp": 4}, sequence=True))
    program.save(tmp_path / "p")
    loaded = shardc.load(tmp_path / "p")
    assert loaded.text(full=True) == program.text(full=True)
    assert torch.equal(
        shardc.verify.simulate(loaded, model, batch).loss, shardc.verify.simulate(program, model, batch).loss
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.mark.parametrize(
    ("mesh", "shard", "text"),
    [
        (
            {"tp": 4},
            {"up": "column"},
            "10 is not divisible by tp=4.*make the size 8 or 12, or tp=2 or 5, or set `uneven: pad`",
        ),
        ({"dp": 4}, {}, r"the batch of 7 \(dim 0\) is not divisible by dp=4.*make it 4 or 8.*`uneven: pad`"),
    ],
)
def test_without_the_word_it_is_an_error_with_what_would_fit(
    mesh: dict[str, int], shard: dict[str, Any], text: str
) -> None:
    with pytest.raises(shardc.ShardcError, match=f"(?s){text}"):
        shardc.compile(Net(), {"x": torch.randn(7, 6)}, {"shardc": 1, "mesh": mesh, "shard": shard})


def test_a_ranks_own_part_does_not_tell_a_padded_batch() -> None:
    net, batch = Net(), {"x": torch.randn(7, 6)}
    program = shardc.compile(net, batch, {"shardc": 1, "mesh": {"dp": 2}, "uneven": "pad"})
    with pytest.raises(shardc.ShardcError, match=r"(?s)does not divide over ranks.*without local=True"):
        loopback(program.mesh, lambda mesh: take(program, {"x": torch.randn(4, 6)}, mesh, local=True))


class Poles(nn.Module):
    """What padding is made of, divided by, and its roots and logarithms taken: each has its pole where a padded weight
    is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 4)
        self.scale = nn.Parameter(torch.ones(6))  # gets the sum of all rows' gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.up.weight * self.scale
        n, s = w.norm(dim=1), w.square().sum(1)
        many = (
            s.sqrt()
            + s.rsqrt()
            + s.log()
            + s.log2()
            + s.log10()
            + s.reciprocal()
            + s.pow(0.3)
            + s**s
            + s.lgamma()
            + s.digamma()
        )
        many = (
            many
            + torch.atan2(s, n)
            + torch.hypot(s, n)
            + torch.xlogy(n, s)
            + torch.addcdiv(s, n, s)
            + (s + n).remainder(n)
        )
        many = many + torch.logit(s / (s + 1)) + torch.special.ndtri(s / (s + 1)) + (s / s.detach() * 2).acosh()
        w = torch._weight_norm(w, n[:, None], 0)
        return (self.down(nn.functional.linear(x, w / n[:, None]) * many.tanh()) ** 2).mean()


def test_padding_lies_at_no_pole() -> None:
    torch.manual_seed(0)
    one = equality.reference(lambda: (Poles().double(), (torch.randn(4, 6, dtype=torch.float64),)))
    sim = one.on({"shardc": 1, "mesh": {"tp": 3}, "shard": {"up.weight": {0: "tp"}, "down": "row"}, "uneven": "pad"})
    assert sim.grads["scale"].isfinite().all()
    equality.assert_equal(sim, one.loss, one.grads)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return h.square().mean() + (torch.histc(h.detach(), 4, -1.0, 1.0) * torch.arange(1, 5)).sum() / 10


def test_padding_is_not_counted() -> None:
    torch.manual_seed(0)
    one = equality.reference(lambda: (Counted().double(), (torch.randn(7, 3, dtype=torch.float64),)))
    equality.assert_equal(one.on({"shardc": 1, "mesh": {"dp": 2}, "uneven": "pad"}), one.loss, one.grads)


EVEN = {name: zoo.ALL[name] for name in ("gpt", "llama", "gpt2", "bert", "mlp", "moe")}
EVEN |= {name: plain.ALL[name] for name in ("unet", "lstm", "dit", "detector")}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"tp": 2}], ids=["dp2tp2", "tp2"])
def test_where_everything_divides_the_program_is_the_same(name: str, mesh: dict[str, int]) -> None:
    """The very text: padding is for what does not divide, and changes nothing else."""
    model, batch = EVEN[name]()
    captured = shardc.capture.capture(model, batch, prove=False)
    each = {"shardc": 1, "mesh": mesh, "shard": {"use": "structure"}}
    plainly = shardc.compile(model, batch, each, captured=captured)
    padded = shardc.compile(model, batch, {**each, "uneven": "pad"}, captured=captured)
    assert str(padded) == str(plainly)


def test_a_table_that_divides_is_not_padded() -> None:
    """1000 rows that nothing else shares: no op of the split says into how many pieces its dim falls."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(1000, 8), nn.Linear(8, 1000)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.tok(ids)).flatten(0, 1), ids.flatten())

    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"tok": "vocab", "head": "column"}, "uneven": "pad"}
    program = shardc.compile(Table(), {"ids": torch.arange(32).view(4, 8)}, spec)
    assert str(program.param("tok_weight").value) == "f32[1000@tp, 8] ~dp"
    odd = shardc.compile(Table(), {"ids": torch.arange(32).view(4, 8)}, {**spec, "mesh": {"dp": 2, "tp": 3}})
    assert "1000+2@tp" in str(odd.param("tok_weight").value)
