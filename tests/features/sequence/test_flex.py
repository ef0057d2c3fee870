"""FlexAttention: whatever a mask_mod or a score_mod says, and wherever a block mask was made, loss and every gradient
are those of torch's own definition of it on one device, however the mesh splits it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

import shardc
from shardc.capture.rewrite import flex_attention as captured_flex
from shardc.ir.graph import calls
from shardc.ir.types import op_name
from shardc.runtime import ops
from tests import equality
from tests.sequences import PP, TP, check
from tests.zoo import hf, hf_more

BATCH, SEQ, HEADS, KV, DIM = 4, 32, 8, 4, 8
HIDDEN = HEADS * DIM
Mods = Callable[["Attention", Any], dict[str, Any]]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j < 5


def blocks(mod: Any, b: int | None = None, h: int | None = None, **more: Any) -> dict[str, Any]:
    return {"block_mask": create_block_mask(mod, b, h, SEQ, SEQ, device="cpu", **more)}


#: Made once, when this module is imported.
OUTSIDE = create_block_mask(and_masks(causal, window), None, None, SEQ, SEQ, device="cpu")


class Attention(nn.Module):
    def __init__(self, mods: Mods, kv: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, HIDDEN + 2 * kv * DIM), nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mods, self.kv = mods, kv
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.5, HEADS))
        self.table = nn.Parameter(torch.randn(HEADS, 2 * SEQ) / 4)
        self.prefix = nn.Buffer(torch.arange(BATCH) * 3)
        self.made = blocks(lambda b, h, i, j: (i // 8 == j // 8) & (i >= j))

    def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split([HIDDEN, self.kv * DIM, self.kv * DIM], -1)
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
        y = flex_attention(q, k, v, enable_gqa=self.kv < HEADS, **self.mods(self, batch))
        y = y[0] + y[1].lse[..., None] if isinstance(y, tuple) else y
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, mods: Mods, kv: int = KV) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(Attention(mods, kv) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, ids: Tensor, documents: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, {"documents": documents, "lengths": lengths})
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def documents(m: Attention, batch: Any) -> dict[str, Any]:
    d = batch["documents"]

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return d[b, i] == d[b, j]

    return blocks(and_masks(causal, same), BATCH)


def padded(m: Attention, batch: Any) -> dict[str, Any]:
    """Rows beyond a length see nothing."""
    n = batch["lengths"]
    return blocks(lambda b, h, i, j: (j < n[b]) & (i < n[b]), BATCH)


def one_by_one(m: Attention, batch: Any) -> dict[str, Any]:
    """Indices of one dim at a time, as in transformers. Without a gradient: torch itself has no backward of it."""
    d, bias = batch["documents"], m.table.detach()
    same = blocks(lambda b, h, i, j: d[b][i] == d[b][j], BATCH)
    return {"score_mod": lambda s, b, h, i, j: s + bias[h][i - j + SEQ]} | same


MODS: dict[str, Mods] = {
    "nothing": lambda m, batch: {},
    "causal": lambda m, batch: blocks(causal),
    "window": lambda m, batch: {"block_mask": OUTSIDE},
    "made in __init__": lambda m, batch: m.made,
    "prefix": lambda m, batch: blocks(or_masks(causal, lambda b, h, i, j: j < m.prefix[b]), BATCH),
    "documents": documents,
    "rows without a key": padded,
    "a mask for each head": lambda m, batch: blocks(lambda b, h, i, j: (i >= j) & (i - j < 4 * (h + 1)), None, HEADS),
    "alibi": lambda m, batch: {"score_mod": lambda s, b, h, i, j: s + m.slopes[h] * (j - i)} | blocks(causal),
    "a table": lambda m, batch: {"score_mod": lambda s, b, h, i, j: m.table[h, i - j + SEQ] + s, "scale": 0.2},
    "indices one by one": one_by_one,
    "hidden by score": lambda m, batch: {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))},
    "soft cap": lambda m, batch: {"score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)} | blocks(causal),
    "scaled, rows without a key": lambda m, batch: {"score_mod": lambda s, b, h, i, j: s * m.slopes[h]}
    | padded(m, batch),
    "log-sum-exps": lambda m, batch: {"return_aux": AuxRequest(lse=True), "kernel_options": {"BLOCK_M": 16}}
    | blocks(causal),
}  # fmt: skip
WRITTEN_OUT = {"soft cap", "scaled, rows without a key"}
#: Masks that are known from positions: none of [queries, keys] is made where the sequence is split.
BANDS = {"causal", "window"}
#: A bias with a gradient wants every key's row whole.
NO_RING = WRITTEN_OUT | {"alibi", "a table"}


def build(mods: Mods, kv: int = KV) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (BATCH, SEQ))
    lengths = torch.tensor([SEQ, 20, 7, 13])
    starts = torch.tensor([[0, 5, 40], [9, 17, 31], [3, 6, 30], [16, 16, 16]])
    held = (torch.arange(SEQ)[None, :, None] >= starts[:, None]).sum(-1)
    return Model(mods, kv), {"ids": ids, "documents": held, "lengths": lengths, "targets": ids.roll(-1, 1)}


@functools.cache
def reference(name: str, kv: int = KV) -> equality.Reference:
    with captured_flex.in_eager():  # torch's own, whose kernels have no backward on a CPU
        return equality.reference(lambda: build(MODS[name], kv))


@pytest.mark.parametrize("name", [n for n in MODS if n != "log-sum-exps"])
@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_methods(name: str, method: str) -> None:
    if method == "ring" and name in NO_RING:
        with pytest.raises(shardc.ShardcError, match="ring"):
            check(reference(name), {"cp": 4}, method)
    else:
        program = check(reference(name), {"cp": 4}, method)
        assert program.prove().gaps == ()
        assert not (name in BANDS and squares(program))
        names = {op_name(n.target) for n in calls(program.stages[0].graph)}
        assert bool(names & {"attention", "scaled_dot_product_attention"}) == (name not in WRITTEN_OUT)


def squares(program: shardc.Program) -> list[str]:
    """Names of masks [.., queries, keys] in a program."""
    values = ((n.name, n.meta["value"]) for s in program.stages for n in calls(s.graph))
    return [n for n, v in values if getattr(v, "dtype", None) == torch.bool and v.shape[-2:] == (SEQ, SEQ)]


SPLITS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "tp": ({"tp": 4}, TP),
    "dp, tp, microbatches": ({"dp": 2, "tp": 2}, TP | {"batch": {"microbatches": 2}}),
    "pp": ({"pp": 2, "tp": 2}, TP | PP),
    "zero 3, recomputed": (
        {"dp": 2, "tp": 2},
        TP | {"data": {"zero": 3}, "checkpoint": [{"match": "layers.*", "save": []}]},
    ),
}


@pytest.mark.parametrize("name", ["window", "documents", "a mask for each head", "alibi", "soft cap", "log-sum-exps"])
@pytest.mark.parametrize("what", SPLITS)
def test_without_a_split_sequence(name: str, what: str) -> None:
    one, (mesh, more) = reference(name), SPLITS[what]
    program = one.compile({"shardc": 1, "mesh": mesh, **more})
    equality.assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)
    assert program.prove().gaps == ()


@pytest.mark.parametrize("name", ["causal", "documents", "soft cap"])
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"cp": 2, "tp": 2}, TP),
        ({"pp": 2, "cp": 2}, PP),
        ({"dp": 2, "cp": 2}, {"data": {"zero": 3}}),
        ({"cp": 3}, {"uneven": "pad"}),
    ],
    ids=["tp", "pp", "zero 3", "padded"],
)
def test_with_a_split_sequence(name: str, mesh: dict[str, int], more: dict[str, Any]) -> None:
    check(reference(name), mesh, "auto", **more)


def test_a_causal_mask_is_what_kernels_know() -> None:
    """Without a split sequence, too: no mask of [queries, keys]."""
    program = reference("causal").compile({"shardc": 1, "mesh": {"dp": 2}})
    assert squares(program) == []
    assert squares(reference("documents").compile({"shardc": 1, "mesh": {"dp": 2}})) != []


def test_layers_under_one_block_mask_have_one_mask() -> None:
    """So that documents are looked for once (`ops.attention_reach`)."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            mask = create_block_mask(lambda b, h, i, j: ids[b, i] == ids[b, j], BATCH, None, SEQ, SEQ, device="cpu")
            for _ in range(3):
                q = self.a(x).unflatten(-1, (HEADS, 1)).transpose(1, 2)
                x = torch.compile(flex_attention)(q, q, q, block_mask=mask).transpose(1, 2).flatten(2)
            return x.square().mean()

    batch = {"x": torch.randn(BATCH, SEQ, DIM), "ids": torch.arange(SEQ).div(7).long().repeat(BATCH, 1)}
    with captured_flex.in_eager():
        one = equality.reference(lambda: (Two().double(), batch | {"x": batch["x"].double()}))
    program = check(one, {"cp": 4}, "ring")
    found = [n.target for n in calls(program.stages[0].graph)]
    assert (found.count(ops.attention), found.count(ops.attention_reach)) == (3, 1)


REFUSED: dict[str, tuple[Mods, str]] = {
    "one by one, with a gradient": (
        lambda m, batch: {"score_mod": lambda s, b, h, i, j: s + m.table[h][i]},
        r"torch has no backward.*\n.*table\[h, q_idx\] and not",
    ),
    "a row": (lambda m, batch: {"score_mod": lambda s, b, h, i, j: s + m.prefix.view(1, -1)[h].sum()}, "fewer indices"),
    "a row alone": (lambda m, batch: blocks(lambda b, h, i, j: batch["documents"][b], BATCH), "fewer indices than it"),
    "a slice": (lambda m, batch: {"score_mod": lambda s, b, h, i, j: s + m.table[h, 1:].sum()}, "fewer indices than"),
    "a sum": (lambda m, batch: {"score_mod": lambda s, b, h, i, j: s - s.sum()}, "calls sum, which does not work"),
    "in place": (lambda m, batch: {"score_mod": lambda s, b, h, i, j: s.mul_(2)}, "changes a tensor in place"),
    "a whole tensor": (lambda m, batch: blocks(lambda b, h, i, j: (m.slopes > 0) & (i >= j)), "to broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_said_of_each_score_is_refused(what: str) -> None:
    mods, said = REFUSED[what]
    with pytest.raises(shardc.ShardcError, match=said) as e:
        shardc.compile(*build(mods), {"shardc": 1, "mesh": {"dp": 2}})
    assert "test_flex.py" in str(e.value)


def test_blocks_that_no_mask_mod_hides_are_refused() -> None:
    """Kernels leave them out, torch's own definition of FlexAttention does not."""
    first = torch.ones(1, 1, 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2)
    both = torch.full((1, 1, 2), 2, dtype=torch.int32), first[1]

    def compiled(count: Tensor, which: Tensor) -> shardc.Program:
        made = BlockMask.from_kv_blocks(count, which, BLOCK_SIZE=SEQ // 2, seq_lengths=(SEQ, SEQ))
        return shardc.compile(*build(lambda m, batch: {"block_mask": made}), {"shardc": 1, "mesh": {"dp": 2}})

    with pytest.raises(shardc.ShardcError, match=r"leaves out blocks.*\n.*create_block_mask") as e:
        compiled(*first)
    assert "test_flex.py" in str(e.value)
    assert squares(compiled(*both)) == []


def test_a_block_mask_in_the_batch_is_refused() -> None:
    """It is no tensor, so that a program would have the first one's values."""
    model, batch = build(MODS["causal"])
    with pytest.raises(shardc.ShardcError, match=r"mask is a block mask of flex_attention.*same in every step"):
        shardc.compile(model, batch | {"mask": OUTSIDE}, {"shardc": 1, "mesh": {"dp": 2}})


def test_a_parameter_in_a_closure_is_refused() -> None:
    """A program would have it as a constant."""
    model, batch = build(lambda m, batch: {"score_mod": m.held})
    slopes = model.layers[0].slopes
    for layer in model.layers:
        layer.held = lambda s, b, h, i, j: s + slopes[h] * (j - i)
    with pytest.raises(shardc.ShardcError, match=r"reads the parameter 'layers\.0\.slopes' from .* a closure") as e:
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    assert "test_flex.py" in str(e.value)


def test_transformers_models() -> None:
    """Gemma 2 has windows, and a soft cap of scores."""

    def gemma() -> tuple[nn.Module, Any]:
        model, batch = hf.build((hf.FAMILIES | hf_more.FAMILIES)["gemma2"])
        model.set_attn_implementation("flex_attention")  # type: ignore[operator]
        return model, batch

    with captured_flex.in_eager():
        one = equality.reference(gemma)
    check(one, {"cp": 2}, "ulysses")
    check(one, {"cp": 2, "tp": 2}, "gather", **TP)
