"""Call torch's ops by their Python bindings, in graphs that a rank runs.

    torch.ops.aten.mm.default(x, y)       the overload, as in a text; arguments are parsed by the op's schema: 2.5 us
    torch.mm(x, y)                        the same kernel behind a generated parser of arguments: 1.3 us

A layer's step has some hundred ops. If they are small, or the device is fast, a step takes as long as the host needs
to call them. Programs keep overloads: analysis, proof and saved files need the exact op.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

aten = torch.ops.aten

#: The most frequent ops. Each binding takes the arguments of its overload, in the same order, and these arguments
#: select no other overload: `tests/runtime/stage/test_bindings.py` calls both. Most are torch's function of that name.
_SAME_NAME = """
    _softmax_backward_data.default add.Tensor addmm.default bmm.default cat.default clone.default cos.default div.Tensor
    masked_fill.Scalar matmul.default mean.dim mm.default mul.Tensor native_layer_norm.default neg.default
    permute.default pow.Tensor_Scalar reshape.default rsqrt.default select.int sin.default softmax.int sub.Tensor
    sum.default sum.dim_IntList t.default transpose.int unsqueeze.default
"""
_BINDINGS: dict[Any, Callable[..., Any]] = {
    **{attrgetter(op)(aten): getattr(torch, op.partition(".")[0]) for op in _SAME_NAME.split()},
    aten.expand.default: Tensor.expand,
    aten.linear.default: F.linear,
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    aten.silu.default: F.silu,
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
