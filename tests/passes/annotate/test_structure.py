"""`shard: {use: structure}`: what is split is found in the graph, equals one device, and reads as a user would write
it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.ir.placement import Shard
from shardc.rules.views import _in_parts, in_sections
from tests import equality, zoo
from tests.passes.annotate.test_model_plan import forward as forward_sums
from tests.zoo import Built, hf, hf_more, plain

USE = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}}


def compiled(build: Callable[[], Built], **spec: Any) -> Program:
    model, batch = build()
    with zoo.Wide():
        return shardc.compile(model, batch, {**USE, **spec})


# --- models beside the zoo's: nothing in them is named as anywhere else


class ViT(nn.Module):
    """Patches by a convolution, PyTorch's own encoder layers (fused q, k, v), a class token, a small head."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 5, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 6)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = self.body(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place)
        return F.cross_entropy(self.last(x[:, 0]), label)


class Mixer(nn.Module):
    """An MLP-mixer: MLPs over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.a, self.b = nn.Linear(16, 48), nn.Linear(48, 16)
        self.c, self.d = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(self.one(x).transpose(1, 2)))).transpose(1, 2)
        return (x + self.d(F.gelu(self.c(self.two(x))))).square().mean()


class Fused(nn.Module):
    """One attention layer whose q, k, v lie in one weight, in one of several ways; a gated MLP with a fused gate."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.groups = how, 4 if how in ("interleaved", "thirds") else 2
        self.n = nn.LayerNorm(32)
        self.w = nn.Linear(32, 8 * (4 + 2 * self.groups))
        self.o, self.g, self.d = nn.Linear(32, 32), nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h, g, y = 4, self.groups, self.w(self.n(x))
        if self.how == "interleaved":  # GPT-NeoX: every head its q, k, v
            q, k, v = y.view(b, s, h, 3, 8).unbind(3)
        elif self.how == "grouped":  # Falcon: every group its queries, one k, one v
            y = y.view(b, s, g, h // g + 2, 8)
            q, k, v = y[:, :, :, :-2].flatten(2, 3), y[:, :, :, -2], y[:, :, :, -1]
        elif self.how == "sliced":  # Phi-3: q, then k, then v, cut by slices
            q, k, v = (
                y[..., :32].view(b, s, h, 8),
                y[..., 32 : 32 + 8 * g].view(b, s, g, 8),
                y[..., 32 + 8 * g :].view(b, s, g, 8),
            )
        else:
            q, k, v = (t.view(b, s, h, 8) for t in y.chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=g != h)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, 32))
        gate, up = self.g(x).chunk(2, -1)
        return (x + self.d(F.silu(gate) * up)).square().mean()


class Convs(nn.Module):
    """A pair of convolutions around a group norm, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b, self.fc = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(F.relu(self.n(self.a(x)))).mean((2, 3))).square().mean()


class Plain(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(F.relu(x))
        return x.square().mean()


def of(model: Callable[[], nn.Module], *inputs: tuple[int, ...], labels: int = 0) -> Callable[[], Built]:
    def build() -> Built:
        generator = torch.Generator().manual_seed(5)
        batch = [torch.randn(s, generator=generator, dtype=torch.float64) for s in inputs]
        extra = [torch.randint(labels, (inputs[0][0],), generator=generator)] if labels else []
        return zoo.ready(model(), torch.float64), (*batch, *extra)

    return build


SEQ = (4, 8, 32)
CASES: dict[str, tuple[Callable[[], Built], list[str], Counter[str]]] = {
    "gpt": (
        zoo.gpt,
        [
            "wte: vocab",
            '"h.*.qkv.{weight,bias}": {0: {axis: tp, split: 3}}',
            '"h.*.{proj,out}": row',
            '"h.*.fc": column',
        ],
        Counter(all_reduce=5),  # the embedding's, and two a layer
    ),
    "llama": (
        zoo.llama,
        [
            "model.embed_tokens: vocab",
            '"model.layers.*.self_attn.{q_proj,k_proj,v_proj}": column',
            '"model.layers.*.self_attn.o_proj": row',
            '"model.layers.*.mlp.{gate_proj,up_proj}": column',
            '"model.layers.*.mlp.down_proj": row',
            "lm_head: column",
        ],
        Counter(all_reduce=5),
    ),
    "gpt2": (
        zoo.gpt2,  # Conv1D: weights are stored [in, out]
        [
            "transformer.wte: vocab",
            '"transformer.h.*.attn.c_attn.weight": {1: {axis: tp, split: 3}}',
            '"transformer.h.*.attn.c_attn.bias": {0: {axis: tp, split: 3}}',
            '"transformer.h.*.attn.c_proj": row',
            '"transformer.h.*.mlp.c_fc": column',
            '"transformer.h.*.mlp.c_proj": row',
        ],
        Counter(all_reduce=5),
    ),
    "bert": (
        zoo.bert,
        [
            "bert.embeddings.word_embeddings: vocab",
            '"bert.encoder.layer.*.attention.self.{query,key,value}": column',
            '"bert.encoder.layer.*.attention.output.dense": row',
            '"bert.encoder.layer.*.intermediate.dense": column',
            '"bert.encoder.layer.*.output.dense": row',
            "cls.predictions.bias: {0: tp}",
        ],
        Counter(all_reduce=5),
    ),
    "t5": (
        zoo.t5,
        [
            "shared: vocab",
            *(
                line
                for side, attn in (("encoder", ["Self"]), ("decoder", ["Self", "EncDec"]))
                for line in (
                    *(
                        x
                        for a in attn
                        for bias in [",relative_attention_bias" if a == "Self" else ""]
                        for x in (
                            f'"{side}.block.*.layer.*.{a}Attention.{{q,k,v{bias}}}": column',
                            f'"{side}.block.*.layer.*.{a}Attention.o": row',
                        )
                    ),
                    f'"{side}.block.*.layer.*.DenseReluDense.wi": column',
                    f'"{side}.block.*.layer.*.DenseReluDense.wo": row',
                )
            ),
        ],
        Counter(all_reduce=12),  # an embedding each, two a layer of the encoder, three of the decoder
    ),
    "vit": (
        of(ViT, (4, 3, 8, 8), labels=6),
        [
            '"body.layers.*.self_attn.{in_proj_weight,in_proj_bias}": {0: {axis: tp, split: 3}}',
            '"body.layers.*.self_attn.out_proj": row',
            '"body.layers.*.linear1": column',
            '"body.layers.*.linear2": row',
        ],
        Counter(all_reduce=4),
    ),
    "vit, norm last": (
        of(lambda: ViT(norm_first=False), (4, 3, 8, 8), labels=6),
        [
            '"body.layers.*.self_attn.{in_proj_weight,in_proj_bias}": {0: {axis: tp, split: 3}}',
            '"body.layers.*.self_attn.out_proj": row',
            '"body.layers.*.linear1": column',
            '"body.layers.*.linear2": row',
        ],
        Counter(all_reduce=4),
    ),
    "mixer": (of(Mixer, (4, 16, 32)), ['"{a,c}": column', '"{b,d}": row'], Counter(all_reduce=2)),
    "mlp": (zoo.ALL["mlp"], ["up: column", "down: row"], Counter(all_reduce=1)),
    "deep mlp": (
        of(lambda: Plain(32, 64, 32, 64, 32), (4, 32)),
        ['"layers.{0,2}": column', '"layers.{1,3}": row'],
        Counter(all_reduce=2),
    ),
    "convs": (of(Convs, (4, 3, 8, 8)), ["a: column", '"n.{weight,bias}": {0: tp}', "b: row"], Counter(all_reduce=1)),
    "thirds": (
        of(lambda: Fused("thirds"), SEQ),
        [
            '"w.{weight,bias}": {0: {axis: tp, split: 3}}',
            '"{o,d}": row',
            '"g.{weight,bias}": {0: {axis: tp, split: 2}}',
        ],
        Counter(all_reduce=2),
    ),
    "interleaved": (
        of(lambda: Fused("interleaved"), SEQ),
        ["w: column", '"{o,d}": row', '"g.{weight,bias}": {0: {axis: tp, split: 2}}'],
        Counter(all_reduce=2),
    ),
    "grouped": (
        of(lambda: Fused("grouped"), SEQ),
        ["w: column", '"{o,d}": row', '"g.{weight,bias}": {0: {axis: tp, split: 2}}'],
        Counter(all_reduce=2),
    ),
    "sliced": (
        of(lambda: Fused("sliced"), SEQ),
        [
            '"w.{weight,bias}": {0: {axis: tp, sections: [32, 16, 16]}}',
            '"{o,d}": row',
            '"g.{weight,bias}": {0: {axis: tp, split: 2}}',
        ],
        Counter(all_reduce=2),
    ),
    # by experts: two sums of 1 KB for the router's softmax, where columns would sum its result's gradient, of 8 KB
    "moe": (zoo.ALL["moe"], ['"{up,down}": {0: tp}', "embed: vocab", '"{router,head}": column'], Counter(all_reduce=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_it_chooses_is_equal_and_as_good_as_megatron(name: str) -> None:
    build, lines, sums = CASES[name]
    program = compiled(build)
    assert [line.strip() for line in program.meta["shard"]] == lines
    assert forward_sums(program) == sums
    report = program.verify()
    assert report.ok, report.findings


@pytest.mark.parametrize("name", CASES)
def test_what_it_prints_is_a_spec_that_says_the_same(name: str) -> None:
    build = CASES[name][0]
    program = compiled(build)
    text = "shardc: 1\nmesh: {tp: 2}\nshard:\n" + "\n".join(program.meta["shard"]) + "\n"
    model, batch = build()
    with zoo.Wide():
        written = shardc.compile(model, batch, shardc.Spec.parse(text))
    assert [(p.fqn, p.layout) for p in written.params] == [(p.fqn, p.layout) for p in program.params]
    for line in program.meta["shard"]:
        assert f"# {line}" in str(program)


def test_entries_beside_it_win_and_keep_their_partners_whole() -> None:
    program = compiled(zoo.llama, shard={"use": "structure", "*.layers.0.mlp.down_proj": "replicate", "lm_head": "row"})
    split = {p.fqn for p in program.params if p.layout["tp"] != shardc.ir.placement.REPLICATE}
    assert not any(".0.mlp." in name for name in split)
    assert "model.layers.1.mlp.gate_proj.weight" in split
    assert program.param("lm_head.weight").layout["tp"] == shardc.ir.placement.Shard(1)
    assert program.meta["shard"][:2] == ['  "*.layers.0.mlp.down_proj": replicate', "  lm_head: row"]
    report = program.verify()
    assert report.ok, report.findings


def test_the_axis_may_have_another_name_and_an_axis_of_one_changes_nothing() -> None:
    program = compiled(zoo.gpt, mesh={"x": 2}, shard={"use": {"plan": "structure", "axis": "x"}})
    assert program.param("h.0.fc.weight").layout["x"] == shardc.ir.placement.Shard(0)
    assert '"h.*.fc": {style: column, axis: x}' in "\n".join(program.meta["shard"])
    one = compiled(zoo.gpt, mesh={"tp": 1})
    assert not forward_sums(one)
    assert "shard" not in one.meta


def test_with_data_and_sequence_parallel() -> None:
    program = compiled(zoo.gpt, mesh={"dp": 2, "tp": 2}, activations={"wte": {1: "tp"}})
    report = program.verify()
    assert report.ok, report.findings
    assert forward_sums(program) == Counter(
        reduce_scatter=5, all_gather=5
    )  # the embedding's; two each a layer; the head's


def test_sizes_that_do_not_divide_stay_whole_with_a_note() -> None:
    program = compiled(of(lambda: Plain(32, 63, 32, 64, 32), (4, 32)))
    assert [line.strip() for line in program.meta["shard"]] == ["layers.2: column", "layers.3: row"]
    assert any(
        "layers.*.weight, layers.*.bias are left whole: 63 (of [63, 32]) is not divisible by tp=2" in n
        for n in program.notes
    ), program.notes


def test_nothing_to_split_is_an_error() -> None:
    with pytest.raises(
        shardc.ShardcError, match="`use: structure` finds nothing to split: no weight's split can be followed"
    ) as e:
        compiled(
            of(
                lambda: nn.Sequential(
                    nn.LayerNorm(8), nn.Flatten(0), nn.LayerNorm(32), nn.Flatten(0), nn.Linear(32, 1)
                ),
                (4, 8),
            )
        )
    assert "name the weights by patterns" in str(e.value)


def test_what_stops_a_split_is_named_with_its_line_and_gathered_where_weights_are_named() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.down(self.norm(self.up(x)).relu()) - x).square().mean()

    torch.manual_seed(0)
    model, x = Between().double(), torch.rand(4, 16, dtype=torch.float64)
    with pytest.raises(shardc.ShardcError) as e:
        shardc.compile(model, x, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}})
    assert re.search(r"or to the loss: layer_norm in norm \(test_structure.py:\d+\) needs it whole$", e.value.what)
    assert e.value.fix == "name the weights by patterns: values that are needed whole are then gathered"

    program = shardc.compile(model, x, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}})
    loss = shardc.simulate(program, model, x).loss
    torch.testing.assert_close(loss, model(x).detach(), rtol=1e-12, atol=0.0)
    assert any("norm" in note and "is gathered over tp" in note for note in program.notes)


def test_recurrent_layers_stay_whole_with_a_note() -> None:
    model, batch = plain.lstm()
    program = shardc.compile(model, batch, USE, prove=False)
    note = "spec: shard.use use: structure: rnn left whole: no rule splits a weight of aten.lstm.input"
    assert note in program.notes, program.notes
    assert [p.fqn for p in program.params if p.value.layout.shards()] == ["embed.weight", "head.weight", "head.bias"]
    spec = {**USE, "shard": {"rnn.weight_ih_l0": {0: "tp"}, "head": "column"}}
    program = shardc.compile(model, batch, spec, prove=False)
    gathers = [n for n in program.notes if "is gathered over tp" in n]
    assert any(": rnn.weight_ih_l0 f32[32, 8] is gathered over tp, because aten.lstm.input" in n for n in gathers)
    assert "    rnn_weight_ih_l0_whole = ops.all_gather(rnn_weight_ih_l0, " in str(program)


def test_causes_name_the_modules_between_which_a_split_goes() -> None:
    text = str(compiled(zoo.llama))
    assert "use: structure 'model.layers.0.self_attn.{q_proj,k_proj,v_proj} -> model.layers.0.self_attn.o_proj'" in text
    assert "use: structure 'model.embed_tokens.weight: vocabulary'" in text


def test_heads_that_do_not_divide_leave_their_pair_whole_with_a_note() -> None:
    """The first stages have fewer heads than ranks, and no query heads that could share them."""
    one = equality.reference(lambda: hf.build(hf_more.FAMILIES["segformer"]))
    program = one.compile({"shardc": 1, "mesh": {"tp": 4}, "shard": {"use": "structure"}})
    assert [n for n in program.notes if "2 (of [8, 256, 2, 8]) is not divisible by tp=4" in n and "left whole" in n]
    equality.assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)


# --- heads of a scan


@pytest.mark.parametrize("tp", [2, 4])
def test_heads_of_a_scan_are_split_with_the_parts_of_the_projection_that_makes_them(tp: int) -> None:
    """Mamba 2: in_proj makes gate | x | B | C | step, of which x | B | C go through one depthwise convolution. Each
    part is split by itself; on four ranks two share each of the two groups of B and C.
    """
    model, batch = hf.build(hf_more.FAMILIES["mamba2"], num_hidden_layers=1)
    with zoo.Wide():
        program = shardc.compile(model, batch, {**USE, "mesh": {"tp": tp}})
    values = {p.fqn.partition("mixer.")[2]: str(p.value).partition(" ~")[0] for p in program.params}
    group, head = ("tp", "tp") if tp == 2 else ("tp.0", "tp.0@tp.1/2")
    assert values["in_proj.weight"] == f"f64[128|128|8|8|8@{group}, 64]"
    assert values["conv1d.weight"] == f"f64[128|8|8@{group}, 1, 4]"
    assert values["A_log"] == f"f64[8@{head}]"
    assert values["out_proj.weight"] == f"f64[64, 128@{head}]"
    # the embedding, the mixer's output; and its norm, which is over the ranks' groups before transformers 5.24
    whole_norm = not hasattr(model.get_submodule("backbone.layers.0.mixer.norm"), "group_size")
    assert forward_sums(program) == {"all_reduce": 2 + whole_norm}
    assert len(program.notes) == (tp == 4)  # ranks that share a group make all of its x
    report = program.verify()
    assert report.worst <= 1e-12, str(report)
    assert program.prove().ok


def test_parts_in_sections_of_their_own() -> None:
    p = Shard(0, 1, (128, 128, 8, 8, 8))
    assert _in_parts(p, [128, 144, 8]) == (Shard(0), Shard(0, 1, (128, 8, 8)), Shard(0))
    assert _in_parts(p, [256, 16, 8]) == (Shard(0, 2), Shard(0, 2), Shard(0))
    assert _in_parts(p, [128, 132, 20]) is None
    assert in_sections(Shard(0, 2), 16) == (8, 8)


class Blocks(nn.Module):
    """Layers that are Sequentials: the number of a linear layer is its role, and no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_layers_of_sequentials_are_written_once() -> None:
    program = shardc.compile(Blocks(), {"x": torch.randn(8, 8)}, USE)
    assert program.meta["shard"] == ['  "blocks.*.0": column', '  "blocks.*.2": row']
    again = shardc.compile(
        Blocks(), {"x": torch.randn(8, 8)}, {**USE, "shard": {"blocks.*.0": "column", "blocks.*.2": "row"}}
    )
    assert [p.layout for p in again.params] == [p.layout for p in program.params]
