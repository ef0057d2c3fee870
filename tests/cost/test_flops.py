"""Operations of attention, as kernels of GPUs compute it; of convolutions, of products with vectors, of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardc
from shardc.cli.ranks.step_metrics import ModelFlops
from shardc.cost.measured.device_file import device
from shardc.machine.flops import aligned_of, flops_of, op_of
from shardc.runtime.mesh.step_context import StepContext
from tests import zoo

aten = torch.ops.aten
PRODUCTS = {
    aten._scaled_dot_product_flash_attention.default: 2,
    aten._scaled_dot_product_efficient_attention.default: 2,
    aten._scaled_dot_product_cudnn_attention.default: 2,
    aten._scaled_dot_product_flash_attention_backward.default: 5,
    aten._scaled_dot_product_efficient_attention_backward.default: 5,
    aten._scaled_dot_product_cudnn_attention_backward.default: 5,
}


@pytest.mark.parametrize("heads", [8, 2], ids=["as many heads of keys", "fewer heads of keys"])
@pytest.mark.parametrize("op", PRODUCTS, ids=str)
def test_attention_on_a_gpu(op: torch._ops.OpOverload, heads: int) -> None:
    q, k = torch.empty(3, 8, 32, 16, device="meta"), torch.empty(3, heads, 64, 16, device="meta")
    gradient = (q,) if "backward" in str(op) else ()
    assert flops_of(op, (*gradient, q, k, k), {}, q) == PRODUCTS[op] * 2 * 3 * 8 * 32 * 64 * 16


@pytest.mark.parametrize(
    ("columns", "transposed", "expected"), [(64, False, 16), (30522, False, 4), (50257, False, 2), (50257, True, 16)]
)
def test_rows_of_products_begin_at_multiples(columns: int, transposed: bool, expected: int) -> None:
    """Of bytes; the rows of a transposed matrix are those that lie in memory."""
    x = torch.empty(128, 64, dtype=torch.bfloat16, device="meta")
    w = torch.empty(columns, 64, dtype=torch.bfloat16, device="meta").t()
    if transposed:  # the product has 64 columns, and its rows are many
        x, w = torch.empty(columns, 64, dtype=torch.bfloat16, device="meta"), torch.empty_like(x[:64]).t()
    assert aligned_of(aten.mm.default, (x, w), x @ w) == expected
    assert aligned_of(aten.add.Tensor, (x, x), x) == 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 8])
def test_a_convolutions_backward_computes_its_products_twice(groups: int, transposed: bool) -> None:
    """Once for each gradient; of each group's channels alone."""
    x = torch.empty(2, 16, 9, 9, device="meta")
    w = torch.empty(16, 32 // groups, 3, 3) if transposed else torch.empty(32, 16 // groups, 3, 3)
    args = (x, w.to("meta"), None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    y = aten.convolution.default(*args)
    forward = flops_of(aten.convolution.default, args, {}, y)
    assert forward == 2 * 2 * 9 * 9 * 32 * 16 // groups * 9
    for mask in ([True, True, False], [False, True, True], [True, False, False]):
        backward = (y, x, w.to("meta"), [32], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, mask)
        gradients = aten.convolution_backward.default(*backward)
        assert flops_of(aten.convolution_backward.default, backward, {}, gradients) == sum(mask[:2]) * forward


def test_products_with_a_vector_take_the_time_of_their_bytes() -> None:
    """As the gradient of routing weights: of each token, its experts' rows by its own."""
    h100 = device("h100-80g")
    for rows, weights, columns in ((2, 4096, 1), (1, 2, 4096)):
        args = (torch.empty(4096, rows, weights, device="meta"), torch.empty(4096, weights, columns, device="meta"))
        op = op_of(aten.bmm.default, args, {}, aten.bmm.default(*args))
        assert op is not None
        assert h100.op_seconds(op) == h100.traffic_seconds(op) > h100.launch


@pytest.mark.parametrize("spec", [{}, {"checkpoint": [{"match": "h.*"}]}], ids=["kept", "recomputed"])
def test_a_models_flops_are_those_of_its_products(spec: dict[str, Any]) -> None:
    """Twice forward's in backward, whatever is computed again; once where weights are frozen."""
    model, batch = zoo.gpt()

    def counted() -> int:
        program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, **spec}, prove=False)
        engine = program.engine(model, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
        with ModelFlops(engine.mesh.step) as found:
            engine.step(batch)
        return found.flops

    with torch.no_grad(), ModelFlops(StepContext()) as forward:
        model(**batch)
    assert counted() == 3 * forward.flops
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("h.") or name == "h.0.ln_1.weight")
    rows, length = batch["ids"].shape
    head = 2 * rows * length * zoo.VOCAB * zoo.HIDDEN
    attention = 2 * 4 * rows * length**2 * zoo.HIDDEN  # of two layers: it has no weights
    assert counted() == 2 * forward.flops + attention + head
