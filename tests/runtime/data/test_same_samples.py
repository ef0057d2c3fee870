"""Datasets that are not the same on all ranks are an error; samples that are drawn are none."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.data.loader import Loader
from shardc.runtime.data.same_samples import check, digest
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import example_program

SIZE = 32


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), float(i)), "y": torch.full((8,), -float(i))}


class Drawn(Rows):
    """Augmented: from the generators that shardc seeds."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        return {"x": super().__getitem__(i)["x"] + noise, "y": noise}


class OwnGenerator(Rows):
    """From a generator of its own that nobody seeds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(self.rng.random(8)), "y": torch.zeros(8)}


class Broken(Rows):
    """Its first sample cannot be read on one rank."""

    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == 0 and self.odd:
            raise OSError("a file is missing")
        return super().__getitem__(i)


class Opened(Rows):
    """Notes which processes read it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        (self.folder / str(os.getpid())).touch()
        return super().__getitem__(i)


def share(rank: int) -> Subset[Any]:
    """Of a script for DDP."""
    return Subset(Rows(), range(rank, SIZE, 4))


def made(dataset: Callable[[int], Any], **options: Any) -> None:
    program = example_program.program(2, 2)

    def work(mesh: LoopbackMesh) -> None:
        program.engine(example_program.Model(), mesh=mesh).loader(dataset(mesh.rank), **options)

    loopback(program.mesh, work)


class Shuffled(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """A stream in an order that nobody seeds."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows()
        return (rows[i] for i in random.SystemRandom().sample(range(SIZE), SIZE))


def test_a_stream_that_begins_elsewhere_each_time_is_noted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = itertools.count()  # not by chance the same twice

    def order(*_: Any) -> list[int]:
        first = next(drawn)
        return [(first + i) % SIZE for i in range(SIZE)]

    monkeypatch.setattr(random.SystemRandom, "sample", order)
    made(lambda rank: Shuffled())
    assert "the stream begins with other samples each time that it is read" in capfd.readouterr().err


def test_a_ranks_share_is_no_dataset() -> None:
    with pytest.raises(ShardcError, match=r"the content of the dataset \(its samples 0, 4, 7\) differs between ranks"):
        made(share)
    with pytest.raises(ShardcError, match="return the whole Dataset on every rank"):
        made(share)


def test_one_rank_with_another_last_sample() -> None:
    def dataset(rank: int) -> list[Any]:
        samples = [{"x": torch.ones(8), "y": "a text"} for _ in range(SIZE)]
        samples[-1]["y"] = "another" if rank == 3 else "a text"
        return samples

    with pytest.raises(ShardcError, match=r"loader 'train': the content .* differs on rank 3 \(dp=1, tp=1\)"):
        made(dataset)


@pytest.mark.parametrize("dataset", [lambda _: Rows(), lambda _: Drawn(), lambda _: OwnGenerator()])
def test_what_is_drawn_is_no_difference(dataset: Callable[[int], Any]) -> None:
    made(dataset)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_drawn_of_the_process(workers: int) -> None:
    class OneOfTwo:  # a mesh on which every sum is a lone rank's
        layout, rank, activity = Mesh((("dp", 2),)), 0, Activity()

        def sum_on_host(self, values: list[int]) -> list[int]:
            return [2 * v for v in values]

    loader = Loader(example_program.program(2), OneOfTwo(), Drawn(), num_workers=workers)
    before = torch.random.get_rng_state(), random.getstate()
    check(OneOfTwo(), loader)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_what_cannot_be_read_is_said_when_it_is_read() -> None:
    made(lambda rank: Broken(rank == 2))


def test_with_workers_a_worker_reads(tmp_path: Path) -> None:
    """It may open files that are no good after a fork."""
    made(lambda _: Opened(tmp_path), num_workers=2)
    readers = {int(p.name) for p in tmp_path.iterdir()}
    assert readers
    assert os.getpid() not in readers


def test_digests() -> None:
    class Own:
        pass

    class Image:
        def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
            return np.arange(4)

    same = [lambda: {"a": [1, 2.0], "b": (torch.ones(2, 2), np.ones(3), b"x", Own(), Image())}] * 2
    assert digest(same[0]()) == digest(same[1]())
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})
    assert (
        len({digest(x) for x in (1, 1.0, "1", b"1", [1], torch.ones(1), np.ones(1), np.ones(2), Own(), Image())}) == 10
    )
    assert digest(torch.eye(2).to_sparse()) == digest(torch.ones(2, 2).to_sparse())  # by their kind
