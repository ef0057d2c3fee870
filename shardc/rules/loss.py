"""Rules of losses. Negative log likelihood also runs with split classes: logits are never gathered."""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, REPLICATE, Layout, Partial, Placement
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.reduce_parts import behind
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.shared_signatures import all_whole, names_of
from shardc.rules.core.strategy import over_dim
from shardc.runtime import ops
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers shardc::ctc_loss)


def _class_dim(call: Call) -> int:
    return 1 if len(call.operands[0].shape) > 1 else 0


def nll(call: Call) -> Signature:
    """Split all but the classes c: logits[n, c, ...], target[n, ...] -> loss[n, ...]."""
    names, c = names_of(len(call.operands[0].shape)), _class_dim(call)
    rest = names[:c] + names[c + 1 :]
    return call.fit([[*names[:c], f"d{c}!", *names[c + 1 :]], rest], [rest])


def local_nll(call: LocalCall) -> fx.Node:
    """Compute the largest logit over ranks, then the normaliser and the target's logit in one sum."""
    split = call.axes("classes")
    if not split:
        return call.same()
    axes, c = call.mesh.merge(split), _class_dim(call.call)
    logits, target, ignore = call.args
    logits = call.without_padding(logits, 0, c, -math.inf)
    digits, classes = call.digits(0, c)
    out, layout = call.call.results[0], call.outputs[0]

    def typed(placement: Placement, before: tuple[int, ...] = (), *, grad: bool = False) -> Value:
        placed = Layout.of(dict(behind(layout, len(before)).items) | dict.fromkeys(split, placement), call.mesh)
        return Value((*before, *out.shape), out.dtype, grad, placed)

    cause = "loss over split classes:"
    stats, parts, whole = (
        typed(p, (n,), grad=out.requires_grad) for n, p in ((3, PARTIAL), (2, PARTIAL), (2, REPLICATE))
    )
    read = call.emit(ops.nll_stats, (logits, target, call.mesh_node, digits, classes, ignore), {}, value=stats)
    top = call.emit(ops.nll_top, (read,), {}, value=typed(Partial("max")))
    top = call.all_reduce(ops.all_reduce_max, top, axes, typed(REPLICATE), f"{cause} the largest logit")
    sums = call.emit(ops.nll_parts, (read, top), {}, value=parts)
    sums = call.all_reduce(ops.all_reduce, sums, axes, whole, f"{cause} normaliser and target logit")
    return call.emit(ops.nll_join, (sums, target, ignore), {})


# vocabulary-parallel cross-entropy (Megatron-LM, Shoeybi et al. 2019, section 3)
rule(ops.nll, nll, local=local_nll, extra=over_dim("classes", lambda c: (_class_dim(c),), REPLICATE))


def by_row(call: Call) -> Signature:
    """Split rows of x[n, c], targets[n, c] -> loss[n], if the canonical pass left the loss unreduced."""
    if call.arg("reduction"):
        return all_whole(call)
    return call.fit("n c!, n c! -> n" if len(call.operands[0].shape) == 2 else "c!, c! -> ")


rule(torch.ops.aten.multilabel_margin_loss.default, by_row)


def ctc(call: Call) -> Signature:
    """Split n: log_probs[t, n, c], targets[n, s] (not concatenated), lengths[n] twice -> loss[n]."""
    batched = len(call.operands[1].shape) == 2
    return call.fit("t! n c!, n s!, n, n -> n" if batched else "t! n! c!, s!, n, n -> n")


rule(torch.ops.shardc.ctc_loss.default, ctc)
