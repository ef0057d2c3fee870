"""Capture: what comes out for unmodified models, and what is refused with which words."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc import torch_private
from shardc.capture import capture, compare_eager
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.runtime.mesh.loopback import loopback
from shardc.verify.reference import interpret, reach
from tests import zoo
from tests.one_device import tensors_of

torch.set_num_threads(1)


class Net(nn.Module):
    """A linear layer, then a function of the layer and its output."""

    def __init__(self, function: Any = lambda self, y: y.sum()) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(6, 6)
        self.k = torch.arange(6.0)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, **_: Any) -> Any:
        return self.function(self, self.fc(x))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def refused(function: Any, text: str, *, line: str | None = None, batch: Any = X, **options: Any) -> ShardcError:
    """Capture fails with `text`, names the place of the source text `line` in this file, and says what to do."""
    with pytest.raises(ShardcError, match=text) as e:
        capture(Net(function), batch, **options)
    if line is not None:
        found = re.search(r"test_capture\.py:(\d+)", e.value.where)
        assert found, e.value.where
        with open(__file__, encoding="utf-8") as f:
            assert line in f.readlines()[int(found[1]) - 1]
    assert e.value.fix
    return e.value


def grads(program: Program, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    params, buffers, inputs = tensors_of(program, model, batch)
    loss, *_ = interpret(program, params, buffers, inputs)
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return {p.fqn: g for p, g in zip(program.params, found, strict=True) if g is not None}


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_conventions() -> None:
    model, batch = zoo.resnet_bn()
    program = capture(model, batch)
    names = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    assert names == ["mesh", "rng", *(x.name for x in (*program.params, *program.buffers, *program.inputs))]
    assert all(n.target == n.name for n in program.graph.nodes if n.op == "placeholder")
    assert program.mesh.world == 1
    assert program.param("bn.weight").name == "bn_weight"
    updated = [b.fqn for b in program.buffers if b.updated]
    assert len(updated) == 5 * 3
    assert updated[:3] == ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
    loss, news = program.graph.output_node().args[0]
    assert loss.meta["value"].shape == ()
    assert [n.meta["value"].requires_grad for n in news] == [False] * 15


def test_tied_weights_are_one_param() -> None:
    for build, names in (
        (zoo.gpt, ("wte.weight", "head.weight")),
        (zoo.gpt2, ("transformer.wte.weight", "lm_head.weight")),
        (zoo.bert, ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")),
        (zoo.t5, ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")),
    ):
        model, batch = build()
        program = capture(model, batch, prove=False)
        p = program.param(names[0])
        assert (p.fqn, *p.aliases) == names
        assert len(program.params) == len(list(model.parameters()))


def test_tied_weights_on_meta_stay_apart_from_others() -> None:
    with torch.device("meta"):
        a, b = nn.Linear(6, 6), nn.Linear(6, 6)
        model = nn.Sequential(a, b, nn.Linear(6, 6))
    model[2].weight = a.weight
    program = capture(model, torch.zeros(2, 6, device="meta"), loss=lambda y, _: y.sum())
    names = [(p.fqn, *p.aliases) for p in program.params]
    assert names == [("0.weight", "2.weight"), ("0.bias",), ("1.weight",), ("1.bias",), ("2.bias",)]
    assert program.notes == ()  # proven, on made-up numbers


def test_unused_frozen_and_constant() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        return (y * self.k * torch.tensor([1.0, 2, 3, 4, 5, 6])).sum()

    model = Net(function)
    model.other = nn.Linear(3, 3)
    model.fc.bias.requires_grad_(False)
    program = capture(model, X)
    assert not program.param("fc.bias").requires_grad
    assert program.param("other.weight").shape == (3, 3)
    constants = [b for b in program.buffers if b.constant is not None]
    assert sorted(b.constant.tolist() for b in constants) == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert all(b.fqn == "" and not b.persistent for b in constants)
    assert [b.fqn for b in program.buffers if b.constant is None] == ["seen"]
    outputs = {n.name for n in program.graph.nodes if n.op == "call_function" and n.meta["value"].requires_grad}
    assert outputs
    assert not program.graph.find_nodes(op="placeholder", target="fc_bias")[0].meta["value"].requires_grad


def test_batches() -> None:
    class Any_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, a: Any, b: Any = None, scale: float = 1.0) -> Tensor:
            x = a["x"][0] if isinstance(a, dict) else a
            return ((x * self.w if b is None else x * b * self.w) * scale).sum()

    for batch, paths in (
        (X, [()]),
        ((X,), [(0,)]),
        ((X, X), [(0,), (1,)]),
        ({"a": X, "b": X, "scale": 2.0}, [("a",), ("b",)]),
        ({"a": {"x": [X], "y": None}, "scale": 3.0}, [("a", "x", 0)]),
    ):
        program = capture(Any_(), batch)
        assert [i.path for i in program.inputs] == paths
        assert all(reach(batch, i.path) is X for i in program.inputs)
        model = Any_()
        want = (
            model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
        )
        got, *_ = interpret(program, *tensors_of(program, model, batch))
        assert torch.equal(got, want)
    assert [i.name for i in capture(Any_(), (X, X)).inputs] == ["input_0", "input_1"]
    with pytest.raises(ShardcError, match="the batch contains no tensor"):
        capture(Any_(), {"a": 1})
    with pytest.raises(ShardcError, match="a is a list\n  fix: make it a tensor"):
        capture(Any_(), {"a": [1, 2]})
    with pytest.raises(ShardcError, match="batch: a is a numpy array, not a tensor\n  fix: torch"):
        capture(Any_(), {"a": X.numpy(), "b": X})
    with pytest.raises(ShardcError, match="the batch is a function"):
        capture(Any_(), lambda: X)
    with pytest.raises(ShardcError, match=r"the model is a class, not a torch\.nn\.Module"):
        capture(Any_, X)  # type: ignore[arg-type]


def test_losses() -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    for function in (
        lambda s, y: y.sum(),
        lambda s, y: Output(y.sum()),
        lambda s, y: {"loss": y.sum(), "y": y},
        lambda s, y: (y.sum(), y),
        lambda s, y: y.sum().view(1),
    ):
        program = capture(Net(function), X)
        assert program.graph.output_node().args[0][0].meta["value"].shape == ()
    program = capture(Net(lambda s, y: y), (X,), loss=lambda y, batch: F.mse_loss(y, batch[0]))
    at = {n.meta["source"].code for n in program.graph.nodes if op_name(n.target) == "mse_loss"}
    assert at == {"program = capture(Net(lambda s, y: y), (X,), loss=lambda y, batch: F.mse_loss(y, batch[0]))"}


def test_fake_and_meta_models_and_batches() -> None:
    model, batch = zoo.llama()
    want = capture(model, batch, prove=False)
    mode = torch_private.fake_mode()
    fake = {n: torch_private.fake_tensor(mode, x) for n, x in batch.items()}
    meta, _ = zoo.llama()
    for m, b in (
        (model, fake),
        (meta.to("meta"), fake),
        (meta, {n: x.to("meta") for n, x in batch.items()}),
        (meta, batch),
    ):
        program = capture(m, b)
        assert str(program.graph) == str(want.graph)
        assert program.notes == want.notes  # on what it computes in float32


def test_sources() -> None:
    model, batch = zoo.gpt()
    program = capture(model, batch)
    by_op = {op_name(n.target): n.meta["source"] for n in program.graph.nodes if n.op == "call_function"}
    assert by_op["scaled_dot_product_attention"].module == "h.1"
    assert by_op["scaled_dot_product_attention"].code.startswith("y = F.scaled_dot_product_attention(")
    assert re.fullmatch(r"__init__\.py:\d+", by_op["linear"].line)
    assert by_op["linear"].module == "head"
    assert by_op["cross_entropy_loss"].module == ""
    model, batch = zoo.llama()
    by_op = {
        op_name(n.target): n.meta["source"]
        for n in capture(model, batch, prove=False).graph.nodes
        if n.op == "call_function"
    }
    assert re.fullmatch(r"model\.layers\.1\.mlp\.act_fn \(\w+\.py:\d+\)", str(by_op["silu"]))
    assert by_op["linear"].line.startswith("modeling_llama.py:")
    assert by_op["linear"].code.startswith("logits = self.lm_head(hidden_states")


def test_the_model_is_left_as_it_was() -> None:
    model, batch = zoo.llama()
    import transformers.masking_utils as masking

    def state() -> list[Any]:
        return [
            *[(n, id(p), p.grad) for n, p in model.named_parameters()],
            *[(n, id(b)) for n, b in model.named_buffers()],
            model.config.use_cache,
            masking.is_tracing,
            masking.find_packed_sequence_indices,
            torch.Tensor.register_hook,
            torch.autograd.Function.__dict__["apply"],
            torch.fx.proxy.TracerBase.create_node,
            [m.training for m in model.modules()],
            torch.random.get_rng_state().sum(),
        ]

    before, weights = state(), {n: p.clone() for n, p in model.named_parameters()}
    capture(model, batch)
    assert state() == before
    with pytest.raises(ShardcError):
        capture(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(ShardcError):
        capture(model, {"nonsense": batch["input_ids"]})
    assert state() == before
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


# --- gradients that export alone would change -------------------------------------------------------------------------


def _no_grad(self: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().mean()
        same = y
        with torch.enable_grad():
            inner = self.fc.weight.sum() * scale
        outer = inner * 2
    return (y / scale).pow(2).sum() + same.sum() + inner + outer


def test_no_grad_regions() -> None:
    model = Net(_no_grad)
    program = capture(model, X)  # proves itself
    assert not [n for n in program.graph.nodes if "wrap" in str(n.target)]
    want = torch.autograd.grad(model(X), [model.fc.weight])[0]
    assert torch.allclose(grads(program, model, X)["fc.weight"], want, rtol=1e-6)


def test_inference_mode_is_no_grad() -> None:
    """Also where nothing compares the graph with the model: tracing does not see the mode."""

    @torch.inference_mode()
    def mean(y: Tensor) -> Tensor:
        return y.abs().mean()

    def forward(self: Net, y: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = mean(y)
            with torch.inference_mode(False):
                inner = self.fc.weight.sum()
        return (y / scale.clone()).pow(2).sum() + inner

    model = Net(forward)
    want = torch.autograd.grad(model(X), [model.fc.weight])[0]
    assert torch.allclose(grads(capture(model, X, prove=False), model, X)["fc.weight"], want, rtol=1e-6)


def test_what_a_no_grad_region_gives_back_as_it_is_keeps_its_gradient() -> None:
    """`y.to(y.dtype)` is y: the trace calls it by that name from there on."""

    def f(self: Net, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = y.to(y.dtype).contiguous().sin() + F.dropout(y, 0.5, training=False).flatten(0, 0)
        return (self.fc(y) * scale).sum()

    capture(Net(f), (torch.randn(4, 6),))  # proven


def test_a_module_brought_to_the_dtype_that_it_has_in_forward_stays_as_it_is() -> None:
    def f(self: Net, y: Tensor) -> Tensor:
        self.fc = self.fc.to(y.dtype)
        return self.fc(y).sum()

    model = Net(f)
    assert [p.fqn for p in capture(model, X).params] == [n for n, _ in model.named_parameters()]


def test_no_grad_regions_with_views_written_to() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        z = _no_grad(self, y) * torch.ones(6)
        z[1:3] = y[0, :2]
        return z.sum()

    capture(Net(function), X)


def test_buffers() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        self.seen.add_(1)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(y.mean(), alpha=0.1)
        return (y * self.seen).sum()

    model = Net(function)
    program = capture(model, X)
    _, news, _ = interpret(program, *tensors_of(program, model, X))
    model(X)
    assert torch.equal(news["seen"], model.seen)
    assert program.buffers[0].updated


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_changes_nothing(reentrant: bool) -> None:
    model = Net(lambda self, y: checkpoint(lambda z: self.fc(z).relu(), y, use_reentrant=reentrant).sum())
    assert set(grads(capture(model, X), model, X)) == {"fc.weight", "fc.bias"}


def test_a_reentrant_checkpoint_that_trains_nothing_is_named() -> None:
    """torch computes no gradients inside where no input requires one, and only warns."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True)).sum()

    with pytest.raises(ShardcError, match=r"lacks what torch.utils.checkpoint\(..., use_reentrant=True\)") as e:
        capture(Alone(), torch.ones(2, 4))
    assert [x.where for x in e.value.errors] == ["first.weight", "first.bias"]
    assert "use_reentrant=False" in str(e.value)

    also = Net(lambda self, y: (checkpoint(self.fc, X, use_reentrant=True) + y).sum())
    with pytest.raises(ShardcError, match="lacks"):  # trained, but not by what is inside
        capture(also, X)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_updates_buffers_twice_is_named(reentrant: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.norm, self.fc(x), use_reentrant=reentrant).square().sum()  # type: ignore[no-any-return]

    with pytest.raises(ShardcError, match=r"norm\.running_mean, .* a batch counts twice") as e:
        capture(Normed(), torch.randn(6, 4))
    assert e.value.where == "norm"
    assert "`checkpoint:`" in str(e.value)


def test_dropout_is_proven_with_seeds() -> None:
    model, batch = zoo.bert(dropout=0.3)
    assert capture(model, batch).notes == ()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_hooks_are_refused() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        y.register_hook(lambda g: g * 2)
        return y.sum()

    refused(function, "a tensor hook is registered in forward", line="y.register_hook(lambda g: g * 2)")
    model = Net()
    model.fc.register_full_backward_hook(lambda *_: None)
    model.fc.weight.register_hook(lambda g: g * 2)
    model.fc.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ShardcError) as e:
        capture(model, X)
    assert [re.sub(r"\d+", "N", x.where) for x in e.value.errors] == [
        f"{name} (test_capture.py:N)" for name in ("fc", "fc.weight", "fc.bias")
    ]
    assert "the module has a backward hook" in str(e.value)
    assert "the parameter has a gradient hook" in str(e.value)


def _branch(self: Net, y: Tensor) -> Tensor:
    if y.sum() > 0:
        y = y * 2
    return y.sum()


def _item(self: Net, y: Tensor) -> Tensor:
    return y.sum() * y.max().item()


def _experts(self: Net, y: Tensor) -> Tensor:
    chosen = y.argmax(-1)
    out = torch.zeros_like(y)
    for expert in range(3):
        rows = torch.where(chosen == expert)[0]
        out[rows] = y[rows] * y[rows].mean(0)
    return out.sum()


def _masked(self: Net, y: Tensor) -> Tensor:
    return y[y > 0].max()


def _range(self: Net, y: Tensor) -> Tensor:
    for _ in range(int(y.sum())):
        y = y * 2
    return y.sum()


@pytest.mark.parametrize(
    ("function", "what", "line"),
    [
        (_branch, "a branch depends on a tensor's value", "if y.sum() > 0:"),
        (_item, "a tensor becomes a Python number", "y.sum() * y.max().item()"),
        (_experts, "the loop over experts depends on a tensor's value", "y[rows] * y[rows].mean(0)"),
        (
            _masked,
            "indexing by a condition has a result whose size depends on a tensor's value",
            "return y[y > 0].max()",
        ),
        (_range, "the length of a loop depends on a tensor's value", "for _ in range(int(y.sum())):"),
    ],
)
def test_data_dependence_is_refused(function: Any, what: str, line: str) -> None:
    refused(function, what, line=line)


def test_losses_that_are_none() -> None:
    refused(
        lambda s, y: y, r"the model returns a tensor of shape \[4, 6\] and torch.float32: there is no scalar loss in it"
    )
    refused(lambda s, y: {"logits": y}, "the model returns a dict: there is no scalar loss in it")
    refused(lambda s, y: "yes", "the model returns a str: there is no scalar loss in it")
    refused(lambda s, y: (None, y), "the model returns a tuple: there is no scalar loss in it")
    refused(
        lambda s, y: (y, y.sum(), y.mean()), "the model returns a tuple: there is no scalar loss in it"
    )  # which one?
    refused(lambda s, y: y, "the loss is a Python number, from .item", loss=lambda y, b: 1.0)
    refused(
        lambda s, y: y, "the loss function returns nothing\n  fix: end it with `return loss`", loss=lambda y, b: None
    )
    named = r"the loss is a dict without 'loss', of 'mse'\n  fix: name the number that is trained 'loss'"
    refused(lambda s, y: y, named, loss=lambda y, b: {"mse": y.sum()})
    refused(
        lambda s, y: y, r"the loss is a tensor of shape \[4, 6\] and torch.float32, not a scalar", loss=lambda y, b: y
    )
    refused(
        lambda s, y: y, "the loss is a tensor of shape .* and torch.int64, not a scalar", loss=lambda y, b: y.argmax()
    )
    model, batch = zoo.llama()
    with pytest.raises(ShardcError, match="the model returns a CausalLMOutputWithPast: there is no scalar loss in it"):
        capture(model, {"input_ids": batch["input_ids"]})


def test_a_loss_that_is_no_function_of_output_and_batch() -> None:
    refused(lambda s, y: y, "loss: loss is a str, not a function", loss="mse")
    takes = r"loss takes \(output, batch\), and cannot be called with these two: too many positional arguments"
    refused(lambda s, y: y, takes, loss=lambda y: y.sum())
    swapped = r"loss takes \(.*\), and is called with \(output, batch\): .*\n  fix: write def loss\(output, batch\)"
    refused(lambda s, y: y, swapped, batch={"x": X}, loss=lambda a, b: F.mse_loss(b, a["x"]))  # it failed
    refused(lambda s, y: y, swapped, batch={"x": X}, loss=lambda batch, output: output.sum())  # it would run
    long = r"the loss failed: TypeError: mse_loss.{100,170} \.\.\.\)\n  fix"
    refused(
        lambda s, y: y, long, batch={"x": X}, loss=lambda y, b: F.mse_loss(y, b["x"], "a word", "another one", 3, 4, 5)
    )
    text = "the loss failed: AttributeError: .*\n  fix: it gets the model's output and the whole batch: loss=lambda"
    refused(lambda s, y: y, text, batch={"x": X}, loss=F.mse_loss)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_modules_compiled_by_torch_jit_are_refused() -> None:
    layer = nn.Linear(6, 6)
    for compiled in (torch.jit.script(nn.Sequential(layer)), torch.jit.trace(layer, X)):
        for model, where in ((compiled, "the model"), (nn.Sequential(compiled), "0")):
            with pytest.raises(
                ShardcError, match=f"^{where}: the module is scripted or traced by torch.jit.*\n  fix: pass"
            ):
                capture(model, X)


def test_errors_of_the_model_itself() -> None:
    text = "the model's forward failed: RuntimeError: a and b must have same reduction dim"
    refused(lambda s, y: y @ y, text, line="refused(lambda s, y: y @ y")
    refused(
        lambda s, y: s.missing, "the model's forward failed: AttributeError: 'Net' object has no attribute 'missing'"
    )
    with pytest.raises(ShardcError, match="the batch does not fit the model's forward"):
        capture(Net(), {"nonsense": X})
    with pytest.raises(ShardcError, match=r"the model is a function, not a torch\.nn\.Module"):
        capture(lambda x: x, X)  # type: ignore[arg-type]


def test_parameters_written_to_are_refused() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(0.9)
        return y.sum()

    refused(function, "the forward pass writes to the parameter 'fc.weight'", line="self.fc.weight.mul_(0.9)")

    def views(self: Net, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight[0].mul_(0.9)
        return y.sum()

    refused(views, "the forward pass writes to the parameter 'fc.weight'")


def test_activations_changed_under_no_grad_are_refused() -> None:
    def function(self: Net, y: Tensor) -> Tensor:
        z = y * 2
        with torch.no_grad():
            z.mul_(2)
        return z.sum()

    refused(function, "changes an activation in place under no_grad", line="z.mul_(2)")


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(ShardcError, match="lazy module has no shape yet\n  fix: run the model once on a batch"):
        shardc.compile(nn.Sequential(nn.LazyLinear(4)), X, {"shardc": 1}, loss=lambda y, _: y.sum())


def test_a_table_that_is_written_to_when_it_is_read() -> None:
    """What the error says to write instead gives the same weights."""
    torch.manual_seed(0)
    limited, plain = (nn.Sequential(nn.Embedding(6, 6, max_norm=n)).double() for n in (1.0, None))
    plain.load_state_dict(limited.state_dict())
    ids, spec = torch.arange(8) % 5, {"shardc": 1, "mesh": {"dp": 2}}
    with pytest.raises(ShardcError, match=r"(?s)0: max_norm writes to the weight .*\n  fix: .*embedding_renorm_"):
        capture(limited, ids, loss=lambda y, _: y.sum())
    program = shardc.compile(plain, ids, spec, loss=lambda y, _: y.sin().sum())

    def work(mesh: Any) -> Tensor:
        engine = program.engine(plain, lambda ps: torch.optim.SGD(ps, 0.5), mesh=mesh)
        for _ in range(3):
            with torch.no_grad():
                torch.embedding_renorm_(engine.params["0.weight"], ids, 1.0, 2.0)
            engine.step(ids)
        return engine.full_state_dict()["0.weight"]

    weights = loopback(program.mesh, work)
    optimizer = torch.optim.SGD(limited.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        limited(ids).sin().sum().backward()
        optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight, limited[0].weight.detach(), rtol=1e-12, atol=1e-15)


def test_batch_norm_without_momentum() -> None:
    """Running statistics are means over all steps, on any mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)).double()
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    program = shardc.compile(
        model, batches[0], {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().sum(-1).sqrt().mean()
    )

    def work(mesh: Any) -> dict[str, Tensor]:
        engine = program.engine(model, None, mesh=mesh)
        for batch in batches:
            engine.backward(batch)
            engine.update()
        return engine.full_state_dict()

    states = loopback(program.mesh, work)
    for batch in batches:
        model(batch)
    for state in states:
        torch.testing.assert_close(state["1.running_mean"], model[1].running_mean, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(state["1.running_var"], model[1].running_var, rtol=1e-12, atol=1e-15)
        assert int(state["1.num_batches_tracked"]) == 3


# --- the proof --------------------------------------------------------------------------------------------------------


def test_python_state_that_changes() -> None:
    def center(self: Net, y: Tensor) -> Tensor:
        loss = (y - self.k).square().mean()
        self.k.mul_(0.9)
        return loss

    ticks = itertools.count(1)
    refused(center, "on the second call: its forward sets 'k'.*\n  fix: make it a buffer")
    refused(lambda s, y: y.sum() * next(ticks), "the loss .* differs .*\n  fix: Python values are read once")


def test_the_proof_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture gone wrong: a gradient is lost, a buffer's update forgotten."""

    def wrong(self: Net, y: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return (y.detach() * self.fc.bias).sum()
        self.seen.add_(1)
        return (y * self.fc.bias).sum()

    with pytest.raises(ShardcError) as e:
        capture(Net(wrong), X)
    assert [x.where for x in e.value.errors] == ["fc.weight", "fc.bias", "seen"]
    assert "the gradient of the captured graph differs from the model's own by" in str(e.value)
    assert "the model updates the buffer, but the captured graph does not" in str(e.value)

    with pytest.raises(ShardcError, match="the loss of the captured graph differs"):
        capture(Net(lambda s, y: y.sum() * (2 if torch.compiler.is_exporting() else 1)), X)

    monkeypatch.setattr(compare_eager, "LIMIT_PARAMS", 10)
    assert capture(Net(wrong), X).notes == (
        "capture was checked statically only: the model is too large to run here once",
    )
    assert capture(Net(wrong), X, prove=False).notes == ()


# --- torch's private parts --------------------------------------------------------------------------------------------


def test_private_parts_of_torch() -> None:
    """What capture would lose if these moved: shapes without storage, constant masks, source lines, clear errors."""
    mode = torch_private.fake_mode()
    x = torch_private.fake_tensor(mode, torch.empty(2, 3, device="meta"))
    assert isinstance(x, torch_private.FakeTensor)
    assert (x.shape, x.device.type) == ((2, 3), "cpu")
    with mode, pytest.raises(torch_private.data_dependent()):
        bool(x.sum() > 0)
    assert isinstance(torch.ops.aten.add.Tensor, torch_private.OpOverload)
    assert isinstance(torch.ops.higher_order.cond, torch_private.HigherOrderOperator)
    assert torch_private.traced_node(torch.zeros(1)) is None
    seen: list[Any] = []

    def function(y: Tensor) -> Tensor:
        z = torch.arange(3)
        seen.append(torch_private.traced_node(z))
        return y * z

    with torch_private.traced_with(lambda: "here"):
        gm = torch.export.export(Net(lambda s, y: function(y.sum())), (X,), strict=False).graph_module
    assert seen[0].target is torch.ops.aten.arange.default
    assert {n.stack_trace for n in gm.graph.nodes if n.op == "call_function"} == {"here"}


def _likely(s: Net, y: Tensor) -> Tensor:
    """Distributions check their arguments' values."""
    return -torch.distributions.Normal(y, y.exp()).log_prob(torch.zeros(())).mean()


def test_distributions_do_not_check_their_arguments() -> None:
    """Proven equal by capture itself; nothing in the graph is a number that is computed at run time."""
    program = capture(Net(_likely), X)
    assert all(n.meta["value"] is not None for n in program.graph.nodes if n.op == "call_function")


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_rounding() -> None:
    """The bias of an attention's keys: both sides have only noise, of other sizes."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = (self.query(x) @ self.key(x).mT).softmax(-1)
            return (scores @ self.value(x)).square().sum()

    capture(Attention(), torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)))


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_keys_that_only_the_loss_reads() -> None:
    batch = {"x": torch.randn(4, 6), "labels": torch.randn(4, 6), "index": torch.arange(4)}
    model = Doubles()

    def loss(y: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(y, batch["labels"])

    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, loss=loss)
    assert [n for n in program.notes if "reads" in n] == [
        "index: neither forward nor the loss reads this key of the batch"
    ]
    torch.testing.assert_close(shardc.verify.simulate(program, model, batch).loss, loss(model(batch["x"]), batch))
    with pytest.raises(
        ShardcError, match="unexpected keyword argument 'labels'"
    ):  # without a loss all of it is forward's
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    with pytest.raises(ShardcError, match="missing a required argument: 'x'"):
        shardc.compile(model, {"labels": batch["labels"]}, {"shardc": 1, "mesh": {"dp": 2}}, loss=loss)


def test_a_tuple_of_two_numbers_is_told() -> None:
    """The first is the loss: perhaps it was to be another, or the sum."""
    (note,) = capture(Net(lambda _, y: (y.sum(), y.mean())), X).notes
    assert re.match(r"test_capture\.py:\d+: the model returns 2 single numbers, and the first of them is", note)
    assert "loss=lambda output, batch: output[0] + output[1]" in note
    for returned in ((lambda _, y: (y.sum(), y)), (lambda _, y: (y, y.sum())), (lambda _, y: (y.sum(), y.argmax()))):
        assert capture(Net(returned), X).notes == ()


def test_halves_of_a_batch_are_no_fused_weight() -> None:
    """Rows of pairs, chosen and rejected: the note on what is gathered advised to split a weight."""

    def pairs(output: Tensor, batch: Any) -> Tensor:
        chosen, rejected = output.chunk(2)
        return (rejected - chosen).mean().exp()

    program = shardc.compile(nn.Linear(4, 3), torch.randn(8, 4), {"shardc": 1, "mesh": {"dp": 2}}, loss=pairs)
    gathered = [note for note in program.notes if "is gathered over dp" in note]
    assert gathered
    assert not any("fused weight" in note for note in gathered)
