"""The joint graph of a stage: its step equals one device, on one rank to the bit.

And what stands in the graphs, and that they come back from disk.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardc
import shardc.nn
from shardc.api import Program
from shardc.capture import capture
from shardc.ir.stage import DeferredJoint, Joint
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.mesh.step_context import StepContext
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.zero.bucket import Bucket
from tests import zoo
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

TP = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
SP = {
    "mesh": {"dp": 2, "tp": 2},
    "shard": {"*.fc": "column", "*.out": "row"},
    "activations": {"drop": {1: "tp"}, "h.*": {1: "tp"}},
}
PP = {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("gpt", {"mesh": {"dp": 2}}),
    "tp": ("gpt", TP),
    "sp": ("gpt", SP),
    "microbatches": ("gpt", {"mesh": {"dp": 2}, "batch": {"microbatches": 2}}),
    "padding": ("gpt", {"mesh": {"dp": 3}, "uneven": "pad"}),
    **{
        f"zero {z}": ("gpt", {**TP, "data": {"zero": z, "bucket_mb": 0.01}, "batch": {"microbatches": 2}})
        for z in (1, 2, 3)
    },
    "zero 3 kept": ("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3, "keep": True}, "batch": {"microbatches": 2}}),
    "recompute all": ("gpt", {**TP, "checkpoint": [{"match": "h.*", "save": []}]}),
    "recompute but products": ("gpt", {**TP, "checkpoint": [{"match": "h.*", "save": ["linear"]}]}),
    "recompute cheap": ("gpt", {**TP, "checkpoint": [{"match": "h.*", "recompute": "cheap"}]}),
    "nested regions": (
        "gpt",
        {**TP, "checkpoint": [{"match": "h.*", "save": ["linear"]}, {"match": "h.*.fc", "save": []}]},
    ),
    "pipeline": ("gpt", PP),
    "zero bubbles": ("gpt", {**PP, "pipeline": {"axis": "pp", "stages": 2, "schedule": "zb-h1"}}),
    "zero bubbles, v, zero 3, recomputed": (
        "gpt",
        {
            "mesh": {"pp": 2, "dp": 2},
            "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"},
            "batch": {"microbatches": 2},
            "data": {"zero": 3},
            "checkpoint": [{"match": "h.*", "recompute": "cheap"}],
        },
    ),
    "several results sent, one passed on": (
        "linear_attention",
        {**PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"}},
    ),
    "received and passed on as a view": (
        "mixer",
        {**PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"}},
    ),
    "recurrent, narrow": ("lstm", {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}}),
    "pairs, v, zero 3": (
        "gpt",
        {
            "mesh": {"pp": 2, "dp": 2},
            "pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"},
            "batch": {"microbatches": 4},
            "data": {"zero": 3, "bucket_mb": 0.01},
        },
    ),
    "interleaved": ("gpt", {**PP, "pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"}}),
    "precision": ("gpt", {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}, "batch": {"microbatches": 2}}),
    "precision, zero 3": ("gpt", {"mesh": {"dp": 2}, "precision": {"compute": "bfloat16"}, "data": {"zero": 3}}),
    "loss scale": ("gpt", {"mesh": {"dp": 2}, "precision": {"compute": "float16", "loss_scale": 128}}),
    "loss in chunks": ("gpt", {**TP, "loss": {"chunks": 2}}),
    "batch norm": ("resnet_bn", {"mesh": {"dp": 2}}),
    "experts": ("moe", TP),
    "tied": ("llama", TP),
    "products of data": ("ordering", {"mesh": {"dp": 2}}),
    "in place": ("embedding_losses", {"mesh": {"dp": 2}}),
    "data-dependent": ("spectrogram", {"mesh": {"dp": 2}}),
    "gradients in forward": ("burgers", {"mesh": {"dp": 2}}),
}


@functools.cache
def built(name: str) -> tuple[nn.Module, Any, Program]:
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = zoo.gpt(dropout=0.1) if name == "gpt" else (zoo.ALL | plain.ALL)[name]()
        return model, batch, capture(model, batch)


def compiled(name: str, spec: dict[str, Any], **more: Any) -> Program:
    model, batch, captured = built(name)
    with zoo.Wide():
        return shardc.compile(model, batch, {"shardc": 1, **spec, **more}, captured=captured)


def compiled_of(name: str, model: nn.Module, batch: Any) -> Program:
    with zoo.Wide():
        return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9)


@pytest.mark.parametrize("case", SPECS)
def test_a_step_equals_one_device(case: str) -> None:
    name, spec = SPECS[case]
    program = compiled(name, spec)
    report = program.verify()
    assert report.ok, report


@pytest.mark.parametrize("name", ["lstm", "moe"])
def test_one_ranks_step_is_eagers_to_the_bit(name: str) -> None:
    """The graphs run the kernels that autograd runs, in its order, and add gradients up as it does."""
    model, batch, _ = built(name)
    program = compiled_of(name, model, batch)
    have = shardc.verify.simulate(program, model, batch, steps=2, optimizer=momentum)
    eager = copy.deepcopy(model)
    optimizer = momentum(eager.parameters())
    for step in range(2):
        optimizer.zero_grad()
        output = eager(**batch)
        loss = getattr(output, "loss", output[0] if isinstance(output, tuple) else output)
        loss.backward()
        grads = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
        if step == 0:
            optimizer.step()
    optimizer.step()
    # the program adds up losses by `sum`, and torch's nll_loss one after the other: in which order, its vectors decide
    torch.testing.assert_close(have.loss, loss, rtol=1e-15, atol=0)
    assert have.grads.keys() >= grads.keys()
    assert [n for n, g in grads.items() if not torch.equal(have.grads[n], g)] == []
    assert [n for n, x in eager.state_dict().items() if n in have.state and not same(have.state[n], x)] == []


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def test_experts_of_a_mesh() -> None:
    with zoo.Wide():
        model, batch = hf.build(hf_more.FAMILIES["mixtral"])
        spec = {
            "shardc": 1,
            "mesh": {"ep": 2},
            "shard": {"use": "model"},
            "experts": [{"match": "*.mlp.experts", "axis": "ep"}],
        }
        program = shardc.compile(model, batch, spec)
    text = program.joint()
    assert "ops.opaque('ops.experts_apply'" in text
    for op in ("experts_send", "experts_return"):  # there and back, forward and backward
        assert f"ops.start('{op}', " in text
        assert f"ops.transpose_start('{op}', " in text
    assert program.verify().ok


def test_the_text_of_a_product_beside_its_collective() -> None:
    """The sum of the input's gradient is begun, then come the gradients of weight and bias, then it is waited for."""
    lines = compiled("gpt", TP).joint().partition("_backward(")[2].splitlines()
    start = next(i for i, line in enumerate(lines) if "ops.transpose_start('sum_grad', layer_norm_3_each" in line)
    wait = next(i for i, line in enumerate(lines) if i > start and "ops.wait(" in line)
    between = "\n".join(lines[start:wait])
    assert "all_reduce/none tp" in lines[start]
    assert "aten.mm.default" in between
    assert between.count("ops.accumulate(h_1_fc_") == 2


def test_zero_3_gathers_and_scatters_in_the_text() -> None:
    """Each bucket is begun while the one before it is used, and its gradients are summed when they are there."""
    program = compiled("gpt", {"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.01}})
    backward = program.joint().partition("_backward(")[2]
    assert backward.count("ops.scatter(") == len(program.buckets)
    ops = [m[1] for m in re.finditer(r"ops\.regather_(start|wait)\(", backward)]
    assert ops.count("start") == ops.count("wait") > 2
    assert ops[:4] == ["start", "wait", "start", "start"]  # a large bucket, and a small one beside it
    under_way = [ops[:i].count("start") - ops[:i].count("wait") for i in range(len(ops))]
    assert max(under_way) <= 3


def test_lines_name_the_op_and_the_line_that_they_come_from() -> None:
    text = compiled("gpt", TP).joint()
    assert re.search(r"# linear_7 backward, h\.1\.out \(.*__init__\.py:\d+\)", text)
    assert '"spec: shard.use' in text


def test_it_comes_back_from_disk(tmp_path: Path) -> None:
    model, batch, _ = built("gpt")
    spec = {**TP, "data": {"zero": 3}, "checkpoint": [{"match": "h.*", "recompute": "cheap"}]}
    program = compiled("gpt", spec)
    program.save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    assert loaded.joint() == program.joint() != ""
    want, have = (shardc.verify.simulate(p, model, batch) for p in (program, loaded))
    assert [n for n, g in want.grads.items() if not torch.equal(have.grads[n], g)] == []


@pytest.mark.parametrize("spec", [{"mesh": {"dp": 2}}, TP, {**SP, "checkpoint": [{"match": "h.*", "save": []}]}])
def test_equal_layers_are_differentiated_once(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their collectives have tags of their own, and their dropouts and attentions streams of random numbers."""

    from shardc.passes import joint

    made: list[joint.Rules] = []
    counts: list[tuple[int, ...]] = []
    tables: tuple[dict[Any, Any], ...] = ({}, {})
    for name, table in zip(("_RULES", "_FACTS"), tables, strict=True):
        monkeypatch.setattr(joint.derivatives, name, table)
    monkeypatch.setattr(joint, "Rules", lambda program: made.append(joint.derivatives.Rules(program)) or made[-1])
    for layers in (3, 6):
        model, batch = zoo.gpt(layers=layers, dropout=0.1)
        assert shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False).joint()
        counts.append(tuple(map(len, (*tables, made[-1]._rules, made[-1]._facts))))
    assert counts[0] == counts[1]
    assert counts[0][0] + counts[0][2] > 20


def test_a_rank_of_a_pipeline_writes_the_texts_of_its_own_stages() -> None:
    """Not under whatever modes are on where it looks at them; and ranks may be threads."""
    spec = {**PP, "pipeline": {"axis": "pp", "stages": 4}}
    model, batch, _ = built("gpt")
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
    assert [type(s.joint) for s in program.stages] == [DeferredJoint] * 4

    def first_rank(mesh: LoopbackMesh) -> None:
        if mesh.rank == 0:
            with torch.autocast("cpu"):
                stages = Interpreter(program, mesh).stages.values()
                assert all(s.joint is not None for s in stages)

    loopback(program.mesh, first_rank)
    assert [type(s.joint) is Joint for s in program.stages] == [c == 0 for c in program.schedule.placement]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: program.joint(), range(4)))
    assert texts == [shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False).joint()] * 4


@pytest.mark.parametrize("how", ["kept", "host"])
def test_one_line_of_backward_runs_in_both_halves_where_that_takes_less_memory(how: str, tmp_path: Path) -> None:
    """Experts' weights are larger than what their backward takes: their gradients do not wait for the second half."""
    pipe = {**PP, "pipeline": {"axis": "pp", "stages": 2, "schedule": "zb-h1"}, "batch": {"microbatches": 4}}
    pipe |= (
        {"checkpoint": [{"match": "layers.*", "save": ["linear", "matmul"], "offload": "cpu"}]} if how == "host" else {}
    )
    model, batch = Routeds(), {"x": torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))}
    captured = capture(model, batch, prove=False)
    program = shardc.compile(model, batch, {"shardc": 1, **pipe}, captured=captured)
    first, second = (str(s.joint.graphs[half]) for s in program.stages[1:] for half in ("backward", "weights"))
    assert "keep: True" in first
    assert "only: " in first
    assert "only: " in second
    assert "keep: True" not in second
    assert ("tape_host" in first) == (how == "host")
    program.save(tmp_path / "out")
    assert shardc.load(tmp_path / "out").joint() == program.joint()
    assert program.prove().ok
    for half, right, other in (("backward", ", keep=True", ""), ("weights", "only=(2, 3)", "only=(1, 3)")):
        file = tmp_path / "out" / f"stage1_{half}.py"
        text = file.read_text()
        assert right in text
        file.write_text(text.replace(right, other))
        assert not shardc.load(tmp_path / "out", trust=True).prove().ok
        file.write_text(text)
    with mock.patch.object(OffloadedTensors, "useful", staticmethod(lambda x: how == "host")):
        assert program.verify().ok


class Routed(nn.Module):
    """A layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 64, 16) * 0.1), nn.Parameter(torch.randn(4, 16, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        return x + shardc.nn.experts(x, index, weights, self.up, self.down)


class Routeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Routed(), Routed())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class WithBias(nn.Module):
    """Experts with biases; the output's is a partial sum on a mesh with tp: the first rank keeps the parameter, as a
    view, and the others have zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 16)), nn.Parameter(torch.randn(4, 16, 12))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(4, 12)), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, -1)
        bias = {"activation": "gelu", "up_bias": self.up_bias, "down_bias": self.down_bias}
        return shardc.nn.experts(x, index, weights, self.up, self.down, **bias).square().mean()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_view_of_a_parameter_is_no_parameter(zero: int) -> None:
    torch.manual_seed(0)
    model, batch = WithBias().double(), {"x": torch.randn(8, 16, dtype=torch.float64)}
    shard = {"up": {1: "tp"}, "up_bias": {1: "tp"}, "down": {2: "tp"}}
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": shard, "data": {"zero": zero}}
    assert shardc.compile(model, batch, spec).verify().ok


def test_tags_and_streams_are_each_layers_own() -> None:
    """A derivative that equal layers share has them as parameters."""
    backward = compiled("gpt", TP).joint().partition("_backward(")[2]
    tags = re.findall(r"ops\.transpose.*tag='(\w+)'", backward)
    assert len(tags) == len(set(tags)) > 2
    streams = re.findall(r"ops\.dropout\(.*?, 0\.1, rng, (\d+)", backward)
    assert len(streams) == len(set(streams)) > 2


def test_a_graph_in_a_graph_ends_as_it_was() -> None:
    step = StepContext()
    with step.training():
        with pytest.raises(ZeroDivisionError), step.training(list):
            raise ZeroDivisionError
        assert step.trains
        assert step.launch is None
    assert not step.trains


def test_a_gather_of_a_backward_that_fails_is_waited_for() -> None:
    class Gathers(Bucket):
        def __init__(self) -> None:
            self.waited = 0
            self._forward_gather, self._backward_gathers = None, []

        def start_gather(self, direction: str) -> tuple[Tensor, Any]:
            return torch.ones(4), self

        def wait(self) -> None:
            self.waited += 1

        def views(self, whole: Tensor) -> tuple[Tensor, ...]:
            return (whole,)

    one, other = Gathers(), Gathers()
    wait, _ = one.regather(), other.regather()
    assert wait()[0].sum() == 4
    for bucket in (one, other):
        bucket.finish_gathers()  # what follows a backward that raises
        bucket.finish_gathers()
    assert (one.waited, other.waited) == (1, 1)


# --- memory that is not backward's alone, and derivatives that torch does not tell


class _Permuted(nn.Module):
    """einsum of one operand gives back its memory, and its schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.o = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for b in self.b:
            x = b(x)
            q = x.square()
            x = self.o(torch.einsum("bij->bji", x) + q.sin()).tanh() + q
        return x.square().mean()


@torch.library.custom_op("test_joint::straight_through", mutates_args=())
def _straight_through(x: Tensor) -> Tensor:
    return x.round()


@_straight_through.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _looks(ctx: Any, g: Tensor) -> Tensor:
    if bool(g.isnan().any()):  # so it cannot be traced
        raise ValueError("nan")
    return g


_straight_through.register_autograd(_looks)
shardc.rule(_straight_through, "... -> ...", samples=[lambda: (torch.randn(4, 6),)])


class _PassedOn(nn.Module):
    """The gradient that an op of the user's gives is the one that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        w, y = self.a(x), self.b(x)
        u, v = w.sin(), y.tanh()
        return (y + _straight_through(w)).square().mean() + u.mean() + v.mean()


class _Expanded(nn.Module):
    """A slice that is expanded has as many elements as what it is a slice of."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)[:, :, 0:2]
        w = (h * h).sum((1, 2))
        c = torch.cat([x[:, :, 0] * 2, h.sum(2)], 1)
        return c.square().mean() + w.mean()


@pytest.mark.parametrize(
    ("model", "shape", "spec"),
    [
        (_Permuted, (4, 4, 4), {"checkpoint": [{"match": "b.*", "save": []}]}),
        (_Permuted, (4, 4, 4), {"checkpoint": [{"match": "*", "save": []}]}),
        (_PassedOn, (4, 4), {}),
        (_Expanded, (4, 2, 2), {}),
    ],
)
def test_sums_take_no_memory_that_others_look_at(model: Any, shape: tuple[int, ...], spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, batch = model(), {"x": torch.randn(shape)}
    assert (
        shardc.compile(plain, batch, {"shardc": 1, "mesh": {"dp": 2}, "strict": True, **spec}, prove=False).verify().ok
    )


class _OneBias(nn.Module):
    """A bias of one number, beside a product whose input's gradient is summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.a(x), self.weight).square().mean()


def test_a_bias_of_one_number_beside_a_sum_over_ranks() -> None:
    spec = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"weight": {1: "tp"}}}
    report = shardc.compile(_OneBias(), {"x": torch.randn(4, 8)}, spec).verify()
    assert report.ok, report


class _Turned(nn.Module):
    """Stages hand on what is a view of another layout, whose gradient goes to kernels that read memory as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x).transpose(1, 2)
            x = (x + x.softmax(-1).cumsum(1)).transpose(1, 2)
        return x.square().mean()


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4), ("zb-v", 4), ("dualpipe-v", 4)])
def test_a_stage_knows_how_what_comes_from_others_lies_in_memory(schedule: str, stages: int) -> None:
    torch.manual_seed(0)
    model, batch = _Turned().double(), {"x": torch.randn(4, 16, 12, dtype=torch.float64)}
    spec = {"shardc": 1, **PP, "pipeline": {"axis": "pp", "stages": stages, "schedule": schedule}, "strict": True}
    assert shardc.compile(model, batch, spec, prove=False).verify().ok


def test_a_gradient_lies_alike_on_ranks_with_padding_and_without() -> None:
    """That of a mean has no memory of its own for each number; view_as_complex, the gradient's view, wants it."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(self.a(x).unflatten(-1, (8, 2)))
            return torch.view_as_real(z.conj() * z).mean()

    model, batch = Squares().double(), {"x": torch.randn(8, 4, 16, dtype=torch.float64)}
    spec = {"shardc": 1, "mesh": {"dp": 3}, "uneven": "pad", "strict": True}
    assert shardc.compile(model, batch, spec).verify().ok


@pytest.mark.parametrize("file", ["stage0.py", "stage0_forward.py"])
@pytest.mark.parametrize(
    "name", ["load_library.__func__.__globals__.get", "aten.copy_.default", "ops.accumulate", "1 + 1"]
)
def test_an_artifact_calls_no_op_by_a_text_that_a_program_may_not(file: str, name: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    program = shardc.compile(
        model, {"input": torch.ones(4, 4)}, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().mean()
    )
    program.save(tmp_path / "out")
    text = (tmp_path / "out" / file).read_text()
    head, arrow, body = text.partition("):\n")
    line = f"    e1 = ops.opaque({name!r}, (), (), '__builtins__')  # (f32[1])\n"
    (tmp_path / "out" / file).write_text(head + arrow + line + body)
    with pytest.raises(shardc.ShardcError, match=r"not an op that programs call|that only compute"):
        shardc.load(tmp_path / "out", trust=True)


def test_a_taped_op_is_looked_up_by_its_name_alone() -> None:
    from shardc.runtime.ops.opaque import op_of

    assert op_of("aten.silu.default") is torch.ops.aten.silu.default
    for name in ("load_library.__func__.__globals__", "ops.opaque", "ops.__all__", "aten.silu", "aten.silu.__class__"):
        with pytest.raises(shardc.ShardcError, match="is not an op that programs call"):
            op_of(name)


def test_verify_runs_the_texts_that_are_there(tmp_path: Path) -> None:
    compiled("gpt", {"mesh": {"dp": 2}}).save(tmp_path / "out")
    file = tmp_path / "out" / "stage0_backward.py"
    changed = file.read_text().replace("aten.gelu_backward.default(", "aten.silu_backward.default(", 1)
    assert changed != file.read_text()
    file.write_text(re.sub(r"(silu_backward\.default\([^)]*?), approximate='[a-z]*'\)", r"\1)", changed))
    assert not shardc.load(tmp_path / "out", trust=True).verify().ok
