"""Scans of a split sequence: loops over tokens or over chunks are split by channels, heads or rows instead, by
all_to_all, where placement finds that cheaper than to gather what they read."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests import equality
from tests.equality import Reference
from tests.sequences import PP, TP, check, exchanged
from tests.zoo import HIDDEN, SEQ, VOCAB, hf, hf_more, labels, ready, sequences, tokens

STATE, CHUNK = 4, 4


class Loop(nn.Module):
    """h' = a h + b x and y = c h, token by token, for each channel: as Mamba, whose c is of all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.read = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, STATE)

    def forward(self, x: Tensor) -> Tensor:
        a, c = self.decay(x).sigmoid(), self.read(x)
        h, ys = x.new_zeros(x.shape[0], HIDDEN, STATE), []
        for t in range(x.shape[1]):
            h = a[:, t, :, None] * h + x[:, t, :, None] * c[:, t, None, :]
            ys.append((h @ c[:, t, :, None])[..., 0])
        return torch.stack(ys, 1)


class Chunks(nn.Module):
    """The same sum within chunks by products, and states from chunk to chunk: as Mamba 2, of 8 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(HIDDEN, 8 * STATE), nn.Linear(HIDDEN, 8 * STATE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(1, (-1, CHUNK)).unflatten(-1, (8, -1)) for y in (self.query(x), self.key(x), x))
        within = torch.einsum("bclhn,bcshn->bchls", q, k).tril()
        y = torch.einsum("bchls,bcshp->bclhp", within, v)
        states = torch.einsum("bclhn,bclhp->bchnp", k, v)
        before, h = [], torch.zeros_like(states[:, 0])
        for i in range(states.shape[1]):
            before.append(h)
            h = 0.5 * h + states[:, i]
        y = y + torch.einsum("bclhn,bchnp->bclhp", q, torch.stack(before, 1))
        return y.flatten(3).flatten(1, 2)


class Mixing(nn.Module):
    """A recurrence whose state mixes all channels: none of them goes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x[:, 0] * 0, []
        for t in range(x.shape[1]):
            h = torch.tanh(self.state(h) + x[:, t])
            ys.append(h)
        return torch.stack(ys, 1)


class Model(nn.Module):
    def __init__(self, mixer: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(mixer() for _ in range(2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (HIDDEN,)))
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


@functools.cache
def one(mixer: type[nn.Module], rows: int = 1) -> Reference:
    batch = {"ids": tokens()[:rows], "targets": labels()[:rows]}
    return equality.reference(lambda: (ready(Model(mixer), torch.float64), batch))


def moves(program: shardc.Program) -> Counter[str]:
    """Collectives of values with numbers, by kind."""
    nodes = [n for s in program.stages for n in s.graph.nodes if "collective" in n.meta]
    return Counter(n.meta["collective"].kind for n in nodes if n.meta["value"].dtype.is_floating_point)


def told(program: shardc.Program) -> list[str]:
    return [n for n in program.notes if "read tokens of other ranks" in n]


@pytest.mark.parametrize("mixer", [Loop, Chunks])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_channels_are_split_instead(mixer: type[nn.Module], cp: int) -> None:
    program = check(one(mixer), {"cp": cp})
    assert program.prove().ok
    assert len(told(program)) == 2, "of each layer"
    assert "instead of the sequence, by all_to_all" in told(program)[0]
    sent = moves(program)
    assert sent["all_to_all"] >= 4
    assert sent["all_reduce"] < SEQ, "no token is summed by itself"


@pytest.mark.parametrize("mixer", [Loop, Chunks])
def test_no_rank_has_a_whole_scan(mixer: type[nn.Module]) -> None:
    """Each op of a scan works on a share, but for what all channels share: there is less of it than of channels."""
    program = check(one(mixer), {"cp": 4})
    whole = one(mixer).captured
    largest = max(
        v.nbytes() for n in whole.graph.nodes if ".layers" in f".{n.meta.get('source', '')}" for v in _values(n)
    )
    nodes = [
        n
        for n in program.stages[0].graph.nodes
        if n.op == "call_function" and str(n.meta["source"]).startswith("layers")
    ]
    assert max(v.nbytes(program.mesh) for n in nodes for v in _values(n)) <= largest / 4


def _values(node: Any) -> list[Any]:
    found = node.meta.get("value")
    return list(found) if isinstance(found, tuple) else [found] if found is not None else []


def test_of_chunks_that_divide_states_alone_are_sent() -> None:
    """4 chunks on 2 ranks: what is within a chunk stays where it is."""
    program = check(one(Chunks), {"cp": 2}, balance="none")
    states = SEQ // CHUNK * 8 * STATE * HIDDEN // 8  # float64, of a layer
    turned = [
        n for n in program.stages[0].graph.nodes if "collective" in n.meta and n.meta["collective"].kind == "all_to_all"
    ]
    assert turned
    assert {n.meta["value"].shape[-2:] for n in turned} == {(STATE, HIDDEN // 8)}
    # there and back, half of a rank's half, of two ranks and two layers
    assert exchanged(program, one(Chunks), "forward") == 2 * 2 * 2 * states * 8 // 2


#: Of both kinds, with what else splits rows, channels and tokens.
TOGETHER: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"cp": 2, "tp": 2}, TP),
    "pp": ({"pp": 2, "cp": 2}, PP),
    "zero 3 over cp": ({"cp": 4}, {"data": {"zero": 3}}),
    "dp behind cp, microbatches": ({"cp": 2, "dp": 2}, {"batch": {"microbatches": 2}}),
    "recomputed": ({"cp": 2}, {"checkpoint": [{"match": "layers.*", "save": []}]}),
    "two axes": ({"far": 2, "near": 2}, {"axis": ["far", "near"]}),
    "padded": ({"cp": 3}, {"uneven": "pad"}),
}


@pytest.mark.parametrize("what", TOGETHER)
@pytest.mark.parametrize("mixer", [Loop, Chunks])
def test_with_every_other_section(mixer: type[nn.Module], what: str) -> None:
    mesh, more = TOGETHER[what]
    rows = 4 if what in ("pp", "dp behind cp, microbatches") else 1
    program = check(one(mixer, rows), mesh, "auto", **more)
    assert program.prove().ok
    # 64 channels and 8 heads are not divisible by 3, which is noted
    assert bool(told(program)) != (what == "padded")
    assert bool(equality.gathered(program)) or what != "padded"


def test_what_mixes_channels_is_split_by_rows_or_gathered_once() -> None:
    program = check(one(Mixing, 4), {"cp": 4}, balance="zigzag")
    assert "split by dim 0 of f64[4, 16, 64] instead" in told(program)[0]
    program = check(one(Mixing, 1), {"cp": 4})
    assert not told(program)
    assert any("f64[1, 16, 64] is gathered over cp, because aten.select.int" in n for n in program.notes)
    assert moves(program)["all_reduce"] < SEQ, "a token by itself is not summed"


def test_the_cheapest_is_taken() -> None:
    """A sort of many rows is turned; one token that is picked out of a sequence is not worth it."""

    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x[:, -1].unsqueeze(1)

    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(1).values

    assert not told(check(one(Picks), {"cp": 4}))
    program = check(one(Sorts), {"cp": 4})
    assert len(told(program)) == 2
    assert moves(program)["all_gather"] == 0


#: Families of transformers, one row: channels or heads have to be what is split.
FAMILIES = {"mamba": 2, "mamba2": 4, "rwkv": 2, "minimax": 4}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    family = (hf_more.FAMILIES | sequences.FAMILIES)[name]

    def built() -> tuple[nn.Module, Any]:
        model, batch = hf.build(family)
        return model, {k: x[:1] for k, x in batch.items()}

    program = check(equality.reference(built), {"cp": FAMILIES[name]}, "auto")
    assert told(program)
    assert program.prove().ok
