"""What plans keep: a second question compiles nothing and has the same answer; files that are torn, too many, or of
another model are of no use to it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import shardc
from shardc.cost import device
from shardc.cost.dry_run import dry_run
from shardc.cost.known_ops import KnownOps
from shardc.cost.peak_memory import reserved
from shardc.cost.recorded import DryRun
from shardc.ir.program import Program
from shardc.machine.clock import Clock
from shardc.machine.work import Op
from shardc.plan import compiled_ranks, traces
from shardc.plan.disk_cache import DiskCache, folder
from shardc.plan.fingerprint import Unknown, fingerprint
from shardc.plan.stage_vectors import Meter, roles, stage
from shardc.runtime import schedule as schedules
from shardc.runtime.step.engine_optimizer import adamw
from tests import zoo
from tests.plan.test_plan import Sparse

H100 = device("h100-80g")
HIDDEN = 8


class Net(nn.Module):
    def __init__(self, slope: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.slope = nn.Linear(8, 16), nn.Linear(16, 8), slope

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.nn.functional.leaky_relu(self.a(x), self.slope)).square().mean()  # type: ignore[no-any-return]


def compiled(name: str, **spec: Any) -> Program:
    model, batch = zoo.ALL[name]()
    return shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)


SPECS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3}, "checkpoint": [{"match": "h.*", "save": []}]}),
    ("llama", {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 1}}),
    ("moe", {"mesh": {"dp": 2}, "precision": {"params": "float32", "compute": "bfloat16"}}),
    ("resnet_bn", {"mesh": {"dp": 2}}),
]


def told(r: DryRun) -> Any:
    """A dry run as plain values, with the names of what made something. Keys of collectives are addresses."""
    keys: dict[Any, int] = {}

    def part(p: Any) -> Any:
        def plain(w: Any) -> Any:
            if isinstance(w, Op):
                return w
            return tuple(keys.setdefault(x, len(keys)) if isinstance(x, int) else x for x in w)

        work = [plain(w) for w in p.work]
        return [(sign, s.nbytes, s.kind, s.op, s.shape) for sign, s in p.changes], work, p.sent

    every = [("before", r.before), *((str(a), p) for a, p in r.actions), ("after", r.after), ("update", r.update)]
    return sorted((s.nbytes, s.kind, s.op) for s in r.resident), [(name, part(p)) for name, p in every]


class Forgets(KnownOps):
    """Asks torch for every op anew."""

    def key(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize(("name", "spec"), SPECS, ids=[n for n, _ in SPECS])
def test_ops_that_are_known_give_what_torch_says(name: str, spec: dict[str, Any]) -> None:
    """Known from the same dry run, and from another one before."""
    program, known = compiled(name, **spec), KnownOps()
    asked = told(dry_run(program, 0, adamw, known=Forgets()))
    for _ in range(2):
        assert told(dry_run(program, 0, adamw, known=known)) == asked


def test_experts_on_a_gpu_are_one_product() -> None:
    """As the engine runs them there (runtime/ops/grouped_mm.py): as many flops, fewer calls."""
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"params": "bfloat16"}}
    program = shardc.compile(Sparse(), {"x": torch.zeros(8, 4, 16)}, spec, prove=False)

    def products(cpu: bool) -> tuple[int, int]:
        ops = [w for _, p in dry_run(program, 0, adamw, cpu=cpu).actions for w in p.work if isinstance(w, Op)]
        return sum(w.flops for w in ops), sum(w.name == "_grouped_mm" for w in ops)

    (flops, calls), (flops_of_loops, none) = products(cpu=False), products(cpu=True)
    assert calls == 5  # two, and their gradients but for the input's
    assert not none
    assert flops == flops_of_loops
    assert told(dry_run(program, 0, adamw, cpu=True, known=Forgets())) == told(dry_run(program, 0, adamw, cpu=True))


@pytest.mark.parametrize(("name", "spec"), SPECS[:2], ids=[n for n, _ in SPECS[:2]])
def test_a_dry_run_from_a_file_has_the_same_price(name: str, spec: dict[str, Any]) -> None:
    program = compiled(name, **spec)
    run = dry_run(program, 0, adamw)
    read = traces.decoded(json.loads(json.dumps(traces.encoded(run))))
    assert program.spec is not None

    def priced(r: DryRun) -> Any:
        assert program.spec is not None
        return stage(r, Meter.of(H100, program.mesh, r.rank, roles(program.spec)))

    one, other = priced(run), priced(read)
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[k], other[k]) for k in one)
    ops, again = ([w for _, p in r.actions for w in p.work if isinstance(w, Op)] for r in (run, read))
    assert [(w.name, w.dtype, w.matrices) for w in ops] == [(w.name, w.dtype, w.matrices) for w in again]
    actions = schedules.of(program).actions[0]
    assert reserved(read, actions, 80e9) == reserved(run, actions, 80e9)


@pytest.mark.parametrize("slow", [1.0, 1e3], ids=["work", "starting ops"])
def test_ops_between_collectives_are_as_one(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priced one by one, they take as long: where the device is busy, and where it waits for the host. slow: how much
    faster than an H100's the device's memory and products are.
    """
    on = H100.model_copy(update={"bandwidth": H100.bandwidth / 1e3 * slow, "launch": 0.0})
    for name, spec in SPECS[1:3]:
        program = compiled(name, **spec)
        run = dry_run(program, 0, adamw)
        assert program.spec is not None
        of = program.spec

        def priced(run: DryRun = run, program: Program = program, of: Any = of) -> Any:
            return stage(run, Meter.of(on, program.mesh, run.rank, roles(of)))

        stretches = priced()
        with monkeypatch.context() as m:
            m.setattr(Meter, "run", Clock.run)
            each = priced()
        assert stretches.keys() == each.keys()
        assert all(np.allclose(stretches[k], each[k], rtol=1e-12, atol=1e-18) for k in each)


def plan(model: nn.Module | None = None, **options: Any) -> shardc.plan.Plan:  # type: ignore[name-defined]
    given = {"shardc": 1, "mesh": {"dp": 2}}
    return shardc.plan(model or Net(), {"x": torch.ones(4, 8)}, given=given, precision="float32", **options)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder()


def test_a_second_question_compiles_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan()
    assert list(empty.iterdir())

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiled_ranks, "compiled", refuse)
    again = plan()
    assert again.candidates[0].priced == first.candidates[0].priced
    with pytest.raises(AssertionError, match="compiled again"):
        plan(cache=False)
    with pytest.raises(AssertionError, match="compiled again"):
        plan(Net(0.25))  # another model
    with pytest.raises(AssertionError, match="compiled again"):
        plan(loss=lambda y, _: 2 * y)


def test_without_a_cache_nothing_is_written(empty: Path) -> None:
    plan(cache=False)
    assert not empty.exists()


@pytest.mark.parametrize("harm", ["torn", "changed", "not a file"])
def test_a_file_that_is_not_whole_is_missing(empty: Path, harm: str) -> None:
    first = plan()
    for file in list(empty.iterdir()):
        data = file.read_bytes()
        if harm == "not a file":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(data[: len(data) // 2] if harm == "torn" else data[:40] + b"?" + data[41:])
    assert plan().candidates[0].priced == first.candidates[0].priced


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cache = DiskCache(file / "below")
    cache.put("q", 1)
    assert cache.get("q") is None


def test_files_beyond_the_limit_are_removed_the_oldest_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit=3000)
    for i in range(20):
        cache.put(i, [hash((i, j)) for j in range(40)])
        assert cache.get(0) is not None or i > 2  # read again and again: it stays
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 3000
    assert cache.get(19) is not None
    assert cache.get(1) is None


def test_many_may_write_the_same(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    value = list(range(2000))

    def work(_: int) -> bool:
        cache.put("q", value)
        return cache.get("q") == value  # type: ignore[no-any-return]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_hash_of_another_process_is_no_other_model() -> None:
    """transformers' models have one in their generation_config: texts are hashed to other numbers in every process."""
    made = []
    for number in (1, 2):
        model = Net()
        model.generation_config = GenerationConfig(max_new_tokens=7)
        model.generation_config._original_object_hash = number
        made.append(fingerprint(model, {"x": torch.ones(4, 8)}, None)[0])
    assert made[0] == made[1]


def test_what_decides_a_models_graph_decides_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: nn.Module, rows: int = 4, loss: Any = None) -> str:
        return fingerprint(model, {"x": torch.ones(rows, 8)}, loss)[0]

    def scaled(by: float) -> Any:
        return lambda y, _: by * y

    frozen, tied = Net(), Net()
    frozen.a.bias.requires_grad_(False)
    tied.extra = tied.a
    different = [of(Net()), of(Net(0.25)), of(Net().eval()), of(Net(), 8), of(Net().double()), of(frozen), of(tied)]
    different += [of(Net(), 4, scaled(2)), of(Net(), 4, scaled(3))]
    monkeypatch.setattr("tests.plan.test_records.HIDDEN", 9)  # a global of the file that the model is in
    different.append(of(Net()))
    assert len(set(different)) == len(different)
    assert of(Net()) == of(Net())


def test_what_cannot_be_told_is_not_looked_up(empty: Path) -> None:
    class Holder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.thing = memoryview(b"")

    with pytest.raises(Unknown):
        fingerprint(Holder(), {"x": torch.ones(4, 8)}, None)
    assert plan(Holder()).candidates[0].priced.exact
    assert not empty.exists()


def test_what_compile_refused_it_refuses_again(empty: Path) -> None:
    """Also from a file, in the same words."""
    spec = {"shardc": 1, "mesh": {"tp": 3}, "shard": {"a": "column"}}

    def refused() -> shardc.ShardcError:
        with pytest.raises(shardc.ShardcError) as e:
            shardc.plan(Net(), {"x": torch.ones(4, 8)}, given=spec, precision="float32")
        return e.value

    one, other = refused(), refused()
    assert (one.where, one.what, one.fix) == (other.where, other.what, other.fix)
