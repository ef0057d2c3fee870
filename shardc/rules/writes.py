"""Rules of ops that write into a view of a tensor: the view's rule, read backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, SignatureOf, rule
from shardc.rules.views import cut, diagonal, local_range

aten = torch.ops.aten
#: The view that each op writes into.
_VIEWS = {aten.slice_scatter.default: aten.slice.Tensor, aten.diagonal_scatter.default: aten.diagonal.default}


def into(view: SignatureOf) -> SignatureOf:
    """Return the rule of (x, new values of a view of x) -> x, with the view's arguments after these."""

    def written(call: Call) -> Signature:
        """Split the dims that the view keeps, also in the written values."""
        seen = view(_read(call))
        return replace(seen, inputs=(*seen.inputs, *seen.outputs), outputs=seen.inputs)

    return written


def _read(call: Call) -> Call:
    """Return the call of the view that this call writes into."""
    x, source = call.operands
    args = (call.args[0], *call.args[2:])
    return replace(call, target=_VIEWS[call.target], args=args, operands=(x,), results=(source,))


def local_cut_written(call: LocalCall) -> fx.Node:
    """Write into the same part of this rank's entries if the sliced dim is split.

    If the slice takes all entries, return the source.
    """
    d = call.call.dim("dim")
    if not call.inputs[0].shards(d):
        return call.same()
    size, local = call.local(1)[d], call.out_shape[d]
    if local == size:
        return call.args[1]  # type: ignore[no-any-return]
    return call.emit(call.call.target, (*call.args[:2], d, *local_range(_read(call.call), size, local)), {})


rule(aten.slice_scatter.default, into(cut), linear="0 1", local=local_cut_written)
rule(aten.diagonal_scatter.default, into(diagonal), linear="0 1")
