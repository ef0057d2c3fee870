"""Complex weights under every split: losses, gradients and weights after a step are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests import equality

COMPLEX = torch.complex128


class Layers(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.product, self.first = product, nn.Linear(6, 6, dtype=COMPLEX)
        self.up, self.down = nn.Linear(6, 8, dtype=COMPLEX), nn.Linear(8, 2, dtype=COMPLEX)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        wide = {
            "linear": lambda: self.up(h),
            "matmul": lambda: h @ self.up.weight.mT + self.up.bias,
            "addmm": lambda: torch.addmm(self.up.bias, h, self.up.weight.mT),
            "einsum": lambda: torch.einsum("bi,oi->bo", h, self.up.weight),
        }[self.product]()
        return (self.down(wide * wide.conj().abs()) - y).abs().square().mean()


def built(product: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batch = {n: torch.randn(8, k, generator=generator, dtype=COMPLEX) for n, k in (("x", 6), ("y", 2))}
    return Layers(product), batch


SPECS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}},
    "dp tp zero 3": {"mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}, "data": {"zero": 3}},
    "dp, padded": {"mesh": {"dp": 3}, "uneven": "pad"},
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("product", ["linear", "matmul", "addmm", "einsum"])
def test_complex_products(product: str, spec: str) -> None:
    one = equality.reference(lambda: built(product))
    program = one.compile({"shardc": 1, **SPECS[spec]})
    assert program.prove().ok
    equality.assert_equal(shardc.verify.simulate(program, one.model, one.batch), one.loss, one.grads)


def test_a_complex_product_comes_back_from_disk(tmp_path: Any) -> None:
    one = equality.reference(lambda: built("linear"))
    one.compile({"shardc": 1, **SPECS["tp"]}).save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    equality.assert_equal(shardc.verify.simulate(loaded, one.model, one.batch), one.loss, one.grads)
