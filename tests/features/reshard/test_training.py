"""Training that goes on under another plan, weights for other programs, and what is refused."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.features.reshard.moves import Moves
from shardc.features.reshard.places import Plan, weights
from shardc.features.reshard.runtime import local_tensors
from shardc.features.reshard.transports import OverMesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import zoo
from tests.features.generation.test_runtime import WEIGHTS
from tests.features.matrices.optimizers import SOAP
from tests.features.reshard.test_pairs import ROWS, adamw, batch, model, program
from tests.second_device import NAME, OnSecond, second_device
from tests.zoo import expert_loops

torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(5) * (i + 1) + i) % 11
        return {"ids": ids[:4], "labels": ids[1:]}


def scheduled(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def steps(engine: Any, number: int) -> list[float]:
    loader, losses = engine.loader(Rows(), seed=5), list[float]()
    while len(losses) < number:
        for part in loader:
            losses.append(float(engine.step(part, local=True)))
            if len(losses) == number:
                break
    return losses


def same(one: Any, other: Any) -> None:
    left, right = one.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(x, right[n]) for n, x in left.items())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("dp=8 zero 3", "tp=2 dp=4 zero 1"),
        ("tp=2 dp=4 zero 1", "pp=2 dp=2 tp=2"),
        ("pp=2 dp=2 tp=2", "dp=4 tp=2 zero 1 bf16"),
        ("dp=4 tp=2 zero 1 bf16", "dp=2 ep=4 zero 2"),
    ],
)
def test_training_goes_on_as_from_a_checkpoint(a: str, b: str, tmp_path: Path) -> None:
    """To the bit: losses, weights, learning rates, the order of the data."""
    old, new, source = program(a), program(b), model()
    options: dict[str, Any] = {"optimizer": adamw, "scheduler": scheduled, "seed": 3, "clip_norm": 1.0}

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, mesh=mesh, **options)
        steps(engine, 4)
        engine.save(tmp_path)
        loaded = new.engine(source, mesh=mesh.seen_as(new.mesh), **options)
        loaded.load(tmp_path)
        moved = engine.to(new)
        assert (moved.step_count, moved.lr, moved.rng.seed) == (loaded.step_count, loaded.lr, 3) == (4, engine.lr, 3)
        assert steps(moved, 4) == steps(loaded, 4)
        same(moved, loaded)

    loopback(old.mesh, work)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.up(x).relu()), y)


PAIR = {"x": torch.linspace(-1, 1, 64).view(8, 8), "y": torch.linspace(1, -1, 64).view(8, 8).sin()}


@functools.cache
def small(zero: int = 0, matrices: str = "", **mesh: int) -> Program:
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh, "data": {"zero": zero}}
    spec |= {"shard": {"up": "column", "down": "row"}} if "tp" in mesh else {}
    spec |= {"optimizer": {"matrices": matrices}} if matrices else {}
    return shardc.compile(two(), PAIR, spec)


def two() -> nn.Module:
    torch.manual_seed(0)
    return Two()


def test_matrices_with_owners(tmp_path: Path) -> None:
    """Their state is whole, nested, and on other ranks under the other plan."""
    old, new, source = small(zero=1, matrices="whole", dp=4), small(matrices="whole", dp=2, tp=2), two()

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, SOAP, mesh=mesh)
        for _ in range(3):
            engine.step(PAIR)
        moved = engine.to(new)
        back = moved.to(old)
        same(engine, back)
        losses = [[float(e.step(PAIR)) for _ in range(2)] for e in (engine, moved, back)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        # a basis of eigh lies by columns in memory, one that was moved by rows: on some CPUs (AMD) products of them
        # differ in the last bit of a float32
        assert losses[2] == pytest.approx(losses[0], rel=1e-6)
        left, right = engine.full_state_dict(), back.full_state_dict()
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)

    loopback(old.mesh, work)


def test_a_spec_in_the_place_of_a_program(tmp_path: Path) -> None:
    """A path, a dict, a compiled one: the same program, compiled once for all ranks."""
    old, new, source = small(zero=3, dp=4), small(tp=4), two()
    spec = {"shardc": 1, "mesh": {"tp": 4}, "shard": {"up": "column", "down": "row"}}
    path = tmp_path / "split.yaml"
    path.write_text("shardc: 1\nmesh: {tp: -1}\nshard: {up: column, down: row}\n")
    program = shardc.compile(source, PAIR, {"shardc": 1, "mesh": {"dp": 4}, "data": {"zero": 3}})

    def work(mesh: LoopbackMesh) -> None:
        engine, first = (p.engine(source, adamw, mesh=mesh) for p in (program, old))
        for e in (engine, first):
            e.step(PAIR)
        moved, named, expected = engine.to(spec), engine.to(path), first.to(new)
        assert moved.program is named.program
        assert moved.program.text() == new.text()
        same(moved, expected)
        assert float(moved.step(PAIR)) == float(expected.step(PAIR))

    loopback(program.mesh, work)
    assert program.to(spec).mesh == new.mesh
    with pytest.raises(ShardcError, match="3 ranks"):
        loopback(program.mesh, lambda mesh: program.engine(source, mesh=mesh).to({"shardc": 1, "mesh": {"dp": 3}}))


def test_a_spec_without_a_model_to_compile() -> None:
    program = shardc.compile(two(), PAIR, {"shardc": 1, "mesh": {"dp": 4}})
    gc.collect()
    with pytest.raises(ShardcError, match="the model that was compiled no longer exists"):
        program.to({"shardc": 1, "mesh": {"dp": 2}})
    with pytest.raises(ShardcError, match="a loaded program has no model to compile"):
        replace(program, resize=None).to({"shardc": 1, "mesh": {"dp": 2}})


def test_weights_for_a_forward_only_program_and_back() -> None:
    """Again and again, with one plan of messages; what the optimizer has stays."""
    old = program("dp=8 zero 3")
    spec = {"shardc": 1, "mesh": {"dp": 4, "tp": 2}, "shard": {"*.gate_up": "column", "*.down": "row"}}
    scoring, source = shardc.compile(model(), batch(), spec, forward="score"), model()
    scores: list[float] = []
    alone = shardc.compile(model(), batch(), {"shardc": 1, "mesh": {"dp": 1}})
    for number in (1, 2):
        trained = shardc.simulate(alone, source, batch(), steps=number, optimizer=adamw).state
        one = shardc.compile(model(), batch(), {"shardc": 1, "mesh": {"dp": 1}}, forward="score")
        scores.append(float(one.forward(source, weights=trained).score(batch(1)).sum()))

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, adamw, mesh=mesh)
        run = scoring.forward(source, mesh=mesh.seen_as(scoring.mesh))
        made = []
        for _ in range(2):
            engine.step(batch())
            made.append(engine.weights_to(run))
            weights = engine.full_state_dict()
            assert all(torch.equal(x, weights[n]) for n, x in run.full_state_dict().items() if n != "seen")
            assert float(run.score(batch(1), gather=True).sum()) == pytest.approx(scores[len(made) - 1], rel=1e-5)
        assert made[0] is made[1]
        other = old.engine(source, adamw, mesh=mesh, seed=1)
        run.weights_to(other)
        one, copy = engine.full_state_dict(), other.full_state_dict()
        assert all(torch.equal(x, copy[n]) for n, x in one.items() if n != "seen")
        assert other.step_count == 0

    loopback(old.mesh, work)


def test_on_another_device_than_the_cpu() -> None:
    """Tensors of the device are packed there; AdamW's counts of steps, which are on the CPU, go along."""
    old, new, source = small(zero=3, dp=4), small(tp=4), two()

    def work(mesh: LoopbackMesh, name: str) -> list[float]:
        mesh.device = torch.device(name)
        engine = old.engine(source, adamw, mesh=mesh)
        losses = [engine.step(PAIR)]
        engine = engine.to(new)
        losses.append(engine.step(PAIR))
        writer = engine.to(old, optimizer=None)
        engine.weights_to(writer)
        losses.append(writer.evaluate(PAIR))
        return [float(x.numbers if isinstance(x, OnSecond) else x) for x in losses]

    def there(mesh: LoopbackMesh) -> list[float]:
        with second_device():
            return work(mesh, NAME)

    expected = loopback(old.mesh, lambda mesh: work(mesh, "cpu"))
    assert loopback(old.mesh, there) == [pytest.approx(each, rel=1e-6) for each in expected]


@pytest.mark.parametrize("bucket", [64, 1000, 1 << 20])
def test_rounds_are_bounded(bucket: int) -> None:
    """No rank sends more than two buckets at once, and each element still arrives."""
    old, new, source = small(zero=3, dp=4), small(tp=4), two()

    def work(mesh: LoopbackMesh) -> tuple[list[int], int]:
        engine = old.engine(source, None, mesh=mesh)
        other = new.engine(lambda: Two(), None, mesh=mesh.seen_as(new.mesh), seed=7)
        first = len(mesh.records)
        move = Moves(OverMesh(mesh), weights(Plan(old), Plan(new), all_buffers=False), bucket)
        move(local_tensors(engine._saver), local_tensors(other._saver))
        same(engine, other)
        sent = [r.bytes for r in mesh.records[first:] if r.tag == "reshard"]
        assert (sum(sent), len(sent)) == (sum(move.sent), move.rounds)
        return sent, sum(move.sent)

    results = loopback(old.mesh, work)
    assert max(n for sent, _ in results for n in sent) <= 2 * bucket
    assert len(results[0][0]) == -(-max(total for _, total in results) // bucket)


def test_what_cannot_go_is_refused() -> None:
    old, forward = small(dp=2), shardc.compile(two(), PAIR, {"shardc": 1, "mesh": {"dp": 2}}, forward=True)
    source, wide, tp = two(), small(dp=4), small(tp=2)
    another = shardc.compile(nn.Sequential(nn.Linear(8, 4)), PAIR["x"], {"shardc": 1, "mesh": {"dp": 2}}, loss=_mean)

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, mesh=mesh)
        engine.step(PAIR)
        with pytest.raises(ShardcError, match="dp=2 has 2 ranks, and dp=4 has 4"):
            engine.to(wide)
        with pytest.raises(ShardcError, match=r"(?s)forward-only.*weights_to"):
            engine.to(forward)
        with pytest.raises(ShardcError, match="no such option"):
            engine.to(tp, optimiser=None)
        with pytest.raises(ShardcError, match="is of another model"):
            engine.to(another)
        with pytest.raises(ShardcError, match="optimizer AdamW, not SGD"):
            engine.to(tp, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
        engine.backward(PAIR)
        with pytest.raises(ShardcError, match=r"gradients of .* need an update"):
            engine.to(tp)
        engine.update()
        assert engine.to(tp).step_count == 2  # and the engine is as it was

    loopback(old.mesh, work)


def _mean(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


TP = {"*.gate_up": "column", "*.down": "row"}
LORA = [{"match": "*.gate_up", "rank": 2, "alpha": 3}]
CPU = {"optimizer": "cpu", "parameters": "cpu"}
BF16, FP16 = {"compute": "bfloat16"}, {"compute": "float16", "loss_scale": "dynamic"}
STAGES = {"pipeline": {"axis": "pp", "cut": ["layers.1"]}, "batch": {"microbatches": 2}}
#: Both specs of a move, without meshes: of dp=4, and of dp=2 with tp=2 (or pp=2).
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offload": ({"data": {"zero": 3, "offload": CPU}}, {"data": {"zero": 1}, "precision": BF16}),
    "masters that are offloaded": (
        {"data": {"zero": 3}},
        {"data": {"zero": 2, "offload": {"optimizer": "cpu"}}, "precision": BF16},
    ),
    "loss scale": ({"data": {"zero": 1}, "precision": FP16}, {"precision": FP16}),
    "adapters": ({"data": {"zero": 3}, "adapters": LORA}, {"data": {"zero": 1}, "adapters": LORA}),
    "stages": ({"data": {"zero": 2}}, {"data": {"zero": 3}, **STAGES}),
    "recomputation": ({"data": {"zero": 3}, "checkpoint": [{"match": "layers.*", "save": []}]}, {}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_with_other_sections(name: str) -> None:
    """There and back: the same weights, and then the same step as the engine's that never moved, to the bit."""
    first, second = BESIDE[name]
    source, split = model(), {"mesh": {"dp": 2, "tp": 2}, "shard": TP}
    specs = (
        {"mesh": {"dp": 4}, **first},
        {**({"mesh": {"pp": 2, "dp": 2}} if "pipeline" in second else split), **second},
    )
    old, new = (shardc.compile(source, batch(), {"shardc": 1, **spec}) for spec in specs)
    moves_there_and_back(old, new, source, [batch(i) for i in range(3)])


def moves_there_and_back(old: Program, new: Program, source: nn.Module, batches: list[Any]) -> None:
    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(source, adamw, mesh=mesh)
        for each in batches[:-1]:
            engine.step(each)
        there = engine.to(new)
        same(engine, there)
        back = there.to(old)
        assert torch.equal(back.step(batches[-1]), engine.step(batches[-1]))
        same(engine, back)
        if engine.scaler is not None:
            assert engine.scaler.state_dict() == back.scaler.state_dict()

    loopback(old.mesh, work)


def test_a_stack_of_experts() -> None:
    """Each expert's weights are parameters under one plan, and one stack of all under the other."""
    torch.manual_seed(0)
    source, ids = expert_loops.Model(expert_loops.STYLES["Mixtral"]), torch.arange(24).view(4, 6) % expert_loops.VOCAB
    experts = [{"match": "moe", "axis": "ep"}]
    specs = (
        {"mesh": {"dp": 4}, "data": {"zero": 3}},
        {"mesh": {"dp": 2, "ep": 2}, "experts": experts, "data": {"zero": 1}},
    )
    old, new = (shardc.compile(source, (ids,), {"shardc": 1, **spec}, prove=False) for spec in specs)
    assert [any(p.members for p in program.params) for program in (old, new)] == [False, True]
    moves_there_and_back(old, new, source, [(ids,), (ids.flip(0),)])


def test_tokens_from_another_plan() -> None:
    """Of training at ZeRO 3, on weights split for generating, after every step."""
    source, rows = zoo.llama()
    zero = shardc.compile(source, rows, {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}}, prove=False)
    split = shardc.compile(source, rows, {"shardc": 1, "mesh": {"tp": 2}, "shard": WEIGHTS}, prove=False)
    prompts = [[5, 6, 7], [9, 8, 7, 6]]

    def work(mesh: LoopbackMesh) -> None:
        engine = zero.engine(source, lambda ps: torch.optim.SGD(ps, lr=0.5), mesh=mesh)
        writer, made = engine.to(split, optimizer=None), []
        for _ in range(3):
            engine.weights_to(writer)
            made.append(writer.generate(prompts, 8))
            assert made[-1] == engine.generate(prompts, 8)
            engine.step(rows)
        assert made[0] != made[2]

    loopback(zero.mesh, work)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_modules(zero: int) -> None:
    """A loop of one's own gives its weights to an engine, and takes them back."""
    old, new, source = small(zero=zero, dp=4), small(dp=2, tp=2), two()

    def work(mesh: LoopbackMesh) -> None:
        module = old.module(source, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        engine = new.engine(source, lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh.seen_as(new.mesh))
        for _ in range(2):
            module(**module.local(PAIR)).backward()
            optimizer.step()
            optimizer.zero_grad()
            module.weights_to(engine)
            same(module, engine)
            loss = engine.step(PAIR)
            engine.weights_to(module)
            same(module, engine)
            assert float(module(**module.local(PAIR)).detach()) < float(loss)
        with pytest.raises(ShardcError, match="a dict holds no weights"):
            engine.weights_to({})

    loopback(old.mesh, work)


@pytest.mark.parametrize(
    ("data", "each"),
    [({"zero": 1}, 0), ({"zero": 3}, 2 * 2 * 96 // 4)],  # bytes of a rank, at most: its quarter of two weights
    ids=["copies that each rank has", "masters that who sends narrows"],
)
def test_another_dtype(data: dict[str, Any], each: int) -> None:
    """A program stored in bfloat16, of training in it with float32 masters; and back, without loss."""
    rows = {n: x.bfloat16() for n, x in PAIR.items()}
    spec = {"shardc": 1, "mesh": {"dp": 4}, "data": data, "precision": {"compute": "bfloat16"}}
    old, source, short = shardc.compile(two(), PAIR, spec), two(), two().bfloat16()
    new = shardc.compile(short, rows, {"shardc": 1, "mesh": {"tp": 4}, "shard": {"up": "column", "down": "row"}})

    def work(mesh: LoopbackMesh) -> list[int]:
        engine = old.engine(source, adamw, mesh=mesh)
        engine.step(PAIR)
        other = new.engine(short, None, mesh=mesh.seen_as(new.mesh))
        sent = engine.weights_to(other).sent
        left, right = engine.full_state_dict(), other.full_state_dict()
        assert all(torch.equal(x.bfloat16(), right[n]) for n, x in left.items())
        other.weights_to(engine)
        again = engine.full_state_dict()
        assert all(torch.equal(x.float(), again[n]) for n, x in right.items())
        return sent

    assert sum(map(sum, loopback(old.mesh, work))) == old.reshard(new).bytes <= 4 * each
