"""Products of 8 bits: torch's kernel, and what runs where there is none, are one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from shardc.cost.ledger import FakeLedger
from shardc.features.fp8 import kernel as fp8_kernel
from shardc.features.fp8 import products as fp8_products
from shardc.features.fp8 import rounding as fp8
from shardc.features.fp8.recipe import RECIPES, along
from shardc.machine.work import Op
from shardc.torch_private import TorchDispatchMode, multiplies_float8_on_cpu

KERNEL = torch.ops.aten._scaled_mm_v2.default


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def whole(*shape: int) -> Tensor:
    """Numbers that float8 has, of which sums are exact in float32."""
    return torch.randint(-7, 8, shape).bfloat16()


def real(*shape: int) -> Tensor:
    return (torch.randn(shape) * torch.exp(torch.randn(shape))).bfloat16()


def layer(name: str, make: Callable[..., Tensor], transposed: bool, packed: bool = True) -> tuple[Tensor, ...]:
    """A layer's result, and the gradients of its input and weight, in bfloat16."""
    torch.manual_seed(0)
    recipe = RECIPES[name]
    x, g = make(2, 32, 64), make(2, 32, 96)
    weight = make(64, 96) if transposed else make(96, 64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    of_x, of_weight = along(recipe.x, 3), recipe.of_weight(transposed)
    amax = fp8.fp8_amax(weight, of_weight)
    x8 = fp8.fp8_round(x, fp8.fp8_amax(x, of_x), "e4m3", of_x)
    kept = fp8.fp8_pack(x8, "e4m3", of_x) if packed else None
    y = fp8_products.fp8_linear(x8, weight, amax, name, transposed, kept)
    y = fp8.fp8_grad(y, amax if recipe.rows else None, recipe.gradient, along(recipe.grad, 3))
    return (y.detach(), *torch.autograd.grad(y, (x, weight), g))


@pytest.mark.skipif(not multiplies_float8_on_cpu(), reason="torch 2.11 has no such kernel for the CPU")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("name", "calls"), [("fp8-rowwise", 2), ("fp8-tensorwise", 3), ("mxfp8", 0)])
def test_the_kernel_is_what_runs_without_one(
    name: str, calls: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row-wise and tensor-wise torch has a kernel for the CPU. The gradient of the weight has 8 bits with one scale for
    a tensor alone. Where sums are exact, so is the result; else sums in float32 differ in their order."""
    with Calls() as ran:
        found = layer(name, whole, transposed), layer(name, real, transposed)
    assert ran.count[KERNEL] == 2 * calls
    loose = layer(name, real, transposed, packed=False)
    assert all(map(torch.equal, loose, found[1]))  # packed before, or here
    monkeypatch.setattr(fp8_products, "has_kernel", lambda *_: False)
    with Calls() as ran:
        right = layer(name, whole, transposed), layer(name, real, transposed)
    assert not ran.count[KERNEL]
    assert all(map(torch.equal, found[0], right[0]))
    for a, b in zip(found[1], right[1], strict=True):
        largest = b.abs().max()
        assert bool(((a - b).abs() <= b.abs() / 128 + largest * 1e-5).all())  # the last of a bfloat16's 8 bits


def test_backward_keeps_bytes_of_the_input_and_the_weight_itself() -> None:
    x, weight = whole(32, 64).requires_grad_(), whole(96, 64).requires_grad_()
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        amax = fp8.fp8_amax(weight, (1, 0))
        x8 = fp8.fp8_round(x, fp8.fp8_amax(x, (1, 0)), "e4m3", (1, 0))
        fp8_products.fp8_linear(x8, weight, amax, "fp8-rowwise", False, fp8.fp8_pack(x8, "e4m3", (1, 0)))
    assert [(t.dtype, t.numel()) for t in saved] == [
        (torch.uint8, 32 * 64 + 32),
        (torch.bfloat16, 96 * 64),
        (torch.float32, 96),
    ]
    assert saved[1].data_ptr() == weight.data_ptr()


def test_scales_of_blocks_lie_in_cublas_tiles() -> None:
    """1D block scaling factors layout: tiles of 128 rows by 4 blocks, in a tile (r % 32) * 16 + r // 32 * 4 + c."""
    rows, blocks = 160, 6
    exponent = torch.randint(-100, 100, (rows, blocks), dtype=torch.int32)
    tiles = fp8_kernel._in_tiles(exponent).view(torch.uint8)
    assert tiles.numel() == 256 * 8
    for r in range(0, rows, 7):
        for c in range(blocks):
            at = (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert int(tiles[at]) - 127 == -int(exponent[r, c])


def test_products_of_blocks_are_priced_as_such() -> None:
    """Of tensors without data, which stand for those of a GPU that has the kernel: torch takes factors and scales."""
    with FakeLedger() as ledger, FakeTensorMode():
        x = torch.empty(64, 128, dtype=torch.bfloat16).requires_grad_()
        w = torch.empty(96, 128, dtype=torch.bfloat16).requires_grad_()
        y = fp8_products.fp8_linear(x, w, fp8.fp8_amax(w, (32, 32)), "mxfp8")
        torch.autograd.grad(y, (x, w), torch.empty_like(y))
    products = [op for op in ledger.parts[0].work if isinstance(op, Op) and op.flops]
    assert [(op.dtype, op.flops) for op in products] == [
        ("float8_e8m0fnu", 2 * 64 * 128 * 96),
        ("float8_e8m0fnu", 2 * 64 * 128 * 96),
        ("bfloat16", 2 * 64 * 128 * 96),
    ]
