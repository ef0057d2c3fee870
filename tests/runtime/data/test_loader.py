"""The loader: all ranks' parts are exactly the global batch, in one order on every mesh, read on where it stopped."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import default_collate as collated

import shardc
from shardc.api import Program
from shardc.cli.ranks.user_frames import one_line, place
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.stored import Input
from shardc.runtime.data.loader import Loader
from shardc.runtime.data.worker import Rest, started
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from tests import example_program, warm
from tests.cli.test_cli import MODEL as MLP

MESHES: list[dict[str, int]] = [
    {},
    {"dp": 2},
    {"dp": 4},
    {"dp_outer": 2, "dp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"dp_outer": 2, "tp": 2, "dp": 2},
]
B = 8


@dataclass
class Rank:
    """All that a loader asks of a runtime mesh."""

    rank: int


class Numbers(Dataset[dict[str, Tensor]]):
    """Sample i is i, over and over."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < self.size:
            raise IndexError(i)
        return {"x": torch.full((3,), float(i)), "y": torch.tensor(float(i))}


class Endless(IterableDataset[dict[str, Tensor]]):
    """The same as a stream. epoch: what it was told."""

    def __init__(self, size: int) -> None:
        self.numbers, self.epoch = Numbers(size), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in range(len(self.numbers)):
            yield {k: x + 1000 * self.epoch for k, x in self.numbers[i].items()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x / 16))).sum(1) - y / 16).square().mean()


def compiled(sizes: dict[str, int], batch: int = B) -> Program:
    spec = {"shardc": 1, "mesh": sizes or {"dp": 1}, "shard": {"up": "column", "down": "row"} if "tp" in sizes else {}}
    with torch.device("meta"):
        net = Net()
    return shardc.compile(net, {"x": torch.zeros(batch, 3), "y": torch.zeros(batch)}, spec)


def loaders(program: Program, dataset: Any, **options: Any) -> list[Loader]:
    """Every rank's."""
    return [Loader(program, Rank(r), dataset, **options) for r in range(program.mesh.world)]


def whole(program: Program, parts: tuple[Any, ...]) -> list[int]:
    """The samples of a global batch, from all ranks' parts of it; every input says the same, and every rank has just
    its part.
    """
    mesh, found = program.mesh, []
    for x in program.inputs:
        local = [part[x.path[0]] for part in parts]
        joined = x.layout.join(lambda coords, local=local: local[mesh.rank(coords)], mesh)  # type: ignore[misc]
        for rank, got in enumerate(local):
            assert torch.equal(got, x.layout.local(joined, mesh, mesh.coords(rank)))
        found.append([int(v) for v in joined.reshape(len(joined), -1)[:, 0]])
    assert found[0] == found[1]
    return found[0]


def epoch(program: Program, found: list[Loader]) -> list[list[int]]:
    return [whole(program, parts) for parts in zip(*found, strict=True)]


# --- who reads what


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_ranks_together_read_the_global_batch_in_order(sizes: dict[str, int]) -> None:
    program = compiled(sizes)
    for shuffle in (False, True):
        found = loaders(program, Numbers(27), shuffle=shuffle)
        assert len(found[0]) == 3
        assert {tuple(f.order.whole().tolist()) for f in found} == {tuple(found[0].order.whole().tolist())}
        order = found[0].order.whole().tolist()
        assert (order == list(range(27))) != shuffle
        assert epoch(program, found) == [order[i : i + B] for i in (0, 8, 16)]


def test_the_order_does_not_know_the_mesh() -> None:
    """Of three epochs on each mesh."""
    seen = []
    for sizes in MESHES:
        found = loaders(compiled(sizes), Numbers(27), seed=3)
        seen.append([epoch(found[0].program, found) for _ in range(3)])
    assert all(s == seen[0] for s in seen)


def test_every_epoch_reads_every_sample_once_in_an_order_of_its_own() -> None:
    program = compiled({"dp": 2})
    found = loaders(program, Numbers(24))
    epochs = [[i for batch in epoch(program, found) for i in batch] for _ in range(4)]
    assert all(sorted(e) == list(range(24)) for e in epochs)
    other = [Loader(program, Rank(0), Numbers(24), seed=1).order.whole().tolist()]
    assert len({tuple(e) for e in epochs + other}) == 5  # also: epoch 1 of seed 0 is not epoch 0 of seed 1
    assert found[0].epoch == 4


def test_ranks_read_nothing_but_their_part() -> None:
    class Noted(Numbers):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.read: list[int] = []

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            self.read.append(i)
            return super().__getitem__(i)

    sets = [Noted(16) for _ in range(4)]
    program = compiled({"dp": 2, "tp": 2})
    for rank, data in enumerate(sets):
        list(Loader(program, Rank(rank), data, shuffle=False))
    assert [s.read for s in sets] == [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 + [[4, 5, 6, 7, 12, 13, 14, 15]] * 2


def test_a_dataset_that_reads_batches_is_given_batches() -> None:
    class Fast(Numbers):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
            assert len(indices) == 4
            return [self[i] for i in indices]

    program = compiled({"dp": 2})
    assert epoch(program, loaders(program, Fast(16))) == epoch(program, loaders(program, Numbers(16)))


def test_a_tensor_is_a_dataset() -> None:
    program = compiled({"dp": 2})
    rows = torch.arange(16.0)[:, None].expand(16, 3)

    def collate(items: list[Tensor]) -> dict[str, Tensor]:
        x = torch.stack(items)
        return {"x": x, "y": x[:, 0]}

    found = epoch(program, loaders(program, rows, shuffle=False, collate_fn=collate))
    assert found == [list(range(8)), list(range(8, 16))]


# --- inputs that lie otherwise


def laid(mesh: Mesh, **inputs: tuple[tuple[int, ...], dict[str, Shard]]) -> Program:
    """A program with such inputs, which only a loader looks at."""
    made = tuple(Input(n, (n,), shape, torch.float32, Layout.of(dict(at), mesh)) for n, (shape, at) in inputs.items())
    return replace(example_program.program(), mesh=mesh, inputs=made)


def test_digits_of_the_batch_dim_are_followed() -> None:
    """A batch of [2, dp, 2], such as two microbatches cut each for itself."""
    program = laid(Mesh((("dp", 2),)), x=((B, 3), {"dp": Shard(0, 2)}), y=((B,), {"dp": Shard(0, 2)}))
    parts = [next(iter(loader)) for loader in loaders(program, Numbers(B), shuffle=False)]
    assert [p["y"].tolist() for p in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert whole(program, tuple(parts)) == list(range(B))


def test_a_sequence_that_lies_split_is_cut_after_reading() -> None:
    class Pair(NamedTuple):
        x: Tensor
        y: list[Tensor]

    mesh = Mesh((("dp", 2), ("cp", 2)))
    program = laid(mesh, x=((4, 6), {"dp": Shard(0), "cp": Shard(1, 3)}))
    program = replace(program, inputs=(replace(program.inputs[0], path=("pair", "x")),))
    data = [{"pair": Pair(torch.arange(6) + 10 * i, [torch.tensor(i)])} for i in range(4)]
    parts = [next(iter(loader)) for loader in loaders(program, data, shuffle=False)]
    assert [p["pair"].x.tolist() for p in parts] == [
        [[0, 2, 4], [10, 12, 14]],
        [[1, 3, 5], [11, 13, 15]],
        [[20, 22, 24], [30, 32, 34]],
        [[21, 23, 25], [31, 33, 35]],
    ]
    assert parts[3]["pair"].y[0].tolist() == [2, 3]
    wrong = Loader(program, Rank(0), [{"pair": Pair(torch.arange(5), [])}] * 4)
    assert next(iter(wrong))["pair"].x.shape == (2, 5)  # the engine's step names it


def test_several_rows_of_a_sample_and_inputs_without_a_batch_dim() -> None:
    """labels are flattened, time goes first in z, and `scale` is no matter of samples."""

    class M(nn.Module):
        def forward(self, x: Tensor, labels: Tensor, z: Tensor, scale: Tensor) -> Tensor:
            return ((x.reshape(-1) - labels).square().mean() + z.mean()) * scale.sum()

    def collate(items: list[int]) -> dict[str, Tensor]:
        x = torch.tensor(items).float()[:, None].expand(-1, 3)
        return {"x": x, "labels": x.reshape(-1), "z": x.t(), "scale": torch.ones(5)}

    spec = {"shardc": 1, "mesh": {"dp": 2}, "batch": {"dims": {"scale": None, "z": 1}}}
    program = shardc.compile(M(), collate([0] * 8), spec)
    parts = [next(iter(loader)) for loader in loaders(program, range(8), shuffle=False, collate_fn=collate)]
    for rank, part in enumerate(parts):
        assert {k: tuple(x.shape) for k, x in part.items()} == {
            "x": (4, 3),
            "labels": (12,),
            "z": (3, 4),
            "scale": (5,),
        }
        assert part["z"][0].tolist() == [4 * rank + i for i in range(4)]
    with pytest.raises(
        ShardcError,
        match=r"z: its batch dim is 3 long, .* multiple of the other inputs' 8|multiple of the other inputs' 3",
    ):
        Loader(laid(Mesh((("dp", 1),)), x=((8, 3), {}), z=((3, 8), {})), Rank(0), range(8))


# --- going on


@pytest.mark.parametrize(
    ("first", "then"), [({"dp": 2}, {"dp": 4}), ({"dp": 2, "tp": 2}, {}), ({}, {"dp_outer": 2, "dp": 2})], ids=str
)
@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_on_in_mid_epoch_on_another_mesh_and_batch_size(
    first: dict[str, int], then: dict[str, int], stream: bool
) -> None:
    data = Endless(40) if stream else Numbers(40)
    one, other = compiled(first), compiled(then, 4)
    found = loaders(one, data, seed=7)
    seen = [whole(one, parts) for parts in itertools.islice(zip(*found, strict=True), 3)]
    state = json.loads(json.dumps(found[-1].state_dict()))
    more = loaders(other, data)  # another seed: the saved one wins
    for loader in more:
        loader.load_state_dict(state)
    rest = epoch(other, more)
    assert [len(b) for b in rest] == [4] * 4
    assert sorted(i for b in seen + rest for i in b) == list(range(40))
    alone = loaders(one, data, seed=7)
    assert [i for b in epoch(one, alone) for i in b] == [i for b in seen + rest for i in b]
    after = (epoch(one, alone), epoch(other, more))  # and the epoch after it is the same too
    assert [i for b in after[0] for i in b] == [i for b in after[1] for i in b]


def test_a_loop_that_was_broken_off_is_gone_on_with() -> None:
    loader = Loader(compiled({}), Rank(0), Numbers(24), shuffle=False)
    for _ in loader:
        break
    assert (loader.epoch, loader.consumed) == (0, 8)
    assert [part["y"][0].item() for part in loader] == [8, 16]
    assert (loader.epoch, loader.consumed) == (1, 0)  # a checkpoint made now begins with the next epoch
    assert len(list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 7))) == 7
    assert (loader.epoch, loader.consumed) == (3, 8)


def test_what_fills_no_batch_is_left_out_also_where_the_batch_size_changed() -> None:
    loader = Loader(compiled({}, 4), Rank(0), Numbers(22))
    list(itertools.islice(loader, 4))
    other = Loader(compiled({}), Rank(0), Numbers(22))
    other.load_state_dict(loader.state_dict())  # 6 are left
    assert (other.epoch, other.consumed) == (1, 0)
    assert len(list(other)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_workers_read_the_same_and_the_state_is_what_was_handed_out(stream: bool) -> None:
    program = compiled({"dp": 2})
    data: Any = Endless(56) if stream else Numbers(56)
    options: dict[str, Any] = {"num_workers": 1} if stream else {"num_workers": 2, "persistent_workers": True}
    plain, loader = Loader(program, Rank(1), data), Loader(program, Rank(1), data, prefetch_factor=3, **options)
    for i, (part, same) in enumerate(zip(loader, plain, strict=True)):
        assert part["y"].tolist() == same["y"].tolist()
        assert loader.consumed == 8 * (i + 1)  # not what workers have read ahead
        if i == 2:
            break
    for _ in range(2):
        assert [p["y"].tolist() for p in loader] == [p["y"].tolist() for p in plain]
    assert (loader.epoch, loader.consumed) == (plain.epoch, plain.consumed) == (2, 0)


# --- draws


class Noisy(Numbers):
    """Samples with noise from three generators."""

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        noise = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]) / 2
        return {"x": torch.full((3,), float(i)) + noise, "y": torch.tensor(float(i))}


def by_sample(found: list[Loader]) -> dict[int, list[float]]:
    return {
        int(y): x.tolist() for loader in found for part in loader for x, y in zip(part["x"], part["y"], strict=True)
    }


def test_what_a_dataset_draws_does_not_know_the_mesh() -> None:
    torch.manual_seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    want = by_sample(loaders(compiled({}), Noisy(16)))
    assert len({x[k] - y for y, x in want.items() for k in range(3)}) == 48
    for sizes in ({"dp": 2, "tp": 2}, {"tp": 4}):  # `whole` asserts that replicas have the same
        program = compiled(sizes)
        found = loaders(program, Noisy(16))
        for parts in zip(*found, strict=True):
            whole(program, parts)
        assert by_sample(loaders(program, Noisy(16))) == want
    assert by_sample([Loader(compiled({}), Rank(0), Noisy(16), num_workers=1)]) == want
    assert by_sample(found) != want  # another epoch
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_collate_function_or_a_stream_draws_is_the_same_on_replicas(stream: bool) -> None:
    """Such as the words that a masked language model is asked for."""

    class NoisyStream(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for i in torch.randperm(24).tolist():
                yield Noisy(24)[i]

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {k: torch.stack([item[k] for item in items]) + torch.rand(()) / 4 for k in ("x", "y")}

    program = compiled({"dp": 2, "tp": 2})
    found = loaders(program, NoisyStream() if stream else Noisy(24), collate_fn=collate)
    seen = [i for parts in zip(*found, strict=True) for i in whole(program, parts)]
    assert sorted(seen) == list(range(24))
    assert seen != list(range(24))


# --- streams


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_take_their_samples_of_a_stream(sizes: dict[str, int]) -> None:
    program = compiled(sizes)
    found = loaders(program, Endless(20))
    assert epoch(program, found) == [list(range(8)), list(range(8, 16))]
    assert epoch(program, found) == [list(range(1000, 1008)), list(range(1008, 1016))]  # it was told the epoch
    with pytest.raises(TypeError, match="an iterable dataset has no length"):
        len(found[0])


# --- with an engine


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def pairs(size: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(example_program.K, generator=g).double(),
            "y": torch.randn(example_program.N, generator=g).double(),
        }
        for _ in range(size)
    ]


def endless(loader: Loader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def one_device(steps: int) -> list[float]:
    """The plain model in a plain loop over global batches."""
    model, data = example_program.Model(), pairs(20)
    optimizer, losses = sgd(model.parameters()), []
    order = Loader(example_program.program(), Rank(0), data, seed=2).order
    while len(losses) < steps:
        for i in order.whole().split(example_program.B)[:2]:
            optimizer.zero_grad()
            loss = model(**{k: torch.stack([data[j][k] for j in i.tolist()]) for k in ("x", "y")})
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        order.next_epoch()
    return losses[:steps]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_training_from_a_loader_equals_one_device(dp: int, tp: int) -> None:
    program = example_program.program(dp, tp)

    def work(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(example_program.Model(), sgd, mesh=mesh)
        loader = engine.loader(pairs(20), seed=2)
        return [float(engine.step(part, local=True)) for part in itertools.islice(endless(loader), 5)]

    for losses in loopback(program.mesh, work):
        assert losses == pytest.approx(one_device(5), rel=1e-12)


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_knows_where_the_loader_stands(tmp_path: Path, late: bool) -> None:
    """late: the loader is made after loading. The first run is in the middle of an epoch on dp=2, the next one is on
    tp=2.
    """

    def first(engine: Engine) -> list[float]:
        loader = engine.loader(pairs(20), seed=2)
        losses = [float(engine.step(part, local=True)) for part in itertools.islice(endless(loader), 3)]
        engine.save(tmp_path / "c")
        return losses

    def second(engine: Engine) -> list[float]:
        loader = None if late else engine.loader(pairs(20))
        engine.load(tmp_path / "c")
        engine.save(tmp_path / "again")  # what waits for its loader is kept
        engine.load(tmp_path / "again")
        loader = loader or engine.loader(pairs(20))
        engine.loader(pairs(20), shuffle=False, name=None)
        assert engine.loaders.keys() == {"train"}
        return [float(engine.step(part, local=True)) for part in itertools.islice(endless(loader), 2)]

    def run(program: Program, work: Any) -> Any:
        return loopback(program.mesh, lambda mesh: work(program.engine(example_program.Model(), sgd, mesh=mesh)))[0]

    losses = run(example_program.program(2, 1), first) + run(example_program.program(1, 2), second)
    assert losses == pytest.approx(one_device(5), rel=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_whose_step_did_not_come_to_its_end_comes_again(fails: bool, tmp_path: Path) -> None:
    """The run was told to stop when it had read it, or its step failed: what was saved then goes on with it."""
    program = example_program.program(2, 1)

    def first(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(example_program.Model(), sgd, mesh=mesh)
        batches = endless(engine.loader(pairs(20), seed=2))
        losses = [float(engine.step(next(batches), local=True)) for _ in range(3)]
        unused = next(batches)
        if fails:
            with pytest.raises(ShardcError):
                engine.step({name: x.float().to(torch.float16) for name, x in unused.items()}, local=True)
        engine.save(tmp_path / "c")
        return losses

    def second(mesh: LoopbackMesh) -> list[float]:
        engine = program.engine(example_program.Model(), sgd, mesh=mesh)
        loader = engine.loader(pairs(20))
        engine.load(tmp_path / "c")
        return [float(engine.step(part, local=True)) for part in itertools.islice(endless(loader), 2)]

    losses = loopback(program.mesh, first)[0] + loopback(program.mesh, second)[0]
    assert losses == pytest.approx(one_device(5), rel=1e-12)


MODEL = (
    MLP
    + """
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.full((8,), float(i))

def collate(rows):
    return {"x": torch.stack(rows) / 18}

def data(split):
    return Rows(18) if split == "train" else Rows(8)

def optimizer(params):
    return torch.optim.SGD(params, lr=1.0)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
"""
)


def test_run_reads_a_dataset_and_resumes_it_on_another_mesh(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 2, tp: 2}\nshard:\n  up: column\n  down: row\n")

    def run(*args: str) -> dict[str, Any]:
        done = warm.run("run", "model.py", "spec.yaml", "--json", *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    first = run("--mesh", "dp=2,tp=1", "--steps", "3", "--save", "saved", "--log", "log")
    more = run("--mesh", "dp=1,tp=2", "--steps", "6", "--resume", "saved", "--log", "log")
    alone = run("--mesh", "dp=1,tp=1", "--steps", "6")
    assert [*first["losses"], *more["losses"]] == pytest.approx(alone["losses"], rel=1e-5)
    assert more["held_out"] == pytest.approx(alone["held_out"], rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "log" / "steps.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == [0.5**i for i in range(6)]
    (tmp_path / "model.py").write_text(
        MODEL.replace("return Rows(18)", "return None").replace(' if split == "train" else Rows(8)', "")
    )
    done = warm.run("run", "model.py", "spec.yaml", "--mesh", "dp=1,tp=1", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "data('train') returns None" in done.stderr


# --- what a user can get wrong


class Nothing:
    pass


WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    (
        "too short",
        Numbers(5),
        {},
        r"loader 'train': the dataset has 5 samples, fewer than one global batch of 8\n  fix: use more",
    ),
    (
        "batch size",
        Numbers(16),
        {"batch_size": 4},
        r"batch_size is 4, but the program was compiled for global batches of 8 samples\n  fix: leave",
    ),
    (
        "shuffled stream",
        Endless(21),
        {"shuffle": True},
        r"an iterable dataset has its own order\n  fix: leave shuffle out",
    ),
    ("sampler", Numbers(16), {"sampler": [1]}, r"sampler is set by the loader"),
    ("a DataLoader", DataLoader(Numbers(16)), {}, r"a DataLoader is not a dataset\n  fix: pass its dataset"),
    ("a dict", {"train": Numbers(16)}, {}, r"a dict is not a dataset\n  fix: pass one of its entries, such as 'train'"),
    ("an empty dict", {}, {}, r"a dict is not a dataset\n  fix: pass a dataset"),
    ("no dataset", Nothing(), {}, r"a Nothing is not a dataset: it has neither __getitem__ and __len__, nor __iter__"),
    ("an iterator", iter(Numbers(16)), {}, r"can be read only once\n  fix: pass an object whose __iter__ starts again"),
]


@pytest.mark.parametrize(("data", "options", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_said(data: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        Loader(compiled({"dp": 2}), Rank(0), data, **options)


def test_a_rest_needs_the_model() -> None:
    """A program that was read from an artifact is for one batch size."""
    program = replace(compiled({"dp": 2}), resize=None)
    with pytest.raises(
        ShardcError, match=r"the last batch of an epoch would be 5 samples, not 8.*\n  fix: leave drop_last out"
    ):
        Loader(program, Rank(0), Numbers(21), drop_last=False)


def test_data_shorter_than_a_batch_are_a_rest_if_the_model_can_be_compiled_for_them() -> None:
    (part,) = Loader(compiled({"dp": 2}), Rank(0), Numbers(3), drop_last=False, shuffle=False)
    assert isinstance(part, Rest)
    for program, size in ((compiled({"dp": 2}), 0), (replace(compiled({"dp": 2}), resize=None), 3)):
        with pytest.raises(ShardcError, match=f"the dataset has {size} samples, fewer than one global batch of 8"):
            Loader(program, Rank(0), Numbers(size), drop_last=False)


def test_a_stream_that_ends_too_early() -> None:
    with pytest.raises(ShardcError, match=r"the dataset ends before one global batch of 8 samples"):
        list(Loader(compiled({"dp": 2}), Rank(0), Endless(5)))


def test_another_dataset_than_the_checkpoints() -> None:
    program = compiled({})
    state = Loader(program, Rank(0), Numbers(16)).state_dict()
    with pytest.raises(
        ShardcError, match=r"is in the middle of 16 samples, but this one is 24 samples\n  fix: continue with the same"
    ):
        Loader(program, Rank(0), Numbers(24)).load_state_dict(state)
    with pytest.raises(ShardcError, match=r"is in the middle of 16 samples, but this one is an iterable dataset"):
        Loader(program, Rank(0), Endless(24)).load_state_dict(state)


def test_two_loaders_of_one_name() -> None:
    engine = example_program.program().engine(example_program.Model())
    engine.loader(pairs(8))
    with pytest.raises(
        ShardcError, match=r"the engine already has a loader named 'train'\n  fix: use that one for every epoch"
    ):
        engine.loader(pairs(8))
    assert len(engine.loader(pairs(16), name="valid")) == 2


def test_inputs_that_no_part_can_be_read_of() -> None:
    pair = Mesh((("dp", 2),))
    with pytest.raises(
        ShardcError, match=r"x: its size \[5\] does not divide over the ranks: the last parts would be padded"
    ):
        Loader(laid(pair, x=((5,), {"dp": Shard(0, padding=1)})), Rank(0), range(8))
    with pytest.raises(ShardcError, match=r"y: its batch dim is not split into the same whole samples"):
        Loader(laid(pair, x=((8,), {"dp": Shard(0)}), y=((8,), {"dp": Shard(0, 2)})), Rank(0), range(8))
    with pytest.raises(ShardcError, match=r"loader 'train': none of the program's inputs has a batch dim"):
        Loader(laid(pair, x=((), {})), Rank(0), range(8))


class Holes(Numbers):
    """Some samples are not there."""

    def __getitem__(self, i: int) -> Any:
        return None if i in (5, 6) else super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_none_is_named(workers: int) -> None:
    program = compiled({"dp": 1})
    (loader,) = loaders(program, Holes(B * 2), shuffle=False, num_workers=workers)
    said = r"engine.loader: sample 5 is None \(2 of the 8 of a batch are\)\n  fix: return a sample for every number"
    with pytest.raises(ShardcError, match=said):
        list(loader)
    filtering = loaders(
        compiled({"dp": 8}), Holes(B), shuffle=False, collate_fn=lambda s: collated([x for x in s if x])
    )
    with pytest.raises(ShardcError, match=r"sample 5 is None: none is left of (?s:.*)another sample in its place"):
        list(filtering[5])
    (whole_again,) = loaders(
        program, Holes(B * 2), shuffle=False, collate_fn=lambda samples: collated([x or samples[0] for x in samples])
    )
    assert list(whole_again)


def test_samples_that_make_no_batch_are_named() -> None:
    class Odd(Numbers):
        def __getitem__(self, i: int) -> Any:
            return {"other": 1} if i == 3 else super().__getitem__(i)

    (loader,) = loaders(compiled({"dp": 1}), Odd(B * 2), shuffle=False)
    with pytest.raises(ShardcError, match=r"torch cannot make a batch of samples 0, ...: KeyError: 'x'") as e:
        list(loader)
    assert "the same keys" in e.value.fix


class BadSampleError(Exception):
    def __init__(self, why: str, *, row: int = 0) -> None:
        super().__init__(why)
        self.row = row


class UnpickledError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("of two")


class Faulty(Dataset[dict[str, Tensor]]):
    """Sample 3 raises."""

    def __init__(self, error: Exception) -> None:
        self.good, self.error = Numbers(8), error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i == 3:
            raise self.error
        return self.good[i]


class FaultyStream(Faulty, IterableDataset[dict[str, Tensor]]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(8))


def collate_none(samples: list[Any]) -> Any:
    raise BadSampleError("no collation", row=len(samples))


def failure(dataset: Any, workers: int, **options: Any) -> tuple[Exception, list[str]]:
    loader = Loader(compiled({}), Rank(0), dataset, num_workers=workers, **options)
    with pytest.raises((BadSampleError, KeyError, RuntimeError, ShardcError)) as e:
        list(loader)
    return e.value, getattr(e.value, "__notes__", [])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_raises_comes_as_it_is_and_names_the_sample(workers: int) -> None:
    here = ["in DataLoader worker process 0"] * workers
    error, notes = failure(Faulty(BadSampleError("torn", row=7)), workers)
    assert (type(error), error.args, error.row, notes) == (BadSampleError, ("torn",), 7, ["in dataset[3]", *here])  # type: ignore[attr-defined]
    if workers:
        assert "raise self.error" in str(error.__cause__)
        assert place(error).startswith("test_loader.py:")
        assert one_line(error) == "BadSampleError: torn; in dataset[3]; in DataLoader worker process 0"
    error, notes = failure(FaultyStream(KeyError("x")), workers)
    assert (error.args, notes) == (("x",), ["in the iterable dataset's sample 3", *here])
    error, notes = failure(Numbers(8), workers, collate_fn=collate_none, shuffle=False)
    assert (error.row, notes) == (8, ["in the collate function, of samples 0, 1, 2, 3, 4, 5, 6, 7", *here])  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_what_a_new_process_cannot_get_is_named(start: str) -> None:
    data = DataLoader([1, 2], num_workers=1, multiprocessing_context=start, collate_fn=lambda samples: samples)  # type: ignore[arg-type]
    with pytest.raises(ShardcError, match=r"data: workers that start as new Python processes(.|\n)*local object") as e:
        started(data)
    assert "at the top level of the file" in e.value.fix
    assert list(started([1, 2])) == [1, 2]


def test_a_sharing_strategy_whose_sockets_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardc.runtime.data.worker.short_sockets", lambda: True)
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    with pytest.raises(ShardcError, match=r"TMPDIR: torch's sharing strategy file_system(.|\n)*at most 69 bytes"):
        started(DataLoader([1, 2], num_workers=1))  # type: ignore[arg-type]


def test_errors_that_a_worker_process_cannot_hand_over() -> None:
    error, _ = failure(Faulty(UnpickledError(1, 2)), 1)
    assert (type(error), str(error)) == (RuntimeError, "UnpickledError: of two")
    assert "raise self.error" in str(error.__cause__)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_a_sample_does_not_end_the_epoch(workers: int) -> None:
    error, _ = failure(Faulty(StopIteration()), workers)
    assert isinstance(error, ShardcError)
    assert error.what.startswith("dataset[3] raises StopIteration, which would end the epoch")
