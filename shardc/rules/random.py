"""Rules of random ops: numbers depend on an element's global index, so any dim may be split."""

from __future__ import annotations

from torch import fx

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.shared_signatures import broadcast, names_of
from shardc.runtime import ops
from shardc.runtime.rng import Digits, Paddings


def local_part(call: LocalCall) -> tuple[Digits, Paddings]:
    """Return which part of its result a rank has."""
    layout = call.outputs[0]
    digits = tuple((s.dim, axis, s.signed, s.sections) for axis, s in layout.shards())
    return digits, tuple((s.dim, s.padding, s.blocks) for s in layout.paddings())


def local_dropout(call: LocalCall) -> fx.Node:
    digits, paddings = local_part(call)
    args = (*call.args[:4], call.mesh_node, call.call.results[0].shape, digits, *((paddings,) if paddings else ()))
    return call.emit(call.call.target, args, {}) if digits else call.same()


rule(ops.dropout, broadcast, linear="0", local=local_dropout)


def drawn(call: Call) -> Signature:
    """Split every dim of the result; a permutation is drawn whole."""
    n = len(call.results[0].shape)
    return call.fit([], [names_of(n, range(n) if call.args[0] == "permutation" else ())])


def local_random(call: LocalCall) -> fx.Node:
    digits, paddings = local_part(call)
    args = (*call.args[:6], call.mesh_node, digits, *((paddings,) if paddings else ()))
    return call.emit(call.call.target, args, {}) if digits else call.same()


rule(ops.random, drawn, local=local_random)


# linear in nothing: batch_stat(batch, running) selects one of both as a whole
rule(ops.batch_stat, broadcast)
