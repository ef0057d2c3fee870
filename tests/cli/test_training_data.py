"""Data of which each rank reads its own part: other numbers for other parts, and one end for all ranks."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

import shardc
from shardc.cli.ranks import training_loop
from shardc.cli.ranks.training_data import Batches, _taken_over, batches, example, note_same_data
from shardc.cli.ranks.training_loop import Interrupted, Signals, Training
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.agreement import DisagreementError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.spec import Run

#: Of an engine without schedulers, callbacks and a best step.
QUIET: dict[str, Any] = {"callbacks": [], "extra": {}, "evaluated": lambda loss: None}
Drawn = list[tuple[float, float, float]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def once(split: str, part: int, parts: int) -> Iterator[Any]:
    """Made anew for each epoch; draws when it is made, and for each batch."""
    first = draw()
    return iter([first, *(draw() for _ in range(2))])


class Again:
    """Read again for each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return (draw() for _ in range(3))


def again(split: str, part: int, parts: int) -> Iterable[Any]:
    return Again()


@pytest.mark.parametrize("data", [once, again])
def test_parts_draw_apart_and_a_part_alike_on_all_its_ranks(data: Any) -> None:
    def drawn(part: int, seed: int = 5) -> Drawn:
        source = batches(SimpleNamespace(part=(part, 2)), SimpleNamespace(data=data), "train", seed)
        assert source is not None
        assert source.local
        stream = iter(source)
        return [next(stream) for _ in range(6)]  # two epochs

    rank0, rank1, other = drawn(0), drawn(0), drawn(1)
    assert rank0 == rank1
    for of_one, of_other in ((rank0, other), (rank0, drawn(0, seed=6)), (rank0[:3], rank0[3:])):
        for numbers, others in zip(zip(*of_one, strict=True), zip(*of_other, strict=True), strict=True):
            assert set(numbers).isdisjoint(others), "random, numpy and torch"


def held_out(lengths: list[int], local: bool) -> list[Any]:
    """What each rank has of an evaluation, or its error. lengths: of the held-out data of each rank."""

    def work(mesh: LoopbackMesh) -> Any:
        data = [f"batch {i}" for i in range(lengths[mesh.rank])]

        def evaluate_all(batches: Iterable[int], local: bool) -> dict[str, Any]:
            return {"loss": 0.0, "read": list(batches)}

        engine = SimpleNamespace(**QUIET, mesh=mesh, step_count=3, evaluate_all=evaluate_all)
        valid = Batches(data, lambda: data, 0, local=local, description="")
        signals: Any = SimpleNamespace(seen=0)
        training = Training(Run(), engine, valid, valid, SimpleNamespace(say=print), signals, print)  # type: ignore[arg-type]
        try:
            return training.held_out()["read"]
        except DisagreementError as e:
            return e

    return loopback(Mesh.of({"dp": 2}), work)


def test_held_out_parts_of_unequal_length_are_an_error_on_all_ranks() -> None:
    """The rank that has more would wait for ever in the collectives of a batch that the other does not have."""
    for ended, lengths in ((1, [3, 2]), (0, [0, 1])):
        for error in held_out(lengths, local=True):
            assert isinstance(error, DisagreementError)
            assert f"the held-out data of rank {ended}" in error.what
            assert f"ended after {min(lengths)} batches, but others have more" in error.what
            assert "the same number of batches for every part" in error.fix


@pytest.mark.parametrize("local", [False, True])
def test_held_out_parts_of_equal_length_are_read_to_their_end(local: bool) -> None:
    assert held_out([3, 3], local) == [["batch 0", "batch 1", "batch 2"]] * 2


def evaluation(settings: Run, seen: int, saves: int, *, dies: bool = False) -> list[tuple[Any, ...]]:
    """What each of two ranks has read, held-out values or the end, and steps saved, if rank 1 gets signals at batch 2.

    dies: the workers that read its batches get them, too.
    """

    def work(mesh: LoopbackMesh) -> tuple[Any, ...]:
        signals, read, saved = SimpleNamespace(seen=0, saves=0), list[int](), list[int]()

        def evaluate_all(batches: Iterable[int], local: bool) -> dict[str, float]:
            for batch in batches:
                read.append(batch)
                if mesh.rank == 1 and batch == 2:
                    signals.seen, signals.saves = seen, saves
            return {"loss": sum(read)}

        engine: Any = SimpleNamespace(**QUIET, mesh=mesh, step_count=3, evaluate_all=evaluate_all, saving=None)
        engine.save, engine.finish_save = lambda *_, **__: saved.append(engine.step_count), lambda: None
        ends = dies and mesh.rank == 1
        read_by_workers = (1 // 0 if ends and i == 3 else i for i in range(40))
        valid = Batches(read_by_workers, lambda: None, 0, local=False, description="")
        lines: Any = SimpleNamespace(say=print, add_held_out=lambda *_: None)
        training = Training(settings, engine, valid, valid, lines, signals)
        try:
            values: Any = training.last_held_out()
        except Interrupted as e:
            values = str(e)
        return len(read), values, saved

    return loopback(Mesh.of({"dp": 2}), work)


def test_a_signal_ends_an_evaluation_on_all_ranks_and_no_mean_of_a_part_is_given() -> None:
    for read, end, saved in (x for dies in (False, True) for x in evaluation(Run(save="out"), 15, 0, dies=dies)):
        assert read == 3
        assert end == "stopped by SIGTERM after step 3: saved to out; continue with --resume out"
        assert saved == [3]


def test_a_checkpoint_that_is_asked_for_in_an_evaluation_is_written_there() -> None:
    for read, values, saved in evaluation(Run(save="out"), 0, 2):
        assert (read, values, saved) == (40, {"loss": sum(range(40))}, [3])


def test_held_out_batches_are_the_same_each_time_and_are_read_once_for_a_step() -> None:
    model, rows = torch.nn.Linear(4, 4).double(), Rows()
    program = shardc.compile(
        model, {"input": rows.x[:4]}, {"shardc": 1}, loss=lambda y, _: y.square().mean(), prove=False
    )
    engine = program.engine(model)
    valid = batches(engine, SimpleNamespace(data=lambda split: rows, collate=None), "valid", 0)
    assert valid is not None
    signals: Any = SimpleNamespace(seen=0)
    losses = []
    for _ in range(2):
        training = Training(Run(eval_batches=1), engine, valid, valid, SimpleNamespace(), signals)  # type: ignore[arg-type]
        losses.append(training.held_out())
        training.valid = example(SimpleNamespace(ref="", batch={"input": rows.x[8:12]}), 0)
        assert training.held_out() == losses[-1]
    assert losses[0] == losses[1]


def test_two_signals_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager ends all processes of a group, and the launcher passes its own on."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    signals = Signals()
    signals._note(signal.SIGTERM, None)
    signals._note(signal.SIGTERM, None)
    assert (signals.seen, ended) == (signal.SIGTERM, [])
    signals._since -= training_loop.AT_ONCE
    signals._note(signal.SIGINT, None)
    assert ended == [128 + signal.SIGINT]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), float(i))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size=4, **options)


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))[::-1])


class Doubling(DataLoader[torch.Tensor]):
    def __iter__(self) -> Any:
        return (2 * x for x in super().__iter__())


def test_a_loader_that_reads_in_its_own_way_is_not_taken_over() -> None:
    rows = Rows()
    for own in (
        DataLoader(rows, 2, sampler=Backwards(rows)),
        DataLoader(rows, 2, sampler=SequentialSampler(range(2))),  # the first two alone
        DataLoader(rows, 2, sampler=RandomSampler(rows, num_samples=2)),
        DataLoader(rows, 2, sampler=WeightedRandomSampler([0.5] * 8, 8)),
        DataLoader(rows, batch_size=None),
        Doubling(rows, 2),
    ):
        assert _taken_over(own) is None


def test_how_a_loader_reads_goes_with_it() -> None:
    """Also what a worker runs first, such as opening a file. With `batch_sampler=` a DataLoader has a `sampler` that
    reads nothing: rows that should be shuffled were not."""
    of_workers = {"num_workers": 1, "worker_init_fn": print, "prefetch_factor": 3, "persistent_workers": True}
    plain = {"collate_fn": default_collate, "pin_memory": False, "timeout": 0, "multiprocessing_context": None}
    sampler = BatchSampler(RandomSampler(Rows()), 2, True)
    for how, order in (
        ({"batch_size": 4}, {"batch_size": 4, "shuffle": False, "drop_last": False}),
        ({"batch_sampler": sampler}, {"batch_size": 2, "shuffle": True, "drop_last": True}),
    ):
        assert _taken_over(DataLoader(Rows(), **how, **of_workers)) == {**order, **of_workers, **plain}  # type: ignore[arg-type]


apart = DistributedSampler(Rows(), num_replicas=2, rank=0)


def reseeded(source: Any) -> Any:
    torch.manual_seed(7)
    return source


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: reseeded(Rows()), True),
        (lambda: reseeded(shuffled(shuffle=True)), True),
        (lambda: shuffled(shuffle=True, generator=torch.Generator().manual_seed(7)), True),
        (lambda: reseeded(Again()), True),
        (lambda: reseeded(shuffled()), False),
        (lambda: reseeded([torch.randn(4, 3)]), False),  # it drew all there is to draw
        (lambda: shuffled(shuffle=True), False),
        (Rows, False),
    ],
)
def test_a_seed_of_data_that_decides_nothing_is_told(make: Any, told: bool) -> None:
    def loader(dataset: Any, **options: Any) -> Any:
        return SimpleNamespace(order=SimpleNamespace(size=8, rest=False), batch_size=4)

    program = shardc.compile(
        torch.nn.Linear(3, 3), {"input": torch.zeros(4, 3)}, {"shardc": 1}, loss=lambda y, _: y.mean()
    )
    found = batches(
        SimpleNamespace(loader=loader, program=program),
        SimpleNamespace(data=lambda split: make(), collate=None),
        "train",
        3,
    )
    assert found is not None
    assert ("drawn from --seed 3: the seed 7 that data() sets does not reach its epochs" in found.description) == told


class From(Dataset[torch.Tensor]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), float(i + self.start))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (lambda split: From(0), True),
        (lambda split: DataLoader(From(0), 4, shuffle=split == "train"), True),
        (lambda split: {"train": From(0), "valid": From(8)}[split], False),
        (lambda split: [torch.ones(4, 3)] * 2, False),  # batches: nobody reads them twice
    ],
)
def test_held_out_data_that_are_the_training_data_are_told(data: Any, told: bool) -> None:
    model = torch.nn.Linear(3, 2)
    program = shardc.compile(
        model, torch.ones(4, 3), {"shardc": 1}, loss=lambda output, batch: output.square().mean(), prove=False
    )
    engine, file = program.engine(model), SimpleNamespace(data=data, collate=None)
    train, valid = batches(engine, file, "train", 3), batches(engine, file, "valid", 3)
    assert train is not None
    assert valid is not None
    note_same_data(train, valid)
    assert ("(the training data: data('valid') returns the same" in valid.description) == told
    assert "(the training" not in train.description
    assert repr(engine) == "<Engine of Linear: rank 0 of one device, AdamW, 0 steps done>"
    if told:
        assert repr(engine.loaders["train"]) == "<Loader of 8 samples in global batches of 4: epoch 0, 0 read>"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            torch.zeros(8, 4),
            r"data\(\) returns a tensor \[8, 4\]: each of its rows would be (.|\n)*TensorDataset\(x, y\)",
        ),
        (DataLoader(Rows(), 2, sampler=apart), "a DistributedSampler, which splits samples (.|\n)*shuffle=True"),
        (DataLoader(Rows(), batch_sampler=BatchSampler(apart, 2, True)), "the DataLoader has a DistributedSampler"),
    ],
)
def test_data_that_nobody_means_are_refused(source: Any, said: str) -> None:
    with pytest.raises(ShardcError, match=said):
        batches(SimpleNamespace(), SimpleNamespace(data=lambda split: source), "train", 0)


@pytest.mark.parametrize(("ref", "said"), [("m.py", "of batch(), repeated"), ("hf:x", "random ids, repeated")])
def test_a_run_without_data_says_what_it_trains_on(ref: str, said: str) -> None:
    assert said in example(SimpleNamespace(ref=ref, batch=torch.zeros(2)), 0).description


def test_held_out_data_without_a_batch_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(training_loop, "print_line", told.append)

    def work(mesh: LoopbackMesh) -> None:
        engine = SimpleNamespace(
            **QUIET, mesh=mesh, step_count=3, evaluate_all=lambda batches, local: dict.fromkeys(batches, 0.0)
        )
        signals: Any = SimpleNamespace(seen=0)
        for data in (["loss"], []):
            valid = Batches(data, lambda: [], 0, local=False, description="")
            training = Training(Run(), engine, valid, valid, SimpleNamespace(say=print), signals)  # type: ignore[arg-type]
            for _ in range(2):
                assert training.held_out() == dict.fromkeys(data, 0.0)

    loopback(Mesh.of({"dp": 2}), work)
    assert told == ["note: data('valid') has no batch: there is no held-out loss (return None if none is intended)"]


def test_a_table_of_splits_without_held_out_data_is_told_what_to_return() -> None:
    file = SimpleNamespace(data=lambda split: {"train": [1]}[split], collate=None)
    with pytest.raises(ShardcError, match=r"data\('valid'\) raises KeyError(.|\n)*return None for 'valid'"):
        batches(SimpleNamespace(), file, "valid", 0)
    with pytest.raises(KeyError, match="other"):
        batches(SimpleNamespace(), SimpleNamespace(data=lambda split: {}["other"], collate=None), "valid", 0)


def test_data_without_end_are_read_as_far_as_said_and_no_valid_data_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "SAY_AFTER", 0.0)
    said: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(training_loop, "print_line", told.append)

    def work(mesh: LoopbackMesh) -> Any:
        def evaluate_all(batches: Iterable[int], local: bool) -> dict[str, Any]:
            return {"loss": 0.0, "read": list(batches)}

        engine = SimpleNamespace(**QUIET, mesh=mesh, step_count=3, evaluate_all=evaluate_all)
        signals: Any = SimpleNamespace(seen=0)
        endless = Batches(itertools.count(), itertools.count, 0, local=False, description="")
        lines: Any = SimpleNamespace(say=said.append)
        for settings, valid in ((Run(eval_batches=3), endless), (Run(eval_every=2), None)):
            training = Training(settings, engine, endless, valid, lines, signals)  # type: ignore[arg-type]
            found = training.held_out()
            training.held_out()
            assert found == ({"loss": 0.0, "read": [0, 1, 2]} if valid else {})

    loopback(Mesh.of({"dp": 2}), work)
    assert any(" batches in 0 s, and it has not ended (--eval-batches N reads the first N)" in line for line in said)
    assert told == ["note: there is no data('valid') in the model file: no held-out loss (--eval-every)"]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """13 of them: a batch of 8, and 5 left over."""

    def __init__(self) -> None:
        self.x = torch.randn(13, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input": self.x[i]}


def test_held_out_data_count_whole() -> None:
    """The last batch is smaller, which an epoch of training leaves out."""
    model, rows = torch.nn.Linear(4, 4).double(), Rows()
    file = SimpleNamespace(data=lambda split: rows, collate=None)
    program = shardc.compile(
        model, {"input": rows.x[:8]}, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().mean(), prove=False
    )
    want = float(model(rows.x).square().mean().detach())

    def work(mesh: LoopbackMesh) -> tuple[float, int]:
        engine = program.engine(model, mesh=mesh)
        valid, train = (batches(engine, file, split, 0) for split in ("valid", "train"))
        assert valid is not None
        assert train is not None
        count = len(list(train.one_epoch()))
        return engine.evaluate_all(valid.one_epoch(), local=True)["loss"], count

    for loss, count in loopback(program.mesh, work):
        assert loss == pytest.approx(want, rel=1e-12)
        assert count == 1
