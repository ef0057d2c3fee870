"""Bugs of other frameworks, re-expressed: a step here is one device's, or the spec is refused; and the broken program
that makes the same mistake is noticed by the proof.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.runtime.data.loader import Loader
from shardc.runtime.mesh.loopback import loopback
from shardc.verify.static import prove
from tests import zoo
from tests.verify import mutants
from tests.verify.field_bugs import BUGS, Bug
from tests.verify.field_bugs.models import MODELS

STEPS, B, SAMPLES = 2, 8, 20


def by_dims(pairs: Any) -> torch.optim.Optimizer:
    params = [p for _, p in pairs]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5},
    ]
    return torch.optim.SGD(groups, 0.1)


#: Of (name, parameter) pairs, as an engine and a module's named_parameters give them.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "decay": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.5),
    "adam": lambda ps: torch.optim.AdamW(ps, 0.01, eps=1e-2, weight_decay=0.5),
    "groups by dims": by_dims,
    "named groups": lambda ps: torch.optim.SGD(
        shardc.groups(ps, {"*.bias": {"weight_decay": 0.0}, "*norm*.weight": {"lr": 0.01}}, lr=0.1, weight_decay=0.5)
    ),
}


@lru_cache
def model(name: str) -> tuple[nn.Module, Any, Program]:
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        built, batch = MODELS[name]()
        return built, batch, capture(built, batch)


def compiled(bug: Bug) -> Program:
    built, batch, captured = model(bug.model)
    with zoo.Wide():
        return shardc.compile(built, batch, bug.spec, captured=captured, prove=False)


@lru_cache
def on_one_device(name: str, optimizer: str, clip: float | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses (and norms, where clipped) of some steps, and weights and buffers after them: of the model as it is."""
    one, batch, _ = model(name)
    one = copy.deepcopy(one)
    stepping = OPTIMIZERS[optimizer]([(n, p) for n, p in one.named_parameters() if p.requires_grad])
    said = []
    with zoo.Wide():
        for _ in range(STEPS):
            stepping.zero_grad()
            loss = one(**batch)
            loss.backward()
            said.append(loss.detach())
            if clip is not None:
                said.append(torch.nn.utils.clip_grad_norm_(one.parameters(), clip))
            stepping.step()
    return said, {n: x.detach().clone() for n, x in one.state_dict(keep_vars=True).items()}


def on_ranks(bug: Bug, program: Program) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """The same of each rank."""
    built, batch, _ = model(bug.model)

    def work(mesh: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        engine = program.engine(built, optimizer=OPTIMIZERS[bug.optimizer], clip_norm=bug.clip, mesh=mesh)
        said = []
        for _ in range(STEPS):
            said.append(engine.step(batch))
            if bug.clip is not None:
                said.append(engine.grad_norm)
        return said, {n: x.clone() for n, x in engine.full_state_dict().items()}

    return loopback(program.mesh, work)


def check_steps(bug: Bug, program: Program) -> None:
    before = model(bug.model)[0].state_dict()
    said, after = on_one_device(bug.model, bug.optimizer, bug.clip)
    updates = {n: x - before[n] for n, x in after.items()}
    most = max(float(u.double().abs().max()) for u in updates.values())
    assert most > 1e-3, "nothing was trained"
    for rank, (have, state) in enumerate(on_ranks(bug, program)):
        assert len(have) == len(said)
        for a, b in zip(have, said, strict=True):
            assert abs(float(a - b)) <= 1e-12 * abs(float(b)), f"rank {rank}: {float(a)} instead of {float(b)}"
        assert state.keys() == after.keys()
        off = {n: float((state[n] - x).double().abs().max()) for n, x in after.items()}
        assert not {n: d for n, d in off.items() if not d <= 1e-11 * most}, f"rank {rank}"


def check_verified(bug: Bug, program: Program) -> None:
    report = program.verify()
    assert report.ok, str(report)


def check_own_loop(bug: Bug, program: Program) -> None:
    built, batch, _ = model(bug.model)

    def work(mesh: Any) -> None:
        module = program.module(built, mesh=mesh)
        optimizer = OPTIMIZERS[bug.optimizer](module.named_parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            module(**module.local(batch)).backward()
            optimizer.step()

    loopback(program.mesh, work)


def check_scheduler(bug: Bug, program: Program) -> None:
    built, batch, _ = model(bug.model)

    def work(mesh: Any) -> list[float | None]:
        engine = program.engine(
            built,
            optimizer=OPTIMIZERS[bug.optimizer],
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            mesh=mesh,
        )
        rates = []
        for _ in range(3):
            engine.step(batch)
            rates.append(engine.lr)
        return rates

    assert loopback(program.mesh, work) == [[0.05, 0.025, 0.0125]] * program.mesh.world


def check_overflow(bug: Bug, program: Program) -> None:
    """Where one row overflows: nobody steps, and everybody goes on with the same scale."""
    built, batch, _ = model(bug.model)
    broken = copy.deepcopy(built)
    if "x" in batch:
        batch = batch | {"x": batch["x"].clone()}
        batch["x"][-1] = 1e6
    else:
        with torch.no_grad():
            broken.layers[-1].down.weight.mul_(1e6)

    def work(mesh: Any) -> tuple[float, float, bool]:
        engine = program.engine(broken, optimizer=OPTIMIZERS[bug.optimizer], mesh=mesh)
        before = {n: x.clone() for n, x in engine.full_state_dict().items()}
        first = engine.scaler.factor
        engine.step(batch)
        same = all(torch.equal(x, before[n]) for n, x in engine.full_state_dict().items())
        return first, engine.scaler.factor, same

    ranks = set(loopback(program.mesh, work))
    assert len(ranks) == 1
    first, then, same = ranks.pop()
    assert then < first
    assert same


@dataclass
class Rank:
    """All that a loader asks of a runtime mesh."""

    rank: int


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample i is full of i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return dict.fromkeys(("x", "y"), torch.full((2, 6), float(i), dtype=torch.float64))


class Reader:
    """The loaders of all ranks, and the samples of the global batches that they give."""

    def __init__(self, program: Program, state: Any = None, **options: Any) -> None:
        self.loaders = [Loader(program, Rank(r), Numbers(), **options) for r in range(program.mesh.world)]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)

    def read(self, batches: int | None = None) -> list[list[int]]:
        """What is left of an epoch; batches: no more than so many."""
        parts = itertools.islice(zip(*self.loaders, strict=True), batches)
        return [[int(v) for part in each for v in part["x"][:, 0, 0]] for each in parts]

    @property
    def state(self) -> Any:
        return self.loaders[0].state_dict()


def check_epochs(_: Bug, program: Program) -> None:
    reader = Reader(program)
    epochs = [[i for batch in reader.read() for i in batch] for _ in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert all(len(set(e)) == SAMPLES // B * B for e in epochs)


def check_rest(bug: Bug, program: Program) -> None:
    """Twenty samples in batches of eight on four ranks: each counts once in the mean."""
    built, _, _ = model(bug.model)

    def work(mesh: Any) -> float:
        engine = program.engine(built, optimizer=None, mesh=mesh)
        batches = engine.loader(Numbers(), drop_last=False)
        assert len(batches) == 3
        return engine.evaluate_all(batches, local=True)["loss"]

    with zoo.Wide(), torch.no_grad():
        whole = default_collate([Numbers()[i] for i in range(SAMPLES)])
        want = float(built(**whole))
    assert loopback(program.mesh, work) == pytest.approx([want] * program.mesh.world, rel=1e-12)


def check_resumed(program: Program, *stops: int) -> None:
    """Interrupted after so many batches each, a run reads what one reads that is not."""
    whole = Reader(program)
    want = whole.read() + whole.read() + whole.read()
    seen: list[list[int]] = []
    state = None
    for stop in (*stops, len(want) - sum(stops)):
        reader = Reader(program, state)
        left = stop
        while left:
            part = reader.read(left)
            seen += part
            left -= len(part)
        state = reader.state
    assert seen == want


CHECKS: dict[str, Callable[[Bug, Program], None]] = {
    "steps": check_steps,
    "verify": check_verified,
    "own loop": check_own_loop,
    "scheduler": check_scheduler,
    "overflow": check_overflow,
    "order of epochs": check_epochs,
    "rest of an epoch": check_rest,
    "resumed order": lambda _, program: check_resumed(program, 3),
    "resumed twice": lambda _, program: check_resumed(program, 1, 2, 1),
    "resumed at the end": lambda _, program: check_resumed(program, 2),
}


@pytest.mark.every_case
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_it_is_equal_or_refused(bug: Bug) -> None:
    kind, _, message = bug.here.partition(": ")
    if kind == "refused":
        with pytest.raises(shardc.ShardcError, match=message):
            CHECKS[bug.check](bug, compiled(bug))
        return
    program = compiled(bug)
    proof = prove(program)
    assert proof.ok, str(proof)
    CHECKS[bug.check](bug, program)


@pytest.mark.parametrize("bug", [b for b in BUGS if b.mutant], ids=lambda b: b.name)
def test_a_program_with_the_mistake_is_noticed(bug: Bug) -> None:
    """By the proof, of the first such program whose step is not that of one device."""
    for make in itertools.islice(mutants.KINDS[bug.mutant](compiled(bug)), 4):
        try:
            mutant = make()
        except mutants.NothingError:
            continue
        if mutants.noticed_by_run(mutant):
            assert not prove(mutant).ok
            return
    pytest.fail("no such mutant changes this program's step")
