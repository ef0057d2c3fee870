"""The fewest bytes from which backward's wishes follow by ops that are cheap: against all subsets of small graphs, and
against closed forms of known layers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import source_of
from shardc.passes.recompute.fewest_bytes import MinCut
from tests.cost import papers
from tests.gpt3 import gpt3

Graph = dict[int, tuple[int, list[int] | None]]  # value -> (bytes, operands if cheap)


def follows(graph: Graph, kept: set[int], wanted: set[int]) -> bool:
    known = set(kept)
    for v, (_, operands) in graph.items():  # in order
        if operands is not None and all(u in known for u in operands):
            known.add(v)
    return wanted <= known


def drawn(seed: int) -> tuple[Graph, set[int]]:
    r = random.Random(seed)
    graph: Graph = {}
    for v in range(9):
        operands = r.sample(range(v), min(v, r.randint(1, 3))) if v and r.random() < 0.7 else None
        graph[v] = (r.randint(1, 6), operands)
    return graph, set(r.sample(range(9), 3))


@pytest.mark.parametrize("seed", range(60))
def test_no_subset_has_fewer(seed: int) -> None:
    graph, wanted = drawn(seed)
    cut = MinCut()
    for v, (nbytes, operands) in graph.items():
        cut.value(v, nbytes, operands)
    for v in wanted:
        cut.require(v)
    kept = set(cut.cut())
    assert follows(graph, kept, wanted)
    subsets = itertools.chain.from_iterable(itertools.combinations(graph, n) for n in range(len(graph) + 1))
    fewest = min(sum(graph[v][0] for v in s) for s in subsets if follows(graph, set(s), wanted))
    assert sum(graph[v][0] for v in kept) == fewest


def test_of_equal_cuts_the_last_is_taken() -> None:
    """After it least runs again."""
    cut = MinCut()
    cut.value("x", 2, None)
    cut.value("wide", 4, ["x"])
    cut.value("y", 2, ["wide"])
    cut.value("view", None, ["y"])
    cut.require("view")
    assert cut.cut() == ["y"]


def test_what_is_there_anyway_costs_nothing() -> None:
    cut = MinCut()
    cut.value("scaled", 8, [])  # of a weight
    cut.require("scaled")
    assert cut.cut() == []


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(self.fc(x).transpose(0, 1))).transpose(0, 1) + x
        return result


class TurnedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Turned() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def test_views_run_again_whatever_may() -> None:
    """They take nothing: a norm of a transposed product follows from the product."""

    def kept(again: list[str]) -> list[int]:
        spec = {"shardc": 1, "mesh": {"dp": 1}, "checkpoint": [{"match": "h.*", "recompute": again}]}
        return [r.kept for r in shardc.compile(TurnedStack(), torch.randn(4, 4, 8), spec, prove=False).regions]

    assert kept(["norm"]) == kept(["norm", "elementwise"])


# --- layers

b, s, h, a, t = 5, 40, 96, 6, 2  # batch, sequence, hidden, heads, tp
SPEC = {"shard": {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row"}, "activations": {"h.*": {1: "tp"}}}


@pytest.mark.parametrize(
    ("again", "kept"),
    [
        # two norms' inputs 4, q, k, v 6, attention's result 2, before the activation 8; softmax's result 2 as
        ("cheap", 20 * s * b * h / t + 2 * a * s * s * b / t),
        # with attention's products run again (Korthikanti et al.'s selective recomputation, where Megatron keeps 34):
        # nothing of size s², and its result follows from q, k, v
        (["elementwise", "norm", "gather", "matmul"], 18 * s * b * h / t),
    ],
    ids=["cheap", "selective"],
)
def test_a_gpt_layer_keeps(again: Any, kept: Any) -> None:
    model, batch = gpt3()
    spec = {"shardc": 1, "mesh": {"tp": 2}, **SPEC, "checkpoint": [{"match": "h.*", "recompute": again}]}
    program = shardc.compile(model, batch, spec, prove=False)
    assert papers.kept(program.cost(), 1) == kept
    assert program.regions[-1].again == 2  # the gathers before q, k, v and before fc


class Llama(nn.Module):
    """A layer as transformers writes it: norms in float32 op by op, a gated MLP of 3.5 times the width."""

    def __init__(self, hidden: int, heads: int, kv: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.ln_1, self.ln_2 = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, hidden * 7 // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden * 7 // 2, hidden, bias=False)

    @staticmethod
    def norm(x: Tensor, w: Tensor) -> Tensor:
        y = x.float()
        return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        y = self.norm(x, self.ln_1)
        q, k, v = (f(y).view(n, length, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(z.transpose(1, 2).reshape(n, length, -1))
        y = self.norm(x, self.ln_2)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 256)
        self.h = nn.ModuleList(Llama(256, 8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.h:
            x = layer(x)
        return x.float().square().mean()


def test_a_llama_layer_keeps_24_bytes_and_statistics() -> None:
    """x before each norm 4, q 2, k and v 2 for half as many heads, attention's result 2, gate and up 14: 24 of s·b·h/t.
    Beside them numbers a row: two of a norm's in float32, and attention's in float32 a head.
    """
    with torch.device("meta"):
        model, x = Stack().bfloat16(), torch.empty(3, 40, 48, dtype=torch.bfloat16)
    shard = {"h.*.{q,k,v,gate,up}": "column", "h.*.{o,down}": "row"}
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": shard, "activations": {"h.*": {1: "tp"}}}

    def kept(**more: Any) -> int:
        program = shardc.compile(model, x, {**spec, **more}, prove=False)
        return sum(k.storage.nbytes for k in program.cost().kept()[0] if source_of(k.node).module.startswith("h.1"))

    rows = 3 * 40
    unit = rows * 256 // 2  # s·b·h/t
    assert (
        kept(checkpoint=[{"match": "h.*", "recompute": "cheap"}]) == 24 * unit + 2 * rows // 2 * 4 + rows * 8 // 2 * 4
    )
    assert kept() > 2 * 24 * unit
