"""Rounding to float8, and its messages, are the CPU's bit for bit.

Products by torch's kernels are those of 16 bits. (A CPU's: tests/features/fp8/test_passes.py.)"""

from __future__ import annotations

import pytest
import torch

from shardc.features.fp8 import kernel as fp8_kernel
from shardc.features.fp8 import products as fp8_products
from shardc.features.fp8 import rounding as fp8
from shardc.features.fp8.recipe import RECIPES


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
        sent = fp8.unpacked(fp8.fp8_pack(y.detach(), format, granule), y.detach(), format, granule)
        rows = fp8.fp8_amax(x.detach().t(), (1, 0))
        (g,) = torch.autograd.grad(fp8.fp8_grad(y, rows, format, granule), x, y.detach())
        return y.detach().cpu(), sent.cpu(), g.cpu()

    for a, b in zip(rounded(x.to(device)), rounded(x), strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("name", list(RECIPES))
def test_kernels_multiply_what_the_bytes_stand_for(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, whose sums are exact in float32: a layer and both its gradients, where the device has a kernel."""
    recipe, draw = RECIPES[name], torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-7, 8, shape, generator=draw).to(device, torch.bfloat16)

    x, weight, g = whole(160, 256), whole(96, 256), whole(160, 96)
    if not fp8_kernel.has_kernel(x, recipe, 96, 256):
        pytest.skip(f"torch has no kernel for {name} on this device")
    scales = 2.0 ** torch.arange(-80, 80, device=device).clamp(-20, 20)[:, None]  # a row's own
    x = x * scales.to(x.dtype) if recipe.x[0] else x

    def layer() -> tuple[torch.Tensor, ...]:
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        amax = fp8.fp8_amax(w, recipe.weight)
        rounded = fp8.fp8_round(a, fp8.fp8_amax(a, recipe.x), "e4m3", recipe.x)
        y = fp8_products.fp8_linear(rounded, w, amax, name)
        y = fp8.fp8_grad(y, amax if recipe.rows else None, recipe.gradient, recipe.grad)
        return (y.detach(), *torch.autograd.grad(y, (a, w), g))

    found = layer()
    monkeypatch.setattr(fp8_products, "has_kernel", lambda *_: False)
    for a, b in zip(found, layer(), strict=True):
        assert torch.equal(a, b) or bool(((a - b).abs() <= b.abs() / 128).all())
