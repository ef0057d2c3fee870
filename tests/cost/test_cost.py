"""program.cost: predicted peaks are measured ones; schedules, devices, errors. (Figures of papers: test_papers.py.)"""

from __future__ import annotations

import ast
import copy
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.cost import Cost, device
from shardc.cost.dry_run import dry_run
from shardc.cost.measured.device_file import measured_file
from shardc.ir.repeats import layer_lists, with_layers
from shardc.machine.flops import moved_by
from shardc.machine.work import Op
from tests import live_bytes, zoo
from tests.gpt3 import gpt3

aten = torch.ops.aten
MEGATRON = {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row"}
SPLIT = {"h.*": {1: "tp"}}


@functools.cache
def captured() -> tuple[Any, Any, Program]:
    model, batch = gpt3()
    return model, batch, capture(model, batch, prove=False)


@functools.cache
def _cost(spec: str) -> Cost:
    model, batch, program = captured()
    return shardc.compile(model, batch, {"shardc": 1, **ast.literal_eval(spec)}, captured=program).cost()


def cost(mesh: dict[str, int], **spec: Any) -> Cost:
    """Of the small GPT-3; the same one for the same spec."""
    return _cost(repr({"mesh": mesh, **spec}))


def test_what_a_random_state_keeps_is_no_activation() -> None:
    """Its key, and vectors of indices: of the steps that come, too."""
    model, batch = zoo.gpt(torch.float32, dropout=0.1)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "batch": {"microbatches": 4}}, prove=False)
    drawn = [x for x in dry_run(program).resident if x.op in ("dropout", "attention")]
    assert {x.kind for x in drawn} == {"buffers"}
    assert [x.nbytes for x in drawn if x.dtype == torch.int64] == [24]


@functools.cache
def gpt3_175b() -> Cost:
    model, batch = gpt3(layers=3, hidden=12288, heads=96, sequence=2048, vocab=51200, batch=5)
    return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False).cost()


# --- predicted and measured peaks; all models and settings: tests/bench/memory.py, docs/measured/memory.md

SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"dp": 1}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.1}},
    "1f1b": {"mesh": {"pp": 2}, "batch": {"microbatches": 4}, "pipeline": {"axis": "pp", "schedule": "1f1b"}},
    "zb-v": {"mesh": {"pp": 2}, "batch": {"microbatches": 4}, "pipeline": {"axis": "pp", "schedule": "zb-v"}},
    "budget": {"mesh": {"dp": 1}, "checkpoint": [{"match": "h.*", "budget": 0.5}]},
    "bf16": {
        "mesh": {"dp": 2},
        "data": {"zero": 1, "bucket_mb": 0.1},
        "precision": {"compute": "bfloat16"},
        "batch": {"microbatches": 2},
    },
    "zero 2, 1f1b": {
        "mesh": {"pp": 2, "dp": 2},
        "batch": {"microbatches": 4},
        "pipeline": {"axis": "pp"},
        "data": {"zero": 2, "bucket_mb": 0.05},
    },
    "bf16 1f1b": {
        "mesh": {"pp": 2},
        "batch": {"microbatches": 4},
        "pipeline": {"axis": "pp"},
        "precision": {"compute": "bfloat16"},
    },
    "loss scale": {"mesh": {"dp": 1}, "precision": {"compute": "float16", "loss_scale": 16.0}},
    "state on the host": {
        "mesh": {"dp": 2},
        "data": {"zero": 3, "bucket_mb": 0.1, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    },
    "activations on the host": {
        "mesh": {"dp": 1},
        "checkpoint": [{"match": "h.*", "save": ["linear"], "offload": "cpu"}],
    },
    "activations on the host, microbatches": {
        "mesh": {"dp": 2},
        "batch": {"microbatches": 2},
        "checkpoint": [{"match": "h.*", "save": ["linear", "attention"], "offload": "cpu"}],
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_predicted_peak_is_the_measured_one(setting: str) -> None:
    model, batch = zoo.gpt(torch.float32, dropout=0.1)
    program = shardc.compile(model, batch, {"shardc": 1, **SETTINGS[setting]}, prove=False)
    found, real = program.cost(), live_bytes.watched(program, model, batch)
    for r in found.ranks:
        here = [x for rank, x in enumerate(real) if not program.axis or program.mesh.coords(rank)[program.axis] == r.at]
        assert r.memory.peak == pytest.approx(max(x.peak for x in here), rel=0.01)
        assert r.memory.host == max(x.outside_peak for x in here)
    assert (found.memory.host > 0) == ("host" in setting)
    assert sum(found.memory.kinds.values()) == found.memory.peak
    assert found.memory.op or found.memory.part == "update"


class Spelling(nn.Module):
    """A loss the size of whose alignments hangs on the targets' lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor, frames: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        logits = self.linear(x).log_softmax(-1).transpose(0, 1)
        return torch.nn.functional.ctc_loss(logits, targets, frames, lengths)


def test_alignments_of_the_longest_targets() -> None:
    n, t, s = 16, 128, 40
    batch = (torch.randn(n, t, 64), torch.randint(1, 32, (n, s)), torch.full((n,), t), torch.full((n,), s))
    program = shardc.compile(Spelling(), batch, {"shardc": 1, "mesh": {"dp": 2}})
    assert program.cost().memory.peak == pytest.approx(live_bytes.measured(program, Spelling(), batch)[0], rel=0.01)


def test_clipping_gradients() -> None:
    model, batch = zoo.gpt(torch.float32)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    assert program.cost(clip_norm=1.0).memory.peak == pytest.approx(
        live_bytes.measured(program, model, batch, clip_norm=1.0)[0], rel=0.01
    )


def test_a_gpu_updates_all_parameters_at_once() -> None:
    """In one kernel, with nothing beside them; op by op (foreach), with something as large as they are; on a CPU, as
    one of them.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    program = shardc.compile(
        model, torch.randn(1, 64), {"shardc": 1, "mesh": {"dp": 1}}, loss=lambda y, x: y.sum(), prove=False
    )
    one = 64 * 64 * 4
    cpu = device("h100-80g").model_copy(update={"kind": "cpu"})

    def peak(device: Any = None, **how: bool) -> int:
        """Of the update, in parameters of this size."""
        make = lambda params: torch.optim.AdamW(params, lr=1e-3, **how)  # noqa: E731
        return round(program.cost(device or "h100-80g", optimizer=make).memory.peak / one)

    assert peak() == peak(fused=True) == 8 * 4
    assert peak(foreach=True) == 8 * 5
    assert 8 * 4 < peak(cpu) < 8 * 5
    assert live_bytes.measured(program, model, torch.randn(1, 64))[0] == pytest.approx(
        program.cost().memory.peak, rel=0.01
    )


def test_on_a_cpu_its_own_memory_is_no_other_place() -> None:
    model, batch = zoo.gpt(torch.float32)
    cpu = device("h100-80g").model_copy(update={"kind": "cpu"})

    def peak(place: str) -> tuple[int, int]:
        spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 1, "offload": {"optimizer": place}}}
        found = shardc.compile(model, batch, spec, prove=False).cost(cpu).memory
        return found.peak, found.host

    (here, none), (files, mapped) = peak("cpu"), peak("/nowhere")
    assert none == 0
    assert here - files == pytest.approx(mapped, rel=0.01)


def test_checkpointing_a_stack_shows_the_measured_ratio() -> None:
    """The classic demo: Linear-ReLU blocks with and without recomputation."""
    torch.manual_seed(0)
    block = [torch.nn.Linear(32, 32), torch.nn.ReLU()]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*copy.deepcopy(block * 4)) for _ in range(4)))
    batch = torch.randn(512, 32)

    def peaks(**spec: Any) -> tuple[int, int]:
        program = shardc.compile(
            model, batch, {"shardc": 1, "mesh": {"dp": 1}, **spec}, loss=lambda y, x: y.square().mean(), prove=False
        )
        return program.cost().memory.peak, live_bytes.measured(program, model, batch)[0]

    (predicted, measured), (less, measured_less) = peaks(), peaks(checkpoint=[{"match": "{0,1,2,3}"}])
    assert less / predicted == pytest.approx(measured_less / measured, rel=0.02)
    assert less < 0.9 * predicted


# --- time


def test_a_faster_device_takes_less_time() -> None:
    program = gpt3_175b().program
    one, other = program.cost("a100-80g"), gpt3_175b()
    assert other.step_seconds < one.step_seconds < 8 * other.step_seconds
    assert one.memory.peak == other.memory.peak
    for memory, fits in ((one.reserved + one.outside, True), (one.memory.peak - 1, False)):
        assert replace(one, device=one.device.model_copy(update={"memory": memory})).fits == fits
    elements = sum(math.prod(p.shape) for p in program.params)
    matmuls = 6 * 5 * 2048 * (elements - 12288 * 2048)  # 6 flops a token and parameter
    assert other.flops == pytest.approx(matmuls, rel=0.05)


def test_communication_is_what_the_program_says() -> None:
    found = cost({"tp": 2}, shard=MEGATRON)
    each = 5 * 40 * 96 * 2  # an activation's bytes
    assert found.comm["tp", "all_reduce"] >= 3 * 4 * each  # two in forward and two in backward of each layer


# --- models of many layers from few


def test_what_layers_take_is_linear_in_their_number() -> None:
    model, batch = gpt3(layers=4)
    whole = capture(model, batch, prove=False)
    assert layer_lists(whole) == {"h": list("0123")}

    def priced(program: Program) -> Cost:
        spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": MEGATRON, "uneven": "pad"}
        return shardc.compile(model, batch, spec, captured=program).cost()

    two, three, four = (priced(with_layers(whole, n)).ranks[0] for n in (2, 3, 4))
    assert 2 * three.memory.peak - two.memory.peak == pytest.approx(four.memory.peak, rel=0.02)
    assert 2 * three.flops - two.flops == four.flops
    assert 2 * three.seconds - two.seconds == pytest.approx(four.seconds, rel=0.02)
    sent = [each.comm["tp", "all_reduce"] for each in (two, three, four)]
    assert 2 * sent[1] - sent[0] == sent[2]


def test_layers_that_others_use_stay() -> None:
    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            every = []
            for layer in self.h:
                x = layer(x)
                every.append(x)
            return torch.stack(every).sum()

    with pytest.raises(shardc.ShardcError, match="of a layer that would be left out"):
        with_layers(capture(Skips(), torch.randn(2, 4), prove=False), 2)


# --- devices


def test_a_causal_mask_leaves_out_the_blocks_that_it_empties() -> None:
    """In blocks of 128 queries and keys: of 1024 × 1024, 36 of 64. Counted flops are those of the whole square."""

    class Attention(torch.nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.causal, self.w = causal, torch.nn.Parameter(torch.ones(()))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            q = q * self.w
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=self.causal).sum()

    def ops(causal: bool) -> list[Op]:
        spec = {"shardc": 1, "mesh": {"dp": 1}}
        program = shardc.compile(Attention(causal), torch.randn(2, 4, 1024, 64), spec, prove=False)
        work = (w for _, part in program.cost().dry_runs[0].actions for w in part.work)
        return [w for w in work if isinstance(w, Op) and w.attention]

    whole, causal = ops(False), ops(True)
    assert [w.flops for w in whole] == [w.flops for w in causal]
    assert len(causal) == 2  # forward and backward
    assert all(w.masked == 0 for w in whole)
    assert all(w.masked == w.flops * 28 // 64 for w in causal)
    h100 = device("h100-80g")
    assert h100.product_seconds(causal[0]) == pytest.approx(h100.product_seconds(whole[0]) * 36 / 64)
    cpu = h100.model_copy(update={"kind": "cpu"})  # whose kernels take 512 keys at once
    assert cpu.product_seconds(causal[0]) == pytest.approx(cpu.product_seconds(whole[0]) * 50 / 64)


@pytest.mark.parametrize(
    ("op", "args", "moved"),
    [
        (aten.add.Tensor, lambda: (torch.ones(8, 16), torch.ones(8, 16)), 3 * 8 * 16 * 4),
        (aten.add.Tensor, lambda: (torch.ones(8, 16), torch.ones(1).expand(8, 16)), 2 * 8 * 16 * 4 + 4),
        (aten.zero_.default, lambda: (torch.ones(8, 16),), 8 * 16 * 4),
        (aten.copy_.default, lambda: (torch.ones(8, 16), torch.ones(8, 16, dtype=torch.float64)), 8 * 16 * 12),
        (aten.embedding.default, lambda: (torch.ones(100, 16), torch.zeros(8, dtype=torch.int64)), 2 * 8 * 16 * 4 + 64),
        (aten.view.default, lambda: (torch.ones(8, 16), [16, 8]), None),
        (aten._unsafe_view.default, lambda: (torch.ones(8, 16), [16, 8]), None),
        (
            aten.nll_loss_backward.default,
            lambda: (
                torch.ones(()),
                torch.ones(8, 100),
                torch.zeros(8, dtype=torch.int64),
                None,
                1,
                -100,
                torch.ones(()),
            ),
            8 * 100 * 4 + 64 + 8,
        ),
    ],
)
def test_an_op_moves_what_it_reads_and_writes(op: Any, args: Any, moved: int | None) -> None:
    operands = args()
    each = moved_by(op, operands, {}, op(*operands))
    assert (each if each is None else sum(nbytes for _, nbytes in each)) == moved


def test_what_products_reach_depends_on_their_shape() -> None:
    """The last round of tiles may have few of them; few steps in k; few results, for which k is cut."""
    h100 = device("h100-80g")
    assert h100.products is not None
    share = h100.products.share
    assert share(8192, 8192, 8192) > share(2048, 2048, 2048) > share(512, 512, 512) > share(64, 64, 64)
    assert share(8192, 8192, 8192) > share(8192, 8192, 256)
    assert share(128, 256, 65536) > 4 * share(128, 256, 1024)
    assert share(1024, 1024, 512, many=16) > 1.3 * share(1024, 1024, 512)
    assert 0.6 < share(8192, 8192, 8192) * h100.reaches.flops < 0.8


def test_a_device_that_is_not_known() -> None:
    with pytest.raises(shardc.ShardcError, match="there is no device 'h100'") as e:
        device("h100")
    assert "h100-80g" in str(e.value)


def test_a_device_file_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(shardc.ShardcError, match="there is no file"):
        device(tmp_path / "none.yaml")
    for text, what in (
        ("[", "this is not YAML"),
        ("3", "a device is a mapping"),
        ("name: x\nmemory: -1", "memory: input should be greater than 0"),
    ):
        file = tmp_path / "device.yaml"
        file.write_text(text)
        with pytest.raises(shardc.ShardcError, match=what):
            device(file)


def test_a_measured_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(shardc.ShardcError, match="this machine's cpu has not been measured") as e:
        device("cpu")
    assert "shardc device cpu --measure" in str(e.value)
    file = measured_file("cpu")
    file.parent.mkdir(parents=True)
    file.write_text(device("h100-80g").model_copy(update={"name": "cpu", "kind": "cpu"}).to_yaml())
    assert device("cpu").kind == "cpu"
    assert cost_on("cpu").step_seconds > 0


def cost_on(which: str) -> Cost:
    return cost({"dp": 1}).program.cost(which)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gathers_that_the_last_update_began_are_under_way_on_all_ranks(microbatches: int) -> None:
    """Each takes a millisecond, all else next to nothing: a step waits for one of them, not for one of each stage."""
    h100 = device("h100-80g")
    slow = h100.model_copy(update={"within": h100.within.model_copy(update={"start": 1e-3}), "host": 0.0})
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), {"input": torch.randn(6, 16)}
    spec = {
        "shardc": 1,
        "mesh": {"pp": 4, "dp": 2},
        "pipeline": {"axis": "pp"},
        "batch": {"microbatches": microbatches},
    }

    def end(zero: int) -> float:
        program = shardc.compile(model, batch, {**spec, "data": {"zero": zero}}, loss=lambda y, _: y.pow(2).mean())
        timeline = program.cost(slow).timeline
        assert timeline is not None
        return timeline.end

    assert end(1) - end(0) == pytest.approx(1e-3, rel=0.1)
