"""Signatures that rules of several families share, and functions that name linear operands.

rule(aten.sort.default, whole_dims((1, "dim", -1)))      the dims that an argument names stay whole
rule(aten.pdist.default, all_whole)                      nothing may be split
rule(aten.cat.default, cat, linear=every_operand)        linear in all operands together
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call


def names_of(ndim: int, prefix: str = "d") -> list[Dim]:
    return [(f"{prefix}{i}",) for i in range(ndim)]


def signature_of(
    call: Call,
    inputs: Sequence[Sequence[Dim]],
    outputs: Sequence[Sequence[Dim]],
    sizes: dict[str, int],
    whole: Iterable[str] = (),
) -> Signature:
    return Signature(tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), sizes, frozenset(), frozenset(whole))


def sizes_of(shape: Sequence[int]) -> dict[str, int]:
    return {f"d{i}": s for i, s in enumerate(shape)}


def all_whole(call: Call) -> Signature:
    """Split nothing: every dim is a separate factor that stays whole."""
    ins = tuple(tuple((f"i{j}_{i}",) for i in range(len(v.shape))) for j, v in enumerate(call.operands))
    outs = tuple(tuple((f"o{j}_{i}",) for i in range(len(v.shape))) for j, v in enumerate(call.results))
    sides = (("i", call.operands), ("o", call.results))
    sizes = {f"{k}{j}_{i}": s for k, vs in sides for j, v in enumerate(vs) for i, s in enumerate(v.shape)}
    return Signature(ins, outs, sizes, frozenset(), frozenset(sizes))


def whole_dims(*dims_of: tuple[int, str, Any]) -> Any:
    """Return the rule of one operand and like results: dims named by (position, name, default) are whole."""

    def some_dims_whole(call: Call) -> Signature:
        x = call.operands[0].shape
        whole: set[int] = set()
        for position, name, default in dims_of if x else ():
            d = call.arg(position, name, default)
            whole |= {call.dim(i) for i in ([d] if isinstance(d, int) else d or range(len(x)))}
        names = names_of(len(x))
        out_dims = [(f"o{i}",) if i in whole else n for i, n in enumerate(names)]
        sizes = sizes_of(x) | {f"o{i}": call.results[0].shape[i] for i in whole}
        return signature_of(
            call, [names], [out_dims for _ in call.results], sizes, {f"d{i}" for i in whole} | {f"o{i}" for i in whole}
        )

    return some_dims_whole


def every_operand(call: Call) -> str:
    return " ".join(str(i) for i in range(len(call.operands)))


def bias_or_not(call: Call) -> str:
    """Return the linear operands: (input, bias) or (weight, bias) together; without a bias each alone."""
    return "0 2 | 1 2" if len(call.operands) == 3 else "0 | 1"
