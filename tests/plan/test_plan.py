"""shardc plan: its prices are those of whole programs, what it chooses changes for the right reasons, its specs compile
and verify.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardc.nn
from shardc.cli import app
from shardc.cost import Device, device
from shardc.cost.recorded import KINDS
from shardc.machine.device import Link, Outside
from shardc.plan import Candidate, Plan
from shardc.plan.estimate import Rough, Table, estimated
from shardc.plan.few_layers import Subject
from shardc.plan.planner import Planner
from shardc.plan.price import price
from shardc.plan.questions import ALIGNED, largest
from shardc.plan.runs import Runs
from shardc.plan.space import Choice, Core, Facts, choices, sequence_widths, spec, splits
from shardc.plan.stage import NET
from shardc.plan.table import zero
from shardc.spec import Spec
from tests import zoo
from tests.once import once

H100 = device("h100-80g")
#: Collectives begin after half a millisecond.
SLOW_LINKS = H100.model_copy(update={"within": H100.within.model_copy(update={"start": 5e-4})})
FILE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x.square().mean()

def model():
    return Net()

def batch():
    return {"x": torch.ones(8, 4, 16)}
"""


class Block(nn.Module):
    def __init__(self, hidden: int, wide: int = 0) -> None:
        super().__init__()
        wide = wide or 4 * hidden
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """A language model without attention: many layers, few ops."""

    def __init__(self, layers: int, hidden: int = 64, vocab: int = 128, wide: int = 0) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.h = nn.ModuleList(Block(hidden, wide) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.h:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def stack(layers: int = 6) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Stack(layers), {"ids": torch.empty(16, 32, dtype=torch.long)}


def planner(model: nn.Module, batch: Any, on: Device = H100, **more: Any) -> Planner:
    runs = Runs(Subject(model, batch, more.get("loss")), on.kind == "cpu")
    return Planner(runs, on, "bfloat16", 0.05, "it", lambda what, done, of: None)


def elsewhere(q: Planner, on: Device, headroom: float = 0.0) -> Planner:
    """The same model on another device, from the same dry runs."""
    return Planner(q.runs, on, "bfloat16", headroom, "it", lambda what, done, of: None)


def first_price(q: Planner, c: Choice) -> Rough:
    """By arithmetic on a block."""
    block = q.finder.block(c.core)
    assert block is not None
    seconds, peaks = estimated(Table([c], q.device, {}), block, c.core, q.library)
    return Rough(float(seconds[0]), float(peaks[0]))


@functools.cache
def stacked() -> Planner:
    return planner(*stack())


@once
def blocks() -> Plan:
    """Of few ops: a plan on two devices."""
    model, batch = stack(2)
    return shardc.plan(model, batch, devices=2, device=SLOW_LINKS, largest="batch", fewest=True)


# --- prices


@pytest.mark.parametrize(
    "c",
    [
        Choice(dp=2, rows=2, microbatches=4, checkpoint="full"),
        Choice(dp=2, tp=2, zero=2, rows=4, microbatches=2, sequence_parallel=True),
        Choice(pp=2, dp=2, rows=1, microbatches=5, schedule="1f1b", zero=1),
        Choice(pp=2, dp=2, zero=3, rows=2, microbatches=4, schedule="interleaved", per_rank=2, checkpoint="selective"),
        Choice(pp=2, tp=2, rows=4, microbatches=4, schedule="zb-v", per_rank=2),
        Choice(cp=2, tp=2, zero=3, rows=4, microbatches=4, sequence_parallel=True, checkpoint="full"),
        Choice(pp=2, dp=4, outer=2, zero=3, kept=True, rows=1, microbatches=4, schedule="1f1b"),
    ],
    ids=str,
)
def test_a_price_from_few_layers_is_that_of_the_whole_program(c: Choice) -> None:
    q = stacked()
    assert q.runs.subject.layers is not None
    assert q.runs.subject.layers.number == 6
    found = price(q.library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
    asked = spec(c, q.facts, found.counts if c.pp > 1 else ())
    model, _ = stack()
    whole = shardc.compile(model, q.runs.subject.example(c.batch), asked, prove=False).cost(H100)
    # `keep` over replicas in a pipeline: 6 % too fast here, not explained yet. Interleaved: 4 % too slow where the host
    # takes no time, and 7 % here, where what is computed again waits for it
    near = 0.08 if c.kept or c.schedule == "interleaved" else 0.05
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=near)
    assert found.peak == pytest.approx(whole.memory.peak, rel=0.05)
    assert sum(found.spent.values()) == pytest.approx(found.step_seconds, rel=1e-6)


@pytest.mark.parametrize(
    "c",
    [
        Choice(pp=2, dp=2, zero=2, rows=2, microbatches=4, schedule="interleaved", per_rank=3),
        Choice(pp=2, dp=2, zero=3, kept=True, rows=2, microbatches=4, schedule="gpipe"),
        Choice(pp=2, rows=2, microbatches=1, schedule="interleaved", per_rank=2),
        Choice(pp=2, dp=2, zero=1, rows=2, microbatches=1, schedule="1f1b"),
    ],
    ids=str,
)
def test_a_price_knows_what_is_waited_for_once_a_step(c: Choice) -> None:
    """Collectives take long to begin here: gathers before the first microbatch, sums of the last one, and the loss,
    which a rank hands on once, however many stages it has. (A stage's last sum is waited for by the rank's next stage,
    which a stage that was run alone does not show.)
    """
    slow = H100.model_copy(
        update={"within": H100.within.model_copy(update={"latency": 1e-4, "start": 3e-4}), "host": 0.0}
    )
    q = elsewhere(stacked(), slow)
    found = price(q.library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
    asked = spec(c, q.facts, found.counts)
    whole = shardc.compile(stack()[0], q.runs.subject.example(c.batch), asked, prove=False).cost(slow)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.15)


@pytest.mark.parametrize(
    ("layers", "c"),
    [
        (9, Choice(dp=2, zero=3, rows=2, microbatches=2, checkpoint="full")),
        (9, Choice(pp=2, dp=2, zero=2, rows=2, microbatches=4, schedule="1f1b")),
        (28, Choice(dp=4, zero=2, rows=2, microbatches=2)),
        (28, Choice(pp=2, dp=2, zero=3, rows=2, microbatches=2, schedule="1f1b")),
    ],
    ids=str,
)
def test_a_price_where_a_bucket_holds_several_layers(layers: int, c: Choice) -> None:
    """Two layers and three lie in one bucket, whose collective nothing hides: many are many buckets."""
    model, batch = stack(layers)
    q = planner(model, batch, H100.model_copy(update={"host": 0.0, "launch": 0.0}))
    given = spec(c, q.facts)
    given["data"]["bucket_mb"] = 0.4  # a layer has 0.13 MB
    found = price(q.library, Spec.load(given), c.batch, whole_layers=True)
    if found.counts:
        given["pipeline"] = {**{k: v for k, v in given["pipeline"].items() if k != "stages"}, "balance": found.counts}
    whole = shardc.compile(model, q.runs.subject.example(c.batch), given, prove=False).cost(q.device)
    near = 1e-6 if layers < 24 else 0.1  # buckets are not quite three layers
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=near)
    assert found.peak == pytest.approx(whole.memory.peak, rel=near)


@functools.cache
def large() -> Planner:
    with torch.device("meta"):
        model, batch = Stack(9, 1024, 16384), {"ids": torch.empty(16, 512, dtype=torch.long)}
    return planner(model, batch)


@pytest.mark.parametrize(
    "c",
    [
        Choice(dp=2, rows=2, microbatches=2),
        Choice(dp=8, zero=1, rows=2, microbatches=1, checkpoint="full"),
        Choice(dp=2, zero=3, kept=True, rows=2, microbatches=4),
        Choice(pp=2, dp=2, zero=1, rows=1, microbatches=8, schedule="zb-h1"),
        Choice(pp=2, rows=2, microbatches=8, schedule="zb-v", per_rank=2),
        Choice(pp=4, dp=2, zero=3, rows=1, microbatches=8, schedule="1f1b", checkpoint="full"),
    ],
    ids=str,
)
def test_what_is_reserved_follows_from_few_layers(c: Choice) -> None:
    """Of nine layers, from two and three, or one and two on each stage: as the whole program's."""
    q = large()
    found = price(q.library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
    asked = spec(c, q.facts, found.counts if c.pp > 1 else ())
    whole = shardc.compile(q.runs.subject.model, q.runs.subject.example(c.batch), asked, prove=False).cost(H100)
    assert found.reserved == pytest.approx(whole.reserved, rel=0.06)
    assert found.outside == whole.outside
    assert found.peak == pytest.approx(whole.memory.peak, rel=0.09)
    assert found.peak <= found.reserved


def test_what_is_reserved_decides_whether_a_spec_fits() -> None:
    """All of the device is live at the peak: nothing is left for what the allocator rounds up."""
    first = elsewhere(large(), H100).search(2, None).best
    little = H100.model_copy(update={"memory": first.peak + first.outside})
    q = elsewhere(large(), little)
    given = q.given([first.spec], None).candidates[0]
    assert given.peak <= given.target.usable - given.outside
    assert not given.fits
    best = q.search(2, None).best
    assert best.spec != first.spec
    model, batch = large().runs.subject.model, large().runs.subject.batch
    assert shardc.compile(model, batch, best.spec, prove=False).cost(little).fits


def test_a_pipeline_inside_of_nodes_sends_gradients_between_them() -> None:
    """As of the whole program: the order of the mesh's axes says who shares a node."""
    q, pairs = stacked(), H100.model_copy(update={"node": 2})
    library = replace(q.library, device=pairs)
    c = Choice(pp=2, dp=2, rows=2, microbatches=4)
    for inside in (False, True):
        found = price(library, Spec.load(spec(replace(c, inside=inside), q.facts)), c.batch, whole_layers=True)
        asked = spec(replace(c, inside=inside), q.facts, found.counts)
        assert list(asked["mesh"]) == (["dp", "pp"] if inside else ["pp", "dp"])
        model, _ = stack()
        whole = shardc.compile(model, q.runs.subject.example(c.batch), asked, prove=False).cost(pairs)
        assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.05)
    slow = pairs.model_copy(update={"between": Link(bandwidth=1e7, latency=1e-5)})
    apart, inside = (
        price(
            replace(q.library, device=slow), Spec.load(spec(replace(c, inside=x), q.facts)), c.batch, whole_layers=True
        )
        for x in (False, True)
    )
    assert inside.spent["dp"] > 2 * apart.spent["dp"]
    assert inside.spent["pp"] + inside.spent["bubble"] < apart.spent["pp"] + apart.spent["bubble"]


def test_the_best_candidate_costs_what_its_spec_does() -> None:
    """And so does the best of both devices. A step of so few small ops is none the faster for two that take long to
    send, so the best leaves one idle, and says so.
    """
    best, model, batch = blocks().best, *stack(2)
    of_both = next(c for c in blocks().candidates if c.devices == 2)
    for c in (best, of_both):
        whole = shardc.compile(model, batch, c.spec, prove=False).cost(SLOW_LINKS)
        assert c.step_seconds == pytest.approx(whole.step_seconds, rel=0.03)
        assert c.peak == pytest.approx(whole.memory.peak, rel=0.03)
        assert c.fits
    assert best.devices == 1
    assert best.step_seconds < of_both.step_seconds
    assert "the best uses 1 of 2 devices: with more it is slower" in str(blocks())
    assert "1 of 2 devices: with more it is slower, so the others are idle" in blocks().spec()


def test_time_is_told_by_what_axes_are_for_whatever_their_names() -> None:
    def spent(data: str, tensor: str) -> dict[str, float]:
        made = {
            "shardc": 1,
            "mesh": {data: 2, tensor: 2},
            "data": {"axis": data},
            "shard": {"use": {"plan": "structure", "axis": tensor}},
        }
        return dict(price(stacked().library, Spec.load(made), 16).spent)

    found = spent("rows", "columns")
    assert found == spent("dp", "tp")
    assert found["tp"] > 0 < found["dp"]


def test_model_flops_are_those_of_its_products() -> None:
    """6 a token and parameter of a product (Kaplan et al. 2020)."""
    q = stacked()
    products = sum(m.weight.numel() for m in q.runs.subject.model.modules() if isinstance(m, nn.Linear))
    assert q.library.flops == pytest.approx(6 * 32 * products, rel=0.01)


@pytest.mark.parametrize("family", ["gpt", "t5", "numbers"])
def test_a_plan_counts_the_tokens_that_a_run_counts(family: str) -> None:
    """Positions of ids that an embedding looks up: not of targets, and not of numbers [row, position, feature]."""
    numbers = nn.Linear(4, 3), {"input": torch.ones(8, 5, 4)}
    model, batch = {"gpt": zoo.gpt, "t5": zoo.t5, "numbers": lambda: numbers}[family]()
    loss = (lambda y, _: y.sum()) if family == "numbers" else None
    tokens = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, loss=loss, prove=False).tokens
    facts = planner(model, batch, loss=loss).facts
    assert (tokens is None, (facts.tokens or 0) * facts.rows) == (family == "numbers", tokens or 0)


def test_candidates_are_ranked() -> None:
    found = blocks()
    assert all(c.fits for c in found.candidates)
    assert [c.step_seconds for c in found.candidates] == sorted(c.step_seconds for c in found.candidates)
    assert found.considered > 30
    assert found.best.tokens_per_second == pytest.approx(16 * 32 / found.best.step_seconds)
    assert 0 < found.best.mfu < 1


# --- what is recommended, and how it is shown


def priced_as(c: Candidate, seconds: float, peak: float) -> Candidate:
    """A candidate with another price."""
    return replace(c, step_seconds=seconds, memory={"activations": peak}, reserved=peak, outside=0.0)


def test_nothing_is_recommended_that_does_not_fit() -> None:
    one = blocks().candidates[0]
    limit = one.target.usable
    best, faster, other = (priced_as(one, s, f * limit) for s, f in ((2.0, 0.5), (1.0, 4), (3.0, 0.4)))
    assert "Nothing else that was priced fits" in replace(blocks(), candidates=(best, faster)).spec()
    text = replace(blocks(), candidates=(best, other, faster)).spec()
    assert "Next best that fits: " in text
    assert "in 3.00 s" in text
    assert "1.00 s" not in text


def test_every_row_comes_to_something_else() -> None:
    found = [
        (c.spec.mesh.axes, f"{c.step_seconds:.4g}", f"{c.needs:.4g}", f"{c.peak:.4g}") for c in blocks().candidates
    ]
    assert len({*found}) == len(found) > 2


def test_a_second_choice_that_fits_is_priced() -> None:
    kinds = {(c.spec.mesh.axes, c.spec.pipeline and c.spec.pipeline.schedule) for c in blocks().candidates if c.fits}
    assert len(kinds) > 1


def test_a_waterfall_leads_from_the_peak_to_a_step() -> None:
    for c in blocks().candidates[:3]:
        assert sum(c.waterfall.values()) == pytest.approx(c.step_seconds, rel=0.02)
        assert next(iter(c.waterfall)) == "peak"
        assert c.waterfall["peak"] == pytest.approx(c.mfu * c.step_seconds)
    one = next(c for c in blocks().candidates if not c.spec.checkpoint)
    assert one.waterfall.get("again", 0.0) < 0.2 * one.waterfall["peak"]


def test_what_would_help() -> None:
    """The same dry runs on other devices give what a plan for that device gives."""
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
    model, batch = zoo.ALL["gpt"]()

    def priced(on: Any) -> Any:
        return shardc.plan(model, batch, device=on, given=spec, what_if=on == "h100-80g", tokens=1e9)

    here = priced("h100-80g")
    by = {x["what"]: x for x in here.what_if}
    assert [x["ratio"] for x in here.what_if] == sorted(x["ratio"] for x in here.what_if)
    assert by["on a100-80g"]["step_seconds"] == pytest.approx(priced("a100-80g").best.step_seconds)
    better = [x for what, x in by.items() if "twice" in what or "no time" in what]
    assert len(better) == 5
    assert all(x["ratio"] <= 1 + 1e-9 for x in better)
    assert by["no time to start ops (fused, or captured)"]["ratio"] < 0.9
    hours = 1e9 / here.best.tokens_per_second / 3600
    assert here.answers["duration"]["device_hours"] == pytest.approx(4 * hours)


def test_what_another_spec_would_help() -> None:
    """As that spec is priced by itself: nothing computed again, or what lies between products compiled."""
    spec = {"shardc": 1, "mesh": {"dp": 2}, "checkpoint": [{"match": "h.*"}]}
    model, batch = zoo.ALL["gpt"]()

    def priced(one: Any, **more: Any) -> Any:
        return shardc.plan(model, batch, device="h100-80g", given=one, **more)

    by = {x["what"]: x for x in priced(spec, what_if=True).what_if}
    again, compiled = (next(x for what, x in by.items() if part in what) for part in ("again", "compiled"))
    assert again["step_seconds"] == priced({k: v for k, v in spec.items() if k != "checkpoint"}).best.step_seconds
    assert compiled["step_seconds"] == priced({**spec, "execution": {"compile": "layers"}}).best.step_seconds
    assert max(again["ratio"], compiled["ratio"]) < 1
    lowered = priced({"shardc": 1, "mesh": {"dp": 2}, "execution": {"compile": "layers"}}, what_if=True)
    assert not [x for x in lowered.what_if if "again" in x["what"] or "compiled" in x["what"]]


class Head(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).float().logsumexp(1).sum()


@pytest.mark.parametrize("vocabulary", [1000, 1001])
def test_whether_padding_would_help(vocabulary: int) -> None:
    spec = {"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "bfloat16"}}
    batch = {"x": torch.zeros(65536, 64)}
    plan = shardc.plan(Head(vocabulary), batch, device="h100-80g", given=spec, what_if=True)
    ratios = [x["ratio"] for x in plan.what_if if x["what"] == ALIGNED]
    assert len(ratios) == vocabulary % 8
    assert all(ratio < 0.95 for ratio in ratios)


# --- what it chooses


@functools.cache
def prices() -> tuple[tuple[Choice, Rough], ...]:
    """First prices for eight devices of one node."""
    q = stacked()
    cores = [Core(t, sequence_parallel=t > 1, checkpoint=k) for t in (1, 2) for k in ("none", "full")]  # type: ignore[arg-type]
    return tuple((c, first_price(q, c)) for core in cores for c in choices(core, 8, 64, 6))


def test_small_memory_makes_it_split_and_recompute() -> None:
    def best(memory: float) -> Choice:
        return min((x for x in prices() if x[1].peak <= memory), key=lambda x: x[1].seconds)[0]

    def state(c: Choice) -> float:
        """The part of the optimizer's state that a rank has."""
        return 1 / (c.tp * c.pp * (c.dp if c.zero else 1))

    peaks = sorted(p.peak for _, p in prices())
    much, little = best(80e9), best(peaks[len(peaks) // 50])
    assert much.checkpoint == "none"
    assert (little.checkpoint, little.zero) != ("none", 0)
    assert state(little) < state(much) or little.checkpoint == "full"


@pytest.mark.parametrize(
    "entry",
    [
        {"checkpoint": [{"match": "h.*", "every": 2}]},
        {"checkpoint": [{"match": "h.{0,3,4}"}]},
        {"mesh": {"tp": 2}, "shard": {"h.2.up": "column", "h.2.down": "row"}},
        {"mesh": {"pp": 2}, "pipeline": {"axis": "pp"}, "batch": {"microbatches": 2}, "checkpoint": [{"match": "h.5"}]},
        {"mesh": {"tp": 2}, "activations": {"h.*": {1: "tp"}}, "checkpoint": [{"match": "h.5"}]},
    ],
    ids=["every", "numbers", "weights of one layer", "pipeline", "dims of activations"],
)
def test_a_spec_that_tells_layers_apart_is_priced_whole(entry: dict[str, Any]) -> None:
    """Few layers are like many only if the spec says the same of all."""
    q = stacked()
    asked = {"shardc": 1, "mesh": {"dp": 2}, **entry}
    assert not q.runs.treats_layers_alike(Spec.load(asked))
    found = price(q.library, Spec.load(asked), 8)
    model, _ = stack()
    whole = shardc.compile(model, q.runs.subject.example(8), asked, prove=False).cost(H100)
    assert found.peak == whole.memory.peak
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)


def test_estimates_lie_near_exact_prices() -> None:
    q = stacked()
    for c in (
        Choice(dp=4, tp=2, sequence_parallel=True, rows=4, microbatches=4),
        Choice(pp=2, dp=4, rows=2, microbatches=8),
    ):
        rough, exact = first_price(q, c), price(q.library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
        assert rough.seconds == pytest.approx(exact.step_seconds, rel=0.3)
        assert rough.peak == pytest.approx(exact.peak, rel=0.3)


@pytest.mark.parametrize(
    "c",
    [
        Choice(tp=2, sequence_parallel=True, rows=16, microbatches=1),
        Choice(tp=4, sequence_parallel=True, rows=4, microbatches=4, checkpoint="full"),
        Choice(pp=2, rows=4, microbatches=1, schedule="zb-h1"),
        Choice(pp=2, rows=2, microbatches=4, schedule="interleaved", per_rank=3),
        Choice(dp=2, zero=3, rows=4, microbatches=2),
        Choice(dp=2, zero=2, rows=4, microbatches=2),
    ],
    ids=str,
)
def test_estimates_over_slow_links_lie_near_exact_prices(c: Choice) -> None:
    """A row waits for nothing where the host is late, and several do; each stage of a rank sends; nothing hides the
    only bucket (where the host takes no time: that it hides behind what is waited for estimates do not know).
    """
    slow = H100.within.model_copy(update={"bandwidth": H100.within.bandwidth / 500, "latency": 1e-4})
    host = 0.0 if c.dp > 1 else H100.host
    q = elsewhere(stacked(), H100.model_copy(update={"within": slow, "launch": 0.0, "host": host}))
    rough, exact = first_price(q, c), price(q.library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
    assert rough.seconds == pytest.approx(exact.step_seconds, rel=0.4)
    assert rough.peak == pytest.approx(exact.peak, rel=0.3)


class Attends(nn.Module):
    """Causal attention over long rows, of sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(63, 45), nn.Linear(45, 135), nn.Linear(45, 63)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (y.unflatten(-1, (3, 15)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.nn.functional.cross_entropy(self.head(y.transpose(1, 2).flatten(2)).flatten(0, 1), ids.flatten())


@once
def long_rows() -> Plan:
    """Of one row of 131072 tokens on two devices, too long for one by what is reserved, not by live bytes."""
    with torch.device("meta"):
        model, batch = Attends(), {"ids": torch.empty(1, 131072, dtype=torch.long)}
    little = H100.model_copy(update={"memory": 167 * 2**20, "outside": Outside()})
    return shardc.plan(model, batch, devices=2, device=little, largest="sequence")


def test_the_sequence_is_split_where_a_row_is_too_long() -> None:
    found = long_rows()
    best = found.best
    assert best.spec.to_dict()["sequence"] == {"axis": "cp"}
    assert "# cp=2: " in found.spec()
    assert best.shares["cp"] > 0
    with torch.device("meta"):
        model, batch = Attends(), {"ids": torch.empty(1, 131072, dtype=torch.long)}
    whole = shardc.compile(model, batch, best.spec, prove=False).cost(best.target.device)
    assert best.step_seconds == pytest.approx(whole.step_seconds, rel=0.03)
    assert best.peak == pytest.approx(whole.memory.peak, rel=0.03)


def test_the_longest_sequence_is_that_of_the_mesh_that_takes_it() -> None:
    found = long_rows()
    answer = found.answers["largest sequence"]
    assert answer["needs_bytes"] <= found.target.usable < answer["next_needs_bytes"]
    assert answer["spec"]["mesh"] == {"cp": 2}
    assert answer["value"] > 131072


def test_short_rows_are_not_split() -> None:
    assert sequence_widths(8, 1024) == []
    assert sequence_widths(8, None) == []
    assert all("cp" not in c.spec.mesh.names for c in blocks().candidates)


def test_slow_links_keep_tensor_parallel_in_a_node() -> None:
    slow = H100.model_copy(update={"node": 2, "between": Link(bandwidth=1e9, latency=1e-4)})
    q = planner(*stack(2), on=slow)
    assert max(core.tp for core in splits(q.facts, 8, 2)) == 2
    inside, across = (
        price(q.library, Spec.load(spec(Choice(dp=8 // t, tp=t, rows=2 * t), q.facts)), 16, whole_layers=True)
        for t in (2, 4)
    )
    assert across.spent["tp"] > 5 * inside.spent["tp"]


def test_heads_that_do_not_divide() -> None:
    """8 heads and 128 words on 3 ranks: said, and other splits are taken."""
    model, batch = zoo.gpt(torch.float32)
    q = planner(model, batch)
    with pytest.raises(shardc.ShardcError):
        q.library.block(Core(tp=3))
    assert [core.tp for core in splits(q.facts, 3, 8) if q.finder.block(core)] == [1]
    assert "tp=3" in q.finder.refused


class Mixture(nn.Module):
    def __init__(self, hidden: int = 16, inner: int = 32, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, number)
        self.up = nn.Parameter(torch.randn(number, inner, hidden))
        self.down = nn.Parameter(torch.randn(number, hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return shardc.nn.experts(x, index, weights, self.up, self.down, activation="relu")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x).square().mean()  # type: ignore[no-any-return]


def test_experts_are_offered() -> None:
    q = planner(Sparse(), {"x": torch.zeros(8, 4, 16)})
    assert q.facts.number == 4
    assert q.facts.experts == ("mixture",)
    found = [c for c, _ in q.finder.ranked(2, 8) if c.ep == 2]
    assert found
    assert spec(found[0], q.facts)["experts"] == [{"match": "mixture", "axis": "ep"}]


class SparseStack(Stack):
    """Layers with a dense part, and with eight experts."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for block in self.h:
            block.down = nn.Sequential(block.down, Mixture(64, 256, 8))  # type: ignore[assignment]


@functools.cache
def sparse_stacked() -> Planner:
    with torch.device("meta"):
        return planner(SparseStack(6), {"ids": torch.empty(16, 32, dtype=torch.long)})


@pytest.mark.parametrize("dp", [1, 2])
def test_zero_over_the_ranks_of_experts_shards_what_is_not_theirs_there_and_theirs_over_dp(dp: int) -> None:
    q = sparse_stacked()
    plain = Choice(dp=dp, ep=4, rows=2, microbatches=4)
    c = replace(plain, zero=1, over_experts=True)
    assert c.data == {"axis": ["dp", "ep"] if dp > 1 else "ep", "zero": 1}
    if dp > 1:
        shown: Any = SimpleNamespace(spec=Spec.load(spec(c, q.facts)))
        assert zero(shown) == "1, over ep, experts dp"
    core = q.library.block(c.core)
    unit = 2 * 2 * 64 * 256 * 4  # of eight experts of two matrices, a rank has two, in float32
    assert [core.ranks[x].weights.experts for x in ("first", "one", "last")] == [unit, unit, unit]
    exact, whole = (price(q.library, Spec.load(spec(x, q.facts)), c.batch, whole_layers=True) for x in (c, plain))
    moments, experts = whole.memory["optimizer"], 6 * 2 * unit  # two numbers of each parameter
    assert exact.memory["optimizer"] == pytest.approx(experts / dp + (moments - experts) / 4, rel=1e-3)
    rough, without = first_price(q, c), first_price(q, plain)
    assert rough.peak / without.peak == pytest.approx(exact.peak / whole.peak, rel=0.02)
    assert rough.seconds == pytest.approx(exact.step_seconds, rel=0.15)


def test_layers_of_another_kind_that_come_first_are_recomputed_too() -> None:
    """As the dense layers of a model of experts: a pipeline's first rank keeps no more of them than of the others."""
    with torch.device("meta"):
        model = SparseStack(8)
        for block in model.h[:2]:
            block.down = block.down[0]  # type: ignore[index, assignment]
        q = planner(model, {"ids": torch.empty(16, 32, dtype=torch.long)})
    assert q.runs.subject.layers is not None
    assert q.runs.subject.layers.first == 2
    c = Choice(pp=2, rows=4, microbatches=4, checkpoint="full")
    none, full = (q.library.block(replace(c, checkpoint=keep).core) for keep in ("none", "full"))
    kept = KINDS.index("activations")
    before, after = (x.stages["first"].part("F", "middle")[NET][kept] for x in (none, full))
    assert after < 0.2 * before


@pytest.mark.parametrize(
    "c",
    [
        Choice(dp=4, ep=2, rows=1, microbatches=2),
        Choice(dp=4, ep=2, rows=1, microbatches=2, zero=1),
        Choice(dp=4, ep=2, rows=1, microbatches=2, zero=3),
        Choice(dp=2, ep=4, rows=1, microbatches=2, zero=1, over_experts=True),
        Choice(dp=2, ep=4, rows=1, microbatches=2, zero=3, over_experts=True),
    ],
    ids=str,
)
def test_what_is_summed_and_gathered_of_experts_takes_as_long_as_it_is_priced(c: Choice) -> None:
    """Each rank of a node has other experts: its links carry those of all. Between slow nodes that is all of a step."""
    slow = H100.model_copy(update={"node": 2, "between": Link(bandwidth=2e7, latency=1e-5)})
    q = sparse_stacked()
    library = replace(q.library, device=slow)
    exact = price(library, Spec.load(spec(c, q.facts)), c.batch, whole_layers=True)
    assert exact.spent["dp"] > 0.4 * exact.step_seconds
    assert first_price(elsewhere(q, slow), c).seconds == pytest.approx(exact.step_seconds, rel=0.25)


@pytest.mark.parametrize("core", [Core(ep=2), Core(ep=4), Core()], ids=["experts on 2", "experts on 4", "no experts"])
@pytest.mark.parametrize("zero", [3, 1, 2, 0])
def test_estimates_of_every_zero_lie_near_exact_prices_with_experts_and_without(core: Core, zero: int) -> None:
    """Wide layers and a large table between slow nodes: most of a step is what is gathered and summed. The table is
    used as it is stored, in twice the bytes of what is cast; sums over several axes run side by side.
    """
    q = wide(core.ep > 1)
    every = [c for c in choices(core, 16, 32, 6, node=4) if c.pp == 1 and c.rows == 1 and c.zero == zero]
    some = [c for c in every if not (c.outer > 1 and c.ep == 4)]
    assert some
    for c in some:
        rough, exact = first_price(q, c), q.finder.exact(c)
        assert exact is not None
        assert exact.spent["dp"] + exact.spent["ep"] > 0.4 * exact.step_seconds
        assert rough.seconds == pytest.approx(exact.step_seconds, rel=0.2), str(c)
        # the head's gradient is whole for a moment
        assert rough.peak == pytest.approx(exact.peak, rel=0.25), str(c)


@functools.cache
def wide(experts: bool) -> Planner:
    on = device("a100-80g")
    links = {"within": on.within.bandwidth / 3, "between": on.between.bandwidth / 3}
    slow = {name: getattr(on, name).model_copy(update={"bandwidth": n}) for name, n in links.items()}
    with torch.device("meta"):
        model = Stack(6, 2048, 32000)
        for block in model.h if experts else ():
            block.down = nn.Sequential(block.down, Mixture(2048, 1024, 8))  # type: ignore[assignment]
        batch = {"ids": torch.empty(16, 1024, dtype=torch.long)}
        return planner(model, batch, on=on.model_copy(update={**slow, "node": 4}))


@pytest.mark.parametrize("overlap", ["microbatches", "forwards"])
def test_a_given_spec_with_pairs_is_priced_as_they_run(overlap: str) -> None:
    model, batch = zoo.gpt(torch.float32, layers=1)
    spec: dict[str, Any] = {
        "shardc": 1,
        "mesh": {"dp": 2},
        "batch": {"microbatches": 2},
        "execution": {"overlap": overlap},
    }
    found = shardc.plan(model, batch, device="h100-80g", given=spec).best
    whole = shardc.compile(model, batch, spec, prove=False).cost("h100-80g")
    assert found.step_seconds == pytest.approx(whole.step_seconds)
    assert found.peak == whole.memory.peak


@pytest.mark.parametrize("pipeline", [{}, {"stages": 4}, {"stages": 4, "schedule": "interleaved"}], ids=str)
def test_a_given_pipeline_without_cuts_is_priced_as_compile_cuts_it(pipeline: dict[str, Any]) -> None:
    """Also inside of layers: a plan that writes cuts divides whole layers."""
    model, batch = stack(7)
    given = {"shardc": 1, "mesh": {"pp": 2}, "batch": {"microbatches": 4}, "pipeline": {"axis": "pp", **pipeline}}
    (found,) = shardc.plan(model, batch, given=given, device="h100-80g").candidates
    cost = shardc.compile(model, batch, given, prove=False).cost(device="h100-80g")
    assert found.step_seconds == pytest.approx(cost.step_seconds, rel=1e-9)
    assert found.peak == cost.memory.peak


def test_no_given_spec_with_experts_over_several_nodes_is_better_than_the_best() -> None:
    """On nodes of two devices whose memory is just enough for it."""
    pairs = H100.model_copy(update={"node": 2})
    four = Choice(dp=2, ep=4, rows=1, microbatches=2, zero=1, over_experts=True)
    q = elsewhere(sparse_stacked(), pairs)
    given = price(q.library, Spec.load(spec(four, q.facts)), 16, whole_layers=True)
    q = elsewhere(q, pairs.model_copy(update={"memory": given.needs}))
    assert {c.tp for c in splits(q.facts, 8, 2) if c.ep == 4} == {1, 2}
    found = [p for p in q.finder.best(8, 16).values() if p.needs <= given.needs]
    assert min(p.step_seconds for p in found) <= given.step_seconds


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.relu(self.norm(self.a(x))))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_convolutional_net_gets_plans() -> None:
    found = shardc.plan(
        Convolutions(),
        {"x": torch.zeros(8, 3, 8, 8)},
        devices=2,
        loss=lambda y, _: y.logsumexp(1).mean(),
        precision="float32",
    )
    assert {c.devices for c in found.candidates} == {1, 2}  # so few ops are quicker on one
    assert found.best.step_seconds == min(c.step_seconds for c in found.candidates if c.fits)
    assert any(c.spec.data.zero for c in found.candidates)


# --- answers


@pytest.mark.parametrize("power", [1, 2])
def test_the_largest_number_is_solved(power: int) -> None:
    calls = []

    def peak(n: int) -> float:
        calls.append(n)
        return 1e6 + 3.0 * n**power

    assert largest(peak, 1e6 + 3.0 * 1234.5**power, 4)[0] == 1234
    assert len(calls) < 12
    assert {1234, 1235} <= set(calls)


def test_the_largest_number_is_solved_where_memory_goes_up_in_steps() -> None:
    """As what an allocator reserves does: near the answer the curve says nothing."""
    most, priced = largest(lambda n: 1e6 + 100.0 * (n // 40) + (n * 7919) % 13, 1e6 + 100.0 * 30.5, 4)
    assert most == 1239
    assert len(priced) < 24


def test_nothing_is_the_largest() -> None:
    assert largest(lambda n: 10.0, 5.0, 8)[0] == 0


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    answer = blocks().answers["largest batch"]
    assert answer["needs_bytes"] <= blocks().target.usable < answer["next_needs_bytes"]
    assert answer["next"] == answer["value"] + answer["step"]


@pytest.mark.parametrize(("longest", "next_is_priced"), [(1 << 20, True), (200, False)])
def test_the_longest_sequence_fits_and_the_next_does_not(longest: int, next_is_priced: bool) -> None:
    """Of a model that takes any length, and of one with a table of positions."""

    class Placed(Stack):
        def __init__(self) -> None:
            super().__init__(1)
            self.places = nn.Parameter(torch.zeros(longest, 64))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.h[0](self.table(ids) + (self.places[: ids.shape[1]] if longest < 1 << 20 else self.places[0]))
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    with torch.device("meta"):
        model, batch = Placed(), {"ids": torch.empty(16, 32, dtype=torch.long)}
    little = H100.model_copy(update={"memory": 3e9})
    found = shardc.plan(
        model, batch, device=little, given={"shardc": 1, "mesh": {"dp": 2}}, largest="sequence", precision="float32"
    )
    answer = found.answers["largest sequence"]
    assert answer["value"] % answer["step"] == 0
    assert answer["next"] == answer["value"] + answer["step"]
    assert answer["needs_bytes"] <= found.target.usable
    assert (answer["next_needs_bytes"] is not None) == next_is_priced
    long = {"ids": torch.empty(16, answer["value"], dtype=torch.long, device="meta")}
    whole = shardc.compile(model, long, answer["spec"], prove=False).cost(little)
    assert answer["needs_bytes"] == pytest.approx(whole.reserved + whole.outside, rel=0.02)
    if next_is_priced:
        assert answer["next_needs_bytes"] > found.target.usable
    else:
        assert answer["value"] == longest


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}], ids=["dp", "pp"])
def test_the_deepest_model_fits_and_one_more_layer_does_not(mesh: dict[str, int]) -> None:
    model, batch = large().runs.subject.model, large().runs.subject.batch
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh}
    spec |= {"pipeline": {"axis": "pp"}, "batch": {"microbatches": 2}} if "pp" in mesh else {}
    little = H100.model_copy(update={"memory": 12e9})
    found = shardc.plan(model, batch, device=little, given=spec, largest="model", precision="float32")
    answer = found.answers["largest model"]
    assert answer["needs_bytes"] <= found.target.usable < answer["next_needs_bytes"]
    assert answer["value"] > 9
    with torch.device("meta"):
        deep = Stack(answer["value"], 1024, 16384)
    whole = shardc.compile(deep, batch, answer["spec"], prove=False).cost(little)
    assert answer["needs_bytes"] == pytest.approx(whole.reserved + whole.outside, rel=0.06)


def test_a_model_without_equal_layers_has_no_deepest() -> None:
    with pytest.raises(shardc.ShardcError, match="the model has no long list of equal layers") as e:
        shardc.plan(
            nn.Linear(4, 1),
            torch.zeros(8, 4),
            given={"shardc": 1, "mesh": {"dp": 2}},
            largest="model",
            loss=lambda y, _: y.sum(),
        )
    assert e.value.fix == "use --largest batch"


def test_given_specs_are_priced_side_by_side(folder: Path, tmp_path: Path) -> None:
    """The fastest that fits is the first, in whatever order they are named."""
    files = []
    for i, mesh in enumerate(("{dp: 1}", "{dp: 8}")):
        files.append(tmp_path / f"{i}.yaml")
        files[-1].write_text(f"shardc: 1\nmesh: {mesh}\n")
    alone = [call("plan", str(folder / "model.py"), "--given", str(f), "--json") for f in files]
    both = call("plan", str(folder / "model.py"), "--given", str(files[1]), "--given", str(files[0]), "--json")
    assert both.exit_code == 0, both.output
    seconds = [json.loads(x.stdout)["candidates"][0]["step_seconds"] for x in alone]
    assert [c["step_seconds"] for c in json.loads(both.stdout)["candidates"]] == sorted(seconds)


def test_the_cheapest_of_several_clusters(folder: Path) -> None:
    """A slower device may be cheaper by the row; without prices the fastest is the best."""
    given = str(folder / "one.yaml")
    Path(given).write_text("shardc: 1\nmesh: {dp: 2}\n")
    asked = ("plan", str(folder / "model.py"), "--given", given, "--device", "a100-80g", "--device", "b200", "--json")

    def answer(*more: str) -> Any:
        done = call(*asked, *more)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    free, cheap = answer(), answer("--price", "a100-80g=1", "--price", "b200=50")
    by = {x["device"]: x for x in cheap["answers"]["clusters"]["clusters"]}
    fastest = min(by.values(), key=lambda x: x["step_seconds"])["device"]
    assert free["device"] == free["answers"]["clusters"]["value"] == fastest
    assert cheap["device"] == "a100-80g"
    assert by["a100-80g"]["price_per_row"] == pytest.approx(2 / 3600 * by["a100-80g"]["step_seconds"] / 8)
    shown = call(*asked[:-1], "--price", "a100-80g=1", "--price", "b200=50")
    assert "clusters, the cheapest first" in shown.stdout


def test_rows_without_a_sequence_have_no_longest() -> None:
    with pytest.raises(shardc.ShardcError, match="the inputs have no sequence dim in common") as e:
        shardc.plan(
            nn.Linear(4, 1),
            torch.zeros(8, 4),
            given={"shardc": 1, "mesh": {"dp": 2}},
            largest="sequence",
            loss=lambda y, _: y.sum(),
        )
    assert e.value.fix == "use --largest batch"


def test_fewest_devices() -> None:
    assert blocks().answers["fewest devices"]["value"] == 1


def test_nothing_fits(tmp_path: Path) -> None:
    model, batch = stack(2)
    tiny = H100.model_copy(update={"memory": 1e5})
    found = shardc.plan(model, batch, devices=2, device=tiny)
    with pytest.raises(
        shardc.ShardcError, match=r"nothing fits into 97\.7 KiB of h100-80g: the nearest .* needs .* more than that"
    ) as e:
        _ = found.best
    assert "--fewest" in e.value.fix


# --- files and the command line


def test_the_spec_is_annotated_and_loads(tmp_path: Path) -> None:
    text = blocks().spec()
    assert Spec.parse(text) == blocks().best.spec
    for section in Spec.parse(text).to_dict():
        if section != "shardc":
            before = text[: text.index(f"\n{section}:")].splitlines()[-1]
            assert before.startswith("# "), section


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    (made / "model.py").write_text(FILE)
    return made


def test_from_a_file_to_a_verified_spec(folder: Path) -> None:
    """Of devices so slow that two are faster than one, even for a small model."""
    model, written, slow = str(folder / "model.py"), folder / "spec.yaml", folder / "slow.yaml"
    link = {"bandwidth": 1e12, "latency": 0.0}
    machine = {"name": "slow", "memory": 80e9, "flops": {"float32": 1e9, "bfloat16": 1e9}, "bandwidth": 1e9}
    slow.write_text(json.dumps({**machine, "within": link, "between": link}))
    done = call("plan", model, "--devices", "2", "--device", str(slow), "-o", str(written))
    assert done.exit_code == 0, done.output
    assert "limited by" in done.stdout
    assert "choices considered" in done.stdout
    assert call("compile", model, str(written)).exit_code == 0
    assert call("verify", model, str(written)).exit_code == 0
    priced = call("plan", model, "--given", str(written), "--json")
    assert priced.exit_code == 0, priced.output
    found = json.loads(priced.stdout)
    (one,) = found["candidates"]
    assert found["devices"] == 2
    assert one["fits"] is True
    assert one["peak_bytes"] == pytest.approx(sum(one["memory"].values()), abs=10)
    assert one["peak_bytes"] < one["reserved_bytes"] <= 80e9 - one["outside_bytes"]
    assert sum(one["shares"].values()) == pytest.approx(1)
    shown = call("plan", model, "--given", str(written), "--html", str(folder / "plan.html"))
    assert "memory of a device" in shown.stdout
    assert (folder / "plan.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--given", "none.yaml"), "this spec file does not exist"),
        ((), "the number of devices is missing"),
        (("--devices", "0"), "0 devices"),
        (("--devices", "2", "--device", "h1"), "there is no device 'h1'"),
        (("--devices", "2", "--precision", "bf16"), "unknown precision 'bf16'"),
        (("--devices", "2", "--price", "much"), "must be NAME=PRICE, not 'much'"),
        (("--devices", "2", "--device", "b200", "--device", "l40s", "--price", "h=1"), "a price of 'h'"),
        (("--devices", "2", "--headroom", "2"), "headroom 2.0 is not a share"),
        (("--devices", "2", "--global-batch", "0"), "a global batch of 0 rows"),
        (("--devices", "2", "--largest", "all"), "cannot search for the largest 'all'"),
    ],
)
def test_wrong_options(folder: Path, args: tuple[str, ...], what: str) -> None:
    done = call("plan", str(folder / "model.py"), *args)
    assert done.exit_code == 2, done.output
    assert what in " ".join(done.output.split())
    assert "fix:" in done.output


def test_a_batch_that_cannot_be_spread() -> None:
    q = planner(Convolutions(), {"x": torch.zeros(8, 3, 8, 8)}, loss=lambda y, _: y.logsumexp(1).mean())
    q.runs.subject.loss = lambda y, _: y.logsumexp(1).mean()
    with pytest.raises(shardc.ShardcError, match="a global batch of 1 rows cannot be spread over 7 devices"):
        q.search(7, 1)


def test_a_compiled_folder_is_no_model(tmp_path: Path) -> None:
    done = call("plan", str(tmp_path), "--devices", "2")
    assert done.exit_code == 2
    assert "already has its spec" in done.output


# --- the model with few of its layers


def test_layers_that_alternate_are_kept_in_pairs() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.h = nn.ModuleList([Block(8), *(nn.Linear(8, 8) if i % 2 else Block(8) for i in range(13))])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.h:
                x = layer(x)
            return x.square().mean()

    with torch.device("meta"):
        subject = Subject(Alternating(), torch.empty(4, 8))
    assert subject.layers is not None
    assert (subject.layers.name, subject.layers.first, subject.layers.period, subject.layers.number) == ("h", 1, 2, 14)
    assert len({p.fqn for p in subject.captured(2, 5).params}) < len(list(subject.model.parameters()))


def test_a_model_that_counts_its_layers_is_priced_whole() -> None:
    class Counting(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for i in range(8):
                x = self.h[i](x)
            return x.square().mean()  # type: ignore[no-any-return]

    with torch.device("meta"):
        q = planner(Counting(8), {"ids": torch.empty(4, 8, dtype=torch.long)})
    assert q.runs.subject.layers is None
    found = price(q.library, Spec.load({"shardc": 1, "mesh": {"dp": 2}}), 4)
    subject = q.runs.subject
    whole = shardc.compile(subject.model, subject.example(4), {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    assert found.step_seconds == pytest.approx(whole.cost(H100).step_seconds, rel=1e-12)


def test_a_choice_is_a_spec() -> None:
    c = Choice(
        pp=2, dp=2, tp=2, sequence_parallel=True, zero=1, rows=1, microbatches=4, checkpoint="half", schedule="zb-h1"
    )
    made = Spec.load(spec(c, stacked().facts, (3, 3)))
    assert made.mesh.world == 8
    assert c.batch == 8
    assert made.checkpoint[0].budget == 0.5
    assert replace(c, pp=1, schedule="1f1b").mesh == {"dp": 2, "tp": 2}


def test_an_encoder_gets_a_mesh_whose_data_ranks_are_all_ranks() -> None:
    shard = {"use": "structure"}
    facts = Facts(8, 16, 16, {}, None, "float32", 0, 4, shard, encoders=("vision",))
    wide = spec(Choice(dp=4, outer=2, tp=2, encoder_rows=True), facts)
    assert list(wide["mesh"].items()) == [("dp_outer", 2), ("dp", 2), ("tp", 2)]
    assert wide["parts"] == {"vision": {"modules": "vision", "mesh": {"dp_outer": 2, "dp": 4}}}
    alone = spec(Choice(tp=4, encoder_rows=True), facts)
    assert (alone["mesh"], alone["parts"]["vision"]["mesh"]) == ({"dp": 1, "tp": 4}, {"dp": 4})
    assert "parts" not in spec(Choice(dp=4, encoder_rows=True), facts)
