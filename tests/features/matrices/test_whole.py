"""Optimizers over whole matrices: on every mesh the weights of one device, after 20 steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.features.matrices.program import Matrix, cuts, of_param
from shardc.runtime.mesh.loopback import loopback
from tests.features.matrices.optimizers import SOAP, Lamb, Shampoo, alone
from tests.once import once_each
from tests.runtime.state.test_pairs import EP, TP, Model

torch.set_num_threads(1)
CLIP, STEPS = 0.5, 20
IDS = (torch.arange(8 * 4).view(8, 4) * 7 + 3) % 12
BATCH = {"ids": IDS, "labels": (IDS * 5 + 1) % 12}


@functools.cache
def model() -> nn.Module:
    """Tied embeddings, experts of one parameter each, norms, biases; without dropout, which other meshes draw alike and
    torch not.
    """
    torch.manual_seed(0)
    made = Model().double()
    for layer in made.layers:
        layer.drop.p = 0.0
    return made


def several(params: Any) -> list[torch.optim.Optimizer]:
    """Each kind of optimizer for some of the parameters, a weight of several matrices too."""
    kinds: dict[str, list[Any]] = {"muon": [], "shampoo": [], "soap": [], "lamb": [], "adamw": []}
    for name, p in params:
        matrix = p.dim() == 2 and "embed" not in name
        kind = {"down": "shampoo", "router": "soap", "experts": "muon"}.get(name.split(".")[2] if matrix else "", "")
        kinds[kind or ("muon" if matrix else "lamb" if "norm" in name else "adamw")].append((name, p))
    return [
        torch.optim.Muon(kinds["muon"], lr=0.02),
        Shampoo(kinds["shampoo"]),
        SOAP(kinds["soap"]),
        Lamb(kinds["lamb"], lr=0.05),
        torch.optim.AdamW(kinds["adamw"], lr=1e-2),
    ]


WORDS = {"matrices": "experts"}


@once_each
def compiled(spec: dict[str, Any], words: Any = WORDS) -> Program:
    return shardc.compile(model(), BATCH, {"shardc": 1, "optimizer": words, **spec})


def matrices(program: Program) -> list[Matrix]:
    """Of all parameters, under the names that the plain model has."""
    return [replace(m, param=p.fqn) for p in program.params for m in of_param(program, p)]


@functools.cache
def expected(steps: int = STEPS) -> dict[str, Tensor]:
    return alone(model(), BATCH, several, matrices(compiled({"mesh": {"dp": 1}})), steps, CLIP)


def train(p: Program, make: Any = several, steps: int = STEPS) -> list[dict[str, Tensor]]:
    def work(mesh: Any) -> dict[str, Tensor]:
        engine = p.engine(model(), make, mesh=mesh, clip_norm=CLIP)
        for _ in range(steps):
            engine.step(BATCH)
        return engine.full_state_dict()

    return loopback(p.mesh, work)


def check(states: Sequence[dict[str, Tensor]], want: dict[str, Tensor], bound: float = 1e-12) -> None:
    for state in states:
        off = {n: float((state[n] - x).norm() / x.norm().clamp(min=1e-3)) for n, x in want.items() if "seen" not in n}
        assert not {n: e for n, e in off.items() if not e <= bound}


FULL: dict[str, Any] = {
    "mesh": {"pp": 2, "ep": 2, "tp": 2},
    "shard": TP,
    "experts": EP,
    "pipeline": {"axis": "pp", "cut": ["layers.1"]},
    "batch": {"microbatches": 2},
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_twenty_steps_of_all_kinds(zero: int) -> None:
    """Muon, Shampoo, SOAP, LAMB and AdamW in one engine, on tp=2 × pp=2 × ep=2 with each level of ZeRO."""
    program = compiled({**FULL, "data": {"axis": "ep", "zero": zero}})
    check(train(program), expected())


SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}, "data": {"bucket_mb": 1e-4}},
    "uneven": {"mesh": {"dp": 2, "tp": 3}, "shard": TP, "uneven": "pad", "data": {"zero": 1}},
    "hsdp": {"mesh": {"dp_outer": 2, "dp": 2}, "data": {"axis": ["dp_outer", "dp"], "zero": 3}},
    "lowered": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": 2}},
    "ep and dp": {"mesh": {"dp": 2, "ep": 2}, "experts": EP, "data": {"zero": 1}, "batch": {"microbatches": 2}},
    "pp alone": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "cut": ["layers.1"]}},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_few_steps_elsewhere(name: str) -> None:
    """Padding is in no matrix; copies along an outer data axis get their updates too."""
    check(train(compiled(SPECS[name]), steps=3), expected(3))


def test_read_from_a_folder(tmp_path: Path) -> None:
    program = compiled(SPECS["ep and dp"])
    program.save(tmp_path / "p")
    loaded = shardc.load(tmp_path / "p")
    assert cuts(loaded) == cuts(program)
    assert cuts(loaded)
    check(train(loaded, steps=3), expected(3))


@pytest.mark.parametrize(("first", "second"), [("lowered", "pp alone"), ("pp alone", "hsdp"), ("ep and dp", "uneven")])
def test_checkpoints_of_other_meshes(first: str, second: str, tmp_path: Path) -> None:
    """Nested state and state of other shapes than the parameter's go on where they were."""

    def work(mesh: Any, p: Program, load: bool) -> dict[str, Tensor]:
        engine = p.engine(model(), several, mesh=mesh, clip_norm=CLIP)
        if load:
            engine.load(tmp_path)
        for _ in range(2):
            engine.step(BATCH)
        if not load:
            engine.save(tmp_path)
        return engine.full_state_dict()

    for name, load in ((first, False), (second, True)):
        p = compiled(SPECS[name])
        states = loopback(p.mesh, functools.partial(work, p=p, load=load))
    check(states, expected(4))


def test_other_matrices_than_were_saved(tmp_path: Path) -> None:
    def work(mesh: Any, p: Program, load: bool) -> None:
        engine = p.engine(model(), lambda ps: Shampoo(ps), mesh=mesh)
        if load:
            engine.load(tmp_path)
        else:
            engine.step(BATCH)
            engine.save(tmp_path)

    saved, other = (compiled(SPECS["dp"], {"matrices": m}) for m in ("whole", {"*.up.weight": {0: 2}}))
    loopback(saved.mesh, functools.partial(work, p=saved, load=False))
    with pytest.raises(ShardcError, match=r"has no matrix layers.0.up.weight\[0\](.|\n)*`optimizer: \{matrices"):
        loopback(other.mesh, functools.partial(work, p=other, load=True))


def test_what_somebody_writes_goes_to_the_owner() -> None:
    p = compiled(SPECS["dp"])

    def work(mesh: Any) -> dict[str, Tensor]:
        engine = p.engine(model(), several, mesh=mesh, clip_norm=CLIP)
        with torch.no_grad():
            for name, q in engine.params.items():
                q.add_(0.125 if "down" in name else 0.0)
        engine.step(BATCH)
        return engine.full_state_dict()

    moved = Model().double()
    moved.load_state_dict(model().state_dict())
    for layer in moved.layers:
        layer.drop.p = 0.0
    with torch.no_grad():
        for name, q in moved.named_parameters():
            q.add_(0.125 if "down" in name else 0.0)
    check(loopback(p.mesh, work), alone(moved, BATCH, several, matrices(p), 1, CLIP))


class Attention(nn.Module):
    """A fused weight of three, heads, a frozen layer and a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.still, self.idle = nn.Linear(8, 8, bias=False).requires_grad_(False), nn.Parameter(torch.ones(4, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.still(self.out(y) + x).square().mean()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("whole", ["qkv.weight"]),
        ({"qkv": {0: 3}}, ["qkv.weight[0]", "qkv.weight[1]", "qkv.weight[2]"]),
        ("heads", [f"qkv.weight[{i}]" for i in range(6)]),
        ({"*.weight": {1: [3, 5]}}, ["qkv.weight[0]", "qkv.weight[1]"]),
    ],
)
def test_fused_weights_and_heads(words: Any, names: list[str]) -> None:
    net, x = Attention(), torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    split = {"qkv.weight": {0: {"axis": "tp", "split": 3}}, "out": "row"}
    spec = {"mesh": {"dp": 2, "tp": 2}, "shard": split, "data": {"zero": 2}, "optimizer": {"matrices": words}}
    p = shardc.compile(net, {"x": x}, {"shardc": 1, **spec})
    shown: list[str] = []

    def make(params: Any) -> torch.optim.Optimizer:
        shown[:] = [n for n, _ in params]
        return torch.optim.Muon(params, lr=0.05)

    def work(mesh: Any) -> dict[str, Tensor]:
        engine = p.engine(net, make, mesh=mesh)
        for _ in range(3):
            engine.step({"x": x})
        return engine.full_state_dict()

    found = [m for m in matrices(p) if m.param not in ("still.weight", "idle")]
    check(loopback(p.mesh, work), alone(net, {"x": x}, lambda ps: [torch.optim.Muon(ps, lr=0.05)], found, 3, None))
    assert [n for n in shown if n.startswith("qkv")] == names


def test_master_weights() -> None:
    """With products in bfloat16, owners hold what is stored: float32. Every mesh gives what one rank gives."""
    results = []
    for spec in ({"mesh": {"dp": 1}}, {"mesh": {"tp": 2}, "shard": TP}, {"mesh": {"dp": 2}, "data": {"zero": 3}}):
        words: dict[str, Any] = {"optimizer": WORDS, "precision": {"compute": "bfloat16"}}
        p = shardc.compile(model().float(), BATCH, {"shardc": 1, **words, **spec})

        def work(mesh: Any, p: Program = p) -> dict[str, Tensor]:
            engine = p.engine(model().float(), several, mesh=mesh)
            for _ in range(2):
                engine.step(BATCH)
            assert all(q.dtype == torch.float32 for q in engine.optimizer.param_groups[1]["params"])
            return engine.full_state_dict()

        results.append(loopback(p.mesh, work)[0])
    model().double()
    for other in results[1:]:
        check([other], results[0], 2e-2)


class Together(torch.optim.SGD):
    """Scales every step by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm() if every else 1.0
        for p in every:
            p.grad /= norm
        super().step()


def test_what_is_refused() -> None:
    for make, words, said in (
        (lambda ps: shardc.whole(Together(ps, lr=0.1)), WORDS, "updates a parameter depending on others"),
        (
            lambda ps: torch.optim.Muon([x for x in ps if x[1].dim() > 1], lr=0.1),
            {"matrices": "whole"},
            "only supports 2D",
        ),
        (lambda ps: torch.optim.Adafactor(ps), {}, r"needs whole parameters(.|\n)*optimizer: \{matrices: whole\}"),
    ):
        p = compiled(SPECS["hsdp"], words)
        with pytest.raises((ShardcError, ValueError), match=said):
            train(p, make, 1)
    p = compiled(SPECS["dp"], {"matrices": {"*.up.weight": {0: 2}}})

    def groups(params: Any) -> torch.optim.Optimizer:
        odd = [(n, x) for n, x in params if n.endswith("[1]")]
        rest = [(n, x) for n, x in params if not n.endswith("[1]")]
        return torch.optim.AdamW([{"params": rest}, {"params": odd, "lr": 0.1}])

    with pytest.raises(ShardcError, match=r"some matrices of layers\.0\.up\.weight in other groups"):
        train(p, groups, 1)
    with pytest.raises(ShardcError, match="do not sum to the 16 of dim 0"):
        compiled(SPECS["dp"], {"matrices": {"*.up.weight": {0: 5}}})
    with pytest.raises(ShardcError, match="matches no parameter"):
        compiled(SPECS["dp"], {"matrices": {"*.upp.weight": "whole"}})
    with pytest.raises(ShardcError, match="does not compute queries, keys or values"):
        compiled(SPECS["dp"], {"matrices": {"*.up.weight": "heads"}})
    with pytest.raises(ShardcError, match="hole"):
        compiled(SPECS["dp"], {"matrices": "hole"})


def test_an_optimizer_that_begins_late_is_declared() -> None:
    """Its first steps are SGD's: `shardc.whole` says what no trial shows."""

    class Late(torch.optim.SGD):
        """As one that preconditions from step 100 on."""

    owned: list[int] = []
    p = compiled(SPECS["hsdp"])
    for wrap in (lambda o: o, shardc.whole):

        def work(mesh: Any, wrap: Any = wrap) -> int:
            engine = p.engine(model(), lambda ps: wrap(Late(ps, lr=0.1)), mesh=mesh)
            return sum(q.dim() == 2 for g in engine.optimizer.param_groups for q in g["params"])

        owned.append(sum(loopback(p.mesh, work)))
    assert owned[0] == 0
    assert owned[1] == sum(len(m.shape) == 2 for m in matrices(p))


def test_matrices_and_all_else() -> None:
    """Tables, a tied one too, the head, norms and biases are no matrices."""
    seen: list[tuple[list[str], list[str]]] = []

    def make(params: Any) -> list[torch.optim.Optimizer]:
        inner, rest = shardc.matrices(params)
        seen.append(([n for n, _ in inner], [n for n, _ in rest]))
        return [torch.optim.Muon(inner, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]

    train(compiled(SPECS["dp"]), make, 1)
    experts = [f"layers.{i}.experts.{w}[{e}]" for i in range(2) for w in ("up", "down") for e in range(4)]
    plain = [f"layers.{i}.{w}.weight" for i in range(2) for w in ("up", "down", "router")]
    assert set(seen[0][0]) == {*experts, *plain}
    assert "embed.weight" in seen[0][1]
    head = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    p = shardc.compile(head, torch.arange(4), {"shardc": 1, "mesh": {"dp": 1}}, loss=lambda y, _: y.sum())

    def one(params: Any) -> torch.optim.Optimizer:
        assert [n for n, _ in shardc.matrices(params)[0]] == ["1.weight"]
        return torch.optim.SGD(params, lr=0.1)

    loopback(p.mesh, lambda mesh: p.engine(head, one, mesh=mesh))
    with pytest.raises(ShardcError, match="needs what `optimizer=` receives"):
        shardc.matrices(head.named_parameters())
