"""Rules of losses. Negative log likelihood also runs with split classes: logits are never gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PARTIAL, REPLICATE, Layout, Partial, Placement, Shard
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.shared_signatures import all_whole, names_of
from shardc.rules.core.strategy import Strategy
from shardc.runtime import ops
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers shardc::ctc_loss)


def _class_dim(call: Call) -> int:
    return 1 if len(call.operands[0].shape) > 1 else 0


def nll(call: Call) -> Signature:
    """Split all but the classes c: logits[n, c, ...], target[n, ...] -> loss[n, ...]."""
    names, c = names_of(len(call.operands[0].shape)), _class_dim(call)
    rest = names[:c] + names[c + 1 :]
    return call.fit([[*names[:c], f"d{c}!", *names[c + 1 :]], rest], [rest])


def by_classes(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies of vocabulary-parallel cross-entropy (Megatron-LM, Shoeybi et al. 2019, section 3)."""
    d = _class_dim(call)
    for c in sorted(available[0], key=repr):
        if (
            isinstance(c, Shard)
            and c.dim == d
            and c.by_digits_alone
            and c.padded(call.operands[0].shape[d]) % (c.split * n) == 0
        ):
            yield Strategy("classes", (c, REPLICATE), (REPLICATE,))


def local_nll(call: LocalCall) -> fx.Node:
    """Compute the largest logit over ranks, then the normaliser and the target's logit in one sum."""
    split = call.axes("classes")
    if not split:
        return call.same()
    axes, c = call.mesh.merge(split), _class_dim(call.call)
    shards = call.inputs[0].shards(c)
    digits, classes = tuple((a, s.signed) for a, s in shards), call.call.operands[0].shape[c]
    logits, target, ignore = call.args
    if shards[0][1].padding:
        logits = call.without_padding(logits, 0, c, -math.inf)
        classes = shards[0][1].padded(classes)
    out = call.call.results[0]
    layout = call.outputs[0]
    flat = Value(out.shape, out.dtype, False, _on(layout, split, Partial("max"), call.mesh))
    pair = Value((2, *out.shape), out.dtype, out.requires_grad, _on(_shifted(layout), split, PARTIAL, call.mesh))
    size = Value(out.shape, out.dtype, False, layout).nbytes(call.mesh)
    top = call.emit(ops.nll_max, (logits,), {}, value=flat)
    top = call.emit(
        ops.all_reduce_max,
        (top, call.mesh_node, axes),
        {},
        value=Value(out.shape, out.dtype, False, layout),
        collective=Collective("all_reduce", "none", axes, size, "loss over split classes: the largest logit"),
    )
    parts = call.emit(ops.nll_parts, (logits, target, top, call.mesh_node, digits, classes, ignore), {}, value=pair)
    whole = Value((2, *out.shape), out.dtype, out.requires_grad, _shifted(layout))
    parts = call.emit(
        ops.all_reduce,
        (parts, call.mesh_node, axes),
        {},
        value=whole,
        collective=Collective(
            "all_reduce", "none", axes, 2 * size, "loss over split classes: normaliser and target logit"
        ),
    )
    return call.emit(ops.nll_join, (parts, target, ignore), {})


def _on(layout: Layout, axes: Sequence[str], placement: Placement, mesh: Mesh) -> Layout:
    for axis in axes:
        layout = layout.replace(axis, placement, mesh)
    return layout


def _shifted(layout: Layout) -> Layout:
    """Return the layout of a result that gets one more leading dim."""
    return Layout(tuple((a, replace(p, dim=p.dim + 1) if isinstance(p, Shard) else p) for a, p in layout.items))


rule(ops.nll, nll, local=local_nll, extra=by_classes)


def by_row(call: Call) -> Signature:
    """Split rows of x[n, c], targets[n, c] -> loss[n], if the canonical pass left the loss unreduced."""
    if call.arg(2, "reduction", 1):
        return all_whole(call)
    return call.fit("n c!, n c! -> n" if len(call.operands[0].shape) == 2 else "c!, c! -> ")


rule(torch.ops.aten.multilabel_margin_loss.default, by_row)


def ctc(call: Call) -> Signature:
    """Split n: log_probs[t, n, c], targets[n, s] (not concatenated), lengths[n] twice -> loss[n]."""
    batched = len(call.operands[1].shape) == 2
    return call.fit("t! n c!, n s!, n, n -> n" if batched else "t! n! c!, s!, n, n -> n")


rule(torch.ops.shardc.ctc_loss.default, ctc)
