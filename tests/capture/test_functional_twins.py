"""Every in-place op of aten has a functional twin that gives what it writes, with all arguments and with its defaults;
or it is refused by name. What a model's graph then is equals eager, which capture proves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc import ShardcError
from shardc.capture import capture, compare_eager
from shardc.capture.rewrite.functional_twins import cut_gradients, functional, with_zeros

aten = torch.ops.aten
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
#: Not computations: storage, names, sparse layouts, gradients' bookkeeping and what torch keeps for itself.
NO_COMPUTATION = {
    *("resize_", "resize_as_", "set_", "set_data", "rename_", "requires_grad_", "retain_grad", "_resize_output_"),
    *("sparse_resize_", "sparse_resize_and_clear_", "copy_sparse_to_sparse_", "_coalesced_", "resize_as_sparse_"),
    *("_amp_update_scale_", "_mkldnn_transpose_", "_philox_normal_", "_philox_uniform_"),
    *("_fill_mem_eff_dropout_mask_", "_sobol_engine_ff_", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_"),
}
#: No twin: the model says it otherwise, and the message how.
REFUSED = {"fill_diagonal_", "rrelu_with_noise_"}


def inplace() -> Iterator[Any]:
    """The overloads that write to their first argument and return it."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if (
            not name.startswith("aten::")
            or not (base.endswith("_") or base.startswith("__i"))
            or base.startswith("__r")
        ):
            continue
        op = getattr(getattr(aten, base, None), overload or "default", None)
        if op is None or base in NO_COMPUTATION:
            continue
        first = op._schema.arguments[0]
        if first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor":
            yield op


def tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Numbers between 0.1 and 0.9 of a floating dtype, small ones above zero of another."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return 0.1 + 0.8 * torch.rand(shape, dtype=dtype, generator=generator)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


#: Of ops that do not take what their arguments' types say: (those behind the tensor by name).
SHAPED: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "addmv_": lambda d: {"self": tensor(d, 4), "mat": tensor(d, 4, 4), "vec": tensor(d, 4, seed=1)},
    "addr_": lambda d: {"vec1": tensor(d, 4), "vec2": tensor(d, 4, seed=1)},
    "addbmm_": lambda d: {"batch1": tensor(d, 2, 4, 4), "batch2": tensor(d, 2, 4, 4, seed=1)},
    "baddbmm_": lambda d: {
        "self": tensor(d, 2, 4, 4),
        "batch1": tensor(d, 2, 4, 4),
        "batch2": tensor(d, 2, 4, 4, seed=1),
    },
    "index_add_": lambda d: {"dim": 0, "index": torch.tensor([1, 0, 1]), "source": tensor(d, 3, 4)},
    "index_reduce_": lambda d: {
        "dim": 0,
        "index": torch.tensor([1, 0, 1]),
        "source": tensor(d, 3, 4),
        "reduce": "prod",
    },
    "index_copy_": lambda d: {"dim": 0, "index": torch.tensor([1, 0]), "source": tensor(d, 2, 4)},
    "index_fill_": lambda d: {"dim": 0, "index": torch.tensor([1, 0]), "value": tensor(d)},
    "index_put_": lambda d: {"indices": [torch.tensor([1, 0])], "values": tensor(d, 2, 4)},
    "_index_put_impl_": lambda d: {"indices": [torch.tensor([1, 0])], "values": tensor(d, 2, 4)},
    "put_": lambda d: {"index": torch.tensor([1, 5]), "source": tensor(d, 2)},
    "scatter_": lambda d: {"dim": 0, "index": torch.arange(4).expand(2, 4), "src": tensor(d, 2, 4), "reduce": "add"},
    "scatter_add_": lambda d: {"dim": 0, "index": torch.zeros(2, 4, dtype=torch.long), "src": tensor(d, 2, 4)},
    "scatter_reduce_": lambda d: {
        "dim": 0,
        "index": torch.zeros(2, 4, dtype=torch.long),
        "src": tensor(d, 2, 4),
        "reduce": "sum",
    },
    "masked_fill_": lambda d: {"mask": tensor(torch.bool, 4, 4, seed=3), "value": tensor(d)},
    "masked_scatter_": lambda d: {"mask": torch.eye(4, dtype=torch.bool), "source": tensor(d, 4)},
    "as_strided_": lambda d: {"size": [2, 3], "stride": [3, 1], "storage_offset": 1},
    "squeeze_": lambda d: {"self": tensor(d, 4, 1, 4), "dim": 1},
    "random_": lambda d: {"from": 0, "to": 3},
    "renorm_": lambda d: {"p": 2, "dim": 0, "maxnorm": 0.5},
    "embedding_renorm_": lambda d: {"indices": torch.tensor([1, 2]), "max_norm": 0.5, "norm_type": 2.0},
    "fill_": lambda d: {"value": tensor(d)},
    "mvlgamma_": lambda d: {"self": 1 + tensor(d, 4, 4), "p": 1},
}
#: By name, and by type, of all the others.
NAMED: dict[str, Any] = {
    "dim": 0,
    "dim0": 0,
    "dim1": 1,
    "axis0": 0,
    "axis1": 1,
    "train": True,
    "training": True,
    "p": 0.5,
}
NAMED |= {"rounding_mode": "floor", "generator": None, "diagonal": 1, "from": 0.1, "to": 0.9, "std": 2.0, "mean": 1.0}
TYPED: dict[str, Any] = {"number": 1, "int": 1, "float": 0.5, "bool": True, "Optional[number]": 0.5, "str": "none"}


def arguments(op: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Of one call, by name. Raises LookupError where there is none."""
    values: dict[str, Any] = {}
    shaped = SHAPED.get(op._schema.name.partition("::")[2], lambda _: {})(dtype)
    for i, a in enumerate(op._schema.arguments):
        kind, given = str(a.type), shaped.get(a.name, NAMED.get(a.name))
        if given is not None and not (isinstance(given, Tensor) and kind == "number"):
            given = [given] if kind == "List[int]" and isinstance(given, int) else given
            values[a.name] = tensor(dtype) if kind == "Tensor" and not isinstance(given, Tensor) else given
        elif kind in ("Tensor", "Optional[Tensor]"):
            values[a.name] = tensor(dtype, 4, 4, seed=i)
        elif kind in TYPED:
            values[a.name] = TYPED[kind]
        elif not a.has_default_value():
            raise LookupError(f"{op}: {a.name} of type {kind}")
    return values


def of_twin(op: Any, given: dict[str, Any]) -> Tensor:
    """What the twin gives, through the graph that capture would write."""
    graph, tensors = fx.Graph(), list[Tensor]()

    def put(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return [put(y) for y in x] if isinstance(x, list) else x
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = x.detach()
        tensors.append(x)
        return node

    args = {name: put(x) for name, x in given.items()}
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in args]
    call = graph.call_function(op, tuple(args.pop(n) for n in positional), args)
    call.meta["val"] = op(**_copied(given)).detach()
    with graph.inserting_before(call):
        result = with_zeros(call, functional(call), lambda n: n.target is not aten.zeros_like.default)
    graph.erase_node(call)
    graph.output(result)
    cut_gradients(graph)
    torch.manual_seed(0)
    return fx.GraphModule(nn.Module(), graph)(*tensors)  # type: ignore[no-any-return]


def gradients(call: Callable[[dict[str, Any]], Tensor], given: dict[str, Any]) -> list[Tensor | None] | None:
    """Of a weighted sum of the result with respect to every tensor, None where autograd gives none; None if torch has
    no derivative.
    """
    leaves: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return [leaf(y) for y in x] if isinstance(x, list) else x
        leaves.append(x.clone().requires_grad_())
        return leaves[-1] * 1

    torch.manual_seed(0)
    result = call({name: leaf(x) for name, x in given.items()})
    if not result.requires_grad:
        return [None for _ in leaves]
    weights = torch.linspace(1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
    try:
        return list(torch.autograd.grad(result, leaves, weights, allow_unused=True))
    except RuntimeError:
        return None


def _copied(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _copied(v) for k, v in x.items()}
    return [_copied(y) for y in x] if isinstance(x, list) else x.clone() if isinstance(x, Tensor) else x


def tried(op: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What calls with all arguments and with defaults write, of all dtypes that eager takes, and what twins give."""
    for dtype, every in itertools.product(DTYPES, (True, False)):
        given = arguments(op, dtype)
        if not every:
            given = {a.name: given[a.name] for a in op._schema.arguments if not a.has_default_value()}
        try:
            torch.manual_seed(0)
            written = op(**_copied(given))
        except (RuntimeError, IndexError):  # not of this dtype, or not with these defaults
            continue
        yield f"{op} {dtype}, {'all arguments' if every else 'defaults'}", written, of_twin(op, given)


def test_each_gives_what_the_op_in_place_writes() -> None:
    differ, untried, count = [], [], 0
    for op in inplace():
        name = op._schema.name.partition("::")[2]
        calls = list(tried(op)) if name not in REFUSED else []
        count += len(calls)
        if not calls and name not in REFUSED:
            untried.append(str(op))
        for call, written, given in calls:
            same = written.shape == given.shape and written.dtype == given.dtype
            if not same or not torch.allclose(written, given, rtol=1e-13, atol=0, equal_nan=True):
                differ.append(call)
    assert not differ
    assert not untried
    assert count > 1000


def same_gradient(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, 1e-13)


def test_gradients_are_those_of_the_op_in_place() -> None:
    differ, count = [], 0
    for op in inplace():
        given = arguments(op, torch.float64)
        try:
            wanted = gradients(lambda g, op=op: op(**g), given)  # type: ignore[misc]
        except (RuntimeError, IndexError):
            continue  # not of this dtype
        if wanted is not None and op._schema.name.partition("::")[2] not in REFUSED:
            count += 1
            found = gradients(lambda g, op=op: of_twin(op, g), given)  # type: ignore[misc]
            if found is None or not all(map(same_gradient, found, wanted)):
                differ.append(str(op))
    assert not differ
    assert count > 150


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name(name: str) -> None:
    op = getattr(aten, name).default
    with pytest.raises(ShardcError, match=rf"aten.{name}.default changes a tensor in place, and torch has no op"):
        of_twin(op, arguments(op, torch.float64))


# --- in a model

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Net(nn.Module):
    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(6, 6, dtype=torch.float64), function
        self.register_buffer("seen", torch.ones(4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.fc(x))


def power(s: Net, y: Tensor) -> Tensor:
    return (y.exp() + 1).pow_(-0.5).sum() + y.clone().float_power_(2).sum()


def logical(s: Net, y: Tensor) -> Tensor:
    """What in place keeps the dtype is a number."""
    z, v = y * 1, y * 1
    z.logical_and_(y > 0).lt_(0.5)
    return (z * y).sum() + (v.logical_not_() * y).sum()


def stochastic_depth(s: Net, y: Tensor) -> Tensor:
    return (y * torch.empty(4, 1, dtype=torch.float64).bernoulli_(0.5) / 0.5).sum()


def noise(s: Net, y: Tensor) -> Tensor:
    z, v = y * 1, y * 2
    return (z.normal_() * v.uniform_(1, 2) * y * torch.randint_like(y, 5) * (y * 1).random_(1, 4)).sum()


def drawn_through_a_view(s: Net, y: Tensor) -> Tensor:
    z = y * 1
    v = z.t()
    z.bernoulli_(0.5)
    return (v.t() * z * y).sum()


def turned(s: Net, y: Tensor) -> Tensor:
    """Only how `z` is looked at changes: `v` stays what it is, and a write through `z` shows in it."""
    z = y * 1
    v = z[0]
    z.transpose_(0, 1)
    z[0].mul_(3)
    return (v * z[:, 1].sum()).sum()


def turned_without_gradients(s: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = y * 1
        z.swapaxes_(0, 1).unsqueeze_(0).squeeze_(0)
    return (z.t() * y).sum()


def turned_buffer(s: Net, y: Tensor) -> Tensor:
    s.seen.t_().t_().mul_(2)
    return (s.seen * y).sum()


def conjugates(s: Net, y: Tensor) -> Tensor:
    """Kernels only mark them: `view_as_real` would not take them."""
    each = (torch.fft.ifft(y), torch.fft.ihfft2(y), torch.svd(torch.complex(y, y * y))[2].abs())
    return sum((torch.view_as_real(z.resolve_conj()) if z.is_complex() else z).square().sum() for z in each)  # type: ignore[return-value]


FUNCTIONS = [
    *(power, logical, stochastic_depth, noise, drawn_through_a_view),
    *(turned, turned_without_gradients, turned_buffer, conjugates),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_a_model(function: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    program = shardc.compile(Net(function), {"x": X}, {"shardc": 1, "mesh": {"dp": 2}})
    assert program.verify().ok


def outlined(s: Net, y: Tensor) -> Tensor:
    return y.clone().fill_diagonal_(2.0).sum()


def test_the_fix_of_one_that_has_no_twin_helps() -> None:
    with pytest.raises(
        ShardcError, match=r"(?s)test_functional_twins.py:\d+: aten.fill_diagonal_.*x.diagonal\(\).fill_"
    ):
        capture(Net(outlined), {"x": X})

    def fixed(s: Net, y: Tensor) -> Tensor:
        z = y.clone()
        z.diagonal().fill_(2.0)
        return z.sum()

    capture(Net(fixed), {"x": X})


# --- what torch raises


def test_what_torch_raises_in_capture_has_the_models_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an op of the captured graph did not run, and as if a backward had no derivative."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("derivative for aten::exp is not implemented")

    monkeypatch.setattr(compare_eager, "interpret", broken)
    wanted = r"(?s)twins.py:\d+: torch cannot run the graph that capture made of this: RuntimeErr.*exp\(\) \+ 1.*report"
    with pytest.raises(ShardcError, match=wanted):
        capture(Net(power), {"x": X})


def test_a_fault_of_shardc_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("ours")

    monkeypatch.setattr(compare_eager, "interpret", broken)
    with pytest.raises(AssertionError, match="ours"):
        capture(Net(power), {"x": X})


class Ending(nn.Module):
    """Two layers whose results meet in an op alone that writes to the first one's, and has a gradient of zeros."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        self.write(h, self.b(x))
        return (h * x).sum()


def in_two_writes(h: Tensor, _: Tensor) -> None:
    h.zero_()
    h.add_(1).normal_()


def in_halves(h: Tensor, y: Tensor) -> None:
    h[:, :2] = 0
    h[:, 2:] = y[:, 2:]


COMPARISONS = ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "less_", "greater_", "not_equal_")
ENDING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{f"{name}, numbers": lambda h, y, name=name: getattr(h, name)(0.1) for name in COMPARISONS},
    **{name: lambda h, y, name=name: getattr(h, name)(y) for name in (*COMPARISONS, "copy_")},
    **{name: lambda h, y, name=name: getattr(h, name)() for name in ("zero_", "normal_", "uniform_", "exponential_")},
    "bernoulli_": lambda h, y: h.bernoulli_(y.sigmoid()),
    "fill_": lambda h, y: h.fill_(2.0),
    "fill_, of a value": lambda h, y: h.fill_(y.sum()),
    "a part compared": lambda h, y: h[:, 0].lt_(y[:, 0]),
    "a view": lambda h, y: h.t().zero_(),
    "[:] = 0": lambda h, y: h.__setitem__(slice(None), 0.0),
    "[...] = y": lambda h, y: h.__setitem__(..., y),
    "no_grad before": lambda h, y: h.copy_(y.detach()),
    "in two writes": in_two_writes,
    "in halves": in_halves,
}


@pytest.mark.parametrize("name", ENDING)
def test_a_gradient_of_zeros_is_one(name: str) -> None:
    """Parameters whose only path ends in such a write get zeros, as in eager; others get none."""
    torch.manual_seed(0)
    model, x = Ending(ENDING[name]), torch.randn(8, 4, dtype=torch.float64)
    model(x).backward()
    given = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sim = shardc.simulate(shardc.compile(model, x, {"shardc": 1, "mesh": {"dp": 2}}, prove=False), model, x)
    assert given.keys() == sim.grads.keys()
    assert all(torch.allclose(sim.grads[n], g, rtol=1e-12) for n, g in given.items())
    shardc.compile(model, x, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"a": "column", "b": "row"}})


def test_what_is_written_over_without_a_gradient_stays_as_it_is() -> None:
    """New tensors, which models fill: nothing is added to their programs."""

    def write(h: Tensor, y: Tensor) -> None:
        h.add_(torch.empty_like(y).copy_(y) + torch.zeros(8, 4).double().copy_(y) + torch.zeros_like(y).normal_())

    program = shardc.compile(Ending(write), torch.randn(8, 4).double(), {"shardc": 1, "mesh": {"dp": 2}})
    assert "with_gradient_of" not in program.text()
