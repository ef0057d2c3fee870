"""Signatures that rules of several families share, and functions that name linear operands.

rule(aten.sort.default, whole_dims)                  the dims that `dim` names stay whole
rule(aten.pdist.default, all_whole)                  nothing may be split
rule(aten.cat.default, cat, linear=every_operand)    linear in all operands together
"""

from __future__ import annotations

from collections.abc import Collection

from shardc.ir.metadata import Value
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call


def names_of(ndim: int, whole: Collection[int] = ()) -> list[str]:
    """Return a factor for each dim, `d0`, `d1`, ...; marked where the dim is whole."""
    return [f"d{i}!" if i in whole else f"d{i}" for i in range(ndim)]


def whole_names(x: Value, mark: str) -> list[str]:
    """Return a separate factor for each dim of a value, all whole. mark: begins their names."""
    return [f"{mark}{i}!" for i in range(len(x.shape))]


def broadcast(call: Call) -> Signature:
    """Split every dim of the result; an operand lacks a factor where its dim is missing or of size one."""
    names = names_of(len(call.results[0].shape))
    ins, outs = ([names[len(names) - len(v.shape) :] for v in side] for side in (call.operands, call.results))
    return call.fit(ins, outs)


def all_whole(call: Call) -> Signature:
    """Split nothing: every dim is a separate factor that stays whole."""
    ins, outs = (
        [whole_names(v, f"{mark}{j}_") for j, v in enumerate(values)]
        for mark, values in (("i", call.operands), ("o", call.results))
    )
    return call.fit(ins, outs)


def whole_dims(call: Call) -> Signature:
    """Keep the dims that `dim` or `dims` names whole, in one operand and like results; split the others."""
    names = names_of(len(call.operands[0].shape), whole := call.dims())
    out = [f"o{i}!" if i in whole else n for i, n in enumerate(names)]
    return call.fit([names], [out for _ in call.results])


def every_operand(call: Call) -> str:
    return " ".join(str(i) for i in range(len(call.operands)))


def each_operand(call: Call) -> str:
    return " | ".join(str(i) for i in range(len(call.operands)))


def bias_or_not(call: Call) -> str:
    """Return the linear operands: (input, bias) or (weight, bias) together; without a bias each alone."""
    return "0 2 | 1 2" if len(call.operands) == 3 else "0 | 1"
