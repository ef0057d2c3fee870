"""Random graphs of ops, on random specs, equal to one device or are refused, and are proven (tests/verify/op_graphs.py;
`make graphs` tries many); and what was found so, kept as the smallest model of each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests import equality
from tests.verify import op_graphs

GRAPHS, SPECS = 20, 3


def test_random_graphs() -> None:
    found: Counter[str] = Counter()
    for number in range(GRAPHS):
        built = op_graphs.case(0, number)
        for i in range(SPECS if built is not None else 0):
            _, captured = built  # type: ignore[misc]
            spec = op_graphs.spec_of(captured, random.Random(f"0 {number} {i}"), most=8)
            result = op_graphs.check(captured, spec)
            assert not result.endswith("!"), f"case {number}.{i}: {spec}\n{result}"
            found[result.partition(":")[0]] += 1
    assert found[""] > 3 * (found.total() - found[""])


def test_what_is_wrong_is_noticed_and_made_smaller() -> None:
    """A search that finds nothing, or shrinks it to something else, would find nothing ever."""
    cases = (op_graphs.case(0, n) for n in range(20))
    built = next(b for b in cases if b is not None and len(b[0].calls) > 4)
    graph, captured = built
    assert not op_graphs.differences(captured, captured.loss, captured.grads)
    assert op_graphs.differences(captured, captured.loss + 1, captured.grads) == "the loss differs by 1"
    smaller = op_graphs.smaller_graph(graph)
    assert smaller
    assert all(len(g.calls) <= len(graph.calls) for g in smaller)
    for g in smaller[:5]:
        again = op_graphs.captured(g)
        assert not op_graphs.check(again, {"shardc": 1, "mesh": {"dp": 1}, "batch": {"axes": []}})


class Elementwise(nn.Module):
    """A parameter meets the batch's dim."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(-5.0, 7.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.p).square().sum()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.ReLU()
        self.p = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.p) * 2).square().sum()


class Summed(nn.Module):
    """A parameter is summed as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(6.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.p.sum()).square().sum()


class Gathered(nn.Module):
    """Indices point into a dim that is padded in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        index = (x.long() % 12).view(12, 4)
        return (self.p.abs().reshape(12, 4).gather(0, index) * x.view(12, 4)).sum()


class Inverted(nn.Module):
    """Zeros in the padding are matrices without an inverse, and without a condition number's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.linalg.cond(self.p) * x.sum(1)).sum()


class Added(nn.Module):
    """A parameter's entries are added to places."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(32.0, dtype=torch.float64).view(4, 8))
        self.register_buffer("places", torch.tensor([3, 0, 5, 11, 0, 2, 7, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return x.index_add(1, self.places, self.p).square().sum()


class Strided(nn.Module):
    """The memory of a parameter, and of a value that lies otherwise, read by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(7.0, dtype=torch.float64))  # in front of it in a bucket
        self.p = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * self.p * self.first.sum()).t()
        return self.p.as_strided((5, 3), (4, 1), 2).square().sum() + turned.as_strided((12, 3), (1, 12)).square().sum()


class EachRow(nn.Module):
    """A parameter has a row for each of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,bi->b", x, self.p).square().sum()


class Equal(nn.Module):
    """All entries are equal: torch's gradient of their deviation is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(4, 12, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.p.std(0) * x).sum() + (self.p.std() + self.p.sum()) * x.sum()


class Broadcast(nn.Module):
    """A row beside a view that puts microbatches after a part of a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(8.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.p, x.t().reshape(4, 12), self.p.expand(12, 8)).square().sum()


class Broadcasts(nn.Module):
    """Two that read alike: whole, and one microbatch's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(12.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.p.expand(6, 12).index_add(0, x[0].long() % 6, self.p.expand(12, 12)).square().sum()


class Zeros(nn.Module):
    """A constant beside a view that puts padding into several places of a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(16.0, dtype=torch.float64).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        part = x[:, :4]
        zeros = torch.zeros_like(part.t().reshape(2, 8)).view(4, 4)
        return (torch.cat([self.p * part.t(), zeros]) * 3).square().sum()


class Heads(nn.Module):
    """A constant whose first dim is rows times heads."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(16.0, dtype=torch.float64).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x[:, :4] @ self.p).reshape(2 * x.shape[0], 2)
        return torch.cat([heads, torch.zeros_like(heads)], 1).square().sum()


class Repeated(nn.Module):
    """A row that stands in every row, padding among them, of a product with a padded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(72.0, dtype=torch.float64).view(12, 6))
        self.q = nn.Parameter(torch.arange(8.0, dtype=torch.float64).view(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.p.t() @ self.q.expand(12, 8)).square().sum() * x.sum()


class Divergence(nn.Module):
    """Of a parameter, whose logarithm is infinite where it is padded with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(1.0, 49.0, dtype=torch.float64).view(4, 12))
        self.q = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nn.functional.kl_div(self.q, self.p, reduction="none")
        return (rows * 1e-3).square().sum() + x.sum()


class Squares(nn.Module):
    """A long product of exponentials that are below 1 in all rows: in padding it may not overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.1, 1, 12, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.exp(-self.rate * x.abs() / 4096)
        for _ in range(12):
            decay = decay * decay
        return (decay * self.rate * x).mean()


class Twice(nn.Module):
    """One value, made twice, in two layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.product, self.w = nn.Linear(12, 8).double(), nn.Parameter(torch.ones(4, 12, dtype=torch.float64))
        nn.init.ones_(self.product.weight)
        nn.init.ones_(self.product.bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.p.expand(4, 12), self.p.expand(4, 12)
        return self.product(second).square().sum() * 1e-3 + (first.positive() * self.w * x).sum()


class Merged(nn.Module):
    """A view merges the parts of one parameter, and another one is split in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(48.0, dtype=torch.float64).view(4, 12))
        self.w = nn.Parameter(torch.arange(288.0, dtype=torch.float64).view(12, 24) * 1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.p.unsqueeze(2).expand(4, 12, 6).reshape(12, 24) * self.w).sum() + x.sum()


X = {"x": torch.arange(48.0, dtype=torch.float64).view(4, 12) - 20}


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        pytest.param(
            Elementwise,
            {"mesh": {"dp": 2, "tp": 2}, "batch": {"dims": {"x": 1}}, "shard": {"p": {0: "tp"}}},
            id="a dim that one axis leaves and another takes: it was cut first, and the parts were others",
        ),
        pytest.param(
            Elementwise,
            {"mesh": {"dp": 2}, "batch": {"dims": {"x": 1}, "microbatches": 3}},
            id="a parameter was stored in parts of microbatches",
        ),
        pytest.param(
            Turned,
            {
                "mesh": {"a": 2, "b": 2},
                "batch": {"axes": []},
                "activations": {"first": {0: "a", 1: "b"}, "second": {0: "b", 1: "a"}},
            },
            id="two axes change places",
        ),
        pytest.param(
            Summed,
            {"mesh": {"tp": 4}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {0: "tp"}}},
            id="the gradient of a padded parameter's sum reached its padding, which the optimizer then filled",
        ),
        pytest.param(
            Gathered,
            {"mesh": {"tp": 2}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {1: "tp"}}},
            id="padding before an entry was counted as entries, in the rule of gather",
        ),
        pytest.param(
            Inverted,
            {"mesh": {"tp": 3}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {0: "tp"}}},
            id="gradients of matrices in the padding were nan",
        ),
        pytest.param(
            Added,
            {"mesh": {"tp": 3}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {1: "tp"}}},
            id="places beside a padded parameter were taken for a factor, which keeps gradients from its padding",
        ),
        pytest.param(
            Strided,
            {"mesh": {"dp": 2, "tp": 2}, "data": {"zero": 1}, "shard": {"p": {0: "tp"}}},
            id="strides read the memory of a bucket",
        ),
        pytest.param(
            Elementwise,
            {"mesh": {"a": 2, "b": 2}, "batch": {"dims": {"x": 0}, "axes": ["a"], "microbatches": 2}},
            id="a summand's type lost one of its axes",
        ),
        pytest.param(
            Equal,
            {"mesh": {"dp": 2}, "batch": {"dims": {"x": 1}}},
            id="the gradient of a deviation of equal entries was nan",
        ),
        pytest.param(
            Broadcast,
            {"mesh": {"b": 2}, "batch": {"dims": {"x": 0}, "axes": [], "microbatches": 2}},
            id="rows of a microbatch were not known to be a part of what is broadcast",
        ),
        pytest.param(
            Broadcasts,
            {"mesh": {"dp": 2}, "batch": {"dims": {"x": 1}, "microbatches": 2}},
            id="of two values that one line holds, it has to be right for each",
        ),
        pytest.param(
            Zeros,
            {"mesh": {"dp": 2}, "batch": {"dims": {"x": 0}, "microbatches": 3}, "uneven": "pad"},
            id="padding in several places of a constant was not known",
        ),
        pytest.param(
            Zeros,
            {"mesh": {"dp": 1}, "batch": {"dims": {"x": 0}, "microbatches": 3}, "uneven": "pad"},
            id="padding of microbatches alone was not known",
        ),
        pytest.param(
            Heads,
            {"mesh": {"dp": 1}, "batch": {"dims": {"x": 0}, "microbatches": 3}, "uneven": "pad"},
            id="padding of rows times heads was not known",
        ),
        pytest.param(
            Squares,
            {"mesh": {"dp": 1}, "batch": {"dims": {"x": 0}, "microbatches": 3}, "uneven": "pad"},
            id="padding of an exponential grew until it overflowed",
        ),
        pytest.param(
            Repeated,
            {"mesh": {"tp": 5}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {0: "tp"}}},
            id="a row that is repeated was taken for a parameter, whose padding is zero",
        ),
        pytest.param(
            Divergence,
            {"mesh": {"tp": 3}, "batch": {"axes": []}, "uneven": "pad", "shard": {"p": {0: "tp"}, "q": {0: "tp"}}},
            id="the gradient of a divergence was nan where its target is padded",
        ),
        pytest.param(
            Twice,
            {"mesh": {"tp": 3}, "batch": {"axes": []}, "uneven": "pad", "activations": {"product": {0: "tp"}}},
            id="of a value that is made twice the second layout was not known",
        ),
        pytest.param(
            EachRow,
            {"mesh": {"pp": 2}, "batch": {"microbatches": 2}, "pipeline": {"axis": "pp"}},
            id="flops of a sum of products took an input's rows for those of a microbatch",
        ),
        pytest.param(
            Merged,
            {
                "mesh": {"a": 2, "b": 2},
                "batch": {"axes": []},
                "uneven": "pad",
                "shard": {"p": {1: ["a", "b"]}, "w": {0: ["b", "a"]}},
            },
            id="a parameter got the padding of another split than its own",
        ),
    ],
)
def test_what_was_found(model: Callable[[], nn.Module], spec: dict[str, Any]) -> None:
    one = equality.reference(lambda: (model(), X))
    program = one.compile({"shardc": 1, **spec})
    assert program.prove().ok, str(program.prove())

    def momentum(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 1e-6, momentum=0.9)

    alone = one.compile({"shardc": 1, "mesh": {"dp": 1}})
    want, sim = (shardc.verify.simulate(p, one.model, X, steps=3, optimizer=momentum) for p in (alone, program))
    torch.testing.assert_close(sim.loss, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(sim.state, want.state, rtol=1e-12, atol=0)
