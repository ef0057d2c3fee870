"""The ways in which ranks come to differ, made on rank 3 of 4 on purpose. The table of docs/reference/rank-checks.md.

Run by test_differences.py on processes that it starts, and by hand in any world of 4:

    torchrun --nproc-per-node 4 --module tests.runtime.mesh.differences [FOLDER]
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.stage.communicators import runtime_mesh
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule

Batch = dict[str, torch.Tensor]
ODD = 3


class Net(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, width), nn.Dropout(dropout), nn.Linear(width, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.drop(self.up(x).relu())) * self.scale - x).square().mean()


def net(seed: int = 0, **config: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**config)


BATCH = {"x": torch.linspace(-1, 1, 64).view(8, 8).sin()}


def compiled(model: nn.Module, **spec: Any) -> shardc.Program:
    given = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}, **spec}
    return shardc.compile(model, BATCH, given, prove=False)


class Rank:
    """A rank of the world. odd: it is the one that differs."""

    def __init__(self) -> None:
        self.program = compiled(net())
        self.mesh = runtime_mesh(self.program)
        self.odd = self.mesh.rank == ODD

    def engine(self, model: Any = None, program: Any = None, lr: float = 1e-2, **options: Any) -> Engine:
        options = {"optimizer": lambda ps: torch.optim.AdamW(ps, lr=lr), **options}
        return Engine(program or self.program, model or net(), mesh=self.mesh, **options)

    def module(self, **options: Any) -> ShardedModule:
        return ShardedModule(self.program, net(), mesh=self.mesh, **options)

    def batch(self) -> Batch:
        """The same, or on the odd rank one in which a number is another."""
        x = BATCH["x"].clone()
        x[7, 7] += 1e-6 * self.odd
        return {"x": x}


CASES: dict[str, tuple[Callable[[Rank], Any], str]] = {}


def case(what: str, says: str) -> Callable[[Callable[[Rank], Any]], Callable[[Rank], Any]]:
    """A row of the table: what differs, and how its error begins."""

    def keep(work: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
        CASES[what] = work, says
        return work

    return keep


@case("weights of a model that is not seeded", "the weight up.weight differs between ranks 1")
def _(r: Rank) -> None:
    r.engine(net(seed=int(r.odd)))


@case("one number of one weight", "the weight down.weight differs between ranks 1")
def _(r: Rank) -> None:
    model = net()
    with torch.no_grad():
        model.down.weight[0, 15] += 1e-6 * r.odd
    r.engine(model)


@case("a buffer", "the buffer scale differs on rank 3")
def _(r: Rank) -> None:
    model = net()
    model.scale[2] += r.odd
    r.engine(model)


@case("the seed", "the seed differs on rank 3 (dp=1, tp=1): 0 on rank 0, 1 on rank 3")
def _(r: Rank) -> None:
    r.engine(seed=int(r.odd))


@case("the spec", "the program differs on rank 3")
def _(r: Rank) -> None:
    r.engine(program=compiled(net(), data={"axis": "dp", "zero": 1}) if r.odd else r.program)


@case("the model's configuration, such as one from the environment", "the program differs on rank 3")
def _(r: Rank) -> None:
    r.engine(net(width=32 if r.odd else 16), compiled(net(width=32 if r.odd else 16)))


@case("a rate of dropout", "the program differs on rank 3")
def _(r: Rank) -> None:
    r.engine(program=compiled(net(dropout=0.1 + 0.1 * r.odd)))


@case("the number of microbatches", "the program differs on rank 3")
def _(r: Rank) -> None:
    r.engine(program=compiled(net(), batch={"microbatches": 2}) if r.odd else r.program)


@case("the precision", "the program differs on rank 3")
def _(r: Rank) -> None:
    r.engine(program=compiled(net(), precision={"compute": "bfloat16"}) if r.odd else r.program)


@case("the mesh", "the mesh differs on rank 3: dp=2 × tp=2 on rank 0, tp=2 × dp=2 on rank 3")
def _(r: Rank) -> None:
    TorchMesh(Mesh((("tp", 2), ("dp", 2)) if r.odd else (("dp", 2), ("tp", 2))))


@case("the version of torch", "the version of torch differs on rank 3")
def _(r: Rank) -> None:
    with mock.patch.object(torch, "__version__", "2.99.0" if r.odd else torch.__version__):
        r.engine()


@case("clipping", "clip_norm differs on rank 3 (dp=1, tp=1): 1.0 on rank 0, 2.0 on rank 3")
def _(r: Rank) -> None:
    r.engine(clip_norm=1.0 + r.odd)


@case("what is done about a loss of nan", "nonfinite differs on rank 3 (dp=1, tp=1): stop on rank 0, skip on rank 3")
def _(r: Rank) -> None:
    r.engine(nonfinite="skip" if r.odd else "stop")


@case("the class of the optimizer", "the optimizer differs on rank 3 (dp=1, tp=1): AdamW on rank 0, Adam on rank 3")
def _(r: Rank) -> None:
    r.engine(optimizer=torch.optim.Adam if r.odd else torch.optim.AdamW)


@case("betas or weight decay", "the setting of the optimizer differs on rank 3 (dp=1, tp=1): weight_decay=0.01")
def _(r: Rank) -> None:
    r.engine(optimizer=lambda ps: torch.optim.AdamW(ps, weight_decay=0.01 * (1 + r.odd)))


@case("the learning rate", "the learning rate differs on rank 3 (dp=1, tp=1): 0.01 on rank 0, 0.02 on rank 3")
def _(r: Rank) -> None:
    r.engine(lr=0.01 * (1 + r.odd)).step(BATCH)


@case("the schedule of learning rates", "the learning rate differs on rank 3")
def _(r: Rank) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if r.odd else 0.5)

    engine = r.engine(scheduler=schedule)
    for _ in range(2):
        engine.step(BATCH)


@case("steps done, after checkpoints of two runs", "the number of steps done differs on rank 3")
def _(r: Rank) -> None:
    engine = r.engine()
    engine.rng.step += r.odd
    engine.step(BATCH)


@case("the global batch", "the global batch differs on rank 3")
def _(r: Rank) -> None:
    r.engine().step(r.batch())


@case("a held-out batch", "the global batch differs on rank 3")
def _(r: Rank) -> None:
    r.engine().evaluate(r.batch())


@case("rows that are dropped", "the form of the batch differs on rank 3 (dp=1, tp=1): x f32[8, 8] on rank 0")
def _(r: Rank) -> None:
    r.engine().step({"x": BATCH["x"][: 6 if r.odd else 8]})


@case("keys of the batch", "the form of the batch differs on rank 3 (dp=1, tp=1): x f32[8, 8] on rank 0")
def _(r: Rank) -> None:
    r.engine().step({"y" if r.odd else "x": BATCH["x"]})


@case("dtypes of the batch", "the form of the batch differs on rank 3 (dp=1, tp=1): x f32[8, 8] on rank 0")
def _(r: Rank) -> None:
    r.engine().step({"x": BATCH["x"].double() if r.odd else BATCH["x"]})


@case("the part of a batch that a tensor-parallel group shares", "its part of the batch: the part of the batch differs")
def _(r: Rank) -> None:
    half = r.batch()["x"].chunk(2)[r.mesh.coordinate("dp")]
    r.engine().step({"x": half}, local=True)


@case("the length of a dataset", "the length of the dataset differs on rank 3 (dp=1, tp=1): 32 on rank 0, 24 on rank 3")
def _(r: Rank) -> None:
    r.engine().loader([{"x": BATCH["x"][0]}] * (24 if r.odd else 32))


@case(
    "a dataset that is a rank's share of the data",
    "loader 'train': the content of the dataset (its samples 0, 16, 31) differs on rank 3",
)
def _(r: Rank) -> None:
    samples = [{"x": BATCH["x"][0] + i} for i in range(64)]
    r.engine().loader(samples[r.odd :: 2])


@case("the shuffling of a dataset", "the loader's seed differs on rank 3 (dp=1, tp=1): 0 on rank 0, 7 on rank 3")
def _(r: Rank) -> None:
    r.engine().loader([{"x": BATCH["x"][0]}] * 32, seed=7 * r.odd)


@case("the end of the data", "the call of this rank differs on rank 3 (dp=1, tp=1): a step on rank 0, saving on rank 3")
def _(r: Rank) -> None:
    engine = r.engine()
    if r.odd:
        engine.save("not written")
    engine.step(BATCH)


@case(
    "a rank that evaluates while others train", "the call of this rank differs on rank 3 (dp=1, tp=1): a step on rank 0"
)
def _(r: Rank) -> None:
    engine = r.engine()
    (engine.evaluate if r.odd else engine.step)(BATCH)


@case("train or eval of a module", "whether the module trains differs on rank 3 (dp=1, tp=1): True on rank 0")
def _(r: Rank) -> None:
    module = r.module().train(not r.odd)
    module(**module.local(BATCH))


@case("parameters that one rank alone changed", "whether parameters changed differs on rank 3")
def _(r: Rank) -> None:
    module = r.module()
    with torch.no_grad():
        next(module.parameters()).mul_(1 + r.odd) if r.odd else None
    module(**module.local(BATCH))


def steps(r: Rank, weight: float = 1.0, lr: float = 0.1, probe: bool = False) -> None:
    """Two steps of a loop of one's own, and the forward that finds what differed in the second."""
    module, scale = r.module(), nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([*module.parameters(), scale], lr=lr)
    for _ in range(3):
        part = module.local(BATCH)
        extra = (part["x"] * scale).square().sum() if probe else 0.0
        (module(**part) * weight + extra).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "a factor on a module's loss, made of a rank's rows",
    "loss.backward(): the gradient of the loss in backward differs on rank 3 (dp=1, tp=1): 1 on rank 0, 2 on rank 3",
)
def _(r: Rank) -> None:
    steps(r, weight=1.0 + r.odd)


@case(
    "the learning rate of a loop around a module",
    "optimizer.step(): the learning rate differs on rank 3 (dp=1, tp=1): 0.1 on rank 0, 0.2 on rank 3",
)
def _(r: Rank) -> None:
    steps(r, lr=0.1 * (1 + r.odd))


@case(
    "parameters beside a module, trained on one's own rows",
    "the optimizer SGD: it also steps parameters that are not the module's (1), and their gradients are not summed",
)
def _(r: Rank) -> None:
    steps(r, probe=True)


def flip(x: torch.Tensor) -> None:
    """One bit of the last element, such as the lowest of its fraction."""
    x.detach().as_subclass(torch.Tensor).view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@case("a bit that flips in a weight", "after step 2: the weight up.bias differs between ranks 1")
def _(r: Rank) -> None:
    engine = r.engine(check_every=2)
    engine.step(BATCH)
    if r.odd:
        flip(engine.params["up_bias"])
    engine.step({"x": BATCH["x"] * 0})


@case("a bit that flips in the optimizer's state", "after step 2: the optimizer's state of down.bias differs on rank 3")
def _(r: Rank) -> None:
    engine = r.engine(check_every=2)
    engine.step(BATCH)
    if r.odd:
        assert engine.optimizer is not None
        engine.optimizer.state[engine.params["down_bias"]]["step"] += 1e-6
        flip(engine.optimizer.state[engine.params["down_bias"]]["exp_avg_sq"])
    with mock.patch.object(engine.optimizer, "step"):
        engine.step(BATCH)


@case("a bit that flips in a buffer", "after step 1: the buffer scale differs on rank 3")
def _(r: Rank) -> None:
    engine = r.engine()
    engine.step(BATCH)
    if r.odd:
        flip(engine.buffers["scale"])
    engine.save("not written")


@case("a bit that flips in a weight of a module", "after step 1: the weight up.bias differs between ranks 1")
def _(r: Rank) -> None:
    module = r.module(check_every=1)
    loss = module(**module.local(BATCH))
    if r.odd:
        flip(module.get_parameter("up.bias").data)
    loss.backward()
    module(**module.local(BATCH))


def main(folder: Path | None) -> None:
    """Every case in one world: each ends in an error on all ranks, and the next begins. Writes what this rank read, or
    prints it on rank 0, and what is amiss on any rank; the exit status then says whether all was well here.
    """
    torch.set_num_threads(1)
    rank, messages = Rank(), {}
    for what, (work, _) in CASES.items():
        try:
            work(copy.copy(rank))
            messages[what] = ""
        except ShardcError as e:
            messages[what] = str(e)
    rank.mesh.close()
    if folder is not None:
        (folder / f"rank{rank.mesh.rank}.json").write_text(json.dumps(messages))
        return
    wrong = 0
    for what, message in messages.items():
        named = message.startswith(CASES[what][1])
        wrong += not named
        if rank.mesh.rank == 0 or not named:
            print(f"{'ok ' if named else 'BAD'} {what}, on rank {rank.mesh.rank}\n    {message or 'nothing was said'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
