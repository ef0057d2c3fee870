"""Products of 8 bits: what they are on one device, and that every mesh computes the same."""

from __future__ import annotations

import collections
import os
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.cost import kept_activations
from shardc.features.fp8 import products as fp8_products
from shardc.features.fp8 import rounding as fp8
from shardc.features.fp8.casts import blocks, exponents, powers
from shardc.features.fp8.recipe import FORMATS
from shardc.ir.metadata import Collective
from shardc.ir.types import op_name
from shardc.machine.work import Op
from shardc.report.comm import comm_rows
from shardc.runtime import launch, ops
from shardc.torch_private import multiplies_float8_on_cpu
from shardc.verify.equality import verify
from tests import equality, warm, zoo

RECIPES = ("fp8-rowwise", "fp8-tensorwise", "mxfp8")
SEQUENCE = {"norms.*": {1: "tp"}, "last": {1: "tp"}}


class Layers(nn.Module):
    """Two blocks, column and row parallel under `use: structure`, and a head that is split by its classes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(2))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return nn.functional.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Layers()
    with torch.no_grad():  # rows whose scales differ, and numbers that float8 nearly loses
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(torch.exp(2 * torch.randn(p.shape[0], 1)).clamp(0.01, 5))
    return model, {"ids": torch.randint(128, (12, 8)), "labels": torch.randint(128, (12, 8))}


def spec_of(recipe: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {"shardc": 1, "mesh": {"dp": 1}, "precision": {"products": recipe}, **more}


def compiled(spec: dict[str, Any], **how: Any) -> Program:
    model, batch = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shardc.compile(model, batch, spec, **how)


def collectives(program: Program) -> dict[str, Collective]:
    return {n.name: c for s in program.stages for n in s.graph.nodes if (c := n.meta.get("collective")) is not None}


# --- numbers


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granule", [(1, 0), (0, 0), (1, 32), (32, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounded_values_are_those_of_float8_and_stay(format: str, granule: tuple[int, int], dtype: torch.dtype) -> None:
    """Rounding again changes no value and no scale, and a message of any part loses nothing."""
    x = (torch.randn(64, 96) * torch.exp(4 * torch.randn(64, 96))).to(dtype)
    amax = fp8.fp8_amax(x, granule)
    r = fp8.fp8_round(x, amax, format, granule)
    steps = 2 ** (3 if format == "e4m3" else 2)
    top = blocks(amax, [1] * 2)
    scale = blocks(powers(exponents(amax, format), torch.float64), [1] * 2)
    assert bool((top * scale < FORMATS[format].top + 1).all())
    assert bool((2 * top * scale > FORMATS[format].top - 1).all())  # the largest scale that there is
    off = (r - x).double().abs()
    smallest = blocks(torch.full_like(amax, 2.0 ** (-9 if format == "e4m3" else -16), dtype=torch.float64), [1, 1])
    assert bool((blocks(off, granule) <= blocks(x.double().abs() / steps / 2, granule) + smallest / scale).all())
    again = fp8.fp8_amax(r, granule)
    assert torch.equal(exponents(again, format), exponents(amax, format))
    assert torch.equal(fp8.fp8_round(r, again, format, granule), r)
    for part in (r, r[32:], r[:, :32], r[:32, 64:]):
        message = fp8.fp8_pack(part, format, granule)
        assert message.numel() == fp8.message_bytes(part.shape, granule)
        assert torch.equal(fp8.unpacked(message, part, format, granule), part)


def test_what_is_not_finite_is_seen_and_zeros_stay_zeros() -> None:
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 2.0], [0.0, 0.0], [1e-42, 0.0]])
    r = fp8.fp8_round(x, fp8.fp8_amax(x, (1, 0)), "e4m3", (1, 0))
    assert r[:2].isnan().all()
    assert torch.equal(r[2:], torch.zeros(2, 2))  # of 1e-42 nothing is left


def test_a_layer_is_a_product_of_float8_by_hand() -> None:
    """Forward and both gradients of one layer, row-wise, from the bytes and scales that `torch._scaled_mm` takes."""
    torch.manual_seed(1)
    layer, x, g = nn.Linear(32, 48), torch.randn(16, 32), torch.randn(16, 48)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, g: Tensor) -> Tensor:
            return (self.layer(x) * g).sum()

    batch = {"x": x, "g": g}
    program = shardc.compile(Model(), batch, spec_of("fp8-rowwise", {}))
    sim = shardc.simulate(program, Model(), batch)

    def cast(t: Tensor) -> tuple[Tensor, Tensor]:
        exponent = exponents(t.abs().amax(1, keepdim=True), "e4m3")
        return (t * powers(exponent, t.dtype)).to(torch.float8_e4m3fn), powers(-exponent, t.dtype)

    (x8, sx), (w8, sw) = cast(x), cast(layer.weight.detach())
    y = x8.double() @ w8.double().T * sx * sw.T
    assert torch.allclose(sim.loss.double(), ((y + layer.bias) * g).sum(), rtol=1e-6)
    g8, sg = cast(g * sw.T)  # the scales of the weight's rows go into the gradient: they are summed over
    rounded = g8.double() * sg / sw.T
    assert torch.allclose(sim.grads["layer.weight"].double(), rounded.T @ (x8.double() * sx), rtol=1e-5, atol=1e-6)
    assert torch.allclose(sim.grads["layer.bias"], g.sum(0), rtol=1e-5)  # no product: it is not rounded


# --- meshes

MESHES: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp": 2}},
    {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "activations": SEQUENCE},
    {"mesh": {"tp": 3}, "shard": {"use": "structure"}, "uneven": "pad"},
    {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 3}},
    {"mesh": {"dp_outer": 2, "dp": 2}, "data": {"axis": ["dp_outer", "dp"], "zero": 2}},
    {"mesh": {"dp": 5}, "uneven": "pad", "data": {"zero": 3}},
    {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}, "checkpoint": [{"match": "up.*", "save": []}]},
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("more", MESHES, ids=str)
def test_equal_to_one_device(recipe: str, more: dict[str, Any]) -> None:
    """In float64, where what differs is the order of sums: 1e-16, which moves no number over to the next of float8."""
    program = compiled(spec_of(recipe, more))
    assert program.prove().ok, str(program.prove())
    report = verify(program)
    assert report.worst < 1e-12, str(report)


@pytest.mark.parametrize("recipe", ["fp8-rowwise", "mxfp8"])
def test_a_scale_of_rows_or_blocks_is_that_of_one_device_with_microbatches_and_stages(recipe: str) -> None:
    more: dict[str, Any] = {"batch": {"microbatches": 3}}
    for mesh in (
        {"mesh": {"dp": 2}, "data": {"zero": 3}},
        {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}},
    ):
        report = verify(compiled(spec_of(recipe, more | mesh)))
        assert report.worst < 1e-12, str(report)


class Whole(nn.Module):
    """Layers of small whole numbers, whose sums are exact in float64 in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.token = nn.ReLU()

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.down(self.up(self.token(x)).relu()) * g).sum()


BITWISE: tuple[dict[str, Any], ...] = (
    {"mesh": {"tp": 2}, "shard": {"up": "column"}},
    {"mesh": {"tp": 2}, "shard": {"up": "row", "down": "row"}},
    {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}, "activations": {"token": {1: "tp"}}},
    {"mesh": {"dp": 4}},
    {"mesh": {"dp": 2}, "data": {"zero": 3}, "batch": {"microbatches": 2}},
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("more", BITWISE, ids=str)
def test_bit_for_bit_where_sums_are_exact(recipe: str, more: dict[str, Any]) -> None:
    if recipe == "fp8-tensorwise" and "batch" in more:
        return
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-500, 500, shape, generator=generator).double()

    model = Whole().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(whole(*p.shape))
    batch = {"x": whole(8, 16, 32), "g": whole(8, 16, 32)}
    with zoo.Wide():
        one = shardc.simulate(shardc.compile(model, batch, spec_of(recipe, {})), model, batch)
        program = shardc.compile(model, batch, spec_of(recipe, more))
        many = shardc.simulate(program, model, batch)
        plain = shardc.simulate(shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}), model, batch)
    assert torch.equal(one.loss, many.loss)
    assert all(torch.equal(one.grads[n], g) for n, g in many.grads.items())
    assert not torch.equal(one.loss, plain.loss)  # these numbers are rounded


@pytest.mark.skipif(not multiplies_float8_on_cpu(), reason="torch 2.11 has no such kernel for the CPU")
@pytest.mark.parametrize(("recipe", "calls"), [("fp8-rowwise", 3), ("fp8-tensorwise", 5)])
def test_kernels_of_8_bits_give_the_same_bits(recipe: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where sums of whole numbers are exact in float32: forward, the gradient of the inner input, and
    tensor-wise those of the weights."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-6, 7, shape, generator=generator).float()

    model = Whole()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(whole(*p.shape))
    batch = {"x": whole(8, 16, 32), "g": whole(8, 16, 32)}
    more = {"shardc": 1, "mesh": {"tp": 2}, "precision": {"compute": "bfloat16", "products": recipe}}
    program = shardc.compile(model, batch, {**more, **BITWISE[2], "mesh": {"tp": 2}})
    assert program.prove().ok, str(program.prove())
    multiplied, ran = fp8_products.multiplied, []
    monkeypatch.setattr(fp8_products, "multiplied", lambda *a, **k: ran.append(a) or multiplied(*a, **k))
    many = shardc.simulate(program, model, batch)
    assert len(ran) == 2 * calls  # of two ranks
    monkeypatch.setattr(fp8_products, "has_kernel", lambda *_: False)
    reference = shardc.simulate(program, model, batch)
    assert torch.equal(many.loss, reference.loss)
    assert all(torch.equal(many.grads[n], g) for n, g in reference.grads.items())


def test_bytes_that_are_not_the_inputs_are_no_proof() -> None:
    program = compiled(spec_of("fp8-rowwise", MESHES[1]))
    (stage,) = program.stages
    one, other, *_ = (n for n in stage.graph.nodes if n.target is fp8_products.fp8_linear)
    other.args = (*other.args[:5], one.args[5])
    assert "linear_1" in str(program.prove())
    program = compiled(spec_of("fp8-rowwise", MESHES[1]))
    (stage,) = program.stages
    bytes_ = next(n for n in stage.graph.nodes if n.target is fp8.fp8_pack)
    bytes_.args = (bytes_.args[0], "e5m2", *bytes_.args[2:])
    assert not program.prove().ok
    program = compiled(spec_of("fp8-rowwise", MESHES[2]))
    (stage,) = program.stages
    gathered = next(n for n in stage.graph.nodes if n.target is fp8.fp8_pack and len(n.args) == 3)
    gathered.args = (gathered.args[0], "e5m2", gathered.args[2])
    assert "8 bits of what is not rounded to them" in str(program.prove())
    program = compiled(spec_of("fp8-rowwise", MESHES[1]))
    (stage,) = program.stages
    one = next(n for n in stage.graph.nodes if n.target is fp8_products.fp8_linear)
    one.args = (one.args[5], *one.args[1:4])
    assert "as values" in str(program.prove())


def test_a_device_prices_products_at_its_rate_for_8_bits_and_keeps_inputs_in_bytes() -> None:
    """The rates are those of datasheets; a device without one multiplies in 16 bits."""

    def cost(recipe: str | None, device: str) -> Any:
        precision = {"compute": "bfloat16"} | ({"products": recipe} if recipe else {})
        return compiled({"shardc": 1, "mesh": {"dp": 1}, "precision": precision}).cost(device)

    def rates(c: Any) -> dict[Any, float]:
        work = [w for r in c.dry_runs for _, part in r.actions for w in part.work if isinstance(w, Op) and w.flops]
        return {w.dtype: c.device.flops_per_second(w.dtype) / c.device.flops["bfloat16"] for w in work}

    plain, rowwise = cost(None, "h100-80g"), cost("fp8-rowwise", "h100-80g")
    assert rates(rowwise) == {"float8_e4m3fn": pytest.approx(2, rel=1e-2), "bfloat16": 1}
    assert rates(cost("fp8-rowwise", "a100-80g")) == {"float8_e4m3fn": 1, "bfloat16": 1}
    assert rates(cost("mxfp8", "b200")) == {"float8_e8m0fnu": 2, "bfloat16": 1}
    assert rates(cost("mxfp8", "h100-80g")) == {"float8_e8m0fnu": 1, "bfloat16": 1}
    assert plain.flops == rowwise.flops

    def inputs(c: Any) -> list[int]:
        """Bytes of inputs that are kept for products."""
        found = kept_activations.kept(c.program, c.dry_runs[0])
        wanted = [k.storage for k in found if any(op_name(n.target) in ("linear", "fp8_linear") for n in k.wants)]
        return [x.nbytes for x in wanted if x.shape[:2] == (12, 8) or x.dtype is torch.uint8]

    tokens, features = 12 * 8, [64, 256, 64, 256, 64]
    assert inputs(plain) == [2 * tokens * n for n in features]
    assert inputs(rowwise) == [tokens * (n + 1) for n in features]  # a byte, and one for the scale of each row


# --- messages


def test_gathers_before_column_parallel_products_send_half_the_bytes_of_bfloat16() -> None:
    more = {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "activations": SEQUENCE}
    program = compiled(spec_of("fp8-rowwise", more) | {"precision": {"compute": "bfloat16", "products": "fp8-rowwise"}})
    bf16 = compiled({"shardc": 1, **more, "precision": {"compute": "bfloat16"}})

    def gathers(program: Program) -> list[Collective]:
        return [c for c in collectives(program).values() if c.kind == "all_gather"]

    rows = 12 * 8
    assert [c.forward_bytes for c in gathers(program)] == [rows * 64 + rows] * 3  # a scale for each row
    assert [c.forward_bytes for c in gathers(bf16)] == [rows * 64 * 2] * 3
    assert [c.backward for c in gathers(program)] == ["reduce_scatter"] * 3
    assert [c.bytes for c in gathers(program)] == [rows * 64 * 2] * 3  # gradients are summed in bfloat16
    model, batch = build()
    sent = [c.bytes for c in shardc.simulate(program, model, batch).comms if c.kind == "all_gather"]
    assert sent.count(rows * 64 + rows) == 3  # what ran is what the text says
    assert "all_gather/reduce_scatter tp 6240/12288" in str(program)


@pytest.mark.parametrize(
    "more", [{"mesh": {"dp": 3}}, {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}], ids=str
)
def test_zero_3_gathers_weights_that_are_rounded_before_in_8_bits(more: dict[str, Any], tmp_path: Any) -> None:
    """FlatShards begin in the middle of rows; their scales are found over ranks, also over those of tp."""
    precision = {"compute": "bfloat16", "products": {"recipe": "fp8-rowwise", "match": ["*", "!head"]}}
    program = compiled({"shardc": 1, "precision": precision, "data": {"zero": 3}, **more})
    rounded = [b for b in program.buckets if b.rounded]
    assert {n for b in rounded for n in b.params} == {f"{n}_{i}_weight" for n in ("up", "down") for i in (0, 1)}
    sent = {n.args[1]: n.meta["collective"] for n in program.stages[0].graph.nodes if n.target is ops.gather_start}
    for i, b in enumerate(program.buckets):
        c = sent[f"bucket{i}"]
        assert c.bytes == 2 * c.forward_bytes if b.rounded else c.bytes == c.forward_bytes
    assert program.prove().ok
    model, batch = build()
    said = {(r.axes, r.kind, r.direction): (r.count, r.bytes) for r in comm_rows(program.cost()) if "zero" in r.cause}
    ran: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for c in shardc.simulate(program, model, batch).comms:
        ran[c.axis, c.kind, c.direction].append(c.bytes)
    assert said["dp", "all_gather", "forward"] == (3, sum(ran["dp", "all_gather", "forward"]))
    packed = [sent[f"bucket{i}"].packed for i, b in enumerate(program.buckets) if b.rounded]
    assert set(packed) <= set(ran["dp", "all_gather", "backward"])  # they are freed, and gathered again
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").buckets == program.buckets
    i, b = next((i, b) for i, b in enumerate(program.buckets) if b.rounded)
    wrong = replace(b, rounded=tuple(replace(r, granule=(0, 0)) for r in b.rounded))
    other = replace(program, buckets=(*program.buckets[:i], wrong, *program.buckets[i + 1 :]))
    assert "reads it otherwise" in str(other.prove())
    wrong = replace(b, rounded=tuple(replace(r, axes=("tp",) if not r.axes else ()) for r in b.rounded))
    other = replace(program, buckets=(*program.buckets[:i], wrong, *program.buckets[i + 1 :]))
    assert "tp" not in program.mesh.names or "what has one scale is split over" in str(other.prove())


def process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in place.items()}
    model, batch = build()
    engine = shardc.load(f"{folder}/out").engine(model.double())
    loss = engine.step(batch)
    torch.save(float(loss), f"{folder}/loss{rank}.pt")
    engine.close()


def test_real_processes(tmp_path: Any) -> None:
    """Messages of bytes, and largest values, over gloo."""
    model, batch = build()
    model = model.double()
    with zoo.Wide():
        one = shardc.simulate(shardc.compile(model, batch, spec_of("fp8-rowwise", {})), model, batch)
        more: dict[str, Any] = {"mesh": {"dp": 2}, "data": {"zero": 3}}
        program = shardc.compile(model, batch, spec_of("fp8-rowwise", more))
        program.save(tmp_path / "out")
    assert any(b.rounded for b in program.buckets)
    warm.ranks(process, launch.free_port(), str(tmp_path), world=2)
    for rank in range(2):
        assert torch.load(tmp_path / f"loss{rank}.pt") == pytest.approx(float(one.loss), rel=1e-12)


def test_blocks_that_shards_would_cut_are_gathered_and_named() -> None:
    program = compiled(spec_of("mxfp8", {"mesh": {"tp": 3}, "shard": {"up.*": "column"}, "uneven": "pad"}))
    assert any("fp8_amax needs it whole" in str(n) for n in program.notes)
    assert not any("fp8_amax" in str(n) for n in compiled(spec_of("mxfp8", MESHES[1])).notes)


def test_a_message_of_8_bits_of_what_is_not_rounded_is_no_proof() -> None:
    program = compiled(spec_of("fp8-rowwise", MESHES[2]))
    (stage,) = program.stages
    gather = next(n for n in stage.graph.nodes if "fp8" in n.kwargs)
    gather.kwargs = gather.kwargs | {"fp8": ("e5m2", (1, 1, 0))}
    assert "8 bits of what is not rounded" in str(program.prove())


def test_it_is_saved_and_read_back(tmp_path: Any) -> None:
    program = compiled(spec_of("fp8-rowwise", MESHES[2]))
    program.save(tmp_path / "out")
    again = shardc.load(tmp_path / "out")
    assert again.text(full=True) == program.text(full=True)
    assert collectives(again) == collectives(program)


# --- words


def test_the_layers_that_are_left_are_named() -> None:
    program = compiled(spec_of({"recipe": "fp8-rowwise", "match": ["*", "!head"]}, {}))
    assert "up_0_weight_amax, 'fp8-rowwise'" in str(program)
    assert "head_weight_amax" not in str(program)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(10, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.small(x).sum()

    notes = shardc.compile(Odd(), {"x": torch.randn(4, 10)}, spec_of("fp8-rowwise", {})).notes
    assert any("leaves small.weight as it is: sizes are not multiples of 16" in str(n) for n in notes)
    assert any("found no linear layer" in str(n) for n in notes)


def test_an_input_of_two_products_is_rounded_for_one_and_packed_for_the_other() -> None:
    """One takes what is gathered of it, the other its part."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.q(y).square().mean() + self.k(y).square().mean()

    torch.manual_seed(0)
    more = {"mesh": {"tp": 2}, "shard": {"k": "column"}, "activations": {"q:in": {1: "tp"}}, "freeze": ["*", "!k"]}
    program = shardc.compile(Two(), {"x": torch.randn(4, 8, 16)}, spec_of("fp8-rowwise", more))
    text = str(program)
    assert text.count("ops.fp8_round(") == 1
    assert text.count("ops.fp8_pack(") == 2
    assert program.prove().ok, str(program.prove())


def test_what_is_alike_in_all_microbatches_is_left() -> None:
    """Learned queries: one device would round the sum of their gradients, a microbatch its own."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.project, self.up = nn.Parameter(torch.randn(3, 16)), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (self.up(x) @ self.project(self.queries).T).square().mean()

    torch.manual_seed(0)
    model, batch = Queries(), {"x": torch.randn(8, 16)}
    for microbatches in (1, 2):
        more = {"batch": {"microbatches": microbatches}, "mesh": {"dp": 2}}
        program = shardc.compile(model, batch, spec_of("fp8-rowwise", more))
        assert program.prove().ok
        told = "leaves project.weight as it is: its input is the same in all microbatches"
        assert sum(told in str(n) for n in program.notes) == microbatches - 1


def test_adapters_are_left_in_the_dtype_of_products() -> None:
    more = {"adapters": [{"match": "up.*", "rank": 16, "alpha": 16}], "mesh": {"tp": 2}, "shard": {"use": "structure"}}
    program = compiled(spec_of("fp8-rowwise", more))
    assert "lora_A_weight_amax" not in str(program)
    assert "up_0_weight_amax" in str(program)
    assert verify(program).worst < 1e-12


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (
            spec_of("fp8-tensorwise", {"batch": {"microbatches": 2}}),
            "fp8-tensorwise has one scale for the whole batch, and 2 microbatches",
        ),
        (
            {"shardc": 1, "mesh": {"dp": 1}, "precision": {"compute": "float16", "products": "mxfp8"}},
            "products: mxfp8 with compute: float16",
        ),
        (spec_of({"recipe": "mxfp8", "match": ["*", "!hat"]}, {}), "pattern 'hat' matches no parameter"),
        (spec_of("fp8", {}), "'fp8'"),
    ],
)
def test_refusals(spec: dict[str, Any], what: str) -> None:
    with pytest.raises(shardc.ShardcError) as e:
        compiled(spec)
    assert what in str(e.value)


def test_forward_only_has_no_gradient_to_round() -> None:
    assert "fp8_grad" not in str(compiled(spec_of("fp8-rowwise", MESHES[1]), forward=True))
    assert equality.RTOL == 1e-12
