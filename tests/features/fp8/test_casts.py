"""Rounding to float8: the kernels are the torch forms, bit for bit. (By Triton's interpreter; on a GPU: tests/gpu.)"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from shardc.features.fp8 import rounding as fp8
from shardc.features.fp8.casts import _empty, by_torch, row_amax_by_torch
from tests.triton_interpreter import interpreted


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with interpreted("shardc.features.fp8.cast_kernel") as module:
        yield module


def numbers(dtype: torch.dtype) -> Tensor:
    """Of all sizes, with borders between two numbers of float8, a granule of zeros, and one that is not finite."""
    torch.manual_seed(0)
    x = torch.randn(64, 96) * torch.exp(5 * torch.randn(64, 96))
    x[0, :16] = torch.tensor(
        [448, 464, 463, 432, 1, -(2**-6), 2**-9, 2**-10, 3 * 2**-10, 0, -0.0, 17, 19, 15, 9, 2**-7]
    )
    x[1, :8] = torch.tensor([57344, 61439, 2**-14, 2**-16, 2**-17, 3 * 2**-17, -5, 7])
    x[32:64, :32] = 0
    x[40] = 0
    x[50, 40], x[51, 80] = float("inf"), float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granule", [(1, 0), (0, 0), (0, 1), (32, 32), (1, 32)], ids=str)
def test_the_kernel_is_the_torch_form_bit_for_bit(
    kernel: ModuleType, granule: tuple[int, int], format: str, dtype: torch.dtype
) -> None:
    x = numbers(dtype)
    if granule == (0, 0):
        x = x.nan_to_num(3, 3, 3)
    amax = fp8.fp8_amax(x, granule)
    weights = torch.exp(3 * torch.randn(96)).float()
    for of in (None, weights):
        top = amax if of is None else fp8.fp8_amax(x.float() * 2.0**-5, granule)
        for kind in ("packed", "values"):
            if of is not None:  # no number may be larger than the largest
                top = top.clamp(min=1e30) if kind == "values" else amax * 1e6
            found = _empty(x, top, kind)
            kernel.cast(x, top, of, format, granule, found, kind)
            right = by_torch(x, top, of, format, granule, kind)
            if kind == "values":
                assert torch.equal(found.isnan(), right.isnan())
                assert torch.equal(found.nan_to_num(), right.nan_to_num())
            else:
                known = right & 127 != 127  # nan has two signs
                assert torch.equal(found & 127, right & 127)
                assert torch.equal(found[known], right[known])


def test_the_largest_of_rows_whose_columns_have_scales(kernel: ModuleType) -> None:
    x, weights = numbers(torch.bfloat16), torch.exp(3 * torch.randn(96)).float()
    found, right = kernel.largest(x, weights), row_amax_by_torch(x, weights)
    assert torch.equal(found, right)
    assert found[50:52].isinf().all()
