"""Which kind an op is of, as a spec's `checkpoint` calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from shardc.passes.recompute.kinds import kinds
from shardc.runtime import ops

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.scaled_dot_product_attention.default, "attention"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"),
        (ops.attention, "attention"),
        (aten.conv2d.default, "conv"),
        (aten.conv_transpose2d.input, "conv"),
        (aten.convolution.default, "conv"),
        (aten.mm.default, "matmul"),
        (aten.layer_norm.default, "norm"),
        (aten.mul.Tensor, "elementwise"),
        (aten.sum.dim_IntList, "elementwise"),
        (aten.sort.default, ""),
        (torch.ops.prims.convert_element_type.default, "elementwise"),  # begins as convolutions do
    ],
)
def test_kind_of_an_op(target: Any, kind: str) -> None:
    node = fx.Graph().create_node("call_function", target)
    assert kinds(node, set()) == ({kind} if kind else set())
