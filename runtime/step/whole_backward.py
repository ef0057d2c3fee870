"""Refuses a backward that goes around the sums of gradients: `torch.autograd.grad(loss, module.parameters())`.

A module's gradients are summed over ranks into `.grad`, at the end of `loss.backward()`. What an optimizer holds, of
parameters in buckets, are other leaves than those of the graph: asked for their gradients alone, autograd would find
none, or only those of a penalty beside the loss; and of a parameter that is split it would give this rank's part, as if
it were the whole. So the loss leads to them as well, with no gradient: then its backward runs, and can say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shardc.errors import ShardcError
from shardc.torch_private import engine_executes


def check(beside: Sequence[nn.Parameter], graph: Any) -> None:
    """In the backward of a loss. beside: the parameters that optimizers hold. graph: the node behind the loss, which a
    whole backward runs. Raises ShardcError.
    """
    if torch.is_grad_enabled():
        raise ShardcError(
            "gradients that are summed over ranks have no graph of their own, by which they could be differentiated",
            where="loss.backward(create_graph=True)",
            fix="call loss.backward(); a term that needs gradients itself (a gradient penalty) belongs into the loss"
            " function, shardc.compile(model, batch, spec, loss=...)",
        )
    for p in beside:
        runs = engine_executes(get_gradient_edge(p).node)
        if runs is None:
            raise ShardcError(
                "gradients of parameters are summed over ranks when backward() ends, and lie in .grad: autograd.grad"
                " would find none, or that of this rank's part alone",
                where="torch.autograd.grad(loss, module.parameters())",
                fix="call loss.backward() and read each p.grad; a term that needs gradients itself (a gradient penalty)"
                " belongs into the loss function, shardc.compile(model, batch, spec, loss=...)",
            )
        if runs and engine_executes(graph):
            return  # a whole backward, as most are
        if runs:
            raise ShardcError(
                "with inputs=, backward would leave out what sums gradients over ranks: none would come",
                where="loss.backward(inputs=...)",
                fix="call loss.backward(), and set the .grad that is not wanted to None",
            )
