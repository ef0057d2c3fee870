"""The last batch of an epoch: fewer rows than were compiled, the same step as on one device, whatever ranks and
microbatches divide.
"""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardc
from shardc.api import Program
from shardc.runtime.data.worker import Rest
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests.runtime.zero.test_steps import CLIP, MESHES, ROWS, Net, adamw, batch, captured, model, program, spec

State = dict[str, Tensor]


def fewer(step: int) -> dict[str, Tensor]:
    """24 rows, 24, then 7, 24, 1."""
    rows = {2: slice(4, 11), 4: slice(4, 5)}.get(step, slice(None))
    return {k: x[rows] for k, x in batch(step).items()}


@functools.cache
def reference() -> tuple[list[float], State]:
    plain = copy.deepcopy(model())
    optimizer = adamw([(n, p) for n, p in plain.named_parameters() if p.requires_grad])
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = plain(**fewer(step))
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: x.detach() for n, x in plain.state_dict().items()}


@pytest.mark.parametrize(("mesh", "zero", "microbatches"), [("dp3", 0, 1), ("dp2xtp2", 2, 3), ("hybrid", 3, 3)])
def test_fewer_rows(mesh: str, zero: int, microbatches: int) -> None:
    sizes, data = MESHES[mesh]
    p = program(sizes, zero, microbatches, **data)

    def work(mesh: LoopbackMesh) -> tuple[list[float], State]:
        engine = p.engine(model(), adamw, mesh=mesh, clip_norm=CLIP)
        losses = []
        for step in range(5):
            seen = engine.evaluate(fewer(step))
            losses.append(float(engine.step(fewer(step))))
            assert float(seen) == pytest.approx(losses[-1], rel=1e-12)
        assert len(engine._model._recompiled) == 2
        return losses, engine.full_state_dict()

    losses, want = reference()
    for found, state in loopback(p.mesh, work):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, x in want.items():
            assert float((state[name] - x).norm()) <= 1e-11 * float(x.norm()), name


#: Rows that a collate function leaves out of each step's batch: none, some of one part, of all, all of the first part.
LEFT_OUT = [set[int](), {5}, {0, 1, 9, 20}, set(range(12))]


def kept(step: int, rows: range) -> dict[str, Tensor]:
    mine = [i for i in rows if i not in LEFT_OUT[step]]
    return {k: x[mine] for k, x in batch(step).items()}


@functools.cache
def without_bad_rows() -> list[float]:
    plain, losses = copy.deepcopy(model()), list[float]()
    optimizer = adamw([(n, p) for n, p in plain.named_parameters() if p.requires_grad])
    for step in range(len(LEFT_OUT)):
        optimizer.zero_grad()
        loss = plain(**kept(step, range(ROWS)))
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


PIPELINE = {"pipeline": {"axis": "pp", "cut": ["norm"], "schedule": "1f1b"}}


@pytest.mark.parametrize(
    "sharded",
    [
        spec({"dp": 2}, 0),
        spec({"tp": 2, "dp": 2}, 2, 3),
        spec({"pp": 2, "dp": 2}, 1, 3) | PIPELINE,
        spec({"dp_outer": 2, "dp": 2}, 3, 2, axis=["dp_outer", "dp"]),
    ],
    ids=["dp", "tp", "pp", "hybrid"],
)
def test_parts_that_lack_rows(sharded: dict[str, Any]) -> None:
    """A collate function leaves bad samples out of a rank's part: the step of one device that leaves them out."""
    p = shardc.compile(model(), batch(0), sharded, captured=copy.deepcopy(captured()))

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = p.engine(model(), adamw, mesh=mesh, clip_norm=CLIP)
        (number, parts), losses = engine.part, list[float]()
        for step in range(len(LEFT_OUT)):
            part = kept(step, range(ROWS)[number * ROWS // parts : (number + 1) * ROWS // parts])
            seen = engine.evaluate_all([part], local=True)["loss"]
            losses.append(float(engine.step(part, local=True)))
            assert seen == pytest.approx(losses[-1], rel=1e-12)
        return losses

    for losses in loopback(p.mesh, work):
        assert losses == pytest.approx(without_bad_rows(), rel=1e-12)


def test_parts_that_are_refused() -> None:
    """A module takes no parts that lack rows; and a collate function that returns no batch differs on all ranks."""
    p = program({"dp": 2}, 0)

    def module(mesh: LoopbackMesh) -> None:
        p.module(model(), mesh=mesh)(**kept(1, range(12 * mesh.rank, 12 * mesh.rank + 12)))

    def engine(mesh: LoopbackMesh) -> None:
        p.engine(model(), mesh=mesh).step(kept(0, range(12)) if mesh.rank else None, local=True)

    for work, text in (
        (module, r"number of rows in the part of the batch differs(?s:.*)of the dataset"),
        (engine, r"the inputs in the part of the batch differs(?s:.*)also where samples are left out"),
    ):
        with pytest.raises(shardc.ShardcError, match=text):
            loopback(p.mesh, work)


class Normed(nn.Module):
    """Statistics of the batch, a mean over its elements, a mask that is as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(4, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        every_other = torch.tensor([1.0, 2.0] * 8, dtype=torch.float64)[: x.shape[0], None]
        return (self.norm(self.fc(x)) * every_other).square().mean()


def rows(n: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def test_statistics_and_constants_of_their_own() -> None:
    net = Normed()
    p = shardc.compile(net, rows(16), {"shardc": 1, "mesh": {"dp": 4}})
    net.eval()  # that it is switched later changes nothing

    def work(mesh: LoopbackMesh) -> State:
        engine = p.engine(net, lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh)
        for n in (16, 6, 16, 3):
            engine.step(rows(n))
        return engine.full_state_dict()

    plain = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for n in (16, 6, 16, 3):
        optimizer.zero_grad()
        plain(rows(n)).backward()
        optimizer.step()
    for state in loopback(p.mesh, work):
        for name, x in plain.state_dict().items():
            torch.testing.assert_close(state[name], x.detach(), rtol=1e-11, atol=1e-13)
    assert not net.training


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 38

    def __getitem__(self, i: int) -> Tensor:
        return rows(38)[i]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loader_gives_the_rest(microbatches: int) -> None:
    """38 samples in batches of 16: every sample counts, in both epochs; the same step as on one device."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    spec = {"shardc": 1, "mesh": {"dp": 4}, "data": {"zero": 2}, "batch": {"microbatches": microbatches}}
    p = shardc.compile(net, rows(16), spec, loss=mean)

    def work(mesh: LoopbackMesh) -> tuple[list[Any], State]:
        engine = p.engine(net, lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh)
        loader = engine.loader(Numbers(), drop_last=False, shuffle=True, seed=5)
        assert len(loader) == 3
        seen: list[Any] = []
        for _ in range(2):
            for part in loader:
                seen.append(part.batch if isinstance(part, Rest) else part)
                engine.step(part, local=True)
        assert (loader.epoch, loader.consumed) == (2, 0)
        return seen, engine.full_state_dict()

    ranks = loopback(p.mesh, work)
    assert [x.shape[0] for x in ranks[0][0]] == [4, 4, 6] * 2
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        whole = ranks[0][0][step] if step % 3 == 2 else torch.cat([seen[step] for seen, _ in ranks])
        optimizer.zero_grad()
        mean(plain(whole), whole).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    every = torch.cat([torch.cat([seen[step] for seen, _ in ranks]) for step in (0, 1)] + [ranks[0][0][2]])
    assert torch.equal(every.sort(0).values, rows(38).sort(0).values)
    for _, state in ranks:
        for name, x in plain.state_dict().items():
            torch.testing.assert_close(state[name], x.detach(), rtol=1e-11, atol=1e-13)


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def test_what_cannot_be_made_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net().double()
    p = shardc.compile(net, batch(0), {"shardc": 1, "mesh": {"dp": 2}})
    small, other = ({k: x[:n] for k, x in batch(0).items()} for n in (5, 7))

    def step(p: Program, given: Any) -> None:
        made = model()  # once: threads share torch's random numbers
        loopback(p.mesh, lambda mesh: p.engine(made, mesh=mesh).step(given))

    step(p, small)
    with monkeypatch.context() as patch:
        patch.setattr("shardc.recompile.MOST_SIZES", 1)
        with pytest.raises(shardc.ShardcError, match="leave bad samples out of the dataset"):
            step(p, other)
    for wrong in (
        {k: torch.cat([x, x]) for k, x in small.items() for _ in [0]} | {"ids": batch(0)["ids"]},
        {k: x.float() for k, x in small.items()},
    ):
        with pytest.raises(shardc.ShardcError, match="the program was compiled for"):
            step(p, wrong)
    del net
    gc.collect()
    with pytest.raises(
        shardc.ShardcError, match=r"other sizes than the program was compiled for .*, and the model.* no longer exists"
    ):
        step(p, other)
    step(p, small)  # it is there already
    p.save(tmp_path / "p")
    with pytest.raises(shardc.ShardcError, match="the program was compiled for"):  # an artifact has no model
        step(shardc.load(tmp_path / "p"), small)


def test_a_table_that_another_length_needs_on_fewer_stages() -> None:
    """Stages of other lengths are cut elsewhere in forward: the second one gets what it computed from a table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes))
    ids = torch.ones(16, 256, dtype=torch.long)
    made = {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 16}}
    one = shardc.compile(net, {"input_ids": ids, "labels": ids}, made, prove=False)
    assert one.resize is not None
    other = one.resize(one, {"input_ids": ids[:, :16], "labels": ids[:, :16]}, ((16, 16), (16, 16)), "as compiled")
    assert [b.stages for b in one.buffers if b.fqn] != [b.stages for b in other.buffers if b.fqn]
    assert one.params == other.params
