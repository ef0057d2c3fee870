"""Wrong specs for a right model: each mistake is one error with place, text and fix, and all come at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.placement import Layout, Shard
from tests import zoo


class Net(nn.Module):
    """Tied head, LayerNorm, one attention of 6 heads over 24 features."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 24)
        self.ln = nn.LayerNorm(24)
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.o = nn.Linear(24, 24)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        y = self.ln(x)
        q, k, v = (m(y).unflatten(-1, (6, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def compiled(spec: dict[str, Any], batch: int = 8) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(Net(), {"ids": torch.randint(0, 32, (batch, 12))}, {"shardc": 1, **spec}, prove=False)


TP: dict[str, Any] = {"mesh": {"tp": 2}}
WRONG: list[tuple[str, dict[str, Any], str, str, str]] = [
    # name, spec, where, what, fix
    (
        "unmatched",
        {**TP, "shard": {"attn.*": "column"}},
        'shard."attn.*"',
        "matches no parameter and no module",
        "see the model's names",
    ),
    ("misspelt", {**TP, "shard": {"haed": "column"}}, "shard.haed", "matches no parameter", "did you mean 'head'"),
    (
        "shadowed",
        {**TP, "shard": {"{q,k,v}": "column", "q": "row", "o": "row"}},
        "shard.q",
        "never wins",
        "delete it, or move it up",
    ),
    (
        "tied two ways",
        {**TP, "shard": {"emb.weight": {1: "tp"}, "head.weight": {0: "tp"}}},
        "shard.",
        "two ways: f32[32, 24@tp] and f32[32@tp, 24]",
        "split it once",
    ),
    (
        "style without meaning",
        {**TP, "shard": {"ln": "column"}},
        "shard.ln",
        "is not a weight that 'column' can split: it is used by aten.layer_norm.default, whose weights no rule splits",
        "delete it, or narrow the pattern",
    ),
    (
        "dims of a module",
        {**TP, "shard": {"q": {0: "tp"}}},
        "shard.q",
        "names a module, but dims belong to one parameter",
        "'q.weight'",
    ),
    (
        "weight does not divide",
        {"mesh": {"tp": 5}, "shard": {"q": "column"}},
        "shard.q",
        "q.weight, q.bias: 6 heads of 4 are not divisible by tp=5",
        "make it 5 or 10 heads, or tp=3 or 6",
    ),
    (
        "no such dim",
        {**TP, "shard": {"q.weight": {2: "tp"}}},
        'shard."q.weight"',
        "dim 2 does not exist",
        "its dims are 0 to 1",
    ),
    (
        "thirds do not divide",
        {**TP, "shard": {"q.weight": {0: {"axis": "tp", "split": 9}}}},
        'shard."q.weight"',
        "in 9 parts",
        "18 or 36",
    ),
    (
        "sections do not sum",
        {**TP, "shard": {"q.weight": {0: {"axis": "tp", "sections": [8, 8]}}}},
        'shard."q.weight"',
        "do not sum",
        "",
    ),
    (
        "heads do not divide",
        {"mesh": {"tp": 4}, "shard": {"{q,k,v}": "column", "o": "row"}},
        "shard.",
        "6 heads (of [8, 12, 24]",
        "tp=3 or 6; or leave",
    ),
    (
        "batch does not divide",
        {"mesh": {"dp": 3}},
        "mesh.dp",
        "'ids': the batch of 8 (dim 0) is not divisible by dp=3",
        "6 or 9, or dp=2 or 4",
    ),
    (
        "batch over two axes",
        {"mesh": {"dp": 2, "dp_x": 3}},
        "mesh.dp_x",
        "8 (dim 0) is not divisible by dp=2 × dp_x=3",
        "or dp_x=2 or 4",
    ),
    (
        "microbatches do not divide",
        {"mesh": {"dp": 2}, "batch": {"microbatches": 3}},
        "batch.microbatches",
        "input 'ids': the batch of 8 (dim 0) is not divisible by dp=2 × microbatches=3",
        "make it 6 or 12, or microbatches=2 or 4",
    ),
    (
        "more ranks than rows",
        {"mesh": {"dp": 16}},
        "mesh.dp",
        "8 (dim 0) is not divisible by dp=16",
        "make it 16, or dp=8",
    ),
    (
        "structure",
        {"mesh": {"tp": 5}, "shard": {"use": "structure"}},
        "shard.use",
        "is not divisible by tp=5",
        "another number of ranks for tp",
    ),
    (
        "no such input",
        {"mesh": {"dp": 2}, "batch": {"dims": {"idz": 0}}},
        "batch.dims.idz",
        "matches no input",
        "did you mean 'ids'",
    ),
    (
        "no such input to pad",
        {"mesh": {"dp": 2}, "batch": {"pad": {"idz": 0}}},
        "batch.pad.idz",
        "matches no input",
        "did you mean 'ids'",
    ),
    ("no such batch dim", {"mesh": {"dp": 2}, "batch": {"dims": {"*": 2}}}, "batch.dims", "dim 2 does not exist", ""),
    (
        "no such module",
        {**TP, "activations": {"nowhere": {1: "tp"}}},
        "activations.nowhere",
        "matches no module that computes",
        "",
    ),
    (
        "sequence does not divide",
        {"mesh": {"tp": 5}, "activations": {"emb": {1: "tp"}}},
        "activations.emb",
        "12 is not divisible by tp=5",
        "10 or 15",
    ),
    (
        "shadowed activation",
        {**TP, "activations": {"{emb,ln}": {1: "tp"}, "ln": {0: "tp"}}},
        "activations.ln",
        "never wins",
        "move it up",
    ),
    (
        "contradiction",
        {**TP, "activations": {"emb": {1: "tp"}, "ln:in": {2: "tp"}}},
        'activations."ln:in"',
        "lays out differently",
        "annotations the same",
    ),
    (
        "strict",
        {**TP, "strict": True, "shard": {"o.weight": {1: "tp"}}},
        "",
        "implied by no annotation (strict: true)",
        "annotate",
    ),
]


@pytest.mark.parametrize(("spec", "where", "what", "fix"), [pytest.param(*row[1:], id=row[0]) for row in WRONG])
def test_wrong_specs(spec: dict[str, Any], where: str, what: str, fix: str) -> None:
    with pytest.raises(shardc.ShardcError) as caught:
        compiled(spec)
    texts = [(e.where, e.what, e.fix) for e in caught.value.errors]
    assert any(where in w and what in t and fix in f for w, t, f in texts), texts


def test_a_tied_weight_is_what_it_is_in_the_module_that_is_named() -> None:
    """The rows of a table are the columns of the head that is tied to it: `vocab` of one and `column` of the other are
    one split.
    """
    for shard in ({"emb": "vocab", "head": "column"}, {"head": "column"}, {"emb": "vocab"}):
        assert [s.dim for _, s in compiled({**TP, "shard": shard}).param("emb.weight").layout.shards()] == [0]


def test_one_error_for_all_weights_that_share_heads() -> None:
    with pytest.raises(shardc.ShardcError) as e:
        compiled({"mesh": {"tp": 5}, "shard": {"{q,k,v}": "column", "o": "row", "emb": "vocab"}})
    assert [(x.where, x.what) for x in e.value.errors] == [
        ("spec: shard.emb", "emb.weight of shape [32, 24]: 32 is not divisible by tp=5"),
        ('spec: shard."{q,k,v}"', "q.weight, q.bias, k.weight and 4 more: 6 heads of 4 are not divisible by tp=5"),
    ]


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(shardc.ShardcError) as caught:
        compiled(
            {"mesh": {"dp": 3, "tp": 2}, "shard": {"qq": "column", "ln": "row"}, "activations": {"nowhere": {1: "tp"}}}
        )
    assert len(caught.value.errors) == 4
    assert all(e.where and e.what and e.fix for e in caught.value.errors)


@pytest.mark.parametrize("n", [2, 4])
def test_styles_are_read_off_the_ops(n: int) -> None:
    """Conv1D keeps [in, out]: column is its dim 1 there, and dim 0 of a Linear; biases
    follow; embeddings split rows.
    """
    model, batch = zoo.gpt2()
    spec = {"shardc": 1, "mesh": {"tp": n}, "shard": {"*.wte": "vocab", "*.c_fc": "column", "*.mlp.c_proj": "row"}}
    program = shardc.compile(model, batch, spec, prove=False)

    def layout(name: str) -> Layout:
        return program.param(name).layout

    assert layout("transformer.h.0.mlp.c_fc.weight")["tp"] == Shard(1)
    assert layout("transformer.h.0.mlp.c_fc.bias")["tp"] == Shard(0)
    assert layout("transformer.h.0.mlp.c_proj.weight")["tp"] == Shard(0)
    assert layout("transformer.h.0.mlp.c_proj.bias").items == ()
    assert layout("lm_head.weight")["tp"] == Shard(0)


def test_a_batch_over_two_axes_takes_disjoint_digits() -> None:
    program = compiled({"mesh": {"dp_outer": 2, "dp": 2}, "data": {"axis": ["dp_outer", "dp"]}})
    assert program.inputs[0].layout["dp_outer"] == Shard(0, 1)
    assert program.inputs[0].layout["dp"] == Shard(0, 2)
    assert {b.axes for b in program.buckets} == {("dp_outer", "dp")}


class Dropped(nn.Module):
    """In nanoGPT's form: a module that does nothing with p = 0 is where the first
    activation of the blocks comes out.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.emb, self.drop, self.norm, self.head = nn.Embedding(8, 4), nn.Dropout(p), nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.norm(self.drop(self.emb(ids) + self.emb.weight[0]))).flatten(0, 1), ids.flatten()
        )


@pytest.mark.parametrize("at", ["drop", "drop:in"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_module_that_comes_to_nothing_is_a_place(p: float, at: str) -> None:
    ids = torch.arange(32).view(4, 8) % 8
    program = shardc.compile(
        Dropped(p), ids, {"shardc": 1, "mesh": {"tp": 2}, "activations": {at: {1: "tp"}}}, prove=False
    )
    (norm,) = program.stages[0].graph.find_nodes(op="call_function", target=torch.ops.aten.layer_norm.default)
    assert norm.meta["value"].layout["tp"] == Shard(1)


class Tower(nn.Module):
    """An encoder that takes a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.vision(x)
        return (self.head(y) * positions.sum(0)[..., None]).square().mean()


def tower(spec: dict[str, Any], positions: tuple[int, ...] = (3, 8, 6)) -> shardc.Program:
    batch = {"x": torch.randn(8, 6, 4).double(), "positions": torch.rand(positions).double()}
    return shardc.compile(Tower(), batch, {"shardc": 1, **spec}, prove=False)


def test_the_input_of_a_module_may_be_the_batchs() -> None:
    spec = {"mesh": {"tp": 2}, "activations": {"vision:in": {0: "tp"}}, "batch": {"dims": {"positions": 1}}}
    program = tower(spec)
    (first, _) = program.stages[0].graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert first.meta["value"].layout["tp"] == Shard(0)
    assert program.prove().ok


def test_the_output_of_a_module_may_have_no_gradient() -> None:
    spec = {"mesh": {"tp": 2}, "activations": {"vision": {1: "tp"}}, "batch": {"dims": {"positions": 1}}}
    (_, head) = tower(spec).stages[0].graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert head.meta["value"].layout["tp"] == Shard(1)


def test_an_entry_without_effect_is_an_error() -> None:
    """A module that takes nothing: it makes a table."""

    class Table(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(6, 4, dtype=torch.float64)

    model = Tower()
    model.vision = nn.Sequential(model.vision, Table())
    model.vision.forward = lambda x: model.vision[0](x) * model.vision[1]().sum()
    batch = {"x": torch.randn(8, 6, 4).double(), "positions": torch.rand(8, 8, 6).double()}
    spec = {"shardc": 1, "mesh": {"tp": 2}, "activations": {"vision.1:in": {0: "tp"}}}
    with pytest.raises(
        ShardcError, match=r"vision.1:in.*: the entry has no effect: no tensor enters vision.1\n  fix: name"
    ):
        shardc.compile(model, batch, spec, prove=False)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"input '\w+' has no rows \(dim 0\).*\n  fix: compile with a global batch"):
        shardc.compile(nn.Linear(4, 4), torch.randn(0, 4), {"shardc": 1, "mesh": {"dp": 1}}, loss=lambda o, _: o.sum())


def test_inputs_that_disagree_about_rows() -> None:
    differs = r"'positions' has 3 rows \(dim 0\), but 'x' has 8"
    fix = r"if the rows of 'positions' are its dim 1, write `batch: \{dims: \{positions: 1\}\}`"
    with pytest.raises(ShardcError, match=rf"is not divisible by dp=2: {differs}\n  fix: {fix}"):
        tower({"mesh": {"dp": 2}})
    assert any(re.search(f"{differs}: {fix}", note) for note in tower({"mesh": {"dp": 3}, "uneven": "pad"}).notes)
    assert not tower({"mesh": {"dp": 2}, "batch": {"dims": {"positions": 1}}}).notes
    # with microbatches a sum over what are no rows would be one of all
    micro = {"mesh": {"dp": 1}, "batch": {"microbatches": 2}}
    differs = r"'positions' has 4 rows \(dim 0\), but 'x' has 8"
    with pytest.raises(ShardcError, match=rf"^spec: batch: {differs}\n  fix: {fix}\n.*takes all rows of the batch"):
        tower(micro, (4, 8, 6))
    assert not tower({**micro, "batch": {"microbatches": 2, "dims": {"positions": 1}}}, (4, 8, 6)).notes
    shared = r"'positions' has 3 rows \(dim 0\), but 'x' has 8"
    fix = r"if all rows share 'positions', write `batch: \{dims: \{positions: null\}\}`; else make it 2 or 4"
    with pytest.raises(ShardcError, match=rf"is not divisible by dp=2: {shared}\n  fix: {fix}"):
        tower({"mesh": {"dp": 2}}, (3, 6))
    assert not tower({"mesh": {"dp": 2}, "batch": {"dims": {"positions": None}}}, (3, 6)).notes
