"""Documents in one row, under a ring: what no document of a batch spans is neither sent nor computed, and what comes
out is one device's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir.placement import Shard, runs
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.ops.attention import blocks as attention_blocks
from shardc.runtime.step.engine import Engine
from tests import equality
from tests.equality import assert_equal
from tests.sequences import CP, PP, TP, check, exchanged
from tests.zoo import HEADS, HIDDEN, VOCAB, ready


class Packed(nn.Module):
    """Layers of causal attention within documents, given by the ids of each token's document."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        sizes = {"qkv": 3 * HIDDEN, "up": HIDDEN, "down": HIDDEN}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(HIDDEN, n) for name, n in sizes.items()}) for _ in range(layers)
        )
        self.dropout = dropout

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (place[None, :] <= place[:, None])
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer["qkv"](x).chunk(3, -1))
            y = (
                F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
                .transpose(1, 2)
                .flatten(2)
            )
            x = x + layer["down"](F.relu(layer["up"](y)))
        same = F.pad(document[:, 1:] == document[:, :-1], (0, 1))  # a document's last token has no next one
        following = torch.where(same, ids.roll(-1, 1), -100)
        return F.cross_entropy(self.out(x).flatten(0, 1), following.flatten())


def packed(
    rows: int, *lengths: int, layers: int = 2, dropout: float = 0.0, ids_as: torch.dtype = torch.int64
) -> equality.Reference:
    """Documents of these lengths; in each further row they begin a token earlier."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    document = torch.stack([document.roll(-i) for i in range(rows)]).to(ids_as)
    ids = torch.randint(VOCAB, document.shape, generator=torch.Generator().manual_seed(3))
    return equality.reference(
        lambda: (ready(Packed(layers, dropout), torch.float64), {"ids": ids, "document": document})
    )


PACKED_WITH: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "alone": ({"cp": 4}, {}),
    "dp": ({"dp": 2, "cp": 2}, {}),
    "tp": ({"cp": 2, "tp": 2}, TP),
    "pp": ({"pp": 2, "cp": 2}, PP),
    "pp, ids of floats": ({"pp": 2, "cp": 2}, PP),
    "zero 3": ({"cp": 4}, {"data": {"zero": 3}}),
    "recomputed": ({"cp": 2}, {"checkpoint": [{"match": "layers.*", "save": []}]}),
    "microbatches": ({"cp": 2}, {"batch": {"microbatches": 4}}),
    "padded": ({"cp": 5}, {"uneven": "pad"}),
}


@pytest.mark.parametrize("what", PACKED_WITH)
def test_documents_with_every_other_section(what: str) -> None:
    mesh, more = PACKED_WITH[what]
    ids_as = torch.float64 if "floats" in what else torch.int64  # gathered once: masks are sent to the next stage
    program = check(packed(4, 5, 12, 3, 20, 8, ids_as=ids_as), mesh, "ring", **more)
    for stage in program.stages:
        reach = stage.graph.find_nodes(op="call_function", target=ops.attention_reach)
        assert len(reach) == 1  # one for all attention under a mask
    assert program.prove().ok


@pytest.mark.parametrize("balance", ["none", "zigzag"])
def test_what_no_document_spans_is_not_sent(balance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor computed: the bytes are those of the keys that some query of another rank sees, counted pair by pair."""
    lengths, cp = (70, 300, 200, 30, 360, 64), 4
    one, size = packed(1, *lengths), sum(lengths)
    program = check(one, {"cp": cp}, "ring", balance)
    document = one.batch["document"][0]
    mask = (document[:, None] == document[None, :]).tril()
    shard = Shard(0, 2, mirrored=True) if balance == "zigzag" else Shard(0)
    keys = 0
    for rank in range(cp):
        own = torch.zeros(size, dtype=torch.bool)
        for _, start, length in runs(size, [(shard, cp, rank)]):
            own[start : start + length] = True
        keys += int((mask[own].any(0) & ~own).sum())
    real, pairs = attention_blocks.forward, []

    def forward(rule: Any, q: Tensor, *rest: Any) -> Any:
        assert rule.mask.any()
        pairs.append(q.shape[2] * rest[0].shape[2])
        return real(rule, q, *rest)

    monkeypatch.setattr(attention_blocks, "forward", forward)
    for direction, times in (("forward", 1), ("backward", 2)):  # again, and gradients home
        layers, keys_and_values = 2, 2
        assert exchanged(program, one, direction) == layers * times * keys * keys_and_values * HIDDEN * 8  # float64
    assert sum(pairs) / 2 / 2 < 0.6 * size * size / 2  # runs, layers: of a causal square


def test_masks_without_a_single_pair_in_a_part() -> None:
    """Every document lies on one rank: nothing is sent at all; and rows that see nothing give zeros."""
    program = check(packed(1, 16, 16, 16, 16), {"cp": 4}, "ring", "none")
    found: list[str] = []
    one = packed(1, 16, 16, 16, 16)

    def work(mesh: Any) -> None:
        Engine(program, one.model, None, 0, mesh=mesh, check=False).backward(one.batch)
        found.extend(r.kind for r in mesh.records)

    loopback(program.mesh, work)
    assert "all_to_all" not in found
    assert "all_gather" in found


def test_documents_and_dropout() -> None:
    """Detail 14, of keys that are left out: they do not shift the others' numbers."""
    one = packed(2, 5, 12, 3, 20, 8, dropout=0.3)
    specs = [{"mesh": {"cp": n}, "sequence": CP | {"method": m}} for n, m in ((1, "auto"), (4, "ring"), (2, "gather"))]
    want, *others = (
        shardc.verify.simulate(one.compile({"shardc": 1, **spec}), one.model, one.batch, seed=7) for spec in specs
    )
    for got in others:
        assert_equal(got, want.loss, want.grads)
