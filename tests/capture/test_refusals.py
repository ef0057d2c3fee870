"""What cannot be captured: one message per cause, with the model's line and a way out. And what looks as if it could
not, but can.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Gamma
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.capture import capture, compare_eager
from shardc.capture.refusals import REFUSALS
from shardc.errors import ShardcError
from tests.zoo import hf

X = torch.linspace(-1, 1, 24).view(4, 6)
Function = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(6, 6), function
        self.register_buffer("seen", torch.zeros(6))
        self.count, self.table, self.cache, self.history = 0, torch.ones(6), None, []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.fc(x))


def net(function: Function) -> Net:
    torch.manual_seed(0)
    return Net(function)


# --- the value of a tensor decides what runs


def branch(s: Net, y: Tensor) -> Tensor:
    if y.sum() > 0:
        y = y * 2
    return y.sum()


def either(s: Net, y: Tensor) -> Tensor:
    return y.sum() if y.norm() > 1 else 2 * y.sum()


def until(s: Net, y: Tensor) -> Tensor:
    while y.norm() > 1:
        y = y / 2
    return y.sum()


def turns(s: Net, y: Tensor) -> Tensor:
    for _ in range(int(y.sum())):
        y = y * 2
    return y.sum()


def experts(s: Net, y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    for expert in range(3):
        rows = torch.where(y.argmax(-1) == expert)[0]
        out[rows] = y[rows] * y[rows].mean(0)
    return out.sum()


def layer_drop(s: Net, y: Tensor) -> Tensor:
    dropout_probability = torch.rand([])
    if dropout_probability < 0.1:
        return y.sum()
    return (y * 2).sum()


def packed(s: Net, y: Tensor) -> Tensor:
    lengths = y[:, 0].argsort().sort(descending=True).values + 1
    return nn.utils.rnn.pack_padded_sequence(y[:, :, None], lengths, batch_first=True).data.sum()


def packed_recurrent(s: Net, y: Tensor) -> Tensor:
    lengths = (y > 0).sum(1).clamp(min=1)
    rows = nn.utils.rnn.pack_padded_sequence(y[:, :, None], lengths, batch_first=True, enforce_sorted=False)
    return nn.LSTM(1, 2, batch_first=True)(rows)[1][0].sum()


def truncated(s: Net, y: Tensor) -> Tensor:
    return y[:, : int(y.sum())].sum()


def labels(s: Net, y: Tensor) -> Tensor:
    labels_mask = y > 0
    return y.masked_select(labels_mask).max()


VALUES: list[tuple[Function, str, str]] = [
    (branch, "a branch depends on a tensor's value (if y.sum() > 0:)", "torch.where(condition, a, b)"),
    (either, "a branch depends on a tensor's value (return y.sum() if", "torch.where(condition, a, b)"),
    (until, "the length of a loop depends on a tensor's value (while y.norm() > 1:)", "a fixed number of iterations"),
    (turns, "the length of a loop depends on a tensor's value (for _ in range", "a fixed number of iterations"),
    (experts, "the loop over experts depends on a tensor's value (rows = ", "shardc.nn.experts"),
    (layer_drop, "LayerDrop leaves out layers at random: a branch depends", "set the config's layerdrop to 0"),
    (
        lambda s, y: print(f"{y.max().item():.2f}") or y.sum(),
        "forward formats a tensor as text",
        "print it outside of forward",
    ),
    (lambda s, y: y.sum() * y.max().item(), "a tensor becomes a Python number (.item(), int()", "x * n.detach(), not"),
    (lambda s, y: y.sum() * sum(y[0].tolist()), "a tensor becomes a Python number", "keep it a tensor"),
    (lambda s, y: y.sum() * len(set((y > 0).sum(1).tolist())), "a tensor becomes a Python number", "keep it a tensor"),
    (lambda s, y: y[int(y.sum(1).argmax())].sum(), "a tensor becomes a Python number", "index_select"),
    (lambda s, y: y[y.sum(1).argmax()].sum(), "a tensor becomes a Python number", "index_select"),
    (
        lambda s, y: y[tuple((y[0] > 0).long())[:2], (0, 1)].sum(),
        "elements of a tensor are read outside of torch's ops",
        "unbind(-1)",
    ),
    (
        lambda s, y: y[y > 0].max(),
        "indexing by a condition has a result whose size depends",
        "x.masked_fill(~mask, -inf).max()",
    ),
    (
        lambda s, y: y[:, y[0] != y[1]].max(),  # self loops: columns of a graph's edges
        "indexing by a condition has a result whose size depends",
        "choose them where the batch is made",
    ),
    (
        lambda s, y: y[y > 0].sum() / y[y > 0].numel(),
        "indexing by a condition has a result whose size depends",
        "x.masked_fill(~mask, -inf).max()",
    ),
    (
        lambda s, y: torch.masked_select(y, y > 0).max(),
        "indexing by a condition has a result whose size depends",
        "labels to -100 (its ignore_index)",
    ),
    (
        lambda s, y: y[(y > 0).nonzero()[:, 0]].std(),
        "nonzero has a result whose size depends",
        "torch.where(mask, x, 0)",
    ),
    (
        lambda s, y: y.sum() * torch.unique(y.round()).numel(),
        "_unique2 has a result whose size depends",
        "torch.where(mask, x, 0)",
    ),
    (
        lambda s, y: y.sum() * torch.bincount((y[0] > 0).long()).sum(),
        "bincount has a result whose size depends",
        "mask",
    ),
    (
        lambda s, y: torch.repeat_interleave(y, (y[0] > 0).long() + 1, dim=1).sum(),
        "repeat_interleave has a result whose size",
        "output_size=total",
    ),
    (
        lambda s, y: (y.sum() * F.one_hot((y[:, 0] > 0).long())).sum(),
        "the size of the one-hot encoding depends",
        "num_classes=n",
    ),
    (truncated, "the size of a slice or tensor depends", "keep the size and mask"),
    (
        packed_recurrent,
        "packed sequences have a size that depends on the lengths' values (rows = nn.utils",
        "pick each row's last step",
    ),
    (packed, "packed sequences have a size that depends on the lengths' values", "leave padding out of the loss"),
    (labels, "the labels without padding have a size that depends", "F.ctc_loss(...) takes padded labels"),
]


# --- the model leaves the graph


def penalty(s: Net, y: Tensor) -> Tensor:
    x = torch.ones(4, 6, requires_grad=True)
    (g,) = torch.autograd.grad(F.dropout(s.fc(x)).tanh().sum(), x, create_graph=True)
    return y.sum() + g.square().sum()


def backward(s: Net, y: Tensor) -> Tensor:
    y.sum().backward()
    return s.fc.weight.sum()


def switched(s: Net, y: Tensor) -> Tensor:
    s.fc.requires_grad_(False)
    loss = y.sum() + s.fc(y).sum()
    s.fc.requires_grad_(True)
    return loss + s.fc(y.detach()).sum()


def unused(s: Net, y: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), torch.ones(4, requires_grad=True), create_graph=True)[0].sum()


def data_written(s: Net, y: Tensor) -> Tensor:
    s.fc.weight.data.mul_(0.9)
    return y.sum()


def data_replaced(s: Net, y: Tensor) -> Tensor:
    s.fc.weight.data = s.fc.weight * 0.9
    return y.sum()


def data_of_activation(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    z.data.mul_(2)
    return z.sum()


def leaf_in_place(s: Net, y: Tensor) -> Tensor:
    z = s.fc.weight.view(-1)
    z += 1
    return y.sum()


def made_late(s: Net, y: Tensor) -> Tensor:
    if not hasattr(s, "scale"):
        s.scale = nn.Parameter(torch.ones(6))
    return (y * s.scale).sum()


LEAVING: list[tuple[Function, str, str]] = [
    (lambda s, y: y.sum() * y.detach().numpy().max(), "the model leaves torch: .numpy()", "write it in torch ops"),
    (lambda s, y: y.sum() * random.random(), "the model draws random numbers from Python or numpy", "draw with torch"),
    (
        lambda s, y: y.sum() if np.random.rand() < 2 else y.mean(),
        "the model draws random numbers from Python or numpy",
        "draw with torch",
    ),
    (lambda s, y: y.cuda().sum(), "the model uses a device that this machine does not have", "device=x.device"),
    (lambda s, y: y.to("cuda:0").sum(), "the model uses a device that this machine does not have", "device=x.device"),
    (
        lambda s, y: (y * torch.ones(6, device="cuda")).sum(),
        "the model uses a device that this machine does not have",
        "device=x.device",
    ),
    (lambda s, y: copy.deepcopy(y).sum(), "forward makes a copy with copy.deepcopy", "x.clone()"),
    (lambda s, y: copy.deepcopy(s.fc)(y).sum(), "forward makes a copy with copy.deepcopy", "once, in __init__"),
    (
        lambda s, y: torch.vmap(lambda r: s.fc.weight @ r)(y).sum(),
        "forward uses vmap on values that tracing cannot see",
        "batched ops",
    ),
    (
        lambda s, y: torch._foreach_mul_([y * 1], 2.0) and y.sum(),
        "aten._foreach_mul_.Scalar changes a tensor in place",
        "returns a new tensor",
    ),
    (
        lambda s, y: (torch.manual_seed(0), y.sum() * torch.rand(()))[1],
        "forward seeds torch's random numbers",
        "once in __init__",
    ),
    (
        lambda s, y: nn.init.trunc_normal_(torch.empty_like(y)).sum() + y.sum(),
        "trunc_normal_ draws again until all numbers are inside of its bounds",
        "torch.special.ndtri",
    ),
    (
        lambda s, y: torch.linalg.lstsq(s.fc.weight, y.T).solution.sum(),
        "the residuals of lstsq have a size that depends on a tensor's value",
        "torch.linalg.pinv(a) @ b",
    ),
    (
        lambda s, y: torch.func.grad(lambda z: z.square().sum())(y).sum(),
        "forward computes a gradient by a transform",
        "autograd.grad",
    ),
    (
        lambda s, y: torch.func.jacrev(torch.sin)(y[0]).sum(),
        "forward computes a gradient by a transform",
        "use torch.autograd.grad",
    ),
    (
        lambda s, y: Gamma(y.exp(), y.exp()).rsample().sum(),
        "aten._standard_gamma.default would draw other random numbers",
        "pass them in with the batch",
    ),
    (
        lambda s, y: Beta(y.exp(), y.exp()).rsample().sum(),
        "aten._sample_dirichlet.default would draw other random numbers",
        "pass them in with the batch",
    ),
    (
        lambda s, y: torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z, (y,)).sum(),
        "the model uses control flow or a transform of torch's own (torch.cond",
        "torch.where",
    ),
    (penalty, "a gradient inside forward goes through aten.dropout.default", "under detach()"),
    (switched, "the forward pass turns a parameter's gradient off", "torch.func.functional_call(m, {n: p.detach()"),
    (backward, "backward() is called inside forward", "torch.autograd.grad(y, x, create_graph=True)"),
    (unused, "the result does not depend on the tensor with respect to which a gradient is taken", "allow_unused=True"),
    (lambda s, y: torch.sparse.mm(y.to_sparse(), s.fc.weight).sum(), "to_sparse) cannot be split", "x.to_dense()"),
    (
        lambda s, y: (y * torch.randn(6, generator=torch.Generator().manual_seed(0))).sum(),
        "an op takes a generator, or another Python object of the model",
        "leave generator= out",
    ),
    (data_written, "the forward pass writes to the parameter 'fc.weight'", "outside of forward"),
    (data_replaced, "the forward pass replaces a tensor's .data", "change parameters outside of forward"),
    (
        data_of_activation,
        "changes an activation in place under no_grad or through .detach(), .data",
        "compute a new tensor",
    ),
    (leaf_in_place, "a parameter is changed in place while its gradient is recorded", "outside of forward"),
    (
        made_late,
        "the forward pass creates 'scale', which does not exist before the first call",
        "create it in __init__",
    ),
    (lambda s, y: y.detach().sum(), "the loss depends on no trainable parameter", "detached"),
]


@pytest.mark.parametrize(("function", "what", "fix"), [*VALUES, *LEAVING])
def test_one_message_per_cause(function: Function, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        capture(net(function), X)
    assert len(e.value.errors) == 1
    assert what in e.value.what
    assert fix in e.value.fix
    if torch.__version__ >= "2.13" or "a transform" not in what:  # 2.11 fails on such a graph as a whole
        assert "test_refusals.py:" in e.value.where


def test_every_row_can_be_read() -> None:
    for cause in REFUSALS:
        assert cause.what
        assert cause.fix
        assert cause.raised or cause.op


# --- state between calls


def counts(s: Net, y: Tensor) -> Tensor:
    s.count += 1
    return y.sum() * s.count


def table(s: Net, y: Tensor) -> Tensor:
    s.table = s.table + y.mean(0).detach()
    return (y * s.table).sum()


def cached(s: Net, y: Tensor) -> Tensor:
    y = y if s.cache is None else y + s.cache
    s.cache = y.mean(0).detach()
    return y.square().sum()


@pytest.mark.parametrize(("function", "name"), [(counts, "count"), (table, "table"), (cached, "cache")])
def test_state_outside_of_buffers_is_refused(function: Function, name: str) -> None:
    model = net(function)
    held = dict(model.__dict__)
    with pytest.raises(ShardcError) as e:
        capture(model, X)
    assert f"the model returns another loss on the second call: its forward sets '{name}'" in e.value.what
    assert "register_buffer" in e.value.fix
    assert e.value.where.startswith("test_refusals.py:")
    assert all(model.__dict__[k] is v for k, v in held.items())


class Table(nn.Module):
    """A table that the first call computes and keeps in a buffer, with a counter of how much of it is filled."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8, dtype=torch.float64))
        self.rates = nn.Parameter(torch.rand(8, dtype=torch.float64), requires_grad=learned)
        self.register_buffer("kept", torch.zeros(16, 8, dtype=torch.float64), persistent=False)
        self.filled = 0

    def forward(self, x: Tensor) -> Tensor:
        n, x = x.shape[1], x * self.scale
        if n > self.filled:
            angles = torch.arange(n)[:, None] * self.rates
            self.kept[:n] = angles.detach()
            self.filled = n
            return (x * angles.cos()).square().sum()
        return (x * self.kept[:n].cos()).square().sum()


def test_a_table_that_the_first_call_keeps_in_a_buffer_is_captured() -> None:
    """The second call finds what the first left in both, the buffer and the counter."""
    model, x = Table(learned=False), torch.rand(4, 6, 8, dtype=torch.float64)
    program = capture(model, x)
    assert any("forward sets 'filled'" in n for n in program.notes)
    assert model.filled == 0
    assert not model.kept.any()
    sim = shardc.simulate(shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 2}}), model, x)
    torch.testing.assert_close(sim.loss, model(x).detach(), rtol=1e-12, atol=0)


def test_a_table_that_only_the_first_call_trains_is_refused() -> None:
    """The losses of both calls are equal, but the second one has no gradient."""
    with pytest.raises(ShardcError, match="another loss on the second call: its forward sets 'filled'"):
        capture(Table(learned=True), torch.rand(4, 6, 8, dtype=torch.float64))


def drops(s: Net, y: Tensor) -> Tensor:
    """Layers that are dropped at a rate, as torchaudio writes it."""
    for _ in range(2):
        if not (s.training and torch.rand(1).item() <= s.count):
            y = s.fc(y)
    return y.sum()


@pytest.mark.parametrize(("rate", "layers"), [(0.0, 2), (-1, 2), (1.0, 0)])
def test_a_rate_that_no_random_number_is_below_is_known(rate: float, layers: int) -> None:
    model = net(drops)
    model.count = rate
    program = capture(model, X)
    linear = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len(linear) == layers + 1  # one before


def test_a_rate_that_some_random_numbers_are_below_is_refused() -> None:
    model = net(drops)
    model.count = 0.5
    with pytest.raises(ShardcError, match="depends on a tensor's value") as e:
        capture(model, X)
    assert "torch.rand(1).item() <= s.count" in e.value.what


def checked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As beartype checks types: in code of its own, which draws which item of a list it looks at."""
    names: dict[str, Any] = {"function": function, "random": random}
    code = "def check(x):\n    random.getrandbits(32)\n    return function(x)\n"
    exec(compile(code, "<@beartype(test_refusals.checked) at 0x7f>", "exec"), names)
    return names["check"]  # type: ignore[no-any-return]


def test_random_numbers_of_a_check_of_types_are_no_reason() -> None:
    squares = checked(lambda y: y.square().sum())
    capture(net(lambda s, y: squares(y)), X)
    draws = checked(lambda y: (y * random.random()).sum())
    with pytest.raises(ShardcError, match="draws random numbers from Python or numpy") as e:
        capture(net(lambda s, y: draws(y)), X)
    assert "y * random.random()" in e.value.what


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).float().softmax(-1).to(x.dtype).square().sum()


@pytest.mark.parametrize(("dtype", "notes"), [(torch.float64, 1), (torch.float32, 0)])
def test_what_a_model_of_float64_computes_in_float32_is_noted(dtype: torch.dtype, notes: int) -> None:
    program = capture(Casts().to(dtype), torch.rand(4, 8, dtype=dtype))
    found = [n for n in program.notes if "differs by rounding of float32, about 1e-07" in n]
    assert len(found) == notes
    assert all(n.startswith("test_refusals.py:") and ".float().softmax(-1)" in n for n in found)


def test_too_large_to_run_it_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_eager, "LIMIT_PARAMS", 10)
    assert "forward sets 'count': the program uses the value of the first call" in capture(net(counts), X).notes


# --- what can be captured


def keeps(s: Net, y: Tensor) -> Tensor:
    """Writes that nothing reads: attention maps, logs."""
    s.last = y
    s.history.append(y.mean())
    s.eval()
    z = s.fc(y)
    s.train()
    return z.sum()


def logs(s: Net, y: Tensor) -> Tensor:
    message = f"{y.mean():.3f} {y}"
    assert message
    assert torch.isfinite(y).all(), "not finite"
    return y.sum()


def assigns(s: Net, y: Tensor) -> Tensor:
    s.seen = 0.9 * s.seen + y.mean(0).detach()
    return (y * s.seen).sum()


def data_of_buffer(s: Net, y: Tensor) -> Tensor:
    s.seen.data.add_(y.data.mean(0))
    return (y * s.seen).sum()


def masked_where_any(s: Net, y: Tensor) -> Tensor:
    mask = y > 0
    z = y * 1
    if mask.any():
        z[mask] = -3.0
    return z.square().sum()


def random_integers(s: Net, y: Tensor) -> Tensor:
    return y.sum() * torch.empty(6, dtype=torch.int64).random_(0, 5).sum()


@pytest.mark.parametrize("function", [keeps, logs, assigns, data_of_buffer, masked_where_any, random_integers])
def test_what_only_looks_odd(function: Function) -> None:
    model = net(function)
    held = dict(model.__dict__)
    program = shardc.compile(model, X, {"shardc": 1, "mesh": {"dp": 2}})
    assert program.verify().ok
    assert model.__dict__.keys() == held.keys()
    assert all(model.__dict__[k] is v for k, v in held.items())
    assert model.history == []


def test_the_line_that_draws_may_call_another() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.square()
            return y.sum()

    class Noisy(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * float(np.random.rand()))

    with pytest.raises(ShardcError, match=r"np\.random\.rand\(\)") as e:
        shardc.compile(Noisy(), torch.ones(4), {"shardc": 1, "mesh": {"dp": 2}})
    assert "test_refusals.py" in e.value.where


def test_batches_of_another_mapping() -> None:
    """What transformers' tokenizers return is a mapping, but no dict."""
    model, batch = hf.build(hf.FAMILIES["distilbert"])
    program = shardc.compile(model, UserDict(batch), {"shardc": 1, "mesh": {"dp": 2}})
    assert [i.path for i in program.inputs] == [(k,) for k in batch]
    torch.testing.assert_close(
        shardc.verify.simulate(program, model, UserDict(batch)).loss, model(**batch).loss.detach()
    )


# --- transformers


def refused(model: nn.Module, batch: Any) -> ShardcError:
    with pytest.raises(ShardcError) as e:
        shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})
    assert "modeling_" in e.value.where or "moe.py" in e.value.where or "hub_kernels.py" in e.value.where
    return e.value


def test_spec_augment() -> None:
    """Its masks are drawn by numpy, which every step would repeat."""
    masked = {"apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2}
    e = refused(*hf.build(hf.row("Wav2Vec2ForSequenceClassification", hf.sound, **hf.CONVS | masked), torch.float32))
    assert "draws random numbers from Python or numpy" in e.what
    assert "config.apply_spec_augment = False" in e.fix


def test_layerdrop() -> None:
    model, batch = hf.build(hf.FAMILIES["bart"], torch.float32)
    model.model.encoder.layerdrop = 0.1
    e = refused(model, batch)
    assert "LayerDrop leaves out layers at random" in e.what
    assert "layerdrop to 0" in e.fix


def test_flash_attention_that_is_not_here() -> None:
    model, batch = hf.build(hf.FAMILIES["mistral"], torch.float32)
    model.config._attn_implementation = "flash_attention_2"
    e = refused(model, batch)
    assert "the attention implementation needs a package or device that this machine does not have" in e.what
    assert 'config._attn_implementation = "sdpa"' in e.fix


@pytest.mark.parametrize("how", ["checkpointing", "attentions", "cache", "tuple", "packed", "packed_uncached"])
def test_settings_that_need_no_care(how: str) -> None:
    model, batch = hf.build(hf.FAMILIES["mistral"], torch.float32)
    given: dict[str, Any] = {
        "attentions": {"output_attentions": True, "output_hidden_states": True},
        "cache": {"use_cache": True},
        "tuple": {"return_dict": False},
        "packed": {"position_ids": torch.arange(8).repeat(2).expand(8, 16)},
        "packed_uncached": {"position_ids": torch.arange(8).repeat(2).expand(8, 16)},
    }.get(how, {})
    if how == "checkpointing":
        model.model.gradient_checkpointing = True
        for layer in model.model.layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = (
                True,
                functools.partial(checkpoint, use_reentrant=False),
            )
    if how == "packed_uncached":
        model.config.use_cache = False
    assert capture(model, {**batch, **given}).notes == ()


def test_checkpoints_within_one_another() -> None:
    """As swin's stages hold its layers."""
    twice = functools.partial(checkpoint, use_reentrant=False)
    program = capture(net(lambda s, y: twice(lambda x: twice(s.fc, x).relu(), y).sum()), X)
    assert program.notes == ()


# --- what torch itself says


def test_torch_prints_nothing_beside_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Its warnings and parts of graphs would stand before the message; the loggers are as before afterwards."""
    handlers = {
        h: list(h.filters)
        for x in (logging.getLogger(n) for n in list(logging.root.manager.loggerDict))
        for h in x.handlers
    }
    with pytest.raises(ShardcError, match="a branch depends on a tensor's value"):
        capture(net(branch), X)
    assert capfd.readouterr() == ("", "")
    assert all(h.filters == before for h, before in handlers.items())


def test_numbers_that_only_python_sees_are_noted() -> None:
    """`print(x.item())`: no step of the program prints anything."""

    def prints(s: Net, y: Tensor) -> Tensor:
        print(y.mean().item(), y.max().item())
        return y.sum()

    notes = [n for n in capture(net(prints), X).notes if "Python" in n]
    assert len(notes) == 1  # one a line
    assert notes[0].startswith("test_refusals.py:")
    assert (
        "only Python sees (print(y.mean().item(), y.max().item())): steps of the program do not run this line"
        in notes[0]
    )


# --- the batch does not fit forward


@pytest.mark.parametrize(
    ("batch", "what", "fix"),
    [
        ({"y": X}, "missing a required argument: 'x' (its keys are y)", "rename the batch's key 'y' to 'x'"),
        ({"x": X, "z": X}, "got an unexpected keyword argument 'z' (its keys are x, z)", "leave 'z' out of the batch"),
        ((X, X), "too many positional arguments", "pass forward only the arguments x;"),
    ],
)
def test_a_batch_that_does_not_fit_forward(batch: Any, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        capture(net(lambda s, y: y.sum()), batch)
    assert e.value.what == f"the batch does not fit the model's forward(x): {what}"
    assert e.value.where.startswith("test_refusals.py:")
    assert fix in e.value.fix


@dataclass
class Pair:
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "what", "fix"),
    [
        ({"x": Pair(X)}, "x is a Pair, in which tensors are not found", "register_dataclass"),
        ({"x": X.to_sparse()}, "x is a sparse tensor, which cannot be split", "x.to_dense()"),
        (
            {"x": torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)},
            "x is a nested tensor, which cannot be split",
            "to_padded_tensor",
        ),
    ],
)
def test_a_batch_of_other_things_is_named(batch: Any, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        capture(net(lambda s, y: y.sum()), batch)
    assert (e.value.what, e.value.where) == (what, "batch")
    assert fix in e.value.fix


def test_a_sparse_buffer_is_named() -> None:
    model = net(lambda s, y: torch.sparse.mm(s.links, y).sum())
    model.register_buffer("links", torch.eye(4).to_sparse())
    with pytest.raises(ShardcError, match=r"links: a sparse or nested tensor cannot be split(.|\n)*x\.to_dense\(\)"):
        capture(model, X)


def test_a_tensor_kept_from_an_earlier_call_is_named() -> None:
    kept: list[Tensor] = []

    def once(s: Net, y: Tensor) -> Tensor:
        if not kept:
            kept.append(s.fc.weight.sum())
        return y.sum() * kept[0]

    with pytest.raises(ShardcError, match=r"forward reads a tensor that it computed from weights or the batch"):
        capture(net(once), X)


def test_a_batch_that_forward_changes_is_named() -> None:
    class Shifts(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.up, self.shift = nn.Linear(8, 8), shift

        def forward(self, data: dict[str, Tensor]) -> Tensor:
            x = data["x"]
            x -= self.shift
            x[:, :2] = 0  # comes to the same every time
            return nn.functional.mse_loss(self.up(x), data["y"])

    batch = {"data": {"x": torch.ones(8, 8), "y": torch.ones(8, 8)}}
    with pytest.raises(ShardcError, match=r"changes data\.x of the batch in place: .* \(x -= self\.shift\)") as e:
        shardc.compile(Shifts(3.0), batch, {"shardc": 1, "mesh": {"dp": 2}})
    assert e.value.where.startswith("test_refusals.py:")
    assert "write `x = x - 3`" in e.value.fix
    shardc.compile(Shifts(0.0), batch, {"shardc": 1, "mesh": {"dp": 2}})


def test_module_dropout_of_peft() -> None:
    """It draws where its rate is 0, too."""
    peft = pytest.importorskip("peft")

    def adapted(rate: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        config = peft.LoHaConfig(target_modules=["0"], r=4, module_dropout=rate)
        return peft.get_peft_model(model, config)  # type: ignore[no-any-return]

    batch, spec = {"input": torch.ones(8, 8)}, {"shardc": 1, "mesh": {"dp": 2}}

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    with pytest.raises(ShardcError, match="module dropout leaves out adapters at random") as e:
        shardc.compile(adapted(0.1), batch, spec, loss=loss)
    assert e.value.where.startswith("peft/tuners/loha/layer.py:")
    assert "module_dropout to 0" in e.value.fix
    model = adapted(0.0)
    program = shardc.compile(model, batch, spec, loss=loss)
    assert not program.eval_mode
    assert "dropout" in str(program)


class OneMemory(nn.Module):
    """Two parameters whose values are views of one tensor."""

    def __init__(self, view: Callable[[Tensor], tuple[Tensor, Tensor]], trained: bool = True) -> None:
        super().__init__()
        one, other = view(torch.arange(32.0).reshape(4, 8))
        self.one, self.other = nn.Parameter(one, requires_grad=trained), nn.Parameter(other, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.one.mT).sum() + (self.other * x.sum()).sum()


@pytest.mark.parametrize("view", [lambda m: (m, m.t()), lambda m: (m, m[1]), lambda m: (m[:3], m[2:])])
def test_parameters_in_the_same_memory_are_refused(view: Any) -> None:
    with pytest.raises(shardc.ShardcError, match="one and other are two tensors in the same memory"):
        capture(OneMemory(view), torch.ones(2, 8))
    capture(
        OneMemory(view, trained=False).requires_grad_(False), torch.ones(2, 8), forward=lambda output, batch: output
    )


@pytest.mark.parametrize("view", [lambda m: (m[:2], m[2:]), lambda m: (m[::2], m[1::2])])
def test_parameters_side_by_side_in_memory_are_captured(view: Any) -> None:
    capture(OneMemory(view), torch.ones(2, 8))
