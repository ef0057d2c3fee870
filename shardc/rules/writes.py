"""Ops that write into a view of a tensor: the rule of the view, read backward."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardc.rules.notation import Signature
from shardc.rules.op_call import Call
from shardc.rules.registry import SignatureOf, rule
from shardc.rules.views import cut, diagonal

aten = torch.ops.aten


def into(view: SignatureOf) -> SignatureOf:
    """x and what a view of x becomes -> x: dims that the view keeps are factors. The arguments are the view's, after
    the source.
    """

    def written(call: Call) -> Signature:
        """Written into a view: dims that the view keeps may be split, in what is written as well."""
        x, source = call.operands
        seen = view(replace(call, args=(call.args[0], *call.args[2:]), operands=(x,), results=(source,)))
        return replace(seen, inputs=(*seen.inputs, *seen.outputs), outputs=seen.inputs)

    return written


rule(aten.slice_scatter.default, into(cut), linear="0 1")
rule(aten.diagonal_scatter.default, into(diagonal), linear="0 1")
