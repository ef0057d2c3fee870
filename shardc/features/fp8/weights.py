"""Find how the readers of a weight round it: at ZeRO 3 it is then rounded before it is gathered."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.features.fp8.experts import fp8_experts, fp8_experts_apply
from shardc.features.fp8.products import fp8_linear
from shardc.features.fp8.rounding import fp8_amax
from shardc.ir.stored import Rounded
from shardc.runtime import ops

#: Ops that round the weights that they read: argument places of (weight, its largest values).
WEIGHTS: dict[Any, tuple[tuple[int, int], ...]] = {
    fp8_linear: ((1, 2),),
    fp8_experts: ((3, 9), (4, 10)),
    fp8_experts_apply: ((2, 8), (3, 9)),
}


def how_rounded(reader: fx.Node, x: fx.Node | None) -> Rounded | None:
    """Return how an op that reads x rounds it; None if it does something else with it."""
    if reader.target is fp8_amax:
        axes: Any = ()
        rounds = reader
        if (whole := next((u for u in reader.users if u.target is ops.all_reduce_max), None)) is not None:
            rounds, axes = whole, whole.args[2]
        formats = {format for u in rounds.users if (format := _format(u, x, rounds))}
        return Rounded(formats.pop(), tuple(reader.args[1]), tuple(axes)) if len(formats) == 1 else None  # type: ignore[arg-type]
    places = WEIGHTS.get(reader.target, ())
    amax: Any = next((reader.args[scales] for at, scales in places if reader.args[at] is x), None)
    if amax is None or sum(a is x for a in reader.args) != 1 or not _format(reader, x, amax):
        return None
    amax = amax.args[0] if amax.target is ops.all_reduce_max else amax
    return how_rounded(amax, x) if amax.target is fp8_amax and amax.args[0] is x else None


def _format(reader: fx.Node, x: fx.Node | None, amax: fx.Node) -> str:
    """Return the format to which an op rounds x by these largest values; "" if it does not."""
    pairs = ((at, scales) for at, scales in WEIGHTS.get(reader.target, ()) if reader.args[at] is x)
    return "e4m3" if any(reader.args[scales] is amax for _, scales in pairs) else ""
