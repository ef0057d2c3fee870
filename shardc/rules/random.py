"""Random ops. Masks are a function of the global element's index, so any dim may be split; the rank tells which elements it has."""

from __future__ import annotations

from torch import fx

from shardc.rules.core import Call, LocalCall, rule
from shardc.rules.pointwise import broadcast
from shardc.runtime import ops


def local_dropout(call: LocalCall) -> fx.Node:
    shape = call.call.results[0].shape
    layout = call.outputs[0]
    digits = tuple((s.dim, axis, s.split, s.sections) for axis, s in layout.shards())
    paddings = tuple((s.dim, s.padding, s.blocks) for s in layout.paddings())
    args = (*call.args[:4], call.mesh_node, shape, digits, *((paddings,) if paddings else ()))
    return call.emit(call.call.target, args, {}) if digits else call.same()


rule(ops.dropout, broadcast, linear="0", local=local_dropout)


def _stat(call: Call) -> str:
    """batch_stat(batch, running): one or the other as a whole."""
    return ""


rule(ops.batch_stat, broadcast, linear=_stat)
