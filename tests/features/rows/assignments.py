"""Steps of ragged rows under assignments that a seed draws, against one device with the rows in order.

python -m tests.features.rows.assignments 100 [first seed]     draws models, rows and meshes too; 20 steps each
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardc
from shardc.api import Program
from shardc.features.rows.runtime import places_of
from shardc.runtime.data.ragged import Ragged, Size
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import zoo
from tests.zoo import hf, hf_more

ROWS, SEQ, IGNORED = 8, 16, -100
LENGTHS = (8, 12, SEQ)
PAD = {"input_ids": 0, "labels": IGNORED}
Batch = dict[str, Tensor]

SPECS: dict[str, dict[str, Any]] = {
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}, "batch": {"microbatches": 2}},
    "tp": {
        "mesh": {"dp": 2, "tp": 2},
        "shard": {"use": "structure"},
        "data": {"zero": 2},
        "batch": {"microbatches": 2},
    },
    "pp": {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 4},
    },
    "cp": {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp", "method": "gather"}, "batch": {"microbatches": 2}},
    "zero 3, cp": {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp"}, "data": {"zero": 3}},
    "pp, cp": {"mesh": {"pp": 2, "cp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "sequence": {"axis": "cp"}},
    "cp of 4": {"mesh": {"cp": 4}, "sequence": {"axis": "cp", "method": "gather"}},
    "ring of 4": {"mesh": {"cp": 4}, "sequence": {"axis": "cp", "method": "ring"}},
    "ring": {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp", "method": "ring"}, "batch": {"microbatches": 2}},
}
MODELS = ("dense", "moe", "moe with a loss of its router", "mla")
#: padded: each row has a length, and all are as long as compiled; packed: documents fill rows; ragged: padded rows,
#: and each microbatch of each rank has a length of its own; shared: short rows of a split sequence are on fewer ranks
#: than long ones, by seconds that the seed draws.
KINDS = ("padded", "packed", "ragged", "shared")
SHARED = ("cp", "ring", "zero 3, cp", "pp, cp", "cp of 4", "ring of 4")
SIZES = (4, 8, SEQ)


@functools.cache
def model(name: str) -> nn.Module:
    with zoo.Wide():
        if name == "dense":
            return zoo.llama()[0]
        family = hf_more.FAMILIES["deepseek_v3_dense" if name == "mla" else "mixtral"]
        if "router" in name:
            family = hf.Family(family.model, {**family.config, "output_router_logits": True}, family.batch)
        return hf.build(family)[0]


def lengths_of(kind: str, seed: int) -> list[list[int]]:
    """The documents of each row: ragged rows have one, of a length that a heavy tail draws."""
    draw = random.Random(seed)
    if kind != "packed":
        return [[min(SEQ, 2 + int(draw.lognormvariate(1.3, 0.9)))] for _ in range(ROWS)]
    rows = []
    for _ in range(ROWS):
        left, mine = SEQ, []
        while left:
            mine.append(min(left, 2 + int(draw.lognormvariate(1, 0.8))))
            left -= mine[-1]
        rows.append(mine)
    return rows


def batch(kind: str, seed: int) -> Batch:
    """One global batch, its rows in order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, zoo.VOCAB, (ROWS, SEQ), generator=generator)
    labels, place = ids.clone(), torch.arange(SEQ).repeat(ROWS, 1)
    for i, documents in enumerate(lengths_of(kind, seed)):
        at = 0
        for n in documents:
            labels[i, at] = IGNORED
            place[i, at : at + n] = torch.arange(n)
            at += n
        ids[i, at:], labels[i, at:] = 0, IGNORED
    return {"input_ids": ids, "labels": labels} | ({"position_ids": place} if kind == "packed" else {})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norm: float  # of the last step's gradient
    weights: dict[str, Tensor]


@functools.cache
def one_device(name: str, kind: str, steps: int, seed: int) -> Trained:
    net, losses = copy.deepcopy(model(name)), []
    optimizer = sgd(net.parameters())
    with zoo.Wide():
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(**batch(kind, seed + step), use_cache=False).loss  # with a cache it would not part documents
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    norm = float(torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm())
    return Trained(losses, norm, {n: x.detach().clone() for n, x in net.named_parameters()})


@functools.cache
def program(name: str, kind: str, mesh: str) -> Program:
    spec = copy.deepcopy(SPECS[mesh])
    if kind == "ragged":
        spec["batch"] |= {"lengths": list(LENGTHS), "pad": PAD}
    if kind == "shared":
        microbatches = ROWS // spec["mesh"].get("dp", 1)
        spec["batch"] = {"microbatches": microbatches, "lengths": list(SIZES), "pad": PAD, "balance": True}
    with zoo.Wide():
        return shardc.compile(model(name), batch(kind, 0), {"shardc": 1, **spec}, prove=False)


class Rows(Dataset[Batch]):
    """The rows of the batches of several steps, each as long as it is."""

    def __init__(self, kind: str, steps: int, seed: int) -> None:
        self.batches = [batch(kind, seed + step) for step in range(steps)]
        self.lengths = [documents[0] for step in range(steps) for documents in lengths_of(kind, seed + step)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Batch:
        return {n: x[i % ROWS, : self.lengths[i]] for n, x in self.batches[i // ROWS].items()}


def shared(engine: Any, kind: str, steps: int, seed: int) -> Iterator[Ragged]:
    """Yield this rank's parts of the steps, as a loader deals them by seconds that the seed draws."""
    loader = engine.loader(Rows(kind, steps, seed), shuffle=False)
    balance = loader.balance
    balance.step = replace(balance.step, seconds=lambda size, _: random.Random(f"{seed} {size}").random())
    yield from loader


def assigned(p: Program, mesh: LoopbackMesh, whole: Batch, kind: str, seed: int) -> Any:
    """This rank's part of the batch, with rows and, if ragged, lengths where the seed puts them."""
    draw = random.Random(seed)
    order = draw.sample(range(ROWS), ROWS)
    rows = {n: x[order] for n, x in whole.items()}
    if kind != "ragged":
        return rows
    long = (whole["input_ids"] != 0).sum(1)[order]
    mine, cells = places_of(p, mesh.rank), {}
    for r in range(p.mesh.world):  # the sizes of every rank's microbatches, as each of them draws them
        for cell in places_of(p, r).tolist():
            cells.setdefault(tuple(cell), Size(0))
    for cell in cells:
        least = max(int(long[i]) for i in cell)
        cells[cell] = Size(draw.choice([n for n in LENGTHS if n >= least]))
    here = [cells[tuple(cell)] for cell in mine.tolist()]
    parts = [{n: x[cell, : cells[tuple(cell)].length] for n, x in rows.items()} for cell in mine.tolist()]
    return Ragged(tuple(parts), tuple(here), tuple(sorted(set(cells.values()))))


def worst(name: str, kind: str, mesh: str, steps: int, seed: int) -> float:
    """The largest relative difference from one device: of losses, the last gradient's norm, and weights.

    Momentum makes the weights those of all gradients.
    """
    p, one = program(name, kind, mesh), one_device(name, kind, steps, seed)

    def work(mesh: LoopbackMesh) -> Trained:
        with zoo.Wide():
            engine, losses = p.engine(model(name), sgd, mesh=mesh, norm=True), []
            if kind == "shared":
                losses = [float(engine.step(part, local=True)) for part in shared(engine, kind, steps, seed)]
            for step in range(steps if kind != "shared" else 0):
                part = assigned(p, mesh, batch(kind, seed + step), kind, 1000 * seed + step)
                losses.append(float(engine.step(part)))
        state, norm = engine.full_state_dict(), engine.grad_norm
        return Trained(losses, float(norm), {n: state[n] for n in one.weights})

    found = 0.0
    for trained in loopback(p.mesh, work):
        numbers = zip([*trained.losses, trained.norm], [*one.losses, one.norm], strict=True)
        found = max(found, *(abs(a / b - 1) for a, b in numbers))
        moved = {n: one.weights[n] - x.detach() for n, x in model(name).named_parameters()}
        size = float(torch.stack([x.norm() for x in moved.values()]).norm()) * 1e-3
        for n, x in one.weights.items():  # against what training moved: weights alone would hide a wrong gradient
            found = max(found, float((trained.weights[n] - x).norm()) / max(float(moved[n].norm()), size))
    return found


def main(draws: int, first: int) -> None:
    wrong = 0
    for seed in range(first, first + draws):
        draw, start = random.Random(seed), time.perf_counter()
        kind = draw.choice(KINDS)
        name = draw.choice([m for m in MODELS if kind not in ("ragged", "shared") or "router" not in m])
        of_kind = SHARED if kind == "shared" else [m for m in SPECS if "batch" in SPECS[m]]
        mesh = draw.choice([m for m in of_kind if not m.startswith("ring") or name != "mla"])
        off = worst(name, kind, mesh, 20, seed)
        wrong += off > 1e-12
        seconds = time.perf_counter() - start
        print(f"{seed}: {name}, {kind}, {mesh}: {off:.1e}{' WRONG' * (off > 1e-12)}, {seconds:.0f} s", flush=True)
    print(f"{draws - wrong} of {draws} are one device's")


if __name__ == "__main__":
    main(*[int(x) for x in sys.argv[1:]], *[100, 0][len(sys.argv) - 1 :])
