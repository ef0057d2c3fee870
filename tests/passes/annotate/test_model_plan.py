"""`shard: {use: model}`: every word of transformers' plans, equality and collectives of models that bring one, errors,
overrides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

import shardc
from shardc.api import Program
from shardc.ir.placement import REPLICATE, Shard
from shardc.passes.annotate import model_plan
from tests import zoo
from tests.zoo import HIDDEN, VOCAB, Built

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}


def causal(config: type[Any], **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        experts = {"experts_implementation": "batched_mm"} if "num_local_experts" in settings else {}
        model = transformers.AutoModelForCausalLM.from_config(config(**{**TINY, **settings}), **experts)
        return zoo.ready(model, torch.float64), {"input_ids": zoo.tokens(), "labels": zoo.labels()}

    return build


def compiled(build: Callable[[], Built], **spec: Any) -> Program:
    with zoo.Wide():
        model, batch = build()
        return shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "model"}, **spec})


def forward(program: Program) -> Counter[str]:
    """Forward's collectives over tp by kind, without the loss's two small ones."""
    found = [n.meta["collective"] for s in program.stages for n in s.graph.nodes if "collective" in n.meta]
    return Counter(
        c.kind for c in found if "tp" in c.axes and c.kind != "none" and "loss over split classes" not in c.cause
    )


def check_equal(program: Program) -> None:
    report = program.verify()
    assert report.ok, report.findings


def split(program: Program, name: str) -> Shard | None:
    found = program.param(name).layout["tp"]
    assert found == REPLICATE or isinstance(found, Shard)
    return found if isinstance(found, Shard) else None


# --- models that bring a plan

MODELS: dict[str, tuple[Callable[[], Built], int]] = {  # all_reduces of forward: the embedding's, and two a layer
    "llama": (causal(transformers.LlamaConfig, **GQA), 5),
    "mistral": (causal(transformers.MistralConfig, **GQA), 5),
    "qwen2": (causal(transformers.Qwen2Config, num_key_value_heads=2), 5),
    "qwen3": (causal(transformers.Qwen3Config, **GQA), 5),  # norms over each head
    "gemma2": (causal(transformers.Gemma2Config, query_pre_attn_scalar=16, **GQA), 5),  # tied head
    "phi3": (causal(transformers.Phi3Config, num_key_value_heads=2), 5),  # fused weights, which the plan gathers
    "starcoder2": (causal(transformers.Starcoder2Config, num_key_value_heads=2), 5),  # biases
    "nemotron": (causal(transformers.NemotronConfig, **GQA), 5),
    "granite": (causal(transformers.GraniteConfig, num_key_value_heads=2), 5),
    "mixtral": (causal(transformers.MixtralConfig, num_local_experts=4, **GQA), 5),
    "phi": (causal(transformers.PhiConfig), 3),  # parallel blocks: attention and MLP are summed before they are reduced
    # as well; before transformers 5.24 its plan left the embedding whole
    "gpt_neox": (
        causal(transformers.GPTNeoXConfig),
        2 + ("embed_in" in (transformers.GPTNeoXConfig.base_model_tp_plan or {})),
    ),
    "olmo2": (
        causal(transformers.Olmo2Config, num_key_value_heads=2),
        9,
    ),  # norms over all heads: two sums of one number a token
}


if not transformers.NemotronConfig.base_model_tp_plan:  # it has one in transformers 5.24
    del MODELS["nemotron"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_its_own_plan_is_equal_and_as_good_as_megatron(name: str) -> None:
    build, sums = MODELS[name]
    program = compiled(build)
    assert forward(program) == Counter(all_reduce=sums)
    assert not [n for n in program.notes if "gathered" in n]
    check_equal(program)


@pytest.mark.parametrize(
    ("name", "pinned"), [("llama", ""), ("phi3", ""), ("gemma2", "model.layers.*.{self_attn,mlp}")]
)
def test_sequence_parallel_beside_a_plan(name: str, pinned: str) -> None:
    """Gemma 2 norms what a block puts out before it is added: that it is split there has to be said."""
    activations = {m: {1: "tp"} for m in ("model.embed_tokens", pinned) if m}
    program = compiled(MODELS[name][0], mesh={"dp": 2, "tp": 2}, activations=activations)
    assert forward(program) == Counter(reduce_scatter=5, all_gather=5)
    check_equal(program)


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2", "gpt_neox", "mixtral"])
def test_what_it_prints_is_a_spec_that_says_the_same(name: str) -> None:
    build = MODELS[name][0]
    program = compiled(build)
    text = "shardc: 1\nmesh: {tp: 2}\nshard:\n" + "\n".join(program.meta["shard"]) + "\n"
    with zoo.Wide():
        written = shardc.compile(*build(), shardc.Spec.parse(text))
    assert [(p.fqn, p.layout) for p in written.params] == [(p.fqn, p.layout) for p in program.params]
    assert all(f"# {line}" in str(program) for line in program.meta["shard"])


def test_fused_weights_are_split_as_their_use_shows() -> None:
    program = compiled(MODELS["phi3"][0])
    assert split(program, "model.layers.0.self_attn.qkv_proj.weight") == Shard(0, 1, (64, 32, 32))
    assert split(program, "model.layers.0.mlp.gate_up_proj.weight") == Shard(0, 2)
    assert [line.strip() for line in program.meta["shard"]] == [
        "model.embed_tokens: vocab",
        '"model.layers.*.self_attn.o_proj": row',
        '"model.layers.*.self_attn.qkv_proj.weight": {0: {axis: tp, sections: [64, 32, 32]}}',
        '"model.layers.*.mlp.gate_up_proj.weight": {0: {axis: tp, split: 2}}',
        '"model.layers.*.mlp.down_proj": row',
        "lm_head: column",
    ]


def test_causes_cite_the_spec_and_the_plans_entry(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("shardc: 1\nmesh: {tp: 2}\nshard: {use: model}\n")
    with zoo.Wide():
        program = shardc.compile(*MODELS["llama"][0](), file)
    assert "spec.yaml:3:9 use: model 'model.layers.*.self_attn.o_proj: rowwise'" in str(program)


def test_experts_go_where_the_models_plan_says(tmp_path: Path) -> None:
    """Over an axis `ep` that the spec leaves free; the same as the entries written out. Entries of one's own win."""
    file = tmp_path / "spec.yaml"
    file.write_text("shardc: 1\nmesh: {ep: 2, tp: 2}\nshard: {use: model}\n")
    with zoo.Wide():
        program = shardc.compile(*MODELS["mixtral"][0](), file)
    p = program.param("model.layers.0.mlp.experts.gate_up_proj")
    assert p.layout.items == (("ep", Shard(0)), ("tp", Shard(1, 2)))
    assert "spec.yaml:3:9 use: model, experts 'model.layers.*.mlp.experts'" in str(program)
    check_equal(program)
    entries = [{"match": "*.mlp.experts", "axis": "ep"}]
    assert compiled(MODELS["mixtral"][0], mesh={"ep": 2, "tp": 2}, experts=entries).param(p.name).layout == p.layout
    data = compiled(
        MODELS["mixtral"][0], mesh={"ep": 2, "dp": 2, "tp": 1}, experts=[{"match": "*.mlp.experts", "axis": "dp"}]
    )
    assert data.param(p.name).layout.items == (("dp", Shard(0)),)
    used = compiled(MODELS["mixtral"][0], mesh={"ep": 2}, shard={"use": {"plan": "model", "axis": "ep"}})
    assert not used.spec.experts


@pytest.mark.parametrize("plan", ["model", "structure"])
def test_a_mesh_without_tp_takes_what_the_plan_has_for_its_axes(plan: str, tmp_path: Path) -> None:
    """Experts over `ep`, and nothing over the `tp` that is not there; with both axes, both."""
    file = tmp_path / "spec.yaml"
    for mesh, want in (
        ("dp: 2, ep: 2", (("ep", Shard(0)),)),
        ("ep: 2, tp: 2", (("ep", Shard(0)), ("tp", Shard(1, 2)))),
    ):
        file.write_text(f"shardc: 1\nmesh: {{{mesh}}}\nshard: {{use: {plan}}}\n")
        with zoo.Wide():
            program = shardc.compile(*MODELS["mixtral"][0](), file)
        assert program.param("model.layers.0.mlp.experts.gate_up_proj").layout.shards() == list(want)
        assert f"spec.yaml:3:9 use: {plan}, experts 'model.layers.*.mlp.experts'" in str(program)
        check_equal(program)
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").spec == program.spec


def test_a_plan_that_has_nothing_for_the_meshs_axes() -> None:
    for plan in ("model", "structure"):
        what = f"`use: {plan}` splits weights over 'tp', which the mesh does not have, and finds no experts for 'ep'"
        with pytest.raises(shardc.ShardcError, match=what) as e:
            shardc.compile(
                *MODELS["llama"][0](), {"shardc": 1, "mesh": {"dp": 2, "ep": 2}, "shard": {"use": plan}}, prove=False
            )
        assert e.value.fix == f"write use: {{plan: {plan}, axis: ep}}, or add tp to the mesh"


# --- words


def test_every_style_of_transformers_is_known() -> None:
    assert set(ALL_PARALLEL_STYLES) <= set(model_plan.WORDS)


class Carrier(nn.Module):
    """Two layers, an embedding and a head, with a plan of its own."""

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.tp_plan = {k.replace("__", "."): v for k, v in plan.items()}
        self.embed, self.norm = nn.Embedding(VOCAB, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, VOCAB)
        self.table = nn.Parameter(torch.zeros(8, 32))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[ids % 8]
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def carrier(**plan: str) -> Callable[[], Built]:
    return lambda: (zoo.ready(Carrier(**plan), torch.float64), {"ids": zoo.tokens(), "labels": zoo.labels()})


WORDS = [  # the plan, and the splits it comes to
    ({"head": "colwise"}, {"head.weight": Shard(0), "head.bias": Shard(0)}),
    ({"head": "colwise_rep"}, {"head.weight": Shard(0), "head.bias": Shard(0)}),
    ({"head": "colwise_gather_output"}, {"head.weight": Shard(0), "head.bias": Shard(0)}),  # the loss takes it split
    ({"head": "rowwise_split_input"}, {"head.weight": Shard(1)}),
    ({"head": "rowwise_rep"}, {"head.weight": Shard(1)}),
    ({"head__weight": "local_colwise"}, {"head.weight": Shard(0)}),
    ({"embed": "embedding_rowwise"}, {"embed.weight": Shard(0)}),
    ({"embed": "embedding_colwise"}, {"embed.weight": Shard(1)}),
    ({"embed": "replicate", "norm": "sequence_parallel", "up": "mla_kv_a_proj"}, {}),
    ({"down": "rowwise"}, {"down.weight": Shard(1)}),
    (
        {"up": "colwise", "down": "rowwise"},
        {"up.weight": Shard(0, 2), "up.bias": Shard(0, 2), "down.weight": Shard(1)},
    ),  # chunked
    (
        {"up": "packed_colwise", "down": "rowwise"},
        {"up.weight": Shard(0, 2), "up.bias": Shard(0, 2), "down.weight": Shard(1)},
    ),
    (
        {"up": "colwise_gather_output", "down": "rowwise_split_input"},
        {"up.weight": Shard(0, 2), "up.bias": Shard(0, 2), "down.weight": Shard(1)},
    ),
    ({"up": "packed_rowwise"}, {"up.weight": Shard(1, 2)}),
    ({"norm": "replicated_with_grad_allreduce", "down": "all_reduce"}, {}),
    ({"*": "rowwise"}, {"table": Shard(1), **{f"{m}.weight": Shard(1) for m in ("embed", "up", "down", "head")}}),
]


@pytest.mark.parametrize(("plan", "wanted"), WORDS, ids=[str(p) for p, _ in WORDS])
def test_words(plan: dict[str, str], wanted: dict[str, Shard]) -> None:
    program = compiled(carrier(**plan))
    given = {
        p.fqn: s
        for p in program.params
        if isinstance(s := p.layout["tp"], Shard) and "cause" in _placeholder(program, p.name).meta
    }
    assert given == wanted
    check_equal(program)


def _placeholder(program: Program, name: str) -> torch.fx.Node:
    return next(n for n in program.graph.nodes if n.name == name)


def test_parts_of_an_ordinary_model_keep_their_plans() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Carrier(up="colwise", down="rowwise")
            self.tp_plan = {"inner.head": "colwise"}

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            loss = self.inner(ids, labels)
            assert isinstance(loss, Tensor)
            return loss

    assert model_plan.read(Outer()) == {"inner.head": "colwise", "inner.up": "colwise", "inner.down": "rowwise"}


def test_a_weight_that_no_op_can_use_split_stays_whole_with_a_note() -> None:
    program = compiled(carrier(table="colwise", head="colwise"))
    assert split(program, "table") is None
    assert any("table stays whole: the op that uses it has no rule for its dim 0 split" in n for n in program.notes)


class Adapted(nn.Module):
    """LoRA by hand: a frozen layer one level below its name, beside two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, (out, into) = base.requires_grad_(False), base.weight.shape
        self.A, self.B = nn.Parameter(torch.randn(4, into).double() / 8), nn.Parameter(torch.randn(out, 4).double() / 8)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + (x @ self.A.T) @ self.B.T


def test_adapters_are_split_like_the_layers_they_stand_around() -> None:
    def build() -> Built:
        model, batch = MODELS["llama"][0]()
        for layer in model.model.layers:
            for name, base in [*layer.self_attn.named_children(), *layer.mlp.named_children()]:
                if isinstance(base, nn.Linear):
                    setattr(layer.self_attn if name[0] in "qkvo" else layer.mlp, name, Adapted(base))
        return model, batch

    program = compiled(build)
    column, row = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    lies = {
        f"{layer}.{n}": program.param(f"{layer}.{n}").layout["tp"]
        for layer in (column, row)
        for n in ("base.weight", "A", "B")
    }
    assert {n: p for n, p in lies.items() if isinstance(p, Shard)} == {
        f"{column}.base.weight": Shard(0),
        f"{column}.B": Shard(0),
        f"{row}.base.weight": Shard(1),
        f"{row}.A": Shard(1),
    }
    assert forward(program) == {
        "all_reduce": 5
    }  # as without: B is linear, so what A leaves to be summed waits for the sum of the layer
    check_equal(program)


# --- beside it, and wrong


def test_entries_beside_a_plan_win() -> None:
    shard = {"use": "model", "*.layers.1.mlp.*_proj": "replicate", "lm_head": "row"}
    program = compiled(MODELS["llama"][0], shard=shard)
    assert split(program, "model.layers.1.mlp.up_proj.weight") is None
    assert split(program, "model.layers.0.mlp.up_proj.weight") == Shard(0)
    assert split(program, "lm_head.weight") == Shard(1)
    assert program.meta["shard"][:2] == ['  "*.layers.1.mlp.*_proj": replicate', "  lm_head: row"]
    check_equal(program)


def test_fewer_key_value_heads_than_ranks() -> None:
    program = compiled(causal(transformers.LlamaConfig, **{**GQA, "num_key_value_heads": 1}))
    assert forward(program) == Counter(all_reduce=5)
    check_equal(program)


def test_heads_that_do_not_divide() -> None:
    build = causal(
        transformers.LlamaConfig, **{**GQA, "num_attention_heads": 6, "hidden_size": 96}
    )  # 6 heads, 2 of keys
    with pytest.raises(shardc.ShardcError, match="is not divisible by tp=4") as e:
        compiled(build, mesh={"tp": 4})
    assert "use: model 'model.layers.*.self_attn.q_proj: colwise'" in str(e.value)


def test_a_model_without_a_plan() -> None:
    with pytest.raises(shardc.ShardcError, match="the model has no tensor-parallel plan") as e:
        compiled(zoo.gpt)
    assert "write `use: structure`, or name the weights by patterns" in str(e.value)
    assert compiled(zoo.gpt, mesh={"tp": 1}).params  # an axis of one rank changes nothing


def test_an_unknown_word() -> None:
    with pytest.raises(shardc.ShardcError, match="the word 'colwize' for 'up', which shardc does not know") as e:
        compiled(carrier(up="colwize", down="rowwise"))
    assert "is it 'colwise'? write an entry for it beside `use`" in str(e.value)
    program = compiled(carrier(up="colwize", down="rowwise"), shard={"use": "model", "up": "replicate"})
    assert split(program, "down.weight") == Shard(1)
