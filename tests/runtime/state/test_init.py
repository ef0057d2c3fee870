"""Recorded builders: what they compute, that it depends on (seed, op, element) alone, and what is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.random_draws import draw, draw_box
from shardc.runtime.rng import Key
from shardc.runtime.state.init import materialise_model, named_tensors, record, record_reset
from shardc.runtime.state.parts import local_parameters
from shardc.runtime.state.sources import weights_for
from shardc.runtime.state.tape_slices import drawn

torch.set_num_threads(1)


class Zoo(nn.Module):
    """One of everything that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8, padding_idx=3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight
        self.orthogonal = nn.Linear(8, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.trunc = nn.Linear(8, 8)
        nn.init.trunc_normal_(self.trunc.weight, std=0.02)
        self.kaiming = nn.Conv2d(4, 8, 3)
        nn.init.kaiming_normal_(self.kaiming.weight, nonlinearity="relu")
        self.sparse = nn.Linear(8, 8)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.dirac = nn.Conv1d(8, 8, 3)
        nn.init.dirac_(self.dirac.weight)
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.constant = torch.tensor([1.0, 2.0, 3.0]) * 2
        with torch.no_grad():
            self.trunc.weight[2].fill_(5)
            self.trunc.bias.data.copy_(torch.arange(8.0))
        self.made = nn.Parameter(torch.randn(3, 4) / 2)
        mask = torch.tensor([True, False, True])
        self.made.data[mask] = 7.0
        self.chosen = nn.Parameter(torch.ones(3)[mask])
        self.numpy = nn.Parameter(torch.from_numpy(np.arange(4.0)))
        with torch.no_grad():
            self.numpy.mul_(2)
        self.lstm = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(4)
        self.half = nn.Linear(4, 4).half()
        if (torch.arange(3) > 1).any():
            self.branch = nn.Linear(2, 2)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: x.detach() for n, x in named_tensors(model)}


def test_constructor_runs_without_memory_and_gives_the_model_on_meta() -> None:
    model, recipe = record(Zoo)
    plain = Zoo()
    assert {n: (x.shape, x.dtype) for n, x in named_tensors(model)} == {
        n: (x.shape, x.dtype) for n, x in named_tensors(plain)
    }
    assert all(x.is_meta for _, x in named_tensors(model))
    assert set(recipe.names) == {n for n, _ in named_tensors(plain)}
    assert model.head.weight is model.emb.weight
    assert model.rates == plain.rates
    assert model.listed == plain.listed
    assert torch.equal(model.constant, plain.constant)


def test_huge_model_is_recorded_and_one_parameter_of_it_computed() -> None:
    _, recipe = record(
        lambda: nn.ModuleList([nn.Linear(100_000, 100_000), nn.Linear(3, 4)])
    )  # the first would take 40 GB
    assert recipe.materialise("1.weight", 0).shape == (4, 3)


def test_deterministic_values_are_exactly_those_of_the_plain_model() -> None:
    mine, plain = values(materialise_model(Zoo, seed=1)), values(Zoo())
    norm = [f"norm.{n}" for n in ("weight", "running_var", "num_batches_tracked")]
    for name in ("inv_freq", "trunc.bias", "chosen", "numpy", "dirac.weight", *norm):
        assert torch.equal(mine[name], plain[name]), name
    assert mine["trunc.weight"][2].eq(5).all()
    assert mine["emb.weight"][3].eq(0).all()
    assert mine["made"][[0, 2]].eq(7).all()
    assert not mine["made"][1].eq(7).any()
    gram = mine["orthogonal.weight"] @ mine["orthogonal.weight"].T
    assert torch.allclose(gram, torch.eye(8), atol=1e-5)
    assert mine["sparse.weight"].eq(0).sum(0).eq(4).all()


def test_numbers_depend_on_the_seed_and_the_op_alone() -> None:
    torch.manual_seed(1)
    one = values(materialise_model(Zoo, seed=1))
    torch.manual_seed(2)
    with torch.device("cpu"):
        again = values(materialise_model(Zoo, seed=1))
    other = values(materialise_model(Zoo, seed=2))
    _, recipe = record(Zoo)
    for name, x in one.items():
        assert torch.equal(x, again[name]), name
        assert torch.equal(x, recipe.materialise(name, 1)), name
    assert not torch.equal(one["made"], other["made"])
    assert not torch.equal(one["lstm.weight_ih_l0"], one["lstm.weight_hh_l0"])


def test_ties_and_references_survive() -> None:
    model = materialise_model(Zoo, seed=0)
    assert model.head.weight is model.emb.weight
    assert model.lstm(torch.zeros(2, 4))[0].shape == (2, 4)  # LSTM keeps a list of its parameters
    assert not torch.equal(model.trunc.weight[0], model.trunc.weight[1])


def test_dtype_casts_the_same_numbers() -> None:
    single, double = values(materialise_model(Zoo, 3)), values(materialise_model(Zoo, 3, dtype=torch.float64))
    assert double["half.weight"].dtype == torch.float64
    assert double["norm.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(single[n].to(x.dtype), x) for n, x in double.items())


def test_default_dtype_at_replay_does_not_matter() -> None:
    _, recipe = record(lambda: nn.Linear(4, 4))
    torch.set_default_dtype(torch.float64)
    try:
        assert recipe.materialise("weight", 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


Case = tuple[str, dict[str, Any], float, float]
CASES: list[Case] = [
    ("normal_", {"mean": 2.0, "std": 3.0}, 2.0, 3.0),
    ("randn", {}, 0.0, 1.0),
    ("uniform_", {"from": -1.0, "to": 3.0}, 1.0, 4 / math.sqrt(12)),
    ("bernoulli_", {"p": 0.25}, 0.25, math.sqrt(0.25 * 0.75)),
    ("exponential_", {"lambd": 2.0}, 0.5, 0.5),
    ("geometric_", {"p": 0.5}, 2.0, math.sqrt(2)),
    ("log_normal_", {"mean": 0.0, "std": 0.5}, math.exp(0.125), math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
    ("randint", {"low": -2, "high": 3}, 0.0, math.sqrt(2)),
    ("trunc_normal_", {"mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0}, 0.0, 0.8796),
    ("trunc_normal_", {"mean": 0.0, "std": 0.02, "a": -2.0, "b": 2.0}, 0.0, 0.02),
    ("trunc_normal_", {"mean": 0.0, "std": 1.0, "a": 3.0, "b": 9.0}, 3.2831, 0.2657),
]


@pytest.mark.parametrize(("name", "args", "mean", "std"), CASES)
def test_distribution_of_each_random_op(name: str, args: dict[str, Any], mean: float, std: float) -> None:
    out = torch.empty(400, 500, dtype=torch.float64)
    draw(name, out, Key(123, 456), args)
    noise = std / math.sqrt(out.numel())
    assert abs(out.mean().item() - mean) < 6 * noise + 1e-4 * std
    assert abs(out.std().item() - std) < 0.02 * std
    if "a" in args:
        assert args["a"] <= out.min()
        assert out.max() <= args["b"]


@pytest.mark.parametrize(("name", "args"), [(name, args) for name, args, _, _ in CASES])
def test_a_box_of_a_draw_is_computed_without_the_rest(
    name: str, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.empty(6, 5, 8, dtype=torch.bfloat16)
    draw(name, whole, Key(123, 456), args)
    monkeypatch.setattr("shardc.runtime.random_draws.CHUNK", 7)
    box = [(2, 3), (0, 5), (4, 2)]
    part = draw_box(name, whole.shape, whole.dtype, Key(123, 456), args, box)
    assert torch.equal(part, whole[2:5, :, 4:6])


class Tables(nn.Module):
    """Weights that a random op fills, and others: scaled afterwards, with a row of zeros, from a tensor of means."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 6)
        self.scaled = nn.Parameter(torch.randn(4, 4) * 3)
        self.padded = nn.Embedding(5, 4, padding_idx=1)
        self.means = nn.Parameter(torch.normal(torch.arange(4.0), 0.1))
        with torch.no_grad():
            nn.init.trunc_normal_(self.plain.weight, std=0.02)


def test_only_what_a_random_op_alone_filled_is_computed_by_slice() -> None:
    _, recipe = record(Tables)
    found = {n: drawn(recipe.tape, ref, 7) for n, ref in recipe.names.items()}
    assert {n for n, x in found.items() if x is not None} == {"plain.weight", "plain.bias"}
    weight, whole = found["plain.weight"], recipe.materialise("plain.weight", 7)
    assert weight is not None
    assert torch.equal(weight.read([(1, 4), (3, 2)]), whole[1:5, 3:5])


def test_a_rank_computes_its_own_part_of_a_split_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = shardc.compile(
        nn.Sequential(nn.Linear(8, 6)),
        {"input": torch.ones(2, 8)},
        {"shardc": 1, "mesh": {"tp": 2}, "shard": {"0": "column"}},
        loss=lambda y, _: y.square().mean(),
        prove=False,
    )
    wanted = record(lambda: nn.Sequential(nn.Linear(8, 6)))[1].materialise("0.weight", 3)
    computed: list[int] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        part = draw_box(*args, **options)
        computed.append(part.numel())
        return part

    monkeypatch.setattr("shardc.runtime.random_draws.draw_box", counted)
    parts = loopback(
        program.mesh, lambda mesh: local_parameters(program, lambda: nn.Sequential(nn.Linear(8, 6)), mesh, 3)[0]
    )
    assert sorted(computed) == [3, 3, 24, 24]
    name = next(p.name for p in program.params if p.fqn == "0.weight")
    assert torch.equal(torch.cat([p[name].detach() for p in parts]), wanted)


def test_cauchy_and_permutation() -> None:
    out = torch.empty(100_000)
    draw("cauchy_", out, Key(1, 2), {"median": 5.0, "sigma": 2.0})
    assert abs(out.median().item() - 5) < 0.1
    permutation = torch.empty(1000, dtype=torch.int64)
    draw("randperm", permutation, Key(1, 2), {"n": 1000})
    assert permutation.sort().values.equal(torch.arange(1000))
    assert not permutation.equal(torch.arange(1000))


def test_draws_go_by_element_not_by_memory_order_or_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = torch.empty(30, 7), torch.empty(7, 30).T
    draw("normal_", rows, Key(1, 2), {"mean": torch.arange(210.0).view(30, 7), "std": 0.1})
    monkeypatch.setattr("shardc.runtime.random_draws.CHUNK", 16)
    draw("normal_", columns, Key(1, 2), {"mean": torch.arange(210.0).view(30, 7), "std": 0.1})
    assert torch.equal(rows, columns)
    assert (rows.flatten() - torch.arange(210.0)).abs().max() < 1


def _transformers() -> dict[str, Callable[[], nn.Module]]:
    import transformers as t

    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = t.GPT2Config(n_layer=2, n_embd=32, n_head=4, **ids)
    return {
        "gpt2": lambda: t.GPT2LMHeadModel(gpt2),
        "from_config": lambda: t.AutoModelForCausalLM.from_config(gpt2, dtype=torch.bfloat16),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, **ids)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small, vocab_size=64)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **ids)
        ),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**small, image_size=32, patch_size=8)),
        "swin": lambda: t.SwinForImageClassification(
            t.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 2], image_size=32)
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "from_config", "llama", "bert", "t5", "vit", "swin"])
def test_transformers_models_get_the_distributions_of_their_own_init(name: str) -> None:
    builder = _transformers()[name]
    mine, plain = materialise_model(builder, seed=0), builder()
    theirs = dict(named_tensors(plain))
    assert [n for n, _ in named_tensors(mine)] == list(theirs)
    ids = {id(x) for _, x in mine.named_parameters(remove_duplicate=False)}
    assert len(ids) == len({id(x) for _, x in plain.named_parameters(remove_duplicate=False)}), "other ties"
    for n, x in named_tensors(mine):
        y = theirs[n]
        assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad), n
        if (
            y.unique().numel() <= 2
            or not y.is_floating_point()
            or "inv_freq" in n
            or n.endswith("relative_coords_table")
        ):
            assert torch.equal(x, y), n
        elif y.numel() >= 500:
            assert abs(x.float().std() / y.float().std() - 1) < 0.25, n
            assert abs(x.float().mean() - y.float().mean()) < y.float().std() / 2, n


# --- models on the meta device ----------------------------------------------------------------------------------------


def test_meta_model_is_reset_module_by_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)
        )
        model.append(nn.Linear(4, 7, bias=False))
        model[5].weight = model[0].weight
    recipe = record_reset(model)
    assert all(x.is_meta for _, x in named_tensors(model)), "the model was changed"
    assert recipe.materialise("2.weight", 0).eq(1).all()
    assert recipe.materialise("3.running_var", 0).eq(1).all()
    assert recipe.materialise("1.weight", 0).abs().max() <= 0.5
    assert torch.equal(recipe.materialise("5.weight", 0), recipe.materialise("0.weight", 0))


def test_meta_module_without_reset_is_named_with_the_fix() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(
        ShardcError, match=r"(?s)^1: Scale is on the meta device and has no reset_parameters.*builds the model"
    ):
        record_reset(model)


def test_meta_model_with_an_init_of_its_own_is_refused() -> None:
    class Own(nn.Linear):
        def _init_weights(self) -> None: ...

    with torch.device("meta"), pytest.raises(ShardcError, match="has an initialisation of its own"):
        record_reset(Own(2, 2))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_never_initialised_parameter_is_named() -> None:
    class Hole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.inner.extra = nn.Parameter(torch.empty(3))

    _, recipe = record(Hole)
    with pytest.raises(ShardcError, match=r"inner.extra is never initialised \(made at \(test_init.py:\d+\)\)") as e:
        recipe.materialise("inner.extra", 0)
    assert e.value.where == "inner"
    assert recipe.materialise("inner.weight", 0).shape == (2, 2)


def test_branch_on_random_values_is_refused_with_its_line() -> None:
    def build() -> nn.Module:
        return nn.Linear(2, 2 if torch.rand(1).item() < 0.5 else 3)

    with pytest.raises(ShardcError, match=r"looks at the value of random numbers \(return nn.Linear") as e:
        record(build)
    assert e.value.where.startswith("test_init.py:")
    assert "real model" in e.value.fix


@pytest.mark.parametrize(("name", "draw_one"), [("numpy.random", np.random.rand), ("random", random.random)])
def test_foreign_randomness_is_refused(name: str, draw_one: Callable[[], float]) -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.data.fill_(draw_one())
        return model

    with pytest.raises(ShardcError, match=f"draws from Python's module {name}, which would differ"):
        record(build)


def test_random_op_without_counter_form_is_refused() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.data.random_()
        return model

    with pytest.raises(ShardcError, match=r"aten\.random_\.default has no counter-based form"):
        record(build)


def test_builder_of_something_else_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"the builder returned a int, not a torch\.nn\.Module"):
        record(lambda: 3)  # type: ignore[arg-type, return-value]


def test_values_made_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    _, recipe = record(lambda: model)
    with pytest.raises(ShardcError, match="weight is never initialised"):
        recipe.materialise("weight", 0)


def test_sparse_tensor_is_refused() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
        return model

    with pytest.raises(ShardcError, match="pass a real model"):
        record(build)


def test_recording_leaves_no_trace() -> None:
    before = nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert nn.init._no_grad_trunc_normal_ is before
    assert torch.empty(2).device.type == "cpu"
    assert torch.empty(2, device="meta").is_meta


def test_a_seed_that_building_sets_is_told_where_it_would_decide_weights(tmp_path: Path) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(42)
        return nn.Linear(4, 4)

    def constant() -> nn.Module:
        torch.manual_seed(42)
        made = nn.BatchNorm1d(4)
        return made

    torch.manual_seed(42)  # the same one: told all the same
    said = weights_for(seeded, None, 7).overruled
    assert "building Linear calls torch.manual_seed(42), which has no effect" in said
    assert "drawn from seed=7" in said
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "w.safetensors")
    quiet: list[tuple[Any, Any]] = [
        (lambda: nn.Linear(4, 4), None),
        (constant, None),
        (seeded(), None),  # a model: its values count
        (seeded, tmp_path / "w.safetensors"),  # nothing is drawn
    ]
    for source, files in quiet:
        state = torch.get_rng_state()
        assert not weights_for(source, files, 7).overruled
        assert source in (constant, seeded) or torch.equal(torch.get_rng_state(), state)
