"""Fused regions of a step, compiled: numbers, masks, what is freed when, what is compiled once, what is refused.

Most tests put a stand-in where the compiler is (tests/stand_in_compiler.py). One compiles.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.runtime.runtime_utils import cache_dir

import shardc
from shardc.ir.fused_regions import fused_regions, moved, region_of, without_fused_regions
from shardc.ir.graph import calls, values_of
from shardc.ir.mesh import Mesh
from shardc.runtime import ops
from shardc.runtime.compiled import masks
from shardc.runtime.mesh.shapes import ShapeMesh
from shardc.runtime.ops.experts import activation, products
from shardc.runtime.rng import Rng, device_key
from shardc.torch_private import kernels_of, no_compiler
from tests import stand_in_compiler, zoo
from tests.passes.test_joint import SPECS, built, compiled, momentum, same
from tests.zoo import hf, hf_more

module: Any = importlib.import_module("shardc.runtime.compiled.region_calls")
cut, compiler = stand_in_compiler.cut, stand_in_compiler.compiler
CASES = (
    *("tp", "sp", "zero 3", "pipeline", "zero bubbles, v, zero 3, recomputed", "pairs, v, zero 3", "recompute cheap"),
    *("precision", "experts", "tied", "data-dependent"),
)
LAYERS = {"execution": {"compile": "layers"}}


@pytest.fixture
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also regions that save nothing."""
    monkeypatch.setattr(cut, "LEAST_SAVED", 0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each region that was "compiled", how many inputs it has."""
    return stand_in_compiler.put_in(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_regions_give_the_same_bits(case: str, stand_in: list[int]) -> None:
    name, spec = SPECS[case]
    model, batch, _ = built(name)
    program = compiled(name, spec, **LAYERS)
    regions = [p for s in program.stages if s.joint for g in s.joint.graphs.values() for p in fused_regions(g)]
    want, have = (
        shardc.verify.simulate(p, model, batch, steps=2, optimizer=momentum) for p in (compiled(name, spec), program)
    )
    assert bool(stand_in) == bool(regions)
    assert torch.equal(have.loss, want.loss)
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []
    assert [n for n, x in want.state.items() if not same(have.state[n], x)] == []


def test_masks_are_those_of_dropout() -> None:
    mesh, cpu = ShapeMesh(Mesh((("dp", 2),)), 1), torch.device("cpu")
    rng = Rng(seed=-3, step=2**40, microbatch=1)
    wide = torch.tensor([3, 2**31 + 5, 2**33]), torch.arange(40)  # of a tensor of more than 2^31 elements
    for (rows, columns), dtype in (
        (rng.row_and_column_offsets([6, 10], (), mesh, cpu, ()), torch.float32),
        (rng.row_and_column_offsets([12, 10], ((0, "dp", 1, ()),), mesh, cpu, ()), torch.bfloat16),
        (rng.row_and_column_offsets([3, 7, 4], ((2, "dp", 1, ()),), mesh, cpu, ()), torch.float64),
        (wide, torch.float32),
    ):
        x = torch.randn(len(rows) * len(columns), dtype=dtype).abs() + 1
        want = torch.ops.shardc.dropout(x, rng.words(cpu), rows, columns, 5, 0.4)
        words = rng.key_words(5, cpu)
        assert torch.equal(masks.masked(x, (words, rows, columns), 0.4), want)
        assert torch.equal(device_key(rng.words(cpu), 5), words)
        assert 0 < int((want == 0).sum()) < x.numel()


def regions(program: Any) -> list[Any]:
    return [p for s in program.stages for g in s.joint.graphs.values() for p in fused_regions(g)]


def test_equal_layers_have_equal_regions(small_regions: None) -> None:
    """So 3 layers and 6 compile the same code."""
    keys = []
    for layers in (3, 6):
        model, batch = zoo.gpt(layers=layers, dropout=0.1)
        program = shardc.compile(model, batch, {"shardc": 1, **SPECS["dp"][1], **LAYERS}, prove=False)
        calls = [module._RegionCall(p, compiler.Compiler()) for p in regions(program)]
        keys.append({c._code.key for c in calls})
        assert len(calls) > len(keys[-1])
    assert keys[0] == keys[1]
    assert len(keys[0]) > 5


def test_a_layer_is_a_few_regions_with_its_products(small_regions: None) -> None:
    """Between two attentions and two layers there is one. Its `put`s are behind it, in front of their bucket's sum."""
    spec = {"mesh": {"dp": 2}, "data": {"bucket_mb": 0.01}}
    program, plain = compiled("gpt", spec, **LAYERS), compiled("gpt", spec)
    (graphs,) = ([*s.joint.graphs.values()] for s in program.stages if s.joint)
    for graph in graphs:
        products = [n for n in calls(graph) if n.target in cut._KERNELS]
        alone = [n for n in products if "fused" not in n.meta]  # with nothing to fuse beside them
        assert 4 * len(alone) <= len(products)
    forward, backward = graphs
    layers = sum(n.target is ops.opaque for n in forward.nodes)
    assert layers <= len(fused_regions(forward)) <= 2 * layers + 2

    def sums(graph: Any) -> list[tuple[str, set[str], int]]:
        """Of each bucket: which gradients are there when its sum begins, and how many products have run."""
        begun, puts, products = [], set[str](), 0
        for n in calls(graph):
            puts |= {n.meta["param"]} if n.target is ops.accumulate else set()
            products += n.target in cut._KERNELS
            if n.target is ops.launch:
                begun.append((str(n.args[1]), set(puts), products))
        return begun

    (want,) = (sums(s.joint.backward) for s in plain.stages if s.joint)
    assert sums(backward) == want
    assert len(want) > 5


def test_arithmetic_is_recomputed_in_the_region_that_reads_it(small_regions: None) -> None:
    """Forward keeps fewer values and none instead; backward has their lines, inside of regions; the proof holds."""
    name, spec = SPECS["tied"]
    plain, fused = compiled(name, spec), compiled(name, spec, **LAYERS)

    def kept(program: Any) -> dict[str, Any]:
        (joint,) = (s.joint for s in program.stages)
        return {n.name: n for n in joint.forward.output_node().args[0][3]}

    dropped = {n: x for n, x in kept(plain).items() if n not in kept(fused)}
    assert len(dropped) >= 4
    assert kept(fused).keys() <= kept(plain).keys()
    names = {n.target.overloadpacket.__name__ for n in dropped.values()}
    assert "mul" in names
    assert not names & {"mean", "rsqrt", "silu", "linear", "embedding"}
    again = [n for s in fused.stages for n in calls(s.joint.backward) if n.meta.get("repeats")]
    assert {n.meta["of"] for n in again} >= dropped.keys()
    assert all("fused" in n.meta for n in again)
    assert fused.cost().memory.peak < plain.cost().memory.peak
    proof = fused.prove()
    assert proof.ok, str(proof)


def test_a_backward_in_two_halves_keeps_all(small_regions: None) -> None:
    name, spec = SPECS["zero bubbles, v, zero 3, recomputed"]
    counts = [
        [len(s.joint.forward.output_node().args[0][3]) for s in compiled(name, spec, **how).stages]
        for how in ({}, LAYERS)
    ]
    assert counts[0] == counts[1]


def test_sizes_that_change_every_step_are_not_compiled_again_and_again(stand_in: list[int]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    lines = [graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))]
    lines.append(graph.call_function(torch.ops.aten.add.Tensor, (lines[0], 1)))
    graph.output(lines[1])
    call = module._RegionCall(region_of(0, lines), compiler.Compiler())
    for rows in range(20):
        (made,) = call([torch.ones(rows)], None, None)
        assert torch.equal(made, torch.full((rows,), 3.0))
    assert len(stand_in) == module.LAYOUTS


def test_small_regions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    some = regions(compiled("gpt", SPECS["sp"][1], **LAYERS))
    assert some
    assert all(saved(p) >= 1 << 16 for p in some)
    monkeypatch.setattr(cut, "LEAST_SAVED", max(map(saved, some)) + 1)
    assert not regions(compiled("gpt", SPECS["sp"][1], **LAYERS))


def saved(region: Any) -> int:
    def size(n: Any) -> int:
        return sum(v.nbytes() for v in values_of(n) if v is not None)

    apart, together = moved(region, cut.fuses, size, cut.shares_memory)
    return apart - together


def test_regions_come_back_from_disk_and_count_as_one_op(small_regions: None, tmp_path: Path) -> None:
    program = compiled("gpt", SPECS["sp"][1], **LAYERS)
    program.save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    assert loaded.joint() == program.joint()
    assert "| fused 0" in loaded.joint()
    fused, plain = (p.cost("h100-80g") for p in (program, without_fused_regions(program)))
    assert fused.step_seconds < plain.step_seconds
    assert fused.memory.peak <= plain.memory.peak


def test_gradients_wait_for_their_region_up_to_a_limit(small_regions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"mesh": {"dp": 2}}
    many = len(regions(compiled("gpt", spec, **LAYERS)))
    monkeypatch.setattr(cut, "WAITING", 1 << 14)
    assert len(regions(compiled("gpt", spec, **LAYERS))) > many + 5


@pytest.mark.parametrize("spec", ["zero 3", "recompute cheap", "precision", "experts"])
def test_only_gradients_that_wait_take_more_memory(
    spec: str, small_regions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, given = SPECS[spec]
    monkeypatch.setattr(cut, "WAITING", 0)
    eager, fused = (compiled(name, given, **how).cost().memory.peak for how in ({}, LAYERS))
    assert fused <= eager + 512  # a bias's gradient that moved up


def test_without_a_compiler_lines_run_one_by_one(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, batch, _ = built("gpt")
    want = shardc.verify.simulate(compiled("gpt", SPECS["dp"][1]), model, batch)
    program = compiled("gpt", SPECS["dp"][1], **LAYERS)
    monkeypatch.setattr(compiler, "no_compiler", lambda device: "there is no C++ compiler")
    monkeypatch.setattr(compiler, "_REPORTED", set())
    have = shardc.verify.simulate(program, model, batch)
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []
    assert capsys.readouterr().err.count("there is no C++ compiler") == 1
    strict = compiled("gpt", SPECS["dp"][1], **LAYERS, strict=True)
    with pytest.raises(shardc.ShardcError, match=r"is not compiled: there is no C\+\+ compiler"):
        shardc.verify.simulate(strict, model, batch)


def test_what_the_compiler_refuses_is_named(
    stand_in: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(function: Any, inputs: Any, any_rows: bool) -> Any:
        raise NotImplementedError("no lowering for this")

    monkeypatch.setattr(compiler, "inductor_compiled", refuse)
    model, batch, _ = built("gpt")
    shardc.verify.simulate(compiled("gpt", SPECS["dp"][1], **LAYERS), model, batch)
    said = capsys.readouterr().err
    assert "is not compiled, and runs line by line: NotImplementedError: no lowering for this" in said
    assert "(h.0, " in said


class Small(nn.Module):
    """Two layers of little more than a norm, dropout, and a gelu written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.fcs = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, fc in zip(self.norms, self.fcs, strict=True):
            y = fc(x)
            x = norm(x + nn.functional.dropout(y * torch.sigmoid(1.702 * y), 0.1, self.training))
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own
def test_compiled_by_inductor(small_regions: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles: forward and backward of a layer, once for two layers and two ranks; kernels are fewer than ops."""
    if why := no_compiler(torch.device("cpu")):
        pytest.skip(why)
    headers = Path(cache_dir()) / "precompiled_headers"  # this machine's: they take longer than all that is compiled
    headers.mkdir(parents=True, exist_ok=True)
    (tmp_path / headers.name).symlink_to(headers)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_DONE", {})
    torch.manual_seed(0)
    model, batch = Small().double(), {"x": torch.randn(8, 4, 32, dtype=torch.float64)}
    spec = {"shardc": 1, "mesh": {"dp": 2}, **LAYERS}
    program = shardc.compile(model, batch, spec)
    plain_ = without_fused_regions(program)
    want, have = (shardc.verify.simulate(p, model, batch, steps=2, optimizer=momentum) for p in (plain_, program))
    assert not [v for v in compiler._DONE.values() if isinstance(v, str)]
    lines = [n for p in regions(program) for n in p.lines if not cut.shares_memory(n)]
    kernels = [kernels_of(run) for run in compiler._DONE.values()]
    assert len(kernels) <= len(regions(program)) <= sum(kernels) * 2 < len(lines)
    assert torch.allclose(have.loss, want.loss, rtol=1e-12)
    for name, g in want.grads.items():
        assert float((have.grads[name] - g).norm()) <= 1e-12 * float(g.norm())
    report = program.verify(compiled=True)
    assert report.ok
    assert report.compiled is not None
    assert "compiled, against the same step line by line" in str(report)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own
def test_an_activation_of_experts_is_compiled_once_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := no_compiler(torch.device("cpu")):
        pytest.skip(why)
    monkeypatch.setattr(compiler, "_DONE", {})
    text = "a, b = stripes(x); c = clamp(a, None, 7.0); d = silu(c); mul(b, d)"
    plain, compiled_ = activation.read(text), module.CompiledActivation(text, compiler.Compiler(strict=True), "mlp")
    for rows in (1, 8, 0, 12, 2):  # compiled for 8 rows of 8 numbers
        first, back, chosen = (torch.randn(rows, n, dtype=torch.float64) for n in (16, 8, 1))
        for have, want in zip(
            (compiled_(first), *compiled_.backward(first, back, chosen), *compiled_.backward(first, back)),
            (
                plain(first),
                *products.backward_of(plain, first, back, chosen),
                *products.backward_of(plain, first, back),
            ),
            strict=True,
        ):
            assert have.shape == want.shape
            assert float((have - want).norm()) <= 1e-14 * float(want.norm())
    assert len(compiler._DONE) == 3  # forward, and backward with and without weights


@pytest.mark.parametrize(
    "spec",
    [{"mesh": {"dp": 2}}, {"mesh": {"ep": 2}, "experts": [{"match": "*.mlp.experts", "axis": "ep"}]}],
    ids=["experts", "experts_apply"],
)
def test_steps_run_compiled_activations(spec: dict[str, Any], stand_in: list[int]) -> None:
    """In their number of inputs: rows, in forward; the first product, what comes back, and the weights of choices."""
    with zoo.Wide():
        model, batch = hf.build(hf_more.FAMILIES["mixtral"])
        plain, program = (shardc.compile(model, batch, {"shardc": 1, **spec, **more}) for more in ({}, LAYERS))
        want, have = (shardc.verify.simulate(p, model, batch) for p in (plain, program))
    assert torch.equal(have.loss, want.loss)
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []
    activations = [inputs for key, inputs in zip(compiler._DONE, stand_in, strict=True) if "halves(x)" in key[0]]
    assert set(activations) == {1, 2 + ("dp" in spec["mesh"])}


@pytest.mark.parametrize(("execution", "fix"), [({"compile": "layers"}, "larger batch"), ({}, "compile: layers")])
def test_verify_says_why_nothing_is_compiled(execution: dict[str, str], fix: str) -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    spec = {"shardc": 1, "mesh": {"dp": 2}, "execution": execution}
    program = shardc.compile(model, (x,), spec, loss=lambda y, _: y.square().mean())
    (finding,) = program.verify(compiled=True).findings
    assert fix in finding.fix
