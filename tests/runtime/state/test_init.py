"""Recorded builders: what they compute is what plain torch computes with that seed, and what is refused."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.errors import ShardcError
from shardc.runtime.state.init import named_tensors, record, record_reset
from shardc.runtime.state.init_tape import Recorder

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
        lambda: nn.ModuleList([nn.Linear(3, 4), nn.Linear(100_000, 100_000)])
    )  # the second would take 40 GB
    assert recipe.materialise("0.weight", 0).shape == (4, 3)


class Streams(nn.Module):
    """Generators that are seeded, set back and shared, and random ops that tensors are arguments of."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.forked = nn.Parameter(torch.randn(40))
        self.after = nn.Parameter(torch.randn(5))
        own = torch.Generator().manual_seed(5)
        self.own = nn.Parameter(torch.randn(5, generator=own))
        self.shared = nn.Parameter(torch.rand(3))
        self.later = nn.Parameter(torch.empty(20).normal_(generator=own))
        self.kept = nn.Parameter(torch.bernoulli(self.shared.detach()))
        self.means = nn.Parameter(torch.normal(torch.arange(4.0), 0.1))
        self.bits = nn.Parameter(torch.empty(5).random_())
        self.order = nn.Parameter(torch.randperm(9).float())
        with torch.no_grad():
            self.first.weight.data[1:3].normal_()
            self.first.bias.uniform_()


def _equal_plain(builder: Callable[[], nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    plain = values(builder())
    torch.manual_seed(seed + 1)
    state = torch.get_rng_state()
    _, recipe = record(builder)
    for name in reversed(plain):  # the last one needs all draws before it
        mine = recipe.materialise(name, seed)
        assert (mine.dtype, mine.shape) == (plain[name].dtype, plain[name].shape), name
        assert torch.equal(mine, plain[name]), name
        assert torch.equal(mine, recipe.materialise(name, seed)), name
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("builder", [Zoo, Streams, lambda: Streams(9)], ids=["zoo", "streams", "seeded"])
def test_values_are_those_of_plain_torch_with_the_seed(builder: Callable[[], nn.Module]) -> None:
    for seed in (1, 2):
        _equal_plain(builder, seed)


def test_a_seed_that_the_builder_sets_wins() -> None:
    _, recipe = record(lambda: Streams(9))
    assert torch.equal(recipe.materialise("first.weight", 1), recipe.materialise("first.weight", 2))


def test_generators_of_the_caller_are_as_they_were() -> None:
    own = torch.Generator().manual_seed(5)
    _, recipe = record(lambda: nn.ParameterList([torch.randn(4, generator=own)]))
    assert torch.equal(own.get_state(), torch.Generator().manual_seed(5).get_state())
    assert torch.equal(recipe.materialise("0", 0), torch.randn(4, generator=own))


def test_memory_of_a_replay_is_one_tensor_beyond_what_is_kept() -> None:
    """Draws of others are thrown away: 40 tensors of 4 MB take no 40 MB."""
    _, recipe = record(lambda: nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(40)]))
    recipe.materialise("0.weight", 0)
    held: list[int] = []
    alive: list[weakref.ref[Tensor]] = []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            x = func(*args, **(kwargs or {}))
            alive.extend([weakref.ref(x)] if func is torch.ops.aten.empty.memory_format else [])
            held.append(sum(y.untyped_storage().nbytes() for r in alive if (y := r()) is not None))
            return x

    with Counting():
        recipe.materialise("39.weight", 0)
    assert 4 << 20 <= max(held) <= 9 << 20, max(held)


def test_default_dtype_at_replay_does_not_matter() -> None:
    _, recipe = record(lambda: nn.Linear(4, 4))
    torch.set_default_dtype(torch.float64)
    try:
        assert recipe.materialise("weight", 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


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
def test_transformers_models_get_the_values_of_their_own_init(name: str) -> None:
    _equal_plain(_transformers()[name], 0)
    models = [record(_transformers()[name])[0], _transformers()[name]()]
    one, other = (len({id(x) for _, x in m.named_parameters(remove_duplicate=False)}) for m in models)
    assert one == other, "other ties"


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

    with torch.device("meta"), pytest.raises(ShardcError, match="has its own initialisation"):
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

    with pytest.raises(ShardcError, match=r"reads the value of random numbers \(return nn.Linear") as e:
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


def test_a_recorder_that_is_opened_again_draws_on() -> None:
    recorder, drawn = Recorder(), list[Tensor]()
    for _ in range(2):
        with recorder.recording():
            drawn.append(torch.randn(3))
    torch.manual_seed(4)
    plain = [torch.randn(3), torch.randn(3)]
    for x, y in zip(recorder.tape.replay([recorder.ref(x) for x in drawn], 4), plain, strict=True):
        assert torch.equal(x, y)
