"""Call torch's ops by their Python bindings, in graphs that a rank runs.

    torch.ops.aten.mm.default(x, y)       the overload, as in a text; arguments are parsed by the op's schema: 2.5 us
    torch.mm(x, y)                        the same kernel behind a generated parser of arguments: 1.3 us

A layer's step has some hundred ops. If they are small, or the device is fast, a step takes as long as the host needs
to call them. Programs keep overloads: analysis, proof and saved files need the exact op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

aten = torch.ops.aten

#: The most frequent ops. Each binding takes the arguments of its overload, in the same order, and these arguments
#: select no other overload: `tests/runtime/stage/test_bindings.py` calls both.
_BINDINGS: dict[Any, Callable[..., Any]] = {
    aten._softmax_backward_data.default: torch._softmax_backward_data,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.cos.default: torch.cos,
    aten.div.Tensor: torch.div,
    aten.expand.default: Tensor.expand,
    aten.linear.default: F.linear,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.matmul.default: torch.matmul,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    aten.select.int: torch.select,
    aten.silu.default: F.silu,
    aten.sin.default: torch.sin,
    aten.softmax.int: torch.softmax,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}


def binding(target: Any) -> Any:
    """Return the binding of an op, or the op itself if it has none."""
    return _BINDINGS.get(target, target)


def bound(graph: fx.Graph, source: fx.Graph | None = None) -> fx.GraphModule:
    """Make a graph a function that calls ops by their bindings; the graph then names them, too. source: not used."""
    for n in graph.nodes:
        if n.op == "call_function":
            n.target = binding(n.target)
    return fx.GraphModule(nn.Module(), graph)
