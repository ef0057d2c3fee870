"""Context parallel (`sequence:`): loss and every gradient are those of one device, whatever reads positions, whichever
keys a mask shows, and together with every other axis.

Each detail that goes wrong elsewhere (docs/reference/sequence-details.md) has a test here; the name of
the detail stands in the test's docstring.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.ir.graph import values_of
from shardc.ir.placement import Shard, runs
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.ops.attention.spans import CAUSAL, Span, blocks
from shardc.runtime.step.engine import Engine
from tests import equality, zoo
from tests.equality import assert_equal
from tests.sequences import CP, PP, TP, check, exchanged
from tests.zoo import BATCH, HEADS, HIDDEN, SEQ, VOCAB, hf, hf_more, labels, ready, sequences, tokens


@functools.lru_cache(maxsize=4)  # cases come model by model
def reference(name: str) -> equality.Reference:
    families, built = hf.FAMILIES | hf_more.FAMILIES, zoo.ALL | sequences.MODELS
    return equality.reference(built[name] if name in built else lambda: hf.build(families[name]))


# --- models

#: What is special in each: masks that are causal (llama), sliding (mistral, gemma3, with soft caps gemma2), padded
#: (bert); cross attention and relative biases (t5); sinks and experts (gpt_oss); latent attention (deepseek_v3_dense);
#: alibi (bloom), a state space (mamba), short convolutions (lfm2), disentangled positions (deberta_v2), chunks
#: (llama4), prefixes (prefix_lm), none (dit). The methods: of each those that it has, on so many ranks.
MODELS: dict[str, tuple[tuple[str, int], ...]] = {
    "gpt": (("gather", 4), ("ring", 4), ("ulysses", 4), ("auto", 8)),
    "llama": (("gather", 8), ("ring", 2), ("ring", 8), ("ulysses", 4), ("auto", 4)),
    "bert": (("gather", 2), ("ring", 4), ("ulysses", 2)),
    "t5": (("gather", 2), ("ulysses", 4), ("auto", 2)),
    "bart": (("ring", 4), ("ulysses", 2)),
    "mistral": (("gather", 2), ("ring", 4), ("ulysses", 2)),
    "gemma2": (("gather", 4), ("ulysses", 4)),
    "gemma3": (("ring", 4),),
    "gpt_oss": (("gather", 4), ("ulysses", 2)),
    "mixtral": (("ring", 2),),
    "deepseek_v3_dense": (("ring", 4), ("ulysses", 4)),
    "bloom": (("ulysses", 4),),
    "mamba": (("auto", 4),),
    "mamba2": (("auto", 4),),
    "lfm2": (("ring", 2),),
    "deberta_v2": (("auto", 4),),
    "llama4": (("ring", 4),),
    "prefix_lm": (("ring", 4), ("ulysses", 2)),
    "dit": (("ring", 4),),
}
CASES = [(name, *how) for name, every in MODELS.items() for how in every]


@pytest.mark.parametrize(("name", "method", "cp"), CASES)
def test_models(name: str, method: str, cp: int) -> None:
    program = check(reference(name), {"cp": cp}, method)
    if method in ("ring", "ulysses"):
        kinds = {n.meta["collective"].kind for n in program.stages[0].graph.nodes if "collective" in n.meta}
        assert "all_to_all" in kinds


def test_heads_that_a_view_merges_with_rows() -> None:
    """Attention written out over [rows * heads, ...]: ranks of dp split the outer digit, those of cp the one inside."""
    program = check(reference("xglm"), {"dp": 2, "cp": 2}, "ulysses")
    assert any(c.kind == "all_to_all" for n in program.stages[0].graph.nodes if (c := n.meta.get("collective")))


AGAIN = {"checkpoint": [{"match": "model.layers.*", "save": []}]}
TOGETHER: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"cp": 2, "tp": 2}, TP),
    "the model's plan": ({"cp": 2, "tp": 4}, {"shard": {"use": "model"}}),
    "tp, split activations": ({"cp": 2, "tp": 2}, TP | {"activations": {"model.embed_tokens": {1: "tp"}}}),
    "pp": ({"pp": 2, "cp": 2}, PP),
    "pp, zb-v": ({"pp": 2, "cp": 2}, PP | {"pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}}),
    "dp, tp, pp": ({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, TP | PP),
    "zero 1": ({"dp": 2, "cp": 2}, {"data": {"zero": 1}}),
    "zero 2": ({"dp": 2, "cp": 2}, {"data": {"zero": 2}}),
    "zero 3": ({"dp": 2, "cp": 4}, {"data": {"zero": 3}}),
    "zero 3 over cp": ({"cp": 4}, {"data": {"zero": 3}}),
    "zero 3 over cp, copies over dp": ({"dp": 2, "cp": 2}, {"data": {"zero": 3, "axis": ["dp", "cp"]}}),
    "recomputed": ({"cp": 2}, AGAIN),
    "microbatches": ({"cp": 2, "dp": 2}, {"batch": {"microbatches": 4}}),
    "padded": ({"cp": 3}, {"uneven": "pad"}),
    "padded, no zigzag": ({"cp": 3}, {"uneven": "pad", "balance": "none"}),
    "padded, dp, zero 3": ({"dp": 2, "cp": 3}, {"uneven": "pad", "data": {"zero": 3}}),
    "padded, tp": ({"cp": 3, "tp": 2}, TP | {"uneven": "pad"}),
    "the loss in chunks": ({"cp": 2}, {"loss": {"chunks": 4}}),
    "eight ranks": ({"cp": 8}, {}),
}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("what", TOGETHER)
def test_with_every_other_section(what: str, method: str) -> None:
    mesh, more = TOGETHER[what]
    if method == "ulysses" and 4 % (mesh["cp"] * mesh.get("tp", 1)):  # llama here has four key-value heads
        with pytest.raises(shardc.ShardcError, match="heads, 4 of keys, do not divide"):
            check(reference("llama"), mesh, method, **more)
    else:
        check(reference("llama"), mesh, method, **more)


@pytest.mark.parametrize(("name", "method"), [("t5", "auto"), ("bert", "ring")])
def test_padded_sequences_of_other_models(name: str, method: str) -> None:
    check(reference(name), {"cp": 3}, method, uneven="pad")


def test_a_method_for_each_module() -> None:
    """T5's self attention has a bias with a gradient, its cross attention has none: only that can be a ring."""
    method = {"decoder.block.*.EncDecAttention": "ring", "encoder": "ulysses", "*": "gather"}
    program = check(reference("t5"), {"cp": 2}, method)
    kinds = {
        (n.meta["source"].module.rpartition(".")[2], n.meta["collective"].kind)
        for n in program.stages[0].graph.nodes
        if "collective" in n.meta and n.target is not ops.attention_reach  # a few numbers, of the mask
    }
    assert ("EncDecAttention", "all_to_all") in kinds
    assert ("EncDecAttention", "all_gather") not in kinds


#: Keys travel between `far` ranks, or are gathered there, while `near` ones have heads: a method for each axis.
TWO_AXES: dict[str, tuple[str, dict[str, int], Any, dict[str, Any]]] = {
    "ring, ulysses": ("llama", {"far": 2, "near": 2}, ["ring", "ulysses"], {}),
    "ulysses, ring": ("llama", {"far": 2, "near": 2}, ["ulysses", "ring"], {}),
    "of four each": ("llama", {"far": 2, "near": 4}, ["ring", "ulysses"], {}),
    "one method for both": ("llama", {"far": 2, "near": 2}, "ulysses", {}),
    "auto": ("llama", {"far": 4, "near": 2}, "auto", {}),
    "windows": ("mistral", {"far": 2, "near": 2}, ["ring", "ulysses"], {}),
    "written out": ("gpt_oss", {"far": 2, "near": 2}, ["gather", "ulysses"], {}),
    "biases": ("t5", {"far": 2, "near": 2}, {"decoder.block.*.EncDecAttention": ["ring", "gather"], "*": "auto"}, {}),
    "a state space": ("mamba", {"far": 2, "near": 2}, "auto", {}),
    "tp": ("gpt", {"far": 2, "near": 2, "tp": 2}, ["ring", "ulysses"], {"shard": {"use": "structure"}}),
    "pp, recomputed": ("llama", {"pp": 2, "far": 2, "near": 2}, ["ring", "ulysses"], {
        "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2},
        "checkpoint": [{"match": "model.layers.*", "save": []}],
    }),
    "zero 3 over both": ("llama", {"far": 2, "near": 2}, ["ring", "ulysses"], {
        "data": {"zero": 3, "axis": ["far", "near"]},
    }),
    "padded": ("llama", {"far": 3, "near": 2}, ["ring", "ulysses"], {"uneven": "pad"}),
    "heads that do not divide": ("llama", {"far": 3, "near": 2}, ["auto", "ring"], {"uneven": "pad"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "balance"), [*((w, "auto") for w in TWO_AXES), ("ring, ulysses", "none"), ("ulysses, ring", "none")]
)
def test_two_axes(what: str, balance: str) -> None:
    name, mesh, method, more = TWO_AXES[what]
    program = check(reference(name), mesh, method, balance, axis=["far", "near"], **more)
    if method == ["ring", "ulysses"]:
        rings = [n for s in program.stages for n in s.graph.nodes if n.target is ops.attention]
        assert rings
        assert {n.meta["collective"].axes for n in rings} == {("far",)}
        turned = [n for s in program.stages for n in s.graph.nodes if n.target is ops.all_to_all]
        assert {n.meta["collective"].axes for n in turned} == {("near",)}


def test_a_ring_runs_over_one_axis() -> None:
    one, two = reference("llama"), {"axis": ["far", "near"]}
    for method, said in (("ring", "a ring runs over one axis"), (["ring"] * 3, "3 methods for the 2 axes")):
        with pytest.raises(shardc.ShardcError, match=said):
            one.compile({"shardc": 1, "mesh": {"far": 2, "near": 2}, "sequence": two | {"method": method}})
    with pytest.raises(shardc.ShardcError, match="'far' is written twice"):
        one.compile({"shardc": 1, "mesh": {"far": 2}, "sequence": {"axis": ["far", "far"]}})


def test_experts() -> None:
    """Detail 10: the router's auxiliary loss counts the tokens of all ranks."""
    family = hf_more.FAMILIES["mixtral"]
    one = equality.reference(lambda: hf.build(family, output_router_logits=True, router_aux_loss_coef=0.1))
    check(one, {"cp": 2, "ep": 2}, "ring", experts=[{"match": "*.experts", "axis": "ep"}])


# --- what reads positions


class Reads(nn.Module):
    """Something that looks at a whole sequence f[b, s, h], between two layers that look at single tokens."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=4)
        self.table = nn.Embedding(2 * SEQ, HIDDEN)
        self.what = what

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        y = self.out(self.what(self, self.embed(ids)))
        targets = targets if y.shape[1] == targets.shape[1] else targets[:, : y.shape[1]]
        return F.cross_entropy(y.flatten(0, 1), targets.flatten())


def rotated(m: Any, x: Tensor) -> Tensor:
    """Rotary positions, computed in forward."""
    place = torch.arange(x.shape[1], dtype=x.dtype)
    angles = torch.outer(place, 1.0 / 100 ** (torch.arange(0, HIDDEN, 2, dtype=x.dtype) / HIDDEN)).repeat(1, 2)
    half = torch.cat([-x[..., HIDDEN // 2 :], x[..., : HIDDEN // 2]], -1)
    return x * angles.cos() + half * angles.sin()


def relative(m: Any, x: Tensor) -> Tensor:
    """A bias for each distance."""
    place = torch.arange(x.shape[1])
    bias = m.table((place[:, None] - place[None, :]).abs()).mean(-1)
    return torch.softmax(x @ x.transpose(1, 2) + bias, -1) @ x


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions of arange": lambda m, x: x + m.table(torch.arange(x.shape[1])),
    "a part of a table": lambda m, x: x + m.table.weight[: x.shape[1]],
    "rotary": rotated,
    "relative bias": relative,
    "shift": lambda m, x: F.pad(x[:, 1:], (0, 0, 0, 1)),
    "the next token": lambda m, x: x[:, :-1],
    "every other token": lambda m, x: x[:, ::2],
    "roll": lambda m, x: x + x.roll(1, 1),
    "flip": lambda m, x: x + x.flip(1),
    "cumsum": lambda m, x: x.cumsum(1),
    "conv": lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "causal conv": lambda m, x: F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), m.conv.weight, groups=4).transpose(1, 2),
    "the mean": lambda m, x: x - x.mean(1, keepdim=True),
    "the first token": lambda m, x: x + x[:, :1],
    "the last token": lambda m, x: x + x[:, -1].unsqueeze(1),
    "the largest": lambda m, x: x + x.amax(1, keepdim=True),
    "softmax over tokens": lambda m, x: x.softmax(1),
    "sort": lambda m, x: x.sort(1).values,
    "diff": lambda m, x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "tokens in pairs": lambda m, x: x + x.view(x.shape[0], -1, 2, HIDDEN).mean(2).repeat_interleave(2, 1),
    "halves": lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "tril": lambda m, x: (x @ x.transpose(1, 2)).tril() @ x,
}


@pytest.mark.parametrize("what", READS)
def test_positions(what: str) -> None:
    """Details 1 and 2: the sequence's order is one device's for all that reads it, and shifts cross ranks' borders."""
    one = equality.reference(lambda: (ready(Reads(READS[what]), torch.float64), {"ids": tokens(), "targets": labels()}))
    check(one, {"cp": 4}, balance="none")
    check(one, {"cp": 4}, balance="zigzag")
    check(one, {"cp": 5}, balance="zigzag", uneven="pad")  # of the last stretches two are padding alone


#: What tells the other ranks a few numbers, and which.
STRETCHES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any]] = {
    "cumsum": (READS["cumsum"], ops.cumsum),
    "cumsum, in another dtype": (lambda m, x: x + (x > 0).cumsum(1, dtype=x.dtype), ops.cumsum),
    "conv": (READS["conv"], ops.conv1d),
    "causal conv": (READS["causal conv"], ops.conv1d),
    "causal conv, cut off": (
        lambda m, x: F.conv1d(x.transpose(1, 2), m.conv.weight, m.conv.bias, padding=2, groups=4)[..., :SEQ].mT,
        ops.conv1d,
    ),
    "causal conv, every second place": (
        lambda m, x: F.conv1d(F.pad(x.mT, (2, 2)), m.conv.weight, dilation=2, groups=4).mT,
        ops.conv1d,
    ),
    "a window ahead": (lambda m, x: F.conv1d(F.pad(x.mT, (0, 2)), m.conv.weight, groups=4).mT, ops.conv1d),
}
SPLIT_TWICE: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "cp": ({"cp": 4}, "cp", {}),
    "two axes": ({"far": 2, "near": 2}, ["far", "near"], {}),
    "dp, microbatches": ({"dp": 2, "cp": 2}, "cp", {"batch": {"microbatches": 2}}),
}


@pytest.mark.parametrize("where", SPLIT_TWICE)
@pytest.mark.parametrize("what", STRETCHES)
def test_what_needs_little_of_other_ranks_gets_little(what: str, where: str) -> None:
    """A cumulative sum gets the sums of other ranks, a convolution the edges: nothing is gathered."""
    mesh, axis, more = SPLIT_TWICE[where]
    reads, op = STRETCHES[what]
    one = equality.reference(lambda: (ready(Reads(reads), torch.float64), {"ids": tokens(), "targets": labels()}))
    program = check(one, mesh, balance="zigzag", axis=axis, **more)
    assert program.notes == ()
    assert program.prove().ok
    (node,) = program.stages[0].graph.find_nodes(op="call_function", target=op)
    said = node.meta["collective"].bytes
    if where == "cp":  # of eight stretches the sum, or two entries, of every row; float64
        entries = 1 if op is ops.cumsum else 4 if "second" in what else 2
        assert said == 8 * entries * BATCH * HIDDEN * 8
    sent: list[int] = []

    def work(mesh: Any) -> None:
        Engine(program, one.model, None, 0, mesh=mesh, check=False).backward(one.batch)
        sent.extend(r.bytes for r in mesh.records if r.tag == node.name and r.direction == "forward")

    loopback(program.mesh, work)
    assert sent == [said] * program.mesh.world * program.microbatches


@pytest.mark.parametrize(
    "what",
    {
        "strided": lambda m, x: F.conv1d(x.mT, m.conv.weight, stride=2, groups=4).mT,
        "cut elsewhere": lambda m, x: F.conv1d(x.mT, m.conv.weight, padding=2, groups=4)[..., 1 : SEQ + 1].mT,
        "read twice": lambda m, x: (
            (lambda y: y[..., :SEQ] + y[..., 2:])(F.conv1d(x.mT, m.conv.weight, padding=2, groups=4)).mT
        ),
        "ones beside it": lambda m, x: F.conv1d(F.pad(x.mT, (2, 0), value=1.0), m.conv.weight, groups=4).mT,
        "wider than a part": lambda m, x: F.conv1d(F.pad(x.mT, (6, 0)), m.conv.weight, dilation=3, groups=4).mT,
    }.items(),
    ids=lambda x: x[0],
)
def test_other_convolutions_are_split_by_rows(what: tuple[str, Callable[[Any, Tensor], Tensor]]) -> None:
    one = equality.reference(lambda: (ready(Reads(what[1]), torch.float64), {"ids": tokens(), "targets": labels()}))
    program = check(one, {"cp": 4})
    assert any("read tokens of other ranks; over cp they are split by dim 0 of" in note for note in program.notes)


# --- attention


class Attends(nn.Module):
    """One layer of attention as a function of queries, keys and values f[b, heads, s, d] and what else a batch has."""

    def __init__(self, how: Callable[..., Tensor], groups: int = HEADS) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * size) for n in (HEADS, groups, groups))
        self.sink = nn.Parameter(torch.zeros(HEADS))
        self.how = how

    def forward(self, ids: Tensor, targets: Tensor, **more: Tensor) -> Tensor:
        x = self.embed(ids)
        b, s, h = x.shape
        q, k, v = (f(x).view(b, s, -1, h // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.how(self, q, k, v, **more).transpose(1, 2).reshape(b, s, h)
        return F.cross_entropy(self.out(x + y).flatten(0, 1), targets.flatten())


sdpa = F.scaled_dot_product_attention


def places() -> tuple[Tensor, Tensor]:
    place = torch.arange(SEQ)
    return place[:, None], place[None, :]


def seen(rows: Tensor, columns: Tensor, window: int = 5, prefix: int = 4) -> dict[str, Tensor]:
    causal = columns <= rows
    return {
        "causal": causal,
        "window": causal & (rows - columns < window),
        "chunked": causal & (rows // window == columns // window),
        "prefix": causal | (columns < prefix),
        "some rows see nothing": (columns < rows - 3),
    }


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
    return torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ v


def sinks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """gpt-oss: one more column, which nothing is behind."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(~seen(*places())["causal"], -1e9)
    sink = m.sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ v


def documents(m: Any, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    same = document[:, None, :, None] == document[:, None, None, :]
    return sdpa(q, k, v, same & seen(*places())["causal"])


def linear(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without softmax: a sum over keys first."""
    return F.elu(q) @ (F.elu(k).transpose(-2, -1) @ v)


def documents_of_uneven_lengths() -> Tensor:
    """i64[8, 16]: their borders are no rank's."""
    return torch.stack([(torch.arange(SEQ) * (2 + i % 3) + i) // 11 for i in range(BATCH)])


HOW: dict[str, tuple[Callable[..., Tensor], int]] = {
    "full": (lambda m, q, k, v: sdpa(q, k, v), HEADS),
    "is_causal": (lambda m, q, k, v: sdpa(q, k, v, is_causal=True), HEADS),
    "is_causal, 2 kv heads": (lambda m, q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), 2),
    "is_causal, 1 kv head": (lambda m, q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), 1),
    "is_causal, scaled": (lambda m, q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), HEADS),
    "is_causal, wide values": (lambda m, q, k, v: sdpa(q, k, torch.cat([v, v], -1), is_causal=True)[..., :8], HEADS),
    "is_causal, one key and value for all heads": (
        lambda m, q, k, v: sdpa(q, k[:, :1], v[:, :1], is_causal=True),
        HEADS,
    ),
    "eager": (lambda m, q, k, v: eager(q, k, v, seen(*places())["window"]), HEADS),
    "eager, alibi": (
        lambda m, q, k, v: eager(q, k, v, seen(*places())["causal"], -0.1 * (places()[0] - places()[1]).abs()),
        HEADS,
    ),
    "sinks": (sinks, HEADS),
    "linear": (linear, HEADS),
    **{
        f"a mask: {what}": (lambda m, q, k, v, what=what: sdpa(q, k, v, seen(*places())[what]), HEADS)  # type: ignore[misc]
        for what in seen(*places())
    },
    "a float mask": (
        lambda m, q, k, v: sdpa(
            q, k, v, torch.zeros(SEQ, SEQ, dtype=q.dtype).masked_fill(~seen(*places())["window"], -torch.inf)
        ),
        HEADS,
    ),
}


def built(how: Callable[..., Tensor], groups: int = HEADS, **more: Tensor) -> equality.Reference:
    batch = {"ids": tokens(), "targets": labels(), **more}
    return equality.reference(lambda: (ready(Attends(how, groups), torch.float64), batch))


@pytest.mark.parametrize("what", HOW)
def test_masks(what: str) -> None:
    """Details 3 (no mask is dropped), 4 (global indices), 6 (rows without keys), 7 (gradients of all ranks' keys),
    8 (fewer kv heads than ranks), 13 (a sink's gradient is a sum over ranks)."""
    one = built(*HOW[what])
    check(one, {"cp": 4}, balance="zigzag")
    check(one, {"cp": 3}, balance="zigzag", uneven="pad")
    if what not in ("sinks", "linear") and "eager" not in what:
        check(one, {"cp": 4}, "ring", "zigzag")
        check(one, {"cp": 3}, "ring", "none", uneven="pad")
        check(one, {"cp": 5}, "ring", "zigzag", uneven="pad")
    if what not in ("is_causal, 2 kv heads", "is_causal, 1 kv head", "linear"):
        check(one, {"cp": 4}, "ulysses")


def test_documents() -> None:
    """Detail 15: documents that cross ranks' borders, by ids of the batch."""
    one = built(documents, document=documents_of_uneven_lengths())
    for method in ("gather", "ring", "ulysses"):
        check(one, {"cp": 4}, method, "zigzag")


def within(document: Tensor) -> Tensor:
    """The mask of documents i64[.., s], causal."""
    return (document[..., :, None] == document[..., None, :]) & seen(*places())["causal"]


FIRST = torch.tensor([0, 5, 9, 16])
SAID: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "positions that begin anew": (
        lambda p: within((p == 0).cumsum(1))[:, None],
        torch.cat([torch.arange(n) for n in FIRST.diff()]).repeat(BATCH, 1),
    ),
    "cumulative lengths": (lambda cu: within(torch.searchsorted(cu, torch.arange(SEQ), right=True)), FIRST),
    "cumulative lengths, in buckets": (lambda cu: within(torch.bucketize(torch.arange(SEQ), cu, right=True)), FIRST),
    "a mask of four dims": (lambda m: m, within(documents_of_uneven_lengths())[:, None]),
}


@pytest.mark.parametrize("how", SAID)
def test_documents_however_a_batch_says_it(how: str) -> None:
    """Detail 15: with no more in the spec than `sequence: {axis: cp}`."""
    mask, said = SAID[how]
    one = built(lambda m, q, k, v, said: sdpa(q, k, v, mask(said)), said=said)
    assert check(one, {"cp": 4}, "ring").prove().ok


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_dropout_does_not_know_the_mesh(name: str) -> None:
    """Detail 14: also of attention's weights, whose queries are split."""
    with zoo.Wide():
        model, batch = zoo.ALL[name](dropout=0.2)
        captured = capture(model, batch)
        one, *many = (
            shardc.compile(
                model, batch, {"shardc": 1, "mesh": {"cp": n}, "sequence": CP, "uneven": "pad"}, captured=captured
            )
            for n in (1, 2, 3)
        )
    want = shardc.verify.simulate(one, model, batch, seed=7)
    for program in many:
        assert_equal(shardc.verify.simulate(program, model, batch, seed=7), want.loss, want.grads)


# --- causal work

LONG = 512


def causal_blocks(cp: int, balance: str) -> list[int]:
    """Pairs of a query and a key that a rank computes, by rank."""
    shard = Shard(0, 2, mirrored=True) if balance == "zigzag" else Shard(0)
    work = []
    for rank in range(cp):
        rows = [Span(start, local, n) for local, start, n in runs(LONG, [(shard, cp, rank)])]
        work.append(sum(b.pairs for b in blocks(rows, [Span(0, 0, LONG)], CAUSAL)))
    return work


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_zigzag_evens_out_causal_work(cp: int) -> None:
    """Detail 4: nothing above the diagonal is computed, and every rank has as many of the other pairs."""
    work = causal_blocks(cp, "zigzag")
    assert len(set(work)) == 1
    assert sum(work) == LONG * (LONG + 1) // 2
    uneven = causal_blocks(cp, "none")
    assert sum(uneven) == sum(work)
    assert uneven[-1] > 1.4 * work[-1]


def sent(balance: str, method: str) -> int:
    """Elements of keys and values that ranks sent in forward, by what ran."""
    one = reference("gpt")
    spec = {"shardc": 1, "mesh": {"cp": 4}, "sequence": CP | {"method": method, "balance": balance}}
    found: list[int] = []

    def work(mesh: Any) -> None:
        engine = Engine(program, one.model, None, 0, mesh=mesh, check=False)
        engine.backward(one.batch)
        found.extend(r.bytes for r in mesh.records if r.kind == "all_to_all" and r.direction == "forward")

    program = one.compile(spec)
    loopback(program.mesh, work)
    return sum(found) // 8


def test_a_ring_sends_what_queries_see() -> None:
    """Under a causal mask a contiguous rank sends its keys to those behind it alone: half of what a gather sends."""
    layers, whole = 2, 2 * BATCH * SEQ * HIDDEN
    assert sent("none", "ring") == layers * whole * (4 - 1) // 2
    # of a zigzag, ranks with lower numbers send their first stretch, those with higher ones both
    assert sent("zigzag", "ring") == layers * whole * (4 - 1) * 3 // 4


# --- windows


def window_of(program: shardc.Program) -> set[object]:
    """What is known of the masks of a program's attention: (window, whether a mask is left)."""
    nodes = [n for s in program.stages for n in s.graph.nodes if n.target is ops.attention]
    return {((None, 0) if n.args[5] else n.kwargs.get("window"), n.args[3] is not None) for n in nodes}


def rows_and_keys() -> tuple[Tensor, Tensor]:
    return torch.arange(SEQ)[:, None], torch.arange(SEQ)[None, :]


#: Ways to write a mask, what follows of it (low, high), and whether anything else of it has to be kept.
SPELLED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int | None, int | None] | None, bool]] = {
    "comparisons": (lambda i, j: (j <= i) & (i - j < 5), (-4, 0), False),
    "shifted": (lambda i, j: ~(j > i + 1) & (j >= i - 2), (-2, 1), False),
    "triangles": (lambda i, j: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(1).triu(-3), (-3, 1), False),
    "chunks of five": (lambda i, j: (i // 5 == j // 5) & (j <= i), (-4, 0), True),
    "a window or a prefix": (lambda i, j: (j < 3) | ((j <= i) & (i - j < 5)), None, True),
    "either of two": (lambda i, j: ((j <= i) & (j > i - 3)) | ((j <= i) & (j > i - 6)), (-5, 0), True),
    "beside a number of each": (lambda i, j: (j <= i) & (i * j < 40), (None, 0), True),
    "the other way": (lambda i, j: 2 * j <= 2 * i, None, True),
}


@pytest.mark.parametrize("how", SPELLED)
def test_masks_of_positions_are_understood(how: str) -> None:
    mask, window, left = SPELLED[how]
    one = built(lambda m, q, k, v: sdpa(q, k, v, mask(*rows_and_keys())))
    program = check(one, {"cp": 4}, "ring")
    assert window_of(program) == {(window, left)}
    assert program.prove().ok


def test_windows_and_padding() -> None:
    """What a batch hides stays a mask; what positions hide is not sent."""

    def how(m: Any, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return sdpa(q, k, v, seen(*places())["window"] & padding[:, None, None, :])

    padding = torch.arange(SEQ)[None] < torch.tensor([[SEQ - i] for i in range(BATCH)])
    one = built(how, padding=padding)
    for method in ("ring", "gather", "ulysses"):
        program = check(one, {"cp": 4}, method)
    assert window_of(check(one, {"cp": 4}, "ring", "zigzag")) == {((-4, 0), True)}
    assert window_of(program) == {((-4, 0), True)}


def test_models_windows_are_found() -> None:
    """As transformers writes them."""
    for name in ("mistral", "gemma3"):
        program = reference(name).compile({"shardc": 1, "mesh": {"cp": 2}, "sequence": CP | {"method": "ring"}})
        assert window_of(program) == {((-7, 0), False)}


def test_dropout_within_a_window() -> None:
    """Weights are dropped by global index, also of keys that came from other ranks."""

    def how(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, seen(*places())["window"], dropout_p=0.3)

    one = built(how)
    programs = [
        one.compile({"shardc": 1, "mesh": {"cp": n}, "sequence": CP | {"method": method}})
        for n, method in ((1, "auto"), (4, "ring"), (4, "gather"), (2, "ulysses"))
    ]
    want = shardc.verify.simulate(programs[0], one.model, one.batch, seed=7)
    for program in programs[1:]:
        assert_equal(shardc.verify.simulate(program, one.model, one.batch, seed=7), want.loss, want.grads)


class Local(nn.Module):
    """A window of 1024, in a sequence of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(VOCAB, 64), nn.Linear(64, 192), nn.Linear(64, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None, :]
        y = sdpa(q, k, v, (j <= i) & (j > i - 1024)).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(y).flatten(0, 1), ids.flatten())


def test_a_window_sends_its_border() -> None:
    """Detail 5: at W=1024, S=131072, cp=8 a fiftieth of what a gather sends; and nothing is of the square's size."""
    length = 131072
    with torch.device("meta"):
        model, batch = Local(), {"ids": torch.zeros(1, length, dtype=torch.long)}
    sizes = {}
    for method in ("gather", "ring"):
        spec = {"shardc": 1, "mesh": {"cp": 8}, "sequence": CP | {"method": method}}
        program = shardc.compile(model, batch, spec, prove=False)
        nodes = program.stages[0].graph.nodes
        kind = {"gather": "all_gather", "ring": "all_to_all"}[method]
        found = [n.meta["collective"] for n in nodes if "collective" in n.meta]
        sizes[method] = sum(c.bytes for c in found if c.kind == kind)
        assert max(math.prod(v.shape) for n in nodes if n.op == "call_function" for v in values_of(n)) <= length * 192
    assert sizes["gather"] > 50 * sizes["ring"] > 0


@pytest.mark.parametrize("balance", ["none", "zigzag"])
@pytest.mark.parametrize("what", ["is_causal", "a mask: window", "full"])
def test_what_a_program_says_a_ring_sends_is_what_it_sends(what: str, balance: str) -> None:
    """Detail 17: bytes as printed, forward and backward, on the mean of ranks."""
    one = built(*HOW[what])
    program = one.compile({"shardc": 1, "mesh": {"cp": 4}, "sequence": CP | {"method": "ring", "balance": balance}})
    (said,) = [n.meta["collective"].bytes for n in program.stages[0].graph.nodes if n.target is ops.attention]
    for direction, times in (("forward", 1), ("backward", 2)):  # again, and gradients home
        assert exchanged(program, one, direction) == times * 4 * said


# --- what is refused


def refused(spec: dict[str, Any]) -> shardc.ShardcError:
    one = reference("gpt")
    with pytest.raises(shardc.ShardcError) as caught:
        one.compile({"shardc": 1, "mesh": {"cp": 3}, **spec})
    return caught.value


def test_sizes_that_do_not_divide() -> None:
    error = refused({"sequence": CP})
    assert "input 'ids': the sequence of 16 (dim 1) is not divisible by cp=3" in str(error)
    assert "cp=2 or 4" in error.fix
    assert "{ids: null}" in error.fix


def test_a_zigzag_that_does_not_divide() -> None:
    error = refused({"sequence": CP | {"balance": "zigzag"}})
    assert "is not divisible by cp=3 in 2 parts" in str(error)
    assert "balance: none" in error.fix
    assert "uneven: pad" in error.fix


def test_dims_that_are_not_there() -> None:
    assert "pattern 'idz' matches no input" in str(refused({"sequence": {"axis": "cp", "dims": {"idz": 1, "*": 1}}}))
    assert "the batch's and the sequence's" in str(
        refused({"mesh": {"cp": 2, "dp": 2}, "sequence": {"axis": "cp", "dims": {"*": 0}}})
    )
    assert "no input has a sequence" in str(refused({"sequence": {"axis": "cp", "dims": {"*": None}}}))


def test_mistakes_of_other_sections_are_named_beside_those_of_the_sequence() -> None:
    error = str(refused({"mesh": {"dp": 5, "cp": 2}, "sequence": {"axis": "cp", "dims": {"idz": 1, "*": 1}}}))
    assert "dp=5" in error
    assert "pattern 'idz' matches no input" in error


def test_methods_that_an_attention_does_not_have() -> None:
    def message(name: str, method: Any, **mesh: int) -> str:
        with pytest.raises(shardc.ShardcError) as caught:
            reference(name).compile({"shardc": 1, "mesh": mesh, "sequence": CP | {"method": method}, "uneven": "pad"})
        assert (
            "method: gather" in caught.value.fix
            or "or gather" in caught.value.fix
            or "attention is in" in caught.value.fix
        )
        return str(caught.value)

    assert "model.layers.0.self_attn: 8 heads, 4 of keys, do not divide over 8 ranks" in message(
        "llama", "ulysses", cp=8
    )
    assert "a ring computes no gradient of its mask, and needs keys whose sequence is split" in message(
        "gpt_oss", "ring", cp=2
    )
    assert "a ring computes no gradient of its mask" in message("t5", "ring", cp=2)
    assert "'*.attention' matches no module that attends" in message("llama", {"*.attention": "ring"}, cp=2)


def test_an_input_that_stays_whole() -> None:
    """Its part is cut where it meets what is split."""
    check(reference("llama"), {"cp": 2}, sequence={"axis": "cp", "dims": {"labels": None, "*": 1}})
