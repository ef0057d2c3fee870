"""Who owns which matrix, and exactly what has to move."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.fake_mesh import rank_of
from shardc.features.matrices.exchange import Exchange
from shardc.features.matrices.owners import owners, work
from shardc.features.matrices.program import Cut, fault, matrices_of, with_cuts
from shardc.features.matrices.routes import Routes
from shardc.features.matrices.runtime import CAUSES
from shardc.ir.stored import Param
from shardc.report.comm import comm_rows, comm_table
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine_optimizer import assumed

#: Of Llama 3 8B: the matrices of a layer, and how many layers there are.
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LAYERS = 32


@pytest.mark.parametrize(("ranks", "stages"), [(64, 1), (64, 4), (16, 1), (8, 2)])
def test_owners_of_llama_8b_have_even_work(ranks: int, stages: int) -> None:
    """Within 10 % of even; of every stage of a pipeline too."""
    works = [work(shape) for _ in range(LAYERS // stages) for shape in LAYER]
    load = [0.0] * (ranks // stages)
    for w, owner in zip(works, owners(works, len(load)), strict=True):
        load[owner] += w
    even = sum(works) / len(load)
    assert min(load) > 0
    assert max(load) <= 1.1 * even


def test_owners_without_enough_matrices() -> None:
    found = owners([1.0, 3.0, 2.0], 4)
    assert len(set(found)) == 3
    assert owners([], 4) == []


def test_work_grows_with_the_sides() -> None:
    """One product of a step of Muon on a square matrix of n: 5 iterations of 3 n^3 multiplications."""
    n = 1 << 14
    assert work((n, n)) == pytest.approx(15 * n**3, rel=0.01)
    assert work((n, 4 * n)) == work((4 * n, n)) == pytest.approx(5 * 9 * n**3, rel=0.01)
    assert work((n, n), products=False) == work((n * n,)) == 1e3 * n * n


def param(shape: tuple[int, ...], **more: Any) -> Param:
    return Param("w", "m.w", shape, torch.float64, **more)


def test_cuts() -> None:
    (one,) = matrices_of(param((6, 4)))
    assert (one.name, one.offset, one.size, one.shape) == ("m.w", (0, 0), (6, 4), (6, 4))
    fused = matrices_of(param((6, 4)), [Cut(0, (4, 1, 1))])
    assert [(m.name, m.offset, m.size) for m in fused] == [
        ("m.w[0]", (0, 0), (4, 4)),
        ("m.w[1]", (4, 0), (1, 4)),
        ("m.w[2]", (5, 0), (1, 4)),
    ]
    experts = matrices_of(param((2, 6, 4)), [Cut(0, (1, 1), alone=True), Cut(2, (2, 2))])
    assert [(m.name, m.offset, m.shape) for m in experts] == [
        ("m.w[0,0]", (0, 0, 0), (6, 2)),
        ("m.w[0,1]", (0, 0, 2), (6, 2)),
        ("m.w[1,0]", (1, 0, 0), (6, 2)),
        ("m.w[1,1]", (1, 0, 2), (6, 2)),
    ]
    stack = matrices_of(param((2, 6, 4), members=("e.0.w", "e.1.w")), [Cut(0, (3, 3))])
    assert [(m.name, m.offset, m.shape) for m in stack] == [
        ("e.0.w[0]", (0, 0, 0), (3, 4)),
        ("e.0.w[1]", (0, 3, 0), (3, 4)),
        ("e.1.w[0]", (1, 0, 0), (3, 4)),
        ("e.1.w[1]", (1, 3, 0), (3, 4)),
    ]
    assert fault((6, 4), [Cut(1, (2, 2))]) == ""
    assert "no dim 2" in fault((6, 4), [Cut(2, (2,))])
    assert "do not sum to the 6" in fault((6, 4), [Cut(0, (2, 2))])
    assert "twice" in fault((6, 4), [Cut(0, (6,)), Cut(0, (6,))])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16, bias=False).double(), nn.Linear(16, 8, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


TWO = Two()
X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SHARD = {"up": "column", "down": "row"}
SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "shard": SHARD},
    **{f"zero {z}": {"mesh": {"dp": 2, "tp": 2}, "shard": SHARD, "data": {"zero": z}} for z in (0, 1, 3)},
    "many small": {"mesh": {"dp_outer": 2, "dp": 4}, "data": {"axis": ["dp_outer", "dp"], "zero": 2}},
    "uneven": {"mesh": {"tp": 3}, "shard": SHARD, "uneven": "pad"},
}


@pytest.mark.parametrize("spec", SPECS)
def test_exactly_what_must_move_is_sent(spec: str) -> None:
    """To its owner every element that it does not store, once; from it to every other rank what that rank stores. The
    weights are the numbers of their elements, so what a rank stores is seen.
    """
    p = shardc.compile(TWO, X, {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS[spec]})
    numbered = {n: torch.arange(1.0, 1 + x.numel(), dtype=x.dtype).view(x.shape) for n, x in TWO.state_dict().items()}

    def work(mesh: LoopbackMesh) -> tuple[list[int], dict[str, set[float]], set[str]]:
        engine = p.engine(numbered, lambda ps: torch.optim.Muon(ps, lr=0.1), mesh=mesh)
        stored = {q.fqn: set(engine.owned[q.name].flatten().tolist()) - {0.0} for q in p.params}  # padding is 0
        mesh.records.clear()
        engine.step(X)
        sent = [r.bytes for r in mesh.records if r.tag.startswith("matrices")]
        return sent, stored, set(engine._model.owners.owned)

    ranks = loopback(p.mesh, work)
    there = back = 0
    for name, x in numbered.items():
        (owner,) = [i for i, (_, _, owned) in enumerate(ranks) if name in owned]
        there += x.numel() - len(ranks[owner][1][name])
        back += sum(len(stored[name]) for i, (_, stored, _) in enumerate(ranks) if i != owner)
    assert there
    assert back
    assert [sum(each) for each in zip(*(sent for sent, _, _ in ranks), strict=True)] == [8 * there, 8 * back]


def test_matrices_go_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for each bucket, and the same elements in all."""
    p = shardc.compile(TWO, X, {"shardc": 1, "mesh": {"dp": 2}, "optimizer": {"matrices": "whole"}})
    found = [m for q in p.params for m in matrices_of(q)]
    places = {m.name: i for i, m in enumerate(found)}
    dtypes = {q.name: q.dtype for q in p.params}

    def moved(limit: int) -> list[tuple[int, bool]]:
        def work(mesh: LoopbackMesh) -> tuple[int, bool]:
            exchange = Exchange(Routes(p, mesh.rank, found, places), mesh, dtypes, limit)
            stored = {q.name: torch.full(q.shape, float(mesh.rank), dtype=q.dtype) for q in p.params}
            whole = {m.name: torch.arange(math.prod(m.shape), dtype=torch.float64) for m in found}
            mine = {m.name: whole[m.name].view(m.shape) for m in found if places[m.name] == mesh.rank}
            exchange.from_owners(mine, stored, "update")
            same = all(torch.equal(stored[m.param], whole[m.name].view(m.shape)) for m in found)
            return len(mesh.records), same

        return loopback(p.mesh, work)

    assert moved(1 << 20) == [(1, True)] * 2
    assert moved(8) == [(2, True)] * 2


def test_cost_counts_what_the_optimizer_moves() -> None:
    """Without weights or processes: the bytes that one of the ranks sends, and the products of its step."""
    p = shardc.compile(TWO, X, {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS["zero 1"]})
    plain, muon = (p.cost(optimizer=lambda ps, o=o: o(ps, lr=0.1)) for o in (torch.optim.AdamW, torch.optim.Muon))

    def work(mesh: LoopbackMesh) -> int:
        engine = p.engine(TWO, lambda ps: torch.optim.Muon(ps, lr=0.1), mesh=mesh)
        mesh.records.clear()
        engine.step(X)
        return sum(r.bytes for r in mesh.records if r.tag.startswith("matrices"))

    sent = loopback(p.mesh, work)
    assert not any(kind == "all_to_all" for _, kind in plain.comm)
    assert muon.comm["dp+tp", "all_to_all"] in sent
    assert muon.comm["dp+tp", "all_to_all"] > 0
    assert muon.step_seconds > plain.step_seconds


@pytest.mark.parametrize("spec", ["zero 0", "zero 1", "zero 3", "many small"])
def test_what_is_shown_without_an_optimizer_is_what_muon_sends(spec: str) -> None:
    """`inspect --comm`, `plan` and the metrics of a run: bytes of the rank that is shown, and its time."""
    net = Three()
    p = shardc.compile(net, X, {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS[spec]})
    shown = rank_of(p.mesh, "", 0)
    rows = [r for r in comm_rows(p.cost()) if r.cause == CAUSES["matrices"]]

    def work(mesh: LoopbackMesh) -> list[int]:
        engine = p.engine(net, assumed(p), mesh=mesh)
        mesh.records.clear()
        engine.step(X)
        return [r.bytes for r in mesh.records if r.tag.startswith("matrices")]

    sent = loopback(p.mesh, work)[shown]
    assert [(r.axes, r.kind, r.count, r.bytes) for r in rows] == [("+".join(p.mesh.names), "all_to_all", 2, sum(sent))]
    assert p.cost().comm[rows[0].axes, "all_to_all"] == sum(sent)
    assert CAUSES["matrices"] in comm_table(p.cost())
    given = {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS[spec]}
    plain = {k: v for k, v in given.items() if k != "optimizer"}
    first, second = (shardc.plan(net, X, given=g, precision="model").best for g in (given, plain))
    assert first.step_seconds > second.step_seconds


class Three(nn.Module):
    """Between an input that is no table and the last product: `up` and `mid` are matrices, `down` is the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = (nn.Linear(a, b).double() for a, b in ((8, 16), (16, 16), (16, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(torch.tanh(self.up(x))))).square().mean()


def test_the_proof_knows_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix has one, each element comes once, and goes back to all that store it."""
    p = shardc.compile(TWO, X, {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS["zero 3"]})
    assert p.prove().ok
    sources, pieces = Routes.sources, Routes.pieces

    def said(what: str) -> bool:
        proof = p.prove()
        monkeypatch.undo()
        return any(what in gap.what for gap in proof.gaps)

    monkeypatch.setattr(Routes, "sources", lambda self, m: [*sources(self, m), sources(self, m)[0]])
    assert said("not every element of its gradient comes to its owner once")
    monkeypatch.setattr(Routes, "sources", lambda self, m: sources(self, m)[1:])
    assert said("not every element of its gradient comes to its owner once")
    monkeypatch.setattr(Routes, "sources", lambda self, m: [i for i in range(4) if i % 2 == 0])
    assert said("comes to its owner once")
    monkeypatch.setattr(Routes, "pieces", lambda self, m, i: pieces(self, m, i) if i in sources(self, m) else iter(()))
    replicated = shardc.compile(TWO, X, {"shardc": 1, "optimizer": {"matrices": "whole"}, **SPECS["zero 0"]})
    assert any("its owners do not send back" in gap.what for gap in replicated.prove().gaps)
    monkeypatch.undo()
    name = p.params[0].name
    for cuts in ((Cut(0, (8,)),), (Cut(0, (12, 8)),)):
        assert any("do not sum to the 16 of dim 0" in g.what for g in with_cuts(p, {name: cuts}).prove().gaps)
