"""The loss: negative log likelihood, also with the classes split, so that the logits are never gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from shardc.placement import PARTIAL, REPLICATE, Layout, Partial, Placement, Shard
from shardc.program import Collective, Value
from shardc.rules.core import Call, LocalCall, Strategy, rule
from shardc.rules.notation import Dim, Signature
from shardc.runtime import ops


def _class_dim(call: Call) -> int:
    return 1 if len(call.operands[0].shape) > 1 else 0


def nll(call: Call) -> Signature:
    """logits[n, c, ...], target[n, ...] -> loss[n, ...]; the classes c are whole."""
    x, c = call.operands[0].shape, _class_dim(call)
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    rest = tuple(names[:c] + names[c + 1 :])
    return Signature((tuple(names), rest), (rest,), {f"d{i}": s for i, s in enumerate(x)}, frozenset(), frozenset({f"d{c}"}))


def by_classes(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Vocabulary-parallel cross-entropy (Megatron-LM, Shoeybi et al. 2019, section 3)."""
    c = Shard(_class_dim(call))
    if call.operands[0].shape[c.dim] % n == 0 and c in available[0]:
        yield Strategy("classes", (c, REPLICATE), (REPLICATE,))


def local_nll(call: LocalCall) -> fx.Node:
    """Per position: the maximum over all classes, then in one sum over ranks the normaliser and the target's logit."""
    axes = call.axes("classes")
    if not axes:
        return call.same()
    assert len(axes) == 1, "the classes are split over one axis"
    axis = axes[0]
    logits, target, ignore = call.args
    out = call.call.results[0]
    layout = call.outputs[0]
    flat = Value(out.shape, out.dtype, False, layout.replace(axis, Partial("max"), call.mesh))
    pair = Value((2, *out.shape), out.dtype, True, _shifted(layout).replace(axis, PARTIAL, call.mesh))
    size = Value(out.shape, out.dtype, False, layout).nbytes(call.mesh)
    top = call.emit(ops.nll_max, (logits,), {}, value=flat)
    top = call.emit(
        ops.all_reduce_max, (top, call.mesh_node, (axis,)), {}, value=Value(out.shape, out.dtype, False, layout),
        collective=Collective("all_reduce", "none", (axis,), size, "loss over split classes: the largest logit"),
    )  # fmt: skip
    parts = call.emit(ops.nll_parts, (logits, target, top, call.mesh_node, axis, ignore), {}, value=pair)
    whole = Value((2, *out.shape), out.dtype, True, _shifted(layout))
    parts = call.emit(
        ops.all_reduce, (parts, call.mesh_node, (axis,)), {}, value=whole,
        collective=Collective("all_reduce", "none", (axis,), 2 * size, "loss over split classes: normaliser and target logit"),
    )  # fmt: skip
    return call.emit(ops.nll_join, (parts, target, ignore), {})


def _shifted(layout: Layout) -> Layout:
    """The layout of the result under one more leading dim."""
    return Layout(tuple((a, Shard(p.dim + 1, p.split, p.sections) if isinstance(p, Shard) else p) for a, p in layout.items))


rule(ops.nll, nll, local=local_nll, extra=by_classes)
