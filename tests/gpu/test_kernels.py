"""Kernels against what they replace. (Dropout's: test_dropout.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardc.runtime.ops.experts import grouped_mm as grouped_mm
from tests.gpu.watched import Gpu, watching

SIZES = (5, 0, 64, 27)  # of experts; one gets nothing


@pytest.mark.parametrize("transposed", [False, True], ids=["f[e, b, a]", "f[e, a, b]"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_products(device: str, dtype: torch.dtype, transposed: bool) -> None:
    """The product and its gradients, against one product an expert in float64."""
    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    rows, bias = leaf(sum(SIZES), 64), leaf(len(SIZES), 48)
    weight = leaf(len(SIZES), *((64, 48) if transposed else (48, 64)))
    assert grouped_mm.has_kernel(weight) == (device == "cuda" and dtype is torch.bfloat16)
    upstream = torch.randn(sum(SIZES), 48, generator=draw).to(device, dtype)
    groups = grouped_mm.Groups(SIZES, rows.device)
    found = grouped_mm.product(rows, weight, bias, groups, transposed)
    grads = (
        grouped_mm.grad_of_rows(upstream, weight, groups, transposed),
        grouped_mm.grad_of_weight(upstream, rows, weight, groups, transposed),
        grouped_mm.grad_of_bias(upstream, groups),
    )
    wide = [x.double().requires_grad_() for x in (rows, weight, bias)]
    matrices = [w if transposed else w.t() for w in wide[1]]
    parts = [r @ w + b for r, w, b in zip(wide[0].split(SIZES), matrices, wide[2], strict=True)]
    expected = torch.autograd.grad(torch.cat(parts), wide, upstream.double())
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for a, b in zip((found, *grads), (torch.cat(parts), *expected), strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=bound, atol=bound * float(b.detach().std()))


def test_grouped_products_do_not_wait(gpu: str) -> None:
    weight = torch.randn(4, 64, 64, device=gpu, dtype=torch.bfloat16)
    rows = torch.randn(sum(SIZES), 64, device=gpu, dtype=torch.bfloat16)

    def run() -> None:
        groups = grouped_mm.Groups(SIZES, rows.device)
        g = grouped_mm.product(rows, weight, rows[:4], groups, False)
        grouped_mm.grad_of_rows(g, weight, groups, False)
        grouped_mm.grad_of_weight(g, rows, weight, groups, False)
        grouped_mm.grad_of_bias(g, groups)

    run()
    seen = Gpu()
    with watching(seen):
        run()
    assert seen.syncs == []


def test_a_weight_at_an_odd_address_is_multiplied_without_the_kernel(gpu: str) -> None:
    """The kernel refuses addresses that are no multiples of 16 bytes."""
    flat = torch.randn(1 + 4 * 64 * 64, device=gpu, dtype=torch.bfloat16)
    weight = flat[1:].view(4, 64, 64)
    rows = torch.randn(sum(SIZES), 64, device=gpu, dtype=torch.bfloat16)
    assert not grouped_mm.has_kernel(weight)
    groups = grouped_mm.Groups(SIZES, rows.device)
    expected = grouped_mm.product(rows, weight.clone(), None, groups, False)
    found = grouped_mm.product(rows, weight, None, groups, False)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
