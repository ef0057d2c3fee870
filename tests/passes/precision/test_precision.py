"""Mixed precision: what runs in which dtype, equality with one device, collectives of half the bytes, loss scaling on
all ranks alike.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.ir import types as values
from shardc.ir.mesh import Mesh
from shardc.passes.precision import Precision
from shardc.passes.precision.op_lists import CASTS, LOOKUPS, LOW, MOVES, NARROWED, PROMOTE, WIDE, is_wide
from shardc.runtime import launch
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state.parts import gather
from shardc.runtime.step.loss_scale import INTERVAL, LossScaler
from shardc.spec import Spec
from shardc.verify.simulate import Simulation
from tests import warm, zoo
from tests.equality import OF_BUCKETS
from tests.zoo import plain as plain_zoo
from tests.zoo import plain_gradients, plain_more  # noqa: F401 (they fill the zoo)

BF16 = {"precision": {"compute": "bfloat16"}}
#: DESIGN section 6, for the loss and the whole gradient. A single parameter's gradient averages fewer roundings: twice
#: that, and measured against 5 % of the whole where it nearly cancels.
RTOL, RTOL_ONE, FLOOR = 1e-2, 2e-2, 0.05


def smooth_t5() -> tuple[nn.Module, Any]:
    """T5 1.1, with gelu: relu's gradient jumps, and 3 % of a small model's gradient is then the rounding that decides
    on which side of 0 a unit lies, in eager bf16 just the same.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=zoo.VOCAB,
        d_model=zoo.HIDDEN,
        d_kv=zoo.HIDDEN // zoo.HEADS,
        d_ff=4 * zoo.HIDDEN,
        num_layers=2,
        num_heads=zoo.HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return zoo.ready(T5ForConditionalGeneration(config), torch.float32), {
        "input_ids": zoo.tokens(),
        "labels": zoo.labels(),
    }


def calm(name: str) -> tuple[nn.Module, Any]:
    """A model of the zoo in float32, initialised as people do: activations of ordinary size, for which 8 bits of
    mantissa do.
    """
    model, batch = smooth_t5() if name == "t5" else zoo.ALL[name](dtype=torch.float32)
    with torch.no_grad():
        for fqn, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(0.5)
            if name == "t5" and fqn.endswith(".q.weight"):  # T5 scales queries in the weight, by sqrt(d_kv)
                p.mul_((zoo.HIDDEN // zoo.HEADS) ** -0.5)
    return model, batch


@dataclass(frozen=True)
class One:
    """A model on one device in bf16: the program on a mesh of one rank."""

    model: nn.Module
    batch: Any
    captured: Program
    sim: Simulation

    def compile(self, **spec: Any) -> Program:
        return shardc.compile(self.model, self.batch, {"shardc": 1, **spec}, captured=self.captured)

    def on(self, **spec: Any) -> Simulation:
        return shardc.verify.simulate(self.compile(**spec), self.model, self.batch)


@functools.cache
def one(name: str) -> One:
    model, batch = calm(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own
        captured = capture(model, batch)
    program = shardc.compile(model, batch, {"shardc": 1, **BF16}, captured=captured)
    return One(model, batch, captured, shardc.verify.simulate(program, model, batch))


def assert_close(loss: Tensor, grads: dict[str, Tensor], to: Simulation, factor: float = 1.0) -> None:
    whole = float(torch.stack([to.grads[n].float().norm() for n in grads]).norm())
    off = {n: float((g - to.grads[n]).float().norm()) for n, g in grads.items()}
    assert abs(float(loss - to.loss)) <= RTOL * abs(float(to.loss))
    assert sum(e**2 for e in off.values()) ** 0.5 <= factor * RTOL * whole
    assert not {
        n: e
        for n, e in off.items()
        if not e <= factor * RTOL_ONE * max(float(to.grads[n].float().norm()), FLOOR * whole)
    }


SEQUENCE = {
    "gpt": ["h.*"],
    "llama": ["model.layers.*"],
    "bert": ["bert.encoder.layer.*"],
    "t5": ["encoder.block.*", "decoder.block.*"],
}
MESHES: list[tuple[dict[str, int], bool]] = [
    ({"dp": 2}, False),
    ({"tp": 2}, False),
    ({"dp": 2, "tp": 2}, False),
    ({"dp": 2, "tp": 2}, True),
]


def split(name: str, mesh: dict[str, int], sequence: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"mesh": mesh}
    if "tp" in mesh:
        spec["shard"] = {"use": "structure"}
    if sequence:
        spec["activations"] = {pattern: {1: "tp"} for pattern in SEQUENCE[name]}
    return spec


def ops_of(program: Program) -> dict[str, list[tuple[str, torch.dtype]]]:
    """Op -> (module, dtype of its result) of the graph of one device."""
    found: dict[str, list[tuple[str, torch.dtype]]] = {}
    for n in program.graph.nodes:
        v = n.meta.get("value")
        if n.op == "call_function" and not isinstance(v, tuple):
            found.setdefault(values.op_name(n.target), []).append((n.meta["source"].module, v.dtype))
    return found


def dtypes_of(program: Program, *names: str) -> set[torch.dtype]:
    found = ops_of(program)
    assert set(names) <= set(found), f"the program has no {set(names) - set(found)}"
    return {d for n in names for _, d in found[n]}


# --- equality


@pytest.mark.parametrize(("mesh", "sequence"), MESHES, ids=["dp2", "tp2", "dp2xtp2", "dp2xtp2+sp"])
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5", "resnet_bn"])
def test_follows_one_device_in_bf16(name: str, mesh: dict[str, int], sequence: bool) -> None:
    if sequence and name not in SEQUENCE:
        assert name == "resnet_bn"  # it has no sequence
        return
    single = one(name)
    sim = single.on(**split(name, mesh, sequence), **BF16)
    assert_close(sim.loss, sim.grads, single.sim)
    assert {g.dtype for g in sim.grads.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5", "resnet_bn"])
def test_follows_autocast(name: str) -> None:
    """The looser reference: eager torch rounds in other places (its residual sums stay float32), so twice the
    tolerance.
    """
    single = one(name)
    model, batch = single.model, single.batch
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**batch)
    loss = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.loss
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, [dict(model.named_parameters())[n] for n in names])
    assert_close(loss.detach().float(), dict(zip(names, grads, strict=True)), single.sim, factor=2.0)


def test_weights_after_steps() -> None:
    """The optimizer works on float32 weights: five steps of a learning rate that bfloat16 weights would not see."""
    single = one("gpt")

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)

    def after(**spec: Any) -> Simulation:
        return shardc.verify.simulate(
            single.compile(**spec, **BF16), single.model, single.batch, steps=5, optimizer=sgd
        )

    ones, many = after(), after(**split("gpt", {"dp": 2, "tp": 2}))
    before = dict(single.model.named_parameters())
    for n, w in ones.state.items():
        assert w.dtype == torch.float32
        moved = w - before.get(n, before["wte.weight"]).detach()
        assert float((many.state[n] - w).norm()) <= RTOL_ONE * max(float(moved.norm()), 1e-6)
    w = before["h.0.fc.weight"].detach()
    assert not torch.equal(ones.state["h.0.fc.weight"], w)
    assert float((ones.state["h.0.fc.weight"] - w).abs().max()) < 2**-9 * float(w.abs().max())


@pytest.mark.parametrize(
    ("name", "sequence"), [("gpt", False), ("gpt", True), ("llama", False), ("llama", True), ("t5", False)]
)
def test_activations_take_half_the_bytes(name: str, sequence: bool) -> None:
    single, spec = one(name), split(name, {"tp": 2}, sequence)

    def sent(**precision: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for c in single.on(**spec, **precision).comms:
            if "loss over split classes" not in c.cause and c.cause not in OF_BUCKETS:
                found.setdefault(f"{c.kind} {c.direction}", []).append(c.bytes)
        return found

    narrow, wide = sent(**BF16), sent()
    big = zoo.BATCH * zoo.SEQ * zoo.HIDDEN * 4
    assert {k: len(v) for k, v in narrow.items()} == {k: len(v) for k, v in wide.items()}
    assert sum(map(sum, wide.values())) > 8 * big
    assert {k: [b for b in v if b >= big // 2] for k, v in narrow.items()} == {
        k: [b // 2 for b in v if b >= big] for k, v in wide.items()
    }


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=["dp2", "dp2xtp2"])
def test_zero_in_bf16(zero: int, mesh: dict[str, int]) -> None:
    """Master weights are cut; what is gathered of them is the compute dtype, where nothing else needs them."""
    single = one("gpt")
    program = single.compile(**split("gpt", mesh), **BF16, data={"zero": zero})
    sim = shardc.verify.simulate(program, single.model, single.batch)
    assert_close(sim.loss, sim.grads, single.sim)
    assert {w.dtype for w in sim.state.values()} == {torch.float32}
    low = {n for b in program.buckets if b.compute == torch.bfloat16 for n in b.params}
    assert {"h_0_qkv_weight", "h_0_fc_weight", "h_1_out_bias"} <= low
    assert not low & {"wpe_weight", "h_0_ln_1_weight", "ln_f_bias"}
    if zero == 3:
        sent = sum(c.bytes for c in sim.comms if c.kind == "all_gather" and c.axis == "dp" and c.direction == "forward")
        size = {p.name: p.value.nbytes(program.mesh) // 4 for p in program.params}
        narrow = sum(size[n] for n in low)
        assert (
            2 * narrow < sent <= 2 * narrow + 4 * (sum(size.values()) - narrow) + 64 * len(program.buckets)
        )  # and padding


# --- what runs in which dtype


@pytest.mark.parametrize("name", ["gpt", "resnet_bn"])
def test_nothing_changes_without_precision(name: str) -> None:
    single = one(name)
    text = str(single.compile())
    assert str(single.compile(precision={})) == text
    assert str(single.compile(precision={"compute": "float32", "params": "float32", "reduce": "float32"})) == text
    assert "bf16" not in text


def test_float64_stays_float64() -> None:
    model, batch = zoo.mlp(dtype=torch.float64)
    for precision in ({}, {"loss_scale": 8}):
        program = shardc.compile(model, batch, {"shardc": 1, "precision": precision})
        assert {
            v.dtype for n in program.graph.nodes if isinstance(v := n.meta.get("value"), shardc.ir.metadata.Value)
        } == {torch.float64}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)
        self.down, self.head = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.gain * self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def block() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.ready(Block(), torch.float32), {"ids": zoo.tokens(32), "targets": zoo.tokens(32, 2)}


def test_program(golden: Callable[[str, str], None]) -> None:
    """The casts stand in the program."""
    model, batch = block()
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}, **BF16}
    golden(
        "precision.txt",
        re.sub(r"\(test_precision.py:\d+\)", "(test_precision.py)", str(shardc.compile(model, batch, spec))),
    )


def test_lists_do_not_contradict_each_other() -> None:
    assert not LOW & WIDE
    assert not (LOW | WIDE | LOOKUPS) & MOVES
    assert NARROWED <= WIDE
    ours = {"getitem", "experts"}
    assert not {
        n for n in LOW | WIDE | MOVES | LOOKUPS | PROMOTE | CASTS if n not in ours and not hasattr(torch.ops.aten, n)
    }
    assert is_wide("linalg_solve")
    assert not is_wide("linalg_matmul")


def test_what_runs_in_which_dtype() -> None:
    low, wide = {torch.bfloat16}, {torch.float32}
    gpt = one("gpt").compile(**BF16)
    assert dtypes_of(gpt, "linear", "scaled_dot_product_attention", "gelu") == low
    assert dtypes_of(gpt, "layer_norm", "nll", "div") == wide
    resnet = one("resnet_bn").compile(**BF16)
    assert dtypes_of(resnet, "conv2d", "relu") == low
    assert dtypes_of(resnet, "batch_stat", "rsqrt", "nll") == wide
    assert {b.dtype for b in resnet.buffers if b.updated} == wide | {torch.int64}  # it counts its batches
    t5 = one("t5").compile(**BF16)
    assert dtypes_of(t5, "pow", "mean", "rsqrt") == wide
    assert dtypes_of(one("moe").compile(**BF16), "softmax") == wide
    residual = [d for module, d in ops_of(gpt)["add"] if module in ("h.0", "h.1")]
    assert residual == [torch.bfloat16] * 4
    loss = next(iter(reversed(t5.graph.nodes))).args[0][0]
    assert loss.meta["value"].dtype == torch.float32


def test_tables_and_indices_are_untouched() -> None:
    llama = one("llama").compile(**BF16)
    assert dtypes_of(llama, "cos", "sin") == {torch.float32}
    assert {b.dtype for b in llama.buffers} == {torch.float32}
    plain = one("llama").compile()
    assert [n.meta["value"].dtype for n in plain.graph.nodes if values.op_name(n.target) == "arange"] == [
        n.meta["value"].dtype for n in llama.graph.nodes if values.op_name(n.target) == "arange"
    ]
    assert {i.dtype for i in llama.inputs} == {torch.int64}


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x.float()) * 3


class Casting(nn.Module):
    """Casts of its own: to float32 around a sine, and down to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.sine = nn.Linear(8, 8), nn.Linear(8, 8), Sine()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.sine(y).half().float() + torch.cos(y)
        return self.b(z).float().mean()


def test_own_casts_stay() -> None:
    spec = Spec.load({"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "bfloat16"}})
    program = Precision(spec).run(capture(Casting(), torch.randn(4, 8)))
    assert dtypes_of(program, "linear") == {torch.bfloat16}
    assert dtypes_of(program, "sin") == {torch.float32}
    assert dtypes_of(program, "cos") == {torch.bfloat16}
    assert torch.float16 in dtypes_of(program, "_to_copy")


@torch.library.custom_op("shardc_test::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    return x / 2


halve.register_fake(lambda x: torch.empty_like(x))
halve.register_autograd(lambda ctx, g: g / 2)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(halve(self.a(x))).square().mean()
        return found


def test_foreign_ops_get_what_they_were_captured_with() -> None:
    torch.manual_seed(0)
    model, x = Foreign(), torch.randn(4, 8)
    plain, sim = (
        shardc.verify.simulate(shardc.compile(model, x, {"shardc": 1, "unknown_ops": "replicate", **p}), model, x)
        for p in ({}, BF16)
    )
    assert_close(sim.loss, sim.grads, plain)


@pytest.mark.parametrize("name", ["clicks", "critic", "forces"])
def test_quantised_and_with_gradients_inside(name: str) -> None:
    """Fake quantisation has no kernel in 16 bits; gradients inside forward are ops like all others."""
    model, batch = plain_zoo.ALL[name](torch.float32)
    whole, sim = (
        shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, **p}), model, batch)
        for p in ({}, BF16)
    )
    torch.testing.assert_close(sim.loss, whole.loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    ("params", "compute"),
    [("bfloat16", "float32"), ("float32", "float64"), ("float64", "bfloat16"), ("float16", "bfloat16")],
)
def test_every_pair_of_dtypes(params: str, compute: str) -> None:
    single = one("gpt")
    program = single.compile(**split("gpt", {"dp": 2, "tp": 2}), precision={"params": params, "compute": compute})
    assert dtypes_of(program, "linear") == {getattr(torch, compute)}
    assert {p.dtype for p in program.params} == {getattr(torch, params)}
    sim = shardc.verify.simulate(program, single.model, single.batch)
    assert_close(sim.loss, {n: g.float() for n, g in sim.grads.items()}, single.sim, factor=2.0)


class Masked(nn.Module):
    """Masks as people write them: float32's least number, added or filled in, as an operand of attention, with rows
    that see nothing.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        least = torch.finfo(torch.float32).min
        mask = (1.0 - keep[:, None, None, :].float()) * least
        if self.how == "operand":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2) / 4
            scores = scores + mask if self.how == "added" else scores.masked_fill(keep[:, None, None, :] == 0, least)
            y = scores.softmax(-1) @ v
        return self.out(y.squeeze(1)).square().mean()


@pytest.mark.parametrize("how", ["operand", "added", "filled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masks_do_not_overflow(how: str, dtype: str) -> None:
    torch.manual_seed(0)
    model, x, keep = Masked(how), torch.randn(4, 6, 16), torch.ones(4, 6, dtype=torch.long)
    keep[0] = 0
    keep[1, 3:] = 0
    plain = shardc.verify.simulate(shardc.compile(model, (x, keep), {"shardc": 1}), model, (x, keep))
    program = shardc.compile(model, (x, keep), {"shardc": 1, "mesh": {"dp": 2}, "precision": {"compute": dtype}})
    sim = shardc.verify.simulate(program, model, (x, keep))
    assert all(bool(g.isfinite().all()) for g in sim.grads.values())
    if (how, dtype) != (
        "operand",
        "float16",
    ):  # 65504 is so little that the fused op still sees scores beside it in a row that sees nothing
        assert_close(sim.loss, sim.grads, plain)


def test_dropout_draws_the_same_masks() -> None:
    """Attention with dropout is one op, which adds up its softmax in float32. Masks do not depend on the dtype."""
    model, batch = zoo.gpt(dtype=torch.float32, dropout=0.3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5 if p.dim() > 1 else 1)
    single = shardc.compile(model, batch, {"shardc": 1, **BF16})
    assert dtypes_of(single, "attention") == {torch.bfloat16}
    plain = shardc.verify.simulate(shardc.compile(model, batch, {"shardc": 1}), model, batch)
    ones = shardc.verify.simulate(single, model, batch)
    assert_close(ones.loss, ones.grads, plain, factor=2.0)  # bf16 against float32
    spec = {"shardc": 1, **split("gpt", {"dp": 2, "tp": 2}), **BF16}
    many = shardc.verify.simulate(shardc.compile(model, batch, spec), model, batch)
    assert_close(many.loss, many.grads, ones)


# --- stored weights, summed gradients


def test_weights_stored_in_bf16() -> None:
    single = one("gpt")
    precision = {"params": "bfloat16", "reduce": "float32"}
    program = single.compile(**split("gpt", {"dp": 2, "tp": 2}), precision=precision)
    assert {p.dtype for p in program.params} == {torch.bfloat16}
    assert {b.dtype for b in program.buckets} == {torch.float32}
    assert dtypes_of(program, "linear") == {torch.bfloat16}
    assert dtypes_of(program, "layer_norm", "nll") == {torch.float32}
    sim = shardc.verify.simulate(program, single.model, single.batch)
    assert {g.dtype for g in sim.grads.values()} == {torch.bfloat16}
    assert_close(sim.loss, {n: g.float() for n, g in sim.grads.items()}, single.sim)


def test_master_weights_of_a_bf16_model() -> None:
    """A model that is bfloat16 itself, trained with float32 weights: its checkpoints and gradients are float32."""
    model, batch = block()
    model.bfloat16()
    program = shardc.compile(
        model, batch, {"shardc": 1, "mesh": {"dp": 2}, "precision": {"params": "float32", "compute": "bfloat16"}}
    )
    sim = shardc.verify.simulate(program, model, batch)
    assert {g.dtype for g in sim.grads.values()} == {w.dtype for w in sim.state.values()} == {torch.float32}
    plain = shardc.verify.simulate(shardc.compile(block()[0], batch, {"shardc": 1, **BF16}), model, batch)
    assert_close(sim.loss, sim.grads, plain)


@pytest.mark.parametrize("reduce", ["bfloat16", "float64"])
def test_gradients_are_summed_in_reduce(reduce: str) -> None:
    single = one("gpt")
    program = single.compile(mesh={"dp": 2}, precision={"reduce": reduce})
    dtype = getattr(torch, reduce)
    assert {b.dtype for b in program.buckets} == {dtype}
    sim, plain = (
        shardc.verify.simulate(p, single.model, single.batch) for p in (program, single.compile(mesh={"dp": 2}))
    )
    assert sum(c.bytes for c in sim.comms if c.direction == "backward") == dtype.itemsize * sum(
        p.value.nbytes() // 4 for p in program.params
    )
    assert {g.dtype for g in sim.grads.values()} == {torch.float32}
    assert torch.equal(sim.loss, plain.loss)
    tolerance = RTOL if reduce == "bfloat16" else 1e-6
    assert all(float((sim.grads[n] - g).norm()) <= tolerance * float(g.norm()) for n, g in plain.grads.items())


def test_gradients_are_added_to_what_was_there() -> None:
    """Sums that are converted back keep torch's `.grad +=`."""
    model, batch = block()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}, "precision": {"reduce": "bfloat16"}})

    def twice(mesh: LoopbackMesh) -> list[tuple[Tensor, Tensor]]:
        module = program.module(model, mesh=mesh)
        part = {k: v.chunk(2)[mesh.coordinate("dp")] for k, v in batch.items()}
        module(**part).backward()
        first = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        module(**part).backward()
        return [(g, p.grad) for n, g in first.items() if (p := module.get_parameter(n)).grad is not None]

    for pairs in loopback(program.mesh, twice):
        assert pairs
        for once, both in pairs:
            torch.testing.assert_close(both, 2 * once)


def test_artifact_keeps_precision(tmp_path: Path) -> None:
    model, batch = block()
    spec = {
        "shardc": 1,
        "mesh": {"dp": 2},
        "precision": {"compute": "float16", "reduce": "float16", "loss_scale": "dynamic"},
    }
    program = shardc.compile(model, batch, spec)
    program.save(tmp_path)
    again = shardc.load(tmp_path)
    assert again.text(full=True) == program.text(full=True)
    assert [b.dtype for b in again.buckets] == [torch.float16] * len(program.buckets)
    assert again.spec.precision.loss_scale == "dynamic"


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet_bn"])
def test_verify_checks_the_algebra_in_float64(name: str) -> None:
    """`verify` widens every dtype, casts too: what it finds equal to 1e-12 is the splitting, not the rounding."""
    report = (
        one(name)
        .compile(**split(name, {"dp": 2, "tp": 2}), precision={"compute": "bfloat16", "reduce": "bfloat16"})
        .verify()
    )
    assert report.ok, str(report)


# --- loss scaling


def test_follows_grad_scaler() -> None:
    """The same factors as torch.amp.GradScaler, step by step, over overflows and growth."""
    theirs = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    ours = loopback(Mesh(()), lambda mesh: LossScaler("dynamic", mesh))[0]
    w = nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([w], lr=1.0)
    for step in range(2 * INTERVAL + 10):
        factor = float(theirs.get_scale())
        assert ours.factor == factor
        bad = step in (3, 4, 70, INTERVAL + 60)
        w.grad = torch.tensor([1.0, float("nan" if step == 4 else "inf") if bad else 2.0]) * factor
        mine = w.grad.clone()
        theirs.scale(torch.ones(()))
        theirs.unscale_(sgd)
        ours.unscale([mine, None])
        assert ours.sync_overflow() is bad
        if not bad:
            torch.testing.assert_close(mine, w.grad)
        theirs.step(sgd)
        theirs.update()
        ours.update()
    assert ours.skipped == 4
    again = LossScaler("dynamic", ours.mesh)
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


class Columns(nn.Module):
    """Gradients of the last two rows of the weight are 10^5 times those of the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.register_buffer("size", torch.tensor([1e-3, 1e-3, 1e2, 1e2]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.size).sum()


SCALED = {
    "shardc": 1,
    "mesh": {"tp": 2},
    "shard": {"fc": "column"},
    "precision": {"compute": "float16", "loss_scale": "dynamic"},
}


def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Columns(), torch.rand(4, 4)
    program = shardc.compile(model, x, SCALED)

    def work(mesh: LoopbackMesh) -> dict[str, Any]:
        engine = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh, norm=True)
        assert engine.scaler is not None
        (weight,) = engine.owned.values()
        before = weight.detach().clone()
        engine.backward(x)
        assert weight.grad is not None
        finite = bool(weight.grad.as_subclass(torch.Tensor).isfinite().all())  # of this rank
        engine.update()
        first = {
            "finite": finite,
            "kept": torch.equal(weight, before),
            "factor": engine.scaler.factor,
            "steps": engine.step_count,
        }
        while engine.scaler.overflow:
            engine.step(x)
        moved = before - weight.detach()
        engine.save(tmp_path / "checkpoint")
        other = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh)
        other.load(tmp_path / "checkpoint")
        assert other.scaler is not None
        return first | {
            "moved": moved,
            "scaler": engine.scaler.state_dict(),
            "loaded": other.scaler.state_dict(),
            "norm": engine.grad_norm,
        }

    ranks = loopback(program.mesh, work)
    assert [r["finite"] for r in ranks] == [True, False]
    assert [(r["kept"], r["factor"], r["steps"]) for r in ranks] == [(True, 2.0**15, 1)] * 2
    assert ranks[0]["scaler"] == ranks[1]["scaler"] == ranks[0]["loaded"]
    assert ranks[0]["scaler"]["skipped"] >= 6  # 100 * factor must come below 65504 / (sum of x)
    expected = model.size[:, None] * x.sum(0)
    torch.testing.assert_close(torch.cat([r["moved"] for r in ranks]), 0.1 * expected, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(ranks[0]["norm"], expected.norm(), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_overflow_of_one_part(zero: int) -> None:
    """What a rank keeps is its part of the summed gradients: only the rank with the large rows sees them overflow."""
    torch.manual_seed(0)
    model, x = Columns(), torch.rand(4, 4)
    program = shardc.compile(model, x, SCALED | {"mesh": {"dp": 2}, "shard": {}, "data": {"zero": zero}})

    def work(mesh: LoopbackMesh) -> tuple[bool, bool, float, bool]:
        engine = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh)
        before = engine.full_state_dict()["fc.weight"]
        engine.backward(x)
        finite = all(
            bool(p.grad.as_subclass(Tensor).isfinite().all()) for p in engine.params.values() if p.grad is not None
        )
        engine.update()
        assert engine.scaler is not None
        kept = torch.equal(engine.full_state_dict()["fc.weight"], before)
        factor = engine.scaler.factor
        while not engine.updated:
            engine.step(x)
        return finite, kept, factor, bool((engine.full_state_dict()["fc.weight"] != before).any())

    assert loopback(program.mesh, work) == [(True, True, 2.0**15, True), (False, True, 2.0**15, True)]


def test_overflow_is_one_small_collective() -> None:
    model, x = Columns(), torch.rand(4, 4)
    spec = SCALED | {"mesh": {"dp": 2, "tp": 2}}
    found = [c for c in shardc.verify.simulate(shardc.compile(model, x, spec), model, x).comms if c.cause == "overflow"]
    assert [(c.kind, c.axis, c.bytes, c.direction) for c in found] == [("all_reduce", "dp+tp", 4, "update")]


def test_fixed_scale() -> None:
    """float16 loses these gradients without a scale, and has them with one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(8, 4)

    def run(**precision: Any) -> Simulation:
        program = shardc.compile(
            model, x, {"shardc": 1, "mesh": {"dp": 2}, "precision": precision}, loss=lambda y, _: y.mean() * 1e-7
        )
        return shardc.verify.simulate(program, model, x)

    plain, lost, kept = run(), run(compute="float16"), run(compute="float16", loss_scale=2.0**16)
    assert float(lost.grads["0.weight"].abs().max()) == 0.0
    assert_close(kept.loss, kept.grads, plain)
    fixed = LossScaler(8.0, loopback(Mesh(()), lambda mesh: mesh)[0])
    fixed.unscale([torch.tensor([float("inf")])])
    assert fixed.sync_overflow()
    fixed.update()
    assert (fixed.factor, fixed.skipped) == (8.0, 1)


# --- real processes


def process(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model, batch = calm("gpt")
    program = shardc.load(Path(folder) / "program")
    engine = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
    loss = engine.step(batch)
    grads = {p.fqn: gather(engine.params[p.name].grad, p.layout, engine.mesh) for p in program.params}  # type: ignore[arg-type]
    assert engine.scaler is not None
    if rank == 0:
        torch.save({"loss": loss, "grads": grads, "skipped": engine.scaler.skipped}, Path(folder) / "result.pt")
    engine.close()


def test_two_processes(tmp_path: Path) -> None:
    """bfloat16 over gloo: activations on tp, with the sequence split, gradients on dp."""
    single = one("gpt")
    precision = {"compute": "bfloat16", "reduce": "bfloat16", "loss_scale": 16}
    for mesh in ({"dp": 2}, {"tp": 2}):
        folder = tmp_path / "".join(mesh)
        single.compile(**split("gpt", mesh, "tp" in mesh), precision=precision).save(folder / "program")
        run = functools.partial(process, world=2, port=launch.free_port(), folder=str(folder))
        warm.ranks(_positional, run, world=2)
        found = torch.load(folder / "result.pt")
        assert found["skipped"] == 0
        assert_close(found["loss"], found["grads"], single.sim)


def _positional(rank: int, run: functools.partial[None]) -> None:
    run(rank)


@pytest.mark.parametrize(("given", "told"), [({}, True), ({"loss_scale": "dynamic"}, False)])
def test_float16_without_a_scale_of_the_loss_is_told(given: dict[str, Any], told: bool) -> None:
    spec = {"shardc": 1, "mesh": {"dp": 2}, "precision": {"compute": "float16", **given}}

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    program = shardc.compile(nn.Linear(8, 8), {"input": torch.ones(8, 8)}, spec, loss=loss, prove=False)
    assert [n.startswith("spec: precision: float16 has no numbers below 6e-8") for n in program.notes] == [True] * told
