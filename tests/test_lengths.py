"""Batches of other lengths than were compiled: the step of one device; padded to the lengths that the spec names."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine

VOCABULARY, IGNORED = 12, -100
Batch = dict[str, Tensor]


class Language(nn.Module):
    """Attention that sees no later position, so that padding at the end changes nothing; loss over counted tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(64, 8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = h + self.down(self.up(h).relu())
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


NET = Language()


def batch_of(length: int, rows: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed + length)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[::3, length // 2 :] = IGNORED
    return {"ids": ids, "labels": labels}


TP = {"up": "column", "down": "row"}
SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp zero3": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": 3}},
    "sequence": {"mesh": {"tp": 2}, "shard": TP, "activations": {"qkv:in": {1: "tp"}}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["up"]}, "batch": {"microbatches": 2}},
    "microbatches": {"mesh": {"dp": 2}, "data": {"zero": 2}, "batch": {"microbatches": 2}},
}
STEPS = [batch_of(16), batch_of(10), batch_of(24), batch_of(10, seed=1), batch_of(12, rows=4)]
BUCKETS = {"lengths": [16, 32], "pad": {"ids": 0, "labels": IGNORED}}


def compiled(spec: dict[str, Any], example: Batch = STEPS[0]) -> Program:
    return shardc.compile(NET, example, {"shardc": 1, **spec})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def plain(batches: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(NET)
    optimizer = sgd(model.parameters())
    losses = []
    for b in batches:
        optimizer.zero_grad()
        value = model(**b)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {n: x.detach() for n, x in model.state_dict().items()}


def check(program: Program, batches: list[Batch], expected: list[Batch], compilations: int) -> None:
    losses, weights = plain(expected)

    def work(mesh: LoopbackMesh) -> tuple[list[float], dict[str, Tensor]]:
        engine = program.engine(NET, sgd, mesh=mesh)
        values = []
        for b in batches:
            seen = float(engine.evaluate(b))
            values.append(float(engine.step(b)))
            assert seen == pytest.approx(values[-1], rel=1e-12)
        assert len(engine._model._recompiled) == compilations
        return values, engine.full_state_dict()

    for values, state in loopback(program.mesh, work):
        assert values == pytest.approx(losses, rel=1e-12)
        for n, x in weights.items():
            torch.testing.assert_close(state[n], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_other_lengths_compile_when_they_come(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(compiled(SPECS[name]), STEPS, STEPS, 3)
    said = capsys.readouterr().err
    assert len(re.findall(r"note: compiled for ids \[8, 10\], labels \[8, 10\] in", said)) == 1


@pytest.mark.parametrize("name", ["dp", "tp zero3", "pp"])
def test_lengths_that_the_spec_names(name: str) -> None:
    """Padded by numbers that the loss does not count, the step is that of the batch as it came."""
    spec = copy.deepcopy(SPECS[name])
    spec["batch"] = {**spec.get("batch", {}), **BUCKETS}
    check(compiled(spec), STEPS[:4], STEPS[:4], 1)


class Sentences(Dataset[Batch]):
    """Of different lengths, so that ranks' parts of a batch have different ones."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Batch:
        return {n: x[0] for n, x in batch_of(5 + i % 9, rows=1, seed=i).items()}


def collate(samples: list[Batch]) -> Batch:
    longest = max(len(s["ids"]) for s in samples)
    fills = {"ids": 0, "labels": IGNORED}
    return {n: torch.stack([F.pad(s[n], (0, longest - len(s[n])), value=v) for s in samples]) for n, v in fills.items()}


@pytest.mark.parametrize("lengths", [[8, 16], []])
def test_parts_of_ranks_get_one_length(lengths: list[int]) -> None:
    """A loader pads each rank's samples by themselves; the spec's numbers pad the parts to one length."""
    batch = {"lengths": lengths, "pad": BUCKETS["pad"]}
    program = compiled({"mesh": {"dp": 2}, "batch": batch})
    samples = [Sentences()[i] for i in range(16)]
    losses, _ = plain([collate(samples[:8]), collate(samples[8:])])

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(NET, sgd, mesh=mesh)
        loader = engine.loader(Sentences(), shuffle=False, collate_fn=collate)
        return [float(engine.step(part, local=True)) for part in loader]

    for values in loopback(program.mesh, work):
        assert values == pytest.approx(losses, rel=1e-12)


def test_parts_of_different_lengths_are_told() -> None:
    program = compiled({"mesh": {"dp": 2}})

    def work(mesh: LoopbackMesh) -> None:
        program.engine(NET, sgd, mesh=mesh).step(batch_of(10 + mesh.rank, rows=4), local=True)

    with pytest.raises(ShardcError, match=r"length of the part of the batch differs between(?s:.*)batch: {lengths"):
        loopback(program.mesh, work)


def test_parts_of_another_length() -> None:
    """All ranks' parts have it: they need no padding."""
    program = compiled(SPECS["tp zero3"])
    losses, _ = plain([STEPS[1]])

    def work(mesh: LoopbackMesh) -> float:
        rows = slice(4 * mesh.coordinate("dp"), 4 * mesh.coordinate("dp") + 4)
        engine = program.engine(NET, sgd, mesh=mesh)
        return float(engine.step({n: x[rows] for n, x in STEPS[1].items()}, local=True))

    assert loopback(program.mesh, work) == pytest.approx(losses * 4, rel=1e-12)


def engine_of(spec: dict[str, Any], mesh: Any) -> Engine:
    return compiled(spec).engine(NET, sgd, mesh=mesh)


def one(spec: dict[str, Any], *batches: Batch) -> list[float]:
    program = compiled({"mesh": {"dp": 1}, **spec})

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(NET, sgd, mesh=mesh)
        return [float(engine.step(b)) for b in batches]

    return loopback(program.mesh, work)[0]


def test_whole_numbers_of_another_width() -> None:
    narrow = {n: x.to(torch.int32) for n, x in STEPS[0].items()}
    assert one({}, narrow) == pytest.approx(plain([STEPS[0]])[0], rel=1e-12)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardcError, match=r"length 40 is longer than all of the spec's lengths, 16, 32\n.*add 40"):
        one({"batch": BUCKETS}, batch_of(40))
    with pytest.raises(ShardcError, match=r"labels: its dim 1 has the batch's length, 10, .* no number to pad with"):
        one({"batch": {"lengths": [16], "pad": {"ids": 0}}}, batch_of(10))
    with pytest.raises(ShardcError, match="padding batches to these lengths needs the numbers"):
        one({"batch": {"lengths": [16]}})
    with pytest.raises(ShardcError, match=r"compiling it for ids \[8, 10\] fails: "):
        one({}, {"ids": STEPS[1]["ids"], "labels": STEPS[0]["labels"]})
    monkeypatch.setattr("shardc.recompile.MOST_SIZES", 2)
    with pytest.raises(ShardcError, match=r"batches of 2 other sizes .* now comes ids \[8, 13\](?s:.*)lengths: \[128"):
        one({}, *map(batch_of, (11, 12, 13)))


def test_a_split_length_that_does_not_divide() -> None:
    """Refused, or padded, as the spec says."""
    spec = SPECS["sequence"]
    with pytest.raises(ShardcError, match=r"compiling it for ids \[8, 11\].* is not divisible"):
        check(compiled(spec), [batch_of(11)], [batch_of(11)], 1)
    check(compiled({**spec, "uneven": "pad"}), [batch_of(11)], [batch_of(11)], 1)
