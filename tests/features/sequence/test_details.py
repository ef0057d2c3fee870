"""Details of a split sequence that go wrong elsewhere, each with a test (docs/reference/sequence-details.md). Here:
the table itself, and tests of those details that no other file has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir.mesh import Mesh
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import equality
from tests.features.sequence.test_methods import built, sdpa, sinks
from tests.sequences import CP, check
from tests.zoo import BATCH, HEADS, HIDDEN, SEQ, labels, ready

ROOT = Path(__file__).resolve().parents[3]


def test_each_detail_has_a_test() -> None:
    page = (ROOT / "docs" / "reference/sequence-details.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^\[(\w+)\]: \.\./\.\./(.*)$", page, re.MULTILINE))
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.MULTILINE)
    assert [int(n) for n, _ in rows] == list(range(1, 18))
    for _, tests in rows:
        named = re.findall(r"`(\w+)` in \[(\w+)\]", tests)
        assert named
        for name, file in named:
            assert f"def {name}(" in (ROOT / files[file]).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_valid_tokens_of_all_ranks_count(method: str) -> None:
    """Detail 9: a mean over valid tokens, where some ranks and microbatches have none, weighted or not."""
    targets = labels().clone()
    targets[:, SEQ // 2 :] = -100  # the second rank has none
    targets[:4, 1:] = -100  # and the first microbatch has few
    one = built(lambda m, q, k, v: sdpa(q, k, v, is_causal=True), targets=targets)
    check(one, {"cp": 2}, method, "none")
    check(one, {"cp": 2, "dp": 2}, method, "zigzag", batch={"microbatches": 2})


@pytest.mark.parametrize("balance", ["none", "zigzag"])
def test_each_token_is_on_one_rank(balance: str) -> None:
    """Detail 11: split once. Of every input the ranks' parts are all tokens, each of them once."""
    one = built(lambda m, q, k, v: sdpa(q, k, v))
    spec = {"shardc": 1, "mesh": {"dp": 2, "cp": 4}, "sequence": CP | {"balance": balance}}
    program = one.compile(spec)
    place = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    for x in program.inputs:
        parts = [x.layout.local(place, program.mesh, {"dp": i, "cp": r}) for i in range(2) for r in range(4)]
        assert {p.shape for p in parts} == {(BATCH // 2, SEQ // 4)}
        assert sorted(torch.cat([p.flatten() for p in parts]).tolist()) == list(range(BATCH * SEQ))


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_sizes_that_are_all_equal(method: str) -> None:
    """Detail 12: rows, tokens, heads and features are 8 each, so that no wrong dim is noticed by its size."""

    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(8, 64), nn.Linear(64, 192), nn.Linear(64, 8)

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            q, k, v = (x.unflatten(-1, (8, 8)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
            y = sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return F.cross_entropy(self.out(y).flatten(0, 1), targets.flatten())

    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(0, 8, (8, 8), generator=generator) for _ in range(2))
    one = equality.reference(lambda: (ready(Cube(), torch.float64), {"ids": ids, "targets": targets}))
    for mesh in ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}):
        check(one, mesh, method)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_a_ring_sends_heads_of_keys_and_no_copies(groups: int) -> None:
    """Detail 8: what is sent grows with the heads of keys and values, not with those of queries."""
    one = built(lambda m, q, k, v: sdpa(q, k, v, enable_gqa=True), groups)
    program = check(one, {"cp": 4}, "ring", "none")
    (said,) = [n.meta["collective"].bytes for n in program.stages[0].graph.nodes if n.target is ops.attention]
    keys = BATCH * (SEQ // 4) * groups * (HIDDEN // HEADS) * 8
    assert said == 2 * 3 * keys


@pytest.mark.parametrize("how", [{}, {"is_causal": True}], ids=str)
def test_blocks_are_joined_in_float32(how: dict[str, Any]) -> None:
    """Detail 16: of eight blocks in bfloat16, results and gradients are as near to float64's as those of one block."""
    length, eps = 256, torch.finfo(torch.bfloat16).eps
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, length, 16, generator=generator).bfloat16() for _ in range(4))

    def step(parts: list[Tensor], weight: Tensor, *options: Any) -> list[Tensor]:
        leaves = [p.clone().requires_grad_() for p in parts]
        y = ops.attention(*leaves, *options)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]

    whole = (None, 0.0, how.get("is_causal", False), None, False, None, 0)
    exact = step([x.double() for x in (q, k, v)], g.double(), *whole)

    def work(mesh: LoopbackMesh) -> list[Tensor]:
        digits = ((2, "cp", 1, ()), (3, "cp", 1, ()))
        own = [x.chunk(8, 2)[mesh.coordinate("cp")].contiguous() for x in (q, k, v, g)]
        return step(own[:3], own[3], *whole, mesh, (1, 2, length, length), digits, (), "cp")

    ranks = loopback(Mesh((("cp", 8),)), work)
    for i, right in enumerate(exact):
        joined = torch.cat([r[i] for r in ranks], 2)
        assert joined.dtype == torch.bfloat16
        assert float((joined - right).norm() / right.norm()) < 2 * eps


def test_a_sink_s_gradient_is_a_sum_over_ranks() -> None:
    """Detail 13: each rank finds the part of its own queries."""
    one = built(sinks)
    assert float(one.grads["sink"].norm()) > 0
    sim = shardc.verify.simulate(check(one, {"cp": 4}, "gather"), one.model, one.batch)
    torch.testing.assert_close(sim.grads["sink"], one.grads["sink"], rtol=1e-12, atol=1e-15)
