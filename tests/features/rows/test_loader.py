"""A loader that balances: each sample once, the samples of a step those of the sampler, and one device's step."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import shardc
from shardc.cli.ranks.worker import _data
from shardc.errors import ShardcError
from shardc.features.text.packing import Form
from shardc.features.text.rows import Rows
from shardc.runtime.data.ragged import Ragged, Size
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import zoo
from tests.features.rows import assignments
from tests.test_lengths import BUCKETS, IGNORED, NET, TP, Batch, Language, batch_of, collate, compiled, plain, sgd

PAD = BUCKETS["pad"]
BALANCED = {"lengths": [8, 16, 24, 32], "pad": PAD, "balance": True, "microbatches": 2}
MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "zero 3, tp": {"mesh": {"dp": 2, "tp": 2}, "shard": TP, "data": {"zero": 3}},
    "pp": {"mesh": {"dp": 2, "pp": 2}, "pipeline": {"axis": "pp", "cut": ["up"]}},
    "split sequence": {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp"}},
}


class Talks(Dataset[Batch]):
    """48 samples of 3 to 31 tokens. Like most datasets, it does not say how long they are."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Batch:
        return {n: x[0] for n, x in batch_of(3 + (i * i) % 29, rows=1, seed=i).items()}


class Known(Talks):
    """It says how long its samples are."""

    lengths = tuple(3 + (i * i) % 29 for i in range(48))


def in_order(seed: int, steps: int) -> list[Batch]:
    """The global batches of the sampler, whatever the mesh."""
    order = shardc.runtime.data.sampler.Order(48, 8, torch.arange(8), True, seed)
    batches: list[Batch] = []
    while len(batches) < steps:
        for keys in order:
            batches.append(collate([Talks()[i] for _, i in keys]))
        order.next_epoch()
    return batches[:steps]


def spec(name: str, **more: Any) -> dict[str, Any]:
    return {**MESHES[name], "batch": {**BALANCED, **more}}


@pytest.mark.parametrize("name", MESHES)
def test_steps_are_one_devices(name: str) -> None:
    program = compiled(spec(name))
    losses, weights = plain(in_order(3, 8))

    def work(mesh: LoopbackMesh) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        engine = program.engine(NET, sgd, mesh=mesh)
        loader = engine.loader(Known(), seed=3)
        values, parts = list[float](), list[Any]()
        while len(values) < 8:
            for part in loader:
                parts.append(part)
                values.append(float(engine.step(part, local=True)))
                if len(values) == 8:
                    break
        return values, engine.full_state_dict(), parts

    results = loopback(program.mesh, work)
    for values, state, _ in results:
        assert values == pytest.approx(losses, rel=1e-12)
        for n, x in weights.items():
            torch.testing.assert_close(state[n], x, rtol=1e-10, atol=1e-12)
    parts = [p for _, _, each in results for p in each]
    assert all(isinstance(p, Ragged) for p in parts)
    assert len({p.sizes for p in parts}) > 3  # microbatches do have lengths of their own


SHORT_ON_FEWER = {
    "counted by other ranks": {
        "mesh": {"a": 4, "b": 2},
        "sequence": {"axis": ["a", "b"], "method": ["gather", "ring"]},
    },
    "stages": {"mesh": {"pp": 2, "cp": 4}, "sequence": {"axis": "cp"}, "pipeline": {"axis": "pp", "cut": ["up"]}},
    "sharded over them": {"mesh": {"cp": 4}, "sequence": {"axis": "cp"}, "data": {"axis": ["cp"], "zero": 3}},
}


@pytest.mark.parametrize("name", SHORT_ON_FEWER)
def test_short_rows_on_fewer_ranks(name: str) -> None:
    """Steps have fewer microbatches than compiled. The program for 8 tokens counts labels over fewer ranks."""
    batch = {"batch": {**BALANCED, "lengths": [8, 16, 32], "microbatches": 8}}
    program, (losses, weights) = compiled(SHORT_ON_FEWER[name] | batch), plain(in_order(3, 6))

    def work(mesh: LoopbackMesh) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        engine = program.engine(NET, sgd, mesh=mesh)
        parts = list(engine.loader(Known(), seed=3))
        return [float(engine.step(part, local=True)) for part in parts], engine.full_state_dict(), parts

    for values, state, parts in loopback(program.mesh, work):
        assert values == pytest.approx(losses, rel=1e-12)
        for n, x in weights.items():
            torch.testing.assert_close(state[n], x, rtol=1e-10, atol=1e-12)
        assert max(len(p.parts) for p in parts) < 8
        assert {size.times for p in parts for size in p.sizes} > {1}


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once_and_resumed_on_another_mesh(workers: int, tmp_path: Path) -> None:
    """Two and a half epochs, saved in the middle of one, by a dataset of which ranks find the lengths."""
    losses, weights = plain(in_order(5, 15))

    def steps(mesh: LoopbackMesh, program: Any, first: int, last: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = program.engine(NET, sgd, mesh=mesh)
        loader, values = engine.loader(Talks(), seed=5, num_workers=workers), list[float]()
        if first:
            engine.load(tmp_path)
        while first + len(values) < last:
            for part in loader:
                values.append(float(engine.step(part, local=True)))
                if first + len(values) == last:
                    break
        engine.save(tmp_path, overwrite=True)
        return values, engine.full_state_dict()

    one, other = compiled(spec("split sequence", microbatches=4)), compiled(spec("pp", microbatches=4))
    begun = loopback(one.mesh, lambda mesh: steps(mesh, one, 0, 9))
    ended = loopback(other.mesh, lambda mesh: steps(mesh, other, 9, 15))
    assert [*begun[0][0], *ended[0][0]] == pytest.approx(losses, rel=1e-12)
    for n, x in weights.items():
        torch.testing.assert_close(ended[0][1][n], x, rtol=1e-10, atol=1e-12)


class Counted(Known):
    """It counts what is read."""

    def __init__(self) -> None:
        self.read: Counter[int] = Counter()

    def __getitem__(self, i: int) -> Batch:
        self.read[i] += 1
        return super().__getitem__(i)


def test_no_sample_is_read_twice() -> None:
    program = compiled(spec("dp"))

    def work(mesh: LoopbackMesh) -> Counter[int]:
        data = Counted()
        loader = program.engine(NET, sgd, mesh=mesh, check=False).loader(data)
        list(loader)
        return data.read

    assert sum(loopback(program.mesh, work), Counter()) == Counter(range(48))


class Documents(Dataset[Batch]):
    """Rows of 32 tokens, of documents of 2 to 30: packed, as shardc.text does."""

    lengths = tuple([[2 + 4 * (i % 8), 30 - 4 * (i % 8)] for i in range(32)])

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Batch:
        ids = torch.randint(1, 12, (32,), generator=torch.Generator().manual_seed(i))
        document = torch.arange(2).repeat_interleave(torch.tensor(self.lengths[i]))
        return {"ids": ids, "document": document}


class Packed(Language):
    def forward(self, ids: Tensor, document: Tensor) -> Tensor:  # type: ignore[override]
        h = self.table(ids)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        place = torch.arange(ids.shape[1])
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (place <= place[:, None])
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.roll(-1, 1).flatten(), ignore_index=IGNORED)


def test_packed_rows_by_what_a_ring_computes() -> None:
    """All rows are of one length: only the pairs within documents differ, and only a ring leaves the others out."""
    net, example = Packed(), torch.utils.data.default_collate([Documents()[i] for i in range(8)])
    batch = {"balance": True, "microbatches": 4}
    ring = {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp", "method": "ring"}, "batch": batch}
    for made, left_out in ((ring, True), ({"mesh": {"dp": 2}, "batch": batch}, False)):
        program = shardc.compile(net, example, {"shardc": 1, **made})

        def work(mesh: LoopbackMesh, program: Any = program) -> tuple[Any, list[float]]:
            engine = program.engine(net, sgd, mesh=mesh)
            loader = engine.loader(Documents(), shuffle=False)
            return loader.balance, [float(engine.step(part, local=True)) for part in loader]

        balance, losses = loopback(program.mesh, work)[0]
        assert (balance.step.left_out, balance.ragged) == (left_out, False)
        seconds = [balance.step.seconds(Size(32), sum(n * n for n in row)) for row in ((32,), (16, 16), (2,) * 16)]
        assert (seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]) == left_out
        assert losses == pytest.approx(of_packed(), rel=1e-12)


def of_packed() -> list[float]:
    net, losses = Packed(), []
    optimizer = sgd(net.parameters())
    for at in range(0, 32, 8):
        loss = net(**torch.utils.data.default_collate([Documents()[i] for i in range(at, at + 8)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Mean(nn.Module):
    """Its loss is a mean over all places, padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return (self.table(ids) * (labels != IGNORED).unsqueeze(-1)).pow(2).mean()


class Clamped(Language):
    """Places that fill up rows are labels of class 0."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels.clamp(min=0))


class Seen(Language):
    """Tokens see what fills up their row."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Noisy(Language):
    """It draws numbers, which differ by a row's length."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + 0.1 * torch.randn_like(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def test_drawn_numbers_are_no_padding_that_takes_part() -> None:
    model = Noisy()
    program = shardc.compile(model, batch_of(16), {"shardc": 1, **spec("dp")})

    def work(mesh: LoopbackMesh) -> float:
        engine = program.engine(model, sgd, mesh=mesh)
        return float(engine.step(next(iter(engine.loader(Known(), seed=1))), local=True))

    assert len(set(loopback(program.mesh, work))) == 1


class Faint(Seen):
    """As a model with new weights, which look at tokens a little: less than 16 bits round."""

    def __init__(self) -> None:
        super().__init__()
        self.proj.weight.data *= 1e-3


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("net", [Clamped, Seen, Faint])
def test_padding_that_takes_part_is_refused(net: type[nn.Module], dtype: str) -> None:
    """No structure shows it. Of 16 bits, another id in its place shows it: other lengths differ by rounding too."""
    half = {"precision": {"compute": "bfloat16"}} if dtype == "bfloat16" else {}
    model = net()
    program = shardc.compile(model, batch_of(16), {"shardc": 1, **spec("split sequence", microbatches=4), **half})

    def work(mesh: LoopbackMesh) -> None:
        engine = program.engine(model, sgd, mesh=mesh)
        engine.step(next(iter(engine.loader(Known(), seed=1))), local=True)

    with pytest.raises(ShardcError, match=r"padding takes part|the number that fills up ids"):
        loopback(program.mesh, work)


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Any:
        yield from (Talks()[i] for i in range(48))


class Tokens(Dataset[Batch]):
    """32 samples of 3 to 16 tokens, for the models of assignments."""

    lengths = tuple(3 + (5 * i) % 14 for i in range(32))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Batch:
        ids = torch.randint(1, 120, (self.lengths[i],), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def test_experts_over_ranks_need_one_length() -> None:
    """Ranks of ep exchange tokens in each microbatch; those of dp need not be as long."""
    pad = assignments.PAD
    batch = {"microbatches": 2, "lengths": [8, 12, 16], "pad": pad, "balance": True}
    made = {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.mlp.experts", "axis": "ep"}], "batch": batch}
    net = assignments.model("moe")
    with zoo.Wide():
        program = shardc.compile(net, assignments.batch("ragged", 0), {"shardc": 1, **made}, prove=False)

        def work(mesh: LoopbackMesh) -> tuple[int, list[float]]:
            with zoo.Wide():
                engine = program.engine(net, sgd, mesh=mesh)
                loader = engine.loader(Tokens(), shuffle=False)
                return loader.balance.step.ranks, [float(engine.step(part, local=True)) for part in loader]

        found = loopback(program.mesh, work)
        plain, optimizer, losses = copy.deepcopy(net), None, []
        optimizer = sgd(plain.parameters())
        for at in range(0, 32, 8):
            rows = [Tokens()[i] for i in range(at, at + 8)]
            padded = {n: torch.nn.utils.rnn.pad_sequence([r[n] for r in rows], True, pad[n]) for n in rows[0]}
            loss = plain(**padded).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    for ranks, values in found:
        assert ranks == 2
        assert values == pytest.approx(losses, rel=1e-12)


def test_a_router_that_counts_padding_is_refused() -> None:
    net, batch = assignments.model("moe with a loss of its router"), {**BALANCED, "pad": assignments.PAD}
    with zoo.Wide():
        program = shardc.compile(net, assignments.batch("ragged", 0), {"shardc": 1, **MESHES["dp"], "batch": batch})

    def work(mesh: LoopbackMesh) -> None:
        with zoo.Wide():
            program.engine(net, sgd, mesh=mesh).loader(Tokens())

    with pytest.raises(ShardcError, match="it counts places of a row, padding too"):
        loopback(program.mesh, work)


def refused(made: dict[str, Any], dataset: Any = None, net: Any = None, **options: Any) -> None:
    program = shardc.compile(net or NET, batch_of(16), {"shardc": 1, **made})
    loopback(program.mesh, lambda m: program.engine(net or NET, sgd, mesh=m).loader(dataset or Known(), **options))


def test_what_would_be_another_step_is_refused() -> None:
    with pytest.raises(ShardcError, match=r"it counts places of a row, padding too.*\n.*ignore_index"):
        refused(spec("dp"), net=Mean())
    with pytest.raises(
        ShardcError, match=r"samples have 3 to 31 tokens, more than 16\n  fix: write batch: {lengths: \[4, 8, 16, 32\]"
    ):
        refused({"mesh": {"dp": 2}, "batch": {"balance": True}})
    with pytest.raises(ShardcError, match=r"samples have 3 to 31 tokens, more than 16"):
        refused(spec("dp", lengths=[8, 16]))
    with pytest.raises(ShardcError, match="a stream does not say how long"):
        refused(spec("dp"), Stream())
    with pytest.raises(ShardcError, match=r"the rest of an epoch has fewer rows.*\n  fix: leave drop_last out"):
        refused(spec("dp"), drop_last=False)
    with pytest.raises(ShardcError, match="microbatches of several lengths cannot be one graph"):
        refused({**spec("dp"), "execution": {"overlap": "microbatches"}})
    with pytest.raises(ShardcError, match=r"`lengths` are 48, and it has 8 samples"):
        refused(spec("dp"), Short())


class Short(Known):
    def __len__(self) -> int:
        return 8


class Dropped(Language):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.dropout(self.table(ids), 0.1, self.training)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Switched(Language):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) + (self.head.bias.sum() if ids.shape[1] > 20 else 0.0)


def test_a_forward_that_looks_at_the_length_is_refused() -> None:
    with pytest.raises(ShardcError, match="forward computes something else for rows of 16 and 24"):
        refused(spec("dp"), net=Switched())


def test_dropout_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    refused(spec("dp"), net=Dropped())
    assert "dropout draws by a row's place in the batch, which now depends on the mesh" in capsys.readouterr().err


def test_held_out_data_are_read_in_order() -> None:
    program = compiled(spec("dp"))

    def work(mesh: LoopbackMesh) -> float:
        engine = program.engine(NET, sgd, mesh=mesh)
        return engine.evaluate_all(engine.loader(Talks(), shuffle=False, name=None), local=True)["loss"]

    whole = NET(**collate([Talks()[i] for i in range(48)])).detach()
    assert loopback(program.mesh, work) == pytest.approx([float(whole)] * 2, rel=1e-12)


def test_rows_of_text_say_their_lengths() -> None:
    """Those that are filled up: what fills them is a document too. Those that are not: each is as long as it is."""
    documents = [(list(range(1, n + 1)), [True] * n) for n in (5, 9, 3)]
    for fill, expected in ((True, [[5, 11], [9, 7], [3, 13]]), (False, [[5], [9], [3]])):
        rows = Rows(Form("document", 16, "drop", 1, True, 0, fill), lambda counts: iter(documents), None)
        assert rows.lengths == expected
        assert [len(rows[i]["labels"]) for i in range(3)] == ([16] * 3 if fill else [5, 9, 3])
    packed = Rows(Form("document", 16, "drop", 8, True, 0), lambda counts: iter(documents), None)
    assert sorted(map(sorted, packed.lengths)) == [[2, 5, 9], [3, 13]]


def test_data_that_are_batches_are_refused() -> None:
    """`shardc run` would read them as they are."""
    program = compiled(spec("dp"))
    file = SimpleNamespace(data=lambda split: [batch_of(16)], collate=None, ref="model.py")

    def work(mesh: LoopbackMesh) -> None:
        _data(SimpleNamespace(model="model.py"), file, program.engine(NET, sgd, mesh=mesh))  # type: ignore[arg-type]

    with pytest.raises(ShardcError, match=r"data\(\) gives batches, and .* deals samples\n  fix: return a dataset"):
        loopback(program.mesh, work)
