"""A loop of one's own around program.module: cutting a batch, clipping, averages of weights, and what is refused."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.checks.tensor_parts import TensorPart
from shardc.runtime.checks.tensor_parts import part as part_of
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, SPECS, backward, compiled, on_engines, on_modules

NORMS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
    "foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, foreach=True),
    "get_total_norm": lambda ps: nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]),
    "a sum of squares": lambda ps: sum(p.grad.pow(2).sum() for p in ps if p.grad is not None),
    "a product": lambda ps: [torch.dot(p.grad.flatten(), p.grad.flatten()) for p in ps if p.grad is not None],
    "of what is detached": lambda ps: [p.grad.detach().data.norm(2) for p in ps if p.grad is not None],
    "by hand": lambda ps: torch.stack([p.grad.norm() for p in ps if p.grad is not None]).norm(),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_norm_over_parts_of_gradients_is_refused(spec: str) -> None:
    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        backward(module)
        for norm in NORMS.values():
            with pytest.raises(ShardcError, match=r"module\.clip_grad_norm_"):
                norm(list(module.parameters()))
        nn.utils.clip_grad_value_(module.parameters(), 2**-10)
        plain = [p.grad.as_subclass(Tensor) for p in module.parameters() if p.grad is not None and p.numel()]
        assert all(float(g.abs().max()) <= 2**-10 for g in plain)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_in_one_vector_are_refused(spec: str) -> None:
    whole = nn.utils.parameters_to_vector(NORMED.parameters())

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        before = module.full_state_dict()
        with pytest.raises(ShardcError, match=r"parameters_to_vector: up.weight: this rank has only a part"):
            nn.utils.parameters_to_vector(module.parameters())
        with pytest.raises(ShardcError, match=r"vector_to_parameters: up.weight: .*\n  fix: take the whole weights"):
            nn.utils.vector_to_parameters(whole, module.parameters())
        torch.testing.assert_close(module.full_state_dict(), before, rtol=0, atol=0)
        p = module.up.weight
        assert p.view(-1).numel() == p.numel() == p.detach().numel()


@pytest.mark.parametrize("spec", SPECS)
def test_every_trained_parameter_has_a_gradient(spec: str) -> None:
    """Also where this rank's stretch of it has no element: what a loop does with `.grad` works, or says why not."""
    program = compiled(spec)

    def work(mesh: LoopbackMesh) -> int:
        module = ShardedModule(program, NORMED, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        backward(module)
        grads = [p.grad for p in module.parameters()]
        assert all(g is not None and g.shape == p.shape for g, p in zip(grads, module.parameters(), strict=True))
        empty = [g for g in grads if g is not None and not g.numel()]
        for g in empty:
            with pytest.raises(ShardcError, match="this rank's part of the gradient"):
                g.norm()
        for _ in range(2):
            optimizer.step()
            backward(module)
        return len(empty)

    assert (sum(loopback(program.mesh, work)) > 0) == spec.startswith("zero")


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}])
def test_a_norm_over_whole_gradients_is_torchs(mesh: dict[str, int]) -> None:
    reference = copy.deepcopy(NORMED)
    reference(**BATCH).backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)

    @on_modules(shardc.compile(copy.deepcopy(NORMED), BATCH, {"shardc": 1, "mesh": mesh}))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        backward(module)
        torch.testing.assert_close(nn.utils.clip_grad_norm_(module.parameters(), 0.1), want)


def test_a_part_of_a_gradient_is_a_tensor_otherwise() -> None:
    g = part_of(torch.randn(3, 4), {1})
    assert type(g * 2) is type(g.detach()) is type(g.data) is type(g.view(-1)) is type(g.clone()) is TensorPart
    assert type(g > 0) is type(g[0]) is type(g.chunk(2)[0]) is TensorPart
    assert type(g.as_subclass(Tensor)) is type(torch.zeros_like(g)) is type(g._base) is Tensor
    buffer = torch.zeros(3, 4)
    assert buffer.lerp_(g, 0.5) is buffer
    assert g.add_(1) is g
    assert type(copy.deepcopy(g)) is TensorPart
    assert (g.numel(), g.shape, len(g), "TensorPart(" in repr(g)) == (12, (3, 4), 3, True)
    assert torch.equal(torch.max(g, buffer).as_subclass(Tensor), g.as_subclass(Tensor).maximum(buffer))
    g[g > 100] = 0.0
    file = io.BytesIO()
    torch.save(g, file)
    file.seek(0)
    assert type(torch.load(file)) is Tensor


def test_sums_along_whole_dims_of_a_part() -> None:
    """A row that a rank has all of has the norm that it has on one device; a norm of these is one of a part again."""
    g = part_of(torch.randn(3, 4), {0})
    plain = g.as_subclass(Tensor)
    scaled = g * (0.1 / g.norm(dim=1, keepdim=True)).clamp(max=1)  # adaptive clipping, row by row
    assert torch.equal(scaled.as_subclass(Tensor), plain * (0.1 / plain.norm(dim=1, keepdim=True)).clamp(max=1))
    assert torch.equal(scaled.sum(-1).as_subclass(Tensor), scaled.as_subclass(Tensor).sum(-1))
    for mixed in (lambda: g.norm(dim=0), lambda: g.sum((0, 1)), lambda: g.norm(dim=1).norm(), lambda: g.T.norm(dim=1)):
        with pytest.raises(ShardcError, match="part of the gradient"):
            mixed()


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda g: g.numpy(),
    "asarray": lambda g: np.asarray(g),
    "tolist": lambda g: g.tolist(),
    "item": lambda g: g[0, 0].item(),
    "a list of numbers": lambda g: [float(x) for x in g.flatten()],
    "@": lambda g: g.flatten() @ g.flatten(),
    "einsum": lambda g: torch.einsum("ij,ij->", g, g),
    "cumsum": lambda g: (g.flatten() ** 2).cumsum(0),
    "var": lambda g: g.var(),
    "parameters_to_vector": lambda g: nn.utils.parameters_to_vector([g]).norm(),
    "cat": lambda g: torch.cat([g.flatten(), g.flatten()]).norm(),
    "mse_loss": lambda g: nn.functional.mse_loss(g, torch.zeros(3, 4), reduction="sum"),
    "cosine": lambda g: nn.functional.cosine_similarity(g.flatten(), torch.ones(12), dim=0),
    "normalize": lambda g: nn.functional.normalize(g, dim=1),
    "qr": lambda g: torch.linalg.qr(g),
    "orthogonal": lambda g: g @ g.T @ g,
    "a copy's": lambda g: g.clone().norm(),
    "a maximum": lambda g: g.abs().max(),
    "quantile": lambda g: g.quantile(0.9),
    "topk": lambda g: g.flatten().topk(2),
    "what decides": lambda g: bool(torch.isfinite(g).all()),
    "a loss scaler's": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_elements_of_a_part_is_refused(name: str) -> None:
    with pytest.raises(
        ShardcError,
        match=r"use this rank's part of the gradient|rank would look|the vector would differ|selects entries by",
    ):
        MIXED[name](part_of(torch.randn(3, 4), {1}))


class Lion(torch.optim.Optimizer):
    """By hand, as people write it."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.sign(m * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        f"{kind.__name__} {foreach}": functools.partial(kind, lr=1e-2, foreach=foreach, **more)
        for foreach in (False, True)
        for kind, more in (
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
            (torch.optim.Adam, {"amsgrad": True}),
            (torch.optim.AdamW, {"maximize": True}),
            (torch.optim.Adamax, {}),
            (torch.optim.NAdam, {}),
            (torch.optim.RAdam, {}),
            (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
            (torch.optim.Adagrad, {}),
            (torch.optim.Adadelta, {}),
            (torch.optim.ASGD, {}),
            (torch.optim.Rprop, {}),
        )
    },
    **{
        f"{kind.__name__} fused": functools.partial(kind, lr=1e-2, fused=True)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    },
    "Lion": Lion,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_work_element_by_element_are_as_they_were(name: str) -> None:
    """Bit for bit, and what they keep is plain."""
    torch.manual_seed(0)
    plain, held = ([nn.Parameter(x.clone()) for x in (torch.randn(3, 4), torch.randn(5))] for _ in range(2))
    with torch.no_grad():
        for p, q in zip(plain, held, strict=True):
            q.copy_(p)
    optimizers = [ELEMENTWISE[name](ps) for ps in (plain, held)]
    for _ in range(3):
        for p, q in zip(plain, held, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = part_of(p.grad.clone(), {0})
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(plain, held, strict=True))
    kept = [x for state in optimizers[1].state.values() for x in state.values() if isinstance(x, Tensor)]
    assert {type(x) for x in kept} <= {Tensor}


@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`", "ignore:.*torch.jit.script_method"
)
def test_a_compiled_optimizer_steps_parts() -> None:
    plain, held = (nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    compiled_one = torch.optim.AdamW([held], lr=0.1)
    optimizers = torch.optim.AdamW([plain], lr=0.1), compiled_one
    steps = optimizers[0].step, torch.compile(compiled_one.step, backend="eager")
    for seed in range(2):
        plain.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        held.grad = part_of(plain.grad.clone(), {0})
        for step in steps:
            step()
    torch.testing.assert_close(held, plain)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizers_step_on_parts(spec: str, options: dict[str, bool]) -> None:
    reference = copy.deepcopy(NORMED)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(2):
        plain.zero_grad()
        reference(**BATCH).backward()
        plain.step()

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, **options)
        for zeros in (True, False):  # eps: up.bias has no gradient but noise
            optimizer.zero_grad(set_to_none=zeros)
            backward(module)
            optimizer.step()
        torch.testing.assert_close(module.full_state_dict(), dict(reference.state_dict()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_an_average_of_weights_is_the_plain_models(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = compiled(spec)

    def train(model: Any, loss: Callable[[Any], Tensor], average: AveragedModel) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            average.update_parameters(model)

    def averaged(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    reference = copy.deepcopy(NORMED)
    want = averaged(reference)
    train(reference, lambda m: m(**BATCH), want)

    @on_modules(program)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        average = averaged(module)
        train(module, lambda m: m(**m.local(BATCH)), average)
        torch.testing.assert_close(average.module.full_state_dict(), dict(want.module.state_dict()))
        torch.testing.assert_close(module.full_state_dict(), dict(reference.state_dict()))
        average.eval()
        want.eval()
        torch.testing.assert_close(average(**program.local(BATCH, mesh.rank)), want(**BATCH))

    assert (
        "another engine or module was made from it" not in capfd.readouterr().err
    )  # the average is no second training


def test_a_copy_shares_nothing_and_a_pickle_is_refused() -> None:
    @on_modules(compiled("tp"))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        optimizer = torch.optim.AdamW(module.parameters())
        backward(module)
        other, its = copy.deepcopy((module, optimizer))
        assert {id(p) for g in its.param_groups for p in g["params"]} == {id(p) for p in other.parameters()}
        backward(other)
        its.step()
        before = NORMED.up.weight.chunk(2)[mesh.coordinate("tp")]
        assert torch.equal(module.get_parameter("up.weight"), before)
        assert not torch.equal(other.get_parameter("up.weight"), before)
        with pytest.raises(ShardcError, match="full_state_dict"):
            pickle.dumps(module)
        state = io.BytesIO()
        torch.save(module.state_dict(), state)


class Classes(nn.Module):
    """Logits whose classes are split, and their softmax's normaliser."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        return nn.functional.cross_entropy(logits, ids.roll(1)) + logits.logsumexp(-1).square().mean()


def test_backward_of_a_graph_that_is_kept_runs_again() -> None:
    """What it saves as large as the logits is written over in the last backward alone."""
    model, batch = Classes().double(), {"ids": torch.arange(8)}
    spec = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
    program = shardc.compile(model, batch, {"shardc": 1, **spec})
    text = program.text()
    assert "nll_parts" in text and "sum_exp" in text  # noqa: PT018
    reference = copy.deepcopy(model)
    (reference(**batch) * 3).backward()

    @on_modules(program, model)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        loss = module(**program.local(batch, mesh.rank))
        for again in (True, True, False):
            loss.backward(retain_graph=again)
        for name, p in reference.named_parameters():
            assert p.grad is not None
            dim = program.param(name).layout.shards()[0][1].dim
            want = p.grad.chunk(2, dim)[mesh.coordinate("tp")]
            got = module.get_parameter(name).grad
            assert got is not None
            torch.testing.assert_close(got.as_subclass(Tensor), want, rtol=1e-12, atol=1e-12)


def test_a_program_is_its_own_copy_and_is_saved_not_pickled() -> None:
    program = compiled("tp")
    assert copy.deepcopy({"program": program})["program"] is program is copy.copy(program)
    for write in (pickle.dumps, lambda p: torch.save({"program": p}, io.BytesIO())):
        with pytest.raises(ShardcError, match=r"(?s)not pickled.*program.save\(folder\), and shardc.load\(folder\)"):
            write(program)


class Pair(NamedTuple):
    x: Tensor
    name: str


@pytest.mark.parametrize("batch", [BATCH, {"x": BATCH["x"], "note": "kept"}])
def test_a_batch_is_cut_in_its_own_form(batch: dict[str, Any]) -> None:
    program = compiled("tp")
    parts = [program.local(batch, rank) for rank in range(4)]
    assert all(list(part) == list(batch) for part in parts)
    for rank, part in enumerate(parts):
        assert torch.equal(part["x"], BATCH["x"].chunk(2)[rank // 2])


def test_forms_of_batches_that_are_no_dicts() -> None:
    class Two(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[0].square().mean()

    program = shardc.compile(Two(), (Pair(BATCH["x"], "n"),), {"shardc": 1, "mesh": {"dp": 2}})
    (part,) = program.local((Pair(BATCH["x"], "n"),), 1)
    assert isinstance(part, Pair)
    assert torch.equal(part.x, BATCH["x"][4:])
    with pytest.raises(ShardcError, match="the batch gives"):
        program.local((Pair(BATCH["x"][:4], "n"),), 1)


def test_a_whole_batch_for_a_module_is_told_how_to_cut_it() -> None:
    program = compiled("tp")

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match=r"program\.local\(batch\)"):
            ShardedModule(program, NORMED, mesh=mesh)(**BATCH)
        with pytest.raises(ShardcError, match=r"program\.local\(batch\)"):
            Engine(program, NORMED, mesh=mesh).step(BATCH, local=True)

    loopback(program.mesh, work)


PENALTIES: dict[str, Callable[[nn.Module, Callable[[], Tensor]], Tensor]] = {
    "after": lambda m, loss: loss() + 0.1 * sum(p.square().sum() for p in m.parameters()),
    "before": lambda m, loss: 0.1 * sum(p.square().sum() for p in m.parameters()) + loss(),
    "of one weight": lambda m, loss: loss() + m.get_parameter("up.weight").abs().sum(),
    "two losses": lambda m, loss: loss() + 0.5 * loss(),
}


@pytest.mark.parametrize("spec", [*SPECS, "dp", "zero 2"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_is_added_to_the_loss_by_parameters_is_as_of_a_plain_model(spec: str, penalty: str) -> None:
    """Of whole parameters its gradient is whole on every rank, and not summed over them; what was in .grad before
    stays. A sum over a part is refused: its number is another one on every rank.
    """
    specs = {"dp": {"mesh": {"dp": 4}}, "zero 2": {"mesh": {"dp": 2}, "data": {"zero": 2}}}
    made = {"shardc": 1, **specs[spec]} if spec in specs else None
    program = shardc.compile(copy.deepcopy(NORMED), BATCH, made) if made else compiled(spec)

    def train(model: Any, loss: Callable[[], Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            if i != 2:  # gradients of two steps add up
                optimizer.zero_grad()
            PENALTIES[penalty](model, loss).backward()
            optimizer.step()

    reference = copy.deepcopy(NORMED)
    train(reference, lambda: reference(**BATCH))

    @on_modules(program)
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        if penalty != "two losses" and spec != "dp":
            with pytest.raises(ShardcError, match=r"weight: p\.sum\(\) would be that of the part(.|\n)*loss function"):
                train(module, lambda: module(**module.local(BATCH)))
            return
        train(module, lambda: module(**module.local(BATCH)))
        torch.testing.assert_close(module.full_state_dict(), dict(reference.state_dict()))


def assign(m: ShardedModule) -> None:
    m.load_state_dict({n: x.clone() for n, x in m.state_dict().items()}, assign=True)


def put(m: ShardedModule) -> None:
    m.get_submodule("up").register_parameter("weight", nn.Parameter(m.get_parameter("up.weight") * 2))


def double(m: ShardedModule) -> None:
    for p in m.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("replace", [assign, put, double])
def test_parameters_that_are_replaced_are_refused_or_used(spec: str, replace: Callable[[ShardedModule], None]) -> None:
    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        if replace is assign:
            with pytest.raises(ShardcError, match=r"assign=True.*: the program uses its own parameters"):
                replace(module)
            return
        replace(module)
        if replace is double and spec == "tp":
            with torch.no_grad():
                module.get_parameter("down.weight").zero_()
            assert not module.full_state_dict()["down.weight"].any(), "before the next forward, too"
            assert not copy.deepcopy(module).full_state_dict()["down.weight"].any()
            value = module(**module.local(BATCH))
            value.backward()
            plain = copy.deepcopy(NORMED)
            nn.init.zeros_(plain.down.weight)
            want = plain(**BATCH)
            want.backward()
            torch.testing.assert_close(value, want)
            torch.testing.assert_close(module.get_parameter("down.bias").grad, plain.down.bias.grad)
            return
        with pytest.raises(ShardcError, match="or its memory, was replaced"):
            module(**module.local(BATCH))


def optimizers(m: ShardedModule) -> dict[str, torch.optim.Optimizer]:
    ps = list(m.parameters())
    groups = [{"params": [p for p in ps if p.ndim > 1]}, {"params": [p for p in ps if p.ndim <= 1], "weight_decay": 0}]
    shaped = [{"params": [p for p in ps if (len(p.shape) > 1) == wide]} for wide in (True, False)]
    by_shape = torch.optim.AdamW(shaped, lr=0.1)
    return {"dims": torch.optim.AdamW(groups, lr=0.1), "shapes": by_shape, "whole": torch.optim.Adafactor(ps, lr=0.1)}


@pytest.mark.parametrize(
    ("spec", "kind", "said"),
    [
        ("zero 1", "dims", ""),
        ("zero 1", "shapes", "one group has all parameters, and another has none: at ZeRO 1 .*\n.*group by `p.ndim`"),
        ("zero 1", "whole", "the optimizer Adafactor"),
        ("tp", "dims", ""),
        ("tp", "whole", "the optimizer Adafactor"),
        ("tp", "compiled", "the optimizer Adafactor"),
        ("zero 1", "named", ""),
    ],
)
def test_an_optimizer_that_steps_parts_otherwise_is_refused(spec: str, kind: str, said: str) -> None:
    """Before it has changed anything; optimizers of other parameters are nobody's business."""

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        other = nn.Parameter(torch.ones(2, 2))
        others = torch.optim.Adafactor([other])
        named = {"*.bias": {"weight_decay": 0.0}}
        optimizer = (
            torch.optim.AdamW(shardc.groups(module.named_parameters(), named))
            if kind == "named"
            else optimizers(module)["whole" if kind == "compiled" else kind]
        )
        step = torch.compile(optimizer.step, backend="eager") if kind == "compiled" else optimizer.step
        others.step()
        for _ in range(2):
            backward(module)
            if not said:
                step()
                continue
            before = [p.detach().clone() for p in module.parameters()]
            with pytest.raises(ShardcError, match=said):
                step()
            assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("right", [False, True])
def test_an_optimizer_of_the_plain_model_is_told_from_the_modules(right: bool) -> None:
    """It would train nothing, without a word. Beside the module's own it is nobody's business."""
    program = compiled("tp")

    def work(mesh: LoopbackMesh) -> None:
        model = copy.deepcopy(NORMED)
        module = ShardedModule(program, model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        own = torch.optim.SGD(module.parameters(), lr=0.1) if right else None
        for i in range(5):
            if i == 2 and not right:
                with pytest.raises(
                    ShardcError, match=r"the optimizer Adam: .*of the plain model(.|\n)*Adam\(module.par"
                ):
                    backward(module)
                return
            backward(module)
            (own or optimizer).step()

    loopback(program.mesh, work)


@pytest.mark.parametrize("kind", ["same", "own", "constant"])
def test_the_same_rows_on_all_ranks_are_told_once(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = compiled("tp")
    rows = BATCH["x"][:4]

    def work(mesh: LoopbackMesh) -> None:
        module, engine = ShardedModule(program, NORMED, mesh=mesh), Engine(program, NORMED, mesh=mesh)
        for i in range(5):
            part = {"same": rows + i, "own": rows + mesh.coordinate("dp"), "constant": torch.ones(4, 8)}[kind]
            module(part).backward()
            engine.step({"x": part}, local=True)

    loopback(program.mesh, work)
    told = capfd.readouterr().err
    assert told.count("3 times in a row all ranks got the same rows") == (2 if kind == "same" else 0)


def test_global_batches_are_not_taken_for_the_same_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """Stages of a pipeline may differ in other things: that they do not says nothing about rows."""
    spec = {"shardc": 1, "mesh": {"dp": 2, "pp": 2}, "pipeline": {"axis": "pp", "schedule": "gpipe", "stages": 2}}

    @on_engines(shardc.compile(NORMED, BATCH, spec, prove=False))
    def _(engine: Engine, mesh: LoopbackMesh) -> None:
        for _ in range(4):
            engine.step(BATCH)

    assert "the same rows" not in capfd.readouterr().err
