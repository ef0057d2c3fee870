"""Operations of attention, as kernels of GPUs compute it."""

from __future__ import annotations

import pytest
import torch

from shardc.machine.flops import aligned_of, flops_of

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
