"""Generation: on every mesh tokens, greedy and drawn, are those of transformers on one device (tests/drawn.py)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.features.generation import cache as caches
from shardc.features.generation import compiler
from shardc.features.generation.capture import cache_argument, no_cache
from shardc.features.generation.program import Sizes
from shardc.features.generation.runtime import Prompts
from shardc.passes.annotate import model_plan
from shardc.recompile import Resizer
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.state.parts import constants
from tests import drawn, zoo
from tests.once import once_each
from tests.zoo import hf, hf_more, sequences

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [11, 12]]
TOKENS = 10
#: By hand, since the structure of a model as small as this is not worth splitting.
WEIGHTS = {
    "*.embed_tokens": "vocab",
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "lm_head"), "column"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "row"),
}
STAGES = {"axis": "pp", "stages": 2}
SPECS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "tp=2": {"mesh": {"tp": 2}, "shard": WEIGHTS},
    "kv heads < tp": {"mesh": {"tp": 8}, "shard": WEIGHTS},
    "dp=2": {"mesh": {"dp": 2}},
    "pp=2": {"mesh": {"pp": 2}, "pipeline": STAGES},
    "zero 3": {"mesh": {"dp": 2, "tp": 2}, "shard": WEIGHTS, "data": {"zero": 3}},
    "all": {"mesh": {"dp": 2, "tp": 2, "pp": 2}, "shard": WEIGHTS, "pipeline": STAGES, "batch": {"microbatches": 2}},
    "cp=2": {"mesh": {"cp": 2, "tp": 2}, "shard": WEIGHTS, "sequence": {"axis": "cp"}},
}


@functools.cache
def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = zoo.llama()
    return model, batch


def theirs(model: Any, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS, **options: Any) -> list[list[int]]:
    """What transformers generates, with prompts filled up on their left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    training = model.training
    made = model.eval().generate(ids, attention_mask=mask, max_new_tokens=tokens, **options)
    model.train(training)
    found: list[list[int]] = made[:, width:].tolist()
    return found


def compiled(model: Any, batch: Any, spec: dict[str, Any]) -> Program:
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)


@once_each
def of_llama(spec: dict[str, Any]) -> Program:
    return compiled(*llama(), spec)


def ours(spec: dict[str, Any], *calls: dict[str, Any], model: Any = None, batch: Any = None) -> list[list[list[int]]]:
    if model is None:
        return generated(of_llama(spec), llama()[0], *calls)
    return generated(compiled(model, batch, spec), model, *calls)


def generated(program: Program, model: Any, *calls: dict[str, Any]) -> list[list[list[int]]]:
    """What every rank gets of these calls of engine.generate."""

    def work(mesh: Any) -> list[list[list[int]]]:
        engine = program.engine(model, None, mesh=mesh)
        return [engine.generate(**{"prompts": PROMPTS, "max_new_tokens": TOKENS, "stop": (), **c}) for c in calls]

    ranks = loopback(program.mesh, work)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


CALLS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.7},
]


@functools.cache
def on_one_device() -> list[list[list[int]]]:
    every = list(range(len(PROMPTS)))
    return [theirs(llama()[0], logits_processor=drawn.processors(call, every)) for call in CALLS]


@pytest.mark.parametrize("name", SPECS)
def test_tokens_greedy_and_drawn_are_those_of_transformers_on_one_device(name: str) -> None:
    assert ours(SPECS[name], *CALLS) == on_one_device()


def test_other_seeds_draw_other_tokens() -> None:
    one, same, other = ours(SPECS["one"], *({"temperature": 1.0, "seed": s} for s in (1, 1, 2)))
    assert one == same != other


def test_a_row_ends_with_its_stop_token_and_all_end_early() -> None:
    plain = theirs(llama()[0])
    stop = plain[0][2]
    (found,) = ours(SPECS["tp=2"], {"stop": [stop]})
    assert found == [row[: row.index(stop) + 1] if stop in row else row for row in plain]
    assert len(found[0]) <= 3


def test_without_a_word_the_stop_tokens_are_the_models_own() -> None:
    model, batch = zoo.llama()
    model.generation_config.eos_token_id = [theirs(model)[1][4]]  # type: ignore[union-attr]
    (found,) = ours(SPECS["dp=2"], {"stop": None}, model=model, batch=batch)
    (end,) = model.generation_config.eos_token_id  # type: ignore[union-attr]
    assert found == [row[: row.index(end) + 1] if end in row else row for row in theirs(model)]


@pytest.mark.parametrize(
    "prompts", [[[4, 5]], [[1, 2, 3]] * 3, [list(range(20)), [7]]], ids=["1 row", "3 rows", "long"]
)
def test_rows_and_lengths_that_no_program_was_compiled_for(prompts: list[list[int]]) -> None:
    (found,) = ours(SPECS["dp=2"], {"prompts": prompts})
    assert found == theirs(llama()[0], prompts)


def test_prompts_as_a_tokenizer_gives_them() -> None:
    ids = torch.tensor([[5, 6, 0], [9, 8, 7]])
    with_mask = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    one, two = ours(SPECS["one"], {"prompts": with_mask}, {"prompts": ids[1:]})
    assert one == theirs(llama()[0], [[5, 6], [9, 8, 7]])
    assert two == one[1:]


@pytest.mark.parametrize("spec", [SPECS["zero 3"], SPECS["pp=2"]], ids=["zero 3", "pp=2"])
def test_in_the_middle_of_training_the_weights_are_those_of_now_and_nothing_changes(spec: dict[str, Any]) -> None:
    model, batch = zoo.llama()
    program = compiled(model, batch, spec)

    def work(mesh: Any, generates: bool) -> tuple[list[list[int]], dict[str, Tensor] | None, list[float]]:
        engine = program.engine(model, lambda ps: torch.optim.SGD(ps, lr=0.5), mesh=mesh)
        losses = [float(engine.step(batch)) for _ in range(2)]
        made = engine.generate(PROMPTS, TOKENS, stop=()) if generates else []
        weights = engine.full_state_dict()
        return made, weights, [*losses, float(engine.step(batch))]

    with_it = loopback(program.mesh, lambda mesh: work(mesh, True))
    without = loopback(program.mesh, lambda mesh: work(mesh, False))
    assert [r[2] for r in with_it] == [r[2] for r in without]
    weights = next(r[1] for r in with_it if r[1])
    trained, _ = zoo.llama()
    trained.load_state_dict(weights, strict=False)
    assert with_it[0][0] == theirs(trained) != theirs(model)


def test_the_cache_is_split_like_the_heads_and_over_stages() -> None:
    steps = steps_of(of_llama(SPECS["all"]), Sizes(4, 16, 64))
    caches = {b.name: (str(b.value), b.stages) for b in steps[1].buffers if b.cache}
    assert caches["cache_0_keys"] == ("f64[4@dp, 4@tp, 64, 8]", (0,))
    assert caches["cache_1_values"] == ("f64[4@dp, 4@tp, 64, 8]", (1,))
    kinds = [n.meta["collective"].kind for s in steps[1].stages for n in s.graph.nodes if "collective" in n.meta]
    assert set(kinds) == {"all_reduce", "send_recv"}


def test_the_cache_is_written_where_it_stands() -> None:
    model, _ = llama()
    program = of_llama(SPECS["tp=2"])
    _, following = steps_of(program, Sizes(4, 16, 64))

    def work(mesh: Any) -> None:
        engine = program.engine(model, None, mesh=mesh)
        given = {"mesh": mesh, "rng": engine.rng, **engine.buckets.given, **engine.buffers}
        empty = {b.name: torch.zeros(b.layout.local_shape(b.shape, mesh.layout)).double() for b in following.buffers}
        cache = {b.name: empty[b.name] for b in following.buffers if b.cache}
        batch = {x.name: torch.ones(x.shape, dtype=x.dtype) for x in following.inputs}
        news, _ = Interpreter(following, mesh).forward({**given, **constants(following, mesh), **batch, **cache})
        assert {name: x.data_ptr() for name, x in news.items()} == {name: x.data_ptr() for name, x in cache.items()}
        for x in cache.values():
            assert (x[:, :, 1] != 0).any()
            assert not x[:, :, 2:].any()

    loopback(program.mesh, work)


#: Keys and values in one place each, in rings, moved up (GPT-Neo, MPT); states of convolutions and recurrences.
FAMILIES = (
    *("mistral", "qwen3", "phi3", "gpt_neox", "opt", "falcon_alibi", "gemma3", "phi", "gpt_bigcode", "cohere2", "glm4"),
    *("deepseek_v3_dense", "mixtral", "qwen3_moe", "gpt_oss", "gpt_neo", "mpt", "mamba2", "mamba", "lfm2", "jamba"),
)


#: One mesh for each family, in turn; tests/bench/generate_families.py tries every family on every mesh.
IN_TURN = ({"mesh": {"tp": 2}}, {"mesh": {"tp": 4}}, SPECS["pp=2"], {"mesh": {"dp": 2}, "data": {"zero": 3}})


@pytest.mark.parametrize(("name", "spec"), list(zip(FAMILIES, itertools.cycle(IN_TURN))), ids=FAMILIES)
def test_families_generate_with_a_cache_as_transformers_does(
    name: str, spec: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch = hf.build({**hf.FAMILIES, **hf_more.FAMILIES, **sequences.FAMILIES}[name])
    split = {"shard": {"use": "model" if model_plan.read(model) else "structure"}} if "tp" in spec["mesh"] else {}
    calls: tuple[dict[str, Any], ...] = ({}, {"temperature": 2.0, "top_k": 9, "top_p": 0.8})
    made = ours({**spec, **split}, *calls, model=model, batch=batch)
    for call, found in zip(calls, made, strict=True):  # each prompt alone: their MPT gives others where rows are filled
        chosen = [drawn.processors(call, [row]) for row in range(len(PROMPTS))]
        assert found == [theirs(model, [p], logits_processor=c)[0] for p, c in zip(PROMPTS, chosen, strict=True)]
    assert "whole sequence" not in capsys.readouterr().err


def steps_of(program: Program, sizes: Sizes) -> tuple[Program, Program]:
    assert isinstance(program.resize, Resizer)
    steps = compiler.generating(program.resize, program, sizes).steps
    assert steps is not None
    return steps


def caches_of(program: Any) -> dict[str, str]:
    return {b.name.removeprefix("cache_"): str(b.value) for b in program.buffers if b.cache}


@pytest.mark.parametrize("window", [5, 12, 24])
def test_a_layer_with_a_window_keeps_so_many_tokens_and_gives_what_it_would_with_all(window: int) -> None:
    """Gemma 2 has a layer with a window and one without: 16 places of prompts are more or fewer, 30 tokens go round."""
    model, batch = hf.build(hf.FAMILIES["gemma2"], sliding_window=window)
    prompts = [[5, 6, 7], list(range(20, 35))]
    program = compiled(model, batch, SPECS["tp=2"])
    (found,) = generated(program, model, {"prompts": prompts, "max_new_tokens": 30})
    assert found == [theirs(model, [p], 30)[0] for p in prompts]
    _, following = steps_of(program, Sizes(2, 16, 64))
    caches = caches_of(following)
    assert caches["0_keys"] == f"f64[2, 4@tp, {window}, 8]"
    assert caches["1_keys"] == "f64[2, 4@tp, 64, 8]"


STATES = {
    "mamba": {"conv_states_0": "f64[4@dp, 128@tp, 4]", "recurrent_states_0": "f64[4@dp, 128@tp, 4]"},
    "lfm2": {"conv_states_0": "f64[4@dp, 64@tp, 3]"},
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_recurrences_are_split_as_their_channels_are(name: str) -> None:
    model, batch = hf.build(hf_more.FAMILIES[name])
    spec = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
    _, following = steps_of(compiled(model, batch, spec), Sizes(4, 16, 64))
    found = caches_of(following)
    assert {f"0_{n}": x for n, x in STATES[name].items()}.items() <= found.items()


def test_a_token_sees_an_axis_in_the_digits_that_weights_are_split_by() -> None:
    """Nemotron-H has 2 groups of a scan and 4 key-value heads; a token's step alone does not show the groups."""
    model, batch = hf.build(sequences.FAMILIES["nemotron_h"])
    program = compiled(model, batch, {"mesh": {"tp": 8}, "shard": {"use": "structure"}})
    first, following = steps_of(program, Sizes(4, 16, 64))
    assert first.mesh == following.mesh
    assert [following.mesh.size(a) for a in following.mesh.digits("tp")] == [2, 2, 2]


def test_a_token_has_the_entries_and_causes_of_the_program_whose_weights_it_runs_on() -> None:
    """By itself the graph of one token suggests another group of weights for layer 0, which ranks do not divide."""
    model, batch = hf.build(hf.FAMILIES["mistral"])
    program = compiled(model, batch, {"mesh": {"tp": 2}, "shard": {"use": "structure"}})
    for step in steps_of(program, Sizes(4, 16, 64)):
        assert step.meta["shard"] == program.meta["shard"]
        assert all(f"# {line}" in step.text() for line in program.meta["shard"])
        assert not [
            n.name for n in step.stages[0].graph.nodes if "collective" in n.meta and n.meta["collective"].implicit
        ]


def test_weights_that_zero_3_gathers_in_fewer_bits_than_a_token_reads_them_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training reads Mamba's D in 32 bits, a token in all: its product was taken for that cast, and left out."""
    model, batch = hf.build(hf_more.FAMILIES["mamba"], num_hidden_layers=1)
    (found,) = ours({"mesh": {"dp": 2}, "data": {"zero": 3}}, {"max_new_tokens": 3}, model=model, batch=batch)
    assert found == theirs(model, tokens=3)
    said = capsys.readouterr().err
    assert "mixer.D is gathered in torch.float32, as the running program reads it, and here aten.mul.Tensor" in said


@pytest.mark.parametrize("how", ["weights", "compute"])
def test_logits_in_32_bits_of_a_model_in_16_may_differ_by_the_rounding_of_16(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mamba gives such: by the bound of 32 bits its cache was taken for a wrong one, and tokens ran whole rows."""
    model, batch = hf.build(hf_more.FAMILIES["mamba"], num_hidden_layers=1)
    spec: dict[str, Any] = {"mesh": {"dp": 2}}
    spec |= {"precision": {"compute": "bfloat16"}} if how == "compute" else {}
    ours(
        spec, {"max_new_tokens": 3}, model=model.to(torch.float32 if how == "compute" else torch.bfloat16), batch=batch
    )
    assert "whole sequence" not in capsys.readouterr().err


def test_a_pipeline_is_cut_for_tokens_where_it_is_for_training() -> None:
    """Of its own, a token's cheap scans would move Jamba's cut into another layer, away from the weights."""
    model, batch = hf.build(sequences.FAMILIES["jamba"])
    (found,) = ours(SPECS["pp=2"], {}, model=model, batch=batch)
    assert found == theirs(model)


def without_positions() -> Any:
    """GPT-2 that counts positions from the first place on, whatever is filled up there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Counting(GPT2LMHeadModel):
        def forward(self, input_ids: Any, attention_mask: Any = None, cache: Any = None, use_cache: Any = None) -> Any:
            named = {cache_argument(super()): cache}  # past_key_values before transformers 5.24
            return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache, **named)

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    return Counting(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)).double()


def test_a_model_that_is_another_with_padding_runs_whole_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """Found by trying it, with either kind of cache."""
    model = without_positions()
    ids = torch.arange(32).view(4, 8)
    program = shardc.compile(model, {"input_ids": ids}, {"shardc": 1, "mesh": {"dp": 1}}, forward=True, prove=False)
    (found,) = loopback(program.mesh, lambda mesh: program.forward(model, mesh=mesh).generate(PROMPTS, 4, stop=()))
    assert "with a cache Counting has other logits than without" in capsys.readouterr().err
    for prompt, new in zip(PROMPTS, found, strict=True):
        row = list(prompt)
        for token in new:
            assert token == int(model(torch.tensor([row])).logits[0, -1].argmax())
            row.append(token)


def test_a_cache_that_is_no_longer_the_same_kind_of_thing_is_no_cache() -> None:
    """What counts in Python would count once, while a token is traced; what grows has another size each time."""
    model, _ = hf.build(hf.FAMILIES["qwen3"])
    cache = caches.new_cache(model, caches.Now(4, torch.zeros(1, 2, dtype=torch.bool)))
    for i in (0, 1):
        cache.update(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), i)
    states, form = caches.split_cache(cache)
    assert list(states) == ["0.keys", "0.values", "1.keys", "1.values"]
    again = caches.join_cache(form, states, caches.Now(4))
    assert caches.checked_states(form, again).keys() == states.keys()
    again.layers[1].seen = 3
    with pytest.raises(ShardcError, match="a token changes what '1\\.seen' of its cache is, from None to 3"):
        caches.checked_states(form, again)


class Own(nn.Module):
    """A model of one's own: ids -> logits. causal: whether it sees only what is before."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(32, 16), nn.Embedding(20, 16), nn.Linear(16, 32)
        self.causal = causal

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)
        logits: Tensor = self.head(x)
        return logits


def own_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def own(causal: bool = True) -> tuple[Own, Any]:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8))
    batch = {"ids": ids, "labels": ids}
    model = Own(causal).double()
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"head": "column"}}
    return model, shardc.compile(model, batch, spec, loss=own_loss)


def test_a_model_of_ones_own_generates_by_whole_sequences() -> None:
    model, program = own()

    def work(mesh: Any) -> list[list[int]]:
        return program.engine(model, None, mesh=mesh).generate(PROMPTS, TOKENS)  # type: ignore[no-any-return]

    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert loopback(program.mesh, work) == [expected] * 4


def test_a_model_that_sees_what_comes_later_is_refused() -> None:
    model, program = own(causal=False)
    with pytest.raises(ShardcError, match="the model is not causal"):
        loopback(program.mesh, lambda mesh: program.engine(model, None, mesh=mesh).generate(PROMPTS, TOKENS))


def encoded(name: str) -> tuple[Any, Any, Any, list[list[int]]]:
    """A model with an encoder, its batch, prompts, and what transformers makes of each by itself."""
    model, batch = zoo.t5() if name == "t5" else hf.build(hf.FAMILIES[name])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": TOKENS}
    model.generation_config.forced_eos_token_id = None  # type: ignore[union-attr]
    if "input_features" in batch:
        features = batch["input_features"][:3]
        rows = [{"input_features": features[i : i + 1], "begin_suppress_tokens": None} for i in range(3)]
        start, prompts = 0, {"input_features": features}
    else:
        ids = [torch.tensor([p]) for p in PROMPTS]
        rows = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
        start, prompts = 1, PROMPTS
    model.eval()
    wanted = [model.generate(**row, **options)[0, start:].tolist() for row in rows]  # type: ignore[operator]
    return model.train(), batch, prompts, wanted


T5_WEIGHTS = {**dict.fromkeys(("*.q", "*.k", "*.v", "*.wi"), "column"), **dict.fromkeys(("*.o", "*.wo"), "row")}
ENCODED: dict[str, list[dict[str, Any]]] = {
    "t5": [{"mesh": {"tp": 2}, "shard": T5_WEIGHTS}, {"mesh": {"dp": 2, "pp": 2}, "pipeline": STAGES}],
    "bart": [{"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 3}}],
    "whisper": [{"mesh": {"tp": 2}, "shard": {"use": "structure"}}],
}


@pytest.mark.parametrize("name", ENCODED)
def test_encoder_decoders_generate_as_transformers_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts are the encoder's, filled up on their right; the decoder begins with its start token."""
    model, batch, prompts, wanted = encoded(name)
    for spec in ENCODED[name]:
        (found,) = ours(spec, {"prompts": prompts}, model=model, batch=batch)
        assert found == wanted
    assert "whole sequence" not in capsys.readouterr().err


def test_an_encoder_runs_once_and_its_keys_are_split_and_stay() -> None:
    model, batch = zoo.t5()
    of_ids = [(name, (2, 16), torch.int64) for name in ("input_ids", "attention_mask")]
    spec = {"mesh": {"dp": 2, "tp": 2}, "shard": T5_WEIGHTS}
    _, following = steps_of(compiled(model, batch, spec), Sizes(2, 1, 64, tuple(of_ids)))
    assert caches_of(following)["cross_attention_cache_0_keys"] == "f64[2@dp, 8@tp, 16, 8]"
    assert {b.name for b in following.buffers if b.cache and not b.updated} == {
        f"cache_cross_attention_cache_{i}_{kind}" for i in (0, 1) for kind in ("keys", "values")
    }
    used = {n.name for n in following.stages[0].graph.find_nodes(op="placeholder") if n.users}
    assert {p.fqn.split(".")[0] for p in following.params if p.name in used} == {"shared", "decoder"}


def test_a_decoder_begins_with_what_is_given() -> None:
    model, batch, prompts, wanted = encoded("t5")
    given = {"input_ids": prompts, "decoder_input_ids": [[0, *row[:2]] for row in wanted]}
    (found,) = ours({"mesh": {"dp": 2}}, {"prompts": given, "max_new_tokens": 4}, model=model, batch=batch)
    assert found == [row[2:6] for row in wanted]


def test_what_is_given_to_an_encoder_has_to_be_said_for_every_row() -> None:
    begun: Any = {"input_ids": [[1], [2]], "decoder_input_ids": [[0], [0, 5]]}
    with pytest.raises(ShardcError, match=r"decoder_input_ids of 2 rows and \[1, 2\] tokens"):
        Prompts.of(begun).for_decoder(0)
    with pytest.raises(ShardcError, match="configuration has no decoder_start_token_id"):
        Prompts.of([[1]]).for_decoder(None)
    with pytest.raises(ShardcError, match="input_features, mask have different numbers of rows"):
        Prompts.of({"input_features": torch.zeros(2, 3, 4), "mask": torch.zeros(3, 4)})
    with pytest.raises(ShardcError, match="LlamaForCausalLM has no encoder, which input_features would be for"):
        ours(SPECS["one"], {"prompts": {"input_features": torch.zeros(2, 3, 4)}})


def test_a_program_for_evaluating_generates_too() -> None:
    model, batch = llama()
    program = shardc.compile(model, batch, {"shardc": 1, **SPECS["tp=2"]}, forward=True, prove=False)
    made = loopback(program.mesh, lambda mesh: program.forward(model, mesh=mesh).generate(PROMPTS, TOKENS, stop=()))
    assert made == [theirs(model)] * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number of at least 1, not 0"),
    ({"temperature": -1.0}, "temperature: must be a number of at least 0, not -1.0"),
    ({"temperature": 1.0, "top_p": 1.5}, "top_p: must be above 0 and at most 1, not 1.5"),
    ({"temperature": 1.0, "top_k": 0}, "top_k: must be a whole number of at least 1, not 0"),
    ({"top_k": 3}, "temperature 0 does not sample"),
    ({"prompts": []}, "there is no prompt"),
    ({"prompts": [[1], []]}, "prompt 1 has no token"),
    ({"prompts": ["Once upon"]}, "a prompt is a str, not a list of token ids"),
]


@pytest.mark.parametrize(("options", "error"), WRONG, ids=[e for _, e in WRONG])
def test_what_cannot_be_asked_for(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ShardcError, match=error):
        ours(SPECS["one"], options)


def test_products_of_8_bits_generate_the_same_tokens_on_every_mesh() -> None:
    """Rounded by rows, a token's numbers are its own; of one scale for all tokens they are not."""
    one, split = (ours({**SPECS[n], "precision": {"products": "fp8-rowwise"}}, {})[0] for n in ("one", "tp=2"))
    assert one == split
    assert one != theirs(llama()[0])
    with pytest.raises(ShardcError, match="fp8-tensorwise has one scale for all tokens that are computed at once"):
        ours({**SPECS["one"], "precision": {"products": "fp8-tensorwise"}}, {})


def test_a_program_that_was_loaded_has_no_model_to_compile(tmp_path: Any) -> None:
    model, batch = llama()
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False).save(tmp_path)
    program = shardc.load(tmp_path)
    with pytest.raises(ShardcError, match="a loaded program has no model to compile"):
        loopback(program.mesh, lambda mesh: program.engine(model, None, mesh=mesh).generate(PROMPTS, TOKENS))


def test_ranks_that_ask_for_different_things_are_told() -> None:
    model, _ = llama()
    program = of_llama(SPECS["tp=2"])

    def work(mesh: Any) -> None:
        program.engine(model, None, mesh=mesh).generate([[1 + mesh.rank]])

    with pytest.raises(ShardcError, match="what is generated"):
        loopback(program.mesh, work)


def test_the_cache_has_the_name_that_the_model_gives_it() -> None:
    """transformers 5.24 calls it `cache`; with only the old name known every token ran the whole sequence."""

    class Renamed(nn.Module):
        config = object()

        def forward(self, input_ids: torch.Tensor, cache: Any = None) -> None: ...

    class Before(nn.Module):
        config = object()

        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> None: ...

    assert not no_cache(Renamed())
    assert not no_cache(Before())
    assert "takes no cache of keys and values" in no_cache(Own())
