"""Unsort: models that sort rows by expert themselves are equal to one device, and send the chosen rows only; what is
not of the form stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.passes.canonical import grouped_mm
from shardc.runtime import ops

E, K, H, INNER = 4, 2, 16, 16


class Sorted(nn.Module):
    """A mixture of experts by grouped products. how: what is done with (model, x, weights, index). torch's op takes
    bfloat16 only.
    """

    def __init__(self, how: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.gate = how, nn.Linear(H, E, bias=False)
        self.w1, self.w3, self.w2 = (nn.Parameter(torch.randn(E, INNER, H) / 4) for _ in range(3))
        self.w13 = nn.Parameter(torch.randn(E, H, 2 * INNER) / 4)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, index = self.gate(flat).softmax(-1).topk(K, -1)
        return self.how(self, flat, weights, index).float().square().mean()


def ends(index: Tensor) -> Tensor:
    return torch.histc(index.flatten().float(), bins=E, min=0, max=E - 1).cumsum(0).to(torch.int32)


def titan(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """torchtitan: gather, three weights, scatter_add."""
    order = torch.argsort(index.view(-1), stable=True)
    rows = torch.gather(x, 0, (order // K).reshape(-1, 1).expand(-1, H))
    h = F.silu(torch._grouped_mm(rows, m.w1.transpose(-2, -1), offs=ends(index)))
    h = h * torch._grouped_mm(rows, m.w3.transpose(-2, -1), offs=ends(index))
    made = torch._grouped_mm(h, m.w2, offs=ends(index)) * weights.view(-1)[order].reshape(-1, 1)
    return x + torch.zeros_like(x).scatter_add(0, (order // K).reshape(-1, 1).expand(-1, H), made)


@torch.library.custom_op("shardc_grouped::scatter_add", mutates_args=())
def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src)


scatter_add.register_fake(lambda out, index, src: torch.empty_like(out))
scatter_add.register_autograd(
    lambda ctx, g: (g, None, g.gather(0, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def titan_3(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """torchtitan 0.3: counts by a scatter, which counts no expert of a token twice; rows are cast for each product; an
    op of its own puts them back.
    """
    counts = torch.zeros(len(x), E, dtype=torch.bool).scatter_(-1, index, True).sum(0)
    stops = torch.cumsum(counts, 0, dtype=torch.int32)
    order = torch.argsort(index.view(-1), stable=True)
    share, token = weights.view(-1)[order], order // K
    rows = x.float()[token]
    h = F.silu(torch._grouped_mm(rows.bfloat16(), m.w1.transpose(-2, -1), offs=stops))
    h = h * torch._grouped_mm(rows.bfloat16(), m.w3.transpose(-2, -1), offs=stops)
    made = torch._grouped_mm(h, m.w2.transpose(-2, -1), offs=stops).type_as(rows) * share.reshape(-1, 1)
    zeros = torch.zeros(x.shape)
    return scatter_add(zeros, token.reshape(-1, 1).expand(-1, H), made)  # type: ignore[no-any-return]


def fused(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """One weight for gate and up, indexing, counts by one_hot, rows put back by the inverse order."""
    _, order = index.flatten().sort()
    count = F.one_hot(index, E).sum((0, 1)).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x[order // K], m.w13, offs=count).chunk(2, -1)
    made = F.grouped_mm(F.gelu(gate) * up, m.w2, offs=count)
    return (made[order.argsort()].view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


def plain(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """No gate; rows are scattered into their places; every choice is weighed before."""
    order = index.flatten().argsort()
    pairs = (x.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
    made = torch._grouped_mm(F.relu(torch._grouped_mm(pairs[order], m.w1.mT, offs=ends(index))), m.w2, offs=ends(index))
    y = torch.zeros_like(pairs)
    y[order] = made
    return y.view(-1, K, H).sum(1)


def added(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """index_select and index_add."""
    order = index.flatten().argsort(stable=True)
    token = torch.div(order, K, rounding_mode="floor")
    made = torch._grouped_mm(
        F.relu(torch._grouped_mm(x.index_select(0, token), m.w1.mT, offs=ends(index))), m.w2, offs=ends(index)
    )
    return torch.zeros_like(x).index_add(0, token, made * weights.flatten()[order].unsqueeze(-1))


MESHES: dict[str, dict[str, Any]] = {
    "dp=2": {"mesh": {"dp": 2}},
    "ep=2": {"mesh": {"ep": 2}, "experts": [{"match": "*", "axis": "ep"}]},
    "dp=2, experts over dp": {"mesh": {"dp": 2}, "experts": [{"match": "*", "axis": "dp"}]},
}


def batch() -> Tensor:
    return torch.randn(4, 8, H, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", [titan, titan_3, fused, plain, added])
def test_equal(how: Any, mesh: str) -> None:
    """Within bfloat16, and in float64 as the one op; the bytes are those of the chosen rows."""
    model, x = Sorted(how), batch()
    loss = model(x)
    loss.backward()
    program = shardc.compile(model, x, {"shardc": 1, **MESHES[mesh]})
    sim = shardc.verify.simulate(program, model, x)
    torch.testing.assert_close(sim.loss, loss.detach(), rtol=1e-2, atol=0)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert float((sim.grads[name] - p.grad).norm()) <= 2e-2 * float(p.grad.norm()), name
    assert program.verify().ok
    sent = [n.meta["collective"] for n in program.stages[0].graph.nodes if "collective" in n.meta]
    assert all(c.kind in ("all_to_all", "all_reduce") for c in sent)
    if "experts" in MESHES[mesh]:
        assert sorted(c.bytes for c in sent if c.kind == "all_to_all")[1:] == [4 * 8 // 2 * K * H * 2] * 2
        assert program.param("w2").value.local_shape(program.mesh)[0] == E // 2


def other_counts(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Ends that are not those of the order's experts."""
    order = index.flatten().argsort(stable=True)
    return torch._grouped_mm(
        F.relu(torch._grouped_mm(x[order // K], m.w1.mT, offs=ends(E - 1 - index))), m.w2, offs=ends(index)
    )


def mixed(m: Any, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Rows that look at each other between the products."""
    order = index.flatten().argsort(stable=True)
    h = torch._grouped_mm(x[order // K], m.w1.mT, offs=ends(index)).softmax(0)
    return torch._grouped_mm(h, m.w2, offs=ends(index))


@pytest.mark.parametrize("how", [other_counts, mixed])
def test_what_is_not_of_the_form_is_refused(how: Any) -> None:
    with pytest.raises(shardc.ShardcError, match=r"_grouped_mm.* has no rule") as e:
        shardc.compile(Sorted(how), batch(), {"shardc": 1, "mesh": {"dp": 2}})
    assert "shardc.nn.experts" in e.value.errors[0].fix


def test_the_op() -> None:
    """Three products are one op, with the activation as text; the sort is gone."""
    program = shardc.compile(Sorted(titan), batch(), {"shardc": 1, "mesh": {"dp": 1}})
    (node,) = program.graph.find_nodes(op="call_function", target=ops.experts)
    assert node.args[7] == "b, c = halves(x); a = silu(b); mul(a, c)"
    assert "argsort" not in str(program)
    assert shardc.coverage(Sorted(titan), batch()).covered
    with pytest.raises(NotImplementedError, match="never runs"):
        grouped_mm.product(torch.ones(1), torch.ones(1))
