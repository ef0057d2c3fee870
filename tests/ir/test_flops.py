"""Operations of attention, as kernels of GPUs compute it."""

from __future__ import annotations

import pytest
import torch

from shardc.ir.flops import flops_of

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
