"""Datasets and streams of `datasets`, Grain and of plain Python: each sample once, whatever the mesh and the workers.

`datasets` and Grain are tried where they are installed; objects of the same shape always.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shardc
from shardc.api import Program
from shardc.cli.ranks import training_data
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.data.loader import Loader
from shardc.runtime.data.samples import is_batch
from shardc.runtime.data.worker import Rest
from shardc.runtime.mesh.agreement import DisagreementError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback

B, SEQ = 4, 3


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 2)

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        return (self.embed(ids).sum((1, 2)) * weight).mean()


MODEL = Ids()  # held, as programs are compiled again for other sizes


@functools.cache
def program(dp: int = 1, batch: int = B) -> Program:
    example = {"ids": torch.zeros(batch, SEQ, dtype=torch.int64), "weight": torch.ones(batch)}
    return shardc.compile(MODEL, example, {"shardc": 1, "mesh": {"dp": dp}}, prove=False)


def sample(i: int) -> dict[str, Any]:
    """As `datasets` gives it: lists, and columns that the model does not take."""
    return {
        "ids": [i, i + 1, i + 2],
        "weight": i / 2,
        "text": "word " * i,
        "nothing": None,
        "messages": [{"a": "b"}] * i,
    }


class Shaped:
    """Of the shape of a dataset, and of no library."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= self.size:
            raise IndexError(i)
        return sample(i)


class Streamed:
    """Of the shape of a stream, and of no library."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sample, range(self.size))


class Divided(IterableDataset[dict[str, Any]]):
    """Divides itself over workers, as torch's documentation teaches."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        begin, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return map(sample, range(begin, self.size, step))


def hugging_face(size: int, *, stream: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([sample(i) for i in range(size)])
    return rows.to_iterable_dataset(num_shards=3) if stream else rows


def grain(size: int, *, stream: bool) -> Any:
    source = pytest.importorskip("grain").MapDataset.source(Shaped(size))
    return source.to_iter_dataset() if stream else source


STREAMS = {
    "shaped": Streamed,
    "divided": Divided,
    "datasets": lambda size: hugging_face(size, stream=True),
    "grain": lambda size: grain(size, stream=True),
}
MAPS = {
    "shaped": Shaped,
    "list": lambda size: [sample(i) for i in range(size)],
    "datasets": lambda size: hugging_face(size, stream=False),
    "grain": lambda size: grain(size, stream=False),
}


def read(loaders: Iterable[Loader]) -> list[int]:
    """The first id of each sample, in the order of global batches; all ranks' parts joined."""
    ids = []
    for parts in zip(*loaders, strict=True):
        parts = parts[:1] if isinstance(parts[0], Rest) else parts
        for part in parts:
            part = part.batch if isinstance(part, Rest) else part
            assert part["ids"].dtype == torch.int64
            assert part["weight"].dtype == torch.float32
            assert torch.equal(part["weight"] * 2, part["ids"][:, 0].float())
            ids += part["ids"][:, 0].tolist()
    return ids


def loaders(dp: int, data: Any, batch: int = B, **options: Any) -> list[Loader]:
    return [Loader(program(dp, batch), SimpleNamespace(rank=r), data, **options) for r in range(dp)]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_divided_over_ranks_and_workers(kind: str) -> None:
    data = STREAMS[kind](18)
    order = read(loaders(1, data))
    assert sorted(order) == sorted(set(order)), "each once"
    assert len(order) == 16
    assert read(loaders(2, data)) == order
    assert read(loaders(2, data, num_workers=2)) == order


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_a_stream_is_whole_on_all_ranks(workers: int) -> None:
    """Held-out data count each sample once: the last, smaller batch too."""
    assert read(loaders(2, Streamed(10), drop_last=False, num_workers=workers)) == list(range(10))
    assert read(loaders(2, Streamed(3), drop_last=False, num_workers=workers)) == [0, 1, 2]
    assert read(loaders(2, Streamed(8), drop_last=False, num_workers=workers)) == list(range(8))


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_on_another_mesh(kind: str) -> None:
    data = STREAMS[kind](24)
    order, one, two = read(loaders(1, data)), loaders(1, data), loaders(2, data, batch=2, num_workers=2)
    begun = read([list(itertools.islice(one[0], 3))])
    for loader in two:
        loader.load_state_dict(one[0].state_dict())
    assert begun + read(two) == order


@pytest.mark.parametrize("kind", MAPS)
def test_datasets_of_samples(kind: str) -> None:
    data = MAPS[kind](18)
    assert read(loaders(1, data, shuffle=False)) == list(range(16))
    shuffled = read(loaders(1, data, seed=3))
    assert shuffled == read(loaders(2, data, seed=3)) != list(range(16))
    assert len(set(shuffled)) == 16


def test_a_dataset_without_end() -> None:
    endless = pytest.importorskip("grain").MapDataset.source(Shaped(8)).repeat()
    with pytest.raises(ShardcError, match=r"never ends has no epochs\n  fix: leave out its repeat"):
        loaders(1, endless)


def test_a_column_that_is_none_is_named() -> None:
    rows = [sample(i) | {"weight": None if i == 2 else 1.0} for i in range(4)]
    with pytest.raises(ShardcError, match=r"'weight' of sample 2 is None\n  fix: give it a value"):
        list(loaders(1, rows, shuffle=False)[0])


def test_a_column_of_numbers_more_is_an_error_of_the_step() -> None:
    """It may be a mask that the model needs, so it is not left out silently."""
    model = Ids()
    engine = program().engine(model)
    rows = [{k: v for k, v in sample(i).items() if k in ("ids", "weight")} | {"mask": [1] * SEQ} for i in range(4)]
    (part,) = engine.loader(rows, shuffle=False)
    with pytest.raises(ShardcError, match=r"mask: the program was compiled without this input, i64\[4, 3\]"):
        engine.step(part, local=True)


def data_of(source: Any, split: str = "train", collate: Any = None, dp: int = 1) -> training_data.Batches:
    model = Ids()
    file = SimpleNamespace(data=lambda split: source() if callable(source) else source, collate=collate)
    result = training_data.batches(program(dp).engine(model), file, split, 0)
    assert result is not None
    return result


def stacked(*numbers: int) -> dict[str, Tensor]:
    return {"ids": torch.tensor([sample(i)["ids"] for i in numbers]), "weight": torch.tensor([i / 2 for i in numbers])}


def test_the_rule_that_tells_samples_from_global_batches() -> None:
    one, several = sample(1), stacked(1, 2, 3, 4)
    assert not is_batch(program(), one, False)
    assert not is_batch(program(), {k: torch.tensor(one[k]) for k in ("ids", "weight")}, True)
    assert is_batch(program(), several, False)
    assert is_batch(program(), {k: x[:2] for k, x in several.items()}, True), "of fewer rows"
    assert not is_batch(program(), {"text": "a"}, True), "only collate can read it"
    assert is_batch(program(), {"text": "a"}, False), "whose error names what it has"
    with pytest.raises(
        ShardcError, match=r"gives i64\[1, 3\]: is it a sample, .*\n  fix: .* \(x.squeeze\(0\)\), or beg"
    ):
        is_batch(program(), {k: x[:1] for k, x in several.items()}, False)


def test_data_may_return_samples_or_global_batches() -> None:
    for source in (Shaped(9), [sample(i) for i in range(9)]):
        found = data_of(source)
        assert (found.local, found.resumes) == (True, True)
        assert found.description == "9 samples, 1 of which an epoch leaves out (batches of 4)"
    found = data_of(Streamed(9))
    left_out = "a stream of samples, of a Streamed, whose rest of less than 4 an epoch leaves out"
    assert (found.description, found.resumes) == (left_out, True)
    assert [x["ids"][:, 0].tolist() for x in found.one_epoch()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = data_of(lambda: iter(Streamed(9)))
    stream = iter(found)
    assert [next(stream)["ids"][:, 0].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    batches = [stacked(*range(4)), stacked(*range(4, 8))]
    for source in (batches, lambda: iter(batches), tuple(batches)):
        found = data_of(source)
        assert (found.local, found.description.split(" of a ")[0]) == (False, "global batches")
        assert [x["ids"][:, 0].tolist() for x in found.one_epoch()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = data_of([str(i) for i in range(5)], collate=lambda texts: stacked(*map(int, texts)))
    assert sorted(next(found.one_epoch())["ids"][:, 0].tolist())[-1] <= 4


def test_a_dataloader_of_a_stream_is_divided_too() -> None:
    """In torch, two workers give each sample twice."""
    found = data_of(DataLoader(Divided(9), batch_size=B, num_workers=2, drop_last=True))  # type: ignore[arg-type]
    assert [x["ids"][:, 0].tolist() for x in found.one_epoch()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_held_out_streams_include_the_rest() -> None:
    read_all = [x.batch if isinstance(x, Rest) else x for x in data_of(Streamed(9), "valid").one_epoch()]
    assert [x["ids"][:, 0].tolist() for x in read_all] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_stream_that_is_a_ranks_share_is_refused() -> None:
    """As split_dataset_by_node(dataset, rank, world) of a script for DDP makes it."""

    compiled, model = program(2), Ids()

    def work(mesh: LoopbackMesh) -> None:
        rows = [sample(i) for i in range(mesh.rank, 16, 2)]
        compiled.engine(model, mesh=mesh).loader(SimpleStream(rows))

    with pytest.raises(DisagreementError, match=r"split_dataset_by_node"):
        loopback(Mesh.of({"dp": 2}), work)


class SimpleStream:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_several_held_out_sets_have_a_loss_each() -> None:
    model = Ids()
    engine = program().engine(model)
    sets = {"chat": Shaped(9), "code": Streamed(8), "none": None}
    file = SimpleNamespace(data=lambda split: sets, collate=None)
    found = training_data.held_out(engine, file, 0)
    assert isinstance(found, dict)
    assert training_data.described(found) == "chat: 9 samples; code: a stream of samples, of a Streamed"
    with pytest.raises(
        ShardcError, match=r"data\('train'\) returns several datasets \(chat, code, none\)\n  fix: .*mix"
    ):
        training_data.batches(engine, file, "train", 0)
    from shardc.cli.ranks.training_loop import Training
    from shardc.spec import Run

    signals: Any = SimpleNamespace(seen=0, saves=0)
    lines: Any = SimpleNamespace(say=print)
    values = Training(Run(), engine, next(iter(found.values())), found, lines, signals).held_out()
    alone = {
        name: engine.evaluate_all([stacked(*range(i, min(i + B, n))) for i in range(0, n, B)])["loss"]
        for name, n in (("chat", 9), ("code", 8))
    }
    assert values == pytest.approx({f"{n}/loss": x for n, x in alone.items()} | {"loss": sum(alone.values()) / 2})
