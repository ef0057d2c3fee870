"""From every plan to every other one, in memory: 30 ordered pairs of plans of 8 ranks. Weights, buffers and the
optimizer's state are the slices of the same global tensors, bit for bit; and no more is sent than the elements that a
rank needs and does not have, counted here one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.api import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.zero.flat_partition import FlatShard
from tests.runtime.state.test_pairs import WIDTH, Experts

torch.set_num_threads(1)
ROWS = 8


class Block(nn.Module):
    """Fused weights of a size that few numbers of ranks divide, a frozen weight, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 18), nn.Linear(18, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, index, weights)


class Model(nn.Module):
    """Tied embeddings, and buffers that every step updates, or that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.seen.add_(1.0)
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


TP = {"*.gate_up": "column", "*.down": "row"}
PLANS: dict[str, dict[str, Any]] = {
    "dp=8 zero 3": {"mesh": {"dp": 8}, "data": {"zero": 3}},
    "tp=8 padded": {"mesh": {"tp": 8}, "shard": TP, "uneven": "pad"},
    "tp=2 dp=4 zero 1": {"mesh": {"tp": 2, "dp": 4}, "shard": TP, "data": {"zero": 1}},
    "pp=2 dp=2 tp=2": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "shard": TP,
        "pipeline": {"axis": "pp", "cut": ["layers.1"]},
        "batch": {"microbatches": 2},
    },
    "dp=2 ep=4 zero 2": {
        "mesh": {"dp": 2, "ep": 4},
        "experts": [{"match": "*.experts", "axis": "ep"}],
        "data": {"zero": 2},
    },
    "dp=4 tp=2 zero 1 bf16": {
        "mesh": {"dp": 4, "tp": 2},
        "shard": TP,
        "data": {"zero": 1},
        "precision": {"compute": "bfloat16"},
    },
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(step: int = 0) -> dict[str, Tensor]:
    ids = (torch.arange(ROWS * 5).view(ROWS, 5) * (step + 3)) % 11
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


@functools.cache
def program(name: str) -> Program:
    return shardc.compile(model(), batch(), {"shardc": 1, **PLANS[name]})


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


# --- what a rank has, as it is, without the code that is tested


@dataclass
class Local:
    """A tensor of a rank. run: the stretch of its local part that it is."""

    x: Param | Buffer
    value: Tensor
    run: FlatShard | None = None
    copy: bool = False  # of a whole parameter, at ZeRO 1 and 2
    narrow: bool = False  # a copy in the dtype to compute in

    def cut(self, whole: Tensor, program: Program, rank: int) -> Tensor:
        """What it is to be of a global tensor. Padding is zeros."""
        part = self.x.layout.local(whole, program.mesh, program.mesh.coords(rank))
        return part.reshape(-1)[self.run.start : self.run.stop] if self.run is not None else part


Rank = dict[str, list[Local]]


def held(engine: Any) -> Rank:
    """All that a rank has: {name: its forms}, with copies."""
    found: Rank = {}
    shards = engine.buckets.shards
    for p in engine.program.params:
        if p.name not in engine.params:
            continue
        own, run = engine.params[p.name], shards.get(p.name)
        forms = found.setdefault(p.fqn, [Local(p, own.detach().clone(), run)])
        whole = engine.buckets.kept_whole(p.name)
        if whole is not None and run is not None:
            forms.append(Local(p, whole.clone(), copy=True, narrow=whole.dtype != own.dtype))
        for name, x in engine.optimizer.state.get(own, {}).items() if engine.optimizer is not None else ():
            found[f"{p.fqn}.{name}"] = [Local(p, x.clone(), run if x.dim() else None)]
    for b in engine.program.buffers:
        if b.fqn and b.name in engine.buffers:
            found[b.fqn] = [Local(b, engine.buffers[b.name].clone())]
    return found


def whole(program: Program, ranks: list[Rank], name: str) -> Tensor:
    """A global tensor from what all ranks have of it."""
    parts: dict[tuple[int, ...], Tensor] = {}
    every = [(r, rank[name][0]) for r, rank in enumerate(ranks) if name in rank]
    x = every[0][1].x
    if every[0][1].value.dim() == 0:
        return every[0][1].value

    def key(coords: Any) -> tuple[int, ...]:
        return tuple(coords[a] for a, _ in x.layout.shards())

    shape = x.layout.local_shape(x.shape, program.mesh)
    for r, one in every:
        flat = parts.setdefault(key(program.mesh.coords(r)), torch.full(shape, 7.0, dtype=one.value.dtype).view(-1))
        run = one.run or FlatShard(shape, 0, flat.numel())
        flat[run.start : run.stop] = one.value.reshape(-1)
    return x.layout.join(lambda c: parts[key(c)].view(shape), program.mesh)


def bytes_to_move(old: Program, new: Program, before: list[Rank], after: list[Rank]) -> int:
    """Of all ranks: each element that a rank needs and does not have, in the narrower dtype."""
    total = 0
    for name in dict.fromkeys(n for rank in after for n in rank):
        x = next(rank[name][0].x for rank in after if name in rank)
        numbers = torch.arange(1, torch.Size(x.shape).numel() + 1)
        for r, (a, b) in enumerate(zip(before, after, strict=True)):
            got = torch.zeros(len(numbers) + 1, dtype=torch.bool)  # numbered elements that are there by now
            for form in a.get(name, []):
                if not form.narrow:
                    got[_elements(form, numbers.view(x.shape), old, r)] = True
            for form in b.get(name, []):
                if form.copy:  # is gathered from the others' stretches
                    continue
                needs = torch.zeros_like(got)
                needs[_elements(form, numbers.view(x.shape), new, r)] = True
                needs[0] = False  # padding
                total += int((needs & ~got).sum()) * form.value.element_size()
                got |= needs
    return total


def _elements(form: Local, numbers: Tensor, program: Program, rank: int) -> Tensor:
    if form.value.dim() == 0:
        return torch.ones(1, dtype=torch.long)
    return form.cut(numbers, program, rank).reshape(-1)


# --- the tests


@pytest.mark.parametrize("a", PLANS)
def test_to_every_other_plan(a: str) -> None:
    old, source = program(a), model()
    others = [b for b in PLANS if b != a]

    def work(mesh: LoopbackMesh) -> tuple[Rank, list[tuple[Rank, int]]]:
        engine = old.engine(source, adamw, mesh=mesh)
        engine.step(batch())
        found = []
        for b in others:
            first = len(mesh.records)
            other = engine.to(program(b))
            records = [*mesh.records[first:], *other.mesh.records]
            found.append((held(other), sum(r.bytes for r in records if not r.tag.startswith("bucket"))))
        return held(engine), found

    for b in others:
        program(b)  # before ranks run
    results = loopback(old.mesh, work)
    before = [rank for rank, _ in results]
    wholes = {n: whole(old, before, n) for n in dict.fromkeys(n for rank in before for n in rank)}
    for i, b in enumerate(others):
        new, after = program(b), [found[i][0] for _, found in results]
        for r, (name, form) in _each(after):
            expected = wholes[name] if form.value.dim() == 0 else form.cut(wholes[name], new, r)
            assert torch.equal(form.value, expected.to(form.value.dtype)), (a, b, r, name)
        assert {n for rank in after for n in rank} == set(wholes), (a, b)
        least, sent = bytes_to_move(old, new, before, after), sum(found[i][1] for _, found in results)
        assert 0 < least <= sent <= 1.02 * least, (a, b, least, sent)


def _each(ranks: list[Rank]) -> Iterator[tuple[int, tuple[str, Local]]]:
    for r, rank in enumerate(ranks):
        for name, forms in rank.items():
            for form in forms:
                yield r, (name, form)
