"""Pipelines are equal to one device: every schedule, with dp and tp, whatever crosses between stages, whatever they
share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.runtime.schedule import SCHEDULES
from shardc.verify.simulate import Simulation
from tests import equality, zoo
from tests.equality import Reference, assert_equal
from tests.test_equal import FIRST, SHARD
from tests.zoo import plain, plain_more  # noqa: F401 (its models are in plain.ALL)

BUILD: dict[str, Callable[..., zoo.Built]] = {
    "gpt": functools.partial(zoo.gpt, layers=4),
    "llama": functools.partial(zoo.llama, layers=4),
    "t5": functools.partial(zoo.t5, layers=2),
    **plain.ALL,
    **{name: build for name, build in zoo.ALL.items() if name not in ("gpt", "llama", "t5")},
}
#: A mesh, and microbatches: as many as stages, more, fewer, one, not a multiple.
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "pp=2": ({"pp": 2}, 8),
    "pp=4": ({"pp": 4}, 2),
    "pp=2 dp=2": ({"pp": 2, "dp": 2}, 4),
    "pp=2 tp=2": ({"pp": 2, "tp": 2}, 4),
    "pp=2 tp=2 sp": ({"pp": 2, "tp": 2}, 1),
    "dp=2 pp=2 tp=2": ({"dp": 2, "pp": 2, "tp": 2}, 2),
    "pp=3": ({"pp": 3}, 4),
}
PLAIN = ("pp=2", "pp=4", "pp=2 dp=2", "pp=3")  # for models without a plan


def spec(mesh: dict[str, int], microbatches: int = 1, **more: Any) -> dict[str, Any]:
    """A spec; `cut`, `stages`, `balance` and `schedule` go to its pipeline section."""
    pipeline = {"axis": "pp"} | {k: more.pop(k) for k in ("cut", "stages", "balance", "schedule") if k in more}
    return {"shardc": 1, "mesh": mesh, "pipeline": pipeline, "batch": {"microbatches": microbatches}, **more}


@functools.cache
def one_device(name: str) -> Reference:
    return equality.reference(BUILD[name])


def on(name: str, asked: dict[str, Any]) -> tuple[Program, Simulation]:
    one = one_device(name)
    with zoo.Wide():
        program = one.compile(asked)
        return program, shardc.verify.simulate(program, one.model, one.batch)


def check(name: str, asked: dict[str, Any]) -> Program:
    program, sim = on(name, asked)
    one = one_device(name)
    assert_equal(sim, one.loss, one.grads)
    assert {p.fqn for p in program.params if p.fqn in sim.grads} == set(one.grads)
    return program


# --- models, meshes, schedules

CASES = [
    (name, mesh, tuple(SCHEDULES)[(i + j) % len(SCHEDULES)], sequence)
    for i, (name, meshes) in enumerate({"gpt": MESHES, "llama": MESHES, "t5": MESHES, "unet": PLAIN}.items())
    for j, (mesh, sequence) in enumerate((m, m.endswith("sp")) for m in meshes)
]


@pytest.mark.parametrize(("name", "mesh", "schedule", "sequence"), CASES)
def test_loss_and_gradients_equal_one_device(name: str, mesh: str, schedule: str, sequence: bool) -> None:
    """The batch's rows count different numbers of labels, and so do the microbatches."""
    sizes, microbatches = MESHES[mesh]
    more: dict[str, Any] = {"shard": SHARD[name]} if "tp" in sizes else {}
    if sequence:
        more["activations"] = {FIRST[name]: {1: "tp"}}
    check(name, spec(sizes, microbatches, schedule=schedule, **more))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    check("gpt", spec({"pp": 2, "dp": 2}, 4, schedule=schedule))
    check("gpt", spec({"pp": 4}, 1, schedule=schedule))


def test_a_schedule_of_ones_own(tmp_path: Any) -> None:
    """From a file: stage 0 on the second rank, microbatches backwards."""
    file = tmp_path / "own.txt"
    file.write_text("rank 0: 1F1 1F0 1B0 1B1\nrank 1: 0F1 0F0 0B0 0B1\n")
    program = check("gpt", spec({"pp": 2}, 2, schedule=str(file)))
    assert program.schedule is not None
    assert program.schedule.placement == (1, 0)


def test_encoder_and_decoder_on_different_stages() -> None:
    program = check("t5", spec({"pp": 2, "tp": 2}, 2, cut=["decoder"], schedule="zb-h1", shard=SHARD["t5"]))
    assert [(e.source, e.target, len(e.names)) for e in program.edges] == [(0, 1, 1)]


def test_sixteen_ranks() -> None:
    check("gpt", spec({"dp": 2, "pp": 4, "tp": 2}, 4, schedule="interleaved", shard=SHARD["gpt"]))


@pytest.mark.parametrize("name", ["mlp", "moe", "seq2seq", "lstm", "gru_bidirectional", "dit", "mae", "nerf"])
def test_other_models(name: str) -> None:
    """Recurrent ops have several results; skips, conditions and permutations cross."""
    check(name, spec({"pp": 2}, 2, schedule="zb-h1"))
    check(name, spec({"pp": 2, "dp": 2}, 1, schedule="interleaved"))


@pytest.mark.parametrize(
    ("zero", "schedule"), [(1, "zb-v"), (1, "1f1b"), (2, "interleaved"), (2, "zb-h1"), (3, "zb-v"), (3, "zb-h1")]
)
def test_zero(zero: int, schedule: str) -> None:
    check("gpt", spec({"pp": 2, "dp": 2}, 4, schedule=schedule, data={"axis": "dp", "zero": zero, "bucket_mb": 0.1}))


# --- against the same program on one rank: dropout, precision, several steps


def pair(build: Callable[[], zoo.Built], asked: dict[str, Any], **options: Any) -> tuple[Simulation, Simulation]:
    """(the mesh's, one rank's) simulation."""
    with zoo.Wide():
        model, batch = build()
        alone = {k: v for k, v in asked.items() if k == "precision"}
        one = shardc.verify.simulate(
            shardc.compile(model, batch, {"shardc": 1, "mesh": {}, **alone}, prove=False), model, batch, **options
        )
        return shardc.verify.simulate(shardc.compile(model, batch, asked, prove=False), model, batch, **options), one


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout(schedule: str) -> None:
    asked = spec(
        {"pp": 2, "tp": 2},
        4,
        schedule=schedule,
        shard=SHARD["gpt"],
        activations={"wte": {1: "tp"}} if schedule == "gpipe" else {},
    )
    sim, one = pair(functools.partial(zoo.gpt, dropout=0.2), asked, seed=7)
    assert_equal(sim, one.loss, one.grads)


@pytest.mark.parametrize(
    ("schedule", "data", "checkpoint"),
    [
        ("1f1b", {}, [{"match": "h.*", "save": []}]),
        ("interleaved", {"axis": "dp", "zero": 3}, [{"match": "h.*", "save": ["linear"]}]),
        ("zb-h1", {"axis": "dp", "zero": 3}, [{"match": "h.*", "save": [], "offload": "cpu"}]),
        ("zb-v", {"axis": "dp", "zero": 2, "offload": {"optimizer": "cpu"}}, []),
        ("gpipe", {"axis": "dp", "zero": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, []),
    ],
)
def test_training_with_dropout_recomputation_zero_and_offload(
    schedule: str, data: dict[str, Any], checkpoint: list[Any]
) -> None:
    """Three steps of AdamW: every parameter and every copy."""
    asked = spec({"pp": 2, "dp": 2}, 2, schedule=schedule, **({"data": data} if data else {}), checkpoint=checkpoint)
    sim, one = pair(functools.partial(zoo.gpt, dropout=0.1), asked, steps=3)
    for name, x in one.state.items():
        torch.testing.assert_close(sim.state[name], x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        ("zb-v", {"compute": "bfloat16"}),
        ("1f1b", {"compute": "bfloat16", "params": "bfloat16", "reduce": "float32"}),
        ("zb-h1", {"compute": "float16", "loss_scale": "dynamic"}),
    ],
)
def test_mixed_precision(schedule: str, precision: dict[str, Any]) -> None:
    """What crosses is narrow too. Tolerance: DESIGN section 6."""
    asked = spec({"pp": 2, "dp": 2}, 2, schedule=schedule, precision=precision)
    sim, one = pair(functools.partial(zoo.gpt, dtype=torch.float32), asked, steps=2)
    assert_equal(sim, one.loss, one.grads, rtol=1e-2)


def test_activations_cross_in_the_dtype_they_are_computed_in() -> None:
    model, batch = zoo.gpt(dtype=torch.float32)
    program = shardc.compile(model, batch, spec({"pp": 2}, precision={"compute": "bfloat16"}), prove=False)
    assert [v.dtype for e in program.edges for v in e.values] == [torch.bfloat16]


# --- what crosses


class Crossing(nn.Module):
    """Results of ops with several, views, truth values, integers and a part of the loss go from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 6)
        self.gain = nn.Parameter(torch.ones(12))
        self.register_buffer("offset", torch.linspace(-1, 1, 12), persistent=False)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = self.a(x) * self.gain + self.offset  # [8, 5, 12]
        best, at = h.max(dim=-1)
        left, right = h.split(6, dim=-1)
        odd = (h > 0) & mask.unsqueeze(-1)
        turned = h.transpose(1, 2)
        aux = (h * h).mean()
        values, order = h.sort(dim=1)
        z = torch.tanh(self.b(torch.cat([left, right], dim=-1) * self.gain))
        z = z + odd.to(z.dtype) * torch.gather(z, 2, at.unsqueeze(-1)) + torch.gather(values, 1, order)
        z = self.c(z + self.offset) + (best + at).unsqueeze(-1) + left.detach() + turned.mean(1).unsqueeze(-1)
        return F.mse_loss(torch.where(mask.unsqueeze(-1), z, y), y) + 0.1 * aux


def crossing() -> zoo.Built:
    batch = {"x": plain.real(8, 5, 6), "mask": plain.real(8, 5, seed=3) > 0, "y": plain.real(8, 5, 6, seed=4)}
    return zoo.ready(Crossing(), torch.float64), batch


class Shared(nn.Module):
    """Weights that three stages use; one of them only behind a detach; one that nothing reaches; a frozen one; one that
    is not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other, self.dead, self.unused = (nn.Parameter(torch.empty(8, 8)) for _ in range(4))
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.b.requires_grad_(False)
        self.alias = nn.Linear(8, 8)
        self.alias.weight = self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.tanh(self.a(x @ self.table.detach()))
        h = torch.tanh(self.b(first @ self.dead.detach()))
        h = torch.tanh(self.c(h) @ self.table)
        h = self.d(h) + (self.alias(h) + self.c(first @ self.dead).detach())
        return F.mse_loss(h @ self.table.t() + h @ self.other.detach(), y)


def shared() -> zoo.Built:
    return zoo.ready(Shared(), torch.float64), {"x": plain.real(8, 8), "y": plain.real(8, 8, seed=2)}


class Forked(nn.Module):
    """Losses of three stages, one input everywhere; the second half has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)
        self.three = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.one(x))
        first = F.mse_loss(h[:, :4], y)
        z = self.two(h) + x
        second = F.l1_loss(z, y)
        out = torch.softmax(z * x.exp(), dim=1).log()
        return first + 0.5 * second - (out * y.softmax(1)).sum(1).mean() + x.mean()


def forked() -> zoo.Built:
    return zoo.ready(Forked(), torch.float64), {"x": plain.real(8, 4), "y": plain.real(8, 4, seed=2)}


class Queried(nn.Module):
    """What a stage in the middle computes of parameters alone, which data meets only in the last; a penalty that no
    data meets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(5, 8))
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys = self.a(x)
        q = torch.tanh(self.b(self.queries))
        q = self.c(q) + self.queries
        scores = torch.softmax(keys @ q.t(), -1)
        return F.mse_loss(self.d(scores @ q), y) + 0.1 * self.queries.square().mean()


def queried() -> zoo.Built:
    return zoo.ready(Queried(), torch.float64), {"x": plain.real(8, 8), "y": plain.real(8, 8, seed=2)}


BUILD |= {"crossing": crossing, "shared": shared, "forked": forked, "queried": queried}
CUTS = {"crossing": ["b", "c"], "shared": ["b", "c", "d"], "forked": ["two"], "queried": ["b", "c", "d"]}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", CUTS)
def test_whatever_crosses(name: str, schedule: str) -> None:
    ranks = len(CUTS[name]) + 1
    for sizes, microbatches in (({"pp": ranks}, 4), ({"pp": ranks, "dp": 2}, 1), ({"pp": 1}, 2)):
        check(name, spec(sizes, microbatches, schedule=schedule, cut=CUTS[name]))


@pytest.mark.parametrize("name", CUTS)
def test_every_op_may_be_cut_from_the_next(name: str) -> None:
    """As many stages as can be on two ranks."""
    with pytest.raises(shardc.ShardcError, match="256 stages") as e:
        one_device(name).compile(spec({"pp": 2}, stages=256))
    most = int((e.value.fix or "").split()[2]) // 2 * 2
    check(name, spec({"pp": 2}, 2, stages=most, schedule="interleaved"))
    check(name, spec({"pp": most // 2}, 1, stages=most, schedule="zb-v"))


def test_the_lines_of_one_op_stay_on_one_stage() -> None:
    """A softmax over split classes is several lines: the proof knows them as one op."""
    of_classes = {"sequence": {"axis": "cp", "method": "auto"}, "mesh": {"pp": 2, "cp": 2}}
    with pytest.raises(shardc.ShardcError, match="256 stages") as e:
        one_device("forked").compile(spec({"pp": 2}, stages=256) | of_classes)
    most = int((e.value.fix or "").split()[2]) // 2 * 2
    for stages in range(2, most + 1, 2):
        program = one_device("forked").compile(spec({"pp": 2}, 2, stages=stages, schedule="interleaved") | of_classes)
        assert (proof := program.prove()).ok, str(proof)


def test_what_only_a_choice_reads_needs_no_gradient() -> None:
    """The nearest codes of a quantiser are on a stage of their own: what leaves it is integers."""
    asked = spec({"pp": 3, "tp": 2}, 3, stages=6, schedule="interleaved", uneven="pad", shard={"use": "structure"})
    assert (proof := one_device("vector_quantiser").compile(asked).prove()).ok, str(proof)


def test_only_what_the_loss_asks_gets_gradients_back() -> None:
    """Integers, truth values and what is detached where it is used go one way; each stage gets what it uses from where
    it is made.
    """
    program = one_device("crossing").compile(spec({"pp": 3}, cut=CUTS["crossing"]))
    values = {name: v for e in program.edges for name, v in zip(e.names, e.values, strict=True)}
    assert {v.dtype for v in values.values()} == {torch.float64, torch.int64, torch.bool}
    assert {v.shape for v in values.values() if not v.shape} == {()}  # a part of the loss
    assert {n for n, v in values.items() if not v.requires_grad} == {
        n for n, v in values.items() if not v.dtype.is_floating_point or n.startswith("detach")
    }
    late = one_device("shared").compile(spec({"pp": 4}, cut=CUTS["shared"]))
    assert {(e.source, e.target): e.gradient for e in late.edges}[0, 3] is False
    sent = [
        c
        for c in shardc.verify.simulate(late, *_of("shared")).comms
        if c.kind == "send_recv" and c.direction == "backward"
    ]
    assert sent == []  # the first rank sends no gradients at all


def _of(name: str) -> tuple[nn.Module, Any]:
    return one_device(name).model, one_device(name).batch


# --- what stages share


def test_shared_weights_are_in_the_plan() -> None:
    """A copy a rank, initialised alike, gradients summed: tied embedding and head; none where one rank has both ends
    (zb-v).
    """
    program = one_device("gpt").compile(spec({"pp": 4}))
    assert (
        program.notes[-1]
        == "wte.weight is used by stages 0, 3: each rank of pp[0,3] has a copy, and their gradients are summed"
    )
    (bucket,) = [b for b in program.buckets if b.axes]
    assert (bucket.axes, bucket.params, bucket.late) == (("pp[0,3]",), ("wte_weight",), True)
    assert "#   wte.weight = head.weight  f64[128, 64]  sum over pp[0,3], bucket 0" in program.text(full=True)
    folded = one_device("gpt").compile(spec({"pp": 2}, schedule="zb-v"))
    assert not [b for b in folded.buckets if b.axes]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_copies_stay_equal_whatever_reaches_them(zero: int) -> None:
    """A copy whose stage brings no gradient is updated as the others; what nothing reaches is not updated at all, as on
    one device.
    """
    asked = spec({"pp": 4, "dp": 2}, 2, cut=CUTS["shared"], **({"data": {"axis": "dp", "zero": zero}} if zero else {}))
    sim, one = pair(shared, asked, steps=3)
    assert set(sim.grads) == set(one.grads)
    assert not {"dead", "unused", "b.weight"} & set(sim.grads)
    for name, x in one.state.items():
        torch.testing.assert_close(sim.state[name], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("name", ["resnet_bn", "pointnet", "self_supervised", "spectral"])
def test_buffers(name: str, schedule: str) -> None:
    """Running statistics, counters and power iterations; of a module that two stages run, both ranks have the new
    value.
    """
    sim, one = pair(BUILD[name], spec({"pp": 2, "dp": 2}, schedule=schedule), steps=2)
    for fqn, x in one.state.items():
        torch.testing.assert_close(sim.state[fqn], x, rtol=0, atol=1e-9)


def test_a_buffer_that_stages_share_is_sent_after_the_step() -> None:
    model, batch = BUILD["self_supervised"]()
    program = shardc.compile(model, batch, spec({"pp": 2}), prove=False)
    assert "net.1.running_mean is updated by stage 1, and sent after the step: pp 1 -> 0" in program.notes


def test_batch_norm_needs_the_whole_batch() -> None:
    model, batch = zoo.resnet_bn()
    with pytest.raises(shardc.ShardcError, match="takes all rows of the batch"):
        shardc.compile(model, batch, spec({"pp": 2}, 2), prove=False)


# --- what a program shows


def test_the_program_shows_its_stages(golden: Callable[[str, str], None]) -> None:
    program = one_device("forked").compile(spec({"pp": 2}, 2, cut=["two"]))
    golden("pipeline.txt", program.text(full=True))
