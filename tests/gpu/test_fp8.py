"""Rounding to float8, and its messages, are the CPU's bit for bit. (A CPU's: tests/passes/test_products.py.)"""

from __future__ import annotations

import pytest
import torch

from shardc.runtime.ops import fp8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granule", [(1, 0), (0, 0), (32, 32)], ids=str)
def test_rounding_is_the_cpus(device: str, granule: tuple[int, int], format: str, dtype: torch.dtype) -> None:
    """Of numbers of all sizes, of a granule of zeros, and of one that has something not finite."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(96, 64, generator=draw) * torch.exp(6 * torch.randn(96, 64, generator=draw))
    x[32:64] = 0
    x[5, 7] = float("inf") if granule == (1, 0) else 1
    x = x.to(dtype)

    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        y = fp8.fp8_round(x, fp8.fp8_amax(x, granule), format, granule)
        sent = fp8.unpacked(fp8.packed(y.detach(), format, granule), y.detach(), format, granule)
        rows = fp8.fp8_amax(x.detach().t(), (1, 0))
        (g,) = torch.autograd.grad(fp8.fp8_grad(y, rows, format, granule), x, y.detach())
        return y.detach().cpu(), sent.cpu(), g.cpu()

    for a, b in zip(rounded(x.to(device)), rounded(x), strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
